"""Measure the throughput, peak memory and overhead of a checkpoint conversion without its verification.

    python benchmarks/bench_checkpoint.py [--gb 2] [--workers 2] [--recipe nvfp4-te] [--repeat 3] [--folder DIR] [--json
    FILE]

The input is a Llama-like model of normal bfloat16 values. It is generated in the folder and kept for the next run.
Three things are timed; they take turns, and medians are reported. Model files are in the page cache.

- Conversion (`convert_run`): plan, start of the workers, reading, measuring, writing, fsync and SHA-256.
- quantize (`quantize_run`): fp4kit.quantize of the same arrays in the same number of processes. The arrays are loaded
  before the clock starts. overhead = conversion / quantize - 1, both for elapsed time and for CPU time.
- Bytes alone (`bytes_run`): a loop that reads the model, then writes, fsyncs and hashes as many bytes as the result
  has. No tool that writes such a result can do less.

Last, `names_run` times how long the rules of convert_tensors take to decide on the tensor names of a model with 61
layers of 550 experts.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.checkpoint import Rules
from fp4kit.checkpoint.convert.convert import execute
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.storage.files import SafetensorsWriter, TensorReader

T = TypeVar("T")
HIDDEN, INNER, VOCABULARY = 2048, 8192, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (512, HIDDEN),
    "self_attn.v_proj": (512, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYERS_PER_FILE = 4
CHUNK = 2 << 20  # bytes per read in bytes_run, which computes nothing but hashes


class ProcessCost(NamedTuple):
    """The time and memory that one timed run took.

    Attributes:
        seconds: elapsed time
        cpu: CPU time in seconds, summed over processes
        peak: peak memory of the process in MB
        peak_of_workers: peak memory in MB of its largest child process, or 0 if it started no process
    """

    seconds: float
    cpu: float
    peak: int
    peak_of_workers: int


class Spec:
    """Describe a bfloat16 tensor for SafetensorsWriter: its name, shape and dtype."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, "BF16", shape


