"""Test the table of fp4kit inspect about what a checkpoint stores beside its quantized layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic

from fp4kit.checkpoint import convert
from fp4kit.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    synthetic.dense(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "m", "nvfp4-te", format="modelopt")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["unknown_key"] = 1
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    return tmp_path / "m"


def test_one_row_per_reason(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("read as"))
    assert lines[0].startswith("total: ") and "quantized layers: 14 in modelopt NVFP4" in lines[:begin]
    rows = [line for line in lines[begin + 1 :] if line.startswith(("refused", "understood", "carried"))]
    assert [*dict.fromkeys(row.split()[0] for row in rows)] == ["refused", "understood", "carried"]
    assert len(rows) < 20
    assert rows[0].split()[:3] == ["refused", "config.json", "quantization_config.unknown_key"]
    count = len([1 for row in rows if "*.weight_scale " in row])
    assert count == 1 and any("14 *.weight_scale " in row for row in rows)


def test_json_has_every_item(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    scales = [item["name"] for item in items if item["name"].endswith(".weight_scale")]
    assert len(scales) == 14 and len({*scales}) == 14


def test_no_table_without_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_file(tmp_path / "a.safetensors", {"a.weight": np.ones((4, 4), np.float32)})
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert "read as" not in capsys.readouterr().out


def test_a_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# A model\n" * 20)
    (tmp_path / "a.safetensors").write_text("# A model\n" * 20)
    for name, text in (
        ("README.md", "is not a safetensors or GGUF file, so fp4kit cannot read it\n"),
        ("a.safetensors", "its header length is beyond the limit of 100 MB: not a safetensors file"),
    ):
        assert main(["inspect", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert text in err and ("download" in err) == name.endswith(".safetensors")
