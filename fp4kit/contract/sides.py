"""Define Side: one side of fp4kit.parity (trainer or rollout engine), which gives the codes or values of a layer.

A side is described by a Contract, by tensors, by a function, or by a Contract together with tensors or a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import lcm
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from fp4kit.arguments import a_type
from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.contract.schema import SETTINGS, Contract
from fp4kit.formats import FLT_MAX, FLT_MIN, bit_patterns
from fp4kit.layouts import padded_shape, swizzle_scales, unswizzle_scales
from fp4kit.lazy import FUNCTIONS
from fp4kit.ops.amax import amax as plain_amax
from fp4kit.ops.engines import specification
from fp4kit.ops.identify import CandidateAmaxes, ranked
from fp4kit.ops.quantize import dequantize, fake_quantize, quantize
from fp4kit.ops.transforms import hadamard, unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of, of_zeros, on_host
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.schema import as_stored, by_divisor, takes_divisor
from fp4kit.reference.codec import TILE_ELEMENTS, traced
from fp4kit.reference.quantize import tensor_amax
from fp4kit.reference.stochastic import HADAMARD_BLOCK, TE_SIGN_MASK, hadamard_blocks
from fp4kit.reference.tensor_rules import UNKNOWN, covered_range, static_amax

OP = "parity"
Amax: TypeAlias = "np.ndarray | None"
Matrix: TypeAlias = "Quantized | np.ndarray"
"""A matrix of one side: its codes and scales or, for a side without codes, its values."""


@dataclass(frozen=True)
class RowReader:
    """A matrix (N, K) of which only the compared rows are read, such as a layer of a running engine.

    recipe: the recipe of its codes; None if ``read`` returns values.
    read: returns some rows, given their ascending indices.
    fault: returns (step, text) if the engine computes with other numbers than its scales say, otherwise None.
    decoded: True if the values that ``read`` returns were decoded from codes, or fake-quantized.
    follow: returns codes with what an engine that multiplies codes leaves open taken from the other side's codes.
    """

    shape: tuple[int, ...]
    recipe: Recipe | None
    read: Callable[[np.ndarray], Matrix]
    fault: Callable[[], tuple[StepName, str] | None] = lambda: None
    decoded: bool = False
    follow: Callable[[Quantized, Quantized], Quantized] | None = None


Whole: TypeAlias = "Matrix | RowReader"
"""A layer of one side: all of it, or a RowReader."""
NO_CONTRACT = Contract(unknown=SETTINGS)  # of a side for which none is given
# signs of Transformer Engine's transforms -> their sign masks
_MASKS = {None: 0, "".join("-" if TE_SIGN_MASK >> i & 1 else "+" for i in range(HADAMARD_BLOCK)): TE_SIGN_MASK}
_WEIGHT = ".weight"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # of inputs
_DIVIDES = "compressed-tensors"  # containers that store the tensor scale as a divisor


class InputScale(NamedTuple):
    """The static input scale of a layer as a checkpoint stores it, or the amax that a trainer has in its place.

    divides: whether the scale divides on decode.
    """

    value: np.float32
    divides: bool
    is_amax: bool = False

    def operands(self, recipe: Recipe, dtype: np.dtype) -> tuple[Recipe, np.ndarray]:
        """Return the recipe and the tensor amax with which quantize uses this scale."""
        if self.is_amax:
            return recipe, np.asarray(self.value)
        found = static_amax(self.value, recipe, dtype, self.divides)
        if found != UNKNOWN:
            return recipe, np.asarray(found)
        if self.divides and takes_divisor(recipe):
            return by_divisor(recipe), np.asarray(self.value)
        with np.errstate(over="ignore"):
            likely = covered_range(recipe) / self.value if self.divides else covered_range(recipe) * self.value
        return recipe, np.asarray(np.minimum(likely, FLT_MAX))

    def text(self, recipe: Recipe | None) -> str:
        """Return the number in words, such as "stores 768, which divides (amax 3.5)"."""
        if self.is_amax:
            return f"uses the amax {self.value}"
        with np.errstate(all="ignore"):
            full = None if recipe is None or recipe.tensor_scaling != "tensor" else np.float32(covered_range(recipe))
            amax = None if full is None else full / self.value if self.divides else full * self.value
        name = "input_global_scale" if self.divides else "input_scale"
        return f"stores the {name} {self.value}" + ("" if amax is None else f" (amax {amax:.6g})")

    def equals(self, other: InputScale, recipe: Recipe | None) -> bool:
        """Return whether two scales are the same calibration: by ``recipe``, both give one tensor scale."""
        if (self.divides, self.is_amax) == (other.divides, other.is_amax):
            return same(np.asarray(self.value), np.asarray(other.value))
        if (
            recipe is not None
            and recipe.tensor_scaling == "tensor"
            and not (recipe.fake_only or recipe.stochastic_only)
        ):
            x = np.ones((recipe.block_rows, recipe.length_multiple), _BFLOAT16)
            a, b = (made(x, *one.operands(recipe, x.dtype)) for one in (self, other))
            return isinstance(a, Quantized) and isinstance(b, Quantized) and same(a.tensor_scale, b.tensor_scale)
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / other.value
            return not (self.is_amax or other.is_amax) and bool(abs(self.value - inverse) <= 2 * np.spacing(inverse))


class Side:
    """One side of a parity check, which gives the codes or values of layers.

    label: the name of the side in messages, "train" or "rollout".
    contract: the settings of the side; NO_CONTRACT if none are given.
    stored: layer -> Quantized or array; None if the side computes codes or values from unquantized weights.
    function: called with a layer's name and its weight, returns a Quantized or an array; None if the side has none.
    input_scales: layer -> InputScale, taken from `stored`; empty if `stored` has no input scales.
    others: the tensors of a checkpoint that are no layers, such as norms and biases, taken from `stored`.
    unquantized: engine -> layer -> whether the engine leaves it unquantized, as it reads the config of `stored`; empty
        if `stored` is no checkpoint with an exclusion list.
    activations: layer -> recipe of its inputs, as ``stored`` quantizes them; without layers of which this is unknown.
    """

    def __init__(
        self,
        label: str,
        contract: Contract = NO_CONTRACT,
        stored: Mapping[str, Any] | None = None,
        function: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.label, self.contract, self.stored, self.function = label, contract, stored, function
        self.input_scales: Mapping[str, InputScale] = getattr(stored, "input_scales", {})
        self.others: Mapping[str, Any] = getattr(stored, "others", {})
        self.unquantized: Mapping[str, Mapping[str, bool]] = getattr(stored, "unquantized", {})
        self.activations: Mapping[str, Recipe | None] = getattr(stored, "activations", {})

    def recipe_of(self, layer: str, matrix: Whole | None) -> Recipe | None:
        """Return the recipe of a layer's weight, or None if the layer is unquantized or its recipe is unknown."""
        if "weights" not in self.contract.unknown:
            return self.contract.recipe_of(layer)
        return matrix.recipe if isinstance(matrix, (Quantized, RowReader)) else None

    def decoding(self, r: Recipe) -> Recipe:
        """Return r with the decode rule of loaders if the contract names a container, otherwise r itself."""
        container = self.contract.container
        if container is None or r.fake_only:
            return r
        return as_stored(r, container.startswith(_DIVIDES) and r.scale is not None)

    def given(self, layer: str, x: Any) -> Whole | None:
        """Return the matrix that the side stores, or that its function returns; None if it has only a contract."""
        what = f"{self.label}: {layer}"
        if self.stored is not None:
            found = self.stored[layer]
            return found if isinstance(found, RowReader) else as_matrix(what, found)
        return None if self.function is None else as_matrix(what, self.function(layer, x))

    @property
    def transform(self) -> str:
        """The size and the signs of the contract's Hadamard transform in words, such as "32 without signs"."""
        size, signs = self.contract.hadamard, self.contract.hadamard_signs
        return "" if size is None else f"{size} " + (f"with signs {signs}" if signs else "without signs")

    def transformed(self, x: np.ndarray) -> np.ndarray:
        """Return a matrix after the Hadamard transform of the contract; x itself if the contract has no transform."""
        size, signs = self.contract.hadamard, self.contract.hadamard_signs
        if size is None:
            return x
        if size == HADAMARD_BLOCK and signs in _MASKS:
            return hadamard_blocks(x, _MASKS[signs])
        return np.asarray(hadamard(x, size, signs=None if signs is None else [1 if s == "+" else -1 for s in signs]))

    def of_inputs(self, layer: str, recipe: Recipe, dtype: np.dtype) -> tuple[Recipe, np.ndarray | None]:
        """Return the recipe and the tensor amax that give the stored input scale of a layer; None if none is stored."""
        scale = self.input_scales.get(layer)
        is_static = self.contract.input_scales == "static" and recipe.tensor_scaling == "tensor"
        if not is_static or scale is None or not 0 < scale.value < np.inf:
            return recipe, None
        return scale.operands(recipe, dtype)

    def activation_of(self, layer: str) -> tuple[bool, Recipe | None]:
        """Return whether it is known how a quantized layer's inputs are quantized, and their recipe, or None."""
        if layer in self.activations:
            return True, self.activations[layer]
        return "activations" not in self.contract.unknown, self.contract.activations

    def leaves(self, layer: str) -> bool | None:
        """Return whether the side leaves a layer unquantized; None if this is unknown."""
        one = self.contract
        if "excluded" not in one.unknown:
            if any(fnmatchcase(layer, pattern) for pattern in one.excluded):
                return True
            return "weights" not in one.unknown and one.recipe_of(layer) is None
        return None

    def check(self) -> None:
        """Raise ValueError if the side has only a contract, and this contract does not determine codes alone."""
        search = self.contract.scale_search
        why = "" if search is None else f"searches block scales ({search})"
        recipes = (self.contract.weights, *(r for _, r in self.contract.patterns))
        random = next((r.title for r in recipes if r is not None and r.stochastic_only), None)
        why = why if random is None else f"rounds weights stochastically ({random})"
        why = "does not know the recipe of weights" if "weights" in self.contract.unknown else why
        if why and self.stored is None and self.function is None:
            raise ValueError(
                f"{OP}: {self.label}: the contract {why}, so it does not determine codes alone; give the checkpoint"
            )


