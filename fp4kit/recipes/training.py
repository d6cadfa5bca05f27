"""Define the recipes of quantizers for training and research: fouroversix, FP-Quant, qwix and integer QAT."""

from __future__ import annotations

from typing import Any

from fp4kit.formats import IF4, INT4, MXFP4, MXFP8_E4M3, NVFP4
from fp4kit.recipes.schema import Made, of_format, producer, unscaled, variant

_FOUROVERSIX_SOURCE = "fouroversix 1.0.5 quantize/pytorch/reference.py"
_FOUROVERSIX_TRITON = "fouroversix 1.0.5 kernels/triton/quantize.py"
_FOUROVERSIX_BEYOND = (
    "Not equal for elements that are at least 127 times their scale, whose codes overflow into the neighboring code. "
    "Such elements exist only if tensor_amax is too small. Needs torch 2.13 or later, because earlier versions turn "
    "scales that overflow into NaN"
)


@producer("fouroversix", "fouroversix", "1.0.5", package="fouroversix")
def fouroversix() -> Made:
    """Yield the recipes of fouroversix 1.0.5 (MIT HAN lab): PyTorch back end on a CPU, Triton kernels on a GPU."""
    mse = of_format(
        NVFP4,
        "nvfp4-fouroversix",
        "tensor_rule=fouroversix block_rule=four_over_six decode_rule=fouroversix four_over_six=mse "
        "lane_sums=True scale_max=256 rounding=rnw sign=negative nan_code=0xB amax_nan=propagate",
        source=f"{_FOUROVERSIX_SOURCE} quantize_to_nvfp4",
        exact="codes with scale rule mse, the default, also in blocks of 16x16; and the decoded values, which "
        "overflow from 2^128 / 1536 on. Same codes as nvfp4-te-4over6-mse-256 except for scales of 0 and elements that "
        f"are at least 7 times their scale. {_FOUROVERSIX_BEYOND}",
    )
    yield mse
    mae = variant(
        mse, "nvfp4-fouroversix-mae", "four_over_six=mae", exact=f"codes with scale rule mae. {_FOUROVERSIX_BEYOND}"
    )
    yield mae
    yield variant(
        mse,
        "nvfp4-fouroversix-absmax",
        "four_over_six=max",
        exact=f"codes with scale rule abs_max. {_FOUROVERSIX_BEYOND}",
    )
    six = of_format(
        NVFP4,
        "nvfp4-fouroversix-6",
        "tensor_rule=fouroversix block_rule=fouroversix decode_rule=fouroversix rounding=rnw sign=negative "
        "nan_code=0xB amax_nan=propagate",
        source=f"{_FOUROVERSIX_SOURCE} quantize_to_nvfp4",
        exact=f"codes with scale rule static_6. {_FOUROVERSIX_BEYOND}",
    )
    yield six
    yield variant(six, "nvfp4-fouroversix-6-2d", "block=16x16")
    for cpu, name, blocks in (
        (mse, "", ", for finite tensors also in blocks of 16x16"),
        (mae, "-mae", ""),
        (six, "-6", ""),
    ):
        yield variant(
            cpu,
            f"nvfp4-fouroversix-triton{name}",
            "rounding=rn keep_infinity=True nan_code=0xF",
            source=_FOUROVERSIX_TRITON,
            exact=f"codes of the Triton kernels on an H200{blocks}. Same as {cpu.id} except for tensors whose amax is "
            "about 2^-126 or less, and for elements that are at least 7 times their scale, which become 6",
        )
    yield variant(
        six,
        "nvfp4-fouroversix-4",
        "tensor_rule=fouroversix_4 block_rule=fouroversix_4",
        exact=f"codes with scale rule static_4. {_FOUROVERSIX_BEYOND}",
    )
    yield of_format(
        NVFP4,
        "nvint4-fouroversix",
        "tensor_rule=fouroversix block_rule=fouroversix decode_rule=fouroversix narrow=True "
        "keep_infinity=True nan_code=0 amax_nan=propagate",
        element=INT4,
        source=f"{_FOUROVERSIX_SOURCE} quantize_to_nvint4",
        exact="codes of integers from -7 to 7 in two's complement, E4M3 scales, and the decoded values. fouroversix "
        "stores the even element in the low nibble, and scales in row-major order",
    )
    measures = (("", "mse", "mse, the default"), ("-mae", "mae", "mae"), ("-absmax", "max", "abs_max"))
    for name, error, rule in measures:
        yield variant(
            mse,
            f"if4-fouroversix{name}",
            f"block_rule=fouroversix_if4 four_over_six={error} scale_max=448",
            element=IF4,
            source=f"{_FOUROVERSIX_SOURCE} select_intfloat",
            exact=f"codes with scale rule {rule}, and the decoded values. Decode rule fouroversix_float32 gives the "
            "values of a float32 intermediate dtype. In blocks with a NaN scale, fouroversix takes the sign of the "
            "NaN, which depends on the processor, for the bit that selects INT4. fouroversix stores scales in "
            f"row-major order. {_FOUROVERSIX_BEYOND}",
        )
    for fmt, rule in (("nvfp4", "ms_eden"), ("if4", "ms_eden_if4")):
        yield of_format(
            NVFP4,
            f"{fmt}-fouroversix-ms-eden",
            f"tensor_rule=fouroversix block_rule=fouroversix fake_rule={rule} fake_only=True stochastic=ms_eden "
            "amax_nan=propagate",
            source="fouroversix kernels/triton/quartet_ii.py, a checkout labelled 1.0.5",
            exact="values of the Triton kernel on an H100 with rounding='stochastic', for the seed, and with an "
            "identity transform; multiply blocks of 32 elements by the producer's matrix before the call. float32 "
            "elements are truncated to TF32: clear their 13 low bits before the call, and pass the tensor_amax of the "
            "elements before that. The order in which a GPU adds is not known, and changed no recorded value",
        )
    for top, rule in (("6", "e8m0_fouroversix"), ("4", "e8m0_fouroversix_4")):
        yield of_format(
            MXFP4,
            f"mxfp4-fouroversix-{top}",
            f"block_rule={rule} decode_rule=e8m0_float16 sign=negative nan_code=0xB amax_nan=propagate",
            source=f"{_FOUROVERSIX_SOURCE} quantize_to_mxfp4",
            exact=f"codes with scale rule static_{top}, where the codes of a zero block decode to -1.5; and the "
            "decoded values, which are rounded to float16, so that scales from 2^16 on and below 2^-24 are lost",
        )


