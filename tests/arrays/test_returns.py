"""Test that results are arrays of the argument's library: PyTorch tensors on the host give the bits that NumPy arrays
give.

For JAX, see tests/jax/test_functions.py.
"""

import copy
import gc
import pickle
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16
from together import together
from torch_calls import CALLS, DTYPES, X, array, quantized, tensor

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import bit_patterns
from fp4kit.quantized.container import PARTS

torch = pytest.importorskip("torch")


def assert_equal(found, expected):
    """Assert that `found` has the structure and the bits of `expected`, with tensors where `expected` has arrays."""
    if isinstance(expected, fp4kit.Quantized):
        for name, part in expected.parts().items():
            assert_equal(getattr(found, name), part)
        fields = ("shape", "dtype", "axis", "recipe", "scale_layout")
        assert [getattr(found, f) for f in fields] == [getattr(expected, f) for f in fields]
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, (np.ndarray, np.floating)):
        assert_same_bits(bit_patterns(array(found)), bit_patterns(np.asarray(expected)))
    else:
        assert found == expected


@together("dtype", DTYPES)
@together("name", CALLS)
def test_results_of_tensors_are_tensors(name, dtype):
    assert_equal(CALLS[name](tensor(X[dtype])), CALLS[name](X[dtype]))


def test_dtypes_of_pytorch_are_taken():
    x = tensor(X[BF16])
    q = quantized(x)
    for dtype in DTYPES.values():
        assert fp4kit.dequantize(q, dtype).dtype == dtype
    made = fp4kit.Quantized(q.packed, q.block_scale, q.tensor_scale, None, x.shape, torch.bfloat16, -1, "nvfp4-te")
    assert made.dtype == BF16 and torch.equal(fp4kit.dequantize(made), fp4kit.dequantize(q))
    with pytest.raises(TypeError, match=r"^dequantize: dtype is torch.complex32; needs a dtype that NumPy or"):
        fp4kit.dequantize(q, torch.complex32)
    with pytest.raises(TypeError, match=r"^dequantize: dtype is float64; needs float32, float16 or bfloat16"):
        fp4kit.dequantize(q, torch.float64)


def test_out_is_returned():
    x, other = tensor(X[BF16]), tensor(X[BF16][::-1])
    q, y = quantized(x), torch.empty_like(x)
    assert quantized(other, out=q) is q
    assert_equal(q, quantized(X[BF16][::-1]))
    assert fp4kit.dequantize(q, out=y) is y and torch.equal(y, fp4kit.dequantize(q))
    packed = torch.full(q.packed.shape, 0xEE, dtype=torch.uint8)
    amax = fp4kit.partial_amax(x.reshape(-1), tuple(x.shape), 0, "mxfp4-ocp")
    assert fp4kit.partial_cast(x.reshape(-1), packed, amax, tuple(x.shape), 0, "mxfp4-ocp") is None
    assert torch.equal(packed, quantized(x, "mxfp4-ocp").packed)


def test_results_share_no_memory_with_inputs_and_own_theirs():
    x = tensor(X[BF16])
    before = x.clone()
    q = quantized(x)
    q.packed.fill_(0)
    q.tensor_amax.fill_(0)
    assert torch.equal(x, before) and float(quantized(x).tensor_amax) != 0


def test_a_plan_gives_the_same_tensors_again():
    x = tensor(X[BF16].copy())
    plan = fp4kit.GroupedPlan([x, x[:16]], "nvfp4-te")
    first, codes, vector = plan.fake_quantize(), plan.quantize(), plan.amax_vector
    before = [t.clone() for t in first]
    x.mul_(2)
    again = plan.fake_quantize()
    assert all(a is b for a, b in zip([*first, *codes], [*again, *plan.quantize()], strict=True))
    assert not torch.equal(again[0], before[0]) and torch.equal(again[0], fp4kit.fake_quantize(x, "nvfp4-te"))
    assert plan.amax_vector is vector and torch.equal(vector, torch.stack([fp4kit.amax(x), fp4kit.amax(x[:16])]))


