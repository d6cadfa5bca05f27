"""Read a model from disk: its files, its tensors, its layers and what its config declares."""
