"""Test recipes of activations and of loaded weights against what inference engines computed (tests/data/engines)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import recipe

FOLDER = Path(__file__).resolve().parents[1] / "data" / "engines"
TYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


@cache
def arrays(file):
    """Return {key: array} of a file of recordings, where bit patterns have the dtype that their key names."""
    with np.load(FOLDER / f"{file}.npz") as stored:
        found = {key.partition(":"): stored[key] for key in stored.files}
    return {key: array.view(TYPES[type]) if type else array for (key, _, type), array in found.items()}


def cases(scheme, file="transformers", part="x_fake"):
    """Yield (name of the input, activations, what the engine made of them) of a scheme."""
    found = arrays(file)
    for key, expected in found.items():
        which, name, what = key.split("/")
        if which == scheme and what == part:
            yield name, found[f"{'input' if file == 'transformers' else scheme}/{name}/x"], expected


def test_nvfp4_activations_of_transformers():
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    dtypes = set()
    for name, x, expected in cases("nvfp4-w4a4"):
        q = fp4kit.quantize_static(x, "nvfp4-compressed-tensors-static", input_global_scale=scale)
        assert_same_bits(fp4kit.dequantize(q), expected, name)
        assert_same_bits(fp4kit.fake_quantize(x, q.recipe, tensor_amax=q.tensor_amax), expected, name)
        dtypes.add(str(x.dtype))
    assert dtypes == {"float32", "float16", "bfloat16"}


def test_a_scale_in_the_dtype_of_x_gives_other_activations():
    """nvfp4-compressed-tensors rounds the tensor scale to the dtype of x, as for weights, so it is not the recipe."""
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    own, static = recipe("nvfp4-compressed-tensors"), recipe("nvfp4-compressed-tensors-static")
    x = next(x for name, x, _ in cases("nvfp4-w4a4") if name == "heavy_bf16")
    amax = fp4kit.quantize_static(x, static, input_global_scale=scale).tensor_amax
    assert not (
        fp4kit.fake_quantize(x, own, tensor_amax=amax) == fp4kit.fake_quantize(x, static, tensor_amax=amax)
    ).all()
