"""Define the recipes of OCP MX, of libraries for PyTorch such as torchao, and of tools that compress models."""

from __future__ import annotations

from collections.abc import Iterator

from fp4kit import formats
from fp4kit.formats import E4M3, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Alias, Made, Recipe, Versions, of_format, producer, unscaled, variant


@producer("ocp", "OCP MX", "v1.0")
def ocp() -> Made:
    """Yield the recipes of the OCP Microscaling (MX) standard v1.0."""
    yield of_format(
        MXFP4,
        "mxfp4-ocp",
        "block_rule=e8m0_floor amax_nan=propagate",
        exact="torchao 0.19 dev, to_mx with mode FLOOR; for 0.18.0 use mxfp4-torchao-floor-018",
        source="OCP MX v1.0, 6.3; torchao 0.19 dev mx_formats/mx_tensor.py to_mx FLOOR",
    )


@producer("torchao", "torchao", "0.19 dev", package="torchao")
def torchao() -> Made:
    """Yield the recipes of torchao: nvfp4_quantize and to_mx of 0.19 dev, and to_mx of release 0.18.0."""
    torchao = of_format(
        NVFP4,
        "nvfp4-torchao",
        # nan_code is the code of 0 * inf: on x86 that NaN is negative, and its bits round to -1.5
        "tensor_rule=divided block_rule=torchao amax_nan=propagate nan_code=0xB",
        source="torchao 0.19 dev mx_formats/nvfp4_tensor.py nvfp4_quantize",
        exact="nvfp4_quantize with a per-tensor scale, on a CPU, since 0.18.0",
        versions=("0.18.0", "0.19 dev"),
    )
    yield torchao
    yield variant(
        torchao,
        "nvfp4-torchao-single",
        "tensor_scaling=none tensor_rule=None",
        exact="nvfp4_quantize without a per-tensor scale, since 0.18.0",
    )
    # The recipes of 0.19 dev cover RCEIL, CEIL and EVEN, because mode FLOOR is the recipe mxfp4-ocp.
    for mode in ("rceil", "ceil", "even"):
        yield _torchao_to_mx(MXFP4, mode, f"mxfp4-torchao-{mode}")
    for mode in ("floor", "rceil", "ceil", "even"):
        yield _torchao_to_mx_018(MXFP4, mode, f"mxfp4-torchao-{mode}")
    for fmt in (formats.MXFP6_E2M3, formats.MXFP6_E3M2):
        for mode in ("floor", "rceil"):
            for made in (_torchao_to_mx, _torchao_to_mx_018):
                yield made(fmt, mode, f"mxfp6-torchao-{mode}-{fmt.element.name.lower()}")
    for fmt, suffix in ((formats.MXFP8_E4M3, ""), (formats.MXFP8_E5M2, "-e5m2")):
        for mode in ("floor", "rceil", "ceil", "even"):
            for made in (_torchao_to_mx, _torchao_to_mx_018):
                yield made(fmt, mode, f"mxfp8-torchao-{mode}{suffix}")


def _torchao_to_mx(fmt: BlockFormat, mode: str, id: str) -> Recipe:
    """Return the recipe of to_mx in torchao 0.19 dev, for an MX format and a mode, that is how scales are rounded."""
    return of_format(
        fmt,
        id,
        f"block_rule=e8m0_{mode} amax_nan=propagate",
        source=f"torchao 0.19 dev mx_formats/mx_tensor.py to_mx {mode.upper()}",
        exact=f"to_mx with mode {mode.upper()} in 0.19 dev; for 0.18.0 use {id}-018",
    )


def _torchao_to_mx_018(fmt: BlockFormat, mode: str, id: str) -> Recipe:
    """Return the recipe of to_mx in torchao 0.18.0, for an MX format and a mode."""
    scale_0 = (
        "under which elements become zeros" if mode == "rceil" else "which encodes as 2^-126 but decodes as 2^-127"
    )
    more = {
        "even": ", and for blocks with inf or an amax that rounds to inf",
        "rceil": "; for blocks with inf; and for an amax a few ulp above 2^k times the largest element value, where "
        "the log2 of the release rounds down",
    }
    return of_format(
        fmt,
        f"{id}-018",
        f"block_rule=e8m0_{mode}_018 amax_nan=propagate",
        versions=("0.18.0", "0.18.0"),
        source=f"torchao 0.18.0 mx_formats/mx_tensor.py to_mx {mode.upper()}",
        exact=f"to_mx with mode {mode.upper()} in release 0.18.0. Differs from {id} for scale byte 0, "
        f"{scale_0}{more.get(mode, ', and for blocks with inf')}",
    )


_MSLK_MX4 = "MSLK 2a3c897 triton_quantize_mx4"


