"""Test that examples/refit_check.py passes after a refit of a real engine, and names what a faulty refit did."""

import ast
import copy
from pathlib import Path

import pytest

import fp4kit
from fp4kit.checkpoint import convert

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
example = pytest.importorskip("examples.refit_check")

RECIPE = "nvfp4-compressed-tensors"


@pytest.fixture(scope="module")
def refitted(tmp_path_factory):
    """Return (trainer's model, engine's model, folder), where the engine loaded the converted weights."""
    folder = tmp_path_factory.mktemp("refit")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    trainer = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    trainer.save_pretrained(folder / "trained")
    convert(folder / "trained", folder / "served", RECIPE, format="compressed-tensors")
    engine = transformers.AutoModelForCausalLM.from_pretrained(folder / "served", dtype=torch.bfloat16)
    return trainer, engine, folder


@pytest.fixture(autouse=True)
def contract(refitted, monkeypatch):
    monkeypatch.setenv("REFIT_CONTRACT", str(refitted[2] / "served" / "fp4kit_contract.json"))


def test_all_ways_to_call_it(refitted):
    trainer, engine, folder = refitted
    sample = example.sample(trainer.named_parameters(), 1)
    assert {int(name.split(".")[2]) for name in sample} == {0, 1, 4, 5} and len(sample) == 4 * 7
    found = example.check(engine, [*sample.items()])  # SGLang's custom weight loader
    assert found.equal and len([x for x in found.layers if x.kind == "weight"]) == 28
    safetensors.save_file({name: x.contiguous() for name, x in sample.items()}, folder / "sample.safetensors")
    worker = type("Worker", (example.Checked,), {"get_model": lambda self: engine})()  # vLLM's collective_rpc
    assert worker.check_refit(str(folder / "sample.safetensors")).startswith("28 layers are equal in every bit")


def test_a_stale_engine_and_a_stale_layer(refitted):
    trainer, engine, _ = refitted
    stepped = copy.deepcopy(trainer)
    with torch.no_grad():
        stepped.model.layers[2].mlp.up_proj.weight.mul_(1.5)
    assert example.check(engine, example.sample(stepped.named_parameters(), 1)).equal  # layer 2 is not in this sample
    with pytest.raises(RuntimeError, match=r"does not hold the trainer's weights\n\d of 28 layers differ") as error:
        example.check(engine, example.sample(stepped.named_parameters(), 0))
    assert "model.layers.2.mlp.up_proj" in str(error.value)


def test_it_has_at_most_40_lines_of_code():
    source = Path(example.__file__).read_text(encoding="utf-8")
    prose = {
        i
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for i in range(node.lineno, node.end_lineno + 1)
    }
    lines = [i for i, line in enumerate(source.splitlines(), 1) if line.strip() and i not in prose]
    assert len(lines) <= 40 and fp4kit.__name__ in source
