"""Test that a plan chooses the weights and groups that the converter chooses for published models."""

import json

import pytest
import synthetic

import fp4kit
from fp4kit import qat as plan
from fp4kit.checkpoint import make_plan
from fp4kit.checkpoint.model.weights import has_transposed_stacks
from fp4kit.qat import QuantizedNames

MODELS = synthetic.MODELS | synthetic.GPT_OSS
KINDS = {2: "matrix", 3: "stack"}


def planned(root, tensors, recipe, **options):
    """Return the plan for a model in training that has the tensors of a directory."""
    config, weights = json.loads((root / "config.json").read_text()), []
    for name, x in tensors.items():
        stack = x.ndim == 3 and ".experts." in name
        shape = (x.shape[0], x.shape[2], x.shape[1]) if stack and has_transposed_stacks(config) else x.shape
        weights.append(plan.TrainedWeight(name, name, shape, x.dtype.name, "stack" if stack else "matrix"))
    choice = plan.QatChoice.of("test", recipe, options.pop("format", None), config, None, **options)
    return plan.make_plan(choice, weights)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp"])
@pytest.mark.parametrize("model", MODELS)
def test_the_choice_is_that_of_the_converter(tmp_path, model, recipe):
    tensors = MODELS[model](tmp_path / "m")
    if (model, recipe) == ("gpt_oss", "nvfp4-te"):  # gate and up alternate, which no format of NVFP4 can store
        found = planned(tmp_path / "m", tensors, recipe)
        assert found.format == "" and "gpt" in found.note
        return
    converted = make_plan(tmp_path / "m", recipe)
    found = planned(tmp_path / "m", tensors, recipe)
    assert sorted(found.names) == sorted(tensor.name for tensor in converted.converted)
    assert found.format == converted.form.format
    reasons = {row.name: row.reason for row in found.rows}
    groups = {row.name.removesuffix(".weight"): row.group for row in found.rows if tensors[row.name].ndim == 2}
    shared = {name: group for tensor in converted.converted for name, group in tensor.group.items()}
    assert {name: group for name, group in groups.items() if group} == {n: g for n, g in shared.items() if n in groups}
    for tensor in (tensor for shard in converted.shards for tensor in shard.tensors):
        if tensor.name in reasons and tensor not in converted.converted:
            assert reasons[tensor.name] == tensor.reason


def members(plan, name):
    return [row.name for row in plan.members(next(row for row in plan.rows if row.name == name))]


def test_members_of_a_group(tmp_path):
    tensors = synthetic.dense(tmp_path / "m")
    found = planned(tmp_path / "m", tensors, "nvfp4-te")
    attention = "model.layers.0.self_attn"
    assert sorted(members(found, f"{attention}.k_proj.weight")) == [f"{attention}.{n}_proj.weight" for n in "kqv"]
    assert members(found, f"{attention}.o_proj.weight") == [f"{attention}.o_proj.weight"]
    alone = planned(tmp_path / "m", tensors, "mxfp4", exclude=("*.down_proj.weight",))
    assert members(alone, f"{attention}.k_proj.weight") == [f"{attention}.k_proj.weight"] and not alone.shares


def test_decoding_follows_the_format(tmp_path):
    tensors = synthetic.moe(tmp_path / "m")

    def rule(recipe, format):
        return planned(tmp_path / "m", tensors, recipe, format=format).recipe.decode_rule

    assert rule("nvfp4-te", "modelopt") == rule("nvfp4-compressed-tensors", "modelopt") == "product"
    assert rule("nvfp4-te", "compressed-tensors") == "stored_divisor"
    assert rule("nvfp4-compressed-tensors", "compressed-tensors") == "compressed_tensors"
    assert rule("mxfp4-ocp", "compressed-tensors") == rule("mxfp8-te", "sglang-mxfp8") == "e8m0"


def test_a_table_counts_layers_of_one_kind(tmp_path):
    found = QuantizedNames(planned(tmp_path / "m", synthetic.moe(tmp_path / "m"), "nvfp4-te"))
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    experts = [line for line in lines if "experts.*.down_proj.weight" in line]
    assert len(experts) == 1 and experts[0].startswith("yes 4 model.layers.*.mlp.experts.*.down_proj.weight")
    assert sum(int(line.split()[1]) for line in lines[2:]) == len(found.plan.rows)


def test_recipes_of_the_user(tmp_path):
    import dataclasses

    wide = dataclasses.replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
    found = planned(tmp_path / "m", synthetic.dense(tmp_path / "m"), wide)
    assert found.recipe == wide and found.format == "" and "mxfp4-sixteen" in found.note
    assert "model.layers.0.mlp.down_proj.weight" in found.names  # K = 80
