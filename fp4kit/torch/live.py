"""Read the layers of a model in memory, such as that of a running engine, as a side of fp4kit.parity.

Read in vLLM 0.33.0 and SGLang 0.5.23 (process_weights_after_loading of their layers), and compressed-tensors 0.20.0.
A kernel or backend is the part of an engine that chooses the layout. A part is a layer within a merged one, as q_proj.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import torch
from torch.nn.utils import parametrize

from fp4kit.arguments import explains_calls
from fp4kit.arrays.imports import import_to_host
from fp4kit.checkpoint.contract import LazyTensors
from fp4kit.checkpoint.loaders.exclusions import SGLANG_FUSED, VLLM_FUSED
from fp4kit.checkpoint.model.transforms import canonical
from fp4kit.checkpoint.selection.names import FUSIONS, join_module, split_module
from fp4kit.contract.engines import Serving, serving, servings
from fp4kit.contract.schema import Contract
from fp4kit.contract.sides import NO_CONTRACT, InputScale, RowReader, StepName, same
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, recipe_of
from fp4kit.recipes.schema import as_stored
from fp4kit.recipes.table import from_spec
from fp4kit.reference.tensor_rules import divisor_amaxes
from fp4kit.torch.inputs import InputHook
from fp4kit.torch.parameters import FakeQuantized, ServedWeight, parts_of, renaming_of
from fp4kit.types import RecipeId

OP = "of_module"
_LINEAR, _SWIZZLED = "linear", "swizzled_128x4"
# Class name of vLLM's kernel -> layout of the block scales. All other kernels repack or shuffle codes.
_KERNELS = {
    **dict.fromkeys(
        (
            "EmulationNvFp4LinearKernel",
            "EmulationMxfp4LinearKernel",
            "Rdna3W4A8MxFp4LinearKernel",
            "EmulationMxfp8LinearKernel",
        ),
        _LINEAR,
    ),
    **dict.fromkeys(
        (
            "B12xNvFp4LinearKernel",
            "CutlassNvFp4LinearKernel",
            "FbgemmNvFp4LinearKernel",
            "FlashInferB12xNvFp4LinearKernel",
            "FlashInferCudnnNvFp4LinearKernel",
            "FlashInferCuteDslNvFp4LinearKernel",
            "FlashInferCutlassNvFp4LinearKernel",
            "TorchNvFp4LinearKernel",
            "B12xMxFp4LinearKernel",
            "FlashInferMxFp4LinearKernel",
            "FlashInferCutedslMxfp8LinearKernel",
            "FlashInferCutlassMxfp8LinearKernel",
            "TorchMxFp8LinearKernel",
        ),
        _SWIZZLED,
    ),
}
# Name of vLLM's backend of experts -> (layout, whether rows of up come before those of gate, whether the tensor scale
# is multiplied by the input scale)
_BACKENDS = {
    "nvfp4_backend": {
        "EMULATION": (_LINEAR, False, False),
        "VLLM_CUTLASS": (_SWIZZLED, False, True),
        "FLASHINFER_CUTLASS": (_SWIZZLED, True, True),
        "FLASHINFER_CUTEDSL_BATCHED": (_SWIZZLED, False, True),
    },
    "mxfp4_backend": {
        "EMULATION": (_LINEAR, False, False),
        "CUTLASS_MXFP4_MXFP4": (_SWIZZLED, False, False),
    },
    "mxfp8_backend": dict.fromkeys(("EMULATION", "TRITON_MXFP8"), (_LINEAR, False, False)),
}
_FUSED = {
    **{fusion.alias: fusion.members for fusion in FUSIONS if fusion.alias and not fusion.alternatives},
    **VLLM_FUSED,
    **SGLANG_FUSED,
}
_FP4 = {16: as_stored(RECIPES["nvfp4-compressed-tensors"], False), 32: RECIPES["mxfp4-compressed-tensors"]}
_DIVIDED = RECIPES["nvfp4-compressed-tensors"]
_MXFP8 = RECIPES["mxfp8-compressed-tensors"]
_FP8 = {name: RECIPES[f"fp8-{name}"] for name in ("modelopt", "modelopt-channel", "deepgemm-block")}
_DTYPE = np.dtype(ml_dtypes.bfloat16)  # of the weights before they were quantized
_BYTES = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
_PACKED = {*_BYTES, torch.int32}
# tensors beside the codes of a layer; engines keep some of them after they decoded the weights
_BESIDE = (
    *(f"weight_{end}" for end in ("scale", "global_scale", "scale_2", "scale_inv", "scale_interleaved", "shape")),
    *("weight_scale_inv_swizzled", "weight_zero_point", "input_scale", "input_scale_inv", "input_global_scale"),
    *("input_global_scale_inv", "alpha"),
)
# (bits, strategy, group_size, dynamic) of input_activations in compressed-tensors -> scheme of transformers in servings
_INPUT_SCHEMES = {
    (4, "tensor_group", 16, "local"): "nvfp4-w4a4",
    (4, "group", 32, True): "mxfp4-w4a4",
    (8, "group", 32, True): "mxfp8-w8a8",
    (8, "group", 128, True): "fp8-block",
    (8, "token", None, True): "fp8-channel",
}
_STALE = "the engine computes with a stale alpha; process the weights again"
Tensor: TypeAlias = torch.Tensor


@explains_calls
def of_module(model: torch.nn.Module, *, recipe: RecipeId | Recipe | None = None) -> tuple[Contract, Mapping[str, Any]]:
    """Return a model in memory as a side of fp4kit.parity, so that a running engine is compared without a checkpoint.

        found = fp4kit.parity((contract, sent), fp4kit.torch.of_module(engine_model), seconds=2)

    Layers have their names in the checkpoint: merged layers such as qkv_proj are split, stacks of experts are split
    into matrices, swizzled scales are read in linear order, and padding is left out. Nothing is copied or converted
    until parity asks for rows, and only these rows are then read, on the device that holds them.

    These models are read:

    - any model with unquantized weights, among them models of a trainer, also after fp4kit.torch.fake_quantize_model;
    - transformers with compressed-tensors, compressed or decompressed: NVFP4, MXFP4, MXFP8 and FP8. Also gpt-oss with
      decoded experts.
    - vLLM after process_weights_after_loading: NVFP4, MXFP4 and MXFP8 in linear layers and experts; FP8 in linear ones.
    - SGLang after process_weights_after_loading: NVFP4 in linear layers and experts; MXFP8 and FP8 in linear layers.

    In vLLM and SGLang, the kernel must keep the codes in order. The alpha of W4A4 layers is compared with the scales of
    which it is made. If it is another number, the layer's tensor scale is the one with which the engine computes.

    Args:
        model: the module. Run this function where the module is, for example in a worker (collective_rpc in vLLM).
        recipe: the recipe by which codes are decoded. If it is None, compressed codes of transformers are decoded as
            transformers does. Codes of engines that multiply codes have no decoding of their own, so parity decodes
            them by the recipe of the other side.

    Returns:
        (contract, tensors): a Contract with the names of unquantized layers if others are quantized; the recipe of
        activations if fake_quantize_model or transformers quantizes the inputs of all quantized layers alike;
        input_scales; and served_dtype for transformers. After fake_quantize_model, it has the recipe of the weights
        and what the arguments said of the engine or the format. Its other settings are unknown. The tensors are a
        mapping from layer name to RowReader, and also hold the input scale of each layer.

    Raises:
        TypeError: model is not a module.
        ValueError: a layer is stored in a way that is not known, for example repacked for Marlin; its weights are not
            processed yet; it is sharded over several ranks; or the recipe does not fit its codes. The message names
            the layer.

    Source:
        process_weights_after_loading of the linear kernels and experts of vLLM 0.33.0 and SGLang 0.5.23.

    Examples:
        >>> import fp4kit, torch, fp4kit.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> contract, tensors = fp4kit.torch.of_module(model)
        >>> list(tensors), tensors["0"].shape
        (['0'], (8, 32))
        >>> fp4kit.parity(model, fp4kit.torch.of_module(model)).equal
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{OP}: model is {model!r:.60}; needs a Module")
    own = None if recipe is None else recipe_of(OP, recipe)
    fused = {**_FUSED, **getattr(model, "packed_modules_mapping", {})}
    renamed, seen = renaming_of(model), set[int]()
    readers: dict[str, RowReader] = {}
    scales: dict[str, Callable[[], InputScale]] = {}
    activations: dict[str, Recipe | None] = {}
    others: dict[str, Tensor] = {}
    formats: set[str] = set()
    trained: list[Contract] = []
    for name, module in model.named_modules():
        held = _Held(name, module, seen)
        if isinstance(module, parametrize.ParametrizationList) or not held.tensors:
            continue
        found, inputs = list(_matrices(held)), _inputs(held)
        for matrix in found:
            saved = renamed(f"{name}.weight", matrix.codes) if matrix.layer == name else (matrix.layer,)
            named = replace(matrix, layer=saved[0].removesuffix(".weight") if len(saved) == 1 else matrix.layer)
            for piece in _pieces(named, fused):
                readers[key := canonical(piece.layer)] = piece.reader(own)
                if piece.recipe is None and not piece.decoded:
                    continue
                if (scaled := piece.input_scale or inputs.scale) is not None:
                    scales[key] = scaled
                if inputs.known:
                    activations[key] = inputs.recipe
                formats.add(_format(held))
                trained += [one.contract for one in parts_of(module, "weight") if isinstance(one, ServedWeight)]
        others |= _others(held, {leaf for matrix in found for leaf in matrix.used}, fused)
    quantized = {name for name, one in readers.items() if one.recipe is not None or one.decoded}
    is_trained = len(trained) == len(quantized) and all(one == trained[0] for one in trained)
    base = trained[0] if trained and is_trained else NO_CONTRACT
    contract = _contract(base, [*readers], quantized, activations, scales.keys(), formats)
    tensors = {name: partial(readers.__getitem__, name) for name in readers}
    return contract, LazyTensors(tensors, LazyTensors(scales), others, None, activations)


