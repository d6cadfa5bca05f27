"""Draw the pictures of README.md and docs/ into docs/images: python tools/pictures.py

Each picture is an SVG file. It is computed from fp4kit or from a committed benchmark record, so a test can check that
it is current. Colors follow the reader's light or dark setting. Differences also have a thick border and bold text, so
that they are visible without color.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
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


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return an SVG document of this size in pixels, made of the SVG elements `parts`. Screen readers read `title`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        f"{box(0, 0, width, height, 'paper')}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def two_producers() -> str:
    """Return the SVG picture of one block of sixteen weights, quantized by two NVFP4 producers."""
    x = (np.random.default_rng(0).standard_normal((4096, 16)) * 0.02).astype(ml_dtypes.bfloat16)
    pair = [("Transformer Engine", "nvfp4-te"), ("compressed-tensors", "nvfp4-compressed-tensors")]
    found = [fp4kit.quantize(x, recipe) for _, recipe in pair]
    values = [fp4kit.formats.E2M1.decode(fp4kit.unpack(q.packed)) for q in found]
    row = int((values[0] != values[1]).sum(axis=1).argmax())
    left, step = 190, 44
    width = left + 17 * step + 20
    parts = [text(12, 24, "The same sixteen bfloat16 weights become different NVFP4 bytes", "title")]
    parts += [text(12, 58, "weight", "small"), text(left + 16.5 * step + 2, 44, "scale byte", "small middle")]
    for i in range(16):
        parts.append(text(left + (i + 0.5) * step, 58, f"{float(x[row, i]):.3f}".replace("0.", "."), "number"))
    for n, ((name, recipe), q, value) in enumerate(zip(pair, found, values, strict=True)):
        y = 72 + n * 44
        parts += [text(12, y + 17, name), text(12, y + 32, recipe, "small")]
        for i in range(16):
            differs = values[0][row, i] != values[1][row, i]
            parts.append(box(left + i * step + 1, y, step - 2, 34, "differs" if differs else "cell"))
            parts.append(
                text(
                    left + (i + 0.5) * step, y + 22, f"{float(value[row, i]):g}", "number bold" if differs else "number"
                )
            )
        bytes_ = [int(other.block_scale[row, 0]) for other in found]
        kind = "differs" if bytes_[0] != bytes_[1] else "cell"
        parts.append(box(left + 16 * step + 3, y, step - 2, 34, kind))
        parts.append(text(left + 16.5 * step + 2, y + 22, f"{int(q.block_scale[row, 0]):#04x}", "number bold"))
    codes = int((values[0][row] != values[1][row]).sum())
    parts.append(
        text(
            12,
            184,
            f"Each cell is a 4-bit value of E2M1; a weight is value × scale. {codes} of 16 values and the scale differ"
            " (marked), because compressed-tensors rounds its tensor scale to bfloat16.",
            "small",
        )
    )
    title = (
        f"One block of sixteen weights through two producers of NVFP4: {codes} of 16 values and the scale byte differ"
    )
    return picture(width, 198, title, parts)


SPEED = (  # (operation and recipe of a row in the GPU record, label in the picture)
    ("quantize", "mxfp4-ocp", "quantize MXFP4"),
    ("quantize, amax given", "nvfp4-torchao", "quantize NVFP4, amax given"),
    ("quantize with amax", "nvfp4-torchao", "quantize NVFP4 with amax"),
    ("quantize", "mxfp8-torchao-rceil", "quantize MXFP8"),
    ("dequantize", "mxfp4-ocp", "dequantize MXFP4"),
)


def speed() -> str:
    """Return a bar chart of the times of some operations, in fp4kit and in the fastest other library.

    Each time is divided by the time of a copy that moves as many bytes.
    """
    record = json.loads((RESULTS / "h200.json").read_text())
    rows = {(row["operation"], row["recipe"]): row for row in record["rows"] if row["dtype"] == "bfloat16"}
    left, unit, top = 210, 92, 46
    width, largest = 860, 6.2
    parts = [text(12, 24, f"Time on one {record['device']}, as a multiple of a copy of the same bytes", "title")]
    for n, (operation, recipe, words) in enumerate(SPEED):
        row: dict[str, Any] = rows[operation, recipe]
        y = top + n * 46
        ours = row["us"] / row["copy_us"]
        peer, time = min(row["peers"].items(), key=lambda pair: pair[1])
        theirs = time / row["copy_us"]
        parts += [text(left - 8, y + 20, words, "end"), box(left, y, ours * unit, 14, "ours")]
        parts.append(text(left + ours * unit + 6, y + 12, f"fp4kit {ours:.2f}", "small"))
        parts.append(box(left, y + 17, min(theirs, largest) * unit, 14, "peer"))
        more = f"{peer} {theirs:.1f}" if theirs <= largest else f"→ {peer} {theirs:.0f}"
        at = left + min(theirs, largest) * unit
        inside = theirs > largest - 1.5
        parts.append(text(at - 6 if inside else at + 6, y + 29, more, "small end" if inside else "small"))
    bottom = top + len(SPEED) * 46 - 8
    parts += [line(left + unit, top - 8, left + unit, bottom, "limit"), line(left, top - 8, left, bottom)]
    parts.append(text(left + unit, bottom + 16, "1 = a copy", "small middle"))
    parts.append(
        text(
            12,
            bottom + 36,
            f"16384 x 16384 bfloat16, {record['date']}, commit {record['commit']}; the peer is the fastest of those"
            " installed (benchmarks/results/h200.md).",
            "small",
        )
    )
    return picture(width, bottom + 48, "Times of fp4kit and of the fastest other library, relative to a copy", parts)


def element() -> str:
    """Return the SVG picture of E2M1's number line, with the code of each non-negative value."""
    parts = [text(12, 24, "E2M1: eight magnitudes and a sign make sixteen codes of four bits", "title")]
    left, unit, y = 40, 120, 80
    parts.append(line(left, y, left + 6 * unit + 20, y))
    for code in range(8):
        value = float(fp4kit.formats.E2M1.decode(code))
        x = left + value * unit
        parts += [
            line(x, y - 8, x, y + 8),
            text(x, y - 16, f"{value:g}", "number bold"),
            text(x, y + 26, f"{code:04b}", "number"),
        ]
    parts.append(
        text(left, y + 50, "Values lie closer together near 0. Everything above 6 becomes 6 (it saturates).", "small")
    )
    return picture(820, 146, "The number line of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6", parts)


