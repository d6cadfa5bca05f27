"""The logical weights of a checkpoint: linear layers [N, K] and stacks of experts [E, N, K], however they are stored.

K is the axis that the layer contracts, along which blocks run. A stack that a model keeps as [E, K, N] is transposed:
it is read as [E, N, K].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.container import (
    CODES,
    CONTAINERS,
    INPUT_SCALE,
    SCALES,
    TENSOR_SCALE,
    VALUES,
    Container,
)
from fp4kit.checkpoint.containers.ggml_names import STACKS as GGUF_STACKS
from fp4kit.checkpoint.selection.name_rules import STACKS
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorEntry

_QUANTIZED_NAMES = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_packed",
    ".input_scale",
    ".qweight",
    "_blocks",
    "_scales",
    "_weight_scale",
    "_weight_scale_2",
    ".scales",
)
_QUANTIZED_WEIGHTS = ("U8", "I8", "U32", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")


Q8_0 = "Q8_0"  # numbers of 8 bits under a float16 scale, which GGUF files of a model that is not quantized further have
_TURNED = (
    "gpt_oss",
    "llama4",
    "llama4_text",
    "aria",
    "aria_text",
    "openai_privacy_filter",
)  # is_transposed in transformers 5.23


class Located(NamedTuple):
    """A tensor in its file, whose header is not carried along."""

    file: SafetensorsFile
    entry: TensorEntry


class Rows(NamedTuple):
    """Rows [span) of matrix `expert` of a weight."""

    weight: Weight
    expert: int
    span: tuple[int, int]


class HeadOrder(NamedTuple):
    """Rows by heads of so many: halves are woven (0, h/2, 1, h/2 + 1, ...); or, woven in the file, put one after the
    other.
    """

    head: int
    weaves: bool

    def sources(self, rows: int) -> npt.NDArray[np.intp]:
        """Where in the file each of these rows is, of whole heads."""
        pairs = (2, self.head // 2) if self.weaves else (self.head // 2, 2)
        return np.arange(rows).reshape(-1, *pairs).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint. name: of its module; tensor: of its values or codes. container: None for plain numbers.

    members: what its rows are made of, in their order, where it is none of a file itself; parts then are those of the
    first. shape: (N, K) or (E, N, K). parts: VALUES of numbers; CODES, SCALES, ... of a container. transposed: stored
    as (E, K, N). order: in which rows are read, of every matrix.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    container: Container | None
    parts: Mapping[str, Located]
    transposed: bool = False
    members: tuple[Rows, ...] = ()
    order: HeadOrder | None = None

    @property
    def located(self) -> Located:
        """Where values or codes are."""
        return self.parts[VALUES if self.container is None else CODES]

    @property
    def dtype(self) -> str:
        """safetensors dtype of plain numbers, or the name of the container."""
        return self.located.entry.dtype if self.container is None else self.container.name

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        if self.members:
            return sum(w.nbytes * (end - begin) // (w.experts * w.shape[-2]) for w, _, (begin, end) in self.members)
        return sum(part.entry.nbytes for part in self.parts.values())

    @property
    def experts(self) -> int:
        """Matrices of a stack; 1 of a single layer."""
        return self.shape[0] if len(self.shape) == 3 else 1


def located(file: SafetensorsFile, entry: TensorEntry) -> Located:
    """A tensor with a file that carries no header, which would go along with every job."""
    return Located(replace(file, entries=(), metadata={}), entry)


def part_names(weights: Iterable[Weight]) -> set[str]:
    """Names of all tensors that weights are stored in."""
    return {part.entry.name for weight in weights for part in weight.parts.values()}


def looks_quantized(entry: TensorEntry) -> bool:
    """Whether a tensor is a scale or the codes of a quantized layer."""
    if entry.dtype == "F8_E8M0" or (entry.name.endswith(_QUANTIZED_NAMES) and not entry.dtype.startswith("I64")):
        return True
    return entry.dtype in _QUANTIZED_WEIGHTS and entry.name.endswith(".weight") and len(entry.shape) >= 2


def weights_of(
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]], config: Mapping[str, Any], damaged: bool = False
) -> dict[str, Weight]:
    """Name of values or codes -> weight, of all that are quantized, and of plain matrices and stacks; in the order of
    tensors.

    damaged: layers count, too, whose block scales have another shape than they should, or whose tensor scale is
    missing.
    """
    files = {file.path: replace(file, entries=(), metadata={}) for file, _ in tensors.values()}
    places = {name: Located(files[file.path], entry) for name, (file, entry) in tensors.items()}
    found: dict[str, Weight] = {}
    taken: set[str] = set()
    for container in _by_config(config):
        for name in places:
            module = container.module_of(name)
            weight = None if module is None or name in taken else _stored(module, container, places, damaged)
            if weight is not None:
                found[weight.tensor] = weight
                taken |= {part.entry.name for part in weight.parts.values()}
    plain = (_plain(name, place, places, config) for name, place in places.items() if name not in taken)
    found |= {weight.tensor: weight for weight in plain if weight is not None}
    return {name: found[name] for name in places if name in found}


def _by_config(config: Mapping[str, Any]) -> Iterable[Container]:
    """Containers, the declared method first: MXFP8 of Model-Optimizer and of compressed-tensors have the same
    tensors.
    """
    declared = config.get("quantization_config")
    method = str(declared.get("quant_method", "")) if isinstance(declared, Mapping) else ""
    return sorted(CONTAINERS, key=lambda known: not known.format or known.format != method)


def _stored(module: str, container: Container, places: Mapping[str, Located], damaged: bool) -> Weight | None:
    """The quantized layer of this name, if its tensors have the dtypes and shapes of a container."""
    parts = {part: places[module + suffix] for part, suffix in container.suffixes.items() if module + suffix in places}
    damaged = damaged and not container.is_exact
    scaled = damaged or container.has_tensor_scale == (TENSOR_SCALE in parts)
    if not container.needed <= set(parts) or not scaled:
        return None
    shape = container.shape_of(parts[CODES].entry.shape)
    if shape is None:
        return None
    specs, turned = container.specs(shape, INPUT_SCALE in parts), container.stack == "columns"
    for part, place in parts.items():
        entry, (dtype, wanted) = place.entry, specs[part]
        scalar = part in (TENSOR_SCALE, INPUT_SCALE) and prod(entry.shape) == 1 and (len(shape) == 2 or turned)
        if entry.dtype != dtype or (entry.shape != wanted and not scalar and not (damaged and part == SCALES)):
            return None
    return Weight(module, parts[CODES].entry.name, shape, container, parts, turned)


def _plain(name: str, place: Located, places: Mapping[str, Located], config: Mapping[str, Any]) -> Weight | None:
    """A weight of plain numbers: a matrix P.weight, or a stack of experts."""
    entry, module = place.entry, name.removesuffix(".weight")
    if entry.dtype not in (*FLOAT_DTYPES, Q8_0) or 0 in entry.shape:
        return None
    if len(entry.shape) == 2 and module not in ("", name):  # no container has parts of a module without a name
        return Weight(module, name, entry.shape, None, {VALUES: place})
    parent, _, leaf = module.rpartition(".")
    if len(entry.shape) == 3 and leaf in GGUF_STACKS:
        return Weight(module, name, entry.shape, None, {VALUES: place})
    if len(entry.shape) != 3 or leaf not in STACKS or "experts" not in parent.split("."):
        return None
    transposed = _is_transposed(parent, places, config)
    experts, a, b = entry.shape
    return Weight(module, name, (experts, b, a) if transposed else (experts, a, b), None, {VALUES: place}, transposed)


def _is_transposed(parent: str, places: Mapping[str, Located], config: Mapping[str, Any]) -> bool:
    """Whether a stack of experts is [E, K, N]: as gate_up and down fit each other, else by the type of the model."""
    by_type = has_turned_stacks(config)
    names = (f"{parent}.gate_up_proj", f"{parent}.down_proj")
    gate_up, down = (places.get(name, places.get(f"{name}.weight")) for name in names)
    if gate_up is None or down is None or len(gate_up.entry.shape) != 3 or len(down.entry.shape) != 3:
        return by_type
    (_, a, b), (_, c, d) = gate_up.entry.shape, down.entry.shape
    fits = (a == 2 * d and b == c), (b == 2 * c and a == d)  # [2I, H] with [H, I]; [H, 2I] with [I, H]
    return fits[1] if fits[0] != fits[1] else by_type


def stack_shape(shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
    """(E, N, K) of a stack of experts that is seen alone, as models of its type have it."""
    experts, a, b = shape
    return (experts, b, a) if has_turned_stacks(config) else (experts, a, b)


def has_turned_stacks(config: Mapping[str, Any]) -> bool:
    """Whether models of a type keep stacks of experts as [E, K, N]."""
    return str(config.get("model_type", "")) in _TURNED


def is_interleaved(config: Mapping[str, Any]) -> bool:
    """Whether rows of gate_up are gate 0, up 0, gate 1, ...: gpt-oss; all others have the gate's rows first."""
    return str(config.get("model_type", "")) == "gpt_oss"
