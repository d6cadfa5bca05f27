"""Write a recipe and its formats as C++ structs, so that kernels need no copy of the facts in formats.py and recipes/.

In the C++ code, the struct R describes the recipe. Kernels read its constants, such as R::kBlock.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp4kit.formats import (
    E2M1,
    E4M3,
    E5M2,
    INT4,
    Codebook,
    ElementFormat,
    IntegerOrFloat,
    PairedMicroexponents,
    is_same,
)
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES, NOISE_STOCHASTICS
from fp4kit.recipes.schema import fake_unit, then_encodes

# The number of thread blocks in a cluster that computes the amax of a small array: the largest cluster that every GPU
# with clusters supports.
FINDERS = 8
THREAD_BYTES = 64  # bytes of elements that a thread of quantize loads at a time, unless a RowPlan says otherwise
TYPES = {np.dtype(np.float32): "Float32", np.dtype(np.float16): "Float16", np.dtype(ml_dtypes.bfloat16): "Bfloat16"}


def format_struct(f: ElementFormat, name: str) -> str:
    """Return the definition of the C++ struct `name`, which holds the constants of the element or scale format f."""
    largest = f.max
    f = INT4 if isinstance(f, IntegerOrFloat) else f
    facts = {
        "int kExponentBits": f.exponent_bits,
        "int kMantissaBits": f.mantissa_bits,
        "int kBits": f.bits,
        "int kStoredBits": f.packing.stored_bits,
        "int kBias": f.bias,
        "int kEmin": f.emin,
        "int kEmax": f.emax,
        "u32 kSignBit": f.sign_bit,
        "u32 kMaxCode": f.max_code,
        "u32 kNanCode": f.nan_code,
        "u32 kInfinityCode": f.max_code + 1 if f.specials == "ieee" else 0xFFFF,
        "u32 kMaxBits": int(np.float32(largest).view(np.uint32)),
        "bool kHasNan": f.specials != "none",
        "bool kIsInteger": f.is_integer,
        "bool kIsTable": isinstance(f, Codebook),
        "bool kIsE2m1": is_same(f, E2M1),
        "bool kIsE4m3": is_same(f, E4M3),
        "bool kIsE5m2": is_same(f, E5M2),
    }
    members = [_constant(fact, value) for fact, value in facts.items()]
    if isinstance(f, Codebook):
        members += _table_members(f)
    return f"struct {name} {{ {' '.join(members)} }};"


def _table_members(f: Codebook) -> list[str]:
    """Return the definitions of the C++ members that only a Codebook has (kernels/rules/codec.cuh)."""
    values = "".join(f"code == {code}u ? {_literal(value)} : " for code, value in enumerate(f.values[:-1]))
    value = f"FP4KIT_DEVICE float value(u32 code) {{ return {values}{_literal(f.values[-1])}; }}"
    if not isinstance(f, PairedMicroexponents):
        return [_nearest_function(f), value]
    target = int(np.float32(f.amax_target).view(np.uint32))
    return ["using HasPairs = void;", _constant("u32 kAmaxTargetBits", target), value]


def _nearest_function(f: Codebook) -> str:
    """Return the definition of the C++ function `nearest`, which returns the code of the value nearest to a float."""
    steps = " + ".join(["0u", *(f"(x > {_literal(midpoint)})" for midpoint in f.midpoints)])
    codes = sum(int(code) << (4 * i) for i, code in enumerate(f.order))
    return f"FP4KIT_DEVICE u32 nearest(float x) {{ return static_cast<u32>({codes}ull >> (4u * ({steps}))) & 15u; }}"


def _literal(x: np.float32) -> str:
    """Return a C++ expression that has exactly the bits of a float32 number."""
    return f"float_of({int(np.float32(x).view(np.uint32))}u)"


def _constant(name: str, value: object) -> str:
    """Return the C++ definition of a static constant."""
    text = str(value).lower() if isinstance(value, bool) else f"{value}u" if name.startswith("u32") else str(value)
    return f"static constexpr {name} = {text};"


def has_table(r: Recipe) -> bool:
    """Return True if kernels look up the factor of a block in a table, by the code of its block scale."""
    # The rules nunchaku and aiter have no table, because their factor depends on the amax of the block.
    one_scale = r.scale == E4M3 and r.tensor_scaling in ("none", "tensor") and r.block_rows == 1
    return one_scale and not (r.block_rule and BLOCK_RULES[r.block_rule].reads_amax)


def _recipe_facts(r: Recipe) -> dict[str, object]:
    """Return the constants of the C++ struct R that depend only on the recipe, as {"type name": value}."""
    return {
        "int kBlock": r.block_size if r.block else 16,
        "int kBlockRows": r.block_rows,
        "int kScaleMax": r.scale_max,
        "u32 kNanCode": r.element.nan_code if r.nan_code is None else r.nan_code,
        "bool kHasBlocks": r.block is not None,
        "bool kHasScales": r.scale is not None,
        "bool kHasTable": has_table(r),
        "bool kIsOwn": r.is_custom,
        "bool kPropagateNan": r.amax_nan == "propagate",
        "bool kFlush": r.flush,
        "bool kDivide": r.apply != "multiply",
        "bool kCompare": r.apply == "compare",
        "bool kThenEncode": then_encodes(r),
        "bool kRoundScaled": r.round_scaled,
        "bool kStochasticFloat16": r.stochastic == "comfy_kitchen_fp8",
        "bool kRepacked": r.repacked,
        "bool kNanIsMax": r.nan_is_max,
        "bool kNarrow": r.narrow,
        "bool kFourOverSix": r.four_over_six is not None,
        "bool kSquaredError": r.four_over_six == "mse",
        "bool kLargestError": r.four_over_six == "max",
        "bool kFastError": r.fast_error,
        "bool kLaneSums": r.lane_sums,
        "bool kKeepInfinity": r.keep_infinity,
        "AmaxNan kAmaxNan": f"AmaxNan::{r.amax_nan}",
        "Rounding kRounding": f"Rounding::{r.rounding}",
        "Sign kSign": f"Sign::{r.sign}",
        "TensorScaling kTensorScaling": f"TensorScaling::{r.tensor_scaling}",
    }


def recipe_struct(
    r: Recipe,
    layout: str = "linear",
    *,
    fake: bool = False,
    stochastic: bool = False,
    sign_mask: int | None = None,
    finds_amax: bool = False,
    row_step: tuple[str, int] = ("none", THREAD_BYTES),
    calibrated: bool = False,
) -> str:
    """Return the C++ structs for a recipe: its formats, and R, which names the formats, rules and options."""
    facts = _recipe_facts(r) | {
        "bool kStatic": r.static or calibrated,
        "u32 kSignMask": sign_mask or 0,
        "bool kFake": fake,
        "bool kStochastic": stochastic,
        "bool kHadamard": sign_mask is not None,
        "int kFinders": FINDERS if finds_amax else 0,
        "RowStep kRowStep": f"RowStep::{row_step[0]}",
        "int kThreadBytes": row_step[1],
        "ScaleLayout kLayout": f"ScaleLayout::{layout}",
    }
    if stochastic and r.stochastic in NOISE_STOCHASTICS:  # read by quantize_stochastic.cu alone
        facts["bool kMslkNoise"] = r.stochastic == "mslk"
        facts["bool kComfyuiOnGpu"] = r.stochastic == "comfyui_nvfp4_cuda"
    unit = fake_unit(r)
    if unit > 1:  # read by fake_ms_eden.cu alone
        facts["int kUnit"] = unit
        facts["bool kHasIntegers"] = r.fake_rule == "ms_eden_if4"
    formats = [format_struct(r.element, "ElementFormat"), format_struct(r.scale or E4M3, "ScaleFormat")]
    if isinstance(r.element, IntegerOrFloat):
        formats.append(format_struct(E2M1, "FloatFormat"))
    chooses = r.block_rule is None or BLOCK_RULES[r.block_rule].chooses
    names = [
        "using Element = ElementFormat;",
        "using Scale = ScaleFormat;",
        f"using TensorRule = tensor_{r.tensor_rule or 'none'};",
        f"using BlockRule = block_{'none' if chooses else r.block_rule};",
        f"using DecodeRule = {decode_rule(r)};",
        *([f"using FakeRule = fake_{r.fake_rule};"] if r.fake_rule and unit == 1 else []),
        *(["using FloatElement = FloatFormat;"] if isinstance(r.element, IntegerOrFloat) else []),
    ]
    constants = [_constant(name, value) for name, value in facts.items()]
    cluster = [f"#define FP4KIT_FINDERS {FINDERS}"] if finds_amax else []
    return "\n".join([*cluster, *formats, f"struct R {{ {' '.join(names + constants)} }};"])


def decode_rule(r: Recipe) -> str:
    """Return the name of the C++ struct by which kernels decode a recipe, such as "decode_product"."""
    if r.scale is None and r.decode_rule == "product":
        return "decode_tensor"
    if r.is_custom and r.scale is not None and not r.scale.has_zero:
        return "decode_e8m0"  # recipes with E8M0 block scales have no tensor scale
    if isinstance(r.element, IntegerOrFloat):
        return f"two_formats<decode_{r.decode_rule}>"
    return f"decode_{r.decode_rule}"
