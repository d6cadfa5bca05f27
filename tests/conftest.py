"""What all tests share: hypothesis that tries the same examples in every run, and the recorded outputs."""

import pytest
from hypothesis import settings

from fp4kit.golden import GoldenSet

settings.register_profile(
    "fp4kit", derandomize=True, deadline=None, max_examples=100, database=None, print_blob=False
)
settings.load_profile("fp4kit")


@pytest.fixture(scope="session")
def golden():
    """The producers' recorded outputs, tests/golden."""
    return GoldenSet.find()
