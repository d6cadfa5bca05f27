"""Test fake_quantize for recipes with a rule of their own, its gradient, and requantize, on CuPy arrays.

Results have the bytes of the CPU specification.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import INPUTS, as_strided, ordinary, seeded
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, cupy, differing, gpu_only, there

import fp4kit
from fp4kit.cuda.matrix import MAX_KERNEL_AMAX_ELEMENTS
from fp4kit.ops.identify import best_match
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU

DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
WITH_RULE = [r.id for r in RECIPES.values() if r.fake_rule]
MICROXCALING = [name for name in WITH_RULE if "microxcaling" in name]
recipes = pytest.mark.parametrize("name", all_or_few(WITH_RULE))


def same(x: np.ndarray, name, **options) -> None:
    agree(fp4kit.fake_quantize, x, name, **seeded(name, x), **options)


# ---- fake_quantize ----


@pytest.mark.parametrize("name", ["mxfp8-microxcaling-even", "mxfp4-microxcaling-floor"])
def test_given_amaxes_between_the_values_of_the_dtype(name) -> None:
    """log2 of a given amax is rounded to the dtype of x. Its floor is that of the CPU just below each power of two."""
    powers = np.float64(2) ** np.arange(-126, 128)
    below = np.concatenate([powers * 2.0**-log for log in (*2.0 ** -np.arange(1, 12), *(3 * 2.0 ** -np.arange(3, 12)))])
    amax = np.concatenate([np.nextafter(below.astype(np.float32), np.float32(side)) for side in (0, 9e37)])
    amax = np.concatenate([amax, below.astype(np.float32), np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)])
    r = replace(RECIPES[name], static=True)
    for dtype in DTYPES[1:]:
        x = np.tile(np.float32([1, -0.75]), (len(amax), 16)).astype(dtype)
        with np.errstate(all="ignore"):
            same(x, r, block_amax=amax[:, None])


@recipes
def test_inputs_of_every_dtype(name) -> None:
    for dtype in DTYPES:
        for x in (*INPUTS.values(), blocks(dtype, 128)):
            with np.errstate(over="ignore"):
                x = x.astype(dtype)
            same(x, name)
            same(x, name, axis=0)


@recipes
def test_every_golden_input(name, golden) -> None:
    for key in golden.inputs():
        x = golden.input(key)
        if x.shape[1] % RECIPES[name].block_size == 0:
            same(x, name)


@pytest.mark.parametrize("name", all_or_few(name for name in WITH_RULE if RECIPES[name].tensor_scaling != "none"))
def test_given_amaxes(name) -> None:
    r = RECIPES[name]
    for amax in (3.7, 0.0, 1e-9, 1e-45, 2.0**-24, 3e38, np.inf):
        for dtype in DTYPES:
            x = blocks(dtype, 64, 256)
            shape = {"tensor": (), "row": (64,), "block": (64, 256 // r.block_size)}[r.tensor_scaling]
            same(x, name, tensor_amax=np.full(shape, amax, np.float32))


def test_tiny_given_amaxes_of_integers_with_nan_elements() -> None:
    """A float16 NaN loses its sign when a GPU widens it, so no result may depend on the sign."""
    amax = np.full((1, 4), 1e-9, np.float32)
    for dtype in DTYPES:
        x = np.zeros((1, 128), dtype)
        x[0, :4] = np.nan, -np.nan, -np.inf, -0.0
        same(x, "int4-modelopt", tensor_amax=amax)
        same(x, "int8-modelopt", tensor_amax=np.float32(1e-9))


@pytest.mark.parametrize("name", [name for name in WITH_RULE if RECIPES[name].tensor_scaling == "tensor"])
def test_an_amax_for_each_expert(name) -> None:
    x = ordinary(5, (4, 16, 128))
    same(x, name, tensor_amax=np.float32([3, 50, 0.5, 700]))
    same(as_strided(x), name, tensor_amax=np.float32([3, 50, 0.5, 700]))


def test_calibrated_block_amaxes() -> None:
    amax = np.exp2(np.random.default_rng(1).uniform(-20, 20, (64, 16))).astype(np.float32)
    amax[::3, 1::4] = 0
    for dtype in DTYPES:
        same(blocks(dtype, 64, 256), "nvfp4-modelopt-static-fake", block_amax=amax)
        same(blocks(dtype, 64, 256), "nvfp4-modelopt-static-fake", block_amax=amax, tensor_amax=9.5)


@recipes
def test_shapes_and_strides(name) -> None:
    x = ordinary(6, (3, 96, 256))
    same(x, name)
    d, how = cupy.asarray(x), seeded(name, x)
    for view in (np.s_[0, :, ::-1], np.s_[:, ::2], np.s_[1:2, 5:6], np.s_[:0], np.s_[:, :0], np.s_[0, 0]):
        assert differing(fp4kit.fake_quantize(d[view], name, **how), fp4kit.fake_quantize(x[view], name, **how)) == 0
    flat = cupy.asarray(x.reshape(-1))
    for offset in (1, 2, 3):
        part = x.reshape(-1)[offset : offset + 64 * 128].reshape(64, 128)
        y = fp4kit.fake_quantize(flat[offset : offset + 64 * 128].reshape(64, 128), name, **how)
        assert differing(y, fp4kit.fake_quantize(part, name, **how)) == 0


@pytest.mark.parametrize("name", [name for name in WITH_RULE if RECIPES[name].block is None])
@pytest.mark.parametrize("shape", [(7, 30), (1, 2), (5, 34), (33, 16), (1, 4098)])
def test_any_length_without_blocks(name, shape) -> None:
    for dtype in DTYPES:
        same(ordinary(7, shape, dtype), name)


@pytest.mark.parametrize("size", [16, 64, 128, 512])
def test_other_block_sizes(size) -> None:
    for name in ("nvfp4-modelopt-fake", "mxfp4-modelopt-fake", "int4-modelopt", "mxfp8-microxcaling-even"):
        same(blocks(ml_dtypes.bfloat16, 16, 1024), replace(RECIPES[name], block=(1, size)))


def test_missing_kernels_are_reported() -> None:
    x = cupy.ones((32, 96), np.float32)
    with pytest.raises(NotImplementedError, match="blocks of 1x48 with fake_rule='mx_modelopt' have no CUDA kernel"):
        fp4kit.fake_quantize(x, replace(RECIPES["mxfp4-modelopt-fake"], block=(1, 48)))
    with pytest.raises(ValueError, match="rounds to nearest only"):
        fp4kit.fake_quantize(x, "mxfp4-modelopt-fake", rounding="stochastic", seed=1)


@pytest.mark.parametrize("name", all_or_few(MICROXCALING))
def test_every_value_of_sixteen_bits_beside_every_power_of_two(name) -> None:
    """Results equal the CPU's for all finite 16-bit values, in blocks whose scale a larger element determines."""
    for dtype in DTYPES[1:]:
        bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        finite = np.resize(bits[np.isfinite(bits.astype(np.float32))], (4096, 16))
        for exponent in (-126, -24, -14, -1, 0, 1, 7, 15):
            anchor = np.full((4096, 16), 2.0**exponent).astype(dtype)
            same(np.concatenate([finite, anchor], axis=1), name)
        below = np.minimum(np.abs(finite), dtype.type(1e30 if dtype != np.float16 else 6e4))
        same(np.concatenate([below, finite], axis=1), name)


