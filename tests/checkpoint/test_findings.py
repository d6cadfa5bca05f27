"""Test that the plan of a conversion, the report on its result, and verify find the same faults."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive
from together import together

import fp4kit
from fp4kit.checkpoint import CheckpointError, Wishes, convert, execute, make_plan
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.findings import engines_that_load, findings_of_plan
from fp4kit.checkpoint.plan.request import FORMATS
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.cli.conversion_summary import _error_lines, summary_of
from fp4kit.recipes import RECIPES

TARGETS = (
    *(("nvfp4-te", "modelopt"), ("nvfp4-te", "compressed-tensors"), ("mxfp4-ocp", "compressed-tensors")),
    *(("mxfp4-ocp", "gpt-oss"), ("mxfp4-ocp", "deepseek-v4"), ("mxfp4-ocp", "mlx"), ("mxfp8-te", "modelopt")),
    *(("mxfp8-te", "sglang-mxfp8"), ("fp8-modelopt", "modelopt"), ("fp8-transformers-block", "fp8")),
    *(("fp8-transformers-block", "compressed-tensors"), ("nvfp4-comfy-kitchen", "comfy"), ("nvfp4-te", "bf16")),
)
# Layers to convert: all; one layer of a fused one is left out; one expert alone; one part of each expert is left out.
KEPT = ((), ("*.k_proj", "*.key"), ("*.experts.*.down_proj", "*.w2"))
CHOICES = (*(Wishes(keep=names) for names in KEPT), Wishes(only=("*.experts.1.*", "*.q_proj")))
OPTIONS = {"fp8-modelopt": {"input_scale": 1.0}}
FAMILIES = ("wide", "dense", "gpt_oss_mxfp4", "deepseek_v4")
OTHERS = ("moe", "vlm_moe", "fused", "deepseek", "bert", "vlm", "mixtral", "gpt_oss", "deepseek_fp8")


def facts(issues: Iterable[Issue]) -> set[tuple[str, str, str, str]]:
    return {(one.severity, one.loader, one.subject, one.text) for one in issues}


def check(source: Path, out: Path, recipe: str, **options: Any) -> bool | None:
    """Convert a model, and compare the findings of plan, report and verify.

    Return whether the result is clean, or None if the conversion is refused.
    """
    try:
        plan = make_plan(source, recipe, requantize=True, **options)
    except CheckpointError:
        return None
    report = execute(plan, out)
    found = verify(report.files[0] if report.files else out)
    # make_plan leaves out what its own warnings say already
    own = {one for one in facts(report.findings) if one[3] not in plan.warnings}
    assert facts(plan.findings) <= own <= facts(found.issues)
    assert {one for one in own if one[0] == "error"} <= facts(plan.findings)
    assert any(one.severity == "error" for one in report.findings) == (not found.clean), found.issues
    summary = summary_of(report)
    doubted = {one.loader.partition(" ")[0] for one in found.issues if one.severity == "error"}
    assert doubted.isdisjoint(summary.engines) and doubted == {name.partition(" ")[0] for name in summary.rejections}
    if out.is_dir() and plan.form is not None and plan.form.format not in ("mlx", "comfy"):
        assert summary.engines == engines_that_load(plan.format_name, plan.source.config, found.issues)
    return found.clean


def wide(root: Path) -> None:
    """Write a model whose layers have whole blocks of 128 columns, except down_proj. Some have 192 rows."""
    sizes = {"gate_proj": (192, 128), "up_proj": (192, 128), "down_proj": (128, 192)}
    tensors = {f"{{}}.{name}.weight": shape for name, shape in sizes.items()}
    modules = ("model.layers.0.mlp", *(f"model.layers.1.mlp.experts.{i}" for i in range(2)))
    values = {
        name.format(module): synthetic.random(name.format(module), shape)
        for module in modules
        for name, shape in tensors.items()
    }
    for name in "qkvo":
        values[f"model.layers.0.self_attn.{name}_proj.weight"] = synthetic.random(name, (128, 128))
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 2, "hidden_size": 128}
    synthetic.write_model(root, config, values)


@cache
def model(folder: Path, family: str) -> Path:
    (wide if family == "wide" else getattr(synthetic, family))(folder / family)
    return folder / family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("families", [FAMILIES, *exhaustive([OTHERS])], ids=["some", "others"])
def test_what_convert_calls_loadable_verify_accepts(families: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    made = set()
    for recipe, format in TARGETS:
        for family in families:
            out = tmp_path / f"{family}-{recipe}-{format}"
            if check(model(folder, family), out, recipe, format=format, **OPTIONS.get(recipe, {})) is not None:
                made.add((recipe, format))
    assert families == OTHERS or made == {*TARGETS}, {*TARGETS} - made


@together("format", ["modelopt", "compressed-tensors", "fp8"])
def test_what_verify_rejects_convert_does_not_call_loadable(format: str, folder: Path, tmp_path: Path) -> None:
    """Layers that engines load as one, only some of which are converted, are found before and after the run."""
    recipe = {"fp8": "fp8-transformers-block"}.get(format, "nvfp4-te")
    found = [
        check(model(folder, family), tmp_path / f"{family}{i}{format}", recipe, format=format, wishes=wishes)
        for i, wishes in enumerate(CHOICES)
        for family in ("wide", "dense", "moe", "mixtral")
    ]
    assert False in found and (True in found or format == "fp8")


def test_files(tmp_path: Path) -> None:
    """Results that are one file have the same findings before and after the run, too."""
    gguf_files.write_model(tmp_path / "m.gguf")
    assert check(tmp_path / "m.gguf", tmp_path / "q.gguf", "nvfp4-te")
    values = {f"fc{i}.weight": synthetic.random(f"fc{i}", (64, 64)) for i in range(2)}
    synthetic.write_file(tmp_path / "m.safetensors", values)
    for destination in ("q.safetensors", "q"):
        report = execute(make_plan(tmp_path / "m.safetensors", "nvfp4-te"), tmp_path / destination)
        assert facts(findings_of_plan(report.plan, tmp_path / destination)) == facts(report.findings)
        assert facts(report.findings) <= facts(verify(tmp_path / destination).issues)


# Files beside a model: (name, whether the model has an index, text that says what engines do with the file)
BESIDE = (
    ("mtp.safetensors", True, "SGLang does, for the 1 layer of multi-token prediction"),
    ("extra.safetensors", True, "declares 1 layer of multi-token prediction, which may be in it"),
    ("consolidated.safetensors", True, "is not named by model.safetensors.index.json, so vLLM and transformers do not"),
    ("adapter_model.safetensors", True, "is an adapter (PEFT)"),
    ("mtp.safetensors", False, "vLLM and SGLang load all safetensors files"),
    ("consolidated.safetensors", False, "model.safetensors alone is read here and by transformers"),
    ("adapter_model.safetensors", False, "is an adapter (PEFT)"),
)


@together("name, index, text", BESIDE)
def test_weights_outside_the_model_are_named(name: str, index: bool, text: str, tmp_path: Path) -> None:
    source = tmp_path / f"{name}{index}"
    tensors = synthetic.dense(tmp_path / f"{name}{index}s")
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    synthetic.write_model(source, config, tensors, (lambda one: int("layers.1" in one)) if index else None)
    synthetic.write_file(source / name, {"model.layers.2.eh_proj.weight": synthetic.random("eh", (64, 128))})
    assert [one.severity for one in verify(source).issues if one.subject == name and text in one.text] == ["warning"]
    (warning,) = (line for line in make_plan(source).warnings if line.startswith(f"{name}: "))
    assert text in warning and warning.endswith("it is not converted")


def experts_model(
    root: Path, config: dict[str, Any], scales: dict[str, float], ignore: list[str], more: tuple[str, ...] = ()
) -> Path:
    """Write a model of two layers of four experts in Model-Optimizer's NVFP4, with these input scales.

    more: further modules to quantize.
    """
    modules = [f"model.layers.{i}.mlp.experts.{j}.{leaf}_proj" for i in range(2) for j in range(4) for leaf in LEAVES]
    tensors = {f"model.layers.{i}.mlp.gate.weight": synthetic.random(f"gate{i}", (4, 64)) for i in range(2)}
    tensors["lm_head.weight"] = synthetic.random("head", (64, 64))
    for module in [*modules, *more]:
        q = fp4kit.quantize(synthetic.random(module, (64, 64)), "nvfp4-modelopt", tensor_amax=np.float32(0.1))
        tensors |= {f"{module}.weight": q.packed, f"{module}.weight_scale": q.block_scale.view(synthetic.E4M3)}
        tensors[f"{module}.weight_scale_2"] = np.asarray(q.tensor_scale, np.float32)
        if scales:
            value = next((value for name, value in scales.items() if name in module), scales[""])
            tensors[f"{module}.input_scale"] = np.array(value, np.float32)
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    base = {"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 2, "quantization_config": declared}
    synthetic.write_model(root, {**base, **config}, tensors)
    return root


LEAVES, DEAD, GATE = ("gate", "up", "down"), "layers.1.mlp.experts.3.", "layers.0.mlp.experts.1.gate_proj"
ROUTERS = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
# Input scales: (scales by a part of the layer's name, text of the finding, its severity in a dry run)
INPUT_SCALES = (
    ({DEAD: 1e-30, "": 0.01}, "times the median of 8 layers of its kind", "warning"),
    ({GATE: 10.0, "": 0.01}, "input scales differ by a factor of 1000", "warning"),
    ({DEAD: 1e-41, "": 0.01}, "input_global_scale is inf; a positive finite number is needed", "error"),
)


@together("scales, text, severity", INPUT_SCALES)
def test_input_scales_are_doubted_before_the_run(
    scales: dict[str, float], text: str, severity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run, the conversion and verify say the same about input scales that the conversion carries over."""
    source = experts_model(tmp_path / str(len([*tmp_path.iterdir()])), {}, scales, ROUTERS)
    out, arguments = Path(f"{source}o"), ["--format", "compressed-tensors"]
    code = main(["convert", str(source), str(out), *arguments, "--dry-run"])
    dry = [line for line in capsys.readouterr().out.replace("\n  ", " ").splitlines() if text in line]
    assert dry and dry[0].startswith(severity) and code == (severity == "error")
    code = main(["convert", str(source), str(out), *arguments])
    if severity == "error":
        assert code == 2 and "a positive normal float32 is needed" in capsys.readouterr().err
        return
    lines = capsys.readouterr().out.replace("\n  ", " ").splitlines()
    assert code == 0 and [line for line in lines if text in line] == dry
    assert any(text in issue.text for issue in verify(out).issues)


