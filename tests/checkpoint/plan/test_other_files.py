"""Test what conversions take from other files: codes of other models (--codes), and importance matrices of llama.cpp.

Codes are copied byte for byte, or the request is rejected.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import llama_cpp
import numpy as np
import pytest
import synthetic
from borrowed_codes import MODULE_NAMES, directory, out_bytes, stored
from exhaustive import half
from gguf_files import EXPERTS, HIDDEN
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import ConversionReport, ScaleSearch, Wishes, convert, make_plan
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.plan.scale_search import gguf_names, read_imatrix
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import recorded_search
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.layouts import pack_gguf
from fp4kit.recipes import recipe
from fp4kit.storage.gguf_file import read_gguf

gguf = pytest.importorskip("gguf")


def taken(source: Path, codes: Path, **options: Any) -> ConversionReport:
    return convert(source, source.with_name("out.gguf"), codes=codes, **options)


CODES = {"modelopt": (".weight", ".weight_scale_2"), "compressed-tensors": (".weight_packed", ".weight_global_scale")}


FORMS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-te", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp4-ocp", "mlx"),
]


@pytest.mark.parametrize(("recipe", "format"), FORMS[:3])
def test_codes_and_scales_are_those_of_the_directory(recipe: str, format: str, tmp_path: Path) -> None:
    """convert --codes gives every layer of a GGUF file the codes and scales that the directory has for it.

    Divisors are inverted. All other tensors stay as they are.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, recipe, format)
    report = taken(tmp_path / "m.gguf", tmp_path / "q", recipe=recipe)
    parts, kind = stored(tmp_path / "q"), recipe.partition("-")[0]
    assert set(report.actions) == {"rename", "copy"}
    seen = 0
    for entry in read_gguf(tmp_path / "out.gguf").entries:
        raw = out_bytes(tmp_path / "out.gguf", entry.name)
        if entry.dtype != kind.upper():
            assert entry.name.endswith(".scale") or raw == tensors[entry.name].tobytes()
            continue
        _, layer, leaf, _ = entry.name.split(".")
        prefix = f"model.layers.{layer}.{MODULE_NAMES[leaf.removesuffix('_exps')]}"
        stack = leaf.endswith("_exps")
        modules = [prefix.replace("mlp.", f"mlp.experts.{e}.") for e in range(EXPERTS)] if stack else [prefix]
        weight, scale = CODES[format]
        blocks = [pack_gguf(parts[module + weight], parts[f"{module}.weight_scale"], kind) for module in modules]
        assert raw == b"".join(block.tobytes() for block in blocks)
        if kind == "nvfp4":
            factors = np.float32([parts[module + scale].reshape(()) for module in modules])
            factors = np.float32(1) / factors if format == "compressed-tensors" else factors
            assert out_bytes(tmp_path / "out.gguf", entry.name.replace("weight", "scale")) == factors.tobytes()
        seen += 1
    assert seen == (14 if kind == "mxfp4" else 13)
    found = compare_checkpoints(tmp_path / "m.gguf", tmp_path / "out.gguf").layers
    assert len(found) == 11 + EXPERTS * (seen - 11) and all(layer.sqnr_db > 15 for layer in found)


