"""Convert a checkpoint: execute a plan in a partial directory, and rename it to the destination once it is complete. A
plan consists of jobs. A job copies one tensor, or converts one matrix (a layer, or one expert of a stack) or some of
its rows. The partial directory is hidden and lies beside the destination. A journal in it records which jobs are done,
so that an interrupted run can continue.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fp4kit import __version__
from fp4kit.arguments import checks_kinds
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.engines import Issue, comfy, mlx
from fp4kit.checkpoint.contract import contract_of_plan
from fp4kit.checkpoint.convert import run_jobs
from fp4kit.checkpoint.convert.job import (
    CARRY,
    DEQUANTIZE,
    MERGE,
    RENAME,
    REQUANTIZE,
    Changes,
    Done,
    Job,
    Losses,
    Measured,
    Survival,
    action_of,
)
from fp4kit.checkpoint.convert.rows import refused_carry
from fp4kit.checkpoint.executors import Options, Prefetcher, executor_of, pending_limit, run_all, start_devices
from fp4kit.checkpoint.findings import NAN_IN_COPY, check_engine, findings_of_files, judged_for, opened, stored_issues
from fp4kit.checkpoint.model import model_files
from fp4kit.checkpoint.model.doubts import CERTAIN, SWAPPED_NIBBLES, swapped_layers
from fp4kit.checkpoint.model.slabs import SLAB_BYTES
from fp4kit.checkpoint.model.statistics import doubt_about, total
from fp4kit.checkpoint.model.weights import weights_of
from fp4kit.checkpoint.plan.gguf_model import GGUF
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import OutputFile, Plan, check_target, configs, final_path, jobs_of
from fp4kit.checkpoint.plan.request import RequestOptions, takes_options
from fp4kit.checkpoint.verify.reencode import Check, run_check, sampled_losses
from fp4kit.contract.schema import FILE
from fp4kit.cpu.library import is_compiled, num_threads
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.storage.files import CheckpointError, dump_object, listed, shown, write_file

_BASE_BYTES = 128 << 20  # memory of a Python process that has imported its libraries and holds no data
_SLABS_IN_MEMORY = 12  # size of a slab (rows converted at a time) with all its converted forms, in multiples of a slab
# With at least FROM_WORKERS workers and FROM_BYTES bytes to read, processes are faster than threads. Processes take
# about a second to start, but threads of one interpreter wait for each other. On 16 cores, four or eight threads
# convert 1.2 GB/s, eight processes 2.0 and fifteen processes 2.7 (November 2026).
FROM_WORKERS, FROM_BYTES, MOST_PROCESSES = 4, 4 << 30, 8
SURVIVES = 0.5  # a layer of whose update less survives is named in a warning
_WAYS_OUT = (
    'serve the model and the adapter side by side, merge into the unquantized model, or train with adapters="merged"'
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class ConversionReport:
    """A report of what a conversion did.

    Attributes:
        plan: the plan that was executed.
        destination: the directory or file that was written.
        done: one record per job, in the order of the plan: the action that the job took, and the values it changed.
        doubts: warnings about scales or codes of the source that are probably wrong, one per tensor. Empty if
            ``execute`` found the result of an earlier, completed run.
        losses: warnings about layers that lost their values, one per layer; () unless the plan allows this.
        nonfinite: layer name -> the number of values of its source that are NaN or infinite, for the layers that have
            any. They were kept or replaced, as the plan's ``nonfinite`` says. Of a copied tensor, NaN are counted, and
            kept.
    """

    plan: Plan
    destination: Path
    done: tuple[Done, ...]
    doubts: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    nonfinite: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the destination, the format, how many jobs took each action, and values that were NaN or infinite."""
        counts = ", ".join(f"{count} {action}" for action, count in sorted(self.actions.items()))
        counts += f"; {sum(self.nonfinite.values())} NaN or infinite" * bool(self.nonfinite)
        return f"ConversionReport({str(self.destination)!r}: {self.plan.format_name}; {counts})"

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the files that were written, if ``destination`` names a file; () if it is a directory.

        There is one path, or one path per part of a split GGUF model, in order.
        """
        return tuple(paths_to_write(self.plan, self.destination).values())

    @lazy_property
    def actions(self) -> dict[str, int]:
        """Action (quantize, cast, requantize, ...) -> number of jobs that took this action.

        The plan has one job per tensor to copy, and one per matrix to convert. A job with the planned action "cast" or
        "carry", which keeps the codes, counts as "requantize" if the codes could not be kept.
        """
        return dict(Counter(one.action for one in self.done))

    @property
    def inexact(self) -> tuple[str, ...]:
        """The names of the layers whose values changed although the plan was to keep them; () if there are none.

        Their values changed because the new format cannot hold all scales of the layer. Either the whole layer was
        requantized, or only the blocks with such scales (see ``changes``). Layers that the plan itself requantizes or
        merges are not included, nor those that it decodes.
        """
        planned = {piece.module: tensor.action for tensor in self.plan.tensors for piece in tensor.pieces}
        lossy = dict.fromkeys(one.layer for one in self.done if one.action == REQUANTIZE or one.changes.values)
        return tuple(name for name in lossy if planned[name] not in (REQUANTIZE, MERGE, DEQUANTIZE))

    @lazy_property
    def changes(self) -> dict[str, Changes]:
        """Layer name -> the changes that its cast from MXFP4 to NVFP4 made.

        A Changes holds the number of blocks with new codes, the number of changed values, and the largest change. Only
        layers with blocks whose scales NVFP4 cannot hold are present.
        """
        return _sums((one.layer, one.changes) for one in self.done if one.changes.blocks)

    @lazy_property
    def decoded(self) -> dict[str, Changes]:
        """Layer name -> the changes by rounding, for the quantized layers that a GGUF file cannot hold as they are.

        Such a layer, in FP8 for example, is decoded and written in the dtype of ``fp8_as``. It is exact if its Changes
        have no changed values. The dict is empty for all other output.
        """
        keys = {job.key for job in jobs_of(self.plan, _nowhere(self.plan)) if job.counts}
        return _sums((one.layer, one.changes) for one in self.done if one.key in keys)

    @lazy_property
    def gains(self) -> dict[str, Losses]:
        """Layer name -> sums of squared errors without and with the scale search.

        The dict has the layers whose scales were searched, except layers without any nonzero value. It is empty if
        there was no search.
        """
        return _sums((one.layer, one.losses) for one in self.done if one.losses.signal)

    @lazy_property
    def findings(self) -> tuple[Issue, ...]:
        """The faults that verify, and engines, would find in the written result, from its headers, configs and scalars.

        Each is an Issue, with a severity, a subject, a text and the engine that it concerns. An error means that an
        engine rejects the result or decodes wrong values. That an engine does not load such results at all is a
        warning, unless the request names this engine. Codes and scales are examined in layers where they may be NaN.
        Reading this attribute reads the result.
        """
        found, model, *_ = findings_of_files(opened(self.files[0] if self.files else self.destination))
        plan, names = self.plan, {*self.nonfinite}
        for tensor in plan.converted:  # by the rounding "rnh", large finite values become NaN too
            names |= {p.module for p in tensor.pieces if (tensor.recipe or plan.recipe).rounding == "rnh"}
        for name, weight in model.layers.items():
            if name in names:
                layers = [run_check(Check(weight, e), None) for e in range(weight.experts)]
                found += stored_issues(name, total(layer.tally for layer in layers))
                doubts = dict.fromkeys(layer.doubt for layer in layers if layer.doubt)
                found += [Issue("error" if one in CERTAIN else "warning", name, one) for one in doubts]
        found += [Issue("error", one.layer or one.key, NAN_IN_COPY, count=one.nan) for one in self.done if one.nan]
        return tuple(judged_for(self.plan, found))

    @lazy_property
    def survival(self) -> dict[str, Survival]:
        """Layer name -> how much of its adapter's update is left in the result; {} without an adapter."""
        return _sums((one.layer, one.survival) for one in self.done if any(one.survival))

    @property
    def survival_lines(self) -> list[str]:
        """Lines for the user about the adapter: how much of it survived, what else changed, and what to do."""
        if not self.survival:
            return []
        total = reduce(Survival.plus, self.survival.values())
        lines = [
            f"adapter: {len(self.survival)} layers merged; {100 * total.share:.1f}% of the updates survived (projection"
            f" of the stored on the wanted change), error {total.relative_error:.2f} of their size"
        ]
        if self.displaced:
            lines.append(
                f"{len(self.displaced)} layers without an update have new codes, because they share a tensor scale with"
                f" merged layers: {listed([shown(name) for name in self.displaced])}"
            )
        lost = [name for name, one in self.survival.items() if one.share < SURVIVES]
        if lost:
            lines.append(
                f"warning: less than half of the update survived in {len(lost)} of {len(self.survival)} layers"
                f" ({listed([shown(name) for name in lost])}): it is smaller than the steps of the format; {_WAYS_OUT}"
            )
        return lines

    @property
    def displaced(self) -> tuple[str, ...]:
        """The names of the layers without an update that got new codes because merged layers share their tensor scale.

        Only merged values that exceed what the tensor scale of the source holds cause this, or adapter_scales="new".
        """
        keeps = {
            piece.module: piece.weight.update is None and action_of(piece.weight, piece.form) == RENAME
            for tensor in self.plan.tensors
            for piece in tensor.pieces
            if self.plan.request.adapter is not None and tensor.action in (MERGE, REQUANTIZE)
        }
        done = dict.fromkeys(one.layer for one in self.done if one.action == REQUANTIZE)
        return tuple(name for name in done if keeps.get(name))

    @property
    def replaced(self) -> int:
        """The number of NaN and infinite values that were replaced, over all tensors.

        It is 0 unless the plan's ``nonfinite`` is "saturate".
        """
        return sum(one.replaced for one in self.done)


