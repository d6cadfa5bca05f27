"""The host that kernels run on in tests (host/README.md): its threads, barriers and shuffles, and what it notices."""

from __future__ import annotations

import numpy as np
import pytest
from host.harness import DeviceArray, Host, require_compiler

from fp4kit.cuda import loader


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    with Host(folder, require_compiler(folder)) as host:
        yield host


# A sum over a block: by shuffles in a warp, then through shared memory. Threads must wait for each other, and y has one element.
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


@pytest.mark.parametrize("in_ci", ["true", ""])
def test_without_a_compiler(monkeypatch, tmp_path, in_ci):
    """Skips with the reason; in CI it fails."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CI", in_ci)
    outcome = pytest.fail.Exception if in_ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"no C\+\+ compiler found \(looked for no-such-compiler\)"):
        require_compiler(tmp_path)
