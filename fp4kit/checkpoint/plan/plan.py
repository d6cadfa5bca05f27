"""Describe a planned conversion: an action and a reason per tensor, the files to write, and the layers to exclude. A
piece is the unit of work: some rows of one matrix of a weight. A plan is executed as jobs; a job converts one piece or
copies one tensor. A shard is one source file.

``make_plan`` makes a plan from decisions (see plan_facts.py), ``convert.execute`` executes it, ``--dry-run`` prints it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.configs import (
    MIXED,
    awq_declarations,
    container_id,
    declarations,
    mixed_declarations,
    without_declarations,
)
from fp4kit.checkpoint.containers.configs import declared as declared_in
from fp4kit.checkpoint.containers.engines import Issue, comfy, mlx
from fp4kit.checkpoint.convert import job
from fp4kit.checkpoint.model import closed_world, model_files, transforms
from fp4kit.checkpoint.model.weights import (
    Located,
    Piece,
    Weight,
    cast_of,
    has_transposed_stacks,
    is_interleaved,
    located,
    part_names,
    pieces,
    unquantized_pieces,
)
from fp4kit.checkpoint.plan.layer_recipes import recorded_include, recorded_patterns, recorded_recipe
from fp4kit.checkpoint.plan.plan_facts import RECORDED, Declared, PlanFacts, carried, outcomes_of, producer_of
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.plan.source_layers import Restored
from fp4kit.checkpoint.selection import names
from fp4kit.checkpoint.selection.selection import DIFFUSERS_CLASS
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import to_spec
from fp4kit.storage import files, gguf_file


@dataclass(frozen=True)
class OutputFile:
    """One file that a conversion writes.

    Attributes:
        name: the file's name in the partial directory.
        outputs: the tensors in the file.
        metadata: key -> text to write into the header: the metadata of a safetensors file, or keys of a GGUF file.
        numbers: further keys of a GGUF file: the number of this file and the total, for a file of a split model (see
            keys_of_part), and those of a new file.
        is_first: False for the second and later files of a split GGUF model, whose headers get no keys of the source.
        values: name -> bytes, for the first tensors of a new GGUF file if the source does not have them.
    """

    name: str
    outputs: tuple[table.OutputTensor, ...]
    metadata: Mapping[str, str]
    numbers: Mapping[str, gguf_file.Value]
    is_first: bool = True
    values: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def header(self, file: files.SafetensorsFile) -> tuple[bytes, dict[str, int], int]:
        """Return (bytes of the header, {tensor name: offset of its data}, size of the file in bytes).

        file: the first file of the source, or the template of a new GGUF file.
        """
        if isinstance(file, gguf_file.GgufFile):
            keys = {**self.metadata, **self.numbers}
            return gguf_file.gguf_header(
                file, self.outputs, keys, gguf_file.SPLIT_KEYS, self.is_first, self.values if self.is_first else {}
            )
        ordered = files.file_order(self.outputs)
        header, found = files.header_bytes(ordered, self.metadata), {}
        position = len(header)
        for output in ordered:
            found[output.name] = position
            position += files.nbytes_of(output.dtype, output.shape)
        return header, found, position


def final_path(target: Path, name: str) -> Path:
    """Return the final path of a file of a split GGUF model, such as DST-00001-of-00003.gguf."""
    return target.with_name(f"{target.stem}-{name}")


def check_target(target: Path) -> None:
    """Raise CheckpointError if the destination of a split GGUF model has the name of one of its files."""
    # The destination must be DST.gguf, not DST-00001-of-00003.gguf.
    whole = gguf_file.whole_path(target)
    if whole != target:
        raise files.CheckpointError(
            f"{files.shown(str(target))}: is the name of one file of a split model; name the model without numbers,"
            f" {files.shown(str(whole))}"
        )


@dataclass(frozen=True)
class TensorPlan:
    """The plan for one source tensor, or for one weight with all tensors that store it: the action, and why.

    Attributes:
        name, dtype, shape: the name, dtype and shape of the tensor. A weight has the name of the tensor with its values
            or codes; its dtype and shape are Weight.dtype and Weight.shape.
        action: one of the actions in job.py, such as "copy" or "quantize".
        reason: why this action was chosen, in words for the user.
        bytes_in: the number of bytes of the source tensors.
        pieces: the units of work for a weight; empty for a tensor that is copied.
        place: where to read a tensor that is copied; None for a weight.
        group: output module -> name of its group, for the modules that share a tensor scale. None or {} if no module
            does.
        renamed: the output name of a tensor that is copied; "" if it keeps its own name.
        recipe: the recipe of a weight that is converted to a container, also if it keeps its codes. None if the weight
            is decoded or stays in its container, and for a tensor that is copied.
        values: the bytes of a tensor that the source does not have, and that a new GGUF file needs; otherwise b"".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    action: str
    reason: str
    bytes_in: int
    pieces: tuple[Piece, ...]
    place: Located | None = None
    group: Mapping[str, str] | None = None
    renamed: str = ""
    recipe: Recipe | None = None
    values: bytes = field(default=b"", repr=False)

    @property
    def outputs(self) -> tuple[table.OutputTensor, ...]:
        """The output tensors that this source tensor or weight becomes, each listed once."""
        if self.place is not None or self.values:
            return (table.OutputTensor(self.renamed or self.name, self.dtype, self.shape),)
        return tuple(dict.fromkeys(output for piece in self.pieces for output in piece.outputs))

    @property
    def bytes_out(self) -> int:
        """The number of bytes of all output tensors."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def is_rewritten(self) -> bool:
        """True if unquantized values are written unquantized, but in another dtype, order or stack."""
        weights = [piece.weight for piece in self.pieces if piece.form is None]
        plain = [one for one in weights if one.container is None and one.update is None]
        return self.action == job.DEQUANTIZE and len(plain) == len(self.pieces)


@dataclass(frozen=True)
class ShardPlan:
    """The plan for the tensors of one source file. A GGUF model, split or not, is one shard.

    Attributes:
        name: the name of the source file; the first file's name for a split GGUF model.
        tensors: the plans of the source file's tensors.
        metadata: key -> text to write into the header of the output file.
        keys: further keys of the header of a new GGUF file.
    """

    name: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]
    keys: Mapping[str, gguf_file.Value] = field(default_factory=dict)

    @lazy_property
    def outputs(self) -> tuple[table.OutputTensor, ...]:
        """The output tensors of all tensors of the source file."""
        return tuple(output for tensor in self.tensors for output in tensor.outputs)

    @property
    def values(self) -> dict[str, bytes]:
        """The bytes of the tensors that the source does not have."""
        return {tensor.name: tensor.values for tensor in self.tensors if tensor.values}


class Plan(PlanFacts):
    """The plan of a whole conversion.

    Attributes:
        source: the model to read.
        request: what the user asked for.
        config: the content of the model's config.json.
        form: the container to write, or one of them (see layers_of_forms); None to write unquantized tensors.
        has_input_scale: True if quantized layers in ``form`` have input scales. Experts that saw no token may lack one.
        ignore: the exclusion list, which names the layers that loaders must treat as unquantized.
        warnings: messages for the user; those about ``findings`` come last.
        items: everything in the source that may concern quantization (see checkpoint/containers/config_entries.py).
        kv_cache: the quantized KV cache of the source.
        input_amaxes: output layer -> amax of its inputs, for layers whose input scale is computed from activations.
        input_scaled: the names of the containers whose layers get an input scale.
        as_in_source: layer -> True if the source declares that it is unquantized, False if it only stores it so. These
            layers stay unquantized because the source, which has quantized layers, has them so (see Wishes.include).
        decoded: notes about quantized layers that are decoded although the user did not ask for it.
        findings: the faults that verify, and engines, would find in the output, as far as they are known.

    Raises:
        CheckpointError: if the source cannot be converted with this request.
    """

    ignore: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()
    findings: tuple[Issue, ...] = ()

    def __repr__(self) -> str:
        """Return one line with the source, the output format and the number of converted tensors."""
        counts = f"{len(self.converted)} of {len(self.tensors)} tensors converted"
        return f"Plan({str(self.source.root)!r} to {self.format_name}; {counts})"

    @lazy_property
    def shards(self) -> tuple[ShardPlan, ...]:
        """The tensors to write, by source file."""
        shards = tuple(_shard(self, file) for file in self.source.files)
        if not self.is_file:
            return shards
        tensors: Iterable[TensorPlan] = (tensor for shard in shards for tensor in shard.tensors)
        if self.gguf is None:
            return (replace(shards[0], tensors=tuple(tensors)),)
        made = (
            TensorPlan(name, "F32", x.shape, job.COPY, "RoPE of Llama 3.1: computed", 0, (), values=x.tobytes())
            for name, x in self.gguf.generated.items()
        )
        tensors = (*made, *self.gguf.tensors(tensors, self.request.fp8_as))
        keys = self.gguf.precision(tensors)
        return (ShardPlan(f"{self.source.root.name}.gguf", tensors, shards[0].metadata, keys),)

    @lazy_property
    def auxiliary(self) -> model_files.AuxiliaryFiles:
        """The other files of the model directory, such as tokenizers, to copy or to skip."""
        own = {file.name for file in self.source.files} | {model_files.INDEX, model_files.DIFFUSERS_INDEX}
        return model_files.scan(self.source.root, own, keeps_layers=False)

    @lazy_property
    def declarations(self) -> tuple[Declared, ...]:
        """(name, "kept", "converted", "decoded" or "lost", reason) for each thing that the source declares beside its
        weights.
        """
        return outcomes_of(self)

    @lazy_property
    def layers_of_forms(self) -> dict[table.Container, list[str]]:
        """Container -> names of the converted layers that are written in it; {} for unquantized output.

        Several containers mean that the output is a mixed checkpoint. Layers that are copied are not listed.
        """
        found: dict[table.Container, dict[str, None]] = defaultdict(dict)
        for piece in (piece for tensor in self.converted for piece in tensor.pieces):
            if piece.form is not None:
                found[piece.form][piece.module] = None
        return {form: [*names] for form, names in found.items()}

    @property
    def rotated_layers(self) -> list[str]:
        """The names of the layers that are rotated before they are quantized; [] if there are none."""
        pieces = (piece for tensor in self.converted for piece in tensor.pieces if piece.form is not None)
        return list(dict.fromkeys(piece.module for piece in pieces if piece.weight.rotation))

    @property
    def is_mixed(self) -> bool:
        """True if layers are written in several containers that the config must tell apart.

        This is possible only for the output formats compressed-tensors and modelopt. Model-Optimizer's NVFP4 with and
        without AWQ counts as one container.
        """
        forms = {table.MODELOPT_NVFP4 if form is table.MODELOPT_AWQ else form for form in self.layers_of_forms}
        return len(forms) > 1 and self.format in MIXED

    @property
    def recipe(self) -> Recipe:
        """The default recipe for newly quantized tensors. TensorPlan.recipe says which recipe a tensor gets."""
        return self.request.recipe

    @property
    def carries_some_codes(self) -> bool:
        """True if the output has codes whose recipe may differ from ``recorded`` and ``recorded_patterns``.

        See ``mixes_codes`` for the cases.
        """
        actions = {one.action for one in self.converted if any(piece.form is not None for piece in one.pieces)}
        return mixes_codes(actions, self.request, self.source)

    @property
    def recorded(self) -> str:
        """The recipe that made the written codes, as to_spec writes it; "" if it is unknown.

        - If ``carries_codes`` is True, it is the recipe that the source records.
        - If codes are copied from another model (--codes), it is the recipe that this model records.
        - Otherwise, it is the recipe of the request.
        """
        return recorded_recipe(self.source) if self.carries_codes else self.request.recorded

    @property
    def recorded_patterns(self) -> list[list[str]]:
        """The [pattern, recipe] pairs to record for layers whose recipe is not ``recorded``; [] if there are none.

        The first pattern that matches a layer's name in the source decides. If ``carries_codes`` is True, the source's
        recorded pairs are returned, otherwise those of the request (--recipe PATTERN=RECIPE).
        """
        if self.carries_codes:
            return recorded_patterns(self.source)
        return [[pattern, to_spec(one)] for pattern, one in self.request.recipes]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about layers that are not as in the usual conversion of an unquantized source."""
        return (*filter(None, [self.as_in_source_line]), *self.decoded)

    @property
    def as_in_source_line(self) -> str:
        """A line for the user that counts the layers in ``as_in_source``; "" if there are none."""
        if not self.as_in_source:
            return ""
        count, declared = len(self.as_in_source), sum(self.as_in_source.values())
        dtypes = {tensor.dtype for tensor in self.tensors if tensor.name.removesuffix(".weight") in self.as_in_source}
        bits = {files.DTYPE_BITS.get(dtype, 0) for dtype in dtypes}
        how = f"in {bits.pop()} bits" if len(bits) == 1 else "unquantized"
        why = "as the source declares" if declared else "as the source, which has quantized layers, stores them"
        if 0 < declared < count:
            why = f"{declared} as the source declares, {count - declared} as it stores them"
        return f"{count} layer{' stays' if count == 1 else 's stay'} {how}, {why}; --include GLOB quantizes them"

    @property
    def is_file(self) -> bool:
        """True if the output is a GGUF model, of one or several files; False if the output is safetensors.

        It is also False if the output is a single safetensors file.
        """
        return self.gguf is not None or model_files.is_gguf_config(self.config)

    @property
    def first_file(self) -> files.SafetensorsFile:
        """The file whose header is the model of the output's: the source's first, or the template of a GGUF file."""
        return self.source.files[0] if self.gguf is None else self.gguf.template

    @property
    def made_from(self) -> dict[tuple[str, int], transforms.Origin] | None:
        """(module, number of the expert) -> rows of the source, for a new GGUF file, whose names are not the source's.

        None for all other output.
        """
        if self.gguf is None:
            return None
        pieces = (piece for tensor in self.tensors for piece in tensor.pieces)
        return {(one.module, one.number): transforms.Origin(one.weight, one.expert, one.span) for one in pieces}

    @property
    def is_split(self) -> bool:
        """True if the user asks for a split GGUF model. It may still consist of a single file."""
        return self.request.split_max_size is not None

    @lazy_property
    def files(self) -> tuple[OutputFile, ...]:
        """The output files: one per shard, or the parts of a GGUF model if the request sets split_max_size."""
        if self.request.split_max_size is None:
            return tuple(OutputFile(s.name, s.outputs, s.metadata, s.keys, values=s.values) for s in self.shards)
        (shard,) = self.shards
        slices = gguf_file.divide([output.nbytes for output in shard.outputs], self.request.split_max_size)
        return tuple(
            OutputFile(
                gguf_file.name_of_part(i, len(slices)),
                shard.outputs[tensors],
                shard.metadata if i == 0 else {},
                {**(shard.keys if i == 0 else {}), **gguf_file.keys_of_part(i, len(slices), len(shard.outputs))},
                i == 0,
                shard.values,
            )
            for i, tensors in enumerate(slices)
        )

    @lazy_property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The plans of all tensors and weights, copied ones included, in the order of the source files."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @lazy_property
    def converted(self) -> tuple[TensorPlan, ...]:
        """The plans of all tensors and weights whose action is not "copy"."""
        return tuple(tensor for tensor in self.tensors if tensor.action != job.COPY)

    @property
    def format_name(self) -> str:
        """The name of the output format, such as "modelopt NVFP4"; "bf16" if the output is unquantized.

        If the output is mixed (see ``is_mixed``), the name says so, such as "modelopt MIXED_PRECISION".
        """
        if self.form is None:
            return "bf16"
        return MIXED[self.format] if self.is_mixed else container_id(self.form, self.has_input_scale)

    @property
    def bytes_in(self) -> int:
        """The number of bytes of all source tensors."""
        return sum(tensor.bytes_in for tensor in self.tensors)

    @property
    def bytes_out(self) -> int:
        """The number of bytes of all output tensors."""
        return sum(tensor.bytes_out for tensor in self.tensors)


