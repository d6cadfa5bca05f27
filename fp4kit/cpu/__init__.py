"""The fast engine of the host: compiled loops with the rules of the kernels, for what they cover; equal to the
specification.
"""