def _contract(
    contract: Contract,
    layers: Sequence[str],
    quantized: set[str],
    activations: Mapping[str, Recipe | None],
    scaled: Collection[str],
    formats: set[str],
) -> Contract:
    """Add what a model states to a contract. Settings of inputs are known only if all quantized layers agree."""
    if quantized:
        contract = contract.stating(excluded=tuple(name for name in layers if name not in quantized))
    of_inputs = {*activations.values()}
    if activations.keys() == quantized and len(of_inputs) == 1:
        (one,) = of_inputs
        contract = contract.stating(activations=one)
        if not scaled:
            is_scaled = one is not None and one.tensor_scaling == "tensor"
            contract = contract.stating(input_scales="dynamic" if is_scaled else None)
    if scaled and scaled == quantized:
        contract = contract.stating(input_scales="static")
    dtypes = {row.served_dtype for row in servings() if _is_loaded(row) and row.container in formats}
    if len(formats) == len(dtypes) == 1:
        contract = contract.stating(served_dtype=dtypes.pop())
    return contract


class _Inputs(NamedTuple):
    """How a module quantizes its inputs: whether this is known, by which recipe, and its input scale if it has one."""

    known: bool = False
    recipe: Recipe | None = None
    scale: Callable[[], InputScale] | None = None


