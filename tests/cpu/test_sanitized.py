"""Run the compiled engine under sanitizers that find wrong addresses, undefined behavior, and data races between
threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from host.compiler import find_compiler

from fp4kit.cpu import source_digest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = str(ROOT / "tests" / "support")
# Compiler flags: those of setup.py that affect results, and no optimization, so that the sanitizer checks the code as
# it is written. With -O1, both libraries take 52 s of processor time to compile; with -O0, they take 30 s.
FLAGS = (
    "-std=c++17",
    "-O0",
    "-g1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-w",
)
FLAGS += ("-shared", "-fPIC", "-pthread", "-D_GLIBCXX_ASSERTIONS", "-fno-sanitize-recover=all")
KINDS = {"address": ("address,undefined", "libasan.so"), "thread": ("thread", "libtsan.so")}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
}
# A program that makes random calls and calls of all operations, with usual and small tiles, on several threads.
WORK = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, pytest
from fp4kit.cpu import library as native
native.__file__ = {folder!r} + "/library.py"
import fp4kit
from engine_cases import assert_equal, shrink_tiles
from everything import everything
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import Pool
from inputs import BF16, ordinary
assert native.library().functions is not None, native.library().level
assert {folder!r} in native.library().functions._name
fp4kit.set_num_threads(4)
native.ELEMENTS_PER_THREAD = 1
for small in (False, True):
    if small:
        shrink_tiles(pytest.MonkeyPatch())
    found = fuzz.run(fuzz.host_engine()[0], 3600, 1, cases={cases}, pool=Pool(largest=1 << 12))
    assert not found.failures, found.failures[0].text
    names = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te", "int8-modelopt-channel")
    for name in (*names, "nvfp4-te-4over6-mse-256-2d", "nvfp4-modelopt-static", "nvfp4-auto-round-opt"):
        x = ordinary(1, (32, 128), BF16 if small else np.float32)
        with fp4kit.specification():
            expected = list(everything(name, x))
        assert_equal(list(everything(name, x)), expected)
from own_formats import check_drawn_calls
for seed in range({cases}):
    check_drawn_calls(seed)
print("done")
"""
OVERRUN = """
import ctypes, numpy as np
from ctypes import c_int32, c_int64, c_void_p
library = ctypes.CDLL({library!r})
codes, out = np.zeros(2048, np.uint8), np.zeros(2000, np.uint8)
library.fp4kit_transpose(c_void_p(codes.ctypes.data), c_void_p(out.ctypes.data), c_int64(32), c_int64(64), c_int32(0), c_int32(1))
"""  # noqa: E501


def sanitized(folder: Path, kind: str) -> tuple[Path, str]:
    """Build the library with a sanitizer, and copy it to the names of all processor levels in the folder.

    Return the paths of the library and of the sanitizer's own library. Skip the test if the compiler has no sanitizer.

    kind: a key of KINDS.
    """
    compiler = find_compiler(folder)
    command = compiler if isinstance(compiler, str) else compiler.command[0]
    runtime = "" if isinstance(compiler, str) else output(command, f"-print-file-name={KINDS[kind][1]}")
    if not os.path.isabs(runtime):
        pytest.skip(f"the C++ compiler has no sanitizer: {command}")
    library = folder / "_base.so"
    sources = [str(path) for path in sorted(source_digest.SOURCE.glob("*.cpp"))]
    # The sanitizer of addresses also reports address 0, and the check of object sizes does nothing at -O0. Without
    # both, the library compiles in 26 s of processor time instead of 30 s.
    checks = (f"-fsanitize={KINDS[kind][0]}", "-fno-sanitize=null,object-size")
    options = [*FLAGS, *checks, f'-DFP4KIT_DIGEST="{source_digest.digest()}"']
    result = subprocess.run([command, *options, *sources, "-o", str(library)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    for level in ("avx2", "avx512"):
        shutil.copy(library, folder / f"_{level}.so")
    return library, os.path.realpath(runtime)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(code: str, runtime: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | OPTIONS | {"LD_PRELOAD": runtime, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls_and_all_operations(kind, tmp_path):
    library, runtime = sanitized(tmp_path, kind)
    found = run(WORK.format(tests=SUPPORT, folder=str(tmp_path), cases=4 if kind == "address" else 3), runtime)
    assert found.stdout.endswith("done\n"), found.stderr[-6000:]
    if kind == "address":  # the sanitizer also sees a write outside of an array; building the library again takes 30 s
        found = run(OVERRUN.format(library=str(library)), runtime)
        assert found.returncode != 0 and "heap-buffer-overflow" in found.stderr, found.stderr[-2000:]
