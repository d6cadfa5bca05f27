"""Test matrix products on a GPU: the bytes of the CPU, for every kind of operands, unit and shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every, exhaustive
from on_gpu import DEVICES, ON_GPU, cupy, gpu_only, there
from products import BF16, PAIRS, TINY, as_quantized, at_bounds, drawn, drawn_c, drawn_call, far_apart, recorded, tiny

import fp4kit
from fp4kit.call.matmul import matmul_call
from fp4kit.cuda import matmul as cuda
from fp4kit.ops import matmul as operations
from fp4kit.quantized.container import Quantized
from fp4kit.units import ENGINE_ORDERS, DotAdd, Unit

pytestmark = ON_GPU


def moved(x):
    """Return an operand, or a list of them, on the GPU; float8 arrays become Quantized (see as_quantized)."""
    return [moved(a) for a in x] if isinstance(x, list) else there(as_quantized(x))


def both(a, b, c=None, function=None, **options) -> None:
    """Assert that matmul, or matmul_grouped as `function`, gives equal bits on CPU and GPU."""
    function = function or fp4kit.matmul
    with np.errstate(all="ignore"):
        cpu = function(a, b, c=c, **options)
    gpu = function(moved(a), moved(b), c=there(c), **{name: there(value) for name, value in options.items()})
    for x, y in zip(gpu, cpu, strict=True) if isinstance(cpu, list) else ((gpu, cpu),):
        assert isinstance(x, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(x).view(f"u{y.itemsize}"), y.view(f"u{y.itemsize}"))


RECORDED = [case for case in (*recorded("mma_sim"), *recorded("h100")) if as_quantized(case.a) is not None]
ON_DEVICE = [pair for pair in PAIRS if not any(kind.endswith("fnuz") for kind in pair)]


@pytest.mark.parametrize("pair", every(1 if DEVICES else 4, ON_DEVICE), ids="-".join)
def test_drawn_products(pair) -> None:
    _, left, right = pair
    rng = np.random.default_rng(len("-".join(pair)))
    for _ in range(12 if DEVICES else 1):
        M, N = (int(rng.integers(1, 200 if DEVICES else 40)) for _ in range(2))
        K = int(rng.integers(1, 12)) * (128 if left.endswith("128") else 32)
        a, b = drawn(rng, left, M, K), drawn(rng, right, N, K)
        both(a, b, **drawn_call(rng, pair, (M, N)))


@pytest.mark.parametrize("shapes", [((3, 5, 64), (3, 7, 64)), ((5, 64), (3, 7, 64)), ((0, 64), (3, 64))], ids=str)
def test_stacks_and_empty_operands(shapes) -> None:
    rng = np.random.default_rng(3)
    a, b = (fp4kit.quantize(rng.standard_normal(shape).astype(np.float32), "nvfp4-te") for shape in shapes)
    both(a, b)


def test_operands_decoded_in_panels(monkeypatch) -> None:
    """The unit "dequantized" decodes large operands in panels, with the bits of the CPU's undivided product."""
    rng = np.random.default_rng(4)
    a, b = (fp4kit.quantize(rng.standard_normal((n, 64)).astype(np.float32), "nvfp4-te-2d") for n in (48, 64))
    c = rng.standard_normal((48, 64)).astype(np.float32)
    cpu = fp4kit.matmul(a, b, c=c, unit="dequantized")
    monkeypatch.setattr(operations, "MAX_DECODED_BYTES", 0)
    monkeypatch.setattr(operations, "PANEL_ELEMENTS", 16 * 64)
    gpu = fp4kit.matmul(moved(a), moved(b), c=cupy.asarray(c), unit="dequantized")
    assert isinstance(gpu, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(gpu).view(np.uint32), cpu.view(np.uint32))


def grouped(rng, kinds, rows) -> None:
    """Assert that matmul_grouped gives the bits of the CPU for products of the given kinds and numbers of rows."""
    a = [drawn(rng, kind, M, 96) for kind, M in zip(kinds, rows, strict=True)]
    b = [drawn(rng, kind, int(rng.integers(1, 90)), 96) for kind in kinds]
    both(a, b, function=fp4kit.matmul_grouped)


@pytest.mark.parametrize("kinds", [["nvfp4"] * 4, *exhaustive([["e4m3"] * 4, ["mxfp4", "bf16", "mxfp4", "bf16"]])])
def test_groups_of_products(kinds) -> None:
    """Products of several sizes, an empty one among them, take one launch per kernel."""
    grouped(np.random.default_rng(3), kinds, (70, 0, 1, 130))