@producer("mslk", "MSLK", "2a3c897")
def mslk() -> Made:
    """Yield the recipes of MSLK 2a3c897 (Meta): its Triton kernels for NVFP4 and MX4."""
    on_h100 = "on an H100, where MSLK's FP4 conversion was replaced by an equal function"
    given = "except for blocks with NaN if a tensor_amax is given"
    precise = of_format(
        NVFP4,
        "nvfp4-mslk",
        "tensor_rule=fouroversix block_rule=mslk amax_nan=propagate",
        source="MSLK 2a3c897 quantize_kernels/nvfp4.py",
        exact=f"codes and scales of the Triton kernel {on_h100}, with 2688 / amax as global scale, {given}. Scales are "
        "at least 2^-9, including those of zero blocks",
    )
    yield precise
    yield variant(
        precise,
        "nvfp4-mslk-fast",
        "block_rule=mslk_fast",
        exact=f"codes and scales of the Triton kernel with fast math {on_h100}, {given}. Amaxes are multiplied by 1/6",
    )
    yield variant(
        precise,
        "nvfp4-mslk-power",
        "block_rule=mslk_power",
        exact=f"codes and scales of the Triton kernel with power-of-two scales {on_h100}, {given}. Equal with "
        "and without fast math",
    )
    yield variant(
        precise,
        "nvfp4-mslk-single",
        "tensor_scaling=none tensor_rule=None amax_nan=ignore",
        exact=f"codes and scales of the Triton kernel without a global scale, {on_h100}",
    )
    ceil = of_format(
        MXFP4,
        "mxfp4-mslk",
        "block_rule=e8m0_mslk_ceil",
        source=_MSLK_MX4,
        exact="codes and scales of the Triton kernel with mode ceil, the default, on an H100. Differs from "
        "mxfp4-torchao-ceil for scales above 2^125, which become 2^125, and for blocks with infinities or NaN",
    )
    yield ceil
    yield variant(
        ceil,
        "mxfp4-mslk-even",
        "block_rule=e8m0_mslk_even",
        exact="codes and scales of the Triton kernel with mode even on an H100. Differs from mxfp4-torchao-even for "
        "amaxes of exactly 1.75 * 2^k, for scales above 2^125, and for blocks with infinities or NaN",
    )
    yield variant(
        ceil,
        "mxfp4-mslk-nearest",
        "block_rule=e8m0_mslk_nearest",
        exact="codes and scales of the Triton kernel with mode nearest on an H100. An amax above about 1.414 * 2^k "
        "counts as 2^(k + 1)",
    )
    yield variant(
        ceil,
        "mxfp4-mslk-stochastic",
        "stochastic=mslk",
        source="MSLK 2a3c897 quantize_kernels/mx4.py",
        exact="codes and scales of the Triton kernel with mode stochastic on an H100, for the seed. Scales are rounded "
        "stochastically too. A zero has code 7 (the value 6 times the scale) in about half of all cases. For rounding "
        "to nearest, use mxfp4-mslk",
    )
    yield Alias(
        "mxfp4-mslk-floor",
        "mxfp4-ocp",
        source=_MSLK_MX4,
        exact="equals this recipe except for blocks with inf or NaN, whose scale is 2^125 or that of the other "
        "elements",
    )


@producer("microxcaling", "microxcaling", "7bc4195")
def microxcaling() -> Made:
    """Yield the recipes of microxcaling 7bc4195: its fake quantizers."""
    yield from _microxcaling_fakes(MXFP4, ("nearest", "nearest_flush", "even", "floor"))
    yield from _microxcaling_fakes(MXFP8_E4M3, ("nearest", "even"))


def _microxcaling_fakes(fmt: BlockFormat, modes: tuple[str, ...]) -> Iterator[Recipe]:
    """Yield microxcaling's recipes for a format, one per rounding mode, in the order of `modes`."""
    for mode in modes:
        yield of_format(
            fmt,
            f"mx{fmt.name[2:5].lower()}-microxcaling-{mode.replace('_', '-')}",
            f"block_rule=e8m0_floor fake_only=True fake_rule=microxcaling_{mode} amax_nan=propagate",
            source="microxcaling 7bc4195 mx/mx_ops.py _quantize_mx",
            exact=f"quantize_mx_op with round={mode.split('_')[0]!r}" + " and flush_fp32_subnorms" * ("flush" in mode),
        )


_COMPRESSED_FORWARD = "compressed-tensors 0.20.1 quantization/lifecycle/forward.py forward_quantize"
_COMPRESSED_VERSIONS = Versions("0.20.0", "0.20.1")


