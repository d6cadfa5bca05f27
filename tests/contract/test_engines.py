"""Test the table of engines: its rows name what exists, and what is asked for is found or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.containers.configs import LOADED
from fp4kit.checkpoint.containers.table import CONTAINERS
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.plan.request import Request
from fp4kit.cli import main
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.contract.engines import FUSED, OF_CHECKPOINTS

ROWS = fp4kit.servings()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_names_what_exists(row: fp4kit.Serving) -> None:
    contract = row.contract
    assert contract == fp4kit.Contract.from_data(json.loads(json.dumps(contract.as_data())))
    unknown = [name for name in OF_CHECKPOINTS if name != "patterns" or not row.decode_rule]
    assert contract.unknown == tuple(unknown) and row.version and row.needs
    assert row.container in ("", *LOADED, *(form.name for form in CONTAINERS))
    if row.format is not None:
        form = next(one for one in CONTAINERS if one.name == row.container.replace("W4A16_", ""))
        assert form.stores(row.weights) and form.format == row.format
        assert Request(row.weights, row.format).form_for({"model_type": "llama"}) is not None
    assert row.product == "torch" or contract.unit == fp4kit.unit(row.product)
    scales = row.activations is not None and row.activations.tensor_scaling == "tensor"
    assert (row.input_scales is not None) == scales
    assert contract.shared_amax == (FUSED if row.shares_amax else ())


def test_an_engine_loads_the_containers_from_which_it_computes() -> None:
    examined = [row for row in ROWS if row.engine in VERSIONS and row.container]
    for row in examined:
        found = support.cells_of(row.container, row.engine)
        assert any(cell.status == "loads" and "dense" in families for cell, families in found.items())
    assert {row.engine for row in examined} == {"transformers", "vLLM", "SGLang"}
    assert not support.cells_of("mlx nvfp4", "vLLM") and not support.cells_of("modelopt NVFP4", "TensorRT-LLM")


def test_the_first_row_of_an_engine_and_a_scheme_is_the_default() -> None:
    for row in ROWS:
        first = next(one for one in ROWS if (one.engine, one.scheme) == (row.engine, row.scheme))
        assert fp4kit.serving(row.engine.upper(), row.scheme) == first.contract
        found = fp4kit.serving(row.engine, row.scheme, route=row.route, format=row.format)
        assert (
            found
            == next(
                one
                for one in ROWS
                if (one.engine, one.scheme, one.route) == (row.engine, row.scheme, row.route)
                and row.format in (None, one.format)
            ).contract
        )
    keys = [(row.engine, row.scheme, row.route, row.format) for row in ROWS]
    assert len({*keys}) == len(keys)


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (
        ("tranformers", "nvfp4-w4a4"),
        {},
        ValueError,
        r"engine is 'tranformers'; needs one of .*; did you mean transformers",
    ),
    (
        ("vllm", "nvfp4-w4a16"),
        {},
        ValueError,
        r"vLLM needs one of .*did you mean nvfp4-w4a4.*; transformers, torchao, MLX have",
    ),
    (("vllm", "fp4"), {}, ValueError, "scheme is 'fp4'; vLLM needs one of 'nvfp4-w4a4'"),
    (
        ("vllm", "nvfp4-w4a4"),
        {"route": "fast"},
        ValueError,
        "route is 'fast'; vLLM nvfp4-w4a4 needs one of '', 'emulation'",
    ),
    (("vllm", "nvfp4-w4a4"), {"format": "gguf"}, ValueError, "format is 'gguf'; .* 'compressed-tensors', 'modelopt'"),
    ((1, "nvfp4-w4a4"), {}, TypeError, "engine is 1"),
    (("vllm", 1), {}, TypeError, "scheme is 1"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "text"), WRONG, ids=str)
def test_what_is_unknown_is_refused_with_the_near_ones(arguments: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        fp4kit.serving(*arguments, **options)


def test_parity_with_an_engine() -> None:
    """The engine's contract is a side of its own, or states how tensors of the rollout are computed."""
    served = fp4kit.serving("transformers", "mxfp4-w4a4")
    assert fp4kit.parity(served, engine="transformers", scheme="mxfp4-w4a4").equal
    w = {"up_proj": np.random.default_rng(0).standard_normal((64, 64), np.float32)}
    stored = {"up_proj": fp4kit.quantize(w["up_proj"], "nvfp4-compressed-tensors")}
    known = {"engine": "transformers", "scheme": "nvfp4-w4a16"}
    assert fp4kit.parity(fp4kit.serving(**known), stored, weights=w, **known).equal
    trained = replace(fp4kit.serving(**known), served_dtype=None)
    found = fp4kit.parity(trained, stored, weights=w, **known)
    assert not found.equal and "served_dtype is none in train and bfloat16 in rollout" in found.layers[0].setting
    other = fp4kit.parity(served, engine="transformers", scheme="mxfp4-w4a16")
    assert any("activations" in text for text in other.contracts.differences)
    with pytest.raises(TypeError, match="rollout is missing; needs a contract, a model or tensors, or an"):
        fp4kit.parity(served)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(row.engine in listed and row.scheme in listed for row in ROWS)
    assert main(["contract", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "fp4kit.engines/1" and len(found["engines"]) == len(ROWS)
    known = ["contract", "--engine", "transformers", "--scheme", "nvfp4-w4a4"]
    assert main([*known, "--out", str(tmp_path / "c.json")]) == 0
    printed = capsys.readouterr().out
    assert "activations: nvfp4-compressed-tensors-static" in printed
    assert "models dense, llama, llama4, granite_moe, vlm: loads\n" in printed
    assert "models moe, deepseek_v3: wrong values; the engine decodes experts without their global scale" in printed
    assert fp4kit.Contract.load(tmp_path / "c.json") == fp4kit.serving("transformers", "nvfp4-w4a4")
    assert main(["contract", str(tmp_path / "c.json"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["contract"]["served_dtype"] == "bfloat16" and shown["serving"] is None
    assert main(["contract", str(tmp_path / "c.json"), "--engine", "vLLM", "--scheme", "nvfp4-w4a4"]) == 0
    printed = capsys.readouterr().out
    assert "activations: nvfp4-vllm-static-divisor" in printed and "served_dtype: bfloat16 and none" in printed
    assert main(["contract", str(tmp_path / "c.json"), *known[1:]]) == 0
    assert "nothing stated differs" in capsys.readouterr().out
    for wrong in (["contract"], ["contract", "--list", "--engine", "vllm"], [*known[:2], "vLLM", "--scheme", "x"]):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("engine", ["MLX", "llama.cpp"])
def test_parity_multiplies_as_an_engine_does(engine: str) -> None:
    """Products of parity are those of the engine's unit, which takes inputs as they are."""
    rng = np.random.default_rng(0)
    w = {"up_proj": rng.standard_normal((64, 64), np.float32)}
    inputs = {"up_proj": rng.standard_normal((8, 64), np.float32)}
    row = next(one for one in ROWS if one.engine == engine and one.scheme.startswith("mxfp4"))
    assert fp4kit.parity(row.contract, row.contract, weights=w, inputs=inputs).layers[0].products == (0, 512)
    other = row.contract.stating(unit="ggml-avx2" if engine == "MLX" else "mlx-cpu")
    found = fp4kit.parity(row.contract, other, weights=w, inputs=inputs)
    assert not found.equal and found.layers[0].step == "product" and found.layers[0].setting.startswith("unit ")
