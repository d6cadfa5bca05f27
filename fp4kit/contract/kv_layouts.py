"""Compare two layouts of KV pages: pages that one side writes and the other side reads."""

from __future__ import annotations

import numpy as np

from fp4kit.contract.result import LayerParity
from fp4kit.contract.steps import StepName
from fp4kit.layouts.kv import KV_LAYOUTS, KVCache, KVParts, PageShape
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe

_SHAPE = PageShape(pages=2, block_size=16, heads=2, head_dim=128)


def compare_layouts(train: str, rollout: str, recipe: Recipe, labels: tuple[str, str]) -> LayerParity:
    """Return how many codes and scales change if the rollout reads pages that are in the trainer's layout.

    Drawn keys and values are quantized by the recipe, written in the layout `train` and read in the layout `rollout`.
    Every code and scale counts as differing if the layouts have different arrays, or if the recipe does not have blocks
    of 16 E2M1 elements.

    train, rollout: two different names in KV_LAYOUTS.
    labels: the names of the two sides, for the text.
    """
    name, total = "layout", 2 * int(np.prod(_SHAPE))
    setting = f"kv_layout {train} in {labels[0]} and {rollout} in {labels[1]}; use one layout, or convert the pages"
    a, b = KV_LAYOUTS[train], KV_LAYOUTS[rollout]
    scales = total // 16
    every = LayerParity(name, "kv cache", total, total, (total, total), (scales, scales), step="code", setting=setting)
    if recipe.element.name != "E2M1" or recipe.block != (1, 16) or a.container != b.container:
        return every
    tokens = _SHAPE.pages * _SHAPE.block_size
    x = np.random.default_rng(0).standard_normal((2, tokens, _SHAPE.heads, _SHAPE.head_dim), np.float32)
    k, v = (quantize(one, recipe) for one in x)
    written, slots = a.zeros(_SHAPE), np.arange(tokens)
    written.write(slots, KVParts(k.packed, k.block_scale, v.packed, v.block_scale))
    arrays = tuple(
        one.reshape(shape) for one, shape in zip(written.arrays, b.array_shapes(_SHAPE).values(), strict=True)
    )
    read = KVCache(b, arrays).read(slots)
    codes = sum(_different_nibbles(one, q.packed) for one, q in ((read.k_codes, k), (read.v_codes, v)))
    wrong = sum(int((one != q.block_scale).sum()) for one, q in ((read.k_scales, k), (read.v_scales, v)))
    step: StepName = "code" if codes else "block scale"
    return LayerParity(name, "kv cache", total, total, (codes, total), (wrong, scales), step=step, setting=setting)


def _different_nibbles(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many 4-bit codes of two arrays of bytes differ."""
    differs = a ^ b
    return int(((differs & 15) != 0).sum() + ((differs >> 4) != 0).sum())
