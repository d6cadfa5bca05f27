"""Test fp4kit.torch and fp4kit.jax alike: values and gradients are bit-identical to the definitions of fp4kit.

JAX calls are made with values and inside jax.jit. What only one of the libraries has is tested in its own folder.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from exhaustive import every_row, exhaustive, half
from frameworks import Jax, Torch
from inputs import BF16, STOCHASTIC, ordinary, seeded
from tensors import to_torch

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

X, GRAD = ordinary(1, (64, 128)), ordinary(2, (64, 128))
VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
rng = np.random.default_rng(5)


def same_quantized(lib, q, expected):
    """Assert that a Quantized of the library's arrays has the bits and the attributes of one of NumPy arrays."""
    assert all(isinstance(array, lib.kind) for array in q.parts().values() if array is not None)
    assert q.to("numpy").equals(expected)


def cases(of_torch, of_jax):
    """Return (library, ...) as parameters of a test. Other runs than exhaustive ones take every other one of JAX."""
    found = [pytest.param(Torch, *case) for case in of_torch]
    return found + [
        pytest.param(Jax, *case, marks=pytest.mark.exhaustive if i % 2 else ()) for i, case in enumerate(of_jax)
    ]


FORMS = [(-1, np.float32), (0, BF16), (-1, np.float16), (0, np.float32), (-1, BF16), (0, np.float16)]
EVERY = [[(name, *form) for form in forms for name in RECIPES] for forms in (FORMS, FORMS[:3])]


@pytest.mark.parametrize(("lib", "name", "axis", "dtype"), cases(*EVERY), indirect=["lib"])
def test_every_recipe(lib, name, axis, dtype):
    """The forward result, both kinds of gradient, codes and values equal those of calls on NumPy arrays."""
    f = lib.functions
    x, grad = ordinary(1, (128, 128), dtype), ordinary(3, (128, 128), dtype)
    how = {"axis": axis, **seeded(name, x)}
    own = {key: lib.seed(value) if isinstance(value, np.ndarray) else value for key, value in how.items()}
    if not RECIPES[name].fake_only:
        expected = fp4kit.quantize(x, name, **how)
        for way in lib.ways:
            q = way(lambda x: f.quantize(x, name, **own))(lib.array(x))
            same_quantized(lib, q, expected)
            assert_same_bits(lib.host(way(f.dequantize)(q)), fp4kit.dequantize(expected))
    values = fp4kit.fake_quantize(x, name, **how)
    for through in (True, False) if isinstance(lib, Torch) else (False,):
        y, g = lib.vjp(lambda w, p=through: f.fake_quantize(w, name, pass_through=p, **own), x, grad)
        assert_same_bits(y, values)
        assert_same_bits(g, fp4kit.fake_quantize_backward(grad, x, name, axis=axis, pass_through=through))


def test_recipes_that_only_round_stochastically_need_a_seed(lib):
    f, x = lib.functions, lib.array(X)
    for r in (r for r in RECIPES.values() if r.stochastic_only):
        coded = [partial(f.quantize, x, r.id), partial(f.linear, x, x, r, r)] * (not r.fake_only)
        for call in (partial(f.fake_quantize, x, r), partial(f.fake_quantize_grouped, [x], r), *coded):
            with pytest.raises(ValueError, match=f"rounding is 'nearest', but {r.id} only rounds stochastically"):
                call()


SEEDED = [(name,) for name in STOCHASTIC]


@pytest.mark.parametrize(("lib", "name"), cases(SEEDED, SEEDED), indirect=["lib"])
def test_the_same_seed_gives_the_same_bits(lib, name):
    """Seeds are ints, integers of NumPy, 0-d arrays and random bytes."""
    f, x = lib.functions, lib.array(X)
    if RECIPES[name].fake_rule is not None:
        with pytest.raises(ValueError, match=r"fake_quantize: .* rounds to nearest only"):
            f.fake_quantize(x, name, rounding="stochastic", seed=7)
        return
    random = rng.integers(0, 256, X.shape, np.uint8)
    seeds = [(n, n) for n in (0, 7, 2**63 - 1, 2**63, 2**64 - 1)]
    for number, seed in (*seeds, (9, lib.seed(9)), (5, np.int32(5)), (random, lib.seed(random))):
        options = {"rounding": "stochastic", "seed": seed}
        expected = fp4kit.quantize(X, name, rounding="stochastic", seed=number)
        for way in lib.ways:
            same_quantized(lib, way(lambda x, o=options: f.quantize(x, name, **o))(x), expected)
            y = way(lambda x, o=options: f.fake_quantize(x, name, **o))(x)
            assert_same_bits(lib.host(y), fp4kit.fake_quantize(X, name, rounding="stochastic", seed=number))


