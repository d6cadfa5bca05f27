"""Test warnings about layers whose codes and scales do not match, or that are unlike others of their kind.

Sound layers of every recipe and of many distributions of weights must cause no warning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import synthetic
from changed_bytes import change
from exhaustive import half
from inputs import seeded
from synthetic import refused
from together import together

import fp4kit
from fp4kit.__main__ import main
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.containers.config_entries import REFUSED
from fp4kit.checkpoint.containers.table import CONTAINERS, MODELOPT_AWQ, Container
from fp4kit.checkpoint.model.doubts import (
    LOST_COLUMNS,
    LOST_SCALES,
    SWAPPED_NIBBLES,
    declares_mixture,
    doubt_about_rows,
    misfits,
    named_twice,
    role_of,
    swapped_layers,
)
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Slab, UpdateRows
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.layouts import swizzle_scales
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.files import CheckpointError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
SIZE = 128


def form_of(recipe: Recipe) -> Container | None:
    """Return a container with linear block scales of one row that stores a recipe; None if there is none."""
    found = (form for form in CONTAINERS if form.stores(recipe) and form.scale is not None and form.block[0] == 1)
    return next((form for form in found if not (form.in_blocks or form.swizzled or form.stack)), None)


STORED = tuple(name for name, recipe in RECIPES.items() if form_of(recipe) is not None and not recipe.fake_only)
COMMON = ("nvfp4-te", "nvfp4-modelopt", "nvfp4-te-4over6-mse-256", "mxfp4-ocp", "mxfp4-quark-ceil", "mxfp8-te")
DRAWN = [name if name in COMMON else pytest.param(name, marks=pytest.mark.exhaustive) for name in STORED]
recipes = pytest.mark.parametrize("name", DRAWN)
# Recipes with square blocks have too few different scales in a layer of this size.
IN_ROWS = [one for name, one in zip(STORED, DRAWN, strict=True) if RECIPES[name].block[0] == 1]
by_rows = pytest.mark.parametrize("name", IN_ROWS)


def weights(kind: str, rows: int = SIZE, columns: int = SIZE) -> Floats:
    """Return weights of one distribution. They depend only on the arguments."""
    random = np.random.default_rng(3)
    normal = random.standard_normal((rows, columns))
    spread = np.exp(random.standard_normal((1, columns)))
    made: dict[str, Callable[[], Floats]] = {
        "normal": lambda: normal,
        "heavy tails": lambda: random.standard_t(2, (rows, columns)),
        "uniform": lambda: random.uniform(-1, 1, (rows, columns)),
        "columns": lambda: normal * spread,
        "rows and columns": lambda: normal * spread * np.exp(random.standard_normal((rows, 1))),
        "sparse": lambda: normal * (random.random((rows, columns)) < 0.1),
        "ternary": lambda: np.sign(normal) * (np.abs(normal) > 0.7),
        "ternary, mostly zero": lambda: np.sign(normal) * (np.abs(normal) > 1.6),
        "integers": lambda: np.round(3 * normal),
        "low rank": lambda: random.standard_normal((rows, 4)) @ random.standard_normal((4, columns)) + 0.1 * normal,
        "zeros": lambda: np.zeros((rows, columns)),
    }
    return made[kind]() * 0.02


KINDS = (
    *("normal", "heavy tails", "uniform", "columns", "rows and columns", "sparse"),
    *("ternary", "ternary, mostly zero", "integers", "low rank", "zeros"),
)


def encoded(name: str, x: Floats) -> tuple[Container, Bytes, Bytes]:
    """Return the container that stores a recipe, and the codes and block scales of weights as it stores them."""
    form = form_of(RECIPES[name])
    assert form is not None
    q = fp4kit.quantize(x.astype(ml_dtypes.bfloat16), name, **seeded(name, x))
    return form, np.asarray(q.packed).reshape(len(x), -1), np.asarray(q.block_scale).reshape(len(x), -1)


def doubt(form: Container, codes: Bytes, scales: np.ndarray) -> str:
    """Return the warning about a square layer."""
    return doubt_about_rows(form, Slab(0, None, codes, scales), square=True)


def test_rows_of_a_slab() -> None:
    rows, columns = np.arange(4.0, dtype=np.float32).reshape(-1, 1), np.ones((1, 3), np.float32)
    slab = Slab(0, None, rows, rows, low_rank=(rows, columns), update=UpdateRows(rows, columns, np.float32(2)))  # type: ignore[arg-type]
    for index in (slice(1, 3), np.array([1, 2])):
        cut = slab.rows(index)
        assert cut.low_rank is not None and cut.update is not None and cut.low_rank[1] is columns
        for part in (cut.codes, cut.scales, cut.low_rank[0], cut.update.b):
            assert part.tolist() == [[1], [2]]


def test_columns_without_scales() -> None:
    """Zero scales of some columns of blocks, or of most blocks, are an error."""
    form, codes, scales = encoded("nvfp4-te", weights("normal"))
    lost = scales.copy()
    lost[:, 2] = 0
    assert doubt(form, codes, lost) == LOST_COLUMNS
    assert doubt(form, codes, np.zeros_like(scales)) == LOST_SCALES
    assert doubt(form, np.zeros_like(codes), np.zeros_like(scales)) == ""


@recipes
@pytest.mark.parametrize("kind", KINDS)
def test_sound_layers_cause_no_warning(name: str, kind: str) -> None:
    assert doubt(*encoded(name, weights(kind))) == ""


def in_nibbles(codes: Bytes) -> Bytes:
    """Return packed 4-bit codes, one per byte."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


