"""Test that everything beside a quantized layer is understood, carried or refused by name, and never ignored.

Most tests change one thing in a sound checkpoint: they add, drop, rename or retype a tensor or a config key. Then a
command refuses it by name, or the decoded values are those of the sound checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import synthetic
from oracle import Loaded
from synthetic import refused

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.config_entries import CARRIED, IGNORED, REFUSED, UNDERSTOOD, config_items
from fp4kit.checkpoint.containers.table import container
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import MANIFEST
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.storage.files import CheckpointError

LAYER = "model.layers.0.self_attn.o_proj"
SOUND = (
    ("nvfp4-modelopt", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp8-modelopt", "modelopt"),
    ("mxfp8-modelopt", "sglang-mxfp8"),
    ("mxfp4-mlx-cpu", "mlx"),
)


class Sound:
    """Hold a valid converted checkpoint as plain data, which tests change and write.

    tensors: {name: (safetensors dtype, shape, bytes)}. config: the content of config.json. metadata: the metadata of
    the safetensors file. values: the tensors after decoding, in the form of `tensors`.
    """

    def __init__(self, root: Path, recipe: str, form: str) -> None:
        synthetic.dense(root / "source")
        input_scale = 0.5 if "nvfp4" in recipe and form != "mlx" else None
        convert(root / "source", root / "sound", recipe, format=form, input_scale=input_scale)
        self.tensors = oracle.load(root / "sound")
        self.metadata = {"format": "pt"}
        self.values = decoded(root / "sound", root / "decoded")
        self._config = (root / "sound" / "config.json").read_text()

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads(self._config))


Make = Callable[[str, str], Sound]  # makes the sound checkpoint of a recipe and format


def decoded(model: Path, to: Path, **options: Any) -> Loaded:
    """Decode a model to bfloat16 with convert, write it to the directory `to`, and return its tensors."""
    convert(model, to, format="bf16", **options)
    return oracle.load(to)


def write(root: Path, tensors: Loaded, config: dict[str, Any], metadata: dict[str, str]) -> Path:
    """Write a model directory with one safetensors file, without checking that bytes fit dtypes. Return `root`."""
    root.mkdir()
    synthetic.write_bytes(root / "model.safetensors", tensors, metadata)
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes the sound checkpoint of a recipe and format, once per module."""
    made: dict[tuple[str, str], Sound] = {}

    def of(recipe: str, form: str) -> Sound:
        if (recipe, form) not in made:
            made[recipe, form] = Sound(tmp_path_factory.mktemp("sound"), recipe, form)
        return made[recipe, form]

    return of


