"""Test that Recipe rejects what the specification does not define: wrong values of each field, and wrong pairs of
fields.

The error names the field.
"""

import random
import re
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from exhaustive import exhaustive
from inputs import ORDINARY
from together import together

import fp4kit
from fp4kit.arithmetic import ROUNDINGS
from fp4kit.cuda import compiler
from fp4kit.formats import E2M1, E3M2, E4M3, E5M2, E8M0, IF4, INT4, INT8, BlockFormat, ElementFormat
from fp4kit.recipes import RECIPES, Recipe, recipe, rules
from fp4kit.reference import block_rules, codec, dequantize, fake, tensor_rules

V, T = ValueError, TypeError
E1M2, E3M0 = ElementFormat("E1M2", 1, 2, 1), ElementFormat("E3M0", 3, 0, 3)

WRONG = [  # (recipe, the replaced fields, the error, its text after "Recipe <id>: ")
    # each field by itself
    ("nvfp4-te", {"id": ""}, V, "id is ''; needs a name"),
    ("nvfp4-te", {"id": 4}, T, "id is 4; needs a str"),
    ("nvfp4-te", {"element": "NF4"}, T, "element is 'NF4'; needs a format, such as fp4kit.formats.NF4"),
    ("mxfp4-ocp", {"element": E8M0}, V, "element is E8M0; needs a format with a sign"),
    ("nvfp4-te", {"scale": "E4M3"}, T, "scale is 'E4M3'; needs fp4kit.formats.E4M3, E8M0, or None"),
    ("nvfp4-te", {"scale": E5M2}, V, "scale is E5M2; needs E4M3 or E8M0"),
    ("mxfp4-ocp", {"block": (1, 0)}, V, "block is (1, 0); needs (rows, columns), two positive ints"),
    ("mxfp4-ocp", {"block": (16,)}, V, "block is (16,); needs (rows, columns), two positive ints"),
    ("mxfp4-ocp", {"block": (1.0, 32.0)}, T, "block is (1.0, 32.0); needs (rows, columns)"),
    ("mxfp4-ocp", {"block": (True, 32)}, T, "block is (True, 32); needs (rows, columns)"),
    ("mxfp4-ocp", {"block": 32}, T, "block is 32; needs (rows, columns)"),
    ("mxfp4-ocp", {"block": "16"}, T, "block is '16'; needs (rows, columns)"),
    ("nvfp4-te", {"tensor_scaling": "channel"}, V, "tensor_scaling is 'channel'; needs one of none, "),
    ("nvfp4-te", {"tensor_rule": "tee"}, V, "tensor_rule is 'tee'; needs one of te, te_reference"),
    ("nvfp4-te", {"block_rule": "e4m3"}, V, "block_rule is 'e4m3'; needs one of te, flashinfer"),
    ("nvfp4-te", {"decode_rule": None}, V, "decode_rule is None; needs one of product, te"),
    ("nvfp4-te", {"fake_rule": "te"}, V, "fake_rule is 'te'; needs one of nvfp4_modelopt_triton"),
    ("nvfp4-te", {"apply": "div"}, V, "apply is 'div'; needs one of multiply, divide, compare"),
    ("nvfp4-te", {"rounding": "up"}, V, "rounding is 'up'; needs one of rn, rz, rna, rnz, rns, rnw, rnh, first, rnas"),
    ("mxfp6-compressed-tensors", {"rounding": "rnw"}, V, "rounding is 'rnw'; needs E2M1, because it continues"),
    ("nvfp4-te-4over6-mse-256-fasterr", {"rounding": "rnw"}, V, "fast_error is True; needs flush=False and a"),
    ("nvfp4-te", {"rounding": ["rn"]}, V, "rounding is ['rn']; needs one of rn"),
    ("nvfp4-te", {"sign": "plus"}, V, "needs one of signbit, negative, not_positive, unsigned_zero, unscaled"),
    ("nvfp4-te", {"amax_nan": "drop"}, V, "amax_nan is 'drop'; needs one of ignore, propagate, lanes"),
    ("nvfp4-te", {"nan_code": 16}, V, "nan_code is 16; needs a code of E2M1, 0 to 15, or None"),
    ("nvfp4-te", {"nan_code": -1}, V, "nan_code is -1; needs a code of E2M1"),
    ("nvfp4-te", {"nan_code": 7.0}, T, "nan_code is 7.0; needs an int"),
    ("nvfp4-te", {"flush": 1}, T, "flush is 1; needs True or False"),
    ("nvfp4-te", {"source": None}, T, "source is None; needs a str"),
    ("nvfp4-te", {"versions": "0.19"}, T, "versions is '0.19'; needs a pair of str (oldest, newest checked)"),
    ("nvfp4-te", {"versions": ("0.19",)}, T, "versions is ('0.19',); needs a pair of str (oldest, newest checked)"),
    ("nvfp4-te", {"versions": (0.18, 0.19)}, T, "versions is (0.18, 0.19); needs a pair of str (oldest, newest"),
    ("nvfp4-te", {"versions": ("0.19", "")}, V, "versions is ('0.19', ''); needs two nonempty strings"),
    ("nvfp4-te-4over6-mae-448", {"four_over_six": "maee"}, V, "four_over_six is 'maee'; needs one of mae"),
    ("nvfp4-te", {"scale_max": 256.0}, T, "scale_max is 256.0; needs an int"),
    ("nvfp4-te", {"scale_max": 0}, V, "scale_max is 0; needs a positive value of E4M3"),
    ("nvfp4-te", {"scale_max": 300}, V, "scale_max is 300; needs a positive value of E4M3"),
    ("nvfp4-te", {"scale_max": 512}, V, "scale_max is 512; needs a positive value of E4M3"),
    ("nvfp4-te", {"lane_sums": True}, V, "lane_sums is True; needs four_over_six"),
    ("nvfp4-fouroversix", {"block": (1, 4)}, V, "lane_sums is True; needs a multiple of 8 columns per block"),
    ("nvfp4-flashinfer-4over6-mse-256", {"four_over_six": "max"}, V, "four_over_six is 'max'; needs neither flush nor"),
    ("nvfp4-te", {"keep_infinity": True}, V, "keep_infinity is True; needs lane_sums or a block_rule of"),
    ("fp8-modelopt", {"keep_infinity": True}, V, "keep_infinity is True; needs lane_sums"),
    ("mxfp4-quark-even", {"static": True}, V, "static is True; needs False, because block_rule 'e8m0_quark_even'"),
    ("nvfp4-qwix", {"tensor_scaling": "tensor", "tensor_rule": "te"}, V, "does not support a tensor scale; needs"),
    # scale, block and rules
    ("nvfp4-te", {"scale": E8M0}, V, "scale is E8M0; block_rule 'te' writes E4M3"),
    ("mxfp4-ocp", {"scale": E4M3}, V, "scale is E4M3; block_rule 'e8m0_floor' writes E8M0"),
    ("nvfp4-te", {"block": None}, V, "block is None; block_rule 'te' needs (rows, columns)"),
    ("mxfp4-ocp", {"block_rule": None}, V, "block is (1, 32); needs block_rule or tensor_scaling 'block'"),
    ("mxfp4-ocp", {"block_rule": None, "block": None}, V, "block_rule is None; needs a rule that"),
    ("fp8-modelopt", {"block": (1, 16)}, V, "block is (1, 16); needs block_rule or tensor_scaling"),
    ("mxfp4-ocp", {"block": (1, 15)}, V, "block is (1, 15); needs a multiple of 2 columns"),
    ("mxfp4-ocp", {"element": ElementFormat("E2M1_LOW", 2, 1, 127)}, V, "needs values that are normal in float32"),
    ("mxfp8-flashinfer", {"block": (1, 15)}, V, "because amax_nan 'lanes' separates even from odd elements"),
    ("nvfp4-te-rowscaled", {"block": (16, 16)}, V, "needs blocks of one row, because with tensor_scaling 'row'"),
    ("int4-qat", {"block": (2, 32)}, V, "fake_rule is 'int4_qat'; needs blocks of one row, with one scale each"),
    ("mxfp4-ocp", {"element": INT8}, V, "element is INT8; block_rule 'e8m0_floor' needs a float format"),
    ("nvfp4-te", {"element": E1M2}, V, "block_rule 'te' is for elements up to 6"),
    ("nvfp4-te", {"apply": "divide"}, V, "apply is 'divide'; block_rule 'te' needs 'multiply'"),
    ("nvfp4-modelopt", {"apply": "multiply"}, V, "block_rule 'modelopt' needs 'divide'"),
    ("nvfp4-te", {"flush": True}, V, "flush is True; block_rule 'te' needs False"),
    ("nvfp4-flashinfer", {"flush": False}, V, "flush is False; block_rule 'flashinfer' needs True"),
    ("fp8-modelopt", {"flush": True}, V, "flush is True; needs a block_rule"),
    # tensor scales
    ("nvfp4-te", {"tensor_scaling": "none"}, V, "tensor_rule is 'te'; tensor_scaling is 'none'"),
    ("nvfp4-te", {"tensor_rule": None}, V, "tensor_rule is None; tensor_scaling is 'tensor'"),
    ("mxfp4-ocp", {"tensor_scaling": "tensor", "tensor_rule": "te"}, V, "needs E4M3 block scales"),
    ("fp8-modelopt", {"tensor_scaling": "block"}, V, "tensor_scaling is 'block'; needs a block"),
    ("nvfp4-te", {"tensor_scaling": "block"}, V, "block_rule 'te' already gives each block a scale"),
    ("fp8-modelopt", {"tensor_rule": "te"}, V, "tensor_rule is 'te'; scale is None; this rule needs"),
    ("nvfp4-te", {"tensor_rule": "int_modelopt"}, V, "this rule needs None, because it scales elements"),
    ("fp8-modelopt", {"tensor_rule": "int_modelopt"}, V, "needs integer elements"),
    ("int8-modelopt", {"tensor_rule": "fp8_modelopt"}, V, "needs float elements"),
    ("fp8-modelopt", {"scale_max": 256}, V, "needs 448 without block scales"),
    ("nvfp4-torchao-single", {"scale_max": 256}, V, "needs 448 without a tensor_rule"),
    ("fp8-modelopt", {"tensor_scaling": "none", "tensor_rule": None}, V, "scale is None too"),
    # decoding
    ("nvfp4-te", {"decode_rule": "e8m0"}, V, "decode_rule is 'e8m0'; scale is E4M3; this rule needs E8M0"),
    ("mxfp4-ocp", {"decode_rule": "product"}, V, "scale is E8M0; this rule needs E4M3 or None"),
    ("nvfp4-torchao-single", {"decode_rule": "te"}, V, "decode_rule is 'te'; needs a tensor_rule"),
    ("nvfp4-te", {"decode_rule": "int_modelopt"}, V, "scale is E4M3; this rule needs None"),
    # 4over6
    ("nvfp4-te", {"four_over_six": "mae"}, V, "block_rule is 'te'; needs 'mae', 'mse' or 'max' with"),
    ("nvfp4-te-4over6-mae-448", {"four_over_six": None}, V, "needs 'mae', 'mse' or 'max' with"),
    ("nvfp4-te", {"fast_error": True}, V, "fast_error is True; needs four_over_six"),
    ("nvfp4-flashinfer-4over6-mae-448", {"fast_error": True}, V, "needs flush=False"),
    ("nvfp4-te-4over6-mae-448", {"element": E3M0}, V, "block_rule 'four_over_six' is for elements up to 6"),
    ("nvfp4-te-4over6-mae-448", {"tensor_scaling": "block"}, V, "needs 'tensor' or 'row'"),
    ("nvfp4-te-4over6-mae-448", {"block": (3, 16)}, V, "needs a number of rows that is a power of two"),
    ("nvfp4-te-4over6-mae-448", {"rounding": "rz"}, V, "four_over_six rounds to nearest"),
    ("nvfp4-te-4over6-mae-448", {"static": True}, V, "has no effect with four_over_six"),
    ("nvfp4-modelopt-static", {"tensor_scaling": "none", "tensor_rule": None}, V, "it reads the tensor's amax"),
    # fake rules and options
    ("nvfp4-te", {"fake_only": True}, V, "fake_only is True; needs a fake_rule"),
    ("nvfp4-modelopt", {"fake_rule": "mx_modelopt"}, V, "scale is E4M3; this rule needs E8M0"),
    ("fp8-modelopt", {"fake_rule": "int_modelopt"}, V, "element is E4M3; this rule needs integers"),
    ("nvfp4-torchao-single", {"fake_rule": "nvfp4_modelopt_cuda"}, V, "tensor_rule is None; this rule needs"),
    ("mxfp4-modelopt-fake", {"block": (32, 32)}, V, "needs blocks of one row, with one scale each"),
    ("nvfp4-modelopt-fake", {"scale_max": 256}, V, "uses 448 in its formula"),
    ("mxfp4-microxcaling-nearest", {"amax_nan": "ignore"}, V, "needs amax_nan 'propagate' or 'lanes'"),
    ("mxfp4-microxcaling-nearest", {"element": ElementFormat("E5M2X", 5, 2, 15)}, V, "an element format whose values"),
    ("mxfp4-modelopt-fake", {"rounding": "rz"}, V, "rounding is 'rz'; fake_rule 'mx_modelopt' rounds"),
    ("mxfp4-modelopt-fake", {"repacked": True}, V, "repacked is True; has no effect with fake_rule"),
    ("nvfp4-modelopt", {"repacked": True}, V, "repacked is True; needs float elements, a block_rule"),
    ("nvfp4-vllm-emulation", {"repacked": True}, V, "E4M3 scales also sign 'signbit' or 'unsigned_zero'"),
    ("nvfp4-auto-round", {"sign": "not_positive"}, V, "E4M3 scales also sign 'signbit' or 'unsigned_zero'"),
    ("fp8-modelopt", {"repacked": True}, V, "repacked is True; needs float elements, a block_rule"),
    ("mxfp4-modelopt-fake", {"round_scaled": True}, V, "has no effect with fake_rule"),
    ("nvfp4-te", {"narrow": True}, V, "narrow is True; element is E2M1; needs an integer"),
    ("int8-modelopt", {"stochastic": "comfy_kitchen_fp8"}, V, "stochastic is 'comfy_kitchen_fp8'; needs float"),
    ("mxfp8-te", {"stochastic": "comfyui_nvfp4"}, V, "stochastic is 'comfyui_nvfp4'; needs E2M1, whose codes it"),
    ("nvfp4-te", {"stochastic": "numpy"}, V, "stochastic is 'numpy'; needs one of te, comfy_ki"),
    ("int8-modelopt", {"sign": "negative"}, V, "needs 'signbit' for INT8"),
    ("fp8-modelopt", {"static": True}, V, "static is True; needs block scales"),
    ("mxfp4-flashinfer", {"nan_is_max": True}, V, "needs an element format with a NaN, and no nan_code"),
    ("mxfp4-torchao-rceil", {"rounding": "rnh"}, V, "needs an 8-bit float format with a NaN"),
    ("mxfp8-onednn", {"repacked": True}, V, "repacked is True; needs float elements"),
    ("int8-modelopt", {"nan_sign": True}, V, "nan_sign is True; needs a float format with a sign"),
    ("mxfp4-gguf", {"nan_sign": True}, V, "needs a float format with a sign, a rounding to nearest"),
    *(
        (r.id, {"nan_sign": True}, V, "nan_sign is True; needs a block_rule that does not multiply by encode scales")
        for r in map(recipe, ("nvfp4-jax", "nvfp4-jax-gpu", "nvfp4-jax-gpu-global-jit"))
    ),
    ("mxfp4-nncf", {"nan_sign": 1}, T, "nan_sign is 1; needs True or False"),
    ("mxfp8-flashinfer", {"nan_code": 3}, V, "needs an element format with a NaN, and no nan_code"),
    ("int8-modelopt", {"rounding": "first", "fake_rule": None}, V, "rounding is 'first'; needs a float format"),
    ("nvfp4-te", {"search": "mse"}, V, "search is 'mse'; needs one of auto_round_powers, auto_round_percents"),
    ("nvfp4-te", {"search": None}, V, "search is None; needs one of auto_round_powers"),
    ("nvfp4-te", {"search": []}, V, "search is []; needs one of auto_round_powers"),
    ("nvfp4-te", {"search": "auto_round_powers"}, V, "scale is E4M3; this search needs E8M0 block scales"),
    ("fp8-modelopt", {"search": "auto_round_powers"}, V, "scale is None; this search needs E8M0 block scales"),
    ("nvfp4-te-2d", {"search": "auto_round_percents"}, V, "block is (16, 16); search 'auto_round_percents'"),
    ("nvfp4-auto-round-opt", {"block": (1, 12)}, V, "needs one row and a multiple of 8 columns"),
    ("nvfp4-te-4over6-mae-448", {"search": "auto_round_percents"}, V, "four_over_six is 'mae'; has no effect with"),
    ("nvfp4-auto-round-opt", {"static": True}, V, "static is True; has no effect with search"),
    ("nvfp4-modelopt-mse", {"block": (1, 32)}, V, "needs E2M1 elements in blocks of 16 columns"),
    ("nvfp4-modelopt-mse", {"block_rule": "fouroversix_4", "apply": "multiply"}, V, "block_rule is 'fouroversix_4'"),
    ("nvfp4-modelopt-mse", {"tensor_rule": "fouroversix_4"}, V, "tensor_rule is 'fouroversix_4'"),
    ("nvfp4-modelopt-mse", {"rounding": "rz"}, V, "rounding is 'rz'"),
    ("nvfp4-modelopt-fake", {"search": "auto_round_percents"}, V, "fake_rule is 'nvfp4_modelopt_triton'; has no"),
    ("mxfp4-mlx-cpu", {"nan_code": 7}, V, "nan_code is 7; rounding 'first' takes the first code with the smallest"),
    ("fp8-modelopt", {"apply": "compare", "rounding": "first", "nan_code": 0}, V, "needs a block_rule, because apply"),
    ("mxfp4-gguf", {"rounding": "rn"}, V, "rounding is 'rn'; apply 'compare' takes the first of the nearest values"),
    ("mxfp4-gguf", {"round_scaled": True}, V, "has no effect with apply 'compare'"),
    ("nvfp4-gguf", {"tensor_rule": "te", "tensor_scaling": "tensor"}, V, "block_rule 'gguf' does not support a"),
    ("nvfp4-modelopt", {"element": ElementFormat("E4M3", 2, 1, 1)}, V, "needs another name: the scale format E4M3"),
    # IF4
    ("if4-fouroversix", {"element": E2M1}, V, "element is E2M1; block_rule 'fouroversix_if4' needs fp4kit.formats.IF4"),
    ("if4-fouroversix", {"element": INT4}, V, "element is INT4"),
    ("nvfp4-fouroversix", {"element": IF4}, V, "element is IF4; needs block_rule 'fouroversix_if4'"),
    ("nvfp4-te", {"element": IF4}, V, "element is IF4; needs block_rule 'fouroversix_if4'"),
    ("nvfp4-te", {"scale": IF4}, V, "scale is IF4; needs a format whose codes have values"),
    ("nvfp4-te-4over6-mse-448", {"block_rule": "fouroversix_if4"}, V, "needs fp4kit.formats.IF4"),
    ("if4-fouroversix", {"block_rule": "four_over_six"}, V, "needs block_rule 'fouroversix_if4'"),
    ("if4-fouroversix", {"block_rule": "fouroversix"}, V, "needs block_rule 'fouroversix_if4'"),
    ("if4-fouroversix", {"four_over_six": None}, V, "needs 'mae', 'mse' or 'max' with 'fouroversix_if4', else None"),
    ("if4-fouroversix", {"lane_sums": False}, V, "lane_sums is False; needs True with block_rule 'fouroversix_if4'"),
    (
        "if4-fouroversix",
        {"fast_error": True},
        V,
        "fast_error is True; needs flush=False and a rounding other than 'rnw'",
    ),
    ("if4-fouroversix", {"flush": True}, V, "lane_sums is True; needs a multiple of 8"),
    ("if4-fouroversix", {"block": (1, 4)}, V, "lane_sums is True; needs a multiple of 8"),
    ("if4-fouroversix", {"block": (3, 16)}, V, "needs a number of rows that is a power of two"),
    ("if4-fouroversix", {"rounding": "rz"}, V, "rounding is 'rz'; four_over_six rounds to nearest"),
    ("if4-fouroversix", {"narrow": True}, V, "narrow is True; element is IF4"),
    ("if4-fouroversix", {"static": True}, V, "static is True; has no effect"),
    ("if4-fouroversix", {"repacked": True}, V, "repacked is True; has no effect"),
    ("if4-fouroversix", {"search": "auto_round_percents"}, V, "four_over_six is 'mse'; has no effect with search"),
    ("if4-fouroversix", {"search": "modelopt_sweep"}, V, "element is IF4"),
    ("if4-fouroversix", {"fake_rule": "nvfp4_modelopt_cuda"}, V, "element is IF4; this rule needs E2M1"),
    ("if4-fouroversix", {"tensor_scaling": "none"}, V, "needs 'tensor' or 'row'"),
    ("if4-fouroversix", {"nan_code": 16}, V, "nan_code is 16; needs a code of IF4, 0 to 15"),
    ("hif4-amct", {"levels": ()}, V, "levels is (); needs the levels of scales"),
    ("hif4-amct", {"levels": (64, "E6M2")}, T, "needs pairs (columns, format), outermost first"),
    ("hif4-amct", {"levels": ((64, "E6M2"),)}, V, "needs E6M2, then exponent1"),
    ("hif4-amct", {"levels": ((64, "E6M2"), (12, "exponent1"))}, V, "in columns that divide those of the level above"),
    ("hif4-amct", {"rounding": "rz"}, V, "rounding is 'rz'; has no effect with block_rule 'hif4_amct'"),
    ("hif4-amct", {"element": E2M1}, V, "element is E2M1; block_rule 'hif4_amct' needs one exponent bit"),
    ("hif4-amct", {"decode_rule": "product"}, V, "needs a rule for levels, such as 'hif4'"),
    ("mxfp4-ocp", {"levels": ((512, "float32"), (32, "E8M0"))}, V, "block_rule is 'e8m0_floor'; levels need 'amax'"),
    ("hif4-amct", {"search": "quest"}, V, "search is 'quest'; has no effect with block_rule"),
    ("mxfp4-msmodelslim-4over6", {"block": (1, 512)}, V, "elements E2M1 in blocks of at most 256 columns"),
    ("mxfp4-msmodelslim-4over6", {"search": "msmodelslim_mse"}, V, "elements E4M3 in blocks of at most 256 columns"),
    ("mxfp4-ocp", {"search": "msmodelslim_ceil_x"}, V, "needs 'e8m0_msmodelslim_ceil_x', whose scales it chooses"),
    ("mxfp4-ocp", {"fake_rule": "mx_msmodelslim"}, V, "needs 'e8m0_msmodelslim' or 'e8m0_msmodelslim_ceil_x'"),
    ("mxfp8-msmodelslim", {"sign": "unscaled"}, V, "'mx_msmodelslim' needs 'negative' for elements E4M3"),
    ("mxfp4-msmodelslim-dual", {"fake_rule": "mx_msmodelslim"}, V, "needs no levels of scales"),
    ("mxfp4-msmodelslim-dual", {"rounding": "rn"}, V, "rounding is 'rn'; needs 'rnas' with tensor_rule 'msmodelslim'"),
    ("mxfp4-msmodelslim-dual", {"static": True}, V, "static is True; needs False with tensor_rule 'msmodelslim'"),
    ("mxfp4-msmodelslim", {"element": E3M0}, V, "element is E3M0; block_rule 'e8m0_msmodelslim' needs E2M1"),
    ("mxfp4-msmodelslim", {"rounding": "rn"}, V, "fake_rule 'mx_msmodelslim' needs 'rnas'"),
    ("hif4-amct", {"block": (1, 12), "levels": ((12, "E6M2"), (4, "exponent1"))}, V, "needs a multiple of 8 columns"),
    ("nvfp4-te-4over6-mae-448", {"sign": "unscaled"}, V, "needs another sign with the amax rules, four_over_six"),
    ("mxfp4-msmodelslim-dual", {"levels": ((48, "float32"), (32, "E8M0"))}, V, "in columns that divide"),
]


