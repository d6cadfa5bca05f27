"""Draw bars: the values that a quantized array uses, the quality of layers, and the error budget of a product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp4kit.formats import IntegerOrFloat
from fp4kit.layouts import unpacked, unswizzle_scales
from fp4kit.ops.matmul import ErrorBudget
from fp4kit.plot.style import BLUE, GREY, ORANGE, axes, without_frame
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import on_host


def histogram(q: Quantized, *, ax: Any = None) -> Any:
    """Draw how often a quantized array uses each value of its element format.

    The bars of the largest magnitude, where elements may have been clipped, are hatched. Values that the array does not
    use have bars of height 0. Codes of NaN and infinity are left out.

    Args:
        q: the quantized array, such as the result of fp4kit.quantize.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with one bar per finite value of the format. The height of a bar is a share of all elements.

    Raises:
        TypeError: q is not a Quantized.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"plot.histogram: q is {type(q).__name__}; needs a Quantized, the result of fp4kit.quantize")
    element = q.recipe.element
    values, shares = _shares(on_host(q, "plot.histogram"))
    shares, values = shares[np.isfinite(values)], values[np.isfinite(values)]
    ax = axes(ax, 8, 3.5)
    positions, few = np.arange(len(values)), len(values) <= 32
    bars = ax.bar(positions, shares, width=0.85, color=BLUE, edgecolor="black", linewidth=0.5 if few else 0)
    top = np.abs(values).max()
    for bar, value in zip(bars, values, strict=True):
        if abs(value) == top:
            bar.set(hatch="///", facecolor=ORANGE)
    ticks = positions[:: 1 if few else len(values) // 12]
    ax.set_xticks(ticks, [f"{values[i]:.3g}" for i in ticks])
    ax.set(xlabel=f"value of {element.name} (hatched: the largest)", ylabel="share of elements", title=q.recipe.id)
    without_frame(ax)
    return ax


def _shares(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, shares): the distinct values of the elements of q in ascending order, and the share of each."""
    element = q.recipe.element
    codes = unpacked(q.packed, element.packing)
    if isinstance(element, IntegerOrFloat) and q.block_scale is not None:
        scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
        blocks = codes.reshape(*scales.shape, q.recipe.block_size)
        counts = np.bincount((blocks | (16 * element.are_integers(scales)[..., None])).reshape(-1), minlength=32)
        all_values = np.concatenate([element.values_under(False), element.values_under(True)])
    else:
        counts, all_values = np.bincount(codes.reshape(-1), minlength=2**element.bits), element.values
    values, inverse = np.unique(all_values, return_inverse=True)
    return values, np.bincount(inverse, counts, len(values)) / max(codes.size, 1)


def layers(ratios: Mapping[str, float], *, ax: Any = None) -> Any:
    """Draw the SQNR of layers as bars, the worst layer on top.

    SQNR is the signal-to-quantization-noise ratio: 6 dB more halves the error. The bars of layers more than 1 dB below
    the median are hatched.

    Args:
        ratios: {name of the layer: SQNR in dB}, such as {name: fp4kit.compare(x, q).sqnr}. A layer without an error
            (inf) or without a signal (-inf) has a label, but no bar.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with the layers from the worst to the best.

    Raises:
        ValueError: there are no layers, or a ratio is NaN.
    """
    if not ratios:
        raise ValueError("plot.layers: ratios is empty; needs at least one layer")
    if missing := [name for name, ratio in ratios.items() if np.isnan(ratio)]:
        raise ValueError(f"plot.layers: the ratio of {missing[0]} is NaN; needs a number")
    names = sorted(ratios, key=lambda name: ratios[name])
    heights = [ratios[name] if np.isfinite(ratios[name]) else 0.0 for name in names]
    limit = float(np.median([ratios[name] for name in names])) - 1
    ax = axes(ax, 8, 1.2 + 0.26 * len(names))
    bars = ax.barh(np.arange(len(names)), heights, color=BLUE, edgecolor="black", linewidth=0.5)
    for bar, name in zip(bars, names, strict=True):
        if ratios[name] < limit:
            bar.set(hatch="///", facecolor=ORANGE)
    ax.bar_label(bars, [f"{ratios[name]:.1f}" for name in names], padding=3, fontsize=8)
    ax.set_yticks(np.arange(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("SQNR in dB (hatched: more than 1 dB below the median)")
    ax.margins(x=0.08)
    without_frame(ax)
    return ax


def product(budget: ErrorBudget, *, ax: Any = None) -> Any:
    """Draw the error sources of a quantized matrix product as bars, with the relative error of each source.

    Args:
        budget: the result of fp4kit.error_budget.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with one bar per source. The scale is logarithmic. Hatched bars are sums of other bars. A source
        without an error has the label "none" in place of a bar.

    Raises:
        TypeError: budget is not an ErrorBudget.
    """
    if not isinstance(budget, ErrorBudget):
        raise TypeError(f"plot.product: budget is {type(budget).__name__}; needs the result of fp4kit.error_budget")
    sources = {
        f"weight, {budget.recipe_w}": budget.weight,
        f"activation, {budget.recipe_x}": budget.activation,
        "interaction": budget.interaction,
        "quantization (sum)": budget.quantization,
        f"accumulation, {budget.unit}": budget.accumulation,
        f"rounding to {budget.out_dtype}": budget.rounding,
        "total (sum)": budget.total,
    }
    errors = [10 ** (-ratio / 20) for ratio in sources.values()]
    ax = axes(ax, 8, 3.2)
    bars = ax.barh(np.arange(len(errors)), errors, color=BLUE, edgecolor="black", linewidth=0.5)
    for bar, name in zip(bars, sources, strict=True):
        if name.endswith("(sum)"):
            bar.set(hatch="///", facecolor=GREY)
    labels = ["none" if error == 0 else f"{error:.1e}" for error in errors]
    ax.bar_label(bars, labels, padding=3, fontsize=8)
    ax.set_yticks(np.arange(len(errors)), list(sources))
    ax.invert_yaxis()
    smallest = min([error for error in errors if error > 0], default=1e-8)
    ax.set(xscale="log", xlim=(smallest / 3, max([*errors, smallest]) * 8))
    ax.set_xlabel("relative error of the product (hatched: sums)")
    without_frame(ax)
    return ax
