"""Test fp4kit.jax: values and gradients are bit-identical to fp4kit's, eagerly and under jit, grad, vmap and scan.

A Quantized is a pytree, and linear equals the formulas of its docstring.
"""

import gc
import importlib
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import wrong_calls
from exhaustive import exhaustive
from inputs import BF16, NAMES, ordinary
from together import together
from wrong_calls import RANDOM, codes, fake, linear

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

jax = pytest.importorskip("jax")
jnp = importlib.import_module("jax.numpy")
fj = importlib.import_module("fp4kit.jax")


VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
VARIED = ["nvfp4-te", "mxfp4", "nvfp4-te-2d", VARIANT]
SMALL, OTHER = ordinary(1, (32, 64)), ordinary(2, (32, 64))


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Run the tests on the CPU even if JAX has a GPU. tests/cuda/test_gpu_wrappers.py runs them on a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def host(a):
    return np.asarray(a)


def both(function, x, grad):
    """Return the value of a function of x and its gradient for the upstream gradient `grad`.

    Eager and jitted calls must give equal bits.
    """

    def pulled(x, grad):
        y, pull = jax.vjp(function, x)
        return y, *pull(grad)

    plain, jitted = pulled(jnp.asarray(x), jnp.asarray(grad)), jax.jit(pulled)(x, grad)
    for a, b in zip(plain, jitted, strict=True):
        assert isinstance(a, jax.Array)
        assert_same_bits(host(a), host(b))
    return tuple(map(host, plain))


def same_quantized(q, expected):
    """Assert that a Quantized of JAX arrays has the bits and the attributes of one of NumPy arrays."""
    assert all(isinstance(array, jax.Array) for array in q.parts().values() if array is not None)
    assert q.to("numpy").equals(expected)


def test_amaxes_get_no_gradient_and_the_mask_is_differentiated_again():
    amax = jnp.float32(1)

    def loss(x, amax):
        return jnp.sum(fj.fake_quantize(x, "nvfp4-te", tensor_amax=amax, pass_through=False) * x)

    g, of_amax = jax.jit(jax.grad(loss, (0, 1)))(SMALL, amax)
    assert of_amax == 0 and g.any()
    again = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, amax)))(jnp.asarray(SMALL))
    assert_same_bits(host(again), 2 * (np.abs(SMALL) <= 1).astype(np.float32))


def test_a_traced_seed_in_a_scan():
    def step(w, seed):
        return fj.fake_quantize(w, "nvfp4-te", rounding="stochastic", seed=seed) * 1.25, None

    found, _ = jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(4)))(SMALL)
    expected = SMALL
    for seed in range(4):
        expected = fp4kit.fake_quantize(expected, "nvfp4-te", rounding="stochastic", seed=seed) * np.float32(1.25)
    assert_same_bits(host(found), expected)


@pytest.mark.parametrize("recipe", [VARIED[0], *exhaustive(VARIED[1:])], ids=str)
def test_vmap_is_a_loop(recipe):
    stack = ordinary(4, (3, 32, 64))
    y, g = both(jax.vmap(lambda x: fj.fake_quantize(x, recipe, pass_through=False)), stack, stack)
    for i in range(3):
        assert_same_bits(y[i], fp4kit.fake_quantize(stack[i], recipe))
        assert_same_bits(g[i], fp4kit.fake_quantize_backward(stack[i], stack[i], recipe, pass_through=False))
    q = jax.vmap(lambda x: fj.quantize(x, recipe))(stack)
    assert_same_bits(host(q.packed[1]), fp4kit.quantize(stack[1], recipe).packed)
    assert_same_bits(host(jax.vmap(fj.dequantize)(q)), y)
    nested = jax.vmap(jax.vmap(lambda x: fj.fake_quantize(x, recipe)), in_axes=1, out_axes=1)(stack[:, None])
    assert_same_bits(host(nested[:, 0]), y)


