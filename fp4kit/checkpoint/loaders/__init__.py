"""Describe how inference engines load checkpoints: which containers each engine reads, and where it fails.

The package consists of data and pure functions; nothing in it reads a file. The engines of VERSIONS in
fp4kit/contract/engine_table.py were run on a CPU with their own model classes and weight loaders, or their source was
read.
"""
