"""Test the errors of grouped functions: they name the function and the index of the tensor, and are equal on CPU and
GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every, exhaustive
from inputs import BF16, ordinary
from on_gpu import ON_GPU, agree, all_or_few, blocks, check, cupy
from together import together
from variants import E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, square, with_elements

import fp4kit
from fp4kit.cuda import matrix
from fp4kit.quantized.container import Quantized, packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.tensor_rules import tensor_scale

pytestmark = ON_GPU

A = np.ones((16, 64), np.float32)
SHORT = np.ones((16, 40), np.float32)
LONG, DOUBLE = A[:, :32], np.ones((16, 64))


def moved(a, put):
    return put(a) if isinstance(a, np.ndarray) else a


def grouped(function, recipe="nvfp4-te", second=A, **options):
    """Return a function that calls a grouped function or makes a plan for the tensors A and `second`, to see it fail.

    The returned function takes `put`, which moves an array to the device.

    function: the name of a grouped function, or of the class of a plan, in fp4kit.
    second, options: the second tensor and the options, among which is the wrong argument.
    """
    given = options.pop("grads", None)

    def call(put):
        xs = [put(A), put(second)]
        found = {name: [moved(a, put) for a in v] if isinstance(v, list) else v for name, v in options.items()}
        if function == "fake_quantize_grouped_backward":
            return fp4kit.fake_quantize_grouped_backward(list(map(put, given or [A, second])), xs, recipe, **found)
        result = getattr(fp4kit, function)(xs, recipe, **found)
        # A plan may check some arguments only when it is used, so use it.
        return result.quantize() if function == "GroupedPlan" else result

    return call


QUANTIZERS = ("quantize_grouped", "fake_quantize_grouped", "GroupedPlan")
FUNCTIONS = (*QUANTIZERS, "amax_grouped", "fake_quantize_grouped_backward")
# (functions, arguments of `grouped`, the message)
WRONG = (
    (FUNCTIONS, {"second": SHORT}, "xs[1]: axis 1 has length 40; nvfp4-te needs a multiple of 16"),
    (FUNCTIONS, {"second": DOUBLE}, "xs[1] is float64; needs float32, float16 or bfloat16"),
    (FUNCTIONS, {"axis": 2}, "xs[0]: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (QUANTIZERS, {"tensor_amax": [1.0, -1.0]}, "tensor_amax[1] holds 1 negative value(s) of 1"),
    (QUANTIZERS, {"tensor_amax": [1.0, A]}, "tensor_amax[1] has shape (16, 64); nvfp4-te needs ()"),
    (QUANTIZERS, {"tensor_amax": [1.0]}, "tensor_amax has 1 entries and xs 2 arrays"),
    (QUANTIZERS, {"recipe": "mxfp4-ocp", "tensor_amax": [1.0, 1.0]}, "tensor_amax[0] was given, but mxfp4-ocp"),
    (QUANTIZERS, {"block_amax": [A, A]}, "block_amax[0] was given, but nvfp4-te computes it from x"),
    (QUANTIZERS, {"rounding": "up"}, "xs[0]: rounding is 'up'; needs 'nearest' or 'stochastic'"),
    (QUANTIZERS, {"rounding": "stochastic"}, "xs[0]: stochastic rounding needs seed"),
    (QUANTIZERS, {"seed": 1}, "xs[0]: seed was given with rounding='nearest'"),
    (QUANTIZERS[:1], {"hadamard": "no"}, "xs[0]: hadamard is 'no'; needs False, True or 'no_signs'"),
    (QUANTIZERS[:1], {"scale_layout": "tiled"}, "xs[0]: scale_layout is 'tiled'"),
    (QUANTIZERS[:1], {"recipe": "mxfp4-modelopt-fake"}, "xs[0]: mxfp4-modelopt-fake is a fake quantizer"),
)
_ROWS = np.ones(16, np.float32)
_BACKWARD = (
    ({"grads": [A, LONG]}, "grads[1] has shape (16, 32); needs the shape of x, (16, 64)"),
    ({"grads": [A, DOUBLE]}, "grads[1] is float64; needs float32, float16 or bfloat16"),
    ({"grads": [A]}, "grads has 1 arrays and xs 2; needs equally many"),
    ({"amax": [1.0, -1.0]}, "amax[1] holds 1 negative value(s) of 1"),
    ({"amax": [_ROWS, _ROWS[:3]]}, "amax[1] has shape (3,); x (16, 64) needs (), (16,) (rows)"),
)
WRONG += tuple((FUNCTIONS[-1:], {"pass_through": p, **g}, text) for g, text in _BACKWARD for p in (False, True))
CASES = [(f, grouped(f, **given), text) for functions, given, text in WRONG for f in functions]
AXIS = lambda put: fp4kit.amax_grouped([put(A), put(A[0])], axis=1)  # noqa: E731
CASES.append(("amax_grouped", AXIS, "xs[1]: axis 1 is out of range for a 1-d array; needs -1 to 0"))


@together("function, call, text", CASES)
def test_grouped_functions_name_themselves(function, call, text) -> None:
    texts = []
    for put in (np.asarray, cupy.asarray):
        with pytest.raises((ValueError, TypeError), match=re.escape(f"{function}: {text}")) as caught:
            call(put)
        texts.append((caught.type, str(caught.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (2, "amax: axis 2 is out of range for a 2-d array; needs -2 to 1"),
        ((0, -2), "amax: axis (0, -2) names one axis twice; needs different axes"),
    ],
)
def test_axes_of_amax(axis, text) -> None:
    for x in (A, cupy.asarray(A)):
        with pytest.raises(ValueError, match=re.escape(text)):
            fp4kit.amax(x, axis=axis)


F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def guarded(dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield finite matrices (32, 160) of several magnitudes, and one with NaN and infinities.

    Their columns of blocks differ in kind: wide exponents, one magnitude, zeros, few distinct values, and tiny values.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((32, 10, 16)) * np.exp2(rng.integers(-24, 1, (1, 10, 1)))
    x[:, 1] = rng.choice([-1.0, 0.0, 1.0], (32, 16))  # one magnitude: the error is the same with both scales
    x[:, 2] = np.copysign(0.0, x[:, 2])
    x[16:, 3] = np.copysign(0.0, x[16:, 3])  # partly zero
    x[:, 4] = np.round(x[:, 4] / np.abs(x[:, 4]).max() * 12) / 2  # few distinct values
    x[:, 5] *= np.where(rng.random((32, 16)) < 0.1, 1, 2.0**-130)
    x = x.reshape(32, 160)
    top = float(ml_dtypes.finfo(dtype).max)
    for scale in (1.0, 40.0, 2.0**70, 2.0**126, 2.0**-70, 2.0**-130):
        yield np.clip(x * scale, -top, top).astype(dtype)
    x[::7, ::13] = rng.choice([np.nan, np.inf, -np.inf], x[::7, ::13].shape)
    yield x.astype(dtype)


SIX = ("te-4over6-mse-448", "te-4over6-mae-256-2d", "te-4over6-mse-256-fasterr", "flashinfer-4over6-mae-448")
GUARDED = [(RECIPES[f"nvfp4-{id}"], {}) for id in SIX]
GUARDED += [(replace(RECIPES["nvfp4-te-4over6-mse-448"], tensor_scaling="row"), {})]
GUARDED += [(square("nvfp4-flashinfer-4over6-mae-448"), {})]
GUARDED += [(RECIPES[id], {"rounding": "stochastic", "seed": 7}) for id in ("nvfp4-te", "nvfp4-flashinfer", "mxfp8-te")]
AMAXES = (0.02, 1e-38, 2.0**-61, 2.0**61, 0.0)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(r, given, id=f"{r.id}-{r.tensor_scaling}-{r.block}", marks=pytest.mark.exhaustive if i % 2 else ())
        for i, (r, given) in enumerate(GUARDED)
    ],
)
@pytest.mark.parametrize("dtype", [BF16, *exhaustive([F32, F16])], ids=str)
def test_both_sides_of_every_guard(recipe, options, dtype) -> None:
    """4over6 and stochastic rounding equal the CPU's on both sides of the conditions for the kernels' fast paths.

    Many tensor amaxes are tried.
    """
    for x in guarded(dtype):
        for amax in (None, *(AMAXES if recipe.tensor_scaling == "tensor" else ())):
            with np.errstate(all="ignore"):
                check(x, recipe, tensor_amax=amax, **options)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_random_bytes_about_which_codes_change(dtype) -> None:
    """Stochastic rounding equals the CPU's for random bytes at and next to the byte from which an element rounds up.

    All elements below 8 are tried, in blocks with the scale 1.
    """
    bits = np.arange(np.array(8, dtype).view(np.uint16), dtype=np.uint16)
    signs = np.random.default_rng(0).integers(0, 2, bits.size * 4, np.uint16) << 15
    x = np.resize(np.repeat(bits, 4) | signs, (-(-bits.size * 4 // 124), 124)).view(dtype)
    four = np.full((len(x) * 4, 1), 4, dtype)  # the scale of amaxes from 4 to 8 is 1
    x = np.concatenate([x.reshape(-1, 31), four], 1).reshape(-1, 128)
    a = np.abs(x.astype(np.float64))
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(a, 0.5))), 0) - 1)
    first = np.ceil((1 - a / step % 1) * 256)  # the first byte that rounds up; 256 if none does
    turns = np.arange(x.shape[1]) % 4
    seed = np.select([turns == 0, turns == 1, turns == 2], [first - 1, np.minimum(first, 255), np.zeros_like(a)], 255)
    check(x, "mxfp4-ocp", rounding="stochastic", seed=cupy.asarray(seed.astype(np.uint8)))


WITH_CODES = [name for name, r in RECIPES.items() if not r.fake_only and not r.search]


def tensor_scales(name: str, shape: tuple[int, int]) -> Iterator[tuple[np.ndarray | None, np.ndarray | None]]:
    """Yield (tensor scale, tensor amax) pairs for the recipe `name`, to decode with.

    Some pairs match, some have no amax, and some have a wrong amax or a scale that no amax gives.
    """
    r = RECIPES[name]
    if r.tensor_scaling == "none":
        yield None, None
        return
    covered = tensor_amax_shape(shape, r)

    def decode_scale(amax: np.ndarray) -> np.ndarray:
        return np.asarray(tensor_scale(amax, r, BF16).decode, np.float32)

    for amax in (3.7, 0.0, 1e-45, np.inf) + (np.nan,) * (r.amax_nan == "propagate"):
        full = np.full(covered, amax, np.float32)
        yield decode_scale(full), full
    if not DECODE_RULES[r.decode_rule].needs_amax:
        return
    rng = np.random.default_rng(7)
    for size in (3.7, 1e-3, 1e30, 1e-37):
        amax = np.asarray(rng.uniform(1, 2, covered) * size, np.float32)
        for amaxes in (amax, np.asarray(amax.astype(BF16), np.float32)):
            yield decode_scale(amaxes), None
    shifts, wrong = rng.integers(-1, 2, covered), np.where(rng.random(covered) < 0.5, amax, np.float32(5))
    scale = np.asarray(rng.uniform(1e-4, 1, covered), np.float32)
    yield scale, None
    yield np.asarray((scale.view(np.int32) + shifts).astype(np.int32).view(np.float32)), np.asarray(wrong, np.float32)


@pytest.mark.parametrize("name", all_or_few(WITH_CODES))
def test_values_of_any_codes_under_any_scales(name) -> None:
    """Random codes decode to the CPU's bits under every scale byte and every kind of tensor scale."""
    r, rng = RECIPES[name], np.random.default_rng(3)
    for shape in ((64, 256), (3, 3 * r.block_size) if r.block else (5, 38)):
        packed = rng.integers(0, 2 ** (8 if r.is_packed else r.element.bits), packed_shape(shape, r), np.uint8)
        scales = None if r.scale is None else np.resize(np.arange(256, dtype=np.uint8), scale_shape(shape, r))
        for scale, amax in tensor_scales(name, shape):
            q = Quantized(packed, scales, scale, amax, shape, BF16, 1, r)
            for dtype in (F32, F16):
                with np.errstate(all="ignore"):
                    agree(fp4kit.dequantize, q, dtype)


