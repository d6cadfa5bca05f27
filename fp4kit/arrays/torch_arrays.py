"""PyTorch: where its calls run, and tensors of what they give."""

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

ALIGNMENT = 16  # bytes: what memory is rounded up to, so that none is empty
_MOST_STREAMS, _MOST_OUTLINES = 64, 1024  # that are kept
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
_BLOCKS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of address: the tensor that CuPy's memory there is


def _module() -> Any:
    return sys.modules["torch"]


@cache
def _dtypes() -> dict[Any, np.dtype]:
    """PyTorch's dtypes and NumPy's; an older PyTorch has not all of them."""
    known = {
        getattr(_module(), name): np.dtype(getattr(ml_dtypes, name, name))
        for name in _NAMES
        if hasattr(_module(), name)
    }
    packed = getattr(_module(), "float4_e2m1fn_x2", None)  # two codes a byte
    return known | ({} if packed is None else {packed: np.dtype(np.uint8)})


@cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    """The inverse; uint8 is PyTorch's."""
    return {known: dtype for dtype, known in reversed(_dtypes().items())}


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """A dtype of PyTorch as NumPy and ml_dtypes name it. Raises TypeError for one that they do not have."""
    if dtype not in _dtypes():
        raise TypeError(f"{op}: dtype is {dtype}, which NumPy and ml_dtypes do not have")
    return _dtypes()[dtype]


def dtype_named(name: str) -> Any:
    """PyTorch's dtype of a name, such as "float8_e4m3fn"."""
    return getattr(_module(), name)


def count_writes(tensors: list[Any]) -> None:
    """Tell autograd that the values of tensors are others now; an older PyTorch is told of one at a time, or cannot
    be.
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
def at_home(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Calls on x run on the current stream of its device, and take memory from PyTorch's allocator; gives what makes
    tensors.
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
    """A tensor on the memory of a NumPy or CuPy array; anything else as it is."""
    if isinstance(array, np.ndarray):
        return _host_tensor(array)
    return _device_tensor(array) if type(array).__module__ == "cupy" else array


class TorchStream(NamedTuple):
    """A stream of PyTorch, as a launch of CuPy takes it."""

    ptr: int
    device: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """CUDA's protocol of streams: its version, and the pointer."""
        return 0, self.ptr


def stream_of(device: Any) -> TorchStream:
    """PyTorch's current stream of a device."""
    return streams_of(device)()


def streams_of(device: Any) -> Callable[[], TorchStream]:
    """What gives PyTorch's current stream of a device."""
    pointer, index = _raw_stream(), device.index
    return lambda: TorchStream(pointer(index), index)


@cache
def _raw_stream() -> Callable[[int], int]:
    """The pointer of a device's current stream: without making a torch.cuda.Stream of it, where PyTorch has that."""
    quick: Callable[[int], int] | None = getattr(_module()._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda index: int(_module().cuda.current_stream(index).cuda_stream))


@lru_cache(_MOST_STREAMS)
def cupy_stream(stream: TorchStream) -> Any:
    """The stream as CuPy's current one, in a with statement; its device must be the current one."""
    cuda = imports.cupy().cuda
    make = getattr(cuda.Stream, "from_external", None)
    return cuda.ExternalStream(*stream) if make is None else make(stream)


def address() -> Callable[[Any], int]:
    """What gives the address of a tensor."""
    found: Callable[[Any], int] = _module().Tensor.data_ptr
    return found


def maker(device: Any, shape: tuple[int, ...], dtype: np.dtype, zeros: bool) -> Callable[[], Any]:
    """What makes tensors of a shape and a dtype, as NumPy names it, on the current device: uninitialised, or of zeros.

    By what PyTorch's compiled code allocates with, where PyTorch has that: it goes straight to the allocator. Else from
    a tensor like it, without memory, which takes half the time that shape, dtype and device take (of eight tensors 8.7
    and 14.1 us on the host of an H200, November 2026).
    """
    like, straight = _outline(shape, dtype, device), _straight_maker(device.type)
    if zeros:
        return partial(_module().zeros_like, like)
    return (
        partial(_module().empty_like, like) if straight is None else partial(straight, shape, like.stride(), like.dtype)
    )


@cache
def _straight_maker(kind: str) -> Callable[..., Any] | None:
    """What allocates tensors by shape, strides and dtype on the current device of a kind; None in an older PyTorch."""
    guards = getattr(getattr(_module()._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{kind}", None)


@lru_cache(_MOST_OUTLINES)
def _outline(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Any:
    """A contiguous tensor whose memory was given back."""
    tensor = _module().empty(shape, dtype=_torch_dtypes()[dtype], device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def tensor_type() -> Any:
    """Return torch.Tensor, or an empty tuple if PyTorch is not imported: a second argument of isinstance."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


@cache
def host_device() -> Any:
    """Return torch.device("cpu")."""
    return _module().device("cpu")


@cache
def facts(on_host: bool = False) -> Callable[[Any], Hashable]:
    """Return a function of a tensor with plain memory, on CUDA or on the host: all that the checks of a call depend on.

    The function raises TypeError for anything else. Raises TypeError if PyTorch is not imported.
    """
    if "torch" not in sys.modules:
        raise TypeError("PyTorch is not imported")
    tensor, parameter, enabled = _module().Tensor, _module().nn.Parameter, _module().is_grad_enabled

    def of(a: Any) -> Hashable:
        kind = type(a)
        if (kind is not tensor and kind is not parameter) or not (a.is_cpu if on_host else a.is_cuda):
            raise TypeError(kind)
        lost = a.requires_grad and enabled()
        return kind, a.shape, a.dtype, a.stride(), a.data_ptr() % ALIGNMENT, a.device, lost, a.is_neg()

    return of


def allocate(size: int) -> Any:
    """CuPy's allocator in a call. A block is a tensor of its own: so record_stream, graphs and PyTorch's pools know
    it.
    """
    cuda = imports.cupy().cuda
    device, torch = cuda.runtime.getDevice(), _module()
    size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    _BLOCKS[block.data_ptr()] = block
    return cuda.MemoryPointer(cuda.UnownedMemory(block.data_ptr(), size, block, device), 0)


def _host_tensor(array: np.ndarray) -> Any:
    """A tensor on the memory of a NumPy array; of a copy where that is read-only."""
    array = array if array.flags.writeable else array.copy()
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" or array.dtype not in _plain() else array
    return _module().from_numpy(bits).view(_torch_dtypes()[array.dtype])


@cache
def _plain() -> tuple[np.dtype, ...]:
    """dtypes that PyTorch takes from NumPy as they are."""
    return tuple(dtype for dtype in _torch_dtypes() if dtype.isbuiltin == 1)


def _device_tensor(array: Any) -> Any:
    """The tensor of a CuPy array: a view of the block that was allocated for it, or of memory that came otherwise."""
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
