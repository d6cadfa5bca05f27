"""Test the arguments of fp4kit.jax: errors name the function, results are on the argument's device.

A Quantized without values can be printed.
"""

import importlib
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from inputs import ordinary

import fp4kit

jax = pytest.importorskip("jax")
jnp = importlib.import_module("jax.numpy")
fj = importlib.import_module("fp4kit.jax")

SMALL = ordinary(1, (32, 64))
STOCHASTIC = {"rounding": "stochastic"}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


CALLS = {
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


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_that_are_no_integers(op, seed):
    """A seed that is not an integer is rejected.

    Otherwise 3.7 would count as 3, True as 1, and a JAX key would give an unclear error.
    """
    x, given = jnp.asarray(SMALL), SEEDS[seed]()
    for call in (CALLS[op], jax.jit(CALLS[op], static_argnums=1, static_argnames="rounding")):
        with pytest.raises(
            TypeError, match=rf"^{op}: seed is a single {re.escape(str(given.dtype))}; needs an int, a 0-d integer"
        ):
            call(x, "mxfp4", seed=given, **STOCHASTIC)


BAD = {
    "flag": (lambda x: fj.fake_quantize(x, "mxfp4", pass_through="no"), TypeError, "fake_quantize: pass_through is"),
    "flag of a group": (
        lambda x: fj.fake_quantize_grouped([x], "mxfp4", pass_through=2),
        TypeError,
        "fake_quantize_grouped: pass_through is 2;",
    ),
    "bool axis": (lambda x: fj.quantize(x, "mxfp4", axis=True), TypeError, "quantize: axis is True; needs an int"),
    "bool seed": (
        lambda x: fj.fake_quantize(x, "mxfp4", seed=True, **STOCHASTIC),
        TypeError,
        "fake_quantize: seed is True; needs an int",
    ),
    "negative seed": (
        lambda x: fj.fake_quantize(x, "mxfp4", seed=-1, **STOCHASTIC),
        ValueError,
        "fake_quantize: seed is -1; needs 0 to",
    ),
    "negative seed of an array": (
        lambda x: fj.quantize(x, "mxfp4", seed=np.int32(-1), **STOCHASTIC),
        ValueError,
        "quantize: seed is -1; needs 0 to",
    ),
    "large seed": (
        lambda x: fj.quantize(x, "mxfp4", seed=2**64, **STOCHASTIC),
        ValueError,
        "quantize: seed is 18446744073709551616; needs 0 to 2^64 - 1",
    ),
    "axis": (
        lambda x: fj.fake_quantize_grouped([x], "mxfp4", axis=1.5),
        TypeError,
        "fake_quantize_grouped: axis is 1.5; needs",
    ),
    "none": (lambda x: fj.fake_quantize_grouped(None, "mxfp4"), TypeError, "fake_quantize_grouped: xs is a NoneType"),
    "number": (
        lambda x: fj.fake_quantize_grouped(x[0, 0], "mxfp4"),
        ValueError,
        "fake_quantize_grouped: xs is one 0-d array; needs a",
    ),
    "traced": (
        lambda x: jax.jit(lambda x: fp4kit.fake_quantize(x, "mxfp4"))(x),
        TypeError,
        "fake_quantize: x is traced by JAX and has no values yet",
    ),
    "codes that are traced": (
        lambda x: jax.jit(lambda q: q.dequantize())(fj.quantize(x, "mxfp4")),
        TypeError,
        "dequantize: packed is traced by JAX",
    ),
    "deleted": (lambda x: fp4kit.quantize(gone(x), "mxfp4"), BufferError, "quantize: x is a ArrayImpl without memory"),
}


def gone(x):
    x = jnp.array(x)
    x.delete()
    return x


@pytest.mark.parametrize("case", BAD)
def test_errors_carry_the_name_of_the_function(case):
    call, kind, text = BAD[case]
    with pytest.raises(kind, match="^" + re.escape(text)):
        call(jnp.asarray(SMALL))


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
                assert "x is a ArrayImpl without memory of its own on one device" in str(error), error
            else:
                raise AssertionError
            assert np.array_equal(jax.jit(lambda x: fj.fake_quantize(x, "nvfp4"))(sharded), fp4kit.fake_quantize(x, "nvfp4"))
    """  # noqa: E501
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
