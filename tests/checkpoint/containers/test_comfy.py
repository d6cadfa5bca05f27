"""Test files of ComfyUI: how they are written, how they are read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import Rules, convert, make_plan
from fp4kit.checkpoint.verify.reconcile import reconcile
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.safetensors_file import read_header

NAME = "model.diffusion_model.blocks.0.qkv"
# The scales (224, 160 / 16) do not fill their tiles of 128 x 4: 224 rows need 2 tiles, and 10 columns need 3.
SHAPE = (224, 160)


def model(root: Path, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Write a model with the linear layer NAME and a norm to the directory `root`. Return the layer's weight."""
    x = synthetic.random(NAME, shape) * np.exp2(np.arange(shape[0]) % 5)[:, None]
    x = x.astype(synthetic.BF16)
    synthetic.write_model(
        root, {"model_type": "flux"}, {f"{NAME}.weight": x, "norm.weight": np.ones(160, synthetic.BF16)}
    )
    return x


def blocked(scales: np.ndarray) -> bytes:
    """Return scale bytes (rows, blocks) in cuBLAS's tiles of 128 x 4, by the formula in cuBLAS's documentation."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    found = bytearray(high * wide * 512)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * wide + c // 4
            found[tile * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4] = scales[r, c]
    return bytes(found)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp8-te", "nvfp4-comfy-kitchen", "mxfp8-comfy-kitchen"])
def test_bytes_are_those_of_quantize_in_the_order_of_comfyui(recipe: str, tmp_path: Path) -> None:
    x = model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="comfy")
    have, q = oracle.load(tmp_path / "out"), fp4kit.quantize(x, recipe)
    codes = np.asarray(q.packed)
    wanted = (codes << 4 | codes >> 4) if recipe.startswith("nvfp4") else codes
    scales = blocked(np.asarray(q.block_scale))
    dtype = "F8_E4M3" if recipe.startswith("nvfp4") else "U8"
    assert have[f"{NAME}.weight"][1:] == (wanted.shape, wanted.tobytes())
    assert have[f"{NAME}.weight_scale"] == (dtype, (256, len(scales) // 256), scales)
    tag = json.loads(have[f"{NAME}.comfy_quant"][2])
    assert tag == {"format": recipe.partition("-")[0], "orig_shape": list(SHAPE)}
    if recipe.startswith("nvfp4"):
        assert have[f"{NAME}.weight_scale_2"] == ("F32", (), np.float32(q.tensor_scale).tobytes())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt", "mxfp8-modelopt"])
def test_codes_move_to_other_containers_and_back(recipe: str, tmp_path: Path) -> None:
    model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", recipe, format="comfy")
    assert verify(tmp_path / "a", tmp_path / "m").clean
    convert(tmp_path / "m", tmp_path / "b", recipe, format="modelopt")
    convert(tmp_path / "a", tmp_path / "c", recipe, format="modelopt")
    assert oracle.load(tmp_path / "b") == oracle.load(tmp_path / "c")
    convert(tmp_path / "b", tmp_path / "d", recipe, format="comfy")
    assert oracle.load(tmp_path / "a") == oracle.load(tmp_path / "d")
    for name in "bd":
        convert(tmp_path / name, tmp_path / f"{name}16", format="bf16")
    assert oracle.load(tmp_path / "b16") == oracle.load(tmp_path / "d16")


def changed(root: Path, tag: object, metadata: dict[str, str] | None = None) -> Path:
    """Write a ComfyUI model whose tag is replaced by `tag`, and return its path.

    The tag is the layer's `.comfy_quant` tensor. A `tag` of type str is stored as it is, any other value as JSON; None
    leaves the tensor out. `metadata` is stored in the header of the safetensors file.
    """
    model(root / "m")
    convert(root / "m", root / "a", "nvfp4-te", format="comfy")
    tensors = oracle.arrays(oracle.load(root / "a"))
    del tensors[f"{NAME}.comfy_quant"]
    if tag is not None:
        text = tag if isinstance(tag, str) else json.dumps(tag)
        tensors[f"{NAME}.comfy_quant"] = np.frombuffer(text.encode(), np.uint8)
    (root / "b").mkdir()
    synthetic.write_file(root / "b" / "model.safetensors", tensors, metadata)
    (root / "b" / "config.json").write_text("{}")
    return root / "b"


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({"format": "nvfp4"}, "files with this tag exist in two orders of nibbles"),
        ({"format": "nvfp4", "orig_shape": [200, 160]}, "padded layers are not supported"),
        ({"format": "nvfp4", "orig_shape": 5}, "declares the shape 5, but the tensors hold"),
        ({"format": "mxfp8", "orig_shape": list(SHAPE)}, "declares mxfp8, but the tensors are comfy nvfp4"),
        (
            {"format": "nvfp4", "orig_shape": list(SHAPE), "convrot": True},
            "has the key convrot, which fp4kit does not know",
        ),
        ("[1]", "holds a JSON list; an object is needed"),
        ("{", "not valid JSON"),
    ],
)
def test_tags_that_are_refused(tag: object, text: str, tmp_path: Path) -> None:
    with refused(text):
        make_plan(changed(tmp_path, tag), format="bf16")


def test_an_ambiguous_tag_can_be_insisted_on(tmp_path: Path) -> None:
    """If --ignore '*.comfy_quant' is given, a file with an ambiguous tag is read in ComfyUI's nibble order.

    In that order the even element is in the high nibble.
    """
    root = changed(tmp_path, {"format": "nvfp4"})
    convert(root, tmp_path / "x", format="bf16", ignore=("*.comfy_quant",))
    convert(tmp_path / "a", tmp_path / "y", format="bf16")
    assert oracle.load(tmp_path / "x") == oracle.load(tmp_path / "y")


def test_metadata_in_place_of_tags(tmp_path: Path) -> None:
    layers = {NAME: {"format": "nvfp4", "orig_dtype": "torch.bfloat16", "orig_shape": list(SHAPE)}}
    text = json.dumps({"format_version": "1.0", "layers": layers})
    root = changed(tmp_path, None, {"_quantization_metadata": text})
    convert(root, tmp_path / "x", format="bf16")
    convert(tmp_path / "a", tmp_path / "y", format="bf16")
    assert oracle.load(tmp_path / "x") == oracle.load(tmp_path / "y")


@pytest.mark.parametrize("format", ["bf16", "modelopt", "comfy"])
def test_metadata_about_stored_layers_is_not_copied(format: str, tmp_path: Path) -> None:
    """Entries of ComfyUI and torchao say how the source stores its layers, and would be wrong in the result."""
    x = model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", format="comfy")
    tensors = oracle.arrays(oracle.load(tmp_path / "q"))
    entry = tensors.pop(f"{NAME}.comfy_quant").tobytes().decode()
    layers = {NAME: json.loads(entry)}
    metadata = {
        "format": "pt",
        "author": "somebody",
        "norm.weight": json.dumps({"_type": "Tensor"}),
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}),
    }
    source = tmp_path / "tagged.safetensors"
    synthetic.write_file(source, tensors, metadata)
    convert(source, tmp_path / "out.safetensors", "nvfp4-te", format=format)
    header = read_header(tmp_path / "out.safetensors")
    kept = header.metadata
    assert kept["author"] == "somebody" and not {"_quantization_metadata", "norm.weight"} & set(kept)
    assert verify(tmp_path / "out.safetensors").clean
    if format == "bf16":
        assert ("BF16", x.shape) in [(entry.dtype, entry.shape) for entry in header.entries]


def test_row_counts_that_comfyui_cannot_load_are_refused(tmp_path: Path) -> None:
    """The plan rejects an NVFP4 layer whose number of rows is not a multiple of 16, because ComfyUI cannot load it."""
    model(tmp_path / "m", (200, 160))
    with refused(f"{NAME}: has 200 rows; ComfyUI needs a multiple of 16 for nvfp4; leave it out with --keep"):
        make_plan(tmp_path / "m", "nvfp4-te", format="comfy")
    with refused("recipe mxfp4-ocp: cannot be stored for ComfyUI"):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="comfy")
    with refused("format comfy: convert_tensors does not write files of ComfyUI"):
        Rules.of("nvfp4-te", format="comfy")
    model(tmp_path / "n")
    convert(tmp_path / "n", tmp_path / "out", "nvfp4-te", format="comfy")
    with pytest.raises(CheckpointError, match="has no layer in NVFP4 of Model-Optimizer"):  # ComfyUI joins no layers
        reconcile(tmp_path / "out", None)
