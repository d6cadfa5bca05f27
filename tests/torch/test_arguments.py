"""Test the arguments of fp4kit.torch: numbers, sequences and flags have fp4kit's meaning, whatever PyTorch's defaults
are.
"""

import importlib
import re

import numpy as np
import pytest
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from inputs import ordinary
from tensors import to_numpy, to_torch
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")

X = ordinary(1, (64, 128))
STACK = ordinary(2, (3, 32, 64))
STOCHASTIC = {"rounding": "stochastic"}


@pytest.fixture(params=["float32", "bfloat16", "float64"])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("amax", [[0.3, 1 / 3, 2.7], (0.3, 1 / 3, 2.7), 1 / 3, np.float32([0.3, 1 / 3, 2.7])], ids=repr)
def test_amaxes_are_not_rounded_to_the_default_dtype(default_dtype, amax):
    """A list of amaxes keeps its precision, even if PyTorch's default dtype is bfloat16."""
    x = to_torch(STACK)
    assert_same_bits(
        to_numpy(ft.fake_quantize(x, "nvfp4", tensor_amax=amax)), fp4kit.fake_quantize(STACK, "nvfp4", tensor_amax=amax)
    )
    q, expected = ft.quantize(x, "nvfp4", tensor_amax=amax), fp4kit.quantize(STACK, "nvfp4", tensor_amax=amax)
    assert q.to("numpy").equals(expected)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", [name for name in ("ftz", "daz", "both") if name in BITS])
def test_subnormal_amaxes_in_every_mode(changed):
    x, expected = to_torch(STACK), fp4kit.fake_quantize(STACK, "nvfp4-modelopt", tensor_amax=3e-40)
    with mode(changed):
        found = to_numpy(ft.fake_quantize(x, "nvfp4-modelopt", tensor_amax=3e-40))
    assert_same_bits(found, expected)


def test_amaxes_of_groups_are_not_rounded_either(default_dtype):
    amaxes = [0.3, 1 / 3, 2.7]
    values = ft.fake_quantize_grouped(to_torch(STACK), "nvfp4", tensor_amax=amaxes)
    for value, expected in zip(values, fp4kit.fake_quantize_grouped(STACK, "nvfp4", tensor_amax=amaxes), strict=True):
        assert_same_bits(to_numpy(value), expected)


