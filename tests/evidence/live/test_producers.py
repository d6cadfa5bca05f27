"""Test each installed producer for a second: on every drawn array, its output is bit-identical to fp4kit's."""

import pytest

import fp4kit
from fp4kit.evidence.live import run

ADAPTERS = {(adapter.title or adapter.name): adapter for adapter in run.adapters()}
SECONDS = 1.0


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_drawn_array_is_equal(name):
    """An installed producer gives equal results, or reports why it cannot be imported on a CPU.

    A producer that is not installed is reported as missing.
    """
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
    """At least one producer is really compared: the test extra installs gguf."""
    assert run.run(ADAPTERS["gguf"], ("mxfp4-gguf",), 0.1, seed=1).recipes["mxfp4-gguf"].arrays > 0
