"""Run operations by the CPU engine: compiled loops around the rules that the CUDA kernels also use.

The results equal the NumPy specification in every bit.
"""
