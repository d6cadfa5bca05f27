"""CUDA sources, their loader and launchers. Nothing here is imported before an array on a GPU arrives."""
