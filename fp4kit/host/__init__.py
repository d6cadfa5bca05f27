"""Run calls on arrays in host memory, for both host engines: the specification in NumPy and the compiled engine.

An engine's functions quantize one matrix at a time. The functions of this package split arrays into matrices, allocate
outputs, select the tensor scale of each expert, and arrange block scales in their layout.
"""
