"""The pytest plugin of fp4kit: the option --fp4kit-engine and the fixture fp4kit_engine.

This module is not in the package fp4kit, because pytest imports it in every run, and must not import fp4kit with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fp4kit import Contract

_CONTRACT = pytest.StashKey["Contract"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --fp4kit-engine."""
    text = "engine, and scheme of its checkpoints, that the fixture fp4kit_engine describes, such as vLLM:nvfp4-w4a4"
    parser.getgroup("fp4kit").addoption("--fp4kit-engine", metavar="ENGINE[:SCHEME]", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Look up the engine of the option once, so that an unknown one stops the run before any test."""
    named = config.getoption("--fp4kit-engine")
    if named is None:
        return
    import fp4kit

    engine, _, scheme = named.partition(":")
    try:
        config.stash[_CONTRACT] = fp4kit.serving(engine, scheme or None)
    except ValueError as error:
        raise pytest.UsageError(f"--fp4kit-engine {named}: {error}") from None


@pytest.fixture(scope="session")
def fp4kit_engine(request: pytest.FixtureRequest) -> Contract:
    """Return the contract of the engine that --fp4kit-engine names, and skip the test if the option is not given."""
    if _CONTRACT not in request.config.stash:
        pytest.skip("needs --fp4kit-engine ENGINE:SCHEME, such as --fp4kit-engine vLLM:nvfp4-w4a4")
    return request.config.stash[_CONTRACT]
