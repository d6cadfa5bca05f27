"""What the fp4kit command does before anything else is imported: a Ctrl-C while it starts ends it in one line.

Only where this process is the command: a program that imports fp4kit is left alone. fp4kit/__init__.py imports this
module first.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import FrameType


def is_command(argv: list[str], original: list[str]) -> bool:
    """Return whether a process with sys.argv ``argv`` and sys.orig_argv ``original`` is `fp4kit ...` or `python -m
    fp4kit ...`.

    Processes that multiprocessing starts inherit argv, but not what the interpreter was started with.
    """
    name = argv[0] if argv else ""
    if name == "-m":
        return "-mfp4kit" in original or ("-m", "fp4kit") in pairwise(original)
    return os.path.basename(name) in ("fp4kit", "fp4kit.exe") and name in original


COMMAND = is_command(getattr(sys, "argv", []), sys.orig_argv)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process: nothing has been started that would have to be undone."""
    os.write(2, b"fp4kit: interrupted while it started; nothing was written\n")
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Give descriptors 0, 1 and 2 that are closed to the null device, lest files that are opened later become the
    output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


if COMMAND:
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
