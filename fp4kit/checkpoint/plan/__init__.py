"""Decide what happens to each tensor, before any work starts."""