def side_of(label: str, given: Any) -> Side:
    """Return the Side that the argument ``train`` or ``rollout`` of parity describes."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Contract):
        side = side_of(label, given[1])
        if side.stored is None and side.function is None:
            raise ValueError(
                f"{OP}: {label} is a pair of two contracts; needs one contract, or a pair of a Contract and tensors, a"
                " model or a function"
            )
        side.contract = given[0]
        return side
    if isinstance(given, Contract):
        return Side(label, given)
    if isinstance(given, (str, Path)):
        contract, stored = FUNCTIONS["parity.open"](given, True)
        return Side(label, contract or NO_CONTRACT, stored)
    if isinstance(given, Mapping):
        return Side(label, stored=by_layer(given))
    if hasattr(given, "named_modules"):  # a torch.nn.Module, which is callable too
        return side_of(label, FUNCTIONS["parity.live"](given))
    if callable(given):
        return Side(label, function=given)
    raise TypeError(
        f"{OP}: {label} is {a_type(given)}; needs a Contract, a path, a mapping of tensors, a model in memory,"
        " a function, or a pair of a Contract and one of the others"
    )


def source_of(name: str, given: Any) -> Mapping[str, Any] | None:
    """Return the tensors of parity's argument `weights`, `inputs` or `kv` by layer; None if the argument is None."""
    if given is None:
        return None
    if isinstance(given, (str, Path)):
        opened: Mapping[str, Any] = FUNCTIONS["parity.open"](given)[1]
        if opened is None:
            raise ValueError(f"{OP}: {name} is the contract {given}; needs a model or a file of tensors")
        return opened
    if isinstance(given, Mapping):
        return by_layer(given)
    raise TypeError(f"{OP}: {name} is {a_type(given)}; needs a path or a mapping of tensors")


