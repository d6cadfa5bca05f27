"""PyTorch tensors: in which stream and allocator calls on them run, and how results become tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from fp4kit.arrays import imports

ALIGNMENT = 16  # bytes; sizes are rounded up to a multiple, at least one, so that no allocation is empty
_CACHED_STREAMS, _CACHED_OUTLINES = 64, 1024  # cache sizes
_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
)
_BLOCKS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # address -> the tensor that owns CuPy's memory there


def _module() -> Any:
    """Return the torch module, which the caller's tensors have already loaded."""
    return sys.modules["torch"]


@cache
def _dtypes() -> dict[Any, np.dtype]:
    """Return NumPy's dtype by PyTorch dtype. An older PyTorch lacks some of them."""
    dtypes = {
        getattr(_module(), name): np.dtype(getattr(ml_dtypes, name, name))
        for name in _NAMES
        if hasattr(_module(), name)
    }
    packed = getattr(_module(), "float4_e2m1fn_x2", None)  # two codes per byte
    return dtypes | ({} if packed is None else {packed: np.dtype(np.uint8)})


@cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    """Return PyTorch's dtype by NumPy dtype. uint8 gives torch.uint8."""
    return {known: dtype for dtype, known in reversed(_dtypes().items())}


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """Return a PyTorch dtype as NumPy's or ml_dtypes' dtype. Raise TypeError if they do not have it."""
    if dtype not in _dtypes():
        raise TypeError(f"{op}: dtype is {dtype}; needs a dtype that NumPy or ml_dtypes has, such as torch.float32")
    return _dtypes()[dtype]


def dtype_named(name: str) -> Any:
    """Return PyTorch's dtype with the given name, such as "float8_e4m3fn"."""
    return getattr(_module(), name)


def count_writes(tensors: list[Any]) -> None:
    """Tell autograd that tensors were written to.

    An older PyTorch accepts only one tensor per call, and one before that has no such function; then nothing is done.
    """
    count = getattr(_module().autograd.graph, "increment_version", None)
    if count is None:
        return
    try:
        count(tensors)
    except TypeError:
        for tensor in tensors:
            count(tensor)


