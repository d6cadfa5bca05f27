"""Test threads that flush subnormals or round otherwise: usual bits; and that no function gives a NumPy warning."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from everything import everything
from exhaustive import by_default, every, half
from float_modes import BITS, NEEDS_ENVIRONMENT, WORD, mode, tiny, words
from inputs import BF16, nonfinite, ordinary

import fp4kit
from fp4kit import arithmetic
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.formats import E8M0
from fp4kit.recipes import RECIPES

F32 = np.dtype(np.float32)
DTYPES = {"f32": F32, "bf16": BF16, "f16": np.dtype(np.float16)}
# Exception flags that fp4kit may set when it checks the mode: inexact, underflow and subnormal operand. The keys are
# indices of words in the floating-point environment, and the values are the flags' bits in these words.
SET_BY_CHECK = {"x86_64": {7: 0x32}, "aarch64": {1: 0x98}}.get(platform.machine(), {})
FLUSHING = [mode for mode in ("ftz", "daz", "both") if mode in BITS]


def kept(environment: ctypes.Array) -> list[int]:
    """Return the words of a floating-point environment without the flags that fp4kit's check of the mode may set.

    A call must leave these words unchanged.
    """
    return [word & ~SET_BY_CHECK.get(i, 0) for i, word in enumerate(environment)]


X = {name: tiny(dtype) for name, dtype in DTYPES.items()}


def assert_same(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", every(8, RECIPES))
def test_every_recipe_in_every_mode(name, dtype):
    expected = list(everything(name, X[dtype]))
    for changed in BITS:
        with mode(changed):
            found = list(everything(name, X[dtype]))
        assert_same(found, expected)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-compressed-tensors", "mxfp4-ocp", "int8-modelopt-channel"])
@pytest.mark.parametrize("changed", BITS)
def test_operations_that_read_quantized_arrays(name, changed):
    """In a changed mode, compare, identify and requantize give their usual results.

    They are tested apart from quantize, because they have float arithmetic of their own.
    """
    q = fp4kit.quantize(X["f32"][:16], name)
    other = replace(q, packed=q.packed ^ np.uint8(1))

    def results():
        comparison = fp4kit.compare(q, other)
        arrays = fp4kit.compare(X["f32"], np.zeros_like(X["f32"]))
        wide = fp4kit.compare(np.array([5e-324, 1e-310]), np.zeros(2))
        found = [str(comparison), str(arrays), arrays, wide, fp4kit.identify(q, X["f32"][:16])]
        return found, fp4kit.requantize(q, "nvfp4-torchao")

    expected, requantized = results()
    with mode(changed):
        found, again = results()
    assert found == expected
    assert_same_bits(again.quantized, requantized.quantized)
    assert (again.exact, again.changed) == (requantized.exact, requantized.changed)


@NEEDS_ENVIRONMENT
def test_modes_of_these_tests_change_results():
    """The modes that these tests set change results of NumPy, and fp4kit notices them; otherwise no test could fail."""
    x = np.full(64, 3e-39, np.float32)
    half, one = np.float32(0.5), np.float32(1)
    for changed in FLUSHING:
        with mode(changed):
            flushed, seen = not (x * half).view(np.uint32).any(), arithmetic.is_ieee()
        assert flushed and not seen, changed
    for changed in ("up", "down", "zero"):
        with mode(changed):
            seen = arithmetic.is_ieee()
        assert not seen, changed
    assert arithmetic.is_ieee() and (one + half) == 1.5


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", BITS)
def test_the_callers_environment_comes_back(changed):
    """A call restores the caller's mode and exception flags, also after an error.

    Inside the call, NumPy works in the usual mode.
    """

    @arithmetic.ieee("test")
    def work(fail):
        inside = arithmetic.is_ieee()
        with np.errstate(all="raise"), pytest.raises(FloatingPointError):
            np.float32(3e38) * np.float32(10)
        if fail:
            raise KeyError("lost")
        return inside, np.full(100, 1e-30, np.float32) * np.float32(1e-10)

    with mode(changed):
        before = kept(words())
        inside, product = work(False)
        after = kept(words())
        with pytest.raises(KeyError, match="lost"):
            work(True)
        last = kept(words())
    assert inside and product.all()
    assert before == after == last  # the overflow inside leaves no flag


def test_the_environment_is_left_alone_where_it_is_right(monkeypatch):
    def fail(op):
        raise AssertionError(op)

    monkeypatch.setattr(arithmetic, "default_environment", fail)
    fp4kit.quantize(X["f32"], "nvfp4-te")


@NEEDS_ENVIRONMENT
def test_where_it_cannot_be_set_it_is_refused(monkeypatch):
    text = (
        r"^quantize: this thread treats subnormal numbers as zero, or does not round to nearest; .* set on"
        rf" {sys.platform} "
        rf"{platform.machine()}; call torch\.set_flush_denormal\(False\) first, or call fp4kit in a thread"
    )
    with mode("both"):
        with monkeypatch.context() as patch:
            patch.setattr(arithmetic, "environment", lambda: None)
            with pytest.raises(RuntimeError, match=text):
                fp4kit.quantize(X["f32"], "nvfp4-te")


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("win32", "AMD64"), ("linux", "riscv64")])
def test_other_platforms(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert arithmetic.environment.__wrapped__() is None


@NEEDS_ENVIRONMENT
def test_tables_are_right_in_any_mode_at_first_use():
    """Tables of values are computed at first use, and must be right even if that thread flushes subnormals.

    The smallest value of E8M0, 2^-127, is subnormal.
    """
    with mode("both"):
        values = replace(E8M0, name="new").values.view(np.uint32).copy()
    assert values[0] == 0x00400000
    assert_same_bits(values.view(np.float32), E8M0.values)


IMPORTED_FIRST = """
import sys, ctypes
import numpy as np
library = ctypes.PyDLL(None)
environment = (ctypes.c_uint32 * 64)()
library.fegetenv(environment)
environment[{word}] |= {bits}
library.fesetenv(environment)
import fp4kit
x = (np.arange(1, 1025, dtype=np.uint32) * 977).view(np.float32).reshape(8, 128)
for name in ("mxfp4-ocp", "nvfp4-te", "mxfp8-te", "nvfp4-flashinfer"):
    q = fp4kit.quantize(x, name)
    y = fp4kit.dequantize(q)
    print(q.packed.tobytes().hex(), q.block_scale.tobytes().hex(), y.tobytes().hex())
