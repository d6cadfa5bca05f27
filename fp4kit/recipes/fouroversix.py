"""fouroversix 1.0.5 (MIT HAN lab): its PyTorch back end on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Recipe, of_format
from fp4kit.recipes.versions import Versions

VERSIONS = Versions("1.0.5", "1.0.5")
_SOURCE = "fouroversix 1.0.5 quantize/pytorch/reference.py"
_TRITON = "fouroversix 1.0.5 kernels/triton/quantize.py"
_BEYOND = (
    "not from 127 scales on (only a tensor_amax that is too small makes them), "
    "where a code spills into that of its neighbour; with torch from 2.13 on (before, scales that overflow are NaN)"
)


def recipes() -> Iterator[Recipe]:
    """In the order of the table."""
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
        exact="its codes of mse, the default, in blocks of 16x16, too, and its values, which overflow from 2^128 / "
        "1536 on; "
        f"codes of nvfp4-te-4over6-mse-256 but for scales of 0 and elements from 7 scales on; {_BEYOND}",
    )
    yield mse
    mae = replace(mse, id="nvfp4-fouroversix-mae", four_over_six="mae", exact=f"its codes of mae; {_BEYOND}")
    yield mae
    yield replace(mse, id="nvfp4-fouroversix-absmax", four_over_six="max", exact=f"its codes of abs_max; {_BEYOND}")
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
        exact=f"its codes of static_6; {_BEYOND}",
    )
    yield six
    yield replace(six, id="nvfp4-fouroversix-6-2d", block=(16, 16))
    for cpu, name, blocks in (
        (mse, "", ", of finite tensors in blocks of 16x16, too"),
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
            exact=f"its codes on an H200{blocks}; {cpu.id} but for tensors whose amax is near 2^-126 and below, "
            "and for elements from 7 scales on, which are 6 here",
        )
    yield replace(
        six,
        id="nvfp4-fouroversix-4",
        tensor_rule="fouroversix_4",
        block_rule="fouroversix_4",
        exact=f"its codes of static_4; {_BEYOND}",
    )
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
            exact=f"its codes of static_{top}; those of a block of zeros mean -1.5 there, too; its values, which it "
            f"rounds to "
            "float16, so that scales from 2^16 on and below 2^-24 are lost",
        )