@producer("compressed-tensors", "compressed-tensors", "0.20", "0.20.1", package="compressed-tensors")
def compressed_tensors() -> Made:
    """Yield the recipes of compressed-tensors 0.20: its scale generation, quantization and packing."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-compressed-tensors",
        "tensor_rule=compressed_tensors block_rule=compressed_tensors decode_rule=compressed_tensors apply=divide "
        "sign=negative nan_code=0 amax_nan=propagate",
        source="compressed-tensors 0.20.1 quantization/utils calculate_qparams, pack_fp4_to_uint8",
        exact="codes and block scales. The producer's global scale divides on decode, and tensor_scale is its "
        "reciprocal",
    )
    yield nvfp4
    yield variant(
        nvfp4,
        "nvfp4-compressed-tensors-static",
        "tensor_rule=vllm",
        source=_COMPRESSED_FORWARD,
        exact="values of the fake quantizer of activations (W4A4, dynamic local), in the dtype of x, under the "
        "input_global_scale 2688 * (1 / tensor_amax) in float32. That scale is not rounded to the dtype of x. Not "
        "equal for a tensor_amax below 1e-8",
        versions=_COMPRESSED_VERSIONS,
    )
    fp8 = unscaled(
        E4M3,
        "fp8-compressed-tensors",
        "tensor_scaling=tensor tensor_rule=fp8_compressed_tensors apply=divide round_scaled=True sign=negative "
        "amax_nan=propagate",
        source=_COMPRESSED_FORWARD,
        exact="values of the fake quantizer of activations with strategy tensor, in the dtype of x, in which scales "
        "and quotients are rounded. Also with strategy token for 2-d inputs, which then share one scale",
        versions=_COMPRESSED_VERSIONS,
    )
    yield fp8
    yield variant(
        fp8,
        "fp8-compressed-tensors-token",
        "tensor_scaling=row",
        exact="values of the fake quantizer of activations with strategy token, in the dtype of x, for inputs of three "
        "or more dimensions, as layers of a model get them; for 2-d inputs use fp8-compressed-tensors",
    )
    yield variant(
        fp8,
        "fp8-compressed-tensors-group",
        "tensor_scaling=block block=1x128",
        exact="values of the fake quantizer of activations with strategy group and group_size 128, in the dtype of x",
    )
    yield _compressed_tensors_mx(MXFP4, "mxfp4-compressed-tensors", "sign=negative nan_code=0")
    yield _compressed_tensors_mx(MXFP6_E2M3, "mxfp6-compressed-tensors")
    yield _compressed_tensors_mx(MXFP8_E4M3, "mxfp8-compressed-tensors", "sign=negative")


def _compressed_tensors_mx(fmt: BlockFormat, id: str, more: str = "") -> Recipe:
    """Return compressed-tensors' recipe ``id`` for an MX format."""
    top = "1.9375" if fmt is MXFP6_E2M3 else "1.75"
    zero_points = ", with zero points, which turn -0 into 0" if fmt is MXFP8_E4M3 else ""
    return of_format(
        fmt,
        id,
        f"block_rule=e8m0_compressed_tensors round_scaled=True amax_nan=propagate {more}",
        source="compressed-tensors 0.20.1 quantization/utils calculate_qparams",
        exact=f"codes and scales{zero_points}, except for blocks with inf, NaN or an amax of at least {top} * 2^127 "
        f"(float16: {top} * 2^15). There, the producer's scale byte is an undefined cast (127 on x86, with codes of "
        "0), and the recipe follows OCP",
    )


# Texts for Recipe.exact: the exceptions that QuantLinear.pack causes, because it recomputes each code as value / scale
# in the dtype of x.
_AUTO_ROUND_PACKED = (
    ". Values that overflow the dtype get the code of zero. So do all values whose scale is 0 in float16; the sign of "
    "0 / 0 is that of x86's NaN. The sign of a NaN element is undefined in auto-round"
)
_AUTO_ROUND_PACKED8 = (
    ". Values that overflow the dtype get the largest code. So do all values whose scale is 0 in float16; 0 / 0 gives "
    "FF, as on x86. The sign of a NaN element is undefined in auto-round. Needs torch 2.13 or later, because earlier "
    "versions turn elements that overflow into NaN"
)


