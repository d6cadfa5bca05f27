"""Test that parity finds and names mismatches between a trainer and a server: the right step, and the setting.

Each mismatch is injected into one side alone. MISMATCHES states which step and which words the report must have.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import synthetic
from exhaustive import every

import fp4kit
from fp4kit import Contract, dequantize, fake_quantize, parity, quantize, recipe
from fp4kit.checkpoint import convert
from fp4kit.recipes import RECIPES

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(49)
W = {
    f"m.{leaf}": (RNG.standard_normal((128, 384)) * size).astype(BF16)
    for leaf, size in (("gate_proj", 1), ("up_proj", 1.5), ("down_proj", 1))
}
W32 = {name: w.astype(np.float32) for name, w in W.items()}
BASE = Contract("nvfp4-te", activations="nvfp4-te", unit="sm100")
STORED = {name: quantize(w, "nvfp4-te") for name, w in W.items()}
EXPERTS = {f"m.experts.{i}.up_proj": RNG.standard_normal((64, 64), np.float32) for i in range(4)}
# Integers up to 6 * 448, for which both recipes have the tensor scale 1 and exact block scales.
WHOLE = np.where(np.arange(64) == 0, 2688, np.random.default_rng(50).integers(-6, 7, (64, 64))).astype(BF16)
AGREED = {"m.a_proj": WHOLE, "m.b_proj": WHOLE[::-1], "m.up_proj": W["m.up_proj"]}
LATE = {name: (w + 0.01 * RNG.standard_normal(w.shape)).astype(np.float32) for name, w in EXPERTS.items()}
OCP, FP8, INT4 = (recipe(id) for id in ("mxfp4-ocp", "fp8-transformers-block", "int4-qat"))


def served(weights, r="nvfp4-te", **changes):
    """Quantize weights by layer. changes: field of the Quantized -> a function of the Quantized for its new value."""
    made = {name: quantize(np.ascontiguousarray(w), r) for name, w in weights.items()}
    return {name: changed(q, **{field: make(q) for field, make in changes.items()}) for name, q in made.items()}


def changed(q, **values):
    """Return a Quantized with other parts. A new tensor scale leaves no amax."""
    return replace(q, **values, **({"tensor_amax": None} if "tensor_scale" in values else {}))


def rounded(scale, dtype=BF16):
    return np.asarray(scale).astype(dtype).astype(np.float32)


def swapped(weights):
    names = [*weights]
    return {**weights, names[1]: weights[names[2]], names[2]: weights[names[1]]}


def interleaved(w):
    """Return the rows of a fused gate_up matrix in the order gate 0, up 0, gate 1, up 1 and so on."""
    return np.ascontiguousarray(w.reshape(2, -1, w.shape[1]).transpose(1, 0, 2).reshape(w.shape))


class Mismatch(NamedTuple):
    """Two sides, and the step and the pattern of the text that the report must have. weights: the unquantized model."""

    train: Any
    rollout: Any
    step: str
    text: str
    weights: Any = None
    kind: str = "weight"


MISMATCHES = {
    "recipe of bytes": Mismatch(
        BASE, served(W, "nvfp4-modelopt"), "tensor scale", "recipe nvfp4-te in train and nvfp4-modelopt in rollout", W
    ),
    "recipe of values": Mismatch(
        BASE,
        {name: fake_quantize(w, "mxfp8-te") for name, w in W.items()},
        "amax",
        "recipe nvfp4-te in train and mxfp8-te in rollout .*element format E2M1 and E4M3",
        W,
    ),
    "recipe of values by a rule of fake_quantize": Mismatch(
        BASE,
        lambda name, w: fake_quantize(w, "int8-modelopt-channel"),
        "amax",
        "recipe nvfp4-te in train and int8-modelopt-channel in rollout",
        W,
    ),
    "divisor": Mismatch(
        BASE.stating(container="modelopt NVFP4"),
        BASE.stating(container="compressed-tensors NVFP4"),
        "decode",
        "container modelopt NVFP4 in train and compressed-tensors NVFP4 in rollout .*product and stored_divisor",
        W,
    ),
    "shared amax of two checkpoints": Mismatch(
        STORED,
        {name: quantize(w, "nvfp4-te", tensor_amax=fp4kit.amax(W["m.up_proj"])) for name, w in W.items()},
        "tensor scale",
        r"rollout has one tensor scale for m.gate_proj and .*m.up_proj.*\(shared_amax\)",
    ),
    "rounding of bytes": Mismatch(
        Contract(OCP), served(W, replace(OCP, id="mine", rounding="rz")), "code", r"\(rounding rn and rz\)", W
    ),
    "rounding of a fake quantizer": Mismatch(
        Contract(OCP),
        lambda name, w: fake_quantize(w, replace(OCP, id="mine", rounding="rz")),
        "code",
        r"\(rounding rn and rz\)",
        W,
    ),
    "dtype of decoded weights": Mismatch(
        STORED,
        {name: dequantize(q, BF16).astype(np.float32) for name, q in STORED.items()},
        "decode",
        "rollout: the values are decoded from train, then rounded to bfloat16",
    ),
    "dtype that a loader decodes to": Mismatch(
        BASE.stating(served_dtype="float32"),
        BASE.stating(served_dtype="bfloat16"),
        "decode",
        "served_dtype is float32 in train and bfloat16 in rollout; decode to one dtype",
        W32,
    ),
    "dtype of a fake quantizer": Mismatch(
        BASE,
        lambda name, w: dequantize(quantize(w, "nvfp4-te"), np.float16).astype(np.float32),
        "decode",
        "rollout: the values are decoded from nvfp4-te, then rounded to float16",
        W32,
    ),
    "dtype of plain values": Mismatch(
        {name: w.astype(BF16) for name, w in EXPERTS.items()},
        EXPERTS,
        "value",
        "train: the values are those of rollout rounded to bfloat16",
        kind="tensor",
    ),
    "load route": Mismatch(
        Contract(FP8),
        served(W, FP8, tensor_scale=lambda q: rounded(q.tensor_scale)),
        "tensor scale",
        "rollout: the tensor scale is that of fp8-transformers-block rounded to bfloat16",
        W,
    ),
    "load route of decoded values": Mismatch(
        Contract(FP8),
        {
            name: dequantize(changed(q, tensor_scale=rounded(q.tensor_scale)), BF16)
            for name, q in served(W, FP8).items()
        },
        "decode",
        "with the scale rounded to bfloat16 .load route. and are rounded to bfloat16 themselves",
        W,
    ),
    "inverted tensor scale": Mismatch(
        BASE,
        served(W, tensor_scale=lambda q: np.float32(1) / q.tensor_scale),
        "tensor scale",
        "rollout: the tensor scale is inverted: it is 1 / that of nvfp4-te",
        W,
    ),
    "tensor scale not applied": Mismatch(
        STORED,
        served(W, tensor_scale=lambda q: np.ones_like(q.tensor_scale)),
        "tensor scale",
        "rollout: the tensor scale is 1: that of train is not applied",
    ),
    "stale norm": Mismatch(
        {**STORED, "m.norm": np.ones(384, np.float32)},
        {**STORED, "m.norm": np.full(384, 1.25, np.float32)},
        "value",
        "stale ones, from an earlier step; send them again",
        kind="tensor",
    ),
    "norm plus one": Mismatch(
        {**STORED, "m.norm": np.arange(384).astype(BF16)},
        {**STORED, "m.norm": (np.arange(384).astype(BF16) + np.float32(1)).astype(BF16)},
        "value",
        "rollout: the values are those of train plus 1",
        kind="tensor",
    ),
    "stale expert": Mismatch(
        BASE,
        served({**EXPERTS, "m.experts.2.up_proj": LATE["m.experts.2.up_proj"]}),
        "tensor scale",
        "other layers of the same recipe are equal, so one side has another weight here: a stale one",
        EXPERTS,
    ),
    "stale expert of two checkpoints": Mismatch(
        served(EXPERTS, OCP),
        served({**EXPERTS, "m.experts.2.up_proj": LATE["m.experts.2.up_proj"]}, OCP),
        "code",
        "other layers of the same recipe are equal, so one side has another weight here: a stale one",
    ),
    "another recipe, which agrees on other layers": Mismatch(
        served(AGREED),
        served(AGREED, "nvfp4-compressed-tensors"),
        "tensor scale",
        r"^the recipes differ \(nvfp4-te, nvfp4-compressed-tensors\), although they give the same bytes in other",
    ),
    "another recipe of every layer": Mismatch(
        STORED,
        served(W, "nvfp4-compressed-tensors"),
        "tensor scale",
        r"every quantized layer differs: the recipes differ \(nvfp4-te, nvfp4-compressed-tensors\); pass the",
    ),
    "every layer stale": Mismatch(
        BASE,
        served(LATE),
        "tensor scale",
        r"nearest is \S+ or \d+ others with .*; every quantized layer differs, so the recipe or the weights are others",
        EXPERTS,
    ),
    "experts in another order": Mismatch(
        BASE,
        served(swapped(EXPERTS)),
        "tensor scale",
        "rollout has here the weight that train has as m.experts.2.up_proj: swapped layers",
        EXPERTS,
    ),
    "transposed experts": Mismatch(
        BASE,
        served({name: w.T for name, w in EXPERTS.items()}),
        "value",
        "rollout: the weight is the transpose of the unquantized weight",
        EXPERTS,
    ),
    "transposed experts of two checkpoints": Mismatch(
        served(EXPERTS),
        served({name: w.T for name, w in EXPERTS.items()}),
        "value",
        "rollout: the weight is the transpose of that of train",
    ),
    "transposed stack": Mismatch(
        {"m.experts.up_proj": RNG.standard_normal((2, 32, 64), np.float32)},
        {"m.experts.up_proj": RNG.standard_normal((2, 64, 32), np.float32)},
        "value",
        r"rollout has the shape \(2, 64, 32\), that of the transpose of train's \(2, 32, 64\)",
    ),
    "interleaved rows": Mismatch(
        BASE,
        served({name: interleaved(w) for name, w in W.items()}),
        "value",
        r"rollout: the rows are in another order: row \d+ of the unquantized weight is row \d+ .interleaved",
        W,
    ),
    "halves of K swapped": Mismatch(
        BASE,
        served({name: np.roll(w, 192, axis=1) for name, w in W.items()}),
        "value",
        "rollout: the blocks are in another order: block of columns 0 of the unquantized weight is block of columns 12",
        W,
    ),
    "exponents of block scales": Mismatch(
        served(W, OCP),
        served(W, OCP, block_scale=lambda q: q.block_scale + np.uint8(1)),
        "block scale",
        "rollout: every block scale is 2 times that of train; apply one scale",
    ),
    "factor of values": Mismatch(  # such as FP8 codes that one side reads as float8_e4m3fnuz
        W32,
        {name: w / np.float32(2) for name, w in W32.items()},
        "value",
        "rollout: the values are 0.5 times those of train",
        kind="tensor",
    ),
    "block size": Mismatch(
        Contract(INT4), Contract(replace(INT4, id="mine", block=(1, 64))), "amax", r"block \(1, 128\) and \(1, 64\)", W
    ),
    "block size of a fake quantizer": Mismatch(
        Contract(INT4),
        lambda name, w: fake_quantize(w, replace(INT4, id="mine", block=(1, 64))),
        "amax",
        r"block \(1, 128\) and \(1, 64\)",
        W,
    ),
}


def reported(mismatch: Mismatch, **options):
    """Return the first differing layer that parity reports. Assert that only the side with the fault is blamed."""
    found = parity(mismatch.train, mismatch.rollout, weights=mismatch.weights, **options)
    assert not found.equal and found.differing
    return found.differing[0]


@pytest.mark.parametrize("mismatch", MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_found_and_named(mismatch):
    layer = reported(mismatch)
    assert (layer.kind, layer.step) == (mismatch.kind, mismatch.step), str(layer)
    assert re.search(mismatch.text, layer.setting), layer.setting


@pytest.mark.parametrize("name", every(4, MISMATCHES))
def test_sides_without_the_mismatch_are_equal(name):
    """The same comparison without the injected fault finds nothing, so the fault alone is what the report names."""
    for side in MISMATCHES[name][:2]:
        assert parity(side, side, weights=MISMATCHES[name].weights).equal


def test_the_faulty_side_is_named_also_if_it_is_the_trainer():
    for name in ("inverted tensor scale", "load route", "interleaved rows", "transposed experts"):
        one = MISMATCHES[name]
        weights = one.weights or W
        layer = reported(one._replace(train=one.rollout, rollout=one.train, weights=weights))
        assert layer.setting.startswith("train: ") and layer.step == one.step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with a model (source), its checkpoint (served) and one with another norm (late)."""
    path = tmp_path_factory.mktemp("mismatches")
    names = [f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal((64, 64), np.float32) for name in names}
    for source, target, norm in (("source", "served", 1), ("source late", "late", 1.5)):
        tensors["model.norm.weight"] = np.full(64, norm, np.float32)
        synthetic.write_model(path / source, {"model_type": "llama"}, tensors)
        convert(path / source, path / target, "nvfp4-te", format="modelopt", input_scale=8 / 2688)
    return path