def test_no_input_scale_is_an_error_where_engines_need_one(tmp_path: Path) -> None:
    source = experts_model(tmp_path / "m", {}, {}, ROUTERS)
    assert any("input_scale is missing; the engine uses uninit" in one.text for one in verify(source).issues)


def test_engines_that_reject_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 in blocks of 128 leaves down_proj of 192 columns in 16 bits, so that no engine loads the experts."""
    wide(tmp_path / "m")
    arguments = ["convert", str(tmp_path / "m"), str(tmp_path / "o"), "--format", "fp8"]
    assert main([*arguments, "--recipe", "fp8-transformers-block"]) == 1
    out = capsys.readouterr().out.replace("\n  ", " ")
    assert "rejected by vLLM 0.33.0: " in out and "engines that load" not in out and "serve:" not in out
    assert "needs all or none" in out and main(["verify", str(tmp_path / "o")]) == 1


def test_the_engine_that_the_user_names_must_load_the_result(tmp_path: Path, capsys: Any) -> None:
    """transformers decodes experts in NVFP4 wrongly. Only if --engine names transformers, convert stops."""
    synthetic.moe(tmp_path / "m")
    arguments = ["convert", str(tmp_path / "m"), str(tmp_path / "o"), "--scheme", "nvfp4-w4a4", "--input-scale", "1"]
    assert main([*arguments, "--engine", "transformers", "--dry-run"]) == 1
    assert "error: transformers 5.23.0: model: wrong values: the engine" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--engine", "transformers"]) == 2 and not (tmp_path / "o").exists()
    said = capsys.readouterr().err
    assert "use transformers mxfp4-w4a16, transformers mxfp4-w4a4" in said and "transformers nvfp4-w4a4," not in said
    assert main([*arguments, "--engine", "transformers", "--keep", "*.experts.*", "--dry-run"]) == 0
    assert main([*arguments, "--engine", "vllm"]) == 0 and "transformers 5" not in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["nvfp4-w4a16", "nvfp4-w4a4"])
def test_no_scheme_is_suggested_if_an_engine_does_not_rotate(scheme: str, tmp_path: Path, capsys: Any) -> None:
    synthetic.dense(tmp_path / "m")
    arguments = ["convert", str(tmp_path / "m"), str(tmp_path / "o"), "--hadamard", "16", "--engine", "transformers"]
    assert main([*arguments, "--scheme", scheme, *["--input-scale", "1"] * scheme.endswith("a4")]) == 2
    said = capsys.readouterr().err.partition("nothing was written; ")[2]
    assert said.startswith("leave out --hadamard, ") and "nvfp4" not in said


def test_routers_and_heads(tmp_path: Path) -> None:
    """An unquantized router that is not excluded is an error; a quantized head is named, and is an error if tied."""
    source = experts_model(tmp_path / "a", {}, {"": 0.01}, ["lm_head"])
    wrong = {one.subject for one in verify(source).issues if one.severity == "error"}
    assert wrong == {f"model.layers.{i}.mlp.gate" for i in range(2)}
    for tied in (False, True):
        source = experts_model(
            tmp_path / f"{tied}", {"tie_word_embeddings": tied}, {"": 0.01}, ROUTERS[1:], more=("lm_head",)
        )
        found = {(one.severity, one.text) for one in verify(source).issues if "lm_head" in one.subject + one.text}
        assert len(found) == 1
        ((severity, text),) = found
        assert (severity, "vLLM loads it" in text) == (("error", False) if tied else ("warning", True))


def test_a_decoded_model_has_no_transforms_to_warn_of(tmp_path: Path) -> None:
    """A rotated model is doubted in transformers and SGLang; its decoded copy, which has no transform, is not."""
    synthetic.dense(tmp_path / "m")
    rotated = execute(make_plan(tmp_path / "m", "nvfp4-te", format="compressed-tensors", hadamard=16), tmp_path / "q")
    decoded = execute(make_plan(tmp_path / "q", format="bf16"), tmp_path / "b")
    for report, expected in ((rotated, True), (decoded, False)):
        for texts in (report.plan.warnings, [one.text for one in verify(report.destination).issues]):
            assert any("ignores transform_config" in text for text in texts) == expected
    assert "transformers" not in summary_of(rotated).engines and "transformers" in summary_of(decoded).engines


def test_errors_of_samples_are_called_so(tmp_path: Path) -> None:
    """If convert measures all rows, its error is that of verify, to the digit; otherwise, it says that it sampled."""
    for rows in (64, 512):
        source, out = tmp_path / f"m{rows}", tmp_path / f"q{rows}"
        values = {f"model.layers.0.mlp.{leaf}": synthetic.random(leaf, (rows, 64)) for leaf in ("gate_proj", "up_proj")}
        synthetic.write_model(source, {"model_type": "llama"}, {f"{name}.weight": x for name, x in values.items()})
        error = summary_of(execute(make_plan(source, "nvfp4-te"), out)).error
        assert error is not None and error.is_whole == (rows == 64)
        found = {layer.name: layer.tally.sqnr_db for layer in verify(out, source).layers}
        assert ({*error.layers} == {*found.items()}) == error.is_whole
        assert ("sampled" in " ".join(_error_lines(error))) == (not error.is_whole)


def errors(issues: Iterable[Issue]) -> set[tuple[str, ...]]:
    return {one for one in facts(issues) if one[0] == "error"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_are_not_finite(recipe: str, tmp_path: Path) -> None:
    """Whatever a recipe makes of NaN and infinity, and whatever becomes of the layer then, convert counts the values
    and reports the faults that verify does.
    """
    values = np.random.default_rng(0).standard_normal((2, 256, 128), np.float32)
    values[0, 3, 5], values[0, 40, 64:96] = np.inf, np.nan
    names = ("a.up_proj.weight", "a.down_proj.weight")
    synthetic.write_model(tmp_path / "m", {}, dict(zip(names, values, strict=True)))
    for form in (*FORMATS[:-1], "mlx"):
        try:
            report = convert(tmp_path / "m", tmp_path / form, recipe, format=form, nonfinite="keep")
        except CheckpointError:
            continue
        assert report.nonfinite == {"a.up_proj": 33} and "; 33 NaN or infinite)" in repr(report)
        found = verify(tmp_path / form)
        assert errors(report.findings) == errors(found.issues)  # for down_proj too, which is finite in the source
        is_bad = bool(found.total.nan_scales or found.total.nan_codes)
        assert is_bad == any(one.severity == "error" and "NaN" in one.text for one in report.findings)
        for other in ("bf16", "modelopt", "compressed-tensors"):  # decoded, renamed, cast or quantized again
            target, options = tmp_path / f"{form}-{other}", {"nonfinite": "keep", "requantize": True}
            try:
                again = convert(tmp_path / form, target, format=other, **options)  # type: ignore[arg-type]
            except CheckpointError:
                continue
            assert errors(again.findings) == errors(verify(target).issues)
            assert bool(again.nonfinite) >= is_bad
