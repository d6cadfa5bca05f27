"""Re-encode the layers of a checkpoint from its source, and compare the result with the checkpoint byte by byte. If
layers are unlike their source, find out why: smoothing, or a fault such as swapped nibbles. A weight is a single layer,
or a stack with one matrix per expert. Each worker holds at most a slab (some rows of a layer) in memory. SQNR is the
signal-to-noise ratio in decibels: 10 log10(S / N) for the sums of squares of the source and of the differences.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.table import (
    CODES,
    COLUMN_SCALE,
    INPUT_SCALE,
    LOW_RANK_A,
    OUTER_SCALE,
    SCALES,
    VALUES,
    Container,
)
from fp4kit.checkpoint.convert.job import (
    DEQUANTIZE,
    MERGE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    Job,
    Measured,
    Sink,
    Target,
    action_of,
)
from fp4kit.checkpoint.convert.rows import rescaled
from fp4kit.checkpoint.convert.run_jobs import PIECE, join_group, measure_job, produce
from fp4kit.checkpoint.executors import run_all
from fp4kit.checkpoint.findings import is_low, noise_of, zeros_of
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import (
    HOLDS,
    Fp8Layer,
    confirmed,
    explain,
    explain_fp8,
    plain_of,
    without_numbers,
)
from fp4kit.checkpoint.identify.hypotheses import Layout, MadeBy
from fp4kit.checkpoint.identify.run import Place, other_places, parts_elsewhere, stored_layer
from fp4kit.checkpoint.model.doubts import doubt_of
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers, Slab, codes_of, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import StoredCounts, count_nan, sqnr_db, tally, total
from fp4kit.checkpoint.model.transforms import Counterparts, Origin, TurnedOrigin, decodable, origins, resolved
from fp4kit.checkpoint.model.weights import Q8_0, TENSOR_SCALE, Located, Weight, WeightRotation
from fp4kit.checkpoint.plan.other_models import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.plan.source_layers import Restored
from fp4kit.checkpoint.reconcile import Part, order_of
from fp4kit.checkpoint.selection.names import first_match, shared_amax_groups
from fp4kit.formats import E4M3, E5M2
from fp4kit.layouts import unpack_gguf, unswizzle_scales
from fp4kit.ops.quantize import fake_quantize
from fp4kit.recipes import Recipe
from fp4kit.storage.files import FLOAT_DTYPES, NUMPY_DTYPES, CheckpointError

_MADE_FROM_VALUES = (QUANTIZE, REQUANTIZE)


def origins_of(
    stored: Iterable[Weight],
    original: Source,
    rotations: Mapping[str, WeightRotation],
    adapter: LoraAdapter | None = None,
) -> dict[tuple[str, int], Origin]:
    """Find the source rows from which each matrix was made."""
    stored = list(stored)
    weights = decodable(original.tensors, original.config)
    updates = {} if adapter is None else adapter.updates_of(weights, original.config)
    whole = {weight.name: weight for weight in weights.values()}
    forms = {weight.container for weight in stored if weight.container is not None}
    by_form = {form: origins(original, form) for form in forms}
    counterparts = Counterparts(original)
    found: dict[tuple[str, int], Origin] = {}
    for weight in stored:
        unquantized = whole.get(weight.name)
        for e in range(weight.experts):
            origin = None if weight.container is None else by_form[weight.container].get((weight.name, e))
            if unquantized is not None and unquantized.shape == weight.shape:
                origin = Origin(unquantized, e, (0, unquantized.shape[-2]))
            if origin is None and (weight.container is not None or unquantized is None):  # tools may rename layers
                other = counterparts.of(weight, e)
                is_made = weight.container is not None or (other is not None and other.weight.container is not None)
                origin = None if isinstance(other, TurnedOrigin) or not is_made else other
            if origin is not None and origin.shape == weight.shape[-2:]:
                found[weight.name, e] = origin.rotated(rotations.get(weight.name)).updated(updates)
    return found


def transposed_from(stored: Iterable[Weight], original: Source) -> dict[str, tuple[str, ...]]:
    """Find the quantized weights that store tensors of the source transposed."""
    counterparts = Counterparts(original)
    found = {w.name: counterparts.of(w, 0) for w in stored if w.container is not None}
    return {name: tuple(one.names) for name, one in found.items() if isinstance(one, TurnedOrigin)}


@dataclass(frozen=True)
class Settings:
    """How the checkpoint was made, as far as this is known.

    recipe: the recipe of its quantized layers; None if unknown.
    input_scale: the input scale that was written for every layer; None if unknown.
    nonfinite: what the conversion did with NaN and infinities, "keep" or "saturate"; None if unknown. Then both are
        tried.
    devices: the CUDA devices to use in turn; None stands for the CPU.
    search: the search that determined the block scales; None if they were not searched.
    weighted: True if the search had column weights. ``search`` contains the weights only if the user gave them.
    patterns: (pattern, recipe) pairs for layers of other recipes. The first pattern that matches a layer's name in the
        decides.
    adapter: the adapter that was merged; None for none.
    adapter_scales: the block scales of layers with an update, one of ADAPTER_SCALES in checkpoint/plan/other_models.py.
    repairs: (layer, expert) of a matrix that reconcile rescaled -> the parts of its fused layer, once per repair.
    """

    recipe: Recipe | None = None
    input_scale: float | None = None
    nonfinite: str | None = None
    devices: tuple[int | None, ...] = (None,)
    search: ScaleSearch | None = None
    weighted: bool = False
    patterns: tuple[tuple[str, Recipe], ...] = ()
    adapter: LoraAdapter | None = None
    adapter_scales: str = ADAPTER_SCALES[0]
    repairs: Mapping[Part, tuple[tuple[Part, ...], ...]] = field(default_factory=dict)

    def recipe_of(self, original: str) -> Recipe | None:
        """Return the recipe of a layer: that of the first pattern that matches its name, otherwise ``recipe``."""
        found = first_match((pattern for pattern, _ in self.patterns), original)
        return self.recipe if found is None else self.patterns[found][1]


@dataclass(frozen=True)
class Check:
    """One matrix of the checkpoint to check.

    stored: the weight that holds the matrix.
    expert: the number of the matrix in a stack of experts; 0 for a single layer.
    origin: the rows of the source from which the matrix was made; None if there are none.
    job: the job that re-encodes the matrix; None if it cannot be re-encoded.
    why: the reason why there is no job; "" if there is a job or no ``origin``.
    may_saturate: True if it is unknown whether the conversion replaced NaN and infinities. The job keeps them; if its
        result differs from the file, run_check tries again with replacements.
    repairs: the parts with which reconcile gave the matrix one tensor scale, once per repair; () if it did not.
    lost: the jobs of layers that belong to its fused layer in the source, and that the checkpoint has not in whole.
    """

    stored: Weight
    expert: int
    origin: Origin | None = None
    job: Job | None = None
    why: str = ""
    may_saturate: bool = False
    repairs: tuple[tuple[Part, ...], ...] = ()
    lost: tuple[Job, ...] = ()

    @property
    def key(self) -> str:
        """The layer name and expert number as one text, such as "mlp.up_proj#0", which is unique among the checks."""
        return f"{self.stored.name}#{self.expert}"

    @property
    def needs_amax(self) -> bool:
        """True if the amax or scale exponents of the source rows are needed before the matrix can be re-encoded."""
        job = self.job
        if job is None or job.action in (DEQUANTIZE, RENAME):
            return False
        assert job.recipe is not None
        has_scale = job.recipe.tensor_scaling == "tensor" or job.nonfinite == "saturate"
        return has_scale or job.action not in _MADE_FROM_VALUES

    @property
    def nbytes(self) -> int:
        """The size in bytes of the source rows of the matrix, or of the stored matrix if ``origin`` is None."""
        if self.origin is None:
            return self.stored.nbytes // self.stored.experts
        source = self.origin.weight
        return source.nbytes * self.origin.shape[0] // (source.experts * source.shape[-2])


@dataclass(frozen=True)
class Difference:
    """The first difference between a part of a layer in the file and the same part, encoded again from the source.

    part: "codes", "scales" (block scales), "tensor_scale", "input_scale" or "values".
    expert: the number of the expert in a stack; None for a single layer.
    row, column: the place in the matrix; the first element of the block for a block scale; None for a scale of the
        whole layer.
    stored, expected: the code, or the value of the block scale or other number: in the file, and encoded.
    """

    part: str
    expert: int | None
    row: int | None
    column: int | None
    stored: float
    expected: float


@dataclass(frozen=True)
class ReencodedLayer:
    """The result of a check.

    check: the check that was run.
    tally: counts of the stored values, such as NaN or saturated values.
    action: the action by which the matrix was re-encoded, such as "quantize"; "" if it was not.
    compared, differing: part (codes, scales, ...) -> the number of bytes that were compared, and of those that differ.
        Both are empty if the matrix was not re-encoded.
    first: the first difference of each part that differs.
    error: the error message if re-encoding failed; otherwise "".
    usual_db: the SQNR in decibels that the format usually gives on the source rows of this matrix; None if the check
        has a job and the SQNR is not low, or if the function ``usual_db`` cannot compute it.
    doubt: a warning that the codes do not seem to belong to the scales; "" if nothing is odd.
    """

    check: Check
    tally: StoredCounts
    action: str = ""
    compared: Mapping[str, int] = field(default_factory=dict)
    differing: Mapping[str, int] = field(default_factory=dict)
    first: tuple[Difference, ...] = ()
    error: str = ""
    usual_db: float | None = None
    doubt: str = ""


def checks_of(
    stored: Iterable[Weight],
    found: Mapping[tuple[str, int], Origin],
    settings: Settings,
    groups: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Yield a Check for every matrix that is quantized or was decoded from a quantized source.

    groups: layer -> group whose layers share a tensor scale; None to find them by the names of layers.
    """
    stored = list(stored)
    groups = fused_groups(stored) if groups is None else groups
    merged = {groups.get(name, "") for (name, _), origin in found.items() if origin.weight.update is not None} - {""}
    number = 0
    for weight in stored:
        for e in range(weight.experts):
            origin = found.get((weight.name, e))
            is_copy = origin is not None and origin.weight.container is None and origin.weight.update is None
            if origin is None or (weight.container is None and is_copy):
                if weight.container is not None:
                    yield Check(weight, e)
                continue
            device = settings.devices[number % len(settings.devices)]
            number += 1
            group = groups.get(weight.name, weight.name)
            job, why = _job(weight, e, origin, group, settings, device, group in merged)
            repairs = settings.repairs.get((weight.name, e), ())
            yield Check(weight, e, origin, job, why, settings.nonfinite is None, repairs)


