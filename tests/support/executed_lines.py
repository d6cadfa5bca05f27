"""Find the lines of the kernels that a call executes on the simulated GPU (support/host), by gcov."""

from __future__ import annotations

import ctypes
import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host import cupy_on_host
from host.compiler import HERE, require_compiler
from host.instantiations import Instantiation, launching_on, program_text
from host.libraries import FLAGS, Library, call_cache, recorded

from fp4kit.cuda import compiler
from fp4kit.reference.arith import reciprocal_table

DUMP = (
    'extern "C" void __gcov_dump();\nextern "C" __attribute__((visibility("default"))) void dump() { __gcov_dump(); }\n'
)


def executed_lines(call: Callable[[], object], folder: Path) -> tuple[Instantiation, dict[tuple[str, int], bool]]:
    """Return the kernel that a call launches, and {(file, line): whether it was executed} for its compiled lines.

    The kernel runs with few thread blocks, so that each of them handles several tiles.
    """
    command = require_compiler(folder).command[0]
    if "g++" not in Path(shutil.which(command) or command).resolve().name or not shutil.which("gcov"):
        pytest.skip("needs g++ and gcov")
    (kernel,) = recorded([call])
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(program_text([kernel], compiler.SOURCES) + DUMP)
    folders = [HERE, *sorted({path.parent for path in compiler.files(compiler.SOURCES).values()})]
    flags = ["-std=c++20", "-O0", "--coverage", "-fno-toplevel-reorder", "-ffp-contract=off", "-w", *FLAGS]
    subprocess.run(
        [command, *flags, *(f"-I{f}" for f in folders), str(source), "-o", str(library)], check=True, cwd=folder
    )
    loaded = Library(library, reciprocal_table())

    def function(*request: Any) -> Callable[..., None]:
        def launch(grid: tuple[int], threads: tuple[int], arguments: Any, stream: Any = None) -> None:
            loaded.launch(0, arguments[0].tobytes(), max(grid[0] // 8, 1), threads[0])

        return launch

    call_cache._CALLS.clear()
    with cupy_on_host.installed(), launching_on(function, cupy_on_host):
        call()
    call_cache._CALLS.clear()
    ctypes.CDLL(str(library)).dump()
    (data,) = folder.glob("*.gcda")
    subprocess.run(["gcov", "--json-format", str(data)], check=True, cwd=folder, capture_output=True)
    counts: dict[tuple[str, int], bool] = {}
    for path in folder.glob("*.gcov.json.gz"):
        for file in json.loads(gzip.open(path).read())["files"]:
            for line in file["lines"]:
                key = Path(file["file"]).name, line["line_number"]
                counts[key] = counts.get(key, False) or line["count"] > 0
    return kernel, counts
