"""Test that arrays of any library are imported through DLPack, with the right layout, lifetime and errors.

Most tests use an exporter written here; some use PyTorch and JAX, if these are installed.
"""

import ctypes
import gc
import re
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.arrays import imports
from fp4kit.arrays.imports import as_array, as_arrays, device_name

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOAT, BFLOAT, BOOL = 2, 4, 6  # DLDataTypeCode
CPU, CUDA, CUDA_HOST, METAL, ROCM, CUDA_MANAGED = 1, 2, 3, 8, 10, 13  # DLDeviceType

_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# When the destructor of a capsule runs, the capsule's reference count is 0. The destructor must therefore handle the
# capsule as an address, never as a Python object.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_exports = {}  # maps the address of a managed tensor to everything it points to; the tensor's deleter removes the entry


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _delete_capsule(capsule):
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            del _exports[_get_pointer(capsule, name)]


class Exporter:
    """Export the memory of a NumPy array through DLPack, as the array of another library does.

    The memory has a dtype that NumPy knows, or uint16 to export bfloat16.
    """

    def __init__(self, memory, shape, strides, code=BFLOAT, bits=16, lanes=1, offset=0, flags=None, version=(1, 0)):
        self.memory, self.shape, self.strides, self.offset = memory, shape, strides, offset
        self.dtype, self.flags, self.version = (code, bits, lanes), flags, version

    def __dlpack_device__(self):
        return CPU, 0

    def __dlpack__(self, *, max_version):
        address = self._managed()
        name = b"dltensor" if self.flags is None else b"dltensor_versioned"
        return _capsule_new(address, name, ctypes.cast(_delete_capsule, ctypes.c_void_p))

    def _managed(self):
        ndim = len(self.shape)
        shape = (ctypes.c_int64 * ndim)(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * ndim)(*self.strides)
        data = self.memory.ctypes.data if self.memory is not None else None
        tensor = imports._DLTensor(data, (CPU, 0), ndim, self.dtype, shape, strides, self.offset)
        managed = imports._DLManagedTensor(tensor, None, None)
        if self.flags is not None:
            managed = imports._DLManagedTensorVersioned(*self.version, None, None, self.flags, tensor)
        _exports[ctypes.addressof(managed)] = (managed, shape, strides, self.memory)
        return ctypes.addressof(managed)


class LegacyExporter(Exporter):
    def __dlpack__(self):
        return super().__dlpack__(max_version=None)


class OnDevice:
    def __init__(self, kind, index=0):
        self.device = (kind, index)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        raise AssertionError("memory of another device must not be exported")


class CudaArrayInterface:
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


@pytest.fixture
def memory():
    return np.arange(0x3F00, 0x3F00 + 24, dtype=np.uint16)


# ---- NumPy ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.uint8, ml_dtypes.float8_e4m3fn])
def test_numpy_arrays_are_returned_as_they_are(dtype):
    x = np.zeros((4, 6), dtype)[::2, ::-1]
    x.flags.writeable = False
    assert as_array(x) is x


@pytest.mark.parametrize("scalar", [np.float32(1.5), ml_dtypes.bfloat16(1.5)])
def test_numpy_scalars_become_0d_arrays(scalar):
    array = as_array(scalar)
    assert (array.shape, array.dtype, array[()]) == ((), scalar.dtype, scalar)


# ---- the capsule ----


@pytest.mark.parametrize("flags", [None, 0], ids=["legacy", "versioned"])
@pytest.mark.parametrize(
    ("shape", "strides", "offset", "expected"),
    [
        ((4, 6), (6, 1), 0, lambda m: m.reshape(4, 6)),
        ((4, 6), None, 0, lambda m: m.reshape(4, 6)),
        ((2, 3), (12, 2), 0, lambda m: m.reshape(2, 12)[:, :6:2]),
        ((6, 4), (1, 6), 0, lambda m: m.reshape(4, 6).T),
        ((3, 2), (0, 1), 0, lambda m: np.broadcast_to(m[:2], (3, 2))),
        ((5,), (-1,), 20, lambda m: m[10:5:-1]),
        ((2, 3), None, 10, lambda m: m[5:11].reshape(2, 3)),
        ((2, 3), (6, 2), 14, lambda m: m[7:19].reshape(2, 6)[:, ::2]),
        ((), (), 6, lambda m: m[3]),
        ((), None, 0, lambda m: m[0]),
    ],
)
def test_bfloat16_views(memory, flags, shape, strides, offset, expected):
    array = as_array(Exporter(memory, shape, strides, offset=offset, flags=flags))
    assert (array.dtype, array.shape) == (BF16, shape)
    np.testing.assert_array_equal(array.view(np.uint16), expected(memory))
    assert array.ctypes.data == memory.ctypes.data + offset
    assert np.shares_memory(array.view(np.uint16), memory)


