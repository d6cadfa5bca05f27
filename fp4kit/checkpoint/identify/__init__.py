"""Find the recipe that made a checkpoint from a given source, and what happened to its bytes afterwards."""
