"""Test layers of files: open_checkpoint, and decoding, which undoes the Hadamard transforms of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from inputs import BF16
from safetensors.numpy import save_file
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import QuantizedLayers, Wishes, convert, open_checkpoint
from fp4kit.checkpoint.containers.table import container
from fp4kit.checkpoint.model import inspect
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight, WeightRotation, rotation_of
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.storage.files import CheckpointError

LAYER = "model.layers.0.self_attn.q_proj"
TARGETS = ["re:.*(q|k|v|o|gate|up)_proj$"]
SIZE = 16


def apply(location: str, **changed: Any) -> dict[str, Any]:
    """Return an entry of ``apply`` with this location."""
    return {"targets": TARGETS, "location": location, "inverse": location == "weight_input", "ignore": []} | changed


def scheme(**changed: Any) -> dict[str, Any]:
    """Return a config group as compressed-tensors writes it, with some keys changed."""
    both = [apply("input"), apply("weight_input")]
    group = {"type": "hadamard", "apply": both, "randomize": False, "requires_grad": False, "head_dim": SIZE}
    return group | {"precision": "torch.float32"} | changed


def sylvester(size: int) -> np.ndarray:
    i = np.arange(size)
    return np.array([[(-1) ** int(a & b).bit_count() for b in i] for a in i], np.float32)


class Model:
    """Hold a compressed-tensors checkpoint, whose config and tensors tests change."""

    def __init__(self, root: Path) -> None:
        synthetic.dense(root / "source")
        self.plain = root / "plain"
        convert(root / "source", self.plain, "nvfp4-compressed-tensors", format="compressed-tensors", input_scale=0.5)
        self.config = json.loads((self.plain / "config.json").read_text())
        self.root = root
        self.count = 0

    def with_transforms(self, groups: Any, tensors: dict[str, np.ndarray] | None = None) -> Path:
        """Write the checkpoint with a ``transform_config`` and more tensors, and return its directory."""
        self.count += 1
        made = self.root / f"made{self.count}"
        shutil.copytree(self.plain, made)
        config = json.loads(json.dumps(self.config))
        config["quantization_config"]["transform_config"] = {"config_groups": groups}
        (made / "config.json").write_text(json.dumps(config))
        if tensors:
            index = json.loads((made / "model.safetensors.index.json").read_text())
            synthetic.write_file(made / "transforms.safetensors", tensors)
            index["weight_map"] |= dict.fromkeys(tensors, "transforms.safetensors")
            (made / "model.safetensors.index.json").write_text(json.dumps(index))
        return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("transforms"))


def loaded(folder: Path) -> dict[str, np.ndarray]:
    return oracle.arrays(oracle.load(folder))


def test_transforms_are_undone(model: Model) -> None:
    """Layers of the targets get the transform of their decoded values; other tensors stay as they are."""
    made = model.with_transforms({"v": scheme()}, {f"{LAYER}.v_input.weight": sylvester(SIZE)})
    convert(made, model.root / "undone", format="bf16")
    convert(model.plain, model.root / "as_stored", format="bf16")
    undone, stored = loaded(model.root / "undone"), loaded(model.root / "as_stored")
    assert undone.keys() == stored.keys() and f"{LAYER}.v_input.weight" not in undone
    layers, turned = open_checkpoint(model.plain), 0
    for name, values in undone.items():
        module = name.removesuffix(".weight")
        expected = stored[name]
        if module in layers and module.rpartition(".")[2] != "down_proj":
            whole = layers[module].dequantize(np.float32).astype(np.float64)
            blocks = whole.reshape(len(whole), -1, SIZE) @ sylvester(SIZE) / np.sqrt(SIZE)
            expected = fp4kit.hadamard(whole.astype(np.float32), SIZE).astype(BF16)
            # A sum of 16 float32 numbers has an error of at most 5 roundings, and bfloat16 keeps 8 bits.
            assert np.allclose(values.astype(np.float64), blocks.reshape(whole.shape), rtol=2**-8, atol=2**-20)
            turned += 1
        assert (values.view(np.uint16) == expected.view(np.uint16)).all(), name
    assert turned == 12
    assert verify(model.root / "undone", source=made).clean
    assert not verify(model.root / "as_stored", source=made).clean
    assert "quantization_config" not in json.loads((model.root / "undone" / "config.json").read_text())


def test_stacks_of_experts(tmp_path: Path) -> None:
    """Experts that become a transposed stack are transformed before, gate and up rows separately."""
    synthetic.vlm_moe(tmp_path / "source")
    plain = tmp_path / "plain"
    convert(tmp_path / "source", plain, "nvfp4-compressed-tensors", format="compressed-tensors")
    layers = {name: q.dequantize(np.float32) for name, q in open_checkpoint(plain).items() if "experts" in name}
    config = json.loads((plain / "config.json").read_text())
    both = [apply(where, targets=["re:.*experts.*"]) for where in ("input", "weight_input")]
    config["quantization_config"]["transform_config"] = {"config_groups": {"v": scheme(apply=both, head_dim=32)}}
    (plain / "config.json").write_text(json.dumps(config))
    convert(plain, tmp_path / "undone", format="bf16")
    undone = {name: x for name, x in loaded(tmp_path / "undone").items() if ".experts." in name}
    for name, stack in undone.items():
        leaves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for e, matrix in enumerate(stack):
            parts = [layers[f"{name.rpartition('.')[0]}.{e}.{leaf}"] for leaf in leaves]
            expected = np.concatenate([fp4kit.hadamard(part, 32) for part in parts]).astype(BF16)
            assert (matrix.T.view(np.uint16) == expected.view(np.uint16)).all(), name
    assert len(undone) == 4 and verify(tmp_path / "undone", source=plain).clean


def test_linear_stands_for_all_layers(model: Model) -> None:
    ignore = ["lm_head", "re:.*down_proj"]
    both = [apply(where, targets=["Linear"], ignore=ignore) for where in ("input", "weight_input")]
    matrix = {f"{LAYER}.v_input.weight": sylvester(SIZE)}  # a matrix of a transform is not a layer
    plan = make_plan(model.with_transforms({"v": scheme(apply=both)}, matrix), format="bf16")
    rotations = {piece.weight.name: piece.weight.rotation for tensor in plan.converted for piece in tensor.pieces}
    assert {name: found for name, found in rotations.items() if found != WeightRotation(SIZE, inverse=True)} == {
        f"model.layers.{i}.mlp.down_proj": None for i in range(2)
    }


UNKNOWN = "which is not undone"
REFUSED = {
    "random": (scheme(type="random-hadamard"), 'of type "random-hadamard", whose matrix is not stored'),
    "inverted": (
        scheme(type="random-hadamard", apply=[apply("input", inverse=True)]),
        "inverts the rotation of inputs instead of that of weights",
    ),
    "matrix": (scheme(type="random-matrix"), 'of type "random-matrix"'),
    "permuted": (scheme(randomize=True), 'of type "hadamard" with random permutations'),
    "large": (scheme(head_dim=1024), "with blocks of 1024 for model.layers.0."),
    "odd": (scheme(head_dim=24), "with blocks of 24 for model.layers.0."),
    "output": (scheme(apply=[apply("weight_output")]), 'with the location "weight_output"'),
    "cache": (scheme(apply=[apply("k_cache")]), 'with the location "k_cache"'),
    "half": (scheme(apply=[apply("weight_input")]), "rotates only one of the inputs and the weight of"),
    "class": (scheme(apply=[apply("input", targets=["Embedding"])]), 'has the target "Embedding"'),
    "pattern": (scheme(apply=[apply("input", targets=["re:(*"])]), 'has the target "re:(*"'),
    "key": (scheme(anything=1), "has v, which is {"),
    "key of apply": (scheme(apply=[apply("input", anything=1)]), "has v, which applies {"),
    "target": (scheme(apply=[apply("input", targets=["layers.0"])]), "names layers.0, which is not a layer"),
    "ignored": (scheme(apply=[apply("input", ignore=["q_proj"])]), "names q_proj, which is not a layer"),
    "location": (scheme(apply=[apply("input") | {"location": ["input"]}]), 'with the location ["input"]'),
    "unquantized": (
        scheme(apply=[apply(where, targets=["model.embed_tokens"]) for where in ("input", "weight_input")]),
        "for model.embed_tokens, which is unquantized",
    ),
}


def test_other_transforms_are_refused(model: Model) -> None:
    for group, text in REFUSED.values():
        made = model.with_transforms({"v": group})
        with refused(text) as error:
            make_plan(made, format="bf16")
        assert UNKNOWN in str(error.value) and "transform_config" in str(error.value)
    with refused("has several transforms of"):
        make_plan(model.with_transforms({"v": scheme(), "w": scheme()}), format="bf16")
    with refused("convert --format bf16 undoes Hadamard transforms"):
        make_plan(model.with_transforms({"v": scheme()}), "nvfp4-compressed-tensors")


def test_a_matrix_of_another_rotation_is_refused(model: Model) -> None:
    other = sylvester(SIZE)
    other[3] *= -1
    made = model.with_transforms({"v": scheme()}, {f"{LAYER}.v_input.weight": other})
    with refused(f"{LAYER}.v_input.weight (F32 [16, 16]): is not the Hadamard matrix of size 16"):
        make_plan(made, format="bf16")
    other[0, 1] *= -1
    made = model.with_transforms({"v": scheme(type="random-hadamard")}, {f"{LAYER}.v_input.weight": other})
    with refused(f"{LAYER}.v_input.weight (F32 [16, 16]): is not the Hadamard matrix of size 16 with signs"):
        make_plan(made, format="bf16")
    made = model.with_transforms({"v": scheme()}, {f"{LAYER}.w_input.weight": sylvester(SIZE)})
    with refused(f"{LAYER}.w_input.weight"):
        make_plan(made, format="bf16")


@pytest.mark.exhaustive
def test_the_transforms_of_compressed_tensors() -> None:
    """hadamard undoes what compressed-tensors makes of the weights and of the inputs of a layer."""
    torch = pytest.importorskip("torch")
    transform = pytest.importorskip("compressed_tensors.transform")
    torch.manual_seed(0)
    for size in (16, 64):
        net = torch.nn.Sequential(torch.nn.Linear(128, 32, bias=False), torch.nn.Linear(32, 64, bias=False))
        before = [layer.weight.detach().clone() for layer in net]
        x = torch.randn(5, 128)
        y = net(x).detach()
        group = scheme(head_dim=size) | {"apply": [apply("input", targets=["0"]), apply("weight_input", targets=["0"])]}
        transform.apply_transform_config(net, transform.TransformConfig(config_groups={"v": group}))
        # Rounding to float32 changes a value by at most 2^-24 of it, in log2(size) + 3 steps.
        assert (net(x).detach() - y).abs().max() < 1e-5 < (net[0].weight - before[0]).abs().max()
        assert (fp4kit.hadamard(net[0].weight.detach(), size) - before[0]).abs().max() < 1e-6
        assert torch.equal(net[1].weight.detach(), before[1])
        stored = net.state_dict()["0.v_input.weight"].numpy()
        assert (stored == sylvester(size)).all()
        net[0].weight.data.copy_(before[0])
        net[0]._forward_pre_hooks.clear()
        group["type"] = "random-hadamard"
        transform.apply_transform_config(net, transform.TransformConfig(config_groups={"r": group}))
        rotation = rotation_of(net.state_dict()["0.r_input.weight"].numpy())
        assert rotation is not None and "-" in rotation.signs and (net(x).detach() - y).abs().max() < 1e-5
        undone = rotation.inverted.of(net[0].weight.detach().numpy())
        assert np.abs(undone - before[0].numpy()).max() < 1e-6


FORMATS = (
    ("nvfp4-te", "modelopt"),
    ("nvfp4-modelopt", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("nvfp4-mlx-cpu", "mlx"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
    ("fp8-modelopt", "compressed-tensors"),
    ("fp8-modelopt-channel", "modelopt"),
)


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_a_layer_equals_its_source_quantized(tmp_path, recipe, format) -> None:
    """Codes, scales and values equal those of quantize. The layer shares its tensor scale with no other layer."""
    tensors = synthetic.moe(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen3_moe"}))
    convert(tmp_path / "m", tmp_path / "q", recipe, format=format, wishes=Wishes(keep=("*.experts.*",)))
    name = "model.layers.0.self_attn.o_proj"
    read, wanted = fp4kit.open_checkpoint(tmp_path / "q")[name], fp4kit.quantize(tensors[f"{name}.weight"], recipe)
    assert read.recipe == fp4kit.recipe(recipe) and read.shape == wanted.shape
    for part in ("packed", "block_scale"):
        assert np.array_equal(getattr(read, part), getattr(wanted, part)), part
    if wanted.tensor_scale is not None:
        assert np.array_equal(read.tensor_scale.reshape(-1), wanted.tensor_scale.reshape(-1))
    assert np.array_equal(read.dequantize(np.float32), wanted.dequantize(np.float32))


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_a_recipe_that_is_not_in_the_table_is_recorded_with_its_fields(tmp_path, recipe, format) -> None:
    synthetic.dense(tmp_path / "m")
    listed = fp4kit.recipe(recipe)
    own = replace(listed, id="mine", amax_nan="propagate" if listed.amax_nan == "ignore" else "ignore")
    convert(tmp_path / "m", tmp_path / "q", own, format=format, recipes=(("*.o_proj", own),))
    for name in ("fp4kit_manifest.json", "fp4kit_contract.json"):
        (tmp_path / "q" / name).unlink()
    found = verify(tmp_path / "q", tmp_path / "m")
    assert found.recipe == "mine, *.o_proj=mine" and found.errors == 0 and found.layers[0].compared
    convert(tmp_path / "q", tmp_path / "again", format=format)
    for folder in ("q", "again"):
        assert {q.recipe for q in fp4kit.open_checkpoint(tmp_path / folder).values()} == {own}
    assert fp4kit.Contract.of(tmp_path / "q").weights == own
    assert re.search("recipe mine\\W", str(inspect.quantization_summary(inspect_checkpoint(tmp_path / "q"))))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_divisors_of_weights_of_every_dtype(tmp_path, dtype) -> None:
    """The values are those of the source, quantized: decoding divides by the stored divisor, not by its reciprocal."""
    rng = np.random.default_rng(0)
    source = {
        f"layers.{i}.weight": (rng.standard_normal((32, 64)) * rng.uniform(0.01, 1)).astype(dtype) for i in range(24)
    }
    save_file(source, tmp_path / "w.safetensors")
    convert(tmp_path / "w.safetensors", tmp_path / "q", "nvfp4-compressed-tensors", format="compressed-tensors")
    layers = fp4kit.open_checkpoint(tmp_path / "q")
    for name, x in source.items():
        read, wanted = layers[name.removesuffix(".weight")], fp4kit.quantize(x, "nvfp4-compressed-tensors")
        assert read.dtype in (dtype, ml_dtypes.bfloat16)  # bfloat16 may happen to represent the divisor
        assert np.array_equal(read.dequantize(np.float32), wanted.dequantize(np.float32))
    assert any(q.tensor_amax is not None for q in layers.values()) == (dtype == np.float32)


@pytest.mark.parametrize("name", [*synthetic.MODELS, *synthetic.QUANTIZED])
def test_every_layer_decodes_as_the_converter_decodes_it(tmp_path, name) -> None:
    """The order of two products may differ, so that values may differ by the rounding of float32."""
    if name in synthetic.QUANTIZED:
        synthetic.QUANTIZED[name](tmp_path / "q")
    else:
        synthetic.MODELS[name](tmp_path / "m")
        convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers, weights = fp4kit.open_checkpoint(tmp_path / "q"), inspect_checkpoint(tmp_path / "q").layers
    assert list(layers) == list(weights) and len(layers) == len(weights) > 0
    for key, weight in weights.items():
        if weight.container.block[0] > 1:
            odd, powers = weight.shape[-1] % 128 != 0, weight.container.scale is not None
            if odd or powers:
                with synthetic.refused("no recipe has the blocks of" if powers else "is not a multiple of 128, which"):
                    layers[key]
                continue
        with Readers() as readers:
            parts = [values_of(weight, slab) for e in range(weight.experts) for slab in slabs(readers, weight, e)]
        wanted = np.concatenate(parts).astype(np.float32).reshape(weight.shape)
        np.testing.assert_allclose(layers[key].dequantize(np.float32), wanted, rtol=2.0**-22)


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("modelopt NVFP4_AWQ", ["tensor_scale", "column_scale"], "is multiplied by a factor per column"),
        ("modelopt NVFP4", [], "its tensor scale is missing, so its values are unknown"),
        ("modelopt NVFP4", ["tensor_scale"], "K = 40 is not a multiple of 16, which nvfp4-te needs"),
    ],
)
def test_layers_that_a_quantized_cannot_hold(name, parts, text) -> None:
    weight = Weight("a", "a.weight", (32, 40), container(name), dict.fromkeys(parts))
    with synthetic.refused(f"a: {text}"):
        inspect._read(weight, fp4kit.recipe("nvfp4-te"))


def test_gguf_files_and_recipes_of_the_caller(tmp_path) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "nvfp4-gguf")
    layers = fp4kit.open_checkpoint(tmp_path / "q.gguf")
    assert layers[next(iter(layers))].recipe.id == "nvfp4-gguf"
    name = next(iter(layers))
    with synthetic.refused("cannot store mxfp4-ocp; give another recipe"):
        fp4kit.open_checkpoint(tmp_path / "q.gguf", "mxfp4-ocp")[name]


def test_nothing_is_read_before_a_lookup(tmp_path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers = fp4kit.open_checkpoint(tmp_path / "q")
    for path in (tmp_path / "q").glob("*.safetensors"):
        path.unlink()
    assert len(layers) > 0 and isinstance(layers, QuantizedLayers)
    with pytest.raises((CheckpointError, OSError)):
        layers[next(iter(layers))]


def test_unknown_names_list_similar_ones(tmp_path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    layers, name = fp4kit.open_checkpoint(tmp_path / "q"), "model.layers.0.mlp.down_proj"
    assert name in layers and f"{name}.weight" not in layers
    assert repr(layers) == f"QuantizedLayers({str(tmp_path / 'q')!r}: {len(layers)} layers, modelopt NVFP4)"
    for wrong, text in (
        (f"{name}.weight", f"use {name!r}"),
        ("model.layers.0.mlp.down", f"did you mean {name} or "),
        ("model.norm", "is not quantized in"),
        ("lm_head", "is not quantized in"),
        ("x", "; layers are such as model.layers.0"),
    ):
        with pytest.raises(KeyError, match=re.escape(text)):
            layers[wrong]
    with pytest.raises(KeyError, match="which has no quantized layers"):
        fp4kit.open_checkpoint(tmp_path / "m")["lm_head"]
    with synthetic.refused("does not exist"):
        fp4kit.open_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="nvfp4-te"):
        fp4kit.open_checkpoint(tmp_path / "q", "nvfp4_te")
