"""Parse the arguments of a public function into a Call.

Parsing imports the arrays, finds the recipe, checks every argument and makes `moved`: a view of x with the quantized
axis last. All operations share these functions. In all of them, op is the name of the public function, with which error
messages begin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_flag, as_index, as_shape, is_one_of
from fp4kit.arrays.imports import import_arrays, import_to_host, is_array
from fp4kit.call import inputs
from fp4kit.formats import FLOATS, Codebook, PairedMicroexponents
from fp4kit.layouts import check_layout, padded_shape
from fp4kit.quantized.container import Quantized, check_scale_layout, packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes import RECIPES, Recipe, recipe_of
from fp4kit.recipes.rules import FAKE_RULES
from fp4kit.recipes.schema import check_nearest, has_tall_scales, is_simple, seeds_of
from fp4kit.reference.stochastic import HADAMARD_BLOCK, TE_SIGN_MASK
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout


def check_float(op: str, x: np.ndarray, name: str = "x") -> None:
    """Raise TypeError unless the dtype of x is float32, float16 or bfloat16. name: the name of x in the message."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} is {x.dtype}; needs float32, float16 or bfloat16; convert it first, so that you choose the"
            f" rounding, with {name}.astype(np.float32), or {name}.float() in PyTorch"
        )


def check_axis(op: str, axis: int, ndim: int) -> int:
    """Return an axis of an array with `ndim` axes as a non-negative int."""
    if ndim == 0:
        raise ValueError(
            f"{op}: x is 0-d; blocks run along an axis, so it needs at least one; pass the elements of at least one"
            " block in one array"
        )
    axis = axis if type(axis) is int else as_index(op, "axis", axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    return axis % ndim


def check_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...] | None:
    """Return the axes of a reduction, an int or a tuple, as a tuple of non-negative ints."""
    if axis is None:
        return None
    axes = tuple(check_axis(op, a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis {axis} names one axis twice; needs different axes")
    return axes


def check_length(op: str, axis: int, length: int, recipe: Recipe) -> None:
    """Raise ValueError unless the quantized axis has a length that the recipe allows."""
    # The length must be a multiple of recipe.length_multiple: whole blocks or, if the recipe has no blocks, whole bytes
    # of codes.
    multiple = recipe.length_multiple
    if length % multiple:
        raise ValueError(
            f"{op}: axis {axis} has length {length}; {recipe.id} needs a multiple of {multiple}; pad with"
            f" fp4kit.layouts.pad(x, {multiple}, axis={axis})"
        )


def check_has_codes(op: str, recipe: Recipe) -> None:
    """Raise ValueError if a recipe only fake-quantizes, because it then has values but no codes."""
    if recipe.fake_only:
        raise ValueError(f"{op}: {recipe.id} is a fake quantizer and has values only; use fp4kit.fake_quantize")


def check_fake_rule(op: str, r: Recipe, rounding: Any) -> None:
    """Raise ValueError if a recipe with a fake_rule that only rounds to nearest gets another rounding."""
    if r.fake_rule and not FAKE_RULES[r.fake_rule].stochastic and not is_one_of(rounding, ("nearest",)):
        raise ValueError(f"{op}: {r.id} rounds to nearest only; got rounding={rounding!r:.60}")


class Declined(NotImplementedError):
    """Signal that an engine cannot compute a call; the message says why.

    An engine raises this error before any work, so that the next engine can be tried.
    """


class QuantizeOptions(NamedTuple):
    """The arguments scale_layout, rounding, seed and hadamard of quantize, not yet checked."""

    scale_layout: ScaleLayout = "linear"
    rounding: RoundingMode = "nearest"
    seed: Any = None
    hadamard: Hadamard = False


class Call(NamedTuple):
    """A parsed call to quantize, fake_quantize, amax or a related function: what an engine needs, already checked.

    Attributes:
        op: the public function, with which error messages begin.
        x: the array as the engine takes it, NumPy or CuPy; or an AbstractArray, if the call is only checked.
        recipe: the Recipe.
        axis: the quantized axis of x, not negative.
        moved: x with the quantized axis last.
        tensor_amax, block_amax: float32 in their canonical shapes, in the memory (host or device) of x; None if they
            are to be computed.
        grad: the gradient for fake_quantize_backward, in the shape of x; None for other operations.
        layout: the layout of block_scale.
        random: None for nearest rounding. For stochastic rounding, what parse_seed returns: a seed, or random numbers
            in the shape of moved.
        mask: sign mask of the Hadamard transform; None for no transform.
        out: a Quantized to write to, or None.
        block_scale: the caller's block scales, uint8 in `layout`; None if the recipe has none or they are to be
            computed.
        tensor_scale: the caller's tensor scale, float32 in its canonical shape; None if the recipe has none, or if it
            is to be computed.
        on_device: whether the arrays are CuPy arrays. It decides which engines are tried.
    """

    op: str
    x: Any
    recipe: Recipe
    axis: int
    moved: Any
    tensor_amax: Any = None
    block_amax: Any = None
    grad: Any = None
    layout: ScaleLayout = "linear"
    random: Any = None
    mask: int | None = None
    out: Quantized | None = None
    block_scale: Any = None
    tensor_scale: Any = None
    on_device: bool = False

    @property
    def has_scales(self) -> bool:
        """True if the caller passed a block_scale or a tensor_scale, so that only codes are computed."""
        return self.block_scale is not None or self.tensor_scale is not None

    def part_specs(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shapes and dtypes of the arrays in the call's result, as {name: (shape, dtype)}."""
        shape, r = self.moved.shape, self.recipe
        specs: dict[str, tuple[tuple[int, ...], Any]] = {"packed": (packed_shape(shape, r), np.dtype(np.uint8))}
        if r.scale is not None:
            scales = scale_shape(shape, r)
            scales = scales if self.layout == "linear" else padded_shape(scales, self.layout)
            specs["block_scale"] = scales, np.dtype(np.uint8)
        if r.tensor_scaling != "none":
            amax_or_scale = self.tensor_amax if self.tensor_scale is None else self.tensor_scale
            tensor_shape = tensor_amax_shape(shape, r) if amax_or_scale is None else amax_or_scale.shape
            names = ("tensor_scale", "tensor_amax") if self.tensor_scale is None else ("tensor_scale",)
            specs |= {name: (tensor_shape, np.dtype(np.float32)) for name in names}
        return specs

    def result_fields(self) -> dict[str, Any]:
        """Return the fields of a call's result that are not arrays, as {name: value}."""
        x = self.x
        return {
            "recipe": self.recipe,
            "shape": x.shape,
            "dtype": x.dtype,
            "axis": self.axis,
            "scale_layout": self.layout,
        }

    def with_array(self, x: Any, out: Quantized | None = None) -> Call:
        """Return a copy of this call for another array x, and with another output `out`."""
        return self._replace(x=x, moved=_axis_last(x, self.axis), out=out)


def array_call(op: str, x: Any, recipe: str | Recipe, axis: int, **arguments: Any) -> tuple[Call, dict[str, Any]]:
    """Import the arrays of a call, and return the pair (Call for x, `arguments` with their arrays imported)."""
    r = RECIPES.get(recipe) if type(recipe) is str else None
    r = recipe_of(op, recipe) if r is None else r
    arrays = {name: a for name, a in arguments.items() if a is not None and is_array(a)}
    if arrays or type(x) is not np.ndarray:
        x, *imported = (x,) if isinstance(x, inputs.AbstractArray) else import_arrays(op, x=x, **arrays)
        arguments |= dict(zip(arrays, imported, strict=True))
    check_float(op, x)
    axis = check_axis(op, axis, x.ndim)
    check_length(op, axis, x.shape[axis], r)
    on_device = not isinstance(x, (np.ndarray, inputs.AbstractArray))
    return Call(op, x, r, axis, _axis_last(x, axis), on_device=on_device), arguments


def _axis_last(a: Any, axis: int) -> Any:
    """Return a view of the array `a` with the axis `axis` moved last."""
    return a if axis == a.ndim - 1 else np.moveaxis(a, axis, -1)


def quantize_call(
    op: str,
    x: Any,
    recipe: str | Recipe,
    axis: int = -1,
    options: QuantizeOptions = QuantizeOptions(),  # noqa: B008  (immutable)
    *,
    out: Quantized | None = None,
    has_codes: bool = True,
    **given: Any,
) -> Call:
    """Check the arguments of quantize or fake_quantize, or of another function that quantizes, and return its Call.

    has_codes: whether the function needs a recipe with codes, as all but fake_quantize do.
    given: the amaxes (tensor_amax, block_amax) or the scales (block_scale, tensor_scale) that the caller passed.
    """
    call, given = array_call(op, x, recipe, axis, **given, seed=options.seed)
    if has_codes:
        check_codes(call, options.scale_layout)
    else:
        check_fake_rule(op, call.recipe, options.rounding)
    block_scale, tensor_scale = given.get("block_scale"), given.get("tensor_scale")
    call = with_options(call, options, given["seed"])
    if block_scale is None and tensor_scale is None:
        call = with_amaxes(call, given.get("tensor_amax"), given.get("block_amax"))
    else:
        if not is_simple(call.recipe):
            raise NotImplementedError(f"{op}: {call.recipe.id} does not quantize under given scales; leave them out")
        inputs.check_complete(op, call.recipe, block_scale, tensor_scale)
        shape, r = call.moved.shape, call.recipe
        block_scale = inputs.parse_block_scale(op, block_scale, shape, r, call.layout)
        tensor_scale = inputs.parse_tensor_amax(op, tensor_scale, shape, r, call.on_device, "tensor_scale")
        if options.hadamard is False and is_impossible(tensor_scale, call.x):
            raise ValueError(f"{op}: tensor_scale holds NaN, although x is finite; needs tensor_scale >= 0")
        call = call._replace(block_scale=block_scale, tensor_scale=tensor_scale)
    if out is not None:
        call = call._replace(out=inputs.import_out(op, out))
        inputs.check_quantized_out(call)
    return call


def is_impossible(tensor_scale: Any, x: Any) -> bool:
    """Return whether a tensor scale is NaN although x is finite. Return False on a device."""
    on_host = isinstance(tensor_scale, np.ndarray) and isinstance(x, np.ndarray)
    with np.errstate(invalid="ignore"):  # a signaling NaN of bfloat16 would warn
        return on_host and bool(np.isnan(tensor_scale).any() and np.isfinite(x).all())


fake_call = partial(quantize_call, has_codes=False)


def backward_call(op: str, grad: Any, x: Any, recipe: str | Recipe, axis: int, amax: Any) -> tuple[Call, Any]:
    """Check the arguments of fake_quantize_backward except for amax."""
    call, imported = array_call(op, x, recipe, axis, grad=grad, amax=amax)
    (grad,) = (imported["grad"],) if isinstance(imported["grad"], type(call.x)) else import_arrays(op, grad=grad)
    check_float(op, grad, "grad")
    if grad.shape != call.x.shape:
        raise ValueError(f"{op}: grad has shape {grad.shape}; needs the shape of x, {call.x.shape}")
    return call._replace(grad=grad), imported["amax"]


def columnwise(call: Call, options: QuantizeOptions) -> Call:
    """Return the columnwise Call of quantize_both (axis -2), given its rowwise Call."""
    axis = check_axis(call.op, -2, call.x.ndim)
    check_length(call.op, axis, call.x.shape[axis], call.recipe)
    return with_options(call._replace(axis=axis, moved=_axis_last(call.x, axis)), options, options.seed)


def with_amaxes(call: Call, tensor_amax: Any, block_amax: Any) -> Call:
    """Return a copy of the call with the caller's amaxes, checked, as float32 and in the memory of x."""
    if tensor_amax is None and call.recipe.tensor_rule == "divisor":
        raise ValueError(
            f"{call.op}: {call.recipe.id} needs the stored divisor as tensor_amax; it is not computed from x"
        )
    if tensor_amax is None and block_amax is None:
        return call._replace(tensor_amax=None, block_amax=None)
    facts = call.moved.shape, call.recipe, call.on_device
    tensor_amax = inputs.parse_tensor_amax(call.op, tensor_amax, *facts)
    return call._replace(tensor_amax=tensor_amax, block_amax=inputs.parse_block_amax(call.op, block_amax, *facts))


def with_options(call: Call, options: QuantizeOptions, seed: Any) -> Call:
    """Return a copy of the call with layout, random and mask set from the options. seed: options.seed, imported."""
    rounding: Any = options.rounding
    is_default = seed is None and type(rounding) is str and rounding == "nearest" and not call.recipe.stochastic_only
    random = None if is_default else _random_source(call, rounding, seed)
    check_hadamard(call.op, options.hadamard)
    if options.hadamard is False:
        return call._replace(layout=options.scale_layout, random=random)
    if call.moved.shape[-1] % HADAMARD_BLOCK:
        raise ValueError(
            f"{call.op}: axis {call.axis} has length {call.moved.shape[-1]}; the Hadamard transform needs a multiple of"
            f" {HADAMARD_BLOCK}"
        )
    mask = TE_SIGN_MASK if options.hadamard is True else 0
    return call._replace(layout=options.scale_layout, random=random, mask=mask)


def check_codes(call: Call, layout: str) -> None:
    """Raise ValueError unless the recipe of the call has codes, and its scales can be stored in `layout`."""
    # The layout must be one that fp4kit knows.
    check_has_codes(call.op, call.recipe)
    if type(layout) is str and layout == "linear":
        return
    check_layout(call.op, layout)
    check_scale_layout(call.op, call.recipe, layout)
    if layout != "linear" and call.x.ndim < 2:
        raise ValueError(f"{call.op}: x is 1-d; {layout} scales need the rows of a matrix; use x.reshape(1, -1)")


def check_hadamard(op: str, hadamard: Any) -> None:
    """Raise ValueError unless the argument hadamard is the bool False or True, or the string "no_signs"."""
    if not isinstance(hadamard, bool) and not is_one_of(hadamard, ("no_signs",)):
        raise ValueError(f"{op}: hadamard is {hadamard!r:.60}; needs False, True or 'no_signs'")


def _random_source(call: Call, rounding: str, seed: Any) -> Any:
    """Return the source of random numbers for a call (its field random), from the arguments rounding and seed."""
    op, r = call.op, call.recipe
    if not is_one_of(rounding, ("nearest", "stochastic")):
        raise ValueError(f"{op}: rounding is {rounding!r:.60}; needs 'nearest' or 'stochastic'")
    if rounding == "nearest":
        if seed is not None:
            why = "seed was given with rounding='nearest', which is deterministic"
            raise ValueError(f"{op}: {why}; pass rounding='stochastic'")
        check_nearest(op, r)
        return None
    is_float = not (r.element.is_integer or isinstance(r.element, Codebook))
    if not is_float or r.four_over_six or not is_simple(r):
        raise ValueError(f"{op}: {r.id} has no stochastic rounding; it needs float elements and one scale per block")
    if seed is None:
        raise ValueError(f"{op}: stochastic rounding needs seed: {seeds_of(r)}")
    random = inputs.parse_seed(op, seed, call.x, r)
    return random if isinstance(random, int) else np.moveaxis(random, call.axis, -1)


@contextmanager
def declined_as_error(op: str) -> Iterator[None]:
    """Turn Declined, raised in the with block, into a NotImplementedError whose message begins with op."""
    try:
        yield
    except Declined as reason:
        raise NotImplementedError(f"{op}: {reason}") from None


HADAMARD_SIZES = (16, 32, 64, 128, 256, 512)
MAX_MATRIX = 128  # the largest number of rows of a matrix that rotates blocks
# The largest accepted absolute value of an element of M M^T - I. If every element of an orthogonal M is rounded to
# bfloat16, M M^T changes by at most 2 * 2^-9 + 2^-18, since each element changes by at most a relative 2^-9.
ORTHOGONAL_WITHIN = 2.0**-7


class Rotation(NamedTuple):
    """A parsed call to hadamard or rotate: what an engine needs, already checked.

    Attributes:
        x: the array, NumPy or CuPy.
        shape: (outer, length, inner), the shape to which the engine reshapes x. `size` elements along the middle axis
            are a block.
        size: the number of elements of a block.
        signs: uint8 (length,) in host memory, 1 for a sign of -1 and 0 for a sign of 1; None if all signs are 1.
        matrices: float32 (1, size, size) for all blocks or (length / size, size, size), contiguous, in host memory;
            None for a Hadamard transform.
        inverse: True if signs are applied after the rotation instead of before. The matrices of an inverse call are
            already transposed.
    """

    x: Any
    shape: tuple[int, int, int]
    size: int
    signs: np.ndarray | None
    matrices: Any
    inverse: bool


def hadamard_call(op: str, x: Any, size: Any, axis: int, signs: Any, inverse: Any) -> Rotation:
    """Check the arguments of a call to hadamard, and return its Rotation."""
    (x,) = import_arrays(op, x=x)
    check_float(op, x)
    return _rotation(op, x, check_hadamard_size(op, size), None, axis, signs, inverse)


def matrix_call(op: str, x: Any, matrices: Any, axis: int, signs: Any, inverse: Any) -> Rotation:
    """Check the arguments of a call to rotate, and return its Rotation."""
    (x,) = import_arrays(op, x=x)
    check_float(op, x)
    matrices = import_to_host(op, matrices=matrices)
    check_float(op, matrices, "matrices")
    shape = matrices.shape
    if len(shape) not in (2, 3) or shape[-1] != shape[-2] or not 1 <= shape[-1] <= MAX_MATRIX:
        raise ValueError(
            f"{op}: matrices has shape {tuple(shape)}; needs (n, n) or (number of blocks, n, n), with n from 1 to"
            f" {MAX_MATRIX}"
        )
    return _rotation(op, x, shape[-1], matrices, axis, signs, inverse)


def check_hadamard_size(op: str, size: Any) -> int:
    """Return the size of a Hadamard transform as an int."""
    size = as_index(op, "size", size)
    if size not in HADAMARD_SIZES:
        raise ValueError(f"{op}: size is {size}; needs 16, 32, 64, 128, 256 or 512")
    return size


def _rotation(op: str, x: Any, size: int, matrices: Any, axis: int, signs: Any, inverse: Any) -> Rotation:
    """Return the Rotation of x by Hadamard transforms of a size, or by matrices with `size` rows."""
    axis, inverse = check_axis(op, axis, x.ndim), as_flag(op, "inverse", inverse)
    outer, length, inner = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    blocks = length // size
    if length % size:
        raise ValueError(
            f"{op}: axis {axis} has length {length}; blocks of {size} need a multiple of {size}; pad with"
            " fp4kit.layouts.pad"
        )
    if matrices is not None:
        if matrices.ndim == 3 and len(matrices) != blocks:
            raise ValueError(
                f"{op}: matrices has {len(matrices)} matrices of {size}x{size}; needs {blocks}, one per block of"
                f" axis {axis} of x, or one matrix ({size}, {size}) for all blocks"
            )
        matrices = matrices.astype(np.float32).reshape(-1, size, size)
        _check_orthogonal(op, matrices)
        matrices = np.ascontiguousarray(matrices.swapaxes(1, 2) if inverse else matrices)
    negative = None if signs is None else _negative(op, signs, size, length)
    if (negative is None or len(negative) == size) and (matrices is None or len(matrices) == 1):
        return Rotation(x, (outer * blocks, size, inner), size, negative, matrices, inverse)
    if negative is not None and len(negative) < length:
        negative = np.tile(negative, blocks)
    return Rotation(x, (outer, length, inner), size, negative, matrices, inverse)


def _check_orthogonal(op: str, matrices: np.ndarray) -> None:
    """Raise ValueError unless every matrix M is orthogonal, as far as bfloat16 can hold orthogonal matrices."""
    wide = matrices.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.max(np.abs(wide @ wide.swapaxes(-1, -2) - np.eye(wide.shape[-1])), initial=0)
    if not error <= ORTHOGONAL_WITHIN:
        raise ValueError(
            f"{op}: matrices is not orthogonal: an element of M M^T - I is {error:.3g}; needs at most"
            f" {ORTHOGONAL_WITHIN}, because the inverse uses the transpose"
        )


def _negative(op: str, signs: Any, size: int, length: int) -> np.ndarray:
    """Return the argument signs of hadamard or rotate as uint8 in its given shape: 1 for the sign -1, and 0 for 1."""
    try:
        found = np.asarray(import_to_host(op, signs=signs) if is_array(signs) else signs, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{op}: signs is {signs!r:.60}; needs numbers, each 1 or -1") from None
    if found.shape not in ((size,), (length,)):
        raise ValueError(
            f"{op}: signs has shape {found.shape}; needs ({size},) for every block or ({length},) for the whole axis"
        )
    if not (np.abs(found) == 1).all():
        raise ValueError(f"{op}: signs holds {found[np.abs(found) != 1][0]:g}; needs 1 or -1")
    return (found < 0).astype(np.uint8)


def check_castable(op: str, r: Recipe) -> None:
    """Raise ValueError if a recipe cannot quantize a shard by itself."""
    if isinstance(r.element, PairedMicroexponents):
        raise ValueError(f"{op}: pairs of {r.element} elements share a bit; use quantize on the whole matrix")
    if r.four_over_six or r.search:
        raise ValueError(f"{op}: {r.id} chooses scales from whole blocks; use quantize on the whole matrix")


def check_shard(op: str, shard: Any, shape: Any, start: Any, r: Recipe) -> tuple[int, int]:
    """Return the shape (M, K) of a shard's matrix as two ints."""
    check_float(op, shard, "shard")
    check_has_codes(op, r)
    if shard.ndim != 1:
        raise ValueError(
            f"{op}: shard is {shard.ndim}-d; needs the 1-d slice of the flattened matrix; use shard.reshape(-1)"
        )
    shape = as_shape(op, shape)
    if len(shape) != 2:
        raise ValueError(f"{op}: shape is {shape}; needs (M, K) of the whole matrix")
    if r.block is None or r.tensor_scaling not in ("none", "tensor"):
        raise ValueError(
            f"{op}: {r.id} has no blocks, or more than one tensor scale; needs blocks and at most one tensor scale, as"
            " nvfp4-te-2d has"
        )
    M, K = shape
    check_length(op, 1, K, r)
    start = as_index(op, "start", start)
    if start < 0 or start + len(shard) > M * K:
        raise ValueError(
            f"{op}: shard is elements [{start}, {start + len(shard)}) of a matrix of {M * K}; needs a slice inside it"
        )
    return M, K


def amax_shape(shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """Return the shape of the block amaxes of a matrix (M, K): (ceil(M / block rows), K / block columns)."""
    return -(-shape[0] // r.block_rows), shape[1] // r.block_size


def square_block(op: str, r: Recipe, length: int) -> int:
    """Return the side length of a recipe's square blocks, such as 16 for blocks of 16x16."""
    rows, size = r.block or (1, 1)
    if has_tall_scales(r):
        raise ValueError(f"{op}: {r.id} has float32 scales; needs block scales of one byte, such as nvfp4-te-2d's")
    if rows != size or size == 1:
        raise ValueError(f"{op}: {r.id} has {rows}x{size} blocks; needs square blocks, such as nvfp4-te-2d's 16x16")
    if length % size:
        raise ValueError(f"{op}: the other axis has length {length}; needs a multiple of {size}")
    return size


class Partition(NamedTuple):
    """The first and last elements of the shards of all processes. Each process owns one shard of each matrix.

    A shard is a range of elements of a flattened matrix, and may be empty.

    Attributes:
        starts, ends: int64 (processes, matrices), the index of the first element of each shard in its flattened
            matrix, and the index after its last element.
    """

    starts: np.ndarray
    ends: np.ndarray

    def pieces(self, unit: int) -> np.ndarray:
        """Return how many units of ``unit`` elements each shard touches: int64 (processes, matrices)."""
        return -(-self.ends // unit) - self.starts // unit

    def offsets(self, unit: int) -> np.ndarray:
        """Return how many units of ``unit`` elements precede each shard in the memory of its process."""
        lengths = self.pieces(unit)
        return np.cumsum(lengths, axis=1) - lengths

    def split(self, count: int) -> list[Partition]:
        """Divide what each process owns into ``count`` parts, one Partition per part; end parts have half the size."""
        total, cut = self.pieces(1).sum(axis=1, keepdims=True), np.arange(-1, 2 * count, 2)[:, None, None]
        whole = max(2 * count - 2, 1)
        edges = self.starts + np.clip(total * np.clip(cut, 0, whole) // whole - self.offsets(1), 0, self.pieces(1))
        return [*map(Partition, edges[:-1], edges[1:])]


_PLURALS = {"x": "xs", "grad": "grads"}
_ARGUMENT = re.compile(r"(x|grad|tensor_amax|block_amax|amax)\b")


def each(op: str, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Call a function once per tensor of a group: return [function(*entries) for entries in zip(*columns)].

    An error names the tensor that caused it: "quantize: x is 0-d" of tensor 2 becomes "OP: xs[2] is 0-d".
    """
    results: list[Any] = []
    try:
        for entries in zip(*columns, strict=True):
            results.append(function(*entries))
    except (TypeError, ValueError, NotImplementedError) as error:
        i, text = len(results), re.sub(r"^\w+: ", "", str(error))
        if argument := _ARGUMENT.match(text):
            name = argument.group()
            text = f"{_PLURALS.get(name, name)}[{i}]{text[len(name) :]}"
        else:
            text = f"xs[{i}]: {text}"
        raise type(error)(f"{op}: {text}") from error
    return results
