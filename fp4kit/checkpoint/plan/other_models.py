"""Read a LoRA adapter as PEFT saves it, and add its updates to the weights of the model that it was trained on.

Everything in the adapter is understood or refused by name: an option of its config that changes the merged weights in
another way than W + s (B A), a tensor that is no half of such an update, an update that fits no layer.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.table import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.model.model_files import Source, file_digest, is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.transforms import Origin, gate_first, origins
from fp4kit.checkpoint.model.weights import (
    HeadOrder,
    Located,
    LowRankUpdate,
    Rows,
    Weight,
    is_interleaved,
    located,
    members,
    parts_of,
)
from fp4kit.checkpoint.selection.names import ARCHITECTURE, HEADS, adapter_tensor, unwrapped
from fp4kit.storage.files import FLOAT_DTYPES, CheckpointError, listed, load_object, read_header, shown

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# How merged FP4 layers get their block scales: per block the better of the model's scale and a new one, only the
# model's, or only new ones.
ADAPTER_SCALES = ("nearest", "base", "new")
_IN_16_BITS = "merge it with merge_and_unload() in 16 bits, and convert the result"
# Initializations that change the weights of the model, so that the adapter belongs to other weights.
_CHANGES_BASE = r"pissa(_niter_\d+)?|corda|olora|loftq|lora_ga"
# What options of LoRA must be, because any other value makes another update. A value of None stands for "off".
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda v: v == "LORA", f"only LORA is merged; {_IN_16_BITS}"),
    "init_lora_weights": (
        lambda v: not (isinstance(v, str) and re.fullmatch(_CHANGES_BASE, v)),
        "changes the weights of the model too; save the adapter with path_initial_model_for_weight_conversion",
    ),
    "bias": (lambda v: v == "none", f"biases were trained too; {_IN_16_BITS}"),
    "fan_in_fan_out": (lambda v: not v, f"layers with transposed weights (Conv1D) are not merged; {_IN_16_BITS}"),
    "use_rslora": (lambda v: isinstance(v, bool), "needs true or false"),
    "rank_pattern": (lambda v: isinstance(v, dict), "needs an object of ranks by layer"),
    "alpha_pattern": (lambda v: isinstance(v, dict), "needs an object of lora_alpha by layer"),
} | {
    name: (lambda v: not v, f"{why}; {_IN_16_BITS}")
    for name, why in (
        ("use_dora", "DoRA scales the rows of the merged weights"),
        ("lora_bias", "the update has a bias"),
        ("modules_to_save", "whole modules were trained too"),
        ("target_parameters", "stacks of experts are not merged"),
        ("layer_replication", "layers were copied"),
        ("trainable_token_indices", "rows of embeddings were trained too"),
        ("alora_invocation_tokens", "the update applies to some tokens only (aLoRA)"),
        ("use_qalora", "QALoRA sums groups of inputs"),
        ("use_bdlora", "BD-LoRA has block-diagonal updates"),
        ("arrow_config", "Arrow chooses updates by token"),
        ("kasa_config", "KaSA changes the weights of the model"),
        ("velora_config", "VeLoRA is not known"),
        ("monteclora_config", "MonteCLoRA draws its updates"),
    )
}
# Options that do not change the merged weights: what was trained is seen from the tensors.
_IRRELEVANT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode"
    " layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_config megatron_core"
    " peft_version qalora_group_size revision runtime_config target_modules task_type lora_alpha r".split()
)
# part of a tensor's name -> (the half of the update that it is, True for embeddings)
_HALVES = {
    "lora_A": ("A", False),
    "lora_B": ("B", False),
    "lora_embedding_A": ("A", True),
    "lora_embedding_B": ("B", True),
}
_WORDS_OF_WRAPPERS = {"model", "language_model"}  # components that a multimodal model may add to, or drop from, names


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter.

    Attributes:
        root: the directory.
        updates: name of a layer, as the adapter names it -> its update.
        copies: name of a layer -> a copy of the layer's own weight, which must equal the model's.
        facts: what the manifest and the key of a run record: the directory's name, hashes of its files, and the model
            that the config names.
    """

    root: Path
    updates: Mapping[str, LowRankUpdate]
    copies: Mapping[str, Located] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The beginning of error messages."""
        return f"adapter {shown(str(self.root))}"

    @classmethod
    def of(cls, path: str | Path) -> LoraAdapter:
        """Read an adapter's config and header, and check that every update is finite and of the rank that is
        declared.
        """
        root = Path(path)
        label = f"adapter {shown(str(root))}"
        for name in (CONFIG, TENSORS):
            if not (root / name).is_file():
                more = "a directory that PEFT's save_pretrained wrote is needed"
                if name == TENSORS and (root / PICKLED).is_file():
                    more = f"{PICKLED} is pickled: load it with PEFT and call save_pretrained, which writes {TENSORS}"
                raise CheckpointError(f"{label}: has no {name}; {more}")
        config = load_object(root / CONFIG, str(root / CONFIG))
        _check_options(label, config)
        halves: dict[tuple[str, bool], dict[str, Located]] = defaultdict(dict)
        copies: dict[str, Located] = {}
        file = read_header(root / TENSORS)
        for entry in file.entries:
            name, start = entry.name, f"{label}: {shown(entry.name)}"
            found, place = adapter_tensor(name), located(file, entry)
            part, is_embedding = _HALVES.get("" if found is None else found.part, ("", False))
            if not part and name.endswith(".base_layer.weight"):
                copies[unwrapped(name.removesuffix(".weight"))] = place
                continue
            ending = "" if found is None else name.rpartition(f".{found.part}")[2]
            if found is None or not part or not found.layer or ending != ("" if is_embedding else ".weight"):
                kind = "a tensor that is no part of a LoRA update" if found is None else f"{found.part} ({found.kind})"
                raise CheckpointError(f"{start}: is {kind}; {_IN_16_BITS}")
            if entry.dtype not in FLOAT_DTYPES or len(entry.shape) != 2 or 0 in entry.shape:
                needed = "needs a matrix of F32, F16 or BF16"
                raise CheckpointError(f"{start}: is {entry.dtype} {list(entry.shape)}; {needed}; {_IN_16_BITS}")
            halves[found.layer, is_embedding][part] = place
        updates = {
            layer: _update(label, layer, turned, parts, config) for (layer, turned), parts in sorted(halves.items())
        }
        alone = next((place for layer, place in copies.items() if layer not in updates), None)
        if alone is not None:
            raise CheckpointError(f"{label}: {shown(alone.entry.name)}: is a whole weight; {_IN_16_BITS}")
        if not updates:
            raise CheckpointError(f"{label}: has no update of a layer; an adapter with lora_A and lora_B is needed")
        facts = {
            "directory": root.resolve().name,
            "sha256": {name: file_digest(root / name) for name in (CONFIG, TENSORS)},
            "base_model": config.get("base_model_name_or_path"),
        }
        return cls(root, updates, copies, facts)

    def attach(self, weights: Mapping[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
        """Return the weights of a model, with the updates of this adapter: tensor name -> weight."""
        label, names = self.label, {tensor: weight.name for tensor, weight in weights.items()}
        found = dict(weights)
        for layer, tensor in self.matched(names).items():
            weight, update = weights[tensor], self.updates[layer]
            _check_fits(label, layer, update, weight, config)
            if layer in self.copies:
                _check_copy(label, layer, self.copies[layer], weight)
            found[tensor] = replace(weight, update=update)
        return found

    def other_base(self, root: Path, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning if the model that the adapter's config names is not found in the paths of the source."""
        base = self.facts.get("base_model")
        if not isinstance(base, str) or not (name := Path(base).name.lower()):
            return
        if not any(name in str(path).lower() for path in (root.resolve(), config.get("_name_or_path"))):
            yield f"{self.label}: was trained on {shown(base)}; check that the source is this model"

    def updates_of(self, weights: Mapping[str, Weight], config: Mapping[str, Any]) -> dict[str, LowRankUpdate]:
        """Return tensor name -> update, for the weights of a model that the adapter changes."""
        found = self.attach(weights, config)
        return {name: weight.update for name, weight in found.items() if weight.update is not None}

    def matched(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the adapter's name of each layer -> the key of the layer in ``names``, which are the model's names."""
        exact, loose = {name: key for key, name in names.items()}, defaultdict(list)
        for key, name in names.items():
            loose[_loose(name)].append(key)
        found: dict[str, str] = {}
        for layer in self.updates:
            label = f"{self.label}: {shown(layer)}"
            keys = [exact[layer]] if layer in exact else loose.get(_loose(layer), [])
            if not keys:
                near = get_close_matches(layer, exact, 1, 0.0)
                raise CheckpointError(
                    f"{label}: the model has no such layer, but {shown(near[0]) if near else 'none'}; use the model"
                    " that the adapter was trained on, with layers stored one by one"
                )
            if len(keys) > 1:
                raise CheckpointError(f"{label}: may be {listed(keys)}; rename the adapter's tensors")
            if keys[0] in found.values():
                raise CheckpointError(f"{label}: a second update of {shown(names[keys[0]])}; keep one")
            found[layer] = keys[0]
        return found


def _loose(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WORDS_OF_WRAPPERS)


def _check_options(label: str, config: Mapping[str, Any]) -> None:
    for key, (is_known, why) in _OPTIONS.items():
        value = config.get(key)
        if (value is not None or key == "peft_type") and not is_known(value):
            raise CheckpointError(f"{label}: {key} is {shown(json.dumps(value))}: {why}")
    unknown = [key for key, value in config.items() if value and key not in _OPTIONS and key not in _IRRELEVANT]
    if unknown:
        raise CheckpointError(
            f"{label}: {CONFIG}: {listed([shown(key) for key in unknown])}: not known to fp4kit; {_IN_16_BITS}"
        )


def _update(
    label: str, layer: str, turned: bool, parts: Mapping[str, Located], config: Mapping[str, Any]
) -> LowRankUpdate:
    """Return the update of a layer with its factor. Raise CheckpointError if a half is missing, or not as declared."""
    label = f"{label}: {shown(layer)}"
    if len(parts) != 2:
        missing = next(half for half in "AB" if half not in parts)
        raise CheckpointError(f"{label}: has no lora_{'embedding_' * turned}{missing}, the other half of its update")
    a, b = parts["A"], parts["B"]
    rank = a.entry.shape[0]
    declared, alpha = (
        _by_pattern(config.get(f"{name}_pattern") or {}, layer, config.get(key))
        for name, key in (("rank", "r"), ("alpha", "lora_alpha"))
    )
    if type(declared) is not int or rank != declared or b.entry.shape[1] != rank:
        raise CheckpointError(
            f"{label}: lora_A is {list(a.entry.shape)} and lora_B {list(b.entry.shape)}; {CONFIG} declares the rank"
            f" {shown(json.dumps(declared))}; the files do not belong together"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise CheckpointError(f"{label}: lora_alpha is {shown(json.dumps(alpha))}; a finite number is needed")
    with Readers() as readers:
        for place in (a, b):
            values = readers.array(place).astype(np.float32)
            bad = int(np.count_nonzero(~np.isfinite(values)))
            if bad:
                raise CheckpointError(
                    f"{label}: {bad} of {values.size} values of {shown(place.entry.name)} are NaN or infinite; use"
                    " another state of the training"
                )
    return LowRankUpdate(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), turned)


def _by_pattern(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a layer, as PEFT's get_pattern_key does, or ``default``."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return value
        except re.error:
            raise CheckpointError(f"{CONFIG}: {shown(pattern)}: is no regular expression") from None
    return default


def _check_fits(label: str, layer: str, update: LowRankUpdate, weight: Weight, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless an update can be added to a weight."""
    a, b = update.a.entry.shape, update.b.entry.shape
    shape = (a[1], b[0]) if update.turned else (b[0], a[1])
    is_embedding = weight.name.rpartition(".")[2] in ("embed_tokens", "wte", "word_embeddings")
    is_transformed = weight.rotation is not None or weight.order is not None or bool(weight.members)
    of_codes = update.turned and not is_embedding and weight.container is not None
    from_base = "use the model that the adapter was trained on"
    tied = "the output head shares this weight (tie_word_embeddings), so merging would change it too"
    for is_wrong, why in (
        (len(weight.shape) == 3, f"the layer is a stack of experts, into which no update is merged; {_IN_16_BITS}"),
        (shape != weight.shape, f"the update is {list(shape)}, but the layer is {list(weight.shape)}; {from_base}"),
        (is_transformed, f"the stored layer is transformed; {_IN_16_BITS}"),
        (of_codes, f"is an update of an embedding, but the layer is {weight.container}"),
        (is_embedding and config.get("tie_word_embeddings"), f"{tied}; leave the embedding out of the adapter"),
    ):
        if is_wrong:
            raise CheckpointError(f"{label}: {shown(layer)}: {why}")


def _check_copy(label: str, layer: str, place: Located, weight: Weight) -> None:
    """Raise CheckpointError unless a weight in the adapter equals the model's own."""
    same = weight.container is None and place.entry.shape == weight.located.entry.shape
    with Readers() as readers:
        if same:
            x, y = (readers.array(one).astype(np.float32) for one in (place, weight.located))
            same = np.array_equal(x, y)
    if not same:
        raise CheckpointError(
            f"{label}: {shown(place.entry.name)}: differs from the weight of {shown(layer)} in the model; save the"
            f" adapter with save_embedding_layers=False, or {_IN_16_BITS}"
        )


_Layer = tuple[str, int]  # (module, index of the expert in a stack of a GGUF file)
_EXPERT = re.compile(r"(.*\.)(?:experts|switch_mlp)\.(\d+)\.(\w+)")  # mlx-lm calls its stacks switch_mlp
# Layers of a Mixtral expert: mlx-lm's name -> name in the gguf package's map.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_MIN_SQNR_DB = 6.0  # 4-bit codes of the right rows give 15 to 25 dB; codes of other rows give about 0 dB
_KINDS = ("mxfp4", "nvfp4")


def borrow_codes(weights: Mapping[str, Weight], model: Source, donor: Source) -> dict[str, Weight]:
    """Return the weights of ``model``, in which weights with a counterpart in ``donor`` have the donor's codes."""
    if is_gguf_config(model.config) == is_gguf_config(donor.config):
        raise CheckpointError(
            "--codes: needs one GGUF file and one model directory; source and --codes are of the same kind"
        )
    names, origins = GgufNames((model if is_gguf_config(model.config) else donor).config, "--codes"), _origins(donor)
    found = {names.of(donor, layer): origin for layer, origin in origins.items()}
    taken = dict(weights)
    with Readers() as readers:
        for name, weight in weights.items():
            layers = [names.of(model, layer) for layer in _layers(weight, model)]
            rows = _rows(weight, [found[layer] for layer in layers if layer is not None and layer in found])
            if rows:
                first, order = rows[0].weight, names.order(weight, model)
                if _has_alternating_rows(weight, model.config):
                    rows = tuple(_alternate_rows(rows))
                elif order is not None:
                    rows = (in_closest_order(weight, rows[0], order, readers),)
                taken[name] = replace(
                    weight, container=first.container, parts=first.parts, members=rows, transposed=False
                )
    if taken == weights:
        available = listed([module for module, _ in origins]) or "none in MXFP4 or NVFP4"
        raise CheckpointError(
            f"--codes {donor.root}: none of its quantized layers ({available}) is in {model.root}; name a quantized"
            " version of the same model"
        )
    return taken


def _origins(source: Source) -> dict[_Layer, Origin]:
    """Return where a model stores the MXFP4 or NVFP4 codes of its layers: (module, expert) -> rows."""
    found = origins(source, GGUF_NVFP4 if is_gguf_config(source.config) else CT_NVFP4)
    forms = {layer: one.weight.container for layer, one in found.items()}
    return {layer: found[layer] for layer, form in forms.items() if form is not None and form.kind in _KINDS}


def _layers(weight: Weight, model: Source) -> list[_Layer]:
    """Return the layers (module, expert) that a weight of ``model`` consists of, in the order of its rows."""
    if len(weight.shape) == 2 or is_gguf_config(model.config):
        return [(weight.name, e) for e in range(weight.experts)]
    stack = gate_first(weight, model.config)
    return [(name, 0) for e in range(weight.experts) for name, _ in parts_of(stack, e, model.config)]


def _rows(weight: Weight, origins: Sequence[Origin]) -> tuple[Rows, ...]:
    """Return the quantized rows in ``origins``, one Rows per origin, if they make up the whole weight."""
    wanted = weight.experts * weight.shape[-2], weight.shape[-1]
    if len({(one.shape, one.weight.container) for one in origins}) != 1:
        return ()
    rows, columns = origins[0].shape
    is_whole = (len(origins) * rows, columns) == wanted
    return tuple(Rows(one.weight, one.expert, one.span) for one in origins) if is_whole else ()


def package(op: str) -> Any:
    """Return the gguf package. Raise CheckpointError, which names the option or command ``op``, if it is missing."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f'{op}: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'
        ) from None
    return gguf


class GgufNames:
    """Translate layer names of a model directory to names in a GGUF file, with the gguf package's name map.

    Args:
        config: the config of the GGUF file (see names.config_of). Its architecture selects the name map.
        op: the option or command with which error messages begin, such as "--codes".

    Raises:
        CheckpointError: if the gguf package is missing or does not know the architecture.
    """

    def __init__(self, config: Mapping[str, Any], op: str) -> None:
        gguf, architecture = package(op), config[ARCHITECTURE]
        number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
        if number is None:
            raise CheckpointError(
                f"{op}: the gguf package does not know the architecture {shown(repr(architecture))}; update gguf"
            )
        self._config = config
        self._map = gguf.get_tensor_name_map(number, int(config.get("num_hidden_layers", 0)))

    def module(self, name: str) -> tuple[str, int | None] | None:
        """Return (module, number of the expert or None) as a GGUF file names a module; None if it has none."""
        module = name.replace("language_model.", "")
        match = _EXPERT.fullmatch(module)
        named = [module]
        if match is not None:
            named = [f"{match[1]}experts.{leaf}" for leaf in (match[3], _MIXTRAL.get(match[3], ""))]
        found = next(filter(None, map(self._map.get_name, named)), None)
        return None if found is None else (found, None if match is None else int(match[2]))

    def of(self, source: Source, layer: _Layer) -> _Layer | None:
        """Return (module, expert) as a GGUF file names a layer of ``source``; None if the name map has no such
        layer.
        """
        if is_gguf_config(source.config):
            return layer
        found = self.module(layer[0])
        return None if found is None else (found[0], found[1] or 0)

    def order(self, weight: Weight, source: Source) -> HeadOrder | None:
        """Return a reordering that may turn the other model's rows into the rows of ``weight``; None for most
        layers.
        """
        # If ``source`` is the GGUF file, it interleaves the two halves of every head; otherwise, it undoes that.
        layer = self.of(source, (weight.name, 0)) if len(weight.shape) == 2 else None
        leaf = layer[0].rpartition(".")[2] if layer is not None else ""
        rows, count = weight.shape[-2], self._config.get(HEADS.get(leaf, ""), 0)
        head = rows // count if count else 0
        is_head = head > 2 and head % 2 == 0 and head * count == rows
        return HeadOrder(head, is_gguf_config(source.config)) if is_head else None


def check_values_agree(
    converted: Iterable[str], unquantized: Mapping[str, Weight], taken: Mapping[str, Weight]
) -> None:
    """Raise CheckpointError if borrowed codes do not decode to about the values of the weight that they replace."""
    # A few rows are compared; their signal-to-noise ratio must be at least 6 dB.
    with Readers() as readers:
        for name in converted:
            for at, rows in members(taken[name]).items():
                found = sampled_sqnr_db(unquantized[name], at, rows, readers)
                if found < _MIN_SQNR_DB:
                    raise CheckpointError(
                        f"{shown(name)}: {shown(rows.weight.name)} decodes to other values (SQNR {found:.1f} dB);"
                        " --codes is another model, or its rows are in an unknown order; use the right model, or keep"
                        " this layer unquantized with --keep"
                    )


_SAMPLE_ROWS = 16  # rows to compare at each end of a matrix


def _has_alternating_rows(weight: Weight, config: Mapping[str, Any]) -> bool:
    """Return whether a weight is a stack of experts whose gate and up rows alternate: gate 0, up 0, gate 1, ..."""
    return len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")


def _alternate_rows(rows: Sequence[Rows]) -> Iterator[Rows]:
    """Yield one matrix per expert, in which the rows of its gate and up layers alternate."""
    for gate, up in zip(rows[::2], rows[1::2], strict=True):
        one, (begin, end) = gate.weight, gate.span
        if one.container is not None and one.container.has_tensor_scale:
            why = "gate and up have separate tensor scales, but this model stores them as one layer"
            raise CheckpointError(f"{shown(one.name)}: {why}; use codes without tensor scales, such as MXFP4")
        height = 2 * (end - begin)
        shape, order = (height, one.shape[-1]), HeadOrder(height, True)
        yield Rows(
            Weight(one.name, one.tensor, shape, one.container, one.parts, members=(gate, up), order=order),
            0,
            (0, height),
        )


def in_closest_order(unquantized: Weight, rows: Rows, order: HeadOrder, readers: Readers) -> Rows:
    """Return ``rows`` unchanged or reordered by ``order``, whichever decodes closer to the values of
    ``unquantized``.
    """
    reordered = rows._replace(weight=replace(rows.weight, order=order))
    for max_rows in (_SAMPLE_ROWS, unquantized.shape[-2]):
        plain_db, reordered_db = (sampled_sqnr_db(unquantized, 0, one, readers, max_rows) for one in (rows, reordered))
        if plain_db != reordered_db:
            return reordered if reordered_db > plain_db else rows
    return rows


def sampled_sqnr_db(unquantized: Weight, at: int, rows: Rows, readers: Readers, max_rows: int = _SAMPLE_ROWS) -> float:
    """Return the signal-to-noise ratio, in decibels, of decoded rows against the unquantized rows."""
    expert, first = divmod(at, unquantized.shape[-2])
    height = rows.span[1] - rows.span[0]
    pair = Origin(unquantized, expert, (first, first + height)), Origin(*rows)
    signal = noise = 0.0
    for part in (slice(0, min(max_rows, height)), slice(max(height - max_rows, 0), height)):
        x, y = (values_of(one.weight, one.slab(readers, part)).astype(np.float64) for one in pair)
        signal, noise = signal + float(np.sum(x**2)), noise + float(np.sum((x - y) ** 2))
    return sqnr_db(signal, noise)
