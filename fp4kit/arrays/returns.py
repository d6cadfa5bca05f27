"""Return results in the library of the arguments: PyTorch tensors and JAX arrays, on the host and on CUDA.

fp4kit computes on NumPy and CuPy arrays that share the memory of the arguments (fp4kit.arrays.imports). The results of
a public function are converted to arrays of the first argument's library, without a copy if the library allows it. For
arguments of any library other than PyTorch and JAX, the results are NumPy or CuPy arrays. This module does not import
PyTorch or JAX. If an argument is a tensor or JAX array, the caller has already imported its module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, partial, wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from fp4kit.arrays import imports

ALIGNMENT = 16  # bytes: `allocate` rounds every size up to a multiple of it, and 0 to one multiple
_CACHED_STREAMS, _CACHED_OUTLINES = 64, 1024  # the largest numbers of cached streams and cached outlines
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("complex64", "complex128", "bool"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)
_BLOCKS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # address -> the tensor that owns CuPy's memory there


def _torch() -> Any:
    """Return the module torch, which must have been imported already, as by a caller who has tensors."""
    return sys.modules["torch"]


@cache
def _dtypes() -> dict[Any, np.dtype]:
    """Return {PyTorch dtype: NumPy or ml_dtypes dtype} for all dtypes that fp4kit converts tensors from or to."""
    dtypes = {
        getattr(_torch(), name): np.dtype(getattr(ml_dtypes, name, name)) for name in _NAMES if hasattr(_torch(), name)
    }
    packed = getattr(_torch(), "float4_e2m1fn_x2", None)  # two codes per byte
    return dtypes | ({} if packed is None else {packed: np.dtype(np.uint8)})


@cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    """Return {NumPy or ml_dtypes dtype: PyTorch dtype}. np.uint8 gives torch.uint8, not the packed float4 dtype."""
    return {known: dtype for dtype, known in reversed(_dtypes().items())}


def dtype_named(name: str) -> Any:
    """Return the PyTorch dtype with the given name, such as "float8_e4m3fn"."""
    return getattr(_torch(), name)


def count_writes(tensors: list[Any]) -> None:
    """Tell autograd that PyTorch tensors were written to, so that it rejects a backward pass that needs the old
    values.
    """
    count = getattr(_torch().autograd.graph, "increment_version", None)
    if count is None:
        return
    try:
        count(tensors)
    except TypeError:
        for tensor in tensors:
            count(tensor)


@contextmanager
def _torch_context(x: Any) -> Iterator[Callable[[Any], Any]]:
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
    get_raw: Callable[[int], int] | None = getattr(_torch()._C, "_cuda_getCurrentRawStream", None)
    return get_raw or (lambda index: int(_torch().cuda.current_stream(index).cuda_stream))


@lru_cache(_CACHED_STREAMS)
def cupy_stream(stream: TorchStream) -> Any:
    """Return a CuPy stream for a PyTorch stream."""
    # The device of the stream must be the current one.
    cuda = imports.cupy().cuda
    make = getattr(cuda.Stream, "from_external", None)
    return cuda.ExternalStream(*stream) if make is None else make(stream)


def address() -> Callable[[Any], int]:
    """Return the function Tensor.data_ptr, which takes a tensor and returns the address of its first element."""
    data_ptr: Callable[[Any], int] = _torch().Tensor.data_ptr
    return data_ptr


def maker(device: Any, shape: tuple[int, ...], dtype: np.dtype, zeros: bool) -> Callable[[], Any]:
    """Return a function without arguments that allocates a new tensor with the given shape and NumPy dtype."""
    # The tensors hold zeros if `zeros` is True; otherwise they are uninitialized.
    model, allocate_strided = _outline(shape, dtype, device), _direct_allocator(device.type)
    if zeros:
        return partial(_torch().zeros_like, model)
    return (
        partial(_torch().empty_like, model)
        if allocate_strided is None
        else partial(allocate_strided, shape, model.stride(), model.dtype)
    )


@cache
def _direct_allocator(kind: str) -> Callable[..., Any] | None:
    """Return PyTorch's function that allocates a tensor from its shape, strides and dtype, without further checks."""
    guards = getattr(getattr(_torch()._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{kind}", None)


@lru_cache(_CACHED_OUTLINES)
def _outline(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Any:
    """Return a contiguous tensor with the given shape, dtype and device but without memory."""
    tensor = _torch().empty(shape, dtype=_torch_dtypes()[dtype], device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def tensor_type() -> Any:
    """Return the class torch.Tensor, or () if PyTorch is not imported."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


@cache
def host_device() -> Any:
    """Return torch.device("cpu")."""
    return _torch().device("cpu")


@cache
def torch_facts(on_host: bool = False) -> Callable[[Any], Hashable]:
    """Return a function that takes a tensor and returns a hashable tuple of the facts that a call's checks depend
    on.
    """
    if "torch" not in sys.modules:
        raise TypeError("PyTorch is not imported")
    tensor, parameter, enabled = _torch().Tensor, _torch().nn.Parameter, _torch().is_grad_enabled

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
    device, torch = cuda.runtime.getDevice(), _torch()
    size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    _BLOCKS[block.data_ptr()] = block
    return cuda.MemoryPointer(cuda.UnownedMemory(block.data_ptr(), size, block, device), 0)


def _host_tensor(array: np.ndarray) -> Any:
    """Return a CPU tensor that shares the memory of a NumPy array, or of a copy if the array is read-only."""
    array = array if array.flags.writeable else array.copy()
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" or array.dtype not in _plain() else array
    return _torch().from_numpy(bits).view(_torch_dtypes()[array.dtype])


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
            _torch().from_dlpack(bits.view(f"i{array.itemsize}")).view(dtype).reshape(array.shape)
        )  # viewed as integers, which CuPy can export
    strides = [step // array.itemsize for step in array.strides]
    offset = (array.data.ptr - array.data.mem.ptr) // array.itemsize
    return block.view(dtype).as_strided(array.shape, strides, offset)


@contextmanager
def _jax_context(x: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the function that converts results (NumPy or CuPy arrays) to JAX arrays on the device of the JAX array
    x.
    """

    yield lambda array: giver(x)(array)


def giver(x: Any) -> Callable[[Any], Any]:
    """Return a function that converts a NumPy or CuPy array to a JAX array on the device of the JAX array x."""
    device, is_committed = x.device, getattr(x, "committed", True)

    def give(array: Any) -> Any:
        if is_committed:
            return array_of(array, device)
        with sys.modules["jax"].default_device(device):
            return array_of(array)

    return give


def jax_facts(a: Any) -> Hashable:
    """Return a hashable tuple of the facts about a JAX array that the checks of a call depend on, such as its shape."""
    kind = type(a)
    if kind.__name__ != "ArrayImpl" or a.is_deleted() or len(a.devices()) != 1 or a.device.platform != "cpu":
        raise TypeError(kind)
    view = np.asarray(a)  # waits for the values of `a`; the view has the strides of its layout
    return kind, a.shape, a.dtype, view.strides, view.flags.num, a.device, getattr(a, "committed", True)


def array_of(array: Any, device: Any = None) -> Any:
    """Return a JAX array made from a NumPy or CuPy array."""
    if isinstance(array, np.ndarray):
        copy = np.array(array)  # JAX may keep the memory, so no other array may share it
        return sys.modules["jax"].device_put(copy, device)
    return _device_array(array) if type(array).__module__ == "cupy" else array


def _device_array(array: Any) -> Any:
    """Return a JAX array on the memory of a CuPy array, or on that of a contiguous copy if it is not contiguous."""
    # The elements are exported as integers and then viewed in their dtype by JAX, because CuPy does not export every
    # dtype.
    jax: Any = sys.modules["jax"]
    array = imports.cupy().ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes a row of a 0-d array
    bits = jax.dlpack.from_dlpack(array.view(f"u{array.itemsize}"))
    return bits if array.dtype == np.uint8 else jax.lax.bitcast_convert_type(bits, array.dtype)


P = ParamSpec("P")
T = TypeVar("T")
Give = Callable[[Any], Any]  # converts a NumPy or CuPy array to a library's array; leaves the library's own unchanged


class ArrayLibrary(NamedTuple):
    """PyTorch or JAX, with what is needed to convert results to its arrays.

    Attributes:
        name: the name of its module.
        call_context: call_context(a) is a context manager to enter around a call on `a`, an array of the library. It
            yields the function that converts results.
        is_mutable: True if arrays of the library can be written to (PyTorch), False if not (JAX).
    """

    name: str
    call_context: Callable[[Any], AbstractContextManager[Give]]
    is_mutable: bool


TORCH = ArrayLibrary("torch", _torch_context, True)
JAX = ArrayLibrary("jax", _jax_context, False)


def library_of(a: Any) -> ArrayLibrary | None:
    """Return TORCH or JAX if `a` is an array of that library; None for NumPy, CuPy and every other library."""
    if isinstance(a, np.ndarray) or type(a).__module__ == "cupy":
        return None
    a = first_array(a)
    for library, kind in ((TORCH, "Tensor"), (JAX, "Array")):
        if isinstance(a, getattr(sys.modules.get(library.name), kind, ())):
            return library
    return None


def first_array(a: Any) -> Any:
    """Return the array that determines the library and device of an argument."""
    while isinstance(a, (list, tuple)) and a:
        a = a[0]
    return getattr(a, "packed", a)


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """Return a dtype of NumPy, ml_dtypes, PyTorch or JAX as NumPy's dtype."""
    if type(dtype).__module__ == "torch":
        if dtype not in _dtypes():
            raise TypeError(f"{op}: dtype is {dtype}; needs a dtype that NumPy or ml_dtypes has, such as torch.float32")
        return _dtypes()[dtype]
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: dtype is {dtype!r:.60}; needs a dtype of NumPy, ml_dtypes or PyTorch") from None


def convert_arrays(result: Any, give: Give) -> Any:
    """Return the result of a call in which every NumPy or CuPy array is converted by the function `give`."""
    if isinstance(result, np.ndarray) or type(result).__module__ == "cupy":
        return give(result)
    if hasattr(result, "with_parts"):
        return result.with_parts(give)
    if isinstance(result, list):
        return [convert_arrays(part, give) for part in result]
    if isinstance(result, tuple):
        parts = (convert_arrays(part, give) for part in result)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def returns_in_library(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that computes NumPy or CuPy arrays so that it returns arrays of its first argument's
    library.
    """
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules and imports.is_traced():
            return imports.untraced(call, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(first)
        if isinstance(x, Iterator):  # x is iterated twice: here to find its library, and later by the function
            again: Any = call
            return again(list(x), *args[1:], **{name: value for name, value in kwargs.items() if name != first})
        library = None if type(x) is np.ndarray else library_of(x)
        if library is None:
            return function(*args, **kwargs)
        out: Any = kwargs.get("out")
        with library.call_context(first_array(x)) as give:
            result = function(*args, **kwargs)
            return result if result is None else convert_arrays(result, give) if out is None else out

    return call


def mark_written(out: Any) -> Any:
    """Tell PyTorch's autograd that `out` was written to, as PyTorch's in-place functions do, and return `out`."""
    if isinstance(getattr(out, "packed", out), tensor_type()):
        arrays = out.parts().values() if hasattr(out, "with_parts") else (out,)
        count_writes([array for array in arrays if array is not None])
    return out


class PlanLibrary:
    """Convert the results of a plan's methods to the library of the plan's tensors.

    A plan is a GroupedPlan or a MasterWeightsPlan. It overwrites and returns its own arrays in every call. For PyTorch
    the arrays are converted once, to tensors on their memory, and later calls return these tensors again. JAX arrays
    cannot be written to, so each call returns new copies. For any other library, results are not converted.

    arrays: the tensors of the plan, a sequence or one stacked array. The first one decides the library and the device.
    """

    def __init__(self, arrays: Any) -> None:
        self._library, self._like = library_of(arrays), first_array(arrays)
        self._known: dict[str, tuple[list[Any], list[Any]]] = {}

    def context(self) -> AbstractContextManager[Give]:
        """Return the context manager to enter around the plan's calls. It yields the function that converts results."""
        return nullcontext(_unchanged) if self._library is None else self._library.call_context(self._like)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the plan, and return its result as arrays of the plan's library."""
        # If arrays of this library are immutable, the result is a copy, because the next call overwrites the plan's
        # arrays.
        if self._library is None:
            return function(*args, **kwargs)
        with self.context() as give:
            result: Any = function(*args, **kwargs)
            if not self._library.is_mutable:
                return convert_arrays(result, lambda array: give(array.copy()))
            return self._tensors(function.__name__, result, give)

    def _tensors(self, name: str, result: Any, give: Give) -> Any:
        """Return the result of the plan's method `name` as a list of tensors, or as one tensor if it is not a list."""
        arrays = result if isinstance(result, list) else [result]
        cached = self._known.get(name)
        if cached is None or [*map(id, cached[0])] != [*map(id, arrays)]:
            cached = self._known[name] = list(arrays), convert_arrays(list(arrays), give)
        return list(cached[1]) if isinstance(result, list) else cached[1][0]


def _unchanged(array: Any) -> Any:
    """Return the array unchanged: the conversion of results for plans on NumPy or CuPy arrays."""
    return array


def returns_in_plan_library(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of a plan, such as GroupedPlan, so that it returns arrays in the library of the plan's
    tensors.
    """
    # The plan must have a PlanLibrary as its attribute `_home`, whose method `call` converts the result.

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        plan: Any = args[0]
        return plan._home.call(method, *args, **kwargs)

    return call
