"""fp4kit for PyTorch: differentiable, compilable operations on tensors, imported only by name.

    import fp4kit.torch

fake_quantize and fake_quantize_grouped have gradients; quantize and dequantize give and take a Quantized of tensors;
fake_quantize_model and its parametrization FakeQuantized train a model with fake-quantized weights. All are custom operators,
so torch.compile(fullgraph=True), torch.export, torch.func, checkpointing, autocast and CUDA graphs work, on CPU and CUDA.
Inside of compiled code, quantize and dequantize, and recipes that are no ids, need PyTorch 2.13: earlier versions do not trace
objects made without their constructor.
"""

from typing import Any

from torch.utils import _pytree

from fp4kit.pieces import flatten, unflatten
from fp4kit.quantized import Quantized
from fp4kit.torch.functions import dequantize, fake_quantize, fake_quantize_grouped, quantize
from fp4kit.torch.modules import FakeQuantized, fake_quantize_model

__all__ = ["FakeQuantized", "dequantize", "fake_quantize", "fake_quantize_grouped", "fake_quantize_model", "quantize"]


def _with_keys(q: Quantized) -> tuple[list[tuple[Any, Any]], Any]:
    arrays, facts = flatten(q)
    return [(_pytree.GetAttrKey(name), array) for name, array in zip(facts[0], arrays, strict=True)], facts


def _flatten(q: Quantized) -> tuple[list[Any], Any]:
    arrays, facts = flatten(q)
    return list(arrays), facts


_pytree.register_pytree_node(
    Quantized, _flatten, unflatten, serialized_type_name="fp4kit.Quantized", flatten_with_keys_fn=_with_keys
)