def with_lost_members(checks: Iterable[Check], known: Iterable[Weight], kept: Collection[str]) -> Iterator[Check]:
    """Yield the checks, with ``lost`` if layers of the source that may have raised their amax have no check.

    known: the weights of the source.
    kept: the names of the tensors that the checkpoint keeps unquantized.
    """
    checks = list(checks)
    found = [check.origin for check in checks if check.origin is not None]
    used = {*kept, *(name for origin in found for name in origin.names)}
    lost_weights = {w.name: w for w in known if w.experts == 1 and w.tensor not in used}
    groups = shared_amax_groups([*(origin.weight.name for origin in found), *lost_weights])
    members: dict[str, list[Weight]] = defaultdict(list)
    for name, weight in lost_weights.items():
        members[groups.get(name, name)].append(weight)
    for check in checks:
        job, origin = check.job, check.origin
        if job is not None and origin is not None and check.needs_amax:
            beside = members.get(groups.get(origin.weight.name, ""), [])
            jobs = (replace(job, key=f"{job.group} {w.name}", source=w, expert=0, span=None) for w in beside)
            check = replace(check, lost=tuple(jobs))
        yield check


def checks_of_restored(stored: Iterable[Weight], layers: Iterable[Restored], settings: Settings) -> Iterator[Check]:
    """Yield Checks for the unquantized weights that a conversion put together from several weights of the source."""
    found = {weight.name: weight for weight in stored if weight.container is None}
    for layer in layers:
        weight = found.get(layer.name)
        if weight is None or weight.shape != layer.shape:
            continue
        place = weight.located
        for piece in layer.pieces:
            target = Target(VALUES, place.file.path, *piece.share(place.entry.nbytes), place.entry.dtype)
            origin = Origin(piece.weight, piece.expert, piece.span)
            job = Job(
                f"{weight.name}#{piece.number}",
                DEQUANTIZE,
                piece.weight,
                (target,),
                piece.expert,
                piece.span,
                nonfinite="keep",
                transposed=piece.transposed,
            )
            yield Check(weight, piece.number, origin, job, "", settings.nonfinite is None)


