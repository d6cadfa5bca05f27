"""Recipes: each producer's complete arithmetic for a format, as data that names rules.

A rule is one small function, written in reference/ (the specification) under the name that stands here. Producers and versions:
Transformer Engine (TE) d0067d0, FlashInfer fb28d72, Model-Optimizer 0.47, torchao 0.19, compressed-tensors 0.20,
microxcaling 7bc4195, OCP MX v1.0.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT4, INT8, ElementFormat


@dataclass(frozen=True)
class Recipe:
    """One producer's arithmetic. dataclasses.replace makes a variant: replace(recipe("mxfp4-ocp"), block=(1, 16)).

    element, scale: formats of a value and of a block scale (None: float32 scales only, in tensor_scale).
    block: (rows, columns) that share a block scale; columns run along the quantized axis. None: no blocks.
    tensor_scaling: what one tensor_scale covers: "none", "tensor", "row" (channel) or "block".
    tensor_rule, block_rule, decode_rule, fake_rule: names of functions in reference/ (fake_rule: None is dequantize(quantize(x))).
    apply: whether elements are multiplied with or divided by the factor that the rules give.
    rounding, sign, nan_code: see reference.codec.encode (nan_code None: the format's own).
    amax_nan: "ignore" (a NaN loses every comparison), "propagate", or "lanes" (ignored unless a lane of evens or odds is all NaN).
    flush: subnormal elements and products are zero (ftz).
    round_scaled: scaled elements are rounded to the input dtype before they are encoded.
    nan_is_max: a NaN element saturates (FlashInfer's clamp) although the format has a NaN.
    four_over_six: None, "mae" or "mse": each block takes the better of two scales, block maximum at 6 or at 4.
    scale_max: the largest block scale that the tensor scale leaves room for (448, or 256 for some 4over6 recipes).
    static: block amaxes are calibrated state: given as block_amax, or the plain block amax.
    narrow: integers use [-max, max] instead of [-max - 1, max].
    fake_only: values only; there are no codes.
    source: producer, file or function, version. exact: what it equals bit for bit, and where not.
    """

    id: str
    element: ElementFormat
    scale: ElementFormat | None
    block: tuple[int, int] | None
    block_rule: str | None
    source: str
    exact: str
    tensor_scaling: Literal["none", "tensor", "row", "block"] = "none"
    tensor_rule: str | None = None
    decode_rule: str = "product"
    fake_rule: str | None = None
    apply: Literal["multiply", "divide"] = "multiply"
    rounding: str = "rn"
    sign: Literal["signbit", "negative", "not_positive"] = "signbit"
    nan_code: int | None = None
    nan_is_max: bool = False
    amax_nan: Literal["ignore", "propagate", "lanes"] = "ignore"
    flush: bool = False
    round_scaled: bool = False
    four_over_six: Literal["mae", "mse"] | None = None
    fast_error: bool = False
    scale_max: int = 448
    static: bool = False
    narrow: bool = False
    fake_only: bool = False

    def __repr__(self) -> str:
        return f"Recipe({self.id!r})"

    @property
    def block_size(self) -> int:
        """Elements along the quantized axis that share a block scale (1 where there are no blocks)."""
        return self.block[1] if self.block else 1

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.element.bits == 4

    @property
    def format_name(self) -> str:
        """NVFP4, MXFP4, ...: the first part of the id."""
        return self.id.split("-", 1)[0].upper()

    @property
    def producer(self) -> str:
        """The second part of the id: te, flashinfer, ..."""
        return self.id.split("-")[1]


def _nvfp4() -> Iterator[Recipe]:
    te = Recipe(
        "nvfp4-te", E2M1, E4M3, (1, 16), "te", "TE common/transpose/quantize_transpose_vector_blockwise_fp4.cu",
        "TE's kernels; te-reference but for -0 and NaN", "tensor", "te", "te",
    )  # fmt: skip
    yield te
    yield replace(
        te, id="nvfp4-te-2d", block=(16, 16), tensor_rule="te_primary_weight", source="TE common/recipe/nvfp4.cu",
        exact="TE's primary-weight kernels at every offset and K (theirs fail at odd offsets and K % 64 != 0)",
    )  # fmt: skip
    reference = replace(
        te, id="nvfp4-te-reference", tensor_rule="te_reference", sign="negative", nan_code=0, amax_nan="propagate",
        source="TE pytorch/custom_recipes/reference_nvfp4.py", exact="TE's Python quantizer; sign of a NaN scale aside",
    )  # fmt: skip
    yield reference
    yield replace(reference, id="nvfp4-te-reference-2d", block=(16, 16))
    yield replace(reference, id="nvfp4-te-rowscaled", tensor_scaling="row")
    yield from _nvfp4_te_four_over_six(reference)
    yield from _nvfp4_flashinfer()
    yield from _nvfp4_modelopt()
    yield from _nvfp4_others()


def _four_over_six(base: Recipe, prefix: str) -> Iterator[Recipe]:
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name = f"{prefix}-4over6-{error}-{scale_max}"
            yield replace(base, id=name, block_rule="four_over_six", four_over_six=error, scale_max=scale_max)


def _nvfp4_te_four_over_six(reference: Recipe) -> Iterator[Recipe]:
    base = replace(reference, source="TE common/cast/nvfp4/quantize_4over6_nvfp4.cuh, reference_nvfp4.py")
    for r in _four_over_six(base, "nvfp4-te"):
        yield r
        yield replace(r, id=f"{r.id}-2d", block=(16, 16))
    yield replace(
        r, id=f"{r.id}-fasterr", fast_error=True, exact="TE's Python quantizer with NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
    )  # fmt: skip


def _nvfp4_flashinfer() -> Iterator[Recipe]:
    fast = Recipe(
        "nvfp4-flashinfer", E2M1, E4M3, (1, 16), "flashinfer", "FlashInfer quantization_utils.cuh cvt_warp_fp16_to_fp4",
        "FlashInfer's default on sm_90 reciprocals (sm_100's are unmeasured)", "tensor", "flashinfer",
        amax_nan="lanes", flush=True,
    )  # fmt: skip
    yield fast
    precise = replace(
        fast, id="nvfp4-flashinfer-precise", block_rule="flashinfer_precise",
        exact="FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1; nvfp4-te but for subnormals and NaN",
    )  # fmt: skip
    yield precise
    base = replace(precise, exact="FlashInfer with FLASHINFER_NVFP4_4OVER6=1 and fast math disabled")
    yield from _four_over_six(base, "nvfp4-flashinfer")


def _nvfp4_modelopt() -> Iterator[Recipe]:
    dynamic = Recipe(
        "nvfp4-modelopt", E2M1, E4M3, (1, 16), "modelopt", "Model-Optimizer qtensor/nvfp4_tensor.py NVFP4QTensor",
        "NVFP4QTensor; sign of a NaN scale aside", "tensor", "divided", apply="divide", sign="negative",
        amax_nan="propagate",
    )  # fmt: skip
    yield dynamic
    static = replace(
        dynamic, id="nvfp4-modelopt-static", block_rule="modelopt_static", static=True,
        exact="NVFP4QTensor with calibrated block amaxes",
    )  # fmt: skip
    yield static
    yield replace(static, id="nvfp4-modelopt-static-4over6", scale_max=256)
    fake = replace(
        dynamic, fake_only=True, fake_rule="nvfp4_modelopt_triton", id="nvfp4-modelopt-fake",
        source="Model-Optimizer kernels/quantization fp4_fake_quant_block (Triton)", exact="its values on a GPU",
    )  # fmt: skip
    yield fake
    yield replace(
        fake, id="nvfp4-modelopt-fake-cuda", fake_rule="nvfp4_modelopt_cuda",
        source="Model-Optimizer tensor_quant_mx.cu fused_amax_convert", exact="its values",
    )  # fmt: skip
    yield replace(
        fake, id="nvfp4-modelopt-static-fake", fake_rule="nvfp4_modelopt_static", static=True,
        source="Model-Optimizer static_blockwise_fp4_fake_quant (Triton)", exact="its values",
    )  # fmt: skip


def _nvfp4_others() -> Iterator[Recipe]:
    torchao = Recipe(
        "nvfp4-torchao", E2M1, E4M3, (1, 16), "torchao", "torchao mx_formats/nvfp4_tensor.py nvfp4_quantize",
        "nvfp4_quantize with a per-tensor scale; codes under a NaN scale aside", "tensor", "divided",
        nan_code=0xB, amax_nan="propagate",  # 0 * inf is x86's negative NaN, whose bits round to -1.5
    )  # fmt: skip
    yield torchao
    yield replace(
        torchao, id="nvfp4-torchao-single", tensor_scaling="none", tensor_rule=None,
        exact="nvfp4_quantize without a per-tensor scale",
    )  # fmt: skip
    yield Recipe(
        "nvfp4-compressed-tensors", E2M1, E4M3, (1, 16), "compressed_tensors",
        "compressed-tensors quantization/utils calculate_qparams, pack_fp4_to_uint8",
        "its codes and scales; the global scale is kept in decode direction", "tensor", "compressed_tensors",
        "compressed_tensors", apply="divide", sign="negative", nan_code=0, amax_nan="propagate",
    )  # fmt: skip


def _mxfp4() -> Iterator[Recipe]:
    ocp = Recipe(
        "mxfp4-ocp", E2M1, E8M0, (1, 32), "e8m0_floor", "OCP MX v1.0, 6.3; torchao mx_formats/mx_tensor.py to_mx FLOOR",
        "torchao FLOOR; codes under a NaN scale aside", decode_rule="e8m0", amax_nan="propagate",
    )  # fmt: skip
    yield ocp
    for mode in ("rceil", "ceil", "even"):
        yield replace(
            ocp, id=f"mxfp4-torchao-{mode}", block_rule=f"e8m0_{mode}",
            source=f"torchao mx_formats/mx_tensor.py to_mx {mode.upper()}", exact=f"torchao {mode.upper()}; codes under a NaN scale aside",
        )  # fmt: skip
    yield Recipe(
        "mxfp4-flashinfer", E2M1, E8M0, (1, 32), "e8m0_flashinfer_fp4", "FlashInfer quantization_utils.cuh, UE8M0_SF",
        "mxfp4_quantize; the rule of the MXFP4 serving path", decode_rule="e8m0_flashinfer_host", amax_nan="lanes", flush=True,
    )  # fmt: skip
    yield Recipe(
        "mxfp4-te", E2M1, E8M0, (1, 32), "e8m0_te_reference", "TE reference_nvfp4.py, pow_2_scales (TE has no MXFP4 kernel)",
        "TE's Python quantizer with power-of-two scales", decode_rule="e8m0", sign="negative", nan_code=0, amax_nan="propagate",
    )  # fmt: skip
    yield Recipe(
        "mxfp4-modelopt", E2M1, E8M0, (1, 32), "e8m0_modelopt", "Model-Optimizer qtensor/mxfp4_tensor.py MXFP4QTensor",
        "MXFP4QTensor: ties toward zero, every zero is code 8; blocks with inf or NaN aside", decode_rule="e8m0",
        rounding="rnz", sign="not_positive", amax_nan="propagate",
    )  # fmt: skip
    yield replace(
        ocp, id="mxfp4-modelopt-fake", fake_only=True, fake_rule="mx_modelopt", amax_nan="ignore",
        source="Model-Optimizer tensor_quant_mx.cu fused_amax_convert", exact="its values; NaN elements aside",
    )  # fmt: skip
    yield Recipe(
        "mxfp4-compressed-tensors", E2M1, E8M0, (1, 32), "e8m0_compressed_tensors",
        "compressed-tensors quantization/utils/mxfp4_utils.py", "its codes and scales; blocks of amax >= 1.75 * 2^127, inf or NaN aside",
        decode_rule="e8m0", round_scaled=True, sign="negative", nan_code=0, amax_nan="propagate",
    )  # fmt: skip
    yield from _microxcaling(ocp)


def _microxcaling(ocp: Recipe) -> Iterator[Recipe]:
    for mode in ("nearest", "nearest_flush", "even", "floor"):
        yield replace(
            ocp, id=f"{ocp.format_name.lower()}-microxcaling-{mode.replace('_', '-')}", fake_only=True,
            fake_rule=f"microxcaling_{mode}", source="microxcaling mx/mx_ops.py _quantize_mx",
            exact=f"quantize_mx_op with round={mode.split('_')[0]!r}" + " and flush_fp32_subnorms" * ("flush" in mode),
        )  # fmt: skip


def _mxfp6() -> Iterator[Recipe]:
    for element in (E2M3, E3M2):
        for mode in ("floor", "rceil"):
            yield Recipe(
                f"mxfp6-torchao-{mode}-{element.name.lower()}", element, E8M0, (1, 32), f"e8m0_{mode}",
                f"torchao mx_formats/mx_tensor.py to_mx {mode.upper()}", "torchao, one code a byte; codes under a NaN scale aside",
                decode_rule="e8m0", amax_nan="propagate",
            )  # fmt: skip
    yield Recipe(
        "mxfp6-compressed-tensors", E2M3, E8M0, (1, 32), "e8m0_compressed_tensors",
        "compressed-tensors quantization/utils/mxfp6_utils.py", "its codes (here one a byte) and scales; as mxfp4-compressed-tensors",
        decode_rule="e8m0", round_scaled=True, amax_nan="propagate",
    )  # fmt: skip


def _mxfp8() -> Iterator[Recipe]:
    for element in (E4M3, E5M2):
        suffix = "" if element is E4M3 else "-e5m2"
        te = Recipe(
            f"mxfp8-te{suffix}", element, E8M0, (1, 32), "e8m0_te", "TE common/cast/mxfp8/quantize_mxfp8.cuh",
            "TE's kernels; sign of a NaN element aside", decode_rule="e8m0",
        )  # fmt: skip
        yield te
        yield replace(te, id=f"{te.id}-2d", block=(32, 32))
        for mode in ("floor", "rceil", "ceil", "even"):
            yield Recipe(
                f"mxfp8-torchao-{mode}{suffix}", element, E8M0, (1, 32), f"e8m0_{mode}",
                f"torchao mx_formats/mx_tensor.py to_mx {mode.upper()}", "torchao; codes under a NaN scale aside",
                decode_rule="e8m0", amax_nan="propagate",
            )  # fmt: skip
    yield from _microxcaling(Recipe(
        "mxfp8-ocp", E4M3, E8M0, (1, 32), "e8m0_floor", "", "", decode_rule="e8m0", amax_nan="propagate",
    ))  # fmt: skip
    yield Recipe(
        "mxfp8-flashinfer", E4M3, E8M0, (1, 32), "e8m0_flashinfer_fp8", "FlashInfer quantization_utils.cuh cvt_warp_fp16_to_mxfp8",
        "mxfp8_quantize, CUDA backend", decode_rule="e8m0", nan_is_max=True, amax_nan="lanes", flush=True,
    )  # fmt: skip
    modelopt = Recipe(
        "mxfp8-modelopt", E4M3, E8M0, (1, 32), "e8m0_modelopt", "Model-Optimizer qtensor/mxfp8_tensor.py MXFP8QTensor",
        "MXFP8QTensor", decode_rule="e8m0", amax_nan="propagate",
    )  # fmt: skip
    yield modelopt
    yield replace(
        modelopt, id="mxfp8-modelopt-fake", fake_only=True, fake_rule="mx_modelopt", amax_nan="ignore",
        source="Model-Optimizer tensor_quant_mx.cu fused_amax_convert", exact="its values; NaN elements aside",
    )  # fmt: skip
    yield Recipe(
        "mxfp8-compressed-tensors", E4M3, E8M0, (1, 32), "e8m0_compressed_tensors",
        "compressed-tensors quantization/utils calculate_qparams", "its codes and scales; as mxfp4-compressed-tensors",
        decode_rule="e8m0", round_scaled=True, sign="negative", amax_nan="propagate",
    )  # fmt: skip


def _per_tensor() -> Iterator[Recipe]:
    fp8 = Recipe(
        "fp8-modelopt", E4M3, None, None, None, "Model-Optimizer tensor_quant.py scaled_e4m3", "its values on a GPU", "tensor",
        "fp8_modelopt", "product", amax_nan="propagate",
    )  # fmt: skip
    yield fp8
    yield replace(fp8, id="fp8-modelopt-channel", tensor_scaling="row")
    int8 = Recipe(
        "int8-modelopt", INT8, None, None, None, "Model-Optimizer tensor_quant.py _tensor_quant", "its values on a GPU", "tensor",
        "int_modelopt", "int_modelopt", "int_modelopt", amax_nan="propagate",
    )  # fmt: skip
    yield int8
    channel = replace(int8, id="int8-modelopt-channel", tensor_scaling="row")
    yield channel
    yield replace(int8, id="int8-modelopt-narrow", narrow=True)
    yield replace(channel, id="int8-modelopt-channel-narrow", narrow=True)
    yield replace(channel, id="int4-modelopt-channel", element=INT4)
    yield replace(int8, id="int4-modelopt", element=INT4, tensor_scaling="block", block=(1, 32))
    yield Recipe(
        "int4-qat", INT4, None, (1, 128), None, "INT4 fake quantization of open training stacks: clamp(round(w/s), -7, 7) * s",
        "the formula, s = max(amax / 7, 1e-5)", "block", "int4_qat", "product", "int4_qat", apply="divide", narrow=True, amax_nan="propagate",
    )  # fmt: skip


def _table() -> dict[str, Recipe]:
    families = (_nvfp4(), _mxfp4(), _mxfp6(), _mxfp8(), _per_tensor())
    return {recipe.id: recipe for family in families for recipe in family}


RECIPES: dict[str, Recipe] = _table()

# Two names, one rule.
ALIASES: dict[str, str] = {
    "nvfp4": "nvfp4-te",
    "mxfp4": "mxfp4-ocp",
    "mxfp8": "mxfp8-te",
    "mxfp4-torchao-floor": "mxfp4-ocp",
}


def recipes() -> tuple[str, ...]:
    """Ids of all recipes, in the order of the table; ALIASES adds other names for some."""
    return tuple(RECIPES)


def recipe(id: str | Recipe) -> Recipe:
    """The recipe of an id or alias; a Recipe is returned as it is.

    Raises ValueError for an unknown id, with the nearest names; TypeError for anything but a str or a Recipe.
    """
    if isinstance(id, Recipe):
        return id
    if not isinstance(id, str):
        raise TypeError(f"recipe: got {type(id).__name__}; needs an id such as 'nvfp4-te' or a Recipe")
    found = RECIPES.get(ALIASES.get(id, id))
    if found is None:
        near = difflib.get_close_matches(id.lower(), [*RECIPES, *ALIASES], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see fp4kit.recipes()"
        raise ValueError(f"recipe: no recipe is called {id!r}; {hint}")
    return found
