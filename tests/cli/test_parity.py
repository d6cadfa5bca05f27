"""Test the command parity: its exit codes, its text and its JSON document."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4kit
from fp4kit.cli import main


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Go to a directory with the contracts train.json and rollout.json and the weights w.safetensors."""
    monkeypatch.chdir(tmp_path)
    contract = fp4kit.Contract("nvfp4-te", shared_amax=[("gate_proj", "up_proj")], unit="sm100")
    contract.save("train.json")
    contract.stating(shared_amax=()).save("rollout.json")
    rng = np.random.default_rng(0)
    w = {f"{n}.weight": rng.standard_normal((32, 64), np.float32) * s for n, s in (("gate_proj", 1), ("up_proj", 2))}
    save_file({name: x.astype(np.float32) for name, x in w.items()}, "w.safetensors")


def test_equal_sides(files, capsys):
    assert main(["parity", "train.json", "train.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 layers are equal in every bit; compared 262,144 of 262,144 elements in 4 layers\n")
    assert main(["parity", "train.json", "train.json", "--weights", "w.safetensors", "--layers", "1", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_mismatch_is_explained(files, capsys):
    arguments = ["parity", "train.json", "rollout.json", "--weights", "w.safetensors", "--elements", "64"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 of 2 layers differ; compared 128 of 4,096 elements in 2 layers\n")
    assert "first step that differs: amax (tensor amax), 64 of 64 examined differing elements" in out
    assert "the largest of gate_proj, up_proj" in " ".join(out.split()) and "<- they part here" in out
    assert "setting: shared_amax: only the first has (gate_proj up_proj)" in out
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False and found["layers"][0]["step"] == "amax" and found["layers"][0]["worked"]
    assert found["contracts"]["differences"][0].startswith("shared_amax: ")


def test_every_option_is_passed_on(files, monkeypatch):
    given = {"weights": "w", "inputs": "i", "kv": "k", "elements": 5, "layers": 2, "seconds": 3.0}
    given |= {"engine": "vLLM", "scheme": "nvfp4-w4a4"}
    found = []

    def parity(train, rollout, **options):
        found.append((train, rollout, options))
        return fp4kit.parity("train.json", "train.json")

    monkeypatch.setattr("fp4kit.cli.verify.parity", parity)
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    assert main(["parity", "a", "b", *options]) == 0
    assert found == [("a", "b", given)]


def test_errors_have_exit_code_2(files, capsys):
    for arguments, message in (
        (["train.json", "none"], "none: does not exist"),
        (["train.json", "w.safetensors"], "train quantizes weights, but none are given; pass the unquantized model"),
        (["train.json", "rollout.json", "--layers", "0"], "needs at least 1"),
    ):
        assert main(["parity", *arguments]) == 2
        assert message in capsys.readouterr().err
