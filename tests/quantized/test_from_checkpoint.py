"""Test Quantized.from_parts: it accepts the dtypes, nibble orders, scale directions and shapes found in checkpoints.

Other parts raise an error.
"""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, NAMES, ORDINARY, codes_of, ordinary
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3, E8M0, IF4, bit_patterns
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES
from fp4kit.reference.tensor_rules import tensor_scale

F32 = np.float32
SCALES = {E4M3: ml_dtypes.float8_e4m3fn, E8M0: ml_dtypes.float8_e8m0fnu}
X = ordinary(7, dtype=BF16)


def built(q, packed=None, block_scale=None, tensor_scale=None, **options):
    """Return Quantized.from_parts of the arrays of q, in which those that are given replace q's own.

    options: further arguments of from_parts.
    """
    given = [q.packed if packed is None else packed, q.block_scale if block_scale is None else block_scale]
    given.append(q.tensor_scale if tensor_scale is None else tensor_scale)
    own = {"recipe": q.recipe, "dtype": q.dtype, "axis": q.axis, "tensor_scale_divides": False}
    return Quantized.from_parts(*given, **own | options)


def assert_same(found, q):
    """Assert that `found` equals q, except that it has no amax, because checkpoints store none."""
    assert found.tensor_amax is None
    for part in ("packed", "block_scale", "tensor_scale"):
        if getattr(q, part) is not None:
            assert_same_bits(getattr(found, part), getattr(q, part), part)
    facts = ("shape", "dtype", "axis", "recipe", "scale_layout")
    assert all(getattr(found, name) == getattr(q, name) for name in facts)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_quantized_give_it_back(name, axis):
    """from_parts restores a Quantized from its parts without copies.

    Its values are equal, because they depend on the scale and not on the amax.
    """
    q = fp4kit.quantize(X, name, axis=axis)
    found = built(q)
    assert_same(found, q)
    assert found.packed is q.packed and found.block_scale is q.block_scale and found.tensor_scale is q.tensor_scale
    assert_same_bits(found.dequantize(), fp4kit.dequantize(q))


CODES = {  # {recipe: dtypes of its codes besides uint8}; block scales have SCALES, uint8 and int8
    **dict.fromkeys(("nvfp4-te", "mxfp4-ocp"), ("int8", "float4_e2m1fn")),
    "mxfp6-torchao-floor-e2m3": ("int8", "float6_e2m3fn"),
    "mxfp6-torchao-floor-e3m2": ("int8", "float6_e3m2fn"),
    "mxfp8-te": ("int8", "float8_e4m3fn"),
    "mxfp8-te-e5m2": ("int8", "float8_e5m2"),
    **dict.fromkeys(("int8-modelopt", "if4-fouroversix"), ("int8",)),
    **dict.fromkeys(("int4-modelopt-channel", "nvint4-fouroversix"), ("int4",)),  # int8 could be numbers, not bytes
}
KINDS = (getattr(ml_dtypes, name) for name in dir(ml_dtypes) if name not in ("finfo", "iinfo"))
EVERY_DTYPE = {np.dtype(kind) for kind in (*"?bBhHiIqQefdFD", *(kind for kind in KINDS if isinstance(kind, type)))}


@together("name", CODES)
def test_dtypes_of_codes_and_scales(name):
    """from_parts accepts codes and scales as bytes, or in a dtype that names the format, and names every other dtype.

    Unpacked 4-bit codes are packed.
    """
    assert {RECIPES[name].element for name in CODES} == {RECIPES[name].element for name in NAMES}
    q = fp4kit.quantize(X, name)
    scales = () if q.recipe.scale is None else ("uint8", "int8", np.dtype(SCALES[q.recipe.scale]).name)
    for part, accepted in (("packed", ("uint8", *CODES[name])), ("block_scale", scales)):
        for dtype in EVERY_DTYPE if accepted else ():
            stored = codes_of(q) if part == "packed" and dtype.name in ("float4_e2m1fn", "int4") else getattr(q, part)
            given = stored.view(dtype) if dtype.itemsize == 1 else stored.astype(dtype)
            if dtype.name in accepted:
                found = built(q, **{part: given})
                assert_same(found, q)
                assert part == "packed" or np.shares_memory(found.block_scale, q.block_scale)
            else:
                with pytest.raises(TypeError, match=f"^from_parts: {part} is {dtype}; .*needs .*uint8"):
                    built(q, **{part: given})


