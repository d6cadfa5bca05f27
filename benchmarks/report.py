"""Write the Markdown page and the plot of a record of benchmarks/run.py.

    python benchmarks/report.py benchmarks/results/h200.json

A *peer* is another library's call that was timed beside a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import records
from below_target import REASONS, Reason, reason_of
from records import COLOURS, PEER_COLOURS, SHORT, Record, head_text
from rows import BenchmarkRow

from fp4kit.cli.output import markdown as table

COLUMNS = (
    "operation",
    "recipe",
    "from",
    "time, us",
    "spread",
    "bytes",
    "efficiency",
    "target",
    "peers: their time / this one",
)
LIMITS = ("by bytes, us", "by issue, us")  # columns of records that have limits by issue


def rows_of(record: Record) -> list[BenchmarkRow]:
    """Return the rows of a record as BenchmarkRow objects."""
    return [BenchmarkRow.of(row) for row in record["rows"]]


def heading(record: Record) -> str:
    """Return device, driver, versions, commit, date and the time of the reference copy as one line."""
    return (
        f"{record['device']}, driver {record['driver']}, {head_text(record)}; a copy of {record['size']} x"
        f" {record['size']} bfloat16 takes {record['copy_us']:.1f} us, {record['copy_TB/s']:.2f} TB/s"
    )


def target_text(row: BenchmarkRow) -> str:
    """Return a row's targets as text, followed by "(missed)" if the row misses a target.

    Return "" if the row has no target.
    """
    parts = [] if row.target is None else [f"{row.target:.2f}"]
    if row.target_us is not None:
        parts.append(f"{row.target_us:g} us")
    if row.beside is not None:
        parts.append(f"{row.us / row.beside.us:.3f} of {row.beside.name}, at most {row.beside.at_most:.2f}")
    return "; ".join(parts) + (" (missed)" if row.met is False else "")


def cells(row: BenchmarkRow) -> tuple[str, ...]:
    """Return the cells of a row in the Markdown table, in the order of COLUMNS."""
    peers = [f"{name} {ratio:.2f}" for name, ratio in row.ratios.items()] + [f"{name} fails" for name in row.failed]
    operation = row.operation if row.kind == "kernel" else f"{row.operation} ({row.kind} time)"
    efficiency = "" if row.efficiency is None else f"{row.efficiency:.3f}"
    times = (f"{row.us:.1f}", f"{row.spread:.1f}")
    moved = f"{row.bytes / 1e6:,.1f} MB = {row.formula}" if row.bytes else ""
    return (
        operation,
        row.recipe,
        SHORT.get(row.dtype, row.dtype),
        *times,
        moved,
        efficiency,
        target_text(row),
        ", ".join(peers),
    )


def limit_cells(row: BenchmarkRow) -> tuple[str, str]:
    """Return the cells of a row in the columns LIMITS."""
    return tuple("" if us is None else f"{us:.1f}" for us in (row.copy_us, row.issue_us))


def missing_limits(rows: Iterable[BenchmarkRow]) -> str:
    """Return a sentence with a count of rows per reason why they have no limit by issue, or "" if all have one."""
    counts = Counter(re.sub(r"\w+_kernel\b", "their kernel", row.no_issue) for row in rows if row.no_issue)
    parts = [f"{n} row{'s' * (n > 1)}, because {why}" for why, n in counts.most_common()]
    return f" Without a limit by issue: {'; '.join(parts)} (`no_issue` in the record)." if parts else ""


def markdown(record: Record) -> str:
    """Return the Markdown page of a record: its head, the table of rows, and the reasons for missed targets."""
    rows = rows_of(record)
    has_limits = any(row.issue_us is not None or row.no_issue for row in rows)
    missed = sum(row.met is False for row in rows)
    # Rows of "copy" are left out: they time CuPy's copy itself, not an operation of fp4kit.
    ours = (row for row in rows if not row.operation.startswith("copy,"))
    slower = [f"{row.operation} {row.recipe} {row.dtype}" for row in ours if row.faster]
    lines = [
        f"# {record['device']}",
        "",
        f"{heading(record)}.",
        "",
        "This page lists every measurement of one benchmark run. Columns:",
        "",
        f"- time: the median of {record['repeat']} timings. spread: the largest minus the smallest of them.",
        "- bytes: the bytes that the operation must move; n is the number of elements.",
        "- efficiency: the time of a copy that moves as many bytes in the same run, divided by the operation's time.",
        "- peers: the times of other libraries, divided by the time of fp4kit.",
        *([f"- by bytes, by issue: two lower limits of the time (limits.py).{missing_limits(rows)}"] * has_limits),
        "",
        (
            f"{sum(row.met is True for row in rows)} of {sum(row.met is not None for row in rows)} targets are met,"
            f" and {missed} missed. Rows in which another library is faster by more than the spread:"
            f" {'; '.join(slower) or 'none'}."
        ),
        *(f"Not measured: {name}: {why}." for name, why in record.get("errors", {}).items()),
        "",
        f"![efficiency and speed-up]({slug(record)}.svg)",
        "",
        table(COLUMNS + LIMITS * has_limits, [cells(row) + limit_cells(row) * has_limits for row in rows]),
        *below_target(rows),
    ]
    return "\n".join(lines) + "\n"


def below_target(rows: Iterable[BenchmarkRow], reasons: Sequence[Reason] = REASONS) -> list[str]:
    """Return the Markdown section on rows that miss their target: the reason, and the other designs that were tried.

    Return an empty list if no row misses its target. Rows that no entry of ``reasons`` covers get "No reason is known."
    """
    found: dict[Reason | None, list[BenchmarkRow]] = {}
    for row in rows:
        if row.met is False:
            found.setdefault(reason_of(row, reasons), []).append(row)
    lines = ["", "## Below target"] if found else []
    if found:
        lines += ["", "Each paragraph names rows that miss their target: what they reached, and the target."]
        lines += ["The items below a paragraph are other designs that were tried, with the figure that each reached."]
        lines += ["A figure without a unit is an efficiency, or a ratio if the row states a ratio."]
    for reason, missed in found.items():
        names = "; ".join(
            f"{row.operation}, {row.recipe} {SHORT.get(row.dtype, row.dtype)}: {_shortfall(row)}" for row in missed
        )
        why = "No reason is known." if reason is None else reason.why
        tried = () if reason is None else reason.tried
        parts = [text.partition(": ") for text in tried]
        lines += [
            "",
            f"**{names}.** {why}",
            *(["", *(f"- Tried: {design}. Result: {figure}" for design, _, figure in parts)] if tried else []),
        ]
    return lines


def _shortfall(row: BenchmarkRow) -> str:
    """Return text on what a row reached and what its target is, such as "efficiency 0.896, target 0.90"."""
    if row.beside is not None:
        return f"{row.us / row.beside.us:.3f} times as long as {row.beside.name}, target {row.beside.at_most:.2f}"
    return (
        f"{row.us:.1f} us, target {row.target_us:g}"
        if row.efficiency is None
        else f"efficiency {row.efficiency:.3f}, target {row.target:.2f}"
    )


def slug(record: Record) -> str:
    """Return the base name of a device's files, such as "h200" for "NVIDIA H200"."""
    return record["device"].lower().removeprefix("nvidia ").replace(" ", "-").replace("/", "-")