@pytest.mark.parametrize(
    ("key", "refused_as"),
    [("rotation_matrix", "an entry that fp4kit does not know"), ("_quantization_metadata", ""), ("author", "")],
)
def test_metadata_that_may_concern_weights_is_refused(key: str, refused_as: str, sound: Make, tmp_path: Path) -> None:
    start = sound("nvfp4-modelopt", "modelopt")
    model = write(tmp_path / "m", start.tensors, start.config, {**start.metadata, key: "{}"})
    if refused_as:
        with refused(f'metadata: {key}: is "{{}}", {refused_as}'):
            make_plan(model, format="bf16")
    else:
        assert decoded(model, tmp_path / "out") == start.values


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(("recipe", "form"), SOUND)
def test_block_scales_that_became_16_bit_floats_are_refused(
    recipe: str, form: str, is_half: bool, dtype: str, sound: Make, tmp_path: Path
) -> None:
    """Scales of 8 bits that were cast to 16 bits, or whose bytes were viewed as 16 bits, are refused by name."""
    start = sound(recipe, form)
    ends = (".weight_scale", ".weight_scale_inv", ".scales")
    (name,) = (name for name in start.tensors if name.startswith(LAYER) and name.endswith(ends))
    _, shape, data = start.tensors[name]
    wide = np.frombuffer(data, np.uint8).astype(np.float16 if dtype == "F16" else synthetic.BF16)
    retyped = (dtype, (*shape[:-1], shape[-1] // 2), data) if is_half else (dtype, shape, wide.tobytes())
    model = write(tmp_path / "m", {**start.tensors, name: retyped}, start.config, start.metadata)
    with refused(LAYER):
        convert(model, tmp_path / "out", format="bf16")
    assert any(LAYER in issue.subject for issue in verify(model).issues if issue.severity == "error")


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".codebook", "not known beside a layer of modelopt NVFP4"),
        (".weight_zero_point", "zero points, which no 4-bit float format has"),
        (".weight_quantizer._svdquant_lora_a", "low-rank part of the weight (SVDQuant), whose other parts are missing"),
        (".lora_A.weight", "a tensor of an adapter (LoRA), not of a model"),
        (".bias_2", "not known beside"),
    ],
)
def test_every_command_refuses_an_unknown_tensor_by_name(suffix: str, text: str, sound: Make, tmp_path: Path) -> None:
    start = sound("nvfp4-modelopt", "modelopt")
    tensors = {**start.tensors, LAYER + suffix: ("F32", (4,), np.ones(4, np.float32).tobytes())}
    model = write(tmp_path / "m", tensors, start.config, start.metadata)
    source = model.parent / "source"
    synthetic.dense(source)
    for command in (
        lambda: convert(model, tmp_path / "out", format="bf16"),
        lambda: convert(model, tmp_path / "out", format="compressed-tensors"),
        lambda: identify_checkpoint(model, source),
        lambda: reconcile(model, None),
    ):
        with refused(f"{LAYER}{suffix} (F32 [4]): {text}"):
            command()
    assert not (tmp_path / "out").exists()
    assert any(issue.severity == "error" and LAYER + suffix in issue.subject for issue in verify(model).issues)
    comparison = compare_checkpoints(model, source)
    assert [item.name for item in comparison.refused] == [LAYER + suffix] and not comparison.layers
    assert inspect_checkpoint(model).unrecognised == (LAYER + suffix,)


def test_scales_of_inputs_are_few_floats(sound: Make, tmp_path: Path) -> None:
    start = sound("mxfp8-modelopt", "modelopt")
    for i, (dtype, shape) in enumerate((("F32", ()), ("BF16", (1,)), ("U8", (4,)), ("F32", (2, 2)))):
        data = bytes({"F32": 4, "BF16": 2, "U8": 1}[dtype] * int(np.prod(shape)))
        tensors = {**start.tensors, f"{LAYER}.output_scale": (dtype, shape, data)}
        model = write(tmp_path / str(i), tensors, start.config, start.metadata)
        if i < 2:
            (warning,) = make_plan(model, format="bf16").warnings
            other = LAYER.replace("0", "1")
            assert warning.startswith(f"{other}: no output_scale, but 1 of 2 layers of this kind have one; if")
            continue
        with refused(f"{LAYER}.output_scale ({dtype} {list(shape)}): not known beside a layer of modelopt MXFP8"):
            make_plan(model, format="bf16")
    for name in (f"{LAYER}.k_scale", "model.layers.0.self_attn.attn.k_scale"):
        tensors = {**start.tensors, name: ("U32", (), bytes(4))}
        with refused(f"{name} (U32 []): "):
            make_plan(write(tmp_path / name, tensors, start.config, start.metadata), format="bf16")


