"""Compute the bars of the CPU benchmark.

A *bar* is a target for a set of rows. It is compared with the row that comes closest to missing the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rows import CpuRow
from timing import Time

SEVEN = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-modelopt",
    "nvfp4-compressed-tensors",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
)


class Bar(NamedTuple):
    """A performance target for a set of rows, and whether it is met.

    Attributes:
        text: the target in words
        figure: the measured figure that comes closest to missing the target, or "" if no row was measured
        where: the row that has this figure, or "" if no row was measured
        holds: True if the target holds, or None if no row was measured
    """

    text: str
    figure: str
    where: str
    holds: bool | None


def bars(rows: list[CpuRow], loops: Mapping[str, float], sweep: Mapping[str, Any] | None) -> list[Bar]:
    """Return the bars (performance targets) of the CPU engine, each with the figure that comes closest to missing it.

    Args:
        rows: the measured rows
        loops: GB/s of streaming loops on all threads by name (cpu_loops.py). A target rate is lowered to 60% of the
            rate of the matching loop, so that slow memory does not count as a miss.
        sweep: the result of cpu_sweep.sweep, or None if it was not run
    """
    of = {name: [row for row in rows if row.group == name] for name in ("recipes", "small", "sizes", "ggml")}
    seven = [row for row in of["recipes"] if row.recipe in SEVEN]
    quantize, dequantize = ([row for row in seven if row.operation == name] for name in ("quantize", "dequantize"))
    return [
        _rate_bar("quantize bf16", quantize, 2, loops.get("two passes")),
        _rate_bar("quantize bf16, the goal", quantize, 5, loops.get("two passes")),
        _rate_bar(
            "quantize stochastic bf16", [row for row in rows if row.operation == "quantize stochastic"], 1.5, None
        ),
        _rate_bar("dequantize to bf16", dequantize, 5, loops.get("expand")),
        _at_least(
            "times faster than the specification, every row, noise 5%",
            0.95,
            [(row, row.ratio("specification", "all")) for row in rows],
        ),
        _sweep_bar(sweep),
        _at_least(
            "times faster than the fastest other library",
            5,
            [(row, (row.fastest_peer or (0, None))[1]) for row in seven],
        ),
        *(_ggml_bar(of["ggml"], name, least) for name, least in (("quantize", 2), ("dequantize", 1))),
        _rate_bar("one thread, quantize bf16, 55% of the bar for all threads", quantize, 0.55 * 2, None, "one"),
        _rate_bar("one thread, dequantize to bf16, 55% of the bar for all threads", dequantize, 0.55 * 5, None, "one"),
        _at_least(
            "rate of one thread over all, quantize and dequantize",
            0.55,
            [(row, row.ratio("all", "one")) for row in seven],
        ),
        _at_most("small call, us", 60, [(row, max(us.median for us in _ours(row))) for row in of["small"]]),
        _linear_bar(of["sizes"], "all", "loop", 1 << 30, ""),
        _linear_bar(of["sizes"], "all into", "loop into", 1 << 25, " into preallocated memory"),
    ]


def _ours(row: CpuRow) -> list[Time]:
    """Return the row's times on all threads: with a new result and, if measured, with a preallocated result."""
    return [us for name, us in row.times.items() if name.startswith("all")]


def _where(row: CpuRow) -> str:
    """Return a name for the row: operation, recipe and dtype."""
    return f"{row.operation} {row.recipe} {row.dtype}"


def _rate_bar(text: str, rows: list[CpuRow], least: float, loop: float | None, threads: str = "all") -> Bar:
    """Return a bar for a rate of at least `least` GB/s, or 60% of `loop` if that is lower.

    Args:
        text: the first words of the bar's text
        rows: the rows whose rates are compared
        least: the target in GB/s
        loop: GB/s of the matching streaming loop, or None to use `least` alone
        threads: "all" or "one", the time of the row to use
    """
    wanted = least if loop is None else min(least, 0.6 * loop)
    given = "" if wanted == least else f", 60% of {loop:.1f}"
    return _at_least(f"{text}: GB/s", wanted, [(row, row.rate(threads)) for row in rows], given)


