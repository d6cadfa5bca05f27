"""Train a small Llama for an engine, convert it, load it, and check that it computes with the trained bits.

    python examples/train_convert_serve.py [--scheme nvfp4-w4a4] [--steps 60]

The model learns to count: to predict the next number of a sequence. A few batches show the largest inputs of each
layer, from which its input scale follows (W4A4). Then the model trains with the weights and inputs that the engine
transformers will compute with. Then

1. save_pretrained writes the unquantized weights, and fp4kit.checkpoint.convert quantizes them.
2. transformers loads the converted directory, decodes it, and quantizes the inputs of its layers.
3. Every weight of the loaded model and all logits must equal, in every bit, those of the trained model.

Needs PyTorch, transformers and compressed-tensors.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp4kit.torch
from fp4kit.checkpoint import Activations, convert

ENGINE = "transformers"
VOCABULARY = 32


def a_model() -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights, in bfloat16, the dtype of the weights that are loaded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def counting(rows: int, length: int = 16) -> torch.Tensor:
    """Return sequences that count upwards from random numbers, modulo VOCABULARY."""
    return (torch.randint(VOCABULARY, (rows, 1)) + torch.arange(length)) % VOCABULARY


def train(model: LlamaForCausalLM, steps: int) -> None:
    """Train a model to count."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = counting(32)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 2 - 1) == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")


def differing(model: torch.nn.Module, loaded: torch.nn.Module, names: list[str]) -> list[str]:
    """Return the parameters whose loaded values differ from those that training computed with."""

    def weight(of: torch.nn.Module, name: str) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        return getattr(of.get_submodule(module), leaf)

    return [name for name in names if not torch.equal(weight(model, name), weight(loaded, name))]


def main() -> None:
    """Train, convert, load and compare. Raises SystemExit if a weight differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheme", default="nvfp4-w4a4", help="as `fp4kit contract --list` lists them")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    served_by = {"engine": ENGINE, "scheme": options.scheme}
    model, inputs = a_model(), None
    if fp4kit.serving(**served_by).input_scales == "static":
        with fp4kit.torch.collect(model) as inputs:
            model(counting(64))
    names = fp4kit.torch.fake_quantize_model(model, **served_by, inputs=inputs)
    print(names)
    train(model, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        trained, served = Path(folder) / "trained", Path(folder) / "served"
        model.save_pretrained(trained)
        convert(trained, served, **served_by, activations=None if inputs is None else Activations.of(inputs))
        loaded = AutoModelForCausalLM.from_pretrained(served, dtype=torch.bfloat16)
        tokens = counting(8)
        with torch.no_grad():
            outputs = model(tokens).logits, loaded(tokens).logits
    wrong = differing(model, loaded, names)
    print(f"{len(names) - len(wrong)} of {len(names)} layers are equal in every bit")
    print("logits are equal in every bit" if torch.equal(*outputs) else "logits differ")
    if wrong or not torch.equal(*outputs):
        raise SystemExit(f"the trained and the served model differ: {', '.join(wrong) or 'logits'}")


if __name__ == "__main__":
    main()
