"""Build the panel of a Quantized: its arrays, its size, and statistics of its codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.display.panel import Panel, share
from fp4kit.display.statistics import Statistics, by_exponent, statistics
from fp4kit.quantized.container import PARTS, Quantized


def panel(q: Quantized) -> Panel:
    """Read all codes and scales of a Quantized, and return its panel."""
    found = statistics(q)
    facts = [
        ("array", f"{q.shape} {q.dtype}, blocks along axis {q.axis}"),
        *((name, _held(getattr(q, name))) for name in PARTS if getattr(q, name) is not None),
        ("size", f"{q.nbytes:,} bytes, {q.bits_per_value:.3g} bits per value"),
        *_scale_facts(q, found),
        (
            "largest code",
            f"{share(found.saturated, found.values)} of values: {found.saturated:,} of magnitude {_largest(q)}",
        ),
    ]
    if found.blocks:
        facts.append(
            ("zero blocks", f"{share(found.zero_blocks, found.blocks)}: {found.zero_blocks:,} of {found.blocks:,}")
        )
    if found.nan:
        facts.append(("NaN", f"{found.nan:,} codes"))
    if found.saturated and isinstance(q.tensor_amax, np.ndarray) and not q.tensor_amax.any():
        facts.append(("note", "codes are not zero although tensor_amax is 0: x holds NaN, or tensor_amax was passed"))
    bars = by_exponent(found.scales, found.counts) if found.counts.sum() > 1 else ()
    return Panel(f"Quantized {q.recipe.id}", tuple(facts), heading="scales by exponent", bars=bars)


def text_of(q: Quantized) -> str:
    """Return the panel of a Quantized as text, for print."""
    # If the arrays hold no values, for example because JAX traces them, return repr(q).
    panel = _panel_if_there(q)
    return repr(q) if panel is None else panel.text()


def html_of(q: Quantized) -> str | None:
    """Return the panel of a Quantized as HTML, for notebooks."""
    # If the arrays hold no values, for example because JAX traces them, return None; a notebook then shows repr(q).
    panel = _panel_if_there(q)
    return None if panel is None else panel.html()


def _panel_if_there(q: Quantized) -> Panel | None:
    """Return the panel of a Quantized, or None if its arrays hold no values."""
    try:
        q.imported()  # raises for traced arrays
        return panel(q)
    except (TypeError, ValueError, AttributeError, BufferError):
        return None


def _held(array: Any) -> str:
    """Return a description of an array: dtype, shape and library. For a scalar on the host, also its value."""
    place = f" in {type(array).__module__.partition('.')[0]}"
    value = f": {float(array):.9g}" if isinstance(array, np.ndarray) and not array.ndim else ""
    return f"{array.dtype} {tuple(array.shape)}{place}{value}"


def _scale_facts(q: Quantized, found: Statistics) -> list[tuple[str, str]]:
    """Return (name, text) pairs about the scales of q, for its panel."""
    facts = (
        [] if q.block_scale is None else [("block scales", f"{q.recipe.scale}, one per {_block(q)}, {q.scale_layout}")]
    )
    finite = found.scales[np.isfinite(found.scales)]
    if finite.size and found.counts.sum() > 1:
        facts.append(("scales", f"{finite.min():.6g} to {finite.max():.6g}"))
    return facts


def _block(q: Quantized) -> str:
    """Return the size of a block of q's recipe as text, rows x columns: "1 x 32 elements"."""
    rows, columns = q.recipe.block or (1, 1)
    return f"{rows} x {columns} elements"


def _largest(q: Quantized) -> str:
    """Return text for the magnitudes that the row "largest code" counts, such as "6 or more" for E2M1."""
    return f"{q.recipe.element.max:g} or more"