@by_rows
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "rows and columns"])
def test_scales_in_another_order(name: str, kind: str) -> None:
    """Swizzled scales that are declared linear are named."""
    form, codes, scales = encoded(name, weights(kind))
    swizzled = swizzle_scales(scales, "swizzled_128x4").reshape(scales.shape)
    assert "fit the codes only if they are swizzled_128x4, but linear ones" in doubt(form, codes, swizzled)


def test_linear_scales_that_are_declared_swizzled() -> None:
    """Linear scales are named if the container declares swizzled ones; slabs hold what unswizzling makes of them."""
    form = next(form for form in CONTAINERS if form.name == "torchao NVFP4")
    _, codes, scales = encoded("nvfp4-te", weights("normal"))
    assert doubt(form, codes, scales) == ""
    read = fp4kit.unswizzle(scales, "swizzled_128x4", shape=scales.shape)
    assert "fit the codes only if they are linear, but swizzled_128x4 ones" in doubt(form, codes, read)


@by_rows
def test_transposed_codes(name: str) -> None:
    """Codes of a square layer that were transposed without their scales are named."""
    form, codes, scales = encoded(name, weights("normal"))
    if form.element.bits == 8:
        turned = np.ascontiguousarray(codes.T)
    else:
        nibbles = np.ascontiguousarray(in_nibbles(codes).T)
        turned = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    assert "only if the codes are transposed" in doubt(form, turned, scales)
    assert doubt_about_rows(form, Slab(0, None, turned, scales)) == ""  # the layer is not square


@together("name", ["nvfp4-te", "nvfp4-modelopt", "mxfp4-ocp", "mxfp4-quark-ceil", "mxfp8-te"])
@together("kind", ["normal", "heavy tails"])
def test_equal_scales(name: str, kind: str) -> None:
    form, codes, scales = encoded(name, weights(kind))
    assert "all block scales are equal, although" in doubt(form, codes, np.full_like(scales, scales[0, 0]))


@pytest.mark.parametrize(
    ("name", "mask", "least"), [("nvfp4-te", 0xBB, "3"), ("mxfp4-ocp", 0xBB, "3"), ("mxfp8-te", 0x9F, "112")]
)
def test_codes_that_are_cut(name: str, mask: int, least: str) -> None:
    """Codes that lack a bit of the largest magnitudes never reach them."""
    form, codes, scales = encoded(name, weights("normal"))
    assert doubt(form, codes & np.uint8(mask), scales).startswith(f"no block reaches a code of magnitude {least},")


