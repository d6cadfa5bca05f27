"""Test fp4kit.parity: every kind of mismatch is found and explained, and equal sides are equal."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import half
from safetensors.numpy import save_file

import fp4kit
import fp4kit.checkpoint
from fp4kit import Contract, parity
from fp4kit.contract.compare_layer import chance_of_a_miss, products, why_no_products
from fp4kit.contract.sides import NO_CONTRACT, RowReader, Side, differing_bits, rows_of, same
from fp4kit.formats import bit_patterns
from fp4kit.layouts import swizzle_scales, unswizzle_scales
from fp4kit.layouts.kv import KV_LAYOUTS, KVCache, KVParts, PageShape
from fp4kit.quantized.slicing import of_zeros
from fp4kit.recipes import RECIPES
from fp4kit.reference.stochastic import TE_SIGN_MASK
from fp4kit.testing import assert_same_bits

BASE = Contract(
    "nvfp4-te",
    activations="nvfp4-te",
    kv_cache="nvfp4-vllm-kv",
    kv_layout="vllm-hnd",
    unit="sm100",
    shared_amax=[("gate_proj", "up_proj")],
)
RNG = np.random.default_rng(3)
W = {
    f"m.{leaf}.weight": (RNG.standard_normal((32, 384)) * size).astype(ml_dtypes.bfloat16)
    for leaf, size in (("gate_proj", 1), ("up_proj", 1.5), ("down_proj", 1))
}
DOWN = {"m.down_proj.weight": W["m.down_proj.weight"]}
SHARED = max(fp4kit.amax(W["m.gate_proj.weight"]), fp4kit.amax(W["m.up_proj.weight"]))
STORED = {name: fp4kit.quantize(w, "nvfp4-te", tensor_amax=None if "down" in name else SHARED) for name, w in W.items()}


def one(found, kind="weight"):
    """Return the first differing layer of a parity result. Assert that every differing layer is of this kind."""
    assert not found.equal and not found and {layer.kind for layer in found.differing} == {kind}
    return found.differing[0]


def test_equal_sides_are_equal_in_every_bit():
    for train, rollout in ((BASE, BASE), (BASE, (BASE, STORED)), ((BASE, STORED), STORED), (STORED, STORED)):
        found = parity(train, rollout, weights=W)
        assert found.equal and found and not found.differing
        assert [layer.name for layer in found.layers[:3]] == ["m.gate_proj", "m.up_proj", "m.down_proj"]
        assert all(layer.codes == (0, 32 * 384) for layer in found.layers[:3])
    verdict = "4 layers, 1 input and 1 KV cache are equal in every bit; compared 262,144 of 262,144 elements"
    assert parity(BASE, BASE).verdict.startswith(verdict)
    every = parity(BASE, BASE, weights=W).layers
    assert every[0].products == (0, 64 * 32) and [layer.kind for layer in every[3:]] == ["input", "kv cache"]


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-rowscaled"])
def test_tensor_scales_that_differ_in_no_value(recipe, weights):
    """The text names the tensor scales, and calls no element different."""
    q = fp4kit.quantize(W["m.down_proj.weight"], recipe)
    scales = q.tensor_scale.copy()
    scales.flat[-1] = np.nextafter(scales.flat[-1], np.float32(0))
    sides = [
        (BASE.stating(served_dtype="bfloat16"), {"m.down_proj": one}) for one in (q, replace(q, tensor_scale=scales))
    ]
    layer = one(parity(*sides, weights=weights))
    assert layer.values == (0, 32 * 384) and layer.tensor_scales == (1, scales.size)
    assert layer.step in ("tensor scale", "amax") and layer.count == layer.examined == 0
    text = f"tensor scales: 1 of {scales.size} differ: train {q.tensor_scale.flat[-1]!s} ("
    assert text in str(layer) and f" and rollout {scales.flat[-1]!s} (" in str(layer)
    assert "all decoded values are equal" in str(layer) and "examined differing" not in str(layer)


def test_another_recipe():
    found = parity(BASE, BASE.stating(weights="nvfp4-compressed-tensors"), weights=W)
    layer = one(found)
    assert (layer.step, layer.result) == ("tensor scale", "tensor encode scale")
    assert layer.setting.startswith("recipe nvfp4-te in train and nvfp4-compressed-tensors in rollout (")
    assert layer.setting.endswith("use one recipe on both sides") and layer.worked.parting == "tensor encode scale"
    assert layer.count == layer.examined >= layer.values[0] > 0
    assert "weights: nvfp4-te and nvfp4-compressed-tensors" in str(found.contracts)
    two = parity(Contract("nvfp4-te"), Contract("nvfp4-te-4over6-mse-448"), weights=W).layers[0]
    assert two.step == "block scale" and "4over6 mode none and mse" in two.setting
    other = parity(Contract("nvfp4-te"), Contract("mxfp4-ocp"), weights=W).layers[0]
    assert (other.step, other.result, other.scales) == ("amax", "block amax", (0, 0)) and other.codes[0] > 0


def test_another_sharing_of_amaxes():
    found = parity(BASE, BASE.stating(shared_amax=()), weights=W)
    layer = one(found)
    assert [one.name for one in found.differing] == ["m.gate_proj"]  # up_proj has the larger amax
    assert (layer.step, layer.result) == ("amax", "tensor amax")
    own = fp4kit.amax(W["m.gate_proj.weight"])
    uses = f"train uses {SHARED}, the largest of m.gate_proj, m.up_proj and rollout uses {own}, its own"
    assert uses in layer.setting
    assert parity(BASE, (BASE.stating(shared_amax=()), STORED), weights=W).equal  # the bytes count, not the contract
    alone = {name: fp4kit.quantize(w, "nvfp4-te") for name, w in W.items()}
    layer = one(parity((BASE, STORED), (BASE, alone), weights=W))
    assert layer.step == "amax" and "rollout uses" in layer.setting and ", its own" in layer.setting


def test_another_rounding_and_another_version():
    ocp = fp4kit.recipe("mxfp4-ocp")
    layer = one(parity(Contract(ocp), Contract(replace(ocp, id="mine", rounding="rna")), weights=W))
    assert layer.step == "tie" and layer.worked.parting == "code" and "rounding rn and rna" in layer.setting
    assert 0 < layer.count == layer.codes[0]
    layer = one(parity(Contract(ocp), Contract(replace(ocp, id="mine", rounding="rz")), weights=W))
    assert layer.step == "code" and layer.count > dict(layer.steps)["tie"] > 0
    layer = one(parity(Contract("mxfp4-mlx-cpu"), Contract("mxfp4-mlx-cpu-0321"), weights=W))
    assert layer.step == "block scale" and "versions 0.32.2 to 0.32.4 and 0.30.6 to 0.32.1" in layer.setting


def test_another_decoding_and_another_block_scale_rule():
    te = fp4kit.recipe("nvfp4-te")
    layer = one(parity(Contract(te), Contract(replace(te, id="mine", decode_rule="product")), weights=W))
    assert layer.step == "decode" and layer.codes[0] == layer.scales[0] == 0 and layer.result == "decoded value"
    layer = one(parity(Contract("mxfp4-ocp"), Contract("mxfp4-vllm"), weights=W))
    assert layer.step == "block scale" and layer.worked.parting == "block scale"


def test_a_difference_that_rounding_removes_is_no_step():
    """Block scales differ before rounding, but not after it. So decoding is the first step that differs."""
    found = parity(Contract("nvfp4-te"), Contract("nvfp4-flashinfer"), weights=W)
    alike = [layer for layer in found.layers if layer.codes[0] == layer.scales[0] == 0 < layer.values[0]]
    assert alike and all(layer.step == "decode" and len(layer.steps) == 1 for layer in alike)
    assert any("block scale before rounding" in str(layer.worked) for layer in alike)


def test_scales_of_zeros_may_differ():
    zeros = {"w": np.ones((32, 64), np.float32)}
    zeros["w"][3] = 0
    layer = one(parity(Contract("mxfp4-triton-kernels"), Contract("mxfp4-deepgemm"), weights=zeros))
    assert layer.step == "block scale" and layer.scales == (2, 64) and layer.values[0] == layer.codes[0] == 0
    assert layer.examined == layer.count == 64 and layer.worked.index[0] == 3


def test_swapped_nibbles():
    swapped = {name: replace(q, packed=q.packed >> 4 | q.packed << 4) for name, q in STORED.items()}
    for train, weights in ((BASE, W), ((BASE, STORED), None)):
        layer = one(parity(train, (BASE, swapped), weights=weights))
        assert layer.step == "code" and layer.scales == (0, 32 * 24)
        assert layer.setting == "rollout: the even element of each byte is in the high nibble; swap the nibbles"
        assert layer.element.startswith("element [0, 0]: train ")
    layer = one(parity((BASE, swapped), BASE, weights=W))
    assert layer.step == "code" and layer.setting.startswith("train: the even element")


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
def test_swizzled_scales_read_as_linear_and_the_reverse(layout):
    w = {"m.w": RNG.standard_normal((128, 384), np.float32)}
    stored = {"m.w": fp4kit.quantize(w["m.w"], "nvfp4-te")}
    ways = {
        f"the block scales are in the layout {layout}, but are read as linear; pass scale_layout='{layout}'": (
            lambda s: swizzle_scales(s, layout)
        ),
        f"the block scales are linear, but are read in the layout {layout}; pass scale_layout='linear'": (
            lambda s: unswizzle_scales(s, layout, s.shape)
        ),
    }
    for text, change in ways.items():
        wrong = {name: replace(q, block_scale=change(q.block_scale)) for name, q in stored.items()}
        for train, weights in ((BASE, w), (stored, None)):
            layer = one(parity(train, (BASE, wrong), weights=weights))
            assert (layer.step, layer.setting) == ("block scale", f"rollout: {text}") and layer.codes[0] == 0
    both = {n: replace(q, packed=q.packed >> 4 | q.packed << 4) for n, q in wrong.items()}
    layer = one(parity(BASE, (BASE, both), weights=w))
    assert layer.step == "code" and "swap the nibbles; the block scales are linear, but" in layer.setting
    right = {name: fp4kit.swizzle(q, layout) for name, q in stored.items()}  # swizzled, and declared so
    assert parity(BASE, right, weights=w).equal


def test_another_matrix_unit():
    contract = Contract("mxfp8-te", activations="mxfp8-te", unit="sm100")
    found = parity(contract, contract.stating(unit="exact"), weights=W)
    layer = one(found)
    assert layer.step == "product" and layer.values[0] == 0 < layer.products[0] <= 64 * 32
    assert layer.setting == "unit sm100 in train and exact in rollout; use one unit on both sides"
    assert found.verdict.startswith("3 of 3 layers differ")  # not "values differ by rounding"
    assert layer.element.startswith("product of token 0 and row ") and "(0x" in layer.element
    unquantized = replace(contract, activations=None)
    assert one(parity(unquantized, unquantized.stating(unit="float64"), weights=W)).step == "product"
    x = {"m.up_proj": np.ones((3, 384), np.float32)}
    assert parity(contract, contract, weights=W, inputs=x).layers[1].products == (0, 3 * 32)
    without = parity(contract, contract.stating(unit="sm70"), weights=W)
    assert without.equal and any(text.startswith("products: rollout: ") and "sm70" in text for text in without.notes)


def test_another_recipe_of_activations():
    found = parity(BASE, BASE.stating(activations="nvfp4-compressed-tensors"), weights=W)
    layer = next(layer for layer in found.differing if layer.kind == "input")
    assert all(other.step == "product" for other in found.differing if other.kind == "weight")
    assert layer.step == "tensor scale" and "nvfp4-compressed-tensors in rollout" in layer.setting
    mxfp8 = BASE.stating(activations="mxfp8-te")
    found = parity(BASE, mxfp8, weights=W, inputs={"m.up_proj": RNG.standard_normal((8, 384), np.float32)})
    assert found.differing[-1].kind == "input" and found.differing[-1].name == "m.up_proj"
    assert any("products: rollout: " in text for text in found.notes)
    found = parity(BASE, BASE.stating(activations=None), weights=W)
    assert [layer.step for layer in found.differing] == ["product"] * 3 + ["quantization"]
    text = "the inputs are quantized differently; see the inputs"
    assert found.differing[0].setting == text
    found = parity(BASE, BASE.stating(activations="nvfp4-te-4over6-mse-256", unit="float64"), weights=W)
    units = "unit sm100 in train and float64 in rollout; use one unit on both sides"
    assert found.differing[0].setting == f"{units}; {text}"


def test_another_kv_recipe_and_layout():
    layer = one(parity(BASE, BASE.stating(kv_cache="mxfp4-sglang-kv"), weights=W), "kv cache")
    assert layer.step == "tensor scale" and "mxfp4-sglang-kv in rollout" in layer.setting
    assert "scale format E4M3 and E8M0" in layer.setting
    kv = {"k": RNG.standard_normal((4, 2, 64), np.float32)}
    layer = one(parity(BASE, BASE.stating(kv_cache=None), weights=W, kv=kv), "kv cache")
    assert (layer.name, layer.step, layer.total) == ("k", "quantization", 512)
    for layout, step in (("vllm-hnd-swizzled", "block scale"), ("vllm-nhd", "code"), ("flashinfer-hnd", "code")):
        layer = one(parity(BASE, BASE.stating(kv_layout=layout), weights=W), "kv cache")
        assert (layer.name, layer.step) == ("layout", step)
        assert layer.setting.startswith(f"kv_layout vllm-hnd in train and {layout} in rollout")


def test_given_keys_show_what_a_wrong_kv_layout_changes():
    """The counts are those of a cache that is written in one layout and whose bytes are read in the other."""
    kv = {"k": RNG.standard_normal((37, 3, 64), np.float32), "flat": RNG.standard_normal((8, 64), np.float32)}
    kv["one head"] = RNG.standard_normal((20, 1, 64), np.float32)  # both orders have equal offsets
    nhd, recipe = BASE.stating(kv_layout="vllm-nhd"), BASE.kv_cache
    layers = {layer.name: layer for layer in parity(BASE, nhd, weights=W, kv=kv).layers if "layout" in layer.name}
    assert {*layers} == {"layout of k", "layout of one head"}
    assert layers["layout of one head"].equal and layers["layout of k"].step == "code"
    q = fp4kit.quantize(kv["k"], recipe)
    pages = KV_LAYOUTS["vllm-hnd"].zeros(PageShape(3, 16, 3, 64))
    pages.write(np.arange(37), KVParts(q.packed, q.block_scale, q.packed, q.block_scale))
    read = KVCache("vllm-nhd", pages.arrays[0].reshape(3, 2, 16, 3, 36)).read(np.arange(37))
    codes = [int((fp4kit.unpack(one) != fp4kit.unpack(q.packed)).sum()) for one in (read.k_codes, read.v_codes)]
    scales = [int((one != q.block_scale).sum()) for one in (read.k_scales, read.v_scales)]
    assert layers["layout of k"].codes == (sum(codes), 2 * 37 * 3 * 64)
    assert layers["layout of k"].scales == (sum(scales), 2 * 37 * 3 * 4)
    # The layout vllm-hnd-swizzled cannot hold k, so parity compares random keys instead.
    swizzled = parity(BASE, BASE.stating(kv_layout="vllm-hnd-swizzled"), weights=W, kv={"k": kv["k"][..., :48]})
    assert [layer.name for layer in swizzled.layers if "layout" in layer.name] == ["layout"]


def test_a_layer_that_one_side_does_not_quantize():
    layer = one(parity(BASE, BASE.stating(excluded=("*.down_proj",)), weights=W))
    assert (layer.name, layer.step) == ("m.down_proj", "quantization")
    assert layer.setting.startswith("rollout does not quantize this layer, and train does; quantize it by nvfp4-te")
    layer = one(parity(Contract(), Contract("nvfp4-te"), weights=W))
    assert layer.step == "quantization" and layer.setting.startswith("train does not quantize this layer")


def test_layers_that_a_trainer_excludes_are_those_of_an_engine():
    """A contract of an engine knows no exclusions; a function that quantizes nothing is not taken at its word."""
    w = W["m.up_proj.weight"].astype(np.float32) / 3
    engine, weights = fp4kit.serving("vLLM", "nvfp4-w4a4"), {"mlp.up_proj": w, "lm_head": 2 * w}

    def trainer(layer, w):
        return w if layer == "lm_head" else fp4kit.fake_quantize(w, "nvfp4-compressed-tensors")

    found = parity(trainer, engine, weights=weights)
    assert found.equal and any(
        "rollout also leaves 1 layer unquantized, as train does: lm_head" in n for n in found.notes
    )
    assert "; activations and input scales were not compared" in found.verdict
    with pytest.warns(UserWarning, match="activations and input scales were not compared"):
        assert_same_bits(trainer, engine, weights=weights)
    found = parity(lambda layer, w: w, engine, weights=weights)
    assert [x.step for x in found.differing] == ["quantization"] * 2
    narrow = lambda layer, w: trainer(layer, w) if layer != "lm_head" else w.astype(ml_dtypes.bfloat16)  # noqa: E731
    (layer,) = parity(narrow, engine, weights=weights).differing
    assert layer.name == "lm_head" and layer.step == "value"
    (layer,) = parity(trainer, engine.stating(excluded=()), weights=weights).differing
    assert layer.name == "lm_head" and layer.step == "quantization"


def test_the_sign_of_zero_is_no_tie():
    zeros = np.where(np.arange(32 * 64).reshape(32, 64) % 5, RNG.standard_normal((32, 64)), -0.0).astype(np.float32)
    other = replace(RECIPES["nvfp4-te"], id="other", sign="negative")
    layer = one(parity(Contract("nvfp4-te"), Contract(other), weights={"m": zeros}))
    assert (layer.step, layer.result, layer.count) == ("code", "sign of zero", int((zeros == 0).sum()))
    assert "first step that differs: code (sign of zero)" in str(layer)


def test_functions():
    def fake(name, w):
        return fp4kit.fake_quantize(w, "nvfp4-te", tensor_amax=None if "down" in name else SHARED)

    assert parity(fake, BASE, weights=W).equal
    layer = one(parity((BASE, fake), (BASE, STORED), weights=W))
    assert layer.step == "product" and "train has values, which are multiplied as bfloat16" in layer.setting
    assert parity(lambda name, w: STORED[f"{name}.weight"], BASE, weights=W).equal
    layer = one(parity(lambda name, w: fp4kit.fake_quantize(w, "nvfp4-te"), BASE, weights=W))
    assert layer.step == "amax" and layer.codes == (0, 0)
    layer = one(parity(lambda name, w: w * 0, BASE, weights=W))
    assert layer.step == "value" and layer.setting.startswith("train has values instead of codes; rollout has the bits")
    assert "every quantized layer differs" in layer.setting and layer.worked is None
    r = "int8-modelopt"
    layer = one(parity(lambda name, w: fp4kit.fake_quantize(w, r), Contract(r), weights=W))
    assert layer.step == "decode" and "train: values are those of fake_quantize of int8-modelopt" in layer.setting


@pytest.mark.exhaustive
def test_bytes_that_no_contract_explains():
    other = {name: fp4kit.quantize(w, "nvfp4-flashinfer-4over6-mae-256") for name, w in W.items()}
    relabelled = {name: replace(q, recipe=fp4kit.recipe("nvfp4-te")) for name, q in other.items()}
    layer = one(parity(BASE, relabelled, weights=W))
    assert layer.worked.recipes[1].startswith("rollout nvfp4-") and "4over6" in layer.worked.recipes[1]
    scaled = {n: fp4kit.quantize(w, "nvfp4-te", tensor_amax=9) for n, w in W.items()}
    bare = {n: replace(q, tensor_amax=None) for n, q in scaled.items()}
    layer = one(parity(STORED, bare, weights=W))
    assert layer.step == "amax" and "rollout uses 9.0, which its tensor scale implies" in layer.setting
    junk = {name: replace(q, packed=np.roll(q.packed, 1, axis=1)) for name, q in STORED.items()}
    layer = one(parity(BASE, (BASE, junk), weights=W))
    assert layer.step == "code" and layer.setting.startswith("rollout: no recipe reproduces all bytes; nearest is")
    inverted = {name: replace(q, tensor_scale=1 / q.tensor_scale, tensor_amax=None) for name, q in STORED.items()}
    assert one(parity((BASE, STORED), (BASE, inverted))).step == "tensor scale"


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-rowscaled", "mxfp4-ocp"])
def test_stacks_of_experts_are_compared_per_matrix(recipe):
    w = {f"mlp.experts.{n}": RNG.standard_normal((2, 32, 64), np.float32) for n in ("gate_proj", "up_proj")}
    experts = Contract(patterns=[("*.experts.*", recipe)], shared_amax=[("gate_proj", "up_proj")])
    amax = np.maximum(*(np.abs(x).max(axis=(1, 2)) for x in w.values()))
    given = {"tensor_amax": amax} if recipe == "nvfp4-te" else {}
    q = {name: fp4kit.quantize(x, recipe, **given) for name, x in w.items()}
    found = parity(experts, (experts, q), weights=w)
    names = [f"mlp.experts.{e}.{leaf}" for leaf in ("gate_proj", "up_proj") for e in (0, 1)]
    assert found.equal and [layer.name for layer in found.layers] == names
    assert parity(experts, lambda name, x: fp4kit.quantize(x, recipe), weights=w).layers[0].total == 32 * 64
    q["mlp.experts.up_proj"].packed[1, 0, 0] ^= 1
    assert [layer.name for layer in parity(experts, (experts, q), weights=w).differing] == ["mlp.experts.1.up_proj"]
    assert parity(q, q).equal and parity(w, q, weights=w).differing[0].step == "quantization"
    plain = {"logits": w["mlp.experts.up_proj"]}
    assert parity(plain, plain).layers[0].kind == "tensor"  # three axes, and no side has codes


def test_plain_tensors_such_as_logits():
    a = {"logits": np.float32([[1, 2], [np.nan, 0]]), "x": np.ones((2, 3, 4), ml_dtypes.bfloat16)}
    b = {"logits": np.float32([[1, 2], [np.nan, -0.0]]), "x": np.ones((2, 3, 4), np.float32)}
    assert parity(a, a).equal
    found = parity(a, b)
    layer = one(found, "tensor")
    assert layer.name == "logits" and layer.values == (1, 4) and layer.step == "value"
    assert (
        layer.element == "element [1, 1]: train 0.0 (0x00000000) and rollout -0.0 (0x80000000)" and layer.setting == ""
    )


def test_layers_of_one_side_only_are_named():
    fewer = {name: q for name, q in STORED.items() if "up" not in name}
    found = parity(STORED, fewer)
    assert not found.equal and not found.differing and found.missing == ("m.up_proj: not in rollout",)
    assert "on one side only: m.up_proj: not in rollout" in str(found)
    assert parity(fewer, STORED).missing == ("m.up_proj: not in train",)
    found = parity(BASE, STORED, weights={k: v for k, v in W.items() if "up" not in k})
    assert found.notes[0] == "1 layer without an unquantized weight: m.up_proj"


def test_a_time_limit_compares_fewer_elements_of_every_layer():
    q = fp4kit.quantize(RNG.standard_normal((512, 1024), np.float32), "nvfp4-te")
    many = {f"layers.{i}": q for i in range(300)}
    found = parity(many, many, seconds=3)
    assert found.equal and len(found.layers) == 300 and found.layers[0].elements == 1 << 14
    compared, total = sum(layer.elements for layer in found.layers), 300 * 512 * 1024
    sizes = [layer.elements for layer in found.layers]
    assert min(sizes) >= 1024 and max(sizes) > 1 << 14 and compared < total
    text = found.notes[-1]
    assert text.startswith(f"{total - compared:,} of {total:,} elements, which are not in the sample: if 158 elements")
    chance = np.prod([1 - compared / (total - i) for i in range(158)])
    assert f"misses all of them with a chance of {chance:.2g}; it misses" in text


def test_settings_that_nobody_states_are_one_line():
    unknown = ("activations", "unit", "kv_cache", "served_dtype")
    found = parity(
        Contract("nvfp4-te", unknown=unknown), Contract("nvfp4-te", unknown=unknown[:2]), weights=DOWN, elements=384
    )
    assert found.equal and "unknown setting: neither side states activations, unit\n" in str(found)
    assert "unknown setting: rollout alone states served_dtype (none), kv_cache (none)\n" in str(found)
    chance = "not in the sample: if 1 element differs at a random place, the sample misses it with a chance of 0.97; "
    assert chance in chance_of_a_miss(found.layers[:1])


def test_an_engine_serves_the_codes_of_its_checkpoint(tmp_path):
    """With engine=, the recipe of the rollout is that of the checkpoint, not the one that the engine names first."""
    w = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    save_file({"up_proj.weight": w}, tmp_path / "w.safetensors")
    train = Contract("nvfp4-compressed-tensors", served_dtype="bfloat16")
    engine = {"engine": "transformers", "scheme": "nvfp4-w4a16"}
    for made, equal in (("nvfp4-te", False), ("nvfp4-compressed-tensors", True)):
        path = tmp_path / f"{made}.safetensors"
        fp4kit.checkpoint.convert(tmp_path / "w.safetensors", path, made, format="compressed-tensors")
        found = parity(train, path, weights=tmp_path / "w.safetensors", **engine)
        assert found.equal == equal
        assert equal or "recipe nvfp4-compressed-tensors in train and nvfp4-te in rollout" in found.layers[0].setting
        assert not any("rollout" in text and "excluded" in text for text in found.contracts.uncertain)


def test_only_compared_rows_of_a_reader_are_read():
    asked = []

    def read(rows):
        asked.append(rows.tolist())
        return rows_of(STORED["m.down_proj.weight"], rows)

    reader = RowReader((32, 384), STORED["m.down_proj.weight"].recipe, read)
    stored = {"m.down_proj": STORED["m.down_proj.weight"]}
    assert parity(stored, {"m.down_proj": reader}, elements=2 * 384).equal and asked == [[0, 16]]
    for train, rollout in ((BASE, (BASE, {"m.down_proj": reader})), ({"m.down_proj": reader}, stored)):
        assert parity(train, rollout, weights=DOWN).equal
    swapped = replace(
        stored["m.down_proj"], packed=stored["m.down_proj"].packed >> 4 | stored["m.down_proj"].packed << 4
    )
    wrong = replace(reader, read=lambda rows: rows_of(swapped, rows))
    for train in (BASE, stored):
        layer = one(parity(train, {"m.down_proj": wrong}, weights=DOWN if train is BASE else None, elements=384))
        assert layer.step == "code" and "swap the nibbles" in layer.setting
    faulty = replace(reader, read=lambda rows: rows_of(replace(swapped, tensor_scale=np.float32(9)), rows))
    faulty = replace(faulty, fault=lambda: ("tensor scale", "alpha is stale"))
    layer = one(parity(stored, {"m.down_proj": faulty}))
    assert (layer.step, layer.setting) == ("tensor scale", "rollout: alpha is stale")


def test_samples_are_stated():
    found = parity(BASE, BASE.stating(weights="nvfp4-te-2d"), weights=W, elements=4096, layers=2)
    assert [layer.name for layer in found.layers[:2]] == ["m.gate_proj", "m.up_proj"]
    assert found.sampled == "compared 12,288 of 24,576 elements in 2 of 3 layers"
    assert found.layers[0].elements == 6144 and found.layers[0].total == 32 * 384
    found = parity(BASE, BASE, weights=W, seconds=0)
    assert len([x for x in found.layers if x.kind == "weight"]) == 1
    assert found.notes == ("2 layers, because 0 s had passed: m.up_proj, m.down_proj",)
    packed = STORED["m.down_proj.weight"].packed.copy()
    packed[16] ^= 1
    late = {"m.down_proj": replace(STORED["m.down_proj.weight"], packed=packed)}
    layer = one(parity({"m.down_proj": STORED["m.down_proj.weight"]}, late, elements=2 * 384))
    assert layer.element.startswith("element [16, ") and layer.elements == 2 * 384
    swapped = {name: replace(q, packed=q.packed >> 4 | q.packed << 4) for name, q in STORED.items()}
    layer = one(parity(BASE, (BASE, swapped), weights=W, elements=1))
    assert layer.elements == 384 and "swap the nibbles" in layer.setting


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((BASE, 3), TypeError, "parity: rollout is an int; needs a Contract, a path, a mapping"),
        ((BASE, (BASE, BASE)), ValueError, "parity: rollout is a pair of two contracts; needs one contract"),
        ((BASE, STORED), ValueError, "train quantizes weights, but none are given; pass the unquantized model as"),
        ((STORED, {"other": STORED["m.up_proj.weight"]}), ValueError, "the sides have no layer in common; needs equal"),
        (({"a": [1]}, {"a": [1]}), TypeError, "parity: train: a is a list; needs an array or a Quantized"),
        ((STORED, {n: w[:16] for n, w in W.items()}), ValueError, "has the shapes .* needs one shape"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        parity(*arguments)


def test_errors_of_options():
    with pytest.raises(ValueError, match="elements is 0 and layers None; needs at least 1"):
        parity(BASE, BASE, elements=0)
    with pytest.raises(ValueError, match="no layer of the sides has an unquantized weight; needs equal names of"):
        parity(BASE, STORED, weights={"other": np.ones((32, 64), np.float32)})
    with pytest.raises(ValueError, match="weights: w is int64"):
        parity(BASE, BASE, weights={"w": np.ones((4, 4), int)})
    with pytest.raises(ValueError, match=r"train: the contract searches block scales \(mse\)"):
        parity(BASE.stating(scale_search="mse"), BASE)
    with pytest.raises(TypeError, match="weights is an int; needs a path or a mapping"):
        parity(BASE, BASE, weights=3)
    for given in ({"engine": "vLLM"}, {"scheme": "nvfp4-w4a4"}):
        with pytest.raises((TypeError, ValueError), match=f"parity: .*{'scheme' if 'engine' in given else 'engine'}"):
            parity(STORED, STORED, **given)


def test_hadamard_transforms():
    signs = "".join("-" if TE_SIGN_MASK >> i & 1 else "+" for i in range(16))
    alone = BASE.stating(shared_amax=())
    fused = alone.stating(hadamard=16, hadamard_signs=signs)
    q = {n: fp4kit.quantize(w, "nvfp4-te", hadamard=True) for n, w in DOWN.items()}
    assert parity(fused, (fused, q), weights=DOWN).equal
    layer = parity(fused, BASE, weights=DOWN).differing[0]
    assert layer.setting.startswith(f"hadamard is 16 with signs {signs[:4]}... in train and none in rollout; use one")
    plain = alone.stating(hadamard=16)
    q = {n: fp4kit.quantize(w, "nvfp4-te", hadamard="no_signs") for n, w in DOWN.items()}
    assert parity(plain, (plain, q), weights=DOWN).equal

    other = plain.stating(hadamard_signs=signs)
    setting = parity(plain, other, weights=DOWN).differing[0].setting
    assert setting.startswith("hadamard is 16 without signs in train and 16")

    last = alone.stating(hadamard=16, hadamard_signs=signs[:-1] + "+-"[signs[-1] == "+"])
    texts = [f"16 with signs {one.hadamard_signs} in {side}" for one, side in ((fused, "train"), (last, "rollout"))]
    setting = parity(fused, last, weights=DOWN).differing[0].setting
    assert setting == f"hadamard is {' and '.join(texts)}; use one on both sides"

    pattern = np.tile([1, -1, -1, 1], 32)
    large = alone.stating(hadamard=128, hadamard_signs="+--+" * 32)
    q = {n: fp4kit.quantize(fp4kit.hadamard(w, 128, signs=pattern), "nvfp4-te") for n, w in DOWN.items()}
    found = parity(large, (large, q), weights=DOWN)
    assert found.equal and found.layers[0].products == (0, 64 * 32)
    found = parity(large, alone, weights=DOWN)
    layer = found.differing[0]
    assert layer.step == "amax" and layer.worked.steps[0][0] != layer.worked.steps[1][0]  # the elements differ
    assert layer.setting == "hadamard is 128 with signs +--+... in train and none in rollout; use one on both sides"


def test_hadamard_transforms_only_weights_that_are_quantized():
    excludes = BASE.stating(shared_amax=(), excluded=("m.down_proj",))
    layer = parity(excludes.stating(hadamard=16), excludes, weights=DOWN).layers[0]
    assert layer.values == (0, 32 * 384)  # neither side quantizes it, so no transform is applied
    q = {n: fp4kit.quantize(w, "nvfp4-te", hadamard="no_signs") for n, w in DOWN.items()}
    found = parity((BASE.stating(hadamard=16), q), (BASE.stating(hadamard=16), q))
    assert found.equal  # without weights there is nothing to transform


def test_print_shows_the_first_of_many_layers():
    names = [f"layers.{i}.o_proj" for i in range(20)]
    a, b = ({name: np.full((1, 32), value, np.float32) for name in names} for value in (1, 2))
    found = parity(a, b)
    assert len(found.rows()) == 20 and found.rows(20) == found.rows()
    assert found.rows(12)[:11] == found.rows()[:11] and found.rows(12)[11][0] == "and 9 others"
    assert "and 9 others" in str(found) and names[10] in str(found) and names[11] not in str(found)


def test_stored_input_scales_are_noted():
    found = parity(BASE.stating(input_scales="static"), BASE.stating(input_scales="dynamic"), weights=W)
    assert found.notes == ("stored input scales of train; inputs are compared with their own amax",)
    assert found.contracts.differences == ("input_scales: static and dynamic",)
    alone = parity(BASE.stating(input_scales="static"), W, weights=W)  # no inputs are compared
    assert not any("input scales" in note for note in alone.notes)


@pytest.mark.exhaustive
def test_every_recipe_is_told_from_another_one():
    """parity calls two recipes equal if and only if their codes, scales and values are.

    Otherwise, the result and its setting name the other recipe.
    """
    x = {"w": RNG.standard_normal((16, 256)).astype(ml_dtypes.bfloat16)}
    for r in (r for r in RECIPES.values() if not r.stochastic_only):
        base = fp4kit.recipe("mxfp4-ocp" if r.scale is None or r.scale.name == "E8M0" else "nvfp4-te")
        found = parity(Contract(base), Contract(r), weights=x)
        q = fp4kit.quantize(x["w"], base)
        values = fp4kit.dequantize(q, np.float32)
        if r.fake_only:
            fake = fp4kit.fake_quantize(x["w"], r)
            equal = not differing_bits(fp4kit.dequantize(q, fake.dtype), fake).any()
        else:
            other = fp4kit.quantize(x["w"], r)
            codes = r.element != base.element or np.array_equal(q.packed, other.packed)
            scales = r.scale != base.scale or r.block_size != base.block_size
            scales = scales or np.array_equal(q.block_scale, other.block_scale)
            equal = codes and scales and not differing_bits(values, fp4kit.dequantize(other, np.float32)).any()
        assert found.equal == equal, r.id
        layer = found.layers[0]
        assert equal or (r.id in layer.setting and r.id in str(found) and layer.count > 0), r.id


def test_bits_are_compared():
    nan = np.float32([np.nan, 0, 1])
    other = bit_patterns(nan).copy().view(np.float32)
    other.view(np.uint32)[0] |= 1
    assert not differing_bits(nan, other).any()
    assert [*differing_bits(nan, np.float32([np.nan, -0.0, 1]))] == [False, True, False]


def test_a_result_prints_and_counts():
    found = parity(BASE, BASE.stating(weights="nvfp4-flashinfer", unit="exact"), weights=W)
    text = str(found)
    assert text.startswith(found.verdict) and "first step that differs" in text and "Element [" in text
    html = found._repr_html_()
    assert "setting: unit: sm100 and exact" in text and "<table" in html and found.verdict in html
    layer = found.differing[0]
    assert sum(count for _, count in layer.steps) <= layer.examined and layer.steps[0] == (layer.step, layer.count)
    assert str(replace(layer, step=None, worked=None)) == "weight m.gate_proj: equal in every bit"


def test_every_part_of_a_recipe_is_named():
    te = fp4kit.recipe("nvfp4-te")
    fast = "rule of the block scale flashinfer and flashinfer_precise"
    for a, b, step, text in (
        (te, replace(te, id="mine", block=(1, 32)), "amax", "block (1, 16) and (1, 32)"),
        (te, "nvfp4-te-2d", "amax", "block (1, 16) and (16, 16)"),
        ("nvfp4-te-4over6-mse-448", "nvfp4-te-4over6-mae-448", "block scale", "4over6 mode mse and mae"),
        ("nvfp4-te-4over6-mse-448", "nvfp4-te-4over6-mse-256", "tensor scale", "largest block scale 448 and 256"),
        ("nvfp4-flashinfer", "nvfp4-flashinfer-precise", "block scale", fast),
    ):
        found = parity(Contract(a), Contract(b), weights=None if text == fast else DOWN)
        layer = one(found)
        assert layer.step == step and text in layer.setting and text in found.contracts.differences[0], (a, b)


@pytest.mark.parametrize(
    "recipe", half(["nvfp4-te", "nvfp4-compressed-tensors", "nvfp4-te-rowscaled", "nvfp4-fouroversix", "fp8-modelopt"])
)
def test_weights_with_nan(recipe):
    w = RNG.standard_normal((64, 64), np.float32)
    w[0, 0] = np.nan
    q = {"w": fp4kit.quantize(w, recipe)}
    for elements in (1 << 18, 64 * 7):
        assert parity(q, Contract(recipe), weights={"w": w}, elements=elements).equal
        assert parity({"w": w}, Contract(), weights={"w": w.copy()}, elements=elements).equal
        layer = one(parity({"w": w}, Contract(recipe), weights={"w": w.copy()}, elements=elements))
        assert layer.step == "quantization" and layer.setting.startswith("train does not quantize this layer")
    layer = one(parity(Contract(recipe), Contract("mxfp4-ocp"), weights={"w": w}))
    assert layer.step is not None and f"recipe {recipe} in train and mxfp4-ocp in rollout" in layer.setting
    group = BASE.stating(weights=recipe, activations=None, unit=None)
    both = {"m.gate_proj": w, "m.up_proj": np.ones((64, 64), np.float32)}
    assert parity(group, group, weights=both, inputs={"m.up_proj": w}, kv={"k": w}).equal


def test_inputs_of_excluded_layers():
    x = {"m.down_proj": RNG.standard_normal((8, 384), np.float32)}
    excluding = BASE.stating(excluded=("*.down_proj",), input_scales="static")
    found = parity(excluding, excluding.stating(activations="nvfp4-compressed-tensors"), weights=DOWN, inputs=x)
    assert found.equal and [layer.kind for layer in found.layers] == ["weight", "input", "kv cache"] and not found.notes
    found = parity(BASE, excluding, weights=DOWN, inputs=x)
    assert [(layer.kind, layer.step) for layer in found.differing] == [(k, "quantization") for k in ("weight", "input")]
    assert found.differing[1].setting.startswith("rollout does not quantize the inputs, and train does")


def test_random_layers_match_every_pattern():
    later = Contract("nvfp4-te", excluded=("a_proj", "lm_head", "x?y")), Contract("nvfp4-te", excluded=("a_proj", "z*"))
    found = parity(*later)
    assert [layer.name for layer in found.differing] == ["lm_head", "xay", "zdrawn"] and not found.missing
    for pattern, name in (("*.layers.[0-3].*", "drawn.layers.0.drawn"), ("l.[!a-z]?[]x]", "l.Aax"), ("a[0", "a[0")):
        sides = [Contract(patterns=[(pattern, r)]) for r in ("nvfp4-te", "mxfp4-ocp")]
        assert [layer.name for layer in parity(*sides).differing] == [name]
    found = parity(Contract(excluded=("[z-a]",)), Contract())
    assert "layers of the pattern '[z-a]', which no random layer matches" in found.notes and len(found.layers) == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda one: parity(BASE, BASE, weights={"c": one((2, 2, 4, 64))}), ValueError, r"c has the shape \(2, 2, 4, "),
        (lambda one: parity(BASE, BASE, weights={"c": one((0, 64))}), ValueError, r"c has the shape \(0, 64\); needs"),
        (lambda one: parity({"x": one((0, 4))}, {"x": one((0, 4))}), ValueError, r"x has the shape \(0, 4\); needs"),
        (lambda one: parity(BASE, BASE, inputs={"c": one((0, 64))}), ValueError, r"input: c has the shape \(0, 64\)"),
        (lambda one: parity(BASE, BASE, weights={"c": one((2, 64))}, inputs={"c": one(())}), ValueError, "inputs: c h"),
        (lambda one: parity(BASE, BASE, kv={"k": one((0, 2, 64))}), ValueError, r"kv cache: k has the shape \(0, 2, "),
        (lambda one: parity(BASE, BASE, kv={"k": one(())}), ValueError, r"kv cache: k has the shape \(\); needs"),
        (lambda one: parity({"x": one(3) * 1j}, {"x": one(3)}), ValueError, "train: x is complex64; needs real"),
        (lambda one: parity({1: one(3)}, {1: one(3)}), TypeError, "a tensor has the name 1; needs a string"),
        (lambda one: parity(BASE, Contract(unknown=("weights",))), ValueError, "rollout: the contract does not know"),
    ],
)
def test_errors_name_the_layer_or_the_side(call, error, message):
    with pytest.raises(error, match=f"parity: {message}"):
        call(lambda shape: np.ones(shape, np.float32))


def test_settings_are_named_only_if_they_are_the_reason():
    own = fp4kit.amax(W["m.down_proj.weight"])
    layer = one(parity(Contract("nvfp4-te"), Contract("nvfp4-te-rowscaled"), weights=DOWN))
    assert "tensor scale per tensor and row" in layer.setting and "tensor amax:" not in layer.setting
    q = {name: fp4kit.quantize(w, "nvfp4-te", tensor_amax=9) for name, w in DOWN.items()}
    layer = one(parity(Contract("nvfp4-te"), q, weights=DOWN))
    uses = f"tensor amax: train uses {own}, its own and rollout uses 9.0, which its tensor scale implies"
    assert layer.setting == uses

    found = parity(BASE.stating(hadamard=16, unit=None), BASE.stating(shared_amax=(), unit=None), weights=W)
    texts = found.differing[0].setting.split("; ")
    assert texts[0].startswith("hadamard is 16") and texts[-1] == "let the same layers share an amax (shared_amax)"
    layer = one(parity(Contract("nvfp4-te"), Contract("nvfp4-te", container="modelopt NVFP4"), weights=W))
    assert layer.step == "decode" and layer.setting.startswith("container none in train and modelopt NVFP4 in rollout")
    assert layer.setting.endswith("; use one container on both sides")


def test_the_first_step_is_found_behind_eight_affected_parts():
    """Codes differ in every part, and block scales only in one of the last parts."""
    ocp, tied = fp4kit.recipe("mxfp4-ocp"), np.float32([4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 0.25, 0.75] + [0] * 23)
    other = replace(fp4kit.recipe("mxfp4-vllm"), id="mine", rounding="rna")
    for row in (130, 200):
        x = np.tile(tied, (240, 34))
        x[row] *= 1.9
        layer = one(parity(Contract(ocp), Contract(other), weights={"w": x}))
        assert layer.scales == (34, 8160) and layer.step == "block scale" and layer.worked.index[0] == row
        assert layer.examined < layer.values[0] and dict(layer.steps)["tie"] > layer.count > 0
        assert f"{layer.count:,} of {layer.examined:,} examined differing elements" in layer.lines[0]


def test_only_two_missing_arrays_are_the_same():
    """A missing part equals a missing part, but no array; -0 differs from 0, and NaN equals NaN of other bits."""
    x = np.array([np.nan, 0.0], np.float32)
    assert same(None, None)
    assert not same(None, x)
    assert not same(x, None)
    assert same(x, np.array([-np.nan, 0.0], np.float32))
    assert not same(x, np.array([np.nan, -0.0], np.float32))
    assert not same(x, x[:1])


ZEROS = {"m.down_proj.weight": np.full((32, 128), -0.0, ml_dtypes.bfloat16)}


@pytest.mark.parametrize(
    ("recipe", "container", "step"),
    [
        ("nvfp4-modelopt", "modelopt NVFP4", "tensor scale"),
        ("nvfp4-compressed-tensors", "compressed-tensors nvfp4-pack-quantized", "block scale"),
        ("nvfp4-torchao", "modelopt NVFP4", "tensor scale"),
        ("fp8-modelopt", "modelopt FP8", "tensor scale"),
    ],
)
def test_layers_of_zeros_have_the_scales_that_convert_stores(recipe, container, step):
    """A contract with a container states what convert stores; without one, it states the producer's own scales."""
    contract, stored = Contract(recipe), of_zeros(fp4kit.quantize(ZEROS["m.down_proj.weight"], recipe))
    written = contract.stating(container=container)
    for train, rollout in ((written, written), (written, {"m.down_proj.weight": stored})):
        assert parity(train, rollout, weights=ZEROS).equal
    layer = one(parity(contract, {"m.down_proj.weight": stored}, weights=ZEROS))
    assert layer.step == step
    assert layer.setting.startswith("rollout: stores a layer of zeros as convert does, with block scales 0 and tensor")


