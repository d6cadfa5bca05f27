"""Test checkpoints that other tools wrote (tests/data/foreign): their containers, decoded values and faults."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import synthetic
from file_values import read_values
from synthetic import refused
from together import together

from fp4kit import formats
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.storage.safetensors_file import read_header

Array = npt.NDArray[np.float32]
ROOT = Path(__file__).parents[2] / "data" / "foreign"
DECODED = json.loads((ROOT / "decoded.json").read_text())
# {folder of tests/data/foreign: {container: number of layers in it}}
LAYERS = {
    "modelopt--FP8_DEFAULT_CFG": {"modelopt FP8": 7},
    "modelopt--FP8_PER_CHANNEL_PER_TOKEN_CFG": {"modelopt FP8 per row": 7},
    # A layer that fits in one block of 128x128 has a single scale, so it is read as FP8 with one scale per tensor.
    "modelopt--FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": {"modelopt FP8 128x128": 3, "modelopt FP8": 4},
    "modelopt--NVFP4_AWQ_LITE_CFG": {"modelopt NVFP4": 6, "modelopt NVFP4_AWQ": 1},
    "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG": {"modelopt NVFP4_SVD": 7},
    "modelopt--NVFP4_DEFAULT_CFG+FP8DOWN": {"modelopt NVFP4": 6, "modelopt FP8": 1},
    "modelopt--NVFP4_DEFAULT_CFG+FP8_KV_CFG": {"modelopt NVFP4": 7},
    "modelopt--W4A8_NVFP4_FP8_CFG": {"modelopt NVFP4 group 32": 7},
    "modelopt--gpt_oss-NVFP4_DEFAULT_CFG": {"modelopt NVFP4": 4, "modelopt NVFP4 stacks": 2},
    "llm-compressor--MIXED": {"compressed-tensors nvfp4-pack-quantized": 6, "compressed-tensors FP8 per row": 1},
    "llm-compressor--FP8_BLOCK": {"compressed-tensors FP8 128x128": 7},
    "quark--MXFP4_FP8ATT": {"quark mxfp4": 3, "quark FP8": 4},
    "torchao--NVFP4WO": {"torchao NVFP4": 7},
    "torchao--MXFP4": {"torchao MXFP4": 7},
}
UNREADABLE = "modelopt--gpt_oss-MXFP4_MLP_WEIGHT_ONLY_CFG"


def test_every_folder_is_tested_and_small() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} == {*LAYERS, UNREADABLE}
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 2_000_000


@together("name", LAYERS)
def test_containers(name: str) -> None:
    model = inspect_checkpoint(ROOT / name)
    assert Counter(str(weight.container) for weight in model.layers.values()) == LAYERS[name]
    assert not model.unrecognised


@pytest.mark.parametrize("name", LAYERS)
def test_verify_finds_no_error(name: str) -> None:
    """verify finds no error in files of other tools.

    It only warns about engines that fail to load them, and about containers whose requirements are unknown. The small
    k_proj of FP8_BLOCK is one block of 64 rows, which engines cannot fuse.
    """
    issues = verify(ROOT / name).issues
    assert {issue.severity for issue in issues} <= {"warning"}
    known = (
        "the requirements of loaders are not known",
        "fails: ",
        "wrong values: the engine has no modelopt quantizer",
        "in every part of a fused layer except the last, and rejects the layer",
    )
    assert all(any(text in issue.text for text in known) for issue in issues)


def test_stored_divisors_divide() -> None:
    """compressed-tensors' NVFP4 decodes to code * (scale / divisor), not to code * (scale * (1 / divisor))."""
    root, differing = ROOT / "llm-compressor--MIXED", 0
    tensors = oracle.arrays(oracle.load(root))
    for module in (name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")):
        packed, scale, divisor = (tensors[f"{module}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1, 16)
        values, scale = formats.E2M1.values[codes], scale.view(np.uint8)
        quotients = formats.E4M3.values[scale] / np.float32(divisor.reshape(-1)[0])
        wanted = (values * quotients[..., None]).reshape(len(packed), -1)
        assert read_values(root, module).tobytes() == wanted.tobytes()
        differing += int((quotients != formats.E4M3.values[scale] * (np.float32(1) / divisor.reshape(-1)[0])).any())
    assert differing


def decoded(name: str, out: Path) -> dict[str, Array]:
    """Return the bfloat16 tensors that ``convert --format bf16`` writes for a folder of ROOT, as float32 values.

    out: the directory to write to.
    """
    convert(ROOT / name, out, format="bf16")
    found = {}
    for tensor, (dtype, shape, data) in oracle.load(out).items():
        if dtype == "BF16":
            wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            found[tensor] = wide.view(np.float32).reshape(shape)
    return found


def digest(values: Array) -> str:
    """Return the SHA-256 of float32 values that are exact in bfloat16, stored as bfloat16. -0 counts as +0."""
    return hashlib.sha256(((values + np.float32(0)).view(np.uint32) >> 16).astype("<u2").tobytes()).hexdigest()


@pytest.mark.parametrize("name", DECODED)
def test_values_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    have = decoded(name, tmp_path / "out")
    assert len(DECODED[name]) == sum(LAYERS[name].values())
    assert {tensor: digest(have[tensor]) for tensor in DECODED[name]} == DECODED[name]


def bfloat16(values: Array) -> Array:
    """Round float32 values to bfloat16, to the nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def e2m1(packed: npt.NDArray[np.uint8]) -> Array:
    """Return the values of packed codes [..., N, K/2]; the even element is in the low nibble."""
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array(positive + [-value for value in positive], np.float32)
    return table[np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)]


def unswizzled(scales: npt.NDArray[np.uint8], rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Return scales [rows, columns] from their storage in tiles of 128 x 4.

    In a tile, the scale of row 32 i + r and column c is at byte 16 r + 4 i + c.
    """
    tiles = scales.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


def stated(parts: dict[str, tuple[str, tuple[int, ...], bytes]], module: str) -> Array:
    """Return the values of the layer `module`, decoded as the documentation of Model-Optimizer or torchao says.

    parts: {tensor name: (dtype, shape, bytes)} of the file. The names show which tool wrote the layer.
    """

    def bytes_of(suffix: str) -> npt.NDArray[np.uint8]:
        _, shape, data = parts[module + suffix]
        return np.frombuffer(data, np.uint8).reshape(shape)

    def factor(suffix: str) -> np.float32:
        return np.frombuffer(parts[module + suffix][2], "<f4").reshape(())[()]

    if module + "._weight_qdata" in parts:
        values = e2m1(bytes_of("._weight_qdata"))
        rows, columns = values.shape
        has_factor = module + "._weight_per_tensor_scale" in parts
        group = 16 if has_factor else 32
        scales = unswizzled(bytes_of("._weight_scale"), rows, columns // group)
        outer = factor("._weight_per_tensor_scale") if has_factor else np.float32(1)
    elif module + ".weight_scale" in parts:
        values, group = e2m1(bytes_of(".weight")), 16
        scales, outer = bytes_of(".weight_scale"), factor(".weight_scale_2")
    else:
        values, group = e2m1(bytes_of("").swapaxes(1, 2)), 16
        scales, outer = bytes_of("_weight_scale").swapaxes(1, 2), factor("_weight_scale_2")
    numbers = formats.E4M3.values[scales] if group == 16 else np.exp2(scales.astype(np.float32) - 127)
    values = values * np.repeat(numbers.astype(np.float32) * outer, group, -1)
    if module + LOW_RANK + "a" in parts:
        factors = [wide(parts[module + LOW_RANK + part]) for part in "ba"]
        values = (values + factors[0].astype(np.float64) @ factors[1]).astype(np.float32)
        values *= wide(parts[module + ".pre_quant_scale"])
    return bfloat16(values)


LOW_RANK = ".weight_quantizer._svdquant_lora_"


def wide(part: tuple[str, tuple[int, ...], bytes]) -> Array:
    """Return a bfloat16 tensor (dtype, shape, bytes) as float32 values."""
    return (np.frombuffer(part[2], "<u2").astype(np.uint32) << 16).view(np.float32).reshape(part[1])


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - DECODED.keys()))
def test_values_are_as_stated(name: str, tmp_path: Path) -> None:
    have, parts = decoded(name, tmp_path / "out"), oracle.load(ROOT / name)
    for module, weight in inspect_checkpoint(ROOT / name).layers.items():
        expected = stated(parts, module)
        values = have[f"{module}.weight" if f"{module}.weight" in have else module]
        assert values.size == expected.size and weight.shape == expected.shape
        if values.shape != expected.shape or weight.transposed:
            values = values.swapaxes(-1, -2)
        assert np.array_equal(values, expected)


# The first digits of the SHA-256 of the values that Model-Optimizer's decoder gives. It leaves the low-rank part out.
CODES_OF_SVDQUANT = {
    "mlp.down_proj": "469b81e0dc517169",
    "mlp.gate_proj": "b95e23477b4fabf0",
    "mlp.up_proj": "e23bd4dfea314093",
    "self_attn.k_proj": "3234b133d155dddc",
    "self_attn.o_proj": "7837c9369e4a3056",
    "self_attn.q_proj": "7a6af86ff737d211",
    "self_attn.v_proj": "da07ca66d19897d0",
}
SVDQUANT = "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG"


def overwrite(path: Path, name: str, data: bytes) -> None:
    """Replace the bytes of a tensor of a safetensors file."""
    entry = next(entry for entry in read_header(path).entries if entry.name == name)
    whole = bytearray(path.read_bytes())
    whole[entry.start : entry.start + entry.nbytes] = data
    path.write_bytes(whole)


def test_svdquant_without_its_low_rank_part_has_the_values_of_the_tool(tmp_path: Path) -> None:
    shutil.copytree(ROOT / SVDQUANT, tmp_path / "m")
    for entry in read_header(tmp_path / "m" / "model.safetensors").entries:
        if "_lora_b" in entry.name:
            overwrite(tmp_path / "m" / "model.safetensors", entry.name, bytes(entry.nbytes))
    have = decoded(str(tmp_path / "m"), tmp_path / "out")
    found = {name: digest(have[f"model.layers.0.{name}.weight"])[:16] for name in CODES_OF_SVDQUANT}
    assert found == CODES_OF_SVDQUANT


def test_svdquant_is_near_its_source(tmp_path: Path) -> None:
    """verify finds the usual error of NVFP4 if the low-rank part is added, and garbage if it is damaged."""
    source = ROOT.parent / "foreign_sources" / "llama"
    report = verify(ROOT / SVDQUANT, source)
    assert not [issue for issue in report.issues if issue.severity == "error"]
    assert all(21 < sqnr_db(layer.tally.signal, layer.tally.noise) < 26 for layer in report.layers)
    shutil.copytree(ROOT / SVDQUANT, tmp_path / "m")
    name = "model.layers.0.mlp.down_proj.weight_quantizer._svdquant_lora_a"
    overwrite(tmp_path / "m" / "model.safetensors", name, bytes(2 * 32 * 256))
    errors = [issue for issue in verify(tmp_path / "m", source).issues if issue.severity == "error"]
    assert [issue.subject for issue in errors] == ["model.layers.0.mlp.down_proj"]


def test_svdquant_is_requantized_only_on_demand(tmp_path: Path) -> None:
    """The low-rank part makes other values, so no other format can keep the codes."""
    with refused("is already quantized as modelopt NVFP4_SVD"):
        convert(ROOT / SVDQUANT, tmp_path / "out", "nvfp4-modelopt", format="modelopt")
    convert(ROOT / SVDQUANT, tmp_path / "out", "nvfp4-modelopt", format="modelopt", requantize=True, input_scale=1.0)
    assert verify(tmp_path / "out", ROOT / SVDQUANT).clean


@pytest.mark.parametrize(("name", "shape"), [("_svdquant_lora_a", (31, 256)), ("_svdquant_lora_b", (127, 32))])
def test_low_rank_parts_that_do_not_fit_are_refused(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    tensors = oracle.arrays(oracle.load(ROOT / SVDQUANT))
    full = f"model.layers.0.mlp.down_proj.weight_quantizer.{name}"
    tensors[full] = np.resize(tensors[full], shape)
    config = json.loads((ROOT / SVDQUANT / "config.json").read_text())
    synthetic.write_model(tmp_path / "m", config, tensors)
    with refused("low-rank part of the weight (SVDQuant), whose other parts are missing or do not fit"):
        convert(tmp_path / "m", tmp_path / "out", format="bf16")


def test_names_of_diffusers(tmp_path: Path) -> None:
    """The export of Diffusers models stores the low-rank parts beside the codes."""
    tensors = oracle.arrays(oracle.load(ROOT / SVDQUANT))
    renamed = {name.replace("weight_quantizer._", ""): x for name, x in tensors.items()}
    config = json.loads((ROOT / SVDQUANT / "config.json").read_text())
    synthetic.write_model(tmp_path / "m", config, renamed)
    have, want = decoded(str(tmp_path / "m"), tmp_path / "a"), decoded(SVDQUANT, tmp_path / "b")
    assert {name: x.tobytes() for name, x in have.items()} == {name: x.tobytes() for name, x in want.items()}


def test_stacks_with_blocks_along_the_output_axis_are_refused(tmp_path: Path) -> None:
    with refused("MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis"):
        convert(ROOT / UNREADABLE, tmp_path / "out", format="bf16")
    assert "blocks run along the output axis" in " ".join(issue.text for issue in verify(ROOT / UNREADABLE).issues)
