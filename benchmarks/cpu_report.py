"""Write the Markdown page and the plot of a record of bench_cpu.py.

    python benchmarks/cpu_report.py benchmarks/results/cpu.json

A *bar* is a performance target with the figure that was measured for it (cpu_bars.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import records
from cpu_bars import SEVEN, Bar, bars
from records import COLOURS, PEER_COLOURS, SHORT, Record, head_text
from rows import CpuRow

from fp4kit.cli.output import markdown as table

LEGEND: Mapping[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 2, "fontsize": 7}
COLUMNS = (
    "operation",
    "recipe",
    "from",
    "{n} threads",
    "best",
    "1 thread",
    "into `out`",
    "specification",
    "times",
    "others",
)
GROUPS = {
    "recipes": "Every recipe",
    "operations": "Other operations and dtypes",
    "ggml": "Compared with ggml, one thread each, G elements/s",
    "small": "Small arrays, us per call",
    "sizes": "Sizes",
    "searches": "Searches of block scales, compared with a loop over candidates in NumPy on one thread",
}


def rows_of(record: Record) -> list[CpuRow]:
    """Return the rows of a record as CpuRow objects."""
    return [CpuRow.of(row) for row in record["rows"]]


def bars_of(record: Record) -> list[Bar]:
    """Return the bars (targets with the figures that were measured) of a record."""
    return bars(rows_of(record), record.get("loops", {}).get("all", {}), record.get("sweep"))


def bar_lines(record: Record) -> list[str]:
    """Return one line of text per bar.

    It says whether the bar holds, the target, the measured figure and the row with this figure.
    """
    said = {True: "holds", False: "MISSED", None: "not measured"}
    return [f"{said[bar.holds]:13}{bar.text}   {bar.figure}   {bar.where}" for bar in bars_of(record)]


def heading(record: Record) -> str:
    """Return machine, engine, versions, commit, date and load average as one line."""
    load = f"load {record['load'][0]} at the start, {record['load at the end']} at the end"
    machine = f"{record['processor']}, {record['threads']} threads, {record['engine']}"
    return f"{machine}, {head_text(record)}; {load}"


def markdown(record: Record) -> str:
    """Return the Markdown page of a record: its head, the bars, and a table per group of measurements."""
    rows = rows_of(record)
    found = bars_of(record)
    others = ", ".join(f"{name} {version}" for name, version in record["versions of peers"].items())
    lines = [
        "# CPU",
        "",
        f"{heading(record)}.",
        f"Other libraries: {others or 'none'}."
        + "".join(f" No {name} ({why})." for name, why in record["missing"].items()),
        "",
        "This page lists every measurement of one benchmark run on a CPU. Matrices are",
        f"{record['size']} x {record['size']} unless a shape is given. A rate in GB/s is the bytes of input",
        f"(of output for dequantize) divided by the median time of up to {record['repeat']} calls. Columns:",
        "",
        "- best: the rate for the smallest time instead of the median",
        "- times: the time of the specification (fp4kit's NumPy code), divided by the time of fp4kit on all threads",
        "- others: the times of other libraries, divided by the time of fp4kit on all threads",
        "",
        "![rates and speed-up](cpu.svg)",
        "",
        "## Bars",
        "",
        "A bar is a target for a set of measurements. It holds if the worst measurement of the set meets the target. "
        f"{sum(bar.holds is True for bar in found)} of {sum(bar.holds is not None for bar in found)} bars hold.",
        "",
        table(("bar", "found", "where", ""), [_bar_cells(bar) for bar in found]),
        *_machine(record),
        *_groups(rows, record),
        *_sweep(record),
    ]
    return "\n".join(lines) + "\n"


def _bar_cells(bar: Bar) -> tuple[str, ...]:
    """Return the cells of a bar (a performance target) in the table "Bars"."""
    return bar.text, bar.figure, bar.where, {True: "holds", False: "missed", None: "not measured"}[bar.holds]


def _machine(record: Record) -> list[str]:
    """Return the Markdown lines about memory throughput and about the first calls of a fresh process.

    Parts that were not measured are left out.
    """
    lines = []
    if "loops" in record:
        loops = record["loops"]
        cells = [(name, f"{loops['one'][name]:.1f}", f"{rate:.1f}") for name, rate in loops["all"].items()]
        lines += ["", "## Memory throughput, GB/s of the large array (cpu_loops.py)", ""]
        lines += [table(("loop", "1 thread", f"{record['threads']} threads"), cells)]
    if "first use, ms" in record:
        cells = [(step, f"{ms['median']:.2f}", f"{ms['best']:.2f}") for step, ms in record["first use, ms"].items()]
        lines += ["", "## A fresh process, 64 x 4096 bfloat16, nvfp4-te", "", table(("step", "ms", "best"), cells)]
    return lines


def _groups(rows: list[CpuRow], record: Record) -> list[str]:
    """Return the Markdown tables, one per group of rows, followed by notes on peak memory and on sizes left out."""
    lines = []
    for group, title in GROUPS.items():
        found = [row for row in rows if row.group == group]
        if found:
            cells = {"ggml": _ggml_cells, "small": _small_cells, "sizes": _size_cells}.get(group, _cells)
            head = _HEADS.get(group, tuple(name.format(n=record["threads"]) for name in COLUMNS))
            lines += ["", f"## {title}", "", table(head, [cells(row) for row in found])]
    beyond = [
        f"\n{call}: the peak memory exceeds input and result by {mib:.1f} MiB."
        for call, mib in record.get("MiB beyond", {}).items()
    ]
    return lines + beyond + [f"\nLeft out: {size}: {why}." for size, why in record.get("left out", {}).items()]


def _gb(rate: float | None) -> str:
    """Return a rate in GB/s as text with three digits. Return "" for None, which means that the call was not timed."""
    return "" if rate is None else f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"


def _others(row: CpuRow) -> str:
    """Return the times of other libraries as text. Each time is divided by fp4kit's time.

    The fastest library comes first, and libraries that failed come last. fp4kit's time on all threads is used if it was
    measured, otherwise its time on one thread.
    """
    ours = row.times["all" if "all" in row.times else "one"].median
    ratios = sorted((us.median / ours, name) for name, us in row.peers.items())
    return ", ".join([f"{name} {ratio:.1f}" for ratio, name in ratios] + [f"{name} fails" for name in row.failed])


def _cells(row: CpuRow) -> tuple[str, ...]:
    """Return the cells of a row in the order of COLUMNS: what was called, rates in GB/s, and ratios of times."""
    smallest = row.bytes / row.times["all"].best / 1e3
    rates = (row.rate("all"), smallest, row.rate("one"), row.rate("all into"), row.rate("specification"))
    times = row.ratio("specification", "all")
    about = (row.operation, row.recipe, SHORT.get(row.dtype, row.dtype))
    return *about, *(_gb(rate) for rate in rates), "" if times is None else f"{times:.1f}", _others(row)


def _ggml_cells(row: CpuRow) -> tuple[str, ...]:
    """Return the cells of a row in the table of group "ggml". Rates are in 10^9 elements per second."""
    elements = row.bytes / (4 if row.operation == "dequantize" or row.dtype == "float32" else 2) / 1e3
    mine, into, theirs = row.times["one"].median, row.times["one into"].median, row.peers["ggml"].median
    rates = tuple(f"{elements / us:.2f}" for us in (mine, into, theirs))
    return row.operation, row.recipe, SHORT.get(row.dtype, row.dtype), *rates, f"{theirs / into:.2f}"


def _small_cells(row: CpuRow) -> tuple[str, ...]:
    """Return the cells of a row in the table of group "small". Times are in microseconds.

    A time that was not measured is "", and a ratio that was not measured is "0.0".
    """
    names = ("all", "all into", "one", "specification")
    found = (f"{row.times[name].median:.0f}" if name in row.times else "" for name in names)
    return row.operation, row.recipe, *found, f"{row.ratio('specification', 'all') or 0:.1f}"


def _size_cells(row: CpuRow) -> tuple[str, ...]:
    """Return the cells of a row in the table of group "sizes", in ns per element and GB/s.

    A value that was not measured gives "".
    """
    size = f"{row.bytes >> 20} MiB" if row.bytes < 1 << 30 else f"{row.bytes >> 30} GiB"
    elements = row.bytes / 2
    names = ("all", "all into", "one")
    found = [*(row.times.get(name) for name in names), *(row.peers.get(name) for name in ("loop", "loop into"))]
    each = ("" if us is None else f"{us.median * 1e3 / elements:.3f}" for us in found)
    return row.recipe, size, *each, _gb(row.rate("all")), _gb(row.rate("one")), _gb(row.rate("specification"))


_HEADS = {
    "ggml": ("operation", "recipe", "from", "fp4kit", "into `out`", "ggml, from or to fp32", "times (into `out`)"),
    "small": ("operation", "recipe", "new result", "into `out`", "1 thread", "specification", "times"),
    "sizes": (
        "recipe",
        "input",
        "ns per element",
        "into `out`",
        "1 thread",
        "streaming loop, two passes",
        "loop into preallocated memory",
        "GB/s",
        "1 thread",
        "specification",
    ),
}


def _sweep(record: Record) -> list[str]:
    """Return the Markdown lines about the sweep of cpu_sweep.py, or an empty list if the record has no sweep."""
    if not record.get("sweep"):
        return []
    found = record["sweep"]
    lines = ["", "## Compared with the specification: every recipe, dtype, operation and shape (cpu_sweep.py)", ""]
    lines += [
        (
            f"{found['cases']} calls were timed with fp4kit and with the specification. In {len(found['slower'])} of"
            " them fp4kit is slower by more than the noise of 5%. The table shows the smallest speed-up for each shape:"
        ),
        "",
    ]
    return [*lines, table(("shape", "times", "case"), [_shape(*pair) for pair in found["smallest of a shape"].items()])]


def _shape(shape: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one shape's row in the sweep's table: the shape, the smallest speed-up, and its case.

    entry: the case with the smallest speed-up of this shape.
    """
    return shape, f"{entry['ratio']:.2f}", entry["case"].rpartition(" ")[0]


