"""Test msmodelslim's directories: a recorded one (tests/data/imports), and what is refused, kept or named as lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy_formats as numpy
import oracle
import pytest
import synthetic
from file_values import read_values
from synthetic import BF16, E4M3, refused

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

DATA = Path(__file__).parents[2] / "data" / "imports"
RECORDED, DESCRIPTION = DATA / "msmodelslim", "quant_model_description.json"
LAYER = "model.layers.0."
UP, DOWN, VALUE = (f"{LAYER}{name}" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.v_proj"))
CONTAINERS = {
    DOWN: "msmodelslim mxfp4 dual scale",
    f"{LAYER}mlp.gate_proj": "msmodelslim mxfp4",
    UP: "msmodelslim mxfp4 with low rank",
    f"{LAYER}self_attn.k_proj": "msmodelslim mxfp4",
    f"{LAYER}self_attn.q_proj": "msmodelslim mxfp8",
    VALUE: "msmodelslim FP8 per row",
}
Tensors = dict[str, np.ndarray]
Types = dict[str, Any]


def recorded() -> tuple[Tensors, Types]:
    """Return the tensors and the description of the recorded directory, to be changed."""
    return oracle.arrays(oracle.load(RECORDED)), json.loads((RECORDED / DESCRIPTION).read_text())


def written(root: Path, tensors: Tensors, types: Types) -> Path:
    root.mkdir()
    synthetic.write_file(root / "quant_model_weights.safetensors", tensors)
    (root / DESCRIPTION).write_text(json.dumps(types))
    (root / "config.json").write_bytes((RECORDED / "config.json").read_bytes())
    return root


def test_recorded_layers_have_the_values_of_the_tool(tmp_path: Path) -> None:
    """All layers are read, engines find the result by an index, and verify finds nothing but unknown engines."""
    model = inspect_checkpoint(RECORDED)
    assert {name: weight.dtype for name, weight in model.layers.items()} == CONTAINERS
    assert not [item for item in model.items if item.group == "refused"]
    convert(RECORDED, tmp_path / "out", format="bf16")
    have = oracle.load(tmp_path / "out")
    wanted = json.loads((DATA / "msmodelslim_decoded.json").read_text())
    assert {name: hashlib.sha256(have[name][2]).hexdigest() for name in wanted} == wanted
    assert not [name for name in have if "scale" in name or "offset" in name or "svd" in name]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*have}
    assert not (tmp_path / "out" / DESCRIPTION).exists()
    for source in (None, DATA / "msmodelslim_source.safetensors"):
        issues = verify(RECORDED, source).issues
        texts = {issue.text.partition(": ")[0] for issue in issues if issue.severity == "error"}
        assert texts == set()


def test_identify_names_the_recipes_of_the_tool(tmp_path: Path) -> None:
    """Recipes of the specification alone are tried on its files, also where codes were changed afterwards."""
    source = DATA / "msmodelslim_source.safetensors"
    made = {one.name: one.explanation.recipes for one in identify_checkpoint(RECORDED, source).layers}
    assert made[f"{LAYER}self_attn.q_proj"] == ("mxfp8-msmodelslim", "mxfp8-msmodelslim-mse")
    assert all("mxfp4-msmodelslim" in made[f"{LAYER}{name}"] for name in ("self_attn.k_proj", "mlp.gate_proj"))
    assert "mxfp4-msmodelslim" in made[DOWN]
    tensors, types = recorded()
    for name in (f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.q_proj.weight"):
        tensors[name] = tensors[name].copy()
        tensors[name].view(np.uint8)[::2] ^= 1
    changed = identify_checkpoint(written(tmp_path / "changed", tensors, types), source).layers
    causes = {one.name: one.explanation.cause for one in changed if not one.explanation.recipes}
    assert all("codes by another rule" in causes[f"{LAYER}self_attn.{name}"] for name in ("k_proj", "q_proj"))


def test_low_rank_parts_are_added() -> None:
    """A layer of SVD is the sum of its codes and the product of svd_lowrank_l2 and svd_lowrank_l1."""
    tensors, _ = recorded()
    codes = tensors[f"{UP}.weight"]
    values = numpy.E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)].reshape(len(codes), -1, 32)
    scales = np.exp2(tensors[f"{UP}.weight_scale"].astype(np.float32) - 127)
    low, high = (tensors[f"{UP}.svd_lowrank_{part}"].astype(np.float64) for part in ("l1", "l2"))
    wanted = ((values * scales[..., None]).reshape(len(codes), -1) + high @ low).astype(np.float32)
    assert read_values(RECORDED, UP).tobytes() == wanted.tobytes()
    with refused("has a low-rank part"):
        fp4kit.open_checkpoint(RECORDED)[UP]


def dual(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    """Return the parts and the source of a layer of dual-level MXFP4, whose inner level is that of mxfp4-ocp."""
    x = numpy.gaussian(7, rows, columns)
    padded = np.pad(x, ((0, 0), (0, -columns % 512))).reshape(rows, -1, 512)
    outer = (np.abs(padded).max(-1) / np.float32(6)).astype(np.float32)
    q = fp4kit.quantize(x / outer.repeat(512, 1)[:, :columns], "mxfp4-ocp")
    parts = {".weight": q.packed, ".weight_scale": np.asarray(q.block_scale), ".weight_dual_scale": outer[..., None]}
    return {DOWN + end: np.asarray(one) for end, one in parts.items()}, x.astype(BF16)


@pytest.mark.parametrize("columns", [512, 544, 1024, 1472])
def test_dual_levels(columns: int, tmp_path: Path) -> None:
    """A value is value(code) * 2^e * outer scale; open_checkpoint returns both levels, and identify divides by one."""
    parts, x = dual(5, columns)
    types = dict.fromkeys(parts, "W4A4_MXFP4_DUALSCALE") | {f"{DOWN}.bias": "W4A4_MXFP4_DUALSCALE", "group_size": 32}
    root = written(tmp_path / "q", {**parts, f"{DOWN}.bias": np.ones(5, np.float32)}, types)
    codes, scales, outer = parts.values()
    values = numpy.E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(5, -1)]
    factors = np.exp2(scales.astype(np.float32) - 127).repeat(32, 1), outer[..., 0].repeat(512, 1)[:, :columns]
    wanted = values * factors[0] * factors[1]
    assert read_values(root, DOWN).tobytes() == wanted.tobytes()
    q = fp4kit.open_checkpoint(root)[DOWN]
    assert q.recipe.id == "mxfp4-msmodelslim-dual"
    assert np.asarray(q.dequantize(np.float32)).tobytes() == wanted.tobytes()
    synthetic.write_file(tmp_path / "x.safetensors", {f"{DOWN}.weight": x, f"{DOWN}.bias": np.ones(5, np.float32)})
    assert "mxfp4-ocp" in identify_checkpoint(root, tmp_path / "x.safetensors").sentence


def test_outer_scales_in_other_shapes_and_bytes(tmp_path: Path) -> None:
    """Outer scales may lack the last axis of length 1; NaN scale bytes make their blocks NaN, and no others."""
    parts, _ = dual(4, 1024)
    wanted = read_values(written(tmp_path / "a", parts, dict.fromkeys(parts, "W4A4_MXFP4_DUALSCALE")), DOWN)
    parts[f"{DOWN}.weight_dual_scale"] = parts[f"{DOWN}.weight_dual_scale"][..., 0]
    parts[f"{DOWN}.weight_scale"] = parts[f"{DOWN}.weight_scale"].copy()
    parts[f"{DOWN}.weight_scale"][1, 3] = 255
    found = read_values(written(tmp_path / "b", parts, dict.fromkeys(parts, "W4A4_MXFP4_DUALSCALE")), DOWN)
    assert np.isnan(found[1, 96:128]).all()
    wanted[1, 96:128] = found[1, 96:128] = 0
    assert found.tobytes() == wanted.tobytes()


def test_what_concerns_attention_is_left_out_and_named(tmp_path: Path) -> None:
    """Types and scales of the KV cache and of attention are no weights: decoded output has none, and a warning says
    so.
    """
    tensors, types = recorded()
    cache = {f"{LAYER}self_attn.k_proj.kv_cache_{part}": np.ones(32, np.float32) for part in ("scale", "offset")}
    heads = {f"{LAYER}self_attn.fa_q.{part}": np.ones((4, 1), np.float32) for part in ("scale", "offset")}
    types |= dict.fromkeys(cache, "C8") | dict.fromkeys(heads, "FAQuant")
    types |= {"kv_cache_type": "C8", "kv_quant_type": "C8", "fa_quant_type": "FAKQuant", "version": "1.0.0"}
    types |= {f"{LAYER}self_attn.quant_type": "FP8_DYNAMIC", "optional": {"quarot": {"rotation_map": {"a": "b"}}}}
    root = written(tmp_path / "q", {**tensors, **cache, **heads}, types)
    plan = make_plan(root, format="bf16")
    assert any("quantized KV cache of the source and its 4 scales are left out" in text for text in plan.warnings)
    lost = "quantized attention or communication is lost: no output declares"
    assert any(lost in text and '"FAKQuant"' in text and '"FP8_DYNAMIC"' in text for text in plan.warnings)
    convert(root, tmp_path / "out", format="bf16")
    assert not {*cache, *heads} & {*oracle.load(tmp_path / "out")}
    issues = verify(root, DATA / "msmodelslim_source.safetensors").issues
    assert not [issue for issue in issues if issue.severity == "error"]


def _int8(tensors: Tensors, types: Types) -> None:
    tensors[f"{VALUE}.weight"] = tensors[f"{VALUE}.weight"].view(np.int8)
    types |= {name: "W8A8_DYNAMIC" for name in types if name.startswith(f"{VALUE}.weight")}


def _static(tensors: Tensors, types: Types) -> None:
    _int8(tensors, types)
    for part in ("weight_scale", "weight_offset"):
        del tensors[f"{VALUE}.{part}"]
    tensors |= {f"{VALUE}.deq_scale": np.ones(32, np.float32), f"{VALUE}.quant_bias": np.ones(32, np.int32)}


def _typed(kind: str, *modules: str) -> Callable[[Tensors, Types], None]:
    def change(tensors: Tensors, types: Types) -> None:
        types |= {name: kind for name in types if name.rpartition(".")[0] in modules and "bias" not in name}

    return change


def _extra(name: str, x: np.ndarray, kind: str = "FLOAT") -> Callable[[Tensors, Types], None]:
    def change(tensors: Tensors, types: Types) -> None:
        tensors[name], types[name] = x, kind

    return change


def _without(name: str) -> Callable[[Tensors, Types], None]:
    return lambda tensors, types: tensors.__delitem__(name)


def _described(**entries: Any) -> Callable[[Tensors, Types], None]:
    return lambda tensors, types: types.update(entries)


def _shaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors, Types], None]:
    def change(tensors: Tensors, types: Types) -> None:
        tensors[name] = np.resize(tensors[name], shape)

    return change


EYE = np.eye(32, dtype=np.float32)
# what is wrong -> (change, what the message says)
REFUSED: dict[str, tuple[Callable[[Tensors, Types], None], str]] = {
    "int8": (_int8, f"{VALUE}.weight (I8 [32, 32])"),
    "int8, its format": (_int8, "(integers of msmodelslim)"),
    "int8, its type": (_int8, 'is "W8A8_DYNAMIC", a type of weights that fp4kit does not read'),
    "static int8": (_static, "(integers of msmodelslim)"),
    "unknown type of MX layers": (_typed("W2A2_MXFP4", UP), f'is "W2A2_MXFP4", but the tensors of {UP} are'),
    "unknown type of float layers": (_typed("W16A16S", f"{LAYER}self_attn.o_proj"), "a type of weights that fp4kit"),
    "FlatQuant, its type": (_typed("W4A4_MXFP4_FLATQUANT", f"{LAYER}mlp.gate_proj"), '"W4A4_MXFP4_FLATQUANT"'),
    "FlatQuant, its matrices": (_extra(f"{LAYER}mlp.gate_proj.left_trans", EYE), "transforms the inputs of the layer"),
    "smoothing of inputs": (_extra(f"{LAYER}mlp.fc.div.mul_scale", EYE[0]), "may transform weights or the inputs"),
    "online rotation": (_extra(f"{LAYER}self_attn.heads_rotation", EYE), "may transform weights or the inputs"),
    "declared rotation": (_described(metadata={"quarot": {"max_tp_size": 4}}), "rotations of the inputs of layers"),
    "unknown entry": (_described(scheme={"bits": 4}), 'scheme: is {"bits": 4}, which fp4kit does not know'),
    "unknown text": (_described(algorithm="new"), 'algorithm: is "new", which fp4kit does not know'),
    "another group_size": (_described(group_size=64), "group_size: is 64, but the tensors have"),
    "type of another kind": (_typed("W8A8_MXFP8", DOWN), "but the tensors of model.layers.0.mlp.down_proj are"),
    "dual scale that is not declared": (_typed("W4A4_MXFP4", DOWN), 'is "W4A4_MXFP4", but the tensors'),
    "no dual scale": (_without(f"{DOWN}.weight_dual_scale"), "DUALSCALE"),
    "dual scales of a wrong shape": (_shaped(f"{DOWN}.weight_dual_scale", (8, 3, 1)), "weight_dual_scale"),
    "no block scales": (_without(f"{LAYER}mlp.gate_proj.weight_scale"), f"{LAYER}mlp.gate_proj.weight (U8 [64, 16])"),
    "block scales of a wrong shape": (_shaped(f"{LAYER}mlp.gate_proj.weight_scale", (64, 2)), "needs U8 [64, 1]"),
    "no scales of rows": (_without(f"{VALUE}.weight_scale"), f"{VALUE}.weight"),
    "low-rank part of a wrong shape": (_shaped(f"{UP}.svd_lowrank_l1", (3, 32)), "svd_lowrank_l1"),
    "offsets": (_extra(f"{VALUE}.weight_offset", np.ones((32, 1), np.float32), "WFP8AFP8_DYNAMIC"), "offsets, not all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    change, text = REFUSED[name]
    tensors, types = recorded()
    change(tensors, types)
    root = written(tmp_path / "q", tensors, types)
    for format in ("bf16", None):
        with refused(text):
            make_plan(root, format=format)
    assert any(issue.severity == "error" for issue in verify(root).issues)


def test_integers_alone(tmp_path: Path) -> None:
    """A model without any MX or FP8 layer is refused by name too, and a description without tensors is an error."""
    weight = {f"{VALUE}.weight": np.ones((32, 32), np.int8), f"{VALUE}.weight_scale": np.ones((32, 1), np.float32)}
    types = dict.fromkeys(weight, "W8A8_DYNAMIC") | {"model_quant_type": "W8A8_DYNAMIC"}
    with refused("in a format that fp4kit does not read in models"):
        make_plan(written(tmp_path / "a", weight, types), format="bf16")
    plain = {"a.weight": np.ones((32, 32), BF16)}
    with refused(f"{DESCRIPTION}: describes quantized weights, but no tensor is quantized"):
        make_plan(written(tmp_path / "b", plain, {"a.weight": "FLOAT"}), "nvfp4-te")


def test_truncated_weights(tmp_path: Path) -> None:
    root = written(tmp_path / "q", *recorded())
    path = root / "quant_model_weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with refused("quant_model_weights.safetensors: not a usable safetensors file"):
        make_plan(root, format="bf16")


def test_zero_rows_and_bits_of_fp8(tmp_path: Path) -> None:
    """Every E4M3 code decodes to its value times the scale of its row, in float32."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32).view(E4M3)
    scales = np.array([[1], [0.3], [0], [1e-3], [7], [1e-38], [3e4], [-0.0]], np.float32)
    parts = {".weight": codes, ".weight_scale": scales, ".weight_offset": np.zeros((8, 1), np.float32)}
    tensors = {VALUE + end: one for end, one in parts.items()}
    root = written(tmp_path / "q", tensors, dict.fromkeys(tensors, "WFP8AFP8_DYNAMIC"))
    with np.errstate(all="ignore"):
        wanted = codes.astype(np.float32) * scales
    found = read_values(root, VALUE)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)) or np.array_equal(
        found, wanted, equal_nan=True
    )
    assert np.array_equal(np.signbit(found), np.signbit(wanted)) and found.dtype == ml_dtypes.finfo(np.float32).dtype
