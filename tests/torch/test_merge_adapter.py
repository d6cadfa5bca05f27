"""Test merge_adapter: adapters are merged into quantized weights in memory as the converter merges them on disk."""

import importlib
import warnings

import lora
import numpy as np
import pytest
import synthetic

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
ft = importlib.import_module("fp4kit.torch")
Q, K, V, UP = (f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up"))
SHAPES = {Q: (64, 64), K: (32, 64), V: (32, 64), UP: (96, 64)}


def values(std=0.02):
    return {name: synthetic.random(name, shape, std, np.dtype("f4")) for name, shape in SHAPES.items()}


def quantized(recipe, weights):
    """Return the weights quantized as the converter does: q, k and v share their tensor amax."""
    fused = max(np.abs(weights[name]).max() for name in (Q, K, V))
    given = {} if fp4kit.recipe(recipe).tensor_scaling != "tensor" else {"tensor_amax": fused}
    return {name: fp4kit.quantize(x, recipe, **(given if name != UP else {})) for name, x in weights.items()}


def adapter(path, std=3e-4, layers=(Q, UP)):
    tensors = {}
    for name in layers:
        tensors |= lora.halves(name, SHAPES[name], std=std)
    return lora.write(path, tensors), {name: lora.delta(tensors, name, 2.0) for name in layers}


@pytest.mark.parametrize(
    "recipe", ["nvfp4-modelopt", "nvfp4-modelopt-static-4over6", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt-channel"]
)
@pytest.mark.parametrize("scales", ["nearest", "base", "new"])
def test_the_codes_are_those_of_the_converter(tmp_path, recipe, scales):
    weights, (path, _) = values(), adapter(tmp_path / "adapter")
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, {f"{name}.weight": x for name, x in weights.items()})
    form = {"format": "compressed-tensors" if "fp8" in recipe or recipe.startswith("mx") else "modelopt"}
    convert(tmp_path / "m", tmp_path / "base", recipe, **form)
    report = convert(tmp_path / "base", tmp_path / "out", recipe, adapter=path, adapter_scales=scales, **form)
    base, out = (fp4kit.open_checkpoint(tmp_path / name) for name in ("base", "out"))
    merged = ft.merge_adapter(quantized(recipe, weights), path, scales=scales)
    assert set(merged.survival) == {Q, UP}
    for name in SHAPES:
        assert_same_bits(merged.weights[name].packed, out[name].packed)
        assert np.array_equal(merged.weights[name].dequantize(np.float32), out[name].dequantize(np.float32))
        assert base[name].shape == out[name].shape
    for name, one in merged.survival.items():
        assert one.share == pytest.approx(report.survival[name].share)
        assert one[4:] == report.survival[name][4:]


def test_weights_without_an_update_are_the_given_objects(tmp_path):
    given = quantized("nvfp4-te", values())
    path, deltas = adapter(tmp_path / "adapter")
    merged = ft.merge_adapter(given, path)
    assert merged.weights.keys() == given.keys()
    assert merged.weights[K] is given[K]
    for name, delta in deltas.items():
        base, stored = (q[name].dequantize(np.float32).astype(np.float64) for q in (given, merged.weights))
        share = np.vdot(stored - base, delta) / np.vdot(delta, delta)
        assert merged.survival[name].share == pytest.approx(share, abs=1e-6)


def test_an_update_beyond_the_tensor_scale_changes_all_that_share_it(tmp_path):
    given = quantized("nvfp4-te", values())
    merged = ft.merge_adapter(given, adapter(tmp_path / "adapter", std=0.1)[0])
    assert {float(merged.weights[name].tensor_scale) for name in (Q, K, V)} != {float(given[Q].tensor_scale)}
    assert len({float(merged.weights[name].tensor_scale) for name in (Q, K, V)}) == 1
    assert set(merged.survival) == {Q, UP}
    assert merged.survival[Q].share > 0.98


def test_a_model_of_peft_and_tensors_give_tensors():
    """The adapter of a model in memory is merged as its saved files are; the model stays as it is."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 96, bias=False)})
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=4, target_modules=["up_proj"]))
    layer = model.base_model.model["up_proj"]
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    given = {"up_proj.weight": ft.quantize(layer.base_layer.weight.detach(), "nvfp4-te")}
    with warnings.catch_warnings(record=True) as seen:
        merged = ft.merge_adapter(given, model)
    assert not seen
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    q = merged.weights["up_proj.weight"]
    assert isinstance(q.packed, torch.Tensor)
    delta = layer.get_delta_weight("default").detach()
    base, stored = (one["up_proj.weight"].dequantize(torch.float32) for one in (given, merged.weights))
    share = float(((stored - base) * delta).sum() / (delta * delta).sum())
    assert merged.survival["up_proj.weight"].share == pytest.approx(share, abs=1e-5)


def test_wrong_arguments_are_refused(tmp_path):
    given, (path, _) = quantized("nvfp4-te", values()), adapter(tmp_path / "adapter")
    x = values()[Q]
    cases = [
        ((given, path), {"scales": "best"}, ValueError, "use one of nearest, base, new"),
        (({**given, Q: x}, path), {}, TypeError, "needs a Quantized"),
        ((given, 3), {}, TypeError, "needs a model of PEFT or the path"),
        ((given, tmp_path / "none"), {}, CheckpointError, "has no adapter_config.json"),
        (({K: given[K]}, path), {}, CheckpointError, "the model has no such layer"),
        (({**given, Q: given[K]}, path), {}, ValueError, "needs the model of the adapter"),
        (({**given, Q: fp4kit.quantize(x, "nvfp4-te", axis=0)}, path), {}, ValueError, "needs axis 1, linear"),
        (
            ({**given, Q: fp4kit.quantize(x, "nvfp4-te", scale_layout="swizzled_128x4")}, path),
            {},
            ValueError,
            "needs axis 1, linear",
        ),
    ]
    for arguments, options, error, text in cases:
        with pytest.raises(error, match=text):
            ft.merge_adapter(*arguments, **options)
