"""Split named tensors in memory into layers. Megatron-Core fuses several layers into one parameter, such as q, k and v
into linear_qkv, and gate and up into linear_fc1. A stack of experts is a 3-D tensor with one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.convert.memory_rules import Rules
from fp4kit.checkpoint.model.layers import Piece, pieces
from fp4kit.checkpoint.model.weights import Weight, has_transposed_stacks, stack_shape
from fp4kit.storage.errors import CheckpointError, shown

Named = tuple[str, Any]
_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")  # config keys with the rows of linear_qkv_down_proj


def check_array(name: str, array: Any) -> None:
    """Raise TypeError if a value is not an array, which is recognized by its attributes ``dtype`` and ``shape``.

    name: the name of the tensor, for the message.
    array: the value.
    """
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        kind = type(array).__name__
        raise TypeError(f"convert_tensors: {shown(name)} is {kind}; an array of NumPy, CuPy, PyTorch or JAX is needed")


def split_parameter(megatron_name: str, array: Any, rules: Rules) -> Iterator[Named]:
    """Split a Megatron-Core parameter, and yield its Hugging Face (name, array) pairs.

    A fused parameter gives two or three pairs; linear_fc1 of an MLP without a gate gives only one. ``_extra_state``
    gives none. Any other parameter gives one.

    Raise CheckpointError for an unknown Megatron-Core name, and for a fused parameter whose rows do not fit
    ``rules.config``. Raise TypeError if ``array`` is not an array.
    """
    names = rules.names(megatron_name)
    if names:
        check_array(megatron_name, array)
    if len(names) < 2:
        yield from ((name, array) for name in names)
    elif len(names) == 2 and _has_no_gate(names[0], array.shape[0], rules.config):
        yield names[1], array
    elif len(names) == 2:
        first = _rows_of_first(megatron_name, names[0], array.shape[0], rules.config)
        yield from zip(names, (array[:first], array[first:]), strict=True)
    else:
        yield from zip(names, _heads(megatron_name, array, rules.config), strict=True)


def _has_no_gate(first: str, rows: int, config: Mapping[str, Any]) -> bool:
    """Return whether linear_fc1 holds up_proj alone, because the model's MLPs have no gate (Nemotron).

    That is so if it has as many rows as up_proj, and not twice as many. Return False if ``config`` does not state the
    number of rows of up_proj, and for all parameters other than linear_fc1.

    first: the Hugging Face name of the first tensor of the parameter.
    rows: the number of rows of the parameter.
    config: the content of config.json.
    """
    text = config.get("text_config", config)
    if ".gate_proj." not in first:
        return False
    if ".shared_expert" in first:
        return rows == _shared_expert_rows(text)
    return bool(rows == text.get("moe_intermediate_size" if ".experts." in first else "intermediate_size"))


def _shared_expert_rows(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of up_proj of the shared experts of a layer, or None if the config does not state it.

    Configs state it as moe_shared_expert_intermediate_size (Nemotron-H), as shared_expert_intermediate_size (Qwen), or
    as n_shared_experts * moe_intermediate_size (DeepSeek).

    config: the part of config.json that describes the text model.
    """
    for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"):
        if type(config.get(key)) is int:
            return int(config[key])
    count, size = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    return count * size if type(count) is int and type(size) is int else None