def _inputs(held: _Held) -> _Inputs:
    """Return how a layer of fake_quantize_model, or of compressed-tensors in transformers, quantizes its inputs."""
    hooks = list(held.module._forward_pre_hooks.values())
    hook = next((one for one in hooks if isinstance(one, InputHook)), None)
    if hook is not None:
        r, number = from_spec(hook.given or hook.recipe), hook.amax
        if number is None:
            return _Inputs(True, r)
        return _Inputs(True, r, lambda: InputScale(np.float32(number), hook.given is not None, hook.given is None))
    scheme = held.attribute("quantization_scheme")
    if scheme is None:
        is_trained = any(isinstance(one, (ServedWeight, FakeQuantized)) for one in parts_of(held.module, "weight"))
        return _Inputs(is_trained and isinstance(held.module, torch.nn.Linear) and not hooks)
    given, divisor = getattr(scheme, "input_activations", None), held.get("input_global_scale")
    stored = None if divisor is None else lambda: InputScale(_number(divisor), True)
    if given is None or held.attribute("quantization_enabled") is False:
        return _Inputs(True, None, stored)
    facts = (getattr(given, name, None) for name in ("num_bits", "strategy", "group_size", "dynamic"))
    key = tuple(getattr(one, "value", one) for one in facts)
    if key not in _INPUT_SCHEMES or getattr(given, "type", "float") != "float":
        return _Inputs(False, None, stored)
    return _Inputs(True, serving("transformers", _INPUT_SCHEMES[key]).activations, stored)


def _format(held: _Held) -> str:
    """Return the container of a layer of compressed-tensors in transformers, as servings() names it; "" for others."""
    form = getattr(held.attribute("quantization_scheme"), "format", None)
    return f"compressed-tensors {getattr(form, 'value', form)}" if form else ""


def _is_loaded(row: Serving) -> bool:
    """Return whether a row is that of a model of transformers whose modules hold codes when it is loaded."""
    return row.engine == "transformers" and not row.route


class _Held:
    """The tensors of one module that no module before it has, by their names within the module."""

    def __init__(self, name: str, module: torch.nn.Module, seen: set[int]) -> None:
        self.name, self.module = name, module
        held = {**module._parameters, **module._buffers}
        if parametrize.is_parametrized(module):
            parts: Any = module.parametrizations
            held |= {leaf: one.original for leaf, one in parts.items() if one.is_tensor}
        own = {leaf: x for leaf, x in held.items() if x is not None and id(x) not in seen}
        seen.update(map(id, own.values()))
        self.tensors: dict[str, Tensor] = {leaf: x.detach() for leaf, x in own.items()}

    def get(self, leaf: str) -> Tensor | None:
        return self.tensors.get(leaf)

    def __getitem__(self, leaf: str) -> Tensor:
        if leaf not in self.tensors:
            raise self.error(f"has no {leaf}, which its other tensors need")
        return self.tensors[leaf]

    def attribute(self, *names: str) -> Any:
        """Return an attribute of an attribute ... of the module, or None."""
        found: Any = self.module
        for name in names:
            found = getattr(found, name, None)
        return found

    def error(self, why: str) -> ValueError:
        return ValueError(f"{OP}: {self.name or 'the model'} ({type(self.module).__name__}) {why}")


