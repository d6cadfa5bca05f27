"""Define recipes: the complete arithmetic of each producer for a format, as data that names rules.

A producer is a library or standard that defines how to quantize. Each producer has one module here, and table.py
collects the recipes of all modules.
"""

from fp4kit.recipes.schema import Recipe, is_simple
from fp4kit.recipes.table import (
    ALIASES,
    ALL_RECIPES,
    PRODUCER_ALIASES,
    RECIPES,
    custom_recipe,
    family,
    name_for_inputs,
    recipe,
    recipe_of,
    recipes,
    several,
)

__all__ = [
    "ALIASES",
    "ALL_RECIPES",
    "PRODUCER_ALIASES",
    "RECIPES",
    "Recipe",
    "custom_recipe",
    "family",
    "is_simple",
    "name_for_inputs",
    "recipe",
    "recipe_of",
    "recipes",
    "several",
]