def test_static_and_dynamic_input_scales(folder):
    x = {"model.layers.0.mlp.down_proj": np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)}
    static = Contract.of(folder / "served").stating(activations="nvfp4-vllm-static", unit="exact")
    dynamic = static.stating(input_scales="dynamic")
    found = parity(dynamic, (static, folder / "served"), weights=folder / "source", inputs=x)
    (layer,) = (one for one in found.differing if one.kind == "input")
    assert layer.step == "amax" and "use the same input scales on both sides (input_scales)" in layer.setting
    assert "input_scales: dynamic and static" in found.contracts.differences


def test_a_stale_norm_of_a_checkpoint(folder):
    found = parity(folder / "served", folder / "late")
    (layer,) = found.differing
    assert (layer.name, layer.kind, layer.step) == ("model.norm", "other tensor", "value")
    assert "stale ones, from an earlier step" in layer.setting


def test_rounding_between_two_containers_is_not_blamed_on_a_stale_weight(folder):
    """Codes and scales are equal; tensor scales stored as divisors are not, in some layers only."""
    for format, name in (("compressed-tensors", "ct"), ("modelopt", "mo")):
        synthetic.dense(folder / f"dense {name}")
        convert(folder / f"dense {name}", folder / name, "nvfp4-te", format=format)
    found = parity(folder / "ct", folder / "mo")
    assert any(one.equal for one in found.layers if one.kind == "weight") and found.differing
    assert all(one.same_codes and one.setting.startswith("codes and scales are equal") for one in found.differing)
    assert "stale" not in str(found) and "damaged" not in str(found)


