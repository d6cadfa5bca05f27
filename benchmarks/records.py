"""Provide what the GPU and CPU benchmarks share: the head of a record, the files written from it, and plot settings.

A *record* is the result of a benchmark run as a dict, stored as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import fp4kit

Record = Mapping[str, Any]

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
COLOURS = {"bfloat16": "#1b6ca8", "float16": "#e08e0b", "float32": "#5a9e4b", "uint8": "#777777"}
PEER_COLOURS = ("#b5443c", "#7a55a3", "#2f8f8b", "#c77f2a", "#555555", "#d06fa8", "#4a7a1f")


def output_of(*command: str) -> str:
    """Return the first line that a command prints, or "unknown" if the command fails or prints nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def head(**versions: str) -> dict[str, Any]:
    """Return the entries that begin every record: versions (with fp4kit's), commit and date."""
    commit = output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD")
    return {"versions": {"fp4kit": fp4kit.__version__} | versions, "commit": commit, "date": str(date.today())}


def head_text(record: Record) -> str:
    """Return versions, commit and date of a record as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{versions}, commit {record['commit']}, {record['date']}"


def pyplot(path: Path) -> Any:
    """Return matplotlib's pyplot, configured so that plotting a record twice gives the same bytes.

    `path` is the file to plot to. Raises ImportError if matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fp4kit", "font.size": 8})
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file without its date, and close the figure."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot(path).close(figure)


def write(
    record: Record, folder: Path, name: str, page: str, plot: Callable[[Record, Path], None] | None = None
) -> list[Path]:
    """Write the record to NAME.json and the Markdown text `page` to NAME.md.

    If `plot` is given and matplotlib is installed, also write NAME.svg. Return the paths of the written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{suffix}" for suffix in (".json", ".md", ".svg")]
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    paths[1].write_text(page)
    if plot is None:
        return paths[:2]
    try:
        plot(record, paths[2])
    except ImportError:
        print("no plot: matplotlib is missing")
        return paths[:2]
    return paths


def rewrite(write_all: Callable[[Record, Path], list[Path]]) -> None:
    """Write page and plot again for every record file that the command line names.

    `write_all` takes a record and its folder.
    """
    for name in sys.argv[1:]:
        print(*write_all(json.loads(Path(name).read_text()), Path(name).parent), sep="\n")