def jobs_of(
    plan: Plan, positions: Mapping[str, tuple[Path, int]], device: Sequence[int | None] = (None,)
) -> Iterator[job.Job]:
    """Yield the jobs of a plan, in the order of its tensors: one per tensor to copy, and one per piece to convert."""
    devices = cycle(device)
    for tensor in plan.tensors:
        if tensor.place is not None:
            path, at = positions[tensor.outputs[0].name]
            # The key of a copy is the name of the tensor. All other keys end in "#" and a number. If the name contains
            # "#", append "#", so that the key of the copy differs from all of them.
            key = f"{tensor.name}#" if "#" in tensor.name else tensor.name
            target = job.Target(table.VALUES, path, at, tensor.bytes_in, tensor.dtype)
            yield job.Job(key, job.COPY, tensor.place, (target,), nonfinite=plan.request.nonfinite)
            continue
        recipe, search = tensor.recipe or plan.recipe, plan.request.search
        if search is not None and not search.supports(recipe):
            search = None
        for piece in tensor.pieces:
            targets = []
            for output in piece.outputs:
                path, at = positions[output.name]
                begin, count = piece.share(output.nbytes)
                targets.append(job.Target(output.part, path, at + begin, count, output.dtype))
            key = f"{piece.module}#{piece.number}"
            input_amax = plan.input_amaxes.get(piece.module)
            yield job.Job(
                key,
                tensor.action,
                piece.weight,
                tuple(targets),
                piece.expert,
                piece.span,
                (tensor.group or {}).get(piece.module, key),
                recipe,
                piece.form,
                plan.request.input_scale,
                plan.request.nonfinite,
                piece.transposed,
                next(devices),
                "" if search is None else search.objective,
                None if search is None else search.columns_of((piece.module, piece.weight), piece.expert),
                None if input_amax is None else float(input_amax),
                plan.request.adapter_scales if tensor.action == job.MERGE else "",
                plan.gguf is not None and piece.form is None and piece.weight.container is not None,
            )


