"""Recipes: each producer's complete arithmetic for a format, as data that names rules; one module a producer."""

from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import ALIASES, PRODUCER_ALIASES, RECIPES, recipe, recipe_of, recipes

__all__ = ["ALIASES", "PRODUCER_ALIASES", "RECIPES", "Recipe", "recipe", "recipe_of", "recipes"]
