"""Test recipes of serving libraries on a GPU, or on the simulated one.

These are vLLM, triton_kernels, Quark, auto-round, fouroversix, SGLang, DeepGEMM, qwix, torchao 0.18, JAX, miles, NNCF,
oneDNN and the kernels of Hugging Face.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from exhaustive import by_default
from on_gpu import ON_GPU, agree, assert_equal, blocks, check, cupy
from rounding_cases import underflowing
from wrapped import over_scales, tiny_scales

import fp4kit
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU

PRODUCERS = ("vllm", "triton-kernels", "quark", "auto-round", "fouroversix", "sglang", "deepgemm", "qwix")
PRODUCERS += ("jax", "miles", "nncf", "onednn", "hf-kernels")
NAMES = [
    name
    for name, r in RECIPES.items()
    if (r.producer in PRODUCERS or name.endswith("-018"))
    and r.block_size <= 64  # the arrays below have short rows
    and not r.fake_only
]
FEW = (  # a rule from each header, each kind of rounding, and a factor that depends on the amax
    *("nvfp4-vllm-emulation-cuda", "nvfp4-fouroversix-absmax", "nvfp4-fouroversix-mae", "mxfp4-vllm"),
    *("mxfp4-triton-kernels", "mxfp4-quark-floor", "mxfp4-auto-round", "mxfp4-sglang-kv", "mxfp8-qwix"),
    *("mxfp8-quark-even", "mxfp4-torchao-even-018", "mxfp8-torchao-rceil-018", "nvfp4-jax-gpu-global", "mxfp8-nncf"),
    *("mxfp4-miles-dsv4", "nvfp4-nncf-small"),
)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def edges(dtype) -> np.ndarray:
    """Return a matrix with one row per exponent of the dtype, whose block amaxes are at or next to rounding limits.

    The amaxes are 1, 1.25, 1.5, 1.75 or nearly 2 times a power of two, up to 1 ulp away. Some rows have zeros, NaN or
    infinities.
    """
    info = ml_dtypes.finfo(dtype)
    eps, exponents = float(info.eps), np.arange(info.minexp - info.nmant, info.maxexp)
    rng = np.random.default_rng(11)
    x = rng.standard_normal((len(exponents), 64)).clip(-9, 9) / 10
    x[:, 3] = rng.choice([1, 1 + eps, 2 - eps, 1.75, 1.25], len(x))
    x[:, 40] = 1.5 + eps * rng.integers(-1, 2, len(x))
    x = (x * 2.0 ** exponents[:, None]).astype(dtype)
    x[0, :32], x[1, :16], x[2, 16:32] = 0, -0.0, 0
    x[3, 5], x[4, 6], x[5, 32:64:2] = np.inf, np.nan, -np.inf
    x.view(f"u{x.itemsize}")[[6, 7], [2, 40]] = (1 << 8 * x.itemsize - 1) - 1  # the NaN that GPUs make
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", by_default(FEW, NAMES))
def test_codes_scales_and_values(name, dtype) -> None:
    for x in (edges(dtype), blocks(dtype, 48, 192)):
        check(x, name)
        agree(fp4kit.fake_quantize, x, name)


@pytest.mark.parametrize("name", by_default(FEW[:3], NAMES))
def test_columns_and_both(name) -> None:
    x = blocks(ml_dtypes.bfloat16, 64, 192)
    check(x, name, axis=0)
    agree(fp4kit.quantize_both, x, name)


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16))
@pytest.mark.parametrize("name", [name for name in NAMES if "nvfp4-fouroversix" in name and not name.endswith("2d")])
def test_factors_beyond_float32(name, dtype) -> None:
    """If the encode scale or the factor of a block is infinite, codes saturate or are those of NaN, like on the CPU."""
    x = np.random.default_rng(3).standard_normal((16, 64)).clip(-3, 3)
    x[3, :20], x[5, 32:48] = 0, -0.0
    for small in (x * 2.0**-128, x * np.exp2(-113 - np.arange(16))[:, None]):
        check(small.astype(dtype), name)
        codes = fp4kit.unpack(fp4kit.quantize(small.astype(dtype), name).packed)
        if RECIPES[name].keep_infinity:
            assert (codes == 15).any() and (codes == 7).any() and not (codes == 11).all()
        else:
            assert (codes == 11).any()


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].search])
def test_groups_of_recipes_that_search(name) -> None:
    x = blocks(np.float32, 32, 64)
    d, q = cupy.asarray(x), fp4kit.quantize(x, name)
    plan = fp4kit.GroupedPlan([d, d[:16]], name)
    for factor in np.float32([1, 3]):
        d[...] = cupy.asarray(x * factor)
        group = [x * factor, x[:16] * factor]
        assert_equal(plan.quantize(), fp4kit.quantize_grouped(group, name))
        assert_equal(plan.fake_quantize(), fp4kit.fake_quantize_grouped(group, name))
    agree(fp4kit.amax, x, name)
    given = {part: getattr(q, part) for part in ("block_scale", "tensor_scale") if getattr(q, part) is not None}
    agree(fp4kit.quantize, x, name, **given)
    agree(fp4kit.dequantize, fp4kit.quantize(x, name, **given))


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16))
@pytest.mark.parametrize("name", [name for name in NAMES if "nvfp4-fouroversix" in name])
def test_codes_that_wrap_around(name, dtype) -> None:
    """fouroversix's codes wrap around like on the CPU.

    Blocks have subnormal scales and elements of up to 9 scales, and some tensor amaxes are too small for them.
    """
    x = tiny_scales(dtype, RECIPES[name].scale_max)
    for tensor_amax in (None, np.float32(x.max() / 3), np.float32(x.max() / 100), np.float32(1e-30)):
        check(x, name, tensor_amax=tensor_amax)
        agree(fp4kit.fake_quantize, x, name, tensor_amax=tensor_amax)
    check(over_scales().astype(dtype), name, tensor_amax=np.float32(2688))
    q = fp4kit.quantize(x, name)
    agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)


@pytest.mark.parametrize("name", ["nvfp4-quark", "nvfp4-quark-file2file"])
def test_scales_of_quark_that_underflow(name) -> None:
    for factor in (1, 2.0**-125, 2.0**-145):
        check((underflowing() * factor).astype(np.float32), name)