def test_ignore_insists_and_is_recorded(sound: Make, tmp_path: Path) -> None:
    """--ignore leaves out an unknown tensor and an unknown config key, and the manifest records the patterns.

    A pattern that matches nothing that would be rejected is an error.
    """
    start = sound("nvfp4-modelopt", "modelopt")
    tensors = {**start.tensors, f"{LAYER}.codebook": ("F32", (4,), np.ones(4, np.float32).tobytes())}
    config = start.config
    config["quantization_config"]["rotation"] = "hadamard"
    model = write(tmp_path / "m", tensors, config, start.metadata)
    ignore = (f"{LAYER}.codebook", "quantization_config.rotation")
    plan = make_plan(model, format="bf16", ignore=ignore)
    assert [item.name for item in plan.items if item.group == IGNORED] == list(ignore)
    assert decoded(model, tmp_path / "out", ignore=ignore) == start.values
    assert list(ignore) in json.loads((tmp_path / "out" / MANIFEST).read_text())["request"].values()
    with refused("quantization_config.rotation"):
        make_plan(model, format="bf16", ignore=ignore[:1])
    with refused(f"--ignore *.bias: matches nothing that is refused; names are such as {ignore[0]}; leave it out"):
        make_plan(model, format="bf16", ignore=(*ignore, "*.bias"))
    issues = verify(model, ignore=ignore).issues
    assert [issue.severity for issue in issues if "left out by --ignore" in issue.text] == ["warning", "warning"]


GROUP = {"targets": ["Linear"]}
CONFIG_KEYS: dict[str, list[tuple[str, Any, str]]] = {
    "compressed-tensors": [
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}, "declares rotations of the weights"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "declares the sparse format"),
        ("quantization_status", "initialized", 'is "initialized", which is not supported'),
        ("format", "mxfp4-pack-quantized", "but there are layers of nvfp4"),
        ("format", "marlin-24", 'is "marlin-24", which fp4kit does not know'),
        ("format", {"x": 1}, "is {"),
        ("quant_method", "hqq", 'is "hqq", which fp4kit does not know'),
        ("anything", 1, "an entry that fp4kit does not know"),
        ("anything", False, "an entry that fp4kit does not know"),
        ("config_groups", {"g": GROUP | {"weights": {"type": "int", "num_bits": 4}}}, "type"),
        ("config_groups", {"g": {"weights": {}, "rotation": 1}}, "with the key rotation, which fp4kit does not know"),
        ("config_groups", {"g": ["Linear"]}, 'has g, which is ["Linear"], where an object is needed'),
        ("config_groups", {"g": {"targets": "Linear"}}, "whose targets are"),
        ("config_groups", {"g": {"targets": ["re:(*"]}}, "a list of names and patterns is needed"),
        ("config_groups", {"g": {"targets": [LAYER]}}, "names no target for model.layers."),
        ("config_groups", {"g": GROUP | {"weights": {"num_bits": 4, "group_size": 32}}}, "declares num_bits 4 with"),
        (
            "config_groups",
            {"g": GROUP | {"weights": {"num_bits": 8, "group_size": 16}}},
            "but its tensors are compress",
        ),
        ("config_groups", {"g": GROUP | {"format": "mxfp8-quantized"}}, "declares mxfp8 for model.layers."),
        ("config_groups", {"group_0": {"format": ["x"]}}, "the format ["),
        ("ignore", "lm_head", 'is "lm_head"; a list of names and patterns is needed'),
        ("ignore", ["lm_head", "re:(*"], "a list of names and patterns is needed"),
        ("ignore", ["re:.*o_proj"], 'declares with "re:.*o_proj" that model.layers.'),
        ("ignore", [LAYER], f"that {LAYER} is unquantized, but it is quantized"),
    ],
    "modelopt": [
        ("quant_algo", "MXFP8", 'is "MXFP8", but there are layers of nvfp4'),
        ("quant_algo", "W4A8_NVFP4_FP8", "has blocks of 32, but the tensors have blocks of 16"),
        ("quant_algo", "NVFP2", 'is "NVFP2", which fp4kit does not know'),
        ("group_size", 32, "is 32, but the tensors have blocks of 16"),
        ("group_size", [{}], "is [{}], but the tensors have blocks of 16"),
        ("has_zero_point", True, "is true, which is not supported"),
        ("quantized_layers", {LAYER: {"quant_algo": "FP8"}}, f"declares {LAYER} as FP8, but its tensors"),
        ("quantized_layers", {LAYER: {"quant_algo": "NVFP4", "codebook": 1}}, "has the key codebook"),
        ("exclude_modules", ["*.o_proj"], 'declares with "*.o_proj" that model.layers.'),
        ("/llm_config", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "quant_algo"),
        ("/rotation_config", {"r1": "hadamard"}, "an entry that fp4kit does not know"),
        ("/quant_config", 1, "an entry that fp4kit does not know"),
        ("/quantization", {"quant_algo": "MXFP8"}, "but there are layers of nvfp4"),
    ],
}


