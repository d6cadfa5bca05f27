"""Test the compiled engine in threads and processes: results, modes, errors, forks, memory and interruptions."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, assert_equal
from exhaustive import exhaustive, half
from float_modes import BITS, NEEDS_ENVIRONMENT, WORD, mode, tiny
from inputs import BF16, NAMES, ordinary

import fp4kit
from fp4kit.cpu import cached_calls, codec, engine, library
from fp4kit.cpu import library as native
from fp4kit.ops import engines as call_cache
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
MANY = 1 << 20  # enough elements for several threads
FEW = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "int8-modelopt-channel")


@pytest.fixture
def default_threads(monkeypatch):
    """Set the process's default number of threads to 3 for one test, which may change it. Then restore the default."""
    monkeypatch.setattr(library, "_default", [3])


def large(dtype=np.float32, seed=0):
    return ordinary(seed, (MANY // 4096, 4096), dtype)


# ---- numbers ----


@pytest.mark.parametrize("name", [*FEW, *exhaustive(name for name in NAMES if name not in FEW)])
def test_any_number_of_threads_gives_the_same_bytes(name):
    x = large(BF16)
    expected = agree(fp4kit.quantize, x, name)
    values = agree(fp4kit.dequantize, expected)
    for count in (1, 2, 5, 64):
        with fp4kit.threads(count):
            for _ in range(2):
                q = fp4kit.quantize(x, name)
                assert_equal(q, expected)
                assert_equal(fp4kit.dequantize(q), values)


def test_numbers_of_threads(default_threads):
    assert fp4kit.num_threads() == 3
    with fp4kit.threads(2):
        assert fp4kit.num_threads() == 2
        with fp4kit.threads(7):
            assert fp4kit.num_threads() == 7
        fp4kit.set_num_threads(5)
        assert fp4kit.num_threads() == 2
    assert fp4kit.num_threads() == 5
    fp4kit.set_num_threads(np.int64(4))
    assert fp4kit.num_threads() == 4 and library.threads_for(1) == 1
    assert library.threads_for(1 << 40) == library.threads_for(1 << 40, True) == 4
    assert library.threads_for(1 << 18) == 4
    assert library.threads_for(1 << 18, True) == 1 and library.threads_for(1 << 19, True) == 2


def seen_threads(monkeypatch):
    """Return a list that collects the number of threads of every library call from now on."""
    seen, right = [], library.threads_for
    for module in (codec, codec, cached_calls):
        monkeypatch.setattr(
            module, "threads_for", lambda *facts, **more: (seen.append(right(*facts, **more)), seen[-1])[1]
        )
    return seen


def test_threads_of_one_call(default_threads, monkeypatch):
    """`threads=` applies to one call, first or repeated. Before and after that call, the default applies."""
    monkeypatch.setattr(library, "QUICK_FACTOR", 1)
    x, seen = large(), seen_threads(monkeypatch)
    q = fp4kit.quantize(x, "mxfp4-ocp")
    calls = {
        "quantize": lambda **given: fp4kit.quantize(x, "mxfp4-ocp", **given),
        "dequantize": lambda **given: fp4kit.dequantize(q, **given),
        "fake_quantize": lambda **given: fp4kit.fake_quantize(x, "mxfp4-ocp", **given),
        "amax": lambda **given: fp4kit.amax(x, "mxfp4-ocp", **given),
        "quantize_both": lambda **given: fp4kit.quantize_both(x, "mxfp4-ocp", **given),
        "quantize_grouped": lambda **given: fp4kit.quantize_grouped([x], "mxfp4-ocp", **given),
    }
    for name, call in calls.items():
        for count in (2, 5, None, 1):
            for _ in range(2):
                seen.clear()
                call(threads=count)
                assert set(seen) == {count or 3}, (name, count)
            with fp4kit.threads(4):
                call(threads=count)
                assert seen[-1] == (count or 4), name
        with pytest.raises(ValueError, match=f"^{name}: threads is 0; needs 1 or more$"):
            call(threads=0)


def test_threads_of_one_python_thread_are_not_those_of_another(default_threads):
    seen = []
    with fp4kit.threads(2):
        thread = threading.Thread(target=lambda: seen.append(fp4kit.num_threads()))
        thread.start()
        thread.join()
    assert seen == [3]


@pytest.mark.parametrize("function, name", [(fp4kit.set_num_threads, "set_num_threads"), (fp4kit.threads, "threads")])
@pytest.mark.parametrize(
    "count, error, text",
    [
        (0, ValueError, "threads is 0; needs 1 or more"),
        (-1, ValueError, "threads is -1; needs 1 or more"),
        ("2", TypeError, "threads is '2'; needs an int"),
        (1.5, TypeError, "threads is 1.5; needs an int"),
        (None, TypeError, "threads is None; needs an int"),
    ],
)
def test_invalid_numbers_are_rejected(function, name, count, error, text, default_threads):
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {text}')}$"):
        with function(count):
            pass
    assert fp4kit.num_threads() == 3


DEFAULT = "import fp4kit, os; print(fp4kit.num_threads(), len(os.sched_getaffinity(0)))"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
@pytest.mark.parametrize("asked", half(["3", "1", "5,2", "0", "many", ""]))
def test_the_default_number(asked):
    expected = {"1": 1, "3": 3, "5,2": 5}.get(asked)
    environment = os.environ | {"OMP_NUM_THREADS": asked}
    found = subprocess.run([sys.executable, "-c", DEFAULT], env=environment, capture_output=True, text=True, check=True)
    threads, processors = map(int, found.stdout.split())
    assert threads == (processors if expected is None else expected)


# ---- many Python threads ----


def test_many_python_threads_at_once():
    names = [*FEW, "nvfp4-te-2d", "fp8-modelopt"]
    xs = [large(BF16 if i % 2 else np.float32, i) for i in range(6)]

    def work(i):
        with fp4kit.threads(1 + i % 4):
            q = fp4kit.quantize(xs[i], names[i])
            return q, fp4kit.dequantize(q), fp4kit.amax(xs[i])

    with fp4kit.specification():
        expected = [
            (q := fp4kit.quantize(x, n), fp4kit.dequantize(q), fp4kit.amax(x)) for x, n in zip(xs, names, strict=True)
        ]
    with ThreadPoolExecutor(8) as pool:
        for i, found in enumerate(pool.map(work, list(range(6)) * 4)):
            assert_equal(found, expected[i % 6], names[i % 6])


# ---- subnormals that are flushed ----


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", half(BITS))
def test_modes_of_the_calling_thread(changed):
    """Results do not depend on the arithmetic mode of the calling thread.

    The pool's threads may have been started before or in this mode.
    """
    x = np.tile(tiny(np.dtype(np.float32)), (64, 4))
    for name in FEW:
        given = {"tensor_amax": 2e-39} if RECIPES[name].tensor_scaling == "tensor" else {}
        with fp4kit.specification():
            q = fp4kit.quantize(x, name, **given)
            values = fp4kit.dequantize(q, np.float32)
        for count in (1, 2, 9):
            with fp4kit.threads(count), mode(changed):
                found = [(fp4kit.quantize(x, name, **given), fp4kit.dequantize(q, np.float32)) for _ in range(2)]
            for pair in found:
                assert_equal(pair, (q, values), f"{name} {changed} {count}")


POOL_IN_A_MODE = """
import ctypes, sys
import numpy as np, fp4kit
x = np.tile((np.arange(1, 1025, dtype=np.uint32) * 977).view(np.float32), (512, 4))
library = ctypes.PyDLL(None)
before, environment = (ctypes.c_uint32 * 64)(), (ctypes.c_uint32 * 64)()
library.fegetenv(environment), library.fegetenv(before)
environment[{word}] |= {bits}
library.fesetenv(environment)
with fp4kit.threads(4):  # its threads begin here
    q = fp4kit.quantize(x, "mxfp4-ocp")
    y = fp4kit.dequantize(q)
library.fesetenv(before)
with fp4kit.threads(4):
    again = fp4kit.quantize(x, "mxfp4-ocp")
with fp4kit.specification():
    expected = fp4kit.quantize(x, "mxfp4-ocp")
    assert (y.view(np.uint32) == fp4kit.dequantize(expected).view(np.uint32)).all()
assert q.equals(expected) and again.equals(expected)
"""


@NEEDS_ENVIRONMENT
@pytest.mark.skipif("both" not in BITS, reason="no such mode here")
def test_a_pool_that_begins_in_a_wrong_mode():
    code = POOL_IN_A_MODE.format(word=WORD, bits=BITS["both"])
    found = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_torch_that_flushes_subnormals():
    torch = pytest.importorskip("torch")
    x = np.tile(tiny(np.dtype(np.float32)), (64, 4))
    with fp4kit.specification():
        expected = fp4kit.quantize(x, "mxfp4-ocp")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor's mode cannot be set")
    try:
        with fp4kit.threads(4):
            found = [fp4kit.quantize(x, "mxfp4-ocp") for _ in range(2)]
    finally:
        torch.set_flush_denormal(False)
    for q in found:
        assert_equal(q, expected)


def large_array(seed=0):
    """Return an array with enough elements for several threads."""
    return ordinary(seed, (256, 4096))


# ---- processes ----


def in_child(seed):
    """Quantize a large array on three threads, and return the bytes of the result. Child processes call this."""
    with fp4kit.threads(3):
        q = fp4kit.quantize(large_array(seed=seed), "nvfp4-te")
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
for r in map(fp4kit.recipe, fp4kit.recipes()):
    seed = np.zeros_like(x) if "comfyui" in r.stochastic else 1  # an int of ComfyUI imports numpy.random
    fp4kit.fake_quantize(x, r, **{"rounding": "stochastic", "seed": seed} if r.stochastic_only else {})
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
    x = large_array()
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
