"""Benchmark cast_master_weights on several GPUs over NCCL, one process per GPU.

    python benchmarks/bench_distributed.py [--processes N] [--gigabytes 1] [--repeat 20] [--json FILE]

The weights are float32 masters with the shapes of transformer layers of width 4096, and two small matrices of odd
sizes. --gigabytes counts their size in bfloat16. A *partition* is a way to cut the matrices into one shard per process:

- "flat" cuts the concatenation of all matrices at odd elements, as optimizers that shard flat parameters do;
- "each" cuts every matrix at odd elements.

Every rank compares every byte of every matrix with quantize of the whole matrix.

Times come from CUDA events on each rank, with a barrier before each step. Each rank takes the median over --repeat
steps; the largest of these medians is reported. A stage that waits for another rank includes the wait. `step` is the
whole step, which overlaps cast, gather and place; `host` is the time until the call returns. NCCL_NVLS_ENABLE is set to
0, so that NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = "nvfp4-te-2d"
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
ODD = ((1040, 80), (48, 4112))


def shapes_of(elements: int) -> list[tuple[int, int]]:
    """Return shapes of layer matrices with at least `elements` elements in total, followed by the shapes in ODD."""
    found: list[tuple[int, int]] = []
    while sum(M * K for M, K in found) < elements:
        found.append(LAYER[len(found) % len(LAYER)])
    return [*found, *ODD]


def cuts_of(partition: str, sizes: Sequence[int], processes: int) -> np.ndarray:
    """Return the element indices at which each matrix is cut into shards, of shape (processes + 1, matrices).

    Inner cuts are odd, so that they are inside bytes and blocks.

    partition: "each" to divide every matrix among the processes; "flat" to divide all matrices as one buffer.
    sizes: the matrices' numbers of elements.
    """
    total, ends = sum(sizes), np.cumsum(sizes)
    if partition == "each":
        return np.array(
            [
                [(n * i // processes | 1) if 0 < i < processes else n * (i > 0) for n in sizes]
                for i in range(processes + 1)
            ]
        )
    edges = [(total * i // processes | 1) if 0 < i < processes else total * (i > 0) for i in range(processes + 1)]
    return np.array([np.clip(edge - (ends - sizes), 0, sizes) for edge in edges])


class Rank:
    """The communicator and the weights of one process. All processes draw equal weights from a fixed seed.

    Args:
        comm: the communicator of the process
        shapes: the shapes of the matrices
        repeat: the number of timed steps
    """

    def __init__(self, comm: Any, shapes: Sequence[tuple[int, int]], repeat: int) -> None:
        import cupy

        self.cupy, self.comm, self.shapes, self.repeat = cupy, comm, list(shapes), repeat
        random = cupy.random.default_rng(7)
        self.weights = [random.standard_normal(shape, dtype=np.float32) * np.float32(0.02) for shape in shapes]
        self._flag = cupy.zeros(1, np.uint32)

    def run(self, partition: str) -> dict[str, Any]:
        """Cast the weights in a partition, compare the results with the whole matrices, and time the stages.

        Return this partition's part of the record.
        """
        from fp4kit import MasterWeightsPlan, Shard

        cuts, rank = cuts_of(partition, [w.size for w in self.weights], self.comm.size), self.comm.rank
        shards = [
            Shard(w.reshape(-1)[a:b].copy(), w.shape, int(a))
            for w, a, b in zip(self.weights, cuts[rank], cuts[rank + 1], strict=True)
        ]
        start = time.perf_counter()
        plan = MasterWeightsPlan(shards, self.comm, RECIPE, columnwise=True)
        plan_ms = (time.perf_counter() - start) * 1e3
        result = plan.cast()
        compared = self.compare(result)
        stages = self.time(plan.stages)
        (step,) = self.time([("step", plan.cast)]).values()
        host = self.host_us(plan.cast)
        self.compare(result)
        return {
            "partition": partition,
            "plan_ms": plan_ms,
            "compared_bytes": compared,
            "us": stages | {"step": step, "host": host},
        }

    def compare(self, result: Sequence[Any]) -> int:
        """Compare every matrix with fp4kit.quantize of the whole matrix, and return the number of bytes compared.

        Raises AssertionError if a byte differs.
        """
        import fp4kit

        count = 0
        for t, ((row, column), w) in enumerate(zip(result, self.weights, strict=True)):
            whole = fp4kit.quantize(w, RECIPE)
            for name, q, expected in (("rowwise", row, whole), ("columnwise", column, fp4kit.transpose(whole))):
                for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
                    a, b = (
                        self.cupy.ascontiguousarray(getattr(x, part)).reshape(-1).view(np.uint8) for x in (q, expected)
                    )
                    differ = int((a != b).sum())
                    assert a.size == b.size and not differ, (
                        f"matrix {t}, {name} {part}: {differ} of {a.size} bytes differ"
                    )
                    count += a.size
        return count

    def barrier(self) -> None:
        """Make the device wait until all ranks have arrived."""
        self.comm.all_reduce_max(self._flag)

    def time(self, calls: Sequence[tuple[str, Any]]) -> dict[str, float]:
        """Return {name: median microseconds on the slowest rank} of calls that are made one after the other.

        calls: (name, call) pairs in order.
        """
        cuda = self.cupy.cuda
        times: dict[str, list[float]] = {name: [] for name, _ in calls}
        for i in range(self.repeat + 3):
            events = [cuda.Event() for _ in range(len(calls) + 1)]
            self.barrier()
            events[0].record()
            for (_, call), event in zip(calls, events[1:], strict=True):
                call()
                event.record()
            events[-1].synchronize()
            for name, a, b in zip(times, events, events[1:], strict=False):
                times[name] += [cuda.get_elapsed_time(a, b) * 1e3] * (i >= 3)
        medians = np.array([statistics.median(t) for t in times.values()])
        slowest = self.comm.all_gather(medians).reshape(self.comm.size, -1).max(axis=0)
        return dict(zip(times, np.round(slowest, 1).tolist(), strict=True))

    def host_us(self, call: Any) -> float:
        """Return the median microseconds on the host until a call returns."""
        times = []
        for _ in range(self.repeat):
            self.cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return round(statistics.median(times), 1)


def work(rank: int, processes: int, path: Path, args: argparse.Namespace) -> None:
    """Run the benchmark in one process.

    `path` is the file through which the processes exchange NCCL's id. Rank 0 prints the record as one line of JSON.
    """
    import cupy
    import cupy.cuda.nccl
    from measure import describe

    from fp4kit.training.communicators import Nccl

    cupy.cuda.Device(rank).use()
    comm = Nccl.from_file(path, rank, processes)
    shapes = shapes_of(round(args.gigabytes * 1e9 / 2))
    me = Rank(comm, shapes, args.repeat)
    partitions = [me.run(partition) for partition in ("flat", "each")]
    elements = sum(M * K for M, K in shapes)
    source, target = cupy.zeros(elements * 2, np.uint8), cupy.zeros(elements * 2, np.uint8)
    copy = me.time([("copy", lambda: cupy.copyto(target, source))])["copy"]
    if rank == 0:
        about = describe() | {"processes": processes, "recipe": RECIPE, "matrices": len(shapes), "elements": elements}
        about |= {
            "weights_bf16_GB": elements * 2 / 1e9,
            "copy_TB/s": round(4 * elements / copy / 1e6, 3),
            "repeat": args.repeat,
        }
        about |= {"nccl": cupy.cuda.nccl.get_version(), "equal": True}
        print(json.dumps(about | {"partitions": partitions}), flush=True)


def spawn_with(script: Path, processes: int, options: Sequence[str]) -> dict[str, Any]:
    """Start the processes of a script and return the record that rank 0 prints.

    If one process fails, kill the others and raise SystemExit.

    options: options of the script, which every process gets before --file, --processes and --rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script.resolve()), *options, "--file", str(Path(folder) / "id")]
        command += ["--processes", str(processes), "--rank"]
        environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
        running = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=subprocess.PIPE if rank == 0 else None, text=True
            )
            for rank in range(processes)
        ]
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            time.sleep(0.1)
        failed = [rank for rank, p in enumerate(running) if p.poll()]
        for p in running:
            if p.poll() is None:
                p.kill()
        output = running[0].communicate()[0]
        if failed:
            raise SystemExit(f"processes {failed} failed; their errors are above")
        return json.loads(output.splitlines()[-1])


