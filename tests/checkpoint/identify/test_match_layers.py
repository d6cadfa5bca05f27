"""Test identify on two directories: it finds the recipe of every converted model, and faults injected into
its files.
"""

import json
from itertools import cycle

import numpy as np
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


def rewrite(root, change):
    """Rewrite the safetensors files in the directory `root`, and remove the index.

    change: called as change(name, dtype, shape, bytes) for each tensor. It returns the new (dtype, shape, bytes), or
        None to drop the tensor.
    """
    for path in root.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, body, out, at = json.loads(data[8 : 8 + length]), data[8 + length :], {}, 0
        blobs = []
        for name, info in header.items():
            if name == "__metadata__":
                out[name] = info
                continue
            a, b = info["data_offsets"]
            found = change(name, info["dtype"], info["shape"], body[a:b])
            if found is not None:
                dtype, shape, raw = found
                out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
                at += len(raw)
                blobs.append(raw)
        text = json.dumps(out).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    index = root / "model.safetensors.index.json"
    index.unlink(missing_ok=True)


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


def swapped(name, dtype, shape, raw):
    if not name.endswith(("weight_packed", ".weight")) or dtype != "U8":
        return dtype, shape, raw
    codes = np.frombuffer(raw, np.uint8)
    return dtype, shape, (codes << 4 | codes >> 4).tobytes()


def without_tensor_scale(name, dtype, shape, raw):
    return None if name.endswith(("weight_scale_2", "weight_global_scale")) else (dtype, shape, raw)


def inverted(name, dtype, shape, raw):
    if not name.endswith(("weight_scale_2", "weight_global_scale")):
        return dtype, shape, raw
    return dtype, shape, (np.float32(1) / np.frombuffer(raw, np.float32)).tobytes()


def swizzled(name, dtype, shape, raw):
    if not name.endswith("weight_scale"):
        return dtype, shape, raw
    found = swizzle_scales(np.frombuffer(raw, np.uint8).reshape(shape), "swizzled_128x4")
    return dtype, list(found.shape), found.tobytes()


MISHAPS = {
    "nibble": swapped,
    "tensor scale": inverted,
    "tensor scale is missing": without_tensor_scale,
    "swizzled": swizzled,
}


FORMS = ("modelopt", "compressed-tensors")
PAIRS = [(words, FORMS[(i + turn) % 2]) for turn in range(2) for i, words in enumerate(MISHAPS)]


@pytest.mark.parametrize("pair", by_default(PAIRS[: len(MISHAPS) : 2], PAIRS), ids="-".join)
def test_faults_in_files_are_named(tmp_path, pair):
    words, form = pair
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "nvfp4-modelopt", format=form)
    rewrite(tmp_path / "out", MISHAPS[words])
    verdict = identify_checkpoint(tmp_path / "out", tmp_path / "in")
    assert "nvfp4-modelopt" in verdict.recipes and words in (verdict.mishap or ""), str(verdict)


@pytest.mark.exhaustive
def test_another_source_explains_nothing(tmp_path):
    tensors = synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    other = {name: synthetic.random(f"other {name}", x.shape) if x.ndim == 2 else x for name, x in tensors.items()}
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    synthetic.write_model(tmp_path / "else", config, other)
    verdict = identify_checkpoint(tmp_path / "out", tmp_path / "else")
    assert verdict.recipes == () and "nothing explains" in verdict.sentence


def test_errors(tmp_path):
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    with synthetic.refused("no quantized layer of a known format"):
        identify_checkpoint(tmp_path / "in", tmp_path / "in")
    synthetic.bert(tmp_path / "bert")
    with synthetic.refused("give the model that it was made from"):
        identify_checkpoint(tmp_path / "out", tmp_path / "bert")
