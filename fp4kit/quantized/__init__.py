"""Define Quantized: the codes and scales of an array, as quantize returns them or as a checkpoint stores them."""

from fp4kit.quantized.container import Quantized

__all__ = ["Quantized"]
