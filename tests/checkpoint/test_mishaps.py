"""Test reports of users of other tools as small checkpoints, and checkpoints in which one thing is changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import strange_files
import synthetic
from exhaustive import exhaustive, half
from numpy_formats import fp8, nvfp4
from synthetic import BF16, E4M3, E8M0, refused

import fp4kit
from fp4kit.__main__ import main
from fp4kit.calibration import Collector
from fp4kit.checkpoint import CheckpointError, execute, make_plan
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.delta import open_patch
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import MANIFEST, open_source
from fp4kit.checkpoint.plan.other_models import LoraAdapter
from fp4kit.checkpoint.plan.scale_search import ScaleSearch, read_imatrix
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.training.amax_state import AmaxState

CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
CONFIG |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SHAPES = {f"{ATTENTION}.{n}_proj": (128, 128) for n in "qkvo"}
SHAPES |= {f"{MLP}.gate_proj": (256, 128), f"{MLP}.up_proj": (256, 128), f"{MLP}.down_proj": (128, 256)}
DOWN = f"{MLP}.down_proj"
Tensors = dict[str, np.ndarray]
Edit = Callable[[Tensors], Tensors]


def llama() -> Tensors:
    found = {f"{n}.weight": synthetic.random(n, (64, 128)) for n in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = np.ones(128, BF16)
    return found | {f"{name}.weight": synthetic.random(name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "m"
    synthetic.write_model(root, CONFIG, llama())
    return root


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return {recipe: the source, quantized by it for the producer that its id names}."""
    root = tmp_path_factory.mktemp("written")
    for recipe, format in (
        ("nvfp4-modelopt", "modelopt"),
        ("mxfp4-compressed-tensors", "compressed-tensors"),
        ("mxfp8-modelopt", "modelopt"),
        ("nvfp4-compressed-tensors", "compressed-tensors"),
    ):
        scales = {"input_scale": 0.01} if recipe == "nvfp4-modelopt" else {}
        convert(source, root / recipe, recipe, format=format, **scales)
    return {path.name: path for path in root.iterdir()}