S = TypeVar("S", Changes, Losses, Survival)


def _sums(pairs: Iterable[tuple[str, S]]) -> dict[str, S]:
    """Return the sum of the records of each layer."""
    found: dict[str, S] = {}
    for name, one in pairs:
        found[name] = found[name].plus(one) if name in found else one
    return found


@takes_options
def convert(
    source: str | Path,
    destination: str | Path,
    recipe: str | Recipe | None = None,
    *,
    options: Options | None = None,
    **request: Unpack[RequestOptions],
) -> ConversionReport:
    """Convert the model directory ``source`` into the new directory ``destination``, or a file into a new file.

    Args:
        source: the model directory, GGUF file or safetensors file to read.
        destination: the directory or file to create. A GGUF file becomes a GGUF file, or, with ``split_max_size``,
            files such as DST-00001-of-00003.gguf for a destination DST.gguf. A safetensors file becomes a safetensors
            file if the name ends in .safetensors, otherwise a directory.
        recipe: the recipe for newly quantized tensors, or its id. None follows a quantized source, whose layers then
            keep their codes, and is nvfp4-te otherwise.
        format: the output format, such as "modelopt", or "bf16" to decode all layers. None chooses that of a quantized
            source or, if it cannot store the recipe or there is none, the format that most engines load; "gguf" if a
            model directory becomes a file whose name ends in .gguf.
        wishes: which layers to quantize; None for all linear layers.
        input_scale: a positive activation scale to write for every layer; None to write none.
        requantize: True to allow changing the values of layers that are already quantized.
        nonfinite: what to do with NaN and infinity. "error" raises CheckpointError, "keep" quantizes them as they are,
            and "saturate" replaces NaN by 0 and infinities, keeping their sign, by the largest finite magnitude of the
            layers that share the tensor scale.
        codes: the path of a quantized version of the model, whose codes are copied; None to quantize.
        search: how to search the block scales of smallest error; None for no search.
        activations: Activations, a Collector, or paths of its files, from which every layer gets its own input scale;
            None for none.
        options: workers, devices and other choices that do not change the result; None for the defaults.
        ignore: globs of unknown tensors, config keys and metadata entries to leave out. By default, fp4kit rejects a
            model with such contents.
        split_max_size: the largest number of bytes of tensors per file of a GGUF model; None for one file.
        recipes: (pattern, recipe) pairs for layers that get a different recipe from ``recipe``.
        hadamard: the size of a Hadamard transform that rotates every layer before it is quantized; None for no
            rotation.
        hadamard_seed: the seed of random signs for this transform; None for no signs.
        hadamard_only: globs of the names of the layers to rotate; () for all that are quantized.
        adapter: the directory of a LoRA adapter whose updates are added to the weights first; None for none.
        adapter_scales: "nearest", "base" or "new": the block scales of quantized layers with an update.
        allow_loss: True to write layers even if they lose their values.
        fp8_as: "bf16", "q8_0" or "f32": the dtype of quantized layers that a GGUF file cannot hold as they are.
        engine, scheme: the engine that will serve the model and a scheme of fp4kit.servings(); None for none.

    The function make_plan describes ``recipe``, ``format`` and all later arguments in full.

    Returns:
        A ConversionReport with the plan and what was done.

    Raises:
        CheckpointError: before any work, if the plan cannot be made, ``destination`` cannot be written, or the
            engine is known to reject or misread the result. During the work, in these cases:

            - A tensor to be quantized contains NaN or infinity, and ``nonfinite`` is "error".
            - The output cannot hold a scale.
            - Layers lose their values, and ``allow_loss`` is False.
            - The source changes.
        ValueError: no recipe has an id that is given.
        TypeError: a recipe is neither an id nor a Recipe.
        ChildProcessError: a worker process died.

    An exception leaves no incomplete ``destination``.

    Exact: codes and scales of newly quantized tensors equal the result of fp4kit.quantize for the whole tensor. Its
        tensor_amax is the largest amax of the layers that share the tensor scale. With nonfinite="saturate", values are
        replaced first. For a rotated layer W, the whole tensor is fp4kit.hadamard(W, hadamard, seed=hadamard_seed).
        There are two exceptions: the tensor scale of all-zero tensors and groups is 1, and ``search`` may choose other
        block scales.
    """
    request["format"] = format_for(Path(source), Path(destination), request.get("format"))
    plan = make_plan(source, recipe, **request)
    return execute(plan, destination, options)


