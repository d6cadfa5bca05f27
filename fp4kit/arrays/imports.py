"""Import arrays of other libraries without a copy: host arrays as NumPy arrays (DLPack), CUDA arrays as CuPy arrays.

This module also imports CuPy, only when it is needed. An array on another library's memory refers to the DLPack capsule
that describes the memory. The capsule frees the memory when it is garbage collected, so with the last such array.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from fp4kit.arguments import a_type

T = TypeVar("T")
# DLPack device type -> its name. Page-locked memory (3, 11) counts as the host's, managed memory (13) as CUDA's.
_DEVICE_NAMES = {1: "cpu", 3: "cpu", 11: "cpu", 2: "cuda", 13: "cuda", 8: "metal", 10: "rocm", 14: "oneapi"}

DIFFERENTIABLE = ("fake_quantize", "fake_quantize_grouped")  # functions whose fp4kit.torch version has gradients


def as_array(x: Any, name: str = "x") -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array in host memory, of any library, as a NumPy array that shares its memory."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        check_unmasked(x, name)
        return np.asarray(x)
    if "torch._dynamo" in sys.modules and is_traced():
        return untraced(as_array, x, name)
    device = device_name(x, name)
    if device != "cpu":
        of, is_cuda = _variable(name), device.startswith("cuda")
        way = f"cupy.asnumpy({of}) or {of}.cpu()" if is_cuda else f"{of}.cpu() or jax.device_get({of})"
        raise NotImplementedError(
            f"{name} is on {device}; this function computes only on arrays in host memory; move it with {way}"
        )
    return read_dlpack(_detached(x), name)


def check_unmasked(x: Any, name: str) -> None:
    """Raise TypeError if x is a masked array, because its mask would be dropped silently."""
    if hasattr(x, "filled"):
        variable = _variable(name)
        raise TypeError(
            f"{name} is a masked array, whose mask would be ignored; needs a plain array; pass"
            f" {variable}.filled(0), or {variable}.data to use the masked elements too"
        )


def as_arrays(operation: str = "", /, **named: Any) -> tuple[Any, ...]:
    """Return arrays in host memory, of any library, as NumPy arrays that share their memory."""
    prefix = f"{operation}: " if operation else ""
    check_one_device(operation, **named)
    return tuple(None if x is None else as_array(x, prefix + name) for name, x in named.items())


def check_one_device(operation: str = "", /, **named: Any) -> None:
    """Raise ValueError unless all arrays are on one device."""
    prefix = f"{operation}: " if operation else ""
    devices = {name: device_name(x, prefix + name) for name, x in named.items() if x is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} {'is ' * (i == 0)}on {place}" for i, (name, place) in enumerate(devices.items()))
        raise ValueError(f"{prefix}{places}; all arrays of one call must be on one device; move them to one first")


def device_name(x: Any, name: str = "x") -> str:
    """Return the device that holds the memory of x: "cpu" (page-locked memory included), "cuda:0", "rocm:1", ..."""
    # An object that has only `__cuda_array_interface__` gives "cuda", because that interface does not state the device
    # number.
    if isinstance(x, (np.ndarray, np.generic)):
        return "cpu"
    if "torch._dynamo" in sys.modules and is_traced():
        return untraced(device_name, x, name)
    if hasattr(x, "data_ptr"):
        check_tensor(x, name)
    if hasattr(x, "__dlpack_device__") and hasattr(x, "__dlpack__"):
        kind, index = _dlpack_device(x, name)
        place = _DEVICE_NAMES.get(kind, f"DLPack device type {kind}")
        return place if place == "cpu" else f"{place}:{index}"
    if hasattr(x, "__cuda_array_interface__"):
        return "cuda"
    if isinstance(x, getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", ())):
        raise TypeError(
            f"{name} is traced by JAX and has no values yet; needs an array of values; call fp4kit.jax's function,"
            " or call this one outside of the traced code"
        )
    raise TypeError(
        f"{name} is {a_type(x, module=True)}; needs a NumPy array or an array that exports "
        f"DLPack (PyTorch, JAX, ...); {way_to_array(x, _variable(name))}"
    )


def way_to_array(x: Any, variable: str) -> str:
    """Return the end of an error message about an object x that is not an array: how to get an array from it."""
    if hasattr(x, "named_parameters"):  # a torch.nn.Module
        weight = "weight" if hasattr(x, "weight") else next((name for name, _ in x.named_parameters()), "weight")
        expression = f"{variable}.{weight}" if "." not in weight else f"{variable}.get_parameter({weight!r})"
        return f"pass one parameter, such as {expression}, or fake-quantize all with fp4kit.torch.fake_quantize_model"
    if isinstance(x, Mapping):
        return f"pass one of its arrays, such as {variable}[{next(iter(x), 'weight')!r:.60}]"
    if hasattr(x, "packed") and hasattr(x, "dequantize"):  # a Quantized
        return f"it is quantized already; pass {variable}.dequantize() or {variable}.packed, or call fp4kit.requantize"
    if isinstance(x, (str, os.PathLike)):
        return "load the file first: fp4kit.load for files of fp4kit.save, safetensors for models"
    return "pass an array" if x is None else f"pass np.asarray({variable}, np.float32)"


def _dlpack_device(x: Any, name: str) -> tuple[int, int]:
    """Return the DLPack device type and device number of the memory of x."""
    try:
        kind, index = x.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:
        why = "it was deleted, or donated to a call" if getattr(x, "is_deleted", bool)() else str(error).rstrip(".")
        raise BufferError(
            f"{name} is {a_type(x)} without memory of its own on one device ({why:.120}); needs values in"
            " one place: gather a sharded array; inside torch.func, call fp4kit.torch's function"
        ) from error


def is_distributed(x: Any) -> bool:
    """Return whether x is a PyTorch DTensor, which is a tensor spread over the processes of a distributed program."""
    return hasattr(x, "full_tensor") and hasattr(x, "to_local") and hasattr(x, "placements")


def way_to_local(variable: str) -> str:
    """Return the end of an error message about a DTensor: "needs a plain tensor", and two ways to get one from it."""
    return (
        f"needs a plain tensor; pass {variable}.full_tensor(), or {variable}.to_local() with the tensor_amax of all"
        " shards"
    )


def check_tensor(x: Any, name: str = "x") -> None:
    """Raise an error for a PyTorch tensor x whose values cannot be read from its memory, or that requires grad."""
    variable = _variable(name)
    if is_distributed(x):
        raise TypeError(f"{name} is a DTensor, whose values are spread over ranks; {way_to_local(variable)}")
    if str(getattr(x, "layout", "torch.strided")) != "torch.strided":
        raise TypeError(f"{name} is a tensor of layout {x.layout}; needs a dense one; pass {variable}.to_dense()")
    if getattr(x, "is_nested", False):
        raise TypeError(
            f"{name} is a nested tensor; needs one dense tensor; pass {variable}.unbind() to a grouped function"
        )
    if getattr(x, "is_quantized", False):
        raise TypeError(f"{name} is a tensor of {x.dtype}; needs plain numbers; pass {variable}.dequantize()")
    if getattr(x, "is_meta", False):
        raise ValueError(
            f"{name} is on the meta device, which has no memory; needs values; materialize the tensor first"
        )
    for bit, is_set in (("negative", "is_neg"), ("conjugate", "is_conj")):
        if getattr(x, is_set, bool)():
            way_out = f"{variable}.resolve_{is_set[3:]}()"
            raise ValueError(f"{name} has the {bit} bit set, which its memory does not show; pass {way_out}")
    if getattr(x, "requires_grad", False):
        _check_grad(x, name)


def _check_grad(x: Any, name: str) -> None:
    """Raise ValueError for x, a PyTorch tensor that requires grad, because fp4kit's functions would lose its
    gradient.
    """
    torch, op = sys.modules["torch"], name.partition(":")[0]
    if not torch.is_grad_enabled() or (isinstance(x, torch.nn.Parameter) and op not in DIFFERENTIABLE):
        return
    one = (
        f"fp4kit.torch.{op}, which carries" if op in DIFFERENTIABLE else "one of fp4kit.torch's functions, which carry"
    )
    raise ValueError(
        f"{name} requires grad, which would be lost here; call {one} it, or pass {_variable(name)}.detach()"
    )


def _variable(name: str) -> str:
    """Return the argument in the name that messages give an array: "quantize: x" gives "x"."""
    return name.rpartition(" ")[2]


def _detached(x: Any) -> Any:
    """Return an array in a form that DLPack can export."""
    # A PyTorch tensor that requires grad is detached, because PyTorch does not export such tensors; the result shares
    # the tensor's memory.
    return x.detach() if getattr(x, "requires_grad", False) else x


# ---- torch.compile ----


def is_traced() -> bool:
    """Return True if torch.compile traces the caller, or would trace the functions that the caller calls next."""
    if sys.modules["torch"].compiler.is_dynamo_compiling():  # a constant True in traced code
        return _leave_untraced()
    tracer = getattr(sys.modules["torch"]._C._dynamo.eval_frame, "get_eval_frame_callback", bool)()
    return bool(tracer) and _leave_untraced()


def untraced(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return function(*args, **kwargs), called outside of the graph that torch.compile makes."""
    # Call it only after is_traced has returned True, because is_traced tells torch.compile not to trace this function.
    return function(*args, **kwargs)


