"""The CUDA engine: kernels, the code that compiles and launches them, and the operations on CuPy arrays.

All modules of this package can be imported without a GPU or CuPy.
"""