def fused_groups(stored: Iterable[Weight]) -> dict[str, str]:
    """Return a dict: layer name -> name of its group."""
    return shared_amax_groups([w.name for w in stored if w.container is not None and w.container.has_tensor_scale])


def equal_scale_groups(stored: Iterable[Weight], found: Mapping[tuple[str, int], Origin]) -> dict[str, str]:
    """Return layer -> group for fused layers, by their names in the source, whose stored tensor scales are equal."""
    scaled = {w.name: w for w in stored if w.container is not None and w.container.has_tensor_scale}
    modules = {found[name, 0].weight.tensor.rpartition(".")[0]: name for name in scaled if (name, 0) in found}
    members: dict[str, list[str]] = defaultdict(list)
    for module, group in shared_amax_groups(modules).items():
        members[group].append(modules[module])
    with Readers() as readers:
        scales = {
            name: [str(tensor_scale_of(readers, scaled[name], e)) for e in range(scaled[name].experts)]
            for names in members.values()
            for name in names
        }
    alike = {group: names for group, names in members.items() if len({(*scales[name],) for name in names}) == 1}
    return {name: group for group, names in alike.items() for name in names}


def _job(
    stored: Weight, expert: int, origin: Origin, group: str, settings: Settings, device: int | None, shares: bool
) -> tuple[Job | None, str]:
    """Return (the job that re-encodes a matrix, ""), or (None, the reason as text) if this is not possible."""
    form, recipe = stored.container, settings.recipe_of(origin.weight.name)
    if form is not None and form.stack == "columns":
        return None, f"fp4kit reads {form}, but does not write it"
    action = action_of(origin.weight, form)
    action = MERGE if action == RENAME and shares else action
    if action not in (RENAME, DEQUANTIZE):
        if recipe is None:
            return None, NO_RECIPE
        if form is None or not form.stores(recipe):
            return None, f"{form} cannot store {recipe.id}; give the right recipe with --recipe"
        if recipe.stochastic_only:
            return None, f"{recipe.id} only rounds stochastically, and the seed of its codes is not known"
        lacks = settings.search is None or settings.search.lacks((stored.name, origin.weight))
        if settings.weighted and ScaleSearch.supports(recipe) and lacks:
            return None, _WITHOUT_WEIGHTS
    search = settings.search
    searched: tuple[Any, Any] = ("", None)
    if search is not None and (recipe is None or search.supports(recipe)):
        searched = search.objective, search.columns_of((stored.name, origin.weight), origin.expert)
    nonfinite = "keep" if action == DEQUANTIZE else settings.nonfinite or "keep"
    kept = action in (RENAME, MERGE) and INPUT_SCALE in origin.weight.parts
    targets = _targets(stored, expert, settings.input_scale is not None or kept)
    return Job(
        f"{stored.name}#{expert}",
        action,
        origin.weight,
        targets,
        origin.expert,
        origin.span,
        f"{group}#{expert}",
        recipe,
        form,
        settings.input_scale,
        nonfinite,
        stored.transposed,
        device,
        *searched,
        merge_scales=settings.adapter_scales if action == MERGE else "",
    ), ""


NO_RECIPE = "no recipe is recorded; give one with --recipe, which fp4kit identify finds"
_WITHOUT_WEIGHTS = "their scales were searched with column weights; give the weights with --column-weights or --imatrix"


def _targets(weight: Weight, expert: int, has_input_scale: bool) -> tuple[Target, ...]:
    """Return the byte ranges of one matrix in the tensors of a weight, one Target per tensor."""
    found = []
    for part, place in weight.parts.items():
        if part != INPUT_SCALE or has_input_scale:
            count = place.entry.nbytes // weight.experts
            found.append(Target(part, place.file.path, expert * count, count, place.entry.dtype))
    return tuple(found)


class _Comparison:
    """Compare the bytes of a re-encoded matrix with the file, and count the differences.

    This class is the Sink of a job. Its ``put`` compares a part (codes, scales, ...) instead of writing it.

    compared, differing: part -> the number of bytes compared so far, and of those that differ.
    first: part -> its first difference.
    """

    def __init__(self, readers: Readers, check: Check, targets: Iterable[Target]) -> None:
        self._readers, self._check = readers, check
        self.first: dict[str, Difference] = {}
        self._targets = {target.part: target for target in targets}
        self.compared = dict.fromkeys(self._targets, 0)
        self.differing = dict.fromkeys(self._targets, 0)

    def has(self, part: str) -> bool:
        """Return whether ``part`` is compared, that is, whether the targets contain it."""
        return part in self._targets

    def put(self, part: str, array: Any) -> None:
        """Compare the next bytes of a part with the file, and add to ``compared`` and ``differing``."""
        encoded: npt.NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target, done = self._targets[part], self.compared[part]
        if done + encoded.size > target.nbytes:
            raise CheckpointError(f"{part}: re-encoding gives more bytes than the {target.nbytes} bytes stored")
        stored = self._readers.bytes(self._check.stored.parts[part], target.position + done, encoded.size)
        unequal = stored != encoded
        count = int(np.count_nonzero(unequal))
        if count and not self.differing[part]:
            self.first[part] = _difference(self._check, target, done, int(unequal.argmax()), stored, encoded)
        self.differing[part] += count
        self.compared[part] += encoded.size