def _leave_untraced() -> bool:
    """Tell torch.compile not to trace the function `untraced`."""
    if not hasattr(untraced, "_torchdynamo_disable"):
        why = "fp4kit's functions are not traced; in a graph, call those of fp4kit.torch, such as fp4kit.torch.quantize"
        globals()["untraced"] = sys.modules["torch"]._dynamo.disable(untraced, reason=why)
    return True


_leave_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does


# ---- CuPy ----

_NOTHING = nullcontext()


@cache
def cupy() -> Any:
    """Return the module cupy."""
    try:
        import cupy as module
    except ImportError as error:
        raise RuntimeError(
            'fp4kit.cuda: CuPy is missing; run pip install "fp4kit[cuda12]" or "fp4kit[cuda13]", as the driver needs'
        ) from error
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"fp4kit.cuda: no usable CUDA driver ({error}); install or update NVIDIA's driver"
        ) from error
    if not count:
        raise RuntimeError("fp4kit.cuda: the CUDA driver sees no device; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return module


def to_device(host: np.ndarray) -> Any:
    """Return a copy of a NumPy array as a CuPy array on the current device."""
    # A 0-d array is copied with one axis and reshaped, because CuPy would otherwise compile a kernel, which takes
    # seconds.
    return cupy().asarray(host) if host.ndim else cupy().asarray(host.reshape(1)).reshape(())


def on_device(array: Any) -> bool:
    """Return True for a CuPy array, which is on a GPU, and False for a NumPy array."""
    # `array` must be one of the two, as the results of import_arrays are.
    return not isinstance(array, np.ndarray)


def to_host(array: Any) -> Any:
    """Return a NumPy or CuPy array, such as a result of import_arrays, as a NumPy array."""
    return array.get() if on_device(array) else array


def making_current(device: int) -> AbstractContextManager[Any]:
    """Return a context manager that makes a CUDA device, given by its number, the current one within a with block."""
    cuda = cupy().cuda
    return _NOTHING if cuda.runtime.getDevice() == device else cuda.Device(device)


def module_of(a: Any) -> Any:
    """Return the module whose functions take the array `a`: numpy for a NumPy array, cupy for a CuPy array."""
    return np if isinstance(a, np.ndarray) else sys.modules["cupy"]


def import_arrays(op: str, **named: Any) -> tuple[Any, ...]:
    """Return arrays of any library as CuPy arrays if they are on a GPU, otherwise as NumPy arrays."""
    if all(type(a) is np.ndarray for a in named.values()) or _one_cupy_device(named.values()):
        return tuple(named.values())
    if not any(device_name(a, f"{op}: {name}").startswith("cuda") for name, a in named.items()):
        return as_arrays(op, **named)
    check_one_device(op, **named)
    try:
        module = cupy()
    except RuntimeError as error:
        name, place = next((name, device_name(a)) for name, a in named.items())
        why = str(error).removeprefix("fp4kit.cuda: ")
        raise RuntimeError(f"{op}: {name} is on {place}, but {why}; or move {name} to the host first") from error
    return tuple(a if isinstance(a, module.ndarray) else module.from_dlpack(_detached(a)) for a in named.values())


def import_to_host(op: str, **named: Any) -> Any:
    """Return one array of any library, given as name=array, as a NumPy array. An array on a GPU is copied."""
    (array,) = import_arrays(op, **named)
    return to_host(array)


def _one_cupy_device(arrays: Iterable[Any]) -> bool:
    """Return whether all arrays are CuPy arrays on one device; False if there are none or CuPy is not imported."""
    kind = getattr(sys.modules.get("cupy"), "ndarray", None)
    return kind is not None and all(isinstance(a, kind) for a in arrays) and len({a.device.id for a in arrays}) == 1


def is_array(a: Any) -> bool:
    """Return whether an object is an array of some library, which exports DLPack or the CUDA array interface."""
    return hasattr(a, "__dlpack__") or hasattr(a, "__cuda_array_interface__")


_MAX_SUMS = 1 << 20  # largest number of sums that overlaps_itself computes; beyond it, the array counts as overlapping


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements of an array have a byte in common."""
    # The result is exact, except that it is True if the test would need more than _MAX_SUMS (2^20) sums.
    axes = _interleaved_axes(shape, strides, itemsize)
    sums = np.zeros(1, np.int64)
    for i, (step, length) in enumerate(axes):
        if step == 0:
            return True
        below = sums // step
        for count in (below, below + 1):  # the multiples of step next to each sum
            close = np.abs(sums - count * step) < itemsize
            if (close & (count != 0) & (np.abs(count) < length)).any():
                return True
        if i + 1 < len(axes):
            if len(sums) * 2 * length > _MAX_SUMS:
                return True
            sums = np.unique(np.add.outer(sums, step * np.arange(1 - length, length)))
    return False


def _interleaved_axes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Return the axes along which elements may overlap, as a list of (absolute stride in bytes, length)."""
    if 0 in shape:
        return []
    axes: list[tuple[int, int]] = []
    for step, length in sorted((abs(step), length) for step, length in zip(strides, shape, strict=True) if length > 1):
        if axes and step == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0], axes[-1][1] * length)
        else:
            axes.append((step, length))
    while axes and axes[-1][0] >= itemsize + sum(step * (length - 1) for step, length in axes[:-1]):
        axes.pop()
    return sorted(axes, key=lambda axis: axis[1])


