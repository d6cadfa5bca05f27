"""Call all public functions on one array with one recipe, to test that a thread, a process or a processor mode changes
no result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from inputs import seeded

import fp4kit
from fp4kit.recipes import RECIPES
from fp4kit.training.communicators import SingleProcess


def everything(name: str, x: np.ndarray) -> Iterator[object]:
    """Yield the results of all functions with the recipe `name`, for x of shape (32, 128) and for its first 16 rows.

    Functions that the recipe does not support, or that reject a NaN amax, are left out.
    """
    r = RECIPES[name]
    part = np.ascontiguousarray(x[:16])
    takes_int = r.stochastic != "comfyui_nvfp4_cuda"  # as functions that round several arrays need
    for a in (x, part):
        how = seeded(r, a)
        yield fp4kit.fake_quantize(a, name, **how)
        yield fp4kit.amax(a, name)
        yield fp4kit.fake_quantize_backward(a, a, name, pass_through=False)
        yield from fp4kit.fake_quantize_grouped([a, a[:2]], name, **how) if takes_int else ()
    yield fp4kit.fake_quantize_backward(part, part, name, amax=1e-39, pass_through=False)
    yield from (fp4kit.amax(part), fp4kit.amax(part, axis=1))
    yield from (fp4kit.hadamard(part, 64, seed=2), fp4kit.hadamard(x, 32, axis=0, inverse=True))
    yield fp4kit.rotate(part, np.roll(np.eye(8, dtype=np.float32), 3, 0), signs=fp4kit.random_signs(8, 1))
    plan = fp4kit.GroupedPlan([part, x], name, **how) if takes_int else None
    yield from (a for a in plan.amax() if a is not None) if plan else ()
    if r.fake_only:
        return
    for a in (x, part):
        how = seeded(r, a)
        q = fp4kit.quantize(a, name, **how)
        yield q
        yield from (fp4kit.dequantize(q, dtype) for dtype in (None, np.float32, np.float16))
        yield from fp4kit.quantize_grouped([a, a[:2]], name, **how) if takes_int else ()
    yield from options(name, part)
    if 32 % r.length_multiple == 0 and takes_int:
        yield from fp4kit.quantize_both(x, name, **how)
    yield from () if how else shards(name, part)
    yield from searches(name, x)
    yield from readers(q, part)


def options(name: str, x: np.ndarray) -> Iterator[object]:
    """Yield results of quantize with each of these options that the recipe supports.

    The options are stochastic rounding, the Hadamard transform, and a given tensor amax.
    """
    r = RECIPES[name]
    how = seeded(r, x)
    if not (how or r.element.is_integer or r.four_over_six):
        yield fp4kit.quantize(x, name, rounding="stochastic", seed=3)
    yield fp4kit.quantize(x, name, hadamard=True, **how)
    if r.tensor_scaling == "tensor":
        yield from (fp4kit.quantize(x, name, tensor_amax=amax, **how) for amax in (2e-39, 0, np.inf))


def searches(name: str, x: np.ndarray) -> Iterator[object]:
    """Yield results of search_scales with several options.

    Yield nothing unless `name` is "nvfp4-modelopt-static" or "nvfp4-modelopt-static-4over6".
    """
    if name in ("nvfp4-modelopt-static", "nvfp4-modelopt-static-4over6"):
        yield fp4kit.search_scales(x, name)
        yield fp4kit.search_scales(x[:15], name, tensor_amax=3, weights=np.arange(x.shape[1]) % 5, candidates="near")
        yield from (
            fp4kit.search_scales(x[:5], name, tensor_amax=3, objective=objective)
            for objective in ("p2.4", "mae", "max")
        )
        yield fp4kit.search_scales(x[:5], name, hessian=np.tile(np.eye(16) - 0.1, (x.shape[1] // 16, 1, 1)))


def shards(name: str, x: np.ndarray) -> Iterator[object]:
    """Yield results of partial_amax, partial_cast and cast_master_weights for x as one shard.

    Recipes that these functions do not support yield nothing. If an amax is NaN, only partial_amax is called.
    """
    r = RECIPES[name]
    if r.block is None or r.tensor_scaling not in ("none", "tensor") or r.four_over_six or r.search:
        return
    amax = fp4kit.partial_amax(x.reshape(-1), x.shape, 0, name)
    yield amax
    if np.isnan(amax).any() or np.isnan(fp4kit.quantize(x, name).tensor_amax or 0):
        return
    out = np.zeros(fp4kit.quantize(x, name).packed.shape, np.uint8)
    finite = amax[np.isfinite(amax)].max() if r.amax_nan == "lanes" and r.tensor_scaling != "none" else None
    fp4kit.partial_cast(x.reshape(-1), out, amax, x.shape, 0, name, tensor_amax=finite)
    yield out
    yield from fp4kit.cast_master_weights([fp4kit.Shard(x.reshape(-1), x.shape)], SingleProcess(), name)


def readers(q: fp4kit.Quantized, x: np.ndarray) -> Iterator[object]:
    """Yield results of requantize and compare. identify is left out, because it is too slow for every recipe."""
    for target in ("nvfp4-te", "mxfp4-ocp"):
        requantized = fp4kit.requantize(q, target)
        yield from (
            requantized.quantized,
            np.array([requantized.exact, requantized.changed]),
            requantized.largest_error,
        )
    result = fp4kit.compare(q, np.full(x.shape, 1e-40))
    yield np.array([result.values[0], result.max_ulp], np.uint64)
    yield np.array([result.max_error, result.sqnr])
