"""Parse the arguments of a public function into a Call.

Parsing imports the arrays, finds the recipe, checks every argument and makes `moved`: a view of x with the quantized
axis last. All operations share these functions. In all of them, op is the name of the public function, with which error
messages begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.arrays.imports import import_arrays, is_array
from fp4kit.call.abstract_array import AbstractArray
from fp4kit.call.amaxes import parse_block_amax, parse_tensor_amax
from fp4kit.call.checks import check_axis, check_float, check_has_codes, check_length
from fp4kit.call.given_scales import check_complete, parse_block_scale, parse_tensor_scale
from fp4kit.call.outputs import check_quantized_out, import_out
from fp4kit.call.random_numbers import parse_seed
from fp4kit.formats import Codebook
from fp4kit.layouts import check_layout
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, recipe_of
from fp4kit.recipes.rules import SCALE_STOCHASTICS
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout

HADAMARD_BLOCK = 16
TE_SIGN_MASK = 0xD7E8  # Transformer Engine's signs: if bit i is set, input i of a block is negated
SEED_WITHOUT_USE = "seed was given with rounding='nearest', which is deterministic; pass rounding='stochastic'"


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

    def with_array(self, x: Any, out: Quantized | None = None) -> Call:
        """Return a copy of this call for another array x, and with another output `out`."""
        return self._replace(x=x, moved=_axis_last(x, self.axis), out=out)


def array_call(op: str, x: Any, recipe: str | Recipe, axis: int, **arguments: Any) -> tuple[Call, dict[str, Any]]:
    """Import the arrays of a call, and return the pair (Call for x, `arguments` with their arrays imported)."""
    r = RECIPES.get(recipe) if type(recipe) is str else None
    r = recipe_of(op, recipe) if r is None else r
    arrays = {name: a for name, a in arguments.items() if a is not None and is_array(a)}
    if arrays or type(x) is not np.ndarray:
        x, *imported = (x,) if isinstance(x, AbstractArray) else import_arrays(op, x=x, **arrays)
        arguments |= dict(zip(arrays, imported, strict=True))
    check_float(op, x)
    axis = check_axis(op, axis, x.ndim)
    check_length(op, axis, x.shape[axis], r)
    on_device = not isinstance(x, (np.ndarray, AbstractArray))
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
    tensor_amax: Any = None,
    block_amax: Any = None,
    out: Quantized | None = None,
) -> Call:
    """Check the arguments of an operation that returns codes, such as quantize, and return its Call."""
    arrays = {"tensor_amax": tensor_amax, "block_amax": block_amax, "seed": options.seed}
    call, imported = array_call(op, x, recipe, axis, **arrays)
    check_codes(call, options.scale_layout)
    call = with_amaxes(
        with_options(call, options._replace(seed=imported["seed"])), imported["tensor_amax"], imported["block_amax"]
    )
    if out is not None:
        call = call._replace(out=import_out(op, out))
        check_quantized_out(call)
    return call


def call_with_scales(
    op: str,
    x: Any,
    recipe: str | Recipe,
    axis: int,
    options: QuantizeOptions,
    block_scale: Any,
    tensor_scale: Any,
    out: Quantized | None,
) -> Call:
    """Check the arguments of quantize for a caller who passes scales instead of amaxes, and return the Call."""
    # `out` must have been imported already (import_out).
    arrays = {"block_scale": block_scale, "tensor_scale": tensor_scale, "seed": options.seed}
    call, imported = array_call(op, x, recipe, axis, **arrays)
    check_codes(call, options.scale_layout)
    check_complete(op, call.recipe, block_scale, tensor_scale)
    call = with_options(call, options._replace(seed=imported["seed"]))
    shape, r = call.moved.shape, call.recipe
    call = call._replace(
        out=out,
        block_scale=parse_block_scale(op, imported["block_scale"], shape, r, call.layout),
        tensor_scale=parse_tensor_scale(op, imported["tensor_scale"], shape, r, call.on_device),
    )
    if out is not None:
        check_quantized_out(call)
    return call


def fake_call(
    op: str,
    x: Any,
    recipe: str | Recipe,
    axis: int,
    options: QuantizeOptions,
    *,
    tensor_amax: Any = None,
    block_amax: Any = None,
) -> Call:
    """Check the arguments of an operation that returns fake-quantized values, and return its Call."""
    arrays = {"tensor_amax": tensor_amax, "block_amax": block_amax, "seed": options.seed}
    call, imported = array_call(op, x, recipe, axis, **arrays)
    call = with_options(call, options._replace(seed=imported["seed"]))
    return with_amaxes(call, imported["tensor_amax"], imported["block_amax"])


def any_call(
    op: str,
    x: Any,
    recipe: str | Recipe,
    axis: int,
    options: QuantizeOptions = QuantizeOptions(),  # noqa: B008  (immutable)
    **amaxes: Any,
) -> Call:
    """Check the arguments of an operation that accepts every recipe, such as explain, and return its Call."""
    call = fake_call(op, x, recipe, axis, options, **amaxes)
    return call if call.recipe.fake_only else quantize_call(op, x, recipe, axis, options, **amaxes)


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
    return with_options(call._replace(axis=axis, moved=_axis_last(call.x, axis)), options)


def with_amaxes(call: Call, tensor_amax: Any, block_amax: Any) -> Call:
    """Return a copy of the call with the caller's amaxes, checked, as float32 and in the memory of x."""
    if tensor_amax is None and block_amax is None:
        return call._replace(tensor_amax=None, block_amax=None)
    op, shape, r = call.op, call.moved.shape, call.recipe
    tensor = parse_tensor_amax(op, tensor_amax, shape, r, call.on_device)
    return call._replace(tensor_amax=tensor, block_amax=parse_block_amax(op, block_amax, shape, r, call.on_device))