def check(plan: Plan, destination: str | Path, resume: bool = False, removes: bool = False) -> None:
    """Raise CheckpointError if the plan cannot be executed into ``destination``; nothing is written."""
    target = Path(destination)
    _check_file(plan, target)
    check_gguf_name(plan.is_file, target)
    if plan.is_split:
        check_target(target)
    if resume and finished_before(plan, target) is not None:
        return
    paths = paths_to_write(plan, target).values()
    staging.check_destination(plan.source.root, target, paths, resume or removes)
    if not removes or staging.removable(target) is None:
        staging.check_partial(target, resume)
    staging.check_space(target, bytes_to_write(plan))


def paths_to_write(plan: Plan, target: Path) -> dict[str, Path]:
    """Return a dict that maps the name of each output file to its final path; {} if the result is a directory."""
    if plan.is_split:
        return {file.name: final_path(target, file.name) for file in plan.files}
    return {plan.files[0].name: target} if plan.is_file or _is_safetensors(target) else {}


def _is_safetensors(path: Path) -> bool:
    """Return whether a path ends in .safetensors, ignoring case."""
    return path.suffix.lower() == ".safetensors"


def notes_on_file(plan: Plan, target: Path) -> tuple[str, ...]:
    """Return a tuple with one message: loaders need a config, which a single safetensors file cannot hold."""
    if not _is_safetensors(target) or plan.form is None or plan.form.format == comfy.FORMAT:
        return ()
    declared = json.dumps(configs(plan)[model_files.CONFIG]["quantization_config"])
    return (
        f"a file holds no config.json, which loaders of {plan.form.format} need; convert to a directory to get it, or"
        f" add to yours: {json.dumps('quantization_config')}: {declared}",
    )


