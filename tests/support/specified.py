"""What kernels are compared with: the specification, never the compiled engine of the host, which has its rules from
the kernels.

Tests of the files that `holds_kernels` names, and those with a fixture of FIXTURES, run on the specification, whatever
they call on NumPy arrays, in every thread (conftest.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from unittest.mock import patch

import pytest

from fp4kit.call import call_cache
from fp4kit.ops import engines

KERNELS = re.compile(r".*/test_(gpu_\w+|\w+_on_host)|.*/support/host/test_\w+")
FIXTURES = {"host", "played_gpu", "away"}  # devices, or what stands for one


def holds_kernels(path: Path) -> bool:
    """Return whether a file of tests, by its path, compares kernels with what NumPy gives."""
    return KERNELS.fullmatch(path.with_suffix("").as_posix()) is not None


def needs_specification(item: pytest.Item) -> bool:
    """Whether a test runs on the specification alone."""
    return holds_kernels(item.path) or bool(FIXTURES.intersection(getattr(item, "fixturenames", ())))


@contextmanager
def specification_everywhere() -> Iterator[None]:
    """fp4kit.specification() for all threads: those that begin inside do not inherit what the one that made them has
    set.
    """
    always = ContextVar("specification_only", default=True)
    with patch.object(engines, "specification_only", always), patch.object(call_cache, "specification_only", always):
        yield


@contextmanager
def compiled_here() -> Iterator[None]:
    """In this thread the compiled engine again: for what is only rehearsed, whose results nobody sees."""
    token = engines.specification_only.set(False)
    try:
        yield
    finally:
        engines.specification_only.reset(token)
