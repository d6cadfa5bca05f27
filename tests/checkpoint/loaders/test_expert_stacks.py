"""Test models whose experts engines read as stacks: what is warned, what is excluded, and what transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.loaders import exclusions, support
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.transforms import gate_first
from fp4kit.checkpoint.model.weights import HeadOrder, Weight
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.contract.engine_table import SPLIT_EXPERTS

synthetic.DTYPE_NAMES.setdefault(np.dtype("u4"), "U32")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings come from transformers
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("model_type", "leaf", "shape", "alternates"),
    [
        ("gpt_oss", "gate_up_proj", (2, 8, 64), True),
        ("gpt_oss", "down_proj", (2, 8, 64), False),
        ("gpt_oss", "gate_up_proj", (8, 64), False),
        ("llama4", "gate_up_proj", (2, 8, 64), False),
        ("qwen3_vl_moe", "gate_up_proj", (2, 8, 64), False),
    ],
)
def test_rows_of_gate_and_up_alternate_only_in_stacks_of_gpt_oss(
    model_type: str, leaf: str, shape: tuple[int, ...], alternates: bool
) -> None:
    weight = Weight(f"{LAYER}.mlp.experts.{leaf}", leaf, shape, None, {})
    order = gate_first(weight, {"model_type": model_type}).order
    assert order == (HeadOrder(8, False) if alternates else None)
    assert order is None or order.sources(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


STACKS = {
    "granitemoe": ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear", "block_sparse_moe.experts"),
    "aria_text": ("mlp.experts.fc1", "mlp.experts.fc2", "mlp.experts"),
}


def with_stacks(root: Path, model_type: str) -> Path:
    """Write a model with an attention layer and two stacks of experts to `root`, and return `root`.

    model_type: the type of the model, which determines the names of the stacks.
    """
    values = np.random.default_rng(0).standard_normal((4, 64, 64)).astype(np.float32)
    tensors = {f"{LAYER}.{name}.weight": values for name in STACKS[model_type][:2]}
    tensors |= {f"{LAYER}.self_attn.{name}_proj.weight": values[0] for name in "qkvo"}
    config = {"model_type": model_type, "num_local_experts": 4, "num_hidden_layers": 1}
    synthetic.write_model(root, config, tensors)
    return root


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("model_type", STACKS)
def test_copied_stacks_are_named_and_excluded(tmp_path: Path, model_type: str, format: str) -> None:
    source = with_stacks(tmp_path / "m", model_type)
    first, second, container = (f"{LAYER}.{name}" for name in STACKS[model_type])
    plan = make_plan(source, "nvfp4-te", format=format)
    refused = {t.name for t in plan.tensors if "unsupported expert stack" in t.reason}
    assert refused == {f"{first}.weight", f"{second}.weight"}
    assert tuple(text for text in plan.warnings if ": model: " not in text) == (
        f"2 layers ({first}.weight, {second}.weight): kept unquantized, because expert stacks of such names are not"
        " supported",
    )
    assert container in plan.ignore  # vLLM and SGLang look up the container, not the stacks
    convert(source, tmp_path / "out", "nvfp4-te", format=format)
    assert not [issue for issue in verify(tmp_path / "out").issues if issue.severity == "error"]


@pytest.mark.parametrize("container", ["modelopt NVFP4", "compressed-tensors nvfp4-pack-quantized"])
def test_a_list_without_the_container_of_granite_is_an_error(container: str) -> None:
    stacks = [f"{LAYER}.{name}" for name in STACKS["granitemoe"][:2]]
    found = exclusions.check(container, ["lm_head", *stacks], stacks, [f"{LAYER}.self_attn.o_proj"])
    assert {(each.loader.partition(" ")[0], each.subject) for each in found} >= {
        ("vLLM", f"{LAYER}.block_sparse_moe.experts"),
        ("SGLang", f"{LAYER}.block_sparse_moe.experts"),
    }


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "llama4_text", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["mxfp4-te", *exhaustive(["mxfp8-te"])])
def test_split_experts_are_warned_of(tmp_path: Path, model_type: str, recipe: str) -> None:
    """The plan and verify warn about experts stored one by one if transformers loads this model type only with stacks.

    There is no warning for Llama 4, whose stacks transformers itself splits if the format is compressed-tensors.
    Decoded to bfloat16, such experts become stacks, which need no warning.
    """
    synthetic.vlm_moe(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": model_type}))
    is_stacked, warned = model_type != "qwen3_moe", model_type == "qwen3_vl_moe"
    for source, out, format in (("m", "q", "compressed-tensors"), ("q", "b", "bf16")):
        plan = convert(tmp_path / source, tmp_path / out, recipe, format=format).plan
        expected = warned and format != "bf16"
        assert any(SPLIT_EXPERTS in line for line in plan.warnings) == expected
        issues = verify(tmp_path / out, tmp_path / source).issues
        assert any(SPLIT_EXPERTS in issue.text for issue in issues if issue.severity == "warning") == expected
        assert not [issue for issue in issues if issue.severity == "error"]
    names = inspect_checkpoint(tmp_path / "b").tensors
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in names) == is_stacked
    assert any(".mlp.experts.0." in name for name in names) != is_stacked


def test_copied_stacks_of_a_split_model_are_not_warned_of(tmp_path: Path) -> None:
    synthetic.fused(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl_moe"}))
    wishes = Wishes(keep=("*.experts.*",))
    plan = make_plan(tmp_path / "m", "mxfp4-te", format="compressed-tensors", wishes=wishes)
    assert not any(SPLIT_EXPERTS in line for line in plan.warnings)


def granite(transformers: Any) -> Any:
    config = transformers.AutoConfig.for_model("granitemoe", **SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.AutoModelForCausalLM, config


def aria(transformers: Any) -> Any:
    counts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0}
    return transformers.AutoModelForCausalLM, transformers.AutoConfig.for_model("aria_text", **SIZES, **counts)


def qwen3_vl_moe(transformers: Any) -> Any:
    text = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 4}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    return transformers.AutoModelForImageTextToText, config


def llama4(transformers: Any) -> Any:
    counts = {"num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model("llama4_text", **{**SIZES, **counts, "intermediate_size": 96})
    return transformers.AutoModelForCausalLM, config


@pytest.mark.parametrize("make", [granite, aria, qwen3_vl_moe, llama4])
@pytest.mark.parametrize("recipe", ["nvfp4-te", *exhaustive(["mxfp4-te", "mxfp8-te"])])
def test_the_table_says_what_transformers_does(tmp_path: Path, make: Callable[[Any], Any], recipe: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    auto, config = make(transformers)
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    plan = make_plan(tmp_path / "m", recipe, format="compressed-tensors")
    convert(tmp_path / "m", tmp_path / "q", recipe, format="compressed-tensors")
    model, loading = auto.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True)
    missing = [name for name in loading["missing_keys"] if ".experts." in name]
    status = support.cell(plan.format_name, support.family_of(config.to_dict()), "transformers").status
    assert (status == "loads") == (not missing)
    convert(tmp_path / "q", tmp_path / "bf16", recipe, format="bf16")
    decoded, loading = auto.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16, output_loading_info=True)
    expected = decoded.state_dict()
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    if make in (llama4, qwen3_vl_moe):
        assert_experts(expected, tmp_path / "q", transposed=make is llama4)
    if missing:
        assert status == "wrong values"
        return
    model(torch.arange(4)[None])  # compressed-tensors decodes weights at their first use
    found = model.state_dict()
    if make is llama4:  # transformers has split the experts
        stacks = [name for name in expected if ".experts." in name]
        for name in stacks:
            parent, _, leaf = name.rpartition(".")
            parts = ["down_proj"] if leaf == "down_proj" else ["gate_proj", "up_proj"]
            for e, stack in enumerate(expected.pop(name)):
                split = torch.cat([found[f"{parent}.{e}.{part}.weight"] for part in parts])
                assert torch.equal(split, stack.T)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def assert_experts(loaded: dict[str, Any], quantized: Path, transposed: bool) -> None:
    """Check that the stacks that transformers loaded hold the decoded values of separate experts.

    transposed: True if transformers holds the stacks as [E, K, N].
    """
    layers = inspect_checkpoint(quantized).layers
    found = [name for name in layers if ".experts." in name]
    with Readers() as readers:
        for name in found:
            parent, number, leaf = name.rsplit(".", 2)
            stack = loaded[f"{parent}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"][int(number)].float()
            matrix = stack.T if transposed else stack
            rows, columns = layers[name].shape
            first = rows if leaf == "up_proj" else 0
            values = [values_of(layers[name], slab) for slab in slabs(readers, layers[name])]
            assert np.array_equal(matrix[first : first + rows].numpy(), np.concatenate(values).astype(synthetic.BF16))
            assert matrix.shape == (rows * (1 if leaf == "down_proj" else 2), columns)
    assert len(found) == 12


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_vl_moe"])
@pytest.mark.parametrize("shape", ["complete", "expert", "count", "kind", "square"])
def test_experts_that_become_no_stacks(shape: str, model_type: str, tmp_path: Path) -> None:
    """When decoded, experts stay separate, with a warning, unless they can become the stacks of transformers.

    shape: "complete" for experts that become stacks; "expert" if layers of one expert are missing; "count" if the
        config states one more expert; "kind" if one expert is unquantized; "square" if each matrix is 64x64, so that
        transformers could not tell the order of the axes of qwen3_vl_moe. Llama 4 has one order, so its square experts
        become stacks.
    """
    rng = np.random.default_rng(0)
    inner = 64 if shape == "square" else 96
    sizes = {"gate_proj": (inner, 64), "up_proj": (inner, 64), "down_proj": (64, inner)}
    tensors = {
        f"{LAYER}.mlp.experts.{e}.{leaf}.weight": rng.standard_normal(size).astype(synthetic.BF16)
        for leaf, size in sizes.items()
        for e in range(3)
    }
    if shape == "expert":
        del tensors[f"{LAYER}.mlp.experts.1.up_proj.weight"], tensors[f"{LAYER}.mlp.experts.1.gate_proj.weight"]
    config = {"model_type": model_type, "num_experts": 4 if shape == "count" else 3, "num_hidden_layers": 1}
    synthetic.write_model(tmp_path / "m", config, tensors)
    keep = ("*.experts.2.*",) if shape == "kind" else ()
    convert(tmp_path / "m", tmp_path / "q", "mxfp8-te", format="compressed-tensors", wishes=Wishes(keep=keep))
    plan = convert(tmp_path / "q", tmp_path / "b", format="bf16").plan
    stacked = shape == "complete" or (shape == "square" and model_type == "llama4_text")
    names = set(inspect_checkpoint(tmp_path / "b").tensors)
    stacks = {f"{LAYER}.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")}
    assert names == (stacks if stacked else {*tensors})
    assert any(SPLIT_EXPERTS in line for line in plan.warnings) == (not stacked)
    assert not [issue for issue in verify(tmp_path / "b", tmp_path / "q").issues if issue.severity == "error"]


def test_stacks_of_mlx_become_the_stacks_of_transformers(tmp_path: Path) -> None:
    """Decoding merges mlx-lm's two stacks of gate_proj and up_proj into the one that transformers has for Llama 4.

    The first columns of the merged stack are those of gate_proj.
    """
    shapes = {"gate_proj": (3, 96, 64), "up_proj": (3, 96, 64), "down_proj": (3, 64, 96)}
    values, parts = {}, {}
    for leaf, shape in shapes.items():
        q = fp4kit.quantize(synthetic.random(leaf, shape), "mxfp4-mlx-cpu")
        values[leaf] = fp4kit.dequantize(q, np.float32).swapaxes(1, 2)
        module = f"{LAYER}.feed_forward.experts.{leaf}"
        parts |= {f"{module}.weight": q.packed.view(np.uint32), f"{module}.scales": q.block_scale}
    own = {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    synthetic.write_model(tmp_path / "q", {"model_type": "llama4_text", "num_local_experts": 3, **own}, parts)
    convert(tmp_path / "q", tmp_path / "b", format="bf16")
    wanted = np.concatenate([values["gate_proj"], values["up_proj"]], axis=2), values["down_proj"]
    model = inspect_checkpoint(tmp_path / "b")
    with Readers() as readers:
        for leaf, value in zip(("gate_up_proj", "down_proj"), wanted, strict=True):
            file, entry = model.tensors[f"{LAYER}.feed_forward.experts.{leaf}"]
            assert np.array_equal(readers.of(file).read(entry).astype(np.float32), value)
    assert len(model.tensors) == 2 and verify(tmp_path / "b", tmp_path / "q").clean
