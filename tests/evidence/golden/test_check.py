"""Test every recipe, layout and decoder against the recorded outputs of its producer, bit for bit.

evidence/recorded/README.md describes the recordings.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import half
from recorded import groups

import fp4kit
from fp4kit.evidence.golden import check as golden_check
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import COMPARED, ROWS
from fp4kit.evidence.testing import ComparedEngine, assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.layouts import unpack
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.stochastic import encode_stochastic, philox4x32
from fp4kit.reference.tensor_rules import ONE, TensorScale


def typed(array):
    """Return a recorded uint16 array as bfloat16, because bfloat16 is stored so; return any other array unchanged."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


# ---- recipes ----


# The specification's search takes half a minute, so only test_check_of_everything (tests/cli/test_recipes.py) runs it.
SLOW = ("nvfp4-modelopt-mse",)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SLOW])
def test_recipe(name, golden):
    result = check_recipe(name, golden)
    assert result.differences == ()
    assert (result.compared > 0) == (name in COMPARED)


@pytest.mark.parametrize("name", [*SLOW, *half(name for name in RECIPES if name not in SLOW)])
def test_recipe_on_the_compiled_engine(name, golden):
    result = check_recipe(name, golden, ComparedEngine(np))
    assert result.differences == ()
    assert (result.compared > 0) == (name in COMPARED)


def test_rows_name_recipes():
    assert sorted({row.recipe for row in ROWS} - set(fp4kit.recipes())) == []


def test_rows_name_recorded_variants(golden):
    missing = [row for row in ROWS if row.variant not in golden.variants(row.file)]
    assert missing == []


def test_skips_leave_ordinary_data(golden):
    """Each documented exception leaves ordinary data to compare, so that no exception hides a wrong recipe."""
    ordinary = ("normal", "weights", "heavy_tail", "wide_blocks", "amax_sweep")
    seen = set()
    for row in ROWS:
        for case in golden_check.cases(row, golden) if row.skip and row.recipe in RECIPES else ():
            if case.name.startswith(ordinary):
                case.q = None if row.fake else fp4kit.quantize(case.x, case.recipe)
                skipped = golden_check.SKIPS[row.skip](case).mean()
                # Arrays of the exception "cpu_only_rows" were recorded on a CPU, which rounds some channel scales
                # differently. Channels with such a scale, at most half of them, are not compared.
                assert skipped <= (0.5 if row.skip == "cpu_only_rows" else 0.01), (row, case.name)
                seen.add(row.skip)
    assert seen == set(golden_check.SKIPS)


# ---- the checker can fail ----


def altered(golden, file, key, change):
    """Return a GoldenSet like `golden`, in which the array `key` of the file `file` is replaced.

    change: called with a copy of the array. It returns the array to use, which may be the edited copy.
    """

    def read(name):
        arrays = {k: golden.get(name, k) for k in golden.keys(name)}
        if name == file:
            arrays[key] = change(arrays[key].copy())
        return arrays

    return GoldenSet(golden.path, ("inputs", *golden.files()), read)


