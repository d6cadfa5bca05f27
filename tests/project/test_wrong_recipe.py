"""Test the experiment of benchmarks/wrong_recipe.py: its gradients, its comparison, and its stored record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import wrong_recipe  # noqa: E402

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
