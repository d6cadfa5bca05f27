"""Describe the GGUF file that llama.cpp needs for a Hugging Face model directory: the keys of its header, and the name,
the dtype and the order of rows of each tensor. The gguf package names the tensors, writes the keys and reads the
tokenizer. What is not known here, such as a class of models, a setting or a tokenizer, is refused by name.

Sources, in llama.cpp 0c1e57098: conversion/base.py, llama.py and qwen.py (keys and dtypes); src/llama-vocab.cpp
(regular expressions of tokenizers); src/models/llama.cpp and qwen3moe.cpp (what the graphs compute).
"""

from __future__ import annotations

import logging
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.checkpoint.containers.config_entries import REFUSED, Item, brief
from fp4kit.checkpoint.containers.table import GGUF_NVFP4, INPUT_SCALE, VALUES, OutputTensor
from fp4kit.checkpoint.convert import job
from fp4kit.checkpoint.model.graph_files import GraphFile
from fp4kit.checkpoint.model.model_files import CONFIG, Source, existing_file
from fp4kit.checkpoint.model.transforms import undo
from fp4kit.checkpoint.model.weights import Q8_0, HeadOrder, Located, Piece, Weight, expert_name, located, part_names
from fp4kit.checkpoint.plan.other_models import GgufNames, LoraAdapter, package
from fp4kit.checkpoint.plan.source_layers import Restored
from fp4kit.checkpoint.selection import names
from fp4kit.storage.files import BLOCKED, FLOAT_DTYPES, CheckpointError, listed, load_object, shown
from fp4kit.storage.gguf_file import GgufFile, Value, is_gguf, read_gguf

GGUF = GGUF_NVFP4.format
# Class of transformers -> llama.cpp's name of the architecture.
CLASSES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), "llama"),
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
# Architectures whose graph rotates (RoPE) neighbouring elements, where transformers rotates the two halves of a head:
# the rows of each head of q and k are interleaved.
_INTERLEAVED = ("llama",)
FP8_AS = ("bf16", "q8_0", "f32")  # dtypes for quantized layers that GGUF files cannot hold

# Entries of config.json ----------------------------------------------------------------------------------------------