def test_all_bytes_of_codes_and_scales():
    """from_parts accepts every byte of codes and scales as specified.

    Codes are pairs in both nibble orders, or unpacked codes with upper bits.
    """
    packed, scales = np.arange(256, dtype=np.uint8).reshape(16, 16), np.resize(np.arange(256, dtype=np.uint8), (16, 2))
    q = Quantized.from_parts(packed, scales, F32(1), recipe="nvfp4-te", dtype=F32)
    assert_same(built(q, packed=packed >> 4 | packed << 4, high_nibble_first=True), q)
    one = np.arange(256, dtype=np.uint8).reshape(8, 32)
    found = Quantized.from_parts(one.view(ml_dtypes.float4_e2m1fn), scales[:8], F32(1), recipe="nvfp4-te")
    assert_same_bits(codes_of(found), one & 0x0F)
    every = np.arange(256, dtype=np.uint8).reshape(256, 1)
    found = Quantized.from_parts(np.zeros((256, 8), np.uint8), every.view(SCALES[E4M3]), F32(1), recipe="nvfp4-te")
    assert_same_bits(found.block_scale, every)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64, float])
def test_tensor_scales_of_other_dtypes(dtype):
    q = fp4kit.quantize(X, "nvfp4-te", tensor_amax=2688 * 0.375)
    assert q.tensor_scale == 0.375
    given = 0.375 if dtype is float else np.asarray(0.375, dtype)
    assert_same(built(q, tensor_scale=given), q)


@pytest.mark.parametrize("bits", [1, 0x00400000, 0x00800000, 0x7F7FFFFF, 0x3EAAAAAB])
def test_float64_that_is_a_float32(bits):
    """A float64 tensor scale is accepted if float32 holds it exactly, subnormals and the largest float32 included."""
    scale = np.array(bits, np.uint32).view(F32)
    q = fp4kit.quantize(X, "nvfp4-te")
    assert_same_bits(built(q, tensor_scale=scale.astype(np.float64)).tensor_scale, scale)
    for other in (np.nextafter(scale.astype(np.float64), 2), np.nextafter(scale.astype(np.float64), 0)):
        with pytest.raises(ValueError, match=r"^from_parts: tensor_scale holds .*, which is not a float32 number"):
            built(q, tensor_scale=other)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_scale_of_one_number(shape):
    q = fp4kit.quantize(X, "nvfp4-te")
    assert_same(built(q, tensor_scale=q.tensor_scale.reshape(shape)), q)


def test_tensor_scales_of_rows_experts_and_blocks():
    rows = fp4kit.quantize(X, "fp8-modelopt-channel")
    assert rows.tensor_scale.shape == (128,)
    assert_same(built(rows, tensor_scale=rows.tensor_scale[:, None]), rows)
    experts = fp4kit.quantize(np.stack([X, X * 2]), "nvfp4-te", tensor_amax=[3.0, 6.0])
    for shape in ((2,), (2, 1), (2, 1, 1)):
        assert_same(built(experts, tensor_scale=experts.tensor_scale.reshape(shape)), experts)
    one = fp4kit.quantize(X[None], "nvfp4-te")
    for shape in ((), (1,)):  # both are shapes of a stack of one matrix
        scale = one.tensor_scale.reshape(shape)
        assert_same(built(one, tensor_scale=scale), replace(one, tensor_amax=None, tensor_scale=scale))
    blocks = fp4kit.quantize(X, "int4-modelopt")
    assert_same(built(blocks, tensor_scale=blocks.tensor_scale[..., None]), blocks)