@pytest.mark.parametrize("name", all_or_few(MICROXCALING))
def test_float32_near_powers_of_two(name) -> None:
    powers = np.arange(0, 255, dtype=np.uint32) << 23
    near = (powers[:, None] + np.arange(-160, 32, dtype=np.int64)).clip(1, 0x7F7FFFFF)
    near = near.astype(np.uint32).view(np.float32)
    blocks_of = np.zeros((near.size, 32), np.float32)
    blocks_of[:, 0], blocks_of[:, 1] = near.reshape(-1), -near.reshape(-1) / 3
    same(blocks_of, name)
    same(np.resize(near, (near.size // 32, 32)), name)


def test_graph_capture() -> None:
    x = cupy.asarray(blocks(ml_dtypes.bfloat16, 64, 4096))
    names = ("nvfp4-modelopt-fake", "mxfp4-microxcaling-even", "int4-qat")
    expected = [fp4kit.fake_quantize(x, name) for name in names]
    clipped = fp4kit.fake_quantize_backward(x, x, "nvfp4-te", pass_through=False)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = [fp4kit.fake_quantize(x, name) for name in names]
        grad = fp4kit.fake_quantize_backward(x, x, "nvfp4-te", pass_through=False)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for a, b in zip((*captured, grad), (*expected, clipped), strict=True):
        assert differing(a, b.get()) == 0


# ---- fake_quantize_backward ----


def same_gradient(grad: np.ndarray, x: np.ndarray, name: str, amax=None, **options) -> None:
    agree(fp4kit.fake_quantize_backward, grad, x, name, amax=amax, pass_through=False, **options)


@pytest.mark.parametrize("name", all_or_few(RECIPES))
def test_clip_at_the_computed_amax(name) -> None:
    for x in INPUTS.values():
        for axis in (0, 1):
            same_gradient(ordinary(9), x, name, axis=axis)
    same_gradient(ordinary(9, (2, 4, 32, 128)), as_strided(ordinary(8, (2, 4, 32, 128))), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_clip_at_given_amaxes(dtype, grad) -> None:
    x, g = INPUTS["nonfinite"].astype(dtype), ordinary(9, dtype=grad)
    rows = np.abs(ordinary(3, (128, 1)))
    per_block = np.abs(ordinary(4, (128, 8)))
    for amax in (2, 1.0, np.float32(1 + 2.0**-20), np.float32(0.5), np.inf, rows, rows[:, 0], per_block):
        same_gradient(g, x, "nvfp4-te", amax)
    same_gradient(g[:, :77], x[:, :77], "fp8-modelopt-channel", rows)
    same_gradient(g[::-1, 3:80], x[:, 40:117], "fp8-modelopt", 1.5)


def test_the_gradient_that_passes_through_is_returned() -> None:
    grad, x = cupy.ones((2, 32), np.float32), cupy.ones((2, 32), np.float16)
    assert fp4kit.fake_quantize_backward(grad, x, "nvfp4-te") is grad
    assert fp4kit.fake_quantize_backward(grad[:, :0], x[:, :0], "nvfp4-te", pass_through=False).shape == (2, 0)


def test_errors_of_the_gradient() -> None:
    x = cupy.ones((2, 32), np.float32)
    with pytest.raises(TypeError, match="amax is float64; needs float32, because x is on a GPU"):
        fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=cupy.ones(2), pass_through=False)
    with pytest.raises(ValueError, match=r"amax has shape \(3,\)"):
        fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=cupy.ones(3, np.float32), pass_through=False)
    with pytest.raises(ValueError, match="must be on one device"):
        fp4kit.fake_quantize_backward(np.ones((2, 32), np.float32), x, "nvfp4-te", pass_through=False)


@gpu_only
def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    y = fp4kit.fake_quantize(x, "nvfp4-modelopt-fake")
    expected = fp4kit.fake_quantize(x.cpu(), "nvfp4-modelopt-fake")
    assert torch.equal(y.cpu().view(torch.int16), expected.view(torch.int16))
    amax = torch.tensor(0.5, device="cuda")
    grad = fp4kit.fake_quantize_backward(x, x, "nvfp4-modelopt-fake", amax=amax, pass_through=False)
    assert torch.equal(grad, torch.where(x.abs() <= 0.5, x, 0))


# ---- requantize, compare, identify ----


def same_requantized(q: fp4kit.Quantized, target: str, exact: bool | None = None) -> None:
    cpu, gpu = fp4kit.requantize(q, target), fp4kit.requantize(there(q), target)
    assert_same(gpu.quantized, cpu.quantized)
    assert all(isinstance(found, cupy.ndarray) for found in gpu[1:])
    assert (bool(gpu.exact), int(gpu.changed)) == (cpu.exact, cpu.changed)
    assert differing(gpu.largest_error, np.asarray(cpu.largest_error)) == 0
    assert exact is None or cpu.exact == exact


@pytest.mark.parametrize("target", ["nvfp4-te", "nvfp4-modelopt", "nvfp4-torchao", "nvfp4-te-4over6-mae-256"])
@pytest.mark.parametrize("source", ["mxfp4-ocp", "mxfp4-flashinfer"])
def test_mxfp4_to_nvfp4(source, target) -> None:
    x = ordinary(3, (64, 256))
    # Small negative numbers have the code of -0. nvfp4-modelopt decodes it to +0, so requantizing to it changes values,
    # unless the source is mxfp4-flashinfer, which decodes it to +0 too.
    exact = target != "nvfp4-modelopt" or source == "mxfp4-flashinfer"
    same_requantized(fp4kit.quantize(x, source), target, exact=exact)
    swizzled = fp4kit.quantize(x.astype(np.float16), source, axis=0, scale_layout="swizzled_128x4")
    same_requantized(swizzled, target, exact=exact)
    same_requantized(fp4kit.quantize(np.maximum(x, 0), source), target, exact=True)
    wide = x * np.exp2(np.arange(64, dtype=np.float32))[:, None]
    same_requantized(fp4kit.quantize(wide, source), target, exact=False)
    same_requantized(fp4kit.quantize(INPUTS["nonfinite"], source), target)
    same_requantized(fp4kit.quantize(np.zeros((2, 64), np.float32), source), target, exact=True)
    same_requantized(fp4kit.quantize(ordinary(4, (2, 3, 16, 64)), source), target)


@pytest.mark.parametrize(
    "target", ["nvfp4-te", "nvfp4-modelopt", "nvfp4-compressed-tensors", "nvfp4-te-4over6-mae-256"]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_only_blocks_out_of_range_get_new_codes(target, dtype) -> None:
    rng = np.random.default_rng(7)
    for top, spread in ((127, 18), (127, 40), (20, 20), (254, 60), (255, 2), (251, 251)):
        codes, scales = rng.integers(0, 256, (16, 64), np.uint8), rng.integers(top - spread, top + 1, (16, 4), np.uint8)
        codes[rng.random((16, 64)) < 0.2] = 0x80
        codes[3], codes[5, 16:32] = 0, 0x88  # blocks of zeros
        scales[0, 0] = top
        parts = {"recipe": "mxfp4-ocp", "dtype": dtype}
        same_requantized(fp4kit.Quantized.from_parts(codes, scales, None, **parts), target)
        stack = (codes.reshape(2, 8, 64), scales.reshape(2, 8, 4))
        q = fp4kit.Quantized.from_parts(*stack, None, **parts)
        same_requantized(fp4kit.swizzle(q, "swizzled_128x4"), target)
        same_requantized(fp4kit.Quantized.from_parts(codes, scales, None, axis=0, **parts), target)


@pytest.mark.parametrize("target", ["mxfp8-te", "mxfp4-ocp", "fp8-modelopt", "nvfp4-te-2d"])
def test_other_targets(target) -> None:
    for source in ("nvfp4-te", "mxfp8-te-2d", "int8-modelopt"):
        same_requantized(fp4kit.quantize(ordinary(5, (64, 128)), source), target)
    same_requantized(fp4kit.quantize(np.zeros((0, 64), np.float32), "nvfp4-te"), target)


@pytest.mark.parametrize(
    "target",
    ["fp8-deepgemm-block", "fp8-deepseek-v4", "fp8-modelopt-channel", "fp8-modelopt", "mxfp8-te-2d", "mxfp8-deepgemm"],
)
def test_powers_of_two_as_scales_of_8_bit_floats(target) -> None:
    rng = np.random.default_rng(9)
    for lowest, top in ((113, 127), (100, 127), (60, 90), (0, 12), (243, 254), (250, 255)):
        codes, scales = rng.integers(0, 256, (160, 64), np.uint8), rng.integers(lowest, top + 1, (160, 4), np.uint8)
        codes[:128], scales[32:64] = np.where(rng.random((128, 64)) < 0.3, 0x80, codes[:128]), lowest
        q = fp4kit.Quantized.from_parts(codes, scales, None, recipe="mxfp4-ocp", dtype=np.float32)
        same_requantized(q, target, exact=True if (lowest, top) == (113, 127) else None)
        other = fp4kit.quantize(fp4kit.dequantize(q[:128]), "mxfp8-te")
        same_requantized(fp4kit.swizzle(other, "swizzled_8x4"), target)
    same_requantized(fp4kit.quantize(ordinary(6, (2, 128, 160)), "mxfp4-ocp", axis=1), target)


def test_compare_and_identify_take_what_is_on_a_gpu() -> None:
    x = ordinary(6, (64, 256), ml_dtypes.bfloat16)
    a, b = (fp4kit.quantize(x, name) for name in ("nvfp4-te", "nvfp4-torchao"))
    d = cupy.asarray(x)
    assert str(fp4kit.compare(there(a), there(b))) == str(fp4kit.compare(a, b))
    assert fp4kit.compare(there(a), a) and fp4kit.compare(d, x)
    assert fp4kit.identify(there(b), d) == fp4kit.identify(b, x)


def where_it_is(seen, *arguments):
    """Call best_match with the arguments, and append its x to the list `seen`, to see on which device it is."""
    seen.append(arguments[1])
    return best_match(*arguments)


@pytest.mark.parametrize(
    ("name", "layout", "known"),
    [
        ("nvfp4-te-4over6-mse-256", "linear", True),
        pytest.param("nvfp4-flashinfer", "swizzled_128x4", False, marks=pytest.mark.exhaustive),
        ("mxfp4-ocp", "linear", True),
    ],
)
def test_identify_proves_a_large_array_where_it_is(name, layout, known, monkeypatch) -> None:
    monkeypatch.setattr("fp4kit.ops.identify.SAMPLE", 1 << 13)
    x = ordinary(6, (64, 512), ml_dtypes.bfloat16)
    q = fp4kit.quantize(x, name, scale_layout=layout)
    q = q if known else replace(q, tensor_amax=None)
    # `other` differs in its last codes only, which identify finds only by comparing everything, not a sample.
    other = replace(q, packed=np.where(np.arange(256) == 255, q.packed ^ 1, q.packed))
    found = fp4kit.identify(q, x), fp4kit.identify(other, x)
    assert name in found[0].exact and not found[1].exact
    monkeypatch.setattr("fp4kit.ops.identify.best_match", functools.partial(where_it_is, proved := []))
    for each, expected in zip((q, other), found, strict=True):
        assert fp4kit.identify(there(each), cupy.asarray(x)) == expected
    assert len(proved) >= 4 and all(type(a).__module__ == "cupy" for a in proved)


@pytest.mark.parametrize("name", ["nvfp4-modelopt-fake", "int8-modelopt", "int4-qat"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_an_array_too_large_for_the_kernel_to_find_its_amax(name: str, axis: int) -> None:
    """fake_quantize of more than MAX_KERNEL_AMAX_ELEMENTS elements gives the CPU's bytes.

    A separate launch then computes the tensor amax, except for int4-qat, which has none.
    """
    x = ordinary(0, (1152, 512))
    assert x.size > MAX_KERNEL_AMAX_ELEMENTS
    same(x, name, axis=axis)
