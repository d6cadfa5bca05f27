"""Provide helpers for tests of the compiled engine: comparison with the specification, small tiles, memory layouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fp4kit.call.parse import Declined
from fp4kit.cpu import codec, engine
from fp4kit.cpu import library as native
from fp4kit.evidence.testing import SPECIFICATION, assert_same_bits
from fp4kit.ops import engines as call_cache
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe

# Without the compiled engine, its tests are skipped; in CI they fail.
NEEDS_ENGINE = pytest.mark.skipif(
    native.library().functions is None and os.environ.get("CI") != "true", reason="the engine is not compiled here"
)


def covered(r: Recipe) -> bool:
    """Return True if the compiled engine quantizes with a recipe itself.

    Otherwise calls fall back to the specification.
    """
    try:
        codec.kernels_of(r)
    except Declined:
        return False
    return True


COVERED = [id for id, r in RECIPES.items() if covered(r) and not (r.fake_only or r.stochastic_only)]


def assert_equal(found: Any, expected: Any, what: str = "array") -> None:
    """Assert that two results, or lists of results, agree in every bit (NaN included) and every attribute.

    Args:
        found: an array, a Quantized, or a list or tuple of results.
        expected: a result of the same kind.
        what: a name of the result for the message.
    """
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{what}[{i}]")
    elif isinstance(expected, Quantized):
        assert_same_bits(found, expected)
        for name in ("shape", "dtype", "axis", "recipe", "scale_layout"):
            assert getattr(found, name) == getattr(expected, name), f"{what}: {name}"
    else:
        assert_same_bits(found, expected, what)


def agree(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Assert that function(*arguments, **options) gives equal bits on the compiled engine and in the specification.

    Return the engine's result. The engine is called twice, because the second call may use a cached call.
    """
    expected = SPECIFICATION.apply(function, *arguments, **options)
    for turn in ("first", "second"):
        found = function(*arguments, **options)
        assert_equal(found, expected, f"{turn} {getattr(function, '__name__', function)} {options}")
    return found


def as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the compiled engine treat small arrays like large ones.

    It then computes arrays of any size itself, and always uses tables of scales.
    """
    monkeypatch.setattr(codec, "TABLES_FROM", 0)
    monkeypatch.setattr(engine, "MIN_ELEMENTS", dict.fromkeys(engine.MIN_ELEMENTS, 0))
    monkeypatch.setattr(engine, "MIN_CODE_BYTES", 0)
    monkeypatch.setattr(engine, "MIN_AMAX_ELEMENTS", 0)
    monkeypatch.setattr(engine, "MIN_COLUMNS", 0)


def shrink_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the engine's tiles, so that small arrays are divided into many tiles and slabs, over several threads.

    A thread computes one tile at a time. A slab is a group of whole tiles that one call to the engine computes.
    """
    monkeypatch.setattr(codec, "TILE_ELEMENTS", 64)
    monkeypatch.setattr(codec, "PANEL_COLUMNS", 128)  # the length of the longest block
    monkeypatch.setattr(codec, "TILE_COLUMNS", 32)
    monkeypatch.setattr(codec, "TILE_ROWS", 4)
    for module in (codec, native):
        monkeypatch.setattr(module, "ELEMENTS_PER_CALL", 300)
    monkeypatch.setattr(native, "ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(engine, "FAKE_ELEMENTS", 200)
    monkeypatch.setattr(native, "_default", [3])
    as_large_ones(monkeypatch)
    monkeypatch.setattr(call_cache, "_CALLS", {})  # forget cached calls, which have larger tiles
    codec.kernels_of.cache_clear()  # the kernels of a block depend on PANEL_COLUMNS


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Yield a list that records the shape of each part of an array that the engine leaves to the specification."""
    shapes: list[tuple[int, ...]] = []
    with monkeypatch.context() as patch:
        encoding, decoding = codec.specification, codec.decode_specification
        for module, name in (
            (encoding, "quantize_matrix"),
            (encoding, "encode_matrix"),
            (decoding, "dequantize_matrix"),
        ):
            right = getattr(module, name)

            def counts(x: np.ndarray, *arguments: Any, right: Callable[..., None] = right) -> None:
                shapes.append(x.shape)
                right(x, *arguments)

            patch.setattr(module, name, counts)
        yield shapes


def unaligned(x: np.ndarray) -> np.ndarray:
    """Return a copy that begins one byte after an aligned address."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    found = memory[1:].view(x.dtype) if x.itemsize == 1 else np.ndarray(x.shape, x.dtype, memory, 1)
    found[...] = x
    return found


def gaps(x: np.ndarray) -> np.ndarray:
    """Return a view with equal values whose rows and columns are separated by other elements in memory."""
    big = np.full((2 * x.shape[0], 3 * x.shape[1]), 7, x.dtype)
    big[::2, 1::3] = x
    return big[::2, 1::3]


# Views and copies of a matrix (128, 256) with different layouts in memory.
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda x: x,
    "rows backwards": lambda x: x[::-1],
    "columns backwards": lambda x: x[:, ::-1],
    "transposed": lambda x: x.T,
    "gaps": gaps,
    "every other row": lambda x: x[1::2],
    "a part": lambda x: x[3:100, 128:],
    "one row for all": lambda x: np.broadcast_to(x[5], (6, *x[5].shape)),
    "one column for all": lambda x: np.broadcast_to(x[:, 3:4], (x.shape[0], 128)),
    "one row": lambda x: x[7],
    "one column": lambda x: x[:, 9],
    "a stack": lambda x: x.reshape(2, 64, 256)[:, ::-1],
    "a stack of blocks": lambda x: x.reshape(2, 64, 2, 128).transpose(2, 0, 1, 3),
    "unaligned": unaligned,
    "no rows": lambda x: x[:0],
    "nothing": lambda x: x[:, :0],
}
