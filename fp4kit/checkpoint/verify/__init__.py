"""Verify a checkpoint, compare two checkpoints, and repair tensor scales that disagree.

Verifying covers the integrity of the files, the requirements of inference engines, and the values.
"""
