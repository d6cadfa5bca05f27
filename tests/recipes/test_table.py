"""Test the table of recipes, recipes as strings and data, recipes of own formats, and those of loaded checkpoints."""

import importlib
import json
import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from exhaustive import exhaustive
from inputs import seeded
from together import together

import fp4kit
from fp4kit.cli.output import RECIPE_COLUMNS, recipe_rows
from fp4kit.cuda.dispatch import unsupported
from fp4kit.evidence.fuzz.recipes import Picks, Pool, draw_variant
from fp4kit.evidence.golden.golden_set import RECORDED
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, E2M1, E3M2, E4M3, E8M0, INT4, INT8, NF4, Codebook, ElementFormat, bit_patterns
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, RECIPES, Recipe, recipe, rules
from fp4kit.recipes.schema import EVIDENCE, TEXTS, Versions, as_stored, fields_of, of_format, searching
from fp4kit.recipes.table import ALL_RECIPES, as_data, from_data, from_spec, to_spec
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.dequantize import DECODE_RULES
from fp4kit.reference.fake import FAKE_RULES
from fp4kit.reference.tensor_rules import TENSOR_RULES
from fp4kit.units import KINDS, UNITS
from fp4kit.units import from_spec as unit_from_spec
from fp4kit.units import to_spec as unit_spec

recipes = together("r", RECIPES.values(), ids=lambda r: r.id)
FORMATS = {
    "nvfp4": ("E2M1", "E4M3"),
    "mxfp4": ("E2M1", "E8M0"),
    "mxfp6": ("E2M3 E3M2", "E8M0"),
    "mxfp8": ("E4M3 E5M2", "E8M0"),
    "fp8": ("E4M3 E5M2", None),
    "fp4": ("E2M1", None),
    "nvint4": ("INT4", "E4M3"),
    "if4": ("IF4", "E4M3"),
    "int8": ("INT8", None),
    "int4": ("INT4", None),
}


def test_ids():
    assert fp4kit.recipes() == tuple(ALL_RECIPES) and {*ALL_RECIPES} > {*RECIPES}
    assert [r.id for r in RECIPES.values()] == list(RECIPES)
    plain = {replace(r, id="any", source="", exact="", versions=None) for r in RECIPES.values()}
    assert len(plain) == len(RECIPES)  # no two names share one rule
    assert all(re.fullmatch(r"(nvfp4|nvint4|if4|mxfp[468]|fp[48]|int[48])(-[a-z0-9]+)+", name) for name in RECIPES)


def test_a_row_sets_the_fields_that_it_names():
    found = fields_of("tensor_rule=None flush=True narrow=False nan_code=0xB scale_max=256 block=16x8 apply=divide")
    numbers = {"nan_code": 11, "scale_max": 256, "block": (16, 8)}
    assert found == {"tensor_rule": None, "flush": True, "narrow": False, "apply": "divide"} | numbers
    with pytest.raises(TypeError, match="blok_rule"):
        of_format(fp4kit.formats.NVFP4, "nvfp4-any", "blok_rule=te", source="", exact="")


def test_every_rule_is_used_or_decodes_recorded_arrays():
    used = {name for r in ALL_RECIPES.values() for name in (r.block_rule, r.tensor_rule, r.fake_rule, r.decode_rule)}
    narrow = [rule for name, rule in rules.DECODE_RULES.items() if name in used]
    used |= {name for rule in narrow for name in (rule.float16, rule.bfloat16)}
    own = {name for name in {*BLOCK_RULES, *TENSOR_RULES} if name.startswith("amax")}  # for formats of one's own
    assert set(BLOCK_RULES) | set(TENSOR_RULES) | set(FAKE_RULES) <= used | own | {"divisor"}  # of schema.by_divisor
    # These are alternative decoders of existing codes.
    loaders = {name for name, rule in rules.DECODE_RULES.items() if rule.loader}
    assert set(DECODE_RULES) - used - loaders == {"e8m0_unbounded", "stored_divisor", "fouroversix_float32"}


