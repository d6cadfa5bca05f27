"""Test identify on two directories: it finds the recipe of every converted model, and faults injected into
its files.
"""

import json
from itertools import cycle

import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import by_default

from fp4kit.checkpoint import Options, convert
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.layouts import swizzle_scales

MODELS = synthetic.MODELS
RECIPES = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-modelopt", "compressed-tensors"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
]


def rewritten(root, change):
    """Write a copy of a checkpoint with other tensors.

    change: called as change(name, array) for each tensor. It returns the new array, or None to drop the tensor.
    """
    tensors = {name: change(name, np.asarray(x)) for name, x in oracle.arrays(oracle.load(root)).items()}
    config = json.loads((root / "config.json").read_text())
    synthetic.write_model(root / "bad", config, {name: x for name, x in tensors.items() if x is not None})
    return root / "bad"


# Every model with one recipe, and every recipe with at least one model.
CONVERSIONS = list(zip(MODELS, cycle(RECIPES), strict=False))
USUAL_CONVERSION = ("dense", RECIPES[2])


@pytest.mark.parametrize("conversion", by_default([USUAL_CONVERSION], dict.fromkeys((USUAL_CONVERSION, *CONVERSIONS))))
def test_every_conversion_is_recognised(tmp_path, conversion):
    name, (recipe, form) = conversion
    MODELS[name](tmp_path / "in")
    report = convert(tmp_path / "in", tmp_path / "out", recipe, format=form)
    done = []
    verdict = identify_checkpoint(tmp_path / "out", tmp_path / "in", Options(progress=done.append))
    assert recipe in verdict.recipes and verdict.mishap is None and verdict.exceptions == ()
    assert len(verdict.layers) == report.actions["quantize"] and sum(done) > 0


def tensor_scale(new):
    return lambda name, x: new(x) if name.endswith(("weight_scale_2", "weight_global_scale")) else x


def swizzled(name, x):
    return swizzle_scales(x.view(np.uint8), "swizzled_128x4").view(x.dtype) if name.endswith("weight_scale") else x


MISHAPS = {
    "nibble": lambda name, x: x << 4 | x >> 4 if x.dtype == np.uint8 and name.endswith(("weight", "packed")) else x,
    "tensor scale": tensor_scale(lambda x: 1 / x),
    "tensor scale is missing": tensor_scale(lambda x: None),
    "swizzled": swizzled,
}
FORMS = ("modelopt", "compressed-tensors")
PAIRS = [(words, FORMS[(i + turn) % 2]) for turn in range(2) for i, words in enumerate(MISHAPS)]


@pytest.mark.parametrize("pair", by_default(PAIRS[: len(MISHAPS) : 2], PAIRS), ids="-".join)
def test_faults_in_files_are_named(tmp_path, pair):
    words, form = pair
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "nvfp4-modelopt", format=form)
    verdict = identify_checkpoint(rewritten(tmp_path / "out", MISHAPS[words]), tmp_path / "in")
    assert "nvfp4-modelopt" in verdict.recipes and words in (verdict.mishap or ""), str(verdict)


def test_errors(tmp_path):
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    with synthetic.refused("no quantized layer of a known format"):
        identify_checkpoint(tmp_path / "in", tmp_path / "in")
    synthetic.bert(tmp_path / "bert")
    with synthetic.refused("give the model that it was made from"):
        identify_checkpoint(tmp_path / "out", tmp_path / "bert")
