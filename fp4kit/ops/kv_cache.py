"""Implement fp4kit.quantize_kv and dequantize_kv, which quantize keys and values into KV caches and read them back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import a_type, as_flag, as_float32, explains_calls
from fp4kit.arrays.imports import import_arrays, import_to_host, on_device, to_host
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.parse import check_float
from fp4kit.display import Panel, Shown
from fp4kit.formats import E2M1, FLOATS, NVFP4
from fp4kit.layouts import check_bytes
from fp4kit.layouts.kv import KV_LAYOUTS, KVCache, KVLayout, KVLayoutName, KVParts, PageShape, as_layout, check_slots
from fp4kit.ops.amax import quantize_by_scale
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized, check_values_dtype
from fp4kit.recipes import Recipe, recipe_of, rules
from fp4kit.types import Array, RecipeId


@explains_calls
def quantize_kv(
    cache: KVCache,
    keys: Array,
    values: Array,
    slots: Any,
    *,
    recipe: RecipeId | Recipe | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    four_over_six: bool = False,
) -> KVCache:
    """Quantize keys and values, and write them in place into the given slots of a KV cache.

        scale = block_rule(amax of the block, k_scale);   code = encode(key * factor(scale, k_scale))

    Values are quantized alike, with v_scale instead of k_scale. Bytes of other slots do not change.

    Args:
        cache: the KVCache (fp4kit.layouts.kv), whose arrays are written.
        keys: float32, float16 or bfloat16 (tokens, heads, head_dim), on the device of the cache.
        values: as keys.
        slots: integers (tokens,), the place of each token in the cache. Tokens with a negative slot are skipped, as in
            vLLM. Slots on a GPU are copied to the host.
        recipe: a recipe id or a Recipe of E2M1 elements in blocks of 16. None: the recipe of the kernel that usually
            writes such caches. This is nvfp4-vllm-kv for vLLM, nvfp4-flashinfer-kv for FlashInfer with swizzled scales,
            and nvfp4-flashinfer-kv-page for FlashInfer with linear scales.
        k_scale: the decode scale of all keys, a positive number, as in checkpoints; it is rounded to float32.
        v_scale: the decode scale of all values, likewise.
        four_over_six: True for vLLM's store with 4over6, which tries two scales per block and keeps the one with the
            smaller squared error. Needs the recipe nvfp4-vllm-kv. dequantize_kv reads such a cache like any other.

    Returns:
        The argument `cache`, after its arrays were written.

    Raises:
        TypeError: cache is not a KVCache, keys or values have a dtype other than these three, slots are not integers,
            a scale is not a number, or four_over_six is not a bool.
        ValueError: shapes or devices do not fit, a slot is out of range or occurs twice, a scale is not positive and
            finite, the cache is read-only, or the recipe is unknown or not one for KV caches.
        ValueError: four_over_six is True for another recipe.

    Numerics:
        Ties, overflow, NaN, inf, zeros, -0 and subnormals follow the recipe.

    Exact:
        Equals the kernel of the recipe, as recipe.exact says. On a GPU, block scales are computed on the host.

        The 4over6 mode equals recorded outputs of vLLM's kernel with one thread per block, as built by CUDA 12.9 and
        later. The kernel with two threads per block adds errors in another order: it adds the sums of the two halves of
        a block last.

    Source:
        recipe.source.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.layouts import kv
        >>> cache = kv.KV_LAYOUTS["vllm-hnd"].zeros(kv.PageShape(4, block_size=16, heads=2, head_dim=64))
        >>> keys = np.random.default_rng(0).standard_normal((3, 2, 64), dtype=np.float32)
        >>> _ = fp4kit.quantize_kv(cache, keys, 2 * keys, [5, 6, -1], k_scale=0.01, v_scale=0.02)
        >>> got, _ = fp4kit.dequantize_kv(cache, [5, 6], k_scale=0.01, v_scale=0.02)
        >>> float(np.linalg.norm(got - keys[:2]) / np.linalg.norm(keys[:2])) < 0.12
        True
    """
    op = "quantize_kv"
    r, scales = _recipe_and_scales(op, cache, recipe, k_scale, v_scale)
    if as_flag(op, "four_over_six", four_over_six) and (r.block_rule != "vllm_kv" or r.tensor_rule is None):
        raise ValueError(f"{op}: four_over_six is True for {r.id}; only vLLM's store has 4over6: pass nvfp4-vllm-kv")
    given: dict[str, Any] = dict(zip(("keys", "values"), import_arrays(op, keys=keys, values=values), strict=True))
    shape = (len(check_slots(op, slots, cache.shape, writes=True)), cache.shape.heads, cache.shape.head_dim)
    parts = []
    for (name, x), scale in zip(given.items(), scales, strict=True):
        check_float(op, x, name)
        if x.shape != shape:
            needed = f"{shape}, that is (tokens, heads, head_dim) with one token per slot"
            raise ValueError(f"{op}: {name} have shape {x.shape}; needs {needed}")
        if on_device(x) != on_device(cache.arrays[0]):
            raise ValueError(f"{op}: {name} are on another device than the cache; needs both on one device")
        q = quantize(x, r) if r.tensor_rule is None else quantize_by_scale(x, x, r, scale, four_over_six)
        parts += [q.packed, q.block_scale]
    cache.write(slots, KVParts(*parts))
    return cache


@explains_calls
def dequantize_kv(
    cache: KVCache,
    slots: Any = None,
    *,
    recipe: RecipeId | Recipe | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: Any = np.float32,
) -> tuple[Any, Any]:
    """Return the keys and values that a KV cache holds at the given slots.

        key = decode(code) * block_scale * k_scale     in the order of recipe.decode_rule, then rounded to dtype

    Args:
        cache: the KVCache (fp4kit.layouts.kv).
        slots: integers (tokens,), none of them negative. None returns all slots in order.
        recipe: as in quantize_kv.
        k_scale: the decode scale of all keys, a positive number. Pass the one with which they were quantized.
        v_scale: the decode scale of all values, likewise.
        dtype: float32, float16 or bfloat16.

    Returns:
        The pair (keys, values) of new arrays (tokens, heads, head_dim), NumPy or CuPy as the cache.

    Raises:
        TypeError: cache is not a KVCache, dtype is not float32, float16 or bfloat16, slots are not integers, or a scale
            is not a number.
        ValueError: a slot is out of range or negative, a scale is not positive and finite, or the recipe is unknown or
            not one for KV caches.

    Numerics:
        float32 throughout, with one rounding to dtype at the end. NaN only if a block scale is NaN.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.layouts import kv
        >>> cache = kv.KV_LAYOUTS["vllm-hnd"].zeros(kv.PageShape(4, block_size=16, heads=2, head_dim=64))
        >>> keys, values = fp4kit.dequantize_kv(cache, [63])
        >>> keys.shape, values.any()
        ((1, 2, 64), np.False_)
    """
    op = "dequantize_kv"
    r, scales = _recipe_and_scales(op, cache, recipe, k_scale, v_scale)
    check_values_dtype(op, numpy_dtype(op, dtype))
    if slots is not None:
        check_slots(op, slots, cache.shape, writes=False)
    parts, values = cache.read(slots), []
    for codes, block_scales, scale in zip(parts[::2], parts[1::2], scales, strict=True):
        given = None if r.tensor_rule is None else float(scale)  # a float fits codes on any device
        q = Quantized.from_parts(codes, block_scales, given, recipe=r, dtype=dtype, tensor_scale_divides=False)
        values.append(dequantize(q))
    return values[0], values[1]


# {(container, swizzled): the recipe of the kernel that writes such caches}
_USUAL = {
    ("vllm", False): "nvfp4-vllm-kv",
    ("vllm", True): "nvfp4-vllm-kv",
    ("flashinfer", False): "nvfp4-flashinfer-kv-page",
    ("flashinfer", True): "nvfp4-flashinfer-kv",
}


def _recipe_and_scales(
    op: str, cache: Any, recipe: RecipeId | Recipe | None, k_scale: Any, v_scale: Any
) -> tuple[Recipe, list[np.float32]]:
    """Return the recipe for writing or reading a KV cache, and the tensor scales of keys and values."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"{op}: cache is {a_type(cache)}; needs a fp4kit.layouts.kv.KVCache")
    r = recipe_of(op, _USUAL[cache.layout.container, cache.layout.swizzled] if recipe is None else recipe)
    is_plain = r.element == E2M1 and r.scale is not None and r.block == (1, NVFP4.block_size) and not r.fake_only
    by_scale = r.tensor_rule in (None, "divided") and r.tensor_scaling in ("none", "tensor")
    chooses = r.four_over_six or r.search or rules.BLOCK_RULES[r.block_rule or "te"].needs_tensor
    if chooses or not (is_plain and by_scale):
        raise ValueError(
            f"{op}: {r.id} does not fit a KV cache; needs E2M1 codes in blocks of 16, whose scales follow from the"
            " block and a given tensor scale alone, such as nvfp4-vllm-kv"
        )
    scales = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if np.ndim(scale):
            raise TypeError(f"{op}: {name} is {scale!r:.60}; needs a number")
        found, given = as_float32(op, name, scale, "needs a number"), f"{op}: {name} is {scale!s:.60}"
        if not (found > 0 and math.isfinite(found)):
            raise ValueError(f"{given}; needs a positive float32 number, which multiplies on decode")
        if r.tensor_rule is None and found != 1:
            raise ValueError(f"{given}; {r.id} has no tensor scale, so it needs 1")
        scales.append(found)
    return r, scales