def _at_least(text: str, wanted: float, found: list[tuple[CpuRow, float | None]], given: str = "") -> Bar:
    """Return a bar that holds if the smallest figure is at least `wanted`. Without a figure, `holds` is None.

    Args:
        text: the first words of the bar's text
        wanted: the target
        found: (row, figure) pairs; figures that are None are ignored
        given: text after the target, such as where it comes from
    """
    values = [(value, _where(row)) for row, value in found if value is not None]
    text = f"{text}: at least {wanted:g}{given}"
    if not values:
        return Bar(text, "", "", None)
    value, where = min(values)
    return Bar(text, f"{value:.2f}", where, value >= wanted)


def _at_most(text: str, wanted: float, found: list[tuple[CpuRow, float]]) -> Bar:
    """Return a bar that holds if the largest figure is at most `wanted`. Without a figure, `holds` is None.

    Args:
        text: the first words of the bar's text
        wanted: the target
        found: (row, figure) pairs
    """
    text = f"{text}: at most {wanted:g}"
    if not found:
        return Bar(text, "", "", None)
    value, where = max((value, _where(row)) for row, value in found)
    return Bar(text, f"{value:.1f}", where, value <= wanted)


def _ggml_bar(rows: list[CpuRow], operation: str, least: float) -> Bar:
    """Return a bar that holds if fp4kit is at least `least` times as fast as ggml in every row of an operation.

    Both use one thread and preallocated results. ggml reads or writes float32.

    Args:
        rows: the rows of group "ggml"
        operation: "quantize" or "dequantize"
        least: the target
    """
    found = [
        (row, row.peers["ggml"].median / row.times["one into"].median) for row in rows if row.operation == operation
    ]
    kind = {"quantize": "encoders", "dequantize": "decoders"}[operation]
    return _at_least(f"times faster than ggml's {kind}, one thread each", least, list(found))


def _sweep_bar(sweep: Mapping[str, Any] | None) -> Bar:
    """Return a bar that holds if no case of the sweep is slower than the specification by more than the noise.

    Its figure is the smallest speed-up.

    sweep: the result of cpu_sweep.sweep, or None if it was not run.
    """
    text = "times faster than the specification, every recipe, dtype and shape from 1 kB: at least 1"
    if not sweep or not sweep["cases"]:
        return Bar(text, "", "", None)
    smallest = sweep["smallest"][0]
    return Bar(text, f"{smallest['ratio']:.2f}", f"{smallest['case']}; {sweep['cases']} cases", not sweep["slower"])


def _linear_bar(rows: list[CpuRow], name: str, loop: str, least: int, text: str) -> Bar:
    """Return a bar that holds if the time per byte grows by at most 25% from medium to very large inputs.

    The growth is measured from the smallest size of at least `least` bytes to the largest size. If the time per byte of
    a streaming loop grows too, the growth is divided by the loop's growth. The smallest time of each row is used,
    because every call that takes a second meets some disturbance.

    Args:
        rows: the rows of group "sizes"
        name: the key of the row's times to use, such as "all into"
        loop: the key of the streaming loop in the row's peers
        least: the smallest number of bytes of input to consider
        text: words to add to the bar's text
    """
    text = f"time per byte{text}, 8 GiB over {least >> 20} MiB, relative to a streaming loop: at most 1.25"
    large = sorted((row for row in rows if row.bytes >= least and name in row.times), key=lambda row: row.bytes)
    found = []
    for recipe in sorted({row.recipe for row in large}):
        own = [row for row in large if row.recipe == recipe]
        if len(own) > 1:
            growth, of_loop = _growth(own, name), _growth(own, loop)
            found.append((growth / max(of_loop, 1.0), f"{recipe}: {growth:.2f}, the loop {of_loop:.2f}"))
    if not found:
        return Bar(text, "", "", None)
    value, where = max(found)
    return Bar(text, f"{value:.2f}", where, value <= 1.25)


def _growth(rows: list[CpuRow], name: str) -> float:
    """Return the smallest time per byte of the last row divided by the smallest time per byte of the first row.

    Return 1 if either row lacks the time `name`.

    name: the key of a time in the row's `times` or `peers`.
    """
    first, last = (row.times | row.peers for row in (rows[0], rows[-1]))
    return (
        last[name].best / first[name].best / (rows[-1].bytes / rows[0].bytes) if name in first and name in last else 1.0
    )
