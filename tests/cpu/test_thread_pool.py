"""Test the threads of the compiled engine: any number of them gives equal bytes.

This holds for calls from many Python threads and in any arithmetic mode.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, assert_equal
from exhaustive import exhaustive, half
from float_modes import BITS, NEEDS_ENVIRONMENT, WORD, mode, tiny
from inputs import BF16, ordinary

import fp4kit
from fp4kit.cpu import cached_calls, codec, library
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


@pytest.mark.parametrize(
    "name", [*FEW, *exhaustive(name for name, r in RECIPES.items() if not r.fake_only and name not in FEW)]
)
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
@pytest.mark.parametrize("changed", BITS)
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
