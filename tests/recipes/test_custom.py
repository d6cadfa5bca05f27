"""Test custom_recipe: what it makes, what it rejects, and that every function accepts formats of one's own."""

import pickle
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from together import together

import fp4kit
from fp4kit.cuda.dispatch import unsupported
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, E2M1, E3M2, E4M3, E8M0, INT4, INT8, NF4, Codebook, ElementFormat
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.serialization import as_data, from_data

V, T = ValueError, TypeError
UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
X = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
RECIPES_OF_OURS = {
    "float32": fp4kit.custom_recipe("float32", NF4, block=64),
    "float16": fp4kit.custom_recipe("float16", INT4, "float16", 128, scale_rounding="up"),
    "bfloat16": fp4kit.custom_recipe("bfloat16", Codebook([-1, 0, 1], name="Ternary"), "bfloat16", 32),
    "UE5M3": fp4kit.custom_recipe("UE5M3", E2M1, UE5M3, 16, scale_rounding="up"),
    "E3M2": fp4kit.custom_recipe("E3M2", BNB_FP4, E3M2, 32, tensor_scale=True),
    "E8M0": fp4kit.custom_recipe("E8M0", INT8, E8M0, 32, scale_rounding="down"),
    "square": fp4kit.custom_recipe("square", NF4, UE5M3, (16, 16)),
    "rows under float32": fp4kit.custom_recipe("rows under float32", NF4, block=(8, 32)),
}
ours = pytest.mark.parametrize("r", RECIPES_OF_OURS.values(), ids=RECIPES_OF_OURS)

WRONG = [  # (the arguments, the error, its text)
    ({"id": "nvfp4-te"}, V, "id is 'nvfp4-te', which is the id of a producer's recipe"),
    ({"id": ""}, V, "id is ''; needs a name"),
    ({"element": "NF4"}, T, "element is 'NF4'; needs an ElementFormat"),
    ({"element": UE5M3}, V, "element is UE5M3; needs a format with a sign and a zero"),
    ({"scale": "float64"}, V, "scale is 'float64'; needs an ElementFormat"),
    ({"scale": np.float32}, T, "scale is <class 'numpy.float32'>; needs an ElementFormat"),
    ({"scale": NF4}, V, "scale is NF4; block_rule 'amax' needs a float format"),
    ({"scale": E8M0, "tensor_scale": True}, V, "scale is E8M0, whose largest value 1.7e+38 leaves no range to a"),
    ({"scale": INT8}, V, "scale is INT8; block_rule 'amax' needs a float format"),
    ({"scale": ElementFormat("E4M3", 4, 3, 8)}, V, "scale is E4M3; is not fp4kit.formats.E4M3, although it has this"),
    ({"scale": ElementFormat("UE7M1", 7, 1, 0, signed=False)}, V, "needs a format with values from 2^-100 to 2^100"),
    ({"scale_rounding": "ceil"}, V, "scale_rounding is 'ceil'; needs one of nearest, up, down"),
    ({"scale_rounding": "up"}, V, "scale_rounding is 'up', but scale is 'float32'"),
    ({"tensor_scale": True}, V, "tensor_scale is True, but scale is 'float32'"),
    ({"tensor_scale": 1}, T, "tensor_scale is 1; needs True or False"),
    ({"block": 15}, V, "block is (1, 15); needs a multiple of 2 columns"),
    ({"block": True}, T, "block is True; needs (rows, columns)"),
]
CHANGES = [  # (the recipe, the replaced fields, the error's text)
    ("UE5M3", {"block_rule": "modelopt", "apply": "divide"}, "scale is UE5M3; needs E4M3 or E8M0, the formats that"),
    ("E3M2", {"tensor_rule": "te"}, "tensor_rule is 'te'; block_rule is 'amax'; needs 'amax'"),
    ("float32", {"tensor_rule": "fp8_modelopt"}, "element is NF4; is a table of values; needs block_rule 'amax' or"),
    ("E3M2", {"decode_rule": "te"}, "decode_rule is 'te'; needs 'product' with the amax rules"),
    ("E8M0", {"search": "auto_round_powers"}, "needs"),
    ("float32", {"rounding": "rz"}, "rounding is 'rz'; needs 'rn' with the amax rules and elements NF4"),
    ("float32", {"sign": "negative"}, "sign is 'negative'; needs 'signbit'"),
    ("bfloat16", {"nan_code": 3}, "nan_code is 3; needs a code of the 3 values of Ternary"),
    ("UE5M3", {"apply": "divide"}, "apply is 'divide'; block_rule 'amax_up' needs 'multiply'"),
    ("float16", {"apply": "divide"}, "apply is 'divide'; needs 'multiply' with the amax rules"),
    ("UE5M3", {"four_over_six": "mae"}, "four_over_six is 'mae'; block_rule is 'amax_up'"),
    ("UE5M3", {"repacked": True}, "repacked is True; needs False"),
    ("UE5M3", {"round_scaled": True}, "round_scaled is True; needs False"),
    ("UE5M3", {"rounding": "rnw"}, "rounding is 'rnw'; needs one of rn, rz, rna, rnz"),
    ("E3M2", {"scale_max": 256}, "scale_max is 256; needs 448"),
    ("E8M0", {"fake_rule": "mx_modelopt"}, "fake_rule"),
    ("UE5M3", {"flush": True}, "flush is True; block_rule 'amax_up' needs False"),
]


