"""Convert a checkpoint: execute a plan job by job, into a directory that appears whole or not at all."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.containers import mlx
from fp4kit.checkpoint.containers.configs import declarations
from fp4kit.checkpoint.convert import fp8_to_mxfp8, run_job
from fp4kit.checkpoint.convert.journal import Journal, key_of, request_facts, source_facts
from fp4kit.checkpoint.convert.scheduler import JobScheduler
from fp4kit.checkpoint.model.manifest import MANIFEST, Digest, digest_of, manifest_of, names_in
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, INDEX
from fp4kit.checkpoint.model.slabs import SLAB_BYTES
from fp4kit.checkpoint.plan.job import CARRY, REQUANTIZE, Done, Job, Measured
from fp4kit.checkpoint.plan.plan import Plan, ShardPlan, make_plan
from fp4kit.checkpoint.plan.plan_jobs import jobs_of
from fp4kit.checkpoint.plan.scale_search import Losses, ScaleSearch
from fp4kit.checkpoint.run import staging
from fp4kit.checkpoint.run.executors import executor_of, pending_limit, run_all, start_devices
from fp4kit.checkpoint.run.leftovers import jobs_of_finished_run, remove_leftovers
from fp4kit.checkpoint.run.prefetch import Prefetcher
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.cpu.library import num_threads
from fp4kit.lazy import lazy_property
from fp4kit.ops.engines import engine
from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.gguf_file import GgufFile, read_any_header
from fp4kit.storage.gguf_writer import gguf_header
from fp4kit.storage.json_object import dump_object
from fp4kit.storage.safetensors_file import nbytes_of
from fp4kit.storage.whole_file import write_file
from fp4kit.storage.writer import file_order, header_bytes

_BESIDE, _FORMS = 128 << 20, 12  # bytes of the interpreter with its libraries; slabs that are in memory at a time
# Processes take about a second to start. From so many workers and bytes to read on they are faster: threads of one
# interpreter wait for each other, and eight are no faster than four (1.2 GB/s on 16 cores; eight processes 2.0, fifteen
# 2.7: November 2026).
FROM_WORKERS, FROM_BYTES, MOST_PROCESSES = 4, 4 << 30, 8
Progress = Callable[[int], None]  # called with the bytes of source tensors done since the last call


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: its plan, and every job as it was done."""

    plan: Plan
    destination: Path
    done: tuple[Done, ...]

    @lazy_property
    def actions(self) -> dict[str, int]:
        """Jobs by what became of them: quantize, cast, requantize, ...; a cast or a carry that was not exact is a
        requantize.
        """
        return dict(Counter(one.action for one in self.done))

    @property
    def inexact(self) -> tuple[str, ...]:
        """Layers that were to keep their codes and could not: their scales do not fit."""
        planned = {piece.module: tensor.action for tensor in self.plan.tensors for piece in tensor.pieces}
        again = (one.key.rpartition("#")[0] for one in self.done if one.action == REQUANTIZE)
        return tuple(dict.fromkeys(name for name in again if planned[name] != REQUANTIZE))

    @lazy_property
    def gains(self) -> dict[str, Losses]:
        """Layer -> errors before and after the search of its scales, of those whose scales were searched."""
        found: dict[str, Losses] = {}
        for one in self.done:
            losses, name = Losses(*one.losses), one.key.rpartition("#")[0]
            if losses.signal:
                found[name] = found.get(name, Losses()).plus(losses)
        return found

    @property
    def replaced(self) -> int:
        """NaN and infinities that were replaced."""
        return sum(one.replaced for one in self.done)


