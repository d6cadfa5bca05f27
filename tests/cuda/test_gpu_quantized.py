"""Test Quantized objects on a GPU: from_parts, slices, equality, files and display."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from inputs import ORDINARY
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, check, cupy, differing

import fp4kit
from fp4kit.cuda.dispatch import has_patch_kernel
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E4M3
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import BLOCK_RULES
from fp4kit.reference.tensor_rules import tensor_scale

pytestmark = ON_GPU
F32 = np.float32
NAMES = ["nvfp4-te", "mxfp4-ocp", "nvfp4-te-rowscaled", "int8-modelopt"]


def both(name, **options):
    """Quantize one array on the CPU and on the GPU; return both results."""
    return fp4kit.quantize(ORDINARY, name, **options), fp4kit.quantize(cupy.asarray(ORDINARY), name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_from_parts(name):
    host, gpu = both(name)
    given = {"recipe": name, "dtype": F32, "tensor_scale_divides": False}
    found = Quantized.from_parts(gpu.packed, gpu.block_scale, gpu.tensor_scale, **given)
    assert found.packed is gpu.packed
    assert_same(found, Quantized.from_parts(host.packed, host.block_scale, host.tensor_scale, **given))


@pytest.mark.parametrize(("number", "divides"), [(0.25, False), (F32([4]), True), (np.array(0.25), False)])
def test_tensor_scales_that_go_through_the_host(number, divides):
    host, gpu = both("nvfp4-te")
    number = cupy.asarray(number) if isinstance(number, np.ndarray) else number
    given = {"recipe": "nvfp4-te", "dtype": F32, "tensor_scale_divides": divides}
    found = Quantized.from_parts(gpu.packed, gpu.block_scale, number, **given)
    assert_same(found, Quantized.from_parts(host.packed, host.block_scale, F32(0.25), recipe="nvfp4-te", dtype=F32))


def test_divisors_that_do_not_follow_from_their_reciprocals():
    recipe, rng = "nvfp4-compressed-tensors", np.random.default_rng(3)
    x = (rng.standard_normal((200, 2, 32)) * rng.uniform(1, 9, (200, 1, 1))).astype(F32)
    q = fp4kit.quantize(x, recipe, tensor_amax=np.abs(x).max((1, 2)))
    divisors = tensor_scale(q.tensor_amax, q.recipe, q.dtype).encode
    options = {"recipe": recipe, "dtype": F32, "tensor_scale_divides": True}
    host = Quantized.from_parts(q.packed, q.block_scale, divisors, **options)
    gpu = Quantized.from_parts(*map(cupy.asarray, (q.packed, q.block_scale, divisors)), **options)
    assert host.tensor_amax is not None
    assert_same(gpu, host)
    assert differing(gpu.dequantize(F32), q.dequantize(F32)) == 0


def test_order_of_nibbles():
    host, gpu = both("nvfp4-te")
    options = {"recipe": "nvfp4-te", "dtype": F32, "high_nibble_first": True}
    found = Quantized.from_parts(gpu.packed, gpu.block_scale, gpu.tensor_scale, **options)
    assert_same(found, Quantized.from_parts(host.packed, host.block_scale, host.tensor_scale, **options))


def test_mixed_devices():
    host, gpu = both("nvfp4-te")
    with pytest.raises(ValueError, match=r"^from_parts: packed is on cuda:0, block_scale on cpu"):
        Quantized.from_parts(gpu.packed, host.block_scale, host.tensor_scale, recipe="nvfp4-te")


@pytest.mark.parametrize("name", NAMES)
def test_slices_and_equality(name):
    host, gpu = both(name)
    assert gpu.equals(host) and host.equals(gpu) and gpu.equals(gpu)
    assert_same(gpu[16:48], host[16:48])
    assert gpu[16:48].equals(host[16:48]) and not gpu[16:48].equals(host[0:32])
    assert type(gpu[16:48].packed) is cupy.ndarray
    joined = fp4kit.concatenate([gpu[:16], gpu[16:]])
    assert joined.equals(host) and type(joined.packed) is cupy.ndarray
    with pytest.raises(ValueError, match=r"^concatenate: qs\[0\] and qs\[1\] are on different devices; move them"):
        fp4kit.concatenate([gpu, host])


@pytest.mark.parametrize("name", NAMES)
def test_files_and_display(name, tmp_path):
    host, gpu = both(name)
    fp4kit.save(tmp_path / "a", {"w": gpu})
    fp4kit.save(tmp_path / "b", {"w": host})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert fp4kit.load(tmp_path / "a")["w"].equals(gpu)
    shown = ([line for line in str(q).splitlines() if " in " not in line] for q in (gpu, host))
    assert next(shown) == next(shown)
    assert " in cupy" in str(gpu) and "<table" in gpu._repr_html_()


def test_dequantize():
    host, gpu = both("nvfp4-te")
    assert_same_bits(gpu.dequantize().get(), host.dequantize())


SUPPORTED = [r.id for r in RECIPES.values() if not (r.fake_only or r.stochastic_only) and has_patch_kernel(r)]
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def check_both(x: np.ndarray, name: str, **options) -> None:
    agree(fp4kit.quantize_both, x, name, **options)


@pytest.mark.parametrize("name", all_or_few(SUPPORTED))
def test_every_recipe_both_ways(name) -> None:
    dtype = DTYPES[SUPPORTED.index(name) % 3]
    check_both(blocks(dtype, 160, 416), name)
    check(blocks(dtype, 96, 288), name, axis=0)


@pytest.mark.parametrize(
    "name", [r.id for r in RECIPES.values() if r.scale == E4M3 and BLOCK_RULES[r.block_rule].reads_amax]
)
def test_factors_that_do_not_follow_from_the_scale_code(name) -> None:
    for scale in (1, 2.0**-20, 2.0**20):
        x = (blocks(np.float32, 32, 64) * scale).astype(np.float32)
        check(x, name)
        check(x, name, axis=0)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te-2d", *exhaustive(["nvfp4-te-2d", "mxfp4-ocp"])])
def test_shapes_layouts_and_stacks(name) -> None:
    rng = np.random.default_rng(0)
    for shape in ((32, 32), (2, 64, 320), (224, 544), (3, 0, 64), (64, 0)):
        x = rng.standard_normal(shape).astype(np.float32)
        for layout in ("linear", "swizzled_128x4", "swizzled_8x4"):
            check_both(x, name, scale_layout=layout)
    flat = rng.standard_normal(1 + 64 * 96).astype(ml_dtypes.bfloat16)
    d = cupy.asarray(flat)[1:].reshape(64, 96)
    assert d.data.ptr % 16
    assert_same(fp4kit.quantize(d, name, axis=0), fp4kit.quantize(flat[1:].reshape(64, 96), name, axis=0))
    assert_same(fp4kit.quantize(d.T, name, axis=0), fp4kit.quantize(flat[1:].reshape(64, 96).T, name, axis=0))


@pytest.mark.exhaustive
def test_more_tiles_than_a_band() -> None:
    x = np.random.default_rng(2).standard_normal((1248, 352)).astype(ml_dtypes.bfloat16)
    for name in ("nvfp4-te", "mxfp8-te", "nvfp4-te-2d", "mxfp8-te-2d"):
        check_both(x, name)


@pytest.mark.exhaustive
def test_hadamard_transform_of_columns() -> None:
    for i, dtype in enumerate(DTYPES):
        for x in (blocks(dtype, 160, 416), np.random.default_rng(i).standard_normal((2, 64, 96)).astype(dtype)):
            check(x, "nvfp4-te", axis=-2, hadamard=True)
            check_both(x, "nvfp4-te", hadamard="no_signs", tensor_amax=3.0, scale_layout="swizzled_128x4")
            check_both(x, "nvfp4-te-reference", hadamard=True)


def test_one_amax_for_each_expert() -> None:
    x = np.random.default_rng(1).standard_normal((3, 64, 96)).astype(np.float32)
    amax = [1.0, 2.0, 3.5]
    check_both(x, "nvfp4-te", tensor_amax=amax)
    check(x, "nvfp4-te-2d", axis=1, tensor_amax=amax)
