"""Make contracts (descriptions of how a model is quantized) of conversions and checkpoints.

Also open checkpoints, so that fp4kit.parity can compare them.
"""
