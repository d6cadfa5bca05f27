"""Test kernels that run in this process (libraries.py): threads, barriers, shuffles, and the faults that stop them."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from host import cupy_on_host as cupy
from host.cache import Cache
from host.compiler import Compiler, require_compiler
from host.libraries import Libraries
from inputs import BF16

from fp4kit.cuda import compiler
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import divide_ftz, multiply_ftz, reciprocal_approx_ftz

pytestmark = pytest.mark.usefixtures("played_gpu")

# A kernel that sums over a thread block, by shuffles within a warp and then through shared memory, and stores the sum
# in y[0]. Without its barriers, the sum is wrong. Tests replace parts of the text, such as READ, which is added to a
# thread's first value.
SUM = """
struct Arguments { unsigned* y; const unsigned* x; };
template <int kParts> __device__ unsigned* parts_of() {
  __shared__ unsigned parts[kParts];
  return parts;
}
extern "C" __global__ void sum_kernel(Arguments a) {
  __shared__ unsigned own[8];
  unsigned* parts = PARTS;
  unsigned sum = threadIdx.x + blockIdx.x + READ;
  for (unsigned lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  BARRIER;
  unsigned total = 0;
  for (unsigned part = 0; part < 8; ++part) total += parts[part];
  if (threadIdx.x == 0) STORE;
  (void)own;
}
"""
RIGHT = {"BARRIER": "__syncthreads()", "STORE": "atomicMax(a.y, total)", "READ": "0", "PARTS": "own"}
BESIDE = "on bytes beside an array"
FAULTS = {  # name of a fault -> replacements in the kernel's text, and the expected message
    "no barrier": ({"BARRIER": ""}, "depends on the grid, on the order of threads"),
    "half a barrier": ({"BARRIER": "if (threadIdx.x < 128) __syncthreads()"}, "that not every thread reaches"),
    "undefined": ({"BARRIER": "__syncthreads(); sum <<= blockDim.x"}, "undefined behaviour"),
    "a write into the guard page": ({"STORE": "a.y[4] = total"}, "is outside of every array"),
    "a write behind an array": ({"STORE": "a.y[1] = total"}, "wrote behind the end of an array"),
    "a write before an array": ({"STORE": "a.y[-1] = total"}, "wrote before the start of an array"),
    "a read behind an array": ({"READ": "a.x[1]"}, BESIDE),
    "a read before an array": ({"READ": "a.x[-1]"}, BESIDE),
    "a read in the guard page": ({"READ": "a.x[4] * blockIdx.x"}, "is outside of every array"),
    "a write to an input": ({"BARRIER": "__syncthreads(); *const_cast<unsigned*>(a.x) = 1"}, "wrote to an input"),
    "a write behind shared memory": ({"BARRIER": "parts[8] = 1; __syncthreads()"}, "outside of a variable in shared"),
    "a write before shared memory": ({"BARRIER": "parts[-1] = 1; __syncthreads()"}, "outside of a variable in shared"),
    "a read behind shared memory": ({"READ": "parts[8]"}, BESIDE),
    "a read before shared memory": ({"READ": "parts[-1]"}, BESIDE),
    "a write behind shared memory of a template": (
        {"PARTS": "parts_of<8>()", "BARRIER": "parts[8] = 1; __syncthreads()"},
        "outside of a variable in shared",
    ),
    "a write before shared memory of a template": (
        {"PARTS": "parts_of<8>()", "BARRIER": "parts[-1] = 1; __syncthreads()"},
        "outside of a variable in shared",
    ),
    "a read behind shared memory of a template": ({"PARTS": "parts_of<8>()", "READ": "parts[8]"}, BESIDE),
    "a read before shared memory of a template": ({"PARTS": "parts_of<8>()", "READ": "parts[-1]"}, BESIDE),
}


@pytest.fixture
def one_grid(monkeypatch):
    """Repeat launches only with the launcher's number of thread blocks, because SUM depends on that number."""
    monkeypatch.setattr("host.libraries.MORE_BLOCKS", 0)


def launch_sum(**changed: str) -> int:
    """Launch the kernel SUM in one block of 256 threads, with some of its parts replaced, and return the sum.

    Args:
        changed: {name of a part in SUM: C++ text to put in its place}.
    """
    y, x = cupy.zeros(1, np.uint32), cupy.asarray(np.zeros(1, np.uint32))
    source = SUM
    for name, text in (RIGHT | changed).items():
        source = source.replace(name, text)
    arguments = np.array([(y.data.ptr, x.data.ptr)], [("y", "u8"), ("x", "u8")])
    compiler.function(source, "sum_kernel", 0)((1,), (256,), (arguments,))
    return int(y[0])


@pytest.mark.parametrize("parts", ["own", "parts_of<8>()"])
def test_shuffles_barriers_and_atomics(one_grid, parts):
    assert launch_sum(PARTS=parts) == sum(range(256))


def test_the_grid_must_not_matter_and_a_launch_leaves_what_its_grid_makes(monkeypatch):
    with pytest.raises(AssertionError, match="depends on the grid"):
        launch_sum(READ="0u")
    monkeypatch.setattr("host.libraries.MORE_BLOCKS", 0)
    assert launch_sum(BARRIER="__syncthreads() ") == sum(range(256))


def test_the_other_way_to_switch_stacks(one_grid, tmp_path):
    """Check the fibers of ucontext, which are used on processors other than x86-64."""
    other = Libraries(tmp_path, Compiler((*require_compiler(tmp_path).command, "-DFIBER_UCONTEXT")))
    with other.playing():
        assert launch_sum() == sum(range(256))
    other.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(one_grid, fault):
    changed, seen = FAULTS[fault]
    with pytest.raises(AssertionError, match=seen):
        launch_sum(**changed)


def test_arguments_of_another_size_are_seen():
    source, arguments = SUM, np.zeros(1, [("y", "u8"), ("x", "u8"), ("rows", "i8")])
    for name, text in RIGHT.items():
        source = source.replace(name, text)
    with pytest.raises(AssertionError, match="arguments and the kernel's have different sizes"):
        compiler.function(source, "sum_kernel", 0)((1,), (256,), (arguments,))


# ---- the functions that replace GPU instructions ----

TWINS = {  # C++ expression of p.a[i] and p.b[i] -> NumPy expression of equal value
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
    """Return two float32 arrays of numbers to multiply and divide pairwise.

    Some pairs have random bits, and a product or quotient near the smallest normal number. The other pairs are all
    pairs of edge cases such as 0, infinity and NaN.
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
def test_twins_of_instructions(expression):
    a, b = pairs()
    x, y, out = cupy.asarray(a), cupy.asarray(b), cupy.empty(a.shape, np.float32)
    names = [("a", "u8"), ("b", "u8"), ("y", "u8"), ("count", "i8")]
    arguments = np.array([(x.data.ptr, y.data.ptr, out.data.ptr, a.size)], names)
    source = TWIN.replace("EXPRESSION", expression)
    compiler.function(source, "twin_kernel", 0)((3,), (256,), (arguments,))
    if cupy.rehearsing:
        return
    with np.errstate(all="ignore"):
        expected, found = TWINS[expression](a, b), out.get()
    both_nan = np.isnan(found) & np.isnan(expected)
    assert_same_bits(np.where(both_nan, 0, found), np.where(both_nan, 0, expected), expression)


# ---- the compiler ----


def test_a_program_is_compiled_again_when_a_header_changes(tmp_path, monkeypatch):
    compiler = Compiler((require_compiler(tmp_path).command[0],))
    monkeypatch.setattr("host.compiler.shared", lambda: Cache(tmp_path / "kept"))
    compiled, real = [], Compiler._compile
    monkeypatch.setattr(Compiler, "_compile", lambda *args: compiled.append(args[0]) or real(*args))
    text = '#include "first.h"\nint main() { return ANSWER; }\n'
    (tmp_path / "first.h").write_text('  #  include "answer.h"\n')
    for answer, times in (("3", 1), ("3\n\n// A comment.", 1), ("4", 2)):
        (tmp_path / "answer.h").write_text(f"#define ANSWER {answer}\n")
        compiler.build(text, tmp_path / "program", tmp_path)
        assert (subprocess.run([tmp_path / "program"]).returncode, len(compiled)) == (int(answer[0]), times)
    Compiler((*compiler.command, "-O1")).build(text, tmp_path / "program", tmp_path)
    assert len(compiled) == 3, "other flags make another program"
