"""Test the contract that a conversion writes, to which its result is equal, and contracts inferred from checkpoints."""

import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import synthetic
from changed_bytes import change
from exhaustive import exhaustive, half
from safetensors.numpy import save_file

import fp4kit
from fp4kit.checkpoint import CheckpointError, ScaleSearch, Wishes, convert
from fp4kit.checkpoint.model.model_files import differences, load_manifest
from fp4kit.cli import main
from fp4kit.contract.schema import FILE
from fp4kit.recipes import RECIPES

FOREIGN = Path(__file__).parents[2] / "data" / "foreign"
LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the directory of a small unquantized model."""
    folder = tmp_path_factory.mktemp("model") / "source"
    rng = np.random.default_rng(0)
    names = (*(f"model.layers.0.{leaf}" for leaf in LEAVES), "model.embed_tokens")
    tensors = {f"{name}.weight": rng.standard_normal((64, 64), np.float32) for name in names}
    synthetic.write_model(folder, {"model_type": "llama"}, tensors | {"model.norm.weight": np.ones(64, np.float32)})
    return folder


def without_records(folder):
    """Remove the contract of a directory, and fp4kit's records in its config and in the header of its file."""
    (folder / FILE).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["fp4kit"]
    (folder / "config.json").write_text(json.dumps(config))
    synthetic.write_file(folder / "model.safetensors", oracle.arrays(oracle.load(folder)))


