"""Test conversions of model directories to GGUF files: tensors, keys and tokenizers are those that llama.cpp needs.

Layers that GGUF cannot hold are decoded as stated, and what is not known is refused before any work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import synthetic
from borrowed_codes import stored
from changed_bytes import change
from llama_cpp import EXPERTS, HEADS, KV_HEADS, LAYERS, TOKENS, WIDTH
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import Wishes, convert, make_plan
from fp4kit.checkpoint.convert import run_jobs
from fp4kit.checkpoint.convert.convert import ConversionReport
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import located, weights_of
from fp4kit.checkpoint.plan.gguf_model import CLASSES
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.storage.gguf_file import read_gguf, read_gguf_model

gguf = pytest.importorskip("gguf")

FAMILIES = [name.removesuffix("ForCausalLM") for name in CLASSES]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors_of(path: Path) -> Raw:
    """Return {name: (dtype, shape, bytes)} of the tensors of a GGUF model."""
    files = read_gguf_model(path)
    entries = [(file.path.read_bytes(), entry) for file in files for entry in file.entries]
    return {e.name: (e.dtype, e.shape, data[e.start : e.start + e.nbytes]) for data, e in entries}


def keys_of(path: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file with their values, as the gguf package reads them."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def decoded(root: Path) -> dict[str, np.ndarray]:
    """Return the values of all weights of a model, float32, by the names of their modules."""
    model = open_source(root)
    with Readers() as readers:
        weights = weights_of(model.tensors, model.config).values()
        return {w.name: np.concatenate([values_of(w, slab) for slab in slabs(readers, w)]) for w in weights}


def rewrite(root: Path, changed: synthetic.Tensors, without: str = " ") -> None:
    """Write the file of a directory again, with changed or new tensors, and without tensors of a name."""
    model = open_source(root)
    with Readers() as readers:
        kept = {
            name: (entry.dtype, entry.shape, readers.bytes(located(file, entry)).tobytes())
            for name, (file, entry) in model.tensors.items()
            if without not in name
        }
    new = {name: (synthetic.DTYPE_NAMES[x.dtype], x.shape, x.tobytes()) for name, x in changed.items()}
    synthetic.write_bytes(root / "model.safetensors", kept | new, {"format": "pt"})


def made(root: Path, family: str = "Llama", recipe: str = "nvfp4-te", format: str = "modelopt", **more: Any) -> Path:
    """Write the directories "m" and its quantized form "q", and return the latter."""
    if not (root / "m").exists():
        pre = "llama-bpe" if family == "Llama" else "qwen2"
        llama_cpp.directory(root / "m", family, pre)
    convert(root / "m", root / "q", recipe, format=format, **more)
    return root / "q"


# ("Mistral" differs from "Llama" by its class alone)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "Mistral"])
@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("nvfp4-te", "modelopt"),
        pytest.param("nvfp4-te", "compressed-tensors", marks=pytest.mark.exhaustive),
        pytest.param("mxfp4-ocp", "compressed-tensors", marks=pytest.mark.exhaustive),
    ],
)
def test_tensors_equal_those_of_the_route_over_an_unquantized_file(
    family: str, recipe: str, format: str, tmp_path: Path
) -> None:
    """A directory becomes the GGUF file that --codes makes from the unquantized GGUF file of the model.

    That file is written by other code, which states names and the order of rows of its own.
    """
    root = made(tmp_path, family, recipe, format)
    values = {f"{name}.weight": x for name, x in synthetic_values(tmp_path / "m").items()}
    llama_cpp.file_of(tmp_path / "plain.gguf", values, family, json.loads((root / "config.json").read_text()))
    convert(tmp_path / "plain.gguf", tmp_path / "route.gguf", codes=root)
    report = convert(root, tmp_path / "o.gguf")
    found, wanted = tensors_of(tmp_path / "o.gguf"), tensors_of(tmp_path / "route.gguf")
    assert found == wanted and report.files == (tmp_path / "o.gguf",)
    layers = 7 if "Mo" not in family and family != "Mixtral" else 4 + 3 * EXPERTS
    assert report.actions["rename"] == LAYERS * layers and not report.inexact and not report.decoded
    assert sum(dtype == recipe.partition("-")[0].upper() for dtype, _, _ in found.values()) == 7 * LAYERS
    assert not report.plan.warnings and not report.findings


def synthetic_values(root: Path) -> dict[str, np.ndarray]:
    """Return all tensors of an unquantized directory, as they are stored, without ".weight"."""
    return {name.removesuffix(".weight"): x for name, x in stored(root).items()}


def test_new_codes_equal_those_of_the_route_over_an_unquantized_file(tmp_path: Path) -> None:
    """An unquantized directory can be quantized for GGUF, too; layers do not share tensor scales then."""
    tensors = llama_cpp.directory(tmp_path / "m", "Llama", "llama-bpe")
    llama_cpp.file_of(tmp_path / "plain.gguf", tensors, "Llama", {})
    for recipe in ("nvfp4-te", "nvfp4-gguf"):
        convert(tmp_path / "plain.gguf", tmp_path / f"{recipe}.gguf", recipe)
        convert(tmp_path / "m", tmp_path / f"new-{recipe}.gguf", recipe)
        assert tensors_of(tmp_path / f"new-{recipe}.gguf") == tensors_of(tmp_path / f"{recipe}.gguf")
    tiny = {name: x * synthetic.BF16.type(1e-30) for name, x in tensors.items()}
    synthetic.write_file(tmp_path / "m" / "model.safetensors", tiny)
    with refused("blk.0.attn_k"):  # nvfp4-gguf has no tensor scale, so tiny values become zero
        convert(tmp_path / "m", tmp_path / "lost.gguf", "nvfp4-gguf")


# Entry of RoPE's parameters -> the last position of the training; the inputs below are longer.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
IDS = [*range(5, 205, 2)]


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("Llama", "llama3"),
        ("Qwen3Moe", ""),
        pytest.param("Qwen3", "yarn", marks=pytest.mark.exhaustive),
        pytest.param("Mixtral", "", marks=pytest.mark.exhaustive),
        pytest.param("Llama", "linear", marks=pytest.mark.exhaustive),
        pytest.param("Llama", "yarn", marks=pytest.mark.exhaustive),
        pytest.param("Mistral", "", marks=pytest.mark.exhaustive),
    ],
)
def test_llama_cpp_computes_what_transformers_computes(family: str, rope: str, tmp_path: Path) -> None:
    """The embeddings of llama.cpp and of transformers with the decoded weights are nearly equal.

    They differ slightly, because llama.cpp rounds activations to 8 bits. The original weights give an embedding that
    differs at least 5 times as much. So does the model without its scaling of RoPE.
    """
    pytest.importorskip("xllamacpp")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_scaling": {"rope_type": rope, **ROPES[rope]}} if rope else {}
    llama_cpp.directory(tmp_path / "m", family, "qwen2", **scaling)
    convert(made(tmp_path, family), tmp_path / "o.gguf")
    convert(tmp_path / "q", tmp_path / "d", format="bf16")

    def embedding(root: Path) -> np.ndarray:
        model = transformers.AutoModel.from_pretrained(root, dtype=torch.float32).eval()
        with torch.no_grad():
            state = model(torch.tensor([IDS])).last_hidden_state[0].mean(0).numpy()
        return state / np.linalg.norm(state)

    found, wanted, original = (
        llama_cpp.embeddings(tmp_path / "o.gguf", [IDS])[0],
        embedding(tmp_path / "d"),
        embedding(tmp_path / "m"),
    )
    others = [original]
    if rope:
        config = json.loads((tmp_path / "d" / "config.json").read_text())
        (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
        others.append(embedding(tmp_path / "d"))
    error = np.linalg.norm(found - wanted)
    assert 0 < error < 0.05 and all(np.linalg.norm(found - other) > 5 * error for other in others)


TEXTS = [
    "the block in a thin 12345 line's END",
    "  naïve ±½ 日本語 \n\n two  spaces\t x",
    "HE'LL block blocks",
    "1 22 4444",
]


@pytest.mark.parametrize(
    ("family", "pre"),
    [("Llama", "llama-bpe"), ("Mistral", "spm"), pytest.param("Qwen3", "qwen2", marks=pytest.mark.exhaustive)],
)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(family: str, pre: str, tmp_path: Path) -> None:
    """llama.cpp computes the same embedding, bit for bit, from a text and from the tokens of its tokenizer."""
    pytest.importorskip("xllamacpp")
    name = "sentencepiece" if pre == "spm" else "tokenizers"
    package = pytest.importorskip(name)
    llama_cpp.directory(tmp_path / "m", family, pre)
    convert(made(tmp_path, family), tmp_path / "o.gguf")
    if pre == "spm":
        spm = package.SentencePieceProcessor(model_file=str(tmp_path / "m" / "tokenizer.model"))
        ids, texts = [[1, *spm.encode(text)] for text in TEXTS], TEXTS
    else:
        tokenizer, texts = package.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")), [*TEXTS, "a<tool> the"]
        ids = [tokenizer.encode(text).ids for text in texts]
    assert len({tuple(one) for one in ids}) == len(texts)
    a, b = (llama_cpp.embeddings(tmp_path / "o.gguf", one) for one in (texts, ids))
    assert a.tobytes() == b.tobytes()


def test_the_header_has_the_keys_of_the_model(tmp_path: Path) -> None:
    llama_cpp.directory(tmp_path / "m", "Qwen3Moe", "qwen2", rope_scaling={"rope_type": "yarn", **ROPES["yarn"]})
    (tmp_path / "m" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    convert(made(tmp_path, "Qwen3Moe"), tmp_path / "o.gguf")
    found = keys_of(tmp_path / "o.gguf")
    a = "qwen3moe"
    wanted = {
        "general.architecture": a,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_NVFP4),
        "general.license": "mit",
        f"{a}.block_count": LAYERS,
        f"{a}.context_length": 256,
        f"{a}.embedding_length": WIDTH,
        f"{a}.feed_forward_length": 256,
        f"{a}.expert_feed_forward_length": 256,
        f"{a}.expert_count": EXPERTS,
        f"{a}.expert_used_count": 2,
        f"{a}.attention.head_count": HEADS,
        f"{a}.attention.head_count_kv": KV_HEADS,
        f"{a}.attention.key_length": 64,
        f"{a}.attention.value_length": 64,
        f"{a}.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        f"{a}.rope.dimension_count": 64,
        f"{a}.rope.freq_base": 10000.0,
        f"{a}.rope.scaling.type": "yarn",
        f"{a}.rope.scaling.factor": 4.0,
        f"{a}.rope.scaling.original_context_length": 64,
        f"{a}.vocab_size": TOKENS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": 263,
        "tokenizer.ggml.eos_token_id": 264,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "fp4kit.recipe": "nvfp4-te",
    }
    assert wanted.items() <= found.items()
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == TOKENS and tokens[0] == "!" and found["tokenizer.ggml.merges"][1] == "th e"
    assert tokens[263:267] == ["<|begin|>", "<|end|>", "<tool>", "[PAD266]"] and kinds[262:267] == [1, 3, 3, 4, 5]


def test_layers_without_an_input_scale_forbid_4_bit_inputs(tmp_path: Path) -> None:
    convert(made(tmp_path, wishes=None), tmp_path / "w4a16.gguf")
    convert(tmp_path / "m", tmp_path / "w4a4", "nvfp4-te", format="compressed-tensors", input_scale=0.5)
    convert(tmp_path / "w4a4", tmp_path / "w4a4.gguf")
    one, other = keys_of(tmp_path / "w4a16.gguf"), keys_of(tmp_path / "w4a4.gguf")
    quantized = [name for name, (dtype, _, _) in tensors_of(tmp_path / "w4a16.gguf").items() if dtype == "NVFP4"]
    assert one["general.tensor_extra.name"] == quantized and len(quantized) == 7 * LAYERS
    assert one["general.tensor_extra.prec_a4"] == [False] * len(quantized)
    assert "general.tensor_extra.name" not in other
    scales = tensors_of(tmp_path / "w4a4.gguf")
    assert scales["blk.1.ffn_up.input_scale"] == ("F32", (1,), np.float32(0.5).tobytes())


# Layers in 8 bits -----------------------------------------------------------------------------------------------------

FP8 = {"modelopt": "fp8-modelopt-channel", "compressed-tensors": "fp8-modelopt"}


def mixed(root: Path, format: str, head: bool = False) -> Path:
    """Write a directory with NVFP4 and FP8 layers, and return it: attention in FP8, and lm_head too if ``head``."""
    recipes = [("*.self_attn.*", FP8[format])]
    made(root, format=format, recipes=recipes)
    if not head:
        return root / "q"
    q = fp4kit.quantize(stored(root / "m")["lm_head.weight"], "fp8-modelopt")
    tensors = {"lm_head.weight": q.packed.view(synthetic.E4M3)}
    tensors["lm_head.weight_scale"] = np.asarray(q.tensor_scale, np.float32).reshape(1)
    config = json.loads((root / "q" / "config.json").read_text())
    group = next(one for one in config["quantization_config"]["config_groups"].values() if "float" in one["format"])
    group["targets"] = [*group["targets"], "lm_head"]
    ignore = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [name for name in ignore if name != "lm_head"]
    (root / "q" / "config.json").write_text(json.dumps(config))
    rewrite(root / "q", tensors)
    return root / "q"


@pytest.mark.parametrize("fp8_as", ["bf16", "q8_0", "f32"])
@pytest.mark.parametrize("format", FP8)
def test_8_bit_layers_are_decoded_as_stated(format: str, fp8_as: str, tmp_path: Path) -> None:
    """FP8 layers beside NVFP4 layers are decoded to a dtype; the report counts the values that this rounds.

    Q8_0 has the bytes of the gguf package's encoder.
    """
    root = mixed(tmp_path, format)
    report = convert(root, tmp_path / "o.gguf", fp8_as=fp8_as)
    found, values = tensors_of(tmp_path / "o.gguf"), decoded(root)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    assert len(report.decoded) == 4 * LAYERS and report.actions["rename"] == 3 * LAYERS
    for name, changes in report.decoded.items():
        leaf = name.rpartition(".")[2]
        inner = next(a for a, b in llama_cpp.NAMES.items() if b == leaf)
        x = values[f"model.layers.{name.split('.')[1]}.{inner}"]
        if leaf in heads:
            x = x.reshape(heads[leaf], 2, -1, WIDTH).swapaxes(1, 2).reshape(x.shape)
        dtype, shape, data = found[f"{name}.weight"]
        if fp8_as == "q8_0":
            raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
            after = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        else:
            raw = x.astype(synthetic.BF16 if fp8_as == "bf16" else np.float32)
            after = raw.astype(np.float32)
        assert (dtype, shape, data) == (fp8_as.upper(), x.shape, raw.tobytes())
        assert changes.values == np.count_nonzero(x != after) and changes.largest_error == np.abs(x - after).max()
        assert (changes.values == 0) == (fp8_as == "f32") and not changes.blocks
    assert not report.inexact and not report.changes


def test_powers_of_two_are_exact_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 layers whose scale is a power of two are exact in BF16, and the command says so."""
    root = mixed(tmp_path, "compressed-tensors")
    change(root, "0.self_attn.o_proj.weight_scale", lambda x: np.full_like(x, 2.0**-10))
    report = convert(root, tmp_path / "o.gguf")
    exact = {name for name, one in report.decoded.items() if not one.values}
    assert exact == {"blk.0.attn_output"}
    assert main(["convert", str(root), str(tmp_path / "p.gguf")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "8 layers in BF16, as GGUF has no such type: 1 exact, 7 lossy; --fp8-as f32 is exact" in text
    assert main(["convert", str(root), str(tmp_path / "x.gguf"), "--fp8-as", "f32", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["decoded"]) == 8 and not any(one["values"] for one in body["decoded"])


def test_a_mixed_checkpoint_with_an_fp8_head_runs(tmp_path: Path) -> None:
    """Checkpoints of compressed-tensors with FP8 attention, an FP8 output head and NVFP4 MLPs become files that run."""
    pytest.importorskip("xllamacpp")
    root = mixed(tmp_path, "compressed-tensors", head=True)
    report = convert(root, tmp_path / "o.gguf", fp8_as="q8_0")
    assert {*report.decoded} >= {"output", "blk.0.attn_q"} and tensors_of(tmp_path / "o.gguf")["output.weight"][
        0
    ] == "Q8_0"
    convert(tmp_path / "m", tmp_path / "whole.gguf")
    a, b = (llama_cpp.embeddings(tmp_path / f"{name}.gguf", [IDS])[0] for name in ("o", "whole"))
    assert 0 < np.linalg.norm(a - b) < 0.3


def test_blocks_of_several_rows_are_reordered_by_values(tmp_path: Path) -> None:
    """FP8 layers with 128x128 blocks have heads of other sizes, so q and k are reordered after they are decoded."""
    root = made(tmp_path)
    tensors, names = {}, [f"model.layers.{i}.self_attn.{leaf}_proj" for i in range(LAYERS) for leaf in "qk"]
    for name in names:
        q = fp4kit.quantize(stored(tmp_path / "m")[f"{name}.weight"], "fp8-transformers-block")
        tensors |= {f"{name}.weight": q.packed.view(synthetic.E4M3)}
        scale = np.asarray(q.tensor_scale)
        tensors[f"{name}.weight_scale"] = np.ascontiguousarray(scale[:: 128 if len(scale) > 1 else 1])
    config = json.loads((root / "config.json").read_text())
    layers = {name.removesuffix(".weight_scale_2"): "NVFP4" for name in stored(root) if name.endswith("_scale_2")}
    layers |= dict.fromkeys(names, "FP8_PB_WO")
    algorithms = {
        name: {"quant_algo": one, "group_size": 16 if one == "NVFP4" else 128} for name, one in layers.items()
    }
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": algorithms,
    }
    (root / "config.json").write_text(json.dumps(config))
    (root / "hf_quant_config.json").unlink()
    for one in (".q_proj.weight_scale_2", ".k_proj.weight_scale_2"):
        rewrite(root, tensors, one)
    convert(root, tmp_path / "o.gguf", fp8_as="f32")
    values, found = decoded(root), tensors_of(tmp_path / "o.gguf")
    for name in names:
        heads = HEADS if name.endswith("q_proj") else KV_HEADS
        x = values[name].reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(values[name].shape)
        assert found[f"blk.{name.split('.')[2]}.attn_{name[-6]}.weight"] == ("F32", x.shape, x.tobytes())


def test_a_quantized_output_head_keeps_its_codes(tmp_path: Path) -> None:
    """llama.cpp reads an output head in NVFP4, so it is not decoded as for other engines."""
    root = made(tmp_path)
    q = fp4kit.quantize(stored(tmp_path / "m")["lm_head.weight"], "nvfp4-te")
    tensors = {"lm_head.weight": q.packed, "lm_head.weight_scale": q.block_scale.view(synthetic.E4M3)}
    tensors["lm_head.weight_scale_2"] = np.asarray(q.tensor_scale)
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("lm_head")
    (root / "config.json").write_text(json.dumps(config))
    (root / "hf_quant_config.json").unlink()
    rewrite(root, tensors)
    convert(root, tmp_path / "o.gguf")
    assert tensors_of(tmp_path / "o.gguf")["output.weight"][0] == "NVFP4"
    assert "output.scale" in tensors_of(tmp_path / "o.gguf")
    convert(root, tmp_path / "kept.gguf", wishes=fp4kit.checkpoint.Wishes(keep=("lm_head",)))
    assert tensors_of(tmp_path / "kept.gguf")["output.weight"][0] == "BF16"


def test_verify_and_compare_read_the_result(tmp_path: Path) -> None:
    root = made(tmp_path)
    convert(root, tmp_path / "o.gguf")
    report = verify(tmp_path / "o.gguf")
    assert not report.issues and len(report.layers) == 7 * LAYERS
    found = compare_checkpoints(root, tmp_path / "o.gguf")
    assert all((one.codes, one.scales, one.sqnr_db) == (0, 0, np.inf) for one in found.layers)
    assert len(found.layers) == 7 * LAYERS and not found.tensors


def test_a_model_is_split_over_several_files(tmp_path: Path) -> None:
    """The first of several files has the keys of the model; together, they have the tensors of the whole file."""
    llama_cpp.directory(tmp_path / "m", "Llama", "llama-bpe", rope_scaling={"rope_type": "llama3", **ROPES["llama3"]})
    root = made(tmp_path)
    report = convert(root, tmp_path / "s.gguf", format="gguf", split_max_size=100_000)
    convert(root, tmp_path / "o.gguf")
    assert len(report.files) > 2 and tensors_of(report.files[0]) == tensors_of(tmp_path / "o.gguf")
    assert read_gguf(report.files[0]).metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert "tokenizer.ggml.pre" not in read_gguf(report.files[1]).metadata
    factors = np.frombuffer(tensors_of(tmp_path / "o.gguf")["rope_freqs.weight"][2], np.float32)
    assert factors.min() == 1 and factors.max() == 8 and len(factors) == WIDTH // HEADS // 2


# Refusals -------------------------------------------------------------------------------------------------------------


def with_config(root: Path, **entries: Any) -> None:
    path = root / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


ENTRIES: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["GemmaForCausalLM"]},
        '--format gguf: architectures is ["GemmaForCausalLM"]; model directories',
    ),
    ({"architectures": None}, "architectures is null"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"logits_soft_cap": 30.0}, "config.json: logits_soft_cap: is 30.0; it is not known what llama.cpp needs for it"),
    ({"sliding_window": 64}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "attends to all positions in every layer"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 'have the type "longrope"'),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lack original_max_position_embeddings"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "have mscale with the type linear"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 'have factor "2"; a number is needed'),
    ({"rope_scaling": "yarn"}, 'rope_scaling: is "yarn"; an object is needed'),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, 'have the type ["yarn"]'),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "rotate 0.25 of a head"),
    ({"sliding_window": "64"}, "sliding_window"),
    ({"head_dim": "32"}, 'head_dim: is "32"; a positive whole number is needed'),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"max_position_embeddings": None}, "max_position_embeddings"),
    ({"rms_norm_eps": None}, "rms_norm_eps"),
    ({"vocab_size": 301}, "has 300 rows, but vocab_size is 301"),
    ({"num_attention_heads": 128, "num_key_value_heads": 64}, "rows, which are not heads of an even number of rows"),
]


