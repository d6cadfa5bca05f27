"""Check the arrays that a caller passes beside x: amaxes, scales, seeds, Quantized arrays and `out`.

The canonical shape of a tensor_amax depends on the recipe. For an array (..., K), with the quantized axis last, it is
() for the whole tensor, (E,) for one entry per expert, (...) for one entry per row, and (..., K / block) per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_float32, as_index
from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.arrays.returns import library_of
from fp4kit.formats import E4M3, E8M0, FLOATS
from fp4kit.layouts import padded_shape
from fp4kit.quantized import container
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.rules import COMFYUI_STOCHASTICS, SCALE_STOCHASTICS
from fp4kit.recipes.schema import by_divisor, takes_divisor

TAKE_DIVISORS = "nvfp4-compressed-tensors-static, nvfp4-vllm-static-divisor or nvfp4-vllm-emulation"


@dataclass(frozen=True)
class AbstractArray:
    """An array without values: only its shape and dtype are known. Calls can be checked with it in place of an array.

    Each length is an int, or a compiler's symbol that supports the arithmetic of ints.
    """

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        return prod(self.shape)

    def reshape(self, *shape: Any) -> AbstractArray:
        """Return a new AbstractArray with the given shape."""
        return replace(self, shape=shape[0] if isinstance(shape[0], tuple) else shape)

    def repeat(self, count: Any, axis: int) -> AbstractArray:
        """Return an AbstractArray whose length along an axis is multiplied by count, as np.repeat does."""
        return replace(self, shape=(*self.shape[:axis], self.shape[axis] * count, *self.shape[axis + 1 :]))

    def transpose(self, order: Any) -> AbstractArray:
        """Return an AbstractArray with its axes in the given order. np.moveaxis calls this method."""
        return replace(self, shape=tuple(self.shape[axis] for axis in order))


def description(value: Any) -> str:
    """Return text that describes a wrong value in a message."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{type(value).__module__}.{type(value).__name__} {value.dtype} {value.shape}"


def parse_tensor_amax(
    op: str, given: Any, moved_shape: tuple[int, ...], recipe: Recipe, on_device: bool, name: str = "tensor_amax"
) -> Any:
    """Return the caller's tensor_amax or tensor_scale (name), or None if it is None or the recipe has none.

    The result is float32 in its canonical shape, in the memory of x.
    """
    if given is None or (recipe.tensor_scaling == "none" and name == "tensor_scale"):
        return None
    if recipe.tensor_scaling == "none":
        raise ValueError(f"{op}: tensor_amax was given, but {recipe.id} has no tensor scale; leave it out")
    if on_device and isinstance(given, imports.cupy().ndarray):  # not read, because that would wait for the device
        _check_on_device(op, name, given)
        found = reshape_amax(op, given, moved_shape, recipe, name)
        return found if found.flags.c_contiguous else found.copy()
    found = check_tensor_amax(op, given, moved_shape, recipe, name)
    return imports.to_device(found) if on_device else found


def by_input_global_scale(
    op: str, recipe: Any, scale: Any, tensor_amax: Any, name: str = "input_global_scale"
) -> tuple[Recipe, np.float32]:
    """Return the recipe and the tensor_amax with which an operation uses a stored divisor, input_global_scale."""
    r = recipe_of(op, recipe)
    if tensor_amax is not None:
        raise ValueError(f"{op}: tensor_amax and input_global_scale are both given; needs one of them")
    if not takes_divisor(r):
        raise ValueError(f"{op}: {r.id} takes no {name.partition('[')[0]}; needs a recipe such as {TAKE_DIVISORS}")
    return by_divisor(r), check_divisor(op, name, scale)


def check_limit(op: str, pass_through: Any, amax: Any, by_divisor: bool = False) -> None:
    """Raise ValueError if gradients that are not clipped have a limit, or clipped ones have none, because a stored
    divisor takes the place of the amax.
    """
    if amax is not None and pass_through is True:
        raise ValueError(
            f"{op}: amax clips gradients, but pass_through is True; pass pass_through=False, or tensor_amax, which sets"
            " the scale"
        )
    if by_divisor and pass_through is False and amax is None:
        raise ValueError(f"{op}: pass_through is False, but input_global_scale gives no amax to clip by; pass amax too")


