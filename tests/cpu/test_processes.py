"""Test the engine's threads over forks, Ctrl-C during long calls, and the memory that calls take temporarily."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, assert_equal
from exhaustive import exhaustive
from inputs import ordinary

import fp4kit
from fp4kit.cpu import cached_calls, codec, engine
from fp4kit.cpu import library as native
from fp4kit.ops import engines as call_cache

pytestmark = NEEDS_ENGINE


def large(seed=0):
    """Return an array with enough elements for several threads."""
    return ordinary(seed, (256, 4096))


# ---- processes ----


def in_child(seed):
    """Quantize a large array on three threads, and return the bytes of the result. Child processes call this."""
    with fp4kit.threads(3):
        q = fp4kit.quantize(large(seed=seed), "nvfp4-te")
        return q.packed.tobytes() + q.block_scale.tobytes()


FORK = """
import os, sys, warnings
import numpy as np, fp4kit
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
x = np.random.default_rng(0).standard_normal((512, 4096), np.float32)
fp4kit.set_num_threads(3)
expected = fp4kit.quantize(x, "nvfp4-te").packed.tobytes()
TASKS = "/proc/self/task"  # a folder for each thread, on Linux
def right():
    found = fp4kit.quantize(x, "nvfp4-te").packed.tobytes() == expected
    return found and (not os.path.isdir(TASKS) or len(os.listdir(TASKS)) == 3)
for _ in range(3):
    child = os.fork()
    if not child:
        found = right()
        grandchild = os.fork()
        if not grandchild:
            os._exit(0 if right() else 1)
        os._exit(0 if found and os.waitpid(grandchild, 0)[1] == 0 else 1)
    print(os.waitpid(child, 0)[1])
    assert fp4kit.quantize(x, "nvfp4-te").packed.tobytes() == expected
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own():
    """After a fork, child, grandchild and parent all compute on several threads.

    A fork does not copy the parent's threads.
    """
    found = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["0"] * 3, found.stderr


UNDER_LOAD = """
import multiprocessing, os, signal, sys, threading, time, warnings
import numpy as np, fp4kit
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
fp4kit.set_num_threads(2)
RECIPES = ("nvfp4-te", "mxfp4-ocp", "nvfp4-te-4over6-mae-256", "mxfp8-te", "int8-modelopt-channel", "nvfp4-modelopt-fake")
lengths = iter(range(1, 1 << 30))
expected = {}
def compute(rows, name):
    x = np.full((rows % 500 + 1, 64), 3, np.float32)
    fp4kit.formats.ElementFormat("E4M3", 4, 3, 7, "nan").midpoints
    found = [fp4kit.fake_quantize(x, name)]
    if name != "nvfp4-modelopt-fake":
        q = fp4kit.quantize(x, name)
        found += [q.packed, fp4kit.dequantize(q)]
        str(q)
    return [a.tobytes() for a in found]
def child():
    for i, name in enumerate(RECIPES):
        if compute(i, name) != expected[name]:
            os._exit(1)
    os._exit(0)
class Forked:
    def __init__(self):
        self.pid, self.exitcode = os.fork() or child(), None
    def join(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.exitcode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.exitcode = os.waitstatus_to_exitcode(status) if found else None
            time.sleep(0.01)
def started():
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process
def slowly(start):
    time.sleep(0.005)  # the threads go on
    return start()
for i, name in enumerate(RECIPES):
    expected[name] = compute(i, name)
def go_on():
    while running:
        for name in RECIPES:  # shapes that were not seen before have no cached call
            compute(next(lengths), name)
running = True
threads = [threading.Thread(target=go_on, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
children = [slowly(Forked if i % 2 else started) for i in range(20)]
deadline = time.monotonic() + 20
for one in children:
    one.join(max(0.1, deadline - time.monotonic()))
    if one.exitcode is None:
        os.kill(one.pid, signal.SIGKILL)
running = False
for thread in threads:
    thread.join()
print(*(one.exitcode for one in children))
"""  # noqa: E501


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_is_forked_while_threads_compute():
    """A process that is forked during a call can compute.

    If a lock were held over the fork, the child would wait forever.
    """
    found = subprocess.run([sys.executable, "-c", UNDER_LOAD], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["0"] * 20, found.stderr


IMPORTS = """
import sys
import numpy as np, fp4kit
before = set(sys.modules)
x = np.ones((32, 128), np.float32)
for name in fp4kit.recipes():
    fp4kit.fake_quantize(x, name)
for name in ("nvfp4-te-2d", "nvfp4-te", "mxfp4-flashinfer"):
    q = fp4kit.quantize(x, name, rounding="stochastic", seed=1)
    str(q), repr(q), q._repr_html_(), q[16:], q.equals(q), q.dequantize(), q.to("numpy")
fp4kit.transpose(fp4kit.quantize(x, "nvfp4-te-2d"))
fp4kit.search_scales(x, "nvfp4-modelopt-static")
print(*set(sys.modules) - before)
"""


def test_calls_import_nothing():
    """Calls import no module.

    A process that is forked while another thread imports a module would wait forever in its own import of that module.
    """
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert (found.stdout.split(), found.stderr) == ([], "")


@pytest.mark.parametrize("method", ["spawn", *exhaustive(["forkserver"])])
def test_processes_of_multiprocessing(method):
    expected = in_child(4)
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply_async(in_child, (4,)).get(120) == expected


# ---- Ctrl-C ----


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise KeyboardInterrupt, which a shell may have disabled for tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("function", ["quantize", "dequantize", "amax", "fake_quantize", "search_scales"])
def test_an_interrupt_ends_a_long_call(function, monkeypatch, interruptible):
    """Ctrl-C ends a long call between two calls of the library, and the next call of fp4kit works."""
    x = large()
    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=4.0)
    call = {
        "quantize": partial(fp4kit.quantize, x, "nvfp4-te", tensor_amax=4.0),
        "dequantize": partial(fp4kit.dequantize, q),
        "amax": partial(fp4kit.amax, x),
        "fake_quantize": partial(fp4kit.fake_quantize, x, "nvfp4-te"),
        "search_scales": partial(fp4kit.search_scales, x, "nvfp4-modelopt-static", tensor_amax=4.0),
    }[function]
    expected = call()
    with monkeypatch.context() as patch:
        for module in (codec, cached_calls, native):
            patch.setattr(module, "ELEMENTS_PER_CALL", 1 << 10)
        patch.setattr(engine, "FAKE_ELEMENTS", 1 << 12)
        patch.setattr(call_cache, "_CALLS", {})
        calls = interrupted_at(patch, 20)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert len(calls) <= 22  # of a thousand calls
    assert_equal(call(), expected)


