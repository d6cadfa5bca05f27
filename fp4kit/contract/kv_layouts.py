"""Compare two layouts of the pages of a KV cache: one side writes pages, and the other side reads them.
A side is the trainer or the rollout engine of fp4kit.parity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fp4kit.contract.result import LayerParity
from fp4kit.contract.steps import StepName
from fp4kit.layouts.kv import KV_LAYOUTS, KVCache, KVParts, PageShape
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe

_BLOCK_SIZE = 16  # tokens per page
_DRAWN = (32, 2, 128)  # tokens, heads and head_dim of random keys and values
_MAX_TOKENS = 1024  # at most this many tokens of the caller's keys or values are compared


def compare_layouts(
    train: str, rollout: str, recipe: Recipe, labels: tuple[str, str], given: Mapping[str, np.ndarray]
) -> Iterator[LayerParity]:
    """Yield, per array, how many codes and scales the rollout misreads if pages are in the trainer's layout."""
    multiple = 64 if KV_LAYOUTS[train].swizzled or KV_LAYOUTS[rollout].swizzled else 16
    own = {name: x for name, x in given.items() if x.ndim == 3 and x.size and x.shape[-1] % multiple == 0}
    for name, x in own.items():
        yield _compared(f"layout of {name}", train, rollout, recipe, labels, np.stack([x[:_MAX_TOKENS]] * 2))
    if not own:
        x = np.random.default_rng(0).standard_normal((2, *_DRAWN), np.float32)
        yield _compared("layout", train, rollout, recipe, labels, x)


def _compared(
    name: str, train: str, rollout: str, recipe: Recipe, labels: tuple[str, str], x: np.ndarray
) -> LayerParity:
    """Write keys and values in one layout, read them in the other, and return how many codes and scales then differ."""
    total = x.size
    setting = f"kv_layout {train} in {labels[0]} and {rollout} in {labels[1]}; use one layout, or convert the pages"
    a, b = KV_LAYOUTS[train], KV_LAYOUTS[rollout]
    scales = total // 16
    every = LayerParity(name, "kv cache", total, total, (total, total), (scales, scales), step="code", setting=setting)
    if recipe.element.name != "E2M1" or recipe.block != (1, 16) or a.container != b.container:
        return every
    tokens, heads, head_dim = x.shape[1:]
    shape = PageShape(-(-tokens // _BLOCK_SIZE), _BLOCK_SIZE, heads, head_dim)
    k, v = (quantize(np.ascontiguousarray(one), recipe) for one in x)
    written, slots = a.zeros(shape), np.arange(tokens)
    written.write(slots, KVParts(k.packed, k.block_scale, v.packed, v.block_scale))
    arrays = tuple(one.reshape(each) for one, each in zip(written.arrays, b.array_shapes(shape).values(), strict=True))
    read = KVCache(b, arrays).read(slots)
    codes = sum(_different_nibbles(one, q.packed) for one, q in ((read.k_codes, k), (read.v_codes, v)))
    wrong = sum(int((one != q.block_scale).sum()) for one, q in ((read.k_scales, k), (read.v_scales, v)))
    step: StepName = "code" if codes else "block scale"
    counts = (codes, total), (wrong, scales)
    if not codes and not wrong:  # for example, two orders of heads have equal offsets for one head
        return LayerParity(name, "kv cache", total, total, *counts)
    return LayerParity(name, "kv cache", total, total, *counts, step=step, setting=setting)


def _different_nibbles(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of 4-bit codes that differ between two arrays of bytes, with two codes per byte."""
    differs = a ^ b
    return int(((differs & 15) != 0).sum() + ((differs >> 4) != 0).sum())
