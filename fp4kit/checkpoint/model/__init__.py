"""A model on disk: its files, tensors, layers and what its config declares."""
