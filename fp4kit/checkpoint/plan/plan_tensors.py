"""Plan what is written for each tensor of a source file: converted, decoded or copied. A selected weight is one to
convert. A piece is the unit of work: some rows of one matrix of a weight (see model/layers.py).
"""

from __future__ import annotations

import json
from dataclasses import replace

from fp4kit import __version__
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.containers.table import CODES, INPUT_SCALE, ROTATION, SCALES, TENSOR_SCALE, VALUES, OutputTensor
from fp4kit.checkpoint.model import closed_world, transforms
from fp4kit.checkpoint.model.model_files import is_gguf_config
from fp4kit.checkpoint.model.weights import (
    Piece,
    Weight,
    has_transposed_stacks,
    is_interleaved,
    located,
    part_names,
    pieces,
    unquantized_pieces,
)
from fp4kit.checkpoint.plan.borrowed_codes import recorded_include, recorded_patterns, recorded_recipe
from fp4kit.checkpoint.plan.job import (
    CARRY,
    CAST,
    COPY,
    DEQUANTIZE,
    MERGE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    RESCALE,
    SEARCHED,
    is_rounded,
    target_of,
)
from fp4kit.checkpoint.plan.plan import ShardPlan, TensorPlan
from fp4kit.checkpoint.plan.plan_facts import PlanFacts
from fp4kit.checkpoint.plan.request import mixes_codes
from fp4kit.checkpoint.selection.names import (
    INCLUDED,
    KEPT_CODES,
    PARTLY_CARRIED,
    PATTERNS,
    RECIPE,
    SCALE_SEARCH,
    VERSION,
)
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

# Action -> the words that describe it in TensorPlan.reason.
_WORDS = {
    QUANTIZE: "quantized",
    RENAME: "same codes",
    CAST: "same codes where exponents allow",
    CARRY: "same codes where scales are powers of two",
    RESCALE: "same values where powers of two as scales allow it",
    REQUANTIZE: "decoded and quantized again",
    DEQUANTIZE: "decoded",
    MERGE: "decoded, and quantized again with an adapter's update",
}


def shard_plan(facts: PlanFacts, file: SafetensorsFile, recorded: str, patterns: list[list[str]]) -> ShardPlan:
    """Return the plan for one source file: what happens to its tensors, and the metadata of the output file."""
    parts = (part_names(facts.weights.values()) - set(facts.weights)) | facts.left_out
    parts |= facts.absorbed - set(facts.restored)
    tensors = tuple(_tensor(facts, file, entry) for entry in file.entries if entry.name not in parts)
    own = {**({RECIPE: recorded} if recorded else {}), VERSION: __version__}
    if patterns:
        own[PATTERNS] = json.dumps({"recipes": patterns})
    if facts.form is not None and mixes_codes({*facts.actions.values()}, facts.request, facts.source):
        own[KEPT_CODES] = PARTLY_CARRIED
    if is_gguf_config(facts.config) and facts.request.search is not None:
        own[SCALE_SEARCH] = facts.request.search.words.removeprefix("searched by ")
    include = facts.request.wishes.include
    if include:
        own[INCLUDED] = json.dumps({"include": [*dict.fromkeys((*recorded_include([file]), *include))]})
    taken_over = {} if is_gguf_config(facts.config) else {"format": "pt", **_kept_metadata(facts, file)}
    for name in (RECIPE, PATTERNS, KEPT_CODES):
        taken_over.pop(name, None)
    if facts.form is not None and facts.form.format == mlx.FORMAT:
        taken_over["format"] = mlx.FORMAT
    return ShardPlan(file.name, tensors, {**taken_over, **own})


def recorded(facts: PlanFacts) -> tuple[str, list[list[str]]]:
    """Return the id of the recipe and the [pattern, recipe id] pairs to record in the output files."""
    if facts.form is None:
        return "", []
    if set(facts.actions.values()) == {RENAME} and not facts.request.codes:
        return recorded_recipe(facts.source), recorded_patterns(facts.source)
    return facts.request.recorded, [[pattern, one.id] for pattern, one in facts.request.recipes]


def _kept_metadata(facts: PlanFacts, file: SafetensorsFile) -> dict[str, str]:
    """Return the metadata (key -> text) of a source file that the output keeps."""
    quantized = {weight.name for weight in facts.weights.values() if weight.container is not None}
    tensors = facts.source.tensors
    return {
        key: text
        for key, text in file.metadata.items()
        if not closed_world.describes_stored_layers(key, tensors, quantized)
    }


def _tensor(facts: PlanFacts, file: SafetensorsFile, entry: TensorEntry) -> TensorPlan:
    """Return the plan for one tensor of a file, or for the weight whose values or codes the tensor holds."""
    if entry.name in facts.restored:
        return _restored(facts, entry.name)
    weight = facts.weights.get(entry.name)
    if weight is not None and entry.name in facts.selected:
        return _converted(facts, weight)
    reason = facts.decisions[entry.name].reason if entry.name in facts.decisions else "not a weight"
    # If --codes gave a layer codes, but the layer is not converted, its own values are copied.
    weight = None if facts.has_codes(entry.name) else weight
    if weight is not None and weight.container is not None and not facts.stays_quantized(weight):
        return _decoded(facts, weight, f"{reason}; decoded, because the output has another container")
    if weight is not None and weight.container is not None:
        if weight.update is not None:
            raise CheckpointError(
                f"{shown(weight.name)}: the adapter has an update of this layer, which stays {weight.container};"
                " leave the layer out of the adapter, or use --format bf16"
            )
        return _copied_whole(facts, weight, reason)
    if weight is not None and weight.update is not None:
        return _decoded(facts, weight, f"{reason}; an adapter's update is added")
    renamed = ""
    if facts.form is not None and entry.name in facts.kv_cache.tensors:
        renamed, reason = facts.kv_cache.name(entry.name, facts.form.format), "scale of the KV cache"
    place = located(file, entry)
    cast = None if facts.form is not None and facts.form.format == comfy.FORMAT else facts.cast_of(place)
    if cast is not None:
        output = OutputTensor(entry.name, "BF16", entry.shape, VALUES)
        piece = Piece(cast, 0, (0, cast.shape[0]), entry.name, None, (output,), cast.shape[0])
        return TensorPlan(
            entry.name, cast.dtype, entry.shape, DEQUANTIZE, f"{cast.dtype}: decoded", entry.nbytes, (piece,)
        )
    return TensorPlan(entry.name, entry.dtype, entry.shape, COPY, reason, entry.nbytes, (), place, renamed=renamed)