def flip_a_byte(array):
    array.reshape(-1).view(np.uint8)[array.nbytes // 2] ^= 0x01
    return array


# Variants under jax.jit have only arrays that differ from those without, such as amax_sweep.
ORDINARY = ("normal__bf16", "wide_blocks__f16", "normal__f32", "amax_sweep__bf16", "exponent_sweep__f32")
ORDINARY += ("exponent_sweep__bf16", "ties__bf16")


def a_recorded_array(name, golden):
    """Return (file, key) of a recorded array of ordinary data with which the recipe `name` is compared.

    Raises LookupError if there is none.
    """
    for row in ROWS:
        for x in ORDINARY if row.recipe == name else ():
            if not row.takes(x, golden.input(x, row.file).size):
                continue
            codes = ("output", "dequant") if row.fake else ("codes", "dequant", "scales")
            parts = ("block_amax",) if row.searched else codes
            for part in parts:
                key = f"{x}/{row.variant}/{part}"
                if key in golden.keys(row.file) and key not in golden.keys("modelopt_h200"):
                    return row.file, key
    raise LookupError(name)


RECORDED = [name for name in RECIPES if name in COMPARED]


@pytest.mark.parametrize("name", half([name for name in RECORDED if name not in SLOW][::3]))
def test_one_flipped_byte_is_one_difference(name, golden):
    file, key = a_recorded_array(name, golden)
    result = check_recipe(name, altered(golden, file, key, flip_a_byte))
    case = f"{file}: {key.rpartition('/')[0]}"
    assert [(d.key.rpartition("/")[0], d.differing) for d in result.differences] == [(case, 1)]
    assert result.equal == result.compared - 1


@pytest.mark.parametrize(
    "recipe, file, key",
    [
        ("nvfp4-te-reference", "te", "weights__bf16/nvfp4_1d/scales"),
        ("nvfp4-te-reference", "te", "weights__bf16/nvfp4_1d/global_amax"),
        ("nvfp4-torchao", "ao", "weights__bf16/nvfp4_two_level/global_scale"),
        ("mxfp8-te", "te", "weights__bf16/cpp_mxfp8_e4m3_1d_C/scales"),
        ("nvfp4-flashinfer", "flashinfer", "weights__bf16/nvfp4_swizzled_8x4/scales"),
        ("int8-modelopt", "modelopt_fake", "wide_blocks__f16/fake_int8_per_tensor_clip/grad_clip"),
        ("nvfp4-mlx-cpu", "mlx", "all_bytes/nvfp4/dequant_bf16"),
        ("mxfp4-gguf", "gguf", "nonfinite__f32/mxfp4_python/raw"),
    ],
)
def test_one_flipped_byte_of_other_parts(recipe, file, key, golden):
    result = check_recipe(recipe, altered(golden, file, key, flip_a_byte))
    assert [(d.key, d.differing) for d in result.differences] == [(f"{file}: {key}", 1)]


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_wrong_shape_is_a_difference(part, golden):
    key = f"normal__bf16/mxfp4_floor/{part}"
    result = check_recipe("mxfp4-ocp", altered(golden, "ao", key, lambda array: array[:-1]))
    assert [(d.key, d.differing == d.size) for d in result.differences] == [(f"ao: {key}", True)]


def negated(where):
    def change(array):
        np.negative(array, out=array, where=where(array))
        return array

    return change


def test_the_sign_of_zero_counts_and_that_of_nan_does_not(golden):
    key = "nonfinite__f32/mxfp4_even/dequant"
    recorded = golden.get("microxcaling", key)
    zeros = int((recorded == 0).sum())
    assert zeros and np.isnan(recorded).any()
    result = check_recipe("mxfp4-microxcaling-even", altered(golden, "microxcaling", key, negated(np.isnan)))
    assert result.differences == ()
    result = check_recipe("mxfp4-microxcaling-even", altered(golden, "microxcaling", key, negated(lambda a: a == 0)))
    assert [difference.differing for difference in result.differences] == [zeros]


# ---- decoders ----


@pytest.mark.parametrize(
    "recorded, recipe, rule",
    [
        ("mxfp4_host", "mxfp4-ocp", "e8m0_flashinfer_host"),
        ("e2m1api_ue8m0", "mxfp4-ocp", "e8m0_flashinfer_api"),
        ("e2m1api_e4m3", "nvfp4-te", "product"),
    ],
)
def test_every_scale_times_every_code(recorded, recipe, rule, golden):
    """All 256 scale bytes (rows) with all 256 code bytes (two columns each) decode as by FlashInfer's dequantizers."""
    expected = golden.get("layouts", f"dequant_all/{recorded}")
    codes = unpack(np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    r = replace(fp4kit.recipe(recipe), block=(1, 512), decode_rule=rule)
    values = dequantize_tile(codes, scales, r, TensorScale(ONE, ONE, ONE))
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert_same_bits(values[~nan], expected[~nan])


def transformers_quantized(golden, prefix):
    """Return recorded MXFP4 tensors of gpt-oss as a Quantized of shape (E, rows, K).

    They are recorded as blocks (E, rows, K/32, 16) and scales (E, rows, K/32). prefix: the beginning of their keys.
    """
    blocks, scales = (golden.get("transformers_mxfp4", f"{prefix}/{part}") for part in ("blocks", "scales"))
    E, rows, count, _ = blocks.shape
    r = replace(fp4kit.recipe("mxfp4-ocp"), decode_rule="e8m0_unbounded")
    return Quantized(blocks.reshape(E, rows, -1), scales, None, None, (E, rows, 32 * count), np.float32, -1, r)


def test_transformers_decodes_gpt_oss(golden, either_engine):
    """All codes under all scales decode as in transformers, which returns the values transposed."""
    prefixes = groups(golden, "transformers_mxfp4", "/blocks")
    assert len(prefixes) == 25 and "all_codes_all_scales/convert" in prefixes
    parts = {"dequant": np.float32, "dequant_bf16": ml_dtypes.bfloat16, "dequant_f16": np.float16}
    compared = []
    for prefix in prefixes:
        q = transformers_quantized(golden, prefix)
        for part, dtype in parts.items():
            if f"{prefix}/{part}" in golden.keys("transformers_mxfp4"):
                recorded = typed(golden.get("transformers_mxfp4", f"{prefix}/{part}"))
                if part == "dequant":
                    dtype = ml_dtypes.bfloat16  # recorded in bfloat16, stored as float32
                values = fp4kit.dequantize(q, dtype).swapaxes(1, 2)
                assert_same_bits(values.astype(recorded.dtype), recorded, f"{prefix}/{part}")
                compared.append(part)
    assert [compared.count(part) for part in parts] == [25, 25, 1]


@pytest.mark.parametrize("mode, recipe", [("floor", "mxfp4-ocp"), ("rceil", "mxfp4-torchao-rceil")])
def test_transformers_blocks_are_those_of_torchao(mode, recipe, golden, either_engine):
    for prefix in groups(golden, "transformers_mxfp4", f"/mxfp4_{mode}/blocks"):
        q = transformers_quantized(golden, f"{prefix}/mxfp4_{mode}")
        ours = fp4kit.quantize(golden.input(prefix).reshape(q.shape), recipe)
        assert_same_bits(ours.block_scale, q.block_scale, prefix)
        meaningful = np.repeat(q.block_scale != 255, 16, axis=-1)
        assert_same_bits(ours.packed[meaningful], q.packed[meaningful], prefix)


# ---- stochastic rounding ----


def test_stochastic_rounding_of_transformer_engine(golden):
    x, codes, values = (golden.get("te_sr", key) for key in ("sr_x", "sr_code", "sr_value"))
    random = np.broadcast_to(np.arange(256, dtype=np.uint8), codes.shape)
    ours = encode_stochastic(np.repeat(x[:, None], 256, axis=1), E2M1, random)
    assert_same_bits(ours, codes)
    assert_same_bits(decode(ours, E2M1), values)


def words_of(number):
    """Return the lower and the upper 32 bits of a 64-bit number."""
    return number & 0xFFFFFFFF, number >> 32


def test_philox_words(golden):
    """The random words equal the recorded ones, for four counters per (seed, subsequence, offset)."""
    parameters = golden.get("te_sr", "philox_seed_subseq_offset").astype(np.uint64)
    for (seed, subsequence, offset), words in zip(
        parameters.tolist(), golden.get("te_sr", "philox10_words"), strict=True
    ):
        counters = [words_of(offset + i) + words_of(subsequence) for i in range(4)]
        ours = philox4x32(np.array(counters, np.uint32), words_of(seed))
        assert_same_bits(ours.reshape(-1), words)


# ---- fake quantizers ----

GROUPED = {
    "fp8": "fp8-modelopt",
    "fp8_axis0": "fp8-modelopt-channel",
    "int8": "int8-modelopt",
    "int8_narrow": "int8-modelopt-narrow",
    "int8_axis0": "int8-modelopt-channel",
    "int8_axis0_narrow": "int8-modelopt-channel-narrow",
}


def fp8_of_a_cpu(x, amax):
    """Return x fake-quantized by fp8-modelopt as PyTorch on a CPU does, which computes 448 / amax as (1 / amax) * 448.

    The recordings with which the result is compared were made on a CPU.
    """
    scale = np.float32(1) / np.where(amax <= 2.0**-24, np.float32(1), amax) * np.float32(448)
    return decode(encode(x.astype(np.float32) * scale, E4M3), E4M3) * (np.float32(1) / scale)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("clip", ["", "_clip"])
def test_experts_of_modelopt(kind, dtype, clip, golden, either_engine):
    """Fake quantization of four experts, each with its own amax, equals the recording.

    In the `_clip` cases, the amax is below the largest value.
    """
    for i in range(4):
        x, grad, amax, output, grad_clip = (
            typed(golden.get("modelopt_fake", f"grouped_{dtype}/{part}{i}"))
            for part in (
                "weights/",
                "grad_out/",
                *(f"{kind}{clip}/{name}_" for name in ("amax", "output", "grad_clip")),
            )
        )
        ours = fp4kit.fake_quantize(x, GROUPED[kind], tensor_amax=amax)
        if kind.startswith("fp8"):
            assert_same_bits(fp8_of_a_cpu(x, amax).astype(x.dtype), output)
            ours = np.where(448 / np.maximum(amax, 1e-9) == 1 / np.maximum(amax, 1e-9) * np.float32(448), ours, output)
        assert_same_bits(ours, output)
        ours = fp4kit.fake_quantize_backward(grad, x, GROUPED[kind], amax=amax, pass_through=False)
        assert_same_bits(ours, grad_clip)


@pytest.mark.parametrize(
    "name, recipe", [("mxfp4_rceil", "mxfp4-torchao-rceil"), ("mxfp8_e4m3_rceil", "mxfp8-torchao-rceil")]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_fake_quantized_linear_of_torchao(name, recipe, dtype, golden, either_engine):
    """A linear layer with fake-quantized operands, and its gradients, equal torchao's up to the order of sums.

    Compared are y = fake(x) @ fake(w)^T + b and the straight-through gradients grad @ fake(w) and grad^T @ fake(x).

    The order of the producer's sums is unknown, so products are compared with a bound. In any order, a float32 sum of n
    products is within n * 2^-24 / (1 - n * 2^-24) of the exact sum, relative to the sum of magnitudes. See Higham,
    Accuracy and Stability, 3.5. The bias counts as one more product. bfloat16 results are rounded at most twice more,
    by 2^-8 relative each time.
    """
    x, w, b, y, grad, grad_x, grad_w = (
        golden.get("ao_qat", f"qat_{dtype}/{name}/{part}")
        for part in ("x", "w", "b", "y", "grad_out", "grad_x", "grad_w")
    )
    working = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    fake_x, fake_w = (fp4kit.fake_quantize(a.astype(working), recipe).astype(np.float64) for a in (x, w))

    def close(recorded, left, right, bias):
        exact, magnitude = left @ right + bias, np.abs(left) @ np.abs(right) + np.abs(bias)
        n = left.shape[1] + 1
        bound = magnitude * n * 2.0**-24 / (1 - n * 2.0**-24)
        if dtype == "bf16":
            bound = bound + 2 * 2.0**-8 * (np.abs(exact) + bound) * (1 + 2.0**-8)
        assert np.all(np.abs(recorded - exact) <= bound)
        # The bound is small beside the values, which are about 1 to 10.
        assert np.median(bound) < (0.06 if dtype == "bf16" else 1e-3)

    close(y, fake_x, fake_w.T, b.astype(np.float64))
    close(grad_x, grad.astype(np.float64), fake_w, 0.0)
    close(grad_w, grad.T.astype(np.float64), fake_x, 0.0)
