"""Benchmark a refit: re-encode an MoE layer and lay it out for a server, on one GPU or on several over NCCL.

    python benchmarks/bench_refit.py [--processes 1] [--recipe nvfp4-te] [--experts 128] [--hidden 2048] [--width 768]
                                     [--repeat 20] [--json FILE]

Each expert has two matrices: w13, the gate rows and then the up rows (2 width x hidden), and w2 (hidden x width). The
result is what servers load: packed codes, block scales in the layout swizzled_128x4, and one tensor scale per matrix.
Gate and up share a tensor scale, because they are one matrix. These calls are timed:

- "masters": MasterWeightsPlan.cast from float32 masters. They are cut into one shard per process, at odd elements of
  the concatenated matrices. Every process gets the whole layer.
- "grouped": GroupedPlan.quantize from the float32 stacks of w13 and w2. It is timed only with one process.
- "tensors": convert_tensors from named bfloat16 tensors to the tensors of a checkpoint, with linear scales. It is timed
  only with one process and on the host, for all tensors and, with `since`, for a step that changed no tensor.

`graph` is the time of a CUDA graph of the call "masters", with the messages of NCCL in it. Before and after the timing,
every byte of "masters" (of the graph, in the end) and "grouped" is compared with quantize of each matrix.

A *copy* is a device-to-device copy on the same GPU. Its reads and writes together have as many bytes as the process
must move. The process reads its masters twice, once for the amaxes, and writes all codes and scales. `of a copy` is the
copy's time divided by the call's time. `once` counts the masters once. NCCL's bytes are not counted.

Times come from CUDA events on each process, as in bench_distributed.py; the largest of the medians is reported. With
several processes, `step` is shorter than the sum of its stages, because it overlaps cast, gather and place.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_distributed import Rank, cuts_of, run_benchmark

LAYOUT = "swizzled_128x4"


def shapes_of(experts: int, hidden: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a layer.

    First come w13 (2 width x hidden) of all experts, then w2 (hidden x width) of all experts.
    """
    return [(2 * width, hidden)] * experts + [(hidden, width)] * experts