@pytest.mark.parametrize(("form", "case"), [(form, case) for form, cases in CONFIG_KEYS.items() for case in cases])
def test_config_keys(form: str, case: tuple[str, Any, str], sound: Make, tmp_path: Path) -> None:
    """An entry that contradicts the tensors is refused by name, in quantization_config and (/) elsewhere."""
    start, (key, value, text) = sound(f"nvfp4-{form}", form), case
    config = start.config
    (config if key[0] == "/" else config["quantization_config"])[key.removeprefix("/")] = value
    with refused(text) as caught:
        make_plan(write(tmp_path / "m", start.tensors, config, start.metadata), format="bf16")
    path = key[1:] if key[0] == "/" else f"quantization_config.{key}"
    assert f"config.json: {path}" in str(caught.value)


UNKNOWN: list[tuple[str, Callable[[Any], Any]]] = [
    ("compressed-tensors", lambda declared: declared),
    ("compressed-tensors", lambda declared: declared["config_groups"]["group_0"]),
    ("compressed-tensors", lambda declared: declared["config_groups"]["group_0"]["weights"]),
    ("modelopt", lambda declared: declared),
]


@pytest.mark.parametrize(("form", "place"), UNKNOWN)
@pytest.mark.parametrize("value", [None, 0, False, "", {}])
def test_unknown_entries_that_are_null_declare_nothing(
    form: str, place: Callable[[Any], Any], value: Any, sound: Make, tmp_path: Path
) -> None:
    """compressed-tensors 0.20 writes each optional entry, such as moe_sparsity_config, as null."""
    start = sound(f"nvfp4-{form}", form)
    config = start.config
    place(config["quantization_config"])["moe_sparsity_config"] = value
    made = write(tmp_path / "m", start.tensors, config, start.metadata)
    with nullcontext() if value is None else refused("moe_sparsity_config"):
        make_plan(made, format="bf16")


@pytest.mark.parametrize(
    ("names", "accepted"),
    [
        (["modelopt NVFP4", "modelopt MXFP8", "modelopt FP8 128x128"], [None, 16, 32]),
        (["modelopt NVFP4", "modelopt NVFP4"], [None, 16]),
        (["modelopt FP8", "modelopt FP8 128x128"], [None, 1, 16, 32, 128]),  # no blocks of MX formats
    ],
)
def test_group_sizes_of_mixed_checkpoints(names: list[str], accepted: list[int | None]) -> None:
    weights = {str(i): Weight(str(i), str(i), (64, 64), container(name), {}) for i, name in enumerate(names)}
    for size in (None, 1, 16, 32, 128):
        items = config_items({"quantization_config": {"quant_method": "modelopt", "group_size": size}}, weights)
        assert [item.group != REFUSED for item in items] == [True, size in accepted], size


def test_group_sizes_of_schemes() -> None:
    """A scheme of weights may leave the size of blocks open: null, -1 and 0 stand for any."""
    weights = {LAYER: Weight(LAYER, LAYER, (64, 64), container("compressed-tensors nvfp4-pack-quantized"), {})}
    for size in (None, -1, 0, 16, 8, 32):
        groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": size}}}
        (item,) = config_items({"quantization_config": {"config_groups": groups}}, weights)
        assert (item.group != REFUSED) == (size not in (8, 32)), size