def _rows_of_first(megatron_name: str, first: str, rows: int, config: Mapping[str, Any]) -> int:
    """Return how many rows of a fused Megatron-Core parameter belong to the first of its two tensors.

    linear_fc1 holds gate and up, with half of the rows each. linear_qkv_down_proj holds q_a_proj with q_lora_rank rows,
    then kv_a_proj_with_mqa with kv_lora_rank + qk_rope_head_dim rows.

    Raise CheckpointError if gate and up would have different numbers of rows, or if the ranks in ``config`` are missing
    or do not add up to ``rows``.

    megatron_name: the name of the parameter, for the message.
    first: the Hugging Face name of its first tensor.
    rows: the number of rows of the parameter.
    config: the content of config.json.

    Source: Megatron-Core transformer/multi_latent_attention.py FusedMLASelfAttention.
    """
    if ".q_a_proj." not in first:
        if rows % 2:
            raise CheckpointError(
                f"{shown(megatron_name)}: {rows} rows cannot be split into gate and up; an even number is needed; pass"
                " gate_proj and up_proj under their Hugging Face names"
            )
        return rows // 2
    text = config.get("text_config", config)
    ranks = [text.get(key) for key in _RANKS]
    if not all(type(rank) is int for rank in ranks) or sum(ranks) != rows:
        raise CheckpointError(
            f"{shown(megatron_name)}: {rows} rows cannot be split into q_a_proj and kv_a_proj_with_mqa; rules.config"
            f" needs {', '.join(_RANKS)} that add up to them, and has {', '.join(map(str, ranks))}"
        )
    return int(ranks[0])


def _heads(megatron_name: str, array: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Split Megatron-Core's fused linear_qkv into q, k and v, and return them in this order.

    The rows of the fused tensor are grouped by key-value head. Each group holds the query heads that use this head, its
    key head and its value head. Raise CheckpointError if ``config`` lacks the numbers of heads or they do not fit.

    megatron_name: the name of the parameter, for the message.
    array: the fused weight or bias; its first axis is the rows.
    config: the content of config.json.
    """
    text = config.get("text_config", config)
    heads, groups = text.get("num_attention_heads"), text.get("num_key_value_heads", text.get("num_attention_heads"))
    if not heads or not groups or heads % groups:
        needed = "num_attention_heads and num_key_value_heads"
        raise CheckpointError(
            f"{shown(megatron_name)}: cannot be split into q, k and v; rules.config needs {needed}, and has {heads} and"
            f" {groups}"
        )
    heads_per_group = heads // groups  # query heads per key-value head
    size, remainder = divmod(array.shape[0], groups * (heads_per_group + 2))
    if remainder:
        raise CheckpointError(
            f"{shown(megatron_name)}: {array.shape[0]} rows are not divisible into {groups} groups of"
            f" {heads_per_group + 2} heads; correct the numbers of heads in rules.config"
        )
    blocks = array.reshape(groups, heads_per_group + 2, size, *array.shape[1:])
    parts = (
        blocks[:, :heads_per_group],
        blocks[:, heads_per_group : heads_per_group + 1],
        blocks[:, heads_per_group + 1 :],
    )
    q, k, v = (part.reshape(-1, *array.shape[1:]) for part in parts)
    return q, k, v


def layers_of(name: str, array: Any, rules: Rules) -> Iterator[tuple[str, Any]]:
    """Yield (layer name, matrix) for every layer that a tensor holds.

    - A 2-D tensor is one layer.
    - A 3-D stack of experts is split into one layer per expert, or into two per expert if it holds gate and up.
    - If the container stores stacks whole, a stack is yielded as one array.

    Stacks that the model stores transposed are transposed back.

    name: the name of the tensor, a layer's name with or without ".weight".
    rules: the container to write, and the config of the model.
    """
    shape = tuple(array.shape)
    module = name.removesuffix(".weight")
    if len(shape) == 2:
        yield module, array
        return
    logical = stack_shape(shape, rules.config)
    stack = array.swapaxes(1, 2) if has_transposed_stacks(rules.config) else array
    if rules.form.keeps_stacks:
        yield module, stack
        return
    for piece in _pieces(module, name, logical, rules):
        yield piece.module, stack[piece.expert, piece.span[0] : piece.span[1]]


def _pieces(module: str, name: str, shape: tuple[int, ...], rules: Rules) -> Iterator[Piece]:
    """Yield the layers that a stack of experts is split into: for each its name, expert number and range of rows.

    module: the name of the stack without ".weight".
    name: the full name of the stack's tensor.
    shape: the shape [E, N, K] of the stack, with N rows and K columns per expert, however the model stores them.
    rules: the container to write, and the config of the model.
    """
    return pieces(Weight(module, name, shape, None, {}), rules.form, rules.config, False)
