"""Define the rows of benchmark records, and count the bytes that an operation must move. No GPU is needed.

*Traffic* maps the name of each array to the bytes per element that an operation must read or write. A *peer* is another
library's call that is timed beside a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from timing import Time

import fp4kit

Traffic = Mapping[str, Fraction]


class Beside(NamedTuple):
    """Another time, measured in the same run, that a row is compared with.

    The row meets its target if its time is at most `at_most` times `us`.

    Attributes:
        name: what took the other time, such as "one launch"
        us: the other time in microseconds
        at_most: largest ratio of the row's time to the other time
    """

    name: str
    us: float
    at_most: float


@dataclass(kw_only=True)
class Row:
    """One timed operation in a benchmark record.

    Attributes:
        operation: the operation's name, such as "quantize"
        recipe: id of the recipe, or "" if the operation has none
        dtype: dtype of the unquantized array
        shape: shape of the unquantized array
        bytes: the bytes that the operation moves. Each subclass states which bytes count
        failed: {peer: why it could not be timed}
    """

    operation: str
    recipe: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class BenchmarkRow(Row):
    """One timed operation on a GPU. Times are in microseconds.

    Attributes:
        formula: the traffic as text; `bytes` is its value
        us: the row's time
        spread: the largest timing minus the smallest
        kind: "kernel" (events around consecutive calls), "graph" (events around replays of a CUDA graph) or "host"
            (time until the call returns)
        copy_us: the limit by bytes: time of a device-to-device copy that moves the same number of bytes, or None if it
            was not measured
        issue_us: the limit by issue: time in which the GPU issues the instructions of the main loops, or None
        no_issue: why issue_us is None; "" for rows that are not of the kind "kernel"
        target: smallest efficiency wanted, or None
        target_us: largest time wanted, or None
        beside: another time of the same run, which limits the time of this row, or None
        peers: {name: us}
    """

    formula: str
    us: float
    spread: float
    kind: str = "kernel"
    copy_us: float | None = None
    issue_us: float | None = None
    no_issue: str = ""
    target: float | None = None
    target_us: float | None = None
    beside: Beside | None = None
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def efficiency(self) -> float | None:
        """Return the time of an equally large copy divided by the row's time, or None if no such copy was timed."""
        return None if self.copy_us is None else self.copy_us / self.us

    @property
    def ratios(self) -> dict[str, float]:
        """Return the time of each peer divided by the row's time."""
        return {name: us / self.us for name, us in self.peers.items()}

    @property
    def faster(self) -> list[str]:
        """Return the peers that are faster than the row by more than the row's spread."""
        return [name for name, us in self.peers.items() if us + self.spread < self.us]

    @property
    def met(self) -> bool | None:
        """Return True if every target is reached, False if one is missed, None if the row has no target.

        A target of efficiency counts only if the row has an efficiency.
        """
        found = []
        if self.target is not None and self.efficiency is not None:
            found.append(self.efficiency >= self.target)
        if self.target_us is not None:
            found.append(self.us <= self.target_us)
        if self.beside is not None:
            found.append(self.us <= self.beside.at_most * self.beside.us)
        return all(found) if found else None

    def record(self) -> dict[str, Any]:
        """Return the row as it is written to the JSON file, with its efficiency and `met`."""
        efficiency = None if self.efficiency is None else round(self.efficiency, 3)
        beside = None if self.beside is None else self.beside._asdict()
        return asdict(self) | {"beside": beside, "efficiency": efficiency, "met": self.met}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> BenchmarkRow:
        """Return the BenchmarkRow that `record`, an entry of a JSON file, describes."""
        given = {name: value for name, value in record.items() if name not in ("efficiency", "met")}
        beside = None if given["beside"] is None else Beside(**given["beside"])
        return cls(**given | {"beside": beside, "shape": tuple(given["shape"])})

    def __str__(self) -> str:
        name = self.operation if self.kind == "kernel" else f"{self.operation}, {self.kind}"
        text = f"{name:37}{self.recipe:33}{self.dtype:9}{self.us:10.1f} us{self.spread:8.1f}"
        text += "" if self.efficiency is None else f"{self.efficiency:8.3f}"
        issue = "-" if self.issue_us is None else f"{self.issue_us:.1f}"
        text += "" if self.copy_us is None else f"   limits: bytes {self.copy_us:.1f}, issue {issue} us"
        text += "" if self.target is None else f" of {self.target:.2f}"
        text += "" if self.target_us is None else f"   at most {self.target_us:g} us"
        text += "" if self.beside is None else f"   {self.us / self.beside.us:.3f} of {self.beside.name}"
        text += "".join(f"   {name}: {ratio:.2f}x" for name, ratio in self.ratios.items())
        text += "".join(f"   {name}: {why}" for name, why in self.failed.items())
        return text + ("" if self.met is not False else "   BELOW TARGET")