def run_benchmark(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    script: Path,
    work: Callable[[int, int, Path, argparse.Namespace], None],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Parse the command line of a benchmark, run its processes, print the table and, with --json, write the record.

    In a process that spawn_with started, do the work of its rank instead.

    parser: the parser, with the option --processes and the options of the benchmark. names: the options that every
    process gets. script: the benchmark. work: called as work(rank, processes, file, options). table: returns a record
    as text.
    """
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.processes, args.file, args)
        return
    options = [text for name in names for text in (f"--{name}", str(getattr(args, name)))]
    record = spawn_with(script, args.processes, options)
    print(table(record))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> str:
    """Return the times of the record as a text table, with one row per partition and one column per stage."""
    weights = f"{record['elements'] / 1e6:.0f} M weights, {record['matrices']} matrices"
    head = f"{record['processes']} x {record['device']}: {weights}: equal"
    stages = list(record["partitions"][-1]["us"])
    lines = [head, "us        " + "".join(f"{name:>10}" for name in stages)]
    for p in record["partitions"]:
        lines.append(f"{p['partition']:10}" + "".join(f"{p['us'].get(name, 0):10.1f}" for name in stages))
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, print the table and, if --json is given, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=20)
    run_benchmark(parser, ("gigabytes", "repeat"), Path(__file__), work, table)


if __name__ == "__main__":
    main()