def check_divisor(op: str, name: str, scale: Any) -> np.float32:
    """Return a stored scale as float32, or raise an error unless it is a positive, finite number."""
    found = as_float32(op, name, scale, "needs a number, or an array of one element")
    if not (found > 0 and np.isfinite(found)):
        raise ValueError(f"{op}: {name} is {scale!s:.60}; needs a positive float32 number")
    return found


def _check_on_device(op: str, name: str, array: Any) -> None:
    if array.dtype != np.float32:
        raise TypeError(f"{op}: {name} is {array.dtype}; needs float32, because x is on a GPU")


def check_tensor_amax(
    op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe, name: str = "tensor_amax"
) -> Any:
    """Return a tensor_amax or tensor_scale (name) in host memory, checked, as float32 in its canonical shape."""
    found = reshape_amax(op, as_real(op, name, amax), moved_shape, recipe, name)
    if isinstance(found, AbstractArray):
        return found
    is_amax = name == "tensor_amax"
    bad = ~(found >= 0) if is_amax or recipe.tensor_rule in container.NEVER_NAN else found < 0
    if bad.any():
        what = "NaN" if np.isnan(found[bad]).any() else "negative"
        needed = "amax" if is_amax else name
        raise ValueError(f"{op}: {name} holds {int(bad.sum())} {what} value(s) of {found.size}; needs {needed} >= 0")
    return without_sign(found) if is_amax else found


def without_sign(amax: np.ndarray) -> np.ndarray:
    """Return a copy of float32 amaxes without sign bits: -0 becomes 0, so that its sign does not spread to scales."""
    # Integer arithmetic clears the bits, because float arithmetic could flush subnormals to zero.
    return np.asarray(amax.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)


@ieee("amax")
def as_real(op: str, name: str, amax: Any) -> Any:
    """Return a real number or array, the argument `name` of the public function `op`, as a new float32 array."""
    array = amax if isinstance(amax, AbstractArray) else np.asarray(amax)
    if array.dtype.kind not in "fiu" and array.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {array.dtype}; needs a real number or a float array")
    if isinstance(array, AbstractArray):
        return AbstractArray(array.shape, np.dtype(np.float32))
    with np.errstate(all="ignore"):
        found = array.astype(np.float32)
        if array.itemsize > found.itemsize and (overflows := np.isinf(found) & np.isfinite(array)).any():
            raise ValueError(f"{op}: {name} holds {array[overflows][0]!s:.60}; needs numbers that float32 holds")
        return found


def check_clip_amax(op: str, amax: Any) -> Any:
    """Return the clip limit of a gradient (the argument amax of fake_quantize_backward) as float32, not reshaped."""
    # NaN is allowed: it makes the gradient 0, because no comparison |x| <= NaN holds.
    amax = as_real(op, "amax", amax)
    if isinstance(amax, AbstractArray):
        return amax
    with np.errstate(invalid="ignore"):
        negative = int(np.count_nonzero(amax < 0))
    if negative:
        raise ValueError(
            f"{op}: amax holds {negative} negative value(s) of {amax.size}; needs amax >= 0, such as fp4kit.amax(x)"
        )
    return amax


def reshape_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe, name: str = "tensor_amax") -> Any:
    """Return a tensor_amax or tensor_scale, reshaped to its canonical shape."""
    canonical = container.tensor_amax_shape(moved_shape, recipe)
    allowed = [canonical]
    if recipe.tensor_scaling == "tensor":
        if amax.size == 1:
            return amax.reshape(())
        allowed = [(), (moved_shape[0],)] if len(moved_shape) > 2 else [()]
    shape = container.fitting_shape(amax.shape, allowed)
    if shape is not None:
        return amax.reshape(shape)
    if recipe.tensor_scaling == "block" and container.in_order(amax.shape, canonical):
        return amax.reshape(canonical)
    raise ValueError(f"{op}: {name} has shape {amax.shape}; {recipe.id} needs {' or '.join(map(str, allowed))}")


# The operations that accept block amaxes for recipes that are not static, too; grouped kernels read only static ones.
OPERATIONS_WITH_BLOCK_AMAXES = ("quantize", "fake_quantize", "explain")


def takes_e8m0_amaxes(r: Recipe) -> bool:
    """Return whether recipe r accepts block amaxes for its E8M0 scales, such as those that search_scales finds."""
    chooses_scales = r.specification_only or r.fake_only or r.fake_rule or r.search or r.four_over_six
    return r.scale == E8M0 and r.block_rows == 1 and r.tensor_scaling == "none" and not chooses_scales


