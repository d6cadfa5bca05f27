"""Put separate experts together as stacks, for unquantized models whose experts engines read only as stacks. A stack is
one tensor [E, K, N] with one layer of all E experts: gate_up_proj (gate and up) or down_proj.

transformers loads the experts of Llama 4 and Qwen3-VL-MoE as two stacks per layer: gate_up_proj [E, H, 2 I], whose
first I columns are the gate, and down_proj [E, I, H]. If a model stores separate experts, transformers leaves these
stacks at random values. The released models, vLLM 0.33.0 and SGLang 0.5.23 use this axis order. transformers 5.23.0
transposes the stacks of Qwen3-VL-MoE when it loads them (conversion_mapping.py), but not if both axis orders have equal
shapes. Experts with such shapes stay separate.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp4kit.checkpoint.containers.table import VALUES, OutputTensor
from fp4kit.checkpoint.loaders.support import LLAMA4, STACKED_MOE, family_of
from fp4kit.checkpoint.model.weights import Piece, Rows, Weight

_LEAVES = ("gate_proj", "up_proj", "down_proj")
_SEPARATE = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(_LEAVES)})")
_STACKED = re.compile(rf"(.+)\.(?:experts|switch_mlp)\.({'|'.join(_LEAVES)})")  # names of mlx-lm's stacks
_TRANSPOSED_ON_LOADING = "qwen3_vl_moe"
_COUNTS = ("num_local_experts", "num_experts")  # keys of config.json with the number of experts per layer
Matrices = dict[tuple[str, int], Rows]  # (last part of the name, number of the expert) -> its rows


@dataclass(frozen=True)
class ExpertStack:
    """A stack of experts that is put together from separate matrices.

    Attributes:
        name: the name of the stack.
        experts: for each expert, its matrices (one, or gate and up), whose rows follow each other in the stack.
    """

    name: str
    experts: tuple[tuple[Rows, ...], ...]

    @property
    def reason(self) -> str:
        """The text that the plan shows as the reason: the matrices are decoded and put together as this stack."""
        return f"experts: decoded and put together as {self.name.rpartition('.')[2]}"

    @property
    def tensor(self) -> str:
        """The name of the source tensor with the first matrix's values or codes. The plan lists the stack under it."""
        return self.experts[0][0].weight.tensor

    @property
    def dtype(self) -> str:
        """The dtype in which the source stores the first matrix: a safetensors dtype, or the name of its container."""
        return self.experts[0][0].weight.dtype

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The source weights from which the stack is put together, without duplicates."""
        found = {rows.weight.tensor: rows.weight for matrices in self.experts for rows in matrices}
        return tuple(found.values())

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (E, N, K) of the stack, which is stored as [E, K, N]."""
        rows = sum(end - begin for _, _, (begin, end) in self.experts[0])
        return len(self.experts), rows, self.experts[0][0].weight.shape[-1]

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces (units of work) that write the stack: one per expert, transposed to [K, N]."""
        # The stack is written in BF16 if the first matrix is quantized, otherwise in the dtype of that matrix.
        experts, rows, columns = self.shape
        first = self.experts[0][0].weight
        dtype = "BF16" if first.container is not None else first.dtype
        output = OutputTensor(self.name, dtype, (experts, columns, rows), VALUES)
        for number, matrices in enumerate(self.experts):
            one = matrices[0].weight
            if len(matrices) > 1:
                one = Weight(self.name, one.tensor, (rows, columns), one.container, one.parts, members=matrices)
            at, span = (0, (0, rows)) if len(matrices) > 1 else matrices[0][1:]
            yield Piece(one, at, span, self.name, None, (output,), experts * rows, number * rows, transposed=True)


def expert_stacks(weights: Mapping[str, Weight], config: Mapping[str, Any]) -> dict[str, ExpertStack]:
    """Return the stacks to put together from separate experts: tensor name -> stack; {} if there are none."""
    if family_of(config) not in (STACKED_MOE, LLAMA4):
        return {}
    modules: dict[str, Matrices] = defaultdict(dict)
    for weight in weights.values():
        for parent, leaf, expert, rows in _matrices(weight):
            modules[parent][leaf, expert] = rows
    found = {}
    for parent, matrices in modules.items():
        for stack in _stacks(parent, matrices, config):
            found[stack.tensor] = stack
    return found


def _matrices(weight: Weight) -> Iterator[tuple[str, str, int, Rows]]:
    """Yield (name of the experts' module, last part of the name, number, rows) for each expert's matrix in a weight."""
    rows = (0, weight.shape[-2])
    if len(weight.shape) == 2:
        match = _SEPARATE.fullmatch(weight.name)
        if match is not None:
            yield match[1], match[3], int(match[2]), Rows(weight, 0, rows)
        return
    match = _STACKED.fullmatch(weight.name)
    if match is not None:
        for expert in range(weight.experts):
            yield f"{match[1]}.experts", match[2], expert, Rows(weight, expert, rows)


def _stacks(parent: str, matrices: Matrices, config: Mapping[str, Any]) -> Iterator[ExpertStack]:
    """Yield the stacks gate_up_proj and down_proj of a module, or nothing if they cannot be put together."""
    experts = 1 + max(expert for _, expert in matrices)
    text = config.get("text_config")
    counts = {**(text if isinstance(text, Mapping) else {}), **config}
    declared = next((counts[key] for key in _COUNTS if isinstance(counts.get(key), int)), experts)
    kinds = {(rows.weight.container, rows.weight.dtype) for rows in matrices.values()}
    if len(matrices) != len(_LEAVES) * experts or declared != experts or len(kinds) != 1:
        return
    sizes = [{matrices[leaf, e].weight.shape[-2:] for e in range(experts)} for leaf in _LEAVES]
    if sizes[0] != sizes[1] or len(sizes[0]) != 1 or sizes[2] != {shape[::-1] for shape in sizes[0]}:
        return
    ((inner, hidden),) = sizes[0]
    if hidden in (inner, 2 * inner) and str(config.get("model_type", "")).startswith(_TRANSPOSED_ON_LOADING):
        return
    halves = tuple((matrices["gate_proj", e], matrices["up_proj", e]) for e in range(experts))
    yield ExpertStack(f"{parent}.gate_up_proj", halves)
    yield ExpertStack(f"{parent}.down_proj", tuple((matrices["down_proj", e],) for e in range(experts)))