@producer("auto-round", "auto-round", "0.16.1", package="auto-round")
def auto_round() -> Made:
    """Yield the recipes of Intel auto-round 0.16.1: its data types, as QuantLinear.pack stores them."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-auto-round",
        "tensor_rule=auto_round block_rule=auto_round decode_rule=auto_round sign=unsigned_zero nan_code=0 "
        "repacked=True amax_nan=propagate",
        source="auto-round 0.16.1 data_type/nvfp.py nv_fp4",
        exact="packed tensors, whose codes are recomputed from values in the dtype of x",
    )
    yield nvfp4
    yield variant(
        nvfp4,
        "nvfp4-auto-round-fake",
        "sign=negative repacked=False",
        exact="values of the fake quantizer, where small negative values become -0 (packing starts from these values "
        "and drops the sign)",
    )
    yield variant(
        nvfp4,
        "nvfp4-auto-round-opt",
        "search=auto_round_percents",
        source="auto-round 0.16.1 data_type/nvfp.py opt_rtn_nv_fp4, search_nvfp4_scale",
        exact="packed tensors with iters=0, the default. If tensor_amax is passed, the search uses it too",
    )
    floor = of_format(
        MXFP4,
        "mxfp4-auto-round",
        "block_rule=e8m0_auto_round rounding=rns sign=negative nan_code=8 repacked=True amax_nan=propagate",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx",
        exact=f"packed tensors with iters=0 and disable_opt_rtn{_AUTO_ROUND_PACKED}",
    )
    yield floor
    yield variant(
        floor,
        "mxfp4-auto-round-opt",
        "search=auto_round_powers",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_opt_rtn",
        exact=f"packed tensors with iters=0, the default, except for blocks with inf{_AUTO_ROUND_PACKED}",
    )
    for rule in ("rceil", "rceil_v2"):
        yield variant(
            floor,
            f"mxfp4-auto-round-{rule.replace('_', '-')}",
            f"block_rule=e8m0_auto_round_{rule}",
            source=f"auto-round 0.16.1 data_type/mxfp.py quant_mx_{rule}",
            exact=f"packed tensors with data type function quant_mx_{rule}{_AUTO_ROUND_PACKED}",
        )
    mxfp8 = variant(
        floor, "mxfp8-auto-round", "nan_code=0xFF", element=MXFP8_E4M3.element, exact=f"codes{_AUTO_ROUND_PACKED8}"
    )
    yield mxfp8
    yield variant(
        mxfp8,
        "mxfp8-auto-round-rceil",
        "block_rule=e8m0_auto_round_rceil",
        source="auto-round 0.16.1 data_type/mxfp.py quant_mx_rceil",
    )


_QUARK_STORED = (
    "a scale of 2^-127 is stored as 2^-126 and blocks with inf lose their values; the decoded values, where float16 "
    "loses scales from 2^16 on and below 2^-24; and the values of the fake quantizer, which keeps those scales"
)
_QUARK_TORCH = "Needs torch 2.13 or later, because earlier versions turn scales that overflow into NaN"


@producer("quark", "AMD Quark", "0.13", package="amd-quark")
def quark() -> Made:
    """Yield the recipes of AMD Quark 0.13: its quantized tensors, in which a zero has no sign."""
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-quark",
        "tensor_rule=quark block_rule=quark apply=divide sign=unsigned_zero amax_nan=propagate",
        source="AMD Quark 0.13, scheme nvfp4",
        exact=f"packed tensors of the model flow. {_QUARK_TORCH}",
    )
    yield nvfp4
    yield variant(
        nvfp4,
        "nvfp4-quark-file2file",
        "block_rule=quark_file",
        exact=f"packed tensors of the file-to-file flow. {_QUARK_TORCH}",
    )
    even = _quark_mx(MXFP4, "mxfp4-quark-even")
    yield even
    for mode in ("floor", "ceil"):
        yield variant(
            even,
            f"mxfp4-quark-{mode}",
            f"block_rule=e8m0_quark_{mode} apply=divide",
            source="AMD Quark 0.13 quantization/observer.py get_scale",
            exact=f"packed tensors with scale mode {mode}, where logarithms are computed in the dtype of the "
            f"elements, {_QUARK_STORED}",
        )
    yield _quark_mx(MXFP6_E2M3, "mxfp6-quark-e2m3-even")
    yield _quark_mx(MXFP6_E3M2, "mxfp6-quark-e3m2-even")
    yield variant(
        _quark_mx(MXFP8_E4M3, "mxfp8-quark-even"),
        "mxfp8-quark-even",
        "block_rule=e8m0_even_finite decode_rule=e8m0 sign=signbit",
        exact="values of the fake quantizer. Quark does not pack FP8 with block scales",
    )


def _quark_mx(fmt: BlockFormat, id: str) -> Recipe:
    """Return Quark's recipe for an MX format and Quark's scale mode "even"."""
    return of_format(
        fmt,
        id,
        "block_rule=e8m0_quark_even decode_rule=e8m0_quark sign=unsigned_zero amax_nan=propagate",
        source="AMD Quark 0.13 quantization/utils.py even_round, csrc/mx/funcs.cuh",
        exact=f"packed tensors, where {_QUARK_STORED}",
    )