def test_settings_that_the_engine_would_not_follow_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path)
    text = (root / "config.json").read_text()
    for entries, why in ENTRIES:
        (root / "config.json").write_text(text)
        with_config(root, **entries)
        with refused(why):
            convert(root, tmp_path / "o.gguf")
    (root / "config.json").write_text(text)
    with_config(root, logits_soft_cap=30.0)
    convert(root, tmp_path / "o.gguf", ignore=["logits_soft_cap"])
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_entries_of_mistral_and_qwen_are_checked(tmp_path: Path) -> None:
    """The defaults of a class count, too: MistralConfig has a window of 4096, Qwen3MoeConfig no normalization."""
    for family, entries, why in (
        ("Mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "llama.cpp attends to all positions"),
        ("Qwen3Moe", {"norm_topk_prob": ...}, "llama.cpp normalizes the weights of the chosen experts"),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, "every layer must have experts"),
    ):
        root = made(tmp_path / f"{family}{len(entries)}{why[:3]}", family)
        config = json.loads((root / "config.json").read_text()) | entries
        (root / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        with refused(why):
            convert(root, tmp_path / "o.gguf")


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path)
    layer, path = "model.layers.0", root / "model.safetensors"
    usual = path.read_bytes()
    for name, shape, without in (
        (f"{layer}.self_attn.sinks", (4,), " "),
        (f"{layer}.self_attn.sinks.bias", (4,), " "),
        (f"{layer}.mlp.other_proj.weight", (64, 128), " "),
        (f"{layer}.mlp.up_proj.weight", (128,), "layers.0.mlp.up_proj"),
        (f"{layer}.input_layernorm.weight", (1, 128), " "),
    ):
        path.write_bytes(usual)
        rewrite(root, {name: np.ones(shape, np.float32)}, without)
        with refused(f"{name} (F32 {list(shape)}): llama.cpp has no such tensor in llama models"):
            convert(root, tmp_path / "o.gguf")
    path.write_bytes(usual)
    rewrite(root, {f"{layer}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    convert(root, tmp_path / "o.gguf")
    assert not any("rot" in name for name in tensors_of(tmp_path / "o.gguf"))


def test_stacks_of_experts_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path, "Qwen3Moe")
    stack = {
        f"model.layers.0.mlp.experts.{leaf}": np.ones((4, 256, 128), np.float32) for leaf in ("gate_proj", "up_proj")
    }
    rewrite(root, stack, "layers.0.mlp.experts")
    with refused("is a stack of experts; only separate experts are supported"):
        convert(root, tmp_path / "o.gguf")


def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    """A model with tie_word_embeddings reads its embedding as output head, whatever lm_head holds."""
    root = made(tmp_path)
    with_config(root, tie_word_embeddings=True)
    convert(root, tmp_path / "o.gguf")
    found = tensors_of(tmp_path / "o.gguf")
    assert "output.weight" not in found and "token_embd.weight" in found


def test_links_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path)
    (tmp_path / "secret").write_text("---\nlicense: mit\n---\n")
    (root / "README.md").symlink_to(tmp_path / "secret")
    with refused("README.md: links to a file outside"):
        convert(root, tmp_path / "o.gguf")