def parse_block_amax(op: str, given: Any, moved_shape: tuple[int, ...], recipe: Recipe, on_device: bool) -> Any:
    """Return the caller's block amaxes as float32 (..., K/block), or None if the caller passed none."""
    if given is None:
        return None
    is_custom = recipe.is_custom and recipe.block_rule is not None and recipe.block_rows == 1
    takes = (is_custom or takes_e8m0_amaxes(recipe)) and op in OPERATIONS_WITH_BLOCK_AMAXES
    if not (takes or recipe.static):
        raise ValueError(
            f"{op}: block_amax was given, but {recipe.id} computes it from x; leave it out, or use a recipe that"
            " accepts it, such as nvfp4-modelopt-static"
        )
    shape = (*moved_shape[:-1], moved_shape[-1] // recipe.block_size)
    if on_device:
        is_float32 = isinstance(given, imports.cupy().ndarray) and given.dtype == np.float32
        if not is_float32 or not container.in_order(given.shape, shape):
            raise ValueError(
                f"{op}: block_amax is {description(given)}; needs a float32 CuPy array of shape {shape}, because x is"
                " on a GPU"
            )
        return given.reshape(shape)
    amax = as_real(op, "block_amax", given)
    if not container.in_order(amax.shape, shape):
        raise ValueError(f"{op}: block_amax has shape {amax.shape}; {recipe.id} needs {shape}")
    if isinstance(amax, AbstractArray):
        return amax.reshape(shape)
    if not (amax >= 0).all():
        raise ValueError(f"{op}: block_amax holds NaN or negative values; needs amax >= 0")
    return without_sign(amax).reshape(shape)


def clip_amax(call: Any, given: Any) -> Any:
    """Return the clip limit of a gradient, checked and in the memory (host or device) of x; None if `given` is None."""
    if given is None:
        return None
    if call.on_device and isinstance(given, type(call.x)):
        _check_on_device(call.op, "amax", given)
        return reshape_clip_amax(given, call)
    host = reshape_clip_amax(check_clip_amax(call.op, given), call)
    return imports.to_device(host) if call.on_device else host


def reshape_clip_amax(amax: Any, call: Any) -> Any:
    """Return the clip limits of a gradient in one of three shapes: (1, 1), (rows, 1) or (rows, blocks)."""
    lead = call.moved.shape[:-1]
    rows = prod(lead)
    blocks = container.scale_shape(call.moved.shape, call.recipe)[-1]
    if amax.size == 1:
        return amax.reshape(1, 1)
    if amax.shape == (rows, 1) or (amax.shape[: len(lead)] == lead and amax.size == rows):
        return amax.reshape(rows, 1)
    if call.recipe.tensor_scaling == "tensor" and len(lead) > 1 and amax.shape[:1] == lead[:1] and amax.size == lead[0]:
        return amax.reshape(lead[0], 1).repeat(prod(lead[1:]), axis=0)
    if call.recipe.block and amax.size == rows * blocks:
        return amax.reshape(rows, blocks)
    raise ValueError(
        f"{call.op}: amax has shape {amax.shape}; x {call.x.shape} needs (), {lead} (rows) or {(*lead, blocks)}"
        " (blocks)"
    )


_FLOAT8 = {E4M3: np.dtype(ml_dtypes.float8_e4m3fn), E8M0: np.dtype(ml_dtypes.float8_e8m0fnu)}


def check_complete(op: str, r: Recipe, block_scale: Any, tensor_scale: Any) -> None:
    """Raise ValueError unless the caller passed exactly the scales that the recipe has: block, tensor, or both."""
    has = {"block_scale": r.scale is not None, "tensor_scale": r.tensor_scaling != "none"}
    given = {"block_scale": block_scale is not None, "tensor_scale": tensor_scale is not None}
    for name, is_given in given.items():
        if is_given and not has[name]:
            raise ValueError(f"{op}: {name} was given, but {r.id} has none; leave it out")
    for name, is_given in given.items():  # in a loop of its own: now the recipe has every scale that was given
        if has[name] and not is_given:
            other = next(iter(given.keys() - {name}))
            way = ", or tensor_amax, from which both follow" if other == "tensor_scale" else ", or neither"
            raise ValueError(f"{op}: {other} was given without {name}; {r.id} has both; give both scales{way}")


def parse_block_scale(op: str, given: Any, moved_shape: tuple[int, ...], r: Recipe, layout: str) -> Any:
    """Return the caller's block_scale as uint8 bit patterns, not copied; None if the recipe has no block scales."""
    if r.scale is None:
        return None
    shape = padded_shape(container.scale_shape(moved_shape, r), layout)
    float8 = _FLOAT8.get(r.scale)
    if not hasattr(given, "dtype") or given.dtype not in ((np.uint8,) if float8 is None else (np.uint8, float8)):
        got = getattr(given, "dtype", None) or type(given).__name__
        needed = f"uint8 bit patterns of {r.scale}" + ("" if float8 is None else f", or {float8}")
        hint = "; amaxes, such as those of search_scales, are passed as block_amax" if got == np.float32 else ""
        raise TypeError(f"{op}: block_scale is {got}; {r.id} needs {needed}{hint}")
    if given.shape != shape:
        raise ValueError(f"{op}: block_scale has shape {given.shape}; {r.id} of {moved_shape} needs {shape}, {layout}")
    container.check_codes(op, "block_scale", given, r.scale)
    return given.view(np.uint8)


def check_seed(op: str, seed: Any, most: int = 2**64 - 1) -> int:
    """Return a seed as an int. Raise ValueError unless it is from 0 to `most`."""
    number = as_index(op, "seed", seed)
    if not 0 <= number <= most:
        raise ValueError(f"{op}: seed is {number}; needs 0 to 2^64 - {2**64 - most}")
    return number


def parse_seed(op: str, seed: Any, x: Any, recipe: Recipe) -> Any:
    """Return the source of randomness for stochastic rounding of x: a seed (an int), or random numbers in x's shape."""
    as_numbers = recipe.stochastic in COMFYUI_STOCHASTICS
    if getattr(seed, "ndim", 0) and hasattr(seed, "dtype"):
        if recipe.stochastic in SCALE_STOCHASTICS:
            raise ValueError(f"{op}: seed is an array; {recipe.id} needs an int, because scales are random too")
        if as_numbers:
            return _random_numbers(op, seed, x, recipe)
        if seed.dtype != np.uint8 or seed.shape != x.shape:
            got = f"{seed.dtype} {seed.shape}"
            raise ValueError(f"{op}: seed is {got}; random bytes need uint8 {x.shape}, or pass an int")
        return seed
    number = check_seed(op, seed)
    if recipe.stochastic == "comfyui_nvfp4_cuda":
        raise ValueError(
            f"{op}: seed is {number}; {recipe.id} needs the numbers that torch.rand gives, because those of a seed"
            " depend on the GPU"
        )
    if recipe.stochastic in ("te", *SCALE_STOCHASTICS) or isinstance(x, AbstractArray):
        return number
    words = torch_words(number, x.size).reshape(x.shape)
    numbers = (words & 0xFFFFFF).astype(np.float32) * np.float32(2**-24) if as_numbers else words.astype(np.uint8)
    if isinstance(x, np.ndarray):
        return numbers
    with imports.making_current(x.device.id):
        return imports.to_device(numbers)


def torch_words(seed: int, count: int) -> np.ndarray:
    """Return the first `count` 32-bit words that PyTorch's CPU generator draws after torch.manual_seed(seed)."""
    return np.frombuffer(np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * count), "<u4")


