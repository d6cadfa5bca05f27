"""Make Ctrl-C during the start of the fp4kit command end it with a one-line message instead of a traceback.

fp4kit/__init__.py imports this module before all others. In a program that merely imports fp4kit, this module does
nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import FrameType


def is_command(argv: list[str], original: list[str]) -> bool:
    """Return whether this process is the command `fp4kit ...` or `python -m fp4kit ...`.

    Return False for a program that merely imports fp4kit, and for a process that the command started by
    multiprocessing, which inherits sys.argv from the command but has its own sys.orig_argv.

    argv: sys.argv. original: sys.orig_argv, the arguments of the interpreter itself.
    """
    name = argv[0] if argv else ""
    if name == "-m":
        return "-mfp4kit" in original or ("-m", "fp4kit") in pairwise(original)
    return os.path.basename(name) in ("fp4kit", "fp4kit.exe") and name in original


COMMAND = is_command(getattr(sys, "argv", []), sys.orig_argv)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Handle the signal of Ctrl-C while the command starts: write a line to stderr and end the process at once.

    The exit status is 128 + number. No cleanup is needed, because nothing has been started yet.

    number: the signal number. frame: not used; Python passes it to every signal handler.
    """
    os.write(2, b"fp4kit: interrupted while it started; nothing was written\n")
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Open the null device for each of the descriptors 0, 1 and 2 that is closed.

    Without this, a file opened later would get such a descriptor and receive the program's output. If sys.stdout or
    sys.stderr is None, it becomes a stream on descriptor 1 or 2.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open returns the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


if COMMAND:
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
