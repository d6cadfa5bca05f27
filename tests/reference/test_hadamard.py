"""Test the randomized Hadamard transform: it equals its matrix, sums in the documented order, and precedes all other
steps.
"""

import numpy as np
import pytest
from inputs import BF16, FINITE, NAMES, ORDINARY, codes_of

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.stochastic import hadamard_blocks

recipes = pytest.mark.parametrize("name", NAMES)


TE_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
SYLVESTER = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])


@pytest.mark.parametrize("hadamard, signs", [(True, TE_SIGNS), ("no_signs", np.ones(16))])
def test_hadamard_of_impulses(hadamard, signs):
    """A block with a single 1 at element i becomes row i of diag(s) H / 4.

    E2M1 holds this row exactly: with a scale of 1 / 24, +-0.25 is 6 or -6.
    """
    x = np.eye(16, dtype=np.float32)
    q = fp4kit.quantize(x, "nvfp4-te", hadamard=hadamard)
    assert q.tensor_amax == 0.25
    assert_same_bits(codes_of(q), np.where(signs[:, None] * SYLVESTER > 0, 7, 15).astype(np.uint8))


@pytest.mark.parametrize("hadamard, signs", [(True, TE_SIGNS), ("no_signs", np.ones(16))])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_hadamard_is_the_matrix_product(hadamard, signs, dtype):
    """The transform equals the product with its matrix, rounded once.

    Inputs are integers below 2^8, so that every float64 sum is exact.
    """
    x = np.random.default_rng(0).integers(-255, 256, (8, 64)).astype(dtype)
    expected = x.astype(np.float64).reshape(-1, 16) @ (signs[:, None] * SYLVESTER / 4)
    transformed = hadamard_blocks(x) if hadamard is True else hadamard_blocks(x, 0)
    assert_same_bits(transformed, expected.reshape(x.shape).astype(dtype))


def butterflies(block):
    """Transform 16 numbers by butterflies, in Python floats (float64).

    First multiply by the signs, then take sums and differences at distances 1, 2, 4 and 8, then divide by 4.
    """
    y = [float(v) * int(s) for v, s in zip(block, TE_SIGNS, strict=True)]
    for distance in (1, 2, 4, 8):
        y = [y[i ^ distance] - y[i] if i & distance else y[i] + y[i ^ distance] for i in range(16)]
    return [v / 4 for v in y]


def test_the_order_of_hadamard_sums():
    """The transform adds in the documented order, so that every device gives equal bits.

    The order decides the bits if float64 sums round and then cancel.
    """
    rng = np.random.default_rng(2)
    x = (1000 * rng.standard_normal((64, 16))).astype(np.float32)
    x[:, 3], x[:, 9] = 2.0**60, -(2.0**60)
    assert_same_bits(hadamard_blocks(x), np.array([butterflies(block) for block in x]).astype(np.float32))


@recipes
@pytest.mark.parametrize("hadamard", [True, "no_signs"])
def test_hadamard_comes_before_everything(name, hadamard):
    for x in (ORDINARY, FINITE["bf16"]):
        transformed = hadamard_blocks(x) if hadamard is True else hadamard_blocks(x, 0)
        assert_same_bits(fp4kit.quantize(x, name, hadamard=hadamard), fp4kit.quantize(transformed, name))


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, 0x7F800001), (np.float16, 0x7C01), (BF16, 0x7F81)])
def test_a_signalling_nan_gives_nan_and_no_warning(dtype, bits):
    x = np.ones((2, 32), dtype)
    x.view(f"u{x.itemsize}")[:, 3] = bits
    y = hadamard_blocks(x).astype(np.float32)
    assert np.isnan(y[:, :16]).all() and np.isfinite(y[:, 16:]).all()
