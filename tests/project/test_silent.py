"""Test that no function gives a NumPy warning, for any data: results are right under np.errstate(all="raise").

Python warnings are errors in these tests.
"""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from everything import everything
from exhaustive import by_default
from inputs import BF16, nonfinite, ordinary

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.recipes import RECIPES

DTYPES = {"f32": np.dtype(np.float32), "bf16": BF16, "f16": np.dtype(np.float16)}


def bit_patterns(dtype: np.dtype) -> np.ndarray:
    """Return random bit patterns, including signaling NaN."""
    return np.random.default_rng(1).integers(0, 256, (32, 128 * dtype.itemsize), dtype=np.uint8).view(dtype)


def inputs(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return {name: array of shape (32, 128)}, from ordinary values to random bit patterns."""
    with np.errstate(all="ignore"):
        patterns = bit_patterns(dtype)
        finite = np.where(np.isfinite(patterns.astype(np.float32)), patterns, np.ones((), dtype))
        return {
            "adversarial": np.resize(adversarial_blocks(dtype), (32, 128)),
            "nonfinite": np.concatenate([nonfinite()[::8], nonfinite()[40:56]]).astype(dtype),
            "patterns": patterns,
            "finite patterns": finite,
            "largest": np.full((32, 128), ml_dtypes.finfo(dtype).max, dtype),
            "smallest": np.full((32, 128), 1, f"u{dtype.itemsize}").view(dtype),
        }


DATA = tuple(inputs(BF16))
INPUTS = {(kind, data): x for kind, dtype in DTYPES.items() for data, x in inputs(dtype).items()}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", by_default(list(RECIPES)[::15], RECIPES))
def test_every_recipe(name, kind):
    for data in DATA:
        check(name, INPUTS[kind, data])


def check(name, x):
    """Assert that all functions give no warning on x, and the results that they give with warnings ignored."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(everything(name, x))
    with np.errstate(all="ignore"):
        expected = list(everything(name, x))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te", "int8-modelopt", "nvfp4-compressed-tensors"])
@pytest.mark.parametrize(("kind", "data"), INPUTS)
def test_identify(name, kind, data):
    x = INPUTS[kind, data]
    with np.errstate(all="raise"):
        assert fp4kit.identify(fp4kit.quantize(x, name), x).matches


def test_compare_of_float64():
    x = np.random.default_rng(2).integers(0, 256, (32, 64), dtype=np.uint8).view(np.float64)
    with np.errstate(all="raise"):
        result = fp4kit.compare(x, ordinary(shape=x.shape))
    assert result.values == (x.size, x.size)


def test_the_callers_settings_stay():
    with np.errstate(all="raise"):
        before = np.geterr()
        fp4kit.quantize(INPUTS["f32", "nonfinite"], "nvfp4-te")
        assert np.geterr() == before
        with pytest.raises(FloatingPointError):
            np.float32(3e38) * np.float32(10)