def test_exponent_bytes_that_became_floats() -> None:
    """The E8M0 bytes of a DeepSeek layer, converted to floats, are whole numbers near 127."""
    form = next(form for form in CONTAINERS if form.name == "fp8 128x128")
    codes = (weights("normal", 256, 256) * 2**12).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    sound = np.array([[0.002, 0.003], [0.0025, 0.001]], np.float32)
    assert doubt(form, codes, sound) == ""
    assert "whole numbers from 16 to 254" in doubt(form, codes, np.array([[118, 119], [118, 120]], np.float32))


def test_reciprocal_factors_per_column() -> None:
    """Factors per column make the columns alike; their reciprocals make them less alike."""
    x, random = weights("normal"), np.random.default_rng(5)
    scaling = np.exp(0.5 * random.standard_normal(SIZE)).astype(np.float32)
    _, codes, scales = encoded("nvfp4-modelopt", x * scaling)

    def found(factors: npt.NDArray[np.float32]) -> str:
        return doubt_about_rows(MODELOPT_AWQ, Slab(0, None, codes, scales, np.float32(1), factors))

    assert found(1 / scaling) == found(np.ones(SIZE, np.float32)) == ""
    assert found(random.permutation(1 / scaling)) == ""  # the factors of a layer whose columns differ anyway
    assert "pre_quant_scale makes the columns less alike" in found(scaling)


LAYER = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(("recipe", "form"), [("nvfp4-modelopt", "modelopt"), ("mxfp4-mlx-cpu", "mlx")])
def test_convert_and_verify_warn(recipe: str, form: str, tmp_path: Path) -> None:
    """A layer with overwritten scales is named by verify and by convert; the sound checkpoint causes no warning."""
    synthetic.dense(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "m", recipe, format=form)
    sound = convert(tmp_path / "m", tmp_path / "sound", format="bf16")
    assert not sound.doubts and not any("equal" in issue.text for issue in verify(tmp_path / "m").issues)
    end = f"{LAYER}.{'weight_scale' if form == 'modelopt' else 'scales'}"
    change(tmp_path / "m", end, lambda scales: np.full_like(scales, scales[0]), np.uint8)
    (doubtful,) = convert(tmp_path / "m", tmp_path / "out", format="bf16").doubts
    assert doubtful.startswith(f"{LAYER}.weight: all block scales are equal")
    (issue,) = (issue for issue in verify(tmp_path / "m").issues if "are equal" in issue.text)
    assert (issue.severity, issue.subject) == ("warning", LAYER)


COLUMNS = 256
LAYERS = {"self_attn.q_proj": (COLUMNS, COLUMNS), "mlp.gate_proj": (384, COLUMNS), "mlp.up_proj": (384, COLUMNS)}
FORMS = {"nvfp4-modelopt": "modelopt", "mxfp4-ocp": "compressed-tensors", "mxfp4-mlx-cpu": "mlx"}


def model(root: Path, strength: float, seed: int = 0) -> Path:
    """Write a model whose columns follow the weight of the norm before them, as in trained models; return `root`.

    strength: the share of a column's size that follows the norm; 0 for columns of equal size.
    """
    rng = np.random.default_rng(seed)
    norm = np.exp(0.5 * rng.standard_normal(COLUMNS))
    tensors = {"model.layers.0.input_layernorm.weight": norm.astype(synthetic.BF16)}
    for name, shape in LAYERS.items():
        noise = np.exp(0.5 * (1 - strength) * rng.standard_normal(COLUMNS)) if strength else 1.0
        x = rng.standard_normal(shape) * norm**-strength * noise * 0.02
        tensors[f"model.layers.0.{name}.weight"] = x.astype(synthetic.BF16)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    synthetic.write_model(root, config, tensors)
    return root


