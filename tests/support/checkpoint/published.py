"""List names, dtypes and shapes of the tensors of published models, scaled down, for tests of name rules.

E is the number of experts, M is the width of an expert, H is the hidden size, and V is the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fp4kit.checkpoint.selection.selection import Candidate, ModelFacts, candidate, model_facts

H, V, M, E = 64, 128, 96, 4
Spec = tuple[str, tuple[int, ...]]  # name (without .weight) and shape of a BF16 tensor


def _candidates(config: dict[str, object], specs: Iterator[Spec], stored: str | None = None) -> list[Candidate]:
    """Return the tensors of a model as Candidates, which the converter's name rules select from.

    Args:
        config: the content of config.json.
        specs: the names and shapes of the tensors.
        stored: the container in which linear layers (for gpt-oss, stacks) are quantized; None if they are unquantized.
    """
    model = model_facts(config)
    held = ("proj", "w1", "w2", "w3", "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "kv_a_proj_with_mqa")
    if stored == "gpt-oss":
        held = ("experts.gate_up_proj", "experts.down_proj")
    return [
        _candidate(name, shape, model, stored if name.endswith(held) and "eh_proj" not in name else None)
        for name, shape in specs
    ]


def _candidate(name: str, shape: tuple[int, ...], model: ModelFacts, stored: str | None) -> Candidate:
    """Return one tensor as a Candidate.

    Args:
        name: the name of the module. ".weight" is added, except to stacks and biases.
        shape: the shape of the values.
        model: the facts about the model.
        stored: the container in which the tensor is quantized; None if it is unquantized. Biases are never quantized.
    """
    if len(shape) == 3 and stored:
        return Candidate(f"{name}_blocks", name, stored, shape, model)
    if len(shape) == 3 or name.endswith("bias"):
        return candidate(name, "BF16", shape, model)
    return Candidate(f"{name}.weight", name, stored or "BF16", shape, model)


def attention(prefix: str) -> Iterator[Spec]:
    """Yield (name, shape) of the tensors of an attention module: q, k, v and o projections and a norm of q.

    Args:
        prefix: the name of the module.
    """
    for leaf, shape in (("q_proj", (64, H)), ("k_proj", (32, H)), ("v_proj", (32, H)), ("o_proj", (H, 64))):
        yield f"{prefix}.{leaf}", shape
    yield f"{prefix}.q_norm", (16,)


def mla(prefix: str, leaves: tuple[str, ...]) -> Iterator[Spec]:
    """Yield (name, shape) of the projections `leaves` of the multi-head latent attention module `prefix`."""
    yield from ((f"{prefix}.{leaf}", (64, 32 if leaf.endswith("b") else H)) for leaf in leaves)


def mlp(prefix: str, width: int = M, leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Iterator[Spec]:
    """Yield (name, shape) of the projections of the gated MLP `prefix`.

    Args:
        prefix: the name of the MLP's module.
        width: the number of the MLP's inner features.
        leaves: the last parts of the names, in the order gate, up, down.
    """
    yield from zip((f"{prefix}.{leaf}" for leaf in leaves), ((width, H), (width, H), (H, width)), strict=True)


def experts(prefix: str, leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Iterator[Spec]:
    """Yield (name, shape) of the projections of the experts `prefix`.0, `prefix`.1 and so on.

    leaves: the last parts of the names, in the order gate, up, down.
    """
    for expert in range(E):
        yield from mlp(f"{prefix}.{expert}", M, leaves)


def base(prefix: str = "model", head: bool = True) -> Iterator[Spec]:
    """Yield (name, shape) of the embeddings, the final norm and, if `head` is true, the output head.

    Args:
        prefix: the module that holds the embeddings and the norm.
        head: True to include the output head.
    """
    yield from ((f"{prefix}.embed_tokens", (V, H)), (f"{prefix}.norm", (H,)))
    if head:
        yield "lm_head", (V, H)


def qwen3_dense() -> list[Candidate]:
    """Return the tensors of a dense model with a tied head.

    down_proj has K = 80: whole blocks of 16, but not of 32.
    """

    def specs() -> Iterator[Spec]:
        yield from base(head=False)
        for i in range(3):
            yield from attention(f"model.layers.{i}.self_attn")
            yield from mlp(f"model.layers.{i}.mlp", 80)

    return _candidates({"model_type": "qwen3", "num_hidden_layers": 3}, specs())


def qwen3_moe() -> list[Candidate]:
    """Return the tensors of a mixture of experts whose layer 0 is dense. Experts are separate tensors."""

    def specs() -> Iterator[Spec]:
        yield from base()
        yield from mlp("model.layers.0.mlp", 80)
        for i in range(4):
            yield from attention(f"model.layers.{i}.self_attn")
            if i:
                yield f"model.layers.{i}.mlp.gate", (E, H)
                yield from experts(f"model.layers.{i}.mlp.experts")

    return _candidates({"model_type": "qwen3_moe", "num_hidden_layers": 4}, specs())


def stacked(model_type: str, router: str, biases: bool = False, stored: str | None = None) -> list[Candidate]:
    """Return the tensors of a model with stacks of experts, whose names do not end in ".weight".

    Args:
        model_type: the ``model_type`` of the config.
        router: the name of the router's tensor.
        biases: True to add biases of the stacks.
        stored: the container in which linear layers are quantized; None if they are unquantized.
    """

    def specs() -> Iterator[Spec]:
        yield from base()
        for i in range(2):
            yield from attention(f"model.layers.{i}.self_attn")
            yield f"model.layers.{i}.mlp.{router}", (E, H)
            for leaf, rows, columns in (("gate_up_proj", 2 * M, H), ("down_proj", H, M)):
                yield f"model.layers.{i}.mlp.experts.{leaf}", (E, rows, columns)
                if biases:
                    yield f"model.layers.{i}.mlp.experts.{leaf}_bias", (E, rows)

    return _candidates({"model_type": model_type, "num_hidden_layers": 2}, specs(), stored)


def deepseek_v3(stored: str | None = None) -> list[Candidate]:
    """Return a model like DeepSeek-V3: multi-head latent attention, a dense layer 0, and shared experts.

    Multi-token prediction is the layer after the last one. stored: the container in which linear layers are quantized;
    None if they are unquantized.
    """

    def specs() -> Iterator[Spec]:
        yield from base()
        for i in range(4):
            leaves = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            yield from mla(f"model.layers.{i}.self_attn", leaves)
            if i == 0:
                yield from mlp("model.layers.0.mlp", 80)
                continue
            gate = f"model.layers.{i}.mlp.gate"
            yield from ((gate, (E, H)), (f"{gate}.e_score_correction_bias", (E,)))
            yield from experts(f"model.layers.{i}.mlp.experts")
            yield from mlp(f"model.layers.{i}.mlp.shared_experts")
        yield from ((f"model.layers.3.{leaf}", (V, 2 * H)) for leaf in ("eh_proj", "embed_tokens", "shared_head.head"))

    return _candidates({"model_type": "deepseek_v3", "num_hidden_layers": 3}, specs(), stored)


def deepseek_v4() -> list[Candidate]:
    """Return the tensors of a model with DeepSeek-V4's native names, such as layers.0.attn.wq_a and mtp.0.ffn.gate."""

    def specs() -> Iterator[Spec]:
        yield from (("embed", (V, H)), ("head", (V, H)), ("norm", (H,)))
        for prefix in ("layers.0", "layers.1", "mtp.0"):
            yield from mla(f"{prefix}.attn", ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
            yield f"{prefix}.ffn.gate", (E, H)
            yield from experts(f"{prefix}.ffn.experts", ("w1", "w3", "w2"))
            yield from mlp(f"{prefix}.ffn.shared_experts", M, ("w1", "w3", "w2"))

    return _candidates({"model_type": "deepseek_v4", "num_hidden_layers": 2}, specs(), "deepseek-v4 MXFP4")


def mixtral() -> list[Candidate]:
    """Return the tensors of a mixture of experts with Mixtral's names: w1, w2 and w3 below block_sparse_moe."""

    def specs() -> Iterator[Spec]:
        yield from base()
        for i in range(2):
            yield from attention(f"model.layers.{i}.self_attn")
            yield f"model.layers.{i}.block_sparse_moe.gate", (E, H)
            yield from experts(f"model.layers.{i}.block_sparse_moe.experts", ("w1", "w3", "w2"))

    return _candidates({"model_type": "mixtral", "num_hidden_layers": 2}, specs())


def vlm_moe() -> list[Candidate]:
    """Return the tensors of a vision-language model with experts."""

    def specs() -> Iterator[Spec]:
        yield from base("model.language_model")
        for i in range(2):
            yield from attention(f"model.language_model.layers.{i}.self_attn")
            yield f"model.language_model.layers.{i}.mlp.gate", (E, H)
            yield from experts(f"model.language_model.layers.{i}.mlp.experts")
            yield f"model.visual.blocks.{i}.attn.qkv", (3 * H, H)
            yield from mlp(f"model.visual.blocks.{i}.mlp")

    return _candidates({"model_type": "qwen3_vl_moe", "text_config": {"num_hidden_layers": 2}}, specs())


MODELS: dict[str, Callable[[], list[Candidate]]] = {
    "qwen3_dense": qwen3_dense,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_fused": lambda: stacked("qwen3_moe", "gate"),
    "gpt_oss": lambda: stacked("gpt_oss", "router", biases=True),
    "gpt_oss_mxfp4": lambda: stacked("gpt_oss", "router", biases=True, stored="gpt-oss"),
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_fp8": lambda: deepseek_v3("FP8 128x128"),
    "deepseek_v4": deepseek_v4,
    "mixtral": mixtral,
    "vlm_moe": vlm_moe,
}
