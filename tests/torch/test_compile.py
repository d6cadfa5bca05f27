"""Test fp4kit.torch under torch.compile(fullgraph=True), torch.export, torch.func, checkpointing and autocast.

Compiled calls are bit-identical to eager calls, and eager calls to calls on NumPy arrays.
"""

import importlib
import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from exhaustive import by_default, every, exhaustive, half
from inputs import ordinary, seeded
from tensors import since_2_13, to_numpy, to_torch

import fp4kit
from fp4kit.arrays.imports import as_array, device_name
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import PARTS
from fp4kit.quantized.slicing import FACTS
from fp4kit.recipes import RECIPES
from fp4kit.recipes.table import to_spec
from fp4kit.training.settings import FakeQuantSettings

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")


pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised by PyTorch's tracers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
VARIED = ["nvfp4-te", "mxfp4", "nvfp4-te-2d", pytest.param(VARIANT, marks=since_2_13())]
SEED = torch.tensor(3)


def tensor(seed=0, shape=(4, 32), dtype=torch.float32):
    return to_torch(ordinary(seed, shape)).to(dtype)


X = tensor()


@pytest.fixture(autouse=True)
def reset_compiler():
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def value_and_gradient(function, x):
    w = x.clone().requires_grad_()
    y = function(w)
    y.backward(torch.full_like(y, 0.75))
    return y.detach(), w.grad


def assert_equal(found, expected):
    """Assert that tensors, Quantized, or sequences of these have equal bits and strides."""
    if isinstance(expected, fp4kit.Quantized):
        assert [getattr(found, name) for name in FACTS] == [getattr(expected, name) for name in FACTS]
        found, expected = ([getattr(q, name) for name in PARTS] for q in (found, expected))
    if not isinstance(expected, torch.Tensor):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b) if b is not None else None
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.stride() == expected.stride()
    assert_same_bits(to_numpy(found), to_numpy(expected))


# ---- fp4kit's functions of arrays, which are not traced ----

STORED = fp4kit.quantize(tensor(5, (32, 64)), "nvfp4-te")
UNTRACED = {
    "quantize": lambda x: fp4kit.quantize(x * 2, "nvfp4-te").packed + 1,
    "quantize_both": lambda x: fp4kit.quantize_both(x * 2, "nvfp4-te")[1].packed + 1,
    "quantize_grouped": lambda x: fp4kit.quantize_grouped([x * 2], "nvfp4-te")[0].packed + 1,
    "dequantize": lambda x: fp4kit.dequantize(STORED) * x,
    "both ways": lambda x: fp4kit.dequantize(fp4kit.quantize(x * 2, "nvfp4-te")) * x,
    "fake_quantize": lambda x: fp4kit.fake_quantize(x * 2, "nvfp4-te") + 1,
    "fake_quantize_backward": lambda x: fp4kit.fake_quantize_backward(x * 2, x, "nvfp4-te") + 1,
    "amax": lambda x: fp4kit.amax(x * 2) + 1,
    "unpack": lambda x: fp4kit.unpack((x * 2).to(torch.uint8)) + 1,
    "swizzle": lambda x: fp4kit.swizzle((x * 2).to(torch.uint8), "swizzled_128x4") + 1,
    "requantize": lambda x: fp4kit.dequantize(fp4kit.requantize(STORED, "mxfp4").quantized) * x,
    "as_array": lambda x: x + len(as_array(x * 2)),
    "device_name": lambda x: x + len(device_name(x * 2)),
}


@pytest.mark.parametrize("name", by_default(("requantize",), [*UNTRACED][::2]))
def test_functions_of_arrays_break_the_graph(name):
    """torch.compile does not trace fp4kit's functions of arrays, but breaks the graph there.

    If it traced how they read a tensor's memory, it would fail with an internal assertion.
    """
    torch._dynamo.utils.counters.clear()
    function, x = UNTRACED[name], tensor(2, (32, 64))
    assert_equal(torch.compile(function, backend="aot_eager")(x), function(x))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks and all("fp4kit.torch" in why for why in breaks)  # nothing inside these functions was traced