def _difference(check: Check, target: Target, done: int, at: int, *sides: npt.NDArray[np.uint8]) -> Difference:
    """Return the place and the values of byte ``at``, the first that differs of the bytes from ``done`` on."""
    weight, part = check.stored, target.part
    form = weight.container if part in (CODES, SCALES) else None  # None if the bytes are numbers
    rows, columns = weight.shape[-2:][:: -1 if weight.transposed else 1] if form or part == VALUES else (1, 1)
    dtype = np.dtype(np.uint8) if part == CODES else NUMPY_DTYPES.get(target.dtype, np.dtype(np.uint8))
    # tile: the number of rows that are stored together
    (high, wide), tile = (form.block, 128 if form.swizzled else 1) if form and part == SCALES else ((1, 1), 1)
    tiles = -(-rows // high // tile)
    size = weight.parts[part].entry.nbytes // (weight.experts * tiles)
    expert, number = divmod((target.position + done + at) // size, tiles)
    start = (done + at) // size * size - done
    lines: Any = [side[start : start + size].reshape(1, -1) for side in sides]
    if form and form.in_blocks:
        lines, scales = zip(*(unpack_gguf(line, form.kind) for line in lines), strict=True)
        if np.array_equal(*lines):
            part, (high, wide), lines = SCALES, form.block, scales
    if form and part == CODES:
        lines = [codes_of(form, line << 4 | line >> 4 if form.high_first else line) for line in lines]
    elif tile > 1:
        lines = [unswizzle_scales(line, "swizzled_128x4", (tile, -(-columns // wide))) for line in lines]
    have, want = (line.view(f"u{dtype.itemsize}") for line in lines)  # as integers, so that NaN equals itself
    i, j = map(int, np.argwhere(have != want)[0])
    values = [side[i, j].reshape(1).view(dtype).item() for side in (have, want)]
    if part == SCALES and form and form.scale is not None and dtype == np.uint8:
        values = [float(form.scale.values[value]) for value in values]
    j = j // 34 * 32 if target.dtype == Q8_0 else j * wide  # 34 bytes hold 32 elements
    place = ((number * tile + i) * high, j)[:: -1 if weight.transposed else 1]
    row, column = place if form or part == VALUES else (None, None)
    return Difference(part, expert if weight.experts > 1 else None, row, column, *values)


class Rescaling(NamedTuple):
    """How reconcile rescaled a matrix.

    alone: the measurements of the matrix without the others of its fused layer.
    shared: the tensor scales that it got, as they are stored, one per repair.
    """

    alone: Measured
    shared: tuple[np.float32, ...]


class _TensorScale:
    """A Sink that keeps the stored tensor scale, and drops all other parts."""

    stored: np.float32 | None = None

    def has(self, part: str) -> bool:
        return part == TENSOR_SCALE

    def put(self, part: str, array: Any) -> None:
        if part == TENSOR_SCALE:
            self.stored = np.float32(np.asarray(array).reshape(-1)[0])


class _Rescaled:
    """A Sink that passes a matrix on to ``output`` with its block scales rescaled from ``scales[0]`` to the last one,
    as reconcile does.
    """

    def __init__(self, output: Sink, form: Container, scales: Sequence[np.float32]) -> None:
        self._output, self._form, self._scales = output, form, scales

    def has(self, part: str) -> bool:
        return self._output.has(part)

    def put(self, part: str, array: Any) -> None:
        if part == TENSOR_SCALE:
            array = np.array([self._scales[-1]], np.float32)
        elif part == SCALES:
            assert self._form.scale is not None
            array = np.asarray(array).view(np.uint8)
            for old, new in pairwise(map(self._form.multiplier, self._scales)):
                array = rescaled(self._form.scale, array, old, new)[0]
        self._output.put(part, array)


_HEAD_ROWS = 128  # a multiple of the rows of every block


def _stored_tensor_scale(job: Job, measured: Measured, readers: Readers) -> np.float32 | None:
    """Return the tensor scale that a job stores, for which a few rows are encoded; None if it stores none."""
    first, end = job.span or (0, job.shape[0])
    found = _TensorScale()
    produce(replace(job, span=(first, min(first + _HEAD_ROWS, end))), measured, readers, found)
    return found.stored


def _rescalings(checks: Sequence[Check], alone: Mapping[str, Measured]) -> dict[str, Rescaling]:
    by_part = {(check.stored.name, check.expert): check for check in checks if check.job is not None}
    found: dict[str, Rescaling] = {}
    with Readers() as readers:

        @cache
        def scale(part: Part) -> tuple[tuple[float, float], np.float32]:
            check = by_part[part]
            stored = _stored_tensor_scale(cast(Job, check.job), alone.get(check.key, Measured(check.key)), readers)
            assert stored is not None
            return order_of(check.stored.form, stored), stored

        for check in (one for one in by_part.values() if one.repairs):
            with suppress(CheckpointError, KeyError):  # a part that cannot be encoded; the check itself says why
                shared = tuple(max(map(scale, parts))[1] for parts in check.repairs)
                found[check.key] = Rescaling(alone.get(check.key, Measured(check.key)), shared)
    return found


def run(checks: Sequence[Check], executor: Executor | None, tick: Callable[[int], None]) -> Iterator[ReencodedLayer]:
    """Run all checks, and yield their results in the order in which they finish."""
    members: dict[str, list[Measured]] = defaultdict(list)
    wanted = {check.key: check for check in checks if check.needs_amax}
    for one in run_all(executor, deque((measure_job, (check.job,)) for check in wanted.values())):
        tick(wanted[one.key].nbytes)
        job = wanted[one.key].job
        assert job is not None
        members[job.group].append(one)
    lost = {job.key: job for check in wanted.values() for job in check.lost}
    for one in run_all(executor, deque((measure_job, (job,)) for job in lost.values())):
        members[lost[one.key].group].append(one)
    shared = {group: join_group(found) for group, found in members.items()}
    rescalings = _rescalings(checks, {one.key: one for found in members.values() for one in found})
    alone = {one.key: one for found in members.values() if len(found) > 1 for one in found}
    groups = (
        (
            check,
            None if check.job is None else shared.get(check.job.group),
            rescalings.get(check.key),
            alone.get(check.key),
        )
        for check in checks
    )
    for found in run_all(executor, deque((run_check, one) for one in groups)):
        tick(found.check.nbytes)
        yield found


def run_check(
    check: Check, shared: Measured | None, rescaling: Rescaling | None = None, alone: Measured | None = None
) -> ReencodedLayer:
    """Run one check: re-encode the matrix, compare it with the file, and count its stored values.

    alone: the amax of the matrix alone, under which some tools encode parts of a fused layer.
    """
    form = check.stored.container
    with Readers() as readers:
        if form is None:
            return _reencoded(check, shared, StoredCounts(), readers)
        doubt = doubt_of(readers, check.stored, check.expert)
        tally = tally_of_rows(check, readers)
        if rescaling is None:
            found = _reencoded(check, shared, tally, readers)
            if alone is not None and not found.error and any(found.differing.values()):
                own = _reencoded(check, alone, tally, readers)
                found = found if own.error or _count(own) >= _count(found) else own
        else:  # reconcile rescaled the matrix, which either had a tensor scale of its own or that of its fused layer
            found = _reencoded(check, rescaling.alone, tally, readers, rescaling.shared)
            if found.error or any(found.differing.values()):
                joined = _reencoded(check, shared, tally, readers, rescaling.shared)
                found = found if joined.error or any(joined.differing.values()) else joined
        if found.usual_db is None and is_low(found.tally, form.element.bits):
            found = replace(found, usual_db=usual_db(check, readers))
    return replace(found, doubt=doubt)


def _count(found: ReencodedLayer) -> int:
    return sum(found.differing.values())


def _reencoded(
    check: Check,
    shared: Measured | None,
    found: StoredCounts,
    readers: Readers,
    rescaled_to: tuple[np.float32, ...] = (),
) -> ReencodedLayer:
    """Re-encode a matrix and compare it: as it is, and saturated if that may be and the first result differs."""
    job = check.job
    if job is None:
        return ReencodedLayer(check, found, usual_db=usual_db(check, readers))
    kept = _compared(check, job, shared or Measured(check.key), found, readers, rescaled_to)
    differs = kept.error or any(kept.differing.values())
    if not differs or not check.may_saturate or job.action not in _MADE_FROM_VALUES:
        return kept
    measured = shared or measure_job(job)
    if not measured.nonfinite:
        return kept
    again = _compared(check, replace(job, nonfinite="saturate"), measured, found, readers, rescaled_to)
    return kept if again.error or any(again.differing.values()) else again


def _compared(
    check: Check,
    job: Job,
    shared: Measured,
    found: StoredCounts,
    readers: Readers,
    rescaled_to: tuple[np.float32, ...],
) -> ReencodedLayer:
    """Re-encode one matrix by ``job``, compare it with the file, and return the result."""
    comparison = _Comparison(readers, check, job.targets)
    output: Sink = comparison
    try:
        if rescaled_to:
            own = _stored_tensor_scale(job, shared, readers)
            assert own is not None
            output = _Rescaled(comparison, check.stored.form, (own, *rescaled_to))
        made = produce(job, shared, readers, output)
    except CheckpointError as error:
        return ReencodedLayer(check, found, error=str(error))
    first = tuple(comparison.first.values())
    return ReencodedLayer(check, found, made.action, comparison.compared, comparison.differing, first)


def tally_of_rows(check: Check, readers: Readers, spans: Sequence[tuple[int, int] | None] = (None,)) -> StoredCounts:
    """Count the stored values of a quantized matrix."""
    form, origin = check.stored.form, check.origin
    height = 1 if origin is None or origin.weight.container is None else origin.weight.container.block[0]
    found = []
    rows = (slab for span in spans for slab in slabs(readers, check.stored, check.expert, span, height))
    for slab in rows:
        assert slab.codes is not None and slab.scales is not None
        x = None if origin is None else rows_of(origin, slab.start, len(slab.codes)).values(readers)
        found.append(_tally_of(form, slab, x))
    return total(found)


def _tally_of(form: Container, slab: Slab, x: np.ndarray | None) -> StoredCounts:
    """Count the stored values of some rows."""
    # For SVDQuant, the low-rank matrix is subtracted from the source first, because the codes store only the
    # difference.
    assert slab.codes is not None and slab.scales is not None
    if x is None or slab.low_rank is None:
        return tally(form, slab.codes, slab.scales, slab.tensor_scale, x, slab.column_scale)
    whole = x.astype(np.float64)
    low_rank = slab.low_rank[0] @ slab.low_rank[1]
    rest = whole - (low_rank if slab.column_scale is None else low_rank * slab.column_scale)
    found = tally(form, slab.codes, slab.scales, slab.tensor_scale, rest, slab.column_scale)
    return replace(found, signal=float(np.square(whole).sum()))


# kind of container -> a recipe that gives the usual error of this kind; "mxfp8-te" for kinds that are not listed
_USUAL = {"nvfp4": "nvfp4-te", **dict.fromkeys(("mxfp4", "fp4 groups"), "mxfp4-ocp")}
_SAMPLED_ROWS = 64


def usual_db(check: Check, readers: Readers) -> float | None:
    """Return the SQNR in decibels that a usual recipe for the format gives on the first 64 rows of a matrix's
    source.
    """
    # The rows are extended to whole blocks of the source, and multiplied by a power of two that brings them near 1, so
    # that neither end of the range of scales matters.
    form, origin = check.stored.container, check.origin
    if form is None or origin is None:
        return None
    height = 1 if origin.weight.container is None else origin.weight.container.block[0]
    count = min(origin.shape[0], -(-_SAMPLED_ROWS // height) * height)
    x = rows_of(origin, 0, count).values(readers).astype(np.float32)
    x = np.ascontiguousarray(x[:, : x.shape[1] // 32 * 32])
    if not x.size or not np.isfinite(x).all() or not x.any():
        return None
    x = np.ldexp(x.astype(np.float64), -int(np.frexp(np.abs(x).max())[1])).astype(np.float32)
    error = fake_quantize(x, _USUAL.get(form.kind, "mxfp8-te")).astype(np.float64) - x
    return sqnr_db(float(np.square(x, dtype=np.float64).sum()), float(np.square(error).sum()))


def rows_of(origin: Origin, start: int, count: int) -> Origin:
    """Return a copy of ``origin`` with only the ``count`` rows that begin at its row ``start``; nothing is read."""
    first = origin.span[0] + start
    return replace(origin, span=(first, first + count))


def differing_bytes(stored: Located, source: Located) -> tuple[int, int]:
    """Return (bytes that differ, NaN) of an unconverted tensor and the source's tensor of the same name."""
    # The tensors must have equally many values.
    found = nan = 0
    dtype = stored.entry.dtype
    element = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}.get(source.entry.dtype)
    have, want = (NUMPY_DTYPES.get(place.entry.dtype) for place in (stored, source))
    want = want if element is None else np.dtype(np.uint8)
    if stored.entry.dtype == source.entry.dtype or have is None or want is None:
        have = want = np.dtype(np.uint8)
    step = PIECE // 4
    with Readers() as readers:
        for start in range(0, stored.entry.nbytes // have.itemsize, step):
            count = min(step, stored.entry.nbytes // have.itemsize - start)
            x = readers.bytes(source, start * want.itemsize, count * want.itemsize)
            with np.errstate(over="ignore", invalid="ignore"):
                values = x.view(want) if element is None else element.values[x]
                rounded = x if have == want else values.astype(have).view(np.uint8)
            own = readers.bytes(stored, start * have.itemsize, count * have.itemsize)
            found += int(np.count_nonzero(own != rounded))
            nan += count_nan(own, dtype)
    return found, nan


_MOST_MATRICES, _SAMPLED_ELEMENTS = 256, 1 << 23  # the largest sample, so that a conversion reports its error at once
_SPAN_ROWS, _MOST_SPANS = 16, 4  # rows per span; spans per matrix if there are few matrices
_OUTLIER_DB = 3.0  # a layer this far below the median loses much more than the others


@dataclass(frozen=True)
class SampledError:
    """The SQNR of sampled layers.

    layers: (name, SQNR in decibels) per sampled layer, smallest SQNR first. Each expert of a stack is a layer, with its
        number in brackets in the name. Layers without error, such as those whose codes were kept, are left out.
    total: the number of quantized matrices in the checkpoint that have a counterpart in the source.
    is_whole: True if all rows of all layers were measured, so that verify finds the same numbers.
    """

    layers: tuple[tuple[str, float], ...]
    total: int
    is_whole: bool = False

    @property
    def median(self) -> float:
        """The median SQNR in decibels. ``layers`` must not be empty."""
        return median(db for _, db in self.layers)

    @property
    def outliers(self) -> tuple[str, ...]:
        """The names of the layers whose SQNR is at least 3 dB, a factor of two, below the median; worst first."""
        return tuple(name for name, db in self.layers if db <= self.median - _OUTLIER_DB)


def sampled_error(
    destination: str | Path,
    source: Source,
    adapter: LoraAdapter | None = None,
    made_from: Mapping[tuple[str, int], Origin] | None = None,
) -> SampledError:
    """Measure the SQNR of the layers of a checkpoint on some rows of each."""
    # At most 256 matrices are measured, and fewer if they are large; they are evenly spaced among all matrices.
    checks = _checks_with_origin(destination, source, adapter, made_from=made_from)
    found: dict[str, float] = {}
    sample = list(_sample(checks))
    # verify gives one number per stack, not one per expert
    is_whole = all(check.stored.experts == 1 and spans == ((0, check.stored.shape[-2]),) for check, spans in sample)
    with Readers() as readers:
        for check, spans in sample:
            db = tally_of_rows(check, readers, spans).sqnr_db
            if db is not None and math.isfinite(db):
                found[_name(check)] = db
    layers = tuple(sorted(found.items(), key=lambda item: item[1]))
    return SampledError(layers, len(checks), is_whole and len(sample) == len(checks))


def _checks_with_origin(
    destination: str | Path,
    source: Source,
    adapter: LoraAdapter | None,
    names: Collection[str] | None = None,
    made_from: Mapping[tuple[str, int], Origin] | None = None,
) -> list[Check]:
    """Return a Check for each matrix of a checkpoint that has a counterpart in the source; ``names`` selects layers."""
    made = inspect_checkpoint(destination)
    weights = [weight for weight in made.layers.values() if names is None or weight.name in names]
    found = made_from
    if found is None:
        found = origins_of(weights, source, resolved(made, made.weights).rotations, adapter)
    return [check for check in checks_of(weights, found, Settings()) if check.origin is not None]


def sampled_losses(
    destination: str | Path,
    source: Source,
    names: Collection[str],
    adapter: LoraAdapter | None = None,
    is_weighted: bool = False,
    made_from: Mapping[tuple[str, int], Origin] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Judge on a sample of rows whether layers of a checkpoint have lost their values, by the limits of verify."""
    checks = _checks_with_origin(destination, source, adapter, names, made_from)
    count = min(len(checks), _MOST_MATRICES)
    lost: dict[str, str] = {}
    with Readers() as readers:
        for check in (checks[i * len(checks) // count] for i in range(count)):
            tally, bits = tally_of_rows(check, readers, _spans(check, _MOST_SPANS)), check.stored.form.element.bits
            usual = usual_db(check, readers) if is_low(tally, bits) and not is_weighted else None
            name = _name(check)
            losses = [*zeros_of(name, tally), *noise_of(name, tally.sqnr_db, usual, bits, is_of_recipe=True)]
            for each in (each for each in losses if each.severity == "error"):
                lost.setdefault(name, each.sentence)
    return tuple(lost.items())


def _sample(checks: Sequence[Check]) -> Iterator[tuple[Check, tuple[tuple[int, int], ...]]]:
    """Yield (matrix, spans of rows) for the sample: at most 256 evenly spaced matrices, with one or four spans each."""
    if not checks:
        return
    sizes = []  # elements that must be read to measure one span of a matrix
    for check in checks:
        rows, columns = check.stored.shape[-2:]
        is_turned = check.stored.transposed or (check.origin is not None and check.origin.weight.transposed)
        sizes.append(columns * (rows if is_turned else min(rows, _SPAN_ROWS)))
    mean = sum(sizes) / len(checks)
    count = max(min(len(checks), _MOST_MATRICES, int(_SAMPLED_ELEMENTS / mean)), 1)
    spans = _MOST_SPANS if count * mean * _MOST_SPANS <= _SAMPLED_ELEMENTS else 1
    for check in (checks[i * len(checks) // count] for i in range(count)):
        yield check, _spans(check, spans)


def _spans(check: Check, count: int) -> tuple[tuple[int, int], ...]:
    """Return ``count`` evenly spaced spans (first row, end row) of a matrix, or one span of all rows if it is small."""
    rows, origin = check.stored.shape[-2], check.origin
    forms = (check.stored.container, None if origin is None else origin.weight.container)
    height = max(_SPAN_ROWS, *(form.block[0] for form in forms if form is not None))
    if rows <= height * count:
        return ((0, rows),)
    starts = ((rows - height) * (2 * i + 1) // (2 * count) // height * height for i in range(count))
    return tuple((start, start + height) for start in starts)


def _name(check: Check) -> str:
    """Return the name of a layer, such as "mlp.up_proj", or "mlp.experts.up_proj[3]" for expert 3 of a stack."""
    return check.stored.name if check.stored.experts == 1 else f"{check.stored.name}[{check.expert}]"


_FEW_ROWS = 64  # rows of a layer that are compared
_GAIN_DB = 0.5  # a layer is smoothed if multiplying its source by f improves the SQNR by at least this
_SMOOTHED_DB = 1.0  # a norm is smoothed if f brings one of its layers this near to the format's usual SQNR


class Smoothing(NamedTuple):
    """The norms and layers that were smoothed by a method such as SmoothQuant or AWQ.

    norms: the names of the smoothed norms.
    layers: name of a smoothed layer -> the SQNR in decibels of its values. The signal is W * f: the source of the layer
        times source norm / stored norm, per column.
    """

    norms: tuple[str, ...]
    layers: Mapping[str, float]


def smoothing_of(changed: Iterable[tuple[Located, Located]], checks: Iterable[Check]) -> Smoothing:
    """Find the smoothed norms among the changed tensors, and the layers that were smoothed with them."""
    norms: dict[str, None] = {}  # in the order of the files
    gained: dict[tuple[str, str], float] = {}  # (norm, layer) -> SQNR
    matrices = [check for check in checks if check.origin is not None and check.stored.container is not None]
    with Readers() as readers:
        for stored, source in changed:
            factor = _factor(stored, source, readers)
            parent = stored.entry.name.removesuffix(".weight").rpartition(".")[0]
            if factor is None:
                continue
            for check in matrices:
                if check.stored.name.startswith(f"{parent}.") and check.stored.shape[-1] == factor.size:
                    plain, scaled = (_db_of_rows(check, readers, f) for f in (np.ones_like(factor), factor))
                    if scaled < plain + _GAIN_DB:
                        continue
                    usual = usual_db(check, readers)
                    if usual is not None and scaled >= usual - _SMOOTHED_DB:
                        norms[stored.entry.name] = None
                    gained[stored.entry.name, check.stored.name] = scaled
    return Smoothing(tuple(norms), {layer: db for (norm, layer), db in gained.items() if norm in norms})


def _factor(stored: Located, source: Located, readers: Readers) -> npt.NDArray[np.float32] | None:
    """Return the factors source / stored of a norm as float32, one per column."""
    if len(stored.entry.shape) != 1 or not {stored.entry.dtype, source.entry.dtype} <= set(FLOAT_DTYPES):
        return None
    new, old = (readers.array(place).astype(np.float32) for place in (stored, source))
    if not (np.isfinite(new).all() and np.isfinite(old).all() and new.all() and old.all()):
        return None
    factor: npt.NDArray[np.float32] = old / new
    return factor


def _db_of_rows(
    check: Check, readers: Readers, factor: npt.NDArray[np.float32] | float = 1.0, is_inverted: bool = False
) -> float:
    """Return the SQNR in decibels of the first 64 rows of a stored matrix, whose source's columns have factors."""
    assert check.origin is not None
    count, height = min(_FEW_ROWS, check.stored.shape[-2]), check.stored.form.block[0]
    slab = next(slabs(readers, check.stored, check.expert, (0, -(-count // height) * height), height))
    with np.errstate(all="ignore"):
        if is_inverted and slab.column_scale is not None:
            slab = slab._replace(column_scale=np.float32(1) / slab.column_scale)
        x = rows_of(check.origin, 0, count).values(readers).astype(np.float64) * factor
        error = values_of(check.stored, slab)[: len(x)].astype(np.float64) - x
    return sqnr_db(float(np.square(x).sum()), float(np.square(error).sum()))


_MOST_FAULTY = 4  # at most this many layers are searched for any fault, which takes much longer than comparing
_MOST_ELEMENTS = 1 << 29  # layers with so many elements together are compared with the faults of others
_FAULTY_ELEMENTS = 1 << 26  # layers with more elements are not examined
_MOST_WITH_PARTS = 16  # layers of which single parts are compared with those of other layers
_NEAR_USUAL_DB = 10.0  # an AWQ layer's SQNR under the right factors is within this of the format's usual SQNR


def faults_of(checks: Iterable[Check], names: Collection[str]) -> dict[str, str]:
    """Find the faults of layers in ``names``: any fault in four of them, and faults of these in the others. If there
    are too many layers to examine, the texts say how many were.
    """
    if not names:
        return {}
    by_name = {check.stored.name: check for check in checks if check.origin is not None and check.stored.experts == 1}
    groups = fused_groups(check.stored for check in by_name.values())  # layer -> with which it shares a tensor scale
    quantized = ((name, one) for name, one in by_name.items() if one.stored.container is not None)
    places = {name: Place(name, one.stored, 0, one.origin) for name, one in quantized if one.origin is not None}
    moved = other_places([places[name] for name in names if name in places], [*places.values()])
    is_many = len(moved) > _MOST_FAULTY
    found = {one.name: f"{HOLDS} of the source" if is_many else f"holds {other.origin_name}" for one, other in moved}
    first = dict.fromkeys(one.name for one, _ in moved)
    first |= dict.fromkeys(name for name in names if name in places and by_name[name].job is not None)
    parts = _parts_of_others([*first][:_MOST_WITH_PARTS], by_name, groups, places)
    for one, other in moved:  # with equal tensor scales, codes and block scales are the whole layer
        both = "; ".join(f"holds the {part} of {other.name}" for part in ("codes", "block scales"))
        if parts.get(one.name) == both and groups.get(one.name) == groups.get(other.name, ""):
            del parts[one.name]
    found |= parts
    suitable = [by_name[name] for name in names if name in by_name and name not in found]
    tried = [check for check in suitable if prod(check.stored.shape) <= _FAULTY_ELEMENTS]
    faults: dict[str, str] = {}
    known: dict[MadeBy, None] = {}
    examined = elements = 0
    with Readers() as readers:
        for number, check in enumerate(tried):
            elements += prod(check.stored.shape) * (number >= _MOST_FAULTY)
            if number >= _MOST_FAULTY and (not known or elements > _MOST_ELEMENTS):
                break
            own = groups.get(check.stored.name, "")
            members = [one for name, one in by_name.items() if name in groups and groups[name] == own]
            faults[check.stored.name] = _fault_of(check, members, readers, known, number < _MOST_FAULTY)
            examined += 1
    left = f" ({examined:,} of {len(suitable):,} differing layers were examined)" * (examined < len(suitable))
    found |= {name: fault for name, fault in faults.items() if fault}
    kinds = Counter(map(without_numbers, found.values()))
    for name, fault in found.items():
        kind = without_numbers(fault)  # so that layers with the same fault have one text
        found[name] = (kind if kinds[kind] > _MOST_FAULTY else fault) + left * (name in faults)
    return found


def _parts_of_others(
    names: Sequence[str], checks: Mapping[str, Check], groups: Mapping[str, str], places: Mapping[str, Place]
) -> dict[str, str]:
    """Return {layer: fault as text} for layers in ``names`` that hold the codes or scales of other layers."""
    with Readers() as readers:

        def read(name: str) -> Layout | None:
            stored, origin = places[name].weight, places[name].origin
            parts = stored_layer(stored, 0, readers)
            if isinstance(parts, Fp8Layer) or {COLUMN_SCALE, LOW_RANK_A, OUTER_SCALE} & stored.parts.keys():
                return None
            members = [
                one.origin for other, one in checks.items() if groups.get(other, other) == groups.get(name, name)
            ]
            amaxes = [float(one.amax(readers)) for one in members if one is not None]
            job = checks[name].job
            recipes = () if job is None or job.recipe is None else (job.recipe,)
            return plain_of(parts, origin.values(readers), (max(amaxes, default=0.0),), recipes=recipes)

        found = parts_elsewhere(names, places, readers, read)
    return {name: one.sentence.partition(", by ")[0] for name, one in found.items()}


def _fault_of(check: Check, members: list[Check], readers: Readers, known: dict[MadeBy, None], search: bool) -> str:
    """Return the fault of one layer as text, such as "nibbles are swapped"; "" if none is found. ``known``, to which
    a found fault is added, is tried first. Other faults are tried if ``search``.
    """
    form, origin = check.stored.container, check.origin
    if form is None or origin is None:
        return ""
    if COLUMN_SCALE in check.stored.parts and LOW_RANK_A not in check.stored.parts:
        usual = usual_db(check, readers)
        if usual is not None and _db_of_rows(check, readers, is_inverted=True) > usual - _NEAR_USUAL_DB:
            return "pre_quant_scale is stored as its reciprocals"
    x, amaxes = origin.values(readers), tuple(one.origin.amax(readers) for one in members if one.origin is not None)
    shared = (max(amaxes),) if amaxes else ()
    parts = stored_layer(check.stored, check.expert, readers)
    if isinstance(parts, Fp8Layer):
        cause = explain_fp8(parts, x, shared).cause
        return "scales are stored as their reciprocals" if cause is not None and "inverted" in cause else ""
    assert isinstance(parts, StoredLayer)
    for how in known:
        if again := confirmed(parts, x, how, shared):
            return again.mishap or ""
    found = explain(parts, x, amaxes=shared, unnamed=False) if search else None
    if found is None or not found.mishap:
        return ""
    if found.how is not None:  # its recipes one by one, because the first that fits suffices
        known.update(dict.fromkeys(found.how._replace(recipes=(r,)) for r in found.how.recipes))
    return found.mishap