def plot(record: Record, path: Path) -> None:
    """Plot efficiencies with their targets, and speed-ups over each peer, one line per operation and recipe."""
    plt = records.pyplot(path)
    lines: dict[tuple[str, str], list[BenchmarkRow]] = {}
    for row in rows_of(record):
        if row.efficiency is not None:
            lines.setdefault((row.operation, row.recipe), []).append(row)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.2 + 0.19 * max(len(lines), 4)), sharey=True, width_ratios=(3, 2), layout="constrained"
    )
    _plot_efficiencies(left, list(lines.values()))
    _plot_peers(right, list(lines.values()))
    left.set_yticks(range(len(lines)), [f"{operation}   {recipe}" for operation, recipe in lines])
    left.set_ylim(len(lines) - 0.4, -0.6)
    figure.suptitle(f"{record['device']}, {record['date']}, commit {record['commit']}")
    records.save(figure, path)


def _plot_efficiencies(axes: Any, lines: list[list[BenchmarkRow]]) -> None:
    """Plot the efficiencies of rows, one line of the plot per list of rows, and mark their targets."""
    for y, rows in enumerate(lines):
        axes.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
        for row in rows:
            axes.plot(row.efficiency, y, "o", markersize=5, color=COLOURS.get(row.dtype, "black"))
            if row.target is not None:
                axes.plot([row.target] * 2, [y - 0.4, y + 0.4], color="#cc0000", linewidth=1.4)
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_xlim(left=0, right=max([1.05, *(row.efficiency + 0.03 for rows in lines for row in rows)]))
    axes.set_xlabel("efficiency: 1 is a copy that moves as many bytes; red is the target")
    used = [name for name in COLOURS if any(row.dtype == name for rows in lines for row in rows)]
    handles = [
        axes.plot([], [], "o", markersize=5, color=COLOURS[name], label=SHORT.get(name, name))[0] for name in used
    ]
    axes.legend(handles=handles, loc="lower left")


