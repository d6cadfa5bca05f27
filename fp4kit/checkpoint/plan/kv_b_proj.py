"""Restore kv_b_proj, a layer of multi-head latent attention, from the two stacks that mlx-lm makes of it. For H heads,
embed_q [H, K, nope] holds the first ``nope`` rows (keys) of each head, transposed, and unembed_out [H, v, K] the other
``v`` rows (values).

mlx-lm reads kv_b_proj [H * (nope + v), K] for H heads as [H, nope + v, K], and stores two stacks per layer:

- embed_q [H, K, nope]: the first ``nope`` rows of each head, transposed;
- unembed_out [H, v, K]: the other rows of each head.

The blocks of a quantized embed_q therefore run along another axis than the blocks of kv_b_proj, so kv_b_proj is written
unquantized. Source: mlx-lm 0.32.2, sanitize in models/deepseek_v3.py, deepseek_v32.py, glm4_moe_lite.py, kimi_k3.py,
kimi_linear.py, longcat_flash.py, mistral4.py, bailing_hybrid.py and bailing_moe_v3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp4kit.checkpoint.containers.table import VALUES, OutputTensor
from fp4kit.checkpoint.model.weights import Piece, Weight, located
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorEntry

_KEYS, _VALUES, _WHOLE = "embed_q", "unembed_out", "kv_b_proj"
_PARTNER = {_KEYS: _VALUES, _VALUES: _KEYS}
Tensors = Mapping[str, tuple[SafetensorsFile, TensorEntry]]


@dataclass(frozen=True)
class SplitLayer:
    """A kv_b_proj layer that the source stores as two stacks.

    Attributes:
        name: the name of kv_b_proj.
        keys: the stack embed_q, [H, K, nope].
        values: the stack unembed_out, [H, v, K].
    """

    name: str
    keys: Weight
    values: Weight

    @property
    def reason(self) -> str:
        """The text that the plan shows as the reason: both stacks are decoded and put together as kv_b_proj."""
        return "embed_q and unembed_out of mlx-lm: decoded and put together as kv_b_proj"

    @property
    def tensor(self) -> str:
        """The name of the source tensor with the values or codes of embed_q. The plan lists the layer under it."""
        return self.keys.tensor

    @property
    def dtype(self) -> str:
        """The dtype in which the source stores embed_q: a safetensors dtype, or its container's name if quantized."""
        return self.keys.dtype

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The two stacks: embed_q, then unembed_out."""
        return self.keys, self.values

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of kv_b_proj, (H * (nope + v), K): H heads, each with nope rows for keys and v for values."""
        heads, columns, nope = self.keys.shape
        return heads * (nope + self.values.shape[1]), columns

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces (units of work) that write kv_b_proj: two per head, from embed_q and from unembed_out."""
        dtype = next((weight.dtype for weight in self.weights if weight.container is None), "BF16")
        output = OutputTensor(f"{self.name}.weight", dtype, self.shape, VALUES)
        heads, columns, nope = self.keys.shape
        height, total = self.values.shape[1], self.shape[0]
        for head in range(heads):
            first = head * (nope + height)
            yield Piece(
                self.keys, head, (0, columns), self.name, None, (output,), total, first, transposed=True, height=nope
            )
            yield Piece(self.values, head, (0, height), self.name, None, (output,), total, first + nope, height=height)


def split_layers(tensors: Tensors, weights: Mapping[str, Weight]) -> dict[str, SplitLayer]:
    """Return a dict from tensor name to layer, for every kv_b_proj that is stored as two stacks; {} if there is
    none.
    """
    stacks = {weight.name: weight for weight in weights.values() if _leaf(weight.name) in _PARTNER}
    for name, (file, entry) in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and module not in stacks and _leaf(module) in _PARTNER and _is_plain_stack(entry):
            stacks[module] = Weight(module, name, entry.shape, None, {VALUES: located(file, entry)})
    found = {}
    for name, weight in stacks.items():
        parent = name.removesuffix(_leaf(name))
        partner = stacks.get(parent + _PARTNER[_leaf(name)])
        if partner is None:
            raise CheckpointError(
                f"{shown(name)}: mlx-lm made it from {_WHOLE}, which other engines need, but"
                f" {_PARTNER[_leaf(name)]} is missing, so {_WHOLE} cannot be restored; download the model again"
            )
        if _leaf(name) == _KEYS:
            _check_shapes(weight, partner)
            found[weight.tensor] = SplitLayer(f"{parent}{_WHOLE}", weight, partner)
    return found


def is_split(name: str) -> bool:
    """Return whether a tensor has the name of one of the two stacks that mlx-lm makes of kv_b_proj."""
    return name.endswith((f".{_KEYS}.weight", f".{_VALUES}.weight"))


def _leaf(name: str) -> str:
    """Return the part of a name after its last dot: "up_proj" for "mlp.up_proj". Without a dot, return the name."""
    return name.rpartition(".")[2]


def _is_plain_stack(entry: TensorEntry) -> bool:
    """Return whether a tensor can be an unquantized stack: a float dtype and three axes, none of length 0."""
    return entry.dtype in FLOAT_DTYPES and len(entry.shape) == 3 and 0 not in entry.shape


def _check_shapes(keys: Weight, values: Weight) -> None:
    """Raise CheckpointError unless embed_q has the shape [H, K, nope] and unembed_out [H, v, K], with equal H and K."""
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise CheckpointError(
            f"{shown(keys.name)}: has shape {list(keys.shape)} and {_VALUES} {list(values.shape)}; [H, K, nope] and"
            f" [H, v, K] are needed to restore {_WHOLE}; download the model again"
        )