@pytest.mark.parametrize("name", ["quantize", *exhaustive(["dequantize", "fake_quantize", "amax", "swizzle"])])
def test_where_no_break_is_allowed_the_error_names_what_can_be_traced(name):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call those of fp4kit\.torch, such as"):
        compiled(UNTRACED[name])(tensor(2, (32, 64)))


@pytest.mark.exhaustive
def test_the_compiler_is_imported_when_something_is_compiled():
    """torch._dynamo takes longer than the rest of fp4kit.torch."""
    code = "import sys, fp4kit.torch; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.compiler.assume_constant_result(lambda: 0).__dict__ == ft.functions._constant(lambda: 0).__dict__


def test_functions_called_inside_are_not_traced():
    """Functions that fp4kit's functions call are excluded from tracing, too.

    If torch.compile skips a function that has nothing to compile, it traces the functions that are called inside.
    """
    function = torch.compile(
        lambda x, recipe: fp4kit.dequantize(fp4kit.quantize(x * 2, recipe)) * x, backend="aot_eager"
    )
    torch._dynamo.utils.counters.clear()
    x = tensor(2, (16, 256))
    for recipe in fp4kit.recipes()[:3]:
        assert_equal(function(x, recipe), fp4kit.dequantize(fp4kit.quantize(x * 2, recipe)) * x)
    assert all("fp4kit.torch" in why for why in torch._dynamo.utils.counters["graph_break"])


# ---- torch.compile ----

OPTIONS = [
    {},
    {"pass_through": False},
    {"pass_through": False, "amax": 1.5},
    {"rounding": "stochastic", "seed": 2**64 - 3},
    {"axis": 0},
    {"rounding": "stochastic", "seed": SEED, "pass_through": False},
]


@pytest.mark.parametrize("recipe", [VARIED[0], *exhaustive(VARIED[1:])], ids=str)
def test_compiled_is_eager(recipe):
    x = tensor(2, (32, 64))
    for options in OPTIONS:

        def function(x, options=options):
            return ft.fake_quantize(x, recipe, **options)

        expected = value_and_gradient(function, x)
        assert_equal(value_and_gradient(compiled(function), x), expected)
        plain = {k: int(v) if k == "seed" else v for k, v in options.items() if k not in ("pass_through", "amax")}
        assert_same_bits(to_numpy(expected[0]), fp4kit.fake_quantize(to_numpy(x), recipe, **plain))


