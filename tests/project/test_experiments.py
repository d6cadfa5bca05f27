"""Test the experiments of benchmarks/: their stored records, gradients and figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import fp4kit

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import scale_search_report as report  # noqa: E402
import wrong_recipe  # noqa: E402

RESULTS = BENCHMARKS / "results"
RECORD = json.loads((RESULTS / "scale-search.json").read_text())


def test_the_table_is_that_of_the_record() -> None:
    assert (RESULTS / "scale-search.md").read_text() == report.markdown(RECORD)
    assert report.plot and (RESULTS / "scale-search.svg").exists()


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


WORDS = ["scale", "block", "round", "tensor", "nibble", "codes", "search", "layer", "amax", "format", "value"]


def test_a_sample_is_a_context_and_the_letter_after_it():
    found = wrong_recipe.samples_of(["abc"])
    assert found.contexts[:, -2:].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert found.letters.tolist() == [1, 2, 3, 0]


def test_gradients_are_the_derivatives_of_the_loss():
    samples = wrong_recipe.samples_of(WORDS)
    weights = {name: w.astype(np.float64) for name, w in wrong_recipe.initial(np.random.default_rng(0)).items()}

    def loss(changed: dict[str, np.ndarray]) -> float:
        logs = wrong_recipe.forward(changed, samples.contexts)[3]
        return -logs[np.arange(len(logs)), samples.letters].mean()

    for name, gradient in wrong_recipe.gradients(weights, samples).items():
        step = 1e-6 * gradient / np.linalg.norm(gradient)
        slope = (loss(weights | {name: weights[name] + step}) - loss(weights | {name: weights[name] - step})) / 2e-6
        assert slope == pytest.approx(np.linalg.norm(gradient), rel=1e-4)


def test_a_server_with_the_recipe_of_training_computes_what_training_saw():
    found = wrong_recipe.measured(WORDS, ["bfloat16", "nvfp4-te", "mxfp4-ocp"], seeds=1, steps=2)
    for name in ("difference", "divergence"):
        numbers = np.array(found[name])
        assert numbers.shape == (1, 3, 3)
        assert (np.abs(numbers[:, range(3), range(3)]) == 0).all() and (numbers + np.eye(3) > 0).all()


def test_stored_record_has_all_pairs_and_its_date():
    record = json.loads((ROOT / "benchmarks/results/wrong-recipe.json").read_text(encoding="utf-8"))
    assert tuple(record["recipes"]) == wrong_recipe.RECIPES and {"versions", "commit", "date"} <= record.keys()
    n = len(record["recipes"])
    for name in ("loss", "divergence", "difference"):
        assert np.array(record[name]).shape == (wrong_recipe.SEEDS, n, n) and np.isfinite(record[name]).all()