def test_vmap_over_amaxes():
    stack, amaxes = ordinary(4, (3, 32, 64)), np.array([1, 2, 40], np.float32)
    found = jax.vmap(lambda x, a: fj.fake_quantize(x, "nvfp4-te", tensor_amax=a))(stack, amaxes)
    for i in range(3):
        assert_same_bits(host(found[i]), fp4kit.fake_quantize(stack[i], "nvfp4-te", tensor_amax=amaxes[i]))


@pytest.mark.parametrize("name", ["mxfp4-ocp", "mxfp4-te", "mxfp8-te", "nvfp4-te", "nvfp4-flashinfer"])
def test_subnormal_numbers(name):
    """Subnormals are kept unless the producer flushes them.

    The threads in which JAX runs callbacks flush subnormals to zero, and XLA may do so, too.
    """
    tiny = np.exp2(np.random.default_rng(2).integers(-149, -120, (4, 64))).astype(np.float32)
    tiny[0, ::3], tiny[1, 5] = -0.0, -1e-45
    q = fp4kit.quantize(tiny, name)
    same_quantized(jax.jit(lambda x: fj.quantize(x, name))(tiny), q)
    assert_same_bits(host(jax.jit(fj.dequantize)(jax.tree.map(jnp.asarray, q))), fp4kit.dequantize(q))
    y, g = both(lambda x: fj.fake_quantize(x, name, pass_through=False, amax=2.0**-130), tiny, tiny)
    assert_same_bits(y, fp4kit.fake_quantize(tiny, name))
    assert_same_bits(g, fp4kit.fake_quantize_backward(tiny, tiny, name, amax=2.0**-130, pass_through=False))
    assert name != "mxfp4-ocp" or (y[np.abs(tiny) < 2.0**-126] != 0).any()


def test_gradients_stop_at_codes():
    g = jax.grad(lambda x: jnp.sum(fj.dequantize(fj.quantize(x, "nvfp4-te")) * x))(jnp.asarray(SMALL))
    assert_same_bits(host(g), fp4kit.fake_quantize(SMALL, "nvfp4-te"))


# ---- a Quantized is a pytree ----


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4", VARIANT], ids=str)
def test_a_quantized_is_a_pytree(recipe):
    q = fj.quantize(jnp.asarray(SMALL), recipe)
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == (4 if q.tensor_scale is not None else 2)
    assert tree == jax.tree.structure(fj.quantize(jnp.asarray(OTHER), recipe)) and hash(tree) == hash(
        jax.tree.structure(q)
    )
    assert tree != jax.tree.structure(fj.quantize(jnp.asarray(SMALL), "mxfp8"))
    for other in (
        jax.tree.unflatten(tree, leaves),
        jax.tree.map(lambda a: a, q),
        jax.device_put(q),
        jax.jit(lambda q: q)(q),
    ):
        same_quantized(other, q)
    placeholders = jax.tree.unflatten(tree, [object()] * len(leaves))
    assert type(placeholders.packed) is object and placeholders.shape == q.shape
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(q)[0][0]) == ".packed"
    assert jax.eval_shape(lambda x: fj.quantize(x, recipe), SMALL).packed.shape == q.packed.shape


def test_a_quantized_is_traced_once_for_each_recipe():
    traced = []

    @jax.jit
    def decode(q):
        traced.append(q.recipe)
        return fj.dequantize(q)

    for recipe in ("mxfp4", VARIANT, "mxfp4-ocp", VARIANT):
        for x in (SMALL, OTHER):
            assert_same_bits(host(decode(fj.quantize(jnp.asarray(x), recipe))), fp4kit.fake_quantize(x, recipe))
    assert traced == [fp4kit.recipe("mxfp4"), VARIANT]


