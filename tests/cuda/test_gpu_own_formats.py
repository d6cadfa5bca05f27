"""Test formats of one's own on CuPy arrays: drawn recipes and arrays give the bytes of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, assert_same, check, cupy, differing
from own_formats import UE5M3, drawn_array, drawn_recipe

import fp4kit
from fp4kit.cuda.dispatch import unsupported
from fp4kit.formats import E2M1, E4M3, E8M0, MX4, NF4, Codebook

pytestmark = ON_GPU


def check_calls(x, r, rng) -> None:
    """Assert that quantize, dequantize and fake_quantize of x give equal bits on GPU and CPU, also for drawn codes."""
    q = check(x, r)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0
    packed = rng.integers(0, 256 if r.element.bits in (4, 8) else 64, q.packed.shape, dtype=np.uint8)
    scales = {name: getattr(q, name) for name in ("block_scale", "tensor_scale")}
    scales = {name: None if part is None else part.get() for name, part in scales.items()}
    if r.scale is not None:
        scales["block_scale"] = rng.integers(0, 2**r.scale.bits, q.block_scale.shape, dtype=np.uint8)
    cpu = fp4kit.Quantized(packed, **scales, tensor_amax=None, shape=x.shape, dtype=x.dtype, axis=-1, recipe=r)
    for dtype in (np.float32, np.float16):
        assert differing(fp4kit.dequantize(cpu.to("cupy"), dtype=dtype), fp4kit.dequantize(cpu, dtype=dtype)) == 0
    on_gpu = {name: None if part is None else cupy.asarray(part) for name, part in scales.items()}
    assert_same(fp4kit.quantize(cupy.asarray(x), r, **on_gpu), fp4kit.quantize(x, r, **scales))
    if r.block_rule and r.block_rows == 1:
        amax = rng.random(q.block_scale.shape, np.float32) * np.float32(3)
        check(x, r, block_amax=cupy.asarray(amax))


def drawn_supported(rng):
    """Return a random recipe that CUDA kernels support, whose blocks have 16, 32, 64, 96 or 128 columns."""
    while True:
        r = drawn_recipe(rng)
        if unsupported(r) is None and r.block_size >= 16 and (r.block_rows == 1 or r.block_size <= 32):
            return r


@pytest.mark.parametrize("seed", [*range(2), *exhaustive(range(2, 10))])
def test_drawn_calls(seed):
    rng = np.random.default_rng(seed)
    r = drawn_supported(rng)
    with np.errstate(all="ignore"):
        check_calls(drawn_array(rng, r), r, rng)


@pytest.mark.parametrize("scale", [UE5M3, E8M0, E4M3], ids=repr)
@pytest.mark.parametrize("rounding", ["nearest", "up", "down"])
def test_every_power_of_two_and_its_neighbors_as_scales(scale, rounding):
    """Scales are rounded as on the CPU at powers of two, the numbers beside them, 1.5 times them, 0, inf and NaN."""
    powers = 2.0 ** np.arange(-149, 128, dtype=np.float64)
    largest = np.concatenate([powers * step for step in (1, 1.5, 1 - 2**-24, 1 + 2**-23, 1.5 - 2**-23)])
    largest = np.concatenate([largest, [0, np.inf, np.nan, np.finfo(np.float32).max]]).astype(np.float32)
    x = np.zeros((len(largest), 16), np.float32)
    x[:, 3] = largest
    with np.errstate(all="ignore"):
        check(x, fp4kit.custom_recipe("mine", E2M1, scale, 16, scale_rounding=rounding))


@pytest.mark.parametrize("element", [NF4, Codebook([-3, 0, 0, 1, 5], name="Few")], ids=repr)
def test_every_tie_of_a_codebook(element):
    """Elements at each midpoint of a table, beside it, and beyond its ends get the codes of the CPU."""
    near = [element.midpoints, np.nextafter(element.midpoints, np.float32(9)), np.nextafter(element.midpoints, -9)]
    x = np.concatenate([*near, element.values, [-0.0, 0.0, np.nan, element.max]]).astype(np.float32)
    x = np.resize(x, (1, -(-len(x) // 32) * 32))
    x[:, ::16] = element.max  # so that every block has the scale 1
    check(x, fp4kit.custom_recipe("mine", element, "float32", 16))


@pytest.mark.parametrize("scale", ["float16", "bfloat16", UE5M3], ids=str)
def test_groups_columns_and_both_directions(scale):
    x = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    r = fp4kit.custom_recipe("mine", NF4, scale, 32, scale_rounding="up")
    check(x, r, axis=0)
    for gpu, cpu in zip(fp4kit.quantize_both(cupy.asarray(x), r), fp4kit.quantize_both(x, r), strict=True):
        assert_same(gpu, cpu)
    xs = [x, x[:17], x[:0]]
    for gpu, a in zip(fp4kit.quantize_grouped([cupy.asarray(a) for a in xs], r), xs, strict=True):
        assert_same(gpu, fp4kit.quantize(a, r))


def check_search(x, r, **options):
    """Assert that search_scales finds the amaxes of the CPU, in every bit."""
    on_gpu = {name: cupy.asarray(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
    assert differing(fp4kit.search_scales(cupy.asarray(x), r, **on_gpu), fp4kit.search_scales(x, r, **options)) == 0


@pytest.mark.parametrize("seed", [3, *exhaustive([0, 1, 2, *range(4, 10)])])
def test_searches(seed):
    """Drawn recipes and arrays, with each objective, and weights that differ between the blocks of a row."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        r = drawn_supported(rng)
        while r.block_rows > 1:
            r = drawn_supported(rng)
        x = drawn_array(rng, r)
        objective = ("mse", "mae", "max", "p2.4")[seed % 4]
        weights = rng.random(x.shape[1], np.float32) if rng.random() < 0.5 else None
        check_search(x, r, objective=objective, weights=weights, candidates=(0.6, 1.2, 0.1))


@pytest.mark.parametrize("scaling", ["tensor", *exhaustive(["row"])])
def test_searches_under_tensor_scales(scaling):
    """Each expert, or each row, has its own tensor scale above the block scales."""
    rng = np.random.default_rng(1)
    r = replace(fp4kit.custom_recipe("mine", NF4, E4M3, 24, tensor_scale=True), tensor_scaling=scaling)
    x = rng.standard_normal((3, 4, 48), np.float32) * 2.0 ** rng.integers(-4, 4, (3, 1, 1)).astype(np.float32)
    amaxes = {"tensor": np.abs(x).max((1, 2)), "row": np.abs(x).max(2)}[scaling]
    check_search(x, r, candidates=(0.7, 1.1, 0.1))
    check_search(x, r, candidates=(0.7, 1.1, 0.1), tensor_amax=amaxes)
    check_search(x[:, :0], r)


def test_searches_that_no_kernel_supports_are_refused_before_any_work():
    r = fp4kit.custom_recipe("mine", MX4, E8M0, 2)
    with pytest.raises(NotImplementedError, match="mine has blocks of 2 columns, which no CUDA kernel supports"):
        fp4kit.search_scales(cupy.ones((2, 64), np.float32), r)
