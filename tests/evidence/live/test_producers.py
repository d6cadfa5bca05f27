"""The producers that are installed, for a second each: every drawn array is equal in every bit."""

import pytest

import fp4kit
from fp4kit.evidence.live import run

ADAPTERS = {(adapter.title or adapter.name): adapter for adapter in run.adapters()}
SECONDS = 1.0


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_drawn_array_is_equal(name):
    """What is not installed says so; what is installed runs, or cannot be imported on a CPU and says why."""
    result = run.run(ADAPTERS[name], fp4kit.recipes(), SECONDS, seed=0)
    if result.reason:
        try:
            version = run.find(ADAPTERS[name])[0]
        except run.NotRun:
            assert result.reason == "is not installed"
        else:
            pytest.fail(f"{name} {version} {result.reason}")
        return
    assert all(tally.arrays > 0 for tally in result.recipes.values()) and result.total.arrays > 0
    assert not result.total.differing, "\n".join(found.script for found in result.found)


def test_gguf_runs():
    """It comes with the extra for tests, so that the test above is never of nothing."""
    assert run.run(ADAPTERS["gguf"], ("mxfp4-gguf",), 0.1, seed=1).recipes["mxfp4-gguf"].arrays > 10