def test_in_a_scan_and_checkpointed():
    weights = jax.tree.map(lambda *a: jnp.stack(a), *(fj.quantize(jnp.asarray(x), "nvfp4-te") for x in (SMALL, OTHER)))
    total, _ = jax.lax.scan(lambda s, q: (s + fj.dequantize(q), None), jnp.zeros(SMALL.shape), weights)
    expected = np.float32(0) + fp4kit.fake_quantize(SMALL, "nvfp4-te") + fp4kit.fake_quantize(OTHER, "nvfp4-te")
    assert_same_bits(host(total), expected)
    plain = lambda x: jnp.sum(fj.fake_quantize(x, "nvfp4-te", pass_through=False) ** 2)  # noqa: E731
    assert_same_bits(host(jax.jit(jax.grad(jax.checkpoint(plain)))(SMALL)), host(jax.jit(jax.grad(plain))(SMALL)))


# ---- errors ----

MATRIX = ordinary(1, (64, 128))
ROWS = [
    *wrong_calls.ROWS,
    (lambda f, x: f.fake_quantize(x.astype(int), "nvfp4-te"), TypeError, "fake_quantize: x is int32; needs"),
    (lambda f, x: f.fake_quantize(np.ones((2, 16)), "nvfp4-te"), TypeError, "fake_quantize: x is float64"),
    (lambda f, x: f.fake_quantize([1.0], "nvfp4"), TypeError, "fake_quantize: x is list; needs a jax.Array"),
    (fake("nvfp5"), ValueError, "fake_quantize: no recipe is called 'nvfp5'; did"),
    (fake("nvfp4", tensor_amax=np.nan), ValueError, "fake_quantize: tensor_amax holds"),
    (
        fake("nvfp4", amax=jnp.ones(3), pass_through=False),
        ValueError,
        "fake_quantize: amax has shape (3,); x (64, 128)",
    ),
    (lambda f, x: f.dequantize(f.quantize(x, "nvfp4"), "float64"), TypeError, "dequantize: dtype is float64"),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["plain", "jit", "vmap"])
@together("call, kind, text", ROWS)
def test_errors_before_any_work(call, kind, text, wrap):
    x = jnp.asarray(MATRIX)
    with pytest.raises(kind, match="^" + re.escape(text)):
        wrap(lambda x: jax.tree.leaves(call(fj, x)))(x[None] if wrap is jax.vmap else x)


@pytest.mark.exhaustive
def test_large_arrays_and_many_callbacks():
    """Large arrays in many callbacks at once cause no deadlock: a callback must not wait for work that waits for it."""
    x = ordinary(5, (2048, 2048))
    step = jax.jit(lambda x: fj.fake_quantize(fj.fake_quantize(x @ x, "mxfp4") + x, "nvfp4-te"))
    for found in [step(x) for _ in range(3)]:
        assert found.shape == x.shape and bool(jnp.isfinite(found).all())


@pytest.mark.parametrize("rounds", [5, *exhaustive([150])])
def test_calls_leave_nothing_behind(rounds):
    """Memory must not grow over many calls. An exhaustive run makes 1,600 calls, four per round."""
    step = jax.jit(jax.grad(lambda x: jnp.sum(fj.fake_quantize(x, "nvfp4-te", pass_through=False) ** 2)))

    def work():
        x = jnp.asarray(SMALL)
        return step(x), fj.fake_quantize_grouped([x, x], VARIANT), fj.dequantize(fj.quantize(x, "nvfp4-te"))

    work()
    gc.collect()
    alive = len(jax.live_arrays())
    for _ in range(rounds):
        work()
    gc.collect()
    assert len(jax.live_arrays()) == alive


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
def test_parts_of_4_bit_dtypes(dtype):
    """Quantized.from_parts takes JAX's 4-bit elements, one per byte, and gives JAX arrays."""
    name = {"float4_e2m1fn": "mxfp4-ocp", "int4": next(name for name in NAMES if name.startswith("int4"))}[dtype]
    q = fj.quantize(jnp.asarray(ordinary(0, (4, 64), BF16)), name)
    codes = jnp.stack([q.packed & 15, q.packed >> 4], -1).reshape(4, 64).astype("uint4")
    elements = jax.lax.bitcast_convert_type(codes, dtype)
    found = fp4kit.Quantized.from_parts(elements, q.block_scale, q.tensor_scale, recipe=name)
    assert isinstance(found.packed, jax.Array)
    assert_same_bits(np.asarray(found.packed), np.asarray(q.packed))