def _restored(facts: PlanFacts, tensor: str) -> TensorPlan:
    """Return the plan for an unquantized layer or stack that is put together from several weights of the source."""
    one = facts.restored[tensor]
    nbytes = sum(weight.nbytes for weight in one.weights)
    return TensorPlan(tensor, one.dtype, one.shape, DEQUANTIZE, one.reason, nbytes, tuple(one.pieces()))


def _copied_whole(facts: PlanFacts, weight: Weight, reason: str) -> TensorPlan:
    """Return the plan to write a quantized weight in its own container, with its own codes and scales."""
    assert weight.container is not None
    found = pieces(weight, weight.container, facts.config, INPUT_SCALE in weight.parts)
    why = f"{reason}; as it is"
    return TensorPlan(weight.tensor, weight.dtype, weight.shape, RENAME, why, weight.nbytes, tuple(found))


def _decoded(facts: PlanFacts, weight: Weight, reason: str) -> TensorPlan:
    """Return the plan to decode a weight to BF16, or to write an unquantized one with its update in its own dtype."""
    form = weight.container
    of_type = is_interleaved(facts.config) or (
        form is not None and form.stack == "blocks" and has_transposed_stacks(facts.config)
    )
    own_release = form is not None and form.suffixes[CODES] == ".blocks"
    transposed = len(weight.shape) == 3 and (weight.transposed or (of_type and not own_release))
    found = tuple(unquantized_pieces(weight, "BF16" if form is not None else weight.dtype, transposed))
    return TensorPlan(weight.tensor, weight.dtype, weight.shape, DEQUANTIZE, reason, weight.nbytes, found)


def _converted(facts: PlanFacts, weight: Weight) -> TensorPlan:
    """Return the plan for a selected weight, to convert it, or to decode it if the output is unquantized."""
    if facts.form is None:
        words = ", an adapter's update is added" if weight.update is not None else ""
        return _decoded(facts, weight, f"{weight.dtype}{': decoded' if weight.container is not None else ''}{words}")
    action, form = facts.actions[weight.tensor], facts.form_of(weight.name)
    assert form is not None
    has_input_scale = form.name in facts.input_scaled
    form = target_of(weight.container, form) if action == RENAME else form
    found = tuple(
        replace(piece, outputs=tuple(output for output in piece.outputs if output.part != INPUT_SCALE))
        if facts.without_input_scale(weight, piece)
        else piece
        for piece in pieces(weight, form, facts.config, has_input_scale)
    )
    if weight.rotation is not None and weight is facts.matrix_holder:
        found = tuple(_with_matrix(weight, piece) for piece in found)
    if action == RENAME and is_rounded(weight):
        found = tuple(_with_scales_of(weight, piece) for piece in found)
    groups = {piece.module: facts.groups[piece.module] for piece in found if piece.module in facts.groups}
    shared = f"; shares its tensor scale: {next(iter(groups.values()))}" if groups else ""
    made_by = facts.mixture.of(weight.name).recipe
    words = "" if weight.rotation is None else f"rotated in blocks of {weight.rotation.size}, "
    shares = action == MERGE and weight.update is None
    words += "same codes, if merged layers keep the tensor scale" if shares else _WORDS[action]
    words += ", with an adapter's update" if weight.update is not None and action in (QUANTIZE, REQUANTIZE) else ""
    words += f" by {made_by.id}" if facts.request.recipes and action in SEARCHED else ""
    search = facts.request.search
    words += "" if search is None or shares else search.words_for(action, made_by)
    reason = f"{facts.decisions[weight.tensor].reason}: {words}{shared}"
    about = (weight.tensor, weight.dtype, weight.shape, action, reason, weight.nbytes, found)
    return TensorPlan(*about, group=groups, recipe=made_by)


def _with_matrix(weight: Weight, piece: Piece) -> Piece:
    """Return a copy of a piece that also writes the rotation matrix of its layer."""
    assert weight.rotation is not None
    shape = (weight.rotation.size, weight.rotation.size)
    matrix = OutputTensor(transforms.matrix_name(piece.module), "F32", shape, ROTATION)
    return replace(piece, outputs=(*piece.outputs, matrix))


def _with_scales_of(weight: Weight, piece: Piece) -> Piece:
    """Return a copy of a piece that writes scales in the dtype in which the source stores them."""
    # Decoding rounds values to this dtype, so another dtype would change them.
    kept = {part: weight.parts[part].entry.dtype for part in (SCALES, TENSOR_SCALE) if part in weight.parts}
    return replace(piece, outputs=tuple(replace(one, dtype=kept.get(one.part, one.dtype)) for one in piece.outputs))
