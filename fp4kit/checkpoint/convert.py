"""Convert a checkpoint: execute a plan tensor by tensor, into a directory that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from fp4kit.checkpoint import schema, staging
from fp4kit.checkpoint.files import CONFIG, HF_QUANT_CONFIG, INDEX
from fp4kit.checkpoint.plan import Plan, ShardPlan, TensorPlan, make_plan
from fp4kit.checkpoint.statistics import Tally, amax_and_nonfinite, tally, total
from fp4kit.ops.quantize import quantize
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.json_object import dump_object
from fp4kit.storage.safetensors_file import NUMPY_DTYPES, TensorReader
from fp4kit.storage.whole_file import write_file
from fp4kit.storage.writer import SafetensorsWriter

SLAB_BYTES = 16 << 20  # of source elements that are in memory at a time
Progress = Callable[[int], None]  # called with the bytes of source tensors done since the last call


@dataclass(frozen=True)
class TensorReport:
    """What became of one converted tensor."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    tally: Tally


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: one row per converted tensor, and the plan that it followed."""

    plan: Plan
    destination: Path
    rows: tuple[TensorReport, ...]

    @property
    def total(self) -> Tally:
        return total(row.tally for row in self.rows)


def convert(
    source: str | Path,
    destination: str | Path,
    recipe: str | Recipe = "nvfp4-te",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    input_scale: float | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the model directory ``source`` into the new directory ``destination``.

    Arguments are those of make_plan; ``progress`` is called with numbers of bytes that add up to
    ``plan.bytes_to_read``.
    Raises CheckpointError before any work for what a plan can see, and before any tensor is written for NaN or infinity in
    one that is to be quantized; whatever is raised, ``destination`` does not exist afterwards.
    Exact: codes and scales equal fp4kit.quantize of the whole tensor with the tensor amax of its sharing group, but for
        sharing groups and tensors of zeros, whose tensor scale is 1.
    """
    plan = make_plan(source, recipe, include=include, exclude=exclude, input_scale=input_scale)
    return execute(plan, destination, progress)


def execute(plan: Plan, destination: str | Path, progress: Progress | None = None) -> ConversionReport:
    """Execute ``plan`` into the new directory ``destination``; see convert."""
    target = Path(destination)
    tick = progress or (lambda count: None)
    check_destination(plan, target)
    with staging.staged_directory(target) as folder:
        amaxes = _amaxes(plan, tick)
        rows = [row for shard in plan.shards for row in _write_shard(plan, shard, folder, amaxes, tick)]
        for file in plan.auxiliary.copied:
            staging.copy_file(file.path, folder / file.name)
        _write_configs(plan, folder)
    return ConversionReport(plan, target, tuple(rows))


def check_destination(plan: Plan, destination: Path) -> None:
    """Raise CheckpointError if ``plan`` cannot be executed into ``destination``: what stands there, and the space for it."""
    staging.check_destination(plan.source.root, destination)
    staging.check_space(destination, plan.bytes_out + sum(file.nbytes for file in plan.auxiliary.copied))