SEEDED = {
    "fake_quantize": fj.fake_quantize,
    "quantize": lambda *args, **options: fj.quantize(*args, **options).packed,
    "fake_quantize_grouped": lambda x, *args, **options: fj.fake_quantize_grouped([x], *args, **options)[0],
}
SEEDS = {
    "fraction": lambda: jnp.float32(3.7),
    "fraction of NumPy": lambda: np.float32(3.7),
    "bool": lambda: jnp.array(True),
    "key": lambda: jax.random.key(0),
}


@pytest.mark.parametrize("op", SEEDED)
@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_that_are_no_integers(op, seed):
    """A seed that is not an integer is rejected.

    Otherwise 3.7 would count as 3, True as 1, and a JAX key would give an unclear error.
    """
    x, given = jnp.asarray(SMALL), SEEDS[seed]()
    for call in (SEEDED[op], jax.jit(SEEDED[op], static_argnums=1, static_argnames="rounding")):
        with pytest.raises(
            TypeError, match=rf"^{op}: seed is a single {re.escape(str(given.dtype))}; needs an int, a 0-d integer"
        ):
            call(x, "mxfp4", seed=given, **RANDOM)


VALUES = [
    (codes("mxfp4", seed=np.int32(-1), **RANDOM), ValueError, "quantize: seed is -1; needs 0 to"),
    (
        lambda f, x: jax.jit(lambda x: fp4kit.fake_quantize(x, "mxfp4"))(x),
        TypeError,
        "fake_quantize: x is traced by JAX",
    ),
    (
        lambda f, x: jax.jit(lambda q: q.dequantize())(f.quantize(x, "mxfp4")),
        TypeError,
        "dequantize: packed is traced by",
    ),
    (lambda f, x: fp4kit.quantize(gone(x), "mxfp4"), BufferError, "quantize: x is an ArrayImpl without memory"),
]


def gone(x):
    x = jnp.array(x)
    x.delete()
    return x


@together("call, kind, text", VALUES)
def test_errors_of_values(call, kind, text):
    with pytest.raises(kind, match="^" + re.escape(text)):
        call(fj, jnp.asarray(SMALL))


def test_a_quantized_without_values_can_be_shown():
    """A Quantized without values can be printed: the result of jax.eval_shape, and one inside a jitted function."""
    q, shown = fj.quantize(jnp.asarray(SMALL), "nvfp4-te"), []
    trees = [
        jax.eval_shape(lambda x: fj.quantize(x, "nvfp4-te"), SMALL),
        *(
            jax.tree.map(lambda a, leaf=leaf: leaf, q)
            for leaf in (None, 1, "leaf", object(), jax.sharding.PartitionSpec("d"))
        ),
        jax.vmap(lambda x: fj.quantize(x, "nvfp4-te"))(np.stack([SMALL, SMALL])),
        jax.tree.map(gone, q),
    ]
    jax.jit(lambda q: shown.append((str(q), repr(q), q._repr_html_())))(q)
    for text, line, html in [*shown, *((str(t), repr(t), t._repr_html_()) for t in trees)]:
        assert (
            text == line
            and line.startswith("Quantized(nvfp4-te, shape=(32, 64), dtype=float32, axis=1,")
            and html is None
        )
    assert "zero blocks" in str(q) and "zero blocks" in q._repr_html_()