@pytest.mark.parametrize("name", all_or_few([name for name in WITH_CODES if RECIPES[name].scale]))
def test_values_of_every_code_under_every_scale(name) -> None:
    """Every code decodes to the CPU's bits under every scale byte, in every dtype, in whole runs and at row ends."""
    r = RECIPES[name]
    codes = np.arange(256 if r.is_packed else 2**r.element.bits, dtype=np.uint8)
    if r.is_packed:
        codes = (codes & 7) * 34 + 16  # a byte holds codes 2i and 2i + 1
    per_scale = max(len(codes) // (packed_shape((1, r.block_size), r)[1]), 1)
    for shape in ((256, per_scale * r.block_size), (3, 2 * r.block_size)):
        packed = np.resize(codes, packed_shape(shape, r))
        scales = scale_shape(shape, r)
        scales = (np.arange(256)[:, None] if scales[0] == 256 else np.arange(scales[0])[:, None] * 5) + np.zeros(scales)
        for scale, amax in [*tensor_scales(name, shape)][:6]:
            q = Quantized(packed, scales.astype(np.uint8), scale, amax, shape, BF16, 1, r)
            for dtype in (BF16, F16, F32):
                with np.errstate(all="ignore"):
                    agree(fp4kit.dequantize, q, dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te"])
def test_stochastic_rounding_of_sums_near_values(name, dtype) -> None:
    """A magnitude plus the random part of a step, rounded to float32, may be the next value."""
    r = RECIPES[name]
    rounded = np.tile(np.arange(256, dtype=np.uint8), (96, 1))
    values = (1 - rounded / 256) * r.element.min_subnormal * 2.0 ** np.arange(3).repeat(32)[:, None]
    x = np.asarray(values, F32).view(np.int32) + np.arange(-16, 16, dtype=np.int32).repeat(3)[:, None]
    x = np.maximum(x, 0).view(F32).astype(dtype)
    x[:, :: r.block_size] = r.element.max
    agree(
        fp4kit.quantize,
        x,
        name,
        rounding="stochastic",
        seed=rounded,
        **({"tensor_amax": 2688.0} if "nv" in name else {}),
    )


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te"])
def test_values_of_matrices_whose_thread_blocks_take_several_steps(name, monkeypatch) -> None:
    """A matrix decodes to the CPU's bits also if it is so large that a thread block takes DEQUANTIZE_STEPS steps."""
    monkeypatch.setattr(matrix, "steps_per_block", lambda steps, device, most: most)
    for layout in ("linear", "swizzled_128x4"):
        q = fp4kit.quantize(ordinary(4, (67, 1056), BF16), name, scale_layout=layout)
        agree(fp4kit.dequantize, q)
        assert matrix.dequantize_launch(q.recipe, layout, BF16, BF16, q.shape, 0).grid[0] < 8  # of at least 9 steps


OTHERS = [("nvfp4-torchao", E2M1_BIAS0), ("mxfp4-te", E2M1_BIAS3), ("mxfp8-te", E3M4), ("mxfp8-te", E4M3_IEEE)]
OTHERS += [
    ("nvfp4-torchao-2d", E2M1_BIAS3),
    ("mxfp8-te-2d", E3M4),
    ("fp8-modelopt", E3M4),
    ("fp8-modelopt", E2M1_BIAS0),
]
TALL = [("nvfp4-te", 2, 16), ("nvfp4-te", 4, 32), ("nvfp4-te", 8, 16), ("nvfp4-te", 64, 16), ("mxfp8-te", 128, 32)]
TALL += [("nvfp4-te-4over6-mse-448", 4, 16), ("nvfp4-te-4over6-mse-448", 32, 16)]
VARIANTS = [with_elements(*other) for other in OTHERS] + [square(*block) for block in TALL]


@pytest.mark.parametrize("recipe", every(3, VARIANTS), ids=lambda r: r.id)
@pytest.mark.parametrize("dtype", [BF16, *exhaustive([F32, F16])], ids=str)
def test_other_biases_and_heights_of_blocks(recipe, dtype) -> None:
    for x in (blocks(dtype, 64, 256), ordinary(4, (37, 288), dtype)):
        check(x, recipe)
        agree(fp4kit.dequantize, fp4kit.quantize(x, recipe), BF16)
        agree(fp4kit.quantize_grouped, [x], recipe)
