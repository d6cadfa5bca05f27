"""Ensure IEEE 754 arithmetic on the host, also in threads whose floating-point mode was changed.

The host engines compute every number with float32 and float64 operations that round to nearest even and keep
subnormals. A processor does so unless the mode of its thread was changed:

- torch.set_flush_denormal(True), the threads of JAX's callbacks and code linked with -ffast-math set two mode bits of
  a thread, FTZ and DAZ. FTZ turns subnormal results into zero, and DAZ treats subnormal operands as zero.
- fesetround changes the rounding.

In such a thread NumPy silently computes other bits. The decorator `ieee` restores the default mode during a call.
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

# Made from its bits, because a literal or 2.0**-1074 would depend on the mode of the thread that imports this module.
_TINY: float = struct.unpack("<d", b"\x01" + bytes(7))[0]  # 2^-1074
_BIG, _ONE_STEP, _TWO_STEPS = 2.0**1023, 2.0**-51, 2.0**-50  # a step is _TINY * _BIG

_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV, the default environment, in glibc and musl
_ENVIRONMENT_BYTES = 256  # more than C's fenv_t takes: 32 bytes on x86-64, 8 on aarch64
Environment = tuple[Callable[..., int], Callable[..., int]]  # fegetenv, fesetenv


def is_ieee() -> bool:
    """Return whether this thread computes in IEEE arithmetic, which keeps subnormals and rounds to nearest even.

    The check multiplies the smallest subnormal, here called one step, by 1.5 and by 1.25:

    - 1.5 steps round to two steps under nearest even, but to one step when rounding down or toward zero.
    - 1.25 steps round to one step under nearest even, but to two steps when rounding up.

    The products are scaled up before they are compared, because DAZ would also treat a compared subnormal as zero. One
    check is enough, because float32 and float64 share the mode.
    """
    return _TINY * 1.5 * _BIG == _TWO_STEPS and _TINY * 1.25 * _BIG == _ONE_STEP


def ieee(op: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that it runs in IEEE arithmetic, whatever the mode of the calling thread.

    A check of the mode precedes each call and costs four multiplications, 0.1 us. If the check fails, the thread's
    floating-point environment is set to the default during the call. When the call returns or raises, the caller's
    mode, rounding and exception flags are restored. Only the inexact and underflow flags may differ, because the check
    can set them in any mode.

    Args:
        op: the function name that an error message begins with.

    Raises:
        RuntimeError: raised by the decorated function if the mode is wrong and cannot be set on this platform.
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
    """Set the default floating-point environment in this thread while a with block runs, and then restore it.

    Raise RuntimeError if this platform does not allow setting it, or if its default is not IEEE arithmetic. op: the
    function that the message begins with.
    """
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
    """Return C's functions fegetenv and fesetenv, which read and set the floating-point environment of a thread.

    Return None unless this is Linux with glibc or musl, on x86-64 or aarch64. On other platforms, FE_DFL_ENV, which
    stands for the default environment, may not be the pointer -1. Android's C library, Bionic, is recognized by its
    symbol __fe_dfl_env.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return None
    try:
        library = ctypes.PyDLL(None)  # PyDLL keeps the GIL, because the calls take only a few nanoseconds
        functions = library.fegetenv, library.fesetenv
    except (AttributeError, OSError):
        return None
    return None if hasattr(library, "__fe_dfl_env") else functions


def _refusal(op: str) -> str:
    """Return the error message for a thread that does not compute in IEEE arithmetic, and cannot be made to do so.

    op: the public function that the message begins with.
    """
    return (
        f"{op}: this thread treats subnormal numbers as zero, or does not round to nearest; fp4kit needs IEEE"
        f" arithmetic, which it cannot set on {sys.platform} {platform.machine()}; call torch.set_flush_denormal(False)"
        " first, or call fp4kit in a thread that was started before the mode was set"
    )