@pytest.mark.exhaustive
def test_results_are_where_the_argument_is_and_move_as_it_does():
    """A result is on the argument's device, and committed to it only if the argument is. Sharded arrays are rejected.

    The test uses two CPU devices.
    """
    program = """
        import jax, numpy as np, fp4kit, fp4kit.jax as fj
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        x, (first, second) = np.ones((4, 32), np.float32), jax.devices()
        for call in (fj.fake_quantize, fp4kit.fake_quantize, lambda x, r: fj.quantize(x, r).packed, lambda x, r: fp4kit.amax(x)):
            free, bound = jax.numpy.asarray(x), jax.device_put(x, second)
            assert not call(free, "nvfp4").committed and call(free, "nvfp4").device == first
            assert call(bound, "nvfp4").committed and call(bound, "nvfp4").device == second
            with jax.default_device(second):
                free = jax.numpy.asarray(x)
            assert not call(free, "nvfp4").committed and call(free, "nvfp4").device == second
            assert (bound * call(jax.numpy.asarray(x), "nvfp4").max()).device == second
            sharded = jax.device_put(x, NamedSharding(Mesh(np.array([first, second]), ("d",)), P("d")))
            try:
                call(sharded, "nvfp4")
            except BufferError as error:
                assert "x is an ArrayImpl without memory of its own on one device" in str(error), error
            else:
                raise AssertionError
            assert np.array_equal(jax.jit(lambda x: fj.fake_quantize(x, "nvfp4"))(sharded), fp4kit.fake_quantize(x, "nvfp4"))
    """  # noqa: E501
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


M, N, K = 32, 64, 96
X, W = ordinary(1, (M, K)), ordinary(2, (N, K))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}


def loss_of(x, **options):
    return (fj.linear(x, W, **TE, **options) ** 2).sum()


def test_seeds_may_be_traced_and_maps_are_loops():
    random = {"backward": "quantized", "rounding": "stochastic"}
    traced = jax.jit(jax.grad(lambda x, seed: loss_of(x, seed=seed, **random)))
    for seed in (4, 5):
        found = traced(X, jnp.int32(seed))
        assert_same_bits(np.asarray(found), np.asarray(jax.grad(partial(loss_of, seed=seed, **random))(jnp.asarray(X))))
    stack, gradient = jnp.stack([X, X * 3]), jax.grad(partial(loss_of, seed=4, **random))
    for each, one in zip(jax.vmap(gradient)(stack), stack, strict=True):
        assert_same_bits(np.asarray(each), np.asarray(gradient(one)))


@pytest.mark.exhaustive
def test_gradients_of_gradients():
    """Second derivatives are those of the straight-through rule, and an error for quantized gradients."""
    x = jnp.asarray(X[:16])

    def second(loss):
        return np.asarray(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x))

    def by_rule(x):
        rule = fj.fake_quantize(x, "nvfp4-te") @ fp4kit.fake_quantize(W, "nvfp4-te-2d").T
        return ((rule + jax.lax.stop_gradient(fj.linear(x, W, **TE) - rule)) ** 2).sum()

    expected = second(by_rule)
    np.testing.assert_allclose(second(loss_of), expected, 1e-4, 1e-4 * np.abs(expected).max())  # other order of sums
    with pytest.raises(NotImplementedError, match=r"^linear: the gradients of backward='quantized' have no"):
        second(partial(loss_of, backward="quantized"))


BYTES = np.zeros(3, np.uint8)
LINEAR_ROWS = [
    *wrong_calls.LINEAR,
    (lambda f, x, w: linear()(f, [1.0], w), TypeError, "linear: x is list; needs a jax.Array"),
    (lambda f, x, w: linear()(f, x, [1.0]), TypeError, "linear: w is list; needs a jax.Array"),
    (lambda f, x, w: linear()(f, x.astype(int), w), TypeError, "linear: x is int64; needs float32"),
    (
        linear(backward="quantized", seed=BYTES),
        ValueError,
        "linear: seed has shape (3,); needs an int, or a 0-d integer",
    ),
]


def test_errors():
    for call, kind, text in LINEAR_ROWS:
        with pytest.raises(kind, match="^" + re.escape(text)):
            call(fj, X, W)
    for call, options, text in wrong_calls.LINEAR_OF_CODES:
        with pytest.raises(ValueError, match="^" + re.escape(text)):
            call(fj, X, fj.quantize(jnp.asarray(W), "nvfp4-te", **options))