def generate(root: Path, nbytes: int) -> None:
    """Write a Llama-like model of about nbytes bytes, with config.json, into the new folder root.

    Weights are normally distributed bfloat16 values from a fixed seed. The model has at least one layer.
    """
    per_layer = sum(2 * rows * columns for rows, columns in LAYER.values())
    layers = max(round((nbytes - 2 * VOCABULARY * HIDDEN) / per_layer), 1)
    files: dict[int, list[Spec]] = {0: [Spec("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]}
    for i in range(layers):
        for name, shape in LAYER.items():
            files.setdefault(i // LAYERS_PER_FILE, []).append(Spec(f"model.layers.{i}.{name}.weight", shape))
    root.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    (root / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    for number, specs in files.items():
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        with SafetensorsWriter(root / name, specs, {"format": "pt"}) as writer:
            for spec in specs:
                values = generator.standard_normal(spec.shape, np.float32)
                writer.write(spec.name, (values * np.float32(0.02)).astype(ml_dtypes.bfloat16))
            writer.finish()


def alone(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call the function once per tuple of arguments. All calls run at the same time, each in a new process.

    Return the results in the order of ``calls``.
    """
    with ProcessPoolExecutor(len(calls), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, *zip(*calls, strict=True)))


def quantize_run(plan: Plan, workers: int) -> ProcessCost:
    """Time fp4kit.quantize on the tensors that the plan converts, divided among `workers` processes.

    Reading the tensors is not timed.
    """
    source = open_source(plan.source.root)
    names = sorted((t.name for t in plan.converted), key=lambda name: -source.tensors[name][1].nbytes)
    runs = alone(quantize_share, [(str(plan.source.root), plan.recipe.id, names[i::workers]) for i in range(workers)])
    return ProcessCost(max(run.seconds for run in runs), sum(run.cpu for run in runs), max(run.peak for run in runs), 0)


def quantize_share(root: str, recipe: str, names: list[str]) -> ProcessCost:
    """Time fp4kit.quantize on the named tensors, one after the other, in this process. Reading them is not timed.

    root: the directory of the model.
    recipe: the id of the recipe.
    names: the names of the tensors.
    """
    tensors, seconds, cpu = open_source(Path(root)).tensors, 0.0, 0.0
    for name in names:
        file, entry = tensors[name]
        with TensorReader(file) as reader:
            x = reader.read(entry)
        start, start_cpu = time.perf_counter(), time.process_time()
        fp4kit.quantize(x, recipe)
        seconds, cpu = seconds + time.perf_counter() - start, cpu + time.process_time() - start_cpu
    return ProcessCost(seconds, cpu, peak(resource.RUSAGE_SELF), 0)


def bytes_run(plan: Plan, folder: Path) -> ProcessCost:
    """Time only the I/O of a conversion: read the model, and write, fsync and hash as many bytes as the result has.

    This is done file by file, in one thread.

    plan: the plan of the conversion.
    folder: where to write a file, which is removed.
    """
    start, before, buffer = time.perf_counter(), time.process_time(), memoryview(bytearray(CHUNK))
    share = plan.bytes_out / plan.bytes_in
    for file in plan.source.files:
        written, digest = folder / "bytes", hashlib.sha256()
        with file.path.open("rb", buffering=0) as source, written.open("wb", buffering=0) as target:
            while count := source.readinto(buffer):
                part = buffer[: round(count * share)]
                target.write(part)
                digest.update(part)
            os.fsync(target.fileno())
        written.unlink()
    return ProcessCost(time.perf_counter() - start, time.process_time() - before, peak(resource.RUSAGE_SELF), 0)


def convert_run(source: Path, folder: Path, recipe: str, workers: int) -> ProcessCost:
    """Time a whole conversion, from making the plan to the final rename of the finished directory.

    The cost includes the worker processes. The result is removed afterwards.

    source: the directory of the model.
    folder: where to write the result.
    recipe: the id of the recipe.
    workers: the number of workers.
    """
    start, before = time.perf_counter(), os.times()
    execute(make_plan(source, recipe), folder / "out", Options(workers))
    seconds, after = time.perf_counter() - start, os.times()
    shutil.rmtree(folder / "out")
    return ProcessCost(
        seconds, sum(after[:4]) - sum(before[:4]), peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)
    )


def names_run(recipe: str) -> tuple[int, float]:
    """Time how long the rules of convert_tensors take to decide which tensors of a large model to quantize.

    Return (number of tensor names, seconds). The seconds are the smallest of five timings; each timing covers all
    names.

    recipe: the id of the recipe.
    """
    leaves = ("gate_proj", "up_proj", "down_proj")
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{leaf}.weight" for i in range(61) for e in range(550) for leaf in leaves
    ]
    rules, seconds = Rules.of(recipe, config={"num_hidden_layers": 61}), []
    for _ in range(5):
        start = time.perf_counter()
        rules.decisions((name, "BF16", (2048, 7168)) for each in names for name in rules.names(each))
        seconds.append(time.perf_counter() - start)
    return len(names), min(seconds)


def peak(who: int) -> int:
    """Return the peak resident memory in MB of this process or of its child processes.

    Return 0 if no child process has ended, or if the system does not report the peak of this process.

    who: RUSAGE_SELF for this process, or RUSAGE_CHILDREN for the largest child process that has ended.
    """
    if who == resource.RUSAGE_SELF:  # ru_maxrss includes the peak of the parent process, so VmHWM is read instead
        status = Path("/proc/self/status")
        found = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else "")
        return (int(found[1]) << 10) // 10**6 if found else 0
    return (resource.getrusage(who).ru_maxrss << 10) // 10**6


def main() -> None:
    """Time conversion, quantize and bytes alone in turns, and report the times.

    The model is generated first, unless an earlier run left it in the folder.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--recipe", default="nvfp4-te")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fp4kit-bench")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = args.folder / f"model-{args.gb:g}"
    if not source.exists():
        generate(source, int(args.gb * 1e9))
    # Compile the modules to bytecode first, as pip does, so that no worker spends time on it.
    compileall.compile_dir(Path(fp4kit.__file__).parent, quiet=2)
    plan = make_plan(source, args.recipe)
    own, whole, moved = [], [], []
    for _ in range(args.repeat):
        moved.append(bytes_run(plan, args.folder))
        own.append(quantize_run(plan, args.workers))
        whole += alone(convert_run, [(source, args.folder, args.recipe, args.workers)])
    report(args, plan, own, moved, whole, names_run(args.recipe))


def report(
    args: argparse.Namespace,
    plan: Plan,
    own: list[ProcessCost],
    moved: list[ProcessCost],
    whole: list[ProcessCost],
    named: tuple[int, float],
) -> None:
    """Print the record and, if --json names a file, write the record to it.

    Args:
        args: the command line
        plan: the plan of the conversion
        own: runs of quantize_run
        moved: runs of bytes_run
        whole: runs of convert_run
        named: the result of names_run
    """
    seconds = [median(run.seconds for run in runs) for runs in (whole, own)]
    cpu = [median(run.cpu for run in runs) for runs in (whole, own)]
    found = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "date": date.today().isoformat(),
        "fp4kit": fp4kit.__version__,
        "engine": fp4kit.engine(),
        "recipe": args.recipe,
        "workers": args.workers,
        "bytes": plan.bytes_in,
        "convert_s": sorted(round(run.seconds, 2) for run in whole),
        "quantize_s": sorted(round(run.seconds, 2) for run in own),
        "bytes_alone_s": sorted(round(run.seconds, 2) for run in moved),
        "GB/s": round(plan.bytes_in / seconds[0] / 1e9, 3),
        "overhead": round(seconds[0] / seconds[1] - 1, 3),
        "convert_cpu_s": round(cpu[0], 2),
        "quantize_cpu_s": round(cpu[1], 2),
        "overhead_cpu": round(cpu[0] / cpu[1] - 1, 3),
        "names": named[0],
        "names_s": round(named[1], 2),
        "peak_rss_MB": max(run.peak for run in whole),
        "peak_rss_of_a_worker_MB": max(run.peak_of_workers for run in whole),
    }
    for key, value in found.items():
        print(f"{key:>28} {value}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