@pytest.mark.parametrize(
    "recipe", half(["nvfp4-te", "mxfp4", "nvfp4-te-2d", "nvfp4-te-4over6-mae-256", "int8-modelopt", VARIANT]), ids=str
)
def test_clipped_at_the_amax_that_is_used(lib, recipe):
    """The gradient is clipped at amax if it is given, else at tensor_amax, else at the amax that the recipe computes.

    Each may be a number, an array or a tensor.
    """
    f = lib.functions
    assert_same_bits(lib.vjp(lambda w: f.fake_quantize(w, recipe), X, GRAD)[1], GRAD)
    takes = fp4kit.recipe(recipe).tensor_scaling == "tensor"
    for tensor_amax in (None, 2.5, np.float32(2.5), lib.number(2.5), 3) if takes else (None,):
        for amax in (None, 1.5, lib.number(1.5)):
            options = {"tensor_amax": tensor_amax, "amax": amax, "pass_through": False}
            y, g = lib.vjp(lambda w, o=options: f.fake_quantize(w, recipe, **o), X, GRAD)
            limit = tensor_amax if amax is None else amax
            limit, given = (None if a is None else np.float32(a) for a in (limit, tensor_amax))
            assert_same_bits(y, fp4kit.fake_quantize(X, recipe, tensor_amax=given))
            assert_same_bits(g, fp4kit.fake_quantize_backward(GRAD, X, recipe, amax=limit, pass_through=False))
            assert limit is None or (g != GRAD).any()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (32,), (2, 3, 4, 32)])
def test_shapes(lib, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    y, g = lib.vjp(lambda w: lib.functions.fake_quantize(w, "nvfp4-te", pass_through=False), x, x)
    assert_same_bits(y, fp4kit.fake_quantize(x, "nvfp4-te"))
    assert_same_bits(g, fp4kit.fake_quantize_backward(x, x, "nvfp4-te", pass_through=False))
    same_quantized(lib, lib.functions.quantize(lib.array(x), "nvfp4-te"), fp4kit.quantize(x, "nvfp4-te"))


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-flashinfer"])
def test_special_values(lib, name):
    """Zeros of both signs, infinities, NaN and the largest numbers give fp4kit's bits, subnormals PyTorch's calls too.

    XLA itself may flush subnormals.
    """
    tiny = (1e-45, -1e-38) if isinstance(lib, Torch) else (6, -6)
    x = np.array([0, -0.0, *tiny, np.inf, -np.inf, np.nan, 3.4e38] * 4, np.float32).reshape(1, 32)
    f = lib.functions
    y, g = lib.vjp(lambda w: f.fake_quantize(w, name, pass_through=False, amax=float("inf")), x, x)
    assert_same_bits(y, fp4kit.fake_quantize(x, name))
    assert_same_bits(g, np.where(np.isnan(x), np.float32(0), x))


@pytest.mark.parametrize("recipe", ["nvfp4-te", *exhaustive(["mxfp4-flashinfer", "int4-qat", VARIANT])], ids=str)
@pytest.mark.parametrize("pass_through", [True, False])
def test_groups_are_loops(lib, recipe, pass_through):
    f, arrays = lib.functions, [ordinary(i, s) for i, s in enumerate([(4, 128), (0, 128), (64, 256), (1, 128)])]
    given = [None, [1.0, 2.0, np.float32(3), lib.number(4.0)], lib.number([1.0, 2, 3, 4])]
    for amaxes in given if recipe == "nvfp4-te" else [None]:
        options = {"tensor_amax": amaxes, "pass_through": pass_through}
        ys, gs = lib.vjp(lambda xs, o=options: f.fake_quantize_grouped(xs, recipe, **o), arrays, arrays)
        for i, (y, g, a) in enumerate(zip(ys, gs, arrays, strict=True)):
            amax = None if amaxes is None else np.float32(amaxes[i])
            assert_same_bits(y, fp4kit.fake_quantize(a, recipe, tensor_amax=amax))
            assert_same_bits(g, fp4kit.fake_quantize_backward(a, a, recipe, amax=amax, pass_through=pass_through))
    stacked = f.fake_quantize_grouped(lib.array(np.ones((3, 2, 128), np.float32)), recipe)
    assert [y.shape for y in stacked] == [(2, 128)] * 3
    assert f.fake_quantize_grouped([], recipe) == []


@pytest.mark.parametrize("turn", [1, -1])
def test_groups_of_two_libraries_are_refused(lib, turn):
    x = np.ones((32, 64), np.float32)
    xs = [x, lib.array(x)][::turn]
    for call in (fp4kit.quantize_grouped, fp4kit.fake_quantize_grouped, fp4kit.amax_grouped, fp4kit.GroupedPlan):
        with pytest.raises(ValueError, match=r"xs\[0\] is an array of .* and xs\[1\] of .*; needs arrays of one"):
            call(xs, "nvfp4-te")


def test_quantize_options_and_dtypes(lib):
    f, options = lib.functions, {"scale_layout": "swizzled_128x4", "hadamard": "no_signs", "axis": 0}
    for amax in (np.float32(3), lib.number(3.0)):
        expected = fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.float32(3), **options)
        for way in lib.ways:
            q = way(lambda x, a=amax: f.quantize(x, "nvfp4-te", tensor_amax=a, **options))(lib.array(X))
            same_quantized(lib, q, expected)
    q = f.quantize(lib.array(X), VARIANT)
    for dtype in (np.float16, BF16, None):
        wanted = dtype if dtype is None or isinstance(lib, Jax) else to_torch(np.zeros(1, dtype)).dtype
        expected = fp4kit.dequantize(fp4kit.quantize(X, VARIANT), dtype or np.float32)
        assert_same_bits(lib.host(f.dequantize(q, wanted)), expected)