def by_layer(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors under the names of their layers: the ending ".weight" is removed from every name that has it."""
    wrong = next((name for name in tensors if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"{OP}: a tensor has the name {wrong!r:.60}; needs a string, the name of a layer")
    if not any(name.endswith(_WEIGHT) for name in tensors):
        return tensors
    return {name.removesuffix(_WEIGHT): tensors[name] for name in tensors}


def as_matrix(what: str, given: Any) -> Matrix:
    """Convert a Quantized or an array of any library to one in host memory, with linear block scales."""
    if not isinstance(given, Quantized):
        return array_of(what, given)
    q = on_host(given, OP)
    if q.axis != len(q.shape) - 1:
        raise ValueError(f"{OP}: {what} is quantized along axis {q.axis}; needs the last axis")
    return q if q.scale_layout == "linear" else unswizzle(q)


def array_of(what: str, given: Any) -> np.ndarray:
    """Return an array of NumPy, CuPy, PyTorch or JAX as a NumPy array in host memory, with its dtype and shape."""
    if not hasattr(given, "shape"):
        raise TypeError(f"{OP}: {what} is {a_type(given)}; needs an array or a Quantized")
    (array,) = import_arrays(OP, tensor=given)
    found: np.ndarray = to_host(array)
    if found.dtype.kind not in "biufV" or found.dtype.itemsize > 8:
        raise ValueError(f"{OP}: {what} is {found.dtype}; needs real numbers of at most 64 bits")
    return found


def amax_of(x: np.ndarray, recipe: Recipe) -> Amax:
    """Return the tensor amaxes of a matrix (M, K) as the recipe measures them, or None if quantize needs none."""
    # Recipes with one tensor scale per block need none either, because only whole blocks are quantized later.
    if recipe.tensor_scaling not in ("tensor", "row"):
        return None
    if recipe.tensor_scaling == "tensor":
        largest_magnitude = np.asarray(plain_amax(x))
        if FLT_MIN <= largest_magnitude <= FLT_MAX:  # otherwise recipes differ in what they do with NaN and subnormals
            return largest_magnitude
    return tensor_amax(x, recipe)


def as_loaded(q: Quantized) -> Quantized:
    """Return q with the tensor scale that a loader computes, if the checkpoint stores a divisor; otherwise q itself."""
    if q.recipe.decode_rule != "stored_divisor":
        return q
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(1) / (np.float32(1) / np.asarray(q.tensor_scale, np.float32))
    return replace(q, tensor_scale=np.asarray(scale), tensor_amax=None)


def made(x: np.ndarray, recipe: Recipe, amax: Amax) -> Matrix:
    """Quantize some rows of a matrix with tensor amaxes of the whole matrix."""
    if recipe.fake_only:
        return faked(x, recipe, amax)
    x, amax, added = _with_measured_nan(x, recipe, amax)
    q: Quantized = quantize(x, recipe, tensor_amax=amax)
    return as_loaded(box_of(q, (slice(added, len(x)), slice(0, x.shape[1]))) if added else q)


def faked(x: np.ndarray, recipe: Recipe, amax: Amax) -> np.ndarray:
    """Return the values of fake_quantize for some rows of a matrix. The arguments are those of made()."""
    x, amax, added = _with_measured_nan(x, recipe, amax)
    return np.asarray(fake_quantize(x, recipe, tensor_amax=amax))[added:]


def has_nan(amax: Amax) -> bool:
    """Return whether a tensor amax, or one of several, is NaN. Return False for None."""
    return amax is not None and bool(np.isnan(amax).any())


def _with_measured_nan(x: np.ndarray, recipe: Recipe, amax: Amax) -> tuple[np.ndarray, Amax, int]:
    """Return (x, amax, added) with which quantize computes what the given amax means, also if it is NaN."""
    # If there is one amax for the whole matrix, ``added`` rows of NaN are put before x, because the given rows may have
    # no NaN. The caller removes them from the result.
    if amax is None or not has_nan(amax):
        return x, amax, 0
    if amax.ndim:
        return x, None, 0
    rows = np.full((recipe.block_rows, x.shape[1]), np.nan, x.dtype)
    return np.concatenate([rows, x]), None, len(rows)


def largest(amaxes: Iterable[Amax]) -> Amax:
    """Return the tensor amax that a group of layers shares: the largest of the given amaxes."""
    found = [amax for amax in amaxes if amax is not None]
    return np.max(np.stack(found), axis=0) if found else None


def stacks_in(tensors: Mapping[str, Any] | None, arrays: bool) -> set[str]:
    """Return the names of the stacks in a dict of tensors: Quantized and, on request, arrays of three axes."""
    given = tensors if isinstance(tensors, dict) else {}
    kinds = {name: t for name, t in given.items() if arrays or isinstance(t, Quantized)}
    return {name for name, t in kinds.items() if len(getattr(t, "shape", ())) == 3}


def unstacked(tensors: Mapping[str, Any], stacks: Collection[str]) -> Mapping[str, Any]:
    """Return tensors with each of the named stacks split into its matrices."""
    names = [name for name in stacks if name in tensors and len(tensors[name].shape) == 3]
    if not names:
        return tensors
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in names:
            found[name] = tensor
            continue
        parent, _, leaf = name.rpartition(".")
        for e in range(tensor.shape[0]):
            one = matrix_of(tensor, e) if isinstance(tensor, Quantized) else tensor[e]
            found[f"{parent}.{e}.{leaf}" if parent else f"{leaf}.{e}"] = one
    return found


def matrix_of(q: Quantized, e: int) -> Quantized:
    """Return one matrix of a Quantized of three axes as a Quantized of two axes, which shares its memory."""
    part = box_of(q, (slice(e, e + 1), *(slice(0, n) for n in q.shape[1:])))
    parts = {name: a if a is None or not a.ndim else a[0] for name, a in part.parts().items()}
    if part.recipe.tensor_scaling == "tensor":  # one number per expert, whatever its shape
        numbers = ("tensor_scale", "tensor_amax")
        parts |= {name: None if (a := getattr(part, name)) is None else a.reshape(()) for name in numbers}
    return replace(part, **parts, shape=q.shape[1:], axis=q.axis - 1)


StepName: TypeAlias = Literal[
    "quantization", "amax", "tensor scale", "block scale", "quotient", "tie", "code", "decode", "value", "product"
]
"""The steps of the arithmetic, in their order. "quantization": only one side quantizes. "tie": the quotients are equal
and lie in the middle between two codes. "value": values differ, and nothing is known about the steps before."""


def orders(q: Quantized) -> Iterator[tuple[StepName, str, Quantized]]:
    """Yield (step, what is wrong, copy of q in the right order) for each wrong order in which q may be stored."""
    scales = list(_scale_orders(q))
    for text, one in scales:
        yield "block scale", text, one
    if q.recipe.element.packing.codes == 2:
        for text, one in [("", q), *scales]:
            swapped = replace(one, packed=one.packed >> 4 | one.packed << 4)
            nibbles = "the even element of each byte is in the high nibble; swap the nibbles"
            yield "code", "; ".join(filter(None, (nibbles, text))), swapped


def _scale_orders(q: Quantized) -> Iterator[tuple[str, Quantized]]:
    """Yield (what is wrong, Quantized in the right order) for each wrong order that the block scales of q may have."""
    stored = q.block_scale
    if stored is None:
        return
    for layout in ("swizzled_128x4", "swizzled_8x4"):
        if padded_shape(stored.shape, layout) == stored.shape:
            linear = unswizzle_scales(stored, layout, stored.shape)
            text = f"the block scales are in the layout {layout}, but are read as linear; pass scale_layout={layout!r}"
            yield text, replace(q, block_scale=linear)
            swizzled = np.asarray(swizzle_scales(stored, layout)).reshape(stored.shape)
            text = f"the block scales are linear, but are read in the layout {layout}; pass scale_layout='linear'"
            yield text, replace(q, block_scale=swizzled)


# step -> beginnings of the names of its results; the first that fits a name decides
_STEPS: dict[StepName, tuple[str, ...]] = {
    "amax": ("tensor amax", "block amax"),
    "tensor scale": ("tensor",),
    "block scale": ("amax", "log2", "exponent", "block scale", "error"),
    "quotient": ("factor", "scaled", "element *", "element /"),
    "code": ("code", "value before", "value scaled"),
    "decode": ("element value", "magnitude", "decoded", "result"),
}
_QUOTIENTS = ("element * factor", "element / factor")
# step -> names of its final result. Other results of the step affect the decoded value only through the final result.
_ENDS = {"block scale": ("block scale",), "quotient": ("code", "code of the magnitude"), "code": ("code",)}
_MOST_WINDOWS = 8  # largest number of parts of a layer whose steps are recorded


class Arithmetic(NamedTuple):
    """Everything that determines the codes of a layer: recipe, tensor amaxes and transform.

    amax: the tensor amaxes, of shape () for one amax or (N,) for one per row; None if the recipe needs none.
    layers: the layers that share ``amax``, which is the largest of their amaxes; () if it was derived from stored
        scales.
    transform: the Hadamard transform that the elements went through before, in words; "" for none.
    static: True if the amax follows from a stored input scale.
    """

    recipe: Recipe
    amax: Amax
    layers: tuple[str, ...] = ()
    transform: str = ""
    static: bool = False


class _Result(NamedTuple):
    """The recorded result of one step, one entry per element (m, k): bits in a format or dtype, and their values."""

    bits: np.ndarray
    format: str
    numbers: np.ndarray


_Results: TypeAlias = "dict[str, _Result]"


def first_place(mask: np.ndarray) -> tuple[int, int]:
    """Return (row, column) of the first True in a mask, row by row. At least one entry must be True."""
    i, j = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(i), int(j)


def first_step(
    x: tuple[np.ndarray, np.ndarray], a: Arithmetic, b: Arithmetic, affected: np.ndarray, scales: np.ndarray
) -> tuple[tuple[int, int], dict[str, Any]] | None:
    """Return the earliest step that differs for the affected elements; None if no recorded step differs.

    That is (row and column of one such element, the fields of a LayerParity that describe the step).
    """
    found: dict[tuple[int, StepName, str], list[tuple[int, tuple[int, int]]]] = {}
    examined = 0
    for rows, columns in _windows(affected, scales, a.recipe, b.recipe):
        part = affected[rows, columns]
        examined += int(part.sum())
        recorded = [_recorded(each, one, rows, columns) for each, one in zip(x, (a, b), strict=True)]
        for order, step, name, mask in _differing(recorded[0], recorded[1], part):
            i, j = first_place(mask)
            found.setdefault((order, step, name), []).append((int(mask.sum()), (rows.start + i, columns.start + j)))
    if not found:
        return None
    totals: dict[StepName, int] = {}
    for key in sorted(found):
        totals[key[1]] = totals.get(key[1], 0) + sum(count for count, _ in found[key])
    _, step, name = first = min(found)
    facts = {"step": step, "result": name, "count": totals[step], "examined": examined, "steps": tuple(totals.items())}
    return found[first][0][1], facts


def _windows(affected: np.ndarray, scales: np.ndarray, a: Recipe, b: Recipe) -> list[tuple[slice, slice]]:
    """Return at most eight parts of a matrix that hold affected elements, as slices (rows, columns)."""
    M, K = affected.shape
    height = lcm(a.block_rows, b.block_rows)
    multiple = lcm(a.length_multiple, b.length_multiple)
    width = max(min(K, 1024, TILE_ELEMENTS // height) // multiple, 1) * multiple
    rows = max(TILE_ELEMENTS // width // height, 1) * height
    every = [
        (slice(row, min(row + rows, M)), slice(column, min(column + width, K)))
        for row in range(0, M, rows)
        for column in range(0, K, width)
    ]
    found = [window for window in every if affected[window].any()]
    if len(found) <= _MOST_WINDOWS:
        return found
    chosen = [found[i * len(found) // _MOST_WINDOWS] for i in range(_MOST_WINDOWS)]
    if not any(scales[window].any() for window in chosen):
        chosen[-1] = next((window for window in found if scales[window].any()), chosen[-1])
    return chosen


def _recorded(x: np.ndarray, one: Arithmetic, rows: slice, columns: slice) -> _Results:
    """Quantize and decode a part of x, and return the result of each step in order, as {name of the result: result}."""
    part = np.ascontiguousarray(x[rows, columns])
    amax = one.amax if one.amax is None or not one.amax.ndim else one.amax[rows]
    with specification(), np.errstate(all="ignore"), traced() as steps:
        q = made(part, one.recipe, amax)
        if isinstance(q, Quantized):
            dequantize(q, part.dtype)
    found: _Results = {}
    for step in steps:
        spread = _per_element(step.result, part.shape, one.recipe)
        name = "scaled element" if step.name in _QUOTIENTS else step.name
        if spread is not None and (name not in found or name == "code"):
            format = step.result.dtype.name if step.format is None else step.format.name
            numbers = spread if step.format is None else step.format.values[spread.astype(np.int64)]
            if spread.dtype.kind not in "iub":
                one_nan = np.where(np.isnan(spread), np.full_like(spread, np.nan), spread)
                spread = bit_patterns(one_nan)
            found[name] = _Result(spread, format, np.asarray(numbers, np.float64))
    return found


def _per_element(result: np.ndarray, shape: tuple[int, int], r: Recipe) -> np.ndarray | None:
    """Repeat the entries of a recorded result, so that there is one entry per element, and return it as (m, k)."""
    m, k = shape
    flat = result.reshape(-1)
    blocks, block_rows = k // r.block_size, -(-m // r.block_rows)
    if flat.size == m * k:
        return flat.reshape(m, k)
    if flat.size == 1:
        return np.broadcast_to(flat, (m, k))
    if flat.size == m * blocks:
        return np.repeat(flat.reshape(m, blocks), r.block_size, axis=1)
    if flat.size == block_rows * blocks:
        return np.repeat(np.repeat(flat.reshape(block_rows, blocks), r.block_rows, axis=0)[:m], r.block_size, axis=1)
    return np.broadcast_to(flat[:, None], (m, k)) if flat.size == m else None


def _differing(a: _Results, b: _Results, affected: np.ndarray) -> Iterator[tuple[int, StepName, str, np.ndarray]]:
    """Yield (order, step, name, mask) for each recorded result in which the sides differ, in the order of the steps."""
    left = affected.copy()
    leads_to = {step: _differs(a, b, names) for step, names in _ENDS.items()}
    for order, step in enumerate(_STEPS):
        of_step = [[name for name in one if _step(name) == step] for one in (a, b)]
        for name in (name for name in of_step[0] if name in b):
            differs = left & _differs(a, b, (name,))
            end = leads_to.get(step)
            differs = differs if end is None else differs & end
            left &= ~differs
            if name == "code":
                zeros = differs & (a[name].numbers == 0) & (b[name].numbers == 0)
                if zeros.any():
                    yield order, step, "sign of zero", zeros
                differs &= ~zeros
                ties = differs & _ties(a, b)
                if ties.any():
                    yield order, "tie", name, ties
                differs &= ~ties
            if differs.any():
                yield order, step, name, differs
        of_one_side = bool(of_step[0]) != bool(of_step[1])
        if step in ("tensor scale", "block scale") and of_one_side and left.any():
            yield order, step, (of_step[0] + of_step[1])[0], left
            return


def _differs(a: _Results, b: _Results, names: tuple[str, ...]) -> Any:
    """Return a mask (m, k) of the elements for which a recorded result differs between the sides."""
    name = next((name for name in names if name in a and name in b), None)
    if name is None:
        return None
    x, y = a[name], b[name]
    if x.format == y.format:
        return x.bits != y.bits
    return (x.numbers != y.numbers) & ~(np.isnan(x.numbers) & np.isnan(y.numbers))


def _step(name: str) -> str:
    """Return the name of the step that gives a recorded result, such as "quotient"; "" if no step gives it."""
    return next((step for step, starts in _STEPS.items() if name.startswith(starts)), "")


def _ties(a: _Results, b: _Results) -> np.ndarray:
    """Return a bool mask (m, k) of elements whose quotients are equal and midway between the values of both codes."""
    x, y = a["code"], b["code"]
    last = next((name for name in reversed(a) if _step(name) == "quotient" and name in b), None)
    if last is None or a[last].format != b[last].format:
        return np.zeros(x.bits.shape, bool)
    middle = (x.numbers + y.numbers) / 2
    return (a[last].bits == b[last].bits) & (a[last].numbers == middle)


@dataclass(frozen=True)
class Rows:
    """The compared rows of one layer on one side, and how the side made them, as far as fp4kit could find out.

    label: the name of the side.
    part: the compared rows.
    x: the same rows of the unquantized weight, after the side's Hadamard transform if the side quantizes the layer;
        None if the weight is unknown.
    how: the recipe, tensor amax and transform that give the bytes; None if nothing that was tried gives them.
    step, wrong: the step at which the stored bytes are wrong, and a text that says how; None and "" if they are right.
    nearest: the nearest recipe in words, if ``how`` is None and recipes were compared; otherwise "".
    container: the container whose loaders decode the codes; None if the side's contract names none.
    served_dtype: the dtype to which they decode; None for the dtype of the model.
    """

    label: str
    part: Matrix
    x: np.ndarray | None = None
    how: Arithmetic | None = None
    step: StepName | None = None
    wrong: str = ""
    nearest: str = ""
    container: str | None = None
    served_dtype: str | None = None


def rows_of(matrix: Any, rows: np.ndarray) -> Any:
    """Return some rows of a Quantized, a RowReader or an array."""
    if isinstance(matrix, RowReader):
        return matrix.read(rows)
    if not isinstance(matrix, Quantized):
        return matrix[rows]
    parts = {name: a if a is None or not np.ndim(a) else a[rows] for name, a in matrix.parts().items()}
    return replace(matrix, **parts, shape=(len(rows), matrix.shape[1]))


def whole_of(whole: Whole) -> Matrix:
    """Return all rows of a layer."""
    return whole.read(np.arange(whole.shape[0])) if isinstance(whole, RowReader) else whole


def with_making(found: Rows, x: np.ndarray, whole: Whole, rows: np.ndarray, tried: Sequence[Arithmetic]) -> Rows:
    """Find out which of the given ways made the bytes of a layer from its weight, in whatever order they are stored."""
    part = found.part
    for one in tried:
        if gives(one, x, part):
            return replace(found, how=one)
    if not isinstance(part, Quantized):
        return found
    for one in tried:
        zeros = as_zeros(replace(found, how=one), one, x)
        if zeros is not None and equal(zeros.part, part):
            return zeros
    for step, wrong, q in orders(whole_of(whole)):  # type: ignore[arg-type]  # has codes, because its rows have
        right = rows_of(q, rows)
        for one in tried:
            if gives(one, x, right):
                return replace(found, how=one, step=step, wrong=wrong)
    return found


def identified(found: Rows, x: np.ndarray, part: Quantized) -> Rows:
    """Find the recipe of the table that made the bytes of a layer, or the nearest one."""
    verdict = ranked(part, x)
    for r in (RECIPES.get(id, part.recipe) for id in verdict.exact):
        for amax in CandidateAmaxes(part, x).for_recipe(r):
            one = Arithmetic(r, None if amax is None else np.asarray(amax, np.float32))
            if gives(one, x, part):
                return replace(found, how=one)
    return replace(found, nearest=verdict.verdict)


def fits(part: Matrix, r: Recipe) -> bool:
    """Return whether quantizing by a recipe gives codes in the formats of a Quantized. Values fit every recipe."""
    if not isinstance(part, Quantized):
        return True
    own = part.recipe
    return not r.fake_only and (r.element, r.scale, r.block_size) == (own.element, own.scale, own.block_size)


def gives(one: Arithmetic, x: np.ndarray, part: Matrix) -> bool:
    """Return whether quantizing x with an Arithmetic reproduces every bit of the compared rows of a side."""
    found = made(x, one.recipe, one.amax)
    if isinstance(part, Quantized) and isinstance(found, Quantized):
        return equal(found, part)
    return same(values_of(found, part), values_of(part, found))


def equal(a: Matrix, b: Matrix) -> bool:
    """Return whether two Quantized have the same codes, block scales and tensor scales in every bit."""
    return all(same(getattr(a, name), getattr(b, name)) for name in ("packed", "block_scale", "tensor_scale"))


def as_zeros(found: Rows, one: Arithmetic, x: np.ndarray) -> Rows | None:
    """Return the rows of a layer of zeros as convert stores them: block scales 0 and tensor scale 1 (of_zeros)."""
    if one.recipe.fake_only or one.recipe.tensor_scaling != "tensor" or one.amax is None or one.amax.any():
        return None
    q = made(x, one.recipe, one.amax)
    assert isinstance(q, Quantized)
    zeros = of_zeros(q)
    step: StepName = "block scale" if same(q.tensor_scale, zeros.tensor_scale) else "tensor scale"
    wrong = (
        "stores a layer of zeros as convert does, with block scales 0 and tensor scale 1, not with its recipe's scales"
    )
    return replace(found, part=zeros, step=step, wrong=wrong)


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Return whether two arrays are equal in shape and in every bit, except for the bits of NaN, or are both None."""
    if a is None or b is None:
        return a is b
    return np.shape(a) == np.shape(b) and not differing_bits(np.asarray(a), np.asarray(b)).any()


def fake_making(found: Rows, x: np.ndarray, part: np.ndarray, tried: Sequence[Arithmetic]) -> Rows:
    """Find a recipe whose fake_quantize gives the values of a side, although its decoded codes do not."""
    for one in tried:
        if not one.recipe.fake_only:
            values = faked(x, one.recipe, one.amax)
            if same(values.astype(np.float32), part.astype(np.float32)):
                wrong = f"values are those of fake_quantize of {one.recipe.title}, which differ from its decoded codes"
                return replace(found, how=one, step="decode", wrong=wrong)
    return found


def served(values: np.ndarray, one: Rows) -> np.ndarray:
    """Return decoded values after rounding to the dtype to which a side decodes; values of a side without codes as
    they are.
    """
    if one.served_dtype is None or not isinstance(one.part, Quantized):
        return values
    return values.astype(one.served_dtype).astype(values.dtype)


def values_of(one: Matrix, other: Matrix) -> np.ndarray:
    """Return the values of one side for a comparison with the other side."""
    if not isinstance(one, Quantized):
        return one.astype(np.float32) if one.dtype.itemsize < 4 else one
    is_narrow = not isinstance(other, Quantized) and other.dtype.itemsize < 4
    return np.asarray(dequantize(one, other.dtype if is_narrow else np.dtype(np.float32))).astype(np.float32)


def differing_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a bool mask of the elements in which two arrays of equal shape differ in any bit, so 0 differs from -0."""
    if a.dtype != b.dtype:
        wide = np.promote_types(a.dtype, b.dtype)
        a, b = a.astype(wide), b.astype(wide)
    differs: np.ndarray = bit_patterns(a) != bit_patterns(b)
    return differs if a.dtype.kind in "iub" else differs & ~((a != a) & (b != b))