"""


@NEEDS_ENVIRONMENT
def test_imported_in_a_wrong_mode():
    def run(bits):
        code = IMPORTED_FIRST.format(word=WORD, bits=bits)
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
        ).stdout

    assert run(BITS["both"]) == run(0)


@NEEDS_ENVIRONMENT
def test_torch_flush_denormal():
    torch = pytest.importorskip("torch")
    expected = {
        name: list(everything(name, X["f32"])) for name in ("nvfp4-te", "mxfp4-ocp", "int4-qat", "nvfp4-modelopt-fake")
    }
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor's mode cannot be set")
    try:
        seen = arithmetic.is_ieee()
        found = {name: list(everything(name, X["f32"])) for name in expected}
        tensor = fp4kit.fake_quantize(torch.from_numpy(X["f32"]), "nvfp4-te")
        still = arithmetic.is_ieee()
    finally:
        torch.set_flush_denormal(False)
    assert not seen and not still
    for name, results in expected.items():
        assert_same(found[name], results)
    assert_same_bits(np.asarray(tensor), fp4kit.fake_quantize(X["f32"], "nvfp4-te"))


def test_callbacks_of_jax():
    """XLA's threads flush subnormals. fp4kit must compute its usual bits when XLA calls it in such a thread."""
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    modes = []

    def call(name):
        def on_host(x):
            modes.append(arithmetic.is_ieee())
            return fp4kit.fake_quantize(np.asarray(x), name)

        shape = jax.ShapeDtypeStruct(X["f32"].shape, np.float32)
        return jax.jit(lambda x: jax.pure_callback(on_host, shape, x))

    for name in ("nvfp4-te", "mxfp4-ocp", "int8-modelopt-channel", "nvfp4-modelopt-fake"):
        found = np.asarray(call(name)(jax.device_put(X["f32"], cpu)))
        assert_same_bits(found, fp4kit.fake_quantize(X["f32"], name))
    assert not all(modes)


def test_ml_dtypes_widening_needs_no_mode():
    """ml_dtypes widens narrow floats by table or by bit operations, so arrays are imported correctly in any mode."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = [codes.view(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.float16)]
    for changed in FLUSHING:
        with mode(changed):
            found = [codes.view(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.float16)]
        assert_same(found, expected)


WARNED = {"f32": np.dtype(np.float32), "bf16": BF16, "f16": np.dtype(np.float16)}


def bit_patterns(dtype: np.dtype) -> np.ndarray:
    """Return random bit patterns, including signaling NaN."""
    return np.random.default_rng(1).integers(0, 256, (32, 128 * dtype.itemsize), dtype=np.uint8).view(dtype)


def inputs(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return {name: array of shape (32, 128)}, from ordinary values to random bit patterns."""
    with np.errstate(all="ignore"):
        patterns = bit_patterns(dtype)
        finite = np.where(np.isfinite(patterns.astype(np.float32)), patterns, np.ones((), dtype))
        return {
            "adversarial": np.resize(adversarial_blocks(dtype), (32, 128)),
            "nonfinite": np.concatenate([nonfinite()[::8], nonfinite()[40:56]]).astype(dtype),
            "patterns": patterns,
            "finite patterns": finite,
            "largest": np.full((32, 128), ml_dtypes.finfo(dtype).max, dtype),
            "smallest": np.full((32, 128), 1, f"u{dtype.itemsize}").view(dtype),
        }


DATA = tuple(inputs(BF16))
INPUTS = {(kind, data): x for kind, dtype in WARNED.items() for data, x in inputs(dtype).items()}


@pytest.mark.parametrize("kind", WARNED)
@pytest.mark.parametrize("name", by_default(list(RECIPES)[::15], RECIPES))
def test_every_recipe(name, kind):
    for data in DATA:
        check(name, INPUTS[kind, data])


def check(name, x):
    """Assert that all functions give no warning on x, and the results that they give with warnings ignored."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(everything(name, x))
    with np.errstate(all="ignore"):
        expected = list(everything(name, x))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", half(["nvfp4-te", "mxfp8-te", "int8-modelopt", "nvfp4-compressed-tensors"]))
@pytest.mark.parametrize(("kind", "data"), INPUTS)
def test_identify(name, kind, data):
    x = INPUTS[kind, data]
    with np.errstate(all="raise"):
        assert fp4kit.identify(fp4kit.quantize(x, name), x).matches


def test_compare_of_float64():
    x = np.random.default_rng(2).integers(0, 256, (32, 64), dtype=np.uint8).view(np.float64)
    with np.errstate(all="raise"):
        result = fp4kit.compare(x, ordinary(shape=x.shape))
    assert result.values == (x.size, x.size)


def test_the_callers_settings_stay():
    with np.errstate(all="raise"):
        before = np.geterr()
        fp4kit.quantize(INPUTS["f32", "nonfinite"], "nvfp4-te")
        assert np.geterr() == before
        with pytest.raises(FloatingPointError):
            np.float32(3e38) * np.float32(10)
