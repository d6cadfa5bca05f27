"""Test the compiled engine's search for a multiple of the block amax against the specification, which tries every
candidate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import assert_equal, shrink_tiles
from exhaustive import half
from inputs import BF16, extreme, nonfinite, ordinary
from searched import nearly_equal_blocks, searched_blocks

import fp4kit
from fp4kit.cpu import library as native
from fp4kit.formats import E2M3, E4M3
from fp4kit.recipes import RECIPES
from fp4kit.reference import search as specification

pytestmark = pytest.mark.skipif(native.library().functions is None, reason=native.library().level)
NVFP4, MXFP4 = "nvfp4-auto-round-opt", "mxfp4-auto-round-opt"
NAMES = [NVFP4, MXFP4]


def agree(x: np.ndarray, recipe, **options) -> None:
    """Assert that quantize gives equal results by the compiled engine and by the specification."""
    with fp4kit.specification():
        expected = fp4kit.quantize(x, recipe, **options)
    assert_equal(fp4kit.quantize(x, recipe, **options), expected)


@pytest.mark.parametrize("dtype", half([np.float32, np.float16, BF16]))
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_block(name, dtype, monkeypatch) -> None:
    above = {"tensor_amax": 4.0} if name == NVFP4 else {}
    with np.errstate(all="ignore"):
        arrays = [x.astype(dtype) for x in (searched_blocks(dtype), extreme(), nonfinite())]
    for x in arrays:
        agree(x, name, **above)
    agree(np.ascontiguousarray(ordinary(1, (48, 96), dtype).T), name, axis=0)
    shrink_tiles(monkeypatch)
    agree(arrays[0], name, hadamard="no_signs", **above)
    agree(ordinary(2, (9, 288), dtype), name)


def test_the_order_of_a_sum_decides() -> None:
    agree(nearly_equal_blocks(), NVFP4, tensor_amax=4)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name) -> None:
    """Engine and specification agree for arrays of many shapes.

    These are arrays wider than a tile, rows of one block, views, stacks with an amax per matrix, and empty arrays.
    """
    for shape in ((3, 4160), (70, 32), (1, 64), (2, 3, 8, 64), (0, 64)):
        agree(ordinary(2, shape), name)
    agree(ordinary(3, (64, 256))[::2, 64:192], name)
    if name == NVFP4:
        agree(ordinary(4, (3, 16, 64)), name, tensor_amax=np.float32([1, 0, 9]))


@pytest.mark.parametrize("name", NAMES)
def test_variants(name) -> None:
    """Engine and specification agree for variants of recipes.

    These have tensor scales per row, different elements and scale rules, or blocks that the library does not search.
    """
    r = RECIPES[name]
    variants = [{"block": (1, 64)}, {"sign": "signbit"}, {"amax_nan": "ignore"}, {"rounding": "rnz"}]
    variants += (
        [{"tensor_scaling": "row"}, {"scale_max": 256}] if name == NVFP4 else [{"element": E4M3, "nan_code": None}]
    )
    variants += [{"element": E2M3, "nan_code": None}] if name == MXFP4 else []
    for fields in variants:
        agree(ordinary(5, (40, 192)), replace(r, id="variant", **fields))


@pytest.mark.parametrize("name", NAMES)
def test_only_nonfinite_units_fall_back(name, monkeypatch) -> None:
    """The engine leaves only the rows of work units with NaN or infinity to the specification, not the whole matrix."""
    left, own = [], specification.search_matrix
    monkeypatch.setattr(
        specification, "search_matrix", lambda x, *rest, **given: (left.append(len(x)), own(x, *rest, **given))
    )
    x, above = ordinary(6, (64, 4096)), {"tensor_amax": 4.0} if name == NVFP4 else {}
    fp4kit.quantize(x, name)
    assert left == []
    x[40, 100] = np.inf
    fp4kit.quantize(x, name, **above)
    assert 0 < sum(left) < 64
    agree(x, name, **above)


def test_quest(monkeypatch) -> None:
    """QuEST's amaxes agree for tiles, views, columns, stacks, transformed elements and other block sizes."""
    quest = "mxfp4-fp-quant-quest"
    for dtype in (np.float32, np.float16, BF16):
        with np.errstate(all="ignore"):
            for x in (searched_blocks(dtype), extreme().astype(dtype), nonfinite().astype(dtype)):
                agree(x, quest)
                agree(x, quest, axis=0)
    shrink_tiles(monkeypatch)
    for shape in ((3, 4160), (70, 32), (1, 64), (2, 3, 8, 64), (0, 64)):
        agree(ordinary(2, shape), quest)
    agree(ordinary(3, (64, 256))[::2, 64:192], quest)
    agree(ordinary(4, (32, 64)), quest, hadamard=True)
    for block in (64, 96):
        agree(ordinary(5, (40, 192)), replace(RECIPES[quest], id="variant", block=(1, block)))