# {(DLDataTypeCode, bits, lanes): NumPy dtype}
DTYPES: dict[tuple[int, int, int], np.dtype[Any]] = {
    **{(0, 8 * n, 1): np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{(1, 8 * n, 1): np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{(2, 8 * n, 1): np.dtype(f"f{n}") for n in (2, 4, 8)},
    (4, 16, 1): np.dtype(ml_dtypes.bfloat16),
    **{(5, 8 * n, 1): np.dtype(f"c{n}") for n in (8, 16)},
    (6, 8, 1): np.dtype(np.bool_),
    (10, 8, 1): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8, 1): np.dtype(ml_dtypes.float8_e5m2),
    (14, 8, 1): np.dtype(ml_dtypes.float8_e8m0fnu),
    (17, 4, 2): np.dtype(np.uint8),  # two E2M1 codes per byte
}

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_VERSION = (1, 0)  # the newest DLPack version whose structures are declared below


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL: row-major without gaps
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _ExportedMemory:
    """An object that describes the memory in a DLPack capsule by NumPy's array interface.

    np.asarray(object) makes an array of plain bytes on this memory, which the caller then views in the right dtype. The
    object refers to the capsule, which keeps the memory alive as long as such an array exists.
    """

    def __init__(self, capsule: object, tensor: _DLTensor, dtype: np.dtype[Any], read_only: bool) -> None:
        self.capsule = capsule
        strides = None  # row-major without gaps
        if tensor.ndim and tensor.strides:
            strides = tuple(dtype.itemsize * n for n in tensor.strides[: tensor.ndim])
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{dtype.itemsize}",  # plain bytes: NumPy has no type string for bfloat16
            "shape": _shape(tensor),
            "strides": strides,
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
        }


