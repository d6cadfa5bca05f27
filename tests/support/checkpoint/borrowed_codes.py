"""Write quantized directories whose codes ``convert --codes`` copies into GGUF files, and read stored tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import synthetic
from gguf_files import EXPERTS

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.storage.gguf_file import read_gguf

# {llama.cpp's name of a layer: name of the Hugging Face module below model.layers.N}
MODULE_NAMES = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
MODULE_NAMES = {name: f"self_attn.{letter}_proj" for name, letter in MODULE_NAMES.items()}
MODULE_NAMES |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}


def directory(
    root: Path, tensors: dict[str, np.ndarray], recipe: str = "nvfp4-te", format: str = "modelopt", **options: Any
) -> None:
    """Write a quantized checkpoint directory of a model that has llama.cpp's names.

    Layers get the names of Hugging Face, and each expert is a separate layer. Tensors that MODULE_NAMES does not list
    are left out. The unquantized checkpoint stays beside ``root`` in the folder "plain".

    Args:
        root: the directory to write.
        tensors: the tensors of gguf_files.model.
        recipe: the id of the recipe to quantize with.
        format: the format of the checkpoint, such as "modelopt".
        options: further arguments of convert.
    """
    found: dict[str, np.ndarray] = {}
    for name, x in tensors.items():
        parts = name.split(".")
        leaf = parts[2].removesuffix("_exps") if parts[0] == "blk" else ""
        if leaf not in MODULE_NAMES:
            continue
        prefix = f"model.layers.{parts[1]}.{MODULE_NAMES[leaf]}"
        if x.ndim == 2:
            found[f"{prefix}.weight"] = x
        else:
            found |= {f"{prefix.replace('mlp.', f'mlp.experts.{e}.')}.weight": part for e, part in enumerate(x)}
    config: dict[str, object] = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": EXPERTS}
    synthetic.write_model(root.with_name("plain"), config, found)
    convert(root.with_name("plain"), root, recipe, format=format, **options)


def stored(root: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint directory by name, as they are stored."""
    with Readers() as readers:
        return {name: readers.of(file).read(entry) for name, (file, entry) in inspect_checkpoint(root).tensors.items()}


def out_bytes(path: Path, name: str) -> bytes:
    """Return the stored bytes of the tensor ``name`` of a GGUF file."""
    entry = next(one for one in read_gguf(path).entries if one.name == name)
    return path.read_bytes()[entry.start : entry.start + entry.nbytes]