def _check_file(plan: Plan, target: Path) -> None:
    """Raise CheckpointError if ``target`` ends in .safetensors, but the plan cannot be written as a single file."""
    # MLX layers always need a directory, because loaders need its config.
    if not _is_safetensors(target) or plan.is_file:
        return
    form = "" if plan.form is None else plan.form.format
    if len(plan.files) > 1 or (plan.source.root.is_dir() and form != comfy.FORMAT):
        raise CheckpointError(
            f"{target}: a model directory becomes a directory; name one without .safetensors, or, for ComfyUI, use"
            f" --format {comfy.FORMAT} and a source with one file"
        )
    if form == mlx.FORMAT:
        raise CheckpointError(
            f"{target}: mlx-lm needs config.json to decode layers, which a single file does not have;"
            " name a directory, without .safetensors"
        )


def format_for(source: Path, destination: Path, format: str | None) -> str | None:
    """Return the output format: ``format``, or "gguf" if it is None and a directory becomes a file that ends so."""
    is_new_gguf = format is None and source.is_dir() and destination.suffix.lower() == f".{GGUF}"
    return GGUF if is_new_gguf else format


def check_gguf_name(is_gguf: bool, target: Path) -> None:
    """Raise CheckpointError if ``target`` ends in .gguf but the result is no GGUF file, or the other way round."""
    if (target.suffix.lower() == f".{GGUF}") == is_gguf:
        return
    if is_gguf:
        raise CheckpointError(f"{target}: the result is a GGUF file, whose name ends in .gguf")
    raise CheckpointError(
        f"{target}: only a GGUF file, or a model directory with --format {GGUF}, becomes a GGUF file; give the"
        " destination another name"
    )


