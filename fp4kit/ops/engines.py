"""Which engine does a call: chosen by where the array lives, asked in order, refused where none has a way."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arithmetic import default_environment, is_ieee
from fp4kit.call.parse import Declined
from fp4kit.cpu import engine as cpu
from fp4kit.cuda import engine as cuda
from fp4kit.reference import engine as reference


def engines_of(array: Any) -> tuple[Any, ...]:
    """The engines that take an array, the one to ask first in front."""
    return (cpu, reference) if isinstance(array, np.ndarray) else (cuda,)


def run(op: str, operation: str, array: Any, *arguments: Any) -> Any:
    """What the first engine that does not decline gives; op: the public function that errors name.

    What runs on the host runs in IEEE arithmetic. Raises NotImplementedError with the reason of the last one where all decline.
    """
    if isinstance(array, np.ndarray) and not is_ieee():
        with default_environment(op):
            return _first(op, operation, array, arguments)
    return _first(op, operation, array, arguments)


def _first(op: str, operation: str, array: Any, arguments: tuple[Any, ...]) -> Any:
    reason = None
    for engine in engines_of(array):
        try:
            return getattr(engine, operation)(*arguments)
        except Declined as declined:
            reason = declined
    raise NotImplementedError(f"{op}: {reason}")