def named(root: Path) -> set[str]:
    """Return the layers of a checkpoint that seem to have swapped nibbles. verify and convert must name them, too."""
    found = inspect_checkpoint(root)
    names = {weight.name: weight.tensor for weight in swapped_layers(found.weights.values(), found.tensors)}
    issues = [issue for issue in verify(root).issues if issue.text == SWAPPED_NIBBLES]
    assert {issue.subject for issue in issues} == set(names) and {issue.severity for issue in issues} <= {"warning"}
    doubts = convert(root, root.with_name(f"{root.name}-bf16"), format="bf16").doubts
    assert {text for text in doubts if SWAPPED_NIBBLES in text} == {f"{t}: {SWAPPED_NIBBLES}" for t in names.values()}
    return set(names)


@pytest.mark.parametrize("recipe", FORMS)
def test_swapped_nibbles_are_named(recipe: str, tmp_path: Path) -> None:
    """One layer, or all: the norm tells the order of the columns."""
    convert(model(tmp_path / "s", 0.8), tmp_path / "m", recipe, format=FORMS[recipe])
    assert named(tmp_path / "m") == set()
    end = "weight_packed" if FORMS[recipe] == "compressed-tensors" else "weight"
    change(tmp_path / "m", f"up_proj.{end}", lambda codes: codes << 4 | codes >> 4, np.uint8)
    (tmp_path / "m-bf16").rename(tmp_path / "sound")
    assert named(tmp_path / "m") == {"model.layers.0.mlp.up_proj"}
    for name in ("q_proj", "gate_proj"):
        change(tmp_path / "m", f"{name}.{end}", lambda codes: codes << 4 | codes >> 4, np.uint8)
    (tmp_path / "m-bf16").rename(tmp_path / "one")
    assert named(tmp_path / "m") == {f"model.layers.0.{name}" for name in LAYERS}


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_sound_columns_cause_no_warning(strength: float, seed: int, tmp_path: Path) -> None:
    convert(model(tmp_path / "s", strength, seed), tmp_path / "m", "nvfp4-te", format="modelopt")
    found = inspect_checkpoint(tmp_path / "m")
    assert swapped_layers(found.weights.values(), found.tensors) == []


BF16 = ml_dtypes.bfloat16
CONFIG = {"model_type": "llama", "hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}}
NAMES = [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]


def model_of() -> synthetic.Tensors:
    """Return three FP8 layers of one kind with biases and input scales, as compressed-tensors stores them."""
    found: synthetic.Tensors = {}
    for name in NAMES:
        found[f"{name}.weight"] = synthetic.random(name, (64, 64), 100.0, np.dtype(ml_dtypes.float8_e4m3fn))
        found[f"{name}.bias"] = np.zeros(64, BF16)
        for scale in ("weight_scale", "input_scale"):
            found[f"{name}.{scale}"] = np.array([0.001], np.float32)
    return found


WITHOUT_THIRD = {f"{NAMES[2]}.{part}": None for part in ("weight", "bias", "weight_scale", "input_scale")}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({f"{name}.bias": None for name in NAMES}, None),
        ({f"{NAMES[1]}.bias": None}, f"{NAMES[1]}: no bias, but 2 of 3 layers of this kind have one"),
        # on a tie, the bias is said to be missing
        (WITHOUT_THIRD | {f"{NAMES[1]}.bias": None}, f"{NAMES[1]}: no bias, but 1 of 2 layers of this kind have one"),
        (
            {f"{name}.input_scale": None for name in NAMES[:2]},
            f"{NAMES[2]}: has input_scale, but 2 of 3 layers of this kind have none",
        ),
        (
            {f"{NAMES[2]}.weight_scale": np.array([0.001], BF16)},
            f"{NAMES[2]}: tensor scale in BF16, but in F32 in 2 of 3 layers of this format",
        ),
        (
            {f"{NAMES[2]}.bias": np.zeros(64, np.float16)},
            f"{NAMES[2]}: bias in F16, but in BF16 in 2 of 3 layers of this format",
        ),
        ({f"{NAMES[0]}.bias": np.zeros((64, 1), BF16)}, f"{NAMES[0]} [64, 64]: has 64 rows, but its bias is BF16"),
    ],
)
def test_layers_that_differ_from_their_kind(
    changes: dict[str, np.ndarray | None], text: str | None, tmp_path: Path
) -> None:
    """changes: the tensors that are replaced; None drops a tensor."""
    tensors = {name: x for name, x in (model_of() | changes).items() if x is not None}
    synthetic.write_model(tmp_path / "m", CONFIG, tensors)
    warnings = make_plan(tmp_path / "m", format="bf16").warnings
    assert [warning[: len(text or "")] for warning in warnings] == ([text] if text else [])
    issues = [issue for issue in verify(tmp_path / "m").issues if issue.text in warnings]
    assert [issue.severity for issue in issues] == ["warning"] * len(warnings)