@together("name, changes, kind, text", WRONG)
def test_invalid_recipes_are_rejected(name, changes, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as caught:
        replace(recipe(name), **changes)
    assert str(caught.value).startswith("Recipe" if "id" in changes else f"Recipe {name}: ")


def test_every_field_is_checked():
    named = {field for _, changes, _, _ in WRONG for field in changes}
    assert {field.name for field in fields(Recipe)} - named == {"exact"}


def test_blocks_become_tuples_and_numbers_ints():
    r = replace(RECIPES["mxfp4-ocp"], block=[np.int64(1), 16], nan_code=np.uint8(3))
    assert r.block == (1, 16) and type(r.block) is tuple and type(r.block[0]) is type(r.nan_code) is int
    assert r == replace(RECIPES["mxfp4-ocp"], block=(1, 16), nan_code=3)
    assert type(replace(RECIPES["nvfp4-te"], scale_max=np.int64(256)).scale_max) is int


VARIANTS = [
    ("mxfp4-ocp", {"element": E1M2}),
    ("mxfp4-ocp", {"element": E3M0}),
    ("mxfp4-ocp", {"rounding": "rna"}),
    ("mxfp4-ocp", {"flush": True}),
    ("mxfp8-te", {"element": E3M2}),
    ("nvfp4-modelopt", {"element": E1M2}),
    ("nvfp4-te", {"scale_max": 256}),
    ("nvfp4-te", {"round_scaled": True}),
    ("nvfp4-te", {"decode_rule": "product"}),
    ("nvfp4-modelopt", {"tensor_scaling": "row"}),
    ("int8-modelopt", {"element": INT4}),
    ("fp8-modelopt", {"rounding": "rz"}),
    ("nvfp4-flashinfer", {"decode_rule": "compressed_tensors"}),
    ("int4-qat", {"apply": "multiply"}),
]


@together("name, changes", VARIANTS)
def test_variants_come_near_their_input(name, changes):
    """A combination of rules that Recipe accepts works: the squared error is below 15 % of the sum of squares of x."""
    r = replace(RECIPES[name], **changes)
    y = fp4kit.dequantize(fp4kit.quantize(ORDINARY, r))
    x = ORDINARY.astype(np.float64)
    assert np.sum((y - x) ** 2) < 0.15 * np.sum(x**2)


# (recipe, part, number of parts): all combinations of rules are divided into parts, and each test tries one part.
WHOLE = [("nvfp4-te", 1, 38), ("nvfp4-modelopt", 3, 38), ("mxfp4-ocp", 0, 38)]
PAIRED = [("nvfp4-te", 5, 96), *exhaustive([("nvfp4-te", 37, 96), ("nvfp4-te", 69, 96), *WHOLE])]


@pytest.mark.parametrize("paired", PAIRED, ids=str)
def test_every_pair_of_rules_works_or_is_rejected(paired):
    """Every pair of scale, block, tensor and decode rules is rejected at once, or gives values close to the input."""
    name, part, parts = paired
    x = np.random.default_rng(1).standard_normal((32, 128)).astype(np.float32)
    made = 0
    pairs = [*product(rules.BLOCK_RULES, (None, *rules.TENSOR_RULES), rules.DECODE_RULES)]
    random.Random(0).shuffle(pairs)  # otherwise a part may lack whole kinds of rules
    for block, tensor, decode in pairs[part::parts]:
        fields = {"block_rule": block, "tensor_rule": tensor, "decode_rule": decode}
        fields["tensor_scaling"] = "tensor" if tensor else "none"
        for apply, flush, mode in product(rules.APPLIES, (False, True), (None, "mae")):
            try:
                r = replace(RECIPES[name], id="any", apply=apply, flush=flush, four_over_six=mode, **fields)
            except ValueError as error:
                assert str(error).startswith("Recipe any: ")
                continue
            made += 1
            given = 2688 / np.abs(x).max() if tensor == "divisor" else None
            error = fp4kit.dequantize(fp4kit.quantize(x, r, tensor_amax=given)).astype(np.float64) - x
            clips = "down" in (block or "")  # this rule clips values of up to 12 times the scale to 6
            assert np.sum(error**2) < (0.2 if clips else 0.1) * np.sum(x.astype(np.float64) ** 2), r
    assert made > 5


def named(module, prefix):
    """Return the names of the rules that a module implements: its functions that begin with `prefix`, without it."""
    return {name.removeprefix(prefix) for name in vars(module) if name.startswith(prefix)}


def test_names_of_rules_are_those_of_the_specification():
    """Rule names that Recipe accepts are those of the specification's functions.

    A misspelled function would raise no error; another rule would be used for its name.
    """
    codes, factors = named(block_rules, "code_"), named(block_rules, "factor_")
    assert codes == {name for name, rule in rules.BLOCK_RULES.items() if not (rule.chooses or rule.whole)}
    assert factors < codes
    assert named(tensor_rules, "tensor_") - {"scale"} == {*rules.TENSOR_RULES}
    assert {*dequantize.DECODE_RULES} == {*rules.DECODE_RULES}
    assert {*fake.FAKE_RULES} == {*rules.FAKE_RULES}
    assert set(rules.ROUNDINGS) == {*ROUNDINGS, "rnw", "rnh", "first"} and set(rules.SIGNS) == set(codec.SIGNS)


def test_names_of_rules_are_those_of_the_kernels():
    text = "\n".join(path.read_text() for path in compiler.files(compiler.SOURCES).values())
    structs = set(re.findall(r"^struct (\w+)", text, re.MULTILINE))
    parts = {kind: set(re.findall(rf"^struct {kind}_(\w+) ", text, re.MULTILINE)) for kind in ("block", "tensor")}
    blocks = {name for name, rule in rules.BLOCK_RULES.items() if not rule.chooses}
    assert parts == {"block": {*blocks, "none"}, "tensor": {*rules.TENSOR_RULES, "none"}}
    assert {f"fake_{name}" for name, rule in rules.FAKE_RULES.items() if rule.unit == 1} <= structs
    assert {f"decode_{name}" for name in rules.DECODE_RULES} <= structs
    for name, rule in rules.DECODE_RULES.items():
        (struct,) = re.findall(rf"^struct decode_{name}\b.*?^}};", text, re.MULTILINE | re.DOTALL)
        assert ("kNeedsAmax = true" in struct) == rule.needs_amax


FORMATS = [  # (the fields, the error, its text)
    (("E 2", 2, 1, 1), V, "name is 'E 2'; needs an identifier"),
    ((2, 2, 1, 1), T, "name is 2; needs str"),
    (("X", 5, 3, 1), V, "needs both >= 0, and 1 to 8 bits"),
    (("X", -1, 3), V, "exponent_bits is -1, mantissa_bits is 3; needs both >= 0"),
    (("X", 2.0, 1), T, "exponent_bits is 2.0; needs int"),
    (("X", True, 1), T, "exponent_bits is True; needs int"),
    (("X", 2, 1, 0.5), T, "bias is 0.5; needs int"),
    (("X", 2, 1, 200), V, "bias is 200, so some values are not float32 numbers"),
    (("X", 2, 1, -200), V, "bias is -200, so some values are not float32 numbers"),
    (("X", 2, 1, 1, "inf"), V, "specials is 'inf'; needs 'none', 'nan' or 'ieee'"),
    (("X", 2, 1, 1, "none", 1), T, "signed is 1; needs bool"),
    (("X", 0, 3, 1), V, "an integer needs mantissa_bits > 0, bias 0, specials 'none'"),
    (("X", 0, 0), V, "an integer needs mantissa_bits > 0"),
    (("X", 0, 3, 0, "nan"), V, "an integer needs mantissa_bits > 0, bias 0, specials 'none'"),
    (("X", 0, 4, 0, "none", False), V, "signed is False; needs True for an integer, which is two's"),
    (("X", 4, 0, 7, "nan", False, False), V, "has_zero is False; needs True for every format but E8M0"),
    (("X", 3, 0, 3, "ieee"), V, "specials is 'ieee'; needs mantissa_bits >= 1"),
    (("X", 1, 0, 0, "nan"), V, "zero is the only finite value"),
]


@together("arguments, kind, text", FORMATS)
def test_invalid_formats_are_rejected(arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        ElementFormat(*arguments)


def test_every_small_format_has_values_in_order():
    for exponent, mantissa, specials, signed in product(range(6), range(6), ("none", "nan", "ieee"), (False, True)):
        try:
            fmt = ElementFormat(
                "X", exponent, mantissa, min(exponent, 1) * (2 ** max(exponent - 1, 0) - 1), specials, signed
            )
        except ValueError:
            continue
        assert 1 <= fmt.bits <= 8 and np.all(np.diff(fmt.magnitudes) > 0) and len(fmt.values) == 2**fmt.bits
        assert fmt.is_integer or np.array_equal(codec.decode(codec.encode(fmt.magnitudes, fmt), fmt), fmt.magnitudes)


def test_a_block_format_is_made_of_formats():
    with pytest.raises(TypeError, match="BlockFormat X: scale is 'E8M0'; needs an ElementFormat"):
        BlockFormat("X", E2M1, "E8M0", 32)
    with pytest.raises(ValueError, match="BlockFormat X: block_size is 0; needs a positive int"):
        BlockFormat("X", E2M1, E8M0, 0)
