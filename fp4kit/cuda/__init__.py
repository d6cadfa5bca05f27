"""The CUDA engine: kernels, the code that compiles and launches them, and the operations on CuPy arrays.

No module of it needs a GPU or CuPy when it is imported.
"""
