"""Define the recipes of fouroversix 1.0.5 (MIT HAN lab): PyTorch back end on a CPU, Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from fp4kit.formats import IF4, INT4, MXFP4, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("1.0.5", "1.0.5")
_SOURCE = "fouroversix 1.0.5 quantize/pytorch/reference.py"
_TRITON = "fouroversix 1.0.5 kernels/triton/quantize.py"
_BEYOND = (
    "Not equal for elements that are at least 127 times their scale, whose codes overflow into the neighboring code. "
    "Such elements exist only if tensor_amax is too small. Needs torch 2.13 or later, because earlier versions turn "
    "scales that overflow into NaN"
)


def _if4(like: Recipe) -> Iterator[Recipe]:
    """Yield three recipes of IF4, for the error measures mse, mae and max (fouroversix's abs_max)."""
    measures: dict[str, tuple[Literal["mse", "mae", "max"], str]] = {
        "": ("mse", "mse, the default"),
        "-mae": ("mae", "mae"),
        "-absmax": ("max", "abs_max"),
    }
    for name, (error, rule) in measures.items():
        yield replace(
            like,
            id=f"if4-fouroversix{name}",
            element=IF4,
            block_rule="fouroversix_if4",
            four_over_six=error,
            scale_max=448,
            source=f"{_SOURCE} select_intfloat",
            exact=f"codes with scale rule {rule}, and the decoded values. Decode rule fouroversix_float32 gives the "
            "values of a float32 intermediate dtype. In blocks with a NaN scale, fouroversix takes the sign of the "
            "NaN, which depends on the processor, for the bit that selects INT4. fouroversix stores scales in "
            f"row-major order. {_BEYOND}",
        )


def _ms_eden() -> Iterator[Recipe]:
    """Yield the recipes of MS-EDEN, a fake quantizer for gradients: for NVFP4, then for IF4."""
    for fmt, rule in (("nvfp4", "ms_eden"), ("if4", "ms_eden_if4")):
        yield of_format(
            NVFP4,
            f"{fmt}-fouroversix-ms-eden",
            tensor_rule="fouroversix",
            block_rule="fouroversix",
            fake_rule=rule,
            fake_only=True,
            stochastic="ms_eden",
            amax_nan="propagate",
            source="fouroversix kernels/triton/quartet_ii.py, a checkout labelled 1.0.5",
            exact="values of the Triton kernel on an H100 with rounding='stochastic', for the seed, and with an "
            "identity transform; multiply blocks of 32 elements by the producer's matrix before the call. float32 "
            "elements are truncated to TF32: clear their 13 low bits before the call, and pass the tensor_amax of the "
            "elements before that. The order in which a GPU adds is not known, and changed no recorded value. With "
            "'nearest', block scales are rounded to nearest, which the kernel does not offer",
        )


def recipes() -> Iterator[Recipe]:
    """Yield fouroversix's recipes for NVFP4, NVINT4, IF4 and MXFP4, in the order of fp4kit.recipes()."""
    mse = of_format(
        NVFP4,
        "nvfp4-fouroversix",
        tensor_rule="fouroversix",
        block_rule="four_over_six",
        decode_rule="fouroversix",
        four_over_six="mse",
        lane_sums=True,
        scale_max=256,
        rounding="rnw",
        sign="negative",
        nan_code=0xB,
        amax_nan="propagate",
        source=f"{_SOURCE} quantize_to_nvfp4",
        exact="codes with scale rule mse, the default, also in blocks of 16x16; and the decoded values, which "
        "overflow from 2^128 / 1536 on. Same codes as nvfp4-te-4over6-mse-256 except for scales of 0 and elements that "
        f"are at least 7 times their scale. {_BEYOND}",
    )
    yield mse
    mae = replace(mse, id="nvfp4-fouroversix-mae", four_over_six="mae", exact=f"codes with scale rule mae. {_BEYOND}")
    yield mae
    yield replace(
        mse, id="nvfp4-fouroversix-absmax", four_over_six="max", exact=f"codes with scale rule abs_max. {_BEYOND}"
    )
    six = of_format(
        NVFP4,
        "nvfp4-fouroversix-6",
        tensor_rule="fouroversix",
        block_rule="fouroversix",
        decode_rule="fouroversix",
        rounding="rnw",
        sign="negative",
        nan_code=0xB,
        amax_nan="propagate",
        source=f"{_SOURCE} quantize_to_nvfp4",
        exact=f"codes with scale rule static_6. {_BEYOND}",
    )
    yield six
    yield replace(six, id="nvfp4-fouroversix-6-2d", block=(16, 16))
    for cpu, name, blocks in (
        (mse, "", ", for finite tensors also in blocks of 16x16"),
        (mae, "-mae", ""),
        (six, "-6", ""),
    ):
        yield replace(
            cpu,
            id=f"nvfp4-fouroversix-triton{name}",
            rounding="rn",
            keep_infinity=True,
            nan_code=0xF,
            source=_TRITON,
            exact=f"codes of the Triton kernels on an H200{blocks}. Same as {cpu.id} except for tensors whose amax is "
            "about 2^-126 or less, and for elements that are at least 7 times their scale, which become 6",
        )
    yield replace(
        six,
        id="nvfp4-fouroversix-4",
        tensor_rule="fouroversix_4",
        block_rule="fouroversix_4",
        exact=f"codes with scale rule static_4. {_BEYOND}",
    )
    yield Recipe(
        id="nvint4-fouroversix",
        element=INT4,
        scale=NVFP4.scale,
        block=(1, NVFP4.block_size),
        tensor_scaling="tensor",
        tensor_rule="fouroversix",
        block_rule="fouroversix",
        decode_rule="fouroversix",
        narrow=True,
        keep_infinity=True,
        nan_code=0,
        amax_nan="propagate",
        source=f"{_SOURCE} quantize_to_nvint4",
        exact="codes of integers from -7 to 7 in two's complement, E4M3 scales, and the decoded values. fouroversix "
        "stores the even element in the low nibble, and scales in row-major order",
    )
    yield from _if4(mse)
    yield from _ms_eden()
    for top, rule in (("6", "e8m0_fouroversix"), ("4", "e8m0_fouroversix_4")):
        yield of_format(
            MXFP4,
            f"mxfp4-fouroversix-{top}",
            block_rule=rule,
            decode_rule="e8m0_float16",
            sign="negative",
            nan_code=0xB,
            amax_nan="propagate",
            source=f"{_SOURCE} quantize_to_mxfp4",
            exact=f"codes with scale rule static_{top}, where the codes of a zero block decode to -1.5; and the "
            "decoded values, which are rounded to float16, so that scales from 2^16 on and below 2^-24 are lost",
        )