@checks_kinds
def execute(plan: Plan, destination: str | Path, options: Options | None = None) -> ConversionReport:
    """Execute a plan from make_plan, and write the result as the new directory or file ``destination``.

    Args:
        plan: the plan to execute.
        destination: the directory or file to create, as for convert.
        options: workers, devices and other choices that do not change the result; None for the defaults.

    Returns:
        A ConversionReport. If ``options.resume`` is True and an earlier run had completed the result, nothing is
        written, and the report is about that run, with empty ``doubts``.

    Raises:
        CheckpointError: one of these cases:

            - Before any work: ``destination`` exists, has an unsuitable name or cannot be written.
            - Before any work: the engine that the request names is known to reject or misread the result.
            - Before or during the work: the source has changed since the plan was made.
            - During the work: a value or scale is found that the plan's request does not allow, such as NaN with
              nonfinite="error".

            An exception leaves no incomplete ``destination``.
        ChildProcessError: a worker process died.
    """
    options, target = options or Options(), Path(destination)
    finished = finished_before(plan, target) if options.resume else None
    if staging.result_of(target).exists():  # only a finished result has leftovers
        run_jobs.remove_leftovers(target)
    if finished is not None:
        return finished
    check(plan, target, options.resume)
    check_engine(plan)
    if options.executor is not None:
        return _execute(plan, target, options)
    with Prefetcher(plan.source.files, bytes_to_read(plan), options.progress or (lambda count: None)) as progress:
        start_devices(options.devices, options.executor)
        return _execute(plan, target, replace(options, progress=progress))


def finished_before(plan: Plan, target: Path) -> ConversionReport | None:
    """Return the report on an earlier run of this plan, if it has completed ``target``."""
    found = run_jobs.journal_of_finished_run(target, run_jobs.key_of(plan.source, plan.request))
    keys = [job.key for job in jobs_of(plan, _nowhere(plan))]
    if found is None or not found.done.keys() >= {*keys}:
        return None
    done = tuple(found.done[key] for key in keys)
    nonfinite = _nonfinite((found.measured[key] for key in keys if key in found.measured), done)
    return ConversionReport(plan, target, done, nonfinite=nonfinite)


def _nonfinite(measured: Iterable[Measured], done: Iterable[Done]) -> dict[str, int]:
    """Return ConversionReport.nonfinite."""
    found: Counter[str] = Counter()
    for one in measured:
        found[one.key.rpartition("#")[0]] += one.nonfinite
    for copy in done:
        found[copy.layer or copy.key] += copy.nan
    return dict(+found)


def _execute(plan: Plan, target: Path, options: Options) -> ConversionReport:
    """Execute a plan in a partial directory, and rename the result to ``target`` at the end."""
    # The bytes of tensors are not compared, so that a change of values alone is not noticed here.
    for file in plan.source.files:
        if file.read_again() != file:
            raise CheckpointError(
                f"{file.label}: changed since the conversion was planned; run again when nothing writes to it"
            )
    key = run_jobs.key_of(plan.source, plan.request)
    paths = paths_to_write(plan, target)
    with (
        staging.staged_directory(target, options.resume, paths) as stage,
        run_jobs.Journal(stage.folder / staging.JOURNAL, key) as journal,
    ):
        stage.is_ours = True
        run = _Run(plan, stage.folder.absolute(), options, journal, bool(paths))
        done = run.run()
        if run_jobs.key_of(plan.source, plan.request) != key:
            raise CheckpointError(
                f"{plan.source.root}: changed while it was converted; run again when nothing writes to it"
            )
    doubts = tuple(run.doubts[name] for name in sorted(run.doubts))
    return ConversionReport(plan, target, done, doubts, run.losses, run.nonfinite)


