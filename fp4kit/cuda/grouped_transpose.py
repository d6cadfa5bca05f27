"""Launcher of transpose for a group of matrices: one launch for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import address
from fp4kit.cuda.grouped import Launch, prepare_group
from fp4kit.cuda.transpose import ARGUMENTS, moves, source
from fp4kit.recipes import Recipe


class Matrix(NamedTuple):
    """What transpose takes of one matrix: contiguous codes and scales, in and out, and its rows and columns."""

    codes: Any
    scales: Any
    out: Any
    scales_out: Any
    shape: tuple[int, int]


@cache
def _function(bits: int, block: int, whole: bool, words: bool, device: int) -> Any:
    return loader.function(source(bits, block, "linear", whole, words, "grouped_transpose"), "grouped_transpose_kernel", device)


def transpose_group(matrices: Sequence[Matrix], r: Recipe) -> Launch:
    """The launch that transposes each matrix, none of them empty; linear scales, all on one device."""
    shapes = [(1, *m.shape) for m in matrices]
    found = [moves(m.codes, m.scales, r, "linear", m.out, m.scales_out, shape) for m, shape in zip(matrices, shapes, strict=True)]
    whole, words = (all(column) for column in zip(*found, strict=True))
    device = matrices[0].codes.device.id
    function = _function(4 if r.is_packed else 8, r.block_size, whole, words, device)
    table = np.array([(*map(address, m[:4]), *shape) for m, shape in zip(matrices, shapes, strict=True)], ARGUMENTS)
    elements = np.array([m.shape[0] * m.shape[1] for m in matrices])
    return prepare_group(function, table, np.ones(len(table), bool), elements, device, tuple(matrices))
