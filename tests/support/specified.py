"""Make tests compare kernels with the NumPy specification, because the compiled CPU engine shares rules with the
kernels.

A test runs under the specification if its file compares kernels (see `holds_kernels`) or if it has a fixture in
FIXTURES. Then all calls on NumPy arrays use the specification, in every thread (conftest.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from unittest.mock import patch

import pytest

from fp4kit.cpu import library
from fp4kit.ops import engines

KERNELS = re.compile(r".*/test_(gpu_\w+|\w+_on_host)|.*/support/host/test_\w+")
FIXTURES = {"host", "played_gpu", "away"}  # fixtures of simulated devices


def holds_kernels(path: Path) -> bool:
    """Return True if the path names a test file that compares kernels with NumPy."""
    return KERNELS.fullmatch(path.with_suffix("").as_posix()) is not None


def needs_specification(item: pytest.Item) -> bool:
    """Return True if a test must run under the specification, by its file or by its fixtures."""
    return holds_kernels(item.path) or bool(FIXTURES.intersection(getattr(item, "fixturenames", ())))


@contextmanager
def specification_everywhere() -> Iterator[None]:
    """Use the specification in all threads while the context lasts.

    fp4kit.specification() does not affect threads that start inside it.
    """
    always = ContextVar("specification_only", default=True)
    with patch.object(engines, "specification_only", always), patch.object(library, "specification_only", always):
        yield


@contextmanager
def compiled_here() -> Iterator[None]:
    """Use the compiled engine in this thread while the context lasts; for rehearsals, whose results are not used."""
    token = engines.specification_only.set(False)
    try:
        yield
    finally:
        engines.specification_only.reset(token)