@pytest.mark.parametrize("dtype", [BF16, np.float16, F32])
def test_a_divisor_gives_the_scale_and_the_values_of_its_producer(dtype):
    """A divisor gives the producer's tensor scale and values, bit for bit.

    compressed-tensors stores the encode scale, whose reciprocal is the decode scale.
    """
    rng = np.random.default_rng(5)
    with_amax = 0
    for _ in range(60):
        x = (rng.standard_normal((3, 4, 32)) * np.exp2(rng.uniform(-12, 12, (3, 1, 1)))).astype(dtype)
        for one in (x, x[0]):
            q = fp4kit.quantize(one, "nvfp4-compressed-tensors")
            stored = tensor_scale(q.tensor_amax, q.recipe, q.dtype).encode
            found = built(q, tensor_scale=stored.reshape(*stored.shape, 1), tensor_scale_divides=True)
            with_amax += found.tensor_amax is not None
            assert_same(replace(found, tensor_amax=None), q)
            assert_same_bits(found.dequantize(F32), q.dequantize(F32))
    assert (with_amax > 0) == (dtype == F32)  # divisors of 16 bits follow from their reciprocals


@pytest.mark.parametrize("wrong", [1000.0006, np.inf, 3e38])
def test_one_divisor_of_no_amax_does_not_change_the_other_experts(wrong):
    x = np.random.default_rng(6).standard_normal((64, 2, 32)).astype(F32)
    q = fp4kit.quantize(x, "nvfp4-compressed-tensors", tensor_amax=np.abs(x).max((1, 2)))
    stored = tensor_scale(q.tensor_amax, q.recipe, q.dtype).encode
    stored[0] = wrong
    found = built(q, tensor_scale=stored, tensor_scale_divides=True)
    assert_same_bits(found.dequantize(F32)[1:], q.dequantize(F32)[1:])
    assert_same_bits(found.dequantize(F32)[0], replace(found, tensor_amax=None).dequantize(F32)[0])


def test_a_divisor_of_another_rule_has_no_amax():
    """Only compressed-tensors computes its decode scale from its divisor."""
    for recipe, divisor in (("nvfp4-te", 3.1), ("nvfp4-compressed-tensors", np.nan)):
        q = fp4kit.quantize(X, recipe)
        try:
            found = built(q, tensor_scale=F32([divisor]), tensor_scale_divides=True)
        except ValueError as error:
            assert "tensor_scale is NaN" in str(error)
        else:
            assert found.tensor_amax is None


@pytest.mark.parametrize("recipe", ["nvfp4-compressed-tensors", "nvfp4-compressed-tensors-static", "nvfp4-auto-round"])
def test_a_recipe_whose_files_store_a_divisor_needs_the_flag(recipe):
    """Without the flag, a divisor would be taken for a factor, and the values would be wrong by far."""
    q = fp4kit.quantize(X, recipe)
    divisor = F32(1) / q.tensor_scale
    with pytest.raises(ValueError, match=r"tensor_scale_divides=True for it, or tensor_scale_divides=False for one"):
        Quantized.from_parts(q.packed, q.block_scale, divisor, recipe=recipe)
    assert_same_bits(built(q, tensor_scale=divisor, tensor_scale_divides=True).tensor_scale, F32(1) / divisor)
    assert_same_bits(built(q, tensor_scale_divides=False).tensor_scale, q.tensor_scale)
    assert Quantized.from_parts(q.packed, q.block_scale, F32(1), recipe="nvfp4-te").tensor_scale == 1


def test_a_divisor_is_inverted_as_float32():
    rng = np.random.default_rng(6)
    divisors = np.exp2(rng.uniform(-120, 120, 4000)).astype(F32)
    packed, scales = np.zeros((4000, 1, 8), np.uint8), np.zeros((4000, 1, 1), np.uint8)
    found = Quantized.from_parts(packed, scales, divisors, recipe="nvfp4-compressed-tensors", tensor_scale_divides=True)
    # The quotient has 53 bits, enough that rounding it once more to float32 equals rounding the exact quotient.
    assert_same_bits(found.tensor_scale, (1 / divisors.astype(np.float64)).astype(F32))
    found = Quantized.from_parts(
        packed[0], scales[0], np.float64(2.0**127), recipe="nvfp4-te", tensor_scale_divides=True
    )
    assert found.tensor_scale == 2.0**-127


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_swizzled_scales_of_any_shape(layout):
    q = fp4kit.quantize(X[:100, :48], "nvfp4-te", scale_layout=layout)
    assert_same(built(q, scale_layout=layout), q)
    if layout != "linear":
        assert_same(built(q, block_scale=q.block_scale.reshape(-1), scale_layout=layout), q)
        with pytest.raises(ValueError, match=r"^Quantized: block_scale is uint8 \(99,\); nvfp4-te of \(100, 48\)"):
            built(q, block_scale=q.block_scale.reshape(-1)[:99], scale_layout=layout)


