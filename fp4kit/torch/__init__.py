"""fp4kit for PyTorch: differentiable, compilable operations on tensors, imported only by name.

    import fp4kit.torch

fake_quantize and fake_quantize_grouped have gradients; quantize and dequantize give and take a Quantized of tensors;
fake_quantize_model and its parametrization FakeQuantized train a model with fake-quantized weights. All are custom
operators, so torch.compile(fullgraph=True), torch.export, torch.func, checkpointing, autocast and CUDA graphs work, on
CPU and CUDA. Inside of compiled code, quantize and dequantize, and recipes that are no ids, need PyTorch 2.13: earlier
versions do not trace objects made without their constructor.
"""

from fp4kit.torch import trees
from fp4kit.torch.functions import dequantize, fake_quantize, fake_quantize_grouped, quantize
from fp4kit.torch.modules import FakeQuantized, fake_quantize_model

__all__ = ["FakeQuantized", "dequantize", "fake_quantize", "fake_quantize_grouped", "fake_quantize_model", "quantize"]

trees.register()