def _slabs(reader: TensorReader, tensor: TensorPlan, height: int = 1) -> Iterator[np.ndarray]:
    """Yield a 2-D tensor in slabs of whole rows of blocks, at most SLAB_BYTES each where a row of blocks fits."""
    rows, columns = tensor.entry.shape
    row_bytes = tensor.entry.nbytes // rows
    step = max(SLAB_BYTES // (row_bytes * height), 1) * height
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = reader.read_bytes(tensor.entry, start * row_bytes, count * row_bytes)
        yield raw.view(NUMPY_DTYPES[tensor.entry.dtype]).reshape(count, columns)


def _amax(reader: TensorReader, tensor: TensorPlan, tick: Progress) -> np.float32:
    """Return the amax of a tensor that is to be quantized; raise CheckpointError if it holds NaN or infinity."""
    amax, bad = np.float32(0), 0
    for x in _slabs(reader, tensor):
        largest, count = amax_and_nonfinite(x)
        amax, bad = max(amax, largest), bad + count
        tick(x.nbytes)
    if bad:
        raise CheckpointError(
            f"{shown(tensor.name)}: {bad} of {prod(tensor.entry.shape)} values are NaN or infinite; "
            "repair the source or leave it out with --exclude"
        )
    return amax


def _amaxes(plan: Plan, tick: Progress) -> dict[str, np.float32]:
    """Return sharing group, or name of a tensor without one, -> the largest amax of its members. Nothing is written yet."""
    amaxes: dict[str, np.float32] = {}
    for shard in plan.shards:
        with TensorReader(shard.source) as reader:
            for tensor in shard.tensors:
                if tensor.action == "quantize":
                    key = tensor.group or tensor.name
                    amaxes[key] = max(_amax(reader, tensor, tick), amaxes.get(key, np.float32(0)))
    return amaxes


def _write_shard(plan: Plan, shard: ShardPlan, folder: Path, amaxes: dict[str, np.float32], tick: Progress) -> list[TensorReport]:
    """Write one output file; return the rows of its converted tensors."""
    rows = []
    with ExitStack() as stack:
        reader = stack.enter_context(TensorReader(shard.source))
        writer = stack.enter_context(SafetensorsWriter(folder / shard.name, shard.outputs, shard.metadata))
        for tensor in shard.tensors:
            if tensor.action == "copy":
                for chunk in reader.chunks(tensor.entry):
                    writer.write(tensor.name, chunk)
                    tick(chunk.size)
            else:
                amax = amaxes[tensor.group or tensor.name]
                rows.append(_convert_tensor(plan, tensor, reader, writer, amax, tick))
        writer.finish()
    return rows


def _convert_tensor(
    plan: Plan, tensor: TensorPlan, reader: TensorReader, writer: SafetensorsWriter, amax: np.float32, tick: Progress
) -> TensorReport:
    """Quantize one tensor slab by slab, write its parts, and return its row."""
    tensor_amax = None if plan.recipe.tensor_scaling == "none" else amax
    outputs = {output.part: output.name for output in tensor.outputs}
    tallies, scalars = Tally(), {}
    for x in _slabs(reader, tensor, plan.recipe.block_rows):
        q = quantize(x, plan.recipe, tensor_amax=tensor_amax)
        if tensor_amax is not None and amax == 0:
            q = _zeros(q)
        _check_scales(tensor, q)
        writer.write(outputs[schema.WEIGHT], q.packed)
        writer.write(outputs[schema.SCALE], q.block_scale)
        tallies += tally(x, q, plan.format)
        scalars = _scalars(q, plan.input_scale)
        tick(x.nbytes)
    for part, value in scalars.items():
        writer.write(outputs[part], value)
    return TensorReport(tensor.name, tensor.entry.shape, plan.recipe.id, tallies)


def _zeros(q: Quantized) -> Quantized:
    """Return an all-zero tensor as loaders can read it: codes and block scales 0, tensor scale 1.

    Producers write 0, a subnormal or NaN scales there; nvfp4-te already gives this.
    """
    return replace(
        q,
        packed=np.zeros_like(q.packed),
        block_scale=np.zeros_like(q.block_scale),
        tensor_scale=np.ones_like(q.tensor_scale),
    )


def _scalars(q: Quantized, input_scale: float | None) -> dict[str, np.ndarray]:
    """Return schema part -> array, of the parts that a layer has once."""
    parts = {} if q.tensor_scale is None else {schema.TENSOR_SCALE: np.asarray(q.tensor_scale, np.float32)}
    return parts if input_scale is None else {**parts, schema.INPUT_SCALE: np.array(input_scale, np.float32)}


def _check_scales(tensor: TensorPlan, q: Quantized) -> None:
    """Raise CheckpointError for scales that no loader can use; some recipes give them for zeros or subnormals."""
    advice = f"leave it out with --exclude, or use another recipe than {q.recipe.id}"
    if q.tensor_scale is not None and not schema.usable_tensor_scale(q.tensor_scale):
        raise CheckpointError(f"{shown(tensor.name)}: tensor scale {q.tensor_scale}, not a positive normal float32; {advice}")
    assert q.recipe.scale is not None
    magnitudes = q.block_scale & ~np.uint8(q.recipe.scale.sign_bit)
    bad = int(np.count_nonzero(magnitudes == q.recipe.scale.nan_code))
    if bad:
        raise CheckpointError(f"{shown(tensor.name)}: {bad} block scales are NaN; {advice}")


def _write_configs(plan: Plan, folder: Path) -> None:
    """Write the index and the two configs, which make the directory a model."""
    if plan.source.has_index or len(plan.shards) > 1:
        weight_map = {output.name: shard.name for shard in plan.shards for output in shard.outputs}
        index = {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX, dump_object(index))
    config = {key: value for key, value in plan.source.config.items() if key != "compression_config"}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    config["quantization_config"] = schema.quantization_config(plan.format, plan.ignore, plan.recipe.id)
    write_file(folder / CONFIG, dump_object(config))
    write_file(folder / HF_QUANT_CONFIG, dump_object(schema.hf_quant_config(plan.format, plan.ignore), 4))
