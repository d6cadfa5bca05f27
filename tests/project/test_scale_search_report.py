"""Test the report of what a scale search gains: its table is current, and its figure shows the optimum that a search
finds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import fp4kit

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import minilm  # noqa: E402
import scale_search_report as report  # noqa: E402

RESULTS = BENCHMARKS / "results"
RECORD = json.loads((RESULTS / "scale-search.json").read_text())


def test_the_table_is_that_of_the_record() -> None:
    assert (RESULTS / "scale-search.md").read_text() == report.markdown(RECORD)
    assert report.plot and (RESULTS / "scale-search.svg").exists()


def test_the_figure_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert report.write(RECORD, tmp_path)[2].read_text().startswith("<?xml")


def test_the_searched_scale_is_the_lowest_point_of_the_figure() -> None:
    """search_scales, called with the recorded block and tensor amax, returns the scale at the lowest point."""
    block = RECORD["block"]
    values = np.float32(block["values"])[None]
    found = fp4kit.search_scales(values, "nvfp4-modelopt-static", tensor_amax=block["amax"])
    q = fp4kit.quantize(values, "nvfp4-modelopt-static", tensor_amax=block["amax"], block_amax=found)
    scale = fp4kit.formats.E4M3.values[q.block_scale[0, 0]] * np.float64(q.tensor_scale)
    assert scale == block["scales"]["mse"]
    losses = {way: report.losses(block["values"], one) for way, one in block["scales"].items()}
    assert losses["mse"] < losses["4over6"] and losses["mse"] < losses["amax"]


def test_every_layer_gains() -> None:
    for layer in RECORD["layers"]:
        amax, wide, mse, weighted = (report.decibels(layer["weights"], way) for way in report.WAYS)
        assert amax < wide < mse and weighted < mse, layer["name"]


def test_word_pieces(tmp_path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\nscale\n##s\n.\nun\n##known\n")
    assert minilm.tokens_of("Scales. Unknown scale, été", tmp_path) == [1, 2, 3, 4, 5, 1, 0, 0]


def test_the_model_in_numpy_gives_its_layers_what_they_multiply() -> None:
    rng, shapes = np.random.default_rng(0), {"word": (9, 24), "position": (128, 24), "token_type": (2, 24)}
    tensors = {
        f"embeddings.{name}_embeddings.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    layer = "encoder.layer.0"
    linear = dict.fromkeys([f"{layer}.attention.self.{name}" for name in ("query", "key", "value")], (24, 24))
    linear |= {f"{layer}.attention.output.dense": (24, 24), f"{layer}.intermediate.dense": (96, 24)}
    linear |= {f"{layer}.output.dense": (24, 96)}
    for name, shape in linear.items():
        tensors |= {
            f"{name}.weight": rng.standard_normal(shape, np.float32),
            f"{name}.bias": np.zeros(shape[0], np.float32),
        }
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        tensors |= {
            f"{name}.LayerNorm.weight": np.ones(24, np.float32),
            f"{name}.LayerNorm.bias": np.zeros(24, np.float32),
        }
    seen: dict[str, np.ndarray] = {}
    minilm.run(tensors, list(rng.integers(0, 9, 200)), seen.__setitem__)
    assert {name: x.shape for name, x in seen.items()} == {
        f"{name}.weight": (128, shape[1]) for name, shape in linear.items()
    }
    assert minilm.linear_names(tensors) == list(seen)
    first = seen[f"{layer}.attention.self.query.weight"]
    np.testing.assert_allclose(first.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(first.std(axis=1), 1, atol=1e-5)