# Every container: each part of one layer among its peers is dropped, or one more part is added to it ----------------

PEERS = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.down_proj" for i in range(2) for e in range(2)]
# (recipe, format, whether layers get input scales)
WRITTEN = [
    ("nvfp4-modelopt", "modelopt", True),
    ("nvfp4-compressed-tensors", "compressed-tensors", True),
    ("mxfp4", "compressed-tensors", False),
    ("mxfp8-te", "modelopt", False),
    ("mxfp8-te", "sglang-mxfp8", False),
    ("fp8-transformers-block", "fp8", False),
    ("fp8-modelopt-channel", "modelopt", False),
    ("fp8-modelopt", "compressed-tensors", False),
    ("nvfp4-mlx-cpu", "mlx", False),
    ("nvfp4-comfy-kitchen", "comfy", False),
]


@pytest.fixture(scope="module", params=half(WRITTEN), ids=lambda case: f"{case[0]}-{case[1]}")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, synthetic.Tensors]:
    """Convert layers with peers, dense ones and experts, to one container. Return the directory and its tensors."""
    root = tmp_path_factory.mktemp("peers")
    recipe, form, scaled = request.param
    shape = (128, 128)
    tensors = {f"{name}.weight": synthetic.random(name, shape) for name in (*PEERS, *EXPERTS)}
    for name in PEERS:
        tensors[f"{name}.bias"] = synthetic.random(name, shape[:1])
    synthetic.write_model(root / "m", {"model_type": "llama"}, tensors)
    convert(root / "m", root / "q", recipe, format=form, input_scale=0.5 if scaled else None)
    return root / "q", oracle.arrays(oracle.load(root / "q"))


def copied(written: tuple[Path, synthetic.Tensors], root: Path, tensors: synthetic.Tensors) -> Path:
    """Write changed tensors with the configs of a converted model; return the directory."""
    for path in root.glob("*"):
        path.unlink()
    root.mkdir(exist_ok=True)
    for path in written[0].glob("*.json"):
        if path.name in ("config.json", "hf_quant_config.json"):
            shutil.copy(path, root / path.name)
    synthetic.write_file(root / "model.safetensors", tensors)
    return root


def said(root: Path) -> tuple[str, str]:
    """Return what verify and make_plan say about a checkpoint, as two texts."""
    checked = " ".join(issue.subject + " " + issue.text for issue in verify(root).issues)
    try:
        planned = " ".join(make_plan(root, format="bf16").warnings)
    except CheckpointError as error:
        planned = str(error)
    return checked, planned


