"""Describe a planned conversion: an action and a reason per tensor, the files to write, and the layers to exclude. A
piece is the unit of work: some rows of one matrix of a weight. A plan is executed as jobs; a job converts one piece or
copies one tensor. A shard is one source file.

A plan is plain data: ``make_plan`` creates it, ``convert.execute`` executes it, and ``--dry-run`` prints it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.config_entries import Item
from fp4kit.checkpoint.containers.configs import MIXED, container_id
from fp4kit.checkpoint.containers.table import MODELOPT_AWQ, MODELOPT_NVFP4, VALUES, Container, OutputTensor
from fp4kit.checkpoint.model import model_files as side_files
from fp4kit.checkpoint.model.model_files import Source, is_gguf_config
from fp4kit.checkpoint.model.weights import Located, Piece
from fp4kit.checkpoint.plan.borrowed_codes import recorded_patterns, recorded_recipe
from fp4kit.checkpoint.plan.job import COPY, MERGE, RENAME, Job, Target
from fp4kit.checkpoint.plan.kv_cache import KvCache
from fp4kit.checkpoint.plan.output_files import OutputFile, parts_of
from fp4kit.checkpoint.plan.request import Request, mixes_codes
from fp4kit.checkpoint.verify.integrity import Issue
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.storage.safetensors_file import DTYPE_BITS


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

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The output tensors that this source tensor or weight becomes, each listed once."""
        if self.place is not None:
            return (OutputTensor(self.renamed or self.name, self.dtype, self.shape),)
        return tuple(dict.fromkeys(output for piece in self.pieces for output in piece.outputs))

    @property
    def bytes_out(self) -> int:
        """The number of bytes of all output tensors."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class ShardPlan:
    """The plan for the tensors of one source file. A GGUF model, split or not, is one shard.

    Attributes:
        name: the name of the source file; the first file's name for a split GGUF model.
        tensors: the plans of the source file's tensors.
        metadata: key -> text to write into the header of the output file.
    """

    name: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]

    @lazy_property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The output tensors of all tensors of the source file."""
        return tuple(output for tensor in self.tensors for output in tensor.outputs)


