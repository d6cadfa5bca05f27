"""Draw the pictures of README.md and docs/ into docs/images: python tools/pictures.py

Each picture is an SVG file. It is computed from fp4kit or from a committed benchmark record, so a test can check that
it is current. Every picture is drawn twice, for columns of WIDE and of NARROW pixels, because text that shrinks with
the column becomes unreadable; tools/mkdocs_hooks.py shows the one that fits. Colors follow the reader's light or dark
setting. Differences also have a thick border and bold text, so that they are visible without color.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
WIDE, NARROW = 660, 372  # the site's column at 960 px and more, and at 420 px

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.title { font-size: 15px; font-weight: 600 }
.number { font-family: ui-monospace, monospace; font-size: 12px; text-anchor: middle }
.end { text-anchor: end }
.middle { text-anchor: middle }
.cell { fill: #f6f8fa; stroke: #d1d9e0 }
.differs { fill: #ffd8a8; stroke: #b35900; stroke-width: 2.5 }
.bold { font-weight: 700 }
.ours { fill: #0b69a3 }
.peer { fill: #b9c0c8; stroke: #59636e }
.line { stroke: #59636e; fill: none }
.limit { stroke: #b35900; stroke-dasharray: 5 3 }
.paper { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .cell { fill: #151b23; stroke: #3d444d }
  .differs { fill: #6b3a00; stroke: #ffab57 } .ours { fill: #58a6ff } .peer { fill: #3d444d; stroke: #9198a1 }
  .line { stroke: #9198a1 } .limit { stroke: #ffab57 } .paper { fill: #0d1117 }
}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return an SVG text element with the text `words`, which is escaped, at (x, y) in pixels.

    kind: the names of CSS classes of STYLE, separated by spaces; "" for none.
    """
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def lines(x: float, y: float, words: str, kind: str, width: float) -> list[str]:
    """Return SVG text elements with the text `words`, wrapped to about `width` pixels; the first is at (x, y)."""
    letter = {"title": 9.2, "small": 6.9}[kind.split()[0]]
    wrapped = textwrap.wrap(words, int(width / letter))
    return [text(x, y + 17 * n, part, kind) for n, part in enumerate(wrapped)]


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return an SVG rectangle with rounded corners, whose top left corner is at (x, y) in pixels.

    kind: the names of CSS classes of STYLE, separated by spaces.
    """
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    """Return an SVG line from (x1, y1) to (x2, y2) in pixels.

    kind: the names of CSS classes of STYLE, separated by spaces.
    """
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def picture(width: int, heading: str, caption: str, title: str, height: float, parts: Iterable[str]) -> str:
    """Return an SVG document of this width in pixels, made of a heading, the SVG elements `parts`, and a caption.

    title: the text that screen readers read.
    height: the height of `parts`, whose y begins at 0, below the heading.
    """
    above, below = (lines(12, 0, words, kind, width - 24) for words, kind in ((heading, "title"), (caption, "small")))
    top = 17 * len(above) + 16
    parts = [
        '<g transform="translate(0 24)">',
        *above,
        f'</g>\n<g transform="translate(0 {top})">',
        *parts,
        f'</g>\n<g transform="translate(0 {top + height + 22:g})">',
        *below,
        "</g>",
    ]
    height = round(top + height + 17 * len(below) + 16)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        f"{box(0, 0, width, height, 'paper')}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def two_producers(width: int) -> str:
    """Return the SVG picture of one block of sixteen weights, quantized by two NVFP4 producers."""
    weights = (np.random.default_rng(7).standard_normal((128, 512)) * 0.02).astype(ml_dtypes.bfloat16)
    x = weights.reshape(-1, 16)  # the matrix of README's example
    pair = [("Transformer Engine", "nvfp4-te"), ("compressed-tensors", "nvfp4-compressed-tensors")]
    found = [fp4kit.quantize(x, recipe) for _, recipe in pair]
    values = [fp4kit.formats.E2M1.decode(fp4kit.unpack(q.packed)) for q in found]
    row = int((values[0] != values[1]).sum(axis=1).argmax())
    scales = [int(q.block_scale[row, 0]) for q in found]
    columns = 16 if width == WIDE else 8
    step = 37 if width == WIDE else 39
    parts, y = [], 0
    for start in range(0, 16, columns):
        y += 18
        for i in range(columns):
            parts.append(text(12 + (i + 0.5) * step, y, f"{1000 * float(x[row, start + i]):.0f}", "number"))
        is_last = start + columns == 16
        if is_last:
            parts.append(text(12 + columns * step + 4, y, "scale", "small"))
        for n, ((name, recipe), value) in enumerate(zip(pair, values, strict=True)):
            parts.append(text(12, y + 22, f"{name}: {recipe}", "small"))
            for i in range(columns):
                differs = values[0][row, start + i] != values[1][row, start + i]
                parts.append(box(13 + i * step, y + 28, step - 2, 30, "differs" if differs else "cell"))
                kind = "number bold" if differs else "number"
                parts.append(text(12 + (i + 0.5) * step, y + 47, f"{float(value[row, start + i]):g}", kind))
            if is_last:
                kind = "differs" if scales[0] != scales[1] else "cell"
                parts.append(box(16 + columns * step, y + 28, step + 4, 30, kind))
                parts.append(text(18 + (columns + 0.5) * step, y + 47, f"{scales[n]:#04x}", "number bold"))
            y += 54
        y += 14
    differs = values[0] != values[1]
    codes, equal = int(differs[row].sum()), float((~differs.any(axis=1)).mean())
    caption = (
        f"Above the cells: weights × 1000. Each cell is the value of a 4-bit code of E2M1. {codes} of 16 codes and the"
        " scale byte differ (marked), because compressed-tensors rounds its tensor scale to bfloat16. Of the"
        f" {len(x):,} blocks of the example above, this one differs most: in {equal:.0%}, all codes are equal."
    )
    title = (
        f"The block of sixteen weights that differs most between two producers of NVFP4: {codes} of 16 codes and the"
        f" scale byte; in {equal:.0%} of {len(x):,} blocks, all codes are equal"
    )
    heading = "The same sixteen bfloat16 weights can become different NVFP4 bytes"
    return picture(width, heading, caption, title, y - 6, parts)


SPEED = (  # (operation and recipe of a row in the GPU record, label in the picture)
    ("quantize", "mxfp4-ocp", "quantize MXFP4"),
    ("quantize, amax given", "nvfp4-torchao", "quantize NVFP4, amax given"),
    ("quantize with amax", "nvfp4-torchao", "quantize NVFP4 with amax"),
    ("quantize", "mxfp8-torchao-rceil", "quantize MXFP8"),
    ("dequantize", "mxfp4-ocp", "dequantize MXFP4"),
)


def speed(width: int) -> str:
    """Return a bar chart of the times of some operations, in fp4kit and in the fastest other library.

    Each time is divided by the time of a copy that moves as many bytes.
    """
    record = json.loads((RESULTS / "h200.json").read_text())
    rows = {(row["operation"], row["recipe"]): row for row in record["rows"] if row["dtype"] == "bfloat16"}
    largest = 6.2
    left = 206 if width == WIDE else 12
    unit, above = (width - left - 14) / largest, 0 if left > 12 else 20
    parts, step = [], 46 + above
    for n, (operation, recipe, words) in enumerate(SPEED):
        row: dict[str, Any] = rows[operation, recipe]
        y = 8 + n * step + above
        ours = row["us"] / row["copy_us"]
        peer, time = min(row["peers"].items(), key=lambda pair: pair[1])
        theirs = time / row["copy_us"]
        parts.append(text(left, y - 6, words) if above else text(left - 8, y + 20, words, "end"))
        parts.append(box(left, y, ours * unit, 14, "ours"))
        parts.append(text(left + ours * unit + 6, y + 12, f"fp4kit {ours:.2f}", "small"))
        parts.append(box(left, y + 17, min(theirs, largest) * unit, 14, "peer"))
        more = f"{peer} {theirs:.1f}" if theirs <= largest else f"→ {peer} {theirs:.0f}"
        at = left + min(theirs, largest) * unit
        parts.append(line(left + unit, y - 4, left + unit, y + 36, "limit"))
        inside = theirs > largest / 2
        parts.append(text(at - 6 if inside else at + 6, y + 29, more, "small end" if inside else "small"))
    bottom = len(SPEED) * step
    parts.append(line(left, 0, left, bottom))
    parts.append(text(left + unit, bottom + 16, "1 = a copy", "small middle"))
    caption = (
        f"16384 x 16384 bfloat16, {record['date']}, commit {record['commit']}; the peer is the fastest of those"
        " installed (benchmarks/results/h200.md)."
    )
    heading = f"Time on one {record['device']}, as a multiple of a copy of the same bytes"
    title = "Times of fp4kit and of the fastest other library, relative to a copy"
    return picture(width, heading, caption, title, bottom + 18, parts)


def element(width: int) -> str:
    """Return the SVG picture of E2M1's number line, with the code of each non-negative value."""
    left, unit, y = 28, (width - 62) / 6, 40
    parts = [line(left, y, width - 12, y)]
    for code in range(8):
        value = float(fp4kit.formats.E2M1.decode(code))
        x = left + value * unit
        below = 26 + 16 * (width == NARROW and code % 2)  # neighboring codes would touch
        parts += [
            line(x, y - 8, x, y + 8),
            text(x, y - 16, f"{value:g}", "number bold"),
            text(x, y + below, f"{code:04b}", "number"),
        ]
    return picture(
        width,
        "E2M1: eight magnitudes and a sign make sixteen codes of four bits",
        "Values lie closer together near 0. Everything above 6 becomes 6 (it saturates).",
        "The number line of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6",
        y + 32 + 16 * (width == NARROW),
        parts,
    )


