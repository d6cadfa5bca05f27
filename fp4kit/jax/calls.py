"""Call fp4kit's functions from JAX, also inside functions that JAX traces (jit, grad, vmap).

Arrays that have values are passed to fp4kit directly. In a traced program, a text describes the call: JSON with the
function's name and its arguments, with every array replaced by its position. When the program runs, a handler of XLA's
foreign function interface reads it on CUDA, if CuPy is installed; otherwise jax.pure_callback does, on the host.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.arrays import imports
from fp4kit.arrays.returns import TorchStream, cupy_stream
from fp4kit.call.inputs import AbstractArray
from fp4kit.quantized.container import Quantized
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.training.settings import naming
from fp4kit.units import from_spec as unit_from_spec
from fp4kit.units import to_spec as unit_to_spec

# the parameter that a call is about and those that give its tensor_amax, for errors of traced programs
NAMES: ContextVar[tuple[str, ...]] = ContextVar("names", default=())
JaxArray = Any
Shapes = Sequence[jax.ShapeDtypeStruct]


def is_traced(*arguments: Any) -> bool:
    """Return True if any array among the arguments is traced by JAX, so that it has no values yet; otherwise False."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))


def outline(a: Any) -> Any:
    """Return an AbstractArray with the shape and dtype of an array, so that fp4kit can check arguments without
    values.
    """
    return AbstractArray(tuple(a.shape), np.dtype(a.dtype)) if isinstance(a, (jax.Array, np.ndarray)) else a


def like(a: Any) -> jax.ShapeDtypeStruct:
    """Return a jax.ShapeDtypeStruct with the shape and dtype of `a`, to declare a result of `traced`."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def traced(function: str, results: Shapes, **arguments: Any) -> list[JaxArray]:
    """Insert a call of fp4kit's `function` into a program that JAX traces, and return its traced results."""
    # The call runs on the GPU without copies if the arrays are there and CuPy is installed, otherwise on the host.
    arrays: list[JaxArray] = []
    text = json.dumps([function, {name: _encoded(value, arrays) for name, value in arguments.items()}, NAMES.get()])
    arrays = [jax.lax.stop_gradient(array) for array in arrays]
    host, device = partial(_on_host, text, list(results)), partial(_on_device, text, list(results))
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return host(*arrays)
    register("CUDA", run)
    return jax.lax.platform_dependent(*arrays, cuda=device, default=host)


def _on_host(text: str, results: list[Any], *arrays: JaxArray) -> list[JaxArray]:
    """Insert the call that `text` describes into a traced program, and return its traced results."""
    return jax.pure_callback(partial(run, text), results, *arrays, vmap_method="sequential")


def _on_device(text: str, results: list[Any], *arrays: JaxArray) -> list[JaxArray]:
    """Insert a call of a function of fp4kit into a traced program, and return its traced results."""
    return list(jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")(*arrays, call=text))


def run(text: str, *arrays: JaxArray) -> list[JaxArray]:
    """Run the call that a text describes on the given arrays, and return its results as a list."""
    imported = [a if type(a).__module__ == "cupy" else np.asarray(a) for a in arrays]
    function, arguments, names = json.loads(text)
    keywords = {name: _decoded(value, imported) for name, value in arguments.items()}
    if getattr(keywords.get("seed"), "ndim", None) == 0:
        keywords["seed"] = int(keywords["seed"])
    with naming(names[0], dict.fromkeys(names, np.float32(np.nan))) if names else nullcontext():
        result = getattr(fp4kit, function)(**keywords)
    if isinstance(result, Quantized):
        return [array for array in result.parts().values() if array is not None]
    return result if isinstance(result, list) else [result]


def _encoded(value: Any, arrays: list[JaxArray]) -> Any:
    """Return an argument in a form that JSON can hold and _decoded can read."""
    if isinstance(value, Quantized):
        facts = {name: getattr(value, name) for name in ("shape", "axis", "scale_layout")} | {"dtype": value.dtype.name}
        parts = {name: _encoded(array, arrays) for name, array in value.parts().items()}
        return {"quantized": {**facts, **parts, "recipe": _encoded(value.recipe, arrays)}}
    if isinstance(value, fp4kit.Recipe):
        return {"recipe": to_spec(value)}
    if isinstance(value, fp4kit.Unit):
        return {"unit": unit_to_spec(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(entry, arrays) for entry in value]
    if hasattr(value, "dtype"):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    return value


def _decoded(value: Any, arrays: list[JaxArray]) -> Any:
    """Return the argument that _encoded encoded, from its JSON form."""
    if isinstance(value, list):
        return [_decoded(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "recipe" in value and len(value) == 1:
        return from_spec(value["recipe"])
    if "unit" in value:
        return unit_from_spec(value["unit"])
    fields = {name: _decoded(entry, arrays) for name, entry in value["quantized"].items()}
    return Quantized(**fields | {"shape": tuple(fields["shape"])})


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


def _outline(buffer: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape, dtype and number of bytes of an XLA buffer. The dims of a scalar may be a null pointer."""
    shape = tuple(buffer.dims[: buffer.rank]) if buffer.rank else ()
    dtype = np.dtype(_DTYPES[buffer.dtype])
    return shape, dtype, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _buffers(found: Any) -> list[Any]:
    """Return a list of the _Buffer structures to which `found` points: a _List of the call's arguments or results."""
    return [_Buffer.from_address(found.entries[i]) for i in range(found.size)]


def host_array(buffer: Any) -> np.ndarray:
    """Return a NumPy array that shares the memory of an XLA buffer on the host."""
    shape, dtype, count = _outline(buffer)
    memory: Any = (ctypes.c_uint8 * count).from_address(buffer.data) if count else bytearray()
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def device_array(buffer: Any) -> Any:
    """Return a CuPy array that shares the memory of an XLA buffer on the current device."""
    cupy, (shape, dtype, count) = imports.cupy(), _outline(buffer)
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
