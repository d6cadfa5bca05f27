"""Test that the package does not grow beyond the limits of tools/house.py."""

from __future__ import annotations

import pytest
from tool_module import tool_module


@pytest.mark.exhaustive
def test_limits() -> None:
    house = tool_module("house")
    found = house.counts()
    above = {name: found[name] for name, (limit, _) in house.LIMITS.items() if found[name] > limit}
    assert not above, "tools/house.py counts more than its limits: take something away, or argue for more"