@together("arguments, error, text", WRONG)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=r"^custom_recipe: ") as caught:
        fp4kit.custom_recipe(**{"id": "mine", "element": NF4, "scale": "float32"} | arguments)
    assert text in str(caught.value)


@together("name, changes, text", CHANGES)
def test_wrong_variants(name, changes, text):
    with pytest.raises(ValueError, match=f"^Recipe {name}: ") as caught:
        replace(RECIPES_OF_OURS[name], **changes)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", [name for name, r in RECIPES.items() if r.block_rule or r.tensor_rule])
def test_no_recipe_of_a_producer_takes_a_table_or_another_scale_format(name):
    with pytest.raises(ValueError, match=f"^Recipe {name}: "):
        replace(RECIPES[name], element=NF4)
    if RECIPES[name].scale is not None:
        with pytest.raises(ValueError, match=f"^Recipe {name}: scale is UE5M3; needs E4M3 or E8M0"):
            replace(RECIPES[name], scale=UE5M3)
        with pytest.raises(ValueError, match=f"^Recipe {name}: "):
            replace(RECIPES[name], tensor_rule="amax", tensor_scaling="tensor")


@ours
def test_recipes_are_values(r, tmp_path):
    assert (
        pickle.loads(pickle.dumps(r))
        == r
        == from_data(as_data(r))
        == Recipe(**{f.name: getattr(r, f.name) for f in fields(r)})
    )
    q = agree(fp4kit.quantize, X, r)
    path = tmp_path / "q.safetensors"
    fp4kit.save(path, {"w": q})
    loaded = fp4kit.load(path)["w"]
    assert loaded.recipe == r and loaded.equals(q) and pickle.loads(pickle.dumps(q)).equals(q)
    again = fp4kit.Quantized.from_parts(
        q.packed, block_scale=q.block_scale, tensor_scale=q.tensor_scale, recipe=r, shape=q.shape, dtype=q.dtype
    )
    assert_same_bits(agree(fp4kit.dequantize, again), fp4kit.dequantize(q))
    assert r.id in str(r) and str(r.element) in str(r) and r.id in str(q) and "<" in q._repr_html_()


