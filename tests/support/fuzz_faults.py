"""What the tests of the fuzz share: an engine that is NumPy elsewhere, in which faults are planted; scripts that it
prints.
"""

from __future__ import annotations

import sys
import types

import numpy as np

import fp4kit
from fp4kit.evidence.engines import ComparedEngine
from fp4kit.evidence.fuzz.draw import Pool
from fp4kit.quantized.container import Quantized

SMALL = Pool(largest=1 << 12)


class Away(np.ndarray):
    """An array of another engine: NumPy's, but by its type."""


def engine_away(monkeypatch):
    """An engine that computes as the specification does, on arrays of a type of its own."""
    module = types.ModuleType("arrays_away")
    module.asarray = lambda a: np.array(a).view(Away)
    monkeypatch.setitem(sys.modules, "arrays_away", module)
    return ComparedEngine(module)


def is_away(value):
    """Whether a call is one of the engine's."""
    if isinstance(value, Quantized):
        return isinstance(value.packed, Away)
    return any(map(is_away, value)) if isinstance(value, (list, tuple)) else isinstance(value, Away)


def plant(monkeypatch, name, fault):
    """fault(right, *arguments, **options) in place of fp4kit.name, for the engine's calls; what takes it away again."""
    right = getattr(fp4kit, name)

    def wrong(first, *arguments, **options):
        call = fault if is_away(first) else lambda function, *a, **o: function(*a, **o)
        return call(right, first, *arguments, **options)

    monkeypatch.setattr(fp4kit, name, wrong)
    return lambda: monkeypatch.setattr(fp4kit, name, right)


def executed(text):
    """Run a reproduction; the message of its assertion, empty where it passes."""
    try:
        exec(compile(text, "reproduction", "exec"), {})
    except AssertionError as error:
        return str(error)
    return ""


def one_bit(right, x, *arguments, **options):
    """The first code of a row that begins with a negative number."""
    q = right(x, *arguments, **options)
    if q.packed.size and np.signbit(np.moveaxis(np.asarray(x), q.axis, -1).astype(np.float32)).any():
        q.packed.reshape(-1)[-1] ^= 1
    return q