def read_dlpack(x: Any, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array that shares the memory of x, an array in host memory that exports DLPack."""
    try:
        capsule = x.__dlpack__(max_version=_VERSION)
    except TypeError:  # an exporter of DLPack before 1.0 does not know the keyword
        capsule = x.__dlpack__()
    tensor, read_only = _read(capsule, name)
    key = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if key not in DTYPES:
        raise TypeError(
            f"{name} has the DLPack dtype (code, bits, lanes) = {key}; needs float32, float16, bfloat16 or "
            "another dtype that NumPy or ml_dtypes has; convert it first"
        )
    dtype = DTYPES[key]
    if 0 in _shape(tensor):  # the exporter's data pointer may be NULL
        return np.empty(_shape(tensor), dtype)
    if not tensor.data:
        raise BufferError(
            f"{name} exports no memory, only a shape, as a tensor does while it is traced; needs an array of values"
        )
    return np.asarray(_ExportedMemory(capsule, tensor, dtype, read_only)).view(dtype)


def _read(capsule: object, name: str) -> tuple[_DLTensor, bool]:
    """Return the DLTensor structure in a capsule, and whether its memory is read-only."""
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = _DLManagedTensorVersioned.from_address(pointer)
        if versioned.major != _VERSION[0]:
            argument = name.rpartition(" ")[2]
            raise BufferError(
                f"{name} exports DLPack {versioned.major}.{versioned.minor}; needs 1.x or earlier; "
                f"pass a copy made by its library, such as np.asarray({argument})"
            )
        return versioned.dl_tensor, bool(versioned.flags & _READ_ONLY)
    if _capsule_is_valid(capsule, b"dltensor"):
        return _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).dl_tensor, True
    raise BufferError(f"{name}.__dlpack__() gave {capsule!r}; needs an unconsumed DLPack capsule; export it again")


def _shape(tensor: _DLTensor) -> tuple[int, ...]:
    """Return the shape of a DLTensor (DLPack's description of an array) as a tuple; () if it has no dimensions."""
    return tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
