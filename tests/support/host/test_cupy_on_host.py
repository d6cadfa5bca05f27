"""Test the simulated GPU: arrays behave like CuPy's, kernels stop at what a GPU rejects, and devices are separate."""

from __future__ import annotations

import re
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from exhaustive import every
from host import cupy_on_host as cupy
from host.cuda_on_host import of_capability
from host.device_memory import ALIGNMENT, PAGE, UNIT, UNWRITTEN, check_around_all
from host.instantiations import launching_on
from inputs import BF16, ordinary
from kernel_calls import KINDS, other_rows

import fp4kit
from fp4kit.cuda import launch, matrix
from fp4kit.cuda.cached_calls import FLOAT32, UINT8, NewArray, library_of
from fp4kit.cuda.dispatch import LaunchRequest, kernel_for
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.ops import engines

pytestmark = pytest.mark.usefixtures("played_gpu")


# ---- arrays ----


def test_small_new_arrays_share_memory_and_large_ones_do_not():
    cleared, plain, scalar = NewArray((128, 4), UINT8, zeros=True), NewArray((3, 5), UINT8), NewArray((), FLOAT32)
    make = library_of(cupy.empty(1, np.uint8)).maker([plain, cleared, scalar])
    first, second = make(), make()
    starts = [a.data.ptr for a in first]
    assert [p - starts[0] for p in starts] == [0, 256, 768] and starts[0] % ALIGNMENT == 0
    assert [(a.shape, a.dtype) for a in first] == [(new.shape, new.dtype) for new in (plain, cleared, scalar)]
    assert not first[1].get().any() and (first[0].get() == UNWRITTEN).all()
    assert second[0].data.mem is not first[0].data.mem is first[2].data.mem
    large = library_of(first[0]).maker([NewArray((1 << 20,), UINT8), scalar, cleared])()
    assert len({id(a.data.mem) for a in large}) == 3 and not large[2].get().any()


def test_an_array_is_no_numpy_array():
    a = cupy.asarray(np.arange(6, dtype=np.float32))
    assert not isinstance(a, np.ndarray) and type(a).__module__ == "cupy"
    for convert in (np.asarray, np.array, lambda x: np.float32(1) * np.asarray(x), lambda x: np.zeros(6).__iadd__(x)):
        with pytest.raises(TypeError):
            convert(a)
    for mixed in (lambda: a + np.ones(6, np.float32), lambda: np.ones(6) * a, lambda: a.__setitem__(..., np.ones(6))):
        with pytest.raises(TypeError, match="Unsupported type"):
            mixed()
    with pytest.raises(TypeError, match="no implementation found"):
        np.linalg.norm(a)
    assert (a * np.float32(2) + 1).get().tolist() == [1, 3, 5, 7, 9, 11]


def test_memory_begins_at_an_alignment_and_views_share_it():
    a = cupy.empty((3, 5), BF16)
    assert a.data.ptr % ALIGNMENT == 0 and (a.get().view(np.uint8) == UNWRITTEN).all()
    assert a[1].data.ptr == a.data.ptr + 10 and a[1, 2].data.ptr == a.data.ptr + 14
    a[1, 2].fill(7)
    assert float(a.reshape(-1)[7]) == 7 and a.T.data.ptr == a.data.ptr and not a.T.flags.c_contiguous
    assert cupy.ascontiguousarray(a.T).data.ptr != a.data.ptr
    assert np.moveaxis(a, 0, -1).data.ptr == a.data.ptr
    assert cupy.zeros(0).data.ptr == 0
    fortran = cupy.asarray(np.asfortranarray(np.arange(6).reshape(2, 3)))
    assert fortran.flags.f_contiguous and fortran.get().tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- kernels ----


def amax_of(ptr: int, count: int, whole: bool = True) -> float:
    """Return the amax of `count` float32 values at the address `ptr`, computed by a kernel on the simulated GPU."""
    out = cupy.zeros((), np.float32)
    traits = (np.dtype(np.float32), "AmaxInput::all", whole)
    launch.prepared("amax", 1, (1, count), 0, traits, matrix.transform_struct(None))(ptr, out.data.ptr)
    return float(out)


