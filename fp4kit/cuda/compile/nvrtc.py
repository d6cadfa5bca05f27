"""Call NVRTC, NVIDIA's run-time compiler, through ctypes, to compile source text to a cubin. No GPU is needed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_MISSING = (
    "fp4kit.cuda: NVRTC was not found (libnvrtc.so.12 or .13); install it with the extra that fits the driver: "
    'pip install "fp4kit[cuda12]" or "fp4kit[cuda13]"'
)


class CompileError(RuntimeError):
    """The error that is raised if a kernel does not compile, or if another call to NVRTC fails.

    If a kernel does not compile, the message contains NVRTC's log.
    """


def _candidates() -> Iterator[str]:
    """Yield the places to look for NVRTC, in the order in which they are tried."""
    for folder in sys.path:
        root = Path(folder) / "nvidia"
        for pattern in ("cu13/lib/libnvrtc.so.13*", "cuda_nvrtc/lib/libnvrtc.so.12*"):
            yield from (str(path) for path in sorted(root.glob(pattern)) if ".alt." not in path.name)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@cache
def library() -> ctypes.CDLL:
    """Load the NVRTC library and return it."""
    for path in _candidates():
        try:
            if Path(path).is_absolute():
                # NVRTC opens its builtins library by name, which works only if that is loaded already.
                for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(_MISSING)


@cache
def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version. Raise RuntimeError if NVRTC is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _check(status: int, call: str) -> None:
    """Raise CompileError if a call to NVRTC failed, that is, if its status is not 0."""
    if status:
        library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"fp4kit.cuda: {call} failed: {library().nvrtcGetErrorString(status).decode()}")


def compile_cubin(source: str, headers: Mapping[str, str], options: tuple[str, ...], name: str) -> tuple[bytes, str]:
    """Compile a source to a cubin, and return the cubin and the compiler's log."""
    nvrtc = library()
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    create = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
    _check(create, "nvrtcCreateProgram")
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _text(program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
        if status:
            raise CompileError(f"fp4kit.cuda: {name} did not compile with {' '.join(options)}:\n{log}")
        return _text(program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """Return the output `what` of a compiled program as bytes: "CUBIN" or "ProgramLog"."""
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw
