"""Support printed reproductions: place arrays on an engine, compare results, and run a program on several engines. A
reproduction is the printed Python program of a failure. It is a generator function that makes arrays, calls fp4kit, and
yields the results. An engine is the NumPy specification, the host's compiled engine, or the GPU kernels.

For example:

    def program(on):
        x = on.array(given("float32", (1, 16), {3: 0x3F800000}))
        q = fp4kit.quantize(x, "nvfp4-te")
        yield "quantize", q

    agree(program, np, cupy)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine, compare
from fp4kit.evidence.fuzz.arrays import View, memory

Ended = tuple[str, str]  # kind and text, as in check.Verdict


class EngineArrays:
    """Make the arrays of a reproduction (the printed program of a failure) on one engine.

    Attributes:
        engine: the engine.
        host: True for the specification. Only there, the program makes calls that other engines reject by design.
    """

    def __init__(self, engine: ComparedEngine, host: bool) -> None:
        self.engine, self.host = engine, host
        self._fixed: list[tuple[str, Any, np.ndarray]] = []

    def array(self, values: np.ndarray, view: View | None = None, name: str = "input") -> Any:
        """Return a new array in the engine's library with the given values, for calls that must not write to it."""
        flat, cut = memory(values, View.plain(values.ndim) if view is None else view)
        moved = self.engine.module.asarray(flat)
        self._fixed.append((name, moved, flat.copy()))
        return cut(moved)

    def writable(self, values: np.ndarray, view: View | None = None) -> Any:
        """Return a new array in the engine's library with the given values, for calls that may write to it."""
        flat, cut = memory(values, View.plain(values.ndim) if view is None else view)
        return cut(self.engine.module.asarray(flat))

    def written(self) -> str:
        """Return the name of the first array made by array() that has been changed, or "" if none has been."""
        for name, moved, before in self._fixed:
            now = np.ascontiguousarray(self.engine.get(moved))
            if (now.view(np.uint8) != before.view(np.uint8)).any():
                return name
        return ""


def same(a: Any, b: Any) -> None:
    """Raise AssertionError unless two results of a reproduction agree bit for bit."""
    get = ComparedEngine(np).get
    outcome = compare(get(a), get(b), "result")
    assert not outcome.differing, f"broken: {outcome.first}"


def agree(program: Callable[[EngineArrays], Iterator[tuple[str, Any]]], *modules: Any) -> None:
    """Raise AssertionError unless a program gives equal results on every engine and writes to no input."""
    places = [
        EngineArrays(ComparedEngine(module) if i else SPECIFICATION, host=i == 0) for i, module in enumerate(modules)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running = [program(place) for place in places]
        while True:
            steps = [_next(steps, place) for steps, place in zip(running, places, strict=True)]
            raised = [step if isinstance(step, Exception) else None for step in steps]
            if any(raised):
                kind, text = ended(raised)
                assert kind in ("refused", "declined"), f"{kind}: {text}"
                return
            if steps[0] is None:
                break
            _compare(steps, places)
    for place in places:
        name = place.written()
        assert not name, f"written: the input {name} was written to"


def _next(steps: Iterator[tuple[str, Any]], place: EngineArrays) -> Any:
    """Run a program up to its next ``yield``."""
    # An AssertionError is not returned but raised, because it means that a check in the program failed.
    try:
        with place.engine.computing():
            return next(steps, None)
    except AssertionError:
        raise
    except Exception as error:
        return error


def _compare(steps: list[Any], places: list[EngineArrays]) -> None:
    """Raise AssertionError unless the results of one step of a program are equal, bit for bit, on all engines."""
    (name, expected), *others = (
        (name, place.engine.get(value)) for (name, value), place in zip(steps, places, strict=True)
    )
    for _, found in others:
        outcome = compare(found, expected, name)
        assert not outcome.differing, f"differs: {outcome.first}"


def ended(raised: list[Exception | None]) -> Ended:
    """Return (kind, text) of the verdict for a call that raised an exception on at least one engine."""
    first, last = raised[0], raised[-1]
    unexpected = [
        e for e in raised if e is not None and not isinstance(e, (ValueError, TypeError, NotImplementedError))
    ]
    if unexpected:
        return "warning" if isinstance(unexpected[0], Warning) else "raised", _text(unexpected[0])
    declined = next((e for e in (last, first) if isinstance(e, NotImplementedError)), None)
    if declined is not None:
        return "declined", _text(declined)
    if first is None:
        return "raised", f"{_text(last)}; the specification computes it"
    if last is None:
        return "not refused", f"the specification raises {_text(first)}"
    if type(first) is not type(last) or str(first) != str(last):
        return "message", f"{_text(last)}; the specification: {_text(first)}"
    return "refused", _text(first)


def _text(error: Exception | None) -> str:
    """Return the type and the message of an exception as one text, such as "ValueError: no such recipe"."""
    return f"{type(error).__name__}: {error}"
