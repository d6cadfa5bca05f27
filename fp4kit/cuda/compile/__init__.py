"""Compile kernels with NVRTC: write the source of one instantiation, compile it, cache and load the result."""