def mixes_codes(actions: Set[str], request: Request, source: model_files.Source) -> bool:
    """Return whether an output has codes of a recipe that may differ from the recorded recipe and patterns."""
    if request.codes or actions & {job.CAST, job.CARRY, job.FOLD, job.RESCALE, job.MERGE}:
        return actions != {job.RENAME} and bool(actions)
    wanted = request.recorded, [[pattern, to_spec(one)] for pattern, one in request.recipes]
    return actions > {job.RENAME} and (recorded_recipe(source), recorded_patterns(source)) != wanted


# Action -> the words that describe it in TensorPlan.reason.
_WORDS = {
    job.QUANTIZE: "quantized",
    job.RENAME: "same codes",
    job.CAST: "same codes where exponents allow",
    job.CARRY: "same codes where scales are powers of two",
    job.FOLD: "same codes, tensor scale in the block scales",
    job.RESCALE: "same values where powers of two as scales allow it",
    job.REQUANTIZE: "decoded and quantized again",
    job.DEQUANTIZE: "decoded",
    job.MERGE: "decoded, and quantized again with an adapter's update",
}


def _shard(plan: Plan, file: files.SafetensorsFile) -> ShardPlan:
    """Return the plan for one source file: what happens to its tensors, and the metadata of the output file."""
    parts = (part_names(plan.weights.values()) - set(plan.weights)) | plan.left_out
    parts |= plan.absorbed - set(plan.restored)
    tensors = tuple(_tensor(plan, file, entry) for entry in file.entries if entry.name not in parts)
    own = {names.VERSION: __version__}
    if plan.form is not None and plan.recorded:
        own = {names.RECIPE: plan.recorded, **own}
    if plan.form is not None and plan.gguf is None and plan.recorded_patterns:  # patterns of the source's names
        own[names.PATTERNS] = json.dumps({"recipes": plan.recorded_patterns})
    if plan.form is not None and mixes_codes({*plan.actions.values()}, plan.request, plan.source):
        own[names.KEPT_CODES] = names.PARTLY_CARRIED
    if plan.is_file and plan.request.search is not None:
        own[names.SCALE_SEARCH] = plan.request.search.label
    include = plan.request.wishes.include
    if include:
        own[names.INCLUDED] = json.dumps({"include": [*dict.fromkeys((*recorded_include([file]), *include))]})
    if plan.is_file:
        return ShardPlan(file.output_name, tensors, own)
    quantized = {weight.name for weight in plan.weights.values() if weight.container is not None}
    kept = {
        key: text
        for key, text in file.metadata.items()
        if key not in (names.RECIPE, names.PATTERNS, names.KEPT_CODES)
        and not closed_world.describes_stored_layers(key, plan.source.tensors, quantized)
    }
    kept = {"format": "pt", **kept} | ({"format": mlx.FORMAT} if plan.format == mlx.FORMAT else {})
    return ShardPlan(file.output_name, tensors, kept | own)


