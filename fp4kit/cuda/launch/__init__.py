"""Choose kernels, compute their grids, and launch them. One module per kernel or family of kernels."""
