"""Plant faults in an engine for tests of the fuzzer, and execute the scripts that the fuzzer prints.

The engine, named "away", is NumPy with a separate array type.
"""

from __future__ import annotations

import sys
import types

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz.recipes import Pool
from fp4kit.evidence.testing import ComparedEngine
from fp4kit.quantized.container import Quantized

SMALL = Pool(largest=1 << 12)


class Away(np.ndarray):
    """An array of the engine "away": a NumPy array whose type makes fp4kit choose this engine."""


def engine_away(monkeypatch):
    """Install and return the engine "away", which computes as the specification does, on arrays of type Away."""
    module = types.ModuleType("arrays_away")
    module.asarray = lambda a: np.array(a).view(Away)
    monkeypatch.setitem(sys.modules, "arrays_away", module)
    return ComparedEngine(module)


def is_away(value):
    """Return True if an argument of a call, or an array in it, is of the engine "away"."""
    if isinstance(value, Quantized):
        return isinstance(value.packed, Away)
    return any(map(is_away, value)) if isinstance(value, (list, tuple)) else isinstance(value, Away)


def plant(monkeypatch, name, fault):
    """Replace fp4kit.name with a faulty function for calls that run on the engine named "away".

    Return a function that removes the fault.

    Args:
        monkeypatch: pytest's fixture, with which the function is replaced.
        name: the name of a public function, such as "quantize".
        fault: called as fault(right, *arguments, **options), where `right` is the correct function.
    """
    right = getattr(fp4kit, name)

    def wrong(first, *arguments, **options):
        call = fault if is_away(first) else lambda function, *a, **o: function(*a, **o)
        return call(right, first, *arguments, **options)

    monkeypatch.setattr(fp4kit, name, wrong)
    return lambda: monkeypatch.setattr(fp4kit, name, right)


def executed(text):
    """Run a script, given as text, that the fuzzer printed to reproduce a fault.

    Return the message of the script's AssertionError, or "" if it passes. Other errors are not caught.
    """
    try:
        exec(compile(text, "reproduction", "exec"), {})
    except AssertionError as error:
        return str(error)
    return ""


def one_bit(right, x, *arguments, **options):
    """Quantize with a fault (see plant): flip one bit of the last code if an element of x has its sign bit set."""
    q = right(x, *arguments, **options)
    if q.packed.size and np.signbit(np.moveaxis(np.asarray(x), q.axis, -1).astype(np.float32)).any():
        q.packed.reshape(-1)[-1] ^= 1
    return q