@pytest.mark.parametrize(
    "targets",
    [
        *(["Linear"], ["FusedMoE"], ["re:.*proj"], ["model.layers"], ["re:.*(mlp|k_proj)", "re:.*[qvo]_proj"]),
        ["re:.*mlp", "q_proj", "self_attn.k_proj", "v_proj", "o_proj"],  # the ends of names
    ],
)
def test_targets_that_name_all_layers(targets: list[str], sound: Make, tmp_path: Path) -> None:
    """Targets that cover every layer are accepted: classes, patterns of names, and parents of the layers."""
    start = sound("nvfp4-compressed-tensors", "compressed-tensors")
    config = start.config
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    make_plan(write(tmp_path / "m", start.tensors, config, start.metadata), format="bf16")


QUARK = {"dtype": "fp4", "group_size": 32, "qscheme": "per_group"}
AUTO_ROUND = {"bits": 4, "data_type": "mx_fp", "group_size": 32, "packing_format": "auto_round:llm_compressor"}


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"quant_method": "quark", "global_quant_config": {"weight": QUARK}}, ""),
        ({"quant_method": "quark", "global_quant_config": {"weight": [QUARK | {"dtype": "fp8_e4m3"}, QUARK]}}, ""),
        ({"quant_method": "quark", "global_quant_config": {"weight": QUARK | {"dtype": "int4"}}}, '"dtype": "int4"'),
        ({"quant_method": "quark", "global_quant_config": {"weight": QUARK | {"group_size": 16}}}, '"group_size": 16'),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": QUARK},
                "layer_quant_config": {"*o_proj": {"weight": {"dtype": "fp8_e4m3"}}},
            },
            ".self_attn.o_proj, but its tensors are quark mxfp4",
        ),
        ({"quant_method": "auto-round", **AUTO_ROUND}, ""),
        ({"quant_method": "auto-round", **AUTO_ROUND, "extra_config": {".*o_proj": {"bits": 16}}}, ""),
        ({"quant_method": "quark", "layer_quant_config": [1]}, "for layers, where an object is needed"),
        ({"quant_method": "quark", "layer_type_quant_config": 5}, "for layers, where an object is needed"),
        ({"quant_method": "auto-round", **AUTO_ROUND, "bits": 8}, '"bits": 8'),
        ({"quant_method": "auto-round", **AUTO_ROUND, "bits": {"x": 1}}, '"bits": {"x": 1}'),
        ({"quant_method": "auto-round", **AUTO_ROUND, "data_type": "nv_fp"}, '"data_type": "nv_fp"'),
        ({"quant_method": "auto-round", **AUTO_ROUND, "extra_config": {LAYER: {"bits": 16}}}, '"bits": 16'),
        ({"quant_method": "auto-round", **AUTO_ROUND, "extra_config": [LAYER]}, "has the extra_config"),
        ({"quant_method": "auto-round", **AUTO_ROUND, "extra_config": {LAYER: 5}}, f"has {LAYER} as 5 in extra_config"),
    ],
)
def test_configs_of_quark_and_auto_round(declared: dict[str, Any], text: str, sound: Make, tmp_path: Path) -> None:
    """A config of Quark or auto-round is rejected if it declares bits, types or blocks that the tensors do not have.

    text: a part of the error, or "" if the config is valid.
    """
    start = sound("mxfp4-compressed-tensors", "compressed-tensors")
    of_quark = declared["quant_method"] == "quark"
    tensors = {n.replace("weight_packed", "weight") if of_quark else n: one for n, one in start.tensors.items()}
    model = write(tmp_path / "m", tensors, {"quantization_config": declared}, start.metadata)
    if not text:
        assert decoded(model, tmp_path / "out") == start.values
        return
    with refused(text):
        make_plan(model, format="bf16")


