"""Write small models as model directories and as GGUF files, and run llama.cpp on GGUF files. The packages gguf and
xllamacpp are needed for the latter.

Run as a script, it prints the embeddings that llama.cpp computes with a GGUF file, as JSON: llama_cpp.py FILE INPUTS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

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


# Model directories ----------------------------------------------------------------------------------------------------

TOKENS, KV_HEADS, EXPERTS = 300, 2, 4
_TYPES = {"Llama": "llama", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}
# Name of a tensor of a layer in a directory -> its name in a GGUF file. {} stands for the number of an expert.
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{{}}.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{
        f"block_sparse_moe.experts.{{}}.{a}": f"ffn_{b}_exps" for a, b in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    **dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), "ffn_gate_inp"),
}
OUTER = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def config_of(family: str, **more: Any) -> dict[str, Any]:
    """Return config.json of a small model of a family, such as "Llama"; ``more`` are further entries."""
    found = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": _TYPES[family],
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": TOKENS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    moe = {"num_experts_per_tok": 2, "num_local_experts" if family == "Mixtral" else "num_experts": EXPERTS}
    return {
        **found,
        **({"sliding_window": None} if family.startswith("Mi") else {}),
        **(moe if family in ("Mixtral", "Qwen3Moe") else {}),
        **({"moe_intermediate_size": HIDDEN, "norm_topk_prob": True} if family == "Qwen3Moe" else {}),
        **({"head_dim": 64} if family.startswith("Qwen3") else {}),
        **more,
    }


def directory(root: Path, family: str = "Llama", pre: str = "qwen2", **more: Any) -> dict[str, np.ndarray]:
    """Write a small model directory with a tokenizer, and return its tensors (BF16).

    Args:
        root: the directory to write.
        family: the beginning of the name of its class, such as "Llama" for LlamaForCausalLM.
        pre: the kind of the tokenizer: "qwen2", "llama-bpe", or "spm" for SentencePiece.
        more: further entries of config.json.
    """
    config = config_of(family, **more)
    head = config.get("head_dim", WIDTH // HEADS)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (TOKENS, WIDTH), "lm_head": (TOKENS, WIDTH)}
    norms = {"model.norm": WIDTH}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        norms |= {f"{layer}.{name}_layernorm": WIDTH for name in ("input", "post_attention")}
        rows = {"q": HEADS * head, "k": KV_HEADS * head, "v": KV_HEADS * head}
        shapes |= {f"{layer}.self_attn.{name}_proj": (count, WIDTH) for name, count in rows.items()}
        shapes[f"{layer}.self_attn.o_proj"] = WIDTH, HEADS * head
        if family.startswith("Qwen3"):
            norms |= {f"{layer}.self_attn.{name}_norm": head for name in "qk"}
        if family == "Mixtral":
            mlps = [f"{layer}.block_sparse_moe.experts.{e}.{{}}".format for e in range(EXPERTS)]
            leaves, shapes[f"{layer}.block_sparse_moe.gate"] = ("w1", "w3", "w2"), (EXPERTS, WIDTH)
        elif family == "Qwen3Moe":
            mlps = [f"{layer}.mlp.experts.{e}.{{}}_proj".format for e in range(EXPERTS)]
            leaves, shapes[f"{layer}.mlp.gate"] = ("gate", "up", "down"), (EXPERTS, WIDTH)
        else:
            leaves, mlps = ("gate", "up", "down"), [f"{layer}.mlp.{{}}_proj".format]
        sizes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
        shapes |= {name(leaf): size for name in mlps for leaf, size in zip(leaves, sizes, strict=True)}
    found = {f"{name}.weight": synthetic.random(name, shape, 0.1) for name, shape in shapes.items()}
    found |= {f"{name}.weight": np.linspace(0.5, 1.5, n).astype(synthetic.BF16) for name, n in norms.items()}
    synthetic.write_model(root, config, found)
    (sentencepieces if pre == "spm" else byte_pairs)(root, pre)
    return found


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"qwen2": rf"{_WORDS}\p{{N}}{_REST}", "llama-bpe": rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"}


def byte_pairs(root: Path, pre: str, **changes: Any) -> None:
    """Write tokenizer.json and its settings: 256 bytes, a few merges, and a special token that begins every text.

    Args:
        root: the directory to write to.
        pre: "qwen2" or "llama-bpe". Tokenizers of the first kind add no special token.
        changes: entries of tokenizer.json that replace the usual ones.
    """
    letters = [chr(c) for c in range(33, 256) if c not in range(127, 161) and c != 173]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "a"], ["i", "n"], ["1", "2"], ["12", "3"], ["Ġ", "the"]]
    vocabulary = {text: i for i, text in enumerate([*letters, *("".join(pair) for pair in merges)])}
    if pre == "llama-bpe":
        vocabulary["Ġblock"] = len(vocabulary)  # a word that no merge makes: ignore_merges finds it
    names = {"<|begin|>": True, "<|end|>": True, "<tool>": False}
    added = [
        {"id": len(vocabulary) + i, "content": name, "special": special, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (name, special) in enumerate(names.items())
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    ids = {"<|begin|>": {"id": "<|begin|>", "ids": [added[0]["id"]], "tokens": ["<|begin|>"]}}
    template = {"type": "TemplateProcessing", "single": [begin, a], "pair": [begin, a, begin, b], "special_tokens": ids}
    model = {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
        "ignore_merges": pre == "llama-bpe",
        "vocab": vocabulary,
        "merges": merges,
    }
    content = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": added,
        "normalizer": None if pre == "llama-bpe" else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {"type": "Sequence", "processors": [level, template]} if pre == "llama-bpe" else level,
        "decoder": level,
        "model": model,
    } | changes
    (root / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))


def sentencepieces(root: Path, pre: str = "spm") -> None:
    """Write tokenizer.model, a protocol buffer of SentencePiece's, and the settings of the tokenizer."""

    def field(number: int, wire: int, data: bytes) -> bytes:
        return bytes([number << 3 | wire]) + (bytes([len(data)]) if wire == 2 else b"") + data

    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
    texts = ["\u2581", *"abcdefghiklmnopqrstuvw", "in", "th", "the", "\u2581the", "\u2581a"]
    pieces += [(text, -float(i), 1) for i, text in enumerate(texts)]
    data = b""
    for text, score, kind in pieces:
        one = field(1, 2, text.encode()) + field(2, 5, np.float32(score).tobytes()) + field(3, 0, bytes([kind]))
        data += field(1, 2, one)
    trainer = field(3, 0, bytes([2])) + b"\x98\x02\x01"  # model_type BPE; byte_fallback
    data += field(2, 2, trainer) + field(3, 2, field(1, 2, b"identity") + field(3, 0, b"\1") + field(4, 0, b"\0"))
    (root / "tokenizer.model").write_bytes(data)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": True}
    added = {"1": {"content": "<s>", "special": True}, "290": {"content": "<tool>", "special": False}}
    (root / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": added}))


def file_of(path: Path, values: Mapping[str, np.ndarray], family: str, config: Mapping[str, Any]) -> None:
    """Write the GGUF file of an unquantized directory, independently of the code under test: names, order, dtypes."""
    import gguf_files

    found: dict[str, Any] = {}
    for name, x in values.items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        if module in OUTER:
            to = OUTER[module]
        else:
            expert = int(parts[5]) if "experts" in parts else None
            inner = ".".join("{}" if i == 5 and expert is not None else part for i, part in enumerate(parts))
            to = f"blk.{parts[2]}.{NAMES[inner.split('.', 3)[3]]}"
            if expert is not None:
                found.setdefault(f"{to}.weight", []).append(x)
                continue
        if not family.startswith("Qwen") and to.endswith(("attn_q", "attn_k")):
            heads = HEADS if to.endswith("q") else KV_HEADS
            x = x.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(x.shape)
        wide = x.ndim == 1 or to.endswith("ffn_gate_inp")
        found[f"{to}.weight"] = x.astype(np.float32) if wide else x
    tensors = {name: np.stack(x) if isinstance(x, list) else x for name, x in found.items()}
    architecture = {"Qwen3": "qwen3", "Qwen3Moe": "qwen3moe"}.get(family, "llama")
    keys = {"general.architecture": architecture, f"{architecture}.block_count": LAYERS}
    keys |= {f"{architecture}.attention.head_count": HEADS, f"{architecture}.attention.head_count_kv": KV_HEADS}
    gguf_files.write(path, {name: gguf_files.plain(x) for name, x in tensors.items()}, keys)


# Running llama.cpp ----------------------------------------------------------------------------------------------------


def embeddings(path: Path, inputs: Sequence[str | list[int]]) -> np.ndarray:
    """Return the mean embedding of each input that llama.cpp computes with the GGUF file at `path`, in a new process.

    An embedding is a vector of length (norm) 1; an input is a text, or numbers of tokens. Raise AssertionError with
    llama.cpp's messages if the process fails.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(path), json.dumps(inputs)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def embedding(path: Path) -> np.ndarray:
    """Return the mean embedding of TEXT; see embeddings."""
    return embeddings(path, [TEXT])[0]


def main() -> None:
    """Print as JSON the embeddings that llama.cpp computes. The command line names the GGUF file and the inputs."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_ctx = 256
    parameters.warmup = False
    parameters.embedding = True
    parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(parameters)
    found = (server.handle_embeddings({"input": one}) for one in json.loads(sys.argv[2]))
    print(json.dumps([one["data"][0]["embedding"] for one in found]))


if __name__ == "__main__":
    main()
