"""List the names of rules that recipes may use, and what each rule needs. The functions are in fp4kit/reference/.
The encode scale of a tensor multiplies elements before they are encoded. The decode scale, stored as tensor_scale, is
its inverse. The factor of a block is applied to its elements before rounding: they are multiplied or divided by it, or
(apply "compare") compared with the values of codes times the factor.

A Recipe is checked against these tables when it is created, so that no rule receives a recipe that does not fit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ROUNDINGS = ("rn", "rz", "rna", "rnz", "rns", "rnw", "rnh", "first", "rnas")
SIGNS = ("signbit", "negative", "not_positive", "unsigned_zero", "unscaled")
AMAX_NANS = ("ignore", "propagate", "lanes")
APPLIES = ("multiply", "divide", "compare")
TENSOR_SCALINGS = ("none", "tensor", "row", "block")
ERRORS = ("mae", "mse", "max")
STOCHASTICS = ("te", "comfy_kitchen_fp8", "comfyui_nvfp4", "comfyui_nvfp4_cuda", "mslk", "ms_eden")
# These add noise to scaled elements, and round the sums to nearest. Their random numbers are not bytes. The compiled
# engine does not compute them.
NOISE_STOCHASTICS = ("comfyui_nvfp4", "comfyui_nvfp4_cuda", "mslk")
COMFYUI_STOCHASTICS = NOISE_STOCHASTICS[:2]
WITH_NEAREST = ("te", "comfy_kitchen_fp8")  # those of recipes that can also round to nearest
# These round scales at random too, so they accept only an int as the seed.
SCALE_STOCHASTICS = ("mslk", "ms_eden")


# The scale format of the amax rules, which belong to no producer. They write block scales in every float format, and
# are the only rules that accept a Codebook or a scale format other than E4M3 and E8M0.
ANY_FORMAT = "any"


class BlockRuleTraits(NamedTuple):
    """The properties of a block rule: what it requires of a Recipe, and how the factor of a block is computed.

    Attributes:
        scale: name of the scale format that the rule writes, or ANY_FORMAT.
        apply: how the factor is applied to elements: "multiply", "divide" or "compare".
        six: True if the formula assumes elements whose largest value is 6, that of E2M1.
        needs_tensor: True if the formula reads tensor_amax itself, not only the scales made from it.
        flush: the value that Recipe.flush must have: True if the rule's arithmetic replaces subnormals by zero, False
            if it does not. None allows both values.
        encode: True if the factor is computed from the tensor's encode scale instead of the decode scale.
        then_encode: True if elements are multiplied by the encode scale after the factor is applied.
        first_encode: True if elements are multiplied by the encode scale before the factor is applied.
        reads_amax: True if the factor depends on the block amax, not on the scale code alone.
        one_level: True if the rule does not support a tensor scale.
        may_overflow: True if the factor may be infinite, so that Recipe.keep_infinity has an effect.
        integers: True if the rule also supports integer elements.
        chooses: True if each block chooses between two candidates by the error measure Recipe.four_over_six.
            reference/four_over_six.py quantizes by such a rule, which has no functions for scale and factor.
        whole: True if the rule computes scales and codes together (reference/ascend.py).
    """

    scale: str
    apply: str = "multiply"
    six: bool = False
    needs_tensor: bool = False
    flush: bool | None = False
    encode: bool = False
    then_encode: bool = False
    first_encode: bool = False
    reads_amax: bool = False
    one_level: bool = False
    may_overflow: bool = False
    integers: bool = False
    chooses: bool = False
    whole: bool = False


_POWER = BlockRuleTraits("E8M0", flush=None)
_POWER_OF_AMAX = BlockRuleTraits("E8M0", flush=None, reads_amax=True)
BLOCK_RULES: dict[str, BlockRuleTraits] = {
    "te": BlockRuleTraits("E4M3", six=True),
    "flashinfer": BlockRuleTraits("E4M3", six=True, flush=True, encode=True),
    "flashinfer_precise": BlockRuleTraits("E4M3", six=True, flush=True, encode=True),
    "modelopt": BlockRuleTraits("E4M3", "divide"),
    "modelopt_static": BlockRuleTraits("E4M3", "divide", needs_tensor=True),
    "torchao": BlockRuleTraits("E4M3", encode=True),
    "compressed_tensors": BlockRuleTraits("E4M3", "divide", encode=True),
    "four_over_six": BlockRuleTraits("E4M3", six=True, needs_tensor=True, flush=None, chooses=True),
    "four_over_six_cute": BlockRuleTraits("E4M3", six=True, needs_tensor=True, encode=True, chooses=True),
    "fouroversix_if4": BlockRuleTraits("E4M3", six=True, needs_tensor=True, flush=None, chooses=True),
    "e8m0_floor": _POWER,
    "e8m0_ceil": _POWER,
    "e8m0_even": _POWER,
    "e8m0_rceil": _POWER,
    "e8m0_floor_018": _POWER,
    "e8m0_ceil_018": _POWER,
    "e8m0_even_018": _POWER,
    "e8m0_rceil_018": _POWER,
    "e8m0_te": _POWER,
    "e8m0_te_reference": _POWER,
    "e8m0_flashinfer_fp4": _POWER,
    "e8m0_flashinfer_fp8": _POWER,
    "e8m0_modelopt": _POWER,
    "e8m0_compressed_tensors": _POWER,
    # Rules of llama.cpp and MLX
    "gguf": BlockRuleTraits("E4M3", "compare", one_level=True),
    "e8m0_gguf": BlockRuleTraits("E8M0", "compare"),
    "mlx": BlockRuleTraits("E4M3", "divide", encode=True, then_encode=True),
    "mlx_metal": BlockRuleTraits("E4M3", encode=True),
    "e8m0_mlx": BlockRuleTraits("E8M0", "divide", reads_amax=True),
    "e8m0_mlx_0321": BlockRuleTraits("E8M0", "divide", reads_amax=True),
    "e8m0_mlx_metal_0321": _POWER,
    # Rules of vLLM, triton_kernels, Quark, auto-round, fouroversix, SGLang, DeepGEMM, qwix, comfy-kitchen, MSLK, aiter,
    # DeepSeek, nunchaku, JAX, miles, NNCF and oneDNN
    "vllm": BlockRuleTraits("E4M3", six=True),
    "vllm_cuda": BlockRuleTraits("E4M3", six=True, encode=True),
    "auto_round": BlockRuleTraits("E4M3", six=True),
    "quark": BlockRuleTraits("E4M3", "divide"),
    "quark_file": BlockRuleTraits("E4M3", "divide"),
    "fouroversix": BlockRuleTraits("E4M3", may_overflow=True, integers=True),
    "fouroversix_4": BlockRuleTraits("E4M3", six=True, may_overflow=True),
    "qwix": BlockRuleTraits("E4M3", one_level=True, flush=True),
    "vllm_kv": BlockRuleTraits("E4M3", six=True, encode=True),
    "flashinfer_kv": BlockRuleTraits("E4M3", six=True, flush=True),
    "flashinfer_kv_page": BlockRuleTraits("E4M3", six=True, flush=True),
    "flashinfer_cute": BlockRuleTraits("E4M3", six=True, encode=True),
    "comfy_kitchen": BlockRuleTraits("E4M3", "divide"),
    "comfyui": BlockRuleTraits("E4M3", "divide"),
    "comfyui_cuda": BlockRuleTraits("E4M3", "divide", six=True),
    "mslk": BlockRuleTraits("E4M3", encode=True),
    "mslk_fast": BlockRuleTraits("E4M3", six=True, encode=True),
    "mslk_power": BlockRuleTraits("E4M3", encode=True),
    "nunchaku": BlockRuleTraits("E4M3", six=True, reads_amax=True, one_level=True),
    "aiter": BlockRuleTraits("E4M3", six=True, reads_amax=True, one_level=True),
    "deepseek": BlockRuleTraits("E4M3", "divide", six=True, one_level=True),
    "nncf": BlockRuleTraits("E4M3", "divide", reads_amax=True),
    "nncf_small": BlockRuleTraits("E4M3", "divide", reads_amax=True),
    "onednn": BlockRuleTraits("E4M3", one_level=True),
    "te_1x64": BlockRuleTraits("E4M3", six=True, encode=True),
    "hf_kernels": BlockRuleTraits("E4M3", encode=True),
    "jax": BlockRuleTraits("E4M3", six=True, flush=True, encode=True, first_encode=True),
    "jax_jit": BlockRuleTraits("E4M3", six=True, flush=True, encode=True),
    "jax_gpu": BlockRuleTraits("E4M3", six=True, encode=True, first_encode=True),
    "e8m0_even_finite": _POWER,
    "e8m0_even_normal": _POWER,
    "e8m0_quark_even": _POWER_OF_AMAX,
    "e8m0_quark_floor": BlockRuleTraits("E8M0", "divide", reads_amax=True),
    "e8m0_quark_ceil": BlockRuleTraits("E8M0", "divide", reads_amax=True),
    "e8m0_triton_up": _POWER,
    "e8m0_triton_down": _POWER,
    "e8m0_fouroversix": _POWER,
    "e8m0_fouroversix_4": _POWER,
    "e8m0_deepgemm": _POWER,
    "e8m0_auto_round": _POWER_OF_AMAX,
    "e8m0_auto_round_rceil": _POWER_OF_AMAX,
    "e8m0_auto_round_rceil_v2": _POWER_OF_AMAX,
    "e8m0_sglang": _POWER_OF_AMAX,
    "e8m0_sglang_kv": _POWER_OF_AMAX,
    "e8m0_qwix": _POWER_OF_AMAX,
    "e8m0_comfy_kitchen": _POWER_OF_AMAX,
    "e8m0_mslk_ceil": _POWER,
    "e8m0_mslk_even": _POWER,
    "e8m0_mslk_nearest": _POWER,
    "e8m0_aiter_up": _POWER,
    "e8m0_aiter_ceil": _POWER,
    "e8m0_deepseek": BlockRuleTraits("E8M0", six=True, flush=None),
    "e8m0_deepseek_fp8": _POWER,
    "e8m0_miles_ceil": _POWER_OF_AMAX,
    "e8m0_miles_dsv4": _POWER_OF_AMAX,
    "e8m0_miles_even": _POWER,
    "e8m0_nncf": _POWER,
    "e8m0_nncf_small": _POWER,
    "e8m0_jax": BlockRuleTraits("E8M0", flush=True),
    "e8m0_jax_jit": BlockRuleTraits("E8M0", flush=True),
    "e8m0_jax_011": BlockRuleTraits("E8M0", flush=True),
    "e8m0_jax_011_jit": BlockRuleTraits("E8M0", flush=True),
    "e8m0_jax_gpu": BlockRuleTraits("E8M0"),
    "e8m0_jax_gpu_jit": BlockRuleTraits("E8M0"),
    # Rules of HiFloat4, AMCT and msmodelslim
    "hif4": BlockRuleTraits("E6M2", one_level=True, whole=True),
    "hif4_amct": BlockRuleTraits("E6M2", one_level=True, whole=True),
    "e8m0_msmodelslim": BlockRuleTraits("E8M0"),
    "e8m0_msmodelslim_ceil_x": BlockRuleTraits("E8M0", one_level=True),
    "e8m0_msmodelslim_fp8": BlockRuleTraits("E8M0", reads_amax=True, one_level=True),
    "e8m0_hifloat4": BlockRuleTraits("E8M0"),
    "e8m0_hifloat4_native": BlockRuleTraits("E8M0"),
    "hifloat4": BlockRuleTraits("E4M3", "divide", six=True, one_level=True),
    "hifloat4_native": BlockRuleTraits("E4M3", "divide", six=True, one_level=True),
    "e8m0_msmodelslim_power": BlockRuleTraits("E8M0", reads_amax=True, one_level=True),
    # Rules for user-defined formats: the scale is rounded to nearest, up or down
    "amax": BlockRuleTraits(ANY_FORMAT),
    "amax_up": BlockRuleTraits(ANY_FORMAT),
    "amax_down": BlockRuleTraits(ANY_FORMAT),
}

# {tensor rule: what its tensor scale multiplies}. "E4M3", "E8M0": block scales in this format. "float" or "integer":
# elements of such a format, in recipes without block scales. ANY_FORMAT: block scales of the amax rules, or elements
# of any format.
TENSOR_RULES: dict[str, str] = {
    "te": "E4M3",
    "te_reference": "E4M3",
    "te_primary_weight": "E4M3",
    "flashinfer": "E4M3",
    "flashinfer_token": "E4M3",
    "flashinfer_token_fast": "E4M3",
    "flashinfer_token_precise": "E4M3",
    "divided": "E4M3",
    "compressed_tensors": "E4M3",
    "mlx": "E4M3",
    "fp8_modelopt": "float",
    "fp8_modelopt_cpu": "float",
    "fp8_compressed_tensors": "float",
    "fp8_comfy_kitchen": "float",
    "fp8_deepseek": "float",
    "fp8_transformers": "float",
    "fp8_deepgemm": "float",
    "int_modelopt": "integer",
    "int4_qat": "integer",
    "vllm": "E4M3",
    "divisor": "E4M3",
    "sglang_online": "E4M3",
    "auto_round": "E4M3",
    "quark": "E4M3",
    "fouroversix": "E4M3",
    "fouroversix_4": "E4M3",
    "comfy_kitchen": "E4M3",
    "comfy_kitchen_cuda": "E4M3",
    "te_1x64": "E4M3",
    "hf_kernels": "E4M3",
    "jax_gpu": "E4M3",
    "nncf": "E4M3",
    "nncf_medium": "E4M3",
    "nncf_small": "E4M3",
    "fp4_nncf": "float",
    "fp4_nncf_small": "float",
    "msmodelslim": "E8M0",
    # Rules for user-defined formats: the scale is rounded to float32, or to a number of 16 bits
    "amax": ANY_FORMAT,
    "amax_float16": ANY_FORMAT,
    "amax_float16_up": ANY_FORMAT,
    "amax_float16_down": ANY_FORMAT,
    "amax_bfloat16": ANY_FORMAT,
    "amax_bfloat16_up": ANY_FORMAT,
    "amax_bfloat16_down": ANY_FORMAT,
}


# Tensor rules whose encode scale checkpoints store, as a divisor. With it, such a rule is replaced by "divisor".
STORES_DIVISOR = ("vllm", "auto_round", "compressed_tensors")

# {rule: element value to which the amax is scaled}, if that is not the largest value of the element format.
TOPS = {"fouroversix_4": 4}


class DecodeRule(NamedTuple):
    """The properties of a decode rule: which scales it accepts, and how it treats zeros, NaN and 16-bit results.

    Attributes:
        scales: names of the block scale formats that the rule accepts. None stands for no block scales.
        needs_amax: True if the rule reads the tensor's amax or encode scale.
        unsigned_zero: True if the rule decodes the code of -0 to +0.
        float16: name of the rule to use instead if the result is float16; "" if this rule is used.
        bfloat16: name of the rule to use instead if the result is bfloat16; "" if this rule is used.
        numbers: True if the NaN codes of elements decode as if they were ordinary numbers. For example, code 7F of E4M3
            becomes 480.
        fake: name of the rule to use instead in fake_quantize; "" if this rule is used.
        loader: True if the rule is that of an engine that loads codes and scales of any producer from a checkpoint.
        to_bfloat16: True if values are rounded to bfloat16 before they are rounded to the dtype of the result.
        levels: True if the rule is for hierarchical recipes (Recipe.levels).
    """

    scales: tuple[str | None, ...]
    needs_amax: bool = False
    unsigned_zero: bool = False
    float16: str = ""
    bfloat16: str = ""
    numbers: bool = False
    fake: str = ""
    loader: bool = False
    to_bfloat16: bool = False
    levels: bool = False


_POWERS = DecodeRule(("E8M0",))
DECODE_RULES: dict[str, DecodeRule] = {
    "product": DecodeRule(("E4M3", None)),
    "te": DecodeRule(("E4M3",), needs_amax=True),
    "compressed_tensors": DecodeRule(("E4M3",), needs_amax=True),
    "compressed_tensors_bfloat16": DecodeRule(("E4M3",), needs_amax=True, loader=True, to_bfloat16=True),
    "stored_divisor": DecodeRule(("E4M3",)),
    "stored_divisor_bfloat16": DecodeRule(("E4M3",), loader=True, to_bfloat16=True),
    "vllm_cuda": DecodeRule(("E4M3",), needs_amax=True),
    "flashinfer_kv": DecodeRule(("E4M3",)),
    "auto_round": DecodeRule(("E4M3",)),
    "modelopt": DecodeRule(("E4M3",), unsigned_zero=True),
    "mlx_0322": DecodeRule(("E4M3",)),
    "fouroversix": DecodeRule(("E4M3",), needs_amax=True),
    "fouroversix_float32": DecodeRule(("E4M3",), needs_amax=True),
    "comfy_kitchen": DecodeRule(("E4M3",), float16="comfy_kitchen_float16", bfloat16="comfy_kitchen_bfloat16"),
    "comfy_kitchen_float16": DecodeRule(("E4M3",)),
    "comfy_kitchen_bfloat16": DecodeRule(("E4M3",)),
    "nncf": DecodeRule(("E4M3",)),
    "te_1x64": DecodeRule(("E4M3",), needs_amax=True),
    "hf_kernels": DecodeRule(("E4M3",), needs_amax=True),
    "fp8_comfy_kitchen": DecodeRule(
        (None,), float16="fp8_comfy_kitchen_float16", bfloat16="fp8_comfy_kitchen_bfloat16"
    ),
    "fp8_compressed_tensors": DecodeRule(
        (None,), float16="fp8_comfy_kitchen_float16", bfloat16="fp8_comfy_kitchen_bfloat16", loader=True
    ),
    "fp8_comfy_kitchen_float16": DecodeRule((None,)),
    "fp8_comfy_kitchen_bfloat16": DecodeRule((None,)),
    "int_modelopt": DecodeRule((None,), needs_amax=True),
    "e8m0": _POWERS,
    "e8m0_flashinfer_host": DecodeRule(("E8M0",), unsigned_zero=True),
    "e8m0_flashinfer_api": _POWERS,
    "e8m0_unbounded": _POWERS,
    "gguf": DecodeRule(("E4M3",), unsigned_zero=True),
    "e8m0_gguf": DecodeRule(("E8M0",), unsigned_zero=True),
    "e8m0_infinite": _POWERS,
    "e8m0_mlx": DecodeRule(("E8M0",), float16="e8m0_float16"),
    "e8m0_mlx_0322": DecodeRule(("E8M0",), float16="e8m0_float16_0322", numbers=True),
    "e8m0_quark": DecodeRule(("E8M0",), float16="e8m0_float16", fake="e8m0"),
    "e8m0_float16": _POWERS,
    "e8m0_nncf": _POWERS,
    "e8m0_float16_0322": DecodeRule(("E8M0",), numbers=True),
    "hif4": DecodeRule(("E6M2",), levels=True),
    "e8m0_levels": DecodeRule(("E8M0",), levels=True),
}


class SearchRule(NamedTuple):
    """The requirements of a search for block amaxes, which Recipe.search names: what it needs of a recipe.

    A search chooses the amax of each block. It usually tries several amaxes and compares errors; the search "quest"
    computes one amax from the standard deviation of the block.

    Attributes:
        scale: name of the block scale format that the recipe must have.
        lanes: a number that must divide the columns of a block.
        nvfp4: True if the recipe must have E2M1 elements in blocks of 16 columns under one tensor scale. The largest
            candidate is then the tensor amax.
        decode_rule: name of the decode rule by which the producer measures the error of a candidate. "" if the search
            uses no decode rule.
        block_rule: name of the block rule that the recipe must have. "" if the search fits several.
        element: name of the element format that the recipe must have; "" if there is no such requirement.
        whole_array: True if the search chooses a constant of the block rule, once for the whole array.
    """

    scale: str
    lanes: int = 1
    nvfp4: bool = False
    decode_rule: str = ""
    block_rule: str = ""
    element: str = ""
    whole_array: bool = False


SEARCHES: dict[str, SearchRule] = {  # the values of Recipe.search
    "auto_round_powers": SearchRule("E8M0", lanes=8, decode_rule="e8m0"),
    "auto_round_percents": SearchRule("E4M3", lanes=8, decode_rule="auto_round"),
    "modelopt_sweep": SearchRule("E4M3", nvfp4=True),
    "quest": SearchRule("E8M0", lanes=32),
    "msmodelslim_ceil_x": SearchRule("E8M0", 8, block_rule="e8m0_msmodelslim_ceil_x", element="E2M1", whole_array=True),
    "msmodelslim_4over6": SearchRule("E8M0", lanes=8, block_rule="e8m0_msmodelslim_power", element="E2M1"),
    "msmodelslim_mse": SearchRule("E8M0", lanes=8, block_rule="e8m0_msmodelslim_power", element="E4M3"),
}


class FakeRule(NamedTuple):
    """The requirements of a fake rule, by which fake_quantize computes values without codes: what it needs of a recipe.

    Attributes:
        scale: name of the block scale format that the recipe must have. None if it must have no block scales.
        six: True if the formula assumes elements whose largest value is 6, that of E2M1.
        reads_scale_max: True if the formula uses Recipe.scale_max; otherwise it uses 448.
        one_level: True if the rule does not support a tensor scale. Other rules for E4M3 scales need one.
        unit: the number of elements that share a correction of their block scales; 1 if there is no such correction. It
            must divide the length of the quantized axis. A rule with a unit above 1 needs Recipe.fake_only.
        stochastic: the value of Recipe.stochastic for a rule that can round stochastically; "" if it cannot.
        by_codes: {field of a recipe: the values that it must have}. If it is not empty, finite elements get the values
            to which their codes decode, in blocks whose power of two is neither 0 nor infinite in the dtype of x. The
            CPU engine computes such blocks by codes. The rule is in reference/ascend.py.
    """

    scale: str | None
    six: bool = False
    reads_scale_max: bool = False
    one_level: bool = False
    unit: int = 1
    stochastic: str = ""
    by_codes: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


def _by_codes(rounding: str, *block_rules: str, **fields: tuple[Any, ...]) -> Mapping[str, tuple[Any, ...]]:
    return {"block_rule": block_rules, "rounding": (rounding,), "amax_nan": ("propagate",), **fields}


_MSMODELSLIM = (*("e8m0_msmodelslim", "e8m0_msmodelslim_ceil_x", "e8m0_msmodelslim_fp8"), "e8m0_msmodelslim_power")
_HIFLOAT4 = {"sign": ("unscaled",), "round_scaled": (False,)}
_NATIVE = {"sign": ("unscaled",), "round_scaled": (True,)}
_MX_ELEMENTS = {"element": ("E2M1", "E4M3")}
_NVFP4, _MX, _INTEGER = FakeRule("E4M3", six=True), FakeRule("E8M0"), FakeRule(None)
FAKE_RULES: dict[str, FakeRule] = {
    "nvfp4_modelopt_triton": _NVFP4,
    "nvfp4_modelopt_static": FakeRule("E4M3", six=True, reads_scale_max=True),
    "nvfp4_modelopt_cuda": _NVFP4,
    "mx_modelopt": _MX,
    "int_modelopt": _INTEGER,
    "int4_qat": _INTEGER,
    "microxcaling_nearest": _MX,
    "microxcaling_nearest_flush": _MX,
    "microxcaling_even": _MX,
    "microxcaling_floor": _MX,
    "fp_quant": FakeRule("E8M0", six=True),
    "nvfp4_fp_quant": FakeRule("E4M3", six=True, one_level=True),
    "ms_eden": FakeRule("E4M3", six=True, unit=32, stochastic="ms_eden"),
    "ms_eden_if4": FakeRule("E4M3", six=True, unit=32, stochastic="ms_eden"),
    "hif4_native": FakeRule("E6M2", by_codes={"block_rule": ("hif4", "hif4_amct")}),
    "hif4_float64": FakeRule("E6M2", by_codes={"block_rule": ("hif4", "hif4_amct")}),
    "nvfp4_hifloat4": FakeRule("E4M3", True, one_level=True, by_codes=_by_codes("rn", "hifloat4", **_HIFLOAT4)),
    "nvfp4_hifloat4_native": FakeRule(
        "E4M3", True, one_level=True, by_codes=_by_codes("rn", "hifloat4_native", **_NATIVE)
    ),
    "mx_hifloat4": FakeRule("E8M0", by_codes=_by_codes("rnas", "e8m0_hifloat4", **_MX_ELEMENTS, **_HIFLOAT4)),
    "mx_hifloat4_native": FakeRule(
        "E8M0", by_codes=_by_codes("rnas", "e8m0_hifloat4_native", **_MX_ELEMENTS, **_NATIVE)
    ),
    "mx_msmodelslim": FakeRule("E8M0", by_codes=_by_codes("rnas", *_MSMODELSLIM)),
}