@pytest.mark.parametrize("data", [True, False], ids=["pointer", "null"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_zero_size(memory, data, shape):
    array = as_array(Exporter(memory if data else None, shape, None))
    assert (array.dtype, array.shape, _exports) == (BF16, shape, {})


@together("code, bits, lanes, dtype", [(*key, dtype) for key, dtype in imports.DTYPES.items()])
def test_every_dtype(code, bits, lanes, dtype):
    memory = np.arange(48, dtype=np.uint8) % 2
    array = as_array(Exporter(memory, (48 // dtype.itemsize,), None, code, bits, lanes))
    assert array.dtype == dtype
    assert array.tobytes() == memory.tobytes()
    assert array.flags.aligned


def test_read_only(memory):
    def writeable(exporter):
        return as_array(exporter).flags.writeable

    assert not writeable(Exporter(memory, (24,), None, flags=1))
    assert not writeable(Exporter(memory, (24,), None))  # DLPack before 1.0 cannot mark memory as read-only
    assert writeable(Exporter(memory, (24,), None, flags=0))
    assert writeable(Exporter(memory, (24,), None, flags=2))  # IS_COPIED


def test_writing_reaches_the_exporter(memory):
    as_array(Exporter(memory, (24,), None, flags=0))[3] = -2.0
    assert memory[3] == 0xC000


def test_an_exporter_without_max_version(memory):
    np.testing.assert_array_equal(as_array(LegacyExporter(memory, (24,), None)).view(np.uint16), memory)


def test_a_versioned_capsule_of_a_later_minor_version(memory):
    assert as_array(Exporter(memory, (24,), None, flags=0, version=(1, 7))).shape == (24,)


# ---- lifetime ----


@pytest.mark.parametrize("flags", [None, 0], ids=["legacy", "versioned"])
def test_memory_lives_exactly_as_long_as_the_last_view(flags):
    memory = np.arange(4096, dtype=np.uint16)
    freed = weakref.ref(memory)
    array = as_array(Exporter(memory, (64, 64), None, flags=flags))
    view = array[3:5, ::2].T.view(np.uint16)
    del memory, array
    gc.collect()
    assert freed() is not None
    np.testing.assert_array_equal(view, np.arange(4096).reshape(64, 64)[3:5, ::2].T)
    gc.disable()  # the memory must be freed without the cycle collector
    try:
        del view
        assert freed() is None and _exports == {}
    finally:
        gc.enable()


def test_a_refused_import_frees_the_capsule(memory):
    with pytest.raises(TypeError):
        as_array(Exporter(memory, (12,), None, code=FLOAT, bits=4))
    assert _exports == {}


# ---- errors ----


@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, object()], ids=lambda x: type(x).__name__)
def test_other_objects_are_rejected(x):
    text = rf"^quantize: x is a builtins\.{type(x).__name__}; .*; pass np\.asarray\(x, np\.float32\)$"
    with pytest.raises(TypeError, match=text):
        as_array(x, "quantize: x")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (OnDevice(CUDA), r"x is on cuda:0; .* move it with cupy\.asnumpy\(x\) or x\.cpu\(\)$"),
        (OnDevice(CUDA_MANAGED, 3), r"x is on cuda:3; .* cupy\.asnumpy\(x\)"),
        (CudaArrayInterface(), r"x is on cuda; .* cupy\.asnumpy\(x\)"),
        (OnDevice(METAL), r"x is on metal:0; .* x\.cpu\(\)"),
        (OnDevice(ROCM, 1), r"x is on rocm:1; .* x\.cpu\(\)"),
        (OnDevice(99), r"x is on DLPack device type 99:0; .* x\.cpu\(\)"),
    ],
)
def test_other_devices(x, text):
    with pytest.raises(NotImplementedError, match="^quantize: " + text):
        as_array(x, "quantize: x")


def test_page_locked_memory_is_host_memory():
    assert device_name(OnDevice(CUDA_HOST)) == "cpu"


@pytest.mark.parametrize("dtype", [(FLOAT, 4, 1), (BFLOAT, 16, 2), (BOOL, 1, 1), (11, 8, 1)])
def test_dtypes_that_numpy_cannot_hold(memory, dtype):
    with pytest.raises(TypeError, match=r"^x has the DLPack dtype \(code, bits, lanes\) = \(.*; convert it first$"):
        as_array(Exporter(memory, (4,), None, *dtype))


def test_an_unknown_major_version(memory):
    with pytest.raises(BufferError, match=r"^x exports DLPack 2\.1; needs 1\.x or earlier"):
        as_array(Exporter(memory, (24,), None, flags=0, version=(2, 1)))


def test_a_consumed_capsule():
    x = OnDevice(CPU)
    x.__dlpack__ = lambda **kwargs: object()
    with pytest.raises(BufferError, match="needs an unconsumed DLPack capsule"):
        as_array(x)


# ---- several arrays ----


def test_as_arrays_keeps_the_order_and_none(memory):
    a = np.zeros(3)
    tensor_amax, x, out = as_arrays("quantize", tensor_amax=np.float32(2), x=Exporter(memory, (24,), None), out=None)
    assert (tensor_amax.shape, x.dtype, out) == ((), BF16, None)
    assert as_arrays(x=a)[0] is a


def test_arrays_that_do_not_go_together():
    text = r"^quantize: x is on cpu, tensor_amax on cuda:0; all arrays of one call must be on one device"
    with pytest.raises(ValueError, match=text):
        as_arrays("quantize", x=np.zeros(3), tensor_amax=OnDevice(CUDA))
    with pytest.raises(ValueError, match=r"^a is on cuda:0, b on cuda:1;"):
        as_arrays(a=OnDevice(CUDA), b=OnDevice(CUDA, 1))
    with pytest.raises(TypeError, match=r"^quantize: tensor_amax is a builtins\.float; "):
        as_arrays("quantize", x=np.zeros(3), tensor_amax=1.0)


def test_neither_torch_nor_cupy_is_imported():
    code = "import fp4kit.arrays.imports, sys; sys.exit(bool({'torch', 'cupy', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the real libraries ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_torch_shares_memory(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(getattr(torch, dtype))
    for view in (tensor, tensor.T, tensor[1:, ::2], tensor[2, 3], tensor[:, :0], tensor.expand(2, 4, 6)):
        array = as_array(view)
        assert (array.dtype.name, array.shape) == (dtype, tuple(view.shape))
        assert array.size == 0 or array.ctypes.data == view.data_ptr()
        np.testing.assert_array_equal(array.astype(np.float32), view.to(torch.float32).numpy())


def test_torch_packed_e2m1_arrives_as_bytes():
    torch = pytest.importorskip("torch")
    packed = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    try:
        array = as_array(packed.view(torch.float4_e2m1fn_x2))
    except (AttributeError, BufferError):
        pytest.skip("this torch does not export float4_e2m1fn_x2")
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, packed.numpy())


