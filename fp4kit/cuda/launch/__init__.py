"""Choose CUDA kernels, compute their grids, and launch them. There is one module per kernel or family of kernels.

Most modules have four functions in common. `source` writes the C++ text that instantiates a kernel template,
`_function` compiles this text, `_launch` prepares and caches a launch, and a public function launches the kernel on
arrays.
"""
