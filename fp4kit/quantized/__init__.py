"""Quantized: a quantized array, as quantize returns it or as it is made from the tensors of a checkpoint."""

from fp4kit.quantized.container import Quantized

__all__ = ["Quantized"]