def interrupted_at(patch, number):
    """Make fp4kit use a library that sends SIGINT to this process in its call number `number`, counted from 1.

    Return a list to which the name of each called function is appended. patch: pytest's MonkeyPatch.
    """
    functions, level, _ = native.library()
    calls = []

    class Interrupting:
        def __getattr__(self, name):
            right = getattr(functions, name)

            def call(*arguments):
                calls.append(name)
                if len(calls) == number:
                    os.kill(os.getpid(), signal.SIGINT)
                return right(*arguments)

            return call

    library = native.CompiledLibrary(Interrupting(), level)
    patch.setattr(native, "library", lambda: library)
    return calls


ENDLESS = """
import signal
import numpy as np, fp4kit
signal.signal(signal.SIGINT, signal.default_int_handler)
x = np.ones((4096, 4096), np.float32)
print("ready", flush=True)
while True:
    fp4kit.quantize(x, "nvfp4-te")
"""


def test_an_interrupt_from_outside():
    """A process that calls fp4kit in an endless loop ends at Ctrl-C from outside."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors


# ---- memory ----

SIZE = 256 << 20  # bytes of the input


@pytest.mark.parametrize(
    "name", ["nvfp4-te", *exhaustive(["nvfp4-te-2d", "mxfp4-flashinfer", "int8-modelopt-channel"])]
)
@pytest.mark.parametrize("kind", ["whole", *exhaustive(["transposed"])])
def test_temporaries_are_small(name, kind):
    """A call on a large array allocates at most 64 MiB beside its result.

    kind: "whole" for a contiguous array, "transposed" for a transposed view.
    """
    x = np.broadcast_to(ordinary(0, (1, 4096)), (SIZE // 4 // 4096, 4096)).copy()
    x = x.T if kind == "transposed" else x
    q = fp4kit.quantize(x, name)
    for call in (
        partial(fp4kit.quantize, x, name),
        partial(fp4kit.dequantize, q),
        partial(fp4kit.fake_quantize, x, name),
        partial(fp4kit.amax, x),
    ):
        assert temporaries(call) <= 64 << 20, call.func.__name__


def temporaries(call):
    """Return the peak number of bytes that a call allocates beside its result."""
    tracemalloc.start()
    try:
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak - result.nbytes


def test_memory_is_counted():
    assert temporaries(lambda: np.concatenate([np.zeros(1 << 20, np.uint8)])) >= 1 << 20
