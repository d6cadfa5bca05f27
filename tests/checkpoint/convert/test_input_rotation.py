"""Test --hadamard: layers are rotated before they are quantized, and the config of compressed-tensors declares this."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import synthetic
from oracle import arrays, load
from synthetic import refused

import fp4kit
from fp4kit.__main__ import main
from fp4kit.calibration import Collector
from fp4kit.checkpoint import Activations, ScaleSearch, Wishes, convert, make_plan
from fp4kit.checkpoint.contract import contract_of, contract_of_plan, infer
from fp4kit.checkpoint.findings import findings_of_rotation
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.transforms import decodable
from fp4kit.checkpoint.model.weights import WeightRotation
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

CT = {"format": "compressed-tensors"}
NVFP4, MXFP4, FP8 = "nvfp4-compressed-tensors", "mxfp4-ocp", "fp8-modelopt-channel"
FIRST, ONE = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
LEAVES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
PATTERN = r"re:(.*\.)?{}$"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dense model, one with experts and two rotated versions of the first, and return their directory.

    In the second rotated version, only one layer is quantized.
    """
    root = tmp_path_factory.mktemp("models")
    synthetic.dense(root / "dense")
    synthetic.moe(root / "moe")
    convert(root / "dense", root / "served", NVFP4, hadamard=16, **CT)
    convert(root / "dense", root / "one_layer", NVFP4, hadamard=16, wishes=Wishes(only=(ONE,)), **CT)
    return root


def declared(root: Path) -> Any:
    return json.loads((root / "config.json").read_text())["quantization_config"]["transform_config"]


def rotated_by_hand(source: Path, target: Path, size: int, seed: int | None, names: set[str]) -> Path:
    """Write a copy of a model in which fp4kit.hadamard has rotated the weights of some layers."""
    shutil.copytree(source, target)
    for path in source.glob("*.safetensors"):
        tensors = {
            name: fp4kit.hadamard(x, size, seed=seed) if name.removesuffix(".weight") in names else x
            for name, x in safetensors.numpy.load_file(path).items()
        }
        synthetic.write_file(target / path.name, tensors)
    return target


# (recipe, size, seed, layers, other options, targets). The targets are [] if they are the names of all layers.
CASES: tuple[tuple[str, int, int | None, Wishes, dict[str, Any], list[str]], ...] = (
    (NVFP4, 16, None, Wishes(), {}, [PATTERN.format(leaf) for leaf in LEAVES]),
    (MXFP4, 64, 7, Wishes(keep=("*.down_proj",)), {}, [PATTERN.format(leaf) for leaf in LEAVES if leaf != "down_proj"]),
    (NVFP4, 32, 3, Wishes(keep=("*.down_proj", "model.layers.1.*")), {"recipes": [("*.o_proj", FP8)]}, []),
)


def test_codes_are_those_of_rotated_weights(models: Path, tmp_path: Path) -> None:
    """A result has the tensors of the conversion of rotated weights, one matrix, and targets that match its layers."""
    for i, (recipe, size, seed, wishes, more, expected_targets) in enumerate(CASES):
        out = tmp_path / f"out{i}"
        plan = convert(
            models / "dense", out, recipe, hadamard=size, hadamard_seed=seed, wishes=wishes, **more, **CT
        ).plan
        assert all(f"rotated in blocks of {size}, quantized" in tensor.reason for tensor in plan.converted)
        names = set(plan.rotated_layers)
        by_hand = rotated_by_hand(models / "dense", tmp_path / f"rotated{i}", size, seed, names)
        convert(by_hand, tmp_path / f"plain{i}", recipe, wishes=wishes, **more, **CT)
        found, expected = load(out), load(tmp_path / f"plain{i}")
        assert found.pop(f"{FIRST}.v_input.weight")[2] == WeightRotation.drawn(size, seed).matrix.tobytes()
        assert found == expected and {name for name in found if name.endswith("_packed")}
        model = inspect_checkpoint(out)
        rotations = {w.name: w.rotation for w in decodable(model.tensors, model.config or {}).values() if w.rotation}
        assert rotations == dict.fromkeys(names, WeightRotation.drawn(size, seed).inverted)
        (group,) = declared(out)["config_groups"].values()
        assert group["type"] == ("hadamard" if seed is None else "random-hadamard")
        targets = [apply["targets"] for apply in group["apply"]]
        assert targets[0] == targets[1] == sorted(expected_targets or names)
        assert verify(out, source=models / "dense").clean


def test_decoding_undoes_the_rotation(models: Path, tmp_path: Path) -> None:
    """Decoded layers differ from the source by quantization errors, and verify compares them with the codes."""
    convert(models / "dense", tmp_path / "with_signs", NVFP4, hadamard=16, hadamard_seed=5, **CT)
    for i, served in enumerate((models / "served", tmp_path / "with_signs")):
        convert(served, tmp_path / f"undone{i}", format="bf16")
        assert verify(tmp_path / f"undone{i}", source=served).clean
        source, undone = (arrays(load(root)) for root in (models / "dense", tmp_path / f"undone{i}"))
        assert source.keys() == undone.keys()
        for name, x in source.items():
            error = undone[name].astype(np.float64) - x.astype(np.float64)
            # NVFP4 has a relative error of about 0.095 for normal numbers; a wrong rotation gives more than 1.
            is_layer = name.rpartition(".")[0].rpartition(".")[2] in LEAVES
            assert np.linalg.norm(error) <= (0.11 * np.linalg.norm(x.astype(np.float64)) if is_layer else 0), name


