"""Find out which files of fp4kit a call enters, to test that a cached call takes a short path.

    python entered_files.py ENGINE

ENGINE is compiled, specification, torch or cuda. The script prints two lists of files as JSON: the files that a first
call of quantize enters, and the files that a later call enters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit

PACKAGE = Path(fp4kit.__file__).parent
SHAPE = (64, 4096)


def entered(call: Callable[[], Any]) -> list[str]:
    """Return the files of fp4kit that a call enters, in the order of entry."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[path.relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def first_and_later(x: Any) -> list[list[str]]:
    """Return [files that a first call of quantize enters, files that a later call with the same signature enters]."""
    return [entered(lambda: fp4kit.quantize(x, "nvfp4-te")) for _ in range(2)]


def on_cuda() -> list[list[str]]:
    """Return the files that calls on a CuPy array enter. Kernels run on the CPU."""
    from host.compiler import require_compiler
    from host.libraries import Libraries

    with tempfile.TemporaryDirectory() as folder:
        libraries = Libraries(Path(folder), require_compiler(Path(folder)))
        with libraries.playing() as cupy:
            found = first_and_later(cupy.asarray(np.ones(SHAPE, ml_dtypes.bfloat16)))
        libraries.close()
    return found


def main(engine: str) -> list[list[str]]:
    """Return the files that a first and a later call of quantize enter on an engine."""
    fp4kit.engine()  # load the compiled library
    if engine == "cuda":
        return on_cuda()
    x: Any = np.ones(SHAPE, np.float32)
    if engine == "torch":
        import torch

        x = torch.from_numpy(x)
    with fp4kit.specification() if engine == "specification" else nullcontext():
        return first_and_later(x)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