def summary(record: Record) -> str:
    """Return the README's table: the machine, how many targets hold, and the rates of the recipes in SEVEN."""
    rows = {(row.operation, row.recipe): row for row in rows_of(record) if row.group == "recipes"}
    head = ["recipe"]
    for operation in ("quantize", "dequantize"):
        head += [f"{operation}, {record['threads']} threads", "1 thread", "NumPy", "fastest other"]
    cells = [
        (recipe, *_summary_cells(rows["quantize", recipe]), *_summary_cells(rows["dequantize", recipe]))
        for recipe in SEVEN
    ]
    found = bars_of(record)
    held = f"{sum(bar.holds is True for bar in found)} of {sum(bar.holds is not None for bar in found)} bars are met"
    return (
        f"{heading(record)}. Rates are GB/s of bfloat16 for matrices of {record['size']} x"
        f" {record['size']}. A *bar* is a target for a set of measurements; {held}.\n\n{table(tuple(head), cells)}"
    )


def _summary_cells(row: CpuRow) -> tuple[str, ...]:
    """Return the README's four cells for one operation and recipe.

    They are three rates in GB/s and the fastest other library.
    """
    peer = row.fastest_peer
    other = "" if peer is None else f"{peer[0]}: {peer[1]:.1f} times as long"
    return *(_gb(row.rate(name)) for name in ("all", "one", "specification")), other