BAD = {
    "pass_through": (
        lambda x: ft.fake_quantize(x, "mxfp4", pass_through="no"),
        TypeError,
        "fake_quantize: pass_through is 'no'",
    ),
    "flag of a group": (
        lambda x: ft.fake_quantize_grouped([x], "mxfp4", pass_through="no"),
        TypeError,
        "fake_quantize_grouped: pass_through is",
    ),
    "fraction": (
        lambda x: ft.fake_quantize(x, "mxfp4", seed=3.7, **STOCHASTIC),
        TypeError,
        "fake_quantize: seed is 3.7; needs",
    ),
    "tensor": (
        lambda x: ft.fake_quantize(x, "mxfp4", seed=torch.tensor(3.7), **STOCHASTIC),
        TypeError,
        "fake_quantize: seed is a tensor of torch.float32; needs an",
    ),
    "codes": (
        lambda x: ft.quantize(x, "mxfp4", seed=torch.tensor(True), **STOCHASTIC),
        TypeError,
        "quantize: seed is a tensor of torch.bool; needs an int",
    ),
    "bool": (lambda x: ft.quantize(x, "mxfp4", seed=True, **STOCHASTIC), TypeError, "quantize: seed is True; needs an"),
    "negative": (
        lambda x: ft.fake_quantize(x, "mxfp4", seed=-1, **STOCHASTIC),
        ValueError,
        "fake_quantize: seed is -1; needs 0 to",
    ),
    "too large": (
        lambda x: ft.fake_quantize_grouped([x], "mxfp4", seed=2**64, **STOCHASTIC),
        ValueError,
        "fake_quantize_grouped: seed is 18446744073709551616; needs",
    ),
    "bool axis": (lambda x: ft.fake_quantize(x, "mxfp4", axis=True), TypeError, "fake_quantize: axis is True; needs"),
    "bool tensor as axis": (
        lambda x: ft.quantize(x, "mxfp4", axis=torch.tensor(True)),
        TypeError,
        "quantize: axis is tensor(True); needs an int",
    ),
    "group's axis": (
        lambda x: ft.fake_quantize_grouped([x], "mxfp4", axis=True),
        TypeError,
        "fake_quantize_grouped: axis is True; needs",
    ),
    "group's seed": (
        lambda x: ft.fake_quantize_grouped([x], "mxfp4", seed="3", **STOCHASTIC),
        TypeError,
        "fake_quantize_grouped: seed is '3'; needs an int",
    ),
    "true": (lambda x: ft.fake_quantize(x, "nvfp4", tensor_amax=True), TypeError, "fake_quantize: tensor_amax is"),
    "text": (lambda x: ft.quantize(x, "nvfp4", tensor_amax="3"), TypeError, "quantize: tensor_amax is '3'; needs a"),
    "clip": (
        lambda x: ft.fake_quantize(x, "nvfp4", amax=1j, pass_through=False),
        TypeError,
        "fake_quantize: amax is 1j; needs a real",
    ),
    "none": (lambda x: ft.fake_quantize_grouped(None, "mxfp4"), TypeError, "fake_quantize_grouped: xs is a NoneType"),
    "vector": (lambda x: ft.fake_quantize_grouped(x[0], "mxfp4"), ValueError, "fake_quantize_grouped: xs is one 1-d"),
    "number": (
        lambda x: ft.fake_quantize_grouped(x[0, 0], "mxfp4"),
        ValueError,
        "fake_quantize_grouped: xs is one 0-d tensor; needs a",
    ),
    "dtype": (
        lambda x: ft.dequantize(ft.quantize(x, "mxfp4"), "bfloat16"),
        TypeError,
        "dequantize: dtype is 'bfloat16'; needs torch.float32",
    ),
}


@together("case", BAD)
def test_errors_carry_the_name_of_the_function(case):
    call, kind, text = BAD[case]
    with pytest.raises(kind, match="^" + re.escape(text)):
        call(to_torch(X))


@pytest.mark.parametrize("in_dims", [0, 1])
def test_vmap_over_nothing(in_dims):
    """vmap over an axis of length 0 gives empty results and gradients of the right shapes."""
    x = torch.zeros((0, 2, 32) if in_dims == 0 else (2, 0, 32), dtype=torch.bfloat16)
    values = torch.vmap(lambda x: ft.fake_quantize(x, "nvfp4"), in_dims)(x)
    assert values.shape == (0, 2, 32) and values.dtype == torch.bfloat16
    q = torch.vmap(lambda x: ft.quantize(x, "nvfp4"), in_dims)(x)
    assert q.packed.shape == (0, 2, 16) and q.block_scale.shape == (0, 2, 2) and q.tensor_scale.shape == (0,)
    pair = torch.vmap(lambda x: ft.fake_quantize_grouped([x, x], "nvfp4"), in_dims)(x)
    assert [y.shape for y in pair] == [(0, 2, 32)] * 2
    gradient = torch.func.grad(lambda x: torch.vmap(lambda x: ft.fake_quantize(x, "nvfp4"), in_dims)(x).sum())(x)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "amax"])
def test_plain_functions_under_vmap(name):
    call = {"fake_quantize": fp4kit.fake_quantize, "quantize": fp4kit.quantize, "amax": lambda x, r: fp4kit.amax(x)}[
        name
    ]
    text = (
        rf"^{name}: x is a Tensor without memory of its own on one device \(.*inside torch.func, call"
        r" fp4kit.torch's function"
    )
    with pytest.raises(BufferError, match=text):
        torch.vmap(lambda x: call(x, "mxfp4"))(to_torch(STACK))


def test_a_quantized_without_values_can_be_shown():
    q = ft.quantize(torch.empty(4, 64, device="meta"), "nvfp4")
    assert str(q) == repr(q) and q._repr_html_() is None and q.bits_per_value > 4