def bytes_to_read(plan: Plan) -> int:
    """Return how many bytes of tensors the execution of a plan reads."""
    # A weight that must be measured before it is written, for example to find its amax, is read twice.
    return sum(job.nbytes_in * (1 + job.is_measured) for job in jobs_of(plan, _nowhere(plan)))


def _nowhere(plan: Plan) -> dict[str, tuple[Path, int]]:
    """Return a dict that maps the name of every output tensor of a plan to a dummy place: (Path(), 0)."""
    # Dummies suffice if jobs are only inspected, for example counted, and never run.
    return {output.name: (Path(), 0) for tensor in plan.tensors for output in tensor.outputs}


def bytes_to_write(plan: Plan) -> int:
    """Return the size in bytes of the result: its tensors, and the files that are copied unchanged."""
    return plan.bytes_out + (0 if plan.is_file else sum(file.nbytes for file in plan.auxiliary.copied))


def memory_per_process(plan: Plan) -> int:
    """Return a rough estimate of the memory that one worker process needs to execute a plan, in bytes."""
    pieces = (
        piece for tensor in plan.converted for piece in tensor.pieces if piece.transposed or piece.weight.transposed
    )
    turned = [prod(piece.weight.shape[-2:]) for piece in pieces]
    return _BASE_BYTES + _SLABS_IN_MEMORY * SLAB_BYTES + 2 * 4 * max(turned, default=0)


