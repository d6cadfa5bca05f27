"""Find the recipe that made a checkpoint, and what happened to its bytes afterwards."""
