"""Test on a GPU fp4kit.torch, compiled and captured, and fp4kit.jax in XLA programs: they give the bits of the CPU."""

import importlib

import numpy as np
import pytest
from inputs import ordinary
from on_gpu import DEVICES
from tensors import since_2_13

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.settings import FakeQuantSettings

# raised by the compilers
WARNINGS = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future")]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device"), *WARNINGS]
X, GRAD = ordinary(1, (64, 128)), ordinary(2, (64, 128))
RECIPES = pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "nvfp4-te-2d"])
CLIP = {"pass_through": False}


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    module._dynamo.reset()
    return module


@RECIPES
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_torch_compiled(torch, recipe, backend):
    ft = importlib.import_module("fp4kit.torch")
    function = lambda w: ft.fake_quantize(w, recipe, **CLIP)  # noqa: E731
    function = function if backend is None else torch.compile(function, fullgraph=True, backend=backend)
    w = torch.from_numpy(X).cuda().requires_grad_()
    y = function(w)
    y.backward(torch.from_numpy(GRAD).cuda())
    assert_same_bits(y.detach().cpu().numpy(), fp4kit.fake_quantize(X, recipe))
    assert_same_bits(w.grad.cpu().numpy(), fp4kit.fake_quantize_backward(GRAD, X, recipe, **CLIP))


@since_2_13()
@RECIPES
def test_torch_quantize(torch, recipe):
    ft = importlib.import_module("fp4kit.torch")
    q = torch.compile(lambda x: ft.quantize(x, recipe), fullgraph=True, backend="aot_eager")(torch.from_numpy(X).cuda())
    expected = fp4kit.quantize(X, recipe)
    assert q.packed.is_cuda
    assert_same_bits(q.packed.cpu().numpy(), expected.packed)
    assert_same_bits(q.block_scale.cpu().numpy(), expected.block_scale)
    assert_same_bits(ft.dequantize(q).cpu().numpy(), fp4kit.dequantize(expected))


@pytest.mark.parametrize("call", ["single", "grouped", "quantize"])
def test_torch_opcheck(torch, call):
    importlib.import_module("fp4kit.torch")  # registers the operators
    x, plain = torch.from_numpy(X).cuda().requires_grad_(), ("nearest", None)
    arguments = {
        "single": ("fake_quantize", (x, "nvfp4-te", -1, None, None, *plain, None, False)),
        "grouped": ("fake_quantize_grouped", ([x, x[:2].detach()], "nvfp4-te", -1, [], [], *plain, [], False)),
        "quantize": ("quantize", (x.detach(), "nvfp4-te", 0, None, "linear", *plain, "False", None)),
    }
    name, given = arguments[call]
    assert set(torch.library.opcheck(getattr(torch.ops.fp4kit, name).default, given).values()) == {"SUCCESS"}


def test_torch_in_a_cuda_graph(torch):
    ft = importlib.import_module("fp4kit.torch")
    layer = torch.nn.Linear(128, 64, device="cuda")
    ft.fake_quantize_model(layer, FakeQuantSettings("nvfp4-te", parameters=("weight",)))
    x = torch.from_numpy(X).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = layer.weight * 1
    original = layer.parametrizations.weight.original
    with torch.no_grad():
        original.copy_(torch.from_numpy(X))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(y.cpu().numpy(), fp4kit.fake_quantize(X, "nvfp4-te"))


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "nvfp4-te-2d"])
@pytest.mark.parametrize("wrap", ["plain", "jit", "vmap"])
def test_jax_programs(recipe, wrap):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    fj = importlib.import_module("fp4kit.jax")
    stack, upstream = np.stack([X, 3 * X]), np.stack([GRAD, GRAD])

    def both(x, grad):
        y, pull = jax.vjp(lambda x: fj.fake_quantize(x, recipe, **CLIP), x)
        q = fj.quantize(x, recipe)
        return y, *pull(grad), q.packed, fj.dequantize(q)

    functions = {"plain": both, "jit": jax.jit(both), "vmap": jax.jit(jax.vmap(both))}
    given = (stack, upstream) if wrap == "vmap" else (X, GRAD)
    found = [np.asarray(a) for a in functions[wrap](*map(jax.numpy.asarray, given))]
    for i, x in enumerate(stack if wrap == "vmap" else [X]):
        q = fp4kit.quantize(x, recipe)
        gradient = fp4kit.fake_quantize_backward(GRAD, x, recipe, **CLIP)
        expected = fp4kit.fake_quantize(x, recipe), gradient, q.packed, fp4kit.dequantize(q)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a[i] if wrap == "vmap" else a, b)