@ieee("quantize")
def _random_numbers(op: str, seed: Any, x: Any, recipe: Recipe) -> Any:
    """Check the random numbers that a caller passed, and return them as float32."""
    if seed.dtype not in (np.dtype(np.float32), x.dtype) or seed.shape != x.shape:
        raise ValueError(
            f"{op}: seed is {seed.dtype} {seed.shape}; {recipe.id} needs numbers as torch.rand gives them, {x.dtype}"
            f" {x.shape}" + ", or an int" * (recipe.stochastic == "comfyui_nvfp4")
        )
    if isinstance(seed, AbstractArray):
        return seed
    if not isinstance(seed, np.ndarray):
        with imports.making_current(seed.device.id):
            if seed.dtype == ml_dtypes.bfloat16:  # CuPy does not convert it
                return (seed.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
            return seed.astype(np.float32, copy=False)
    numbers = seed.astype(np.float32)
    bad = int(np.count_nonzero(~((numbers >= 0) & (numbers < 1))))
    if bad:
        raise ValueError(f"{op}: seed holds {bad} number(s) of {seed.size} outside 0 to 1; needs 0 <= r < 1")
    return numbers


# out ------------------------------------------------------------------------------------------------------------------
# The memory that a call writes must be disjoint from the memory that it reads, because an engine may write part of a
# result before it has read all inputs. The span of an array is the range of addresses from its first byte to its last.

ALIGNMENT = 16  # bytes: the largest store of a kernel


def check_out(op: str, name: str, out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise an error unless `out` is a writable NumPy array of this shape and dtype."""
    # The error is TypeError for anything that is not a NumPy array, and ValueError otherwise.
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{op}: {name} is {type(out).__name__}; needs a NumPy array, as x is")
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"{op}: {name} is {out.dtype} {out.shape}; needs {np.dtype(dtype)} {tuple(shape)}")
    if not out.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; needs a writable array")


def import_out(op: str, out: Any) -> Any:
    """Return the caller's `out`, an array or a Quantized, as a NumPy or CuPy array or a Quantized of such arrays."""
    library = library_of(out)
    if library is not None and not library.is_mutable:
        raise TypeError(f"{op}: out is an array of {library.name}, which cannot be written to; call without out")
    if isinstance(out, container.Quantized):
        imported = out.imported()
        for name, part in imported.parts().items():
            _check_places(op, f"out.{name}", part)
        return imported
    imported = out if library is None else imports.import_arrays(op, out=out)[0]
    _check_places(op, "out", imported)
    return imported


def _check_places(op: str, name: str, array: Any) -> None:
    """Raise ValueError if two elements of an output array share memory, as in an expanded tensor."""
    if not hasattr(array, "flags") or array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        return  # CuPy arrays have no such flag, and can always be written to
    if imports.overlaps_itself(array.shape, array.strides, array.dtype.itemsize):
        found = f"shape {array.shape}, strides {array.strides}"
        raise ValueError(
            f"{op}: {name} has elements that share memory, {found}; needs one place in memory for each element"
        )


def check_values_out(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, like: Any) -> None:
    """Raise an error unless `out`, the output of dequantize, is an array to which the values can be written."""
    if isinstance(like, np.ndarray):
        check_out(op, "out", out, shape, dtype)
    elif not isinstance(out, type(like)) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{op}: out is {description(out)}; needs a CuPy array of {dtype} {shape}")
    elif out.device != like.device:
        raise ValueError(f"{op}: out is on {out.device}; needs {like.device}, where q is")


def check_quantized_out(call: Any) -> None:
    """Raise an error unless the result of a call can be written to call.out, a Quantized."""
    op, out = call.op, call.out
    container.check_is_quantized(op, out, "out")
    for name, value in call.result_fields().items():
        if getattr(out, name) != value:
            text = repr if name == "recipe" else str  # str(recipe) takes many lines
            raise ValueError(f"{op}: out has {name} {text(getattr(out, name))}; needs {text(value)}")
    if call.tensor_scale is not None and out.tensor_amax is not None:
        raise ValueError(
            f"{op}: out has a tensor_amax, which a given tensor_scale does not determine; pass"
            " dataclasses.replace(out, tensor_amax=None)"
        )
    specs = call.part_specs()
    outputs = {f"out.{name}": getattr(out, name) for name in specs}
    for (name, array), (shape, dtype) in zip(outputs.items(), specs.values(), strict=True):
        if call.on_device:
            _check_device_out(op, name, array, shape, dtype, call.x)
        else:
            check_out(op, name, array, shape, dtype)
    names = ("block_amax", "block_scale", "tensor_scale", "tensor_amax")
    inputs = {"x": call.x, "seed": call.random} | {name: getattr(call, name) for name in names}
    check_disjoint(op, inputs, outputs)


def _check_device_out(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype, x: Any) -> None:
    """Raise ValueError unless a kernel can write to `array`, an output whose name in the message is `name`."""
    # The array must be a contiguous CuPy array of this shape and dtype on the device of x.
    fits = isinstance(array, type(x)) and (array.shape, array.dtype, array.device) == (shape, dtype, x.device)
    if not fits or not array.flags.c_contiguous:
        needed = f"a contiguous CuPy array of {dtype} {shape} on the device of x"
        raise ValueError(f"{op}: {name} is {description(array)}; needs {needed}")
    if array.ndim and array.data.ptr % ALIGNMENT:
        raise ValueError(f"{op}: {name} is at address {array.data.ptr:#x}; needs a multiple of {ALIGNMENT}")


def empty_quantized(call: Any, amax: Any, empty: Any, empty_scales: Any) -> container.Quantized:
    """Return a new Quantized for the result of a call, with uninitialized codes and scales, and `amax` as
    tensor_amax.
    """
    r, shape = call.recipe, call.moved.shape
    packed = empty(container.packed_shape(shape, r), np.uint8)
    scales = None if r.scale is None else empty_scales(container.scale_shape(shape, r), call.layout)
    decode_scale = None if amax is None else empty(amax.shape, np.float32)
    return container.Quantized(
        packed, scales, decode_scale, amax, call.x.shape, call.x.dtype, call.axis, r, call.layout
    )


_MAX_WORK = 1000  # limit of NumPy's search for a shared byte; if it is reached, the arrays count as sharing memory


def check_disjoint(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raise ValueError if an output shares memory with an input or with another output."""
    # An output named "out.NAME" may share memory with the input "NAME", such as tensor_scale, because the call writes
    # there only the values that it has read from there.
    pairs = [(name, other) for name in outputs for other in inputs if name != f"out.{other}"]
    arrays = {**inputs, **outputs}
    for name, other in [*pairs, *((second, first) for first, second in combinations(outputs, 2))]:
        if shares_memory(arrays[other], arrays[name]):
            raise ValueError(
                f"{op}: {name} shares memory with {other}, which is read or written too; needs memory of its own"
            )


class _OccupiedMemory(NamedTuple):
    """The memory that a Quantized occupies."""

    arrays: tuple[Any, ...]  # without those that are None
    spans: tuple[tuple[int, int], ...]  # on a device: of each array; () in host memory
    whole: tuple[int, int]  # on a device: the span that contains all arrays; (0, 0) in host memory
    parts_are_disjoint: bool


# The memory of each Quantized that cached calls have written to or read from.
_MEMORIES: WeakKeyDictionary[container.Quantized, _OccupiedMemory] = WeakKeyDictionary()


def _memory_of(q: container.Quantized) -> _OccupiedMemory:
    """Return the memory that the arrays of a Quantized occupy."""
    memory = _MEMORIES.get(q)
    if memory is None:
        arrays = tuple(part for part in q.parts().values() if part is not None)
        disjoint = not any(shares_memory(*pair) for pair in combinations(arrays, 2))
        spans = () if isinstance(q.packed, np.ndarray) else tuple(map(_span, arrays))
        whole = min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)
        memory = _MEMORIES[q] = _OccupiedMemory(arrays, spans, whole, disjoint)
    return memory


def are_disjoint(read: Any, out: Any) -> bool:
    """Return whether a cached call may write to `out`: no byte is written twice, or written and also read."""
    # Public functions check this before each cached call with `out`, because the cache's key holds no addresses.
    if out is None:
        return True
    writes_quantized = type(out) is container.Quantized
    array, memory = (read, _memory_of(out)) if writes_quantized else (out, _memory_of(read))
    if writes_quantized and not memory.parts_are_disjoint:
        return False
    if type(array) is np.ndarray:
        return not any(shares_memory(array, part) for part in memory.arrays)
    start, stop = _span(array)
    low, high = memory.whole
    return stop <= low or high <= start or not any(start < last and first < stop for first, last in memory.spans)


def shares_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays share memory."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        try:
            return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True
    first, second = _span(a), _span(b)
    return first[0] < second[1] and second[0] < first[1]


def _span(a: Any) -> tuple[int, int]:
    """Return the span of a CuPy or PyTorch array: its first address, and the address after its last byte."""
    if hasattr(a, "data_ptr"):
        start, is_dense, nbytes = a.data_ptr(), a.is_contiguous(), a.nbytes
    elif type(a).__module__ == "cupy":
        start, is_dense, nbytes = a.data.ptr, a.flags.c_contiguous, a.nbytes
    else:
        return 0, 0
    if not nbytes:
        return 0, 0
    if is_dense:
        return start, start + nbytes
    size = nbytes // prod(a.shape)
    steps = a.strides if hasattr(a, "strides") else [step * size for step in a.stride()]
    reach = [step * (n - 1) for step, n in zip(steps, a.shape, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + size
