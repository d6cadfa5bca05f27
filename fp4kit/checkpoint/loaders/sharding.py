"""Find the sizes of tensor and expert parallelism that a checkpoint allows in vLLM and SGLang. A rank is one GPU.

Both engines split the rows (N) of some layers and the columns (K) of others; SPLITS says which. A shard must consist of
whole blocks, because a block has one scale. Sources: vLLM's and SGLang's validate_fp8_block_shape and attention
classes; vllm-project/vllm issues 49949 (NVFP4, 1856 over 8) and 42384 (FP8, 192 of 128); loaders of gpt-oss, which give
each rank whole blocks of 32, so that sizes need not divide. Limits of single kernels, such as tiles, are not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.selection.diffusers_classes import class_of
from fp4kit.checkpoint.selection.name_rules import candidate, model_facts
from fp4kit.storage.errors import CheckpointError, shown

_OF_OTHER_ENGINES = ("mlx", "gguf", "comfy")  # first words of containers that vLLM and SGLang do not split
SIZES = (1, 2, 4, 8, 16, 32)
_ROWS, _COLUMNS, _WHOLE = "rows", "columns", "whole"
_LEAVES = {
    _ROWS: (
        *("q_proj k_proj v_proj qkv_proj query key value query_key_value wq wk wv wqkv Wqkv".split()),
        *("q_b_proj kv_b_proj wq_b gate_proj up_proj gate_up_proj w1 w3 w13 fc1 c_fc dense_h_to_4h fc_in".split()),
        *("in_proj_qkv in_proj_z in_proj_b in_proj_a in_proj_qkvz in_proj_ba".split()),
    ),
    _COLUMNS: "o_proj down_proj w2 wo wo_b out_proj dense dense_4h_to_h c_proj fc2 fc_out".split(),
    _WHOLE: (
        *("q_a_proj kv_a_proj_with_mqa fused_qkv_a_proj_with_mqa wq_a wkv fused_wqa_wkv".split()),
        *("gate router shared_expert_gate eh_proj e_proj h_proj weights_proj".split()),
    ),
}
SPLITS = {leaf: axis for axis, leaves in _LEAVES.items() for leaf in leaves}  # the leaf of a layer's name -> its split
_KEYS = ("k_proj", "v_proj", "key", "value", "wk", "wv")  # repeated if there are fewer heads than ranks
_FUSED_QKV = ("qkv_proj", "query_key_value", "wqkv", "Wqkv")
_ATTENTION = ("q_proj", "o_proj", "wq", "wo", "query", *_KEYS, *_FUSED_QKV)  # also outside modules called attention
_HALVES = ("gate_up_proj", "w13")
_GPT_OSS = "gpt-oss"
_WHOLE_ROWS = ("fp8 rows", "fp8 tensor")  # kinds whose scales are not per block: each rank gets all of them
# Roles of layers that are not checked: towers are often not split, and engines pad the vocabulary to a multiple of 64.
_NOT_SPLIT: set[Any] = {"tower", "embedding", "head", "router"}


class Obstacle(NamedTuple):
    """A reason why a checkpoint cannot be split.

    Attributes:
        layer: the name of the layer, or of the entry of config.json.
        text: what would be cut, as a clause without the layer's name.
    """

    layer: str
    text: str


@dataclass(frozen=True)
class Sharding:
    """The sizes of tensor parallelism that a checkpoint allows.

    Attributes:
        tensor: the allowed sizes out of SIZES.
        with_experts: the allowed sizes if every rank holds whole experts (expert parallelism of the same size); None if
            the model has no experts.
        refused: size -> the obstacles, for the other sizes without expert parallelism.
        unjudged: the leaves of the names of quantized layers of which it is not known how engines split them.
    """

    tensor: tuple[int, ...]
    with_experts: tuple[int, ...] | None
    refused: Mapping[int, tuple[Obstacle, ...]]
    unjudged: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the fields for JSON: for each size that is refused, each reason with its layers."""
        refused = [
            {"size": size, "reason": text, "layers": [one.layer for one in found if one.text == text]}
            for size, found in self.refused.items()
            for text in dict.fromkeys(one.text for one in found)
        ]
        sizes = {"tensor": list(self.tensor), "with_experts": self.with_experts and list(self.with_experts)}
        return {**sizes, "refused": refused, "unjudged": list(self.unjudged)}

    @property
    def line(self) -> str:
        """The sizes, and why the first size that is missing is not allowed, in one line."""
        text = f"tensor parallel sizes: {', '.join(map(str, self.tensor))}"
        if self.with_experts is not None and self.with_experts != self.tensor:
            text += f" ({', '.join(map(str, self.with_experts))} with expert parallelism of the same size)"
        if self.refused:
            size, found = next(iter(self.refused.items()))
            why, count = Counter(one.text for one in found).most_common(1)[0]
            first = next(one.layer for one in found if one.text == why)
            layers = f"{shown(first)} and {count - 1} more" if count > 1 else shown(first)
            text += f"; not {size}: {why} ({layers})"
        if self.unjudged:
            text += f"; not judged: layers called {', '.join(map(shown, self.unjudged))}"
        return text


