"""Throughput of a conversion without its verification: bytes a second, peak memory, and what it costs beside quantize.

    python benchmarks/bench_checkpoint.py [--gb 2] [--workers 2] [--recipe nvfp4-te] [--repeat 3] [--folder DIR] [--json
    FILE]

A Llama-like model of bfloat16 normal values is generated in the folder (kept for the next run). A run plans it,
converts it with so many workers and removes the result. Beside it, in as many processes, fp4kit.quantize runs on the
same arrays, which are in memory before the clock starts: overhead = conversion / that - 1, by the clock and in seconds
of processors. The conversion includes plan, start of processes, reading, measuring, writing, fsync and SHA-256. What no
tool that writes such a result can leave out is timed, too: one loop that reads the model, and writes, pushes to the
disk and hashes as many bytes as the result has. All are medians of runs that take turns; files of the model are in the
page cache. Last, what the rules of conversion take for the names of a model of 61 layers of 550 experts.
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
from fp4kit.checkpoint.convert.convert import Options, execute
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.plan.plan import Plan, make_plan
from fp4kit.storage.safetensors_file import TensorReader
from fp4kit.storage.writer import SafetensorsWriter

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
CHUNK = 2 << 20  # bytes that are read at a time where nothing is computed


class ProcessCost(NamedTuple):
    """Seconds by the clock and of processors; peaks of memory in MB: of the process, and of the largest one that it
    started.
    """

    seconds: float
    cpu: float
    peak: int
    peak_of_workers: int


class Spec:
    """A tensor to write."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, "BF16", shape


def generate(root: Path, nbytes: int) -> None:
    """Write a model of about so many bytes."""
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
    """Results of calls at once, each in a new process."""
    with ProcessPoolExecutor(len(calls), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, *zip(*calls, strict=True)))


def quantize_run(plan: Plan, workers: int) -> ProcessCost:
    """quantize of the plan's arrays, shared out over processes; reading is not timed."""
    source = open_source(plan.source.root)
    names = sorted((t.name for t in plan.converted), key=lambda name: -source.tensors[name][1].nbytes)
    runs = alone(quantize_share, [(str(plan.source.root), plan.recipe.id, names[i::workers]) for i in range(workers)])
    return ProcessCost(max(run.seconds for run in runs), sum(run.cpu for run in runs), max(run.peak for run in runs), 0)


def quantize_share(root: str, recipe: str, names: list[str]) -> ProcessCost:
    """quantize of these tensors, one after the other."""
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
    """Reading the model, and writing, pushing and hashing as many bytes as the result has, file by file, in one
    thread.
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
    """From the plan to the directory's name, with the workers that it starts."""
    start, before = time.perf_counter(), os.times()
    execute(make_plan(source, recipe), folder / "out", Options(workers))
    seconds, after = time.perf_counter() - start, os.times()
    shutil.rmtree(folder / "out")
    return ProcessCost(
        seconds, sum(after[:4]) - sum(before[:4]), peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)
    )


def names_run(recipe: str) -> tuple[int, float]:
    """How many names, and the seconds in which convert_tensors' rules decide on all of them; the best of five."""
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
    """Largest resident set in MB: of this process, or of the largest that it has waited for."""
    if who == resource.RUSAGE_SELF:  # ru_maxrss has the peak of the process that started this one
        found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
        return (int(found[1]) << 10) // 10**6 if found else 0
    return (resource.getrusage(who).ru_maxrss << 10) // 10**6


def main() -> None:
    """Print the rows, and write them where asked."""
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
    compileall.compile_dir(
        Path(fp4kit.__file__).parent, quiet=2
    )  # as pip leaves it: workers do not compile it, each anew
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
    """The figures, with the spread from the fastest run to the slowest."""
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