@recipes
def test_fields_agree(r):
    elements, scale = FORMATS[r.id.split("-")[0]]
    assert (r.fake_only or r.element.name in elements.split()) and (r.scale.name if r.scale else None) == scale
    assert r.scale is not E8M0 or r.tensor_scaling == "none"
    assert r.is_packed == (r.element.bits == 4)


@recipes
def test_block_sizes(r):
    size = {"nvfp4": 16, "nvint4": 16, "if4": 16, "mxfp4": 32, "mxfp6": 32, "mxfp8": 32}.get(r.id.split("-")[0])
    if size:
        size = 16 if r.id == "mxfp4-sglang-kv" else size
        assert r.block == ((size, size) if r.id.endswith("-2d") else (1, size))
        assert r.block_size == size
    assert r.block_size == (r.block[1] if r.block else 1)


@recipes
def test_text_fields_for_the_tables(r):
    assert r.source and r.exact
    assert r.format_name == r.id.split("-")[0].upper() and f"{r.id}-".startswith(
        f"{r.format_name.lower()}-{r.producer}-"
    )
    assert repr(r) == f"Recipe({r.id!r})" and fp4kit.recipe(r.id) is r and fp4kit.recipe(r) is r


def test_producers():
    found = {r.producer for r in RECIPES.values()}
    assert {"te", "compressed-tensors", "auto-round", "triton-kernels", "gguf"} < found
    assert not found & {"compressed", "auto", "triton"} and not any(producer in RECIPES for producer in found)


def test_aliases_of_producers_say_what_differs():
    for id, alias in PRODUCER_ALIASES.items():
        assert alias.id == id and ALIASES[id] == alias.of and alias.source and alias.exact
        assert f"{id} {alias.exact}" in recipe_rows([alias.of])[0][3] and alias.exact in str(RECIPES[alias.of])


@recipes
def test_versions_are_stated_everywhere(r):
    assert type(r.versions) is Versions and all(r.versions)
    assert any(version in r.exact for version in r.versions)
    assert r.versions.last in r.source or r.producer == "qat"  # qat has no versions
    assert recipe_rows([r.id])[0][RECIPE_COLUMNS.index("versions")] == str(r.versions) and str(r.versions) in str(r)


def test_versions_change_no_bit_and_survive_storage():
    r = RECIPES["mxfp4-ocp"]
    other = replace(r, versions=["0.1", "0.2"])
    assert other != r and other.versions == Versions("0.1", "0.2") and str(other.versions) == "0.1 to 0.2"
    assert from_spec(to_spec(other)) == other and type(from_spec(to_spec(other)).versions) is Versions
    assert pickle.loads(pickle.dumps(other)) == other
    x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    assert fp4kit.quantize(x, other).packed.tobytes() == fp4kit.quantize(x, r).packed.tobytes()
    assert "versions" not in str(replace(r, versions=None))