def test_a_kernel_that_reads_outside_of_an_array_is_stopped():
    x = cupy.ones(UNIT // 4, np.float32)
    for ptr, count in ((x.data.ptr, x.size + 1), (x.data.ptr - PAGE, 4), (0, 4)):
        with pytest.raises(AssertionError, match="is outside of every array"):
            amax_of(ptr, count, False)
        assert amax_of(x.data.ptr, x.size) == 1


def test_a_kernel_that_is_told_the_wrong_alignment_is_stopped():
    x = cupy.ones(65, np.float32)[1:]
    with pytest.raises(AssertionError, match="misaligned address"):
        amax_of(x.data.ptr, x.size)
    assert amax_of(x.data.ptr, x.size, False) == 1


def test_what_is_written_behind_an_array_is_seen():
    codes, packed = cupy.ones(64, np.uint8), cupy.zeros(31, np.uint8)
    with pytest.raises(AssertionError, match="wrote behind the end of an array"):
        launch.prepared("pack_codes", 1, (32,), 0, (True,))(codes.data.ptr, packed.data.ptr)
    del packed
    check_around_all()


# ---- devices ----


# Architectures with rows of their own. Rows for sm_80 are made up where there are none.
ARCHITECTURES = sorted({"sm_80", *(kernel.split()[1] for kernel in launch.LAUNCHES if " " in kernel)})


def on(architecture):
    """Return a context in which the simulated devices have an architecture such as "sm_80"."""
    return of_capability(*divmod(int(architecture[3:]), 10))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sm_99"])
def test_launches_follow_their_rows(architecture):
    """Check the threads for which kernels are compiled, those of their launches, and the numbers of thread blocks."""
    rows, launched = {}, []

    def record(source, kernel, device):
        threads = re.findall(r"#define FP4KIT_THREADS (\d+)", source) or [launch.THREADS]
        return lambda grid, block, *rest, **options: launched.append((kernel, int(threads[0]), *block, *grid))

    engines._CALLS.clear()
    with cupy.installed(), on(architecture), other_rows("sm_80"), launching_on(record, cupy):
        for kernel, row in launch.LAUNCHES.items():
            if " " not in kernel:
                row = launch.LAUNCHES.get(f"{kernel} {architecture}", row)
                rows.setdefault(row.entry or kernel, []).append(row)
        with patch.object(cupy, "rehearsing", True):
            for call in KINDS:
                call.run(cupy.asarray)
    engines._CALLS.clear()
    seen = set()
    for kernel, compiled, threads, blocks in launched:
        name = kernel.removesuffix("_kernel").removeprefix("grouped_")
        if name in rows:
            seen.add(name)
            assert compiled == threads and threads in {row.threads for row in rows[name]}, kernel
            # The simulated device has two multiprocessors. Other limits hold for groups, and for search_hessian, which
            # needs one thread block per Hessian.
            if not kernel.startswith(("grouped", "search_hessian")):
                assert blocks <= 2 * max(row.limit for row in rows[name]), kernel
    assert seen == set(rows)


# Calls that launch kernels whose number of threads may change.
CHANGING = "amax dequantize_without_amax partial master_weights fake_quantize_backward requantize swizzle pack"
CHANGING += " search_scales fake_quantize_grouped_backward amax_grouped"
CALLS = [call for call in KINDS if call.recipe.search or call.make.__name__ in CHANGING.split()]


@pytest.mark.parametrize("call", every(6, CALLS), ids=lambda call: call.make.__name__)
def test_results_are_equal_with_the_rows_of_another_architecture(call):
    expected = call.run()
    for architecture in ARCHITECTURES:
        with on(architecture), other_rows("sm_80"):
            assert cupy.cuda.Device().compute_capability == architecture[3:]
            found = call.run(cupy.asarray)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a.get() if isinstance(a, cupy.ndarray) else np.asarray(a), np.asarray(b))


def test_results_are_where_x_is_whatever_device_is_current():
    x = ordinary(1, (64, 64))
    with cupy.cuda.Device(1):
        there = cupy.asarray(x)
    q = fp4kit.quantize(there, "nvfp4-te")
    values = [
        fp4kit.dequantize(q),
        fp4kit.fake_quantize(there, "nvfp4-te"),
        fp4kit.fake_quantize(there, "mxfp4-modelopt-fake"),
    ]
    values += [
        fp4kit.amax(there),
        fp4kit.amax(there, axis=0),
        fp4kit.transpose(fp4kit.quantize(there, "nvfp4-te-2d")).packed,
    ]
    values += [fp4kit.swizzle(q, "swizzled_128x4").block_scale, fp4kit.unpack(q.packed)]
    values += fp4kit.fake_quantize_grouped([there, there[:32]], "nvfp4-te")
    assert {a.device.id for a in (*values, q.packed, q.block_scale, q.tensor_scale, q.tensor_amax)} == {1}
    assert_same_bits(q.packed.get(), fp4kit.quantize(x, "nvfp4-te").packed)
    assert cupy.cuda.Device().id == 0


def test_arrays_of_two_devices_are_refused():
    x = cupy.ones((2, 32), np.float32)
    with cupy.cuda.Device(1):
        amax = cupy.ones((), np.float32)
    with pytest.raises(
        ValueError, match="quantize: x is on cuda:0, tensor_amax on cuda:1; all arrays of one call must"
    ):
        fp4kit.quantize(x, "nvfp4-te", tensor_amax=amax)


class Exporter:
    """A device tensor of another library, not of CuPy, which exports itself through DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


def test_arrays_of_other_libraries_on_the_device():
    x = ordinary(2, (4, 64), BF16)
    q = fp4kit.quantize(Exporter(cupy.asarray(x)), "mxfp4-ocp")
    assert isinstance(q.packed, cupy.ndarray)
    assert_same_bits(q.packed.get(), fp4kit.quantize(x, "mxfp4-ocp").packed)


def test_a_matrix_that_is_too_large_for_a_kernel():
    launch.check_count(1 << 33)
    with pytest.raises(ValueError, match=r"a kernel takes at most 8589934592 \(2\^33\); split the first axis"):
        launch.check_count((1 << 33) + 1)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-2d", "nvfp4-te-4over6-mse-256", "mxfp8-te", "fp8-modelopt"])
def test_a_row_that_is_too_long_for_a_kernel(monkeypatch, recipe):
    """Check that a row of 2^32 elements is rejected if the recipe has blocks.

    Without blocks, all elements are one row, and kernels number elements with 64 bits.
    """
    monkeypatch.setattr(matrix, "function_of", lambda *arguments, **threads: None)
    for columns in (1 << 32, (1 << 32) - 32, 1 << 12):
        work = LaunchRequest(fp4kit.recipe(recipe), BF16, (2, columns))
        refused = pytest.raises(ValueError, match=r"a row has 4294967296 elements; .* at most 2\^32 - 1; reshape x")
        with refused if columns == 1 << 32 and work.recipe.block else nullcontext():
            matrix.quantize_launch.__wrapped__(kernel_for(work), work, True, 0)
