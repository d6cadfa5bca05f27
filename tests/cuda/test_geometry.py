"""Test Launch: it launches a kernel by CuPy or by the driver, on the right device and stream, with the right
arguments.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from fp4kit.arrays import imports
from fp4kit.arrays.returns import TorchStream
from fp4kit.cuda import launch
from fp4kit.cuda.launch import Launch

FIELDS = np.dtype([("a", "u8"), ("size", "i8")])


class DriverError(Exception):
    """Stand in for the error that the driver raises in a thread without a context."""


@pytest.fixture
def log(monkeypatch):
    """Return a list that records each launch: by whom, where, and its arguments.

    If the list contains "broken", the driver raises an error.
    """
    calls = []

    def by_driver(function, *sizes_and_stream):
        *sizes, _, stream, parameters, extra = sizes_and_stream
        if "broken" in calls:
            raise DriverError
        address = ctypes.c_void_p.from_address(parameters).value
        calls.append(("driver", function, sizes, stream, ctypes.string_at(address, FIELDS.itemsize), extra))

    driver = SimpleNamespace(launchKernel=by_driver, CUDADriverError=DriverError)
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    return calls


class Function:
    """Stand in for a CuPy kernel, which can be launched by calling it or, through its pointer, by the driver."""

    def __init__(self, log, pointer=None):
        self._log = log
        if pointer is not None:
            self.kernel = SimpleNamespace(ptr=pointer)

    def __call__(self, grid, threads, arguments, stream=None):
        self._log.append(("cupy", grid, threads, stream, arguments[0].tobytes()))


def words(*values):
    return np.array(values, np.uint64).tobytes()


def test_without_a_stream_cupy_launches(log):
    Launch(Function(log, 99), 3, FIELDS, 7)(5)
    assert log == [("cupy", (3,), (256,), None, words(5, 7))]


def test_a_stream_is_where_the_driver_launches(log):
    launch = Launch(Function(log, 99), 3, FIELDS, 7, threads=64)
    for stream in (TorchStream(1234, 0), SimpleNamespace(ptr=0)):
        launch(5, stream=stream)
    assert log == [("driver", 99, [3, 1, 1, 64, 1, 1], ptr, words(5, 7), 0) for ptr in (1234, 0)]


def test_a_kernel_without_a_pointer_is_launched_on_the_stream(log):
    stream = TorchStream(1234, 0)
    Launch(Function(log), 3, FIELDS, 7)(5, stream=stream)
    assert log == [("cupy", (3,), (256,), stream, words(5, 7))]


def test_where_the_driver_refuses_cupy_launches_on_the_stream(log):
    log.append("broken")
    stream = TorchStream(1234, 0)
    Launch(Function(log, 99), 3, FIELDS, 7)(5, stream=stream)
    assert log[1:] == [("cupy", (3,), (256,), stream, words(5, 7))]


def test_a_prepared_launch_has_the_grid_and_threads_of_its_row(log, monkeypatch):
    monkeypatch.setattr(launch, "function_of", lambda *arguments: Function(log))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(launch, "architecture_of", lambda device: "sm_90")
    row = launch.LAUNCHES["search"]
    for work in (1 << 20, 600, 1):  # threads that have work
        traits = (None,) * len(row.traits.split())
        launch.prepared.__wrapped__("search", work, (1, 2, 3, 4), 0, traits)(5, 6, 7, 8, 9)
    arguments = (row.threads,), None, words(5, 6, 7, 8, 9, 1, 2, 3, 4)
    assert log == [("cupy", (blocks,), *arguments) for blocks in (3 * row.limit, 2, 1)]
    assert (row.limit, row.threads) == (2, 512)  # and two thread blocks in the launch bounds of search.cu