def _tensor(plan: Plan, file: files.SafetensorsFile, entry: files.TensorEntry) -> TensorPlan:
    """Return the plan for one tensor of a file, or for the weight whose values or codes the tensor holds."""
    name = entry.name
    if name in plan.restored:
        one = plan.restored[name]
        return _planned(one, job.DEQUANTIZE, one.reason, one.pieces)
    weight = plan.weights.get(name)
    if weight is not None and name in plan.selected:
        return _converted(plan, weight)
    reason = plan.decisions[name].reason if name in plan.decisions else "not a weight"
    # If --codes gave a layer codes, but the layer is not converted, its own values are copied.
    weight = None if plan.has_codes(name) else weight
    if weight is not None and weight.container is not None:
        if not plan.stays_quantized(weight):
            return _decoded(plan, weight, f"{reason}; decoded, because the output has another container")
        if weight.update is not None:
            raise files.CheckpointError(
                f"{files.shown(weight.name)}: the adapter has an update of this layer, which stays {weight.container};"
                " leave the layer out of the adapter, or use --format bf16"
            )
        found = pieces(weight, weight.container, plan.config, table.INPUT_SCALE in weight.parts)
        return _planned(weight, job.RENAME, f"{reason}; as it is", found)
    if weight is not None and weight.update is not None:
        return _decoded(plan, weight, f"{reason}; an adapter's update is added")
    renamed = ""
    if plan.form is not None and name in plan.kv_cache.tensors:
        renamed, reason = plan.kv_cache.name(name, plan.format), "scale of the KV cache"
    place = located(file, entry)
    may_be_cast = entry.dtype.startswith("F8") and plan.format != comfy.FORMAT
    cast = cast_of(place, plan.weights.values()) if may_be_cast else None
    if cast is not None:
        output = table.OutputTensor(name, "BF16", entry.shape, table.VALUES)
        piece = Piece(cast, 0, (0, cast.shape[0]), name, None, (output,), cast.shape[0])
        return TensorPlan(
            name, cast.dtype, entry.shape, job.DEQUANTIZE, f"{cast.dtype}: decoded", entry.nbytes, (piece,)
        )
    return TensorPlan(name, entry.dtype, entry.shape, job.COPY, reason, entry.nbytes, (), place, renamed=renamed)


