"""Write LoRA adapters as PEFT saves them, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "base_model_name_or_path": "a/model",
    "r": 8,
    "lora_alpha": 16,
    "bias": "none",
    "target_modules": ["q_proj"],
    "lora_dropout": 0.1,
    "init_lora_weights": True,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
PREFIX = "base_model.model."


def halves(layer: str, shape: tuple[int, int], rank: int = 8, std: float = 1.0) -> dict[str, np.ndarray]:
    """Return lora_A and lora_B of a layer; the elements of B A have the standard deviation ``std * sqrt(rank)``."""
    return {
        f"{PREFIX}{layer}.lora_A.weight": synthetic.random(f"{layer}.A", (rank, shape[1]), 1.0, np.dtype("f4")),
        f"{PREFIX}{layer}.lora_B.weight": synthetic.random(f"{layer}.B", (shape[0], rank), std, np.dtype("f4")),
    }


def write(root: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """Write an adapter with these tensors and options, and return its directory."""
    root.mkdir()
    synthetic.write_file(root / "adapter_model.safetensors", tensors)
    (root / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return root


def delta(tensors: Mapping[str, np.ndarray], layer: str, scale: float) -> np.ndarray:
    """Return the update of a layer, float32."""
    a, b = (tensors[f"{PREFIX}{layer}.lora_{half}.weight"].astype(np.float32) for half in "AB")
    return (b @ a) * np.float32(scale)
