"""Quantized: what quantize returns, and what is made from the tensors of a checkpoint."""

from fp4kit.quantized.container import Quantized

__all__ = ["Quantized"]