def _planned(one: Weight | Restored, action: str, reason: str, found: Iterable[Piece], **more: Any) -> TensorPlan:
    """Return the plan for a weight, or for a layer that is put together from several weights."""
    return TensorPlan(one.tensor, one.dtype, one.shape, action, reason, one.nbytes, tuple(found), **more)


def _decoded(plan: Plan, weight: Weight, reason: str) -> TensorPlan:
    """Return the plan to decode a weight to BF16, or to write an unquantized one with its update in its own dtype."""
    form = weight.container
    of_type = is_interleaved(plan.config) or (
        form is not None and form.stack == "blocks" and has_transposed_stacks(plan.config)
    )
    own_release = form is not None and form.suffixes[table.CODES] == ".blocks"
    transposed = len(weight.shape) == 3 and (weight.transposed or (of_type and not own_release))
    dtype = "BF16" if form is not None else weight.dtype
    return _planned(weight, job.DEQUANTIZE, reason, unquantized_pieces(weight, dtype, transposed))


def _converted(plan: Plan, weight: Weight) -> TensorPlan:
    """Return the plan for a selected weight, to convert it, or to decode it if the output is unquantized."""
    if plan.form is None:
        words = ", an adapter's update is added" if weight.update is not None else ""
        return _decoded(plan, weight, f"{weight.dtype}{': decoded' if weight.container is not None else ''}{words}")
    action, form = plan.actions[weight.tensor], plan.form_of(weight.name)
    has_input_scale = form.name in plan.input_scaled
    form = job.target_of(weight.container, form) if action == job.RENAME else form
    found = [*pieces(weight, form, plan.config, has_input_scale)]
    if weight.rotation is not None or plan.request.activations is not None or action == job.RENAME:
        found = [replace(piece, outputs=tuple(_outputs(plan, weight, piece, action))) for piece in found]
    groups = {piece.module: plan.groups[piece.module] for piece in found if piece.module in plan.groups}
    made_by, search = plan.mixture.of(weight.name).recipe, plan.request.search
    words = "" if weight.rotation is None else f"rotated in blocks of {weight.rotation.size}, "
    shares = action == job.MERGE and weight.update is None
    words += "same codes, if merged layers keep the tensor scale" if shares else _WORDS[action]
    words += (
        ", with an adapter's update" if weight.update is not None and action in (job.QUANTIZE, job.REQUANTIZE) else ""
    )
    words += f" by {made_by.id}" if plan.request.recipes and action in job.SEARCHED else ""
    words += "" if search is None or shares else search.words_for(action, made_by)
    words += f"; shares its tensor scale: {next(iter(groups.values()))}" if groups else ""
    reason = f"{plan.decisions[weight.tensor].reason}: {words}"
    return _planned(weight, action, reason, found, group=groups, recipe=made_by)


