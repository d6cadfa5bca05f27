"""Compile and load kernels, one instantiation at a time, and cache them in memory and on disk.
An instantiation is C++ text that includes a kernel's file and defines the types and constants that the kernel uses. A
cubin is a compiled instantiation.

All kernels are loaded by this module. The cache key of a cubin covers the source, every header that it includes, the
options, the architecture and the version of NVRTC.

The options keep subnormals (-ftz=false) and round a product before it is added (-fmad=false). CuPy's RawKernel would
append -ftz=true, so this module calls NVRTC itself, and CuPy only loads the finished cubin.
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
    """Return {file name: path} for all CUDA C++ files (.cu, .cuh) in the folder `sources` and its subfolders."""
    # File names are unique, because `#include` lines in the kernels name no folder.
    return {path.name: path for path in sorted(sources.rglob("*.cu*"))}


@cache
def include_closure(names: tuple[str, ...]) -> dict[str, str]:
    """Return {file name: text} for the named kernel sources and all files that they include, directly or indirectly."""
    found: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = files(SOURCES)[name].read_text()
            pending += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def architecture(capability: str) -> str:
    """Return the architecture for NVRTC's option -arch, such as "sm_90" for the compute capability "90"."""
    return f"sm_{capability}a" if int(capability) >= 100 else f"sm_{capability}"


def compiler_version() -> tuple[int, int]:
    """Return the major and minor version of NVRTC. Raise RuntimeError if NVRTC is not installed."""
    return nvrtc.version()


def compile_source(source: str, arch: str, name: str = "fp4kit.cu") -> tuple[bytes, str]:
    """Compile an instantiation for an architecture such as "sm_90"."""
    headers = include_closure(tuple(_INCLUDE.findall(source)))
    return nvrtc.compile_cubin(source, headers, (*OPTIONS, f"-arch={arch}"), name)


def cache_folder() -> Path:
    """Return the folder of cached cubins: ~/.cache/fp4kit/cuda if possible, otherwise one in the temporary
    directory.
    """
    # The folder must be writable and owned by this user.
    roots = (Path.home() / ".cache", Path(tempfile.gettempdir()) / f"fp4kit-{os.getuid()}")
    folders = [root / "fp4kit" / "cuda" for root in roots]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise RuntimeError(
        f"fp4kit.cuda: this user can neither use {folders[0]} nor {folders[1]} for compiled kernels; needs one of these"
        " folders, owned by this user and writable"
    )


def _key(source: str, arch: str) -> str:
    """Return the cache key of an instantiation: a digest of everything that its cubin depends on."""
    closure = include_closure(tuple(_INCLUDE.findall(source)))
    parts = [source, *(text for pair in closure.items() for text in pair), *OPTIONS, arch, str(nvrtc.version())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin_path(source: str, arch: str, rebuild: bool = False) -> Path:
    """Return the path of an instantiation's cubin (compiled kernel) in the cache."""
    # The cubin is written under a temporary name and then renamed, so that no process reads an incomplete file.
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
    """Return the CuPy function of one kernel of an instantiation, compiled if needed and loaded on a device."""
    # If the cached cubin cannot be loaded, compile it again.
    module = imports.cupy()
    with module.cuda.Device(device) as current:
        arch = architecture(current.compute_capability)
        try:
            return module.RawModule(path=str(cubin_path(source, arch))).get_function(kernel)
        except module.cuda.driver.CUDADriverError:
            return module.RawModule(path=str(cubin_path(source, arch, rebuild=True))).get_function(kernel)
