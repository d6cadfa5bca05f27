"""Provide what the GPU benchmarks share: inputs, timings, the copy to compare with, checks of results, and rows.

A script bench_<operation>.py has one function, `run(bench)`, which calls `bench.row(...)` for each call that it times:

    from measure import BF16, Bench, check_quantized, main, poison
    from rows import element_bytes, quantized_bytes

    def run(bench: Bench) -> None:
        x = bench.normal(BF16)                                   # (size, size), several times the L2
        q = fp4kit.quantize(x, "mxfp4-ocp")
        poison(q)
        fp4kit.quantize(x, "mxfp4-ocp", out=q)
        check_quantized(q, x)
        traffic = element_bytes(x=x.dtype) | quantized_bytes("mxfp4-ocp")
        bench.row("quantize", "mxfp4-ocp", x, traffic, lambda: fp4kit.quantize(x, "mxfp4-ocp", out=q), target=0.95)

    if __name__ == "__main__":
        main(run)

*Traffic* is the number of bytes per element that an operation must move, by array name. *Efficiency* is the time of a
device-to-device copy of the same number of bytes, divided by the time of the operation in the same run. If the arrays
fit in the L2 cache, pass `bench.row` several calls on different buffers; the calls then take turns.

To *poison* memory is to fill it with bytes 0xEE, so that a check fails if a call leaves part of its result unwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from math import prod
from typing import Any

import limits
import numpy as np
from records import head, output_of
from rows import BenchmarkRow, Traffic, formula, traffic_bytes
from timing import Call, Time, alternate, batches

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import FLOATS
from fp4kit.layouts import unswizzle_scales

F32, F16, BF16 = FLOATS
SIZE = 16384
REPEAT = 15
CALLS = 10  # launches between two events, so that the previous kernel hides the cost of each launch
LEAD_COPIES = 16  # copies before the first event; they take 2 ms, in which the host queues all calls (100 us each)
SMALL_CALLS = 20  # calls in one CUDA graph
POISON = 0xEE
CHECKED = (slice(64), slice(-64, None))  # rows that are compared with the specification
PACKAGES = ("fp4kit", "cupy-cuda13x", "cupy-cuda12x", "numpy", "torch", "triton", "torchao", "nvidia-modelopt")


def poison(*arrays: Any) -> None:
    """Fill CuPy arrays, and the codes and block scales of Quantized objects, with the byte 0xEE.

    A check then fails if a call leaves part of the memory unwritten.
    """
    for array in arrays:
        parts = (array.packed, array.block_scale) if isinstance(array, fp4kit.Quantized) else (array,)
        for part in parts:
            if part is not None:
                part.data.memset(POISON, part.nbytes)


def check_quantized(q: fp4kit.Quantized, x: Any, **options: Any) -> None:
    """Raise AssertionError unless the first and last 64 rows of q equal what the CPU computes from these rows of x.

    If q is quantized along an axis other than the last, that axis of x is first moved to the end. With a seed, only the
    first rows are compared, because the random bits depend on the position.

    Args:
        q: the result to check, on the device
        x: the input of quantize
        options: the options of quantize, except axis, layout and tensor_amax, which come from q
    """
    source = x if q.axis == x.ndim - 1 else x.swapaxes(q.axis, -1)
    scales = None if q.block_scale is None else unswizzle_scales(q.block_scale.get(), q.scale_layout, q.scale_shape)
    amax = None if q.tensor_amax is None else q.tensor_amax.get()
    for rows in CHECKED[:1] if "seed" in options else CHECKED:
        given = {} if amax is None else {"tensor_amax": amax[rows] if amax.ndim else amax}
        cpu = fp4kit.quantize(source[rows].get(), q.recipe, **given, **options)
        assert_same_bits(q.packed[rows].get(), cpu.packed, f"{q.recipe.id}: packed[{rows.start}:{rows.stop}]")
        if scales is not None:
            assert_same_bits(scales[rows], cpu.block_scale, f"{q.recipe.id}: block_scale[{rows.start}:{rows.stop}]")


def check_rows(actual: Any, expected: Callable[[slice], Any], name: str, count: int = 64) -> None:
    """Raise AssertionError unless the first and the last rows of a CuPy array have the expected bits.

    Args:
        actual: the array
        expected: a function from a slice of rows to the NumPy array that these rows should equal
        name: the beginning of the message
        count: how many rows to compare at each end
    """
    for rows in (slice(count), slice(-count, None)):
        assert_same_bits(actual[rows].get(), expected(rows), f"{name}[{rows.start}:{rows.stop}]")


class Bench:
    """One benchmark run on one device: inputs, timings, and the rows so far.

    Args:
        size: rows and columns of the large inputs
        repeat: number of timings per call
        quick: True for 5 repeats and no torch.compile
        peers: True to time other libraries too
    """

    def __init__(self, size: int = SIZE, repeat: int = REPEAT, quick: bool = False, peers: bool = True) -> None:
        self.size, self.repeat, self.quick, self.peers = size, 5 if quick else repeat, quick, peers
        self.rows: list[BenchmarkRow] = []
        self.watch: limits.Watch | None = None  # finds the limit by issue of each row
        self._copies: dict[int, float] = {}
        self._inputs: dict[Any, Any] = {}

    @cached_property
    def cupy(self) -> Any:
        import cupy

        return cupy

    @cached_property
    def _lead(self) -> tuple[Any, Any]:
        """Two buffers of 256 MiB. Copies between them keep the device busy while the host queues the calls to time."""
        return self.cupy.zeros(1 << 28, np.uint8), self.cupy.zeros(1 << 28, np.uint8)

    def normal(self, dtype: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Return an array of normally distributed values, of shape (size, size) by default.

        Calls with the same arguments return the same array, so do not write to it.
        """
        shape = (self.size, self.size) if shape is None else shape
        key = np.dtype(dtype), shape
        if key not in self._inputs:
            self._inputs = {k: v for k, v in self._inputs.items() if v.nbytes < 1 << 28}  # one large input at a time
            n = prod(shape)
            few = np.random.default_rng(0).standard_normal(min(n, 1 << 24), dtype=np.float32).astype(dtype)
            bits = self.cupy.tile(self.cupy.asarray(few.view(f"u{few.itemsize}")), -(-n // few.size))
            self._inputs[key] = bits[:n].reshape(shape).view(dtype)
        return self._inputs[key]

    def release(self) -> None:
        """Free the inputs and the device memory that CuPy and torch cache."""
        self._inputs.clear()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def time(self, *calls: Call) -> Time:
        """Return the device time of one call, measured by CUDA events.

        If several calls are given (on different buffers), they take turns.
        """
        for call in (*calls, *calls):
            call()
        number = len(calls) * max(round(min(CALLS, 3000 / self._events(calls)) / len(calls)), 1)
        turns = [calls[i % len(calls)] for i in range(number)]
        return Time.of(self._events(turns) * 1e-6 for _ in range(self.repeat))

    def _events(self, calls: Sequence[Call]) -> float:
        """Return the device time of the calls in microseconds per call.

        Copies are queued before them, so that the device does not wait for the host.
        """
        start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        for _ in range(LEAD_COPIES):
            self.cupy.copyto(*self._lead)
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, stop)) * 1e3 / len(calls)

    def graph_time(self, call: Call) -> Time:
        """Return the device time of one call inside a CUDA graph that makes SMALL_CALLS calls."""
        self.cupy.cuda.Device().synchronize()
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            call()
            stream.begin_capture()
            for _ in range(SMALL_CALLS):
                call()
            graph = stream.end_capture()
            graph.upload()
            found = self.time(graph.launch)
        stream.synchronize()
        return Time(*(us / SMALL_CALLS for us in found))

    def host_time(self, call: Call) -> Time:
        """Return the time on the host until a call returns."""
        return self.host_times([call])[0]

    def host_times(self, calls: Sequence[Call], batch: int = 200) -> list[Time]:
        """Return the time on the host of each call.

        Calls take turns in batches of `batch` calls each; the device is idle when a batch begins.

        Rows report the smallest of these times, as timeit does, because the speed of a shared host varies: x * 2 of
        PyTorch takes 7.5 us at one moment and 11.5 us a second later.
        """
        idle = self.cupy.cuda.Device().synchronize
        watches = {i: batches(call, batch, lambda call=call: (call(), idle())) for i, call in enumerate(calls)}
        return [*alternate(watches, 2 * self.repeat, float("inf")).values()]

    def copy_us(self, nbytes: int) -> float:
        """Return the microseconds of a device-to-device copy that reads and writes nbytes in total.

        Each size is measured once per run.
        """
        if nbytes not in self._copies:
            source, target = (self.cupy.zeros(max(nbytes // 2, 1), np.uint8) for _ in range(2))
            self._copies[nbytes] = self.time(lambda: self.cupy.copyto(target, source)).median
        return self._copies[nbytes]

    def row(
        self,
        operation: str,
        recipe: str,
        x: Any,
        traffic: Traffic,
        *calls: Call,
        kind: str = "kernel",
        peers: Mapping[str, Call] | None = None,
        timed: Time | None = None,
        **targets: Any,
    ) -> BenchmarkRow:
        """Time calls on x, print the row and keep it.

        Args:
            operation: the operation's name in the record
            recipe: id of the recipe, or "" if the operation has none
            x: the array whose elements `traffic` counts, or any object with its shape and dtype
            traffic: the bytes that the operation must move per element
            calls: one call, or several on different buffers that take turns
            kind: "kernel", "graph" or "host"; see BenchmarkRow
            peers: {name: call}, timed in the same way, unless other libraries are not timed; a call that raises is
                recorded as failed
            timed: the time of the calls, if it is already known
            targets: target, target_us or beside; see BenchmarkRow
        """
        measure = {"kernel": self.time, "graph": self.graph_time, "host": self.host_time}[kind]
        n = prod(x.shape)
        nbytes = traffic_bytes(traffic, n)
        found = measure(*calls) if timed is None else timed
        row = BenchmarkRow(
            operation=operation,
            recipe=recipe,
            dtype=np.dtype(x.dtype).name,
            shape=tuple(x.shape),
            formula=formula(traffic),
            bytes=nbytes,
            us=_reported(found, kind),
            spread=found.spread,
            kind=kind,
            **targets,
        )
        if kind == "kernel":
            row.copy_us = self.copy_us(nbytes)
            row.issue_us, row.no_issue = self._issue_us(calls[0], operation, recipe, n)
        for name, call in (peers or {}).items() if self.peers else ():
            try:
                row.peers[name] = _reported(measure(call), kind)
            except Exception as error:
                row.failed[name] = (
                    f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:160]
                )
        self.rows.append(row)
        print(row, flush=True)
        return row

    def _issue_us(self, call: Call, operation: str, recipe: str, n: int) -> tuple[float | None, str]:
        """Return (the limit by issue of a call on n elements, ""), or (None, why it is not known)."""
        if self.watch is None:
            return None, "no kernel was watched"
        try:
            count = self.watch.issued_per_element(call, operation, recipe, self.cupy)
        except ValueError as error:
            return None, str(error)
        return limits.card_of(self.cupy).by_issue(count * n), ""

    def record(self) -> dict[str, Any]:
        """Return the record of the run, as written to the JSON file."""
        large = 4 * self.size * self.size  # bytes that a copy of a bfloat16 input moves
        copy = self.copy_us(large)
        about = describe() | {
            "size": self.size,
            "repeat": self.repeat,
            "copy_us": copy,
            "copy_TB/s": round(large / copy / 1e6, 3),
        }
        return about | {"rows": [row.record() for row in self.rows]}


def _reported(time: Time, kind: str) -> float:
    """Return the microseconds that a row reports: the smallest time for kind "host", else the median."""
    return time.best if kind == "host" else time.median


def describe() -> dict[str, Any]:
    """Return a record's description of device, driver, versions of the installed packages, commit and date."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "clock_GHz": limits.card_of(cupy).clock / 1e9,
        "peak_TB/s": limits.card_of(cupy).bandwidth / 1e12,
        "L2": properties["l2CacheSize"],
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
    } | head(**versions)


def main(run: Callable[[Bench], None]) -> None:
    """Run the benchmark of one script by itself, with the options of its command line, and print its rows.

    `run` is the script's function.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--repeat", type=int, default=REPEAT)
    parser.add_argument("--quick", action="store_true", help="5 repeats, no torch.compile")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.size, args.repeat, args.quick, not args.no_peers)
    # Checks compare with the specification, not with the CPU engine.
    with fp4kit.specification(), limits.watching() as bench.watch:
        run(bench)
    record = bench.record()
    print(f"{record['device']}, driver {record['driver']}, copy {record['copy_TB/s']} TB/s, {record['date']}")