def test_the_recipe_is_recorded_that_made_the_codes(tmp_path: Path) -> None:
    """A GGUF file that takes the codes of a directory records the recipe that the directory records.

    This may be another one than the recipe of the command, which only names the format. If none is known, the file
    records none.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, "nvfp4-torchao")
    taken(tmp_path / "m.gguf", tmp_path / "q")
    assert read_gguf(tmp_path / "out.gguf").metadata["fp4kit.recipe"] == "nvfp4-torchao"
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "modelopt"}}))
    convert(tmp_path / "m.gguf", tmp_path / "other.gguf", codes=tmp_path / "q")
    assert "fp4kit.recipe" not in read_gguf(tmp_path / "other.gguf").metadata


@pytest.mark.parametrize("format", CODES)
def test_input_scales_go_along(format: str, tmp_path: Path) -> None:
    """A GGUF file that takes the codes of a directory takes its input scales, too. Divisors are inverted."""
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, format=format, input_scale=0.5)
    taken(tmp_path / "m.gguf", tmp_path / "q")
    for name, experts in (("blk.0.attn_q", 1), ("blk.1.ffn_up_exps", EXPERTS)):
        scales = np.full(experts, 0.5, np.float32)
        assert out_bytes(tmp_path / "out.gguf", f"{name}.input_scale") == scales.tobytes()


def test_tensors_that_the_directory_has_not_quantized_stay(tmp_path: Path) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, wishes=Wishes(keep=("*.o_proj", "*.experts.2.*")))
    plan = make_plan(tmp_path / "m.gguf", codes=tmp_path / "q")
    reasons = {tensor.name: tensor.reason for tensor in plan.tensors if tensor.action == "copy"}
    for name in ("blk.0.attn_output.weight", "blk.1.ffn_up_exps.weight"):  # stacks are taken as a whole
        assert reasons[name] == "not quantized in the --codes model"
    assert reasons["blk.1.ffn_gate_inp.weight"] == "MoE router" and len(plan.converted) == 9


def test_mxfp4_codes_become_nvfp4_without_a_loss(tmp_path: Path) -> None:
    """A GGUF file in NVFP4 takes the MXFP4 codes of a directory after a cast without loss; in MXFP4, it keeps them."""
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors, "mxfp4-ocp", "compressed-tensors")
    report = taken(tmp_path / "m.gguf", tmp_path / "q", recipe="nvfp4-te")
    assert report.actions["cast"] == 11 + 2 * EXPERTS and not report.inexact
    taken_again = convert(tmp_path / "m.gguf", tmp_path / "mx.gguf", codes=tmp_path / "q")
    assert taken_again.actions["rename"] == 11 + 3 * EXPERTS
    for layer in compare_checkpoints(tmp_path / "mx.gguf", tmp_path / "out.gguf").layers:
        assert "down_exps" in layer.name or layer.sqnr_db == np.inf


def test_experts_that_are_exchanged_are_refused(tmp_path: Path) -> None:
    tensors = gguf_files.model()
    directory(tmp_path / "q", tensors)
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][::-1]
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in tensors.items()})
    with refused("blk.1.ffn_up_exps.weight: model.layers.1.mlp.experts.0.up_proj decodes to other values"):
        taken(tmp_path / "m.gguf", tmp_path / "q")


def test_invalid_requests_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors)
    directory(tmp_path / "fp8" / "q", tensors, "mxfp8-te", "compressed-tensors")
    for without in (tmp_path / "plain", tmp_path / "fp8" / "q"):
        with refused("none of its quantized layers (none in MXFP4 or NVFP4) is in"):
            taken(tmp_path / "m.gguf", without)
    with refused("--codes: needs one GGUF file and one model directory; source and --codes are of the same kind"):
        convert(tmp_path / "plain", tmp_path / "out", codes=tmp_path / "q")
    gguf_files.write_model(tmp_path / "x.gguf", **{"general.architecture": "none"})
    with refused("--codes: the gguf package does not know the architecture 'none'; update gguf"):
        taken(tmp_path / "x.gguf", tmp_path / "q")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with refused('--codes: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'):
        taken(tmp_path / "m.gguf", tmp_path / "q")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    directory(tmp_path / "q", tensors)
    arguments = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out.gguf"), "--codes", str(tmp_path / "q")]
    assert main([*arguments, "--dry-run"]) == 0 and main(arguments) == 0
    assert f"layers: {11 + 2 * EXPERTS} rename" in capsys.readouterr().out


HEADS = {"attn_q": 4, "attn_k": 2}
COUNTS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Return x with its rows in llama.cpp's order, as LlamaModel.permute of llama.cpp's converter gives it.

    heads: the number of attention heads, whose rows are reordered head by head.
    """
    return x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


def heads_of(name: str) -> int:
    return HEADS.get(name.split(".")[-2], 0)


def llama(path: Path, **keys: Any) -> dict[str, np.ndarray]:
    """Write the model of gguf_files in llama.cpp's row order. Return its tensors in Hugging Face's row order.

    keys: the metadata keys of the file. If there are none, COUNTS is used.
    """
    tensors = gguf_files.model()
    write_turned(path, tensors, keys or COUNTS)
    return tensors


def write_turned(path: Path, tensors: dict[str, np.ndarray], keys: dict[str, Any]) -> None:
    turned = {name: permuted(x, heads_of(name)) if heads_of(name) else x for name, x in tensors.items()}
    gguf_files.write(path, {name: gguf_files.plain(x) for name, x in turned.items()}, keys)