@dataclass(frozen=True)
class Plan:
    """The plan of a whole conversion.

    Attributes:
        source: the model to read.
        request: what the user asked for.
        form: the container to write, or one of them (see layers_of_forms); None to write unquantized tensors.
        has_input_scale: True if quantized layers in ``form`` have input scales. Experts that saw no token may lack one.
        shards: the tensors to write, by source file.
        ignore: the exclusion list, which names the layers that loaders must treat as unquantized.
        warnings: messages for the user; those about ``findings`` come last.
        auxiliary: the other files of the model directory, such as tokenizers, to copy or to skip.
        items: everything in the source that may concern quantization (see model/items.py).
        kv_cache: the quantized KV cache of the source, if the output keeps its scales; otherwise None.
        input_amaxes: output layer -> amax of its inputs, for layers whose input scale is computed from activations.
        input_scaled: the names of the containers whose layers get an input scale.
        as_in_source: layer -> True if the source declares that it is unquantized, False if it only stores it so. These
            layers stay unquantized because the source, which has quantized layers, has them so (see Wishes.include).
        decoded: notes about quantized layers that are decoded although the user did not ask for it.
        declarations: (name, "kept", "converted", "decoded" or "lost", reason) for each thing that the source declares
            beside its weights (see source_declarations.py).
        carried: entries of the source's declaration that the output repeats.
        findings: the faults that verify, and engines, would find in the output, as far as they are known.
    """

    source: Source
    request: Request
    form: Container | None
    has_input_scale: bool
    shards: tuple[ShardPlan, ...]
    ignore: tuple[str, ...]
    warnings: tuple[str, ...]
    auxiliary: side_files.AuxiliaryFiles
    items: tuple[Item, ...] = ()
    kv_cache: KvCache | None = None
    input_amaxes: Mapping[str, np.float32] = field(default_factory=dict)
    input_scaled: frozenset[str] = frozenset()
    as_in_source: Mapping[str, bool] = field(default_factory=dict)
    decoded: tuple[str, ...] = ()
    declarations: tuple[tuple[str, str, str], ...] = ()
    carried: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Issue, ...] = ()

    def __repr__(self) -> str:
        """Return one line with the source, the output format and the number of converted tensors."""
        counts = f"{len(self.converted)} of {len(self.tensors)} tensors converted"
        return f"Plan({str(self.source.root)!r} to {self.format_name}; {counts})"

    @lazy_property
    def layers_of_forms(self) -> dict[Container, list[str]]:
        """Container -> names of the converted layers that are written in it; {} for unquantized output.

        Several containers mean that the output is a mixed checkpoint. Layers that are copied are not listed.
        """
        found: dict[Container, dict[str, None]] = defaultdict(dict)
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
    def other_modules(self) -> list[str]:
        """The names of all modules with output tensors, except the rotated layers. Each name occurs once.

        A module's name is a tensor's name up to the last dot; "" for a tensor whose name has no dot.
        """
        names = (output.name.rpartition(".")[0] for tensor in self.tensors for output in tensor.outputs)
        rotated = {*self.rotated_layers}
        return list(dict.fromkeys(name for name in names if name not in rotated))

    @property
    def is_mixed(self) -> bool:
        """True if layers are written in several containers that the config must tell apart.

        This is possible only for the output formats compressed-tensors and modelopt. Model-Optimizer's NVFP4 with and
        without AWQ counts as one container.
        """
        forms = {MODELOPT_NVFP4 if form is MODELOPT_AWQ else form for form in self.layers_of_forms}
        return len(forms) > 1 and self.form is not None and self.form.format in MIXED

    @property
    def recipe(self) -> Recipe:
        """The default recipe for newly quantized tensors. TensorPlan.recipe says which recipe a tensor gets."""
        return self.request.recipe

    @property
    def carries_codes(self) -> bool:
        """True if every quantized layer of the output keeps the codes of the source, so that no new codes are computed.

        False if the output has no quantized layer, or if codes are copied from another model (--codes).
        """
        return self._actions == {RENAME} and not self.request.codes

    @property
    def carries_some_codes(self) -> bool:
        """True if the output has codes whose recipe may differ from ``recorded`` and ``recorded_patterns``.

        See ``mixes_codes`` for the cases.
        """
        return mixes_codes(self._actions, self.request, self.source)

    @lazy_property
    def _actions(self) -> set[str]:
        """The actions that give the quantized layers of the output."""
        return {one.action for one in self.converted if any(piece.form is not None for piece in one.pieces)}

    @property
    def recorded(self) -> str:
        """The id of the recipe that made the written codes; "" if it is unknown.

        - If ``carries_codes`` is True, it is the recipe that the source records.
        - If codes are copied from another model (--codes), it is the recipe that this model records.
        - Otherwise, it is the recipe of the request.
        """
        return recorded_recipe(self.source) if self.carries_codes else self.request.recorded

    @property
    def recorded_patterns(self) -> list[list[str]]:
        """The [pattern, recipe id] pairs to record for layers whose recipe is not ``recorded``; [] if there are none.

        The first pattern that matches a layer's name in the source decides. If ``carries_codes`` is True, the source's
        recorded pairs are returned, otherwise those of the request (--recipe PATTERN=RECIPE).
        """
        if self.carries_codes:
            return recorded_patterns(self.source)
        return [[pattern, one.id] for pattern, one in self.request.recipes]

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
        bits = {DTYPE_BITS.get(dtype, 0) for dtype in dtypes}
        how = f"in {bits.pop()} bits" if len(bits) == 1 else "unquantized"
        why = "as the source declares" if declared else "as the source, which has quantized layers, stores them"
        if 0 < declared < count:
            why = f"{declared} as the source declares, {count - declared} as it stores them"
        return f"{count} layer{' stays' if count == 1 else 's stay'} {how}, {why}; --include GLOB quantizes them"

    @property
    def is_file(self) -> bool:
        """True if source and output are GGUF models, of one or several files; False if the output is safetensors.

        It is also False if the output is a single safetensors file.
        """
        return is_gguf_config(self.source.config)

    @property
    def is_split(self) -> bool:
        """True if the user asks for a split GGUF model. It may still consist of a single file."""
        return self.request.split_max_size is not None

    @lazy_property
    def files(self) -> tuple[OutputFile, ...]:
        """The output files: one per shard, or the parts of a GGUF model if the request sets split_max_size."""
        if self.request.split_max_size is not None:
            return parts_of(self.shards[0].outputs, self.shards[0].metadata, self.request.split_max_size)
        return tuple(OutputFile(shard.name, shard.outputs, shard.metadata, {}) for shard in self.shards)

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The plans of all tensors and weights, copied ones included, in the order of the source files."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def converted(self) -> tuple[TensorPlan, ...]:
        """The plans of all tensors and weights whose action is not "copy"."""
        return tuple(tensor for tensor in self.tensors if tensor.action != COPY)

    @property
    def format_name(self) -> str:
        """The name of the output format, such as "modelopt NVFP4"; "bf16" if the output is unquantized.

        If the output is mixed (see ``is_mixed``), the name says so, such as "modelopt MIXED_PRECISION".
        """
        if self.form is None:
            return "bf16"
        return MIXED[self.form.format] if self.is_mixed else container_id(self.form, self.has_input_scale)

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
) -> Iterator[Job]:
    """Yield the jobs of a plan, in the order of its tensors: one per tensor to copy, and one per piece to convert."""
    number = 0
    for tensor in plan.tensors:
        if tensor.place is not None:
            path, at = positions[tensor.outputs[0].name]
            # The key of a copy is the name of the tensor. All other keys end in "#" and a number. If the name contains
            # "#", append "#", so that the key of the copy differs from all of them.
            key = f"{tensor.name}#" if "#" in tensor.name else tensor.name
            yield Job(key, COPY, tensor.place, (Target(VALUES, path, at, tensor.bytes_in, tensor.dtype),))
            continue
        for piece in tensor.pieces:
            yield _job(plan, tensor, piece, positions, device[number % len(device)])
            number += 1


def _job(
    plan: Plan, tensor: TensorPlan, piece: Piece, positions: Mapping[str, tuple[Path, int]], device: int | None
) -> Job:
    """Return the job that converts one piece of a tensor's plan."""
    targets = []
    for output in piece.outputs:
        path, at = positions[output.name]
        begin, count = piece.share(output.nbytes)
        targets.append(Target(output.part, path, at + begin, count, output.dtype))
    key = f"{piece.module}#{piece.number}"
    group = (tensor.group or {}).get(piece.module, key)
    request, search, recipe = plan.request, plan.request.search, tensor.recipe or plan.request.recipe
    searched = (
        ("", None)
        if search is None or not search.supports(recipe)
        else (search.objective, search.columns_of((piece.module, piece.weight), piece.expert))
    )
    input_amax = plan.input_amaxes.get(piece.module)
    return Job(
        key,
        tensor.action,
        piece.weight,
        tuple(targets),
        piece.expert,
        piece.span,
        group,
        recipe,
        piece.form,
        request.input_scale,
        request.nonfinite,
        piece.transposed,
        device,
        *searched,
        None if input_amax is None else float(input_amax),
        request.adapter_scales if tensor.action == MERGE else "",
    )
