"""The CUDA engine: kernels, their compiler, their launchers. It is imported when the first array on a GPU arrives."""
