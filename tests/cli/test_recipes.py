"""Test the commands recipes, formats and parity. Commands on checkpoints are tested in tests/checkpoint."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive import exhaustive
from safetensors.numpy import save_file

import fp4kit
from fp4kit import cli
from fp4kit.cli import main, parser
from fp4kit.evidence.golden import check as agreement
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.recipes import recipe, recipes


def commands(arguments: list[str] | None = None) -> dict[str, Any]:
    """Return the parsers of all commands, of the parser for some arguments."""
    (found,) = (action for action in parser(arguments)._actions if action.dest == "command")
    return dict(found.choices)


README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["nvfp4"], [id for id in recipes() if id.startswith("nvfp4-")]),
        (["ModelOpt"], [id for id in recipes() if "-modelopt" in id]),
        (["mxfp4_quark"], ["mxfp4-quark-even", "mxfp4-quark-floor", "mxfp4-quark-ceil"]),
        (["nvfp4-te", "nvfp4-te"], ["nvfp4-te"]),
        (["mxfp4-torchao-floor"], ["mxfp4-ocp"]),
    ],
    ids=str,
)
def test_recipes_of_a_format_or_a_producer(capsys, names: list[str], ids: list[str]) -> None:
    assert main(["recipes", *names, "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["recipes"]] == ids


def test_recipes_shows_aliases_and_versions(capsys) -> None:
    assert main(["recipes", "nvfp4"]) == 0
    out = capsys.readouterr().out
    assert "nvfp4-te = nvfp4" in out and "mxfp4-ocp" not in out
    assert main(["recipes", "mxfp4-mlx-cpu-0321", "nvfp4-te", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["recipes"]
    assert first["versions"] == {"first": "0.30.6", "last": "0.32.1"}
    assert second["versions"] == {"first": "d0067d0", "last": "d0067d0"}
    assert second["id"] == "nvfp4-te" and second["block"] == "1x16"
    assert "TE's CUDA" in second["equal_bit_for_bit_to"]


def arrays_that_are_equal(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+) of (\d+) arrays are equal", text.replace(",", ""))


def test_readme_says_how_many_arrays_are_equal() -> None:
    ((equal, compared),) = arrays_that_are_equal(README.read_text())
    assert equal == compared


@pytest.mark.exhaustive
def test_check_of_everything(capsys) -> None:
    assert main(["recipes", "--check"]) == 0
    out = capsys.readouterr().out
    assert "0 unequal" in out.splitlines()[-1] and "no recorded outputs" in out
    assert arrays_that_are_equal(README.read_text()) == arrays_that_are_equal(out.splitlines()[-1])


def test_check_reports_a_difference(tmp_path, capsys) -> None:
    golden = GoldenSet.find()
    np.savez(tmp_path / "inputs.npz", normal__f32=golden.input("normal__f32"))
    key = "normal__f32/mxfp4_floor"
    codes, scales = golden.get("ao", f"{key}/codes").copy(), golden.get("ao", f"{key}/scales")
    codes[1, 2] ^= 1
    np.savez(tmp_path / "ao.npz", **{f"{key}/codes": codes, f"{key}/scales": scales})
    assert main(["recipes", "mxfp4", "--check", "--golden", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "ao: normal__f32/mxfp4_floor/codes: 1 of 16384 differ" in out and "1 of 2 arrays are equal" in out


@pytest.mark.parametrize("engine", ["compiled", *exhaustive(["specification"])])
def test_formats_and_agreement(capsys, monkeypatch, engine) -> None:
    """The table of recipes that agree has the same row whether the specification or the compiled engine computes it.

    Without the patch of this test, the specification does.
    """
    if engine == "compiled":
        monkeypatch.setattr(agreement, "specification", nullcontext)
    agreement.agreeing.cache_clear()
    assert main(["formats"]) == 0
    assert "NVFP4" in capsys.readouterr().out
    assert main(["recipes", "--agreement"]) == 0
    short = capsys.readouterr().out
    assert re.search(r"mxfp4-te = mxfp4-flashinfer = mxfp4-torchao-rceil and \d+ more\n", short)
    assert main(["recipes", "--agreement", "--long"]) == 0
    assert "mxfp4-torchao-rceil = mxfp4-torchao-rceil-018 = " in capsys.readouterr().out


def test_the_list_of_recipes_is_short_without_long(capsys, monkeypatch) -> None:
    monkeypatch.setattr("fp4kit.cli.output._width", lambda: 80)
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2 * (len(recipes()) + 1) + 2 and max(map(len, lines)) <= 80
    )  # a line with the name, and one below
    monkeypatch.setattr("fp4kit.cli.output._width", lambda: None)
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert out.split("\n")[0].split() == ["recipe", "block", "scale", "rule", "evidence", "versions"]
    assert max(map(len, out.splitlines())) < 160
    assert main(["recipes", "nvfp4-te", "--long"]) == 0
    out = capsys.readouterr().out
    assert "equal bit for bit to" in out and recipe("nvfp4-te").source in out


def test_the_list_of_engines_is_short_without_long(capsys) -> None:
    for options, width in ([], 135), (["--long"], 190):
        assert main(["contract", "--list", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) < width and ("activations" in lines[0]) == bool(options)


@pytest.mark.parametrize("word", ["nvfp4", "mxfp4", "modelopt", "mxfp4-torchao", "nvfp4-te"])
def test_every_option_selects_the_same_recipes(word, capsys, monkeypatch) -> None:
    assert main(["recipes", word, "--json"]) == 0
    listed = tuple(one["id"] for one in json.loads(capsys.readouterr().out)["recipes"])
    assert (len(listed) == 1) == (word == "nvfp4-te")
    asked = []
    for name in ("_check", "live", "_versions"):
        monkeypatch.setattr(f"fp4kit.cli.recipes.{name}", lambda out, ids, *_: asked.append(ids) or 0)
        assert main(["recipes", word, f"--{name.strip('_')}"]) == 0
    assert asked == [listed] * 3
    assert main(["recipes", word, "--agreement", "--json"]) == 0
    groups = [[*one.values()][-1].split(" = ") for one in json.loads(capsys.readouterr().out)["groups"]]
    assert groups and all({*group} & {*listed} for group in groups)


def test_check_of_a_recipe_without_recorded_outputs(capsys) -> None:
    assert main(["recipes", "nvfp4-deepseek-v4", "--check"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "no recorded outputs: derived from the producer's source code"


def test_every_format_that_is_listed_has_values(capsys) -> None:
    """FORMAT, and the names in the errors, are all names that the list shows."""
    assert main(["formats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = (("formats", "format"), ("block_formats", "block_format"), ("hierarchical_formats", "hierarchical_format"))
    names: dict[str, str] = {}
    for key, title in kinds:
        for row in found[key]:
            names.setdefault(row[title], title)
    for name, title in names.items():
        assert main(["formats", name.lower()]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1].split()[0].isdigit()
        assert title == "format" or re.search(rf"^{title.replace('_', ' ')} .*\n{name} ", out)
    assert main(["formats", "zz"]) == 2
    assert f"needs one of {', '.join(names)}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "--recipie", "nvfp4", "a", "b"], "unrecognized argument --recipie; did you mean --recipe?"),
        (["convert", "--recipie=nvfp4"], "fp4kit convert: unrecognized argument --recipie; did you mean --recipe?"),
        (["convert", "a", "b", "--dryrun"], "fp4kit convert: unrecognized argument --dryrun; did you mean --dry-run?"),
        (["convert", "--rec", "nvfp4", "a", "b"], "unrecognized argument --rec; did you mean --recipe?"),
        (["convert", "--xyzzy"], "fp4kit convert: unrecognized argument --xyzzy; see fp4kit convert --help"),
        (["convert", "-x"], "fp4kit convert: unrecognized argument -x; see fp4kit convert --help"),
        (["inspect", "a", "b"], "fp4kit inspect: unrecognized argument b; see fp4kit inspect --help"),
        (["inspect"], "fp4kit inspect: the following arguments are required: PATH; see fp4kit inspect --help"),
        (["convert", "--recipe"], "fp4kit convert: argument --recipe: expected one argument; see fp4kit convert"),
        (["convert", "--input-scale", "x"], "fp4kit convert: argument --input-scale: invalid float value: 'x'; see "),
        (["recipes", "--check", "--agreement"], "argument --agreement: not allowed with argument --check; see "),
        (["--versoin"], "fp4kit: unrecognized argument --versoin; did you mean --version?"),
        (["--quiet", "formats"], "fp4kit: unrecognized argument --quiet; see fp4kit --help"),
        (["convrt", "a", "b"], "fp4kit: argument COMMAND: there is no 'convrt'; did you mean convert?"),
        (["convert", "a", "-o", "b"], "unrecognized argument -o; name the destination as the second path, SRC DST"),
        (["convert", "a", "b", "--dtype", "bf16"], "argument --dtype; the recipe sets the format; --format bf16"),
        (["convert", "a", "b", "--group-size", "32"], "argument --group-size; the recipe sets it; use --recipe; see"),
        (["verify", "q", "m"], "fp4kit verify: unrecognized argument m; did you mean --source m?\n"),
        (["convert", "a", "b", "--gpu"], "fp4kit convert: unrecognized argument --gpu; use --device cuda; see"),
        (
            ["explain", "a"],
            "COMMAND: there is no 'explain'; in Python, help(fp4kit.explain) describes it; see fp4kit --help",
        ),
        (["convert", "a", "b", "--exclude", "x"], "unrecognized argument --exclude; use --keep; see"),
        (["help"], "fp4kit: argument COMMAND: there is no 'help'; did you mean --help?"),
        (["quantize", "a", "b"], "fp4kit: argument COMMAND: there is no 'quantize'; did you mean convert?"),
        (
            ["convert", "a", "b", "--format", "vllm"],
            "there is no 'vllm'; use --format modelopt for vLLM and SGLang, or",
        ),
        (["convert", "a", "b", "--format", "nvfp4"], "no 'nvfp4'; formats are containers; use --recipe nvfp4"),
        (["xyzzy"], "fp4kit: argument COMMAND: there is no 'xyzzy'; needs one of convert, reconcile, diff, "),
        (["--print-completion", "fish"], "argument --print-completion: there is no 'fish'; needs one of bash, zsh"),
        (["recipes", "nvfp4-tee"], "did you mean 'nvfp4-te' or "),
        (["recipes", "nvfp4-ta"], "fp4kit recipes: no recipe is called 'nvfp4-ta'; did you mean 'nvfp4-te'"),
        (["contract", "--engine", "vlm", "--scheme", "x"], "fp4kit contract: engine is 'vlm'; needs one of 'transf"),
        (["contract", "--engine", "vLLM", "--scheme", "x", "--long"], "--long was given without --list; add --list"),
        (["recipes", "--check", "--long"], "--long is for the list of recipes, --agreement and --live; leave it out"),
        (["formats", "zz"], "needs one of E2M1, E1M2, "),
        (["recipes", "nvfp4", "--presets"], "--presets lists all presets, which are no recipes; leave out nvfp4"),
        (["recipes", "--golden", "x"], "fp4kit recipes: --golden was given without --check; add --check"),
        (["recipes", "--check", "--golden", "nowhere"], "nowhere is neither"),
    ],
)
def test_errors_of_wrong_arguments(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_options_may_stand_anywhere(capsys) -> None:
    assert main(["convert", "nowhere", "--recipe", "nvfp4", "out"]) == 2
    assert capsys.readouterr().err.startswith("fp4kit convert: nowhere: does not exist")
    assert main(["inspect", "--", "--json"]) == 2
    assert capsys.readouterr().err.startswith("fp4kit inspect: --json: does not exist")


def test_help_and_version(capsys) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Exit codes: 0 done, 1 a difference" in out and "convert" in out
    assert main([]) == 0 and capsys.readouterr().out == out
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fp4kit {fp4kit.__version__}\n"


def test_the_help_of_convert_shows_ten_options_then_five_examples_and_help_all_the_rest(capsys) -> None:
    def shown(option: str) -> set[str]:
        assert main(["convert", option]) == 0
        return {*re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)}

    usual, everything = shown("--help"), shown("--help-all")
    assert usual == shown("--help") and len(usual) == 12 and {"--demo", "--recipe", "--resume"} < usual < everything
    command = commands()["convert"]
    assert everything == {one for one in command._option_string_actions if one.startswith("--")}
    assert main(["convert", "--help"]) == 0
    options, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert "--resume" in options and "\n  fp4kit " not in options
    assert re.findall(r"^  (fp4kit .+)$", examples, re.MULTILINE) == [*command.examples][:5]
    assert examples.count("\n") == 10 and len(command.examples) > 5


def test_help_lists_each_command_on_one_line_under_a_heading(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\nExit codes")[0].splitlines()
    headings = ["convert and serve", "check and compare", "find out", "measure and prove"]
    assert [line.strip(" :") for line in listed if re.match(r"  \S", line)] == headings
    assert [line.split()[0] for line in listed if re.match(r"    \S", line)] == list(commands())
    assert len([line for line in listed if line]) == len(headings) + len(commands())


def test_every_help_begins_with_examples_that_parse(capsys) -> None:
    for name, command in {"": parser(), **commands()}.items():
        assert main([*([name] if name else []), "--help-all" if command.usual else "--help"]) == 0
        text = capsys.readouterr().out
        assert re.match(r"usage: fp4kit .*?\n\nexamples:\n  fp4kit \S+", text, re.DOTALL), name
        for example in command.examples:
            assert example.startswith(f"fp4kit {name}") and f"\n  {example}\n      " in text
            assert parser().parse_args(shlex.split(example)[1:]).func is not None


def test_a_command_imports_no_module_of_another_command() -> None:
    """--help and --version import no module of a command, and ``formats --json`` imports only its own.

    None of them imports fp4kit.checkpoint.
    """
    script = """