_FP_QUANT_GPU = (
    "With a Hadamard transform, the recorded values are those of the transformed elements if each sum is rounded once; "
    "the order in which a GPU adds is not known. On a GPU, float32 elements are truncated to TF32 first; clear their "
    "13 low bits before the call"
)


@producer("fp-quant", "FP-Quant", "0.3.2", package="fp_quant")
def fp_quant() -> Made:
    """Yield the recipes of FP-Quant 0.3.2: its fake quantizers for training, written in Triton."""
    yield of_format(
        NVFP4,
        "nvfp4-fp-quant",
        "tensor_scaling=none block_rule=modelopt apply=divide fake_only=True fake_rule=nvfp4_fp_quant "
        "amax_nan=propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of NVFP4",
        exact="values with an identity transform and the global scale 3 of method abs_max, on an H100. "
        f"{_FP_QUANT_GPU}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-fp-quant",
        "block_rule=e8m0_floor fake_only=True fake_rule=fp_quant amax_nan=propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of MXFP4",
        exact="values with method abs_max and an identity transform: on an H100 for float16 and bfloat16, and in "
        f"Triton's interpreter for float32, except for blocks with an amax below 2^-124, whose scale a GPU flushes. "
        f"{_FP_QUANT_GPU}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-fp-quant-quest",
        "block_rule=e8m0_floor search=quest rounding=rnz sign=not_positive nan_code=8 amax_nan=propagate",
        source="FP-Quant 0.3.2, Triton pseudo-quantizer of MXFP4",
        exact="values with method quest and an identity transform, on an H100 and in Triton's interpreter. The order "
        f"in which a GPU adds the squares of a block is not known, and changed no recorded value. {_FP_QUANT_GPU}",
    )


_QWIX_COMMON = (
    "Where qwix divides, XLA on a CPU multiplies by rounded reciprocals. A scale below 2^-63 (2^-7 for float16) "
    "becomes 1"
)
_QWIX_MX = (
    "codes with jax 0.10, which rounds logarithms to the dtype of the elements (jax 0.11 does not for bfloat16). "
    f"{_QWIX_COMMON}"
)


@producer("qwix", "qwix", "0.1.8", package="qwix")
def qwix() -> Made:
    """Yield the recipes of qwix 0.1.8 (JAX), as XLA computes them on a CPU."""
    yield of_format(
        NVFP4,
        "nvfp4-qwix",
        "tensor_scaling=none block_rule=qwix flush=True round_scaled=True nan_code=8 amax_nan=propagate",
        source="qwix 0.1.8",
        exact=f"codes. {_QWIX_COMMON}",
    )
    yield of_format(
        MXFP4,
        "mxfp4-qwix",
        "block_rule=e8m0_qwix round_scaled=True nan_code=8 amax_nan=propagate",
        source="qwix 0.1.8",
        exact=_QWIX_MX,
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-qwix",
        "block_rule=e8m0_qwix round_scaled=True amax_nan=propagate",
        source="qwix 0.1.8",
        exact=_QWIX_MX,
    )


@producer("qat", "Integer QAT flags", "unversioned")
def qat() -> Made:
    """Yield the recipe of the INT4 fake quantization of slime and miles, for quantization-aware training (QAT)."""
    yield unscaled(
        INT4,
        "int4-qat",
        "tensor_scaling=block tensor_rule=int4_qat fake_rule=int4_qat apply=divide narrow=True "
        "amax_nan=propagate block=1x128",
        source="slime 624b824 docker/patch/latest/megatron.patch _FakeInt4QuantizationSTE, also in miles 31f1ca9",
        exact="clamp(round(w / s), -7, 7) * s for a weight w, where s = max(amax * fp32(1 / 7), 1e-5): PyTorch on a "
        "GPU divides by 7 in this way, and on a CPU exactly",
    )


