"""Test array classes whose memory differs from their values, such as masked arrays and sparse tensors.

fp4kit must use the values or reject the array, because the memory would give wrong results without an error.
"""

import re

import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.arrays.imports import as_array

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


def test_a_memory_map_is_its_array(tmp_path):
    np.save(tmp_path / "w.npy", W)
    x = np.load(tmp_path / "w.npy", mmap_mode="r")
    assert type(as_array(x)) is np.ndarray and np.shares_memory(as_array(x), x)
    assert same(fp4kit.quantize(x, "nvfp4-te"), fp4kit.quantize(W, "nvfp4-te"))


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