import sys
from fp4kit import cli
cli.main(sys.argv[1:])
print(*(name for name in sys.modules if name.startswith("fp4kit.c")), file=sys.stderr)
"""
    every = {module for modules in cli._GROUPS.values() for module in modules}
    for arguments, expected in (["--help"], set()), (["--version"], set()), (["formats", "--json"], {"recipes"}):
        result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
        found = {name.split(".")[2] for name in result.stderr.split() if name.startswith("fp4kit.cli.")}
        assert found & every == expected
        assert "fp4kit.checkpoint" not in result.stderr.split()


def test_the_parser_of_one_command_parses_as_that_of_all_commands() -> None:
    """A command's help, and the list of commands, do not depend on which modules are imported.

    Every command has the options --json and --quiet.
    """
    whole = parser().format_help()
    for name, command in commands().items():
        assert parser([name, "--quiet"]).format_help() == whole
        assert commands([name, "--quiet"])[name].format_help() == command.format_help()
        assert {"--json", "--quiet"} <= command._option_string_actions.keys()
        assert command.get_default("func") and not command.allow_abbrev
    assert commands(["--print-completion=zsh"])["verify"].get_default("func")


@pytest.mark.parametrize(
    ("arguments", "schema", "key", "count"),
    [
        (["recipes"], "recipes/1", "recipes", len(recipes())),
        (["recipes", "nvfp4-te", "--check"], "recipes.check/1", "recipes", 1),
        (["recipes", "--agreement"], "agreement/1", "groups", 58),
        (["formats"], "formats/1", "formats", 17),
        (["formats"], "formats/1", "hierarchical_formats", 5),
        (["formats", "UE5M3"], "formats.values/1", "values", 256),
        (["formats", "nvfp4"], "formats.values/1", "values", 16),
    ],
)
def test_json(arguments, schema, key, count, capsys) -> None:
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["schema"] == f"fp4kit.{schema}" and len(found[key]) == count and err == ""
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_an_encoding_without_the_signs_of_names() -> None:
    """A character that the terminal's encoding lacks is escaped, so that no UnicodeEncodeError ends the command."""
    command = [sys.executable, "-m", "fp4kit", "inspect", "n\u00e4\udcffme"]
    run = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert run.returncode == 2 and run.stderr.startswith(b"fp4kit inspect: n\\xe4\\udcffme: does not exist")


def test_completion_without_shtab(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    message = 'fp4kit: --print-completion: shtab is missing; run pip install "fp4kit[completion]"\n'
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", shell]) == 0
    out = capsys.readouterr().out
    assert "convert" in out and "--remove-stale" in out


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
    assert out.startswith("1 of 2 layers differs; compared 128 of 4,096 elements in 2 layers\n")
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
        (
            ["train.json", "none"],
            "none: does not exist; a contract (.json), a model directory, a .safe",
        ),
        (["train.json", "w.safetensors"], "train quantizes weights, but none are given; pass the unquantized model"),
        (["train.json", "rollout.json", "--layers", "0"], "needs at least 1"),
    ):
        assert main(["parity", *arguments]) == 2
        assert message in capsys.readouterr().err