@together("shape", [(4, 64), (64,), (0, 64), (4, 0), (2, 3, 64)])
@together("name", ["nvfp4-te", "mxfp8-te", "int8-modelopt"])
def test_the_shape_is_found(shape, name):
    for axis in {0, len(shape) - 1} if 64 in (shape[0], shape[-1]) else ():
        x = np.zeros(tuple(reversed(shape)) if axis == 0 and shape[0] != 64 else shape, F32)
        q = fp4kit.quantize(x, name, axis=axis)
        assert_same(built(q), q)
        assert_same(built(q, axis=axis - x.ndim), q)
        assert_same(built(q, shape=list(x.shape)), q)


def test_the_dtype_is_bfloat16_by_default():
    q = fp4kit.quantize(X, "mxfp4-ocp")
    assert Quantized.from_parts(q.packed, q.block_scale, recipe="mxfp4").dtype == BF16


@pytest.mark.parametrize("name", NAMES)
def test_torch_tensors(name):
    """PyTorch tensors, Parameters included, are accepted without copies and give the values of NumPy arrays."""
    torch = pytest.importorskip("torch")
    q = fp4kit.quantize(X, name)
    names = {
        "E2M1": "float4_e2m1fn_x2",
        "E4M3": "float8_e4m3fn",
        "E5M2": "float8_e5m2",
        "INT8": "int8",
        "E8M0": "float8_e8m0fnu",
    }
    codes, scales = torch.from_numpy(q.packed), None if q.block_scale is None else torch.from_numpy(q.block_scale)
    numbers = None if q.tensor_scale is None else torch.from_numpy(q.tensor_scale)
    for typed in (False, True):
        if typed:
            codes = codes.view(getattr(torch, names.get(q.recipe.element.name, "uint8"), torch.uint8))
            scales = scales if scales is None else scales.view(getattr(torch, names[q.recipe.scale.name]))
        parameter = torch.nn.Parameter(codes, requires_grad=False)
        tensors = Quantized.from_parts(
            parameter, scales, numbers, recipe=name, dtype=q.dtype, tensor_scale_divides=False
        )
        assert type(tensors.packed) is torch.Tensor and tensors.dequantize().dtype == torch.bfloat16
        found = tensors.imported()
        assert_same(found, q)
        assert found.packed.ctypes.data == codes.data_ptr()
        assert scales is None or found.block_scale.ctypes.data == scales.data_ptr()
        assert_same_bits(found.dequantize(), q.dequantize())


def test_torch_numbers_that_are_not_float32():
    torch = pytest.importorskip("torch")
    q = fp4kit.quantize(X, "nvfp4-te", tensor_amax=2688 * 0.375)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert_same(built(q, tensor_scale=torch.tensor([0.375], dtype=dtype)), q)