class _Numbers(NamedTuple):
    """The tensor scale of a matrix as decoding multiplies by it, its amax if it is known, and what is wrong."""

    scale: np.ndarray | None = None
    amax: np.ndarray | None = None
    fault: tuple[StepName, str] | None = None


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a module as the engine stores it: its codes, or values if there is no recipe, with padding.

    first: the row of ``codes`` at which the matrix begins. scales: block scales; float scales of FP8. widths: the
    numbers of rows of the layers that the matrix joins. values: returns values that are computed. decoded: True if
    values were decoded or fake-quantized. product: returns whether a tensor scale gives the product of the tensor scale
    and the input scale, which some engines keep instead. used: the names of its tensors within the module.
    """

    layer: str
    codes: Tensor
    shape: tuple[int, int]
    used: Sequence[str]
    recipe: Recipe | None = None
    scales: Tensor | None = None
    layout: str = _LINEAR
    numbers: Callable[[], _Numbers] = _Numbers
    input_scale: Callable[[], InputScale] | None = None
    widths: Sequence[int] = ()
    first: int = 0
    values: Callable[[], Tensor] | None = None
    decoded: bool = False
    product: Callable[[np.ndarray], bool] | None = None

    def reader(self, own: Recipe | None) -> RowReader:
        r = self.recipe
        if own is not None and r is not None:
            if any(getattr(own, key) != getattr(r, key) for key in ("element", "scale", "block", "tensor_scaling")):
                raise ValueError(f"{OP}: {self.layer} has codes as {r.id}; needs a recipe for such codes, not {own.id}")
            r = own
        follow = None if own is not None or r is _DIVIDED else self.follow
        return RowReader(self.shape, r, partial(self.read, r), lambda: self.numbers().fault, self.decoded, follow)

    def follow(self, own: Quantized, other: Quantized) -> Quantized:
        """Decode by the other side's recipe, because a kernel that multiplies codes decodes in no order of its own."""
        scale = other.tensor_scale
        if self.product is not None and scale is not None and np.ndim(scale) == 0 and self.product(scale):
            own = replace(own, tensor_scale=scale)
        is_same = scale is not None and same(own.tensor_scale, scale)
        amax = other.tensor_amax if is_same else None
        return replace(own, recipe=other.recipe, tensor_amax=amax, dtype=other.dtype)

    def read(self, r: Recipe | None, rows: np.ndarray) -> Any:
        columns, at = self.shape[1], rows + self.first
        if r is None:
            return _rows(self.codes if self.values is None else self.values(), at)[:, :columns]
        codes = np.ascontiguousarray(_rows(self.codes, at)[:, : r.element.packing.length(columns)])
        scales, numbers = None, self.numbers()
        if r.scale is not None:
            scales = np.ascontiguousarray(self._scale_rows(at)[:, : columns // r.block_size])
        elif self.scales is not None:
            one = self.scales.reshape(-1) if r.tensor_scaling == "row" else self.scales
            numbers = _Numbers(_rows(one, at // r.block_rows).astype(np.float32))
        shape = len(rows), columns
        return Quantized(codes, scales, numbers.scale, numbers.amax, shape, _DTYPE, -1, r)

    def _scale_rows(self, at: np.ndarray) -> np.ndarray:
        assert self.scales is not None
        if self.layout == _LINEAR:
            return _rows(self.scales, at)
        tiles = self.scales.reshape(-(-self.codes.shape[0] // 128), -1, 32, 4, 4)
        return _rows(tiles, (at // 128, slice(None), at % 32, at // 32 % 4)).reshape(len(at), -1)


def _rows(x: Tensor, at: Any) -> np.ndarray:
    """Return x[at] as a NumPy array. On the host NumPy indexes, because PyTorch starts threads for a few rows."""
    is_host = x.device.type == "cpu"
    found: np.ndarray = import_to_host(OP, weight=x if is_host else x[at].cpu())
    return found[at] if is_host else found


def _matrices(held: _Held) -> Iterator[_Matrix]:
    if held.get("w13_weight") is not None:
        yield from _experts(held)
    elif held.get("weight_packed") is not None:
        yield _packed(held)
    elif (weight := held.get("weight")) is not None and weight.dtype == torch.uint8:
        yield _uint8(held)
    elif weight is not None and weight.dtype == torch.float8_e4m3fn:
        yield _fp8(held)
    elif weight is not None and weight.is_floating_point() and weight.ndim == 2:
        rows = held.attribute("org_vocab_size") or weight.shape[0]
        widths = _widths(held)
        shape = sum(widths) or rows, weight.shape[1]
        if shape[0] > weight.shape[0]:
            raise held.error(
                f"holds {weight.shape[0]} of {shape[0]} rows, those of one rank; needs an engine on one rank"
            )
        values, used = _computed(held, "weight"), _used(held)
        decoded = values is not None or used != ("weight",)
        yield _Matrix(held.name, weight, shape, used, widths=widths, values=values, decoded=decoded)
    for leaf in ("gate_up_proj", "down_proj"):
        if (stack := held.get(leaf)) is not None and stack.ndim == 3 and stack.is_floating_point():
            yield from _stack(held, leaf, stack)


def _computed(held: _Held, leaf: str) -> Callable[[], Tensor] | None:
    if not parametrize.is_parametrized(held.module, leaf):
        return None
    return lambda: getattr(held.module, leaf).detach()


def _stack(held: _Held, leaf: str, stack: Tensor) -> Iterator[_Matrix]:
    """Yield the matrices of a stack of unquantized experts of transformers."""
    turned, computed = held.attribute("is_transposed") is True, _computed(held, leaf)

    def matrix_of(whole: Tensor, e: int) -> Tensor:
        return whole[e].t() if turned else whole[e]

    halves = leaf == "gate_up_proj" and held.attribute("is_concatenated") is not False
    for e in range(stack.shape[0]):
        one = matrix_of(stack, e)
        rows, columns = one.shape
        values = None if computed is None else partial(lambda get, e: matrix_of(get(), e), computed, e)
        parts = (("gate_proj", 0), ("up_proj", rows // 2)) if halves else ((leaf, 0),)
        for part, first in parts:
            shape = rows // len(parts), columns
            decoded = values is not None
            yield _Matrix(f"{held.name}.{e}.{part}", one, shape, (leaf,), first=first, values=values, decoded=decoded)


def _used(held: _Held, *more: str) -> tuple[str, ...]:
    return tuple(leaf for leaf in ("weight", *_BESIDE, *more) if leaf in held.tensors)


def _widths(held: _Held) -> list[int]:
    """Return the numbers of rows of the layers that a module joins; [] if it joins none."""
    for axis in ("input", "output"):
        whole, own = held.attribute(f"{axis}_size"), held.attribute(f"{axis}_size_per_partition")
        if isinstance(whole, int) and isinstance(own, int) and own < whole:
            raise held.error(f"holds {own} of {whole} {axis}s, those of one rank; needs an engine on one rank")
    names = ("logical_widths", "output_partition_sizes", "output_sizes")
    found = next((one for one in map(held.attribute, names) if isinstance(one, (list, tuple))), ())
    return list(found) if len(found) > 1 else []


def _size(held: _Held, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
    """Return (shape, widths) of a linear layer whose codes may be padded to the given shape."""
    widths = _widths(held)
    outputs = (held.attribute(name) for name in ("output_size_per_partition", "out_features"))
    inputs = (held.attribute(name) for name in ("input_size_per_partition", "in_features"))
    n = sum(widths) or next((one for one in outputs if isinstance(one, int)), rows)
    k = next((one for one in inputs if isinstance(one, int)), columns)
    if n > rows or k > columns:
        raise held.error(f"has codes of shape ({rows}, {columns}); needs at least ({n}, {k})")
    return (n, k), widths


def _number(x: Tensor) -> np.float32:
    return np.float32(x.reshape(-1).max().item() if x.numel() > 1 else x.item())


def _made_of(
    scale: Callable[[], np.float32], alpha: Tensor | None, product: Callable[[np.float32], Any]
) -> Callable[[], _Numbers]:
    """Return a function that reads a tensor scale, and compares alpha with the product of scales that it must be."""

    def numbers() -> _Numbers:
        found = scale()
        if alpha is None:
            return _Numbers(np.asarray(found))
        with np.errstate(all="ignore"):
            is_now, needed = _number(alpha), np.float32(product(found))
            if is_now == needed:
                return _Numbers(np.asarray(found))
            text = f"alpha is {is_now}, but the scales of the layer give {needed}: {_STALE}"
            return _Numbers(np.abs(np.asarray(found * (is_now / needed))), None, ("tensor scale", text))

    return numbers


def _raw(x: Tensor) -> Tensor:
    """Return a tensor of bytes, such as FP8, as uint8; float scales as they are."""
    return x.view(torch.uint8) if x.dtype in _BYTES else x


def _packed(held: _Held) -> _Matrix:
    """Read a layer of compressed-tensors: in transformers, or in SGLang after its weights were processed."""
    codes, scales, alpha = held["weight_packed"], held["weight_scale"], held.get("alpha")
    if codes.dtype != torch.uint8 or codes.ndim != 2 or scales.dtype not in _BYTES:
        raise held.error(f"has weight_packed of {codes.dtype} and weight_scale of {scales.dtype}; needs codes of FP4")
    if held.attribute("quant_method") is not None and alpha is None:
        raise held.error("has weights that are not processed yet; needs process_weights_after_loading")
    shape, widths = _size(held, codes.shape[0], 2 * codes.shape[1])
    common: dict[str, Any] = {
        "shape": shape,
        "used": _used(held, "weight_packed"),
        "scales": _raw(scales),
        "widths": widths,
    }
    divisor, given = held.get("weight_global_scale"), held.get("input_global_scale")
    scaled = None if given is None else lambda: InputScale(_number(given), True)
    if divisor is None:
        return _Matrix(held.name, codes, recipe=_FP4[32], **common)
    if alpha is None:

        def divided() -> _Numbers:
            stored = np.asarray(_number(divisor))
            with np.errstate(all="ignore"):
                return _Numbers(np.asarray(1 / stored), divisor_amaxes(stored, _DIVIDED, _DTYPE))

        return _Matrix(held.name, codes, recipe=_DIVIDED, numbers=divided, input_scale=scaled, **common)
    _refuse_shuffled(held)
    with np.errstate(all="ignore"):
        numbers = _made_of(
            lambda: np.float32(1) / _number(divisor),
            alpha,
            lambda scale: np.float32(1) / (_number(held["input_global_scale"]) * _number(divisor)),
        )
    return _Matrix(held.name, codes, recipe=_FP4[16], layout=_SWIZZLED, numbers=numbers, input_scale=scaled, **common)


def _refuse_shuffled(held: _Held) -> None:
    """Raise ValueError if SGLang shuffles the codes for TensorRT-LLM's kernel, which no tensor shows."""
    place = sys.modules.get("sglang.srt.layers.quantization.fp4_utils")
    if place is not None and place.get_fp4_gemm_runner_backend().is_flashinfer_trtllm():
        raise held.error("is shuffled for the backend flashinfer_trtllm; needs another --fp4-gemm-backend")


def _layout(held: _Held) -> str:
    """Return in which layout the kernel of vLLM reads the block scales of a linear layer."""
    kernel = held.attribute("scheme", "kernel") or held.attribute("quant_method", "kernel")
    name = type(kernel).__name__ if kernel is not None else "no kernel"
    if name not in _KERNELS:
        raise held.error(f"stores weights for {name}; needs one of {', '.join(_KERNELS)}")
    return _KERNELS[name]


def _uint8(held: _Held) -> _Matrix:
    """Read a layer of FP4 codes of vLLM, or of SGLang with Model-Optimizer's names."""
    codes, interleaved = held["weight"], held.get("weight_scale_interleaved")
    if not codes.numel():
        raise held.error("has emptied its weight, because its kernel holds another copy; needs another kernel")
    shape, widths = _size(held, codes.shape[0], 2 * codes.shape[1])
    common: dict[str, Any] = {"shape": shape, "used": _used(held), "widths": widths}
    if interleaved is not None:  # SGLang
        _refuse_shuffled(held)
        given, scale = held["input_scale"], held["weight_scale_2"]
        numbers = _made_of(lambda: _number(scale), held["alpha"], lambda one: _number(given) * one)
        scaled = lambda: InputScale(_number(given), False)  # noqa: E731
        return _Matrix(
            *(held.name, codes),
            recipe=_FP4[16],
            scales=_raw(interleaved),
            layout=_SWIZZLED,
            numbers=numbers,
            input_scale=scaled,
            **common,
        )
    layout, whole = _layout(held), held.get("weight_global_scale")
    common |= {"scales": _raw(held["weight_scale"]), "layout": layout}
    if whole is None:
        return _Matrix(held.name, codes, recipe=_FP4[32], **common)
    if whole.numel() > 1:
        raise held.error("has one weight_global_scale per part, so its weights are not processed yet")
    numbers = _made_of(lambda: _number(whole), held.get("alpha"), lambda one: _number(held["input_global_scale"]) * one)
    input_scale, divides = None, held.attribute("scheme") is not None  # compressed-tensors stores divisors
    if held.get("input_global_scale") is not None:
        stored = held["input_global_scale_inv" if divides else "input_global_scale"]
        input_scale = lambda: InputScale(_number(stored), divides)  # noqa: E731
    return _Matrix(
        *(held.name, codes),
        recipe=_FP4[16],
        numbers=numbers,
        input_scale=input_scale,
        **common,
    )


def _upright(weight: Tensor) -> Tensor:
    """Return a matrix whose columns are contiguous as its transpose."""
    return weight.t() if weight.stride(0) == 1 and weight.stride(1) > 1 else weight


def _fp8(held: _Held) -> _Matrix:
    """Read a layer of FP8 codes: MXFP8, or float scales per tensor, row or block."""
    weight = held["weight"]
    if weight.ndim != 2 or not weight.numel():
        raise held.error(f"has a weight of shape {tuple(weight.shape)}, because its kernel holds another copy")
    weight = _upright(weight)
    shape, widths = _size(held, *weight.shape)
    common: dict[str, Any] = {"shape": shape, "used": _used(held), "widths": widths}
    swizzled = held.get("weight_scale_inv_swizzled")
    scales = held.get("weight_scale") if swizzled is None else swizzled
    scales = held["weight_scale_inv"] if scales is None else scales
    if scales.dtype in _BYTES:
        layout = _LINEAR if swizzled is None else _SWIZZLED
        layout = _layout(held) if held.attribute("quant_method") and held.get("weight_scale") is not None else layout
        return _Matrix(held.name, _raw(weight), recipe=_MXFP8, scales=_raw(scales), layout=layout, **common)
    given = held.get("input_scale")
    fault: tuple[StepName, str] | None = None
    scaled = None if given is None else lambda: InputScale(_number(given), False)
    if scales.dtype != torch.float32:
        fault = "tensor scale", f"the scales are {scales.dtype}, to which the engine rounded them when it loaded them"
    one = partial(_Matrix, held.name, _raw(weight), input_scale=scaled, **common)
    if scales.numel() == 1:
        return one(recipe=_FP8["modelopt"], numbers=lambda: _Numbers(np.asarray(_number(scales)), None, fault))
    per_row = scales.shape[0] >= shape[0] and scales.numel() == scales.shape[0]
    if per_row or tuple(scales.shape) == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)):
        r = _FP8["modelopt-channel" if per_row else "deepgemm-block"]
        return one(recipe=r, scales=scales, numbers=lambda: _Numbers(fault=fault))
    raise held.error(f"has FP8 scales of shape {tuple(scales.shape)}; needs one per tensor, row or 128x128 block")


class _Arrangement(NamedTuple):
    """How experts are stored: layout of scales, whether up comes before gate, and what the tensor scales are."""

    layout: str = _LINEAR
    up_first: bool = False
    multiplied: bool = False


def _arrangement(held: _Held) -> _Arrangement:
    method, scheme = held.attribute("quant_method"), held.attribute("scheme")
    if held.get("g1_alphas") is not None:  # SGLang
        words = ("enable_flashinfer_trtllm_moe", "use_flashinfer_trtllm", "_is_cutedsl_v2_standard")
        wrong = next((word for word in words for one in (method, scheme) if getattr(one, word, False)), None)
        if wrong is not None:
            raise held.error(f"is shuffled or interleaved for its kernel ({wrong}); needs another --moe-runner-backend")
        return _Arrangement(_SWIZZLED, getattr(method, "load_up_proj_weight_first", False) is True)
    for key, backends in _BACKENDS.items():
        backend = getattr(method, key, None)
        if backend is not None:
            name = getattr(backend, "name", str(backend))
            if name not in backends:
                raise held.error(f"stores experts for {key} {name}; needs one of {', '.join(backends)}")
            return _Arrangement(*backends[name])
    if held["w13_weight"].is_floating_point() and held["w13_weight"].dtype not in _BYTES:
        return _Arrangement()
    raise held.error("does not say for which backend it stores its experts")


def _experts(held: _Held) -> Iterator[_Matrix]:
    """Yield the matrices of the experts of vLLM and SGLang, w13_weight and w2_weight."""
    arrangement = _arrangement(held)
    for local, whole in (("local_num_experts", "global_num_experts"), ("num_local_experts", "num_experts")):
        own, every = held.attribute(local), held.attribute(whole)
        if isinstance(own, int) and isinstance(every, int) and own < every:
            raise held.error(f"holds {own} of {every} experts, those of one rank; needs an engine on one rank")
    for name in ("moe_tp_size", "tp_size"):
        if isinstance(ranks := held.attribute(name), int) and ranks > 1:
            raise held.error(f"is sharded over {ranks} ranks; needs an engine on one rank")
    parent = held.name.removesuffix(".routed_experts")
    used = tuple(leaf for leaf in held.tensors if leaf.startswith(("w13_", "w2_", "g1_", "g2_")))
    gate_up = ("up_proj", "gate_proj") if arrangement.up_first else ("gate_proj", "up_proj")
    hidden, inner = held["w2_weight"].shape[1], held.attribute("intermediate_size_per_partition")
    if isinstance(inner, int) and held["w13_weight"].shape[1] != 2 * inner:
        raise held.error(
            f"has w13_weight of {held['w13_weight'].shape[1]} rows; needs those of gate and up, {2 * inner}"
        )
    for stem, parts in (("w13", gate_up), ("w2", ("down_proj",))):
        stack = held[f"{stem}_weight"]
        ends = ("blockscale_swizzled", "weight_scale", "weight_scale_inv")
        scales = next((x for end in ends if (x := held.get(f"{stem}_{end}")) is not None), None)
        for e in range(stack.shape[0]):
            rows = stack.shape[1] // len(parts) if stem == "w13" else hidden
            for number, part in enumerate(parts):
                matrix = _Matrix(
                    f"{parent}.{e}.{part}", _raw(stack[e]), (rows, stack.shape[2]), used, first=number * rows
                )
                yield _expert(held, stem, part, e, matrix, scales, arrangement)


def _expert(
    held: _Held, stem: str, part: str, e: int, matrix: _Matrix, scales: Tensor | None, how: _Arrangement
) -> _Matrix:
    stack = held[f"{stem}_weight"]
    if stack.is_floating_point() and stack.dtype not in _BYTES:
        return matrix
    if scales is None or stack.dtype not in (torch.uint8, torch.float8_e4m3fn) or scales.dtype not in _BYTES:
        raise held.error(f"has {stem}_weight of {stack.dtype} and scales of {getattr(scales, 'dtype', None)}")
    stored = replace(matrix, scales=_raw(scales[e]), layout=how.layout)
    if stack.dtype == torch.float8_e4m3fn:
        return replace(stored, recipe=_MXFP8)
    shape = stored.shape[0], 2 * stored.shape[1]
    second = held.get(f"{stem}_weight_scale_2")
    if second is None:
        return replace(stored, shape=shape, recipe=_FP4[32])

    def of_expert(x: Tensor) -> Tensor:
        one = x.reshape(-1) if x.numel() == 1 else x[e]
        return one if one.ndim == 0 or one.numel() == 1 else one[("gate_proj", "up_proj").index(part)]

    product: Callable[[np.ndarray], bool] | None = None
    numbers: Callable[[], _Numbers]
    if how.multiplied:  # vLLM keeps alpha = tensor scale * input scale in place of the tensor scale
        divisor, given = held.get(f"{stem}_weight_global_scale"), held.attribute(f"{stem}_input_scale")
        if divisor is not None:
            numbers = _made_of(
                lambda: np.float32(1) / _number(divisor[e].reshape(-1)[:1]),
                of_expert(second),
                lambda one: one * _number(of_expert(given)),
            )
        else:
            alpha, factor = of_expert(second), of_expert(given)
            numbers = lambda: _Numbers(np.asarray(_number(alpha) / _number(factor)))  # noqa: E731
            product = lambda scale: bool(scale * _number(factor) == _number(alpha))  # noqa: E731
    else:
        given = held.get("g2_alphas" if stem == "w2" else "g1_alphas_up" if part == "up_proj" else "g1_alphas")
        given = held.get("g1_alphas") if given is None and stem == "w13" else given
        inverse = held.get(f"{stem}_input_scale_quant")
        numbers = _made_of(
            lambda: _number(of_expert(second)),
            None if given is None else of_expert(given),
            lambda one: one * (np.float32(1) / _number(of_expert(inverse))),  # type: ignore[arg-type]
        )
    return replace(stored, shape=shape, recipe=_FP4[16], numbers=numbers, product=product)


def _pieces(matrix: _Matrix, fused: Mapping[str, Sequence[str]]) -> Iterator[_Matrix]:
    """Yield the layers that a matrix joins, or the matrix itself."""
    if not matrix.widths:
        yield matrix
        return
    parent, leaf = split_module(matrix.layer)
    parts = fused.get(leaf, ())
    if len(parts) != len(matrix.widths):
        raise ValueError(f"{OP}: {matrix.layer} joins {len(matrix.widths)} layers; their names are not known")
    first = 0
    for part, width in zip(parts, matrix.widths, strict=True):
        yield replace(matrix, layer=join_module(parent, part), shape=(width, matrix.shape[1]), first=first)
        first += width


def _others(held: _Held, used: set[str], fused: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Return the tensors of a module that are no layers, by name. Raise ValueError if one looks like codes."""
    found: dict[str, Tensor] = {}
    for leaf, tensor in held.tensors.items():
        if leaf in used:
            continue
        if tensor.dtype in _PACKED and (tensor.ndim > 1 or leaf.startswith("weight")):
            raise held.error(f"has {leaf}, {tensor.dtype} {tuple(tensor.shape)}, which is not known")
        if tensor.is_floating_point() and leaf in held.module._parameters:
            parent, last = split_module(held.name)
            parts, widths = fused.get(last, ()), _widths(held)
            name = canonical(held.name) if leaf == "weight" else f"{canonical(held.name)}.{leaf}"
            if leaf == "bias" and len(parts) == len(widths) > 1:
                pieces = zip(parts, tensor[: sum(widths)].split(widths), strict=True)
                found |= {f"{canonical(join_module(parent, part))}.bias": piece for part, piece in pieces}
            else:
                found[name.removeprefix(".")] = tensor
    return found