def _variants(table, texts):
    """Yield (name of a field, record of the table, its variant with a value that another record has there)."""
    names = [one.name for one in fields(next(iter(table.values()))) if one.name not in texts]
    for name, r in product(names, [*table.values()][:: max(len(table) // 130, 1)]):
        for value in {getattr(other, name) for other in table.values()} - {getattr(r, name)}:
            try:
                variant = replace(r, **{name: f"my-{value}" if name == "id" else value})
            except ValueError:
                continue
            yield name, r, variant
            break


def test_a_variant_claims_nothing_that_is_said_of_a_recipe_in_the_table():
    varied = set()
    for name, r, other in _variants(ALL_RECIPES, TEXTS):
        varied.add(name)
        assert {text: getattr(other, text) for text in TEXTS} == TEXTS and not other.evidence, (name, r.id)
        assert not any(word in str(other) for word in (r.exact, r.source, "  versions")), (name, r.id)
        assert pickle.loads(pickle.dumps(other)) == from_spec(to_spec(other)) == other
        again = replace(other, **{name: getattr(r, name)})
        assert again == r and hash(again) == hash(r) and again.exact == r.exact
        own = replace(other, **(stated := {"source": "mine", "exact": "nothing", "versions": ("1", "2")}))
        assert {text: getattr(own, text) for text in TEXTS} == stated and from_spec(to_spec(own)) == own
    # A producer's rules take one format of scales
    assert varied == {one.name for one in fields(Recipe)} - {*TEXTS, "scale"}


def test_every_report_says_what_a_variant_changes():
    rz, slow = replace(RECIPES["nvfp4-te"], rounding="rz"), replace(UNITS["sm90"], promote=128)
    x, both = np.random.default_rng(0).standard_normal((16, 128), np.float32), ["nvfp4-te", rz]
    q, contract = fp4kit.quantize(x, rz), fp4kit.Contract(patterns=[("*.down_proj", rz)], unit=slow)
    explained, fp8 = fp4kit.explain(x, both, (0, 0)), replace(RECIPES["fp8-modelopt"], sign="negative")
    reports = [rz, q, fp4kit.compare(q, q), fp4kit.compare_recipes(x, both), explained, contract, fp4kit.identify(q, x)]
    reports += [fp4kit.plot.histogram(q).get_title(), fp4kit.plot.block(x, rz, (0, 0)).get_title(loc="left")]
    for text in (*map(str, reports), *map(repr, (rz, q, explained)), str(fp4kit.Contract(rz).diff(contract))):
        assert "nvfp4-te with rounding=rz" in text
    budget = str(fp4kit.error_budget(x, x, fp8, unit=slow))
    assert f"weight, {fp8.title} " in budget and "accumulation, sm90 with promote=128 " in budget
    assert slow.title in repr(slow) and slow.title in str(slow) and f"unit: {slow.title}" in str(contract)


def test_a_variant_of_a_unit_claims_nothing_that_was_checked_of_the_unit():
    varied = set()
    for name, u, other in _variants(UNITS, ("checked",)):
        varied.add(name)
        assert other.checked == "no" and "checked   no\n" in f"{other}\n" and unit_from_spec(unit_spec(other)) == other
        assert replace(other, **{name: getattr(u, name)}) == u and replace(other, checked="by me").checked == "by me"
    assert varied >= {*KINDS, "id", "order"}
    slow = replace(UNITS["sm90"], promote=128)  # sm90 says that this was compared
    assert slow.checked == UNITS["sm90"].checked and replace(slow, promote=256).checked == "no"


def test_aliases():
    assert not set(ALIASES) & set(RECIPES)
    for alias, name in ALIASES.items():
        assert fp4kit.recipe(alias) is RECIPES[name] is spec.from_spec(alias) and spec.to_spec(alias) == name
    assert {name: ALIASES[name] for name in ("nvfp4", "mxfp4", "mxfp8")} == {
        "nvfp4": "nvfp4-te",
        "mxfp4": "mxfp4-ocp",
        "mxfp8": "mxfp8-te",
    }


def test_every_field_is_explained():
    for field in fields(Recipe):
        assert re.search(rf"\b{field.name}\b", Recipe.__doc__) or field.name == "id", field.name


spec = importlib.import_module("fp4kit.recipes.table")
E3M0 = ElementFormat("E3M0", 3, 0, 3)


@pytest.mark.parametrize("id", RECIPES)
def test_a_recipe_of_the_table_is_its_id(id):
    assert spec.to_spec(id) == spec.to_spec(RECIPES[id]) == id and spec.from_spec(id) is RECIPES[id]
    variant = replace(RECIPES[id], id="variant")
    text = spec.to_spec(variant)
    assert spec.from_spec(text) == variant and json.loads(text).keys() == {field.name for field in fields(Recipe)}


def drawn():
    """Yield random variants of every recipe with one to four changes."""
    d = Picks(1, Pool())
    for id in RECIPES:
        for changes in range(1, 5):
            yield draw_variant(d, id, changes).recipe


def test_variants_come_back():
    variants = [*drawn(), replace(RECIPES["nvfp4-torchao"], element=E3M0)]
    for variant in variants:
        text = spec.to_spec(variant)
        again = spec.from_spec(text)
        assert again == variant and again.element == variant.element and type(again.block) is type(variant.block)
        assert spec.to_spec(again) == text
    assert len({spec.to_spec(variant) for variant in variants}) == len(set(variants))
    assert len(variants) > 2 * len(RECIPES)


def test_the_string_is_the_same_in_another_process():
    code = (
        "import importlib, dataclasses, fp4kit; spec = importlib.import_module('fp4kit.recipes.table');"
        "print(spec.to_spec(dataclasses.replace(fp4kit.recipe('mxfp4-ocp'), block=(1, 16))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == spec.to_spec(replace(recipe("mxfp4-ocp"), block=(1, 16)))


VARIANT = json.loads(spec.to_spec(replace(recipe("mxfp4-ocp"), block=(1, 16))))


@pytest.mark.parametrize(
    "text, kind, message",
    [
        ("nvfp5", ValueError, "recipe: no recipe is called 'nvfp5'"),
        ("{", ValueError, "from_spec: '{' is not valid JSON"),
        (json.dumps({"id": "x"}), ValueError, "Recipe: the field 'element' is missing"),
        (json.dumps(VARIANT | {"size": 3}), ValueError, "Recipe: unknown field 'size'"),
        (
            json.dumps(VARIANT | {"element": "E9M9"}),
            ValueError,
            "Recipe: no format has the name 'E9M9'; needs one of E2M1",
        ),
        (json.dumps(VARIANT | {"block": [1, 3]}), ValueError, "Recipe mxfp4-ocp: block is"),
        (json.dumps(VARIANT | {"static": 1}), TypeError, "Recipe mxfp4-ocp: static is 1; needs True or False"),
    ],
)
def test_errors(text, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        spec.from_spec(text)


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
    ({"element": "NF5"}, V, "element is 'NF5'; needs an ElementFormat, or one of E2M1"),
    ({"element": "e2m1"}, V, "; did you mean E2M1?"),
    ({"element": 4}, T, "element is 4; needs a format, such as fp4kit.formats.E2M1"),
    ({"element": UE5M3}, V, "element is UE5M3; needs a format with a sign and a zero"),
    ({"scale": "float64"}, V, "scale is 'float64'; needs an ElementFormat, or one of float32"),
    ({"scale": "E4M3FN"}, V, "; did you mean E4M3?"),
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


def test_names_stand_for_formats():
    assert fp4kit.custom_recipe("E3M2", "BNB_FP4", "E3M2", 32, tensor_scale=True) == RECIPES_OF_OURS["E3M2"]


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
    given = {"recipe": r, "shape": q.shape, "dtype": q.dtype, "tensor_scale_divides": False}
    again = fp4kit.Quantized.from_parts(q.packed, block_scale=q.block_scale, tensor_scale=q.tensor_scale, **given)
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
    with pytest.raises(TypeError, match=r"block_scale is float32; UE5M3 .* UE5M3; amaxes, such as"):
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


WITH_CODES = [name for name, r in RECIPES.items() if not r.fake_only]


def assert_encodes_alike(x, name):
    """Assert that the recipe and its as_stored copies give equal codes of x, and the values to which these decode."""
    r, how = RECIPES[name], seeded(name, x)
    q = fp4kit.quantize(x, r, **how)
    for divides in (False, True) if r.scale is not None and r.scale.name == "E4M3" else (False,):
        stored = as_stored(r, divides)
        found = fp4kit.quantize(x, stored, **how)
        assert np.array_equal(found.packed, q.packed)
        assert q.block_scale is None or np.array_equal(found.block_scale, q.block_scale)
        expected = bit_patterns(fp4kit.dequantize(replace(q, recipe=stored)))
        assert np.array_equal(bit_patterns(fp4kit.fake_quantize(x, stored, **how)), expected)


@pytest.mark.parametrize("name", WITH_CODES)
def test_codes_and_fake_quantized_values(name):
    rng = np.random.default_rng(1)
    assert_encodes_alike((rng.standard_normal((128, 256)) * 3).astype(ml_dtypes.bfloat16), name)


@pytest.mark.parametrize("arrays", [10, *exhaustive([40])])
@pytest.mark.parametrize("name", [name for name in WITH_CODES if RECIPES[name].search])
def test_searches_measure_errors_by_the_rule_of_their_producer(name, arrays):
    """The search of auto-round chooses another scale for one in 50,000 blocks if it decodes by another rule."""
    rng = np.random.default_rng(0)
    for _ in range(arrays):
        assert_encodes_alike((rng.standard_normal((512, 512)) * np.exp(rng.uniform(-3, 2))).astype(np.float32), name)


@pytest.mark.parametrize("specified", [False, True])
def test_all_engines_search_by_the_rule_of_the_producer(specified):
    r = replace(RECIPES["nvfp4-auto-round-opt"], id="loaded", decode_rule="product")
    assert searching(r).decode_rule == "auto_round"
    assert searching(RECIPES["mxfp4-fp-quant-quest"]).decode_rule == "e8m0"
    x = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32)
    expected = fp4kit.quantize(x, "nvfp4-auto-round-opt")
    if specified:
        with fp4kit.specification():
            q = fp4kit.quantize(x, r)
    else:
        q = fp4kit.quantize(x, r)
    assert np.array_equal(q.packed, expected.packed) and np.array_equal(q.block_scale, expected.block_scale)


def test_evidence():
    """A recipe says whether it was compared with recordings or a live producer. A variant of it was compared with
    nothing."""
    r = RECIPES["mxfp4-triton-kernels"]
    live = "triton_kernels in vllm 0.33.0"
    assert r.evidence == {"GPU": ("producers_h200",), "CPU": ("triton_kernels",), "live": (live,)}
    assert f"recorded on a GPU (producers_h200), recorded on a CPU (triton_kernels), live ({live})" in str(r)
    assert replace(r, rounding="rz").evidence == {} and "evidence" not in str(replace(r, rounding="rz"))
    derived = RECIPES["nvfp4-deepseek-v4"]
    assert derived.evidence == {} and "derived from the producer's source code" in str(derived)
    column = RECIPE_COLUMNS.index("evidence")
    assert [row[column] for row in recipe_rows([r.id, derived.id])] == ["GPU, CPU, live", "derived"]


def test_recordings_of_gpus_are_those_that_their_readme_names():
    """Every file, or a variant of it, that counts as computed by a GPU has an H100 or H200 in its row, and no other."""
    rows = re.findall(r"^\| ([\w, ]+) \| (.*)$", (RECORDED / "README.md").read_text(), re.MULTILINE)
    named = {name for names, text in rows if "NVIDIA H" in text and "not by" not in text for name in names.split(", ")}
    counted = {row.file for row in ROWS if row.computed == "GPU"}
    by_difference = {"modelopt_fake", "vllm", "fouroversix"}  # the files with their differences are named
    assert counted - by_difference == (named & {row.file for row in ROWS})
    assert {row.computed for row in ROWS} == {*EVIDENCE} - {"live"}


def test_pages_repeat_the_evidence_of_recipes():
    pages = [path.read_text() for path in (Path(__file__).parents[2] / "docs" / "guides").glob("*.md")]
    tables = [table for page in pages for table in re.findall(r"\| evidence \|\n\| ---.*\n((?:\|.*\n)+)", page)]
    rows = [re.match(r"\| (`.*?`) \|.* \| (.*) \|", row) for table in tables for row in table.splitlines()]
    stated = [(name, row[2]) for row in rows if row for name in re.findall(r"`([\w-]+)`", row[1])]
    assert stated == [(name, ", ".join(recipe(name).evidence)) for name, _ in stated] and len(stated) > 4


def test_no_text_repeats_the_evidence():
    """Recipe.evidence is computed, so that a text beside it could become wrong."""
    assert [id for id, r in ALL_RECIPES.items() if re.search("not recorded|erived from", r.exact)] == []


@pytest.mark.parametrize(("name", "field"), [("name", "id"), ("roundng", "rounding"), ("element_format", "element")])
def test_a_misspelled_field_names_the_right_one(name: str, field: str) -> None:
    with pytest.raises(AttributeError, match=rf"^'Recipe' object has no attribute '{name}'; did you mean {field}\?$"):
        getattr(RECIPES["nvfp4-te"], name)