def test_records_of_the_rotation(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest, the contract, the items and the documents of the commands tell of the rotation."""
    made = models / "served"
    assert json.loads((made / "fp4kit_manifest.json").read_text())["request"]["hadamard"] == 16
    for contract in (contract_of(made), infer(inspect_checkpoint(made), None)):
        assert (contract.hadamard, contract.hadamard_signs) == (16, "+" * 16)
    options = [{"hadamard": 32, "wishes": Wishes(only=(ONE,))}, {"hadamard": 16, "hadamard_seed": 5}, {}]
    signs = [contract_of_plan(make_plan(models / "dense", NVFP4, **one, **CT)).hadamard_signs for one in options]
    assert signs == [None, WeightRotation.drawn(16, 5).signs, None]
    whys = {item.name: (item.group, item.why) for item in inspect_checkpoint(made).items}
    assert whys["quantization_config.transform_config"] == (
        "understood",
        "Hadamard transforms of the inputs of 14 layers, undone when the weights are decoded",
    )
    assert whys[f"{FIRST}.v_input.weight"] == ("understood", "the matrix of the transforms in transform_config")
    arguments = ["convert", str(models / "dense"), str(tmp_path / "out"), "--format", "compressed-tensors"]
    assert main([*arguments, "--hadamard", "16", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hadamard"] == 16 and any("transformers" in text for text in document["warnings"])
    assert main(["verify", str(made), "--source", str(models / "dense"), "--json"]) == 0
    issues = json.loads(capsys.readouterr().out)["issues"]
    assert [(one["severity"], one["loader"].split()[0]) for one in issues] == [
        ("warning", "transformers"),
        ("warning", "SGLang"),
    ]
    assert main([*arguments, "--hadamard", "16", "--recipe", NVFP4, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engines"] == ["vLLM"] and document["sqnr"]["median_db"] > 20


def test_some_layers_are_rotated(models: Path, tmp_path: Path) -> None:
    """Layers that no pattern names have the codes of a conversion without rotation, such as routed experts."""
    out, only = tmp_path / "out", ["*.self_attn.o_proj", "*.layers.0.mlp.down_proj"]
    plan = convert(models / "moe", out, NVFP4, hadamard=32, hadamard_only=only, **CT).plan
    names = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)] + ["model.layers.0.mlp.down_proj"]
    assert sorted(plan.rotated_layers) == sorted(names)
    (group,) = declared(out)["config_groups"].values()
    assert group["apply"][0]["targets"] == [names[2], PATTERN.format("o_proj")]
    convert(models / "moe", tmp_path / "plain", NVFP4, **CT)
    found, plain = load(out), load(tmp_path / "plain")
    differing = {name.rpartition(".")[0] for name in found if found[name] != plain.get(name)}
    assert differing == {*names, f"{plan.rotated_layers[0]}.v_input"}
    assert verify(out, source=models / "moe").clean
    assert "hadamard" in contract_of(out).unknown and contract_of(out).hadamard is None


def test_compare_undoes_the_rotation(models: Path, tmp_path: Path) -> None:
    """The values of rotated layers are compared with those of unrotated layers after the rotation is undone."""
    convert(models / "dense", tmp_path / "plain", NVFP4, wishes=Wishes(only=(ONE,)), **CT)
    for other in (models / "dense", tmp_path / "plain"):
        (layer,) = compare_checkpoints(other, models / "one_layer").layers
        assert layer.name == ONE and layer.sqnr_db > 17  # two NVFP4 layers give 20.6 dB each, together 3 dB less


@pytest.mark.exhaustive
def test_recipes_of_rotated_layers_are_identified(models: Path) -> None:
    assert identify_checkpoint(models / "one_layer", models / "dense").recipe == NVFP4


def test_verify_finds_a_wrong_declaration(models: Path, tmp_path: Path) -> None:
    """A declaration of another size, a missing declaration and a changed matrix are errors."""

    def changed(name: str, **keys: Any) -> Path:
        made = tmp_path / name
        shutil.copytree(models / "one_layer", made)
        config = json.loads((made / "config.json").read_text())
        config["quantization_config"]["transform_config"]["config_groups"]["v"].update(keys)
        (made / "config.json").write_text(json.dumps(config))
        return made

    def errors(made: Path, source: Path | None = None) -> str:
        found = verify(made, source)
        return " ".join(f"{issue.subject}: {issue.sentence}" for issue in found.issues if issue.severity == "error")

    assert f"with blocks of 80 for {ONE}, which is not undone" in errors(changed("size", head_dim=80))
    assert f"{ONE}: bytes of codes that differ" in errors(changed("other", head_dim=32), models / "dense")
    missing = changed("missing")
    config = json.loads((missing / "config.json").read_text())
    del config["quantization_config"]["transform_config"]
    (missing / "config.json").write_text(json.dumps(config))
    assert f"{ONE}.v_input.weight" in errors(missing)
    matrix = changed("matrix")
    (path,) = (p for p in matrix.glob("*.safetensors") if WeightRotation(16).matrix.tobytes() in p.read_bytes())
    path.write_bytes(
        path.read_bytes().replace(WeightRotation(16).matrix.tobytes(), (-WeightRotation(16).matrix).tobytes())
    )
    assert "is not the Hadamard matrix of size 16" in errors(matrix)


def test_quantized_layers_are_rotated_only_on_request(models: Path, tmp_path: Path) -> None:
    """A rotation changes codes, so that a quantized source needs requantize=True."""
    only = {"wishes": Wishes(only=(ONE,)), **CT}
    convert(models / "dense", tmp_path / "quantized", NVFP4, **only)
    with refused("is already quantized"):
        make_plan(tmp_path / "quantized", NVFP4, hadamard=16, **only)
    out = tmp_path / "out"
    assert convert(tmp_path / "quantized", out, NVFP4, hadamard=16, requantize=True, **only).actions["requantize"] == 1
    assert verify(out, source=tmp_path / "quantized").clean


SGLANG = {"hadamard": 16, "format": None, "engine": "SGLang", "scheme": "nvfp4-w4a4", "input_scale": 1.0}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("dense", {"hadamard": 24}, "--hadamard 24: is no size; use one of 16, 32, 64, 128, 256, 512"),
    ("dense", {"hadamard_seed": 1}, "--hadamard-seed 1: draws the signs of a transform; add --hadamard SIZE"),
    ("dense", {"hadamard": 16, "hadamard_seed": -1}, "--hadamard-seed -1: needs an integer from 0 to 2^64 - 1"),
    ("dense", {"hadamard_only": ["*"]}, "--hadamard-only *: names layers to rotate; add --hadamard SIZE"),
    ("dense", {"hadamard": 16, "hadamard_only": ["q_proj"]}, "--hadamard-only q_proj: matches no layer that is"),
    ("dense", {"hadamard": 16, "hadamard_only": ["*.q_proj", "*.v_proj"]}, "loaders fuse these layers, so all or none"),
    ("dense", SGLANG, "only the config of compressed-tensors declares rotated inputs; add"),
    ("dense", {"hadamard": 16, "format": "modelopt"}, "only the config of compressed-tensors"),
    ("dense", {"hadamard": 16, "format": "mlx"}, "only the config of compressed-tensors"),
    ("dense", {"hadamard": 16, "format": "bf16"}, "only the config of compressed-tensors"),
    ("dense", {"hadamard": 16, "codes": "x"}, "the codes of another model cannot be rotated; leave --codes out"),
    ("dense", {"hadamard": 16, "nonfinite": "keep"}, "would spread over their blocks; leave --nonfinite keep out"),
    ("dense", {"hadamard": 32}, "the length of their rows is no multiple of the size; use 16, or choose"),
    ("moe", {"hadamard": 16}, "engines do not rotate the inputs of routed experts; choose other layers with"),
    ("served", {"hadamard": 16, "requantize": True}, "declares rotations of the weights"),
)


def test_what_does_not_fit_is_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_plan(models / "dense", NVFP4, hadamard=16).format == "compressed-tensors"  # the default of this model
    for name, options, text in REFUSED:
        with refused(text):
            make_plan(models / name, NVFP4, **{**CT, **options})
    vectors = {f"model.layers.{i}.mlp.up_proj": np.ones(64, np.float32) for i in range(2)}
    synthetic.write_file(tmp_path / "columns.safetensors", vectors)
    search = ScaleSearch.of("mse", tmp_path / "columns.safetensors")
    with refused("column weights belong to columns before the rotation"):
        make_plan(models / "dense", "nvfp4-modelopt-static", hadamard=16, search=search, **CT)
    collector = Collector()
    collector.collect("a", np.ones((1, 16), np.float32))
    collector.save(tmp_path / "inputs.safetensors")
    with refused("activations were measured before the rotation"):
        activations = Activations.of([tmp_path / "inputs.safetensors"])
        make_plan(models / "dense", NVFP4, hadamard=16, activations=activations, **CT)
    assert main(["convert", str(models / "dense"), str(tmp_path / "out"), "--bits", "5", "--hadamard", "16"]) == 2
    assert "--bits: measures errors without a rotation" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_findings_about_engines() -> None:
    assert not [*findings_of_rotation([], ["a.bias"])]
    found = [*findings_of_rotation(["a", "b"], ["a.weight", "a.bias", "b.weight"])]
    assert [one.loader.split()[0] for one in found] == ["transformers", "SGLang", "vLLM"]
    assert found[2].text.endswith("does not run rotated layers that have a bias (a)")