_HEADS = "num_attention_heads"
_COUNTS = ("num_local_experts", "num_experts")
_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", _HEADS),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "num_experts_per_tok", *_COUNTS),
)
_REQUIRED = {*_SIZES} - {"moe_intermediate_size", "num_key_value_heads", "head_dim", "num_experts_per_tok", *_COUNTS}
# Entries that become keys, that tensors show, or that do not change what the model computes.
_KNOWN = {
    *(*_SIZES, "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "architectures", "model_type"),
    *("quantization_config", "quantization", "compression_config", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp"),
    *("problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype"),
    *("transformers_version", "unsloth_fixed", "unsloth_version", "use_cache"),
}


def _fits_window(config: Mapping[str, Any], value: Any) -> bool:
    kind = config["architectures"][0]
    window = config.get("sliding_window", 4096 if kind.startswith("Mistral") else None)  # the default of MistralConfig
    is_off = not config.get("use_sliding_window", not kind.startswith("Qwen3"))
    length = config.get("max_position_embeddings")
    return is_off or window is None or (type(window) is type(length) is int and window >= length)


# Entry -> whether llama.cpp computes what it says, and what llama.cpp does.
_CHECKED: dict[str, tuple[Callable[[Mapping[str, Any], Any], bool], str]] = {
    "hidden_act": (lambda config, value: value == "silu", "llama.cpp computes silu"),
    "sliding_window": (_fits_window, "llama.cpp attends to all positions"),
    "use_sliding_window": (lambda config, value: not value, "llama.cpp attends to all positions"),
    "layer_types": (
        lambda config, value: value is None or {*map(str, value)} == {"full_attention"},
        "llama.cpp attends to all positions in every layer",
    ),
    "partial_rotary_factor": (lambda config, value: value in (None, 1), "llama.cpp rotates whole heads"),
    "is_causal": (lambda config, value: value in (None, True), "only causal attention is supported"),
    "decoder_sparse_step": (lambda config, value: value in (None, 1), "every layer must have experts"),
    "mlp_only_layers": (lambda config, value: not value, "every layer must have experts"),
    "norm_topk_prob": (
        lambda config, value: value is True or config["architectures"] != ["Qwen3MoeForCausalLM"],
        "llama.cpp normalizes the weights of the chosen experts",
    ),
}
# Type of RoPE -> further entries of rope_parameters.
_ROPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL = ("beta_fast", "beta_slow")


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    found["rope_type"] = found.pop("type", None) or found.get("rope_type") or "default"
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return found


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (entry of config.json, reason) for each entry that llama.cpp would not follow, or that is not known."""
    for key, (is_right, why) in _CHECKED.items():
        if (key in config or key in ("sliding_window", "norm_topk_prob")) and not is_right(config, config.get(key)):
            yield key, f"is {brief(config.get(key))}, but {why}"
    for key in _SIZES:
        value = config.get(key)
        if (value is not None or key in _REQUIRED) and (type(value) is not int or value < 1):
            yield key, f"is {brief(value)}; a positive whole number is needed"
    if type(config.get("rms_norm_eps")) not in (int, float):
        yield "rms_norm_eps", f"is {brief(config.get('rms_norm_eps'))}; a number is needed"
    for key, value in config.items():
        if value and key not in _KNOWN and key not in _CHECKED:
            yield key, f"is {brief(value)}; it is not known what llama.cpp needs for it"
    yield from _rope_troubles(config)


def _rope_troubles(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            yield key, f"is {brief(config[key])}; an object is needed"
            return
    rope = _rope_parameters(config)
    kind, factor = rope.pop("rope_type"), rope.pop("partial_rotary_factor", 1)
    if not is_one_of(kind, _ROPE) or factor != 1:
        yield (
            "rope_parameters",
            f"have the type {brief(kind)} and rotate {brief(factor)} of a head; it is not supported",
        )
        return
    for key in rope.keys() ^ {"rope_theta", *_ROPE[kind]}:
        if key in rope or key not in _OPTIONAL:
            yield "rope_parameters", f"{'have' if key in rope else 'lack'} {shown(key)} with the type {kind}"
    numbers = [key for key, value in rope.items() if isinstance(value, bool) or not isinstance(value, (int, float))]
    for key in numbers:
        yield "rope_parameters", f"have {shown(key)} {brief(rope[key])}; a number is needed"


# Names and tensors ----------------------------------------------------------------------------------------------------

_OP = f"--format {GGUF}"
_FREQUENCIES = "rope_freqs.weight"
_UNUSED = ".rotary_emb.inv_freq"  # llama.cpp computes these numbers
# Tensors that are no weights, norms or biases. closed_world.py and the declarations say what becomes of the scales.
_BESIDE = (_UNUSED, ".k_scale", ".v_scale", ".input_scale", ".input_global_scale")


_BY_LLAMA_CPP = "convert_hf_to_gguf.py of llama.cpp (SRC --outtype bf16 --outfile SRC-bf16.gguf)"
_WORKAROUND = f"or write a GGUF file of the unquantized model with {_BY_LLAMA_CPP}, and convert that file"


def architecture_of(source: Source, op: str = _OP) -> str:
    """Return llama.cpp's architecture of a model directory. Raise CheckpointError if the model is not supported."""
    classes = source.config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and len(classes) == 1 else ""
    if not source.root.is_dir() or name not in CLASSES:
        what = f"architectures is {brief(classes)}" if source.root.is_dir() else f"{source.root.name} is a single file"
        others = (
            "convert the unquantized model with convert_hf_to_gguf.py of llama.cpp, and take the codes with --codes"
        )
        if op != _OP:
            others = f"fp4kit compare pairs the layers, and --source takes a GGUF file: run {_BY_LLAMA_CPP}"
        raise CheckpointError(
            f"{op}: {what}; model directories of {', '.join(CLASSES)} become GGUF files; for others, {others}"
        )
    return CLASSES[name]


class _Places:
    """The places of the modules of a model directory in its GGUF file."""

    def __init__(self, source: Source, op: str = _OP) -> None:
        self.architecture, config = architecture_of(source, op), source.config
        layers = config.get("num_hidden_layers")
        known = {"num_hidden_layers": layers} if type(layers) is int else {}
        self._names = GgufNames({names.ARCHITECTURE: self.architecture, **known}, op)
        self._heads = {leaf: config.get(key) or config.get(_HEADS) for leaf, key in names.HEADS.items()}

    def of(self, module: str) -> tuple[str, int | None] | None:
        """Return (module of the GGUF file, number of the expert in its stack); None if the file has no such module."""
        return self._names.module(module)

    def order(self, name: str, rows: int) -> HeadOrder | None:
        """Return how the rows of a module of the GGUF file are reordered; None for most modules."""
        heads = self._heads.get(name.rpartition(".")[2]) if self.architecture in _INTERLEAVED else None
        return HeadOrder(rows // heads, True) if type(heads) is int and heads > 0 else None


def items_of(source: Source, weights: Mapping[str, Weight]) -> Iterator[Item]:
    """Yield a refused item for each entry of config.json and each tensor that has no place in a GGUF file."""
    places, stored = _Places(source), part_names(weights.values())
    for key, why in _settings(source.config):
        yield Item(REFUSED, "config.json", key, why)
    plain = {name: _plain(located(*place)) for name, place in source.tensors.items() if name not in stored}
    for name, weight in [*weights.items(), *plain.items()]:
        if not name.endswith(_BESIDE) and (why := _why_no_place(weight, places, source.config.get("vocab_size"))):
            entry = source.tensors[name][1]
            yield Item(REFUSED, "tensor", name, why, f"{entry.dtype} {list(entry.shape)}")


def _plain(place: Located) -> Weight | None:
    """Return an unquantized tensor as a weight, a norm or a bias as one of one column; None for another tensor."""
    (module, _, kind), entry = place.entry.name.rpartition("."), place.entry
    if kind not in ("weight", "bias") or len(entry.shape) not in (1, 2) or entry.dtype not in FLOAT_DTYPES:
        return None
    return Weight(module, entry.name, (*entry.shape, 1)[:2], None, {VALUES: place})


def _why_no_place(weight: Weight | None, places: _Places, tokens: Any) -> str:
    found = None if weight is None else places.of(weight.name)
    if weight is None or found is None:
        return f"llama.cpp has no such tensor in {places.architecture} models"
    if len(weight.shape) == 3:
        return "is a stack of experts; only separate experts are supported"
    is_vector = len(weight.located.entry.shape) == 1
    if is_vector != (found[0].endswith("_norm") or weight.tensor.endswith(".bias")):
        return f"llama.cpp has no such tensor in {places.architecture} models"
    order, rows = places.order(found[0], weight.shape[0]), weight.shape[0]
    if found[0] in ("token_embd", "output") and rows != tokens:
        return f"has {rows} rows, but vocab_size is {tokens}"
    if order is not None and (not order.head or order.head % 2 or rows % order.head):
        return f"has {rows} rows, which are not heads of an even number of rows"
    return ""


class GgufModel:
    """The GGUF file that a model directory becomes.

    Args:
        source: the model directory.
        weights: its weights: tensor name -> weight.
        kind: the kind of the quantized layers, "nvfp4" or "mxfp4".

    Attributes:
        architecture: llama.cpp's name of the architecture.
        template: a GGUF file without tensors, whose header has the keys.
        config: the stand-in for config.json that the finished file will have.
        generated: name -> values of the tensors that llama.cpp needs beside those of the model.

    Raises:
        CheckpointError: if the model or its tokenizer is not supported, or the gguf package is missing.
    """

    def __init__(self, source: Source, weights: Mapping[str, Weight], kind: str) -> None:
        self._places = _Places(source)
        self.architecture = self._places.architecture
        self._is_tied = source.config.get("tie_word_embeddings") is True
        self._experts = next((count for key in _COUNTS if (count := source.config.get(key))), 0)
        self.template = _file_without_tensors(source, self._places, weights.values(), kind, self._experts)
        self.config = names.config_of(self.template.metadata)
        self.generated = _frequency_factors(source.config)

    def module(self, weight: Weight) -> str:
        """Return the module of the GGUF file that a weight, or its stack of experts, becomes."""
        found = self._places.of(weight.name)
        assert found is not None  # see items_of
        return found[0]

    def tensors(self, plans: Iterable[Any], fp8_as: str) -> Iterator[Any]:
        """Yield the plan of each tensor of the GGUF file, for the plans (TensorPlan) of tensors of the directory.

        fp8_as: the dtype of decoded layers, one of FP8_AS.
        """
        stacks: dict[str, dict[int, Any]] = {}
        for plan in plans:
            if plan.name.endswith(_UNUSED):
                continue
            weight = plan.pieces[0].weight if plan.pieces else _plain(plan.place)
            found = None if weight is None else self._places.of(weight.name)
            assert weight is not None and found is not None  # see items_of
            name, expert = found
            if name == "output" and self._is_tied:  # transformers does not read it
                continue
            placed = self._placed(plan, weight, name, expert, fp8_as)
            if expert is None:
                yield placed
            elif expert in stacks.setdefault(name, {}):
                raise CheckpointError(f"{shown(plan.name)}: expert {expert} of {name} is stored twice; remove one")
            else:
                stacks[name][expert] = placed
        yield from (self._stack(name, experts) for name, experts in stacks.items())

    def precision(self, plans: Iterable[Any]) -> dict[str, Value]:
        """Return the keys that forbid 4-bit inputs for the layers that have no input scale, so that it was 16 bits."""
        outputs = [plan.outputs for plan in plans]
        found = tuple(
            one[0].name
            for one in outputs
            if one[0].dtype == "NVFP4" and not any(output.part == INPUT_SCALE for output in one)
        )
        return (
            {"general.tensor_extra.name": found, "general.tensor_extra.prec_a4": (False,) * len(found)} if found else {}
        )

    def _placed(self, plan: Any, weight: Weight, name: str, expert: int | None, fp8_as: str) -> Any:
        """Return a plan with the name, the dtype and the order of rows that the tensor has in the GGUF file."""
        rows, columns = weight.shape
        kind, order = plan.name.rpartition(".")[2], self._places.order(name, rows)
        pieces = plan.pieces or (Piece(weight, 0, (0, rows), name, None, plan.outputs, rows),)
        form, shape = pieces[0].form, (rows, columns)
        if form is not None:
            has_input_scale = any(output.part == INPUT_SCALE for output in pieces[0].outputs)
            outputs = form.outputs(name, shape if expert is None else (self._experts, *shape), has_input_scale)
        else:
            is_vector = plan.place is not None and len(plan.place.entry.shape) == 1
            dtype = pieces[0].outputs[0].dtype
            if is_vector or names.ROLES.get(name.rpartition(".")[2]) == "router":
                dtype = "F32"
            elif weight.container is not None:
                dtype = fp8_as.upper() if fp8_as.upper() != Q8_0 or columns % BLOCKED[Q8_0].elements == 0 else "BF16"
            stored = (rows,) if is_vector else shape if expert is None else (self._experts, *shape)
            outputs = (OutputTensor(f"{name}.{kind if kind == 'bias' else 'weight'}", dtype, stored),)
            if plan.place is not None and order is None and expert is None and dtype == plan.dtype:
                return replace(plan, renamed=outputs[0].name)
            if weight.container is not None:
                plan = replace(plan, reason=f"{plan.reason}; written as {dtype}")
        first, total = (expert or 0) * rows, rows * (1 if expert is None else self._experts)
        module = name if kind != "bias" else f"{name}.bias"
        placed = (
            replace(one, weight=replace(one.weight, order=order), module=module, outputs=outputs) for one in pieces
        )
        placed = (replace(one, total_rows=total, first_row=first + one.first_row) for one in placed)
        action = job.DEQUANTIZE if plan.place is not None else plan.action
        return replace(plan, action=action, pieces=tuple(placed), place=None, group=None)

    def _stack(self, name: str, experts: Mapping[int, Any]) -> Any:
        missing = [str(number) for number in range(self._experts) if number not in experts]
        if missing or len(experts) != self._experts:
            raise CheckpointError(
                f"{name}: has {len(experts)} experts, but config.json declares {self._experts};"
                f" {listed(missing) or 'others'} are missing or too many"
            )
        plans = [experts[number] for number in range(self._experts)]
        for plan in plans:
            if (plan.action, plan.outputs) != (plans[0].action, plans[0].outputs):
                raise CheckpointError(
                    f"{shown(plan.name)}: is {plan.dtype}, but {shown(plans[0].name)} is {plans[0].dtype}; llama.cpp"
                    " stores the experts of a layer as one tensor, so they must be stored alike"
                )
        pieces = tuple(piece for plan in plans for piece in plan.pieces)
        size = sum(plan.bytes_in for plan in plans)
        return replace(plans[0], shape=(self._experts, *plans[0].shape), bytes_in=size, pieces=pieces)


# Sources of a GGUF file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufView(Source):
    """A model directory whose weights have the names and the order of rows of the GGUF file that it becomes.

    An expert of a stack has the name that expert_name gives it. Tensors keep their names.

    Attributes:
        copied: name of a tensor of the GGUF file -> name of the unquantized tensor that it may be a copy of.
        restored: the tensors of the GGUF file that consist of reordered or separate unquantized tensors.
        generated: see GgufModel.
    """

    copied: Mapping[str, str] = field(default_factory=dict)
    restored: tuple[Restored, ...] = ()
    generated: Mapping[str, np.ndarray] = field(default_factory=dict)

    def made_of(self, name: str) -> set[str]:
        """Return the names of the tensors of the directory in a tensor of the GGUF file; ``name`` itself for none."""
        weights = (one.weights for one in self.restored if name in (one.name, f"{one.name}.weight"))
        return part_names(next(weights, ())) or {self.copied.get(name, name)}

    def biases(self, tensors: Mapping[str, Any]) -> Iterator[Weight]:
        """Yield those of ``tensors``, which are of a GGUF file, that are in ``restored`` and no matrices."""
        for place in (tensors[one.name] for one in self.restored if one.name in tensors):
            weight = _plain(located(*place))
            yield from () if weight is None else [replace(weight, name=weight.tensor)]


def as_gguf(original: Source, made: Path, adapter: LoraAdapter | None = None) -> GgufView:
    """Return a model directory as the source of the GGUF file ``made``, with an adapter that was merged into it."""
    op = f"--source {shown(str(original.root))}"
    if is_gguf(original.root):
        kinds = f"is a GGUF file, but {shown(str(made))} is not; the model directory is needed"
        raise CheckpointError(f"{op}: {kinds}; fp4kit compare pairs the layers of both")
    places, undone = _Places(original, op), undo(original, original.weights)
    weights = undone.weights if adapter is None else adapter.attach(undone.weights, original.config)
    unread = {*undone.matrices, *(name for name in original.tensors if name.endswith(_UNUSED))}
    stored, is_tied = part_names(weights.values()), original.config.get("tie_word_embeddings") is True
    vectors = (_plain(located(*place)) for name, place in original.tensors.items() if name not in stored)
    layers, copied, others = [], dict[str, str](), defaultdict[str, dict[int | None, Weight]](dict)
    for weight in (*weights.values(), *filter(None, vectors)):
        module, expert = places.of(weight.name) or ("", None)
        if module == "output" and is_tied:
            unread |= part_names([weight])
        elif module and len(weight.shape) == 2:
            order, is_bias = places.order(module, weight.shape[0]), weight.tensor.endswith(".bias")
            name = module + ".bias" * is_bias
            placed = replace(weight, name=name if expert is None else expert_name(name, expert), order=order)
            layers += [placed] if weight.tensor in stored else []
            if (order, expert) != (None, None) or weight.update is not None:
                others[name][expert] = placed
            elif weight.container is None:
                copied[name if is_bias else f"{name}.weight"] = weight.tensor
    files: list[GraphFile] = []
    for file in original.files:
        entries = tuple(entry for entry in file.entries if entry.name not in unread)
        files.append(GraphFile(file.path, file.name, file.size, entries, {}, () if files else (*layers,)))
    restored = (_restored(name, experts) for name, experts in others.items())
    made_new = _frequency_factors(original.config)
    return GgufView(original.root, {}, None, (*files,), (), False, copied, (*filter(None, restored),), made_new)


def _restored(name: str, experts: Mapping[int | None, Weight]) -> Restored | None:
    is_stack, weights = None not in experts, [experts[key] for key in sorted(experts, key=lambda key: key or 0)]
    rows, columns = weights[0].shape
    is_whole = not is_stack or {*experts} == {*range(len(experts))}
    if not is_whole or any(one.container is not None or one.shape != (rows, columns) for one in weights):
        return None
    total = rows * len(weights)
    pieces = (Piece(one, 0, (0, rows), name, None, (), total, i * rows) for i, one in enumerate(weights))
    return Restored(name, (*(len(weights),) * is_stack, rows, columns), (*weights,), "", (*pieces,))


# Keys of the header ---------------------------------------------------------------------------------------------------


def _file_without_tensors(
    source: Source, places: _Places, weights: Collection[Weight], kind: str, experts: int
) -> GgufFile:
    gguf, config, root = package(_OP), source.config, source.root
    sizes, stored = {weight.name: prod(weight.shape) for weight in weights}, part_names(weights)
    sizes |= {name: prod(entry.shape) for name, (_, entry) in source.tensors.items() if name not in stored}
    in_stacks = sum(size for name, size in sizes.items() if (found := places.of(name)) and found[1] is not None)
    for name in (*_TEXTS, "generation_config.json"):
        if os.path.lexists(root / name):
            existing_file(root, name)  # no link leads out of the directory

    def add(writer: Any) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        try:
            about = gguf.Metadata.load(None, root, None, sum(sizes.values()))
            about.name = about.name or root.resolve().name
            counts = sum(sizes.values()) - in_stacks, in_stacks // max(experts, 1), experts
            about.size_label = about.size_label or gguf.size_label(sum(sizes.values()), *counts)
            about.set_gguf_meta_model(writer)
        except Exception as error:  # whatever YAML and the heuristics of another package raise
            raise CheckpointError(
                f"README.md or {CONFIG} of {root}: {shown(str(error))}; correct the model card"
            ) from error
        _add_sizes(gguf, writer, config)
        file_type = "MOSTLY_NVFP4" if kind == "nvfp4" else "MOSTLY_MXFP4_MOE"
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(gguf, writer, root, config["vocab_size"])

    return _written(gguf, places.architecture, root.name, add)


def _written(gguf: Any, architecture: str, name: str, add: Callable[[Any], None]) -> GgufFile:
    """Return a GGUF file without tensors, to whose writer `add` has added keys."""
    with TemporaryDirectory(prefix="fp4kit-") as folder:
        path = Path(folder) / "header.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return replace(read_gguf(path, name), head=path.read_bytes())


def header_keys(source: Source) -> tuple[dict[str, str], str]:
    """Return the keys of the GGUF file that a directory becomes, and why some are unknown ("" if none is)."""
    architecture, gguf = architecture_of(source), package(_OP)
    if trouble := next(_settings(source.config), None):
        return {}, f"{CONFIG}: {shown(trouble[0])} {trouble[1]}"
    size, found, why = source.config["vocab_size"], dict[str, str](), ""
    logger = logging.getLogger("gguf.vocab")  # what it says of the tokenizer was said by convert
    logger.disabled, was = True, logger.disabled
    for add in (lambda w: _add_sizes(gguf, w, source.config), lambda w: _add_tokenizer(gguf, w, source.root, size)):
        try:
            found |= _written(gguf, architecture, source.root.name, add).metadata
        except CheckpointError as error:
            why = str(error).removeprefix(f"{_OP}: ").partition("; ")[0]
    logger.disabled = was
    return found, why


def _add_sizes(gguf: Any, writer: Any, config: Mapping[str, Any]) -> None:
    heads, rope = config[_HEADS], _rope_parameters(config)
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    for key, add in (
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        *((key, writer.add_expert_count) for key in _COUNTS),
    ):
        if config.get(key):
            add(config[key])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in rope.keys() & {*_OPTIONAL}:
            getattr(writer, f"add_rope_scaling_yarn_{key}")(rope[key])


def generated_tensors(source: Source) -> dict[str, np.ndarray]:
    """Return the tensors that llama.cpp needs for the config of a source (see GgufModel); {} if it is not supported."""
    known = source.root.is_dir() and source.config.get("architectures") in [[name] for name in CLASSES]
    return _frequency_factors(source.config) if known and not [*_settings(source.config)] else {}


def _frequency_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the divisors of RoPE's frequencies with the scaling of Llama 3.1; {} for models without it."""
    # A wavelength w, in positions, below n / high is not scaled, one above n / low is scaled by the factor, and one in
    # between by an interpolation in n / w. Source: transformers 5.23 modeling_rope_utils.py.
    rope = _rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return {}
    head = config.get("head_dim") or config["hidden_size"] // config[_HEADS]
    factor, low, high, length = (float(rope[key]) for key in _ROPE["llama3"])
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, head, 2) / head)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return {_FREQUENCIES: (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


# Tokenizers -----------------------------------------------------------------------------------------------------------

_TEXTS = ("README.md", "chat_template.jinja", "chat_template.json", "merges.txt")  # that the gguf package reads
_MODEL, _JSON, _SETTINGS = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# (regular expression that splits text into words, ignore_merges) -> llama.cpp's name of such tokenizers.
_PRE_TOKENIZERS = {(rf"{_WORDS}\p{{N}}{{1,3}}{_REST}", True): "llama-bpe", (rf"{_WORDS}\p{{N}}{_REST}", False): "qwen2"}


def _add_tokenizer(gguf: Any, writer: Any, root: Path, size: int) -> None:
    paths = {name: existing_file(root, name) for name in (_MODEL, _JSON, _SETTINGS) if os.path.lexists(root / name)}
    settings = load_object(paths[_SETTINGS], _SETTINGS) if _SETTINGS in paths else {}
    if not {_MODEL, _JSON} & paths.keys():
        raise CheckpointError(
            f"{_OP}: {root} has no {_JSON} and no {_MODEL}; copy the tokenizer of the model, {_WORKAROUND}"
        )
    content = load_object(paths[_JSON], _JSON) if _JSON in paths else {}
    try:
        added = {int(number): one for number, one in (settings.get("added_tokens_decoder") or {}).items()}
        added |= {one["id"]: one for one in content.get("added_tokens") or ()}
        if _MODEL in paths:
            model, name = "llama", "default"
            tokens, prefix = _sentencepieces(gguf, paths[_MODEL])
            writer.add_add_space_prefix(bool(settings.get("add_prefix_space", prefix)))
        else:
            model, (name, tokens) = "gpt2", _byte_pairs(gguf, content)
        for number, one in added.items():
            is_special = one.get("special") or re.fullmatch(r"<\|.*\|>", one["content"])
            kind = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
            tokens[number] = one["content"], -1000.0, kind
        special = gguf.SpecialVocab(root, load_merges=model == "gpt2", n_vocab=size)
        if model == "gpt2":
            special.add_special_token |= dict(zip(("bos", "eos"), _added_at_ends(content), strict=True))
    except CheckpointError:
        raise
    except Exception as error:  # nothing checks what is read here
        raise CheckpointError(
            f"{_OP}: the tokenizer of {root} cannot be read: {type(error).__name__}: {shown(str(error))}; repair it,"
            f" {_WORKAROUND}"
        ) from error
    if tokens and max(tokens) >= size:
        raise CheckpointError(
            f"{_OP}: the tokenizer has a token {max(tokens)}, but vocab_size is {size}; use the model's own tokenizer,"
            f" {_WORKAROUND}"
        )
    rows = [tokens.get(i, (f"[PAD{i}]", -10000.0, gguf.TokenType.UNUSED)) for i in range(size)]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(name)
    writer.add_token_list([text for text, _, _ in rows])
    if model == "llama":
        writer.add_token_scores([score for _, score, _ in rows])
    writer.add_token_types([kind for _, _, kind in rows])
    special.add_to_gguf(writer)


def _added_at_ends(content: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether tokenizer.json adds a special token at the beginning of a text, and at its end."""
    steps = content.get("post_processor") or {}
    templates = [one["single"] for one in steps.get("processors", [steps]) if one.get("type") == "TemplateProcessing"]
    begin, end = (any("SpecialToken" in template[at] for template in templates) for at in (0, -1))
    return begin, end


Tokens = dict[int, tuple[str, float, int]]  # number -> (text, score, type)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a protocol buffer: an int, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        shift = found = 0
        while True:
            byte, at = data[at], at + 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if size > len(data) - at:
            raise ValueError("a field ends behind the end of the file")
        yield key >> 3, data[at : at + size]
        at += size


def _sentencepieces(gguf: Any, path: Path) -> tuple[Tokens, bool]:
    """Return the tokens of a model of SentencePiece, and whether it puts a space before every text."""
    # The numbers of fields and of types are those of sentencepiece_model.proto, 0.2.
    pieces, settings = [], {2: {3: 1}, 3: {3: 1, 4: 1}}  # trainer: Unigram; normalizer: prefix, remove spaces
    for number, value in _fields(path.read_bytes()):
        if number == 1:
            pieces.append({1: b"", 2: bytes(4), 3: gguf.TokenType.NORMAL, **dict(_fields(value))})
        elif number in settings:
            settings[number] |= dict(_fields(value))
    (trainer, normalizer), byte_pairs = (settings[2], settings[3]), 2
    kinds = {"the model is not BPE": trainer[3] != byte_pairs, "it removes spaces": normalizer[4]}
    kinds["it changes characters"] = bool(normalizer.get(2)) and normalizer.get(1) != b"identity"
    why = next((why for why, is_so in kinds.items() if is_so), "")
    if why:
        raise CheckpointError(
            f"{_OP}: {_MODEL} is of a kind that llama.cpp does not compute: {why}; use the tokenizer of the model,"
            f" {_WORKAROUND}"
        )
    tokens = {i: (one[1].decode(), struct.unpack("<f", one[2])[0], one[3]) for i, one in enumerate(pieces)}
    return tokens, bool(normalizer[3])


def _byte_pairs(gguf: Any, content: Mapping[str, Any]) -> tuple[str, Tokens]:
    """Return llama.cpp's name for a tokenizer of byte pairs, and its tokens."""
    model, splits = content["model"], content["pre_tokenizer"]
    steps = splits.get("pretokenizers", [splits])
    kinds = [step["type"] for step in steps]
    changes = [key for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    normalizer = content.get("normalizer") or {"type": "NFC"}
    is_bytes = steps[-1].get("add_prefix_space") is False and steps[-1].get("use_regex") is False
    is_usual = (model["type"], kinds, normalizer["type"], changes) == ("BPE", ["Split", "ByteLevel"], "NFC", [])
    pattern = steps[0].get("pattern", {}).get("Regex"), bool(model.get("ignore_merges"))
    whole = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
    if not (is_usual and is_bytes and whole) or pattern not in _PRE_TOKENIZERS:
        what = f"{model['type']} {changes}, normalizer {normalizer['type']}, splits {kinds} by {pattern[0]}"
        raise CheckpointError(
            f"{_OP}: {_JSON} is of a kind that is not known to fp4kit ({shown(what)}); known are"
            f" {', '.join(_PRE_TOKENIZERS.values())}, and {_MODEL} of SentencePiece; use one of these, {_WORKAROUND}"
        )
    tokens = {number: (text, 0.0, gguf.TokenType.NORMAL) for text, number in model["vocab"].items()}
    return _PRE_TOKENIZERS[pattern], tokens
