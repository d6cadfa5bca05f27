"""Convert a checkpoint: run the jobs of a plan, with a journal, and write the files."""
