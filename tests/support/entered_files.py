"""Find out in which files of fp4kit a call executes functions, to test that the call takes a short path.

    python entered_files.py ENGINE
    python entered_files.py conversion

A call enters a file if it executes a function of that file. ENGINE is compiled, specification, torch or cuda. The
script prints two lists of files as JSON: the files that a first call to quantize enters, and the files that a later
call enters. For "conversion", it prints one list: the files that the main thread enters when it converts a checkpoint
with five tensors.
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
    """Return the files of fp4kit in which a call executes functions, in the order of the first execution."""
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
    """Return [files that a first call to quantize enters, files that a later call with the same signature enters]."""
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


def conversion() -> list[list[str]]:
    """Return a list with one element: the files that the main thread enters during a conversion of five tensors."""
    from safetensors.numpy import save_file

    from fp4kit import checkpoint

    values = np.ones((64, 64), ml_dtypes.bfloat16)
    layers = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    tensors = {"model.embed_tokens.weight": values, **dict.fromkeys(layers, values), "model.norm.weight": values[0]}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return [entered(lambda: checkpoint.convert(source, Path(folder) / "result", "nvfp4-te"))]


def main(engine: str) -> list[list[str]]:
    """Return the files that a first and a later call to quantize enter on an engine, or that a conversion enters."""
    fp4kit.engine()  # load the compiled library
    if engine == "conversion":
        return conversion()
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