FITS = 0.16  # largest relative error of a reading that fits: NVFP4 gives about 0.1
# A reading (the bytes of the cache, decoded by one layout) does not fit if its relative error exceeds NEAR_BEST times
# the smallest relative error of all readings. The factor must be small: if all blocks have similar amaxes, as for
# uniformly distributed values, wrong scales of V hardly raise the error.
NEAR_BEST = 1.05
SAMPLE = 1 << 18  # about how many elements of keys are compared, at most
OFF = 0.05  # a tensor scale counts as wrong if another one that differs by more than this share fits
_COLUMNS = ("layout", "error of keys", "error of values", "reading")


class KVMatch(NamedTuple):
    """The errors of one reading of a KV cache, which is the keys and values decoded from the cache by one layout.

    Attributes:
        layout: the name of the layout.
        fault: what the reading assumes besides the layout, such as "K and V are swapped"; "" if nothing.
        key_error: the relative error of keys, ||read - reference|| / ||reference||. inf if a NaN was read.
        value_error: the relative error of values, likewise.
        fits: True if both errors can come from the format alone. key_error must be at most 0.16, and at most 1.05 times
            the smallest key_error of all readings; the same holds for value_error.
    """

    layout: str
    fault: str
    key_error: float
    value_error: float
    fits: bool = False

    @property
    def error(self) -> float:
        """The larger of the two relative errors."""
        return max(self.key_error, self.value_error)


