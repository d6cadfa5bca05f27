"""Test the statistics that recognise layers whose codes and block scales do not belong together.

Sound layers of every recipe and of many distributions of weights must cause no warning. Damaged layers must cause the
warning that names their damage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import synthetic
from changed_bytes import change
from together import together

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.table import CONTAINERS, MODELOPT_AWQ, Container
from fp4kit.checkpoint.model.doubts import LOST_COLUMNS, SWAPPED_NIBBLES, doubt_about_rows, swapped_layers
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Slab, UpdateRows
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.layouts import swizzle_scales
from fp4kit.recipes import RECIPES, Recipe

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
SIZE = 128
FOREIGN = Path(__file__).parents[2] / "data" / "foreign"


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
    q = fp4kit.quantize(x.astype(ml_dtypes.bfloat16), name)
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
    """Zero scales of some columns of blocks are an error; scales that are all zero have another cause."""
    form, codes, scales = encoded("nvfp4-te", weights("normal"))
    lost = scales.copy()
    lost[:, 2] = 0
    assert doubt(form, codes, lost) == LOST_COLUMNS != doubt(form, codes, np.zeros_like(scales))


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