def test_every_part_of_every_container_is_compared_with_the_peers(
    written: tuple[Path, synthetic.Tensors], tmp_path: Path
) -> None:
    tensors = written[1]
    for odd in (PEERS[1], EXPERTS[2]):
        for part in [name for name in tensors if name.startswith(f"{odd}.")]:
            if part.endswith((".weight", ".weight_packed", ".comfy_quant")):
                continue  # without codes there is no layer
            less = {name: x for name, x in tensors.items() if name != part}
            for text in said(copied(written, tmp_path / "less", less)):
                assert odd in text, (part, text)
    # one part more than the peers; what the container does not know is refused by name
    for leaf in ("bias", "input_scale", "pre_quant_scale", "weight_zero_point"):
        odd = EXPERTS[1] if f"{EXPERTS[1]}.{leaf}" not in tensors else ""
        if odd:
            more = {**tensors, f"{odd}.{leaf}": np.ones(() if leaf == "input_scale" else 128, np.float32)}
            for text in said(copied(written, tmp_path / "more", more)):
                assert odd in text, (leaf, text)


def test_one_peer_in_another_container(written: tuple[Path, synthetic.Tensors], tmp_path: Path) -> None:
    """A peer that is FP8 or unquantized is named, unless the config declares a mixture."""
    tensors = written[1]
    form = inspect_checkpoint(written[0]).layers[PEERS[0]].container
    assert form is not None
    if form.producer in ("comfy-kitchen", "mlx"):
        pytest.skip("the file states the format of each tensor, or the config that of each layer")
    kept = {name: x for name, x in tensors.items() if not name.startswith((f"{PEERS[1]}.w", f"{PEERS[1]}.input"))}
    plain = {**kept, f"{PEERS[1]}.weight": synthetic.random(PEERS[1], (128, 128))}
    assert PEERS[1] in said(copied(written, tmp_path / "plain", plain))[0]
    if form.kind == "fp8 tensor":
        return
    codes = synthetic.random(PEERS[1], (128, 128), 100.0, synthetic.E4M3)
    other = {**kept, f"{PEERS[1]}.weight": codes, f"{PEERS[1]}.weight_scale": np.float32(0.001).reshape(())}
    for text in said(copied(written, tmp_path / "other", other)):
        assert PEERS[1] in text


def test_declared_mixtures_are_no_fault(tmp_path: Path) -> None:
    """Peers in two containers, as --recipe PATTERN=ID writes them, give no warning about their kind."""
    tensors = {f"{name}.weight": synthetic.random(name, (128, 128)) for name in PEERS}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    for form in ("modelopt", "compressed-tensors"):
        recipes = [("*.1.mlp.down_proj", "fp8-modelopt-channel")]
        convert(tmp_path / "m", tmp_path / form, "nvfp4-te", format=form, recipes=recipes)
        assert len(verify(tmp_path / form).formats) == 2
        assert not [text for text in said(tmp_path / form) if "of this kind" in text]
    config = {"quantization_config": {"config_groups": {"a": {}, "b": {}}}}
    assert declares_mixture(config) and declares_mixture({"text_config": config})
    assert declares_mixture({"quantization": {"group_size": 16, "model.layers.0.mlp.down_proj": {"bits": 8}}})
    assert not declares_mixture({"quantization_config": {"config_groups": {"a": {}}, "layer_quant_config": {}}})


def test_roles() -> None:
    names = ("model.layers.3.mlp.experts.7.w1", "double_blocks.11.img_mlp.2", "blk.0.attn_q", "0.conv1")
    roles = ["model.layers.*.mlp.experts.*.w1", "double_blocks.*.img_mlp.2", "blk.*.attn_q", "*.conv1"]
    assert [role_of(name) for name in names] == roles


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SHAPES = {
    **{f"{ATTENTION}.{name}": shape for name, shape in (("q_proj", (96, 64)), ("o_proj", (64, 96)))},
    **{f"{ATTENTION}.{name}": (32, 64) for name in ("k_proj", "v_proj")},
    **{f"{MLP}.{name}": (128, 64) for name in ("gate_proj", "up_proj")},
    f"{MLP}.down_proj": (64, 128),
}


