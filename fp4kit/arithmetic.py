"""IEEE 754 arithmetic on the host: a thread that takes subnormals for zero, or rounds its own way, is set right for a
call.

Every number of fp4kit's host engine is made by float32 and float64 operations that round to nearest even and know
subnormals. A processor does so unless its thread was told otherwise: torch.set_flush_denormal(True), the threads of
JAX's callbacks and code linked with -ffast-math set FTZ (tiny results become zero) and DAZ (tiny operands count as
zero) for one thread, and fesetround sets the rounding. NumPy then computes other bits, without a word.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# From its bits: a literal is read, and 2.0**-1074 computed, in the mode of whatever thread imports this first.
_TINY: float = struct.unpack("<d", b"\x01" + bytes(7))[0]  # 2^-1074
_BIG, _ONE_STEP, _TWO_STEPS = 2.0**1023, 2.0**-51, 2.0**-50  # one step is 2^-1074 * 2^1023

_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_ENVIRONMENT_BYTES = 256  # room for a fenv_t: 32 bytes on x86-64, 8 on aarch64
Environment = tuple[Callable[..., int], Callable[..., int]]  # fegetenv, fesetenv


def is_ieee() -> bool:
    """Whether this thread honours subnormal numbers, as operands and as results, and rounds to nearest even.

    1.5 steps are two under nearest even, one under rounding down or toward zero; 1.25 steps are one, two under rounding
    up. What is compared is no subnormal, because DAZ would take it for zero there too. float32 and float64 share the
    mode.
    """
    return _TINY * 1.5 * _BIG == _TWO_STEPS and _TINY * 1.25 * _BIG == _ONE_STEP


def ieee(op: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: the function runs in IEEE arithmetic, whatever the mode of the thread that calls it.

    The check is four products, 0.1 us; only where it fails is the thread's floating-point environment set to the
    default, and given back on return and on an exception: mode, rounding and exception flags are then as the caller
    left them (but inexact and underflow, which the check sets in any mode). op: what the error begins with. Raises
    RuntimeError where the environment is wrong and cannot be set (see environment).
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if _TINY * 1.5 * _BIG == _TWO_STEPS and _TINY * 1.25 * _BIG == _ONE_STEP:  # is_ieee(), without the call
                return function(*args, **kwargs)
            with default_environment(op):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def default_environment(op: str) -> Iterator[None]:
    """The default floating-point environment in this thread, until the block is left. Raises RuntimeError as ieee."""
    found = environment()
    if found is None:
        raise RuntimeError(_refusal(op))
    get, set_ = found
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    get(saved)
    set_(_DEFAULT)
    try:
        if not is_ieee():
            raise RuntimeError(_refusal(op))
        yield
    finally:
        set_(saved)


@cache
def environment() -> Environment | None:
    """C's fegetenv and fesetenv, on Linux with glibc or musl, x86-64 and aarch64; None elsewhere.

    Elsewhere FE_DFL_ENV is another pointer: macOS, and bionic, which tells itself by a symbol.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return None
    try:
        library = ctypes.PyDLL(None)  # keeps the GIL: the calls take a few nanoseconds
        functions = library.fegetenv, library.fesetenv
    except (AttributeError, OSError):
        return None
    return None if hasattr(library, "__fe_dfl_env") else functions


def _refusal(op: str) -> str:
    return (
        f"{op}: this thread takes subnormal numbers for zero, or does not round to nearest; fp4kit needs IEEE"
        f" arithmetic, which it cannot set on {sys.platform} {platform.machine()}; call torch.set_flush_denormal(False)"
        " first, or fp4kit in another thread, started before the mode was set"
    )
