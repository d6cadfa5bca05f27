"""Rows that another kind of file has in another order: halves of heads of q and k, gate and up of gpt-oss.

llama.cpp's converter weaves the halves of every head of q and k where its graph turns neighbours (Llama, Granite,
InternLM 2), not where a model has them so already (Mistral's own files) or the graph turns halves (Qwen). Which it was,
the numbers tell. Source: llama.cpp 0c1e57098, conversion/llama.py permute and _repack_nvfp4, conversion/gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.ggml_names import HEADS
from fp4kit.checkpoint.identify.match_layers import Origin
from fp4kit.checkpoint.model.slabs import Readers, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.weights import HeadOrder, Rows, Weight, is_interleaved
from fp4kit.storage.errors import CheckpointError, shown

_ROWS = 16  # of each end of a matrix


def takes_turns(weight: Weight, config: Mapping[str, Any]) -> bool:
    """Whether the rows of a stack are gate 0, up 0, gate 1, ..."""
    return len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")


def gate_first(weight: Weight, config: Mapping[str, Any]) -> Weight:
    """A weight, the rows of its gate before those of up, as they are or by its order."""
    return replace(weight, order=HeadOrder(weight.shape[-2], False)) if takes_turns(weight, config) else weight


def by_turns(rows: Sequence[Rows]) -> Iterator[Rows]:
    """Pairs of layers, gate and up, as matrices in which their rows take turns. Raises CheckpointError for tensor
    scales.
    """
    for gate, up in zip(rows[::2], rows[1::2], strict=True):
        one, (begin, end) = gate.weight, gate.span
        if one.container is not None and one.container.has_tensor_scale:
            why = "gate and up have tensor scales of their own, and are one layer where rows take turns"
            raise CheckpointError(f"{shown(one.name)}: {why}; use codes without tensor scales, such as MXFP4")
        height = 2 * (end - begin)
        shape, order = (height, one.shape[-1]), HeadOrder(height, True)
        yield Rows(
            Weight(one.name, one.tensor, shape, one.container, one.parts, members=(gate, up), order=order),
            0,
            (0, height),
        )


def order_of_heads(leaf: str, rows: int, config: Mapping[str, Any], weaves: bool) -> HeadOrder | None:
    """The other order that q or k may have. leaf: of its name in a GGUF file, whose config says how many heads there
    are.
    """
    count = config.get(HEADS.get(leaf, ""), 0)
    head = rows // count if count else 0
    return HeadOrder(head, weaves) if head > 2 and head % 2 == 0 and head * count == rows else None


def in_likest_order(numbers: Weight, rows: Rows, order: HeadOrder, readers: Readers) -> Rows:
    """Rows as they are, or in an order, whichever is more like the numbers; where some rows do not tell, all of them
    do.
    """
    other = rows._replace(weight=replace(rows.weight, order=order))
    for most in (_ROWS, numbers.shape[-2]):
        plain, woven = (likeness(numbers, 0, one, readers, most) for one in (rows, other))
        if plain != woven:
            return other if woven > plain else rows
    return rows


def likeness(numbers: Weight, at: int, rows: Rows, readers: Readers, most: int = _ROWS) -> float:
    """The SQNR in decibels of some rows at both ends. at: the first of the numbers' rows, counted over all matrices."""
    expert, first = divmod(at, numbers.shape[-2])
    height = rows.span[1] - rows.span[0]
    pair = Origin(numbers, expert, (first, first + height)), Origin(*rows)
    signal = noise = 0.0
    for part in (slice(0, min(most, height)), slice(max(height - most, 0), height)):
        x, y = (values_of(one.weight, one.slab(readers, part)).astype(np.float64) for one in pair)
        signal, noise = signal + float(np.sum(x**2)), noise + float(np.sum((x - y) ** 2))
    return sqnr_db(signal, noise)
