"""Read and write files: safetensors, GGUF, strict JSON, and saved Quantized arrays.

A new file appears under its name only when it is complete (files.py).
"""
