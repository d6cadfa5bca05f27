"""Recipes: each producer's complete arithmetic for a format, as data that names rules.

A rule is one small function, written in reference/ (the specification) under the name that stands here. Producers and versions:
Transformer Engine (TE) d0067d0, FlashInfer fb28d72, Model-Optimizer 0.47, torchao 0.19, compressed-tensors 0.20,
microxcaling 7bc4195, OCP MX v1.0.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp4kit import formats
from fp4kit.formats import E4M3, INT4, INT8, MXFP4, NVFP4, BlockFormat, ElementFormat


@dataclass(frozen=True)
class Recipe:
    """One producer's arithmetic. dataclasses.replace makes a variant: replace(recipe("mxfp4-ocp"), block=(1, 16)).

    element, scale: formats of a value and of a block scale (None: float32 scales only, in tensor_scale).
    block: (rows, columns) that share a block scale; columns run along the quantized axis. None: no blocks.
    tensor_scaling: what one tensor_scale covers: "none", "tensor", "row" (channel) or "block".
    tensor_rule, block_rule, decode_rule, fake_rule: names of functions in reference/ (no fake_rule: dequantize(quantize(x))).
    apply: whether elements are multiplied with or divided by the factor that the rules give.
    rounding, sign, nan_code: see reference.codec.encode (nan_code None: the format's own).
    amax_nan: "ignore" (a NaN loses every comparison), "propagate", or "lanes" (ignored unless all even or all odd elements are).
    flush: subnormal elements and products are zero (ftz). round_scaled: they are rounded to the input dtype.
    nan_is_max: a NaN element saturates (FlashInfer's clamp) although the format has a NaN.
    four_over_six: None, "mae" or "mse": each block takes the better of two scales, block maximum at 6 or at 4.
    fast_error: 4over6 compares float16(code * scale) with x times the tensor's encode scale.
    scale_max: the largest block scale that the tensor scale leaves room for (448, or 256 for some 4over6 recipes).
    static: block amaxes are calibrated state: given as block_amax, or the plain block amax.
    narrow: integers use [-max, max] instead of [-max - 1, max]. fake_only: values only; there are no codes.
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

    def __hash__(self) -> int:
        return hash(self.id)  # a hash of all fields takes as long as the rest of a lookup

    @property
    def block_size(self) -> int:
        """Elements along the quantized axis that share a block scale (1 where there are no blocks)."""
        return self.block[1] if self.block else 1

    @property
    def block_rows(self) -> int:
        """Rows that share a block scale."""
        return self.block[0] if self.block else 1

    @property
    def producer(self) -> str:
        """The second part of the id: te, flashinfer, ..."""
        return self.id.split("-")[1]

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.element.bits == 4

    @property
    def length_multiple(self) -> int:
        """What the length of the quantized axis must be a multiple of: whole blocks, whole bytes."""
        return self.block_size if self.block else 2 if self.is_packed else 1

    @property
    def format_name(self) -> str:
        """NVFP4, MXFP4, ...: the first part of the id."""
        return self.id.split("-", 1)[0].upper()


def _of(fmt: BlockFormat, id: str, **fields: Any) -> Recipe:
    """A recipe of a block format, with the format's elements, scales and blocks of one row."""
    scaling = {"tensor_scaling": "tensor"} if fmt.has_tensor_scale else {"decode_rule": "e8m0"}
    return Recipe(id=id, element=fmt.element, scale=fmt.scale, block=(1, fmt.block_size), **{**scaling, **fields})


def _nvfp4_te() -> Iterator[Recipe]:
    te = _of(
        NVFP4, "nvfp4-te", tensor_rule="te", block_rule="te", decode_rule="te",
        source="TE common/transpose/quantize_transpose_vector_blockwise_fp4.cu",
        exact="TE's kernels; nvfp4-te-reference but for -0 and NaN",
    )  # fmt: skip
    yield te
    yield replace(
        te, id="nvfp4-te-2d", block=(16, 16), tensor_rule="te_primary_weight", source="TE common/recipe/nvfp4.cu",
        exact="TE's primary-weight kernels (theirs fail at odd offsets and at K % 64 != 0; this does not)",
    )  # fmt: skip
    reference = replace(
        te, id="nvfp4-te-reference", tensor_rule="te_reference", sign="negative", nan_code=0, amax_nan="propagate",
        source="TE pytorch/custom_recipes/reference_nvfp4.py", exact="TE's Python quantizer",
    )  # fmt: skip
    yield reference
    yield replace(reference, id="nvfp4-te-reference-2d", block=(16, 16))
    yield replace(reference, id="nvfp4-te-rowscaled", tensor_scaling="row")
    base = replace(reference, source="TE common/cast/nvfp4/quantize_4over6_nvfp4.cuh, reference_nvfp4.py")
    for r in _four_over_six(base, "nvfp4-te"):
        yield r
        yield replace(r, id=f"{r.id}-2d", block=(16, 16))
    yield replace(
        r, id=f"{r.id}-fasterr", fast_error=True,
        exact="TE's Python quantizer with NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
    )  # fmt: skip


def _four_over_six(base: Recipe, prefix: str) -> Iterator[Recipe]:
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name = f"{prefix}-4over6-{error}-{scale_max}"
            yield replace(base, id=name, block_rule="four_over_six", four_over_six=error, scale_max=scale_max)


def _nvfp4_flashinfer() -> Iterator[Recipe]:
    fast = _of(
        NVFP4, "nvfp4-flashinfer", tensor_rule="flashinfer", block_rule="flashinfer", amax_nan="lanes", flush=True,
        source="FlashInfer quantization_utils.cuh cvt_warp_fp16_to_fp4",
        exact="FlashInfer's default with sm_90 reciprocals (those of sm_100 are unmeasured)",
    )  # fmt: skip
    yield fast
    precise = replace(
        fast, id="nvfp4-flashinfer-precise", block_rule="flashinfer_precise",
        exact="FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1; nvfp4-te but for subnormals and NaN",
    )  # fmt: skip
    yield precise
    yield from _four_over_six(
        replace(precise, exact="FlashInfer with FLASHINFER_NVFP4_4OVER6=1 and fast math disabled"), "nvfp4-flashinfer"
    )


def _nvfp4_modelopt() -> Iterator[Recipe]:
    dynamic = _of(
        NVFP4, "nvfp4-modelopt", tensor_rule="divided", block_rule="modelopt", apply="divide", sign="negative",
        amax_nan="propagate", source="Model-Optimizer qtensor/nvfp4_tensor.py NVFP4QTensor", exact="NVFP4QTensor",
    )  # fmt: skip
    yield dynamic
    static = replace(
        dynamic, id="nvfp4-modelopt-static", block_rule="modelopt_static", static=True,
        exact="NVFP4QTensor with calibrated block amaxes",
    )  # fmt: skip
    yield static
    yield replace(static, id="nvfp4-modelopt-static-4over6", scale_max=256)
    fake = replace(
        dynamic, id="nvfp4-modelopt-fake", fake_only=True, fake_rule="nvfp4_modelopt_triton", exact="its values on a GPU",
        source="Model-Optimizer kernels/quantization fp4_fake_quant_block (Triton)",
    )  # fmt: skip
    yield fake
    yield replace(
        fake, id="nvfp4-modelopt-fake-cuda", fake_rule="nvfp4_modelopt_cuda", exact="its values",
        source="Model-Optimizer tensor_quant_mx.cu fused_amax_convert",
    )  # fmt: skip
    yield replace(
        fake, id="nvfp4-modelopt-static-fake", fake_rule="nvfp4_modelopt_static", static=True, exact="its values",
        source="Model-Optimizer static_blockwise_fp4_fake_quant (Triton)",
    )  # fmt: skip


def _nvfp4_others() -> Iterator[Recipe]:
    torchao = _of(
        NVFP4, "nvfp4-torchao", tensor_rule="divided", block_rule="torchao", amax_nan="propagate",
        nan_code=0xB,  # of 0 * inf: x86's NaN is negative, and its bits round to -1.5
        source="torchao mx_formats/nvfp4_tensor.py nvfp4_quantize", exact="nvfp4_quantize with a per-tensor scale, on a CPU",
    )  # fmt: skip
    yield torchao
    yield replace(
        torchao, id="nvfp4-torchao-single", tensor_scaling="none", tensor_rule=None,
        exact="nvfp4_quantize without a per-tensor scale",
    )  # fmt: skip
    yield _of(
        NVFP4, "nvfp4-compressed-tensors", tensor_rule="compressed_tensors", block_rule="compressed_tensors",
        decode_rule="compressed_tensors", apply="divide", sign="negative", nan_code=0, amax_nan="propagate",
        source="compressed-tensors quantization/utils calculate_qparams, pack_fp4_to_uint8",
        exact="its codes and block scales; its global scale divides, tensor_scale is the reciprocal",
    )  # fmt: skip


def _torchao(fmt: BlockFormat, mode: str, id: str) -> Recipe:
    return _of(
        fmt, id, block_rule=f"e8m0_{mode}", amax_nan="propagate",
        source=f"torchao mx_formats/mx_tensor.py to_mx {mode.upper()}", exact=f"to_mx {mode.upper()}",
    )  # fmt: skip


def _compressed_tensors(fmt: BlockFormat, id: str, **fields: Any) -> Recipe:
    return _of(
        fmt, id, block_rule="e8m0_compressed_tensors", round_scaled=True, amax_nan="propagate",
        source="compressed-tensors quantization/utils calculate_qparams",
        exact="its codes and scales; as OCP where it corrupts blocks (amax overflows, is inf or NaN)", **fields,
    )  # fmt: skip


def _microxcaling(fmt: BlockFormat, modes: tuple[str, ...]) -> Iterator[Recipe]:
    for mode in modes:
        yield _of(
            fmt, f"mx{fmt.name[2:5].lower()}-microxcaling-{mode.replace('_', '-')}", block_rule="e8m0_floor", fake_only=True,
            fake_rule=f"microxcaling_{mode}", amax_nan="propagate", source="microxcaling mx/mx_ops.py _quantize_mx",
            exact=f"quantize_mx_op with round={mode.split('_')[0]!r}" + " and flush_fp32_subnorms" * ("flush" in mode),
        )  # fmt: skip


def _modelopt_fake(fmt: BlockFormat, id: str) -> Recipe:
    return _of(
        fmt, id, block_rule="e8m0_te_reference", fake_only=True, fake_rule="mx_modelopt",
        source="Model-Optimizer tensor_quant_mx.cu fused_amax_convert", exact="its values; NaN elements are undefined there",
    )  # fmt: skip


def _mxfp4() -> Iterator[Recipe]:
    yield replace(
        _torchao(MXFP4, "floor", "mxfp4-ocp"), source="OCP MX v1.0, 6.3; torchao mx_formats/mx_tensor.py to_mx FLOOR",
    )  # fmt: skip
    for mode in ("rceil", "ceil", "even"):
        yield _torchao(MXFP4, mode, f"mxfp4-torchao-{mode}")
    yield _of(
        MXFP4, "mxfp4-flashinfer", block_rule="e8m0_flashinfer_fp4", decode_rule="e8m0_flashinfer_host", amax_nan="lanes",
        flush=True, source="FlashInfer quantization_utils.cuh, UE8M0_SF",
        exact="mxfp4_quantize and mxfp4_dequantize_host: the MXFP4 serving path",
    )  # fmt: skip
    yield _of(
        MXFP4, "mxfp4-te", block_rule="e8m0_te_reference", sign="negative", nan_code=0, amax_nan="propagate",
        source="TE reference_nvfp4.py, pow_2_scales (TE has no MXFP4 kernel)", exact="TE's Python quantizer",
    )  # fmt: skip
    yield _of(
        MXFP4, "mxfp4-modelopt", block_rule="e8m0_modelopt", rounding="rnz", sign="not_positive", amax_nan="propagate",
        source="Model-Optimizer qtensor/mxfp4_tensor.py MXFP4QTensor",
        exact="MXFP4QTensor: ties toward zero, every zero is code 8; blocks with inf or NaN are undefined there",
    )  # fmt: skip
    yield _modelopt_fake(MXFP4, "mxfp4-modelopt-fake")
    yield _compressed_tensors(MXFP4, "mxfp4-compressed-tensors", sign="negative", nan_code=0)
    yield from _microxcaling(MXFP4, ("nearest", "nearest_flush", "even", "floor"))


def _mxfp6() -> Iterator[Recipe]:
    for fmt in (formats.MXFP6_E2M3, formats.MXFP6_E3M2):
        for mode in ("floor", "rceil"):
            yield _torchao(fmt, mode, f"mxfp6-torchao-{mode}-{fmt.element.name.lower()}")
    yield _compressed_tensors(formats.MXFP6_E2M3, "mxfp6-compressed-tensors")


def _mxfp8() -> Iterator[Recipe]:
    for fmt, suffix in ((formats.MXFP8_E4M3, ""), (formats.MXFP8_E5M2, "-e5m2")):
        te = _of(
            fmt, f"mxfp8-te{suffix}", block_rule="e8m0_te", exact="TE's kernels",
            source="TE common/cast/mxfp8/quantize_mxfp8.cuh",
        )  # fmt: skip
        yield te
        yield replace(te, id=f"{te.id}-2d", block=(32, 32))
        for mode in ("floor", "rceil", "ceil", "even"):
            yield _torchao(fmt, mode, f"mxfp8-torchao-{mode}{suffix}")
    yield _of(
        formats.MXFP8_E4M3, "mxfp8-flashinfer", block_rule="e8m0_flashinfer_fp8", nan_is_max=True, amax_nan="lanes", flush=True,
        source="FlashInfer quantization_utils.cuh cvt_warp_fp16_to_mxfp8", exact="mxfp8_quantize, CUDA backend",
    )  # fmt: skip
    yield _of(
        formats.MXFP8_E4M3, "mxfp8-modelopt", block_rule="e8m0_modelopt", amax_nan="propagate",
        source="Model-Optimizer qtensor/mxfp8_tensor.py MXFP8QTensor", exact="MXFP8QTensor",
    )  # fmt: skip
    yield _modelopt_fake(formats.MXFP8_E4M3, "mxfp8-modelopt-fake")
    yield _compressed_tensors(formats.MXFP8_E4M3, "mxfp8-compressed-tensors", sign="negative")
    yield from _microxcaling(formats.MXFP8_E4M3, ("nearest", "even"))


def _per_tensor() -> Iterator[Recipe]:
    fp8 = Recipe(
        id="fp8-modelopt", element=E4M3, scale=None, block=None, block_rule=None, tensor_scaling="tensor",
        tensor_rule="fp8_modelopt", amax_nan="propagate", source="Model-Optimizer tensor_quant.py scaled_e4m3",
        exact="its fake quantizer on a GPU",
    )  # fmt: skip
    yield fp8
    yield replace(fp8, id="fp8-modelopt-channel", tensor_scaling="row")
    int8 = replace(
        fp8, id="int8-modelopt", element=INT8, tensor_rule="int_modelopt", decode_rule="int_modelopt", fake_rule="int_modelopt",
        source="Model-Optimizer tensor_quant.py _tensor_quant",
    )  # fmt: skip
    yield int8
    channel = replace(int8, id="int8-modelopt-channel", tensor_scaling="row")
    yield channel
    yield replace(int8, id="int8-modelopt-narrow", narrow=True)
    yield replace(channel, id="int8-modelopt-channel-narrow", narrow=True)
    yield replace(channel, id="int4-modelopt-channel", element=INT4)
    yield replace(int8, id="int4-modelopt", element=INT4, tensor_scaling="block", block=(1, 32))
    yield Recipe(
        id="int4-qat", element=INT4, scale=None, block=(1, 128), block_rule=None, tensor_scaling="block", tensor_rule="int4_qat",
        fake_rule="int4_qat", apply="divide", narrow=True, amax_nan="propagate",
        source="INT4 fake quantization of open training stacks", exact="clamp(round(w / s), -7, 7) * s, s = max(amax / 7, 1e-5)",
    )  # fmt: skip


def _table() -> dict[str, Recipe]:
    nvfp4 = (_nvfp4_te(), _nvfp4_flashinfer(), _nvfp4_modelopt(), _nvfp4_others())
    families = (*nvfp4, _mxfp4(), _mxfp6(), _mxfp8(), _per_tensor())
    return {recipe.id: recipe for family in families for recipe in family}


RECIPES: dict[str, Recipe] = _table()

# Two names, one rule.
ALIASES = {"nvfp4": "nvfp4-te", "mxfp4": "mxfp4-ocp", "mxfp8": "mxfp8-te", "mxfp4-torchao-floor": "mxfp4-ocp"}


def recipes() -> tuple[str, ...]:
    """Ids of all recipes, in the order of the table."""
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
