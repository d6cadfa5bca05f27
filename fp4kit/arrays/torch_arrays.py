"""Convert results to PyTorch tensors, and let calls on tensors use PyTorch's stream and allocator."""

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

ALIGNMENT = 16  # bytes: `allocate` rounds every size up to a multiple of it, and 0 to one multiple
_CACHED_STREAMS, _CACHED_OUTLINES = 64, 1024  # the largest numbers of cached streams and cached outlines
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
    """Return the module torch, which must have been imported already, as by a caller who has tensors."""
    return sys.modules["torch"]


@cache
def _dtypes() -> dict[Any, np.dtype]:
    """Return {PyTorch dtype: NumPy or ml_dtypes dtype} for all dtypes that fp4kit converts tensors from or to."""
    dtypes = {
        getattr(_module(), name): np.dtype(getattr(ml_dtypes, name, name))
        for name in _NAMES
        if hasattr(_module(), name)
    }
    packed = getattr(_module(), "float4_e2m1fn_x2", None)  # two codes per byte
    return dtypes | ({} if packed is None else {packed: np.dtype(np.uint8)})


@cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    """Return {NumPy or ml_dtypes dtype: PyTorch dtype}. np.uint8 gives torch.uint8, not the packed float4 dtype."""
    return {known: dtype for dtype, known in reversed(_dtypes().items())}


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """Return the NumPy or ml_dtypes dtype that equals a PyTorch dtype; uint8 for torch.float4_e2m1fn_x2."""
    if dtype not in _dtypes():
        raise TypeError(f"{op}: dtype is {dtype}; needs a dtype that NumPy or ml_dtypes has, such as torch.float32")
    return _dtypes()[dtype]


def dtype_named(name: str) -> Any:
    """Return the PyTorch dtype with the given name, such as "float8_e4m3fn"."""
    return getattr(_module(), name)


def count_writes(tensors: list[Any]) -> None:
    """Tell autograd that PyTorch tensors were written to, so that it rejects a backward pass that needs the old
    values.
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
    """Enter a context for a call on the tensor x, and yield the function that converts results to tensors."""
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
    """Return a tensor that shares the memory of a NumPy or CuPy array."""
    if isinstance(array, np.ndarray):
        return _host_tensor(array)
    return _device_tensor(array) if type(array).__module__ == "cupy" else array


class TorchStream(NamedTuple):
    """A PyTorch stream as its pointer and device number, in a form that CuPy can use as a stream."""

    ptr: int
    device: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of CUDA's stream protocol, and the stream's pointer."""
        return 0, self.ptr


def stream_of(device: Any) -> TorchStream:
    """Return PyTorch's current stream on a CUDA device. device: a torch.device with a number."""
    return streams_of(device)()


def streams_of(device: Any) -> Callable[[], TorchStream]:
    """Return a function without arguments that returns PyTorch's current stream on a device."""
    pointer, index = _raw_stream(), device.index
    return lambda: TorchStream(pointer(index), index)


@cache
def _raw_stream() -> Callable[[int], int]:
    """Return a function from a device number to the address of PyTorch's current stream on that device."""
    get_raw: Callable[[int], int] | None = getattr(_module()._C, "_cuda_getCurrentRawStream", None)
    return get_raw or (lambda index: int(_module().cuda.current_stream(index).cuda_stream))


@lru_cache(_CACHED_STREAMS)
def cupy_stream(stream: TorchStream) -> Any:
    """Return a CuPy stream for a PyTorch stream."""
    # The device of the stream must be the current one.
    cuda = imports.cupy().cuda
    make = getattr(cuda.Stream, "from_external", None)
    return cuda.ExternalStream(*stream) if make is None else make(stream)


def address() -> Callable[[Any], int]:
    """Return the function Tensor.data_ptr, which takes a tensor and returns the address of its first element."""
    data_ptr: Callable[[Any], int] = _module().Tensor.data_ptr
    return data_ptr


def maker(device: Any, shape: tuple[int, ...], dtype: np.dtype, zeros: bool) -> Callable[[], Any]:
    """Return a function without arguments that allocates a new tensor with the given shape and NumPy dtype."""
    # The tensors hold zeros if `zeros` is True; otherwise they are uninitialized.
    model, allocate_strided = _outline(shape, dtype, device), _direct_allocator(device.type)
    if zeros:
        return partial(_module().zeros_like, model)
    return (
        partial(_module().empty_like, model)
        if allocate_strided is None
        else partial(allocate_strided, shape, model.stride(), model.dtype)
    )


@cache
def _direct_allocator(kind: str) -> Callable[..., Any] | None:
    """Return PyTorch's function that allocates a tensor from its shape, strides and dtype, without further checks."""
    guards = getattr(getattr(_module()._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{kind}", None)


@lru_cache(_CACHED_OUTLINES)
def _outline(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Any:
    """Return a contiguous tensor with the given shape, dtype and device but without memory."""
    tensor = _module().empty(shape, dtype=_torch_dtypes()[dtype], device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def tensor_type() -> Any:
    """Return the class torch.Tensor, or () if PyTorch is not imported."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


@cache
def host_device() -> Any:
    """Return torch.device("cpu")."""
    return _module().device("cpu")


@cache
def facts(on_host: bool = False) -> Callable[[Any], Hashable]:
    """Return a function that takes a tensor and returns a hashable tuple of the facts that a call's checks depend
    on.
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
    """Allocate at least `size` bytes on the current device with PyTorch's allocator, and return CuPy's pointer to
    them.
    """
    cuda = imports.cupy().cuda
    device, torch = cuda.runtime.getDevice(), _module()
    size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    _BLOCKS[block.data_ptr()] = block
    return cuda.MemoryPointer(cuda.UnownedMemory(block.data_ptr(), size, block, device), 0)


def _host_tensor(array: np.ndarray) -> Any:
    """Return a CPU tensor that shares the memory of a NumPy array, or of a copy if the array is read-only."""
    array = array if array.flags.writeable else array.copy()
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" or array.dtype not in _plain() else array
    return _module().from_numpy(bits).view(_torch_dtypes()[array.dtype])


@cache
def _plain() -> tuple[np.dtype, ...]:
    """Return the dtypes of NumPy itself, without those of ml_dtypes. torch.from_numpy accepts these directly."""
    return tuple(dtype for dtype in _torch_dtypes() if dtype.isbuiltin == 1)


def _device_tensor(array: Any) -> Any:
    """Return a CUDA tensor that shares the memory of a CuPy array."""
    dtype = _torch_dtypes()[array.dtype]
    block = _BLOCKS.get(array.data.mem.ptr)
    if block is None:
        bits = array.reshape(1) if array.ndim == 0 else array
        return (
            _module().from_dlpack(bits.view(f"i{array.itemsize}")).view(dtype).reshape(array.shape)
        )  # viewed as integers, which CuPy can export
    strides = [step // array.itemsize for step in array.strides]
    offset = (array.data.ptr - array.data.mem.ptr) // array.itemsize
    return block.view(dtype).as_strided(array.shape, strides, offset)