def fp8(shapes: dict[str, tuple[int, ...]]) -> synthetic.Tensors:
    """Return FP8 layers of the given shapes with one scale per layer, as compressed-tensors stores them."""
    found: synthetic.Tensors = {}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = synthetic.random(name, shape, 100.0, E4M3)
        found[f"{name}.weight_scale"] = np.array([0.001], np.float32)
    return found


def texts(root: Path) -> list[str]:
    """Return the warnings of a plan to decode a model. verify must give those about sizes, too."""
    plan = [text for text in make_plan(root, format="bf16").warnings if "another copy of the model" in text]
    found = [issue for issue in verify(root).issues if "another copy of the model" in issue.text]
    assert [issue.text for issue in found] == plan and {issue.severity for issue in found} <= {"warning"}
    return plan


@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_are_cut(layer: str, axis: int, tmp_path: Path) -> None:
    """FP8 codes fit their scale whatever rows or columns are missing; the neighbours show which layer lacks some."""
    shape = tuple(size - 16 * (i == axis) for i, size in enumerate(SHAPES[layer]))
    synthetic.write_model(tmp_path / "m", CONFIG, fp8(SHAPES | {layer: shape}))
    (text,) = texts(tmp_path / "m")
    blamed = f"{ATTENTION}.q_proj {[*SHAPES[f'{ATTENTION}.q_proj']]}" if layer.endswith("o_proj") and axis else ""
    what = ("rows", "columns")[axis]
    assert text.startswith(blamed or f"{layer} {[*shape]}: has {shape[axis]} {what}, but ")


@pytest.mark.parametrize(
    ("layer", "shape", "config"),
    [
        (f"{ATTENTION}.q_proj", (192, 64), {}),  # with a gate of the output
        (f"{ATTENTION}.v_proj", (16, 64), {"v_head_dim": 8}),
        (f"{ATTENTION}.o_proj", (64, 48), {"v_head_dim": 8}),
        (f"{ATTENTION}.k_proj", (32, 64), {"text_config": {"hidden_size": 64}}),
    ],
)
def test_sizes_that_models_have(layer: str, shape: tuple[int, ...], config: dict[str, Any], tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {**CONFIG, **config}, fp8(SHAPES | {layer: shape}))
    assert texts(tmp_path / "m") == []


def test_inspect_names_layers_that_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_model(tmp_path / "m", CONFIG, fp8(SHAPES | {f"{MLP}.up_proj": (112, 64)}))
    (text,) = texts(tmp_path / "m")
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [text]
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert f"warning: {MLP}.up_proj [112, 64]:" in capsys.readouterr().out


def test_a_transposed_layer_is_not_called_cut() -> None:
    shapes = SHAPES | {f"{MLP}.gate_proj": (64, 128)}
    weights = [Weight(name, f"{name}.weight", shape, None, {}) for name, shape in shapes.items()]
    assert misfits(weights, CONFIG) == []


def test_other_names_of_layers() -> None:
    """Layers of Mixtral and of GGUF files are compared as well."""
    for names in (("w1", "w3", "w2"), ("ffn_gate", "ffn_up", "ffn_down")):
        shapes = zip(names, ((128, 64), (112, 64), (64, 128)), strict=True)
        weights = [Weight(f"blk.0.{name}", f"blk.0.{name}.weight", shape, None, {}) for name, shape in shapes]
        assert [misfit.weight.name for misfit in misfits(weights, {})] == [f"blk.0.{names[1]}"]


