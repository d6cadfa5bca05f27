"""Split named tensors in memory into layers. Megatron-Core fuses several layers into one parameter, such as q, k and v
into linear_qkv, and gate and up into linear_fc1. A stack of experts is a 3-D tensor with one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.convert.memory_rules import Rules
from fp4kit.checkpoint.model.weights import Piece, Weight, has_transposed_stacks, pieces, stack_shape
from fp4kit.storage.files import CheckpointError, shown

Named = tuple[str, Any]
_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")  # config keys with the rows of linear_qkv_down_proj


def check_array(name: str, array: Any) -> None:
    """Raise TypeError if a value is not an array, which is recognized by its attributes ``dtype`` and ``shape``."""
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        kind = type(array).__name__
        raise TypeError(f"convert_tensors: {shown(name)} is {kind}; an array of NumPy, CuPy, PyTorch or JAX is needed")


def split_parameter(megatron_name: str, array: Any, rules: Rules) -> Iterator[Named]:
    """Split a Megatron-Core parameter, and yield its Hugging Face (name, array) pairs."""
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
    """Return whether linear_fc1 holds up_proj alone, because the model's MLPs have no gate (Nemotron)."""
    text = config.get("text_config", config)
    if ".gate_proj." not in first:
        return False
    if ".shared_expert" in first:
        return rows == _shared_expert_rows(text)
    return bool(rows == text.get("moe_intermediate_size" if ".experts." in first else "intermediate_size"))


def _shared_expert_rows(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of up_proj of the shared experts of a layer, or None if the config does not state
    it.
    """
    for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"):
        if type(config.get(key)) is int:
            return int(config[key])
    count, size = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    return count * size if type(count) is int and type(size) is int else None


def _rows_of_first(megatron_name: str, first: str, rows: int, config: Mapping[str, Any]) -> int:
    """Return how many rows of a fused Megatron-Core parameter belong to the first of its two tensors."""
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
    """Split Megatron-Core's fused linear_qkv into q, k and v, and return them in this order."""
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
    """Yield (layer name, matrix) for every layer that a tensor holds."""
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
    """Yield the layers that a stack of experts is split into: for each its name, expert number and range of rows."""
    return pieces(Weight(module, name, shape, None, {}), rules.form, rules.config, False)
