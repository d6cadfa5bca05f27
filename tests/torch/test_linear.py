"""Test fp4kit.torch.linear: its values and gradients equal the formulas of its docstring, in every mode of PyTorch."""

import importlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import wrong_calls
from exhaustive import half
from inputs import BF16, ordinary
from tensors import since_2_13, to_torch
from wrong_calls import linear

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised by PyTorch's tracers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
M, N, K = 32, 64, 96
X, W, GRAD = ordinary(1, (M, K)), ordinary(2, (N, K)), ordinary(3, (M, N))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}
importlib.import_module("torch.utils.checkpoint")
TE_BACKWARD = {"backward": "quantized", "rounding": "stochastic", "seed": 7, "hadamard": True}


def test_dtypes_of_gradients_and_autocast():
    x, w = to_torch(X), to_torch(W.astype(BF16))
    x.requires_grad_(), w.requires_grad_()
    ft.linear(x, w, **TE, out_dtype=np.float16).sum().backward()
    assert x.grad.dtype == torch.float32 and w.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        x.grad = None
        loss = ft.linear(x, w, **TE, out_dtype=torch.float32).sum()
        loss.backward()
    inside, x.grad = x.grad, None
    ft.linear(x, w, **TE, out_dtype=torch.float32).sum().backward()
    assert torch.equal(inside, x.grad)


def loss_of(x, w, **options):
    return (ft.linear(x, w, **TE, **options) ** 2).sum()


