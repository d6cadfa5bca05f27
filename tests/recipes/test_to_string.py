"""Test recipes as strings: each recipe, and variants in every field, come back from their string.

The string is the same in every process.
"""

import doctest
import importlib
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace

import pytest

from fp4kit.evidence.fuzz.recipes import Picks, Pool, draw_variant
from fp4kit.formats import ElementFormat
from fp4kit.recipes import ALIASES, RECIPES, Recipe, recipe

spec = importlib.import_module("fp4kit.recipes.serialization")
E3M0 = ElementFormat("E3M0", 3, 0, 3)


@pytest.mark.parametrize("id", RECIPES)
def test_a_recipe_of_the_table_is_its_id(id):
    assert spec.to_spec(id) == spec.to_spec(RECIPES[id]) == id and spec.from_spec(id) is RECIPES[id]
    variant = replace(RECIPES[id], id="variant")
    text = spec.to_spec(variant)
    assert spec.from_spec(text) == variant and json.loads(text).keys() == {field.name for field in fields(Recipe)}


def drawn():
    """Yield random variants of every recipe with one to four changes. Invalid combinations are left out."""
    d = Picks(1, Pool())
    for id in RECIPES:
        for changes in range(1, 5):
            with suppress(ValueError):  # no rule allows this combination of fields
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


def test_an_alias_is_the_recipe():
    for alias, id in ALIASES.items():
        assert spec.to_spec(alias) == id and spec.from_spec(alias) == recipe(id)


def test_the_string_is_the_same_in_another_process():
    code = (
        "import importlib, dataclasses, fp4kit; spec = importlib.import_module('fp4kit.recipes.serialization');"
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


def test_the_examples_of_docstrings():
    found = doctest.testmod(spec)
    assert found.attempted > 2 and not found.failed