def test_a_declaration_in_a_nested_config(sound: Make, tmp_path: Path) -> None:
    """The quantization may be declared in llm_config or hf_quant_config.json instead of quantization_config.

    verify then finds no error, and convert removes the declaration when it decodes the model.
    """
    start = sound("nvfp4-modelopt", "modelopt")
    config = start.config
    declared = config.pop("quantization_config")
    nested = {**config, "llm_config": {"quantization_config": declared, "hidden_size": 64}}
    model = write(tmp_path / "m", start.tensors, nested, start.metadata)
    assert not [issue for issue in verify(model).issues if issue.severity == "error"]
    assert decoded(model, tmp_path / "out") == start.values
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["llm_config"] == {"hidden_size": 64}
    old = write(tmp_path / "old", start.tensors, config, start.metadata)
    entry = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    entry["exclude_modules"] = declared["ignore"]
    inside = {**config, "quantization_config": {"producer": {}, "quantization": {**entry, "smoothquant_val": None}}}
    inner = write(tmp_path / "inside", start.tensors, inside, start.metadata)
    assert not [issue for issue in verify(inner).issues if issue.severity == "error"]
    assert decoded(inner, tmp_path / "out_of_inside") == start.values
    entry_of_mxfp8 = {"quantization_config": {"quantization": {**entry, "quant_algo": "MXFP8"}}}
    with refused("config.json: quantization_config.quantization.quant_algo: is"):
        make_plan(write(tmp_path / "wrong", start.tensors, config | entry_of_mxfp8, start.metadata), format="bf16")
    (old / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": entry}))
    assert not [issue for issue in verify(old).issues if issue.severity == "error"]


def test_factors_per_column_that_are_declared_but_missing(sound: Make, tmp_path: Path) -> None:
    start = sound("nvfp4-modelopt", "modelopt")
    config = start.config
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    model = write(tmp_path / "m", start.tensors, config, start.metadata)
    assert any("no layer has a pre_quant_scale" in text for text in make_plan(model, format="bf16").warnings)
    assert any("no layer has a pre_quant_scale" in issue.text for issue in verify(model).issues)
    sound_one = write(tmp_path / "sound", start.tensors, start.config, start.metadata)
    assert not any("pre_quant_scale" in text for text in make_plan(sound_one, format="bf16").warnings)


@pytest.mark.parametrize("method", ["spqr", ["spqr"]])
def test_a_method_that_is_not_read(method: object, tmp_path: Path) -> None:
    """A config that declares an unknown method over unknown tensors is refused with its name, also by verify."""
    tensors = {f"{LAYER}.words": ("I16", (4, 4), bytes(32)), "model.norm.weight": ("BF16", (4,), bytes(8))}
    model = write(tmp_path / "m", tensors, {"quantization_config": {"quant_method": method}}, {"format": "pt"})
    with refused(f"declares quant_method {method!r}, which fp4kit does not read; convert the unquantized release"):
        make_plan(model, format="bf16")
    assert any("'spqr'" in issue.text and issue.severity == "error" for issue in verify(model).issues)


@pytest.mark.parametrize("name", [f"{LAYER}.ia3_l", "lora_unet_blocks_0.lora_down.weight"])
def test_tensors_of_adapters(name: str, tmp_path: Path) -> None:
    """A model with an adapter that is not merged is refused, also if it is not quantized."""
    tensors = {f"{LAYER}.weight": ("BF16", (32, 64), bytes(4096)), name: ("F32", (4,), bytes(16))}
    model = write(tmp_path / "m", tensors, {"model_type": "llama"}, {"format": "pt"})
    with refused(f"{name} (F32 [4]): a tensor of an adapter"):
        make_plan(model)
    make_plan(model, ignore=[name])


@pytest.mark.parametrize(
    "name",
    [
        "model.R1",
        "model.layers.0.self_attn.hadamard_matrix",
        f"{LAYER}_pre_quant_scale",
        "model.layers.0.mlp.smoothing_factor",
        "model.online_rotation.weight",
    ],
)
def test_tensors_that_may_transform_weights(name: str, sound: Make, tmp_path: Path) -> None:
    """Rotations and factors that lie under no layer are refused in a quantized model."""
    start = sound("nvfp4-modelopt", "modelopt")
    tensors = {**start.tensors, name: ("F32", (4,), bytes(16))}
    with refused(f"{name} (F32 [4])"):
        make_plan(write(tmp_path / "m", tensors, start.config, start.metadata), format="bf16")


def test_mlx_config_that_contradicts_its_tensors(sound: Make, tmp_path: Path) -> None:
    start = sound("mxfp4-mlx-cpu", "mlx")
    for number, (key, value) in enumerate((("mode", "nvfp4"), ("bits", 8), ("group_size", 16))):
        config = start.config
        config["quantization"][key] = value
        with refused("but its tensors are mlx mxfp4"):
            make_plan(write(tmp_path / str(number), start.tensors, config, start.metadata), format="bf16")


def test_the_three_groups(sound: Make, tmp_path: Path) -> None:
    """inspect_checkpoint refuses no item of a valid checkpoint: it understands it, or carries it over unread.

    Biases and scales of key-value caches are carried.
    """
    start = sound("nvfp4-modelopt", "modelopt")
    one = ("F32", (1,), np.ones(1, np.float32).tobytes())
    names = f"{LAYER}.bias", "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_scale"
    more = dict.fromkeys(names, one)
    model = write(tmp_path / "m", {**start.tensors, **more}, start.config, start.metadata)
    found = {item.name: item for item in inspect_checkpoint(model).items}
    assert {found[name].group for name in more} == {CARRIED}
    assert found[f"{LAYER}.weight"].why == "codes of modelopt NVFP4"
    assert {item.group for item in found.values()} == {UNDERSTOOD, CARRIED} and REFUSED not in found


def test_scales_of_activations_are_not_decoded(sound: Make, tmp_path: Path) -> None:
    """Scales of inputs and outputs that lie beside a layer are not copied into a decoded model."""
    start = sound("nvfp4-modelopt", "modelopt")
    one = ("F32", (1,), np.ones(1, np.float32).tobytes())
    more = {f"{LAYER}.output_scale": one, f"{LAYER}.input_global_scale": one}
    model = write(tmp_path / "m", {**start.tensors, **more}, start.config, start.metadata)
    assert decoded(model, tmp_path / "out") == start.values


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8", "F4", "I8"])
def test_dtypes_of_the_same_bytes_are_read(dtype: str, sound: Make, tmp_path: Path) -> None:
    """Tensors may be stored with dtypes of equal bytes: scales as F8_E8M0 or U8, codes as I8 or F4.

    They decode to the same values. The shape of F4 counts elements, not bytes.
    """
    start = sound(
        "mxfp4-compressed-tensors" if dtype == "F8_E8M0" else "nvfp4-modelopt",
        "modelopt" if dtype != "F8_E8M0" else "compressed-tensors",
    )
    tensors = dict(start.tensors)
    for name, (own, shape, data) in start.tensors.items():
        if own in ("U8", "F8_E4M3") and name.endswith("weight_scale") and dtype in ("F8_E8M0", "U8"):
            tensors[name] = (dtype, shape, data)
        elif own == "U8" and dtype in ("F4", "I8") and not name.endswith("scale"):
            tensors[name] = (dtype, (*shape[:-1], shape[-1] * (2 if dtype == "F4" else 1)), data)
    assert tensors != start.tensors
    model = write(tmp_path / "m", tensors, start.config, start.metadata)
    assert decoded(model, tmp_path / "out") == start.values


@pytest.mark.parametrize(
    ("recipe", "form", "part"),
    [
        ("nvfp4-mlx-cpu", "mlx", "scales"),
        ("nvfp4-modelopt", "modelopt", "weight"),
        ("mxfp4-compressed-tensors", "compressed-tensors", "weight_packed"),
    ],
)
def test_exponents_are_no_codes_and_no_e4m3_scales(
    recipe: str, form: str, part: str, sound: Make, tmp_path: Path
) -> None:
    """The dtype F8_E8M0 is accepted for E8M0 scales only, because no tool stores codes or other scales under it."""
    start = sound(recipe, form)
    tensors = dict(start.tensors)
    name = f"{LAYER}.{part}"
    tensors[name] = ("F8_E8M0", *tensors[name][1:])
    with pytest.raises(CheckpointError):
        make_plan(write(tmp_path / "m", tensors, start.config, start.metadata), format="bf16")
