"""What a conversion will do, from headers alone: an action and its reason per tensor, the files, the exclusion list.

A plan is data. ``make_plan`` decides, ``convert.execute`` obeys, and in between a plan can be printed (``--dry-run``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint import auxiliary, schema, sharing
from fp4kit.checkpoint.files import HF_QUANT_CONFIG, INDEX, Source, open_source
from fp4kit.checkpoint.rules import candidate, model_facts
from fp4kit.checkpoint.selection import Decision, Wishes, check, decide
from fp4kit.recipes import RECIPES, Recipe, recipe
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

_QUANTIZED_NAMES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_packed", ".input_scale",
    ".qweight", "_blocks", "_scales", "_weight_scale", "_weight_scale_2",
)  # fmt: skip
_QUANTIZED_WEIGHTS = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_WORDS = {
    jobs.QUANTIZE: "quantized", jobs.RENAME: "same codes", jobs.CAST: "same codes where exponents allow",
    jobs.CARRY: "same codes where scales are powers of two", jobs.REQUANTIZE: "decoded and quantized anew",
    jobs.DEQUANTIZE: "decoded",
}  # fmt: skip


@dataclass(frozen=True)
class TensorPlan:
    """What happens to one tensor, or to one weight with all of its parts, and why. group: those that share its tensor scale."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    action: str
    reason: str
    bytes_in: int
    pieces: tuple[Piece, ...]
    place: Located | None = None  # of a tensor that is copied
    group: Mapping[str, str] | None = None  # module -> group

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The tensors that it becomes, each once."""
        if self.place is not None:
            return (OutputTensor(self.name, self.dtype, self.shape),)
        return tuple(dict.fromkeys(output for piece in self.pieces for output in piece.outputs))

    @property
    def bytes_out(self) -> int:
        """Bytes of those."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class ShardPlan:
    """One file to write: what the tensors of one source file become, under its name."""

    name: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]

    @cached_property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """All tensors of the file."""
        return tuple(output for tensor in self.tensors for output in tensor.outputs)


