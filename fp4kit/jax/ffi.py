"""Run fp4kit's calls inside a compiled JAX program, by a Python handler of XLA's foreign function interface (FFI).

On CUDA the handler makes CuPy arrays that share the program's buffers, and runs the call on the program's stream.
Nothing is copied to the host, and nothing waits for the device.

The ctypes structures are those of xla/ffi/api/c_api.h, version 0.3. Within a major version XLA never moves a field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fp4kit.arrays import imports
from fp4kit.arrays.torch_arrays import TorchStream, cupy_stream

TARGET = "fp4kit_call"
MAJOR = 0  # XLA_FFI_API_MAJOR
_METADATA = 1  # XLA_FFI_Extension_Metadata
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_DTYPES = {
    1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32, 9: np.uint64,  # noqa: E501
    10: np.float16, 11: np.float32, 12: np.float64, 16: ml_dtypes.bfloat16,
}  # fmt: skip  # XLA_FFI_DataType
_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p


def _plain(name: str, *fields: tuple[str, Any]) -> Any:
    """Return a ctypes structure class that has exactly the given fields, each a pair (name, type)."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """Return a ctypes structure class with XLA's usual header (size, pointer to extensions) and the given fields."""
    return _plain(name, ("struct_size", _SIZE), ("extension_start", _POINTER), *fields)


_Extension = _plain(
    "_Extension", ("struct_size", _SIZE), ("type", ctypes.c_int), ("next", _POINTER), ("metadata", _POINTER)
)
_Version = _struct("_Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
_Metadata = _plain("_Metadata", ("struct_size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32))
_Span = _plain("_Span", ("pointer", _POINTER), ("length", _SIZE))
_Buffer = _struct(
    "_Buffer",
    *(("dtype", ctypes.c_int), ("data", _POINTER), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64))),
)
_List = _struct(
    "_List", ("size", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)), ("entries", ctypes.POINTER(_POINTER))
)
_Attributes = _struct(
    "_Attributes",
    *(("size", ctypes.c_int64), ("types", _POINTER), ("names", _POINTER), ("entries", ctypes.POINTER(_POINTER))),
)
_Frame = _struct(
    "_Frame",
    *(("api", _POINTER), ("context", _POINTER), ("stage", ctypes.c_int)),
    *(("arguments", _List), ("results", _List), ("attributes", _Attributes)),
)
_Api = _struct(
    "_Api", ("version", _Version), ("internal", _POINTER), *((f"function{i}", _POINTER) for i in range(18))
)  # in the order of the header: 0 Error_Create, 4 Stream_Get, 17 DeviceOrdinal_Get
_ErrorArguments = _struct("_ErrorArguments", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_StreamArguments = _struct("_StreamArguments", ("context", _POINTER), ("stream", _POINTER))
_Function = ctypes.CFUNCTYPE(_POINTER, _POINTER)
_ERROR_CREATE, _STREAM_GET = 0, 4


def _api_call(frame: Any, number: int, arguments: Any) -> Any:
    """Call a function in XLA's table of functions."""
    arguments.struct_size = ctypes.sizeof(arguments)
    return _Function(getattr(_Api.from_address(frame.api), f"function{number}"))(ctypes.addressof(arguments))


def _shape(buffer: Any) -> tuple[int, ...]:
    """Return the shape of an XLA buffer; () for a scalar, whose dims may be a null pointer."""
    return tuple(buffer.dims[: buffer.rank]) if buffer.rank else ()


def _buffers(found: Any) -> list[Any]:
    """Return a list of the _Buffer structures to which `found` points: a _List of the call's arguments or results."""
    return [_Buffer.from_address(found.entries[i]) for i in range(found.size)]


def host_array(buffer: Any) -> np.ndarray:
    """Return a NumPy array that shares the memory of an XLA buffer on the host."""
    shape, dtype = _shape(buffer), np.dtype(_DTYPES[buffer.dtype])
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_uint8 * count).from_address(buffer.data) if count else bytearray()
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def device_array(buffer: Any) -> Any:
    """Return a CuPy array that shares the memory of an XLA buffer on the current device."""
    cupy, shape, dtype = imports.cupy(), _shape(buffer), np.dtype(_DTYPES[buffer.dtype])
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not count:
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(buffer.data, count, None, cupy.cuda.runtime.getDevice())
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _text(frame: Any) -> str:
    """Return the text that describes a call (see calls.py)."""
    span = _Span.from_address(frame.attributes.entries[0])
    return ctypes.string_at(span.pointer, span.length).decode()


def _execute_on_host(frame: Any, run: Callable[..., list[Any]]) -> None:
    """Run a call on XLA's host buffers with `run` (calls.run), and copy its results into the result buffers."""
    values = run(_text(frame), *map(host_array, _buffers(frame.arguments)))
    for out, value in zip(_buffers(frame.results), values, strict=True):
        host_array(out)[...] = value


def _execute_on_cuda(frame: Any, run: Callable[..., list[Any]]) -> None:
    """Run a call on XLA's CUDA buffers with `run` (calls.run), and copy its results into the result buffers."""
    cupy, stream = imports.cupy(), _StreamArguments(context=frame.context)
    error = _api_call(frame, _STREAM_GET, stream)
    if error:
        raise RuntimeError("fp4kit.jax: XLA returned an error instead of the program's stream; check the JAX version")
    with cupy_stream(TorchStream(stream.stream or 0, cupy.cuda.runtime.getDevice())):
        values = run(_text(frame), *map(device_array, _buffers(frame.arguments)))
        for out, value in zip(_buffers(frame.results), values, strict=True):
            device_array(out)[...] = value


def _answer_metadata(frame: Any) -> bool:
    """Answer XLA if it only asks which version of the interface the handler supports."""
    extension = _Extension.from_address(frame.extension_start) if frame.extension_start else None
    if extension is None or extension.type != _METADATA:
        return False
    metadata = _Metadata.from_address(extension.metadata)
    version = _Api.from_address(frame.api).version
    metadata.version.major, metadata.version.minor, metadata.traits = MAJOR, version.minor, 0
    return True


def handler(execute: Callable[[Any, Any], None], run: Callable[..., list[Any]]) -> Any:
    """Return a C function pointer that XLA can call, which runs execute(frame, run)."""
    # The caller must keep it alive.

    def handle(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            if not _answer_metadata(frame):
                execute(frame, run)
            return None
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".encode()
            return _api_call(frame, _ERROR_CREATE, _ErrorArguments(message=text, code=_INTERNAL))

    return _Function(handle)


_HANDLERS: list[Any] = []


@cache
def register(platform: str, run: Callable[..., list[Any]]) -> None:
    """Register a handler that calls `run` with XLA, under the name TARGET, for the platform "CUDA" or "cpu"."""
    _HANDLERS.append(handler(_execute_on_cuda if platform == "CUDA" else _execute_on_host, run))
    address = ctypes.cast(_HANDLERS[-1], _POINTER).value
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform=platform)
