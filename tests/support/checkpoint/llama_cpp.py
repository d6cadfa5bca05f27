"""Write a small llama model as a GGUF file, and run llama.cpp on it. The packages gguf and xllamacpp are needed.

Run as a script, it prints the embedding that llama.cpp computes with a GGUF file, as JSON: llama_cpp.py FILE.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 260, 128, 256, 4, 2
TEXT = "scales of blocks"


def tensors() -> dict[str, np.ndarray]:
    """Return the float32 tensors of the model by their llama.cpp names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{name}": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (WIDTH, HIDDEN)}
    found = {f"{name}.weight": (rng.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in shapes.items()}
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in range(LAYERS) for name in ("attn", "ffn"))]
    return found | {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}


def write(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write a GGUF file with the given tensors, a llama architecture and a tokenizer of bytes.

    Args:
        path: the file to write.
        values: {llama.cpp's name: array}.
    """
    import gguf

    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(64)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(HIDDEN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("llama")
    file.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256)), b"\xe2\x96\x81a"])
    file.add_token_scores([0.0] * VOCABULARY)
    file.add_token_types([2, 3, 3, *[6] * 256, 1])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    for name, x in values.items():
        file.add_tensor(name, x)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def embedding(path: Path) -> np.ndarray:
    """Return the mean embedding of TEXT that llama.cpp computes with the GGUF file at `path`, in a new process.

    The embedding is a vector of length (norm) 1. Raise AssertionError with llama.cpp's messages if the process fails.
    """
    done = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print as JSON the embedding of TEXT that llama.cpp computes. The command line names the model's GGUF file."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_ctx = 64
    parameters.warmup = False
    parameters.embedding = True
    parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(parameters)
    print(json.dumps(server.handle_embeddings({"input": TEXT})["data"][0]["embedding"]))


if __name__ == "__main__":
    main()