@dataclass(frozen=True)
class Plan:
    """A whole conversion. form: what is written, None for numbers. ignore: the exclusion list; warnings: sentences for the user."""

    source: Source
    request: Request
    form: Container | None
    has_input_scale: bool
    shards: tuple[ShardPlan, ...]
    ignore: tuple[str, ...]
    warnings: tuple[str, ...]
    auxiliary: auxiliary.AuxiliaryFiles

    @property
    def recipe(self) -> Recipe:
        """Of new codes."""
        return self.request.recipe

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """Of all files."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def converted(self) -> tuple[TensorPlan, ...]:
        """Those that are not copied."""
        return tuple(tensor for tensor in self.tensors if tensor.action != jobs.COPY)

    @property
    def format_name(self) -> str:
        """What is written, in words."""
        return "bf16" if self.form is None else self.form.name

    @property
    def bytes_in(self) -> int:
        """Bytes of all source tensors."""
        return sum(tensor.bytes_in for tensor in self.tensors)

    @property
    def bytes_out(self) -> int:
        """Bytes of all output tensors."""
        return sum(tensor.bytes_out for tensor in self.tensors)


def looks_quantized(entry: TensorEntry) -> bool:
    """Whether a tensor is a scale or the codes of a quantized layer."""
    if entry.dtype == "F8_E8M0" or (entry.name.endswith(_QUANTIZED_NAMES) and not entry.dtype.startswith("I64")):
        return True
    return entry.dtype in _QUANTIZED_WEIGHTS and entry.name.endswith(".weight") and len(entry.shape) >= 2


def _decisions(model: Source, wishes: Wishes, block: int) -> dict[str, Decision]:
    """Return what becomes of every tensor; stacks of experts are copied, for which schema has no form."""
    facts = model_facts(model.config)
    candidates = [candidate(name, entry.dtype, entry.shape, facts) for name, (_, entry) in model.tensors.items()]
    decisions = decide(candidates, wishes, block)
    for tensor in candidates:
        if tensor.is_stack and decisions[tensor.name].converted:
            decisions[tensor.name] = Decision(False, "expert stack: not converted by this version", True)
    check(candidates, wishes, decisions)
    return decisions


def _tensor_plan(
    entry: TensorEntry, decisions: Mapping[str, Decision], fmt: schema.OutputFormat, groups: Mapping[str, str]
) -> TensorPlan:
    """Return what happens to one tensor."""
    decision, module = decisions[entry.name], _module(entry.name)
    if not decision.converted:
        output = schema.OutputTensor(entry.name, entry.dtype, entry.shape)
        return TensorPlan(entry, "copy", decision.reason, (output,))
    group = groups.get(module)
    reason = f"shares its tensor amax: {group}" if group else decision.reason
    return TensorPlan(entry, "quantize", reason, schema.module_tensors(module, fmt, entry.shape), group)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _metadata(file: SafetensorsFile, used: Recipe) -> dict[str, str]:
    """Return the ``__metadata__`` of an output file; loaders of transformers insist on ``format``."""
    return {"format": "pt", **file.metadata, "fp4kit.recipe": used.id, "fp4kit.version": __version__}


def _check_outputs(shards: Iterable[ShardPlan]) -> None:
    """Raise if two tensors would be written under one name."""
    seen: set[str] = set()
    for output in (output for shard in shards for output in shard.outputs):
        if output.name in seen:
            raise CheckpointError(f"{shown(output.name)}: would be written twice; rename it in the source")
        seen.add(output.name)


def _warnings(copied: Collection[str], converted: Collection[str], ignore: Sequence[str]) -> tuple[str, ...]:
    """Return what a loader may trip over. copied: layers that loaders are told of."""
    found = [shown(line) for line in sharing.partly_converted(copied, converted)]
    found += [
        f"{shown(pattern)} of the exclusion list also matches {shown(layer)}, which is converted; some loaders go by substring"
        for pattern, layer in sharing.wrongly_ignored(ignore, converted)
    ]
    return tuple(found)


def _recorded(used: Recipe) -> Recipe:
    """Return ``used`` unless its id stands for other rules: the checkpoint names its recipe by id."""
    if RECIPES.get(used.id, used) != used:
        raise CheckpointError(f"recipe {used.id}: changed from the one of that id; give it an id of its own")
    return used


def make_plan(
    source: str | Path,
    recipe_id: str | Recipe = "nvfp4-te",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    input_scale: float | None = None,
) -> Plan:
    """Return the plan to convert the model directory ``source``; reads headers and JSON only.

    include, exclude: globs (fnmatch, case-sensitive) on module names such as ``model.layers.*.mlp.*``. With
        ``include`` only what it names is converted; rules that keep embeddings, heads, routers, towers and the like
        still hold.
    input_scale: a positive float32 written for every layer as ``input_scale``, which makes the checkpoint NVFP4
        (4-bit activations) instead of W4A16_NVFP4. 1.0 is what loaders get that ignore it; nothing here is
        calibrated.
    Raises CheckpointError for a source that cannot be converted, an unmatched pattern, or when nothing is left to
    convert.
    """
    used = _recorded(recipe(recipe_id))
    fmt = schema.output_format(used, input_scale)
    model = open_source(Path(source))
    refuse_quantized(model)
    decisions = _decisions(model, Wishes(only=tuple(include), keep=tuple(exclude)), used.block_size)
    converted = {_module(name): None for name, decision in decisions.items() if decision.converted}
    copied = [_module(name) for name, decision in decisions.items() if decision.listed]
    subtrees = {decision.subtree for decision in decisions.values() if decision.subtree}
    groups = sharing.shared_amax_groups(converted) if fmt.has_tensor_scale else {}
    shards = tuple(
        ShardPlan(file, tuple(_tensor_plan(e, decisions, fmt, groups) for e in file.entries), _metadata(file, used))
        for file in model.files
    )
    _check_outputs(shards)
    ignore = sharing.ignore_list(copied, subtrees, converted)
    names = {file.name for file in model.files} | {INDEX}
    beside = auxiliary.scan(model.root, names)
    return Plan(model, used, fmt, input_scale, shards, ignore, _warnings(copied, converted, ignore), beside)
