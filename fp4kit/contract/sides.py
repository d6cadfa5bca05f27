"""Define Side: one side of fp4kit.parity (trainer or rollout engine), which gives the codes or values of a layer.
Weights are a Quantized or, for a side without codes, an array of values.

A side is described by a Contract, by tensors, by a function, or by a Contract together with tensors or a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.contract.schema import Contract
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.lazy import FUNCTIONS
from fp4kit.ops.amax import amax as plain_amax
from fp4kit.ops.quantize import fake_quantize, quantize
from fp4kit.ops.transforms import hadamard, unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of, on_host
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import as_stored
from fp4kit.reference.quantize import tensor_amax
from fp4kit.reference.stochastic import HADAMARD_BLOCK, TE_SIGN_MASK, hadamard_blocks
from fp4kit.reference.tensor_rules import UNKNOWN, covered_range, static_amax

OP = "parity"
Amax: TypeAlias = "np.ndarray | None"
# signs of Transformer Engine's transforms -> their sign masks
_MASKS = {None: 0, "".join("-" if TE_SIGN_MASK >> i & 1 else "+" for i in range(HADAMARD_BLOCK)): TE_SIGN_MASK}
_WEIGHT = ".weight"
_DIVIDES = "compressed-tensors"  # containers that store the tensor scale as a divisor


class Weights(NamedTuple):
    """One matrix of one side. One of the two fields is None.

    q: the codes and scales, as a Quantized.
    values: the values, as an array.
    """

    q: Quantized | None
    values: np.ndarray | None


class InputScale(NamedTuple):
    """The static input scale of a layer as a checkpoint stores it.

    value: the stored number.
    divides: True if it divides on decode, False if it multiplies.
    """

    value: np.float32
    divides: bool


class Side:
    """One side of a parity check, which gives the codes or values of layers.

    label: the name of the side in messages, "train" or "rollout".
    contract: the settings of the side; None if none are known.
    stored: layer -> Quantized or array; None if the side has no tensors.
    function: called with a layer's name and its weight, returns a Quantized or an array; None if the side has none.
    input_scales: layer -> InputScale, taken from `stored`; empty if `stored` has no input scales.
    others: the tensors of a checkpoint that are no layers, such as norms and biases, taken from `stored`.
    unquantized: engine -> layer -> whether the engine leaves it unquantized, as it reads the config of `stored`; empty
        if `stored` is no checkpoint with an exclusion list.
    """

    def __init__(
        self,
        label: str,
        contract: Contract | None = None,
        stored: Mapping[str, Any] | None = None,
        function: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.label, self.contract, self.stored, self.function = label, contract, stored, function
        self.input_scales: Mapping[str, InputScale] = getattr(stored, "input_scales", {})
        self.others: Mapping[str, Any] = getattr(stored, "others", {})
        self.unquantized: Mapping[str, Mapping[str, bool]] = getattr(stored, "unquantized", {})

    @property
    def makes(self) -> bool:
        """True if the side computes codes or values from unquantized weights; False if it stores tensors."""
        return self.stored is None

    def recipe_of(self, layer: str, q: Quantized | None) -> Recipe | None:
        """Return the recipe of a layer's weight, or None if the layer is unquantized or its recipe is unknown."""
        if self.contract is not None and "weights" not in self.contract.unknown:
            return self.contract.recipe_of(layer)
        return None if q is None else q.recipe

    def decoding(self, r: Recipe) -> Recipe:
        """Return r with the decode rule of loaders if the contract names a container, otherwise r itself."""
        container = None if self.contract is None else self.contract.container
        if container is None or r.fake_only:
            return r
        return as_stored(r, container.startswith(_DIVIDES) and r.scale is not None)

    def weights_of(self, layer: str, x: np.ndarray | None) -> Weights:
        """Return the matrix that the side stores for a layer or, without stored tensors, that its function returns."""
        # The side must have stored tensors or a function.
        if self.stored is not None:
            return as_weights(f"{self.label}: {layer}", self.stored[layer])
        assert self.function is not None
        return as_weights(f"{self.label}: {layer}", self.function(layer, x))

    @property
    def transform(self) -> str:
        """The size and the signs of the contract's Hadamard transform in words, such as "32 without signs"."""
        contract = self.contract
        if contract is None or contract.hadamard is None:
            return ""
        signs = contract.hadamard_signs
        return f"{contract.hadamard} " + (f"with signs {signs}" if signs else "without signs")

    def transformed(self, x: np.ndarray) -> np.ndarray:
        """Return a matrix after the Hadamard transform of the contract; x itself if the contract has no transform."""
        contract = self.contract
        if contract is None or contract.hadamard is None:
            return x
        size, signs = contract.hadamard, contract.hadamard_signs
        if size == HADAMARD_BLOCK and signs in _MASKS:
            return hadamard_blocks(x, _MASKS[signs])
        return np.asarray(hadamard(x, size, signs=None if signs is None else [1 if s == "+" else -1 for s in signs]))

    def input_amax(self, layer: str, recipe: Recipe, dtype: np.dtype) -> np.ndarray | None:
        """Return the tensor amax from which a recipe of activations computes the stored input scale of a layer."""
        if self.contract is None or self.contract.input_scales != "static" or recipe.tensor_scaling != "tensor":
            return None
        scale = self.input_scales.get(layer)
        if scale is None or not 0 < scale.value < np.inf:
            return None
        found = static_amax(scale.value, recipe, dtype, scale.divides)
        if found != UNKNOWN:
            return np.asarray(found)
        with np.errstate(over="ignore"):
            likely = covered_range(recipe) / scale.value if scale.divides else covered_range(recipe) * scale.value
        return np.asarray(np.minimum(likely, FLT_MAX))

    def check(self) -> None:
        """Raise ValueError if the side has only a contract, and this contract does not determine codes alone."""
        contract = self.contract
        if contract is None or not self.makes or self.function is not None:
            return
        why = f"searches block scales ({contract.scale_search})" if contract.scale_search is not None else ""
        why = "does not know the recipe of weights" if "weights" in contract.unknown else why
        if why:
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
        return Side(label, given[0], side.stored, side.function)
    if isinstance(given, Contract):
        return Side(label, given)
    if isinstance(given, (str, Path)):
        contract, stored = FUNCTIONS["parity.open"](given)
        return Side(label, contract, stored)
    if isinstance(given, Mapping):
        return Side(label, None, by_layer(given))
    if callable(given):
        return Side(label, None, None, given)
    raise TypeError(
        f"{OP}: {label} is a {type(given).__name__}; needs a Contract, a path, a mapping of tensors, a function, or a"
        " pair of a Contract and one of the others"
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
    raise TypeError(f"{OP}: {name} is a {type(given).__name__}; needs a path or a mapping of tensors")


def by_layer(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors under the names of their layers: the ending ".weight" is removed from every name that has it."""
    wrong = next((name for name in tensors if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"{OP}: a tensor has the name {wrong!r:.60}; needs a string, the name of a layer")
    if not any(name.endswith(_WEIGHT) for name in tensors):
        return tensors
    return {name.removesuffix(_WEIGHT): tensors[name] for name in tensors}


def as_weights(what: str, given: Any) -> Weights:
    """Convert a Quantized or an array of any library to Weights in host memory, with linear block scales."""
    if isinstance(given, Quantized):
        q = on_host(given, OP)
        if q.axis != len(q.shape) - 1:
            raise ValueError(f"{OP}: {what} is quantized along axis {q.axis}; needs the last axis")
        return Weights(q if q.scale_layout == "linear" else unswizzle(q), None)
    return Weights(None, array_of(what, given))


def array_of(what: str, given: Any) -> np.ndarray:
    """Return an array of NumPy, CuPy, PyTorch or JAX as a NumPy array in host memory, with its dtype and shape."""
    if not hasattr(given, "shape"):
        raise TypeError(f"{OP}: {what} is a {type(given).__name__}; needs an array or a Quantized")
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


def made(x: np.ndarray, recipe: Recipe, amax: Amax) -> Weights:
    """Quantize some rows of a matrix with tensor amaxes of the whole matrix, and return a Quantized in Weights."""
    if recipe.fake_only:
        return Weights(None, faked(x, recipe, amax))
    x, amax, added = _with_measured_nan(x, recipe, amax)
    q: Quantized = quantize(x, recipe, tensor_amax=amax)
    q = box_of(q, (slice(added, len(x)), slice(0, x.shape[1]))) if added else q
    return Weights(as_loaded(q), None)


def faked(x: np.ndarray, recipe: Recipe, amax: Amax) -> np.ndarray:
    """Return the values of fake_quantize for some rows of a matrix. The arguments are those of made()."""
    x, amax, added = _with_measured_nan(x, recipe, amax)
    return np.asarray(fake_quantize(x, recipe, tensor_amax=amax))[added:]


def has_nan(amax: Amax) -> bool:
    """Return whether a tensor amax, or one of several, is NaN. Return False for None."""
    return amax is not None and bool(np.isnan(amax).any())


def _with_measured_nan(x: np.ndarray, recipe: Recipe, amax: Amax) -> tuple[np.ndarray, Amax, int]:
    """Return (x, amax, added) with which quantize computes what the given amax means, also if it is NaN."""
    # If there is one amax for the whole matrix, a block of NaN rows is put before x, because the given rows may have no
    # NaN.
    # ``added`` is the number of these rows, which the caller removes from the result; otherwise 0.
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