def test_a_layer_of_zeros_with_another_scale_is_not_what_convert_stores():
    stored = of_zeros(fp4kit.quantize(ZEROS["m.down_proj.weight"], "nvfp4-modelopt"))
    other = replace(stored, tensor_scale=np.float32(2))
    layer = one(parity(Contract("nvfp4-modelopt"), {"m.down_proj.weight": other}, weights=ZEROS))
    assert "stores a layer of zeros" not in layer.setting


def test_zeros_that_share_an_amax_with_another_layer_are_not_special():
    weights = {"m.gate_proj.weight": ZEROS["m.down_proj.weight"], "m.up_proj.weight": W["m.up_proj.weight"][:, :128]}
    contract = Contract("nvfp4-compressed-tensors", shared_amax=[("gate_proj", "up_proj")])
    amax = fp4kit.amax(weights["m.up_proj.weight"])
    stored = {name: fp4kit.quantize(w, "nvfp4-compressed-tensors", tensor_amax=amax) for name, w in weights.items()}
    written = contract.stating(container="compressed-tensors nvfp4-pack-quantized")
    assert parity(written, stored, weights=weights).equal


X, ROWS = np.random.default_rng(0).standard_normal((2, 16, 256), np.float32)


@pytest.mark.parametrize("transform", [{}, {"hadamard": 16}, {"hadamard": 64, "hadamard_signs": "+--+" * 16}])
@pytest.mark.parametrize("activations", ["nvfp4-te", "mxfp8-modelopt-fake", None])
def test_products_approximate_those_of_values(transform, activations):
    side = Side("train", Contract("nvfp4-te", activations=activations, unit="sm100", **transform))
    q = fp4kit.quantize(side.transformed(ROWS), "nvfp4-te")
    exact = X @ ROWS.T
    for weights in (q, q.dequantize(np.float32)):
        found = products(side, X, weights, quantized=True)
        assert found.dtype == np.float32 and np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)
    assert np.linalg.norm(products(side, X, ROWS, False) - exact) < 0.02 * np.linalg.norm(exact)


