"""Name the matrices of a model so that one matrix has the same key whatever tool wrote the file. For example, tools
store experts as separate layers or as one stack, and mlx-lm splits kv_b_proj into the stacks embed_q and unembed_out.

Tools name layers differently:

- Experts are separate layers or stacks. mlx-lm calls the stacks' module ``switch_mlp``.
- Mixtral calls gate, down and up w1, w2 and w3.
- Wrappers add ``_orig_mod.`` or ``module.``.
- mlx-lm splits DeepSeek's kv_b_proj into two stacks with one matrix per head.

Sources: mlx-lm 0.32.2 models/mixtral.py and models/deepseek_v3.py, sanitize; transformers 5.24 conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp4kit.checkpoint.model.weights import HeadOrder, Weight, expert_name, is_interleaved
from fp4kit.checkpoint.selection.names import join_module, split_module
from fp4kit.contract.schema import EXPERT_LEAVES

_WRAPPERS = ("_orig_mod", "module")
_STACKED_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("gate_proj", "up_proj")}
_KV_B = {"embed_q": "kv_b_proj", "unembed_out": "kv_b_proj"}


def canonical(module: str) -> str:
    """Return the canonical name of a module, a key for matching that does not depend on the tool that wrote the
    file.
    """
    parts = [part for part in module.split(".") if part not in _WRAPPERS]
    if "experts" in parts[:-1]:
        parts[-1] = EXPERT_LEAVES.get(parts[-1], parts[-1])
        parts = ["mlp" if part == "block_sparse_moe" else part for part in parts]
    return ".".join(parts)


def gate_first(weight: Weight, config: Mapping[str, Any]) -> Weight:
    """Return a weight that reads all gate rows before all up rows."""
    alternates = len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")
    return replace(weight, order=HeadOrder(weight.shape[-2], False)) if alternates else weight


def keys_of(weight: Weight, expert: int, config: Mapping[str, Any]) -> Iterator[tuple[str, Weight, tuple[int, int]]]:
    """Yield (key, weight to read, range of rows) for each matrix that other tools may make of a layer or an expert."""
    rows = weight.shape[-2]
    name = weight.name if len(weight.shape) == 2 else expert_name(weight.name, expert)
    yield canonical(name), weight, (0, rows)
    parent, leaf = split_module(name)
    if len(weight.shape) == 3 and leaf in _STACKED_HALVES:
        ordered = gate_first(weight, config)
        for number, half in enumerate(_STACKED_HALVES[leaf]):
            key = canonical(join_module(parent, half))
            yield key, ordered, (number * rows // 2, (number + 1) * rows // 2)


def kv_b_name(module: str) -> str | None:
    """Return the canonical name of the kv_b_proj layer from which mlx-lm made the stack ``module``."""
    parent, leaf = split_module(module)
    return canonical(join_module(parent, _KV_B[leaf])) if leaf in _KV_B else None


def kv_b_rows(leaf: str, rows: int, head: int, nope: int, expert: int) -> tuple[int, int]:
    """Return the range (first row, end row) of kv_b_proj from which mlx-lm made one head of embed_q or unembed_out."""
    first = expert * head + (0 if leaf == "embed_q" else nope)
    return first, first + rows