def block(width: int) -> str:
    """Return the SVG picture of a row that is cut into blocks of sixteen elements with one scale each."""
    parts, step = [], (width - 12) / 3
    cell = (step - 12) / 16
    for b in range(3):
        x = 12 + b * step
        parts += [box(x, 0, 16 * cell, 30, "cell")]
        parts += [line(x + cell * i, 0, x + cell * i, 30) for i in range(1, 16)]
        middle = x + 8 * cell
        parts += [line(middle, 30, middle, 48), box(middle - 30, 48, 60, 28, "differs")]
        parts.append(text(middle, 67, "scale", "number"))
    return picture(
        width,
        "A row of 48 elements in NVFP4: three blocks of 16, one scale byte per block",
        "MXFP4 has blocks of 32. A 16 x 16 block has one scale, so that the transposed matrix has the same scales.",
        "A row of 48 elements, cut into three blocks of 16 with one scale each",
        78,
        parts,
    )


def tensor_scale(width: int) -> str:
    """Return the SVG picture of the two levels of scales of NVFP4: block scales and the tensor scale."""
    steps = (
        ("4-bit value", "E2M1", "6"),
        ("× block scale", "E4M3", "448"),
        ("× tensor scale", "float32", "3.34e-05"),
        ("= weight", "", "0.0898"),
    )
    parts, columns = [], 4 if width == WIDE else 2
    step = (width - 12) / columns
    for n, (words, kind, example) in enumerate(steps):
        x, y = 12 + n % columns * step, n // columns * 84
        parts += [box(x, y, step - 12, 72, "differs" if n == 2 else "cell")]
        middle = x + step / 2 - 6
        parts += [text(middle, y + 22, words, "middle"), text(middle, y + 40, kind, "small middle")]
        parts.append(text(middle, y + 60, example, "number bold"))
    return picture(
        width,
        "NVFP4 has two levels of scales; both multiply when a value is decoded",
        "MXFP4 has block scales only: powers of two, stored as E8M0.",
        "value times block scale times tensor scale gives the weight",
        84 * 4 / columns - 10,
        parts,
    )


