"""Test the Hadamard transform on a GPU: it gives the CPU's codes and amaxes, for every kind of run and
rounding mode.
"""

from importlib import import_module
from itertools import cycle
from unittest.mock import patch

import numpy as np
import pytest
from exhaustive import exhaustive
from hadamard_runs import KINDS, Runs
from inputs import BF16
from on_gpu import ON_GPU, check, cupy, differing

import fp4kit
from fp4kit.cuda import matrix
from fp4kit.reference.stochastic import TE_SIGN_MASK, hadamard_blocks

pytestmark = ON_GPU
ROW = 64  # elements


USUAL = [(kind, BF16) for kind in ("normal", "edges", "ties")]
OTHERS = list(zip(KINDS, cycle((np.dtype(np.float16), np.dtype(np.float32))), strict=False))


@pytest.mark.parametrize("case", USUAL + exhaustive(OTHERS), ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_kind_of_runs(case):
    kind, dtype = case
    x = Runs(dtype).of_kind(kind).reshape(-1, ROW)
    with np.errstate(all="ignore"):
        transformed = hadamard_blocks(x)
        check(x, "nvfp4-te", hadamard=True, tensor_amax=np.float32(3.0))
        check(x[: len(x) // 32 * 32], "mxfp4-te", axis=0, hadamard=True)
    amax = matrix.amax(cupy.asarray(x), "no_nan", True, TE_SIGN_MASK)
    magnitudes = np.abs(transformed).astype(np.float32)
    assert differing(amax, np.where(np.isnan(magnitudes), np.float32(0), magnitudes).max(-1)) == 0


def test_amax_of_a_transform():
    x = np.random.default_rng(0).standard_normal((96, 128)).astype(BF16)
    q = fp4kit.quantize(cupy.asarray(x), "nvfp4-te", hadamard=True)
    assert float(q.tensor_amax) == np.abs(hadamard_blocks(x).astype(np.float32)).max()


@pytest.mark.parametrize(
    "name", ["nvfp4-te", "nvfp4-te-4over6-mae-256", "mxfp8-te", "fp8-modelopt-channel", "int4-modelopt"]
)
def test_rows_of_a_stack(name):
    """All rows of a stack are transformed in one launch, because runs of 16 elements never cross rows."""
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 128)).astype(BF16)
    engine = import_module("fp4kit.cuda.quantize")
    with patch.object(engine, "quantize_matrix", wraps=engine.quantize_matrix) as launched:
        check(x, name, hadamard=True)
    assert launched.call_count == 1
    check(x[:, :, 0], name, hadamard="no_signs")