@pytest.mark.parametrize(("recipe", "format"), FORMS[1:])
def test_heads_are_woven_for_a_file(recipe: str, format: str, tmp_path: Path) -> None:
    """A GGUF file that takes the codes of a directory gets the rows of q and k in llama.cpp's order.

    Codes and scales are permuted together: the gguf package decodes them to fp4kit's values in this order.
    """
    tensors, kind = llama(tmp_path / "m.gguf"), recipe.partition("-")[0]
    wishes = Wishes(keep=("*.experts.*",)) if format == "mlx" else Wishes()
    directory(tmp_path / "q", tensors, recipe, format, wishes=wishes)
    report = convert(tmp_path / "m.gguf", tmp_path / "out.gguf", recipe, codes=tmp_path / "q")
    assert set(report.actions) == {"rename", "copy"}
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    for layer in range(2):
        group = [tensors[f"blk.{layer}.attn_{part}.weight"] for part in "qkv"]
        amax = max(np.abs(x).max() for x in group).astype(np.float32) if kind == "nvfp4" else None
        for leaf, count in HEADS.items():
            name = f"blk.{layer}.{leaf}.weight"
            q = fp4kit.quantize(tensors[name], recipe, tensor_amax=amax)
            blocks = pack_gguf(permuted(q.packed, count), permuted(q.block_scale, count), kind)
            assert out_bytes(tmp_path / "out.gguf", name) == blocks.tobytes()
            values = gguf.dequantize(read[name].data, read[name].tensor_type)
            plain = fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe=f"{kind}-gguf", shape=q.shape)
            assert values.tobytes() == permuted(fp4kit.dequantize(plain, np.float32), count).tobytes()


@pytest.mark.parametrize(("recipe", "format"), FORMS)
def test_heads_are_unwoven_for_a_directory(recipe: str, format: str, tmp_path: Path) -> None:
    """A directory that takes a GGUF file's codes gets the rows of each attention head in the order of its own weights.

    A GGUF file that takes the directory's codes in turn has the bytes of the first file.
    """
    directory(tmp_path / "unused", llama(tmp_path / "m.gguf"))
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", recipe)
    wishes = Wishes(keep=("*.experts.*",)) if format == "mlx" else Wishes()
    report = convert(
        tmp_path / "plain", tmp_path / "d", recipe, format=format, codes=tmp_path / "q.gguf", wishes=wishes
    )
    experts = 0 if format == "mlx" else EXPERTS * (3 if recipe == "mxfp4-ocp" else 2)
    assert report.actions["rename"] == 11 + experts and set(report.actions) <= {"rename", "copy"}
    if recipe == "mxfp4-ocp":  # with tensor scales, the bytes differ: in a file, q, k and v do not share theirs
        verified = verify(tmp_path / "d", tmp_path / "plain")
        assert verified.recipe == recipe and all(layer.codes[0] == 0 for layer in verified.layers)
    options: dict[str, Any] = {"wishes": Wishes(keep=("*_exps",))} if format == "mlx" else {}
    convert(tmp_path / "m.gguf", tmp_path / "only.gguf", recipe, **options)
    convert(tmp_path / "m.gguf", tmp_path / "again.gguf", recipe, codes=tmp_path / "d")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "only.gguf").read_bytes()


def test_heads_that_tell_nothing(tmp_path: Path) -> None:
    """The row order of q is found even if its first and last rows are zero, because all rows are compared.

    If all rows of k are zero, their order does not matter.
    """
    tensors = gguf_files.model()
    tensors["blk.0.attn_q.weight"][:32] = tensors["blk.0.attn_q.weight"][-32:] = tensors["blk.0.attn_k.weight"][:] = 0
    directory(tmp_path / "q", tensors, "mxfp4-ocp", "compressed-tensors")
    write_turned(tmp_path / "m.gguf", tensors, COUNTS)
    convert(tmp_path / "m.gguf", tmp_path / "out.gguf", "mxfp4-ocp", codes=tmp_path / "q")
    q = fp4kit.quantize(permuted(tensors["blk.0.attn_q.weight"], HEADS["attn_q"]), "mxfp4-ocp")
    blocks = pack_gguf(q.packed, q.block_scale, "mxfp4")
    assert out_bytes(tmp_path / "out.gguf", "blk.0.attn_q.weight") == blocks.tobytes()