NVFP4, MXFP8, FP6 = (fp4kit.quantize(X[:4, :64], name) for name in ("nvfp4-te", "mxfp8-te", "mxfp6-torchao-floor-e2m3"))
UNPACKED = np.zeros((4, 64), ml_dtypes.float4_e2m1fn)
V, T = ValueError, TypeError
WRONG = [  # a Quantized, changes of its parts, the error and its text
    (MXFP8, {"packed": MXFP8.packed.view(ml_dtypes.float8_e5m2)}, T, "packed is float8_e5m2; mxfp8-te has elements of"),
    (NVFP4, {"packed": NVFP4.packed.view(np.uint32)}, T, "packed is uint32; nvfp4-te has elements of E2M1; needs"),
    (NVFP4, {"packed": [1, 2]}, T, "packed is a builtins.list; needs a NumPy array"),
    (NVFP4, {"packed": np.uint8(1)}, V, "packed is 0-d; needs at least one axis"),
    (NVFP4, {"packed": np.zeros((4, 63), ml_dtypes.float4_e2m1fn)}, V, "packed holds 63 codes along its last axis"),
    (FP6, {"packed": FP6.packed | 0x40}, V, "packed holds bytes above 63; needs one code of 6 bits per byte; unpack"),
    (MXFP8, {"high_nibble_first": True}, V, "high_nibble_first is True, but packed holds one code per byte; leave it"),
    (NVFP4, {"packed": UNPACKED, "high_nibble_first": True}, V, "high_nibble_first is True, but packed holds one code"),
    (NVFP4, {"block_scale": NVFP4.block_scale.view(ml_dtypes.float8_e8m0fnu)}, T, "block_scale is float8_e8m0fnu"),
    (MXFP8, {"block_scale": MXFP8.block_scale.view(ml_dtypes.float8_e4m3fn)}, T, "block_scale is float8_e4m3fn"),
    (NVFP4, {"block_scale": np.ones((4, 4), F32)}, T, "block_scale is float32; nvfp4-te has block scales of E4M3"),
    (NVFP4, {"tensor_scale": np.array([1])}, T, "tensor_scale is int64; needs float32, or another float"),
    (NVFP4, {"tensor_scale": 1}, T, "tensor_scale is a builtins.int; needs"),
    (NVFP4, {"tensor_scale": 0.1}, V, "tensor_scale holds 0.1, which is not a float32 number; needs the number that"),
    (NVFP4, {"tensor_scale": 1e39}, V, "tensor_scale holds 1e+39, which is no"),
    (NVFP4, {"tensor_scale": F32([-0.0]), "tensor_scale_divides": True}, V, "tensor_scale holds 0, but tensor_scale_d"),
    (MXFP8, {"tensor_scale_divides": True}, V, "tensor_scale_divides is True, but tensor_scale is None; leave"),
    (NVFP4, {"tensor_scale": -1.0, "tensor_scale_divides": True}, V, "Quantized: tensor_scale is negative;"),
    (NVFP4, {"tensor_scale": F32(np.nan), "recipe": "nvfp4-compressed-tensors"}, V, "Quantized: tensor_scale is NaN;"),
    (NVFP4, {"recipe": "nvfp4-modelopt-fake"}, V, "nvfp4-modelopt-fake is a fake quantizer and has values only; needs"),
    (NVFP4, {"axis": 2}, V, "axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (NVFP4, {"scale_layout": "tiled"}, V, "scale_layout is 'tiled'; needs one of linear, "),
]


@together("q, changes, kind, text", WRONG)
def test_invalid_parts_are_rejected(q, changes, kind, text):
    with pytest.raises(kind, match=f"^(from_parts: )?{re.escape(text)}"):
        built(q, **changes)


def test_missing_parts():
    with pytest.raises(TypeError, match=r"^from_parts: packed is None; needs the array of codes$"):
        Quantized.from_parts(None, NVFP4.block_scale, NVFP4.tensor_scale, recipe="nvfp4-te")


def test_inputs_are_not_written_to():
    packed = NVFP4.packed.copy()
    for array in (packed, NVFP4.block_scale, NVFP4.tensor_scale):
        array.setflags(write=False)
    found = built(NVFP4, packed=packed, high_nibble_first=True, tensor_scale_divides=True)
    assert not np.shares_memory(found.packed, packed) and (packed == NVFP4.packed).all()
    assert bit_patterns(found.tensor_scale) == bit_patterns(F32(1) / NVFP4.tensor_scale)


def test_every_format_has_a_dtype():
    """Every format of a recipe is in the table of dtypes that from_parts accepts, except IF4, which has no dtype."""
    from fp4kit.quantized.container import DTYPES

    assert {r.element for r in RECIPES.values()} - {IF4} | {r.scale for r in RECIPES.values() if r.scale} <= set(DTYPES)
    assert DTYPES[E2M1] == np.dtype(ml_dtypes.float4_e2m1fn).name and ORDINARY.dtype == F32
