"""Implement fp4kit.quantize_kv and dequantize_kv, which quantize keys and values into KV caches and read them back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp4kit.arguments import as_flag, as_float32
from fp4kit.arrays.imports import import_arrays, on_device, to_device, to_host
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.checks import check_float, check_values_dtype
from fp4kit.formats import E2M1, NVFP4
from fp4kit.layouts.kv import KVCache, KVParts, check_slots
from fp4kit.ops.amax import amax
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.table import recipe_of
from fp4kit.reference.arith import ONE
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.kv_four_over_six import codes_vllm_kv
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.types import Array, RecipeId


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

        The 4over6 mode was written from vLLM's source and has not been compared with outputs of vLLM. It reproduces the
        kernel with one thread per block. vLLM's kernel with two threads per block adds errors in another order: it adds
        the sums of the two halves of a block last.

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
    r = kv_recipe(op, cache, recipe)
    if as_flag(op, "four_over_six", four_over_six) and (r.block_rule != "vllm_kv" or r.tensor_rule is None):
        raise ValueError(f"{op}: four_over_six is True for {r.id}; only vLLM's store has 4over6: pass nvfp4-vllm-kv")
    given: dict[str, Any] = dict(zip(("keys", "values"), import_arrays(op, keys=keys, values=values), strict=True))
    shape = (len(check_slots(op, slots, cache.shape, writes=True)), cache.shape.heads, cache.shape.head_dim)
    scales = tensor_scale(op, r, "k_scale", k_scale), tensor_scale(op, r, "v_scale", v_scale)
    for name, x in given.items():
        check_float(op, x, name)
        _check_shape(op, name, x, shape)
        if on_device(x) != on_device(cache.arrays[0]):
            raise ValueError(f"{op}: {name} are on another device than the cache; needs both on one device")
    k, v = (_quantized(x, r, scale, four_over_six) for x, scale in zip(given.values(), scales, strict=True))
    cache.write(slots, KVParts(k.packed, k.block_scale, v.packed, v.block_scale))
    return cache


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
    r = kv_recipe("dequantize_kv", cache, recipe)
    scales = tensor_scale("dequantize_kv", r, "k_scale", k_scale), tensor_scale("dequantize_kv", r, "v_scale", v_scale)
    check_values_dtype("dequantize_kv", numpy_dtype("dequantize_kv", dtype))
    if slots is not None:
        check_slots("dequantize_kv", slots, cache.shape, writes=False)
    k_codes, k_scales, v_codes, v_scales = cache.read(slots)
    return _values(k_codes, k_scales, r, scales[0], dtype), _values(v_codes, v_scales, r, scales[1], dtype)


# {(container, swizzled): the recipe of the kernel that writes such caches}
_USUAL = {
    ("vllm", False): "nvfp4-vllm-kv",
    ("vllm", True): "nvfp4-vllm-kv",
    ("flashinfer", False): "nvfp4-flashinfer-kv-page",
    ("flashinfer", True): "nvfp4-flashinfer-kv",
}


def kv_recipe(op: str, cache: Any, recipe: RecipeId | Recipe | None) -> Recipe:
    """Return the recipe for writing or reading a KV cache: `recipe` as a Recipe, or the usual one if it is None."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"{op}: cache is a {type(cache).__name__}; needs a fp4kit.layouts.kv.KVCache")
    r = recipe_of(op, _USUAL[cache.layout.container, cache.layout.swizzled] if recipe is None else recipe)
    is_plain = r.element == E2M1 and r.scale is not None and r.block == (1, NVFP4.block_size) and not r.fake_only
    by_scale = r.tensor_rule in (None, "divided") and r.tensor_scaling in ("none", "tensor")
    if (
        not is_plain
        or not by_scale
        or r.four_over_six
        or r.search
        or rules.BLOCK_RULES[r.block_rule or "te"].needs_tensor
    ):
        raise ValueError(
            f"{op}: {r.id} does not fit a KV cache; needs E2M1 codes in blocks of 16, whose scales follow from the"
            " block and a given tensor scale alone, such as nvfp4-vllm-kv"
        )
    return r


def tensor_scale(op: str, r: Recipe, name: str, scale: Any) -> np.float32:
    """Return the argument k_scale or v_scale as float32."""
    if np.ndim(scale):
        raise TypeError(f"{op}: {name} is {scale!r:.60}; needs a number")
    found = as_float32(op, name, scale, "needs a number")
    if not (found > 0 and math.isfinite(found)):
        raise ValueError(f"{op}: {name} is {scale!s:.60}; needs a positive float32 number, which multiplies on decode")
    if r.tensor_rule is None and found != 1:
        raise ValueError(f"{op}: {name} is {scale!s:.60}; {r.id} has no tensor scale, so it needs 1")
    return found


def _check_shape(op: str, name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x, the argument keys or values, has the given shape."""
    if x.shape != shape:
        raise ValueError(
            f"{op}: {name} have shape {x.shape}; needs {shape}, that is (tokens, heads, head_dim) with one token"
            " per slot"
        )


def _quantized(x: Any, r: Recipe, scale: np.float32, four_over_six: bool) -> Quantized:
    """Return x (keys or values), quantized by recipe r along the last axis, with a given tensor scale."""
    if r.tensor_rule is None:
        return quantize(x, r)
    with np.errstate(all="ignore"):
        tensor = TensorScale(np.asarray(ONE / scale), np.asarray(scale), np.asarray(ONE))
        amaxes = to_host(amax(x, r))
        if four_over_six:
            blocks = np.asarray(to_host(x), np.float32).reshape(*amaxes.shape, NVFP4.block_size)
            codes = codes_vllm_kv(blocks, amaxes, tensor, r)
        else:
            codes = BLOCK_RULES[str(r.block_rule)].code(amaxes, tensor, r, x.dtype)
    return quantize(x, r, block_scale=to_device(codes) if on_device(x) else codes, tensor_scale=scale)


def _values(codes: Any, scales: Any, r: Recipe, scale: np.float32, dtype: Any) -> Any:
    """Return the values, in `dtype`, of packed codes (tokens, heads, bytes) with their block scales and tensor
    scale.
    """
    given = None if r.tensor_rule is None else float(scale)  # a float fits codes on any device
    return dequantize(Quantized.from_parts(codes, scales, given, recipe=r, dtype=dtype))
