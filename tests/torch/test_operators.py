"""Test the operators of fp4kit.torch: PyTorch's opcheck passes, and the meta implementation is right for
every recipe.
"""

import importlib
from dataclasses import replace

import pytest
from exhaustive import every
from inputs import ordinary
from tensors import to_torch

import fp4kit
from fp4kit.recipes import RECIPES
from fp4kit.recipes.serialization import to_spec

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised by PyTorch's tracers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
SEED = torch.tensor(3)
BYTES = torch.arange(4 * 32, dtype=torch.uint8).reshape(4, 32)


def tensor(seed=0, shape=(4, 32), dtype=torch.float32):
    return to_torch(ordinary(seed, shape)).to(dtype)


X = tensor()


def grad_of(shape=(4, 32), dtype=torch.float32):
    return tensor(1, shape, dtype).requires_grad_()


def two():
    return [grad_of(), grad_of((2, 64))]


PLAIN = (None, None, "nearest", None, None)
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)
CALLS = {
    "straight-through": ("fake_quantize", lambda: (grad_of(), "nvfp4-te", -1, *PLAIN, True)),
    "clipped": ("fake_quantize", lambda: (grad_of(), "mxfp4-ocp", -1, *PLAIN, False)),
    "variant": ("fake_quantize", lambda: (grad_of(), to_spec(VARIANT), -1, *PLAIN, False)),
    "bfloat16": ("fake_quantize", lambda: (grad_of(dtype=torch.bfloat16), "nvfp4-te", -1, *PLAIN, False)),
    "columns": ("fake_quantize", lambda: (grad_of((2, 32, 6)), "nvfp4-te", 1, ONE, None, "nearest", None, None, False)),
    "square": ("fake_quantize", lambda: (grad_of((32, 32)), "nvfp4-te-2d", 0, ONE, None, "nearest", None, TWO, False)),
    "empty": ("fake_quantize", lambda: (torch.empty(0, 32, requires_grad=True), "nvfp4-te", -1, *PLAIN, False)),
    "seed": ("fake_quantize", lambda: (grad_of(), "nvfp4-te", -1, None, None, "stochastic", SEED, None, False)),
    "bytes": ("fake_quantize", lambda: (grad_of(), "nvfp4-te", -1, None, None, "stochastic", BYTES, None, True)),
    "backward": ("fake_quantize_backward", lambda: (grad_of(), X, "nvfp4-te", -1, None)),
    "backward at": ("fake_quantize_backward", lambda: (grad_of(), X, "nvfp4-te", 1, ONE)),
    "backward of none": ("fake_quantize_backward", lambda: (grad_of((4, 0)), X[:, :0], "nvfp4-te", 1, ONE)),
    "group": ("fake_quantize_grouped", lambda: (two(), "nvfp4-te", -1, [], [], "nearest", None, [], True)),
    "group clipped": (
        "fake_quantize_grouped",
        lambda: (two(), "nvfp4-te", -1, [ONE, TWO], [], "nearest", None, [], False),
    ),
    "group backward": (
        "fake_quantize_grouped_backward",
        lambda: (two(), [X, X.reshape(2, 64)], "nvfp4-te", -1, [ONE, TWO]),
    ),
    "quantize": ("quantize", lambda: (X, "nvfp4-te", -1, None, "linear", "nearest", None, "False", None)),
    "quantize at": (
        "quantize",
        lambda: (X.repeat(8, 1), "nvfp4-te", 0, ONE, "swizzled_128x4", "stochastic", SEED, "True", None),
    ),
    "quantize experts": (
        "quantize",
        lambda: (tensor(1, (3, 4, 32)), "nvfp4-te", -1, torch.ones(3, 1, 1), "linear", "nearest", None, "False", None),
    ),
    "quantize MX": ("quantize", lambda: (X, to_spec(VARIANT), -1, None, "linear", "nearest", None, "False", None)),
    "quantize rows": (
        "quantize",
        lambda: (X, "int8-modelopt-channel", -1, None, "linear", "nearest", None, "False", None),
    ),
    "dequantize": ("dequantize", lambda: parts_of(ft.quantize(X, "nvfp4-te"))),
    "dequantize columns": ("dequantize", lambda: parts_of(ft.quantize(X.T, VARIANT, axis=0))),
}


def parts_of(q):
    facts = list(q.shape), q.axis, to_spec(q.recipe), q.scale_layout, torch.float32, torch.bfloat16
    return q.packed, q.block_scale, q.tensor_scale, q.tensor_amax, *facts


@pytest.mark.parametrize("case", every(3, CALLS))
def test_opcheck(case):
    """torch.library.opcheck accepts every operator.

    It tests the schema, gradients, the meta implementation, and all of them with dynamic shapes.
    """
    name, arguments = CALLS[case]
    found = torch.library.opcheck(getattr(torch.ops.fp4kit, name).default, arguments())
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_meta_of_every_recipe(name, axis):
    """The meta implementation gives the shapes, dtypes and strides of the real one."""
    x = tensor(1, (128, 256))
    assert_meta(lambda x: ft.fake_quantize(x, name, axis=axis), x)
    if not RECIPES[name].fake_only:
        for layout in ("linear", "swizzled_128x4", "swizzled_8x4"):
            assert_meta(lambda x, s=layout: list(parts_of(ft.quantize(x, name, axis=axis, scale_layout=s))[:4]), x)
            assert_meta(
                lambda x, s=layout: ft.dequantize(ft.quantize(x, name, axis=axis, scale_layout=s), torch.float16), x
            )


def assert_meta(function, x):
    found, expected = function(x.to("meta")), function(x)
    for a, b in zip(*((y if isinstance(y, list) else [y]) for y in (found, expected)), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.is_meta and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
