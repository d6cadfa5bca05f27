"""Repair a checkpoint in which layers that a loader joins into one have different tensor scales. A loader joins q, k
and v, or gate and up, into one fused layer. These layers are its parts. vLLM uses one tensor scale for a fused layer
and does not rescale the parts, so values are wrong if the parts have different tensor scales.

Let s be the tensor scale of a part, as a multiplier on decode, and t the largest s of the fused layer. Then

  new block_scale = E4M3(block_scale * (s / t))
  new tensor scale = t

The quotient, the product and E4M3 round to nearest even; quotient and product are float32. Codes do not change, and a
part with s = t keeps its block scales. All parts store the tensor scale of the part that has t, bit for bit. Values do
not change if s / t is a power of two and no block scale becomes subnormal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp4kit import __version__
from fp4kit.arithmetic import ieee
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.table import CODES, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.convert.job import usable_tensor_scale
from fp4kit.checkpoint.convert.run_jobs import source_facts
from fp4kit.checkpoint.model import model_files
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.slabs import Readers, codes_of, decode, row_chunks, scalar_of, tensor_scale_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.weights import Weight, weights_of
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.storage.files import CheckpointError, SafetensorsWriter, dump_object, shown, write_file

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Repair:
    """One layer that gets a new tensor scale.

    name: the name of the layer.
    group: the name of the fused layer that it is part of.
    before, after: the old and the new tensor scale, as multipliers on decode.
    block_scales, changed: the number of block scales of the layer, and the number of them that change.
    underflow: the number of nonzero block scales that become zero.
    sqnr_db: the SQNR in decibels of the new values, with the old values as the signal; inf if no value changes.
    """

    name: str
    group: str
    before: float
    after: float
    block_scales: int
    changed: int
    underflow: int
    sqnr_db: float


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


def disagreements(source: model_files.Source, readers: Readers) -> dict[str, dict[str, Weight]]:
    """Find the fused layers whose parts (such as q, k and v) store different tensor scales."""
    # The stored numbers are compared, because engines compare them.
    layers = {weight.name: weight for weight in _layers(source).values()}
    found: dict[str, dict[str, Weight]] = {}
    for name, group in shared_amax_groups(layers).items():
        found.setdefault(group, {})[name] = layers[name]

    def stored(part: Weight) -> tuple[bytes, bool]:
        return scalar_of(readers, part, TENSOR_SCALE).tobytes(), part.form.divides

    return {group: parts for group, parts in found.items() if len({stored(part) for part in parts.values()}) > 1}


def _largest(parts: Mapping[str, Weight], readers: Readers) -> Weight:
    """Return the part of a fused layer that has the largest tensor scale, as a multiplier on decode."""

    def scale(part: Weight) -> tuple[float, float]:
        found = tensor_scale_of(readers, part)
        assert found is not None
        return float(found), -float(scalar_of(readers, part, TENSOR_SCALE))

    return max(parts.values(), key=scale)


def _layers(source: model_files.Source) -> dict[str, Weight]:
    """Return the layers whose tensor scale can be reconciled, as a dict from tensor name to weight."""
    return {
        name: weight
        for name, weight in source.weights.items()
        if weight.container is not None
        and {SCALES, TENSOR_SCALE} <= set(weight.parts)
        and len(weight.shape) == 2
        and weight.container.tensor_scale_unit == 1
        and not weight.container.swizzled
    }


def reconcile(
    source: str | Path,
    destination: str | Path | None,
    progress: Progress | None = None,
    ignore: Iterable[str] = (),
) -> Reconciliation:
    """Write a copy of an NVFP4 checkpoint in which the parts of every fused layer have one tensor scale."""
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
        wrong = disagreements(model, readers)
        repaired = {
            name: _Repaired(part, group, _largest(parts, readers), readers)
            for group, parts in wrong.items()
            for name, part in parts.items()
        }
        groups = len(set(shared_amax_groups(weight.name for weight in layers.values()).values()))
        changed = {name: one for name, one in repaired.items() if one.stored != one.was}
        target = None if destination is None else Path(destination)
        if target is not None and changed:
            _write(model, changed, target, readers, progress or (lambda count: None))
        repairs = tuple(one.report(readers) for one in changed.values())
    return Reconciliation(groups, repairs, target if changed else None)


class _Repaired:
    """The old and the new scales of one part (such as q) of a fused layer whose parts disagree.

    weight: the part.
    group: the name of the fused layer.
    largest: the part of the fused layer whose tensor scale all parts get.

    Raises CheckpointError if the tensor scale of the part or of ``largest`` is not a positive normal float32.
    """

    def __init__(self, weight: Weight, group: str, largest: Weight, readers: Readers) -> None:
        scale, shared = tensor_scale_of(readers, weight), tensor_scale_of(readers, largest)
        assert scale is not None and shared is not None
        if not usable_tensor_scale(scale) or not usable_tensor_scale(shared):
            text = f"tensor scale {scale} is not a positive normal float32; convert the model again"
            raise CheckpointError(f"{shown(weight.name)}: {text}")
        self.weight, self.group, self.shared, self.scale = weight, group, shared, scale
        self.form = weight.form
        self.old: npt.NDArray[np.uint8] = readers.array(weight.parts[SCALES])
        self.new = self._rescaled()
        self.was = scalar_of(readers, weight, TENSOR_SCALE)
        # Copy the largest part's stored number: the reciprocal of a divisor's reciprocal may differ from the divisor.
        self.stored = scalar_of(readers, largest, TENSOR_SCALE)
        if largest.form.direction != self.form.direction:
            self.stored = np.float32(1) / shared if self.form.divides else shared

    @ieee("reconcile")
    def _rescaled(self) -> npt.NDArray[np.uint8]:
        """Return the E4M3 codes of block_scale * (scale / shared)."""
        assert self.form.scale is not None
        found: npt.NDArray[np.uint8] = self.form.scale.encode(
            self.form.scale.values[self.old] * (self.scale / self.shared)
        )
        return found

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (tensor name, new array) for the block scales, then for the tensor scale."""
        yield self.weight.parts[SCALES].entry.name, self.new
        yield self.weight.parts[TENSOR_SCALE].entry.name, np.array([self.stored], np.float32)

    def report(self, readers: Readers) -> Repair:
        """Return a Repair with the changes of the scales and the SQNR of the new values."""
        assert self.form.scale is not None
        rows, columns = self.weight.shape
        width = columns * self.form.element.bits // 8
        signal = noise = 0.0
        for part in row_chunks(rows, columns):
            raw = readers.bytes(self.weight.parts[CODES], part.start * width, (part.stop - part.start) * width)
            codes = codes_of(self.form, raw.reshape(-1, width))
            old, new = (self.was, self.stored) if self.form.divides else (None, None)
            before = decode(self.form, codes, self.old[part], self.scale, old).astype(np.float64)
            after = decode(self.form, codes, self.new[part], self.shared, new)
            signal += float(np.sum(before**2))
            noise += float(np.sum((before - after) ** 2))
        magnitudes = ~np.uint8(self.form.scale.sign_bit)
        lost = int(np.count_nonzero((self.old & magnitudes != 0) & (self.new & magnitudes == 0)))
        changed = int(np.count_nonzero(self.old != self.new))
        scales = float(self.scale), float(self.shared)
        return Repair(self.weight.name, self.group, *scales, self.old.size, changed, lost, sqnr_db(signal, noise))


def _write(
    model: model_files.Source, changed: Mapping[str, _Repaired], target: Path, readers: Readers, tick: Progress
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
    staging.check_destination(model.root, target)
    staging.check_space(target, sum(file.size for file in model.files) + sum(file.nbytes for file in beside.copied))
    new = {name: array for one in changed.values() for name, array in one.tensors()}
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
        facts: dict[str, Any] = {"version": __version__, "reconciled": sorted(changed), "source": source_facts(model)}
        write_file(stage.folder / model_files.MANIFEST, dump_object(model_files.manifest_of(digests, facts)))