def _plot_peers(axes: Any, lines: list[list[BenchmarkRow]]) -> None:
    """Plot the times of peers divided by the times of fp4kit, on one line of the plot per list of rows."""
    names = list(dict.fromkeys(name for rows in lines for row in rows for name in row.peers))
    colours = {name: PEER_COLOURS[i % len(PEER_COLOURS)] for i, name in enumerate(names)}
    for y, rows in enumerate(lines):
        axes.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
        for row in rows:
            for name, ratio in row.ratios.items():
                axes.plot(ratio, y, "D", markersize=4, color=colours[name])
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time of a peer over that of fp4kit")
    if names:
        axes.legend(
            handles=[axes.plot([], [], "D", markersize=4, color=colours[name], label=name)[0] for name in names]
        )


SUMMARY_COLUMNS = ("operation", "recipe", "from", "time", "efficiency", "fastest peer")


def summary(record: Record, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the README's rows: one per wanted (operation, recipe) pair, from rows of kind "kernel".

    If a pair was timed from several dtypes, the last row that is not float32 is used, which is bfloat16 in a whole run.

    Raises:
        ValueError: the record lacks a wanted pair.
    """
    found = {
        (row.operation, row.recipe): row for row in rows_of(record) if row.kind == "kernel" and row.dtype == "float32"
    }
    found |= {
        (row.operation, row.recipe): row for row in rows_of(record) if row.kind == "kernel" and row.dtype != "float32"
    }
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(f"report: the run of {record['date']} has no row for {missing}")
    return [_summary_cells(found[key]) for key in wanted]


def _summary_cells(row: BenchmarkRow) -> tuple[str, ...]:
    """Return the cells of a row in the README's table. A cell without a value is empty."""
    peer = min(row.ratios.items(), key=lambda pair: pair[1], default=None)
    against = "" if peer is None else f"{peer[0]}: {peer[1]:.1f} times as long"
    efficiency = "" if row.efficiency is None else f"{row.efficiency:.2f}"
    return row.operation, row.recipe, SHORT.get(row.dtype, row.dtype), f"{row.us:.0f} us", efficiency, against


def write(record: Record, folder: Path, plotted: bool = True) -> list[Path]:
    """Write the record's JSON, page and, if `plotted` is true, plot into a folder.

    Return the paths of the written files.
    """
    return records.write(record, folder, slug(record), markdown(record), plot if plotted else None)


if __name__ == "__main__":
    records.rewrite(write)