def recipe(width: int) -> str:
    """Return the SVG picture of the steps of a recipe, with an example of how producers differ at each step."""
    steps = (
        ("amax", "the largest magnitude", "with or without NaN"),
        ("scale", "amax / 6, as a byte", "floor, ceil, nearest"),
        ("quotient", "element / scale", "or × a rounded reciprocal"),
        ("code", "the nearest 4-bit value", "ties: even, zero, away"),
        ("decode", "value × scales", "order and dtype vary"),
    )
    parts, step = [], (width - 12) / 5
    for n, (name, *sentences) in enumerate(steps):
        if width == WIDE:
            x = 12 + n * step
            parts += [box(x, 0, step - 12, 116, "cell"), text(x + step / 2 - 6, 22, name, "middle bold")]
            for y, words in zip((46, 86), sentences, strict=True):
                parts += lines(x + step / 2 - 6, y, words, "small middle", step - 12)
            if n < 4:
                parts.append(line(x + step - 12, 58, x + step, 58))
        else:
            parts += [box(12, 62 * n, width - 24, 50, "cell"), text(22, 62 * n + 30, name, "bold")]
            parts += [text(120, 62 * n + 21 + 18 * i, words, "small") for i, words in enumerate(sentences)]
            if n < 4:
                parts.append(line(width / 2, 62 * n + 50, width / 2, 62 * n + 62))
    caption = "The first line of each step says what it does, and the second how producers differ."
    return picture(
        width,
        "A recipe fixes every step; producers may differ at each",
        caption,
        "The steps of a recipe: amax, scale, quotient, code, decode",
        118 if width == WIDE else 300,
        parts,
    )