def convert(
    source: str | Path,
    destination: str | Path,
    recipe: str | Recipe = "nvfp4-te",
    *,
    format: str | None = None,
    wishes: Wishes | None = None,
    input_scale: float | None = None,
    requantize: bool = False,
    nonfinite: str = "error",
    codes: str | Path | None = None,
    search: ScaleSearch | None = None,
    options: Options | None = None,
) -> ConversionReport:
    """Convert the model directory ``source`` into the new directory ``destination``, or a GGUF file into a new one.

    Arguments are those of make_plan; options: how it is executed.
    Raises CheckpointError before any work for what a plan can see, and as soon as it is read for NaN or infinity in a
    tensor that is to be quantized; whatever is raised, ``destination`` does not exist afterwards. Exact: codes and
    scales equal fp4kit.quantize of the whole tensor with the tensor amax of its sharing group, but for
        sharing groups and tensors of zeros, whose tensor scale is 1.
    """
    plan = make_plan(
        source,
        recipe,
        format=format,
        wishes=wishes,
        input_scale=input_scale,
        requantize=requantize,
        nonfinite=nonfinite,
        codes=codes,
        search=search,
    )
    return execute(plan, destination, options)


@dataclass(frozen=True)
class Options:
    """How a plan is executed; the bytes that are written do not depend on it.

    workers: threads where GPUs or the compiled engine do the work, else processes on this machine; a script that asks
    for processes needs ``if __name__ == "__main__":``. None: fp4kit.num_threads() threads, at least two; of processes
    this one. processes: instead of the compiled engine's threads where they are faster, of many workers on large
    models; None: at most 8. executor: any of concurrent.futures, instead of those; its workers see the files under the
    same paths. devices: CUDA devices that quantize, in turn; none: the CPU. resume: go on with an interrupted run.
    progress: called with bytes that add up to bytes_to_read.
    """

    workers: int | None = None
    executor: Executor | None = None
    devices: Sequence[int] = ()
    resume: bool = False
    progress: Progress | None = None
    processes: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise CheckpointError(f"workers: got {self.workers!r}; a whole number of them, at least 1, is needed")


def check(plan: Plan, destination: str | Path, resume: bool = False, removes: bool = False) -> None:
    """Raise CheckpointError for all that can be refused before work: the destination, what is left there, the space.

    removes: what is left there is removed before, if that can be done. With ``resume``, a destination is no error if
    the run that is to be resumed had finished it.
    """
    target = Path(destination)
    _check_name(plan, target)
    if resume and finished_before(plan, target) is not None:
        return
    staging.check_destination(plan.source.root, target)
    if not removes or staging.removable(target) is None:
        staging.check_partial(target, resume)
    staging.check_space(target, bytes_to_write(plan))


def _check_name(plan: Plan, target: Path) -> None:
    """Raise CheckpointError for a name that says something else than what is written."""
    if (target.suffix.lower() == ".gguf") != plan.is_file:
        made = (
            "a GGUF file becomes a GGUF file, whose name ends in .gguf"
            if plan.is_file
            else (
                "a model directory becomes a directory; convert_hf_to_gguf.py of llama.cpp makes a GGUF file of it,"
                " then convert that"
            )
        )
        raise CheckpointError(f"{target}: {made}")


def execute(plan: Plan, destination: str | Path, options: Options | None = None) -> ConversionReport:
    """Execute ``plan`` into the new directory ``destination``; see convert."""
    options, target = options or Options(), Path(destination)
    done = finished_before(plan, target) if options.resume else None
    remove_leftovers(target)
    if done is not None:
        return ConversionReport(plan, target, done)
    check(plan, target, options.resume)
    if options.executor is not None:
        return ConversionReport(plan, target, _execute(plan, target, options))
    with Prefetcher(plan.source.files, bytes_to_read(plan), options.progress or (lambda count: None)) as progress:
        start_devices(options.devices, options.executor)
        return ConversionReport(plan, target, _execute(plan, target, replace(options, progress=progress)))


def finished_before(plan: Plan, target: Path) -> tuple[Done, ...] | None:
    """Return what a run of this plan did that was killed when its result had its name already. None if there was no
    such run.
    """
    found = jobs_of_finished_run(target, key_of(plan.source, plan.request))
    keys = [job.key for job in jobs_of(plan, _nowhere(plan))]
    return None if found is None or not found.keys() >= {*keys} else tuple(found[key] for key in keys)


