"""Test fake-quantized inputs of linear layers: dynamic amaxes and calibrated ones."""

import importlib
import re

import numpy as np
import pytest
from tensors import to_numpy

import fp4kit
from fp4kit.calibration import Collector
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")


class Mlp(torch.nn.Module):
    """Store the inputs that its layers compute with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
        self.down_proj = torch.nn.Linear(32, 64)
        self.seen = {}

    def forward(self, x):
        hidden = torch.relu(self.gate_proj(x)) * self.up_proj(input=x)
        self.seen |= {"up_proj": x.detach(), "down_proj": hidden.detach()}
        return self.down_proj(hidden)


def inputs_of(model, x):
    """Return {layer: the inputs that its product gets}, for one call of a model."""
    found = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, y, name=name: found.update({name: (args or tuple(kwargs.values()))[0]}),
            with_kwargs=True,
        )
        for name, module in model.named_children()
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def test_dynamic_amaxes():
    model, x = Mlp(), torch.randn(4, 64, requires_grad=True)
    names = ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te")
    assert names.inputs == ("gate_proj", "up_proj", "down_proj")
    seen = inputs_of(model, x)
    for layer in ("up_proj", "down_proj"):
        assert_same_bits(to_numpy(seen[layer]), fp4kit.fake_quantize(to_numpy(model.seen[layer]), "nvfp4-te"))
    model(x).sum().backward()
    assert x.grad.any()
    ft.remove_fake_quantization(model)
    assert inputs_of(model, x)["up_proj"] is x


@pytest.mark.parametrize("kind", ["collector", "dict"])
def test_calibrated_amaxes(kind):
    """Layers that read one input use its largest measured amax, under whichever of their names it was measured."""
    model, x = Mlp(), torch.randn(4, 64)
    if kind == "collector":
        with ft.collect(model) as given, torch.no_grad():
            model(x * 3)
        amaxes = given.amaxes()
    else:
        amaxes = given = {"gate_proj": 7.5, "down_proj": np.float32(4)}
    ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=given)
    seen = inputs_of(model, x)
    for layer, of in {"up_proj": "gate_proj", "down_proj": "down_proj"}.items():
        values = fp4kit.fake_quantize(to_numpy(model.seen[layer]), "nvfp4-te", tensor_amax=amaxes[of])
        assert_same_bits(to_numpy(seen[layer]), values)


def test_recipes_without_a_tensor_scale():
    model, x = Mlp(), torch.randn(4, 64)
    ft.fake_quantize_model(model, "mxfp4", activations="mxfp8")
    assert_same_bits(to_numpy(inputs_of(model, x)["up_proj"]), fp4kit.fake_quantize(to_numpy(x), "mxfp8"))
    with pytest.raises(ValueError, match=r"input_amaxes are given, but mxfp8-te has no tensor scale; leave them out"):
        ft.fake_quantize_model(Mlp(), "mxfp4", activations="mxfp8", input_amaxes={"gate_proj": 1})


def test_errors_leave_the_model_as_it_was():
    model = Mlp()
    with pytest.raises(TypeError, match=r"input_amaxes are given without activations; pass activations='nvfp4-te' too"):
        ft.fake_quantize_model(model, "nvfp4-te", input_amaxes=Collector())
    with pytest.raises(ValueError, match=r"1 of 3 layers were not measured: down_proj"):
        ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes={"up_proj": 1})
    with pytest.raises(TypeError, match=r"input_amaxes is list; needs a Collector, or a dict of layer -> amax"):
        ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=[1])
    for amax, error, text in (
        (-1.0, ValueError, "is -1.0; needs a number >= 0"),
        (np.nan, ValueError, "is nan; needs a number >= 0"),
        ("3", TypeError, "is '3'; needs a number >= 0"),
        (None, TypeError, "is None; needs a number >= 0"),
    ):
        amaxes = {"gate_proj": 1, "up_proj": amax, "down_proj": 1}
        with pytest.raises(error, match=re.escape(f"fake_quantize_model: input_amaxes['up_proj'] {text}")):
            ft.fake_quantize_model(model, "nvfp4-te", activations="nvfp4-te", input_amaxes=amaxes)
    with pytest.raises(ValueError, match=r"activations='nvfp4-te', but no torch.nn.Linear is fake-quantized"):
        ft.fake_quantize_model(torch.nn.Sequential(torch.nn.Conv1d(16, 8, 1)), "nvfp4-te", activations="nvfp4-te")
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