def test_rows_of_tokens_by_expert() -> None:
    rng = np.random.default_rng(4)
    tokens, experts = drawn(rng, "nvfp4", 140, 64), drawn(rng, "nvfp4", 3, 40, 64)
    starts, c = np.array([0, 70, 70, 140], np.int32), rng.standard_normal((140, 40)).astype(np.float32)
    both(tokens, experts, c, fp4kit.matmul_grouped, m_indptr=starts)


@pytest.mark.parametrize(("unit", "kind"), TINY)
def test_sums_below_the_normal_numbers(unit, kind) -> None:
    both(*tiny(kind), unit=unit, c=np.full((40, 33), 3e-39, np.float32))


@pytest.mark.parametrize("unit", ["sm100", "cdna3"])
def test_products_of_minus_zero(unit) -> None:
    a, b = np.zeros((3, 48), np.float16), -np.ones((5, 48), np.float16)
    both(a, b, np.full((3, 5), -0.0, np.float32), unit=unit)


def test_terms_that_lose_bits() -> None:
    """Scales and sums so far apart that terms lose bits take the path that adds term by term."""
    rng = np.random.default_rng(6)
    for kind in ("nvfp4", "mxfp4"):
        for a, b, c in far_apart(kind, rng):
            both(a, b, c)
    for spread in (0, 12, 26):
        for a, b, c in at_bounds(rng, spread):
            both(a, b, c)
    c = (rng.standard_normal((33, 37)) * 2.0 ** rng.integers(-60, 60, (33, 37))).astype(np.float32)
    for kind, other in (("e4m3", "e5m2"), ("e5m2", "e4m3")):
        a, b = drawn(rng, kind, 33, 96), drawn(rng, other, 37, 96)
        for unit in ("sm90", "sm89"):
            both(a, b, c, unit=unit)
            both(a, b, (c * 2.0**60).astype(np.float32), unit=unit)


def test_the_first_terms_and_sums_that_lose_bits() -> None:
    """A step is exact until a term is below 2^-35 of C, or a bit of C or a term below 2^-35 of the largest term.

    The smallest term is -2^-20: both scales are 2^-9, so their exponents are -6, and both elements are 0.5. C is a
    power of two, or has the bits of 1 + 2^-23. Other terms cancel.
    """
    nvfp4 = fp4kit.quantize(np.zeros((1, 64), np.float32), "nvfp4-te")
    one = np.nextafter(np.float32(1), np.float32(2))
    below = np.float32([np.nextafter(np.float32(2.0**e), np.float32(0)) for e in (10, 15)])
    smallest, cancel = ({16: 1}, {16: 9}), ({0: 2, 8: 2}, {0: 2, 8: 10})
    both_kinds = tuple(x | y for x, y in zip(smallest, cancel, strict=True))
    tiny, ones, high, largest = (1,) * 4, (0x38,) * 4, (0x70, 0x70, 1, 1), (0x78, 0x78, 1, 1)  # codes of scales
    for scales, elements, c, expected in (
        ((tiny, tiny), smallest, 2.0**15, below[1]),
        ((tiny, tiny), smallest, 2.0**16, 2.0**16),
        ((ones, ones), cancel, one * 2.0**-12, one * 2.0**-12),
        ((ones, ones), cancel, one * 2.0**-13, 2.0**-13),
        ((largest, high), both_kinds, 2.0**10, below[0]),
        ((largest, largest), both_kinds, 2.0**10, 2.0**10),
    ):
        operands = []
        for codes, scale in zip(elements, scales, strict=True):
            packed = np.zeros((1, 32), np.uint8)
            packed[0, list(codes)] = list(codes.values())
            operands.append(replace(nvfp4, packed=packed, block_scale=np.uint8([scale])))
        first = np.full((1, 1), c, np.float32)
        assert fp4kit.matmul(*operands, c=first)[0, 0] == expected
        both(*operands, c=first)


@pytest.mark.parametrize(("block", "unit"), [(2, "exact"), (8, "float64"), (256, "float32-blocks")])
def test_blocks_that_no_kernel_takes_are_refused(block, unit) -> None:
    q = fp4kit.quantize(np.ones((4, 512), np.float32), replace(fp4kit.recipe("mxfp4-ocp"), block=(1, block)))
    with pytest.raises(NotImplementedError, match=f"blocks of {block} elements"):
        fp4kit.matmul(moved(q), moved(q), unit=unit)


