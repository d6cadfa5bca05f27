"""Test that llama.cpp itself runs converted GGUF files, with the values that fp4kit decodes."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint import ScaleSearch, convert
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.recipes import recipe
from fp4kit.storage.gguf_file import read_gguf

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


OTHERS = [("nvfp4-gguf", None), ("mxfp4-gguf", "mse"), ("nvfp4-te", None)]


@pytest.mark.parametrize(
    ("id", "objective"),
    [
        ("nvfp4-gguf", "mse"),
        ("mxfp4-gguf", None),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS),
    ],
)
def test_a_forward_pass_has_the_decoded_values(id: str, objective: str | None, tmp_path: Path) -> None:
    """llama.cpp computes nearly the same embedding from a converted file as from an unquantized file with its values.

    The embeddings differ slightly, because llama.cpp rounds activations to 8 bits before it multiplies them by FP4
    weights. The original weights give an embedding that differs at least 5 times as much. So does a layer that is
    scaled by 2.
    """
    values = llama_cpp.tensors()
    llama_cpp.write(tmp_path / "m.gguf", values)
    convert(tmp_path / "m.gguf", tmp_path / "o.gguf", id, search=ScaleSearch.of(objective))
    names = [e.name for e in read_gguf(tmp_path / "o.gguf").entries if e.dtype == id.partition("-")[0].upper()]
    assert len(names) == 7 * llama_cpp.LAYERS
    make = fp4kit.quantize if objective is None else lambda x, id: search_blocks(x, recipe(id), objective, None)
    decoded = {n: fp4kit.dequantize(make(x, id), np.float32) if n in names else x for n, x in values.items()}
    llama_cpp.write(tmp_path / "d.gguf", decoded)
    changed = decoded | {"blk.1.attn_v.weight": decoded["blk.1.attn_v.weight"] * np.float32(2)}
    llama_cpp.write(tmp_path / "c.gguf", changed)
    found, wanted, original, wrong = (llama_cpp.embedding(tmp_path / f"{name}.gguf") for name in "odmc")
    error = distance(found, wanted)
    assert 0 < error < 0.03
    assert distance(found, original) > 5 * error and distance(found, wrong) > 5 * error