def _execute(plan: Plan, target: Path, options: Options) -> tuple[Done, ...]:
    """Run a plan into a partial directory, which gets its name; gives what was done."""
    _check_planned(plan)
    key = key_of(plan.source, plan.request)
    file = plan.shards[0].name if plan.is_file else None
    with (
        staging.staged_directory(target, options.resume, file) as stage,
        Journal(stage.folder / staging.JOURNAL, key) as journal,
    ):
        stage.is_ours = True
        done = _Run(plan, stage.folder.absolute(), options, journal).run()
        if key_of(plan.source, plan.request) != key:
            raise CheckpointError(
                f"{plan.source.root}: changed while it was converted; run again when nothing writes to it"
            )
    return done


def _check_planned(plan: Plan) -> None:
    """Raise CheckpointError for a source that is not as it was when it was planned."""
    for file in plan.source.files:
        if read_any_header(file.path, file.name) != file:
            raise CheckpointError(
                f"{file.label}: changed since the conversion was planned; run again when nothing writes to it"
            )


def bytes_to_read(plan: Plan) -> int:
    """Bytes that execution reads from tensors: those that are measured first are read twice."""
    return sum(job.nbytes_in * (1 + job.is_measured) for job in jobs_of(plan, _nowhere(plan)))


def _nowhere(plan: Plan) -> dict[str, tuple[Path, int]]:
    """Return places for the outputs of a plan whose jobs are only looked at."""
    return {output.name: (Path(), 0) for tensor in plan.tensors for output in tensor.outputs}


def bytes_to_write(plan: Plan) -> int:
    """Bytes of the tensors and of the files beside them that a result holds."""
    return plan.bytes_out + sum(file.nbytes for file in plan.auxiliary.copied)


def memory_per_process(plan: Plan) -> int:
    """About the bytes that a process needs: a slab in all its forms, and the largest matrix that is turned, twice."""
    found = (
        piece for tensor in plan.converted for piece in tensor.pieces if piece.transposed or piece.weight.transposed
    )
    turned = [prod(piece.weight.shape[-2:]) for piece in found]
    return _BESIDE + _FORMS * SLAB_BYTES + 2 * 4 * max(turned, default=0)


class _Run:
    """One execution of a plan, in a partial directory."""

    def __init__(self, plan: Plan, folder: Path, options: Options, journal: Journal) -> None:
        self.plan, self.folder, self.journal, self.options = plan, folder, journal, options

    def run(self) -> tuple[Done, ...]:
        """Write everything; returns what was done, in the order of the plan."""
        kept = {shard.name for shard in self.plan.shards} | {staging.LOCK, staging.JOURNAL}
        staging.clear(self.folder, kept)  # of what an interrupted run left
        positions: dict[str, tuple[Path, int]] = {}
        for shard in self.plan.shards:
            positions |= _lay_out(self.plan, shard, self.folder)
        given, devices = self.options.executor, tuple(self.options.devices)
        workers, by_threads = self._workers()
        all_jobs = tuple(jobs_of(self.plan, positions, devices or (None,)))
        files = [self.folder / shard.name for shard in self.plan.shards]
        sweep = JobScheduler(all_jobs, files, self.journal, self._check, self.options.progress or (lambda count: None))
        with executor_of(given, workers, by_threads) as executor:
            sweep.run(executor, pending_limit(given, workers))
            if not self.plan.is_file:
                self._write_beside()
                digests = self._digests(sweep.digests, executor)
                write_file(self.folder / MANIFEST, dump_object(manifest_of(digests, _facts(self.plan))))
        return tuple(sweep.done[job.key] for job in all_jobs)

    def _workers(self) -> tuple[int, bool]:
        """How many workers of this machine there are, and whether they are threads."""
        asked = self.options.workers
        if not self.options.devices and engine() == "reference":
            return asked or 1, False
        workers = asked or max(2, num_threads())
        are_faster = workers >= FROM_WORKERS and bytes_to_read(self.plan) >= FROM_BYTES
        if self.options.devices or not (self.options.processes and are_faster):
            return workers, True
        return asked or min(workers, MOST_PROCESSES), False

    def _check(self, job: Job, found: Measured) -> None:
        """Raise CheckpointError for what a measured weight may not hold."""
        run_job.check_finite(job, found)
        if job.action == CARRY and not found.exact and not self.plan.request.requantize:
            raise fp8_to_mxfp8.refused(job.name)

    def _write_beside(self) -> None:
        """Write what lies beside the tensors."""
        for file in self.plan.auxiliary.copied:
            staging.copy_file(file.path, self.folder / file.name)
        for name, content in configs(self.plan).items():
            write_file(self.folder / name, dump_object(content, 4 if name == HF_QUANT_CONFIG else 2))

    def _digests(self, known: Mapping[Path, Digest], executor: Executor | None) -> dict[str, Digest]:
        """Of every file by its name, hashed where that is not known."""
        paths = {name: self.folder / name for name in names_in(self.folder)}
        new = run_all(executor, deque((digest_of, (path,)) for path in paths.values() if path not in known))
        found = {**known, **{one.path: one for one in new}}
        return {name: found[path] for name, path in paths.items()}