def block() -> str:
    """Return the SVG picture of a row that is cut into blocks of sixteen elements with one scale each."""
    parts = [text(12, 24, "A row of 48 elements in NVFP4: three blocks of 16, one scale byte per block", "title")]
    for b in range(3):
        x = 12 + b * 268
        parts += [box(x, 40, 256, 30, "cell")]
        parts += [line(x + 16 * i, 40, x + 16 * i, 70) for i in range(1, 16)]
        parts += [
            line(x + 128, 70, x + 128, 88),
            box(x + 98, 88, 60, 28, "differs"),
            text(x + 128, 107, "scale", "number"),
        ]
    parts.append(
        text(
            12,
            136,
            "MXFP4 has blocks of 32. A 16 x 16 block has one scale, so that the transposed matrix has the same scales.",
            "small",
        )
    )
    return picture(820, 148, "A row of 48 elements, cut into three blocks of 16 with one scale each", parts)


def tensor_scale() -> str:
    """Return the SVG picture of the two levels of scales of NVFP4: block scales and the tensor scale."""
    steps = (
        ("4-bit value", "6"),
        ("× block scale, E4M3", "448"),
        ("× tensor scale, float32", "3.34e-05"),
        ("= weight", "0.0898"),
    )
    parts = [text(12, 24, "NVFP4 has two levels of scales; both multiply when a value is decoded", "title")]
    for n, (words, example) in enumerate(steps):
        x = 12 + n * 202
        parts += [box(x, 40, 190, 54, "differs" if n == 2 else "cell")]
        parts += [text(x + 95, 62, words, "middle"), text(x + 95, 84, example, "number bold")]
    parts.append(text(12, 116, "MXFP4 has block scales only: powers of two, stored as E8M0.", "small"))
    return picture(820, 128, "value times block scale times tensor scale gives the weight", parts)


def recipe() -> str:
    """Return the SVG picture of the steps of a recipe, with an example of how producers differ at each step."""
    steps = (
        ("amax", "the largest magnitude", "with or without NaN"),
        ("scale", "amax / 6, as a byte", "floor, ceil, nearest"),
        ("quotient", "element / scale", "or × a rounded reciprocal"),
        ("code", "the nearest 4-bit value", "ties: even, zero, away"),
        ("decode", "value × scales", "order and dtype vary"),
    )
    parts = [text(12, 24, "A recipe fixes every step; producers may differ at each", "title")]
    for n, (name, does, differs) in enumerate(steps):
        x = 12 + n * 162
        parts += [box(x, 40, 150, 84, "cell"), text(x + 75, 62, name, "middle bold")]
        parts += [text(x + 75, 84, does, "small middle"), text(x + 75, 108, differs, "small middle")]
        if n < 4:
            parts.append(line(x + 150, 82, x + 162, 82))
    return picture(826, 136, "The steps of a recipe: amax, scale, quotient, code, decode", parts)


def container() -> str:
    """Return the SVG picture of the tensor names under which two containers store one layer."""
    rows = (
        ("", "Model-Optimizer", "compressed-tensors"),
        ("codes", "weight", "weight_packed"),
        ("block scales", "weight_scale", "weight_scale"),
        ("tensor scale", "weight_scale_2", "weight_global_scale = 1 / scale"),
        ("config", "hf_quant_config.json", "config.json"),
    )
    parts = [text(12, 24, "A container fixes names, dtypes and configs; the code bytes stay the same", "title")]
    for n, (what, left, right) in enumerate(rows):
        y = 38 + n * 30
        kind = "bold" if n == 0 else ""
        parts += [
            text(12, y + 20, what),
            box(130, y, 300, 26, "cell"),
            box(440, y, 340, 26, "differs" if n == 3 else "cell"),
        ]
        parts += [text(140, y + 18, left, kind), text(450, y + 18, right, kind)]
    return picture(820, 200, "The same layer under the names of Model-Optimizer and of compressed-tensors", parts)


def packing() -> str:
    """Return the SVG picture of a byte that holds two codes."""
    parts = [text(12, 24, "Two codes per byte: the even element is in the low nibble", "title")]
    for n, words in enumerate(("high nibble: element 1", "low nibble: element 0")):
        parts += [box(12 + n * 210, 40, 200, 34, "cell"), text(112 + n * 210, 62, words, "middle")]
    parts.append(
        text(
            12,
            98,
            "GGUF files order nibbles differently; fp4kit converts them when it reads or writes such a file.",
            "small",
        )
    )
    return picture(820, 110, "A byte holds element 1 in its high nibble and element 0 in its low nibble", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "two-producers": two_producers,
    "speed": speed,
    "element": element,
    "block": block,
    "tensor-scale": tensor_scale,
    "recipe": recipe,
    "container": container,
    "packing": packing,
}


def main() -> None:
    """Draw every picture of PICTURES, and write it to docs/images as an SVG file."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
