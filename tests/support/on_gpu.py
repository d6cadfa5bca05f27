"""Provide helpers for tests on a GPU. Without a GPU, these tests run their kernels on the CPU (support/host/README.md).

ON_GPU is the pytestmark of their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings

import fp4kit
from fp4kit.evidence import testing
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.recipes import RECIPES

T = TypeVar("T")
try:
    import cupy

    DEVICES = cupy.cuda.runtime.getDeviceCount()
except (ImportError, RuntimeError):  # CuPy or its driver is missing
    DEVICES = 0
if not DEVICES:
    from host import cupy_on_host as cupy
ON_GPU = [pytest.mark.gpu] if DEVICES else [pytest.mark.usefixtures("played_gpu")]
# The recipes that usual runs without a GPU take: one per kind of kernel and of tensor scale.
REPRESENTATIVE = (
    *("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "nvfp4-te-4over6-mae-256", "nvfp4-te-4over6-mse-448-2d"),
    *("nvfp4-flashinfer", "nvfp4-modelopt-static", "mxfp4-ocp", "mxfp4-flashinfer", "mxfp6-torchao-floor-e2m3"),
    *("mxfp8-te", "mxfp8-te-e5m2-2d", "fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt-channel-narrow"),
    *("int4-modelopt", "int4-qat"),
    *("nvfp4-modelopt-fake", "nvfp4-modelopt-static-fake", "mxfp4-modelopt-fake", "mxfp4-microxcaling-even"),
)


def gpu_only(test: T) -> T:
    """Mark a test that is meaningless for kernels that run on the CPU. The test is skipped without a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(DEVICES == 0, reason="no CUDA device")(test))


def examples(count: int) -> settings:
    """Return Hypothesis settings with `count` examples on a GPU, and a fortieth of them on the CPU."""
    return settings(max_examples=count if DEVICES else count // 40)


def importable() -> AbstractContextManager[Any]:
    """Return a context in which `import cupy` gives CuPy. Without a GPU, it gives the module that simulates CuPy."""
    return nullcontext() if DEVICES else cupy.installed()


def all_or_few(values: Iterable[T], few: Sequence[T] = REPRESENTATIVE) -> list[Any]:
    """Return the values as parameters of a test.

    On a GPU, every run takes all values. On the CPU, only exhaustive runs take the values that are not in `few`.
    """
    rest = () if DEVICES else (pytest.mark.exhaustive,)
    return [value if value in few else pytest.param(value, marks=rest) for value in values]


def dtypes_of(name: str, dtypes: Sequence[T], few: Sequence[str] = REPRESENTATIVE) -> Sequence[T]:
    """Return the dtypes with which a test runs a recipe. Return all dtypes on a GPU, and for a recipe in `few`.

    On the CPU, where each dtype is compiled, the other recipes take one dtype each.
    """
    turn = [*RECIPES].index(name) % len(dtypes)
    return dtypes if DEVICES or name in few else dtypes[turn : turn + 1]


def differing(gpu, cpu) -> int:
    """Return the number of elements that differ in any bit between two arrays, on GPU and CPU.

    In arrays of floats, any NaN equals any other. In a rehearsal, in which no kernel runs, return 0.

    Raises:
        AssertionError: if shapes or dtypes differ.
    """
    if getattr(cupy, "rehearsing", False):
        return 0  # no kernel has run
    a, b = gpu.get(), np.asarray(cpu)
    assert a.shape == b.shape and a.dtype == b.dtype
    return int(np.count_nonzero(testing.differing(a, b)))


def assert_same(gpu: fp4kit.Quantized, cpu: fp4kit.Quantized) -> None:
    """Assert that two Quantized, on GPU and CPU, have bit-identical arrays and equal attributes except the recipe."""
    for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
        a, b = getattr(gpu, part), getattr(cpu, part)
        assert (a is None) == (b is None), part
        if a is not None:
            assert differing(a, b) == 0, part
    assert (gpu.shape, gpu.dtype, gpu.axis, gpu.scale_layout) == (cpu.shape, cpu.dtype, cpu.axis, cpu.scale_layout)


def there(value: Any) -> Any:
    """Return a copy on the GPU of an array or a Quantized, or of all in a list or tuple; any other value itself."""
    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    if isinstance(value, fp4kit.Quantized):
        return value.to("cupy")
    return type(value)(map(there, value)) if type(value) in (list, tuple) else value


def assert_equal(gpu: Any, cpu: Any) -> None:
    """Assert that results on GPU and CPU have equal bits: arrays, Quantized, or lists of them."""
    if isinstance(cpu, fp4kit.Quantized):
        assert_same(gpu, cpu)
    elif isinstance(cpu, (list, tuple)):
        for pair in zip(gpu, cpu, strict=True):
            assert_equal(*pair)
    else:
        assert differing(gpu, cpu) == 0


def agree(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Assert that a call gives equal bits for arrays on GPU and CPU, and return the GPU's result.

    The arguments are on the CPU.
    """
    gpu = function(*map(there, arguments), **{name: there(value) for name, value in options.items()})
    assert_equal(gpu, function(*arguments, **options))
    return gpu


def check(x: np.ndarray, name, **options) -> fp4kit.Quantized:
    """Assert that quantize and dequantize of x give the same bits on GPU and CPU; return the GPU's Quantized."""
    on_host = {k: v.get() if isinstance(v, cupy.ndarray) else v for k, v in options.items()}
    cpu = fp4kit.quantize(x, name, **on_host)
    gpu = fp4kit.quantize(cupy.asarray(x), name, **options)
    assert_same(gpu, cpu)
    assert differing(fp4kit.dequantize(gpu), fp4kit.dequantize(cpu)) == 0
    return gpu


def blocks(dtype, rows: int = 64, columns: int = 512) -> np.ndarray:
    """Return a matrix (rows, columns) of the values of adversarial_blocks, repeated or cut to this size."""
    return np.resize(adversarial_blocks(dtype), (rows, columns))
