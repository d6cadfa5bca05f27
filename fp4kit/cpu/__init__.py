"""The CPU engine: compiled loops around the rules of the CUDA kernels. Its results equal the specification in every
bit.
"""