def _lay_out(plan: Plan, shard: ShardPlan, folder: Path) -> dict[str, tuple[Path, int]]:
    """Make a file of its final size with its header, over what an interrupted run left; returns tensor -> file and
    position.
    """
    path = folder / shard.name
    header, places, position = _header(plan, shard)
    found = {name: (path, at) for name, at in places.items()}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, position)
        run_job.write_at(descriptor, memoryview(header), 0)
    finally:
        os.close(descriptor)
    return found


def _header(plan: Plan, shard: ShardPlan) -> tuple[bytes, dict[str, int], int]:
    """The header of a file, where each of its tensors begins, and its size."""
    source = plan.source.files[0]
    if isinstance(source, GgufFile):
        return gguf_header(source, shard.outputs, shard.metadata)
    ordered = file_order(shard.outputs)
    header, found = header_bytes(ordered, shard.metadata), {}
    position = len(header)
    for output in ordered:
        found[output.name] = position
        position += nbytes_of(output.dtype, output.shape)
    return header, found, position


def _facts(plan: Plan) -> dict[str, Any]:
    """What the manifest says of a run."""
    facts = {"version": __version__, "format": plan.format_name, "source": source_facts(plan.source)}
    return facts | {"request": request_facts(plan.request)}


def configs(plan: Plan) -> dict[str, dict[str, Any]]:
    """File name -> content, of the index and the configs, which make the directory a model."""
    found: dict[str, dict[str, Any]] = {}
    if plan.source.has_index or len(plan.shards) > 1:
        weight_map = {output.name: shard.name for shard in plan.shards for output in shard.outputs}
        found[INDEX] = {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}
    config = _without_declarations(plan.source.config)
    if plan.form is None:
        return found | {CONFIG: config}
    own: dict[str, Any] = {
        "version": __version__,
        **({"recipe": plan.request.recorded} if plan.request.recorded else {}),
    }
    if plan.request.search is not None:
        own["scale_search"] = plan.request.search.words.removeprefix("searched by ")
    if plan.form.format == mlx.FORMAT:
        config["quantization"] = mlx.declaration(plan.form)
        return found | {CONFIG: {**config, "quantization_config": {**config["quantization"], "fp4kit": own}}}
    if plan.form.format == "deepseek-v4":
        config["expert_dtype"] = "fp4"
    layers = [piece.module for tensor in plan.converted for piece in tensor.pieces if piece.form is plan.form]
    config["quantization_config"], beside = declarations(plan.form, plan.ignore, plan.has_input_scale, own, layers)
    return found | {CONFIG: config} | ({HF_QUANT_CONFIG: beside} if beside is not None else {})


def _without_declarations(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that declares no quantization."""
    stale = ("quantization_config", "compression_config", "quantization")
    found = {key: value for key, value in config.items() if key not in stale}
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in found["text_config"].items() if key not in stale}
    return found