class _Run:
    """Execute a plan once, in a partial directory.

    plan: the plan to execute.
    folder: the partial directory.
    options: workers, devices and other choices that do not change the result.
    journal: the record of what is done, from which an interrupted run continues.
    is_file: True to write files of tensors only; False to write configs and a manifest beside the files of tensors.

    After ``run``, ``doubts`` maps source tensors to warnings about their scales, ``losses`` has a warning for each
    layer that lost its values, and ``nonfinite`` is that of the report.
    """

    def __init__(self, plan: Plan, folder: Path, options: Options, journal: run_jobs.Journal, is_file: bool) -> None:
        self.plan, self.folder, self.journal, self.options = plan, folder, journal, options
        self.is_file = is_file
        self.doubts: dict[str, str] = {}
        self.losses: tuple[str, ...] = ()
        self.nonfinite: dict[str, int] = {}

    def run(self) -> tuple[Done, ...]:
        """Write all files into the partial directory, and return what each job did, in the order of the plan."""
        kept = {file.name for file in self.plan.files} | {staging.LOCK, staging.JOURNAL}
        staging.clear(self.folder, kept)  # remove any other file that an interrupted run left
        positions: dict[str, tuple[Path, int]] = {}
        for file in self.plan.files:
            positions |= _lay_out(self.plan, file, self.folder)
        workers, by_threads = self._workers()
        all_jobs = tuple(jobs_of(self.plan, positions, tuple(self.options.devices) or (None,)))
        files = [self.folder / file.name for file in self.plan.files]
        tick = self.options.progress or (lambda count: None)
        scheduler = run_jobs.JobScheduler(all_jobs, files, self.journal, self._check, tick)
        with executor_of(self.options.executor, workers, by_threads) as executor:
            scheduler.run(executor, pending_limit(self.options.executor, workers))
            self._doubt_order_of_columns()
            if not self.is_file:
                self._write_beside(scheduler.digests, executor)
            self.losses = self._losses(scheduler.done.values())
        done = tuple(scheduler.done[job.key] for job in all_jobs)
        self.nonfinite = _nonfinite((scheduler.measured[job.key] for job in all_jobs if job.is_measured), done)
        return done

    def _losses(self, done: Iterable[Done]) -> tuple[str, ...]:
        """Return a warning for each layer that lost its values."""
        # The result is discarded, because nothing tells it from a sound one.
        names = {one.layer for one in done if one.is_weak}
        if not names:
            return ()
        path = self.folder / self.plan.files[0].name if self.is_file else self.folder
        request = self.plan.request
        is_weighted = request.search is not None and bool(request.search.columns)
        found = sampled_losses(path, self.plan.source, names, request.adapter, is_weighted, self.plan.made_from)
        if found and not self.plan.request.allow_loss:
            raise CheckpointError(
                f"{listed([name for name, _ in found])}: {found[0][1]}; --keep NAME leaves a layer unquantized,"
                " --allow-loss writes it"
            )
        return tuple(f"{shown(name)}: {why}" for name, why in found)

    def _doubt_order_of_columns(self) -> None:
        """Store in ``doubts`` a warning for each quantized source layer whose bytes seem to have swapped nibbles."""
        pieces = [piece for tensor in self.plan.tensors for piece in tensor.pieces]
        read = {piece.weight.name for piece in pieces if piece.weight.container is not None}
        if read:
            tensors = self.plan.source.tensors
            weights = weights_of(tensors, self.plan.source.config)
            for one in swapped_layers(weights.values(), tensors):
                if one.name in read:
                    self.doubts.setdefault(one.tensor, f"{shown(one.tensor)}: {SWAPPED_NIBBLES}")

    def _workers(self) -> tuple[int, bool]:
        """Return (number of workers, True if they are threads or False if they are processes)."""
        wanted = self.options.workers
        if not (self.options.devices or is_compiled()):
            return wanted or 1, False
        workers = wanted or max(2, num_threads())
        are_faster = workers >= FROM_WORKERS and bytes_to_read(self.plan) >= FROM_BYTES
        if self.options.devices or not (self.options.processes and are_faster):
            return workers, True
        return wanted or min(workers, MOST_PROCESSES), False

    def _check(self, job: Job, found: Measured) -> None:
        """Raise CheckpointError if the measurements of a weight show values that the request does not allow."""
        # Scales that MXFP8 cannot hold are rejected if the request has requantize=False.
        run_jobs.check_finite(job, found)
        if job.weight.container is not None:
            if found.doubt in CERTAIN and not self.plan.request.allow_loss:
                raise CheckpointError(
                    f"{shown(job.name)}: {found.doubt}; take the layer from another copy, or leave it as it is with"
                    " --keep; --allow-loss converts it"
                )
            doubt = "; ".join(filter(None, (doubt_about(found.reach, found.lost), found.doubt)))
            if doubt:
                self.doubts.setdefault(job.name, f"{shown(job.name)}: {doubt}")
        if job.action == CARRY and not found.exact and not self.plan.request.requantize:
            raise refused_carry(job.name)

    def _write_beside(self, hashed: Mapping[Path, model_files.Digest], executor: Executor | None) -> None:
        """Write the files without tensors into the partial directory, the manifest last."""
        plan, folder = self.plan, self.folder
        for file in plan.auxiliary.copied:
            staging.copy_file(file.path, folder / file.name)
        for name, content in configs(plan).items():
            write_file(folder / name, dump_object(content, 4 if name == model_files.HF_QUANT_CONFIG else 2))
        write_file(folder / FILE, dump_object(contract_of_plan(plan).as_data()))
        paths = {name: folder / name for name in model_files.names_in(folder)}
        new = run_all(
            executor, deque((model_files.digest_of, (path,)) for path in paths.values() if path not in hashed)
        )
        found = {**hashed, **{one.path: one for one in new}}
        facts = {
            "version": __version__,
            "format": plan.format_name,
            "source": run_jobs.source_facts(plan.source),
            "request": plan.request.facts,
            **({"codes": "carried"} if plan.carries_codes else {}),
        }
        manifest = model_files.manifest_of({name: found[path] for name, path in paths.items()}, facts)
        write_file(folder / model_files.MANIFEST, dump_object(manifest))


def _lay_out(plan: Plan, file: OutputFile, folder: Path) -> dict[str, tuple[Path, int]]:
    """Create an output file with its final size and its header, so that jobs can write into it in any order."""
    path = folder / file.name
    header, places, position = file.header(plan.first_file)
    found = {name: (path, at) for name, at in places.items()}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, position)
        run_jobs.write_at(descriptor, memoryview(header), 0)
    finally:
        os.close(descriptor)
    return found