@ours
def test_functions(r):
    """Functions that combine others give the results of those: fake quantization, given scales, other axes, groups."""
    q = fp4kit.quantize(X, r)
    assert_same_bits(agree(fp4kit.fake_quantize, X, r), fp4kit.dequantize(q))
    given = agree(fp4kit.quantize, X, r, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
    assert_same_bits(given.packed, q.packed)
    assert_same_bits(agree(fp4kit.quantize, X.T, r, axis=0).packed, q.packed)
    assert_same_bits(fp4kit.quantize_grouped([X, X], r)[1], q)
    assert fp4kit.compare(X, q).sqnr > 3
    assert r.id in fp4kit.identify(q, X).exact
    decoded = fp4kit.dequantize(q, dtype=ml_dtypes.bfloat16).astype(np.float64)
    product = decoded @ decoded.T
    np.testing.assert_allclose(fp4kit.matmul(q, q, unit="dequantized"), product, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=r"no matrix unit multiplies|no instruction"):
        fp4kit.matmul(q, q, unit="sm100")
    if r.scale is not None:
        assert fp4kit.unswizzle(fp4kit.swizzle(q, "swizzled_128x4")).equals(q)
    assert not unsupported(r), "the kernels compute these recipes"


@ours
def test_stochastic_rounding_needs_float_elements(r):
    if r.element == E2M1:
        agree(fp4kit.quantize, X, r, rounding="stochastic", seed=3)
    else:
        with pytest.raises(ValueError, match=f"^quantize: {r.id} has no stochastic rounding"):
            fp4kit.quantize(X, r, rounding="stochastic", seed=3)


GRID = (0.5, 1.25, 0.25)


@pytest.mark.parametrize("r", [r for r in RECIPES_OF_OURS.values() if r.block_rows == 1], ids=lambda r: r.id)
@pytest.mark.parametrize("weights", [None, np.linspace(0, 1, 128, dtype=np.float32)], ids=["", "weights"])
def test_search_scales(r, weights):
    """The search finds, for each block, the first multiple of its amax that gives the smallest squared error."""
    found = agree(fp4kit.search_scales, X, r, candidates=GRID, weights=weights)
    name = "tensor_amax" if r.scale is None else "block_amax"
    amax = np.abs(X).reshape(64, -1, r.block_size).max(-1)
    multiples = np.float32([0.5, 0.75, 1, 1.25])
    losses = []
    for multiple in multiples:
        values = fp4kit.fake_quantize(X, r, **{name: amax * multiple})
        d = (X.astype(np.float64) - values) ** 2 * (1 if weights is None else weights)
        losses.append(d.reshape(64, -1, r.block_size).sum(-1))
    least = np.min(losses, axis=0)
    chosen = np.rint((found / amax - 0.5) * 4).astype(int)
    assert found.shape == amax.shape and len(np.unique(chosen)) > 1
    np.testing.assert_allclose(np.take_along_axis(np.array(losses), chosen[None], 0)[0], least, rtol=1e-9)


def test_search_scales_needs_blocks_of_one_row():
    with pytest.raises(ValueError, match="square cannot be searched"):
        fp4kit.search_scales(X, RECIPES_OF_OURS["square"])


def test_scale_codes_beyond_the_format_are_rejected():
    """A byte above 63 is no E3M2 scale, so neither a Quantized nor quantize accepts it."""
    q = fp4kit.quantize(X, RECIPES_OF_OURS["E3M2"])
    wrong = q.block_scale.copy()
    wrong[-1, -1] = 64
    text = "block_scale holds bytes above 63; needs codes of E3M2, which has 6 bits"
    with pytest.raises(ValueError, match=f"^Quantized: {text}"):
        replace(q, block_scale=wrong)
    with pytest.raises(ValueError, match=f"^quantize: {text}"):
        fp4kit.quantize(X, q.recipe, block_scale=wrong, tensor_scale=q.tensor_scale)
    with pytest.raises(TypeError, match=r"block_scale is float32; UE5M3 needs uint8 bit patterns of UE5M3$"):
        fp4kit.quantize(X, RECIPES_OF_OURS["UE5M3"], block_scale=np.ones((64, 8), np.float32))


def test_compare_counts_steps_between_neighboring_values():
    """Codes 1 and 7 of BNB_FP4 are two steps apart: they stand for 1/192 and 1/4, and the only value between is 1/6."""
    codes, others = np.full((1, 32), 1, np.uint8), np.full((1, 32), 7, np.uint8)
    q = fp4kit.quantize(X[:1, :32], fp4kit.custom_recipe("fp4", BNB_FP4, block=32))
    q, other = (replace(q, packed=fp4kit.pack(c)) for c in (codes, others))
    assert fp4kit.compare(q, other).max_steps == 2


def test_blocks_of_zeros_are_counted():
    x = X[:2].copy()
    x[1] = 0
    for name in ("float32", "E3M2"):
        q = fp4kit.quantize(x, RECIPES_OF_OURS[name])
        blocks = 128 // q.recipe.block_size
        assert f"50%: {blocks} of {2 * blocks}" in str(q)


def test_recipes_of_the_table_are_not_own():
    assert E4M3 in {r.scale for r in RECIPES.values()}
    assert not any(
        (r.block_rule or "").startswith("amax") or (r.tensor_rule or "").startswith("amax") for r in RECIPES.values()
    )