def test_gradients_are_not_lost_silently():
    p = torch.nn.Parameter(torch.ones(32, 32))
    assert type(quantized(p).packed) is torch.Tensor and not quantized(p).tensor_scale.requires_grad
    assert fp4kit.amax(p) == 1 and len(fp4kit.GroupedPlan([p], "nvfp4-te").quantize()) == 1
    with torch.no_grad():
        for x in (p, p * 2):
            assert torch.equal(fp4kit.fake_quantize(x, "mxfp4-ocp"), x)
    text = r"requires grad, which would be lost here; call fp4kit.torch.fake_quantize, which carries it, or pass x.det"
    for x in (p, p * 2):
        with pytest.raises(ValueError, match=f"^fake_quantize: x {text}"):
            fp4kit.fake_quantize(x, "mxfp4-ocp")
    with pytest.raises(ValueError, match=r"^quantize: x requires grad, .* fp4kit.torch's functions, which carry it"):
        quantized(p * 2)
    with pytest.raises(ValueError, match=r"^fake_quantize_grouped: xs\[0\] requires grad"):
        fp4kit.fake_quantize_grouped([p, p], "mxfp4-ocp")


@pytest.mark.parametrize("name", ["quantize", "fake_quantize", "amax", "identify", "compare", "hadamard"])
def test_advice_on_dtypes_fits_tensors(name):
    x, q = torch.ones(16, 32, dtype=torch.int32), quantized(torch.ones(16, 32))
    arguments = {"identify": (q, x), "compare": (q, x), "hadamard": (x, 16)}.get(name, (x, "nvfp4-te-2d"))
    with pytest.raises(TypeError, match=r"\b[xb] is int32") as error:
        getattr(fp4kit, name)(*arguments)
    assert "np." not in str(error.value) or ".float() in PyTorch" in str(error.value)


def test_a_quantized_of_tensors():
    q = quantized(tensor(X[BF16]))
    expected = quantized(X[BF16])
    for same in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), copy.copy(q), replace(q, scale_layout="linear")):
        assert_equal(same, expected)
    assert fp4kit.compare(q, expected) and fp4kit.compare(expected, q)
    assert "nvfp4-te" in fp4kit.identify(q, X[BF16]).exact
    fields = {**q.parts(), "shape": q.shape, "dtype": q.dtype, "axis": 1, "recipe": "nvfp4-te"}
    wrong = {
        "packed is uint8 (31, 64)": {"packed": q.packed[1:]},
        "block_scale is a numpy.ndarray; needs an array of torch, as packed is": {"block_scale": expected.block_scale},
        "block_scale is a torch.Tensor; needs a NumPy array, as packed is": {"packed": expected.packed},
        "tensor_scale is float64": {"tensor_scale": q.tensor_scale.double()},
        "tensor_scale is negative": {"tensor_scale": -q.tensor_scale, "tensor_amax": None},
        "block_scale is None": {"block_scale": None},
    }
    for text, change in wrong.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            fp4kit.Quantized(**{**fields, **change})
        assert text in str(caught.value)


def test_the_first_argument_says_which_library():
    x = X[BF16]
    amax = torch.tensor(3.0)
    assert isinstance(fp4kit.quantize(x, "nvfp4-te", tensor_amax=amax).packed, np.ndarray)
    assert type(fp4kit.quantize(tensor(x), "nvfp4-te", tensor_amax=np.float32(3)).tensor_amax) is torch.Tensor
    assert type(fp4kit.quantize(x=tensor(x), recipe="nvfp4-te").packed) is torch.Tensor
    assert isinstance(fp4kit.quantize(memoryview_exporter(x), "nvfp4-te").packed, np.ndarray)


def memoryview_exporter(x):
    """Return an array of an unknown library, which offers only DLPack."""

    class Exporter:
        __dlpack__, __dlpack_device__ = tensor(x).__dlpack__, tensor(x).__dlpack_device__

    return Exporter()


def test_tensors_of_8_bit_floats_keep_their_dtype():
    codes = quantized(tensor(X[BF16]), "mxfp8-te").packed.view(torch.float8_e4m3fn)
    assert fp4kit.arrays.imports.as_array(codes).dtype == ml_dtypes.float8_e4m3fn
    from fp4kit.arrays import returns

    assert returns.tensor_of(fp4kit.arrays.imports.as_array(codes)).dtype == torch.float8_e4m3fn


def test_to_another_library():
    """Quantized.to moves a result to another library, and shares memory if both libraries can use it."""
    q = quantized(X[BF16])
    there = q.to("torch")
    assert_equal(there, q)
    assert there.packed.data_ptr() == q.packed.ctypes.data and there.to("cpu").packed is not None
    back = there.to("numpy")
    assert isinstance(back.packed, np.ndarray) and back.equals(q) and there.equals(back)
    assert back.packed.ctypes.data == q.packed.ctypes.data and q.to("numpy") is q and q.to("cpu") is q
    for target in ("tpu", "cuda:x", "cpu:0", "torch:1", 3, None):
        with pytest.raises(ValueError, match=r"^Quantized: to\(.*\); needs 'numpy', 'cupy', 'torch', 'jax', or a"):
            q.to(target)


