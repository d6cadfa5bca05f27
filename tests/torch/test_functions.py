"""Test fp4kit.torch: values and gradients are bit-identical to fp4kit's for every recipe.

Errors, threads and lifetimes are tested, too.
"""

import gc
import importlib
import re
import threading
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import wrong_calls
from exhaustive import exhaustive
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from inputs import ordinary
from tensors import to_numpy, to_torch
from together import together
from wrong_calls import RANDOM, codes, fake

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import PARTS
from fp4kit.recipes import RECIPES

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")


X = ordinary(1, (64, 128))
STACK = ordinary(2, (3, 32, 64))
VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))


def both(function, x, grad):
    """Return the value of a function of a tensor, and the gradient for an upstream gradient `grad`."""
    w = to_torch(x).requires_grad_()
    y = function(w)
    y.backward(to_torch(grad))
    return to_numpy(y), to_numpy(w.grad)


def same_quantized(q, expected):
    """Assert that a Quantized of tensors has the bits and the attributes of one of NumPy arrays."""
    assert all(isinstance(array, torch.Tensor) for array in q.parts().values() if array is not None)
    assert q.to("numpy").equals(expected)


def test_amaxes_of_experts_and_rows_clip_too():
    experts = np.array([0.5, 1, 40], np.float32)
    y, g = both(lambda w: ft.fake_quantize(w, "nvfp4-te", tensor_amax=experts, pass_through=False), STACK, STACK)
    for i, amax in enumerate(experts):
        assert_same_bits(y[i], fp4kit.fake_quantize(STACK[i], "nvfp4-te", tensor_amax=amax))
        assert_same_bits(g[i], np.where(np.abs(STACK[i]) <= amax, STACK[i], np.float32(0)))
    row = next(r.id for r in RECIPES.values() if r.tensor_scaling == "row")
    rows = np.abs(X).max(1) / 2
    for shape in ((64,), (64, 1), (64, 1, 1)):
        _, g = both(lambda w, s=shape: ft.fake_quantize(w, row, tensor_amax=rows.reshape(s), pass_through=False), X, X)
        assert_same_bits(g, np.where(np.abs(X) <= rows[:, None], X, np.float32(0)))


def test_gradients_are_those_of_the_rule():
    """The Jacobian is diagonal, with ones or the mask of clipped elements.

    The derivative of the gradient is this mask again.
    """
    x = to_torch(X[:2, :32]).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda x: ft.fake_quantize(x, "nvfp4-te"), x).reshape(64, 64)
    assert torch.equal(jacobian, torch.eye(64))
    clip = {"pass_through": False, "amax": 1.0}
    jacobian = torch.autograd.functional.jacobian(lambda x: ft.fake_quantize(x, "nvfp4-te", **clip), x).reshape(64, 64)
    mask = (x.detach().abs() <= 1).float()
    assert torch.equal(jacobian, torch.diag(mask.reshape(-1))) and 0 < mask.mean() < 1
    grad = torch.randn(2, 32, requires_grad=True)
    (g,) = torch.autograd.grad(ft.fake_quantize(x, "nvfp4-te", **clip), x, grad, create_graph=True)
    again = torch.autograd.grad(g, (grad, x), torch.full_like(g, 3), allow_unused=True)
    assert torch.equal(again[0], 3 * mask) and again[1] is None


def test_flushed_subnormals():
    """PyTorch may flush subnormals in its own operations; fp4kit's give the bits of every other mode."""
    x = np.array([0, -0.0, 1e-45, -1e-38] * 8, np.float32).reshape(1, 32)
    try:
        torch.set_flush_denormal(True)
        assert_same_bits(to_numpy(ft.fake_quantize(to_torch(x), "mxfp4-ocp")), fp4kit.fake_quantize(x, "mxfp4-ocp"))
    finally:
        torch.set_flush_denormal(False)


def test_strides_and_inputs_are_left_alone():
    x = to_torch(X)
    before = x.clone()
    for view in (x.T, x[::2], x[:, 32:96], x.view(2, 32, 128).permute(1, 0, 2), x[:1].expand(5, 128)):
        array = view.numpy()
        assert_same_bits(to_numpy(ft.fake_quantize(view, "nvfp4-te")), fp4kit.fake_quantize(array, "nvfp4-te"))
        same_quantized(ft.quantize(view, "nvfp4-te"), fp4kit.quantize(array, "nvfp4-te"))
    assert torch.equal(x, before)


def test_codes_need_no_gradient_and_no_memory_of_their_amax():
    amax = torch.tensor(3.0)
    q = ft.quantize(to_torch(X).requires_grad_(), "nvfp4-te", tensor_amax=amax)
    assert not any(getattr(q, name).requires_grad for name in PARTS) and q.tensor_amax.data_ptr() != amax.data_ptr()


def test_a_group_of_which_one_result_is_used():
    xs = [torch.ones(2, 32, requires_grad=True) for _ in range(2)]
    ft.fake_quantize_grouped(xs, "nvfp4-te", pass_through=False, amax=[1.0, 1.0])[0].sum().backward()
    assert torch.equal(xs[0].grad, torch.ones(2, 32)) and not xs[1].grad.any()


# ---- errors ----