@dataclass(kw_only=True)
class CpuRow(Row):
    """One timed operation on a CPU.

    `bytes` counts the input, or the output of dequantize. A rate is bytes / time.

    Attributes:
        group: the group of bench_cpu.py that timed the row, such as "recipes"
        times: {key: time}. The keys are "one" and "all" (threads), "one into" and "all into" (with a preallocated
            result), and "specification"
        peers: {name: time} of other libraries on all threads. In the group "ggml", ggml runs on one thread. In the
            group "sizes", the peers are streaming loops
    """

    group: str
    times: dict[str, Time]
    peers: dict[str, Time] = field(default_factory=dict)

    def rate(self, name: str) -> float | None:
        """Return the rate in GB/s for the median time of the key `name`, or None if this key was not timed."""
        found = self.times.get(name)
        return None if found is None else self.bytes / found.median / 1e3

    def ratio(self, over: str, under: str) -> float | None:
        """Return the median time of the key `over` divided by the median time of the key `under`.

        Return None if either was not timed.
        """
        if over not in self.times or under not in self.times:
            return None
        return self.times[over].median / self.times[under].median

    @property
    def fastest_peer(self) -> tuple[str, float] | None:
        """Return (name of the fastest peer, its time divided by the row's time), or None if the row has no peers.

        The row's time on all threads is used if it was measured, otherwise its time on one thread.
        """
        ours = self.times["all" if "all" in self.times else "one"].median
        found = min(self.peers.items(), key=lambda pair: pair[1].median, default=None)
        return None if found is None else (found[0], found[1].median / ours)

    def record(self) -> dict[str, Any]:
        """Return the row as it is written to the JSON file. Times keep only the smallest and the median."""
        timed = {part: {name: us[:2] for name, us in getattr(self, part).items()} for part in ("times", "peers")}
        return asdict(self) | timed

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> CpuRow:
        """Return the CpuRow that `record`, an entry of a JSON file, describes."""
        timed = {part: {name: Time(*us) for name, us in record[part].items()} for part in ("times", "peers")}
        return cls(**{**record, **timed, "shape": tuple(record["shape"])})

    def __str__(self) -> str:
        text = f"{self.group:11}{self.operation:24}{self.recipe:33}{self.dtype:9}{'x'.join(map(str, self.shape)):>12}"
        for name, us in self.times.items():
            text += f"  {name} {us.median:.0f} us ({self.bytes / us.median / 1e3:.2f})"
        text += "".join(f"  {name} {us.median:.0f} us" for name, us in self.peers.items())
        return text + "".join(f"  {name}: {why}" for name, why in self.failed.items())


def element_bytes(**dtypes: Any) -> dict[str, Fraction]:
    """Return {array: bytes per element} for arrays that are read or written once.

    dtypes: {array: dtype}, as in element_bytes(x=F32, values=BF16).
    """
    return {name: Fraction(np.dtype(dtype).itemsize) for name, dtype in dtypes.items()}


def quantized_bytes(recipe: str) -> dict[str, Fraction]:
    """Return {"codes": bytes per element, "scales": bytes per element} of a recipe.

    There is no entry "scales" for a recipe without block scales. The few float32 scales of a tensor are left out.
    """
    r = fp4kit.recipe(recipe)
    codes = {"codes": Fraction(1, 2) if r.is_packed else Fraction(1)}
    return codes if r.scale is None else codes | {"scales": Fraction(1, r.block_size)}


def twice(traffic: Traffic, name: str = "columnwise") -> dict[str, Fraction]:
    """Return the traffic of an operation that writes its results twice: along rows and along columns.

    The result has every entry of `traffic`, and every entry a second time with `name` before the array's name.
    """
    return dict(traffic) | {f"{name} {key}": value for key, value in traffic.items()}


def transposed_bytes(recipe: str) -> dict[str, Fraction]:
    """Return {array: bytes per code} of a transpose of codes with square blocks.

    Codes are read and written once. Scales are written once. Only one row of scales per block of rows is read, because
    all rows of a square block share their scale.
    """
    codes, scales = quantized_bytes(recipe).values()
    return {
        "codes": codes,
        "codes out": codes,
        "scales": scales / fp4kit.recipe(recipe).block_size,
        "scales out": scales,
    }


NO_BYTES: Traffic = {"nothing": Fraction(0)}  # traffic of rows that time the host


def formula(traffic: Traffic) -> str:
    """Return the traffic as text, such as "n (2 x + 1/2 codes + 1/16 scales)" for n elements."""
    return f"n ({' + '.join(f'{value} {name}' for name, value in traffic.items())})"


def traffic_bytes(traffic: Traffic, n: int) -> int:
    """Return the number of bytes that an operation on n elements moves.

    traffic: {name of array: bytes per element}.
    """
    return int(n * sum(traffic.values(), Fraction(0)))
