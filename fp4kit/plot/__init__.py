"""Draw pictures of formats, blocks, recipes and layers with matplotlib. Import it by name: import fp4kit.plot.

Every function takes `ax`, the matplotlib Axes to draw on; None makes a new figure. It returns the Axes. The pictures
can be read without color: colors differ in brightness, and lines, bars and marks also differ in dashes, hatches and
shapes.

matplotlib comes with the extra `plot`: pip install "fp4kit[plot]".

Examples:
    >>> import fp4kit.plot, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    >>> ax = fp4kit.plot.block(x, "nvfp4-te", (0, 0))  # doctest: +SKIP
"""

from fp4kit.plot.bars import histogram, layers, product
from fp4kit.plot.curves import error_against_scale, number_line
from fp4kit.plot.tables import block, compare_recipes

__all__ = [
    "block",
    "compare_recipes",
    "error_against_scale",
    "histogram",
    "layers",
    "number_line",
    "product",
]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no others."""
    return list(__all__)
