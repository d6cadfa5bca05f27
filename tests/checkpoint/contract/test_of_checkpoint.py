"""Test the contract that a conversion writes, and the contract that is inferred from a checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4kit
from fp4kit.checkpoint import CheckpointError, ScaleSearch, Wishes, convert
from fp4kit.checkpoint.model.manifest import differences, load_manifest
from fp4kit.contract.to_json import FILE

LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the directory of a small unquantized model."""
    folder = tmp_path_factory.mktemp("model") / "source"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {f"model.layers.0.{leaf}.weight": rng.standard_normal((64, 64), np.float32) for leaf in LEAVES}
    tensors["model.embed_tokens.weight"] = rng.standard_normal((64, 64), np.float32)
    tensors["model.norm.weight"] = np.ones(64, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def edit(path, change):
    """Call change(header, data) on a safetensors file, and write the result."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + n]), bytearray(raw[8 + n :])
    change(header, data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def double(name):
    """Return a change for `edit` that doubles the first float32 of a tensor."""

    def change(header, data):
        at = header[name]["data_offsets"][0]
        data[at : at + 4] = (np.frombuffer(data, np.float32, 1, at) * 2).tobytes()

    return change


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
        unknown=("activations", "kv_cache", "kv_layout", "unit"),
    )
    assert contract.inferred == () and FILE in load_manifest(out)["files"]
    contract.stating(unit="exact").save(out / FILE)  # an edited contract is noticed
    assert any(text.startswith(f"{FILE}: has ") for text in differences(out))


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


def test_the_contract_is_inferred_without_a_file(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te-4over6-mse-448", format="compressed-tensors")
    written = fp4kit.Contract.of(out)
    (out / FILE).unlink()
    recorded = fp4kit.Contract.of(out)
    assert recorded == written and dict(recorded.inferred)["weights"] == "recorded by fp4kit convert"
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["fp4kit"]
    (out / "config.json").write_text(json.dumps(config))
    edit(out / "model.safetensors", lambda header, data: header.pop("__metadata__"))
    unknown = fp4kit.Contract.of(out)
    assert unknown.weights is None and "weights" in unknown.unknown
    assert unknown.shared_amax == written.shared_amax and unknown.excluded == written.excluded
    edit(out / "model.safetensors", double("model.layers.0.mlp.up_proj.weight_global_scale"))
    assert fp4kit.Contract.of(out).shared_amax == (("k_proj", "q_proj", "v_proj"),)
    plain = fp4kit.Contract.of(source)
    assert plain.weights is None and "weights" not in plain.unknown


@pytest.mark.exhaustive
def test_the_recipe_is_identified_from_the_bytes(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te-4over6-mse-448", format="compressed-tensors")
    written = fp4kit.Contract.of(out)
    (out / FILE).unlink()
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["fp4kit"]
    (out / "config.json").write_text(json.dumps(config))
    edit(out / "model.safetensors", lambda header, data: header.pop("__metadata__"))
    identified = fp4kit.Contract.of(out, source=source)
    assert identified.weights.id == "nvfp4-te-4over6-mse-448" and identified == written
    assert dict(identified.inferred)["weights"].startswith("identified: nvfp4-te-4over6-mse-448")


def test_a_malformed_contract_is_refused_by_name(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nvfp4-te")
    data = json.loads((out / FILE).read_text())
    for change, message in (
        ({"rounding": "rz"}, f"{FILE}: unknown key 'rounding'"),
        ({"hadamard": 3}, f"{FILE}: Contract: hadamard is 3"),
        ({"excluded": 3}, f"{FILE}: Contract: excluded is 3"),
    ):
        (out / FILE).write_text(json.dumps(data | change))
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
    assert contract.unknown == ("activations", "input_scales", "kv_cache", "kv_layout", "unit")
    edit(tmp_path / "q.safetensors", lambda header, data: header["__metadata__"].update(fp4kit_quantized="{}"))
    with pytest.raises(CheckpointError, match="CRC-32"):
        fp4kit.Contract.of(tmp_path / "q.safetensors")
