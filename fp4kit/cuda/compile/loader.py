"""Compile and load kernels, one instantiation at a time, cached in memory and on disk. No other module does.

The cache key of a cubin covers the source, every header that it includes, the options, the architecture and the version
of NVRTC.
Subnormals are kept, and products are rounded before they are added (-ftz=false, -fmad=false). CuPy's RawKernel would
append -ftz=true, so CuPy only loads the finished cubin.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from fp4kit.arrays import imports
from fp4kit.cuda.compile import nvrtc

SOURCES = Path(__file__).parents[1] / "kernels"
OPTIONS = ("-std=c++17", "-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-lineinfo")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@cache
def files(sources: Path) -> dict[str, Path]:
    """Return the CUDA C++ files of a tree by file name. Names are unique, because includes name no folder."""
    return {path.name: path for path in sorted(sources.rglob("*.cu*"))}


@cache
def include_closure(names: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the named kernel sources and of every file that they include, directly or not, by name."""
    found: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = files(SOURCES)[name].read_text()
            pending += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def architecture(capability: str) -> str:
    """Return NVRTC's -arch for a compute capability such as "90". From 100 on it ends in "a", which Blackwell's
    FP4 instructions need.
    """
    return f"sm_{capability}a" if int(capability) >= 100 else f"sm_{capability}"


def compiler_version() -> tuple[int, int]:
    """Return the major and minor version of NVRTC. Raises RuntimeError if it is missing."""
    return nvrtc.version()


def compile_source(source: str, arch: str, name: str = "fp4kit.cu") -> tuple[bytes, str]:
    """Return the cubin and the compiler's log of an instantiation, for an architecture such as "sm_90". Needs no GPU.

    source: the text of instantiate.instantiation.
    """
    headers = include_closure(tuple(_INCLUDE.findall(source)))
    return nvrtc.compile_cubin(source, headers, (*OPTIONS, f"-arch={arch}"), name)


def cache_folder() -> Path:
    """Return the folder of cached cubins: ~/.cache/fp4kit/cuda, or one in the temporary directory if that is not
    writable. Raises RuntimeError if neither is.
    """
    for root in (Path.home() / ".cache", Path(tempfile.gettempdir()) / f"fp4kit-{os.getuid()}"):
        folder = root / "fp4kit" / "cuda"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise RuntimeError(
        "fp4kit.cuda: neither ~/.cache nor the temporary directory is writable; compiled kernels need one of them"
    )


def _key(source: str, arch: str) -> str:
    """Return the cache key of an instantiation."""
    closure = include_closure(tuple(_INCLUDE.findall(source)))
    parts = [source, *(text for pair in closure.items() for text in pair), *OPTIONS, arch, str(nvrtc.version())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin_path(source: str, arch: str, rebuild: bool = False) -> Path:
    """Return the path of an instantiation's cubin. If the cache has none, or with `rebuild`, compile it.

    The cubin is written under another name and renamed, so that no process reads a part of it.
    """
    path = cache_folder() / f"{_key(source, arch)}.cubin"
    if rebuild or not path.exists():
        cubin, _ = compile_source(source, arch)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, path)
    return path


@cache
def function(source: str, kernel: str, device: int) -> Any:
    """Return the CuPy function of one kernel of an instantiation, loaded on a device. If its cached cubin does not
    load, the cubin is compiled again.
    """
    module = imports.cupy()
    with module.cuda.Device(device) as current:
        arch = architecture(current.compute_capability)
        try:
            return module.RawModule(path=str(cubin_path(source, arch))).get_function(kernel)
        except module.cuda.driver.CUDADriverError:
            return module.RawModule(path=str(cubin_path(source, arch, rebuild=True))).get_function(kernel)
