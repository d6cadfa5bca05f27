"""Test on a GPU that CuPy and PyTorch arrays are collected to the bits of NumPy arrays."""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from on_gpu import DEVICES
from together import together

from fp4kit.calibration import Collector

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device")]
STACK = "mlp.experts.up_proj"
EXPERTS = 5


def inputs(dtype, columns=40):
    """Return 300 rows of inputs, whose magnitudes are from subnormal to nearly the largest of the dtype.

    Every seventh row is zero.
    """
    rng = np.random.default_rng(0)
    low, high = (-20, 12) if dtype == np.float16 else (-140, 120)
    x = np.ldexp(rng.standard_normal((300, columns)), rng.integers(low, high, (300, 1)))
    x[::7] = 0
    return x.astype(dtype)


def to_cupy(x):
    import cupy

    return cupy.asarray(x)


def to_torch(x):
    torch = pytest.importorskip("torch")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(x.copy()).cuda()


def contents(collector):
    """Return the bytes of the file that a Collector saves."""
    with tempfile.TemporaryDirectory() as folder:
        collector.save(Path(folder) / "x")
        return (Path(folder) / "x").read_bytes()


def collected(x, owner, convert):
    """Return a Collector of x as a layer, as one expert, and as tokens of several experts.

    owner: the expert of each token.
    convert: a function that moves an array to the library whose arrays are collected.
    """
    collector = Collector()
    collector.collect("a", convert(x))
    collector.collect(STACK, convert(x[:9]), expert=3, experts=EXPERTS)
    collector.collect(STACK, convert(x), expert=convert(owner), experts=EXPERTS)
    collector.collect("mlp.experts.1.up_proj", convert(x[9]))
    return collector


@together("convert", [to_cupy, to_torch])
@together("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@together("columns", [40, 64])
def test_bits_of_numpy(convert, dtype, columns):
    x, owner = inputs(dtype, columns), np.random.default_rng(1).integers(0, EXPERTS, 300)
    assert contents(collected(x, owner, convert)) == contents(collected(x, owner, np.asarray))


def test_host_and_device_arrays_in_one_collector():
    x, mixed, whole = inputs(np.float32), Collector(), Collector()
    for i in range(0, 300, 100):
        mixed.collect("a", to_cupy(x[i : i + 50]))
        mixed.collect("a", x[i + 50 : i + 100])
    whole.collect("a", x)
    assert contents(mixed) == contents(whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_inputs_are_found_when_results_are_read(bad):
    x, collector = inputs(np.float32), Collector()
    x[5, 5] = bad
    collector.collect("a", to_cupy(x))
    collector.collect("a", to_cupy(np.abs(inputs(np.float32))))
    for read in (collector.amaxes, collector.tokens, lambda: contents(collector)):
        with pytest.raises(ValueError, match="a: its inputs hold NaN or infinity; needs finite inputs"):
            read()


def test_a_model_on_the_gpu_gives_what_its_inputs_give():
    torch = pytest.importorskip("torch")
    import fp4kit.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8)).cuda().bfloat16()
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16)
    with fp4kit.torch.collect(model) as collector, torch.no_grad():
        model(x)
        inner = model[1](model[0](x))
    expected = Collector()
    expected.collect("0", x.cpu())
    expected.collect("0", x.cpu())
    expected.collect("2", inner.cpu())
    assert contents(collector) == contents(expected)
