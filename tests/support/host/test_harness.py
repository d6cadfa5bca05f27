"""The host that kernels run on in tests (README.md): its threads, barriers and shuffles, and what it notices."""

from __future__ import annotations

import numpy as np
import pytest
from host.compiler import Compiler, require_compiler
from host.harness import DeviceArray, Host
from inputs import BF16

from fp4kit.cuda.compile import loader
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import divide_ftz, multiply_ftz, reciprocal_approx_ftz

# A sum over a block: by shuffles in a warp, then through shared memory. Threads must wait for each other, and y has one
# element.
SUM = """
struct Arguments { unsigned* y; };
extern "C" __global__ void sum_kernel(Arguments a) {
  __shared__ unsigned parts[8];
  unsigned sum = threadIdx.x + blockIdx.x;
  for (unsigned lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  BARRIER;
  unsigned total = 0;
  for (unsigned part : parts) total += part;
  if (threadIdx.x == 0) atomicMax(a.y + PLACE, total);
}
"""
FAULTS = {  # what stands for BARRIER and PLACE, and what is said
    "no barrier": ("", 0, "depends on the grid or on the order"),
    "half a barrier": ("if (threadIdx.x < 128) __syncthreads()", 0, "not every thread"),
    "outside": ("__syncthreads()", 1, "heap-buffer-overflow"),
    "undefined": ("__syncthreads(); sum <<= blockDim.x", 0, "shift exponent 256 is too large"),
}


def launch_sum(host: Host, barrier: str = "__syncthreads()", place: int = 0) -> int:
    y = DeviceArray.zeros(1, np.uint32)
    arguments = np.array([(y.data.ptr,)], [("y", "u8")])
    source = SUM.replace("BARRIER", barrier).replace("PLACE", str(place))
    host.run(lambda: loader.function(source, "sum_kernel", 0)((1,), (256,), (arguments,)))
    return int(y.array[0])


def test_shuffles_barriers_and_atomics(host, monkeypatch):
    monkeypatch.setattr("host.harness.MORE_BLOCKS", 0)  # the sum depends on the number of blocks
    assert launch_sum(host) == sum(range(256))


def test_the_grid_must_not_matter(host):
    with pytest.raises(AssertionError, match="y depends on the grid"):
        launch_sum(host)


def test_the_other_way_to_switch_stacks(host, tmp_path, monkeypatch):
    """ucontext, which processors other than x86-64 use."""
    monkeypatch.setattr("host.harness.MORE_BLOCKS", 0)
    with Host(tmp_path, Compiler((*host.compiler.command, "-DFIBER_UCONTEXT"))) as other:
        assert launch_sum(other) == sum(range(256))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(host, monkeypatch, fault):
    monkeypatch.setattr("host.harness.MORE_BLOCKS", 0)
    barrier, place, seen = FAULTS[fault]
    if fault in ("outside", "undefined") and not host.compiler.sanitizes:
        pytest.skip("the C++ compiler has no sanitizers")
    with pytest.raises(AssertionError, match=seen):
        launch_sum(host, barrier, place)


def test_arguments_of_another_size_are_seen(host):
    arguments, source = np.zeros(1, [("y", "u8"), ("rows", "i8")]), SUM.replace("BARRIER", "").replace("PLACE", "0")
    with pytest.raises(AssertionError, match="arguments and the kernel's have different sizes"):
        host.run(lambda: loader.function(source, "sum_kernel", 0)((1,), (256,), (arguments,)))


def test_what_does_not_compile_shows_the_compiler_s_words(host):
    with pytest.raises(AssertionError, match="nonsense"):
        launch_sum(host, "nonsense()")


# ---- the software twins of instructions ----

TWINS = {  # an expression of p.a[i] and p.b[i], and the specification
    "mul_ftz(p.a[i], p.b[i])": multiply_ftz,
    "div_ftz(p.a[i], p.b[i])": divide_ftz,
    "rcp_approx_ftz(p.a[i])": lambda a, b: reciprocal_approx_ftz(a),
    "widen_f16(narrow_f16(p.a[i]))": lambda a, b: a.astype(np.float16).astype(np.float32),
    "widen_bf16(narrow_bf16(p.a[i]))": lambda a, b: a.astype(BF16).astype(np.float32),
}
TWIN = """#include "ptx.cuh"
#include "ptx_convert.cuh"
struct Arguments { const float *a, *b; float* y; long long count; };
extern "C" __global__ void twin_kernel(Arguments p) {
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) p.y[i] = EXPRESSION;
}
"""  # noqa: E501


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Floats of all sizes, and partners that put products and quotients at and beside the smallest normal; edges with
    edges.
    """
    rng = np.random.default_rng(5)
    a = rng.integers(0, 2**32, 20000, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        partners = [(np.float64(2.0**-126) / a).astype(np.float32), (a / np.float64(2.0**-126)).astype(np.float32)]
    beside = [(b.view(np.uint32) + rng.integers(-2, 3, b.size)).astype(np.uint32).view(np.float32) for b in partners]
    tiny, least, largest = np.float32(2.0**-149), np.float32(2.0**-126), np.finfo(np.float32).max
    edges = np.array(
        [0, tiny, least - tiny, least, 1, 65504, 65520, 3.39e38, largest, 2.0**126, np.inf, np.nan], np.float32
    )
    edges = np.concatenate([edges, -edges])
    x, y = (m.reshape(-1) for m in np.meshgrid(edges, edges))
    return np.concatenate([a, a, x]), np.concatenate([*beside, y])


@pytest.mark.parametrize("expression", TWINS)
def test_twins_of_instructions(host, expression):
    a, b = pairs()
    x, y, out = DeviceArray(a), DeviceArray(b), DeviceArray.output(a.shape, np.float32)
    names = [("a", "u8"), ("b", "u8"), ("y", "u8"), ("count", "i8")]
    arguments = np.array([(x.data.ptr, y.data.ptr, out.data.ptr, a.size)], names)
    source = TWIN.replace("EXPRESSION", expression)
    host.run(lambda: loader.function(source, "twin_kernel", 0)((3,), (256,), (arguments,)))
    with np.errstate(all="ignore"):
        expected = TWINS[expression](a, b)
    both_nan = np.isnan(out.array) & np.isnan(expected)
    assert_same_bits(np.where(both_nan, 0, out.array), np.where(both_nan, 0, expected), expression)


# ---- the compiler ----


@pytest.mark.parametrize("in_ci", ["true", ""])
def test_without_a_compiler(monkeypatch, tmp_path, in_ci):
    """Skips with the reason; in CI it fails."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CI", in_ci)
    outcome = pytest.fail.Exception if in_ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"no C\+\+ compiler found \(looked for no-such-compiler\)"):
        require_compiler(tmp_path)
