"""Match the row orders of a model directory and a GGUF file, so that codes of one can be written to the other. The two
may differ in q and k, where the halves of each head may be interleaved, and in gate_up of gpt-oss, where gate and up
rows may alternate.

1. q and k: llama.cpp's converter interleaves the two halves of every head if llama.cpp's graph applies rotary
   embedding to neighboring elements (Llama, Granite, InternLM 2). It keeps the order if the model already has it
   (Mistral's own files) or if the graph rotates halves (Qwen). Comparing values shows which order was used.
2. gate_up of gpt-oss: rows of gate and up alternate in the model directory; in a GGUF file they are separate layers.

Source: llama.cpp 0c1e57098, conversion/llama.py permute and _repack_nvfp4, conversion/gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.counterparts import Origin
from fp4kit.checkpoint.model.slabs import Readers, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.weights import HeadOrder, Rows, Weight, is_interleaved
from fp4kit.checkpoint.selection.names import HEADS
from fp4kit.storage.files import CheckpointError, shown

_SAMPLE_ROWS = 16  # rows to compare at each end of a matrix


def has_alternating_rows(weight: Weight, config: Mapping[str, Any]) -> bool:
    """Return whether a weight is a stack of experts whose gate and up rows alternate: gate 0, up 0, gate 1, ..."""
    return len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")


def gate_first(weight: Weight, config: Mapping[str, Any]) -> Weight:
    """Return a weight that is read with all gate rows of an expert before all its up rows."""
    return replace(weight, order=HeadOrder(weight.shape[-2], False)) if has_alternating_rows(weight, config) else weight


def alternate_rows(rows: Sequence[Rows]) -> Iterator[Rows]:
    """Yield one matrix per expert, in which the rows of its gate and up layers alternate."""
    for gate, up in zip(rows[::2], rows[1::2], strict=True):
        one, (begin, end) = gate.weight, gate.span
        if one.container is not None and one.container.has_tensor_scale:
            why = "gate and up have separate tensor scales, but this model stores them as one layer"
            raise CheckpointError(f"{shown(one.name)}: {why}; use codes without tensor scales, such as MXFP4")
        height = 2 * (end - begin)
        shape, order = (height, one.shape[-1]), HeadOrder(height, True)
        yield Rows(
            Weight(one.name, one.tensor, shape, one.container, one.parts, members=(gate, up), order=order),
            0,
            (0, height),
        )


def order_of_heads(leaf: str, rows: int, config: Mapping[str, Any], weaves: bool) -> HeadOrder | None:
    """Return the reordering that interleaves the two halves of every head of q or k, or undoes this; otherwise None."""
    count = config.get(HEADS.get(leaf, ""), 0)
    head = rows // count if count else 0
    return HeadOrder(head, weaves) if head > 2 and head % 2 == 0 and head * count == rows else None


def in_closest_order(unquantized: Weight, rows: Rows, order: HeadOrder, readers: Readers) -> Rows:
    """Return ``rows`` unchanged or reordered by ``order``, whichever decodes closer to the values of
    ``unquantized``.
    """
    reordered = rows._replace(weight=replace(rows.weight, order=order))
    for max_rows in (_SAMPLE_ROWS, unquantized.shape[-2]):
        plain_db, reordered_db = (sampled_sqnr_db(unquantized, 0, one, readers, max_rows) for one in (rows, reordered))
        if plain_db != reordered_db:
            return reordered if reordered_db > plain_db else rows
    return rows


def sampled_sqnr_db(unquantized: Weight, at: int, rows: Rows, readers: Readers, max_rows: int = _SAMPLE_ROWS) -> float:
    """Return the signal-to-noise ratio, in decibels, of decoded rows against the unquantized rows."""
    expert, first = divmod(at, unquantized.shape[-2])
    height = rows.span[1] - rows.span[0]
    pair = Origin(unquantized, expert, (first, first + height)), Origin(*rows)
    signal = noise = 0.0
    for part in (slice(0, min(max_rows, height)), slice(max(height - max_rows, 0), height)):
        x, y = (values_of(one.weight, one.slab(readers, part)).astype(np.float64) for one in pair)
        signal, noise = signal + float(np.sum(x**2)), noise + float(np.sum((x - y) ** 2))
    return sqnr_db(signal, noise)