M, N, K = 32, 64, 96
LEFT, W, OF_PRODUCT = ordinary(1, (M, K)), ordinary(2, (N, K)), ordinary(3, (M, N))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}
TE_BACKWARD = {"backward": "quantized", "rounding": "stochastic", "seed": 2**63 + 1, "hadamard": True}
SLOW = replace(fp4kit.unit("sm90"), id="sm90-slow", promote=128)
SUMS = (1, 2)  # the gradients, whose order of sums XLA chooses unless they are products of quantized operands
PAIRS = [
    ("nvfp4-te", "nvfp4-te-2d", "sm100"),
    ("mxfp8-te", "mxfp4-ocp", "exact"),
    ("mxfp4-ocp", "mxfp4-ocp", "exact"),
    ("int8-modelopt", "nvfp4-te", "dequantized"),
]


def both(lib, x, w, grad, **options):
    """Return y and the gradients of x and w, for the upstream gradient `grad`, as NumPy arrays."""
    near = () if options.get("backward") == "quantized" else SUMS
    y, gradients = lib.vjp(lambda xs: lib.functions.linear(*xs, **options), [x, w], grad, near)
    return y, *gradients


def product(x, w, recipe_x, recipe_w, unit="sm100", dtype=np.float32):
    return fp4kit.matmul(fp4kit.quantize(x, recipe_x), fp4kit.quantize(w, recipe_w), unit=unit, out_dtype=dtype)


def assert_near(found, a, b):
    """Assert that `found` is a b in float32 arithmetic, whatever the order of its sums.

    The error of a sum of n products is at most n u sum |a_k b_k| / (1 - n u), with u = 2^-24; see Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1. The bound here has n + 2 in place of n, for the denominator.
    """
    exact, size = (p.astype(np.float64) @ q.astype(np.float64) for p, q in ((a, b), (abs(a), abs(b))))
    assert (np.abs(found - exact) <= (a.shape[1] + 2) * 2.0**-24 * size).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16, *exhaustive([np.float16])], ids=str)
@pytest.mark.parametrize("recipe_x, recipe_w, unit", every_row(2, PAIRS))
def test_straight_through(lib, recipe_x, recipe_w, unit, dtype):
    """y is the product that fp4kit.matmul gives. The gradients are those of the dequantized operands."""
    x, w, grad = (a.astype(dtype) for a in (LEFT, W, OF_PRODUCT))
    y, of_x, of_w = both(lib, x, w, grad, recipe_x=recipe_x, recipe_w=recipe_w, unit=unit)
    assert_same_bits(y, product(x, w, recipe_x, recipe_w, unit, dtype))
    assert of_x.dtype == of_w.dtype == dtype
    if dtype == np.float32:
        x_values, w_values = (fp4kit.dequantize(fp4kit.quantize(a, r)) for a, r in ((x, recipe_x), (w, recipe_w)))
        assert_near(of_x, grad, w_values)
        assert_near(of_w, grad.T, x_values)