@pytest.mark.parametrize("options", [{}, TE_BACKWARD], ids=["straight-through", "quantized"])
def test_compiled_and_transformed(options):
    """torch.compile, torch.func.grad, checkpointing and torch.vmap give the bits of eager calls."""
    x, w = to_torch(X).requires_grad_(), to_torch(W).requires_grad_()
    loss = partial(loss_of, **options)
    expected = torch.autograd.grad(loss(x, w), (x, w))
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w), (x, w))
    transformed = torch.func.grad(loss, (0, 1))(x.detach(), w.detach())
    for a, b, c in zip(expected, found, transformed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    again = torch.utils.checkpoint.checkpoint(loss, x, w, use_reentrant=False)
    for a, b in zip(expected, torch.autograd.grad(again, (x, w)), strict=True):
        assert torch.equal(a, b)
    stack = torch.stack([x.detach(), x.detach() * 3])
    mapped = torch.vmap(torch.func.grad(loss), (0, None))(stack, w.detach())
    for one, each in zip(stack, mapped, strict=True):
        assert torch.equal(each, torch.func.grad(loss)(one, w.detach()))


def test_row_scaled_activations_with_their_backward_passes():
    """The three backward passes of activations with one scale per row, against products of their operands."""
    x, w, grad = (to_torch(ordinary(i, shape)).bfloat16() for i, shape in enumerate(((48, K), (32, K), (48, 32))))
    recipes = {"recipe_x": "nvfp4-te-rowscaled", "recipe_w": "nvfp4-te"}
    codes_x, codes_w = fp4kit.quantize(x, recipes["recipe_x"]), fp4kit.quantize(w, recipes["recipe_w"])
    rows = np.abs(x.float().numpy()).max(1)
    assert_same_bits(codes_x.tensor_amax.reshape(-1).numpy(), rows)
    for backward, right, left in (
        ("straight-through", fp4kit.dequantize(codes_w, torch.float32), fp4kit.dequantize(codes_x, torch.float32)),
        ("high-precision", w.float(), x.float()),
    ):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = ft.linear(a, b, **recipes, backward=backward)
        assert torch.equal(y, fp4kit.matmul(codes_x, codes_w, out_dtype=torch.bfloat16))
        y.backward(grad)
        assert torch.equal(a.grad, (grad.float() @ right).bfloat16())
        assert torch.equal(b.grad, (grad.float().T @ left).bfloat16())
        found = torch.func.grad(
            lambda a, b, kind=backward: (ft.linear(a, b, **recipes, backward=kind) * grad).sum(), (0, 1)
        )
        for one, other in zip(found(x, w), (a.grad, b.grad), strict=True):
            assert torch.equal(one, other)
    b = w.clone().requires_grad_()
    ft.linear(x, b, **recipes, backward="quantized", recipe_grad="nvfp4-te").backward(grad)
    columns = fp4kit.quantize(x, recipes["recipe_x"], axis=0)
    assert_same_bits(columns.tensor_amax.reshape(-1).numpy(), np.abs(x.float().numpy()).max(0))
    of_grad = fp4kit.quantize(grad, "nvfp4-te", axis=0)
    assert torch.equal(b.grad, fp4kit.matmul(of_grad, columns, out_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="backward is 'high-precision', and w is a Quantized; needs the unquantized w"):
        ft.linear(x, codes_w, recipes["recipe_x"], backward="high-precision")


@since_2_13()
def test_compiled_with_a_quantized_and_a_unit():
    q = ft.quantize(to_torch(W), "nvfp4-te-2d")
    torch._dynamo.reset()
    function = torch.compile(
        lambda x, q, unit: ft.linear(x, q, "nvfp4-te", unit=unit), fullgraph=True, backend="aot_eager"
    )
    for unit in ("sm100", replace(fp4kit.unit("sm100"), id="mine", promote=64)):
        assert torch.equal(function(to_torch(X), q, unit), ft.linear(to_torch(X), q, "nvfp4-te", unit=unit))


def test_lengths_that_change_are_traced_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    function = torch.compile(lambda x, w: ft.linear(x, w, **TE) + 1, fullgraph=True, backend="aot_eager")
    for length in (32, 48, 7):
        x = to_torch(ordinary(length, (length, K)))
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(function(x, to_torch(W)), ft.linear(x, to_torch(W), **TE) + 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_gradients_of_gradients():
    """Second derivatives are those of the straight-through rule, and an error for quantized gradients."""
    x, w = to_torch(X[:16, :32]).requires_grad_(), to_torch(W[:16, :32]).requires_grad_()

    def by_autograd(**options):
        found = torch.autograd.grad(loss_of(x, w, **options), (x, w), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in found), (x, w))

    def by_transforms(**options):
        def squares(x, w):
            return sum((g**2).sum() for g in torch.func.grad(partial(loss_of, **options), (0, 1))(x, w))

        return torch.func.grad(squares, (0, 1))(x.detach(), w.detach())

    def by_fake_quantize(**options):
        def loss(x, w):
            y = ft.linear(x, w, **TE)
            rule = ft.fake_quantize(x, "nvfp4-te") @ ft.fake_quantize(w, "nvfp4-te-2d").T
            return ((rule + (y - rule).detach()) ** 2).sum()

        found = torch.autograd.grad(loss(x, w), (x, w), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in found), (x, w))

    for a, b, c in zip(by_autograd(), by_transforms(), by_fake_quantize(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4 * float(c.abs().max()))  # the order of sums differs
    for second in (by_autograd, by_transforms):
        with pytest.raises(NotImplementedError, match=r"^linear: the gradients of backward='quantized' have no"):
            second(backward="quantized")


def settings(*rest, weight=("", ""), recipes=("nvfp4-te", "nvfp4-te-2d", "")):
    return "\n".join((*recipes, *weight, "sm100", *rest))


STRAIGHT = settings("float32", "straight-through", "nearest", "False")
QUANTIZED = settings("bfloat16", "quantized", "stochastic", "True")
Q = fp4kit.quantize(W, "nvfp4-te-2d")
OF_Q = settings(
    "float32", "quantized", "nearest", "False", weight=("nvfp4-te-2d", "linear"), recipes=("nvfp4-te", "", "")
)
CALLS = {
    "straight": ("linear", (X, W, None, None, None, STRAIGHT), 2),
    "quantized": ("linear", (X, W, None, None, np.int64(5), QUANTIZED), 2),
    "weight": ("linear", (X, Q.packed, Q.block_scale, Q.tensor_scale, None, OF_Q), 1),
    "of x": ("linear_gradient_of_x", (GRAD, W, None, None, None, STRAIGHT, torch.bfloat16), 0),
    "of w": ("linear_gradient_of_w", (GRAD, X, np.int64(5), QUANTIZED, torch.float32), 0),
    "values": ("quantized_values", (X.astype(BF16), "nvfp4-te"), 1),
}


@pytest.mark.parametrize("case", half(CALLS))
def test_opcheck(case):
    name, arguments, differentiable = CALLS[case]
    tensors = [to_torch(a) if isinstance(a, (np.ndarray, np.generic)) else a for a in arguments]
    for tensor in tensors[:differentiable]:
        tensor.requires_grad_()
    found = torch.library.opcheck(getattr(torch.ops.fp4kit, name).default, tuple(tensors))
    assert set(found.values()) == {"SUCCESS"}


BYTES = torch.zeros(3, dtype=torch.uint8)
ROWS = [
    *wrong_calls.LINEAR,
    (lambda f, x, w: linear()(f, X, w), TypeError, "linear: x is ndarray; needs a torch.Tensor; pass"),
    (lambda f, x, w: linear()(f, x, W), TypeError, "linear: w is ndarray; needs a torch.Tensor"),
    (lambda f, x, w: linear()(f, x.double(), w), TypeError, "linear: x is float64; needs float32"),
    (lambda f, x, w: linear()(f, x, w.int()), TypeError, "linear: w is int32; needs float32"),
    (linear("nvfp5", "nvfp4"), ValueError, "recipe: no recipe is called 'nvfp5'"),
    (linear(backward="quantized", seed=BYTES), ValueError, "linear: seed has shape (3,); needs an int, or a 0-d"),
]


def test_errors_before_any_work(monkeypatch):
    x, w = to_torch(X), to_torch(W)
    rows = [(call, w, kind, text) for call, kind, text in ROWS]
    rows += [
        (call, ft.quantize(w, "nvfp4-te", **options), ValueError, text)
        for call, options, text in wrong_calls.LINEAR_OF_CODES
    ]

    def fail(*arguments, **options):
        raise AssertionError("work was done")

    monkeypatch.setattr("fp4kit.quantize", fail)
    for call, weight, kind, text in rows:
        with pytest.raises(kind, match="^" + re.escape(text)):
            call(ft, x, weight)