_JAX_SOURCE = "JAX {} jax._src.cudnn.scaled_matmul_stablehlo quantize, of jax.nn.scaled_dot_general, on {}"


@producer("jax", "JAX", "0.10.2", "0.12.0.1", package="jax")
def jax() -> Made:
    """Yield the recipes of jax.nn.scaled_dot_general: op by op and under jax.jit, on a CPU and on a GPU.

    XLA on a CPU flushes subnormals, and divides by multiplying with a rounded reciprocal. A GPU keeps subnormals. Since
    0.12, MXFP8 and MXFP4 are computed in float32, whatever the dtype; ids with -011 and -gpu are for 0.11.
    """
    kept = "NaN elements are kept in an amax, unlike in some large arrays"
    rules = f"Zeros of a block with scale 0 have code 8. {kept}"
    cpu: dict[str, Any] = {"source": _JAX_SOURCE.format("0.12.0.1", "a CPU")}
    old: dict[str, Any] = {"source": _JAX_SOURCE.format("0.11.2", "a CPU"), "versions": ("0.10.2", "0.11.2")}
    gpu: dict[str, Any] = {"source": _JAX_SOURCE.format("0.11.2", "an H100"), "versions": ("0.11.2", "0.11.2")}
    on_cpu = of_format(
        NVFP4,
        "nvfp4-jax",
        "tensor_scaling=none block_rule=jax nan_code=8 amax_nan=propagate flush=True",
        exact=f"codes and scales of config nvfp4 with global_scale 1, the default, op by op and under jit. {rules}",
        **cpu,
    )
    on_gpu = variant(on_cpu, "nvfp4-jax-gpu", "block_rule=jax_gpu flush=False", **gpu)
    text = "tensor_scaling=tensor tensor_rule="
    for base, jitted, changed in ((on_cpu, "divided block_rule=jax_jit", "divided"), (on_gpu, "divided", "jax_gpu")):
        yield base
        for suffix, rule, how in (("", changed, "op by op"), ("-jit", jitted, "under jit, where it is a constant")):
            exact = f"codes, scales and global_scale {how}, with global_scale = amax / 2688, a normal float32. {rules}"
            facts = old if suffix and base is on_cpu else {}
            exact += ". If global_scale is an argument, and since 0.12, nvfp4-jax-global" if facts else ""
            yield variant(base, f"{base.id}-global{suffix}", f"{text}{rule}", exact=exact, **facts)
    new, zeros = cpu | {"versions": ("0.12.0.1", "0.12.0.1")}, "Zeros of a block with scale 2^-127"
    was = (
        ". Zeros of a bfloat16 block with scale 2^-127 become NaN (under jit on some processors only), and op by op "
        f"those of a float32 block too. {kept}"
    )
    for suffix, how in (("", "op by op"), ("-jit", "under jit")):
        nan, eight = ("", "") if suffix else (f"{zeros} become NaN. ", f"{zeros} have code 8. ")
        for fmt, id, rule, exact, facts in (
            (MXFP8_E4M3, "mxfp8-jax", "{} flush=True", f". {nan}{kept}", new),
            (MXFP4, "mxfp4-jax", "{} flush=True nan_code=8", f". {eight}{kept}", new),
            (MXFP8_E4M3, "mxfp8-jax-011", "_011{} flush=True round_scaled=True", was, old),
            (MXFP8_E4M3, "mxfp8-jax-gpu", "_gpu{} round_scaled=True", "", gpu),
        ):
            text = f"block_rule=e8m0_jax{rule.format(suffix.replace('-', '_'))} amax_nan=propagate"
            exact = f"codes and scales of config {id[:5]} {how}{exact}"
            yield of_format(fmt, f"{id}{suffix}", text, exact=exact, **facts)


@producer("miles", "miles", "200e6df")
def miles() -> Made:
    """Yield the recipes of miles: MXFP4 weights of its quantization-aware training, in three versions of its file."""
    for id, text, version, exact in (
        ("", "even nan_code=0 nan_sign=True", "main of 2026-11", ", scales and bfloat16 values"),
        ("-ceil", "ceil nan_code=8", "kimi-k3 of 2026-07-28", ", scales and bfloat16 values"),
        ("-dsv4", "dsv4 nan_code=0 nan_sign=True", "200e6df", " and scales, where an infinite amax gives zeros"),
    ):
        yield of_format(
            MXFP4,
            f"mxfp4-miles{id}",
            f"block_rule=e8m0_miles_{text} rounding=rnz amax_nan=propagate",
            source=f"miles {version} miles/utils/mxfp4.py",
            exact=f"codes{exact}. Ties round toward zero",
            versions=(version, version),
        )