def test_a_quantized_router_is_decoded_to_float32(tmp_path: Path) -> None:
    root = made(tmp_path, "Qwen3Moe")
    name = "model.layers.0.mlp.gate"
    q = fp4kit.quantize(stored(tmp_path / "m")[f"{name}.weight"], "nvfp4-te")
    parts = {f"{name}.weight": q.packed, f"{name}.weight_scale": q.block_scale.view(synthetic.E4M3)}
    rewrite(root, parts | {f"{name}.weight_scale_2": np.asarray(q.tensor_scale)})
    declared = json.loads((root / "config.json").read_text())["quantization_config"]
    with_config(root, quantization_config={**declared, "ignore": []})
    (root / "hf_quant_config.json").unlink()
    convert(root, tmp_path / "o.gguf")
    wanted = decoded(root)[name]
    assert tensors_of(tmp_path / "o.gguf")["blk.0.ffn_gate_inp.weight"] == ("F32", (EXPERTS, WIDTH), wanted.tobytes())


def test_biases_are_reordered_with_their_layers(tmp_path: Path) -> None:
    root = made(tmp_path)
    biases = {
        f"model.layers.0.self_attn.{leaf}_proj.bias": np.arange(n, dtype=np.float16)
        for leaf, n in (("q", 128), ("v", 64))
    }
    rewrite(root, biases)
    convert(root, tmp_path / "o.gguf")
    found = tensors_of(tmp_path / "o.gguf")
    wanted = np.arange(128, dtype=np.float32).reshape(HEADS, 2, -1).swapaxes(1, 2).reshape(-1)
    assert found["blk.0.attn_q.bias"] == ("F32", (128,), wanted.tobytes())
    assert found["blk.0.attn_v.bias"] == ("F32", (64,), np.arange(64, dtype=np.float32).tobytes())


