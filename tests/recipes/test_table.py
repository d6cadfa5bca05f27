"""Test the table of recipes: every name in it exists, and the fields of each recipe are consistent."""

import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.cli.output import RECIPE_COLUMNS, recipe_rows
from fp4kit.formats import E2M1, E4M3, E8M0, IF4
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, RECIPES, Recipe, rules
from fp4kit.recipes.rules import ROUNDINGS
from fp4kit.recipes.schema import Versions
from fp4kit.recipes.serialization import from_spec, to_spec
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import SIGNS
from fp4kit.reference.dequantize import DECODE_RULES
from fp4kit.reference.fake import FAKE_RULES
from fp4kit.reference.tensor_rules import TENSOR_RULES

recipes = together("r", RECIPES.values(), ids=lambda r: r.id)
FORMATS = {
    "nvfp4": ("E2M1", "E4M3"),
    "mxfp4": ("E2M1", "E8M0"),
    "mxfp6": ("E2M3 E3M2", "E8M0"),
    "mxfp8": ("E4M3 E5M2", "E8M0"),
    "fp8": ("E4M3 E5M2", None),
    "nvint4": ("INT4", "E4M3"),
    "if4": ("IF4", "E4M3"),
    "int8": ("INT8", None),
    "int4": ("INT4", None),
}


def test_ids():
    assert fp4kit.recipes() == tuple(RECIPES)
    assert [r.id for r in RECIPES.values()] == list(RECIPES)
    plain = {replace(r, id="any", source="", exact="", versions=None) for r in RECIPES.values()}
    assert len(plain) == len(RECIPES)  # no two names share one rule
    assert all(re.fullmatch(r"(nvfp4|nvint4|if4|mxfp[468]|fp8|int[48])(-[a-z0-9]+)+", name) for name in RECIPES)


@recipes
def test_names_exist(r):
    chooses = r.block_rule in ("four_over_six", "fouroversix_if4") and r.four_over_six
    assert r.block_rule is None or r.block_rule in BLOCK_RULES or chooses
    assert r.tensor_rule is None or r.tensor_rule in TENSOR_RULES
    assert r.decode_rule in DECODE_RULES
    assert r.fake_rule is None or r.fake_rule in FAKE_RULES
    assert r.rounding in ROUNDINGS and r.sign in SIGNS


def test_every_rule_is_used_or_decodes_recorded_arrays():
    used = {name for r in RECIPES.values() for name in (r.block_rule, r.tensor_rule, r.fake_rule, r.decode_rule)}
    narrow = [rule for name, rule in rules.DECODE_RULES.items() if name in used]
    used |= {name for rule in narrow for name in (rule.float16, rule.bfloat16)}
    own = {name for name in {*BLOCK_RULES, *TENSOR_RULES} if name.startswith("amax")}  # for formats of one's own
    assert set(BLOCK_RULES) | set(TENSOR_RULES) | set(FAKE_RULES) <= used | own
    # These are alternative decoders of existing codes.
    assert set(DECODE_RULES) - used == {"e8m0_unbounded", "stored_divisor", "fouroversix_float32"}


@recipes
def test_fields_agree(r):
    elements, scale = FORMATS[r.id.split("-")[0]]
    assert (r.fake_only or r.element.name in elements.split()) and (r.scale.name if r.scale else None) == scale
    assert (r.scale is None) == (r.block_rule is None)
    assert (r.tensor_scaling == "none") == (r.tensor_rule is None)
    assert r.scale is not E8M0 or r.tensor_scaling == "none"
    assert (r.block is None) == (r.scale is None and r.tensor_scaling != "block")
    assert r.fake_rule or not r.fake_only
    assert r.nan_code is None or 0 <= r.nan_code < 2**r.element.bits
    assert r.is_packed == (r.element.bits == 4)
    chosen = (r.block_rule, r.element, r.scale)
    assert r.four_over_six is None or chosen in (("four_over_six", E2M1, E4M3), ("fouroversix_if4", IF4, E4M3))
    assert not r.fast_error or r.four_over_six


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
    assert repr(r) == f"Recipe({r.id!r})"


@recipes
def test_recipe_finds_it(r):
    assert fp4kit.recipe(r.id) is r and fp4kit.recipe(r) is r


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
    assert replace(r, block=(1, 16)).versions == r.versions
    assert "versions" not in str(replace(r, versions=None))


def test_aliases():
    assert not set(ALIASES) & set(RECIPES)
    for alias, name in ALIASES.items():
        assert fp4kit.recipe(alias) is RECIPES[name]
    assert {name: ALIASES[name] for name in ("nvfp4", "mxfp4", "mxfp8")} == {
        "nvfp4": "nvfp4-te",
        "mxfp4": "mxfp4-ocp",
        "mxfp8": "mxfp8-te",
    }


def test_recipes_are_frozen():
    r = fp4kit.recipe("nvfp4-te")
    with pytest.raises(FrozenInstanceError):
        r.block = (1, 32)
    assert replace(r, block=(1, 32)) != r and replace(r) == r


def test_every_field_is_explained():
    for field in fields(Recipe):
        assert re.search(rf"\b{field.name}\b", Recipe.__doc__) or field.name == "id", field.name
