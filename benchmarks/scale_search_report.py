"""Write the table and the figure of a record of bench_scale_search.py.

    python benchmarks/scale_search_report.py benchmarks/results/scale-search.json

A *way* is a method of choosing block scales, one of WAYS.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import records
from records import Record, head_text

from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.cli.output import markdown as table
from fp4kit.formats import E2M1, E4M3

WAYS = ("amax", "4over6", "mse", "weighted mse")
COLOURS = {
    "amax": "#D55E00",
    "4over6": "#009E73",
    "mse": "#0072B2",
    "weighted mse": "#CC79A7",
}  # the notebooks use these colors too
MARKS = {"amax": "o", "4over6": "s", "mse": "D", "weighted mse": "^"}


def decibels(sums: Mapping[str, float], way: str) -> float:
    """Return the SQNR in dB of one way to choose scales.

    sums: {"signal" or a way: sum of squares}, of the signal and of each way's error.
    """
    return sqnr_db(sums["signal"], sums[way])


def total(record: Record, of: str) -> dict[str, float]:
    """Return {"signal" or a way: sum of squares over all layers}.

    of: "weights" to add up the errors of weights, "outputs" to add up the errors of layer outputs.
    """
    return {key: sum(layer[of][key] for layer in record["layers"]) for key in ("signal", *WAYS)}


def mean(record: Record, of: str, way: str) -> float:
    """Return the mean over layers of the SQNR in dB of one way to choose scales.

    of: "weights" for the SQNR of weights, "outputs" for the SQNR of layer outputs.
    """
    return float(np.mean([decibels(layer[of], way) for layer in record["layers"]]))


def heading(record: Record) -> str:
    """Return model, versions, commit and date of the record as one line."""
    values = sum(layer["shape"][0] * layer["shape"][1] for layer in record["layers"])
    model = f"{record['model']}, {len(record['layers'])} layers, {values:,} weights"
    return f"{model}, {head_text(record)}"


def summary(record: Record) -> str:
    """Return the README's table: the SQNR of weights and of layer outputs for each way."""
    rows = [
        ("weights, all layers", *(f"{decibels(total(record, 'weights'), way):.2f}" for way in WAYS)),
        ("weights, mean over layers", *(f"{mean(record, 'weights', way):.2f}" for way in WAYS)),
        ("outputs on text, mean over layers", *(f"{mean(record, 'outputs', way):.2f}" for way in WAYS)),
    ]
    return f"{heading(record)}.\n\n{table(('SQNR, dB', *WAYS), rows)}"


def markdown(record: Record) -> str:
    """Return the Markdown page of a record: its head and a table of the SQNR of every way."""
    rows = []
    for layer in record["layers"]:
        name = layer["name"].removeprefix("encoder.").removesuffix(".weight")
        found = [[f"{decibels(layer[of], way):.2f}" for way in WAYS] for of in ("weights", "outputs")]
        rows.append((name, "x".join(map(str, layer["shape"])), *found[0], *found[1]))
    columns = ("layer", "shape", *WAYS, *(f"outputs: {way}" for way in WAYS))
    figure = "![error of a block, SQNR per layer](scale-search.svg)"
    about = "This page lists the SQNR of each layer of the demo model in NVFP4, for four ways to choose block scales."
    lines = ("# Search of block scales", "", about, "", summary(record), "", figure, "", table(columns, rows))
    return "\n".join(lines) + "\n"


# ---- the figure ----


def losses(values: Any, scales: Any) -> np.ndarray:
    """Return the sum of squared errors of blocks under given scales.

    Each value is rounded to the nearest E2M1 value times its block's scale.

    Args:
        values: blocks of shape (..., 16)
        scales: scales of shape (...); they broadcast against the leading axes of `values`
    """
    x = np.abs(np.float64(values))[..., None]
    grid = np.float64(E2M1.magnitudes) * np.float64(scales)[..., None, None]
    found: np.ndarray = np.square(np.abs(x - grid).min(axis=-1)).sum(axis=-1)
    return found


def plot(record: Record, path: Path) -> None:
    """Plot the error of one block as a function of its scale, and the SQNR of every layer's weights and outputs."""
    plt = records.pyplot(path)
    figure, (left, *others) = plt.subplots(1, 3, figsize=(12, 5.6), width_ratios=(5, 3, 3), layout="constrained")
    plot_block(left, record["block"])
    plot_layers(others, record)
    records.save(figure, path)


def plot_block(axes: Any, block: Record) -> None:
    """Plot the error of one block as a function of its scale, and mark the scale that each way chose.

    block["amax"] is the amax of the whole tensor.
    """
    usual = np.abs(block["values"]).max() / 6
    energy = np.square(block["values"]).sum()
    ends = 0.7, 1.75
    fine = np.linspace(*ends, 2400)
    axes.plot(fine, 100 * np.sqrt(losses(block["values"], fine * usual) / energy), color="#999999", lw=0.9, zorder=1)
    codes = np.float64(E4M3.values[1:127]) * block["amax"] / (6 * 448) / usual
    codes = codes[(codes > ends[0]) & (codes < ends[1])]
    axes.plot(
        codes,
        100 * np.sqrt(losses(block["values"], codes * usual) / energy),
        ".",
        color="#222222",
        ms=5,
        label="E4M3 scales",
    )
    for way, scale in block["scales"].items():
        error = 100 * np.sqrt(losses(block["values"], scale) / energy)
        axes.plot(
            scale / usual,
            error,
            MARKS[way],
            color=COLOURS[way],
            ms=9,
            mfc="none",
            mew=1.8,
            label=f"{way}: {error:.1f} %",
        )
    axes.set(xlabel="scale of the block / (amax / 6)", ylabel="RMS error of the block, %", xlim=ends)
    axes.set_title(f"One block of {block['name'].removesuffix('.weight')}", loc="left")
    axes.legend(frameon=False)


def plot_layers(pair: Any, record: Record) -> None:
    """Plot the SQNR of every layer: weights on the first of a pair of matplotlib axes, outputs on the second."""
    rows = np.arange(len(record["layers"]))[::-1]
    names = [layer["name"].removeprefix("encoder.layer.").removesuffix(".weight") for layer in record["layers"]]
    for axes, of, labels in zip(pair, ("weights", "outputs"), (names, []), strict=True):
        _plot_ways(axes, record, rows, of)
        axes.set_yticks(rows, labels)
        axes.tick_params(axis="y", labelsize=6)


def _plot_ways(axes: Any, record: Record, rows: np.ndarray, of: str) -> None:
    """Plot the SQNR of every way in every layer. Each layer is one row of the plot, and each way has its own mark.

    Args:
        axes: the matplotlib axes to plot on
        record: the record
        rows: the vertical position of each layer
        of: "weights" or "outputs"
    """
    for way in WAYS:
        found = [decibels(layer[of], way) for layer in record["layers"]]
        axes.plot(
            found, rows, MARKS[way], color=COLOURS[way], ms=4, mfc="none", label=f"{way}: {np.mean(found):.2f} dB"
        )
    axes.set(xlabel=f"SQNR of the {of}, dB")
    axes.grid(True, color="#EEEEEE")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=7)


def write(record: Record, folder: Path) -> list[Path]:
    """Write record, page and plot into a folder. Return the paths of the written files."""
    return records.write(record, folder, "scale-search", markdown(record), plot)


if __name__ == "__main__":
    records.rewrite(write)
