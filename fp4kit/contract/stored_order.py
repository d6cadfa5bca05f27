"""Find a wrong order of stored codes or scales: swapped nibbles, and scales that were read in another layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fp4kit.layouts import padded_shape, swizzle_scales, unswizzle_scales
from fp4kit.quantized.container import Quantized

_LAYOUTS = ("swizzled_128x4", "swizzled_8x4")


def orders(q: Quantized) -> Iterator[tuple[str, str, Quantized]]:
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
    for layout in _LAYOUTS:
        if padded_shape(stored.shape, layout) == stored.shape:
            linear = unswizzle_scales(stored, layout, stored.shape)
            text = f"the block scales are in the layout {layout}, but are read as linear; pass scale_layout={layout!r}"
            yield text, replace(q, block_scale=linear)
            swizzled = np.asarray(swizzle_scales(stored, layout)).reshape(stored.shape)
            text = f"the block scales are linear, but are read in the layout {layout}; pass scale_layout='linear'"
            yield text, replace(q, block_scale=swizzled)
