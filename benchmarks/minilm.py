"""Run the demo model (fp4kit.checkpoint.convert.demo) in NumPy to collect the inputs of its linear layers.

The demo model is a MiniLM sentence encoder. bench_scale_search.py uses the collected inputs as calibration data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from fp4kit.storage.safetensors_file import TensorReader, read_header

HEADS, EPS, LENGTH = 12, 1e-12, 128  # attention heads and layer norm epsilon (config.json); tokens per sequence
# Called with the name of a linear layer's weight and the layer's input, float32 of shape (tokens, K).
Seen = Callable[[str, np.ndarray], None]


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Return {name: array} of the float32 tensors of a model's folder."""
    file = read_header(folder / "model.safetensors")
    with TensorReader(file) as reader:
        return {entry.name: reader.read(entry) for entry in file.entries if entry.dtype == "F32"}


def linear_names(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the linear weights in the encoder's layers, layer by layer."""
    return [name for name, x in tensors.items() if name.endswith(".weight") and x.ndim == 2 and ".layer." in name]


def tokens_of(text: str, folder: Path) -> list[int]:
    """Return the WordPiece token ids of a text.

    The text is lower-cased and split into words and punctuation. Each word is split greedily into the longest pieces
    that the vocabulary in `folder` has.
    """
    known = {word: i for i, word in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    return [known[piece] for word in re.findall(r"\w+|[^\w\s]", text.lower()) for piece in _pieces(word, known)]


def _pieces(word: str, known: Mapping[str, int]) -> Iterator[str]:
    """Yield the vocabulary pieces of a word, from its start, each as long as possible.

    If no piece matches the rest, yield "[UNK]" for it. `known` maps a piece to its id.
    """
    start = 0
    while start < len(word):
        beginnings = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
        piece = next((piece for piece in beginnings if piece in known), None)
        if piece is None:
            yield "[UNK]"
            return
        yield piece
        start += len(piece) - 2 * (start > 0)


def run(tensors: Mapping[str, np.ndarray], tokens: list[int], seen: Seen) -> None:
    """Run the encoder on consecutive sequences of LENGTH tokens, with GELU in its tanh form.

    Call `seen` for every linear layer of each sequence. Tokens after the last whole sequence are ignored.
    """
    for start in range(0, len(tokens) - LENGTH + 1, LENGTH):
        e = "embeddings"
        x = tensors[f"{e}.word_embeddings.weight"][tokens[start : start + LENGTH]]
        x = x + tensors[f"{e}.position_embeddings.weight"][:LENGTH] + tensors[f"{e}.token_type_embeddings.weight"][0]
        x = _norm(tensors, f"{e}.LayerNorm", x)
        for i in range(sum(name.endswith("query.weight") for name in tensors)):
            x = _layer(tensors, f"encoder.layer.{i}", x, seen)


def _layer(tensors: Mapping[str, np.ndarray], p: str, x: np.ndarray, seen: Seen) -> np.ndarray:
    """Return the output of one encoder layer with input x.

    p: the prefix of its tensors' names.
    seen: called with the name and the input of each linear layer.
    """

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        seen(f"{p}.{name}.weight", x)
        return x @ tensors[f"{p}.{name}.weight"].T + tensors[f"{p}.{name}.bias"]

    q, k, v = (
        linear(f"attention.self.{name}", x).reshape(LENGTH, HEADS, -1).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ v
    heads = mixed.transpose(1, 0, 2).reshape(LENGTH, -1).astype(np.float32)
    x = _norm(tensors, f"{p}.attention.output.LayerNorm", x + linear("attention.output.dense", heads))
    h = linear("intermediate.dense", x)
    h = 0.5 * h * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (h + np.float32(0.044715) * h**3)))
    return _norm(tensors, f"{p}.output.LayerNorm", x + linear("output.dense", h))


def _norm(tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Return the layer norm of x with the weight and bias of the layer `name`."""
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + EPS)
    found: np.ndarray = (scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]).astype(np.float32)
    return found
