"""Test that errors of Python functions name arguments, where the command line names options."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4kit
from fp4kit.arguments import in_python
from fp4kit.checkpoint import (
    CheckpointError,
    Rules,
    TensorConverter,
    Wishes,
    assign_recipes,
    compare_checkpoints,
    convert,
    convert_tensors,
    execute,
    identify_checkpoint,
    make_plan,
    open_checkpoint,
    verify_checkpoint,
)
from fp4kit.checkpoint.plan.request import OPTIONS
from fp4kit.cli import main

NAME = "model.layers.0.mlp.up_proj.weight"
FLAGS = [flag.name for option in OPTIONS.values() for flag in option["flags"]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the path of a file with one layer that holds NaN."""
    save_file({NAME: np.full((32, 64), np.nan, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("flag", FLAGS)
def test_every_option_of_convert_has_an_argument(flag: str) -> None:
    text = in_python(f"no layer; use {flag} to allow it", signature(make_plan).parameters)
    assert text != in_python(text, ()) or "--" not in text
    assert "--" not in text and text.startswith("no layer; use ") and text.endswith(" to allow it"), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave it out with --keep", "leave it out with wishes=Wishes(keep=...)"),
        ("--keep leaves it", "wishes=Wishes(keep=...) leaves it"),
        ("--only '*.mlp.*' names", "wishes=Wishes(only=['*.mlp.*']) names"),
        ("--keep-first 2: has", "wishes=Wishes(keep_first=2): has"),
        ("--nonfinite keep or", "nonfinite='keep' or"),
        ("--format bf16 decodes it", "format='bf16' decodes it"),
        ("--format modelopt, which", "format='modelopt', which"),
        ("use --requantize to lose them", "use requantize=True to lose them"),
        ("--input-scale 1.0 or --activations FILE", "input_scale=1.0 or activations=FILE"),
        ("--recipe *.q=...: unused", "recipes=[('*.q', ...)]: unused"),
        ("--scheme x: needs --engine transformers", "scheme='x': needs engine=... transformers"),
        ("run fp4kit convert --format bf16; or --codes", "run fp4kit convert --format bf16; or codes=..."),
        ("use --ptxas-options=-v", "use --ptxas-options=-v"),
        ("ends -- here", "ends -- here"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    expected = expected.replace("engine=... t", "engine='t").replace("transformers", "transformers'")
    parameters = [name for name in signature(make_plan).parameters if name != "source"]
    assert in_python(text, parameters) == expected
    assert in_python("--keep 'a.*'", ("exclude",)) == "exclude=['a.*']"
    assert in_python("--source SRC", parameters) == "--source SRC"


def _execute(model: Path, out: Path) -> Any:
    return execute(make_plan(model), out)


def _converted(model: Path, out: Path) -> Any:
    w = np.zeros((32, 64), np.float32)
    rules = Rules.of("nvfp4-te", recipes=[("*.q", "nvfp4-te-2d")])
    return list(convert_tensors([(NAME, w)], rules))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model, out: make_plan(model, wishes=Wishes(keep=("*.no",))), "wishes=Wishes(keep=['*.no']): matches"),
        (lambda model, out: make_plan(model, hadamard=16, nonfinite="keep"), "leave nonfinite='keep' out"),
        (
            lambda model, out: convert(model, out, format="gpt-oss", recipe="nvfp4-te"),
            "use format='compressed-tensors'",
        ),
        (lambda model, out: convert(model, out), "use nonfinite='keep' or nonfinite='saturate'"),
        (_execute, "use nonfinite='keep' or nonfinite='saturate'"),
        (lambda model, out: Rules.of("nvfp4-te", format="gpt-oss"), "use format='compressed-tensors'"),
        (_converted, "recipes=[('*.q', ...)]: matches no module"),
        (lambda model, out: identify_checkpoint(model, model), "source="),
        (lambda model, out: verify_checkpoint(model, model), "source="),
        (lambda model, out: verify_checkpoint(model, adapter=out), "adapter="),
        (lambda model, out: fp4kit.parity(fp4kit.Contract("nvfp4-te"), {NAME: np.ones((16, 32))}), "weights=MODEL"),
    ],
)
def test_errors(call: Any, words: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        call(model, tmp_path / "out")
    assert words in str(raised.value) and " --" not in str(raised.value)


def test_a_command_names_options(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(model.parent / "out")]) == 2
    assert "use --nonfinite keep or --nonfinite saturate" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="nonfinite='keep'"):  # not after the command
        convert(model, model.parent / "out")


@pytest.mark.parametrize(
    "call",
    [
        open_checkpoint,
        verify_checkpoint,
        make_plan,
        lambda path: convert(path, "out"),
        lambda path: identify_checkpoint(path, path),
        lambda path: compare_checkpoints(path, path),
        lambda path: assign_recipes(path, 4.5),
    ],
)
def test_a_missing_path_is_a_missing_file_too(call: Any, tmp_path: Path) -> None:
    for kind in (FileNotFoundError, CheckpointError):
        with pytest.raises(kind, match=r"absent: does not exist; .* is needed"):
            call(tmp_path / "absent")


def test_a_method_names_arguments() -> None:
    converter = TensorConverter(Rules.of("nvfp4-te", recipes=[("*.q", "nvfp4-te-2d")]))
    with pytest.raises(CheckpointError, match=r"^recipes=\["):
        converter.flush()