def with_options(call: Call, options: QuantizeOptions) -> Call:
    """Return a copy of the call with its fields layout, random and mask set from the options."""
    rounding: Any = options.rounding
    is_default = options.seed is None and type(rounding) is str and rounding == "nearest"
    random = None if is_default else _random_source(call, rounding, options.seed)
    return call._replace(layout=options.scale_layout, random=random, mask=_sign_mask(call, options.hadamard))


def check_codes(call: Call, layout: str) -> None:
    """Raise ValueError unless the recipe of the call has codes, and its scales can be stored in `layout`."""
    # The layout must be one that fp4kit knows.
    check_has_codes(call.op, call.recipe)
    if type(layout) is str and layout == "linear":
        return
    check_layout(call.op, layout)
    if layout != "linear" and call.x.ndim < 2:
        raise ValueError(f"{call.op}: x is 1-d; {layout} scales need the rows of a matrix; use x.reshape(1, -1)")


def check_hadamard(op: str, hadamard: Any) -> None:
    """Raise ValueError unless the argument hadamard is the bool False or True, or the string "no_signs"."""
    if not isinstance(hadamard, bool) and not is_one_of(hadamard, ("no_signs",)):
        raise ValueError(f"{op}: hadamard is {hadamard!r:.60}; needs False, True or 'no_signs'")


def _sign_mask(call: Call, hadamard: Hadamard) -> int | None:
    """Return the sign mask of the Hadamard transform: Transformer Engine's for True, 0 for "no_signs", None for
    False.
    """
    check_hadamard(call.op, hadamard)
    if hadamard is False:
        return None
    length = call.moved.shape[-1]
    if length % HADAMARD_BLOCK:
        raise ValueError(
            f"{call.op}: axis {call.axis} has length {length}; the Hadamard transform needs a multiple of"
            f" {HADAMARD_BLOCK}"
        )
    return TE_SIGN_MASK if hadamard is True else 0


def _random_source(call: Call, rounding: str, seed: Any) -> Any:
    """Return the source of random numbers for a call (its field random), from the arguments rounding and seed."""
    op, r = call.op, call.recipe
    if not is_one_of(rounding, ("nearest", "stochastic")):
        raise ValueError(f"{op}: rounding is {rounding!r:.60}; needs 'nearest' or 'stochastic'")
    if rounding == "nearest":
        if seed is not None:
            raise ValueError(f"{op}: {SEED_WITHOUT_USE}")
        return None
    if r.element.is_integer or r.four_over_six or isinstance(r.element, Codebook):
        raise ValueError(f"{op}: {r.id} has no stochastic rounding; it needs float elements and one scale per block")
    if seed is None:
        numbers = "numbers from 0 to 1 in the shape of x"
        needed = {"comfyui_nvfp4": f"an int, or {numbers}", "comfyui_nvfp4_cuda": numbers}
        bytes_too = "an int" + ", or random bytes (uint8, shape of x)" * (r.stochastic not in SCALE_STOCHASTICS)
        array = needed.get(r.stochastic, bytes_too)
        raise ValueError(f"{op}: stochastic rounding needs seed: {array}")
    random = parse_seed(op, seed, call.x, r)
    return random if isinstance(random, int) else np.moveaxis(random, call.axis, -1)


@contextmanager
def declined_as_error(op: str) -> Iterator[None]:
    """Turn Declined, raised in the with block, into a NotImplementedError whose message begins with op."""
    try:
        yield
    except Declined as reason:
        raise NotImplementedError(f"{op}: {reason}") from None
