"""Test that work which no CUDA kernel does is rejected before any launch, and that the kernels do every recipe of the
table.
"""

from dataclasses import replace

import numpy as np
import pytest
from together import together
from variants import E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, with_elements

import fp4kit
from fp4kit.call.parse import Declined
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.cuda import engine
from fp4kit.cuda.dispatch import LaunchRequest, find_kernel, kernel_for, unsupported
from fp4kit.cuda.search import check_search
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E8M0, MX4, ElementFormat
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe

FAR = ElementFormat("E2M1", 2, 1, -1)
FOUR_OVER_SIX = "nvfp4-te-4over6-mse-448"
REFUSED = [  # recipe, replaced fields, error
    ("mxfp4-ocp", {"element": FAR}, "elements E2M1 with bias -1, which no CUDA kernel supports; needs values from"),
    (
        "int4-modelopt",
        {"rounding": "rz", "fake_rule": None},
        "rounding='rz' for elements INT4, which no CUDA kernel supports; needs 'rn'",
    ),
    (
        "int4-modelopt",
        {"amax_nan": "lanes"},
        "amax_nan='lanes' with tensor_scaling='block', .*; needs 'ignore' or 'propagate'",
    ),
    (
        "nvfp4-fouroversix",
        {"block": (16, 16)},
        "4over6 by lane_sums with blocks of 16 rows, which no .*; needs one row",
    ),
    ("mxfp4-ocp", {"block": (1, 2)}, "blocks of 2 columns, which no CUDA kernel supports; needs a multiple of 4"),
    (FOUR_OVER_SIX, {"block": (1, 32)}, "4over6 with blocks of 32 columns, which no CUDA kernel supports; needs 16"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_work_without_a_kernel_is_rejected(name, fields, message):
    r = replace(RECIPES[name], id=f"{name}-variant", **fields)
    full = f"{name}-variant has {message}.*; compute on the CPU with cupy.asnumpy"
    for work in (
        LaunchRequest(r, np.dtype(np.float32), (32, 64)),
        LaunchRequest(r, np.dtype(np.float32), (32, 64), columns=True),
    ):
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=full):
            kernel_for(work)


@pytest.mark.parametrize("case", [REFUSED[0], REFUSED[4]], ids=["elements", "blocks"])
def test_dequantize_refuses_too(case):
    name, fields, message = case
    r = replace(RECIPES[name], **fields)
    scales = np.zeros((2, 32 // r.block_size), np.uint8)
    q = Quantized(np.zeros((2, 16), np.uint8), scales, None, None, (2, 32), np.float32, -1, r)
    with pytest.raises(Declined, match=f"mxfp4-ocp has {message}"):
        engine.dequantize(q, np.dtype(np.float32))


FAR = ElementFormat("Far", 4, 3, -3, specials="none")
CUSTOM = {  # maps a recipe for formats of one's own to a part of its error
    fp4kit.custom_recipe("powers", E2M1, ElementFormat("E5M0", 5, 0, 15, signed=False), 32): "scales E5M0 without mant",
    fp4kit.custom_recipe("pairs", MX4, E8M0, 2): "blocks of 2 columns, which no CUDA kernel supports; needs a multiple",
    fp4kit.custom_recipe("far", E2M1, FAR, 32): "scales Far with bias -3, which no CUDA kernel supports; needs a bias",
}


@pytest.mark.parametrize("r", CUSTOM, ids=lambda r: r.id)
def test_own_scale_formats_out_of_range_are_rejected(r):
    message = f"{r.id} has {CUSTOM[r]}.*; compute on the CPU with cupy.asnumpy"
    for columns in (False, True):
        work = LaunchRequest(r, np.dtype(np.float32), (32, 64), columns=columns)
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=message):
            kernel_for(work)
    with pytest.raises(Declined, match=message):
        engine.dequantize(fp4kit.quantize(np.ones((2, 64), np.float32), r), np.dtype(np.float32))


def test_searches_of_narrow_blocks_are_rejected():
    x, r = np.ones((2, 64), np.float32), fp4kit.custom_recipe("pairs", MX4, E8M0, 2)
    with pytest.raises(Declined, match=r"pairs has blocks of 2 columns, .* compute on the CPU"):
        check_search(search_call("search_scales", x, r, -1, None, SearchRequest()))


KEPT = [with_elements("nvfp4-torchao", f) for f in (E1M2, E3M0, E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, E2M3)]
KEPT += [with_elements("mxfp4-ocp", E3M0), fp4kit.custom_recipe("pairs", MX4, E8M0, 16)]


@together("r", [*RECIPES.values(), *KEPT], ids=lambda r: r.id)
def test_every_recipe_has_kernels(r: Recipe):
    assert unsupported(r) is None


def test_block_amax_of_four_over_six_is_refused():
    work = LaunchRequest(RECIPES[FOUR_OVER_SIX], np.dtype(np.float32), (1, 16), calibrated=True)
    with pytest.raises(Declined, match="block_amax of blocks of several rows, or of 4over6, has no CUDA kernel"):
        kernel_for(work)