@contextmanager
def call_context(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that makes tensors, in a context for calls on x.

    For a CUDA tensor, the calls run on the current stream of its device and take memory from PyTorch's allocator.
    """
    if not x.is_cuda:
        yield tensor_of
        return
    with (
        imports.making_current(x.device.index),
        cupy_stream(stream_of(x.device)),
        imports.cupy().cuda.using_allocator(allocate),
    ):
        yield tensor_of


def tensor_of(array: Any) -> Any:
    """Return a tensor on the memory of a NumPy or CuPy array. Return anything else unchanged."""
    if isinstance(array, np.ndarray):
        return _host_tensor(array)
    return _device_tensor(array) if type(array).__module__ == "cupy" else array


class TorchStream(NamedTuple):
    """A stream of PyTorch, in the form that a CuPy launch accepts."""

    ptr: int
    device: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of CUDA's stream protocol, and the stream's pointer."""
        return 0, self.ptr


def stream_of(device: Any) -> TorchStream:
    """Return PyTorch's current stream of a device."""
    return streams_of(device)()


def streams_of(device: Any) -> Callable[[], TorchStream]:
    """Return a function that returns PyTorch's current stream of a device."""
    pointer, index = _raw_stream(), device.index
    return lambda: TorchStream(pointer(index), index)


@cache
def _raw_stream() -> Callable[[int], int]:
    """Return a function from a device number to the pointer of its current stream.

    It does not create a torch.cuda.Stream, if this PyTorch can avoid that.
    """
    get_raw: Callable[[int], int] | None = getattr(_module()._C, "_cuda_getCurrentRawStream", None)
    return get_raw or (lambda index: int(_module().cuda.current_stream(index).cuda_stream))


@lru_cache(_CACHED_STREAMS)
def cupy_stream(stream: TorchStream) -> Any:
    """Return the stream as a CuPy stream, for a with statement. The stream's device must be the current one."""
    cuda = imports.cupy().cuda
    make = getattr(cuda.Stream, "from_external", None)
    return cuda.ExternalStream(*stream) if make is None else make(stream)


def address() -> Callable[[Any], int]:
    """Return the function that returns the address of a tensor."""
    data_ptr: Callable[[Any], int] = _module().Tensor.data_ptr
    return data_ptr


def maker(device: Any, shape: tuple[int, ...], dtype: np.dtype, zeros: bool) -> Callable[[], Any]:
    """Return a function that allocates tensors of a shape and NumPy dtype on the current device.

    The tensors are uninitialized, or zeros if `zeros` is set. Uninitialized tensors are allocated with the function of
    PyTorch's compiled code, if this PyTorch has it, because that one calls the allocator directly. Otherwise a tensor
    without memory serves as the model. That takes half the time of passing shape, dtype and device: 8.7 instead of 14.1
    us for eight tensors on the host of an H200, November 2026.
    """
    model, allocate_strided = _outline(shape, dtype, device), _straight_maker(device.type)
    if zeros:
        return partial(_module().zeros_like, model)
    return (
        partial(_module().empty_like, model)
        if allocate_strided is None
        else partial(allocate_strided, shape, model.stride(), model.dtype)
    )


@cache
def _straight_maker(kind: str) -> Callable[..., Any] | None:
    """Return the function that allocates tensors by shape, strides and dtype on the current device of a kind.

    Return None if this PyTorch is too old to have it.
    """
    guards = getattr(getattr(_module()._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{kind}", None)


@lru_cache(_CACHED_OUTLINES)
def _outline(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Any:
    """Return a contiguous tensor without memory, which carries only shape, dtype and device."""
    tensor = _module().empty(shape, dtype=_torch_dtypes()[dtype], device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def tensor_type() -> Any:
    """Return torch.Tensor, or an empty tuple if PyTorch is not imported. Both work as second argument of isinstance."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


@cache
def host_device() -> Any:
    """Return torch.device("cpu")."""
    return _module().device("cpu")


@cache
def facts(on_host: bool = False) -> Callable[[Any], Hashable]:
    """Return a function that returns everything that the checks of a call depend on, for a tensor with plain memory.

    The tensor must be on CUDA, or on the host if on_host is set. The returned function raises TypeError for anything
    else. Raises TypeError if PyTorch is not imported.
    """
    if "torch" not in sys.modules:
        raise TypeError("PyTorch is not imported")
    tensor, parameter, enabled = _module().Tensor, _module().nn.Parameter, _module().is_grad_enabled

    def of(a: Any) -> Hashable:
        kind = type(a)
        if (kind is not tensor and kind is not parameter) or not (a.is_cpu if on_host else a.is_cuda):
            raise TypeError(kind)
        loses_gradient = a.requires_grad and enabled()
        return kind, a.shape, a.dtype, a.stride(), a.data_ptr() % ALIGNMENT, a.device, loses_gradient, a.is_neg()

    return of


def allocate(size: int) -> Any:
    """Allocate memory for CuPy during a call.

    Each block is a tensor of its own, so that record_stream, CUDA graphs and PyTorch's memory pools know it.
    """
    cuda = imports.cupy().cuda
    device, torch = cuda.runtime.getDevice(), _module()
    size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    _BLOCKS[block.data_ptr()] = block
    return cuda.MemoryPointer(cuda.UnownedMemory(block.data_ptr(), size, block, device), 0)


def _host_tensor(array: np.ndarray) -> Any:
    """Return a tensor on the memory of a NumPy array, or on a copy if the array is read-only."""
    array = array if array.flags.writeable else array.copy()
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" or array.dtype not in _plain() else array
    return _module().from_numpy(bits).view(_torch_dtypes()[array.dtype])


@cache
def _plain() -> tuple[np.dtype, ...]:
    """Return the dtypes that PyTorch accepts from NumPy directly."""
    return tuple(dtype for dtype in _torch_dtypes() if dtype.isbuiltin == 1)


def _device_tensor(array: Any) -> Any:
    """Return the tensor of a CuPy array.

    It is a view of the block that `allocate` made for it, or shares memory that was allocated otherwise.
    """
    dtype = _torch_dtypes()[array.dtype]
    block = _BLOCKS.get(array.data.mem.ptr)
    if block is None:
        bits = array.reshape(1) if array.ndim == 0 else array
        return (
            _module().from_dlpack(bits.view(f"i{array.itemsize}")).view(dtype).reshape(array.shape)
        )  # CuPy exports integers
    strides = [step // array.itemsize for step in array.strides]
    offset = (array.data.ptr - array.data.mem.ptr) // array.itemsize
    return block.view(dtype).as_strided(array.shape, strides, offset)
