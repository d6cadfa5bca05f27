"""Define the recipes of Transformer Engine (TE) d0067d0: its CUDA kernels and its Python reference quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit import formats
from fp4kit.formats import MXFP4, NVFP4
from fp4kit.recipes.schema import Recipe, Versions, four_over_six, of_format

VERSIONS = Versions("d0067d0", "d0067d0")


def recipes() -> Iterator[Recipe]:
    """Yield TE's recipes: first those for NVFP4, then the one for MXFP4, then those for MXFP8."""
    yield from _nvfp4()
    yield _mxfp4()
    yield from _mxfp8()


def _nvfp4() -> Iterator[Recipe]:
    """Yield TE's NVFP4 recipes: two of its kernels, three of its Python reference, then the 4over6 variants."""
    te = of_format(
        NVFP4,
        "nvfp4-te",
        tensor_rule="te",
        block_rule="te",
        decode_rule="te",
        source="TE d0067d0 common/transpose/quantize_transpose_vector_blockwise_fp4.cu",
        exact="TE's CUDA kernels. Same bytes as nvfp4-te-reference except for -0 and NaN",
    )
    yield te
    yield replace(
        te,
        id="nvfp4-te-2d",
        block=(16, 16),
        tensor_rule="te_primary_weight",
        source="TE d0067d0 common/recipe/nvfp4.cu",
        exact="TE's primary-weight kernels. Also defined for odd offsets and K % 64 != 0, where these kernels fail",
    )
    reference = replace(
        te,
        id="nvfp4-te-reference",
        tensor_rule="te_reference",
        sign="negative",
        nan_code=0,
        amax_nan="propagate",
        source="TE d0067d0 pytorch/custom_recipes/reference_nvfp4.py",
        exact="TE's Python reference quantizer",
    )
    yield reference
    yield replace(reference, id="nvfp4-te-reference-2d", block=(16, 16))
    yield replace(reference, id="nvfp4-te-rowscaled", tensor_scaling="row")
    base = replace(reference, source="TE d0067d0 common/cast/nvfp4/quantize_4over6_nvfp4.cuh, reference_nvfp4.py")
    for r in four_over_six(base, "nvfp4-te"):
        yield r
        yield replace(r, id=f"{r.id}-2d", block=(16, 16))
    yield replace(
        r,
        id=f"{r.id}-fasterr",
        fast_error=True,
        exact="TE's Python reference quantizer with NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1",
    )


def _mxfp4() -> Recipe:
    """Return the recipe mxfp4-te, the MXFP4 of TE's Python reference quantizer. TE has no kernel for it."""
    return of_format(
        MXFP4,
        "mxfp4-te",
        block_rule="e8m0_te_reference",
        sign="negative",
        nan_code=0,
        amax_nan="propagate",
        source="TE d0067d0 reference_nvfp4.py, pow_2_scales (TE has no MXFP4 kernel)",
        exact="TE's Python reference quantizer",
    )


def _mxfp8() -> Iterator[Recipe]:
    """Yield TE's MXFP8 recipes: for E4M3 elements, then for E5M2, each first with blocks of 32, then of 32x32."""
    for fmt, suffix in ((formats.MXFP8_E4M3, ""), (formats.MXFP8_E5M2, "-e5m2")):
        te = of_format(
            fmt,
            f"mxfp8-te{suffix}",
            block_rule="e8m0_te",
            exact="TE's CUDA kernels",
            source="TE d0067d0 common/cast/mxfp8/quantize_mxfp8.cuh",
        )
        yield te
        yield replace(te, id=f"{te.id}-2d", block=(32, 32))
