"""Run conversions and checks: stage output files, run jobs on executors, and prefetch input files."""
