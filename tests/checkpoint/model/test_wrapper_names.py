"""Test names of tensors to which a wrapper of PyTorch has added parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import Rules, convert_tensors, make_plan
from fp4kit.checkpoint.selection.names import unwrapped
from fp4kit.checkpoint.verify.verify import verify

PLAIN = "model.layers.0.self_attn.o_proj.weight"
WRAPPED = {
    "_orig_mod.model.layers.0.self_attn.o_proj.weight": "torch.compile",
    "model.layers.0._orig_mod.self_attn.o_proj.weight": "torch.compile",
    "module.model.layers.0.self_attn.o_proj.weight": "DistributedDataParallel",
    "module._orig_mod.model.layers.0.self_attn.o_proj.weight": "torch.compile",
    "_forward_module.model.layers.0.self_attn.o_proj.weight": "Lightning",
    "base_model.model.model.layers.0.self_attn.o_proj.weight": "PEFT",
    "base_model.model.model.layers.0.self_attn.o_proj.base_layer.weight": "PEFT",
    "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.self_attn.o_proj.weight": "FSDP",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_names(tmp_path: Path, name: str) -> None:
    """convert refuses a name that a wrapper such as DDP has changed; convert_tensors removes what the wrapper added."""
    assert unwrapped(name) == PLAIN
    w = synthetic.random("w", (32, 64))
    synthetic.write_model(tmp_path / "m", {}, {name: w})
    with refused(f"{name}: {WRAPPED[name]} has added to this name") as found:
        make_plan(tmp_path / "m", "nvfp4-te")
    assert PLAIN in str(found.value)
    assert any(issue.severity == "error" and issue.subject == name for issue in verify(tmp_path / "m").issues)
    rules = Rules.of("nvfp4-te")
    expected = dict(convert_tensors([(PLAIN, w)], rules))
    stripped = dict(convert_tensors([(name, w)], rules))
    assert stripped.keys() == expected.keys()
    assert all(np.array_equal(stripped[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", [PLAIN, "modules.0.weight", "encoder.module.0.weight", "module"])
def test_other_names(name: str) -> None:
    assert unwrapped(name) == name
