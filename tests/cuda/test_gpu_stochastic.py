"""Test stochastic rounding by noise (ComfyUI, MSLK) on a GPU, or on the simulated one: CuPy arrays get the bits of
NumPy arrays.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inputs import BF16
from on_gpu import ON_GPU, agree, assert_same, blocks, check, cupy, differing

import fp4kit
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.testing import ComparedEngine, adversarial_blocks
from fp4kit.formats import E2M1
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import round_to
from fp4kit.reference.stochastic import _comfyui_exponent

pytestmark = ON_GPU
COMFYUI, ON_CUDA, MSLK = RECIPES_ADDING_NOISE = (
    "nvfp4-comfy-kitchen-stochastic",
    "nvfp4-comfy-kitchen-stochastic-cuda",
    "mxfp4-mslk-stochastic",
)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
DTYPES = [F32, F16, BF16]
OTHER_FIELDS = ({"tensor_scaling": "row"}, {"amax_nan": "ignore"})
HEADER = Path(fp4kit.__file__).parent / "cuda" / "kernels" / "shared" / "noise.cuh"


def numbers(shape: tuple[int, ...], dtype: np.dtype = F32, seed: int = 0) -> np.ndarray:
    """Return random numbers of a dtype from 0 to 1, with some zeros and some of the largest below 1."""
    rng = np.random.default_rng(seed)
    r = rng.random(shape, np.float32)
    r[rng.random(shape) < 0.1] = 0
    r[rng.random(shape) < 0.1] = 1
    below = np.nextafter(dtype.type(1), dtype.type(0))
    return np.where(r.astype(dtype) == 1, below, r.astype(dtype)).astype(dtype)


def seed_for(name: str, shape: tuple[int, ...], seed: int = 7) -> Any:
    """Return a seed that a recipe accepts, as an argument of `check`: numbers as a CuPy array, or an int."""
    return cupy.asarray(numbers(shape, seed=seed)) if name == ON_CUDA else seed


def check_noise(x: np.ndarray, name: Any, **options: Any) -> fp4kit.Quantized:
    """Return the result of on_gpu.check for stochastic rounding. The default of `seed` is seed_for(name)."""
    name_of = name if isinstance(name, str) else ON_CUDA if "cuda" in name.stochastic else COMFYUI
    return check(x, name, **{"rounding": "stochastic", "seed": seed_for(name_of, x.shape)} | options)


# ---- the exponents of ComfyUI's rounding ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thresholds_of_the_kernel(dtype):
    """The kernel compares with thresholds instead of computing logarithms. Below 1/2 and from 8 on, neither matters."""
    found = [
        [float.fromhex(number) for number in match]
        for match in re.findall(r"return reached\(a, ([^ ]*?)f, ([^ ]*?)f, ([^ ]*?)f\)", HEADER.read_text())
    ]
    bf16_first, bf16_gpu, bf16_cpu, f16_first, f16_second, f32_first, f32_second = found
    first, cpu, gpu = {
        "bfloat16": (bf16_first, bf16_cpu, bf16_gpu),
        "float16": (f16_first, f16_second, f16_second),
        "float32": (f32_first, f32_second, f32_second),
    }[str(dtype)]
    offset = np.asarray(1.1925, np.float32)
    for thresholds, c in ((first, np.float32(1)), (cpu, round_to(offset, dtype)), (gpu, offset)):
        windows = [np.float32(t).view(np.uint32) + np.arange(-(1 << 16), 1 << 16) for t in thresholds]
        bits = np.concatenate([*windows, np.arange(0x3F000000, 0x41000000, 101), [0, 1, 0x7F7FFFFF, 0x7F800000]])
        a = bits.astype(np.uint32).view(np.float32)
        expected = np.sum([a >= np.float32(t) for t in thresholds], axis=0)
        assert (_comfyui_exponent(a, c, dtype) == expected).all()


# ---- codes and scales ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_edge_values(name, dtype):
    """NaN, infinities, zeros of both signs, subnormals and ties."""
    x = adversarial_blocks(dtype)
    check_noise(x, name)
    finite = np.where(np.isfinite(x), x, dtype.type(0)).astype(dtype)
    check_noise(finite, name)
    check_noise(np.zeros((2, 32), dtype), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [COMFYUI, ON_CUDA])
def test_given_numbers(name, dtype):
    """A small tensor amax gives scaled elements above 6, whose bits reach the sign and the element before."""
    x = blocks(dtype, 40, 64)
    for amax in (2688.0, 6.0, 1e-3, 1e-9, 1e-30):
        for numbers_dtype in {dtype, F32}:
            check_noise(x, name, tensor_amax=amax, seed=cupy.asarray(numbers(x.shape, numbers_dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scaled_element(dtype):
    """With tensor scale 1 and block scale 1, the elements of float16 and bfloat16 are rounded themselves."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype.itemsize == 4 else dtype).astype(dtype)
    x = np.concatenate(
        [np.resize(dtype.type(6), (len(values) // 15 + 1, 1)), np.resize(values, (len(values) // 15 + 1, 15))], 1
    )
    for name in (COMFYUI, ON_CUDA):
        check_noise(x, name, tensor_amax=2688.0, seed=cupy.asarray(numbers(x.shape)))


@pytest.mark.parametrize("seed", [0, 1234, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("name", [COMFYUI, MSLK])
def test_seeds(name, seed):
    check_noise(blocks(BF16, 6, 96), name, seed=seed)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_shapes(name, layout):
    for shape in ((1, 32), (3, 96), (130, 160), (2, 3, 64), (0, 32)):
        check_noise(np.resize(blocks(BF16), shape), name, scale_layout=layout)
    check_noise(blocks(BF16, 64, 48), name, axis=0, scale_layout=layout)
    check_noise(np.resize(blocks(BF16), (2, 32, 5)), name, axis=1, scale_layout=layout)


@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_large_tensors_take_separate_launches_for_the_amax(name):
    check_noise(np.resize(blocks(F16), (1025, 512)), name)


@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_views_and_options(name):
    x = blocks(F32, 8, 128)
    options = {"rounding": "stochastic", "seed": seed_for(name, (8, 96))}
    host = options | {"seed": options["seed"].get() if name == ON_CUDA else 7}
    view = cupy.asarray(x.reshape(-1))[1:769].reshape(8, 96)  # no row begins at a multiple of 16 bytes
    assert_same(fp4kit.quantize(view, name, **options), fp4kit.quantize(view.get(), name, **host))
    check_noise(x[:, 32:], name, **options)
    check_noise(x[:, 32:], name, **options, hadamard=True)
    out = fp4kit.quantize(cupy.asarray(x[:, 32:]), name, **options)
    for part in (out.packed, out.block_scale):
        part.fill(0)
    fp4kit.quantize(cupy.asarray(x[:, :96]), name, **options, out=out)
    assert_same(out, fp4kit.quantize(x[:, :96], name, **host))


@pytest.mark.parametrize(
    "fields",
    [*({"block": (1, 32)}, {"block_rule": "te", "apply": "multiply"}, {"round_scaled": False}), *OTHER_FIELDS],
    ids=str,
)
def test_variants(fields):
    x = blocks(F16, 24, 64)
    check_noise(x, replace(RECIPES[COMFYUI], **fields))


def test_float32_scales_of_blocks():
    """The recipe has no block scales, but one tensor scale per block."""
    r = replace(RECIPES["fp8-deepseek-v4"], element=E2M1, stochastic="comfyui_nvfp4")
    check_noise(blocks(BF16, 3, 256), r)


def test_calibrated_block_amaxes():
    x = blocks(BF16, 8, 64)
    amaxes = np.random.default_rng(2).random((8, 2), np.float32)
    check_noise(x, MSLK, block_amax=cupy.asarray(amaxes))


# ---- other operations ----


@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_other_operations(name):
    x = blocks(F16, 32, 64)
    options = {"rounding": "stochastic", "seed": seed_for(name, x.shape)}
    host = options | {"seed": options["seed"].get() if name == ON_CUDA else 7}
    device, q = cupy.asarray(x), fp4kit.quantize(x, name, **host)
    assert differing(fp4kit.fake_quantize(device, name, **options), fp4kit.dequantize(q)) == 0
    if name != ON_CUDA:
        with pytest.raises(NotImplementedError, match=f"stochastic rounding of {name} in a group has no CUDA kernel;"):
            fp4kit.quantize_grouped([device, device[:16]], name, **options)
        agree(fp4kit.quantize_both, x, name, **host)


@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_recorded_outputs(name, golden):
    """The GPU gives the codes and scales that the producers gave."""
    result = check_recipe(name, golden, ComparedEngine(cupy))
    assert getattr(cupy, "rehearsing", False) or (result.compared >= 18 and not result.differences)


@pytest.mark.parametrize("name", RECIPES_ADDING_NOISE)
def test_given_scales_are_refused(name):
    x = blocks(BF16, 2, 64)
    how = {"rounding": "stochastic", "seed": seed_for(name, x.shape)}
    q = fp4kit.quantize(cupy.asarray(x), name, **how)
    scales = {"block_scale": q.block_scale} | ({} if q.tensor_scale is None else {"tensor_scale": q.tensor_scale})
    with pytest.raises(NotImplementedError, match=f"^quantize: stochastic rounding of {name} under given scales has"):
        fp4kit.quantize(cupy.asarray(x), name, **scales, **how)


def test_numbers_in_other_memory_and_calls_without_a_seed_are_refused():
    x = blocks(BF16, 2, 64)
    for name in (*RECIPES_ADDING_NOISE, *NAMES):
        with pytest.raises(ValueError, match=f"^fake_quantize: rounding is 'nearest', but {name} only rounds stochast"):
            fp4kit.fake_quantize(cupy.asarray(x), name)
    with pytest.raises(ValueError, match="seed"):
        fp4kit.quantize(cupy.asarray(x), ON_CUDA, rounding="stochastic", seed=numbers(x.shape))


NAMES = ("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden")
recipes = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
RANDOM: dict[str, Any] = {"rounding": "stochastic", "seed": 7}


def same(x: np.ndarray, name: Any, **options: Any) -> None:
    agree(fp4kit.fake_quantize, x, name, **options)


@dtypes
@recipes
def test_edge_values_ms_eden(name, dtype):
    """NaN, infinities, zeros of both signs, subnormals and ties."""
    x = adversarial_blocks(dtype)
    x = np.resize(x, (len(x), 64))
    finite = np.where(np.isfinite(x), x, dtype.type(0)).astype(dtype)
    for values in (x, finite, np.zeros((2, 32), dtype), finite * dtype.type(0)):
        same(values, name, **RANDOM)
    for amax in (1e-30, 1e-3, 6.0, 1e5, 0.0):
        same(x, name, tensor_amax=amax, **RANDOM)


@recipes
def test_shapes_and_seeds(name):
    for shape in ((1, 32), (3, 96), (130, 160), (2, 3, 64), (0, 32)):
        same(np.resize(blocks(BF16), shape), name, **RANDOM)
    same(blocks(BF16, 64, 48), name, axis=0, **RANDOM)
    same(np.resize(blocks(BF16), (2, 32, 5)), name, axis=1, **RANDOM)
    for seed in (0, 1234, 2**32 + 5, 2**64 - 1):
        same(blocks(BF16, 6, 96), name, rounding="stochastic", seed=seed)
    same(np.resize(blocks(np.float16), (1025, 512)), name, **RANDOM)  # the amax has a launch of its own
    view = cupy.asarray(blocks(np.float32, 8, 128).reshape(-1))[1:769].reshape(8, 96)  # misaligned rows
    found = fp4kit.fake_quantize(view, name, **RANDOM)
    assert differing(found, fp4kit.fake_quantize(view.get(), name, **RANDOM)) == 0


@pytest.mark.parametrize("fields", [{"block": (1, 32)}, {"block": (1, 8)}, *OTHER_FIELDS], ids=str)
def test_variants_ms_eden(fields):
    x = blocks(np.float16, 24, 64)
    for name in NAMES:
        same(x, replace(RECIPES[name], **fields), **RANDOM)


@recipes
def test_given_block_amaxes(name):
    x = blocks(BF16, 8, 64)
    amaxes = np.random.default_rng(2).random((8, 4), np.float32)
    same(x, replace(RECIPES[name], static=True), block_amax=amaxes, **RANDOM)


@recipes
def test_groups(name):
    xs = [blocks(BF16, 4, 64), blocks(BF16, 0, 32), blocks(BF16, 130, 96)]
    agree(fp4kit.fake_quantize_grouped, xs, name, **RANDOM)


@recipes
def test_what_has_no_kernel(name):
    x = cupy.asarray(blocks(BF16, 4, 64))
    with pytest.raises(NotImplementedError, match=f"blocks of 1x4 by {name} have no CUDA kernel; needs a"):
        fp4kit.fake_quantize(x, replace(RECIPES[name], block=(1, 4)), **RANDOM)


@recipes
def test_recorded_outputs_ms_eden(name, golden):
    """The GPU gives the values that the producer gave."""
    result = check_recipe(name, golden, ComparedEngine(cupy))
    assert getattr(cupy, "rehearsing", False) or (result.compared >= 18 and not result.differences)