T = to_torch(X)
TRUE, FRACTION, BYTES = torch.tensor(True), torch.tensor(3.7), torch.zeros(3, dtype=torch.uint8)
ROWS = [
    *wrong_calls.ROWS,
    (lambda f, x: f.fake_quantize(x.double(), "nvfp4-te"), TypeError, "fake_quantize: x is float64; needs"),
    (lambda f, x: f.fake_quantize(x[0, 0], "nvfp4"), ValueError, "fake_quantize: x is 0-d; blocks run along an"),
    (lambda f, x: f.fake_quantize(X, "nvfp4"), TypeError, "fake_quantize: x is ndarray; needs a torch.Tensor; "),
    (lambda f, x: f.fake_quantize_grouped([x, X], "nvfp4"), TypeError, "fake_quantize_grouped: xs[1] is ndarray; "),
    (lambda f, x: f.fake_quantize_grouped(x[0], "mxfp4"), ValueError, "fake_quantize_grouped: xs is one 1-d"),
    (fake("nvfp5"), ValueError, "recipe: no recipe is called 'nvfp5'; did you mean"),
    (fake("mxfp4", seed=FRACTION, **RANDOM), TypeError, "fake_quantize: seed is a tensor of torch.float32; needs an"),
    (codes("mxfp4", seed=TRUE, **RANDOM), TypeError, "quantize: seed is a tensor of torch.bool; needs an int"),
    (
        fake("nvfp4", seed=BYTES, **RANDOM),
        ValueError,
        "fake_quantize: seed is uint8 (3,); random bytes need uint8 (64,",
    ),
    (codes("mxfp4", axis=TRUE), TypeError, "quantize: axis is "),
    (fake("nvfp4", tensor_amax=True), TypeError, "fake_quantize: tensor_amax is True"),
    (codes("nvfp4", tensor_amax="3"), TypeError, "quantize: tensor_amax is '3'; needs a"),
    (fake("nvfp4", amax=1j, pass_through=False), TypeError, "fake_quantize: amax is 1j; needs a real"),
    (
        fake("nvfp4", tensor_amax=torch.ones(3)),
        ValueError,
        "fake_quantize: tensor_amax has shape (3,); nvfp4-te needs ()",
    ),
    (
        fake("nvfp4", amax=torch.ones(3), pass_through=False),
        ValueError,
        "fake_quantize: amax has shape (3,); x (64, 128)",
    ),
    (fake("nvfp4", block_amax=torch.ones(64, 8)), ValueError, "fake_quantize: block_amax was given, but nvfp4-te"),
    (
        lambda f, x: f.dequantize(f.quantize(x, "nvfp4"), torch.float64),
        TypeError,
        "dequantize: dtype is float64; needs",
    ),
    (
        lambda f, x: f.dequantize(f.quantize(x, "nvfp4"), "bfloat16"),
        TypeError,
        "dequantize: dtype is 'bfloat16'; needs",
    ),
    (lambda f, x: f.dequantize(fp4kit.quantize(X, "nvfp4")), TypeError, "dequantize: q.packed is"),
]


@together("call, kind, text", ROWS)
@together("traced", [False, True])
def test_errors_before_any_work(call, kind, text, traced):
    """Errors are raised while tracing, too, by the meta implementation: FakeTensors have no values."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) if traced else nullcontext() as mode:
        x = mode.from_tensor(T) if traced else T
        with pytest.raises(kind, match="^" + re.escape(text)):
            call(ft, x)


def test_values_of_amaxes_are_checked_when_they_are_there():
    with pytest.raises(ValueError, match=r"fake_quantize: tensor_amax holds 1 NaN value\(s\) of 1; needs amax >= 0"):
        ft.fake_quantize(T, "nvfp4", tensor_amax=float("nan"))
    text = r"amax holds 1 negative value\(s\) of 1; needs amax >= 0"
    for amax in (-1, torch.tensor(-1, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="fake_quantize: " + text):
            ft.fake_quantize(T, "nvfp4", amax=amax, pass_through=False)
        with pytest.raises(ValueError, match=r"fake_quantize_grouped: amax\[1\]" + text[4:]):
            ft.fake_quantize_grouped([T, T], "nvfp4", amax=[1, amax], pass_through=False)


def test_tensors_of_two_devices():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 32)
        with pytest.raises(
            ValueError, match="fake_quantize: x is on cpu, tensor_amax on cuda:0; all arrays of one call"
        ):
            ft.fake_quantize(x, "nvfp4", tensor_amax=torch.empty((), device="cuda"))


# ---- threads, lifetimes ----


def test_threads():
    expected, found = fp4kit.fake_quantize(X, "nvfp4-te"), []

    def work():
        for _ in range(10):
            y, g = both(lambda w: ft.fake_quantize(w, "nvfp4-te", pass_through=False, amax=1), X, X)
            found.append(np.array_equal(y, expected) and np.array_equal(g, np.where(np.abs(X) <= 1, X, 0)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 40


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("rounds", [3, *exhaustive([150])])
def test_calls_leave_nothing_behind(rounds):
    """Memory must not grow over many calls. An exhaustive run makes 1,600 calls, four per round."""

    def work():
        w = torch.randn(4, 32, requires_grad=True)
        ft.fake_quantize(w, VARIANT, pass_through=False, amax=1).sum().backward()
        sum(y.sum() for y in ft.fake_quantize_grouped([w, w], "nvfp4-te", pass_through=False)).backward()
        ft.dequantize(ft.quantize(w, "nvfp4-te", tensor_amax=2.0))

    tracemalloc.start()
    for _ in range(20):  # afterwards the caches of a few tables are full
        work()
    alive, before = tensors_alive(), tracemalloc.get_traced_memory()[0]
    for _ in range(rounds):
        work()
    assert tensors_alive() <= alive
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < 200_000


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
