"""Compare drawn products with the matrix unit of the GPU that runs the tests, by mma.sync. Needs a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from on_gpu import DEVICES, cupy, gpu_only, there
from products import as_quantized

import fp4kit
from fp4kit.units import IntegerAdd, Unit

# A warp computes 16 x 8 sums; all instructions below read 8 words of 32 bits per row, two of B's and four of A's per
# thread. c and d hold float32 or int32, or pairs of float16.
_KERNEL = r"""
extern "C" __global__ void chain(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* d, int words) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, columns = gridDim.y * 8;
  const unsigned* low = a + (blockIdx.x * 16ll + g) * words + t;
  const unsigned* column = b + (blockIdx.y * 8ll + g) * words + t;
  long long at[2];
  for (int i = 0; i < 2; ++i) at[i] = ((blockIdx.x * 16ll + g + 8 * i) * columns + blockIdx.y * 8 + 2 * t) * SUM / 4;
  TYPE s[SUM];
  for (int i = 0; i < SUM; ++i) s[i] = AS_TYPE(c[at[i * 2 / SUM] + i % (SUM / 2)]);
  for (int w = 0; w < words; w += 8) {
    const unsigned a0 = low[w], a1 = low[w + 8 * words], a2 = low[w + 4], a3 = low[w + 8 * words + 4];
    const unsigned b0 = column[w], b1 = column[w + 4];
    MMA
  }
  for (int i = 0; i < SUM; ++i) d[at[i * 2 / SUM] + i % (SUM / 2)] = AS_BITS(s[i]);
}
"""
_FLOAT = {"TYPE": "float", "AS_TYPE(x)": "__uint_as_float(x)", "AS_BITS(x)": "__float_as_uint(x)", "SUM": "4"}
_WORDS = {"TYPE": "unsigned", "AS_TYPE(x)": "x", "AS_BITS(x)": "x", "SUM": "4"}
_TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}


def sums(name: str, operands: tuple[str, str], result: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return c + a b^T as mma.sync of the shape `name` computes it, in chains along K."""
    left, right = operands
    satfinite, kind = (".satfinite", "s32") if result == "sat" else ("", result)
    registers = {**_FLOAT} if kind == "f32" else {**_WORDS, "SUM": "2" if kind == "f16" else "4"}
    count, letter = int(registers["SUM"]), "f" if kind == "f32" else "r"
    own, numbers = ", ".join(f"%{i}" for i in range(count)), [f"%{count + i}" for i in range(6)]
    text = f"mma.sync.aligned.{name}.row.col{satfinite}.{kind}.{left}.{right}.{kind} {{{own}}}, "
    text += f"{{{', '.join(numbers[:4])}}}, {{{', '.join(numbers[4:])}}}, {{{own}}};"
    outs = ", ".join(f'"+{letter}"(s[{i}])' for i in range(count))
    ins = ", ".join(f'"r"({x})' for x in ("a0", "a1", "a2", "a3", "b0", "b1"))
    source = _KERNEL.replace("MMA", f'asm volatile("{text}" : {outs} : {ins});')
    for macro, value in registers.items():
        source = f"#define {macro} {value}\n{source}"
    kernel = cupy.RawKernel(source, "chain")
    words = [cupy.asarray(np.ascontiguousarray(x).view(np.uint32)) for x in (a, b, c)]
    d = cupy.empty_like(words[2])
    kernel((len(a) // 16, len(b) // 8), (32,), (*words, d, np.int32(words[0].shape[1])))
    return cupy.asnumpy(d).view(c.dtype)


SM90, SM90_F16 = fp4kit.unit("sm90-mma"), fp4kit.unit("sm90-mma-f16")
SATURATING = replace(SM90, int8=IntegerAdd(saturate=True))
FP8 = [*product(("e4m3", "e5m2"), repeat=2)]
CASES: list[tuple[str, tuple[str, str], str, Unit]] = [
    *(("m16n8k16", (x, x), "f32", SM90) for x in ("f16", "bf16")),
    ("m16n8k16", ("f16", "f16"), "f16", SM90_F16),
    ("m16n8k8", ("tf32", "tf32"), "f32", SM90),
    *(("m16n8k32", pair, result, u) for pair in FP8 for result, u in (("f32", SM90), ("f16", SM90_F16))),
    *(("m16n8k32", pair, "s32", SM90) for pair in product(("s8", "u8"), repeat=2)),
    *(("m16n8k32", pair, "sat", SATURATING) for pair in product(("s8", "u8"), repeat=2)),
]


def drawn(rng: np.random.Generator, kind: str, size: str, shape: tuple[int, int]) -> np.ndarray:
    """Draw an operand: any bits, ordinary numbers, numbers of many sizes, or numbers that cancel along K."""
    dtype = np.dtype(_TYPES[kind])
    if size == "bits" or dtype.kind in "iu":
        return rng.integers(0, 256**dtype.itemsize, shape).astype(f"u{dtype.itemsize}").view(dtype)
    x = rng.standard_normal(shape)
    if size == "wide":
        x *= 2.0 ** rng.integers(-10, 11, shape)
    if size == "cancel":
        x[:, 1::2] = -x[:, ::2] * (1 + 2.0**-8 * rng.integers(-1, 2, x[:, ::2].shape))
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


@gpu_only
@pytest.mark.skipif(DEVICES > 0 and cupy.cuda.Device().compute_capability != "90", reason="no Hopper GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'-'.join(case[1])}-{case[2]}")
def test_ten_million_sums(case, M: int = 1024, N: int = 640) -> None:
    """Sixteen draws of 655,360 chains each are equal in every bit. Any NaN equals any other."""
    name, operands, result, u = case
    rng = np.random.default_rng(len("".join(operands)))
    sum_of = {"f32": np.float32, "f16": np.float16}.get(result, np.int32)
    for i in range(16):
        size = ("ordinary", "bits", "wide", "cancel")[i % 4]
        K = (32, 128, 64, 256)[i // 4]
        a, b = (drawn(rng, kind, size, (n, K)) for kind, n in zip(operands, (M, N), strict=True))
        if sum_of is np.int32:
            c = rng.integers(-(2**31), 2**31, (M, N)).astype(np.int32)
        else:
            sizes = rng.integers(-20, 21, (M, N)) * (i % 3)
            with np.errstate(over="ignore"):
                c = (rng.standard_normal((M, N)) * 2.0**sizes).astype(sum_of)
        expected = sums(name, operands, result, a, b, c)
        options = {} if sum_of is np.int32 else {"alpha": 1.0, "out_dtype": sum_of}
        found = cupy.asnumpy(fp4kit.matmul(*(there(as_quantized(x)) for x in (a, b)), unit=u, c=there(c), **options))
        bits = f"u{found.itemsize}"
        both_nan = np.isnan(found) & np.isnan(expected) if found.dtype.kind == "f" else False
        wrong = np.count_nonzero((found.view(bits) != expected.view(bits)) & ~np.asarray(both_nan))
        assert wrong == 0, f"{wrong} of {found.size} sums of {size} operands with K = {K} differ"