def _outputs(plan: Plan, weight: Weight, piece: Piece, action: str) -> Iterator[table.OutputTensor]:
    """Yield the tensors of a piece of a converted weight, with the model's rotation matrix if it is the first one."""
    # Decoding rounds values to the dtype of the scales, so another dtype would change values that keep their codes.
    kept = weight.parts if action == job.RENAME and job.is_rounded(weight) else {}
    unmeasured = plan.without_input_scale(weight, piece)
    for output in piece.outputs:
        if output.part in (table.SCALES, table.TENSOR_SCALE) and output.part in kept:
            yield replace(output, dtype=kept[output.part].entry.dtype)
        elif output.part != table.INPUT_SCALE or not unmeasured:
            yield output
    if weight.rotation is not None and weight is next(one for one in plan.selected.values() if one.rotation):
        shape = (weight.rotation.size, weight.rotation.size)
        yield table.OutputTensor(transforms.matrix_name(piece.module), "F32", shape, table.ROTATION)


def configs(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return a dict from file name to JSON content, for the index and configs that engines need to load the result."""
    found: dict[str, dict[str, Any]] = {}
    singles = model_files.SINGLE, model_files.DIFFUSERS_SINGLE  # engines find other files by an index alone
    if plan.source.has_index or [file.name not in singles for file in plan.files] != [False]:
        weight_map = {output.name: file.name for file in plan.files for output in file.outputs}
        name = model_files.INDEX if DIFFUSERS_CLASS not in plan.config else model_files.DIFFUSERS_INDEX
        found[name] = {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}
    config = _without_float8(without_declarations(plan.config))
    # ComfyUI reads tags in the safetensors file, and no entry of config.json.
    if plan.form is None or plan.format == comfy.FORMAT:
        return found | {model_files.CONFIG: config}
    search = plan.request.search
    own: dict[str, Any] = {
        "version": __version__,
        "recipe": plan.recorded,
        "recipes": plan.recorded_patterns,
        "codes": "carried" if plan.carries_codes else names.PARTLY_CARRIED if plan.carries_some_codes else "",
        RECORDED: producer_of(plan.source),
        "scale_search": "" if search is None else search.label,
    }
    own = {key: value for key, value in own.items() if value}
    if plan.format == mlx.FORMAT:
        config["quantization"] = mlx.declaration(plan.form)
        return found | {
            model_files.CONFIG: {**config, "quantization_config": {**config["quantization"], "fp4kit": own}}
        }
    if plan.format == "deepseek-v4":
        config["expert_dtype"] = "fp4"
    if plan.is_mixed:
        declared, beside = mixed_declarations(plan.layers_of_forms, plan.ignore, plan.input_scaled, own)
    else:
        layers = plan.layers_of_forms.get(plan.form, [])
        row = plan.request.serving
        # Only MXFP4 has inputs that are quantized without a stored scale, and also unquantized ones.
        is_w4a4 = plan.form is table.CT_MXFP4 and row is not None and row.activations is not None
        declared, beside = declarations(plan.form, plan.ignore, plan.has_input_scale or is_w4a4, own, layers)
    if plan.format == "deepseek-v4":  # layers in FP8 stay as they are
        tiles = declared_in(plan.config).get("weight_block_size")
        declared |= {"weight_block_size": tiles} if tiles else {}
    if table.MODELOPT_AWQ in plan.layers_of_forms and not plan.is_mixed:
        declared, beside = awq_declarations(declared, beside)
    declared, beside = _with_carried(plan, declared, beside)
    if plan.rotated_layers:
        rotation = plan.request.rotation
        assert rotation is not None
        modules = (output.name.rpartition(".")[0] for tensor in plan.tensors for output in tensor.outputs)
        rotated = plan.rotated_layers
        others = [name for name in dict.fromkeys(modules) if name not in {*rotated}]
        transform = transforms.declaration(rotation, rotated, others)
        declared = {**declared, transforms.KEY: transform}
    config["quantization_config"] = declared
    return found | {model_files.CONFIG: config} | ({model_files.HF_QUANT_CONFIG: beside} if beside is not None else {})


def _without_float8(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config, and of the configs nested in it, in which the dtype of a model in FP8 is bfloat16."""
    return {
        key: _without_float8(value)
        if key.endswith("_config") and isinstance(value, Mapping)
        else "bfloat16"
        if key in ("dtype", "torch_dtype") and str(value).removeprefix("torch.").startswith("float8")
        else value
        for key, value in config.items()
    }


def _with_carried(
    plan: Plan, declared: dict[str, Any], beside: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return both configs with the KV cache and the entries that are carried over from the source (see carried)."""
    settings = carried(plan)
    inputs = {"input_activations": settings.pop("input_activations")} if "input_activations" in settings else {}
    nested = dict(settings)
    declared = {**declared, **settings}
    if plan.kv_cache.is_carried(plan.format):
        scheme, algorithm = plan.kv_cache.declaration(plan.format)
        declared["kv_cache_scheme"] = scheme
        declared |= {"kv_cache_quant_algo": algorithm} if scheme is None and algorithm is not None else {}
        nested["kv_cache_quant_algo"] = algorithm
    if inputs:
        declared["config_groups"] = {name: {**one, **inputs} for name, one in declared["config_groups"].items()}
    if beside is not None and nested:
        beside = {**beside, "quantization": {**beside["quantization"], **nested}}
    return declared, beside