@pytest.mark.parametrize("unit", ENGINE_ORDERS)
def test_engines_on_a_cpu_are_refused(unit) -> None:
    x, w = np.ones((4, 64), np.float32), fp4kit.quantize(np.ones((8, 64), np.float32), "mxfp4-ocp")
    with pytest.raises(NotImplementedError, match=f"matmul: {unit} adds as a program on a CPU does; move both"):
        fp4kit.matmul(moved(x), moved(w), unit=unit)


DTYPES = {"bf16": BF16, "f16": np.float16, "f32": np.float32}
KINDS_OF_BITS = {32: ("f32",), 16: ("bf16", "f16"), 8: ("e4m3", "e5m2", "e2m3", "e3m2"), 4: ("e2m1",)}
# The instances of matmul_truncate.cu: bits of a code of a and of b, k, and fraction bits for the type of terms
TRUNCATING = [
    *((n, n, k, 25) for n in (16, 32) for k in (16, 8, 4, 32)),
    *((a, b, k, bits) for k in (32, 16, 8, 4) for a in (8, 4) for b in (8, 4) for bits in (13, 25)),
]


def regimes(rng, a_kind, b_kind, M, N, K):
    """Yield operands and C of many kinds: drawn ones, wide ones, and sums that cancel but for a few terms."""
    for _ in range(2):
        yield drawn(rng, a_kind, M, K), drawn(rng, b_kind, N, K), drawn_c(rng, (M, N))
    if a_kind not in DTYPES:
        return
    for spread in (5, 30, 64, 130):
        x, y = (rng.standard_normal((n, K)) * 2.0 ** rng.uniform(-spread, spread, (n, K)) for n in (M, N))
        x[:, rng.random(K) < 0.2] = rng.choice([0.0, -0.0])
        y[:, K // 2 :], x[:, K // 2 :] = -y[:, : K - K // 2], x[:, : K - K // 2]
        y[:, ::7] *= 2.0 ** rng.integers(-12, 2)
        with np.errstate(over="ignore"):
            a, b = (part.astype(np.float32).astype(DTYPES[a_kind]) for part in (x, y))
            c = (rng.standard_normal((M, N)) * 2.0 ** rng.uniform(-spread, spread)).astype(np.float32)
        yield a, b, c


@pytest.mark.parametrize("instance", every(1 if DEVICES else 5, TRUNCATING), ids=str)
def test_steps_that_truncate_single_products(instance) -> None:
    """Every instance of matmul_truncate.cu gives the bits of the specification."""
    *bits, k, fraction_bits = instance
    rng = np.random.default_rng(sum(instance))
    step = DotAdd(k, fraction_bits - int(rng.integers(0, 3)), int(rng.choice([23, 13, 10])), -133)
    mx = replace(step, k=32, fraction_bits=max(step.fraction_bits, 15))
    u = Unit("drawn", float16=step, bfloat16=step, tf32=step, fp8=step, fp6_fp4=step, mx=mx)
    for a_kind, b_kind in product(*(KINDS_OF_BITS[n] for n in bits)):
        if bits[0] >= 16 and a_kind != b_kind:
            continue
        M, N = (int(rng.integers(1, 150 if DEVICES else 9)) for _ in range(2))
        K = int(rng.integers(1, 9)) * (32 if 4 in bits else 16 if 8 in bits else 8)
        for a, b, c in regimes(rng, a_kind, b_kind, M, N, K):
            both(a, b, c, unit=rng.choice([u, replace(u, promote=32), replace(u, promote=64)]))
        if k == 32 and bits[0] < 16 < fraction_bits:
            for a, b, c in regimes(rng, f"mx-{a_kind}", f"mx-{b_kind}", M, N, K // 32 * 32 + 32):
                both(a, b, c, unit=u)


@pytest.mark.parametrize(
    ("pair", "K", "file"),
    [
        *((("sm100", kind, kind), 40, "matmul_truncate") for kind in ("bf16", "f32")),
        *((("sm100", kind, "mx-e2m3"), 64, "matmul_truncate") for kind in ("mx-e4m3", "mx-e2m1")),
        *((("sm100", "e2m1", "e5m2"), 64, "matmul_truncate"), (("sm90", "e4m3", "e4m3"), 48, "matmul_truncate")),
        *((("sm100", "bf16", "bf16"), 36, None), (("sm100-f16", "f16", "f16"), 64, None)),
        (("sm100", "nvfp4", "nvfp4"), 64, "matmul_fp4"),
    ],
    ids=str,
)
def test_kernels_of_products(pair, K, file) -> None:
    """Products of rows that begin at multiples of 16 bytes take the fast kernels, whatever M and N are."""
    unit, left, right = pair
    rng = np.random.default_rng(1)
    call, _ = matmul_call(moved(drawn(rng, left, 3, K)), moved(drawn(rng, right, 5, K)), unit, None, None, None)
    found = cuda._special_kernel(call, [call.a.codes, call.b.codes])
    assert (None if found is None else found.file) == file


def test_odd_lengths_and_steps_of_a_variant() -> None:
    rng = np.random.default_rng(4)
    a, b = drawn(rng, "bf16", 33, 131), drawn(rng, "bf16", 31, 131)
    both(a, b, unit="sm80")
    sm90 = fp4kit.unit("sm90")
    both(a, b, unit=replace(sm90, bfloat16=replace(sm90.bfloat16, k=24, fraction_bits=12, output_bits=10)))


@pytest.mark.parametrize("case", every(1 if DEVICES else 12, RECORDED), ids=lambda c: c.name)
def test_recorded_products(case) -> None:
    dtype = ml_dtypes.bfloat16 if case.d.dtype.itemsize == 2 else np.float32
    a, b = moved(case.a), moved(case.b)
    c = None if case.c is None else cupy.asarray(case.c)
    d = fp4kit.matmul(a, b, unit=case.unit, c=c, out_dtype=dtype)
    bits = f"u{case.d.dtype.itemsize}"
    np.testing.assert_array_equal(cupy.asnumpy(d).view(bits), case.d.view(bits))


@gpu_only
@pytest.mark.parametrize(
    ("kind", "unit"), [("nvfp4", "sm100"), ("mxfp4", "sm100"), ("bf16", "sm90"), ("e4m3", "sm90")], ids="-".join
)
def test_large_products(kind, unit) -> None:
    """Products of many tiles have the bits of the CPU in drawn rows and columns of every tile.

    Every tile of 32 rows or columns has one that the CPU computes too. In each of these rows and columns, the CPU
    computes all results.
    """
    rng = np.random.default_rng(5)
    a, b = drawn(rng, kind, 1000, 4096), drawn(rng, kind, 777, 4096)
    with np.errstate(all="ignore"):
        gpu = cupy.asnumpy(fp4kit.matmul(moved(a), moved(b), unit=unit)).view(np.uint32)
        rows, columns = ([min(i + int(rng.integers(32)), n - 1) for i in range(0, n, 32)] for n in gpu.shape)
        np.testing.assert_array_equal(gpu[rows], fp4kit.matmul(taken(a, rows), b, unit=unit).view(np.uint32))
        np.testing.assert_array_equal(gpu[:, columns], fp4kit.matmul(a, taken(b, columns), unit=unit).view(np.uint32))


class Peak(cupy.cuda.MemoryHook if DEVICES else object):
    """Count the bytes that CuPy's memory pool gives out while the hook is active. `peak` is their largest sum."""

    name = "peak"

    def __init__(self) -> None:
        self.sizes, self.peak = {}, 0

    def malloc_postprocess(self, **block) -> None:
        self.sizes[block["mem_ptr"]] = block["mem_size"]
        self.peak = max(self.peak, sum(self.sizes.values()))

    def free_postprocess(self, **block) -> None:
        self.sizes.pop(block["mem_ptr"], None)


# Square products of every kind of kernel, and NVFP4 products with a long K and with a large result.
MEMORY = [
    *(
        (kind, unit, (1024, 1024, 1024))
        for kind, unit in (("nvfp4", "sm100"), ("mxfp4", "sm100"), ("mx-e4m3", "sm100"))
    ),
    *((kind, "sm90", (1024, 1024, 1024)) for kind in ("bf16", "e4m3")),
    ("nvfp4", "sm100", (4096, 64, 65536)),
    ("nvfp4", "sm100", (4096, 65536, 64)),
    ("nvfp4", "dequantized", (1024, 64, 65536)),
]


@gpu_only
@pytest.mark.parametrize(("kind", "unit", "shape"), MEMORY, ids=str)
def test_memory_beyond_inputs_and_output(kind, unit, shape) -> None:
    """A product takes at most 64 MiB of device memory besides its operands and its result."""
    M, N, K = shape
    rng = np.random.default_rng(7)
    a, b = (moved(drawn(rng, kind, rows, K)) for rows in (M, N))
    with Peak() as hook:
        d = fp4kit.matmul(a, b, unit=unit)
    assert d.nbytes <= hook.peak <= d.nbytes + (64 << 20)


def taken(x, rows):
    """Return the given rows of an operand, a matrix."""
    if not isinstance(x, Quantized):
        return x[rows]
    scales = None if x.block_scale is None else x.block_scale[rows]
    return replace(x, packed=x.packed[rows], block_scale=scales, shape=(len(rows), x.shape[1]))


def on_hopper() -> bool:
    return DEVICES > 0 and cupy.cuda.Device().compute_capability == "90"


# Products of these sizes are one chain in cuBLASLt of CUDA 13.0. With fast accumulation it splits K, and so gives other
# bits, where M and N are at most 256 and K is 8,192 or more.
SHAPES = [(4096, 4096, 4096), (1024, 512, 16384), (16, 4096, 4096), (64, 64, 4096), (48, 80, 32)]


@gpu_only
@pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("codes", ["normal", "all"])
def test_fp8_products_of_cublaslt(shape, fast, codes) -> None:
    """torch._scaled_mm on a Hopper GPU gives the bits of the unit sm90, on that GPU itself."""
    torch = pytest.importorskip("torch")
    M, N, K = shape
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    a, b = (fp8_matrix(torch, generator, rows, K, codes) for rows in (M, N))
    one = torch.ones((), device="cuda")
    sm90 = fp4kit.unit("sm90")
    for dtype in (torch.float32, torch.bfloat16):
        theirs = torch._scaled_mm(a, b.T, one, one, out_dtype=dtype, use_fast_accum=fast)
        ours = fp4kit.matmul(a, b, unit=sm90 if fast else replace(sm90, promote=128), out_dtype=dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert bool(((ours.view(bits) == theirs.view(bits)) | (ours.isnan() & theirs.isnan())).all())


def fp8_matrix(torch, generator, rows, columns, codes):
    """Return an E4M3 matrix on the GPU: normally distributed, or of all codes but NaN."""
    if codes == "normal":
        return torch.randn(rows, columns, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    drawn_codes = torch.randint(0, 254, (rows, columns), device="cuda", generator=generator)
    return (drawn_codes + (drawn_codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)


@gpu_only
@pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_products_of_e5m2_and_e4m3(shape, fast) -> None:
    """torch._scaled_mm of an E5M2 and an E4M3 matrix gives the bits of the unit sm90; of two E5M2 it computes none."""
    torch = pytest.importorskip("torch")
    M, N, K = shape
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    one, sm90 = torch.ones((), device="cuda"), fp4kit.unit("sm90")
    for dtypes in ((torch.float8_e5m2, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e5m2)):
        a, b = (
            torch.randn(rows, K, device="cuda", generator=generator).to(dtype)
            for rows, dtype in zip((M, N), dtypes, strict=True)
        )
        theirs = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        ours = fp4kit.matmul(a, b, unit=sm90 if fast else replace(sm90, promote=128))
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


MMA = r"""
extern "C" __global__ void multiply(const unsigned* a, const unsigned* b, float* d, int N, int K) {
  const int lane = threadIdx.x, row = blockIdx.y * 16 + lane / 4, column = blockIdx.x * 8;
  float c[4] = {0, 0, 0, 0};
  for (int k = 0; k < K; k += 16) {
    const int at = (k + lane % 4 * 2) / 2, line = column + lane / 4;
    const unsigned a0 = a[row * K / 2 + at], a1 = a[(row + 8) * K / 2 + at];
    const unsigned a2 = a[row * K / 2 + at + 4], a3 = a[(row + 8) * K / 2 + at + 4];
    const unsigned b0 = b[line * K / 2 + at], b1 = b[line * K / 2 + at + 4];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * N + column + lane % 4 * 2 + i % 2] = c[i];
}
"""


@gpu_only
@pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("seed", range(6))
def test_products_of_mma_sync(kind, seed) -> None:
    """mma.sync of 16-bit floats on a Hopper GPU gives the bits of the unit sm90."""
    rng = np.random.default_rng(seed)
    M, N, K = 256, 128, 4096 if seed % 2 else 48
    a, b = (drawn(rng, kind, rows, K) for rows in (M, N))
    kernel = cupy.RawKernel(MMA.replace("TYPE", kind), "multiply")
    d = cupy.empty((M, N), np.float32)
    words = [cupy.asarray(np.ascontiguousarray(x).view(np.uint32)) for x in (a, b)]
    kernel((N // 8, M // 16), (32,), (*words, d, np.int32(N), np.int32(K)))
    ours = cupy.asnumpy(fp4kit.matmul(moved(a), moved(b), unit="sm90"))
    np.testing.assert_array_equal(cupy.asnumpy(d).view(np.uint32), ours.view(np.uint32))