def test_a_conversion_writes_its_contract(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te", wishes=Wishes(keep=("*down_proj",)), input_scale=1.0, format="modelopt")
    contract = fp4kit.Contract.of(out)
    assert contract == fp4kit.Contract(
        "nvfp4-te",
        excluded=("model.embed_tokens", "model.layers.0.mlp.down_proj"),
        shared_amax=(("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")),
        input_scales="static",
        container="modelopt NVFP4",
        unknown=("activations", "served_dtype", "kv_cache", "kv_layout", "unit"),
    )
    assert contract.inferred == () and FILE in load_manifest(out)["files"]
    contract.stating(unit="exact").save(out / FILE)  # an edited contract is noticed
    assert any(one.name == FILE and one.text.startswith("has ") for one in differences(out))


def test_a_conversion_with_patterns_and_a_search(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te", recipes=[("*self_attn*", "nvfp4-flashinfer")])
    contract = fp4kit.Contract.of(out)
    assert contract.recipe_of("model.layers.0.self_attn.q_proj").id == "nvfp4-flashinfer"
    assert contract.recipe_of("model.layers.0.mlp.up_proj").id == "nvfp4-te"
    (out / FILE).unlink()
    assert fp4kit.Contract.of(out).patterns == contract.patterns
    search = ScaleSearch("mse")
    convert(source, tmp_path / "searched", "nvfp4-modelopt-static", format="compressed-tensors", search=search)
    assert fp4kit.Contract.of(tmp_path / "searched").scale_search.startswith("mse")
    convert(source, tmp_path / "mx", "mxfp4-ocp", format="compressed-tensors")
    assert fp4kit.Contract.of(tmp_path / "mx").shared_amax == ()
    convert(tmp_path / "mx", tmp_path / "plain", format="bf16")  # the contract of the source is not copied
    plain = fp4kit.Contract.of(tmp_path / "plain")
    assert plain.container == "bf16" and plain.weights is None and "weights" not in plain.unknown


@pytest.mark.parametrize(
    ("recipe", "format", "scale", "keeps"),
    [
        ("nvfp4-te", "modelopt", None, True),
        ("nvfp4-te", "modelopt", 1.0, False),
        ("mxfp4-ocp", "compressed-tensors", None, True),
        ("mxfp8-te", "compressed-tensors", None, False),
        ("mxfp8-te", "modelopt", None, False),
    ],
)
def test_a_config_that_declares_unquantized_inputs(source, tmp_path, capsys, recipe, format, scale, keeps):
    convert(source, tmp_path / "m", recipe, format=format, input_scale=scale)
    capsys.readouterr()
    for _ in ("written", "inferred"):
        contract = fp4kit.Contract.of(tmp_path / "m")
        assert ("activations" not in contract.unknown) == keeps and contract.activations is None
        assert main(["contract", str(tmp_path / "m")]) == 0
        text = capsys.readouterr().out
        assert ("activations: none (inferred: the config declares unquantized inputs)" in text) == keeps
        assert "served_dtype and unit depend on the engine: name it by --engine" in " ".join(text.split())
        (tmp_path / "m" / FILE).unlink(missing_ok=True)


def test_codes_of_another_recipe_make_the_recipe_unknown(source, tmp_path):
    """If only some layers get new codes, the contract names a recipe only if the kept codes have it too."""
    attention = Wishes(keep=("*mlp*",))
    for first, options, weights in (
        ("nvfp4-modelopt", {}, None),
        ("nvfp4-te", {}, "nvfp4-te"),
        ("nvfp4-te", {"recipes": [("*.down_proj", "nvfp4-te-2d")]}, None),
        ("mxfp4-ocp", {}, None),  # cast to NVFP4
    ):
        start, out, renamed = (tmp_path / f"{first}{len(options)}{part}" for part in ("start", "out", "renamed"))
        convert(source, start, first, format="compressed-tensors", wishes=attention)
        convert(start, out, "nvfp4-te", format="compressed-tensors", wishes=Wishes(include=("*mlp*",)), **options)
        convert(out, renamed, format="modelopt")
        contracts = [fp4kit.Contract.of(path) for path in (out, renamed)]
        for path in (out, renamed):
            (path / FILE).unlink()
            contracts.append(fp4kit.Contract.of(path))
        for contract in contracts:
            assert contract.patterns == () and (contract.weights and contract.weights.id) == weights
            assert ("weights" in contract.unknown) == (weights is None)
        assert ("patterns" in contracts[0].unknown) == bool(options)
        own = json.loads((out / "config.json").read_text())["quantization_config"]["fp4kit"]
        assert own["recipe"] == "nvfp4-te" and own.get("codes") == (None if weights else "partly carried")


def test_a_single_file_says_that_its_codes_are_of_several_recipes(source, tmp_path):
    """The metadata of the file has the record."""
    plain, start, out, renamed = (tmp_path / f"{name}.safetensors" for name in ("plain", "start", "out", "renamed"))
    plain.write_bytes((source / "model.safetensors").read_bytes())
    convert(plain, start, "nvfp4-modelopt", wishes=Wishes(keep=("*mlp*",)), format="comfy")
    convert(start, out, "nvfp4-comfy-kitchen", format="comfy", wishes=Wishes(include=("*mlp*",)))
    convert(out, renamed, format="comfy")
    assert "weights" not in fp4kit.Contract.of(start).unknown
    for path in (out, renamed):
        contract = fp4kit.Contract.of(path)
        assert contract.weights is None and "weights" in contract.unknown
    convert(out, tmp_path / "new.safetensors", "mxfp8-te", format="comfy", requantize=True)
    assert fp4kit.Contract.of(tmp_path / "new.safetensors").weights.id == "mxfp8-te"


def test_layers_that_a_conversion_decodes_are_excluded(source, tmp_path):
    convert(source, tmp_path / "start", "nvfp4-modelopt", format="compressed-tensors")
    convert(tmp_path / "start", tmp_path / "out", "nvfp4-te", format="modelopt", wishes=Wishes(keep=("*down_proj",)))
    contract = fp4kit.Contract.of(tmp_path / "out")
    assert contract.weights.id == "nvfp4-modelopt"  # all other layers keep their codes
    assert contract.excluded == ("model.embed_tokens", "model.layers.0.mlp.down_proj")


def test_stacks_of_experts_that_are_kept_are_excluded(source, tmp_path):
    """Some stacks have names without ".weight"."""
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": np.ones((4, 64, 64), np.float32),
        f"{prefix}.down_proj": np.ones((4, 64, 32), np.float32),
        "model.layers.0.self_attn.q_proj.weight": np.ones((64, 64), np.float32),
    }
    model = tmp_path / "model"
    synthetic.write_model(model, {"model_type": "qwen3_moe"}, tensors)
    convert(model, tmp_path / "out", "nvfp4-te", wishes=Wishes(keep=("*.experts*",)), format="compressed-tensors")
    contract = fp4kit.Contract.of(tmp_path / "out")
    assert contract.excluded == (f"{prefix}.down_proj", f"{prefix}.gate_up_proj")


def record(folder, **changes):
    """Remove the contract of a directory, and change fp4kit's record in its config."""
    (folder / FILE).unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["fp4kit"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_record_that_cannot_be_right_is_not_stated(source, tmp_path):
    """If the recorded recipes are unknown, or not those of the stored layers, the contract names no recipe."""
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te", format="compressed-tensors", recipes=[("*.down_proj", "fp8-modelopt-channel")])
    pattern = ["*.down_proj", "fp8-modelopt-channel"]
    for recipe, pairs in (("nvfp4-te", [["*.down_proj", "fp8-9"]]), ("mxfp4-ocp", [pattern]), ("nvfp9", [pattern])):
        record(out, recipe=recipe, recipes=pairs)
        contract = fp4kit.Contract.of(out)
        assert contract.weights is None and contract.patterns == ()
        assert contract.unknown[:2] == ("weights", "patterns")
    convert(source, tmp_path / "later", "nvfp4-te", format="compressed-tensors")
    record(tmp_path / "later", recipes=[["*.down_proj", "nvfp4-9"]])
    convert(tmp_path / "later", tmp_path / "renamed", format="modelopt")
    for name in ("later", "renamed"):
        assert fp4kit.Contract.of(tmp_path / name).unknown[:2] == ("weights", "patterns")
    for pairs in (5, [["*.down_proj", 5]], ["*"]):
        record(out, recipes=pairs)
        with pytest.raises(CheckpointError, match=r"the recipes that fp4kit recorded are .*; needs pairs"):
            fp4kit.Contract.of(out)


def test_unknown_formats_are_not_called_unquantized(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq"}}
    synthetic.write_model(tmp_path / "declared", config, {"a.weight": np.ones((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match="declares quant_method 'awq'"):
        fp4kit.Contract.of(tmp_path / "declared")
    packed = {"a.qweight": np.ones((8, 32), np.int32), "a.qzeros": np.ones((1, 4), np.int32)}
    save_file(packed | {"a.scales": np.ones((1, 32), np.float16)}, tmp_path / "packed.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot tell how it is quantized; a\.q.*GPTQ integers"):
        fp4kit.Contract.of(tmp_path / "packed.safetensors")


def test_rotations_of_some_layers(source, tmp_path):
    """The contract states one transform for all layers. The stored matrix of a transform is not a layer."""
    out = tmp_path / "out"
    options = {"hadamard": 32, "hadamard_seed": 3, "hadamard_only": ["*.down_proj"]}
    convert(source, out, "nvfp4-te", format="compressed-tensors", **options)
    contract = fp4kit.Contract.of(out)
    assert {"hadamard", "hadamard_signs"} <= {*contract.unknown}
    (out / FILE).unlink()
    assert fp4kit.Contract.of(out).excluded == contract.excluded == ("model.embed_tokens",)


def test_containers_and_input_scales_of_mixtures(source, tmp_path):
    """A mixed checkpoint has the name that a conversion gives it. Input scales are stated if all layers have one."""
    out = tmp_path / "out"
    recipes = [("*.down_proj", "mxfp8-modelopt")]
    convert(source, out, "nvfp4-te", format="modelopt", input_scale=1.0, recipes=recipes)
    written = fp4kit.Contract.of(out)
    (out / FILE).unlink()
    for contract in (written, fp4kit.Contract.of(out)):
        assert contract.container == "modelopt MIXED_PRECISION"
        assert contract.input_scales is None and "input_scales" in contract.unknown


@pytest.mark.parametrize("name", ["modelopt--gpt_oss-NVFP4_DEFAULT_CFG", "modelopt--NVFP4_AWQ_LITE_CFG"])
def test_stacks_and_awq_layers_make_no_mixture(name):
    contract = fp4kit.Contract.of(FOREIGN / name)
    assert (contract.container, contract.input_scales) == ("modelopt NVFP4", "static")


@pytest.mark.parametrize("identifies", [False, *exhaustive((True,))])
def test_the_contract_is_inferred_without_a_file(source, tmp_path, identifies):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te-4over6-mse-448", format="compressed-tensors")
    written = fp4kit.Contract.of(out)
    (out / FILE).rename(tmp_path / "away.json")
    recorded = fp4kit.Contract.of(out)
    (tmp_path / "away.json").rename(out / FILE)
    assert recorded == written and dict(recorded.inferred)["weights"] == "recorded by fp4kit convert"
    without_records(out)
    if identifies:
        identified = fp4kit.Contract.of(out, source=source)
        assert identified.weights.id == "nvfp4-te-4over6-mse-448" and identified == written
        assert dict(identified.inferred)["weights"].startswith("identified: nvfp4-te-4over6-mse-448")
    unknown = fp4kit.Contract.of(out)
    assert unknown.weights is None and "weights" in unknown.unknown
    assert unknown.shared_amax == written.shared_amax and unknown.excluded == written.excluded
    change(out, "up_proj.weight_global_scale", lambda scale: 2 * scale)
    assert fp4kit.Contract.of(out).shared_amax == (("k_proj", "q_proj", "v_proj"),)
    plain = fp4kit.Contract.of(source)
    assert plain.weights is None and "weights" not in plain.unknown


def test_a_malformed_contract_is_refused_by_name(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te")
    data = json.loads((out / FILE).read_text())
    for changed, message in (
        ({"rounding": "rz"}, f"{FILE}: unknown key 'rounding'"),
        ({"hadamard": 3}, f"{FILE}: Contract: hadamard is 3"),
        ({"excluded": 3}, f"{FILE}: Contract: excluded is 3"),
    ):
        (out / FILE).write_text(json.dumps(data | changed))
        with pytest.raises(CheckpointError, match=message):
            fp4kit.Contract.of(out)
    with pytest.raises(CheckpointError, match="is not a file; needs a contract"):
        fp4kit.Contract.of(tmp_path / "none.json")


def test_a_file_of_save_states_its_recipes(tmp_path):
    x = np.ones((32, 32), np.float32)
    recipes = {"a.weight": "nvfp4-te", "b.weight": "mxfp4-ocp", "c": "nvfp4-te"}
    fp4kit.save(tmp_path / "q.safetensors", {name: fp4kit.quantize(x, r) for name, r in recipes.items()})
    contract = fp4kit.Contract.of(tmp_path / "q.safetensors")
    assert contract.weights.id == "nvfp4-te" and dict(contract.inferred)["weights"] == "recorded by fp4kit.save"
    assert [(name, r.id) for name, r in contract.patterns] == [("b", "mxfp4-ocp")]
    assert contract.unknown == ("activations", "input_scales", "served_dtype", "kv_cache", "kv_layout", "unit")
    raw = (tmp_path / "q.safetensors").read_bytes()
    (tmp_path / "q.safetensors").write_bytes(raw.replace(b"mxfp4-ocp", b"mxfp4-OCP"))
    with pytest.raises(CheckpointError, match="CRC-32"):
        fp4kit.Contract.of(tmp_path / "q.safetensors")


SHAPES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (128, 256)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (256, 256)),
}
FORMATS = ("modelopt", "compressed-tensors", "fp8", "sglang-mxfp8", "mlx", "comfy")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return the directory of an unquantized model whose layers have different amaxes, and one only zeros."""
    folder, rng = tmp_path_factory.mktemp("model") / "source", np.random.default_rng(0)
    tensors = {}
    for i in range(2):
        for leaf, shape in SHAPES.items():
            x = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 1))
            tensors[f"model.layers.{i}.{leaf}.weight"] = x.astype(synthetic.BF16)
    tensors["model.layers.1.mlp.down_proj.weight"][...] = 0
    synthetic.write_model(folder, {"model_type": "llama", "torch_dtype": "bfloat16"}, tensors)
    return folder


def assert_equals_its_contract(folder_of, out, format, recipe):
    convert(folder_of, out, recipe, format=format)
    found = fp4kit.parity(fp4kit.Contract.of(out), out, weights=folder_of)
    assert found.equal and found.layers, f"{format}, {recipe}: {found}"
    return len(found.layers)


@pytest.mark.parametrize(
    ("format", "recipe"),
    [
        ("modelopt", "nvfp4-modelopt"),
        ("compressed-tensors", "nvfp4-compressed-tensors"),
        ("compressed-tensors", "nvfp4-modelopt"),
        ("compressed-tensors", "nvfp4-comfy-kitchen"),
        ("compressed-tensors", "fp8-modelopt-channel"),
        ("mlx", "nvfp4-mlx-cpu-global"),
        ("comfy", "nvfp4-comfy-kitchen"),
    ],
)
def test_a_converted_model_equals_its_contract(folder_of, tmp_path, format, recipe):
    assert assert_equals_its_contract(folder_of, tmp_path / "out", format, recipe) == 2 * len(SHAPES)


@pytest.mark.parametrize("format", exhaustive(FORMATS))
def test_converted_models_equal_their_contracts(folder_of, tmp_path, format):
    count = 0
    for recipe in RECIPES:
        try:
            assert_equals_its_contract(folder_of, tmp_path / recipe, format, recipe)
        except CheckpointError:  # the format cannot hold this recipe
            continue
        count += 1
    assert count


@pytest.mark.parametrize("format", ["compressed-tensors", *exhaustive(("modelopt", "mlx", "comfy"))])
@pytest.mark.parametrize("model", half(synthetic.MODELS))
def test_models_of_each_structure(tmp_path, model, format):
    """A format that cannot hold a structure, or a recipe, refuses it; compressed-tensors holds all of them."""
    synthetic.MODELS[model](tmp_path / "source")
    recipe = "nvfp4-mlx-cpu-global" if format == "mlx" else "nvfp4-modelopt"
    try:
        assert_equals_its_contract(tmp_path / "source", tmp_path / "out", format, recipe)
    except CheckpointError:
        assert format != "compressed-tensors"
