"""Define the recipes of producers for Ascend NPUs: HiFloat4 and AMCT (HiF4), and msmodelslim (dual-level MXFP4)."""

from __future__ import annotations

from typing import Any

from fp4kit.formats import E1M2, E6M2, MXFP4, MXFP8_E4M3, NVFP4, ElementFormat
from fp4kit.recipes.schema import HIF4_LEVELS, Level, Made, Recipe, of_format, producer, variant

_HIF4: dict[str, Any] = {
    "scale": E6M2,
    "block": (1, 64),
    "decode_rule": "hif4",
    "levels": HIF4_LEVELS,
}
_HIFLOAT4 = "HiFloat4 6d937b6 hif4_gpu/quant_cy"


@producer("hifloat4", "HiFloat4", "6d937b6")
def hifloat4() -> Made:
    """Yield the recipes of HiFloat4's reference, in float32 (force_fp32) and in the dtype of x (-native)."""
    elements = {"hif4": E1M2, "hifx3": ElementFormat("E1M1", 1, 1, 1), "hifx5": ElementFormat("E1M3", 1, 3, 1)}
    for name, element in elements.items():
        exact = "values with force_fp32. The producer has no codes; these are the codes of its values"
        facts = {"element": element, "block_rule": "hif4", "source": _HIFLOAT4, "exact": exact}
        r = Recipe(id=f"{name}-hifloat4", **_HIF4 | facts)
        yield r
        exact = "values without force_fp32. In float16, blocks of zeros give NaN"
        yield variant(r, f"{r.id}-native", "fake_only=True fake_rule=hif4_native", exact=exact)
        if name == "hif4":
            exact = "values of its NumPy script HiF4_NVFP4_v14f16.py in float64, for finite inputs"
            yield variant(r, f"{r.id}-numpy", "fake_only=True fake_rule=hif4_float64", exact=exact)
    for fmt, name, rule, text in (
        (NVFP4, "nvfp4", "nvfp4_hifloat4", "tensor_scaling=none apply=divide block_rule=hifloat4"),
        (MXFP4, "mxfp4", "mx_hifloat4", "rounding=rnas block_rule=e8m0_hifloat4"),
        (MXFP8_E4M3, "mxfp8", "mx_hifloat4", "rounding=rnas block_rule=e8m0_hifloat4"),
    ):
        for suffix, how in (("", "with"), ("_native", "without")):
            fake = f"{text}{suffix} fake_only=True fake_rule={rule}{suffix} amax_nan=propagate sign=unscaled"
            fake += f" round_scaled={suffix == '_native'}"
            id, exact = f"{name}-hifloat4{suffix.replace('_', '-')}", f"values {how} force_fp32"
            yield of_format(fmt, id, fake, source=_HIFLOAT4, exact=exact)


@producer("amct", "AMCT", "2be20da")
def amct() -> Made:
    """Yield the recipe of AMCT's HiF4, whose packed and block_scale are the bytes that hif4_pack stores."""
    yield Recipe(
        id="hif4-amct",
        element=E1M2,
        block_rule="hif4_amct",
        **_HIF4,
        source="AMCT 2be20da amct_pytorch/quantization/dtypes/hifp_impl.py hif4_pack, hif4_unpack",
        exact="codes, scale bytes and values. AMCT's scales have the shape (rows, blocks, 4); block_scale is (rows, "
        "blocks * 4). A block with infinities or NaN is NaN as a whole",
    )


@producer("msmodelslim", "msmodelslim", "26.1.0", package="msmodelslim")
def msmodelslim() -> Made:
    """Yield the recipes of msmodelslim's weights: MXFP4, MXFP8 and dual-level MXFP4."""
    source = "msmodelslim 26.1.0 AutoWeightQuantizer"
    usual = "block_rule=e8m0_msmodelslim"
    codes = " rounding=rnas amax_nan=propagate"
    of_fp4, of_fp8 = f"{codes} sign=unscaled nan_code=8", f"{codes} sign=negative nan_code=0xFF"
    for id, text, fmt, exact in (
        ("mxfp4-msmodelslim", of_fp4, MXFP4, "method minmax"),
        ("mxfp4-msmodelslim-ceil-x", f"_ceil_x{of_fp4}", MXFP4, "method ceil_x with the constant 7.25"),
        (
            "mxfp4-msmodelslim-ceil-x-search",
            f"_ceil_x{of_fp4} search=msmodelslim_ceil_x",
            MXFP4,
            "method ceil_x, whose search tries 6, 6.25 to 12 for the whole array",
        ),
        ("mxfp4-msmodelslim-4over6", f"_power{of_fp4} search=msmodelslim_4over6", MXFP4, "method 4over6"),
        ("mxfp8-msmodelslim", f"_fp8{of_fp8}", MXFP8_E4M3, "method minmax"),
        ("mxfp8-msmodelslim-mse", f"_power{of_fp8} search=msmodelslim_mse", MXFP8_E4M3, "method mse_round"),
    ):
        exact = f"codes, scale bytes and values of {exact}. An exponent that is NaN has byte 0, as in its files"
        exact += ". Infinite values have the largest code, as casts of PyTorch give it since 2.13" * (fmt is MXFP8_E4M3)
        yield of_format(fmt, id, f"{usual}{text} fake_rule=mx_msmodelslim", source=source, exact=exact)
    for columns in (512, 64):
        yield of_format(
            MXFP4,
            "mxfp4-msmodelslim-dual" + f"-{columns}" * (columns != 512),
            f"{usual}{of_fp4} tensor_scaling=block tensor_rule=msmodelslim decode_rule=e8m0_levels",
            levels=(Level(columns, "float32"), Level(32, "E8M0")),
            source=f"{source}, dual scale",
            exact=f"codes and the scales of both levels, with dual_scale blocks of {columns}",
        )
