"""The panel of a Quantized: what it holds, how large, and what its codes and scales look like."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.display.panel import Panel, share
from fp4kit.display.statistics import Statistics, by_exponent, statistics
from fp4kit.quantized.container import PARTS, Quantized


def panel(q: Quantized) -> Panel:
    """Shapes, bits, ranges of scales, saturated values and zero blocks, and a histogram of the scales; reads all of
    q.
    """
    found = statistics(q)
    facts = [
        ("array", f"{q.shape} {q.dtype}, blocks along axis {q.axis}"),
        *((name, _held(getattr(q, name))) for name in PARTS if getattr(q, name) is not None),
        ("size", f"{q.nbytes:,} bytes, {q.bits_per_value:.3g} bits a value"),
        *_scale_facts(q, found),
        (
            "saturated",
            f"{share(found.saturated, found.values)} of values: {found.saturated:,} of magnitude {_largest(q)}",
        ),
    ]
    if found.blocks:
        facts.append(
            ("zero blocks", f"{share(found.zero_blocks, found.blocks)}: {found.zero_blocks:,} of {found.blocks:,}")
        )
    if found.nan:
        facts.append(("NaN", f"{found.nan:,} codes"))
    bars = by_exponent(found.scales, found.counts) if found.counts.sum() > 1 else ()
    return Panel(f"Quantized {q.recipe.id}", tuple(facts), heading="scales by exponent", bars=bars)


def text_of(q: Quantized) -> str:
    """The panel as text; one line of parts that hold no values."""
    panel = _panel_if_there(q)
    return repr(q) if panel is None else panel.text()


def html_of(q: Quantized) -> str | None:
    """The panel for a notebook; None of parts that hold no values, of which a notebook shows repr."""
    panel = _panel_if_there(q)
    return None if panel is None else panel.html()


def _panel_if_there(q: Quantized) -> Panel | None:
    """The panel; None of parts that hold no values of q: traced, deleted, on the meta device, what a tree library put
    there.
    """
    try:
        q.imported()  # checks the parts of a library that traces
        return panel(q)
    except (TypeError, ValueError, AttributeError, BufferError):
        return None


def _held(array: Any) -> str:
    """dtype, shape and library; the value of a single number on the host."""
    place = f" in {type(array).__module__.partition('.')[0]}"
    value = f": {float(array):.9g}" if isinstance(array, np.ndarray) and not array.ndim else ""
    return f"{array.dtype} {tuple(array.shape)}{place}{value}"


def _scale_facts(q: Quantized, found: Statistics) -> list[tuple[str, str]]:
    """The format and layout of block scales, and from where to where the scales go."""
    facts = (
        [] if q.block_scale is None else [("block scales", f"{q.recipe.scale}, one for {_block(q)}, {q.scale_layout}")]
    )
    finite = found.scales[np.isfinite(found.scales)]
    if finite.size and found.counts.sum() > 1:
        facts.append(("scales", f"{finite.min():.6g} to {finite.max():.6g}"))
    return facts


def _block(q: Quantized) -> str:
    rows, columns = q.recipe.block or (1, 1)
    return f"{rows} x {columns} elements"


def _largest(q: Quantized) -> str:
    """Two's complement goes one further below."""
    return f"{q.recipe.element.max:g} or more"
