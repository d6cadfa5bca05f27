"""Define what all pictures share: the making of Axes, and colors, marks and hatches that differ in gray too."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#8c8c8c"  # of Okabe and Ito, for color-blind readers
INK, PALE, PINK, PURPLE = "#222222", "#dddddd", "#cc79a7", "#8c4799"
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE = {  # matplotlib's rcParams for the notebooks
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "grid.color": "#eeeeee",
    "legend.frameon": False,
}


def axes(ax: Any, width: float, height: float) -> Any:
    """Return ``ax`` or, if it is None, the Axes of a new figure of width x height inches."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('fp4kit.plot needs matplotlib; run pip install "fp4kit[plot]"') from error
    return plt.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def without_frame(ax: Any) -> None:
    """Hide the upper and right lines of the frame around the Axes ``ax``."""
    ax.spines[["top", "right"]].set_visible(False)
