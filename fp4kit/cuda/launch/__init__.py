"""Choose kernels, compute their grids, and launch them. There is one module per kernel or family of kernels.

Most modules have the same parts. `source` writes the C++ text of an instantiation, `_function` compiles it, `_launch`
prepares and caches a launch, and a public function launches the kernel on arrays.
"""