@dataclass(frozen=True)
class KVIdentification(Shown):
    """The result of identify_kv: candidate layouts of a KV cache, ranked by the errors of keys and values.

    print() shows a verdict and a table with one row per match.

    Attributes:
        matches: one KVMatch per layout that the arrays can have. Those that fit come first. Within both groups, they
            are sorted by the larger of the two errors, smallest first. If no layout fits alone, the list begins with
            the layouts that fit together with a known fault, if there are any.
        assumed: the name of the layout that the caller assumed, or None.
        same: the names of the layouts by which the same keys and values are read as by the first match.
    """

    matches: tuple[KVMatch, ...]
    assumed: str | None = None
    same: tuple[str, ...] = ()

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of the layouts that fit without a fault, best first; () if there are none."""
        return tuple(m.layout for m in self.matches if m.fits and not m.fault)

    @property
    def verdict(self) -> str:
        """The result in one sentence: which layout the cache has, with its errors.

        - If nothing fits, it names the nearest layout.
        - If a layout fits only with a fault, it names the layout and the fault.
        - If the assumed layout reads the same keys and values as the best one, it names only the assumed layout.
        - If the assumed layout fits, but reads others, it names the best layout, and says how the assumed one differs.
        - If the assumed layout does not fit, it says so, and names the best layout in the same way.
        - If no layout was assumed, it names the best one, those that read the same, and those that fit less well.
        """
        best = self.matches[0]
        if not best.fits:
            return (
                f"no known layout fits; the nearest is {best.layout} ({_errors(best)}); check that slots, keys and"
                " values are those that were stored"
            )
        if best.fault:
            return f"the pages fit {best.layout} if {best.fault} ({_errors(best)})"
        same = [name for name in self.layouts if name == best.layout or name in self.same]
        if self.assumed is None:
            others = [name for name in self.layouts if name not in same]
            return (
                f"the pages fit {' or '.join(same)}"
                + ", which are the same for these sizes or this data" * (len(same) > 1)
                + f" ({_errors(best)})"
                + (f"; {' and '.join(others)} cannot be excluded" if others else "")
            )
        if self.assumed in same:
            return f"the pages fit {self.assumed} ({_errors(best)})"
        assumed = next(m for m in self.matches if m.layout == self.assumed and not m.fault)
        differences = _differences(KV_LAYOUTS[self.assumed], KV_LAYOUTS[best.layout])
        found = f"{best.layout} ({_errors(best)}): {differences}"
        if assumed.fits:
            return f"the pages fit {assumed.layout} ({_errors(assumed)}) less well than {found}"
        return f"the pages are not {assumed.layout} ({_errors(assumed)}) but {found}"

    def __repr__(self) -> str:
        """Return one line: KVIdentification(the verdict)."""
        return f"KVIdentification({self.verdict})"

    def _panels(self) -> Iterator[Panel]:
        """Yield the table, one row per match: layout, error of keys, error of values, and fault or "-"."""
        rows = ((m.layout, f"{m.key_error:.3f}", f"{m.value_error:.3f}", m.fault or "-") for m in self.matches)
        yield Panel(self.verdict, columns=_COLUMNS, rows=tuple(rows))


@explains_calls
def identify_kv(
    arrays: Any,
    keys: Array,
    values: Array,
    slots: Any,
    *,
    layout: KVLayoutName | KVLayout | None = None,
    recipe: RecipeId | Recipe | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> KVIdentification:
    """Find the layout of a KV cache by the keys and values that it should hold.

    The cache is decoded by every layout that its arrays can have, and compared with the reference. The right layout
    gives the relative error of the format, about 0.1. A wrong layout gives a larger error, such as 0.76 if swizzled
    scales of V are read as linear and values have outliers. If you pass the layout that you assume, the verdict says
    how the right layout differs.

    If no layout fits, every layout is tried again with each of three faults: K and V are swapped, the two codes of each
    byte are swapped, or the tensor scales are wrong.

    Args:
        arrays: the array of vLLM's pages, or the four arrays of FlashInfer's cache in the order of
            KVLayout.array_shapes, uint8 (the two arrays of scales may be float8_e4m3fn). The first axis counts the
            pages. The lengths of the other axes are not used, so the arrays may be shaped for a wrong layout. vLLM's
            pages are read in the order of their bytes, also through a view with permuted axes.
        keys: the reference keys (tokens, heads, head_dim), finite numbers of any dtype that converts to float32.
        values: the reference values, as keys.
        slots: the slots of these tokens, integers (tokens,). Tokens with a negative slot are left out.
        layout: the layout that you assume, or None.
        recipe: the recipe by which codes are decoded. None: the usual recipe of the cache, as in quantize_kv.
        k_scale: the decode scale of all keys.
        v_scale: the decode scale of all values.

    Returns:
        A KVIdentification. At most about 2^18 elements of keys, from evenly spaced tokens, are compared.

    Raises:
        TypeError: arrays are not uint8 arrays of NumPy or CuPy, keys or values have an unsupported dtype, slots are not
            integers, or a scale is not a number.
        ValueError: there are neither one nor four arrays, the bytes of a page are not a whole number of tokens, or
            shapes do not fit.
        ValueError: keys or values are not finite, or are all zero for the compared tokens; no slot is left, or a slot
            is out of range or occurs twice.
        ValueError: the layout or the recipe is unknown, or does not fit the arrays; or a scale is not positive and
            finite.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.layouts import kv
        >>> keys, values = np.random.default_rng(0).standard_normal((2, 64, 2, 64), dtype=np.float32)
        >>> cache = kv.KV_LAYOUTS["vllm-hnd-swizzled"].zeros(kv.PageShape(4, block_size=16, heads=2, head_dim=64))
        >>> _ = fp4kit.quantize_kv(cache, keys, values, np.arange(64))
        >>> found = fp4kit.identify_kv(cache.arrays, keys, values, np.arange(64), layout="vllm-hnd")
        >>> found.layouts
        ('vllm-hnd-swizzled',)
        >>> found.verdict.partition(": ")[2]
        'the scales of V are swizzled, not linear'
    """
    op = "identify_kv"
    given = _arrays(op, arrays)
    references = tuple(_reference(op, name, x) for name, x in (("keys", keys), ("values", values)))
    shape = _size(op, given, references)
    assumed = None if layout is None else as_layout(op, layout)
    caches = {candidate.name: cache for candidate, cache in _readings(given, shape)}
    if not caches or (assumed is not None and assumed.name not in caches):
        raise ValueError(
            f"{op}: {assumed.name if assumed else 'no layout'} fits {len(given)} array(s) of {tuple(shape)} (pages,"
            f" block_size, heads, head_dim); needs one of {', '.join(caches) or 'the sizes of fp4kit.layouts.kv'}"
        )
    r, scales = _recipe_and_scales(op, next(iter(caches.values())), recipe, k_scale, v_scale)
    where, sampled = _sample(op, check_slots(op, slots, shape, writes=True), references)
    matches: list[KVMatch] = []
    faults: list[KVMatch] = []
    reads = {}
    for name, cache in caches.items():
        reads[name] = read = dequantize_kv(cache, where, recipe=r, k_scale=float(scales[0]), v_scale=float(scales[1]))
        for fault, other in [("", read), *_faults(read, sampled, scales)]:
            match = KVMatch(name, fault, _error(other[0], sampled[0]), _error(other[1], sampled[1]))
            (faults if fault else matches).append(match)
    matches = _judged(matches)
    if not any(match.fits for match in matches):
        matches += [match for match in _judged(faults) if match.fits]
    # Layouts that differ only in the scales of V read the same keys, whose error may be the larger one.
    ranked = sorted(matches, key=lambda m: (not m.fits, bool(m.fault), m.error, m.key_error + m.value_error))
    best = reads[ranked[0].layout]
    same = [name for name, read in reads.items() if all(map(partial(np.array_equal, equal_nan=True), read, best))]
    return KVIdentification(tuple(ranked), assumed.name if assumed else None, tuple(same))


def _arrays(op: str, arrays: Any) -> tuple[Any, ...]:
    """Return the arrays of a cache as a tuple of uint8 NumPy arrays."""
    given = tuple(arrays) if isinstance(arrays, (tuple, list)) else (arrays,)
    if len(given) not in (1, 4):
        raise ValueError(f"{op}: got {len(given)} arrays; needs 1, vLLM's pages, or 4, those of FlashInfer's cache")
    found: list[Any] = []
    for array in given:
        is_scales = len(given) == 4 and len(found) >= 2 and getattr(array, "dtype", None) == "float8_e4m3fn"
        array = array.view(np.uint8) if is_scales else array
        check_bytes(op, array, "arrays")
        found.append(to_host(array))
    return tuple(found)


def _reference(op: str, name: str, x: Any) -> np.ndarray:
    """Return reference keys or values as a NumPy array of float32."""
    array = import_to_host(op, **{name: x})
    if array.dtype.kind not in "biuf" and array.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} are {array.dtype}; needs real numbers")
    host: np.ndarray = array.astype(np.float32)
    if host.ndim != 3:
        raise ValueError(f"{op}: {name} have shape {host.shape}; needs (tokens, heads, head_dim)")
    if not np.isfinite(host).all() or not host.any():
        raise ValueError(f"{op}: {name} are not finite, or all zero; needs reference values to compare with")
    return host


def _size(op: str, arrays: tuple[Any, ...], references: tuple[np.ndarray, ...]) -> PageShape:
    """Return the PageShape of a cache: its number of pages, tokens per page, heads and head_dim."""
    keys, values = references
    if keys.shape != values.shape:
        raise ValueError(f"{op}: keys have shape {keys.shape} and values {values.shape}; needs equal shapes")
    _, H, D = keys.shape
    pages = len(arrays[0])
    codes, scales = D // 2, D // 16
    per_token = (2 * H * (codes + scales),) if len(arrays) == 1 else (H * codes, H * codes, H * scales, H * scales)
    sizes = {array.size / max(pages * n, 1) for array, n in zip(arrays, per_token, strict=True)}
    block_size = int(min(sizes))
    if len(sizes) > 1 or not block_size or sizes != {block_size}:
        raise ValueError(
            f"{op}: arrays {[array.shape for array in arrays]} do not hold a whole number of tokens per page for {H}"
            f" heads and head_dim {D}; needs the arrays of KVLayout.array_shapes, with the pages along the first axis"
        )
    return PageShape(pages, block_size, H, D)


def _readings(arrays: tuple[Any, ...], shape: PageShape) -> Iterator[tuple[KVLayout, KVCache]]:
    """Yield the pair (layout, cache) for every layout in which the arrays can hold a KV cache of the given shape."""
    if len(arrays) == 1:  # views of vLLM's pages may have permuted axes
        strides = arrays[0].strides
        order = sorted(range(1, arrays[0].ndim), key=lambda axis: -abs(strides[axis]))
        arrays = (arrays[0].transpose(0, *order),)
    for layout in KV_LAYOUTS.values():
        try:
            shapes = layout.array_shapes(shape).values()
        except ValueError:
            continue
        if len(shapes) == len(arrays):
            read = (np.ascontiguousarray(array).reshape(each) for array, each in zip(arrays, shapes, strict=True))
            yield layout, KVCache(layout, tuple(read))


def _sample(
    op: str, slots: np.ndarray, references: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Choose the tokens to compare."""
    tokens, H, D = references[0].shape
    if len(slots) != tokens:
        raise ValueError(f"{op}: got {len(slots)} slots for {tokens} tokens; needs one slot per token")
    kept = np.flatnonzero(slots >= 0)
    if not len(kept):
        raise ValueError(f"{op}: all slots are negative; needs a token that is stored")
    kept = kept[:: -(-len(kept) * H * D // SAMPLE)]
    sampled = tuple(x[kept] for x in references)
    if not all(x.any() for x in sampled):
        raise ValueError(f"{op}: the keys or values of the stored tokens are all zero; needs values to compare with")
    return slots[kept], sampled


def _judged(matches: list[KVMatch]) -> list[KVMatch]:
    """Return copies of the matches with the field `fits` set."""
    keys = min(FITS, NEAR_BEST * min(m.key_error for m in matches))
    values = min(FITS, NEAR_BEST * min(m.value_error for m in matches))
    return [m._replace(fits=m.key_error <= keys and m.value_error <= values) for m in matches]


def _error(read: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative error ||read - reference|| / ||reference||, computed in float64; inf if it would be NaN."""
    with np.errstate(all="ignore"):
        off, size = (np.linalg.norm(a.astype(np.float64)) for a in (read - reference, reference))
        return float("inf") if np.isnan(off / size) else float(off / size)


def _faults(
    read: tuple[np.ndarray, ...], references: tuple[np.ndarray, ...], scales: Sequence[np.float32]
) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """Yield (fault, (keys, values)) for each fault that might explain why a reading does not fit."""
    with np.errstate(all="ignore"):
        ratio = scales[0] / scales[1]
        yield "K and V are swapped", (read[1] * ratio, read[0] / ratio)  # each stored with its own tensor scale
        if ratio != 1:
            yield "K and V are swapped", (read[1], read[0])  # each stored with the tensor scale of the other
        pairs = tuple(x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape) for x in read)
        yield "the codes of each byte are swapped (the even element is in the high nibble)", pairs
        factors = [_best_factor(x, reference) for x, reference in zip(read, references, strict=True)]
        wrong = []
        for name, given, factor in zip(("k_scale", "v_scale"), map(float, scales), factors, strict=True):
            if factor > 0 and abs(factor - 1) > OFF:
                needed = given * factor
                inverted = ", its reciprocal" if abs(needed * given - 1) <= OFF and abs(given - 1) > OFF else ""
                wrong.append(f"{name} is about {needed:.2g}{inverted}, not {given:.3g}")
        if wrong:
            yield " and ".join(wrong), tuple(np.float32(f) * x for f, x in zip(factors, read, strict=True))


def _best_factor(read: np.ndarray, reference: np.ndarray) -> float:
    """Return the number f for which f * read is nearest to `reference` in least squares; NaN if `read` is all zeros."""
    a, b = read.astype(np.float64).reshape(-1), reference.astype(np.float64).reshape(-1)
    return float(a @ b / (a @ a))


def _errors(match: KVMatch) -> str:
    """Return the errors of a match as text for a message, such as "relative error 0.09 of keys and 0.76 of values"."""
    return f"relative error {match.key_error:.2f} of keys and {match.value_error:.2f} of values"


def _differences(assumed: KVLayout, found: KVLayout) -> str:
    """Return text that says how the layout `found` differs from the layout `assumed`, in one clause per difference."""
    clauses = []
    if assumed.order != found.order:
        clauses.append(f"the order is {found.order}, not {assumed.order}")
    if assumed.swizzled != found.swizzled:
        names = {True: "swizzled", False: "linear"}
        clauses.append(f"the scales of V are {names[found.swizzled]}, not {names[assumed.swizzled]}")
    return " and ".join(clauses)
