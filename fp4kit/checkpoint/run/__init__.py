"""Execution shared by all commands: staging of files, executors, prefetching, paths."""
