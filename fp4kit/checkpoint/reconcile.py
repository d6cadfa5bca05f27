"""Repair a checkpoint in which layers that a loader joins into one have different tensor scales. A loader joins q, k
and v, or gate and up, into one fused layer. These layers are its parts. vLLM uses one tensor scale for a fused layer
and does not rescale the parts, so values are wrong if the parts have different tensor scales.

Let s be the tensor scale of a part, as a multiplier on decode, and t the largest s of the fused layer. Then

  new block_scale = E4M3(block_scale * (s / t))
  new tensor scale = t

The quotient, the product and E4M3 round to nearest even; quotient and product are float32. Codes do not change, and a
part with s = t keeps its block scales. All parts store the tensor scale of the part that has t, bit for bit. Values do
not change if s / t is a power of two and no block scale becomes subnormal. No block scale saturates, because s <= t.

On request, all experts of a layer get one tensor scale, too: the separate experts, and the matrices of a stack.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp4kit import __version__
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.table import SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.convert.job import usable_tensor_scale
from fp4kit.checkpoint.convert.rows import Folding, folded
from fp4kit.checkpoint.convert.run_jobs import source_facts
from fp4kit.checkpoint.model import model_files
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.doubts import CERTAIN, doubt_of
from fp4kit.checkpoint.model.slabs import Readers, Slab, count_nonfinite, scalar_of, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import doubts_of, reference_of, sampled_magnitudes, sqnr_db
from fp4kit.checkpoint.model.weights import Weight, weights_of
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.storage.files import CheckpointError, SafetensorsWriter, dump_object, shown, write_file

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Repair:
    """One layer that gets a new tensor scale.

    name: the name of the layer, with the number of the expert in brackets if it is a matrix of a stack.
    group: the name of the fused layer that it is part of.
    before, after: the old and the new tensor scale, as multipliers on decode.
    block_scales, changed: the number of block scales of the layer, and the number of them that change.
    underflow: the number of nonzero block scales that become zero.
    inexact: the number of block scales whose value, their product with the tensor scale in float32, changes. Block
        scales of blocks without a nonzero code do not count.
    largest_error: the largest |new - old| / |old| of these values; 0 if none changes.
    sqnr_db: the SQNR in decibels of the new values, with the old values as the signal; inf if no value changes.
    """

    name: str
    group: str
    before: float
    after: float
    block_scales: int
    changed: int
    underflow: int
    inexact: int
    largest_error: float
    sqnr_db: float

    @property
    def loss(self) -> str:
        """The loss in words: "exact" if no value changes."""
        return Folding(self.block_scales, self.inexact, largest_error=self.largest_error).text


@dataclass(frozen=True)
class Reconciliation:
    """A report of what a reconciliation found and did.

    groups: the number of fused layers in the checkpoint.
    repairs: the layers that get a new tensor scale; empty if all fused layers agree.
    destination: the copy that was written; None if nothing was written, because there was no destination or no repair.
    """

    groups: int
    repairs: tuple[Repair, ...]
    destination: Path | None


_EXPERT = re.compile(r"\.experts\.\d+\.")
Parts = dict[str, tuple[Weight, int]]  # name -> (weight, number of the matrix in it)


def disagreements(source: model_files.Source, readers: Readers, experts: bool = False) -> dict[str, Parts]:
    """Find the fused layers whose parts (such as q, k and v, or all experts) store different tensor scales."""

    # The stored numbers are compared, because engines compare them.
    def stored(part: tuple[Weight, int]) -> tuple[bytes, bool]:
        weight, expert = part
        return scalar_of(readers, weight, TENSOR_SCALE, expert).tobytes(), weight.form.divides

    groups = fused_parts(source, experts)
    return {group: parts for group, parts in groups.items() if len({stored(part) for part in parts.values()}) > 1}


def fused_parts(source: model_files.Source, experts: bool = False) -> dict[str, Parts]:
    """Return the parts of each fused layer: its name -> {name of the part: (weight, number of the matrix)}."""
    layers = _layers(source).values()
    single = {weight.name: weight for weight in layers if len(weight.shape) == 2}
    fused, found = shared_amax_groups(single), defaultdict[str, Parts](dict)
    for name, weight in single.items():
        group = fused.get(name, name)
        if experts:
            group = _EXPERT.sub(".experts.*.", group)
        found[group][name] = weight, 0
    for weight in layers if experts else ():
        if len(weight.shape) == 3:
            found[weight.name] = {f"{weight.name}[{e}]": (weight, e) for e in range(weight.experts)}
    return {group: parts for group, parts in found.items() if len(parts) > 1}


def _largest(parts: Iterable[tuple[Weight, int]], readers: Readers) -> tuple[Weight, int]:
    """Return the part of a fused layer that has the largest tensor scale, as a multiplier on decode."""
    return max(parts, key=lambda part: order_of(part[0].form, scalar_of(readers, part[0], TENSOR_SCALE, part[1])))


def order_of(form: Container, stored: np.float32) -> tuple[float, float]:
    """Return the key by which the largest stored tensor scale is chosen: of equal multipliers, the smallest number."""
    return float(form.multiplier(stored)), -float(stored)


def _layers(source: model_files.Source) -> dict[str, Weight]:
    """Return the layers whose tensor scale can be reconciled, as a dict from tensor name to weight."""
    return {
        name: weight
        for name, weight in source.weights.items()
        if weight.container is not None
        and {SCALES, TENSOR_SCALE} <= set(weight.parts)
        and weight.container.tensor_scale_unit == 1
        and not weight.container.swizzled
    }


def reconcile(
    source: str | Path,
    destination: str | Path | None,
    progress: Progress | None = None,
    ignore: Iterable[str] = (),
    experts: bool = False,
    allow_loss: bool = False,
) -> Reconciliation:
    """Write a copy of an NVFP4 checkpoint in which the parts of every fused layer have one tensor scale.

    With ``experts``, all experts of a layer are parts of one fused layer, gate and up together. Without ``allow_loss``,
    CheckpointError is raised, before anything is written, if the source differs from its manifest, if its scales are
    certainly wrong, or if most block scales of a layer would become 0.
    """
    model = model_files.open_source(Path(source))
    if model_files.is_gguf_config(model.config):
        raise CheckpointError(
            f"{source}: is a GGUF file; llama.cpp does not fuse its layers, so there is nothing to reconcile"
        )
    check_model(model, weights_of(model.tensors, model.config), tuple(ignore))
    layers = _layers(model)
    if not layers:
        raise CheckpointError(
            f"{source}: has no layer in NVFP4 of Model-Optimizer or compressed-tensors, whose tensor scales could be"
            " made equal; fp4kit convert --format modelopt writes such layers"
        )
    with Readers() as readers:
        repaired = {
            name: _Repaired(name, part, group, _largest(parts.values(), readers), readers)
            for group, parts in disagreements(model, readers, experts).items()
            for name, part in parts.items()
        }
        groups = len(fused_parts(model, experts))
        changed = {name: one for name, one in repaired.items() if one.stored != one.was}
        target = None if destination is None else Path(destination)
        if target is not None and changed:
            staging.check_destination(model.root, target)
        repairs = tuple(one.report(readers) for one in changed.values())
        if changed and not allow_loss and (fault := next(_faults(model, repaired, repairs, readers), "")):
            raise CheckpointError(f"{fault}; --allow-loss repairs the model as it is")
        if target is not None and changed:
            _write(model, changed, experts, target, readers, progress or (lambda count: None))
    return Reconciliation(groups, repairs, target if changed else None)


def _faults(
    model: model_files.Source, repaired: Mapping[str, _Repaired], repairs: Iterable[Repair], readers: Readers
) -> Iterator[str]:
    """Yield the faults of the source that a repair would hide, or spread to the other parts of a fused layer."""
    for name, text, severity in model_files.differences(model.root) or ():
        if severity == "error":
            why = f"{text}, and the manifest of a repaired model would hide this"
            yield f"{model.root}: {name}: {why}; take the model again"
    weights = [*model.weights.values()]
    for doubt in doubts_of(sampled_magnitudes(weights), reference_of(weights)):
        if doubt.severity == "error":
            yield doubt.line
    for name, one in repaired.items():
        if (why := doubt_of(readers, one.weight, one.expert)) in CERTAIN:
            yield f"{shown(name)}: {why}; take the layer from another copy"
        for slab in slabs(readers, one.weight, one.expert):
            if bad := count_nonfinite(one.weight, slab):
                yield f"{shown(name)}: {bad} values are NaN or infinite; repair the source"
    for repair in repairs:
        if 2 * repair.underflow > repair.block_scales:
            lost = f"{repair.underflow} of {repair.block_scales} block scales would become 0"
            scales = f"the tensor scale {repair.after:.6g} of {shown(repair.group)}; its own is {repair.before:.6g}"
            yield f"{shown(repair.name)}: {lost} with {scales}; one of both is wrong; convert the source again"


class _Repaired:
    """The old and the new scales of one part (such as q) of a fused layer whose parts disagree.

    name: the name of the part.
    part: the weight, and the number of the matrix in it.
    group: the name of the fused layer.
    largest: the part of the fused layer whose tensor scale all parts get.

    Raises CheckpointError if the tensor scale of the part or of ``largest`` is not a positive normal float32.
    """

    def __init__(
        self, name: str, part: tuple[Weight, int], group: str, largest: tuple[Weight, int], readers: Readers
    ) -> None:
        self.name, self.group, (self.weight, self.expert) = name, group, part
        scale, shared = tensor_scale_of(readers, *part), tensor_scale_of(readers, *largest)
        assert scale is not None and shared is not None
        if not usable_tensor_scale(scale) or not usable_tensor_scale(shared):
            text = f"tensor scale {scale} is not a positive normal float32; convert the model again"
            raise CheckpointError(f"{shown(name)}: {text}")
        self.shared, self.scale, form = shared, scale, self.weight.form
        self.was = scalar_of(readers, self.weight, TENSOR_SCALE, self.expert)
        # Copy the largest part's stored number: the reciprocal of a divisor's reciprocal may differ from the divisor.
        self.stored = scalar_of(readers, largest[0], TENSOR_SCALE, largest[1])
        if largest[0].form.direction != form.direction:
            self.stored = np.float32(1) / shared if form.divides else shared

    def fold(self, slab: Slab) -> tuple[npt.NDArray[np.uint8], Folding]:
        """Return the new block scales of some rows, and what became of them."""
        return folded(self.weight, slab, self.shared, self.stored if self.weight.form.divides else None)

    def put_into(self, arrays: dict[str, np.ndarray], readers: Readers) -> None:
        """Put the new scales into ``arrays``, which map tensor names to arrays."""
        for part in (SCALES, TENSOR_SCALE):
            place = self.weight.parts[part]
            if place.entry.name not in arrays:
                arrays[place.entry.name] = readers.array(place)
        arrays[self.weight.parts[TENSOR_SCALE].entry.name].reshape(-1)[self.expert] = self.stored
        scales = arrays[self.weight.parts[SCALES].entry.name]
        matrix = scales if len(self.weight.shape) == 2 else scales[self.expert]
        for slab in slabs(readers, self.weight, self.expert):
            rows = slice(slab.start, slab.start + len(slab.scales))
            new = self.fold(slab)[0]
            if self.weight.transposed:
                matrix[:, rows] = new.T
            else:
                matrix[rows] = new

    def report(self, readers: Readers) -> Repair:
        """Return a Repair with the changes of the scales and the SQNR of the new values."""
        form, loss, size, changed, lost = self.weight.form, Folding(), 0, 0, 0
        assert form.scale is not None
        magnitudes = ~np.uint8(form.scale.sign_bit)
        signal = noise = 0.0
        for slab in slabs(readers, self.weight, self.expert):
            new, found = self.fold(slab)
            old = np.asarray(slab.scales).view(np.uint8)
            loss, size = loss.plus(found), size + old.size
            changed += int(np.count_nonzero(old != new))
            lost += int(np.count_nonzero((old & magnitudes != 0) & (new & magnitudes == 0)))
            divisor = self.stored if form.divides else None
            after = values_of(self.weight, slab._replace(scales=new, tensor_scale=self.shared, divisor=divisor))
            before = values_of(self.weight, slab).astype(np.float64)
            signal += float(np.sum(before**2))
            noise += float(np.sum((before - after) ** 2))
        scales, db = (float(self.scale), float(self.shared)), sqnr_db(signal, noise)
        return Repair(self.name, self.group, *scales, size, changed, lost, loss.changed, loss.largest_error, db)


def _write(
    model: model_files.Source,
    changed: Mapping[str, _Repaired],
    experts: bool,
    target: Path,
    readers: Readers,
    tick: Progress,
) -> None:
    """Write a copy of a model to ``target``, in which only the scales of the layers in ``changed`` have new bytes."""
    is_file = target.suffix.lower() == ".safetensors"
    if is_file and not model.root.is_file():
        raise CheckpointError(f"{target}: a model directory becomes a directory; name one without .safetensors")
    beside = model_files.scan(
        model.root, {file.name for file in model.files} | {model_files.INDEX, model_files.DIFFUSERS_INDEX}
    )
    own = [
        name
        for name in (model_files.CONFIG, model_files.HF_QUANT_CONFIG, model_files.INDEX, model_files.DIFFUSERS_INDEX)
        if os.path.lexists(model.root / name)
    ]
    configs = {name: model_files.existing_file(model.root, name) for name in own}
    staging.check_space(target, sum(file.size for file in model.files) + sum(file.nbytes for file in beside.copied))
    new: dict[str, np.ndarray] = {}
    for one in changed.values():
        one.put_into(new, readers)
    with staging.staged_directory(target, paths={model.files[0].name: target} if is_file else None) as stage:
        for file in model.files:
            with SafetensorsWriter(stage.folder / file.name, file.entries, file.metadata) as writer:
                for entry in file.entries:
                    chunks = [new[entry.name]] if entry.name in new else readers.of(file).chunks(entry)
                    for chunk in chunks:
                        writer.write(entry.name, chunk)
                        tick(chunk.nbytes)
                writer.finish()
        if is_file:
            return
        for extra in beside.copied:
            if extra.name != model_files.MANIFEST:
                staging.copy_file(extra.path, stage.folder / extra.name)
        for name, path in configs.items():
            staging.copy_file(path, stage.folder / name)
        paths = {name: stage.folder / name for name in model_files.names_in(stage.folder)}
        digests = {name: model_files.digest_of(path) for name, path in paths.items()}
        facts = _facts(model, changed, experts)
        write_file(stage.folder / model_files.MANIFEST, dump_object(model_files.manifest_of(digests, facts)))


def _facts(model: model_files.Source, changed: Iterable[str], experts: bool) -> dict[str, Any]:
    # "repaired" describes the files of the model itself
    own = model_files.load_manifest(model.root) or {}
    kept: dict[str, Any] = {name: own[name] for name in ("format", "source", "request", "codes") if name in own}
    steps = [*steps_of(own), {"experts": experts, "layers": sorted(changed)}]
    return {**kept, "version": __version__, "reconciled": steps, "repaired": source_facts(model)}


def steps_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the repairs that a manifest lists, the first one first. Raise CheckpointError if the list is malformed."""
    found = manifest.get("reconciled", [])
    if found and isinstance(found, list) and all(isinstance(name, str) for name in found):
        return [{"experts": False, "layers": found}]  # written before repairs were listed one by one
    is_right = isinstance(found, list) and all(isinstance(one, dict) and _is_step(one) for one in found)
    if not is_right:
        raise CheckpointError(f"{model_files.MANIFEST}: reconciled is malformed; convert the model again")
    return found


Part = tuple[str, int]  # (name of the weight, number of the matrix in it)


def repaired_parts(model: model_files.Source, manifest: Mapping[str, Any]) -> dict[Part, tuple[tuple[Part, ...], ...]]:
    """Return, for each part that a manifest lists as reconciled, the parts of its fused layer, once per repair."""
    found: dict[Part, tuple[tuple[Part, ...], ...]] = {}
    for step in steps_of(manifest):
        for parts in fused_parts(model, step["experts"]).values():
            every = tuple((weight.name, expert) for weight, expert in parts.values())
            for own in (one for name, one in zip(parts, every, strict=True) if name in step["layers"]):
                found[own] = (*found.get(own, ()), every)
    return found


def _is_step(one: Mapping[str, Any]) -> bool:
    layers = one.get("layers")
    names = isinstance(layers, list) and all(isinstance(name, str) for name in layers)
    return names and isinstance(one.get("experts"), bool)
