"""Draw the pictures of docs/guides/look-at-numbers.md into docs/images: python tools/plots.py

Every picture is drawn for the two widths of tools/pictures.py. Coordinates in the SVG files depend on the release of
matplotlib. Therefore each file holds a digest of the data that it shows, and a test compares the digests.
"""

from __future__ import annotations

import hashlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import ml_dtypes
import numpy as np

import fp4kit
import fp4kit.plot

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pictures import NARROW, WIDE

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def weights() -> np.ndarray:
    """Return the bfloat16 weights (64, 256) that most pictures show."""
    return (np.random.default_rng(0).standard_normal((64, 256)) * 0.02).astype(ml_dtypes.bfloat16)


def number_line() -> Any:
    """Draw seven numbers and the E2M1 values that they are rounded to."""
    return fp4kit.plot.number_line(fp4kit.formats.E2M1, [-5.2, -2.5, 0.3, 1.25, 2.4, 5, 7.1])


def block() -> Any:
    """Draw one block through the steps of nvfp4-te."""
    return fp4kit.plot.block(weights(), "nvfp4-te", (3, 5))


def two_producers() -> Any:
    """Draw one block through the steps of two producers of NVFP4, in which eight codes differ."""
    w = (np.random.default_rng(7).standard_normal((128, 512)) * 0.02).astype(ml_dtypes.bfloat16)
    return fp4kit.plot.block(w, ["nvfp4-te", "nvfp4-compressed-tensors"], (59, 128))


def error_against_scale() -> Any:
    """Draw the error of one block against its scale, with the choice of nvfp4-te and of 4over6."""
    recipes = ["nvfp4-te", "nvfp4-te-4over6-mse-448"]
    return fp4kit.plot.error_against_scale(weights()[3, :16], recipes, tensor_amax=0.08)


def compare_recipes() -> Any:
    """Draw the share of codes that differ between five recipes."""
    ids = ["nvfp4-te", "nvfp4-flashinfer", "nvfp4-compressed-tensors", "nvfp4-modelopt", "mxfp4-ocp"]
    return fp4kit.plot.compare_recipes(fp4kit.compare_recipes(weights(), ids))


def histogram() -> Any:
    """Draw how often each E2M1 value occurs."""
    return fp4kit.plot.histogram(fp4kit.quantize(weights(), "nvfp4-te"))


PLOTS: dict[str, Callable[[], Any]] = {
    "number-line": number_line,
    "block": block,
    "two-producers": two_producers,
    "error-against-scale": error_against_scale,
    "compare-recipes": compare_recipes,
    "histogram": histogram,
}


def digest(ax: Any) -> str:
    """Return a digest of the data that an Axes shows: lines, bars, images and texts."""
    data = [np.round(line.get_xydata().astype(float), 9).tolist() for line in ax.lines]
    data += [[round(bar.get_height(), 9), round(bar.get_width(), 9)] for bar in ax.patches]
    data += [np.round(np.asarray(image.get_array(), float), 9).tolist() for image in ax.images]
    data += [text.get_text() for text in ax.texts]
    return hashlib.sha256(repr(data).encode()).hexdigest()


def fit(ax: Any, width: int) -> None:
    """Change the figure of an Axes so that it is `width` pixels wide, and its texts have at least 12 pixels."""
    figure = ax.figure
    height = figure.get_size_inches()[1]
    for found in figure.findobj(matplotlib.text.Text):
        found.set_fontsize(max(found.get_fontsize(), 9.0))  # in points: 12 pixels
    for title in (ax.title, ax._left_title):
        parts = title.get_text().split("\n")
        wrapped = [line for part in parts for line in textwrap.wrap(part, (width - 190) // 7 if ax.images else 40)]
        height += 0.17 * (len(wrapped) - len(parts))
        title.set_text("\n".join(wrapped))
    ax.set_xlabel("\n".join(textwrap.wrap(ax.get_xlabel(), int(width / 8.5))))
    if width == NARROW:
        ax.tick_params(axis="x", which="both", labelrotation=90)
    if ax.images and len(ax.texts) >= 16 * len(ax.get_yticks()):  # 16 columns are too narrow for upright numbers
        for found in ax.texts:
            found.set_rotation(90)
        names = [label.get_text().partition(", ") for label in ax.get_yticklabels()]
        recipes = list(dict.fromkeys(recipe for _, _, recipe in names))  # "" first, for steps that recipes share
        ax.set_yticks(ax.get_yticks(), [f"{step} {recipes.index(r) or ''}".rstrip() for step, _, r in names])
        height += 0.3 * len(names)
    figure.set_layout_engine("constrained", w_pad=0.08)
    figure.set_size_inches(width / 96, height)


def main() -> None:
    """Draw every picture of PLOTS, and write it to docs/images as two SVG files."""
    matplotlib.use("Agg")
    # Letters as text, not as outlines: the files are a fifth as large, and readers can select and search the text.
    matplotlib.rcParams |= {"svg.hashsalt": "fp4kit", "svg.fonttype": "none"}
    for name, draw in PLOTS.items():
        for ending, width in (("", WIDE), ("-narrow", NARROW)):
            ax = draw()
            data = digest(ax)
            fit(ax, width)
            ax.figure.savefig(IMAGES / f"plot-{name}{ending}.svg", metadata={"Date": None, "Description": data})


if __name__ == "__main__":
    main()
