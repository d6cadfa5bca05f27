"""Check a checkpoint (its integrity, what loaders make of it, its values), compare two checkpoints, and repair tensor
scales that disagree.
"""
