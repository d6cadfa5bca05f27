"""What the tests on a GPU share: importing this skips a module where CuPy is missing; ON_GPU is its pytestmark."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
try:
    DEVICES = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    DEVICES = 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device")]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def differing(gpu, cpu) -> int:
    """Values that differ in any bit; NaN equals NaN."""
    a, b = np.ascontiguousarray(gpu.get()), np.ascontiguousarray(cpu)
    assert a.shape == b.shape and a.dtype == b.dtype
    bits = a.view(UNSIGNED[a.dtype.itemsize]) != b.view(UNSIGNED[a.dtype.itemsize])
    if a.dtype != np.uint8:
        bits &= ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
    return int(np.count_nonzero(bits))


def assert_same(gpu: fp4kit.Quantized, cpu: fp4kit.Quantized) -> None:
    """Every part of two quantized arrays."""
    for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
        a, b = getattr(gpu, part), getattr(cpu, part)
        assert (a is None) == (b is None), part
        if a is not None:
            assert differing(a, b) == 0, part
    assert (gpu.shape, gpu.dtype, gpu.axis, gpu.scale_layout) == (cpu.shape, cpu.dtype, cpu.axis, cpu.scale_layout)


def check(x: np.ndarray, name, **options) -> fp4kit.Quantized:
    """quantize and dequantize of x on both sides."""
    on_host = {k: v.get() if isinstance(v, cupy.ndarray) else v for k, v in options.items()}
    cpu = fp4kit.quantize(x, name, **on_host)
    gpu = fp4kit.quantize(cupy.asarray(x), name, **options)
    assert_same(gpu, cpu)
    assert differing(fp4kit.dequantize(gpu), fp4kit.dequantize(cpu)) == 0
    return gpu


def blocks(dtype, rows: int = 64, columns: int = 512) -> np.ndarray:
    return np.resize(adversarial_blocks(dtype), (rows, columns))
