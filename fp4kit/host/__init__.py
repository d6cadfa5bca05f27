"""The driver of both host engines, which are the specification in NumPy and the compiled engine.

The engines quantize one matrix at a time. The driver splits arrays into matrices, allocates outputs, finds each
expert's scale and lays out the block scales.
"""