def test_torch_memory_outlives_the_tensor():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4096, dtype=torch.bfloat16)
    array = as_array(tensor)
    tensor[5] = -1.0
    del tensor
    gc.collect()
    torch.full((4096,), 7, dtype=torch.bfloat16)  # would reuse the memory if it had been freed
    assert (array[5], array[17]) == (-1, 17)
    assert array.flags.writeable


def test_torch_with_gradient():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"^quantize: x requires grad.*pass x\.detach\(\)$"):
        as_array(torch.ones(3, requires_grad=True), "quantize: x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_jax_shares_memory(dtype):
    jax = pytest.importorskip("jax")
    # Use the CPU even if JAX has a GPU.
    x = jax.device_put(jax.numpy.arange(24, dtype=dtype).reshape(4, 6), jax.devices("cpu")[0])
    array = as_array(x)
    assert (array.dtype.name, array.shape, array.flags.writeable) == (dtype, (4, 6), False)
    assert array.ctypes.data == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(array, np.asarray(x))


def test_an_exporter_without_memory():
    with pytest.raises(BufferError, match=r"^quantize: x exports no memory, only a shape"):
        as_array(Exporter(None, (4,), None), "quantize: x")


W = np.linspace(-2, 2, 16 * 32, dtype=np.float32).reshape(16, 32)
MASKED = np.ma.array(W, mask=W > 1)
CALLS = {
    "quantize": lambda x: fp4kit.quantize(x, "nvfp4-te"),
    "quantize_both": lambda x: fp4kit.quantize_both(x, "nvfp4-te"),
    "fake_quantize": lambda x: fp4kit.fake_quantize(x, "int8-modelopt"),
    "amax": lambda x: fp4kit.amax(x),
    "amax by block": lambda x: fp4kit.amax(x, "nvfp4-te"),
    "compare": lambda x: fp4kit.compare(x, W),
    "compare b": lambda x: fp4kit.compare(W, x),
    "identify": lambda x: fp4kit.identify(fp4kit.quantize(W, "nvfp4-te"), x),
    "grad": lambda x: fp4kit.fake_quantize_backward(x, W, "nvfp4-te"),
    "clip": lambda x: fp4kit.fake_quantize_backward(W, x, "nvfp4-te", pass_through=False),
    "tensor_amax": lambda x: fp4kit.quantize(W, "nvfp4-te", tensor_amax=np.abs(x[:1, :1])),
    "grouped": lambda x: fp4kit.quantize_grouped([W, x], "nvfp4-te"),
    "plan": lambda x: fp4kit.GroupedPlan([x], "nvfp4-te").fake_quantize(),
    "partial": lambda x: fp4kit.partial_amax(x[:1].reshape(-1)[:32], (1, 32), 0, "nvfp4-te"),
    "swizzle": lambda x: fp4kit.swizzle(x.astype(np.uint8), "swizzled_128x4"),
    "pack": lambda x: fp4kit.pack(np.abs(x).astype(np.uint8)),
}


@together("call", CALLS.values())
def test_masked_arrays_are_refused(call):
    text = (
        r"is a masked array, whose mask would be ignored; .* a plain array; pass \S+\.filled\(0\), or \S+\.data"
        r" to use"
    )
    with pytest.raises(TypeError, match=text):
        call(MASKED)


def same(a, b):
    """Return True if two results are bit-identical and `a` consists of plain NumPy arrays, not of a subclass.

    Results may be arrays, Quantized, or lists and tuples of these. Anything else is compared as text.
    """
    if isinstance(a, (list, tuple)):
        return all(same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, fp4kit.Quantized):
        return same([a.packed, a.block_scale, a.tensor_scale], [b.packed, b.block_scale, b.tensor_scale])
    if isinstance(a, np.ndarray):
        return type(a) is np.ndarray and a.shape == b.shape and a.tobytes() == b.tobytes()
    return str(a) == str(b)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
# "partial" is left out, because it takes a 1-d slice of its matrix, and no slice of a np.matrix is 1-d.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "partial"])
def test_a_matrix_is_its_array(name):
    x = np.matrix(W, copy=False)
    assert same(CALLS[name](x), CALLS[name](W))
    assert type(as_array(x)) is np.ndarray and np.shares_memory(as_array(x), W)


@pytest.mark.parametrize("dtype", [object, [("a", "f4")], "S4", "U4"], ids=str)
def test_arrays_of_no_numbers_are_refused(dtype):
    x = W.astype(dtype)
    for call in (CALLS["quantize"], CALLS["amax"], CALLS["compare"], CALLS["grad"], CALLS["clip"], CALLS["grouped"]):
        with pytest.raises(TypeError, match=re.escape(str(x.dtype))):
            call(x)


TENSORS = {
    "negative": (lambda torch: torch._neg_view(torch.ones(4, 32)), ValueError, "negative bit set, .*; pass"),
    "imaginary": (lambda torch: torch.full((4, 32), 1 + 1j).conj().imag, ValueError, "negative bit set, .*; pass"),
    "conjugate": (lambda torch: torch.full((4, 32), 1j).conj(), ValueError, "conjugate bit set, .*; pass"),
    "sparse": (lambda torch: torch.ones(4, 32).to_sparse(), TypeError, "layout torch.sparse_coo; .*; pass"),
    "quantized": (
        lambda torch: torch.quantize_per_tensor(torch.ones(4, 32), 0.1, 0, torch.quint8),
        TypeError,
        "is a tensor of torch.quint8; .*; pass x.dequantize()",
    ),
    "meta": (lambda torch: torch.ones(4, 32, device="meta"), ValueError, "is on the meta device, which has no memory"),
    "nested": (
        lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        TypeError,
        "is a nested tensor; .* x.unbind()",
    ),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about sparse, quantized and nested tensors
@pytest.mark.parametrize("make, error, text", TENSORS.values(), ids=TENSORS)
def test_tensors_whose_memory_is_not_their_values(make, error, text):
    torch = pytest.importorskip("torch")
    x = make(torch)
    pattern = re.escape(text).replace(r"\.\*", ".*")
    with pytest.raises(error, match=f"^quantize: x .*{pattern}|^quantize: x {pattern}"):
        fp4kit.quantize(x, "nvfp4-te")
    with pytest.raises(error, match=pattern):
        as_array(x)


def test_resolved_tensors_are_right():
    torch = pytest.importorskip("torch")
    x = torch._neg_view(torch.from_numpy(W))
    assert np.array_equal(fp4kit.quantize(x.resolve_neg(), "nvfp4-te").packed, fp4kit.quantize(-W, "nvfp4-te").packed)