class RefitRank(Rank):
    """The communicator and the weights of one process, with methods that time the calls.

    Args:
        comm: the communicator of the process
        args: the arguments of the command line
    """

    def __init__(self, comm: Any, args: argparse.Namespace) -> None:
        super().__init__(comm, (), args.repeat)
        self.args, self.shapes = args, shapes_of(args.experts, args.hidden, args.width)
        random, shapes = self.cupy.random.default_rng(7), (self.shapes[0], self.shapes[-1])
        self.stacks = [
            random.standard_normal((args.experts, *shape), dtype=np.float32) * np.float32(0.02) for shape in shapes
        ]
        self.weights = [w for stack in self.stacks for w in stack]
        self.elements = sum(w.size for w in self.weights)

    def copy_us(self, nbytes: int) -> float:
        """Return the microseconds of a copy that reads and writes nbytes in total."""
        source, target = (self.cupy.zeros(max(nbytes // 2, 1), np.uint8) for _ in range(2))
        return self.time([("copy", lambda: self.cupy.copyto(target, source))])["copy"]

    def check(self, results: Sequence[Any]) -> int:
        """Compare every byte of the results with fp4kit.quantize of each matrix, and return the number of bytes.

        Raises AssertionError if a byte differs.
        """
        import fp4kit

        count = 0
        for t, (q, w) in enumerate(zip(results, self.weights, strict=True)):
            expected = fp4kit.quantize(w, self.args.recipe, scale_layout=LAYOUT)
            for part in ("packed", "block_scale", "tensor_scale"):
                pair = [getattr(x, part) for x in (q, expected)]
                if pair[0] is None and pair[1] is None:
                    continue
                a, b = (self.cupy.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in pair)
                differ = int((a != b).sum()) if a.size == b.size else -1
                assert not differ, f"matrix {t}, {part}: {differ} of {a.size} bytes differ from {b.size}"
                count += a.size
        return count

    def row(self, name: str, us: dict[str, float], elements: int, results: Sequence[Any]) -> dict[str, Any]:
        """Return the record of a timed call.

        us: {name: microseconds}, where "step" is the name of the whole call.
        elements: the number of master weights that this process reads.
        results: the Quantized that it writes.
        """
        written = sum(part.nbytes for q in results for part in (q.packed, q.block_scale))
        twice, once = (self.copy_us(4 * elements * reads + written) for reads in (2, 1))
        copies = {"copy_us": twice, "copy_once_us": once}
        ratios = {"of_a_copy": round(twice / us["step"], 3), "once": round(once / us["step"], 3)}
        return {"call": name, "us": us, "written_bytes": written} | copies | ratios

    def masters(self) -> dict[str, Any]:
        """Time MasterWeightsPlan.cast, and return its record."""
        from fp4kit import MasterWeightsPlan, Shard

        cuts, rank = cuts_of("flat", [w.size for w in self.weights], self.comm.size), self.comm.rank
        shards = [
            Shard(w.reshape(-1)[a:b] if self.comm.size == 1 else w.reshape(-1)[a:b].copy(), w.shape, int(a))
            for w, a, b in zip(self.weights, cuts[rank], cuts[rank + 1], strict=True)
        ]
        plan = MasterWeightsPlan(shards, self.comm, self.args.recipe, scale_layout=LAYOUT)
        result = plan.cast()
        compared = self.check(result)
        stages = self.time(plan.stages)
        (step,) = self.time([("step", plan.cast)]).values()
        us = stages | {"step": step, "host": self.host_us(plan.cast)}
        us["graph"] = self.graph_us(plan.cast, result)
        assert self.check(result) == compared
        return self.row("masters", us, sum(s.values.size for s in shards), result) | {"compared_bytes": compared}

    def graph_us(self, step: Callable[[], Any], results: Sequence[Any]) -> float:
        """Capture a step in a CUDA graph, fill its results with zeros, and return the microseconds of the graph."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            step()
            graph = stream.end_capture()
        for q in results:
            q.packed.fill(0)
            q.block_scale.fill(0)
        return self.time([("graph", graph.launch)])["graph"]

    def grouped(self) -> dict[str, Any]:
        """Time GroupedPlan.quantize of both stacks, and return its record."""
        from fp4kit import GroupedPlan

        plans = [GroupedPlan(stack, self.args.recipe, scale_layout=LAYOUT) for stack in self.stacks]

        def step() -> list[Any]:
            return [q for plan in plans for q in plan.quantize()]

        compared = self.check(step())
        us = self.time([("step", step)]) | {"host": self.host_us(step)}
        result = step()
        assert self.check(result) == compared
        return self.row("grouped", us, self.elements, result) | {"compared_bytes": compared}

    def named(self) -> list[tuple[str, Any]]:
        """Return the (name, tensor) pairs of the layer in bfloat16, as a trainer sends them."""
        import ml_dtypes

        gate_up, down = (stack.astype(ml_dtypes.bfloat16) for stack in self.stacks)
        width, name = self.args.width, "model.layers.0.mlp.experts.{}.{}_proj.weight"
        pairs = []
        for e in range(self.args.experts):
            parts = {"gate": gate_up[e, :width], "up": gate_up[e, width:], "down": down[e]}
            pairs += [(name.format(e, part), array) for part, array in parts.items()]
        return pairs

    def tensors(self) -> dict[str, Any]:
        """Time convert_tensors on the host, until the device has finished, and return its record.

        Two calls are timed. The first call converts all tensors. The second call passes `since` and finds all tensors
        unchanged.
        """
        from fp4kit.checkpoint import Rules, convert_tensors

        pairs, rules = self.named(), Rules.of(self.args.recipe)
        converted = dict(convert_tensors(pairs, rules))

        def seconds(since: Any) -> float:
            self.cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            count = sum(1 for _ in convert_tensors(pairs, rules, since=since))
            self.cupy.cuda.Device().synchronize()
            assert count == (0 if since else len(converted)), f"{count} tensors were yielded"
            return time.perf_counter() - start

        every, unchanged = ([seconds(since) * 1e3 for _ in range(3)] for since in (None, converted))
        nbytes = 2 * self.elements + sum(part.nbytes for part in converted.values())
        copy_ms = self.copy_us(nbytes) / 1e3
        found = {"tensors": len(converted), "ms": round(min(every), 2), "unchanged_ms": round(min(unchanged), 2)}
        return {"call": "tensors"} | found | {"copy_ms": round(copy_ms, 2), "of_a_copy": round(copy_ms / min(every), 3)}


def work(rank: int, processes: int, path: Path, args: argparse.Namespace) -> None:
    """Run the benchmark in one process. Rank 0 prints the record as one line of JSON.

    path: the file through which several processes exchange NCCL's id.
    """
    import cupy
    from measure import describe

    from fp4kit.training.communicators import Nccl, SingleProcess

    cupy.cuda.Device(rank).use()
    comm = SingleProcess() if processes == 1 else Nccl.from_file(path, rank, processes)
    layer = RefitRank(comm, args)
    calls = [layer.masters()]
    if processes == 1:
        calls.append(layer.grouped())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls.append(layer.tensors())
    if rank == 0:
        about = describe() | {"processes": processes, "recipe": args.recipe, "scale_layout": LAYOUT}
        sizes = {name: getattr(args, name) for name in ("experts", "hidden", "width", "repeat")}
        print(json.dumps(about | sizes | {"elements": layer.elements, "equal": True, "calls": calls}), flush=True)


def table(record: dict[str, Any]) -> str:
    """Return the times of a record as text, one line per call."""
    size = f"{record['experts']} experts of {record['hidden']} x {record['width']}, {record['elements'] / 1e6:.0f} M"
    lines = [f"{record['processes']} x {record['device']}: {size} weights, {record['recipe']}: equal"]
    for call in record["calls"]:
        if call["call"] == "tensors":
            times = f"{call['ms']:.2f} ms on the host for {call['tensors']} tensors, {call['unchanged_ms']:.2f} ms if"
            lines.append(
                f"tensors  {times} unchanged; copy {call['copy_ms']:.2f} ms; {call['of_a_copy']:.3f} of a copy"
            )
            continue
        us = "  ".join(f"{name} {value:.0f}" for name, value in call["us"].items())
        copies = f"copy {call['copy_us']:.0f}, with masters once {call['copy_once_us']:.0f}"
        lines.append(f"{call['call']:8} us: {us}; {copies}; {call['of_a_copy']:.3f} of a copy, once {call['once']:.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, print the table and, if --json is given, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--recipe", default="nvfp4-te")
    for name, default in (("experts", 128), ("hidden", 2048), ("width", 768), ("repeat", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    run_benchmark(parser, ("recipe", "experts", "hidden", "width", "repeat"), Path(__file__), work, table)


if __name__ == "__main__":
    main()
