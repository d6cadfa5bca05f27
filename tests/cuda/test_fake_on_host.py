"""The kernels of fake quantization, of its gradient and of requantize give the bytes of the specification. See
support/host/README.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from exhaustive import every, half
from host.cases import F16, F32, Dequantize
from host.cases_fake import Changed, Clip, Fake, Keep, Lanes, NanAmax
from inputs import BF16

from fp4kit.formats import INT4
from fp4kit.recipes import RECIPES

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

DTYPES = (BF16, F32, F16)
WITH_RULE = [r for r in RECIPES.values() if r.fake_rule]
FAKE = [Fake(r, dtype, misaligned=dtype == BF16) for r in WITH_RULE for dtype in DTYPES]
CLIP = [Clip(dtype, grad) for dtype in DTYPES for grad in DTYPES]

OTHERS = {  # a name, its recipe, what is replaced
    "block of 16": ("mxfp4-modelopt-fake", {"block": (1, 16)}),
    "block of 256": ("nvfp4-modelopt-fake", {"block": (1, 256)}),
    "by row": ("nvfp4-modelopt-static-fake", {"tensor_scaling": "row"}),
    "int4 by tensor": ("int8-modelopt", {"element": INT4}),
    "static mx": ("mxfp4-modelopt-fake", {"static": True}),
    "static microxcaling": ("mxfp8-microxcaling-even", {"static": True}),
    "static microxcaling, flush": ("mxfp4-microxcaling-nearest-flush", {"static": True}),
}
VARIANTS = [Fake(replace(RECIPES[id], id=f"{id}-{name}", **fields), F32) for name, (id, fields) in OTHERS.items()]
NVFP4 = [
    r
    for r in RECIPES.values()
    if r.format_name == "NVFP4" and r.tensor_scaling == "tensor" and r.block == (1, 16) and not r.fake_only
]
KEEP = [Keep(r) for r in NVFP4] + [
    Keep(RECIPES["nvfp4-te"], RECIPES["mxfp4-flashinfer"]),
    Keep(RECIPES["nvfp4-compressed-tensors"], dtype=F16),
]
WITH_CODES = [r for r in RECIPES.values() if not r.fake_only and not r.search]
NAN = [NanAmax(r) for r in WITH_CODES if r.tensor_scaling != "none"]
NAN += [Lanes(r) for r in WITH_CODES if r.amax_nan == "lanes"]
UNUSED = [
    Dequantize(replace(RECIPES["mxfp4-ocp"], id=rule, decode_rule=rule), outputs=DTYPES)
    for rule in ("e8m0_unbounded", "e8m0_flashinfer_api")
]


@pytest.mark.parametrize("case", every(4, FAKE) + VARIANTS, ids=str)
def test_fake_quantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", half(CLIP), ids=str)
def test_clip_gradient(host, case):
    host.check(case)


@pytest.mark.parametrize("case", [*every(3, KEEP), Changed()], ids=str)
def test_requantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", UNUSED, ids=str)
def test_decode_rules_that_no_recipe_of_the_table_has(host, case):
    host.check(case)


@pytest.mark.parametrize("case", every(4, NAN), ids=str)
def test_amaxes_of_nan(host, case):
    host.check(case)
