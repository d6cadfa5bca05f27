"""Convert a checkpoint: run the jobs of a plan, write the files, and keep a journal to continue an interrupted run."""
