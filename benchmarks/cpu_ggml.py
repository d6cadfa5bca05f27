"""Compile ggml's own C code for MXFP4 and NVFP4 blocks for this processor, and time it with one thread on float32.

bench_cpu.py passes ggml's source folder (with include/ and src/). The source package of llama-cpp-python has it as
vendor/llama.cpp/ggml:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python   # 0.3.36 was tried
    tar xzf llama_cpp_python-*.tar.gz
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

BLOCK_BYTES = {"mxfp4": (32, 17), "nvfp4": (64, 36)}  # kind: (elements per block, bytes per block)
# Stubs for functions in other files of ggml that ggml-quants.c refers to. The timed functions do not call them.
STUBS = """
#include <stdlib.h>
void ggml_abort(const char * file, int line, const char * format, ...) { abort(); }
size_t ggml_row_size(int type, long n) { abort(); }
size_t ggml_type_size(int type) { abort(); }
const char * ggml_type_name(int type) { abort(); }
"""


def build(folder: Path, target: Path) -> ctypes.CDLL:
    """Compile ggml-quants.c with the optimization flags of ggml's own build, and load the library.

    folder: the source folder of ggml. target: the folder to write the library to.
    """
    (target / "stubs.c").write_text(STUBS)
    out = target / "ggml.so"
    include = [f"-I{folder / part}" for part in ("include", "src", "src/ggml-cpu")]
    sources = [str(folder / "src" / "ggml-quants.c"), str(target / "stubs.c")]
    compiler = os.environ.get("CC", "cc")
    command = [
        compiler,
        "-O3",
        "-march=native",
        "-DNDEBUG",
        "-w",
        "-fPIC",
        "-shared",
        *include,
        *sources,
        "-o",
        str(out),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(out))


class Ggml:
    """Encode and decode one float32 matrix with ggml, in blocks of one kind, "mxfp4" or "nvfp4".

    encode() encodes the matrix to self.blocks. decode() decodes self.blocks to self.values.
    """

    def __init__(self, library: ctypes.CDLL, kind: str, x: np.ndarray) -> None:
        elements, nbytes = BLOCK_BYTES[kind]
        assert x.dtype == np.float32 and x.flags.c_contiguous and x.shape[-1] % elements == 0
        self.x, self.blocks = x, np.full(x.size // elements * nbytes, 0xEE, np.uint8)
        self.values = np.full_like(x, np.nan)
        self._encode = getattr(library, f"quantize_row_{kind}_ref")
        self._decode = getattr(library, f"dequantize_row_{kind}")
        for function in (self._encode, self._decode):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None

    def encode(self) -> None:
        self._encode(self.x.ctypes.data, self.blocks.ctypes.data, self.x.size)

    def decode(self) -> None:
        self._decode(self.blocks.ctypes.data, self.values.ctypes.data, self.x.size)

    def check(self) -> None:
        """Raise AssertionError unless the decoded values equal the input to within the error of a 4-bit format."""
        self.encode()
        self.decode()
        error = float(np.sqrt(np.mean((self.values - self.x) ** 2) / np.mean(self.x**2)))
        assert error < 0.2, f"ggml's values are {error:.2f} off"


def calls(library: ctypes.CDLL, kind: str, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return {"quantize": call, "dequantize": call} of ggml on x, in blocks of a kind: "mxfp4" or "nvfp4".

    Raises AssertionError if the decoded values are wrong.
    """
    found = Ggml(library, kind, x)
    found.check()
    return {"quantize": found.encode, "dequantize": found.decode}


def version(folder: Path) -> str:
    """Return the version in the CMakeLists.txt of ggml's source folder, such as "0.25.3"; "unknown" if it has none."""
    text = (folder / "CMakeLists.txt").read_text() if (folder / "CMakeLists.txt").exists() else ""
    parts = [re.search(rf"GGML_VERSION_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) or "unknown"
