"""Files: safetensors read and written by byte range, strict JSON, files that appear whole; save and load of a
Quantized.
"""