def train(model, steps=3):
    """Train a model with quantization-aware training; return the losses and the final weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = tensor(3, (16, 64)), tensor(4, (16, 32))
    losses = []
    for _ in range(steps):
        loss = ((model(x) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def a_linear_layer(settings):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
    assert ft.fake_quantize_model(layer, settings) == ["0.weight"]
    return layer


@pytest.mark.parametrize("backend", ["aot_eager", *exhaustive(["inductor"])])
@pytest.mark.parametrize("recipe", ["nvfp4-te", *exhaustive([VARIANT])], ids=str)
@pytest.mark.parametrize("pass_through", [True, False])
def test_training_of_a_linear_layer(backend, recipe, pass_through):
    """After training, compiled, eager and NumPy computations read bit-identical fake-quantized weights.

    Within one backend, the losses are equal, too.
    """
    settings = FakeQuantSettings(recipe, parameters=("*.weight",), pass_through=pass_through)
    eager, model = a_linear_layer(settings), a_linear_layer(settings)
    expected, found = train(eager), train(compiled(model, backend))
    if backend == "aot_eager":
        assert_equal(found, expected)
    read = compiled(lambda: model[0].weight * 1, backend)()
    original = to_numpy(model[0].parametrizations.weight.original)
    assert_same_bits(to_numpy(read), fp4kit.fake_quantize(original, recipe))
    assert_equal(read.detach(), model[0].weight.detach())


@pytest.mark.parametrize("dim", [0, 1])
def test_lengths_that_change_are_traced_once(dim):
    torch._dynamo.utils.counters.clear()
    function = compiled(lambda x: ft.fake_quantize(x * 2, "nvfp4-te", pass_through=False) + 1)
    for length in (32, 48, 160):
        x = tensor(length, (length, 32) if dim == 0 else (4, length))
        torch._dynamo.mark_dynamic(x, dim)
        assert_equal(function(x), ft.fake_quantize(x * 2, "nvfp4-te") + 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    if dim == 1:
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="nvfp4-te needs a multiple of 16; pad with"):
            function(tensor(1, (4, 40)))


def test_seeds_that_change_are_traced_twice():
    """A changing seed causes one retrace: the first trace treats it as a constant, the second as a number."""
    torch._dynamo.utils.counters.clear()
    function = compiled(lambda x, seed: ft.fake_quantize(x, "nvfp4-te", rounding="stochastic", seed=seed))
    for seed in (5, 7, 8, 9):
        assert_equal(function(X, seed), ft.fake_quantize(X, "nvfp4-te", rounding="stochastic", seed=seed))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@since_2_13()
def test_another_recipe_is_traced_anew():
    function = compiled(lambda x, recipe: ft.fake_quantize(x, recipe))
    for recipe in ("mxfp4", VARIANT, fp4kit.recipe("mxfp4-ocp"), replace(VARIANT, block=(1, 32)), VARIANT):
        assert_equal(function(X, recipe), ft.fake_quantize(X, recipe))


@since_2_13()
@pytest.mark.parametrize("recipe", [VARIED[0], *exhaustive(VARIED[1:])], ids=str)
def test_a_quantized_in_a_graph(recipe):
    """A Quantized may be the result, an intermediate value, or an argument of the graph."""
    x = tensor(5, (32, 64))
    q = ft.quantize(x, recipe)
    assert_equal(compiled(lambda x: ft.quantize(x, recipe))(x), q)
    assert_equal(compiled(lambda x: ft.dequantize(ft.quantize(x, recipe)) + 1)(x), ft.dequantize(q) + 1)
    decode = compiled(lambda q: ft.dequantize(q, torch.bfloat16))
    assert_equal(decode(q), ft.dequantize(q, torch.bfloat16))
    other = ft.quantize(x.to(torch.bfloat16), "mxfp8")
    assert_equal(decode(other), ft.dequantize(other, torch.bfloat16))


@pytest.mark.parametrize(
    "options", [{}, {"pass_through": False, "tensor_amax": [1.0, 2.0]}, {"pass_through": False}], ids=str
)
def test_compiled_groups(options):
    def function(*xs):
        return ft.fake_quantize_grouped(xs, "nvfp4-te", **options)

    xs = [tensor(6).requires_grad_(), tensor(7, (3, 64)).requires_grad_()]
    results = []
    for call in (function, compiled(function)):
        ys = call(*xs)
        results.append([*(y.detach() for y in ys), *torch.autograd.grad([(y * y).sum() for y in ys], xs)])
    assert_equal(results[1], results[0])


# ---- torch.export ----


class Fake(torch.nn.Module):
    def forward(self, x):
        return ft.fake_quantize(x, VARIANT, rounding="stochastic", seed=3) * 2


class Encode(torch.nn.Module):
    def forward(self, x):
        return ft.quantize(x, VARIANT)


class Decode(torch.nn.Module):
    def forward(self, q):
        return ft.dequantize(q)


@since_2_13()
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    rows = {0: torch.export.Dim("rows", min=2)}
    file = io.BytesIO()
    torch.export.save(torch.export.export(Fake(), (X,), strict=strict, dynamic_shapes=(rows,)), file)
    file.seek(0)
    again, other = torch.export.load(file).module(), tensor(8, (7, 32))
    assert_equal(again(other), Fake()(other))
    q = Encode()(X)
    assert_equal(torch.export.export(Decode(), (q,), strict=strict).module()(q), Decode()(q))


def test_export_of_a_quantized():
    assert_equal(torch.export.export(Encode(), (X,), strict=False).module()(X), Encode()(X))


class EncodeColumns(torch.nn.Module):
    def forward(self, x):
        return ft.quantize(x, "mxfp6-torchao-floor-e2m3", axis=0)


@pytest.mark.parametrize("module", [Encode(), EncodeColumns()], ids=["rows", "columns"])
def test_a_quantized_of_an_exported_program_is_saved_and_has_its_own_lengths(module):
    """A Quantized of an exported program can be saved by torch.export.save.

    Its shape must hold numbers, not symbols, also if lengths may change.
    """
    lengths = {0: 32 * torch.export.Dim("m", min=1), 1: 32 * torch.export.Dim("n", min=1)}
    x, other, file = tensor(7, (64, 128)), tensor(8, (96, 160)), io.BytesIO()
    program = torch.export.export(module, (x,), strict=False, dynamic_shapes=(lengths,))
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program.module(), torch.export.load(file).module()):
        q = exported(other)
        assert_equal(q, module(other))
        assert q.shape == (96, 160) and all(type(n) is int for n in q.shape) and q.recipe == module(other).recipe
        assert torch.equal(q.dequantize(), fp4kit.fake_quantize(other, q.recipe, axis=q.axis))


# ---- torch.func, checkpointing, autocast ----

STACK = tensor(9, (5, 32, 32))


@pytest.mark.parametrize("recipe", half(VARIED), ids=str)
def test_vmap_is_a_loop(recipe):
    def function(x):
        return ft.fake_quantize(x, recipe, pass_through=False)

    loop = torch.stack([function(x) for x in STACK])
    gradient = torch.func.grad(lambda x: (function(x) * x).sum())
    gradients = torch.stack([torch.autograd.functional.jacobian(lambda x: (function(x) * x).sum(), x) for x in STACK])
    assert_equal(torch.vmap(function)(STACK), loop)
    assert_equal(torch.vmap(function, in_dims=1, out_dims=1)(STACK.movedim(0, 1)).movedim(1, 0).contiguous(), loop)
    assert_equal(torch.vmap(torch.vmap(function))(STACK[:, None])[:, 0], loop)
    assert_equal(torch.vmap(gradient)(STACK), gradients)
    assert_equal(torch.func.grad(lambda s: (torch.vmap(function)(s) * s).sum())(STACK), gradients)
    assert_equal(compiled(torch.vmap(function))(STACK), loop)
    q = torch.vmap(lambda x: ft.quantize(x, recipe))(STACK)
    assert_equal(q.packed, torch.stack([ft.quantize(x, recipe).packed for x in STACK]))
    assert_equal(torch.vmap(lambda x: ft.dequantize(ft.quantize(x, recipe)))(STACK), loop)


def test_vmap_over_amaxes_and_random_bytes():
    amaxes = torch.tensor([0.5, 1, 2, 3, 40])
    found = torch.vmap(lambda x, a: ft.fake_quantize(x, "nvfp4-te", tensor_amax=a))(STACK, amaxes)
    assert_equal(
        found, torch.stack([ft.fake_quantize(x, "nvfp4-te", tensor_amax=a) for x, a in zip(STACK, amaxes, strict=True)])
    )
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 256, STACK.shape, np.uint8))

    def rounded(seed, x=STACK[0]):
        return ft.fake_quantize(x, "nvfp4-te", rounding="stochastic", seed=seed)

    assert_equal(torch.vmap(rounded)(random), torch.stack([rounded(seed) for seed in random]))
    assert_equal(torch.vmap(lambda x: rounded(3, x))(STACK), torch.stack([rounded(3, x) for x in STACK]))


def test_groups_under_torch_func():
    def function(xs):
        return sum((y * y).sum() for y in ft.fake_quantize_grouped(xs, "nvfp4-te", pass_through=False, amax=[1.0, 0.5]))

    xs = [tensor(6), tensor(7, (3, 64))]
    leaves = [x.clone().requires_grad_() for x in xs]
    function(leaves).backward()
    assert_equal(torch.func.grad(function)(xs), [x.grad for x in leaves])
    ys = torch.vmap(lambda x: ft.fake_quantize_grouped([x, 2 * x], "nvfp4-te"))(STACK)
    assert_equal(ys[1], torch.stack([ft.fake_quantize(2 * x, "nvfp4-te") for x in STACK]))


def test_functional_call_and_hessian():
    layer = a_linear_layer(FakeQuantSettings("nvfp4-te", parameters=("*.weight",), pass_through=False))
    parameters, x = dict(layer.named_parameters()), tensor(3, (2, 64))
    gradients = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert_equal(gradients[name], parameter.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def function(x):
        return ft.fake_quantize(x * 2, "nvfp4-te", rounding="stochastic", seed=5, pass_through=False) * x

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)

    assert_equal(value_and_gradient(checkpointed, X), value_and_gradient(function, X))


def test_autocast_leaves_the_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (ft.fake_quantize, compiled(ft.fake_quantize)):
            y = call(X, "nvfp4-te")
            assert_equal(y, ft.fake_quantize(X, "nvfp4-te"))
            assert y.dtype == torch.float32 and torch.nn.functional.linear(y, y).dtype == torch.bfloat16


@pytest.mark.parametrize("pass_through", [True, False])
def test_tangents_are_not_dropped_silently(pass_through):
    """Forward-mode differentiation raises an error.

    Without it, the operator would return a result without a tangent, which counts as a derivative of 0.
    """
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, torch.ones_like(X))
        for call in (ft.fake_quantize, lambda x, *args, **options: ft.fake_quantize_grouped([x], *args, **options)[0]):
            with pytest.raises(NotImplementedError, match="jvp"):
                call(x, "nvfp4-te", pass_through=pass_through)
            assert_equal(call(X, "nvfp4-te", pass_through=pass_through), fp4kit.fake_quantize(X, "nvfp4-te"))


def test_gradients_inside_of_compiled_code_are_right_or_an_error():
    """torch.func.grad inside compiled code gives the right gradient or raises an error.

    torch.compile itself would use 0 as the gradient of an autograd.Function there.
    """
    gradient = torch.func.grad(lambda x: (ft.fake_quantize(x, "nvfp4-te", pass_through=False) * 3).sum())
    try:
        found = compiled(gradient)(X)
    except Exception:
        return
    assert_equal(found, gradient(X))


BYTES = torch.arange(4 * 32, dtype=torch.uint8).reshape(4, 32)


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


@pytest.mark.parametrize("case", every(6, CALLS))
def test_opcheck(case):
    """torch.library.opcheck accepts every operator.

    It tests the schema, gradients, the meta implementation, and all of them with dynamic shapes.
    """
    name, arguments = CALLS[case]
    found = torch.library.opcheck(getattr(torch.ops.fp4kit, name).default, arguments())
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize("name", [r.id for r in RECIPES.values() if r.stochastic != "comfyui_nvfp4_cuda"])
@pytest.mark.parametrize("axis", [0, 1])
def test_meta_of_every_recipe(name, axis):
    """The meta implementation gives the shapes, dtypes and strides of the real one."""
    x, how = tensor(1, (128, 256)), {"axis": axis, **seeded(name, None)}
    assert_meta(lambda x: ft.fake_quantize(x, name, **how), x)
    if not RECIPES[name].fake_only:
        for layout in ("linear", "swizzled_128x4", "swizzled_8x4"):
            assert_meta(lambda x, s=layout: list(parts_of(ft.quantize(x, name, **how, scale_layout=s))[:4]), x)
            assert_meta(
                lambda x, s=layout: ft.dequantize(ft.quantize(x, name, **how, scale_layout=s), torch.float16), x
            )


def assert_meta(function, x):
    found, expected = function(x.to("meta")), function(x)
    for a, b in zip(*((y if isinstance(y, list) else [y]) for y in (found, expected)), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.is_meta and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
