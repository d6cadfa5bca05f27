"""What no CUDA kernel has is refused before a launch, in one place; all recipes of the table are there."""

from dataclasses import replace

import numpy as np
import pytest
from host.cases_variants import E1M2, E2M1_BIAS0, E2M1_BIAS3, E3M0, E3M4, E4M3_IEEE, of_elements

import fp4kit
from fp4kit.cuda.limits import unsupported
from fp4kit.formats import E2M3, E4M3, E5M2, E8M0, INT4, ElementFormat
from fp4kit.ops import fake_on_device, on_device
from fp4kit.recipes import RECIPES, Recipe

UNSIGNED, FAR = ElementFormat("E4M4", 4, 4, 7, signed=False), ElementFormat("E2M1", 2, 1, -1)
FOUR_OVER_SIX = "nvfp4-te-4over6-mse-448"
REFUSED = [  # recipe, what is replaced, the message
    ("mxfp8-te", {"element": UNSIGNED}, "elements E4M4 with bias 7, which .*; needs signed numbers of at most 8 bits within 2"),
    ("mxfp4-ocp", {"element": FAR}, "elements E2M1 with bias -1, which no CUDA kernel has; needs signed numbers"),
    (
        "mxfp4-ocp",
        {"rounding": "rna"},
        "rounding='rna' of E2M1, which no CUDA kernel has; needs 'rn', or of floats 'rz' or 'rnz'",
    ),
    ("int8-modelopt", {"rounding": "rz"}, "rounding='rz' of INT8"),
    ("nvfp4-flashinfer", {"apply": "divide"}, "flush=True with apply='divide', .*; needs apply='multiply'"),
    ("nvfp4-te", {"scale": E5M2}, "scale=E5M2 with block_rule='te', which no CUDA kernel has; needs scale=E4M3"),
    ("nvfp4-te", {"scale": replace(E4M3, specials="none")}, "scale=E4M3 with block_rule='te', .*; needs scale=E4M3"),
    ("nvfp4-te", {"scale": None}, "scale=None with block_rule='te', .*; needs both or neither"),
    ("mxfp4-ocp", {"scale": E4M3}, "scale=E4M3 with block_rule='e8m0_floor', .*; needs scale=E8M0"),
    ("mxfp4-ocp", {"decode_rule": "product"}, "decode_rule='product' with scale=E8M0, .*; needs a rule for such scales"),
    ("nvfp4-te-2d", {"tensor_scaling": "row"}, "blocks of 16 rows with tensor_scaling='row', .*; needs block scales under one"),
    ("int4-modelopt", {"block": (16, 16)}, "blocks of 16 rows with tensor_scaling='block'"),
    (
        "nvfp4-modelopt-fake",
        {"element": E1M2},
        "fake_rule='nvfp4_modelopt_triton' of E1M2 with scale=E4M3, .*; needs the formats",
    ),
    ("int8-modelopt", {"element": E3M4}, "fake_rule='int_modelopt' of E3M4"),
    ("int4-modelopt", {"static": True}, "static=True and tensor_scaling='block', .*; needs one of the two"),
    ("mxfp4-modelopt-fake", {"element": INT4}, "fake_rule='mx_modelopt' of INT4"),
    (FOUR_OVER_SIX, {"element": E1M2}, "4over6 of E1M2, which no CUDA kernel has; needs E2M1"),
    (FOUR_OVER_SIX, {"block": (1, 32)}, "4over6 of blocks of 32 columns, which no CUDA kernel has; needs 16"),
    (FOUR_OVER_SIX, {"rounding": "rz"}, "4over6 with another rounding or scaling of elements"),
    (FOUR_OVER_SIX, {"tensor_scaling": "block"}, "4over6 with tensor_scaling='block', .*; needs 'tensor', 'row' or 'none'"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_no_kernel_has(name, fields, message):
    r = replace(RECIPES[name], id=f"{name}-variant", **fields)
    full = f"op: {name}-variant has .*{message}.*; compute on the CPU with cupy.asnumpy"
    for check in (on_device.check_supported, fake_on_device.check_supported):
        with pytest.raises(NotImplementedError, match=full):
            check("op", r)


def test_dequantize_refuses_too():
    q = fp4kit.quantize(np.ones((2, 32), np.float32), "mxfp4-ocp")
    with pytest.raises(NotImplementedError, match=r"dequantize: .*scale=E8M0 with block_rule=None"):
        on_device.dequantize(replace(q, recipe=replace(q.recipe, block_rule=None)), np.dtype(np.float32), None)


KEPT = [of_elements("nvfp4-te", f) for f in (E1M2, E3M0, E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, E2M3)]
KEPT += [of_elements("mxfp4-ocp", E3M0), replace(RECIPES["mxfp4-ocp"], scale=replace(E8M0, name="UE8M0"))]


@pytest.mark.parametrize("r", [*RECIPES.values(), *KEPT], ids=lambda r: r.id)
def test_what_kernels_have(r: Recipe):
    assert unsupported(r) is None


def test_block_amax_of_four_over_six_is_refused():
    p = fp4kit.ops.prepare.prepare(
        "quantize", np.ones((1, 16), np.float32), replace(RECIPES[FOUR_OVER_SIX], static=True), -1, block_amax=np.ones((1, 1))
    )
    with pytest.raises(NotImplementedError, match="op: block_amax of blocks of several rows, or of 4over6, has no CUDA kernel"):
        on_device.check_block_amax("op", p)