def edited(path: Path, out: Path, edit: Edit, quantization: dict[str, Any] | None = None) -> Path:
    """Write a copy of a model whose tensors are edit(tensors), without what fp4kit records about itself."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].pop("fp4kit", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    found = {name: np.asarray(array) for name, array in edit(oracle.arrays(oracle.load(path))).items()}
    synthetic.write_model(out, config, found)
    return out


def replaced(name: str, new: Callable[[np.ndarray], Any]) -> Edit:
    return lambda tensors: tensors | {name: np.asarray(new(tensors[name]))}


REFUSED: list[tuple[str, Edit, str]] = [  # (kind, how the NVFP4 checkpoint is damaged, key phrase of convert)
    ("scale 0", replaced(f"{DOWN}.weight_scale_2", np.zeros_like), "tensor scale is 0.0, which makes all values 0"),
    ("scale -1", replaced(f"{DOWN}.weight_scale_2", lambda a: -np.ones_like(a)), "tensor scale is -1.0"),
    ("input scale 0", replaced(f"{DOWN}.input_scale", np.zeros_like), "input scale is 0.0; a positive normal float32"),
    (
        "no input scale",
        lambda tensors: {name: a for name, a in tensors.items() if name != f"{DOWN}.input_scale"},
        "down_proj.weight: has no input scale, but 6 of 7 layers have one",
    ),
]


@pytest.mark.parametrize(("edit", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_damaged_scales_are_refused_by_name(edit: Edit, text: str, written: dict[str, Path], tmp_path: Path) -> None:
    bad = edited(written["nvfp4-modelopt"], tmp_path / "bad", edit)
    with refused(text):
        convert(bad, tmp_path / "out", format="modelopt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "suffix", "dtype"),
    [
        ("mxfp4-compressed-tensors", "weight_scale", E8M0),
        ("mxfp8-modelopt", "weight_scale", E8M0),
        ("nvfp4-modelopt", "weight_scale", np.uint8),
    ],
)
def test_equal_bytes_under_another_dtype_are_read(
    recipe: str, suffix: str, dtype: Any, written: dict[str, Path], tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {name: a.view(dtype) if name.endswith(suffix) else a for name, a in tensors.items()}

    convert(edited(written[recipe], tmp_path / "in", edit), tmp_path / "out", format="bf16")
    convert(written[recipe], tmp_path / "usual", format="bf16")
    assert oracle.load(tmp_path / "out") == oracle.load(tmp_path / "usual")


def decoded(path: Path, out: Path) -> Tensors:
    convert(path, out, format="bf16")
    return oracle.arrays(oracle.load(out))


def coded(kind: Callable[..., Any]) -> tuple[Tensors, Tensors]:
    """Return (the tensors of the model, parts of quantized layers under their suffixes; the values of these layers)."""
    tensors, values = {name: a for name, a in llama().items() if "proj" not in name}, {}
    for name in SHAPES:
        parts, values[f"{name}.weight"] = kind(name, llama()[f"{name}.weight"].astype(np.float32))
        tensors |= {f"{name}.{suffix}": np.asarray(a) for suffix, a in parts.items()}
    return tensors, values


def awq(name: str, x: np.ndarray) -> tuple[Tensors, np.ndarray]:
    factors = np.exp2(np.arange(x.shape[1]) % 3 - 1).astype(BF16)
    made = nvfp4(x / factors.astype(np.float32))
    parts = {"weight": made.codes, "weight_scale": made.scales, "weight_scale_2": made.tensor_scale}
    more = {"pre_quant_scale": factors, "input_scale": np.float32(0.01)}
    return {**parts, **more}, made.values * factors.astype(np.float32)


def fp8_blocks(name: str, x: np.ndarray) -> tuple[Tensors, np.ndarray]:
    made = fp8(x, (128, 128))
    scales = made.scales.astype(BF16)  # as Qwen3-FP8 stores them
    spread = scales.astype(np.float32).repeat(128, 0).repeat(128, 1)
    return {"weight": made.codes, "weight_scale_inv": scales}, made.codes.astype(np.float32) * spread


def per_row_and_nvfp4(name: str, x: np.ndarray) -> tuple[Tensors, np.ndarray]:
    if "mlp" in name:
        made = nvfp4(x)
        divisor = np.float32([1]) / np.asarray(made.tensor_scale)
        values = (made.values / np.asarray(made.tensor_scale)) / divisor
        return {"weight_packed": made.codes, "weight_scale": made.scales, "weight_global_scale": divisor}, values
    scales = (np.abs(x).max(1, keepdims=True) / 448).astype(BF16)
    codes = (x / scales.astype(np.float32)).astype(E4M3)
    values = (codes.astype(np.float32) * scales.astype(np.float32)).astype(BF16)
    return {"weight": codes, "weight_scale": scales}, values


FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
EIGHT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
            "weights": EIGHT,
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
        },
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": [r"re:.*mlp\.(gate|up|down)_proj$"],
            "weights": {**FOUR, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"},
            "input_activations": None,
        },
    },
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8["modules_to_not_convert"] = ["lm_head"]
SOUND = [  # (kind, how layers are stored, quantization_config)
    ("awq", awq, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16, "ignore": ["lm_head"]}),
    ("bf16 scales", fp8_blocks, FP8),
    ("mixed", per_row_and_nvfp4, MIXED),
]


@pytest.mark.parametrize(("kind", "quantization"), [case[1:] for case in SOUND], ids=[case[0] for case in SOUND])
def test_sound_files_decode_to_their_values(kind: Any, quantization: dict[str, Any], tmp_path: Path) -> None:
    tensors, values = coded(kind)
    synthetic.write_model(tmp_path / "m", {**CONFIG, "quantization_config": quantization}, tensors)
    assert main(["verify", str(tmp_path / "m")]) == 0
    found = decoded(tmp_path / "m", tmp_path / "out")
    assert not [name for name in found if not name.endswith(".weight")]
    for name, x in values.items():
        assert np.array_equal(found[name], x.astype(BF16)), name


def test_awq_is_refused_where_its_factors_have_no_place(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {**CONFIG, "quantization_config": SOUND[0][2]}, coded(awq)[0])
    with refused("quantizing it as compressed-tensors nvfp4-pack-quantized would change its values"):
        convert(tmp_path / "m", tmp_path / "out", format="compressed-tensors")


def test_single_files_are_taken(tmp_path: Path, capsys: Any) -> None:
    made = nvfp4(llama()[f"{DOWN}.weight"].astype(np.float32))
    parts = {"weight": made.codes, "weight_scale": made.scales, "weight_scale_2": made.tensor_scale}
    synthetic.write_file(tmp_path / "a.safetensors", {f"blocks.0.down.{s}": np.asarray(a) for s, a in parts.items()})
    assert main(["verify", str(tmp_path / "a.safetensors")]) == 0
    printed = capsys.readouterr().out
    assert "is one file without config.json, so what engines make of it was not checked" in printed
    assert "tensor parallel" not in printed
    found = decoded(tmp_path / "a.safetensors", tmp_path / "out")
    assert np.array_equal(found["blocks.0.down.weight"], made.values.astype(BF16))


FORMATS = ("bf16", "compressed-tensors", "modelopt")
SLIGHT = ("by 2", "by 0.5", "by 2^1", "to BF16", "to F16")  # changes that only the source shows
# Numbers of files per sound checkpoint. With ALL, each kind of change is converted to each format.
FEW, ALL = 3, len(strange_files.CHANGES) * len(FORMATS)


def converted(root: Path, form: str) -> tuple[oracle.Loaded, set[str]]:
    """Convert a checkpoint, decode the result, and return its tensors and the warnings of the conversion."""
    out, decoded = root.with_name(f"{root.name} out"), root.with_name(f"{root.name} decoded")
    for path in (out, decoded):
        shutil.rmtree(path, ignore_errors=True)
    plan = make_plan(root, format=form)
    report = execute(plan, out)
    if form != "bf16":
        execute(make_plan(out, format="bf16"), decoded)
    return oracle.load(out if form == "bf16" else decoded), {*plan.warnings, *report.doubts}


def differing(found: oracle.Loaded, right: oracle.Loaded, changed: strange_files.Files) -> list[str]:
    """Return the tensors with other values, and the layers that are gone although their tensors are there."""
    gone = [name for name in right if name not in found and name in changed.tensors]
    return gone + [name for name in right if name in found and found[name] != right[name]]


def issues(root: Path, source: Path | None = None) -> set[tuple[str, str, str]]:
    """Return what verify says about a checkpoint."""
    try:
        return {(issue.severity, issue.subject, issue.text) for issue in verify(root, source).issues}
    except CheckpointError as error:
        return {("error", "refused", str(error))}


@pytest.mark.parametrize("seeds", [range(FEW), *exhaustive([range(FEW, ALL)])], ids=["few", "all"])
@pytest.mark.parametrize("name", half(strange_files.SOUND))
def test_no_silent_value(tmp_path: Path, name: str, seeds: range) -> None:
    files = strange_files.sound(name, tmp_path)
    sound, root = tmp_path / "sound", tmp_path / "strange"
    source = strange_files.source_of(name, tmp_path) if name in strange_files.CONVERTED else None
    files.write(sound)
    usual: dict[str, tuple[oracle.Loaded, set[str]]] = {}
    known, silent = {True: issues(sound, source), False: issues(sound)}, []
    for seed in seeds:
        changed, what = strange_files.strange(files, seed)
        form = FORMATS[seed // len(strange_files.CHANGES) % len(FORMATS)]
        if form not in usual:
            try:
                usual[form] = converted(sound, form)
            except CheckpointError:  # a format that cannot hold this checkpoint
                form = "bf16"
                usual.setdefault(form, converted(sound, form))
        right, warnings = usual[form]
        shutil.rmtree(root, ignore_errors=True)
        changed.write(root)
        try:
            found, said = converted(root, form)
        except CheckpointError:
            continue
        wrong = differing(found, right, changed)
        if wrong and not said - warnings and not what.endswith(SLIGHT):
            silent.append(f"{seed} to {form}: {what}: {wrong[:3]}")
        errors = {i for i in issues(root, source) - known[True] if i[0] == "error"} if wrong and source else set()
        if wrong and source and "cast" not in what and not errors:
            silent.append(f"{seed} verified with the source: {what}: {wrong[:3]}")
        if wrong and not issues(root) - known[False] and not what.endswith(SLIGHT):
            silent.append(f"{seed} verified alone: {what}: {wrong[:3]}")
    assert not silent, "\n".join(silent)


IN_MODEL = "model.safetensors", "model.safetensors.index.json", "config.json", "hf_quant_config.json", MANIFEST
LOADERS: dict[str, Callable[[Path], Any]] = {
    "contract.json": fp4kit.Contract.load,
    "saved.safetensors": fp4kit.load,
    "patch.safetensors": open_patch,
    "imatrix.gguf": read_imatrix,
    "weights.safetensors": lambda path: ScaleSearch.of("mse", path, None),
    "adapter_config.json": lambda path: LoraAdapter.of(path.parent),
    "amax.safetensors": AmaxState.load,
    "totals.safetensors": Collector.load,
}


@pytest.mark.parametrize("name", [*IN_MODEL, "one.safetensors", "one.gguf", "one.onnx", *LOADERS])
def test_errors_about_a_file_name_its_path_as_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of two models have equal names, so that a name without its directory does not say which is damaged."""
    monkeypatch.chdir(tmp_path)
    root = Path("a")  # also a word of messages
    synthetic.write_model(root, CONFIG, llama())
    (root / "adapter_model.safetensors").touch()
    (root / name).write_bytes(b"GGUF" if name.endswith("gguf") else b"{")
    openers = (
        [LOADERS[name]] if name in LOADERS else [verify] if name == MANIFEST else [open_source, inspect_checkpoint]
    )
    for opener in openers:
        with pytest.raises(CheckpointError, match=rf"^(load: |imatrix )?a/{re.escape(name)}: "):
            opener(root if name in IN_MODEL else root / name)