def container(width: int) -> str:
    """Return the SVG picture of the tensor names under which two containers store one layer."""
    rows = (
        ("", "Model-Optimizer", "compressed-tensors"),
        ("codes", "weight", "weight_packed"),
        ("block scales", "weight_scale", "weight_scale"),
        ("tensor scale", "weight_scale_2", "weight_global_scale = 1 / scale"),
        ("config", "hf_quant_config.json", "config.json"),
    )
    beside = width == WIDE
    each = (width - 124) / (1 + beside)
    parts = []
    for column in range(2):
        x, down = (112 + column * each, 0) if beside else (112, column * 162)
        for n, row in enumerate(rows):
            y = down + 30 * n
            parts += [text(12, y + 18, row[0])] if not (beside and column) else []
            parts.append(box(x, y, each - 8 * beside, 26, "differs" if n == 3 and column else "cell"))
            parts.append(text(x + 8, y + 18, row[1 + column], "bold" if n == 0 else ""))
    return picture(
        width,
        "A container fixes names, dtypes and configs; the code bytes stay the same",
        "compressed-tensors stores the reciprocal of the tensor scale (marked).",
        "The same layer under the names of Model-Optimizer and of compressed-tensors",
        150 if beside else 312,
        parts,
    )


def packing(width: int) -> str:
    """Return the SVG picture of a byte that holds two codes."""
    parts = []
    for n, words in enumerate(("high nibble: element 1", "low nibble: element 0")):
        parts += [box(12 + n * 180, 0, 176, 34, "cell"), text(100 + n * 180, 22, words, "middle")]
    return picture(
        width,
        "Two codes per byte: the even element is in the low nibble",
        "GGUF files order nibbles differently; fp4kit converts them when it reads or writes such a file.",
        "A byte holds element 1 in its high nibble and element 0 in its low nibble",
        38,
        parts,
    )


_DRAWN: dict[str, Callable[[int], str]] = {
    "two-producers": two_producers,
    "speed": speed,
    "element": element,
    "block": block,
    "tensor-scale": tensor_scale,
    "recipe": recipe,
    "container": container,
    "packing": packing,
}
# {file name without .svg: the function that draws it}
PICTURES: dict[str, Callable[[], str]] = {
    name + ending: partial(draw, width)
    for name, draw in _DRAWN.items()
    for ending, width in (("", WIDE), ("-narrow", NARROW))
}


def main() -> None:
    """Draw every picture of PICTURES, and write it to docs/images as an SVG file."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
