"""Compile kernels: NVRTC, the loader and its cache, template instantiation."""
