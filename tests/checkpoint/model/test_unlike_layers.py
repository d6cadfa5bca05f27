"""Test warnings about layers that lack a tensor or have another dtype than the other layers of their kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import synthetic

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.unlike_layers import declares_mixture, role_of
from fp4kit.checkpoint.model.weights import located
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.storage.files import CheckpointError

BF16 = ml_dtypes.bfloat16
CONFIG = {"model_type": "llama", "hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}}
NAMES = [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]


def model() -> synthetic.Tensors:
    """Return three FP8 layers of one kind with biases and input scales, as compressed-tensors stores them."""
    found: synthetic.Tensors = {}
    for name in NAMES:
        found[f"{name}.weight"] = synthetic.random(name, (64, 64), 100.0, np.dtype(ml_dtypes.float8_e4m3fn))
        found[f"{name}.bias"] = np.zeros(64, BF16)
        for scale in ("weight_scale", "input_scale"):
            found[f"{name}.{scale}"] = np.array([0.001], np.float32)
    return found


def drop(part: str, *names: str) -> Callable[[synthetic.Tensors], None]:
    def change(tensors: synthetic.Tensors) -> None:
        for name in names:
            del tensors[f"{name}.{part}"]

    return change


def cast(tensors: synthetic.Tensors) -> None:
    name = f"{NAMES[2]}.weight_scale"
    tensors[name] = tensors[name].astype(BF16)


def half(tensors: synthetic.Tensors) -> None:
    name = f"{NAMES[2]}.bias"
    tensors[name] = tensors[name].view(np.float16)


def matrix(tensors: synthetic.Tensors) -> None:
    tensors[f"{NAMES[0]}.bias"] = np.zeros((64, 1), BF16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict, None),
        (drop("bias", *NAMES), None),
        (drop("bias", NAMES[1]), f"{NAMES[1]}: no bias, but 2 of 3 layers of this kind have one"),
        (drop("input_scale", *NAMES[:2]), f"{NAMES[2]}: has input_scale, but 2 of 3 layers of this kind have none"),
        (cast, f"{NAMES[2]}: tensor scale in BF16, but in F32 in 2 of 3 layers of this format"),
        (half, f"{NAMES[2]}: bias in F16, but in BF16 in 2 of 3 layers of this format"),
        (matrix, f"{NAMES[0]} [64, 64]: has 64 rows, but its bias is BF16 [64, 1]"),
    ],
)
def test_layers_that_differ_from_their_kind(
    change: Callable[[synthetic.Tensors], object], text: str | None, tmp_path: Path
) -> None:
    tensors = model()
    change(tensors)
    synthetic.write_model(tmp_path / "m", CONFIG, tensors)
    warnings = make_plan(tmp_path / "m", format="bf16").warnings
    assert [warning[: len(text or "")] for warning in warnings] == ([text] if text else [])
    issues = [issue for issue in verify(tmp_path / "m").issues if issue.text in warnings]
    assert [issue.severity for issue in issues] == ["warning"] * len(warnings)


# Every container: each part of one layer among its peers is dropped, or one more part is added to it ----------------

PEERS = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.down_proj" for i in range(2) for e in range(2)]
# (recipe, format, whether layers get input scales)
WRITTEN = [
    ("nvfp4-modelopt", "modelopt", True),
    ("nvfp4-compressed-tensors", "compressed-tensors", True),
    ("mxfp4", "compressed-tensors", False),
    ("mxfp8-te", "modelopt", False),
    ("mxfp8-te", "sglang-mxfp8", False),
    ("fp8-transformers-block", "fp8", False),
    ("fp8-modelopt-channel", "modelopt", False),
    ("fp8-modelopt", "compressed-tensors", False),
    ("nvfp4-mlx-cpu", "mlx", False),
    ("nvfp4-comfy-kitchen", "comfy", False),
]


def tensors_in(root: Path) -> synthetic.Tensors:
    """Return the tensors of a model directory, {name: array}."""
    types = {"F8_E4M3": synthetic.E4M3, "F8_E8M0": synthetic.E8M0}
    found = {}
    with Readers() as readers:
        for name, (file, entry) in inspect_checkpoint(root).tensors.items():
            x = readers.array(located(file, entry))
            found[name] = x.view(types[entry.dtype]) if entry.dtype in types else x
    return found


@pytest.fixture(scope="module", params=WRITTEN, ids=lambda case: f"{case[0]}-{case[1]}")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, synthetic.Tensors]:
    """Convert layers with peers, dense ones and experts, to one container. Return the directory and its tensors."""
    root = tmp_path_factory.mktemp("peers")
    recipe, form, scaled = request.param
    shape = (128, 128)
    tensors = {f"{name}.weight": synthetic.random(name, shape) for name in (*PEERS, *EXPERTS)}
    for name in PEERS:
        tensors[f"{name}.bias"] = synthetic.random(name, shape[:1])
    synthetic.write_model(root / "m", {"model_type": "llama"}, tensors)
    convert(root / "m", root / "q", recipe, format=form, input_scale=0.5 if scaled else None)
    return root / "q", tensors_in(root / "q")


def copied(written: tuple[Path, synthetic.Tensors], root: Path, tensors: synthetic.Tensors) -> Path:
    """Write changed tensors with the configs of a converted model; return the directory."""
    for path in root.glob("*"):
        path.unlink()
    root.mkdir(exist_ok=True)
    for path in written[0].glob("*.json"):
        if path.name in ("config.json", "hf_quant_config.json"):
            shutil.copy(path, root / path.name)
    synthetic.write_file(root / "model.safetensors", tensors)
    return root


def said(root: Path) -> tuple[str, str]:
    """Return what verify and make_plan say about a checkpoint, as two texts."""
    checked = " ".join(issue.subject + " " + issue.text for issue in verify(root).issues)
    try:
        planned = " ".join(make_plan(root, format="bf16").warnings)
    except CheckpointError as error:
        planned = str(error)
    return checked, planned


def test_every_part_of_every_container_is_compared_with_the_peers(
    written: tuple[Path, synthetic.Tensors], tmp_path: Path
) -> None:
    tensors = written[1]
    for odd in (PEERS[1], EXPERTS[2]):
        for part in [name for name in tensors if name.startswith(f"{odd}.")]:
            if part.endswith((".weight", ".weight_packed", ".comfy_quant")):
                continue  # without codes there is no layer
            less = {name: x for name, x in tensors.items() if name != part}
            for text in said(copied(written, tmp_path / "less", less)):
                assert odd in text, (part, text)
    # one part more than the peers; what the container does not know is refused by name
    for leaf in ("bias", "input_scale", "pre_quant_scale", "weight_zero_point"):
        odd = EXPERTS[1] if f"{EXPERTS[1]}.{leaf}" not in tensors else ""
        if odd:
            more = {**tensors, f"{odd}.{leaf}": np.ones(() if leaf == "input_scale" else 128, np.float32)}
            for text in said(copied(written, tmp_path / "more", more)):
                assert odd in text, (leaf, text)


def test_one_peer_in_another_container(written: tuple[Path, synthetic.Tensors], tmp_path: Path) -> None:
    """A peer that is FP8 or unquantized is named, unless the config declares a mixture."""
    tensors = written[1]
    form = inspect_checkpoint(written[0]).layers[PEERS[0]].container
    assert form is not None
    if form.producer in ("comfy-kitchen", "mlx"):
        pytest.skip("the file states the format of each tensor, or the config that of each layer")
    kept = {name: x for name, x in tensors.items() if not name.startswith((f"{PEERS[1]}.w", f"{PEERS[1]}.input"))}
    plain = {**kept, f"{PEERS[1]}.weight": synthetic.random(PEERS[1], (128, 128))}
    assert PEERS[1] in said(copied(written, tmp_path / "plain", plain))[0]
    if form.kind == "fp8 tensor":
        return
    codes = synthetic.random(PEERS[1], (128, 128), 100.0, synthetic.E4M3)
    other = {**kept, f"{PEERS[1]}.weight": codes, f"{PEERS[1]}.weight_scale": np.float32(0.001).reshape(())}
    for text in said(copied(written, tmp_path / "other", other)):
        assert PEERS[1] in text


def test_declared_mixtures_are_no_fault(tmp_path: Path) -> None:
    """Peers in two containers, as --recipe PATTERN=ID writes them, give no warning about their kind."""
    tensors = {f"{name}.weight": synthetic.random(name, (128, 128)) for name in PEERS}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    for form in ("modelopt", "compressed-tensors"):
        recipes = [("*.1.mlp.down_proj", "fp8-modelopt-channel")]
        convert(tmp_path / "m", tmp_path / form, "nvfp4-te", format=form, recipes=recipes)
        assert len(verify(tmp_path / form).formats) == 2
        assert not [text for text in said(tmp_path / form) if "of this kind" in text]
    config = {"quantization_config": {"config_groups": {"a": {}, "b": {}}}}
    assert declares_mixture(config) and declares_mixture({"text_config": config})
    assert declares_mixture({"quantization": {"group_size": 16, "model.layers.0.mlp.down_proj": {"bits": 8}}})
    assert not declares_mixture({"quantization_config": {"config_groups": {"a": {}}, "layer_quant_config": {}}})


def test_roles() -> None:
    names = ("model.layers.3.mlp.experts.7.w1", "double_blocks.11.img_mlp.2", "blk.0.attn_q", "0.conv1")
    roles = ["model.layers.*.mlp.experts.*.w1", "double_blocks.*.img_mlp.2", "blk.*.attn_q", "*.conv1"]
    assert [role_of(name) for name in names] == roles
