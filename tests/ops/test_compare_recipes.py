"""Test fp4kit.compare_recipes against fp4kit.compare, pair by pair."""

import ml_dtypes
import numpy as np
import pytest

import fp4kit

IDS = ["nvfp4-te", "nvfp4-compressed-tensors", "nvfp4-modelopt-fake", "mxfp4-ocp", "nvfp4-te"]


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)


@pytest.mark.parametrize("axis", [-1, 0])
def test_shares_are_those_of_compare(x, axis):
    found = fp4kit.compare_recipes(x, IDS, axis=axis)
    kinds = [fp4kit.recipe(id).fake_only for id in IDS]
    results = [
        fp4kit.fake_quantize(x, id, axis=axis) if fake else fp4kit.quantize(x, id, axis=axis)
        for id, fake in zip(IDS, kinds, strict=True)
    ]
    for i, a in enumerate(results):
        assert found.codes[i, i] == found.values[i, i] == 0 and found.first[i, i] is None
        for j, b in enumerate(results[:i]):
            pair = fp4kit.compare(a, b)
            for shares, (differ, of) in (
                (found.codes, pair.codes if a is not b else (0, 1)),
                (found.scales, pair.scales),
                (found.values, pair.values),
            ):
                assert np.array_equal(shares, shares.T, equal_nan=True)
                if of:
                    assert shares[i, j] == differ / of, (IDS[i], IDS[j])
            assert (found.first[i, j] is None) == (pair.values[0] == 0)
    assert found.first[0, 4] is None and np.isnan(found.codes[0, 2]) and np.isnan(found.scales[0, 3])


def test_first_is_the_first_element_whose_code_differs(x):
    x = x.astype(ml_dtypes.bfloat16)  # compressed-tensors rounds its tensor scale to this dtype
    found = fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-compressed-tensors"], axis=0)
    a, b = (fp4kit.unpack(fp4kit.quantize(x, id, axis=0).packed).T for id in found.recipes)
    assert found.first[0, 1] == tuple(np.argwhere(a != b)[0]) and found.codes[0, 1] == np.mean(a != b) > 0


def test_codes_that_are_equal_leave_the_first_value():
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    found = fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-torchao"])
    assert found.codes[0, 1] == 0 < found.values[0, 1] and found.first[0, 1] == (0, 0)


def test_a_given_amax_reaches_recipes_with_a_tensor_scale(x):
    given = fp4kit.compare_recipes(x, ["nvfp4-te", "mxfp4-ocp", "nvfp4-flashinfer"], tensor_amax=np.float32(100))
    amax = fp4kit.quantize(x, "nvfp4-te", tensor_amax=np.float32(100))
    other = fp4kit.quantize(x, "nvfp4-flashinfer", tensor_amax=np.float32(100))
    assert given.codes[0, 2] == np.mean(fp4kit.unpack(amax.packed) != fp4kit.unpack(other.packed))


def test_it_prints_a_matrix_and_a_table(x):
    found = fp4kit.compare_recipes(x, IDS[:2])
    assert "Codes that differ" in str(found) and "1 and 2" in str(found) and "<table" in found._repr_html_()
    assert repr(found) == "RecipeComparison(2 recipes; 0 of 1 pairs have equal values)"


def test_errors(x):
    with pytest.raises(TypeError, match="recipes is 'nvfp4-te'; needs a list of at least two recipes"):
        fp4kit.compare_recipes(x, "nvfp4-te")
    with pytest.raises(ValueError, match="recipes has 1 entries; needs at least two"):
        fp4kit.compare_recipes(x, ["nvfp4-te"])
    with pytest.raises(ValueError, match=r"compare_recipes: .*nvfp4"):
        fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-tea"])
