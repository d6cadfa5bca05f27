"""Parametrize weights so that a layer reads the values that a converted checkpoint will serve.
A tensor scale covers all layers that loaders fuse. So the amax of a weight is the largest one of its group: the weights
of these layers, before they are fake-quantized. Weights may be sharded over ranks (DTensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fp4kit.arrays.imports import is_distributed
from fp4kit.recipes.serialization import from_spec
from fp4kit.torch.adapter_layers import FakeQuantizing
from fp4kit.torch.functions import fake_quantize
from fp4kit.training.settings import naming


class Form(NamedTuple):
    """The recipe, axis and gradient by which a parameter is fake-quantized.

    Attributes:
        recipe: the recipe as the string that recipes.to_string.to_spec returns. Its values are decoded as the loaders
            of the checkpoint decode them.
        kind: "matrix", "stack" or "convolution".
        axis: the axis along which blocks run, from the end: -1, or -2 for a stack of experts stored as (E, K, N). The
            filters of a convolution are flattened first.
        shares: True if the recipe has one tensor scale per matrix, so that an amax is needed.
        pass_through: True if the gradient passes unchanged; False if it is set to 0 where |w| > amax.
        dtype: the dtype of the parameter in the model; None if it is that of every call.
        merged_adapters: True to fake-quantize the weight with its active LoRA adapter, as the merged weight is served.
        served_dtype: the dtype to which the values are rounded, as loaders do; None for that of the parameter.
    """

    recipe: str
    kind: str = "matrix"
    axis: int = -1
    shares: bool = True
    pass_through: bool = True
    dtype: torch.dtype | None = None
    merged_adapters: bool = False
    served_dtype: torch.dtype | None = None


class ServedWeight(FakeQuantizing):
    """A parametrization that gives a layer, in place of its weight, the values that a converted checkpoint will serve.

    The optimizer still updates the original weight.

    Args:
        name: the name of the parameter in the model.
        form: the Form in which the parameter is fake-quantized.
        group: (module, name within the module) of every parameter that shares the amax, this parameter included.
    """

    def __init__(self, name: str, form: Form, group: Sequence[tuple[torch.nn.Module, str]]) -> None:
        super().__init__()
        self.name, self.form, self.merged_adapters = name, form, form.merged_adapters
        self._group = list(group)  # a list of tuples, so that PyTorch registers none of these modules as a child

    def extra_repr(self) -> str:
        """Return the text that print(model) shows: name, recipe, and the number of weights that share one amax."""
        return f"{self.name!r}, {from_spec(self.form.recipe).id}, one amax for {len(self._group)}"

    def forward(self, w: Tensor) -> Tensor:
        """Return the weight that the layer computes with: the values that a loader of the checkpoint decodes."""
        if self.is_paused:
            return w
        w = self.with_adapter(w)
        amax = self._amax(w) if self.form.shares else None
        if not is_distributed(w):
            return self._values(w, amax)
        sharded: Any = w
        values = self._values(sharded.to_local(), amax)
        return type(sharded).from_local(
            values, sharded.device_mesh, sharded.placements, run_check=False, shape=w.shape, stride=w.stride()
        )

    def _values(self, w: Tensor, amax: Tensor | None) -> Tensor:
        """Return the served values of the plain tensor w."""
        if not w.numel():
            return w
        matrix = w.flatten(1) if self.form.kind == "convolution" else w
        given = None if amax is None else torch.where(amax == 0, 1, amax)  # zeros have no usable scale; they stay zeros
        with naming(self.name):
            values = fake_quantize(
                matrix, self.form.recipe, axis=self.form.axis, tensor_amax=given, pass_through=self.form.pass_through
            )
        if self.form.served_dtype not in (None, values.dtype):
            values = _Rounded.apply(values, self.form.served_dtype)
        return values.view(w.shape)

    def _amax(self, w: Tensor) -> Tensor:
        """Return the largest |w| over w and the other weights of its group: float32 (), or (E,) for a stack of
        experts.
        """
        stack, is_cast = self.form.kind == "stack", self.form.dtype not in (None, w.dtype)
        found = largest(w, stack)
        for module, leaf in self._group:
            if not self._is_own(module, leaf):
                with torch.no_grad():
                    other = largest(unquantized(module, leaf), stack)
                found = torch.maximum(found, other.to(w.dtype).float() if is_cast else other)
        return found

    def _is_own(self, module: torch.nn.Module, leaf: str) -> bool:
        """Return whether this object is one of the parametrizations of the parameter `leaf` of `module`."""
        return any(part is self for part in parts_of(module, leaf))


class _Rounded(torch.autograd.Function):
    """Round a tensor to another dtype, and keep its own dtype. The gradient passes straight through."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rounded values of x in the dtype of x."""
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: the gradient is that of the identity."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None


def parts_of(module: torch.nn.Module, leaf: str) -> Sequence[torch.nn.Module]:
    """Return the parametrizations of the parameter `leaf` of a module, in order; () if it has none."""
    if not parametrize.is_parametrized(module, leaf):
        return ()
    parametrizations: Any = module.parametrizations
    return list(parametrizations[leaf])


def unquantized(module: torch.nn.Module, leaf: str) -> Tensor:
    """Return the parameter `leaf` of a module before it is fake-quantized by a ServedWeight."""
    parts = parts_of(module, leaf)
    if not parts:
        return module._parameters[leaf]  # type: ignore[return-value]
    originals: Any = module.parametrizations
    held = originals[leaf]
    values = (held.original,) if held.is_tensor else tuple(getattr(held, f"original{i}") for i in range(held.ntensors))
    for part in parts:
        if isinstance(part, ServedWeight):
            return part.with_adapter(values[0])
        values = (part(*values),)
    return values[0]


def largest(w: Tensor, stack: bool) -> Tensor:
    """Return the largest |w| as float32 ()."""
    # If w is a DTensor, all its ranks must call this function together.
    w = w.detach()
    if not is_distributed(w):
        return _local_amax(w, stack)
    sharded: Any = w
    found = _local_amax(sharded.to_local(), stack)
    # Reduce the bits without sign: they are ordered as the amaxes, and those of NaN are the largest. For floats, it
    # depends on the backend whether NaN propagates.
    bits = found.view(torch.int32) & 0x7FFFFFFF
    for dim, placement in enumerate(sharded.placements):
        if not placement.is_replicate() and not (stack and placement.is_shard(0)):
            torch.distributed.all_reduce(
                bits, op=torch.distributed.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim)
            )
    return bits.view(torch.float32)


def _local_amax(w: Tensor, stack: bool) -> Tensor:
    """Return the largest |w| of a plain tensor as float32 ()."""
    rows = w.flatten(1) if stack else w.reshape(1, -1)
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0] if stack else (), dtype=torch.float32)
    low, high = rows.aminmax(dim=1)
    found = torch.maximum(-low, high).float()
    return found if stack else found[0]
