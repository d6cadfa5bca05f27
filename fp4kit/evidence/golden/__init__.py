"""Recorded outputs of the producers, and the comparison of recipes with them."""