def sharding_of(weights: Iterable[Weight], config: Mapping[str, Any]) -> Sharding | None:
    """Return the sizes that a model allows; None for a model that vLLM and SGLang do not load."""
    layers = _layers(weights, config)
    if layers is None:
        return None
    alone = {size: tuple(_obstacles(layers, config, size, 1)) for size in SIZES}
    experts = _expert_count(layers)
    both = None
    if experts:
        both = tuple(size for size in SIZES if not any(_obstacles(layers, config, size, size)))
    unjudged = dict.fromkeys(one.leaf for one in layers if one.leaf not in SPLITS and one.is_quantized)
    refused = {size: found for size, found in alone.items() if found}
    return Sharding(tuple(size for size in SIZES if size not in refused), both, refused, tuple(unjudged))


def obstacles(
    weights: Iterable[Weight], config: Mapping[str, Any], tp: int | None, ep: int | None
) -> tuple[Obstacle, ...]:
    """Return what keeps a model from being split over `tp` ranks, in groups of `ep` ranks that share the experts."""
    tp, ep = (tp or ep or 1), (ep or 1)
    if tp % ep:
        raise CheckpointError(
            f"--ep {ep}: --tp {tp} is no multiple of it, so experts cannot be shared within the ranks"
        )
    layers = _layers(weights, config)
    if layers is None:
        raise CheckpointError("--tp, --ep: need a model directory in a format that vLLM or SGLang loads")
    return tuple(_obstacles(layers, config, tp, ep))


class _SplitLayer(NamedTuple):
    """A linear layer or stack: its logical rows and columns, its block (1, 1 if it has none), and its container."""

    name: str
    leaf: str
    rows: int
    columns: int
    block: tuple[int, int]
    container: str
    matrices: int
    is_expert: bool
    is_attention: bool

    @property
    def is_quantized(self) -> bool:
        return bool(self.container)


def _layers(weights: Iterable[Weight], config: Mapping[str, Any]) -> list[_SplitLayer] | None:
    """Return the linear layers of the language model; None if vLLM and SGLang do not load the containers."""
    facts, found = model_facts(config), []
    for weight in weights:
        container = weight.container
        if container is not None and not _is_served(container):
            return None
        leaf, roles = _leaf_of(weight.name), candidate(weight.tensor, "BF16", weight.shape, facts).roles
        if len(weight.shape) < 2 or _NOT_SPLIT & set(roles) or (container is None and leaf not in SPLITS):
            continue
        rows, columns = weight.shape[-2:]
        height, width = (1, 1) if container is None or container.kind in _WHOLE_ROWS else container.block
        is_attention = ("attention" in roles or leaf in _ATTENTION) and "linear_attn" not in weight.name
        form, block = "" if container is None else container.name, (height, width)
        places = rows, columns, block, form, weight.experts, "experts" in roles, is_attention
        found.append(_SplitLayer(weight.name, leaf, *places))
    return found if any(one.is_quantized for one in found) and not class_of(config) else None


def _leaf_of(name: str) -> str:
    """Return the last part of a layer's name, as SPLITS has it. Layers of an indexer (DeepSeek) are not in SPLITS."""
    *parents, leaf = name.split(".")
    if "indexer" in parents:
        return f"indexer.{leaf}"
    return "dense_h_to_4h" if leaf == "dense" and parents[-1:] == ["intermediate"] else leaf  # BERT


def _is_served(container: Container) -> bool:
    return container.name.partition(" ")[0] not in _OF_OTHER_ENGINES


