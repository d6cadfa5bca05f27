"""Find the recipe that made a checkpoint from a given source, and the faults that changed its bytes afterwards."""