def test_biases_of_scaled_mlps_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path)
    bias = {"model.layers.0.mlp.up_proj.bias": np.ones(256, np.float32)}
    rewrite(root, bias)
    with refused("blk.0.ffn_up: llama.cpp 0c1e57098: aborts if a feed-forward layer has both a .bias and a .scale"):
        convert(root, tmp_path / "o.gguf")


def test_experts_must_be_complete_and_alike(tmp_path: Path) -> None:
    root = made(tmp_path, "Qwen3Moe")
    plain = stored(tmp_path / "m")
    rewrite(root, {}, ".experts.3.")
    with refused("blk.0.ffn_down_exps: has 3 experts, but config.json declares 4; 3 are missing or too many"):
        convert(root, tmp_path / "o.gguf")
    one = "model.layers.1.mlp.experts.2.up_proj"
    made(tmp_path / "again", "Qwen3Moe")
    root = tmp_path / "again" / "q"
    rewrite(root, {f"{one}.weight": plain[f"{one}.weight"]}, one)
    with refused(f"{one}.weight: is BF16, but model.layers.1.mlp.experts.0.up_proj.weight is modelopt NVFP4"):
        convert(root, tmp_path / "o.gguf")


WORKAROUND = "or write a GGUF file of the unquantized model with convert_hf_to_gguf.py of llama.cpp"
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}, "splits ['ByteLevel'] by None"),
    ({"pre_tokenizer": None}, "the tokenizer of"),
    ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ({"added_tokens": [{"id": 300, "content": "x"}]}, "the tokenizer has a token 300, but vocab_size is 300"),
]


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    root = made(tmp_path, "Qwen3")
    for changes, why in CHANGES:
        llama_cpp.byte_pairs(root, "qwen2", **changes)
        with refused(why) as raised:
            convert(root, tmp_path / "o.gguf")
        assert WORKAROUND in str(raised.value)
    llama_cpp.byte_pairs(root, "qwen2")
    content = json.loads((root / "tokenizer.json").read_text())
    for key, value in (("ignore_merges", True), ("byte_fallback", True)):
        changed = {**content, "model": {**content["model"], key: value}}
        (root / "tokenizer.json").write_text(json.dumps(changed))
        with refused("is of a kind that is not known to fp4kit"):
            convert(root, tmp_path / "o.gguf")
    (root / "tokenizer.json").unlink()
    with refused(f"has no tokenizer.json and no tokenizer.model; copy the tokenizer of the model, {WORKAROUND}"):
        convert(root, tmp_path / "o.gguf")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trainer": b"\x18\x01"}, "the model is not BPE"),
        ({"normalizer": b"\x20\x01"}, "it removes spaces"),
        ({"normalizer": b"\x0a\x04nfkc\x12\x01x\x20\x00"}, "it changes characters"),
        ({"tail": b"\x0a\x7f"}, "a field ends behind the end of the file"),
        ({"tail": b"\x0a"}, "IndexError"),
    ],
)
def test_other_sentencepiece_models_are_refused(changes: dict[str, bytes], why: str, tmp_path: Path) -> None:
    llama_cpp.directory(tmp_path / "m", "Mistral", "spm")
    root = made(tmp_path, "Mistral")
    path = root / "tokenizer.model"
    fields = {"trainer": b"\x12", "normalizer": b"\x1a"}
    more = b"".join(fields[k] + bytes([len(v)]) + v if k in fields else v for k, v in changes.items())
    path.write_bytes(path.read_bytes() + more)  # a later field of a protocol buffer replaces an earlier one
    with refused(why) as raised:
        convert(root, tmp_path / "o.gguf")
    assert WORKAROUND in str(raised.value)


