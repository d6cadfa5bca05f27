"""The driver that both host engines share: the specification in NumPy (fp4kit.reference) and the compiled engine.

An engine's functions quantize one matrix at a time. The driver splits arrays into matrices, allocates outputs, selects
the tensor scale of each expert, and arranges block scales in their layout.
"""