def _obstacles(layers: list[_SplitLayer], config: Mapping[str, Any], tp: int, ep: int) -> Iterator[Obstacle]:
    """Yield the obstacles for tensor parallelism over `tp` ranks, of which each `ep` share the experts."""
    if tp > 1 and any(one.is_attention for one in layers):
        yield from _of_heads(config, tp)
    experts = _expert_count(layers)
    if ep > 1 and not experts:
        yield Obstacle("model", f"the model has no experts to share among {ep} ranks")
    elif ep > 1 and experts % ep:
        yield Obstacle("model", f"{experts} experts cannot be shared evenly among {ep} ranks, as SGLang requires")
    alike: dict[tuple[Any, ...], str | None] = {}  # thousands of experts have few shapes
    for one in layers:
        ranks = tp // ep if one.is_expert else tp
        if one[1:] not in alike:
            alike[one[1:]] = _cut(one, config, ranks) if ranks > 1 else None
        if text := alike[one[1:]]:
            yield Obstacle(one.name, text)


def _of_heads(config: Mapping[str, Any], tp: int) -> Iterator[Obstacle]:
    heads, keys = _heads(config)
    if heads and heads % tp:
        yield Obstacle("config.json num_attention_heads", f"{heads} attention heads cannot be split over {tp} ranks")
    if keys and (keys % tp if keys >= tp else tp % keys):
        text = f"{keys} key and value heads can be neither split over {tp} ranks nor repeated"
        yield Obstacle("config.json num_key_value_heads", text)


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (attention heads, key and value heads) of the language model; 0 for a number that is unknown or unused."""
    text = config.get("text_config")
    sections = (text if isinstance(text, Mapping) else {}, config)
    heads, keys = (
        next((s[name] for s in sections if type(s.get(name)) is int and s[name] > 0), 0)
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    latent = any(section.get("kv_lora_rank") for section in sections)  # MLA has one latent vector, not heads
    return heads, 0 if latent else keys or heads


def _expert_count(layers: list[_SplitLayer]) -> int:
    """Return the number of routed experts of one MLP, the largest if MLPs differ; 0 if there are none."""
    stacks = [one.matrices for one in layers if one.is_expert and one.matrices > 1]
    single: dict[str, set[str]] = {}
    for one in layers:
        parent, found, rest = one.name.partition(".experts.")
        if found and one.is_expert and rest.partition(".")[0].isdigit():
            single.setdefault(parent, set()).add(rest.partition(".")[0])
    return max([0, *stacks, *map(len, single.values())])


def _parts(one: _SplitLayer, config: Mapping[str, Any], ranks: int) -> list[tuple[int, int]]:
    """Return (rows, number of ranks that they are split over) of each part of a layer whose rows are split."""
    heads, keys = _heads(config) if one.is_attention else (0, 0)
    shared = min(ranks, keys) if keys else ranks  # fewer key heads than ranks are repeated
    if one.leaf in _KEYS and one.is_attention:
        return [(one.rows, shared)]
    if one.leaf in _FUSED_QKV and heads and not one.rows % (heads + 2 * keys):
        size = one.rows // (heads + 2 * keys)
        return [(size * heads, ranks), (size * keys, shared)]
    if one.leaf in _HALVES:
        return [(one.rows // 2, ranks)]
    return [(one.rows, ranks)]


def _cut(one: _SplitLayer, config: Mapping[str, Any], ranks: int) -> str | None:
    """Return what the split of one layer over some ranks would cut; None if nothing."""
    axis, (height, width) = SPLITS.get(one.leaf, _WHOLE), one.block
    if one.container == _GPT_OSS and axis != _WHOLE:
        size = one.columns if axis == _COLUMNS else one.rows // 2
        blocks = -(-size // width)
        if -(-blocks // ranks) * (ranks - 1) >= blocks:
            return f"{blocks} blocks of {width} leave some of {ranks} ranks without any"
        return None
    if axis == _COLUMNS:
        return _of(f"rows of {one.columns} values", one.columns, ranks, width, f"the block of {width}")
    if axis == _ROWS:
        for rows, over in _parts(one, config, ranks):
            if text := _of(f"{rows} rows", rows, over, height, f"the {height} rows of a block"):
                return text
    return None


def _of(what: str, size: int, ranks: int, multiple: int, named: str) -> str | None:
    if size % ranks:
        return f"{what} cannot be split over {ranks} ranks"
    return f"{what} give {size // ranks} per rank, no multiple of {named}" if size // ranks % multiple else None