def test_requests_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(tmp_path)
    convert(root, tmp_path / "o.gguf")
    for options, why in (
        ({"format": "modelopt"}, "only a GGUF file, or a model directory with --format gguf, becomes a GGUF file"),
        ({"format": "gguf", "codes": tmp_path / "o.gguf"}, "--codes: --format gguf keeps the codes of a directory"),
        ({"format": "gguf", "input_scale": 1.0}, "llama.cpp supports only calibrated input scales"),
        ({"format": "gguf", "recipes": [("*", "nvfp4-te")]}, "a GGUF file records one recipe"),
        ({"format": "gguf", "fp8_as": "f16"}, "--fp8-as f16: unknown; use one of bf16, q8_0, f32"),
        ({"format": "modelopt", "fp8_as": "f32"}, "--fp8-as f32: is the dtype of decoded layers in a GGUF file"),
        ({"format": "gguf", "recipe": "fp8-modelopt"}, "cannot be stored in a GGUF file"),
    ):
        with refused(why):
            convert(root, tmp_path / "p.gguf", **options)
    with refused("the result is a GGUF file, whose name ends in .gguf"):
        convert(root, tmp_path / "p", format="gguf")
    synthetic.write_file(tmp_path / "alone.safetensors", stored(root))
    with refused("alone.safetensors is a single file; model directories of"):
        convert(tmp_path / "alone.safetensors", tmp_path / "p.gguf", format="gguf")
    with refused("format gguf: convert_tensors does not write such files"):
        fp4kit.checkpoint.Rules.of("nvfp4-te", config={}, format="gguf")
    assert convert(tmp_path / "o.gguf", tmp_path / "again.gguf", format="gguf").actions.keys() == {"copy", "rename"}
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused('--format gguf: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'):
        make_plan(root, format="gguf")


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops in the middle is continued by --resume, with the bytes of a run that does not stop."""
    root = made(tmp_path)
    convert(root, tmp_path / "whole.gguf")
    usual, count = run_jobs.write_job, 0

    def stop(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count > 9:
            raise KeyboardInterrupt
        return usual(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_jobs, "write_job", stop)
        convert(root, tmp_path / "o.gguf", options=Options(1))
    report: ConversionReport = convert(root, tmp_path / "o.gguf", options=Options(1, resume=True))
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert report.actions["rename"] == 7 * LAYERS


def test_the_command_line_writes_gguf_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made(tmp_path)
    assert main(["convert", str(root), str(tmp_path / "o.gguf"), "--dry-run"]) == 0
    assert "NVFP4" in capsys.readouterr().out and not (tmp_path / "o.gguf").exists()
    assert main(["convert", str(root), str(tmp_path / "o.gguf")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"next: fp4kit verify {tmp_path / 'o.gguf'} --source {root}" in text and "serve: llama-server -m" in text


def test_the_recipe_of_an_engine(tmp_path: Path) -> None:
    """--engine llama.cpp chooses the recipe of a new GGUF file; other engines load no GGUF file."""
    llama_cpp.directory(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "o.gguf", engine="llama.cpp", scheme="nvfp4-w4a8")
    assert report.plan.recipe.id == "nvfp4-gguf" and report.plan.format_name == "gguf NVFP4"
    with refused("and DST would be gguf NVFP4 scaled; leave other recipes and formats out"):
        convert(tmp_path / "m", tmp_path / "p.gguf", engine="transformers", scheme="nvfp4-w4a16")


def test_a_preset_chooses_layers_by_the_names_of_the_directory(tmp_path: Path) -> None:
    llama_cpp.directory(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "o.gguf", wishes=Wishes(like="modelopt:NVFP4_MLP_ONLY_CFG"))
    found = {name for name, (dtype, _, _) in tensors_of(tmp_path / "o.gguf").items() if dtype == "NVFP4"}
    assert found == {f"blk.{i}.ffn_{leaf}.weight" for i in range(LAYERS) for leaf in ("gate", "up", "down")}
    assert report.plan.recipe.id == "nvfp4-modelopt"