def test_why_products_are_unknown():
    assert why_no_products(NO_CONTRACT) == "no contract states the matrix unit"
    assert why_no_products(Contract()) == "the contract states no matrix unit"
    assert why_no_products(Contract(unit="sm100", unknown=("activations",))) == "the recipe of activations is unknown"
    assert why_no_products(Contract(unit="sm100")) == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_of_decoded_weights_is_named(dtype):
    """Equal codes that one side decodes to 16 bits differ at the step decode, and sides that both round are equal."""
    plain = fp4kit.Contract("nvfp4-compressed-tensors", container="compressed-tensors nvfp4-pack-quantized")
    served = replace(plain, served_dtype=dtype)
    found = fp4kit.parity(plain, served)
    assert not found and found.layers[0].step == "decode" and found.layers[0].codes[0] == 0
    assert f"served_dtype is none in train and {dtype} in rollout" in found.layers[0].setting
    assert fp4kit.parity(served, served).equal


def test_differing_elements_are_counted_by_the_step_that_differs_first() -> None:
    """Without the unquantized weights, the parts that differ say which step it is: scales, codes, or only decoding."""
    x = np.random.default_rng(5).standard_normal((32, 64)).astype(np.float32)
    q = fp4kit.quantize(x, "nvfp4-modelopt")
    scales, codes = q.block_scale.copy(), q.packed.copy()
    scales[0, 0] += 1
    codes[1, 3] ^= 1
    other = replace(q, recipe=fp4kit.recipe("nvfp4-compressed-tensors"), block_scale=scales, packed=codes)
    (layer,) = fp4kit.parity({"a": q}, {"a": other}).layers
    first, second, third = layer.steps
    assert (layer.step, first, second) == ("block scale", ("block scale", 16), ("code", 1))
    assert third[0] == "decode" and layer.count == 16 and layer.examined == 17 + third[1] <= x.size
    assert any("element [0, " in line for line in layer.lines), layer.lines