def test_biases_of_another_length(tmp_path: Path) -> None:
    for count, expected in ((64, 0), (48, 1)):
        tensors = fp8(SHAPES) | {f"{ATTENTION}.o_proj.bias": np.zeros(count, np.float32)}
        synthetic.write_model(tmp_path / str(count), CONFIG, tensors)
        found = texts(tmp_path / str(count))
        assert len(found) == expected and all(
            f"{ATTENTION}.o_proj [64, 96]: has 64 rows, but" in text for text in found
        )


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_head_that_is_tied(nested: bool, tmp_path: Path) -> None:
    """convert warns of a quantized lm_head that engines ignore, and verify calls it an error."""
    tied = {"tie_word_embeddings": True}
    tensors = fp8({**SHAPES, "lm_head": (32, 64)})
    config = {**CONFIG, **({"text_config": tied} if nested else tied)}
    synthetic.write_model(tmp_path / "m", config, tensors)
    text = "lm_head: is quantized, but tie_word_embeddings in config.json is true"
    assert any(warning.startswith(text) for warning in make_plan(tmp_path / "m", format="bf16").warnings)
    (issue,) = (issue for issue in verify(tmp_path / "m").issues if issue.text.startswith(text))
    assert (issue.severity, issue.subject) == ("error", "config.json")
    synthetic.write_model(tmp_path / "untied", CONFIG | {"tie_word_embeddings": False}, tensors)
    synthetic.write_model(tmp_path / "plain", config, fp8(SHAPES) | {"lm_head.weight": synthetic.random("h", (32, 64))})
    for name in ("untied", "plain"):
        assert not any(text in issue.text for issue in verify(tmp_path / name).issues)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("e.0.w1", "e.0.gate_proj"), ["e.0.w1"]),
        (("e.0.w2", "e.0.down_proj", "e.0.w3", "e.0.up_proj"), ["e.0.w2", "e.0.w3"]),
        (("mlp.gate_up_proj", "mlp.up_proj"), ["mlp.gate_up_proj"]),
        (("a.qkv_proj", "a.k_proj"), ["a.qkv_proj"]),
        (("mlp.experts.down_proj", "mlp.experts.3.down_proj"), ["mlp.experts.down_proj"]),
        (("mlp.experts.down_proj", "mlp.experts.3.gate_proj"), []),
        (("e.0.w1", "e.1.gate_proj", "e.0.w2", "e.1.up_proj"), []),
    ],
)
def test_names_of_one_layer(names: tuple[str, ...], named: list[str]) -> None:
    assert [name for name, _ in named_twice(names)] == named


@pytest.mark.parametrize("is_quantized", [False, True])
def test_layers_under_two_names_are_refused(is_quantized: bool, tmp_path: Path) -> None:
    """w1 and gate_proj of one expert: convert, verify and inspect name the layer. Without one of them, all is well."""
    names = [f"{MLP}.experts.0.{name}" for name in ("w1", "w3", "w2", "gate_proj")]
    shapes = {name: (64, 64) for name in names}
    tensors = fp8(shapes) if is_quantized else {f"{n}.weight": synthetic.random(n, s) for n, s in shapes.items()}
    config = CONFIG if is_quantized else {"model_type": "mixtral"}
    synthetic.write_model(tmp_path / "m", config, tensors)
    text = f"is stored beside {MLP}.experts.0.gate_proj, another name of the same part of the model; remove one of them"
    with refused(text):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="bf16" if is_quantized else "compressed-tensors")
    assert any(text in issue.text for issue in verify(tmp_path / "m").issues if issue.severity == "error")
    assert [item.name for item in inspect_checkpoint(tmp_path / "m").items if item.group == REFUSED] == [
        f"{MLP}.experts.0.w1.weight"
    ]
    sound = {name: x for name, x in tensors.items() if "gate_proj" not in name}
    synthetic.write_model(tmp_path / "sound", config, sound)
    make_plan(tmp_path / "sound", "mxfp4-ocp", format="bf16" if is_quantized else "compressed-tensors")


@pytest.mark.parametrize("name", [*synthetic.MODELS, *synthetic.QUANTIZED])
def test_sound_models_fit(name: str, tmp_path: Path) -> None:
    {**synthetic.MODELS, **synthetic.QUANTIZED}[name](tmp_path / "m")
    model = inspect_checkpoint(tmp_path / "m")
    assert misfits(model.weights.values(), model.config or {}) == []
