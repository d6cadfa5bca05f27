"""Test the verdicts on checkpoints that other tools wrote. For their origin, see tests/data/foreign/README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fp4kit.checkpoint.identify.layer_pairs import scaling_of
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.weights import weights_of
from fp4kit.cli import main

DATA = Path(__file__).parents[2] / "data"
FOREIGN, SOURCES = DATA / "foreign", DATA / "foreign_sources"
BF16 = "codes nearest to the quotient in bfloat16)"
F32 = "codes nearest to the quotient in float32)"
BLOCKS, TENSOR = "FP8 per 128x128 block (amax / 448", "FP8 per tensor (amax / 448"
ROWS = f"FP8 per row (amax / 448 rounded to bfloat16, {BF16}"
AGREE = "(they agree on these layers)"
MODELOPT = "nvfp4-modelopt, nvfp4-modelopt-static, nvfp4-modelopt-static-4over6 or nvfp4-comfy-kitchen-static made"
VERDICTS = {
    "modelopt--FP8_DEFAULT_CFG": f"{TENSOR}, {BF16} in 7 layers",
    "modelopt--FP8_PER_CHANNEL_PER_TOKEN_CFG": f"FP8 per row (amax / 448, {F32} in 7 layers",
    "modelopt--FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": f"fp8-modelopt made 4 layers; {BLOCKS}, {F32} in 3 layers",
    "modelopt--NVFP4_DEFAULT_CFG+FP8DOWN": f"{MODELOPT} 6 layers {AGREE}; {TENSOR}, {BF16} in 1 layer",
    "modelopt--NVFP4_DEFAULT_CFG+FP8_KV_CFG": f"{MODELOPT} 7 layers {AGREE}",
    "modelopt--gpt_oss-NVFP4_DEFAULT_CFG": f"{MODELOPT} 12 layers {AGREE}",
    "llm-compressor--MIXED": f"nvfp4-compressed-tensors made 6 layers; {ROWS} in 1 layer",
    "llm-compressor--FP8_BLOCK": f"{BLOCKS} rounded to bfloat16, {BF16} in 7 layers",
    "quark--MXFP4_FP8ATT": f"{TENSOR} rounded to bfloat16, {BF16} in 4 layers; mxfp4-quark-even made 3 layers",
    "torchao--NVFP4WO": "nvfp4-torchao made 7 layers",
}


def source_of(name: str) -> Path:
    return SOURCES / ("gpt_oss" if "gpt_oss" in name else "llama")


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    verdict = identify_checkpoint(FOREIGN / name, source_of(name))
    assert verdict.sentence == VERDICTS[name]
    assert verdict.is_clean


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("modelopt--W4A8_NVFP4_FP8_CFG", "nvfp4-modelopt with block=(1, 32)"),
        ("torchao--MXFP4", "mxfp4-torchao-rceil"),
    ],
)
def test_the_tool_that_wrote_the_file_is_named_first(name: str, recipe: str) -> None:
    """Among recipes that agree, that of the container's producer comes first, also in the short sentence."""
    verdict = identify_checkpoint(FOREIGN / name, source_of(name))
    assert verdict.recipe == recipe and verdict.is_clean and len(verdict.layers) == 7
    shown = {"nvfp4": f"{recipe} (Model-Optimizer)", "mxfp4": recipe}[recipe[:5]]  # the id contains "torchao"
    count = len(verdict.recipes) - 1
    assert verdict.short_sentence == f"{shown} or {count} others that agree made 7 layers"


@pytest.mark.exhaustive
def test_awq_is_told() -> None:
    verdict = identify_checkpoint(FOREIGN / "modelopt--NVFP4_AWQ_LITE_CFG", SOURCES / "llama")
    assert verdict.is_clean and len(verdict.exceptions) == 7
    assert verdict.sentence.startswith("weights scaled per column (AWQ) in 7 layers: ")
    assert {layer.explanation.method for layer in verdict.layers} == {"AWQ"}


@pytest.mark.parametrize(
    ("modifiers", "method"),
    [
        ([], "AWQ"),
        (["AWQModifier"], "AWQ"),  # both declare the one method
        (["SmoothQuantModifier"], ""),
        (["SmoothQuantModifier", "AWQModifier"], ""),
    ],
)
def test_the_method_that_scaled_weights_is_declared_by_factors_and_by_a_recipe(
    modifiers: list[str], method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOREIGN / "modelopt--NVFP4_AWQ_LITE_CFG", folder)
    (folder / "recipe.yaml").write_text("".join(f"  {name}: {{}}\n" for name in modifiers))
    source = open_source(folder)
    assert scaling_of(source, weights_of(source.tensors, source.config).values()) == method


@pytest.mark.exhaustive
def test_svdquant_is_told() -> None:
    verdict = identify_checkpoint(FOREIGN / "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG", SOURCES / "llama")
    assert verdict.sentence == (
        "low-rank part (SVDQuant) in 7 layers: the codes store the rest of the weight, which is not known in every bit"
    )
    assert verdict.is_clean and verdict.hint is None
    shares = [layer.explanation.sentence.rpartition(" gives ")[2] for layer in verdict.layers]
    assert all(float(share.removesuffix("% of bytes")) > 95 for share in shares)


def test_a_layer_without_a_counterpart_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(SOURCES / "llama", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    assert data.count(b"q_proj.weight") == 1
    path.write_bytes(data.replace(b"q_proj.weight", b"x_proj.weight"))
    name = str(FOREIGN / "torchao--NVFP4WO")
    assert main(["identify", name, "--source", str(SOURCES / "llama")]) == 0
    capsys.readouterr()
    assert main(["identify", name, "--source", str(tmp_path / "m"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unpaired"] == ["model.layers.0.self_attn.q_proj"] and found["recipes"] == ["nvfp4-torchao"]
    assert found["sentence"].endswith(
        "1 layer without a counterpart in the source, of 7: model.layers.0.self_attn.q_proj"
    )


def test_wrapped_names_are_paired(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "llama", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip().replace(b'"model.layers', b'"_orig_mod.module.model.layers')
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    verdict = identify_checkpoint(FOREIGN / "torchao--NVFP4WO", tmp_path / "m")
    assert verdict.is_clean and len(verdict.layers) == 7