def columnwise(grad, x, w, options, dtype):
    """Return the gradients of x and w from quantized operands, by the formulas of linear's docstring."""
    r_x, r_w, r_grad = options["recipe_x"], options["recipe_w"], options.get("recipe_grad", options["recipe_x"])
    random = {name: options[name] for name in ("rounding", "seed") if name in options}
    transform = {"hadamard": options.get("hadamard", False)}
    multiply = partial(fp4kit.matmul, unit=options.get("unit", "sm100"), out_dtype=dtype)
    of_x = multiply(fp4kit.quantize(grad, r_grad, **random), fp4kit.quantize(w, r_w, axis=0))
    rows = fp4kit.quantize(grad, r_grad, axis=0, **random, **transform)
    return of_x, multiply(rows, fp4kit.quantize(x, r_x, axis=0, **transform))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {**TE, **TE_BACKWARD},
        {**TE, "backward": "quantized"},
        {"recipe_x": "mxfp4-ocp", "recipe_w": "mxfp4-ocp", "recipe_grad": "mxfp8-te", "backward": "quantized"},
        {**TE, "recipe_grad": "nvfp4-te", **TE_BACKWARD, "hadamard": "no_signs", "unit": "float32-blocks"},
    ],
    ids=["te", "nearest", "mx", "reference"],
)
def test_quantized_gradients(lib, options, dtype):
    x, w, grad = (a.astype(dtype) for a in (LEFT, W, OF_PRODUCT))
    y, of_x, of_w = both(lib, x, w, grad, **options)
    assert_same_bits(y, product(x, w, options["recipe_x"], options["recipe_w"], options.get("unit", "sm100"), dtype))
    expected = columnwise(grad, x, w, options, dtype)
    assert_same_bits(of_x, expected[0])
    assert_same_bits(of_w, expected[1])


def test_gradients_of_the_unquantized_operands(lib):
    """backward="high-precision" quantizes in the forward pass only."""
    y, of_x, of_w = both(lib, LEFT, W, OF_PRODUCT, **TE, backward="high-precision")
    assert_same_bits(y, product(LEFT, W, *TE.values()))
    assert_near(of_x, OF_PRODUCT, W)
    assert_near(of_w, OF_PRODUCT.T, LEFT)


@pytest.mark.parametrize("recipe_w, layout", [("nvfp4-te-2d", "linear"), ("mxfp4-ocp", "swizzled_128x4")])
@pytest.mark.parametrize("has_amax", [True, False])
def test_a_quantized_weight(lib, recipe_w, layout, has_amax):
    """A Quantized weight gives y and the gradient of x of the weight that it was made from."""
    recipe_x = "nvfp4-te" if recipe_w.startswith("nvfp4") else "mxfp8-te"
    q = lib.functions.quantize(lib.array(W), recipe_w, scale_layout=layout)
    q = q if has_amax else replace(q, tensor_amax=None)  # as in a checkpoint
    for options in ({}, {"backward": "quantized"}) if recipe_w == "nvfp4-te-2d" else ({},):
        near = () if options else SUMS
        y, of_x = lib.vjp(lambda x, o=options: lib.functions.linear(x, q, recipe_x, **o), LEFT, OF_PRODUCT, near)
        expected = both(lib, LEFT, W, OF_PRODUCT, recipe_x=recipe_x, recipe_w=recipe_w, **options)
        assert_same_bits(y, expected[0])
        assert_same_bits(of_x, expected[1])


def test_leading_axes_are_joined(lib):
    f, x, grad = lib.functions, LEFT.reshape(2, 1, 16, K), OF_PRODUCT.reshape(2, 1, 16, N)
    for options in ({}, TE_BACKWARD):
        y, of_x, of_w = both(lib, x, W, grad, **TE, **options)
        flat = both(lib, LEFT, W, OF_PRODUCT, **TE, **options)
        assert y.shape == (2, 1, 16, N) and of_x.shape == x.shape
        for a, b in zip((y, of_x, of_w), flat, strict=True):
            assert_same_bits(a.reshape(b.shape), b)
    one = f.linear(lib.array(LEFT[0]), lib.array(W), "nvfp4-te")  # recipe_w is recipe_x
    assert_same_bits(one, f.linear(lib.array(LEFT[0]), lib.array(W), "nvfp4-te", "nvfp4-te"))
    assert f.linear(lib.array(LEFT[0]), lib.array(W), **TE).shape == (N,)
    assert f.linear(lib.array(np.zeros((0, 5, K), np.float32)), lib.array(W), **TE).shape == (0, 5, N)


def test_dtypes_and_units(lib):
    w = W.astype(BF16)
    expected = product(LEFT, w, "fp8-modelopt", "fp8-modelopt", SLOW, BF16)
    options = {"unit": SLOW, "out_dtype": BF16 if isinstance(lib, Jax) else lib.array(w).dtype}
    for way in lib.ways:
        y = way(lambda x, w: lib.functions.linear(x, w, "fp8-modelopt", "fp8-modelopt", **options))
        assert_same_bits(lib.host(y(lib.array(LEFT), lib.array(w))), expected)
