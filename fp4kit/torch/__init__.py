"""fp4kit for PyTorch: differentiable, compilable operations on tensors, imported only by name.

    import fp4kit.torch

fake_quantize and fake_quantize_grouped have gradients; quantize and dequantize give and take a Quantized of tensors;
fake_quantize_model and its parametrization FakeQuantized train a model with fake-quantized weights. All are custom operators,
so torch.compile(fullgraph=True), torch.export, torch.func, checkpointing, autocast and CUDA graphs work, on CPU and CUDA.
"""

from torch.utils import _pytree

from fp4kit.quantized import Quantized, flatten, unflatten
from fp4kit.torch.functions import dequantize, fake_quantize, fake_quantize_grouped, quantize
from fp4kit.torch.modules import FakeQuantized, fake_quantize_model

__all__ = ["FakeQuantized", "dequantize", "fake_quantize", "fake_quantize_grouped", "fake_quantize_model", "quantize"]

_pytree.register_pytree_node(Quantized, flatten, unflatten, serialized_type_name="fp4kit.Quantized")