def test_a_layer_that_no_known_fault_explains_is_not_blamed_on_one():
    """Random codes are no transpose, no order and no other layer; the report then gives the nearest recipe only."""
    junk = served(W, packed=lambda q: np.random.default_rng(0).integers(0, 256, q.packed.shape, np.uint8))
    layer = reported(Mismatch(BASE, junk, "code", "", W))
    assert layer.step == "code" and layer.setting.startswith("rollout: no recipe reproduces all bytes; nearest is ")
    layer = reported(Mismatch(STORED, junk, "code", ""))
    assert layer.step == "code" and layer.setting.startswith("every quantized layer differs, so the recipe or the")


def test_equal_rows_are_no_other_order():
    """A row of zeros that became another row is in many places; that is no permutation."""
    x = {"m": np.zeros((64, 64), np.float32)}
    other = {"m": x["m"].copy()}
    other["m"][9, 7] = 1
    assert reported(Mismatch(x, other, "value", "")).setting == ""


def test_float64_and_large_numbers_are_not_blamed_on_a_dtype():
    for one, other in ((1.0, 1 + 1e-12), (1e300, 1e301), (1e6, 2e6)):
        x, y = (np.full((4, 4), value) for value in (one, other))
        assert reported(Mismatch({"m": x}, {"m": y}, "value", "")).setting == ""
    x = np.linspace(0, 1, 16).reshape(4, 4)
    layer = reported(Mismatch({"m": x}, {"m": x.astype(np.float32)}, "value", ""))
    assert layer.setting == "rollout: the values are those of train rounded to float32; use one dtype on both sides"


@pytest.mark.exhaustive
@pytest.mark.parametrize("made", [quantize, fake_quantize])
def test_another_recipe_is_not_blamed_on_a_fault(made):
    """Bytes and values of every recipe are explained by a recipe, not by a fault that happens to fit."""
    w, count = {"m": W32["m.up_proj"][:32, :128]}, 0
    for r in RECIPES.values():
        if r.stochastic_only or (r.fake_only and made is quantize):
            continue
        found = parity(BASE, {"m": made(w["m"], r)}, weights=w)
        count += not found.equal
        assert found.equal or found.differing[0].setting.startswith("recipe "), (r.id, str(found.differing[0]))
    assert count > 150


def test_sampled_rows_show_the_same_faults():
    for name in ("interleaved rows", "transposed experts", "inverted tensor scale", "experts in another order"):
        one = MISMATCHES[name]
        layer = reported(one, elements=1 << 11)
        assert layer.elements < layer.total and layer.step == one.step and re.search(one.text, layer.setting)