def test_to_a_library_that_is_not_imported(monkeypatch):
    for name in ("torch", "torch._dynamo"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    with pytest.raises(RuntimeError, match=r"^Quantized: to\('torch'\) needs torch, which is not imported here"):
        quantized(X[BF16]).to("torch")


def test_scales_of_tensors_are_taken():
    """quantize accepts block and tensor scales as PyTorch tensors, as loaders hold them: raw bytes or float8."""
    q = quantized(tensor(X[BF16]))
    for scales in (q.block_scale, q.block_scale.view(torch.float8_e4m3fn)):
        found = quantized(tensor(X[BF16]), block_scale=scales, tensor_scale=q.tensor_scale)
        assert torch.equal(found.packed, q.packed)
        assert type(found.block_scale) is torch.Tensor and found.tensor_amax is None


def test_autograd_notices_writes_to_out():
    """A call that writes to out= tells autograd that the tensor has changed.

    Otherwise the gradient of a function that saved the tensor for its backward pass is wrong without an error.
    """
    x = tensor(X[BF16])
    q, packed = quantized(x), quantized(x).packed
    shard, shape, given = x.reshape(-1), tuple(x.shape), {name: getattr(q, name) for name in PARTS[1:3]}
    amax = fp4kit.partial_amax(shard, shape, 0, "mxfp4-ocp")
    writes = {
        "values": (torch.ones(x.shape), lambda out: fp4kit.dequantize(q, torch.float32, out=out)),
        "codes": (packed, lambda out: quantized(x, out=replace(q, packed=out))),
        "scales": (torch.ones(()), lambda out: quantized(x, out=replace(q, tensor_scale=out))),
        "given": (packed, lambda out: quantized(x, **given, out=replace(q, packed=out, tensor_amax=None))),
        "shard": (torch.zeros_like(packed), lambda out: fp4kit.partial_cast(shard, out, amax, shape, 0, "mxfp4-ocp")),
    }
    for name, (out, write) in writes.items():
        for _ in range(3):  # later calls use the cached call of the first
            w = torch.ones(out.shape, requires_grad=True)
            y = w * out
            write(out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        assert out._version >= 3, name
    with torch.inference_mode():
        fp4kit.dequantize(q, out=torch.empty_like(x))


def test_an_out_with_one_place_for_several_elements_is_refused():
    x = tensor(X[BF16])
    q, text = quantized(x), "has elements that share memory, shape .*, strides"
    with pytest.raises(ValueError, match=f"^dequantize: out {text}"):
        fp4kit.dequantize(q, out=torch.zeros(x.shape[-1], dtype=x.dtype).expand(x.shape))
    same_rows = np.lib.stride_tricks.as_strided(np.zeros(x.shape[-1], np.float32), x.shape, (0, 4))
    with pytest.raises(ValueError, match=f"^dequantize: out {text}"):
        fp4kit.dequantize(q.to("numpy"), np.float32, out=same_rows)
    with pytest.raises(ValueError, match=rf"^quantize: out.packed {text}"):
        quantized(x, out=replace(q, packed=q.packed[:1].expand(q.packed.shape)))
    strided = torch.empty(len(x), x.shape[1], 2, dtype=x.dtype)[..., 0]
    assert fp4kit.dequantize(q, out=strided).equal(fp4kit.dequantize(q))
    # An empty array has no two elements that share memory, whatever its strides.
    nothing = np.lib.stride_tricks.as_strided(np.zeros(0, np.float32), (0, x.shape[1]), (0, 0))
    assert fp4kit.dequantize(quantized(x[:0]).to("numpy"), np.float32, out=nothing).size == 0


@together("name", [name for name in CALLS if "plan" not in name and "cast" not in name])
def test_calls_leave_no_cycles(name):
    """Calls must free their arrays by reference counting alone.

    A reference cycle through the frames of a declined engine would keep the arrays alive until a garbage collection.
    """
    x = X[BF16]
    CALLS[name](x)
    gc.disable()
    try:
        # Collect only the youngest generation, which holds all new objects while gc is off, because a full collection
        # takes a second.
        gc.collect(0)
        CALLS[name](x)
        assert gc.collect(0) == 0
    finally:
        gc.enable()