def plot(record: Record, path: Path) -> None:
    """Plot the rates of every recipe, and the times of other libraries relative to fp4kit for the recipes in SEVEN."""
    plt = records.pyplot(path)
    rows = [row for row in rows_of(record) if row.group == "recipes"]
    seven = [row for row in rows if row.recipe in SEVEN]
    names = list(dict.fromkeys(row.recipe for row in rows))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.4 + 0.14 * max(len(names), 8)), width_ratios=(1, 1), layout="constrained"
    )
    _plot_rates(left, rows, names, record["threads"])
    _plot_others(right, seven)
    figure.suptitle(f"{record['processor']}, {record['threads']} threads, {record['date']}, commit {record['commit']}")
    records.save(figure, path)


def _plot_rates(axes: Any, rows: list[CpuRow], names: list[str], threads: int) -> None:
    """Plot the rates of each recipe in GB/s: on all threads, on one thread and by the specification.

    Args:
        axes: the matplotlib axes to plot on
        rows: the rows of group "recipes"
        names: the ids of the recipes, from top to bottom
        threads: the number of all threads, for the legend
    """
    marks = {"quantize": "o", "dequantize": "D", "fake_quantize": "s"}
    colours = {"all": COLOURS["bfloat16"], "one": COLOURS["float16"], "specification": COLOURS["uint8"]}
    for row in rows:
        for name, colour in colours.items():
            if name in row.times:
                axes.plot(row.rate(name), names.index(row.recipe), marks[row.operation], markersize=4, color=colour)
    titles = {"all": f"{threads} threads", "one": "1 thread", "specification": "specification"}
    handles = [axes.plot([], [], "o", color=colour, label=titles[name])[0] for name, colour in colours.items()]
    handles += [axes.plot([], [], mark, color="black", label=name)[0] for name, mark in marks.items()]
    _scale(axes, names, "GB/s of bfloat16")
    axes.legend(handles=handles, **LEGEND)


def _plot_others(axes: Any, rows: list[CpuRow]) -> None:
    """Plot the times of other libraries divided by the times of fp4kit, on one line of the plot per row.

    Args:
        axes: the matplotlib axes to plot on
        rows: the rows to plot, from top to bottom
    """
    lines = [f"{row.operation}   {row.recipe}" for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    colours = {name: PEER_COLOURS[i % len(PEER_COLOURS)] for i, name in enumerate(names)}
    marks = {name: "Dosv"[i // len(PEER_COLOURS) % 4] for i, name in enumerate(names)}
    for y, row in enumerate(rows):
        for name, us in row.peers.items():
            axes.plot(us.median / row.times["all"].median, y, marks[name], markersize=4, color=colours[name])
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.axvline(5, color="#cc0000", linewidth=1)
    _scale(axes, lines, "time of another library divided by that of fp4kit; red is the target")
    if names:
        handles = [axes.plot([], [], marks[name], color=colours[name], label=name)[0] for name in names]
        axes.legend(handles=handles, **LEGEND)


def _scale(axes: Any, lines: list[str], label: str) -> None:
    """Label the y axis with `lines`, one per row of the plot, and the logarithmic x axis with `label`."""
    axes.set_yticks(range(len(lines)), lines, fontsize=7)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_xlabel(label)


def write(record: Record, folder: Path) -> list[Path]:
    """Write cpu.json, cpu.md and cpu.svg into a folder. Return the paths of the written files.

    The plot is left out unless the group "recipes" was measured and matplotlib is installed.
    """
    plotted = any(row.group == "recipes" for row in rows_of(record))
    return records.write(record, folder, "cpu", markdown(record), plot if plotted else None)


if __name__ == "__main__":
    records.rewrite(write)
