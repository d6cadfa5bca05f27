"""Test Quantized objects on a GPU: from_parts, slices, equality, files and display."""

import numpy as np
import pytest
from inputs import ORDINARY
from on_gpu import ON_GPU, assert_same, cupy, differing

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import Quantized
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
    found = Quantized.from_parts(gpu.packed, gpu.block_scale, gpu.tensor_scale, recipe=name, dtype=F32)
    assert found.packed is gpu.packed
    assert_same(found, Quantized.from_parts(host.packed, host.block_scale, host.tensor_scale, recipe=name, dtype=F32))


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