@pytest.mark.parametrize("heads", [None, 8, 48, 0, "4.0", ["4", "4"]])
def test_rows_in_an_order_that_is_not_known(heads: Any, tmp_path: Path) -> None:
    """If the config lacks the right number of heads, q and k are rejected by name, unless they are left out."""
    keys: dict[str, Any] = {"llama.context_length": 8} if heads is None else {"llama.attention.head_count": heads}
    directory(tmp_path / "q", llama(tmp_path / "m.gguf", **keys))
    with refused("attn_q.weight: model.layers.0.self_attn.q_proj decodes to other values (SQNR "):
        convert(tmp_path / "m.gguf", tmp_path / "out.gguf", codes=tmp_path / "q")
    convert(tmp_path / "m.gguf", tmp_path / "out.gguf", codes=tmp_path / "q", wishes=Wishes(keep=("blk.*.attn_[qk]",)))
    assert not (tmp_path / ".out.gguf.partial").exists() and (tmp_path / "out.gguf").exists()


def stacks(root: Path, tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Write the experts of layer 1 to a directory as transformers stores them. Return the written stacks.

    gate_up_proj is [E, 2I, H], with the rows of gate before those of up. For gpt_oss, these rows alternate, and both
    stacks are transposed.

    tensors: the experts' tensors of a GGUF file.
    kind: the model type.
    """
    gate, up, down = (tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    both = np.concatenate([gate, up], axis=1)
    if kind == "gpt_oss":
        both, down = np.stack([gate, up], axis=2).reshape(both.shape).swapaxes(1, 2), down.swapaxes(1, 2)
    prefix = "model.layers.1.mlp.experts."
    found = {f"{prefix}gate_up_proj": np.ascontiguousarray(both), f"{prefix}down_proj": np.ascontiguousarray(down)}
    synthetic.write_model(root, {"model_type": kind, "num_hidden_layers": 2, "num_experts": EXPERTS}, found)
    return found


def experts_file(path: Path, architecture: str) -> dict[str, np.ndarray]:
    """Write a GGUF file that contains only stacks of experts. Return its tensors.

    architecture: the value of the key general.architecture.
    """
    tensors = {name: x for name, x in gguf_files.model().items() if name.endswith("_exps.weight")}
    keys = {"general.architecture": architecture, f"{architecture}.block_count": 2}
    gguf_files.write(path, {name: gguf_files.plain(x) for name, x in tensors.items()}, keys)
    return tensors


@pytest.mark.parametrize(("recipe", "format"), FORMS[:3])
def test_stacks_of_a_file_in_a_directory_of_stacks(recipe: str, format: str, tmp_path: Path) -> None:
    """A directory whose source has stacks of experts takes the codes of a GGUF file, expert by expert.

    A GGUF file that takes the directory's codes in turn has the bytes of the first file.
    """
    stacks(tmp_path / "m", experts_file(tmp_path / "m.gguf", "qwen3moe"), "qwen3_moe")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", recipe)
    report = convert(tmp_path / "m", tmp_path / "d", recipe, format=format, codes=tmp_path / "q.gguf")
    parts = 3 if recipe == "mxfp4-ocp" else 2
    assert report.actions["rename"] == EXPERTS * parts and set(report.actions) <= {"rename", "copy"}
    assert {f"model.layers.1.mlp.experts.{e}.{part}_proj" for e in range(EXPERTS) for part in ("gate", "up")} <= set(
        inspect_checkpoint(tmp_path / "d").layers
    )
    convert(tmp_path / "m.gguf", tmp_path / "again.gguf", recipe, codes=tmp_path / "d")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()


def test_stacks_of_gpt_oss(tmp_path: Path) -> None:
    """gate and up, which are separate in the file, alternate row by row in one tensor of the directory.

    Converting codes in either direction gives the bytes of a conversion from values.
    """
    stacks(tmp_path / "m", experts_file(tmp_path / "m.gguf", "gpt-oss"), "gpt_oss")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "mxfp4-ocp")
    convert(tmp_path / "m", tmp_path / "q", "mxfp4-ocp", format="gpt-oss")
    convert(tmp_path / "m", tmp_path / "d", "mxfp4-ocp", format="gpt-oss", codes=tmp_path / "q.gguf")
    wanted, found = stored(tmp_path / "q"), stored(tmp_path / "d")
    assert len(found) == 4 and all(found[name].tobytes() == x.tobytes() for name, x in wanted.items())
    convert(tmp_path / "m.gguf", tmp_path / "again.gguf", "mxfp4-ocp", codes=tmp_path / "q")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()


def test_gate_and_up_by_turns_have_one_tensor_scale(tmp_path: Path) -> None:
    stacks(tmp_path / "m", experts_file(tmp_path / "m.gguf", "qwen3moe"), "gpt_oss")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "nvfp4-te")
    with refused(
        "blk.1.ffn_gate_exps: gate and up have separate tensor scales, but this model stores them as one layer"
    ):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="gpt-oss", codes=tmp_path / "q.gguf")


@pytest.mark.parametrize("parent", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("scaled", [True, False])
def test_stacks_of_mlx_lm(scaled: bool, parent: str, tmp_path: Path) -> None:
    """A GGUF file can take the codes of mlx-lm's stacks switch_mlp, which are uint32 of shape [E, N, K/8].

    If there is a global scale, the file's tensor scale is the global scale / 2688.
    """
    tensors, recipe = experts_file(tmp_path / "m.gguf", "llama"), "nvfp4-te" if scaled else "nvfp4-torchao-single"
    found: dict[str, np.ndarray] = {}
    for part in ("gate", "up"):
        name = f"model.layers.1.{parent}.switch_mlp.{part}_proj"
        qs = [fp4kit.quantize(x, recipe) for x in tensors[f"blk.1.ffn_{part}_exps.weight"]]
        found[f"{name}.weight"] = np.stack([q.packed for q in qs]).view(np.uint32)
        found[f"{name}.scales"] = np.stack([q.block_scale for q in qs])
        if scaled:
            found[f"{name}.global_scale"] = np.float32([q.tensor_amax for q in qs])
    synthetic.DTYPE_NAMES.setdefault(np.dtype("u4"), "U32")
    synthetic.write_model(tmp_path / "q", {"model_type": "mixtral", "num_hidden_layers": 2}, found)
    convert(tmp_path / "m.gguf", tmp_path / "out.gguf", recipe, codes=tmp_path / "q")
    for part in ("gate", "up"):
        name = f"blk.1.ffn_{part}_exps"
        qs = [fp4kit.quantize(x, recipe) for x in tensors[f"{name}.weight"]]
        blocks = [pack_gguf(q.packed, q.block_scale, "nvfp4").tobytes() for q in qs]
        assert out_bytes(tmp_path / "out.gguf", f"{name}.weight") == b"".join(blocks)
        if scaled:
            scales = np.float32([q.tensor_amax for q in qs]) / np.float32(2688)
            assert out_bytes(tmp_path / "out.gguf", f"{name}.scale") == scales.tobytes()


def test_stacks_of_model_optimizer(tmp_path: Path) -> None:
    """A GGUF file can take the codes of Llama 4 as Model-Optimizer exports it.

    The stacks are [E, K/2, N], with gate before up. All experts share a tensor scale, and names begin with
    language_model.
    """
    tensors = experts_file(tmp_path / "m.gguf", "llama4")
    both = np.concatenate([tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up")], axis=1)
    name, amax = "language_model.model.layers.1.feed_forward.experts.gate_up_proj", np.float32(np.abs(both).max())
    qs = [fp4kit.quantize(x, "nvfp4-te", tensor_amax=amax) for x in both]
    codes = np.stack([q.packed for q in qs]).swapaxes(1, 2).copy()
    scales = np.stack([q.block_scale for q in qs]).swapaxes(1, 2).copy().view(synthetic.E4M3)
    found = {name: codes, f"{name}_weight_scale": scales, f"{name}_weight_scale_2": qs[0].tensor_scale}
    synthetic.write_model(tmp_path / "q", {"model_type": "llama4", "text_config": {"num_hidden_layers": 2}}, found)
    with refused("blk.1.ffn_gate_exps (and 1 more): llama.cpp 0c1e57098: ignores .scale in llama4 models"):
        make_plan(tmp_path / "m.gguf", "nvfp4-te", codes=tmp_path / "q")
    experts_file(tmp_path / "n.gguf", "llama")
    convert(tmp_path / "n.gguf", tmp_path / "out.gguf", "nvfp4-te", codes=tmp_path / "q")
    for i, part in enumerate(("gate", "up")):
        rows = slice(96 * i, 96 * (i + 1))
        blocks = b"".join(pack_gguf(q.packed[rows], q.block_scale[rows], "nvfp4").tobytes() for q in qs)
        assert out_bytes(tmp_path / "out.gguf", f"blk.1.ffn_{part}_exps.weight") == blocks
        scales = np.full(EXPERTS, qs[0].tensor_scale)
        assert out_bytes(tmp_path / "out.gguf", f"blk.1.ffn_{part}_exps.scale") == scales.tobytes()


def test_a_stack_of_another_number_of_experts_stays(tmp_path: Path) -> None:
    tensors = experts_file(tmp_path / "m.gguf", "qwen3moe")
    short = {name: x[:-1] if "up" in name else x for name, x in tensors.items()}
    stacks(tmp_path / "m", tensors, "qwen3_moe")
    write_turned(tmp_path / "s.gguf", short, {"llama.block_count": 2})
    convert(tmp_path / "s.gguf", tmp_path / "q.gguf", "mxfp4-ocp")
    plan = make_plan(tmp_path / "m", "mxfp4-ocp", format="compressed-tensors", codes=tmp_path / "q.gguf")
    actions = {tensor.name.rpartition(".")[2]: (tensor.action, tensor.reason) for tensor in plan.tensors}
    assert actions["gate_up_proj"] == ("copy", "not quantized in the --codes model")
    assert actions["down_proj"][0] == "rename"


Values = dict[str, tuple[np.ndarray, np.ndarray]]  # weight name -> sums of squares (experts, K), counts (experts,)
NEVER = 2  # the expert that saw no token


def sums_of(shapes: dict[str, tuple[int, ...]]) -> Values:
    """Return {name: (sums, counts)} of an importance matrix with random values, for weights of the given shapes.

    sums is (experts, K) and counts is (experts,). The expert NEVER of each stack has a count of 0.
    """
    rng, found = np.random.default_rng(11), {}
    for name, shape in shapes.items():
        experts = shape[0] if len(shape) == 3 else 1
        counts = rng.integers(5, 400, experts).astype(np.float32)
        if experts > 1:
            counts[NEVER] = 0
        sums = (rng.random((experts, shape[-1])) ** 4).astype(np.float32) * counts[:, None]
        found[name] = sums, counts
    return found


def write_gguf(path: Path, values: Values, kind: str = "imatrix") -> Path:
    tensors = {}
    for name, (sums, counts) in values.items():
        tensors[f"{name}.in_sum2"] = gguf_files.plain(sums)
        tensors[f"{name}.counts"] = gguf_files.plain(counts[:, None])
    gguf_files.write(path, tensors, {"general.type": kind, "imatrix.chunk_count": 4, "imatrix.chunk_size": 512})
    return path


def write_legacy(path: Path, values: Values, calls: int = 7) -> Path:
    """Write an importance matrix in llama.cpp's legacy form. Return its path.

    The form stores mean * calls per column, with a mean of 1 for experts whose count is 0.
    """
    data = struct.pack("<i", len(values))
    for name, (sums, counts) in values.items():
        used = np.where(counts > 0, counts, 1).astype(np.float32)[:, None]
        means = np.where(counts[:, None] > 0, sums / used, 1).astype(np.float32) * np.float32(calls)
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, means.size)
        data += means.astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 4, 5) + b"a.txt")
    return path


def weights_of(values: Values, name: str, expert: int) -> np.ndarray:
    """Return the column weights that llama-quantize computes for one expert: sums / counts, or 1 for a count of 0."""
    sums, counts = values[name]
    return sums[expert] / counts[expert] if counts[expert] > 0 else np.ones_like(sums[expert])


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], Values]:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    shapes = {name: x.shape for name, x in tensors.items() if name.startswith("blk") and x.ndim > 1}
    return tmp_path / "m.gguf", tensors, sums_of({n: s for n, s in shapes.items() if "gate_inp" not in n})


WRITERS: dict[str, Callable[[Path, Values], Path]] = {"gguf": write_gguf, "legacy": write_legacy}


@pytest.mark.parametrize("form", WRITERS)
def test_weights_are_those_of_llama_quantize(form: str, model, tmp_path: Path) -> None:
    source, _, values = model
    found = read_imatrix(WRITERS[form](tmp_path / "i", values))
    plan = make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=tmp_path / "i"))
    pieces = [piece for tensor in plan.converted for piece in tensor.pieces]
    assert {piece.expert for piece in pieces} == set(range(EXPERTS))
    for piece in pieces:
        place = found.of(piece.module, piece.weight, piece.expert)
        wanted = weights_of(values, piece.weight.tensor, piece.expert)
        np.testing.assert_allclose(place.read(), wanted, rtol=0 if form == "gguf" else 3e-7)
    never = [text for text in plan.warnings if "saw no token" in text]
    assert len(never) == 1 and "blk.1.ffn_gate_exps expert 2" in never[0]


@pytest.mark.parametrize("id", half(["nvfp4-gguf", "mxfp4-gguf"]))
def test_each_expert_is_searched_with_its_own_weights(id: str, model, tmp_path: Path) -> None:
    """convert --imatrix searches each expert's scales with the weights that llama-quantize computes for the expert.

    verify needs the imatrix to repeat the search.
    """
    source, tensors, values = model
    path, kind = write_gguf(tmp_path / "i.gguf", values), id.partition("-")[0]
    convert(source, tmp_path / "o.gguf", id, search=ScaleSearch.of("mse", imatrix=path))
    whole = (tmp_path / "o.gguf").read_bytes()
    entries = [entry for entry in read_gguf(tmp_path / "o.gguf").entries if entry.dtype == kind.upper()]
    for entry in entries:
        x = tensors[entry.name]
        raw = b""
        for e, part in enumerate(x if x.ndim == 3 else x[None]):
            q = search_blocks(part, recipe(id), "mse", weights_of(values, entry.name, e).astype(np.float32))
            raw += pack_gguf(q.packed, q.block_scale, kind).tobytes()
        assert whole[entry.start : entry.start + entry.nbytes] == raw
    assert verify(tmp_path / "o.gguf", source, search=ScaleSearch.of("mse", imatrix=path)).clean
    with_option = ["verify", str(tmp_path / "o.gguf"), "--source", str(source), "--imatrix", str(path)]
    assert main(with_option) == 0
    assert any("--imatrix" in issue.text for issue in verify(tmp_path / "o.gguf", source).issues)


def test_separate_experts_of_a_directory_are_searched_with_their_own_weights(tmp_path: Path) -> None:
    """The experts of Mixtral become the parts of a stack of llama.cpp, whose name the importance matrix has."""
    tensors = llama_cpp.directory(tmp_path / "m", "Mixtral")
    leaves = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
    plain = [e for e in read_gguf(convert(tmp_path / "m", tmp_path / "p.gguf").files[0]).entries if e.dtype == "NVFP4"]
    values = sums_of({e.name.removesuffix(".weight"): e.shape for e in plain})
    search = ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i.gguf", values))
    convert(tmp_path / "m", tmp_path / "o.gguf", "nvfp4-gguf", search=search)
    whole, stacks = (tmp_path / "o.gguf").read_bytes(), 0
    for entry in read_gguf(tmp_path / "o.gguf").entries:
        layer, leaf = (*entry.name.split("."), "", "")[1:3]
        if leaf in leaves:
            raw, stacks = b"", stacks + 1
            for e in range(entry.shape[0]):
                x = tensors[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{leaves[leaf]}.weight"]
                weights = weights_of(values, entry.name.removesuffix(".weight"), e).astype(np.float32)
                q = search_blocks(x, recipe("nvfp4-gguf"), "mse", weights)
                raw += pack_gguf(q.packed, q.block_scale, "nvfp4").tobytes()
            assert whole[entry.start : entry.start + entry.nbytes] == raw, entry.name
    assert stacks == 3 * llama_cpp.LAYERS
    assert verify(tmp_path / "o.gguf", tmp_path / "m", search=search).clean


def test_layers_without_weights_get_equal_ones(model, tmp_path: Path) -> None:
    source, _, values = model
    del values["blk.0.attn_q.weight"]
    search = ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", values))
    assert any(
        "has no weights for 1 layers" in text and "blk.0.attn_q" in text
        for text in make_plan(source, "nvfp4-gguf", search=search).warnings
    )
    convert(source, tmp_path / "o.gguf", "nvfp4-gguf", search=search)
    assert verify(tmp_path / "o.gguf", source, search=search).clean


def test_names_of_hugging_face(tmp_path: Path) -> None:
    """Weights of a model directory are found by the gguf package's name map, experts included."""
    pytest.importorskip("gguf")
    assert "blk.3.attn_q" in gguf_names("model.layers.3.self_attn.q_proj")
    assert "blk.12.ffn_down" in gguf_names("model.layers.12.mlp.down_proj")
    assert "blk.0.attn_q" in gguf_names("encoder.layer.0.attention.self.query")
    values = sums_of({"blk.1.ffn_gate_exps.weight": (EXPERTS, 8, HIDDEN), "blk.0.attn_q.weight": (8, HIDDEN)})
    found = read_imatrix(write_gguf(tmp_path / "i", values))
    weight = type("W", (), {"name": "", "tensor": "t", "shape": (8, HIDDEN), "experts": 1})()
    for module, name, expert in (
        ("model.layers.1.mlp.experts.3.gate_proj", "blk.1.ffn_gate_exps.weight", 3),
        ("model.layers.1.block_sparse_moe.experts.1.w1", "blk.1.ffn_gate_exps.weight", 1),
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight", 0),
    ):
        place = found.of(module, weight, 0)
        assert place is not None, module
        np.testing.assert_array_equal(place.read(), weights_of(values, name, expert))


def test_a_model_directory_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tensors = synthetic.bert(tmp_path / "m")
    name = "encoder.layer.0.attention.self.query.weight"
    values = sums_of({"blk.0.attn_q.weight": tensors[name].shape})
    search = ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", values))
    convert(tmp_path / "m", tmp_path / "o", "nvfp4-modelopt-static", search=search)
    assert verify(tmp_path / "o", tmp_path / "m", search=search).clean


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"", "it ends inside its number of entries"),
        (lambda data: struct.pack("<i", 0) + data[4:], "it announces 0 entries"),
        (lambda data: struct.pack("<i", 1 << 30) + data[4:], "it announces 1073741824 entries"),
        (lambda data: data[:4] + struct.pack("<i", -5) + data[8:], "a name has -5 bytes"),
        (lambda data: data[:8] + b"\xff" + data[9:], "a name is not UTF-8"),
        (cut, "values"),
        (lambda data: struct.pack("<i", 2) + data[4:-13] * 2, "occurs twice"),
    ],
)
def test_damaged_legacy_files_are_refused(damage: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    path = write_legacy(tmp_path / "i", sums_of({"blk.0.attn_q.weight": (8, HIDDEN)}))
    read_imatrix(path)
    path.write_bytes(damage(path.read_bytes()))
    with refused(text):
        read_imatrix(path)


@pytest.mark.parametrize(("text", "weighted"), [("mse", False), ("weighted mae", True)])
def test_a_search_that_only_the_config_records(text: str, weighted: bool) -> None:
    search = ScaleSearch(text.removeprefix("weighted "))
    assert recorded_search({}, {"scale_search": text}, None) == (search, weighted, [])
    assert recorded_search({}, {"scale_search": "weighted p0"}, None)[::2] == (
        None,
        ["the checkpoint records an unknown scale search: p0"],
    )


def test_other_files_are_refused(model, tmp_path: Path) -> None:
    source, _, values = model
    with refused("is a GGUF file of another type"):
        read_imatrix(source)
    with refused("is not a file"):
        read_imatrix(tmp_path / "none")
    with refused("is used only by a scale search"):
        ScaleSearch.of(None, imatrix=source)
    with refused("leave the file of column weights out"):
        ScaleSearch.of("mse", source, source)
    for change, text in (
        (lambda s, c: (s[:, :64], c), "has 64 values and 1 counts for blk.0.attn_q.weight; needs 128 values"),
        (lambda s, c: (-s, c), "are negative, NaN or infinite"),
        (lambda s, c: (s, -c), "counts of blk.0.attn_q.weight are invalid"),
    ):
        changed = values | {"blk.0.attn_q.weight": change(*values["blk.0.attn_q.weight"])}
        with refused(text):
            make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", changed)))
    with refused("for none of the layers"):
        other = write_gguf(tmp_path / "i", sums_of({"blk.9.attn_q.weight": (8, 8)}))
        make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=other))
