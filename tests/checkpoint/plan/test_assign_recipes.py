"""Test recipes per layer: assigned within a budget of bits, or by patterns."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import synthetic
from oracle import load
from partly_quantized import declare
from synthetic import refused
from together import together

import fp4kit
from fp4kit.__main__ import main
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.plan.assign_recipes import (
    KEEP,
    Assignment,
    LayerGroup,
    Option,
    Point,
    assign_recipes,
    curve,
    shown_points,
    solve,
)
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

FP8 = "fp8-modelopt-channel"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dense model, one with experts and one with stacks of experts, and return the directory of all."""
    root = tmp_path_factory.mktemp("models")
    for make in (synthetic.dense, synthetic.moe, synthetic.fused):
        make(root / make.__name__)
    return root


def ratio(matrices: list[np.ndarray], recipe: str, weights: np.ndarray | None = None) -> float:
    """Return the noise-to-signal ratio of matrices that engines fuse, computed from fp4kit's public functions."""
    amax = np.float32(max(float(np.abs(x.astype(np.float32)).max()) for x in matrices))
    noise = signal = 0.0
    for x in matrices:
        q = fp4kit.quantize(x, recipe, tensor_amax=amax if "nvfp4" in recipe else None)
        error = np.asarray(fp4kit.dequantize(q, np.float32), np.float64) - x.astype(np.float64)
        columns = np.ones(x.shape[1]) if weights is None else weights
        noise += float((error**2 @ columns).sum())
        signal += float((x.astype(np.float64) ** 2 @ columns).sum())
    return noise / signal


def test_errors_and_bits_of_fused_layers(models: Path) -> None:
    """q, k and v are one unit. Its error uses their common tensor scale; its bits are those of the stored tensors."""
    found = assign_recipes(models / "dense", 16)
    x = oracle.arrays(load(models / "dense"))
    name = "model.layers.0.self_attn"
    unit = next(unit for unit in found.units if unit.name == f"{name}.(q_proj|k_proj|v_proj)")
    matrices = [x[f"{name}.{one}_proj.weight"] for one in "qkv"]
    assert unit.weights == sum(one.size for one in matrices) and len(unit.layers) == 3
    errors = {option.name: option.error for option in unit.options}
    assert errors["nvfp4-te"] == pytest.approx(ratio(matrices, "nvfp4-te"), rel=1e-9)
    assert errors[FP8] == pytest.approx(ratio(matrices, FP8), rel=1e-9) and errors[KEEP] == 0
    bits = {option.name: option.bits for option in unit.options}
    rows = sum(len(one) for one in matrices)
    wanted = unit.weights * 9 // 2 + 3 * 32, unit.weights * 8 + rows * 32, unit.weights * 16
    assert bits == dict(zip(("nvfp4-te", FP8, KEEP), wanted, strict=True))


@pytest.mark.parametrize("name", ["moe", "fused"])
def test_experts_are_one_unit_of_two_operators(models: Path, name: str) -> None:
    """All experts of a layer are one unit. Its error is the ratio of gate and up, and that of down, together."""
    found = assign_recipes(models / name, 16)
    units = [unit for unit in found.units if ".experts" in unit.name]
    assert units and all(unit.name.endswith(".experts.*") for unit in units)
    assert all(0 < option.error < 0.05 for unit in units for option in unit.options if option.name == "nvfp4-te")
    both = [option.error for unit in units for option in unit.options if option.name == "nvfp4-te"]
    single = [o.error for unit in found.units if unit not in units for o in unit.options if o.name == "nvfp4-te"]
    assert min(both) > 1.5 * max(single)


def test_all_experts_of_a_stack_that_stays_whole_are_measured(tmp_path: Path) -> None:
    """The error of a stack is that of all its experts, and not of the last one."""
    x = synthetic.gpt_oss(tmp_path / "model")
    found = assign_recipes(tmp_path / "model", 16, candidates=("mxfp4-ocp", KEEP), format="gpt-oss")
    unit = next(unit for unit in found.units if unit.name == "model.layers.0.mlp.experts.*")
    stacks = [x[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down")]
    all_experts, last = (
        sum(ratio([np.ascontiguousarray(one.T) for one in stack[first:]], "mxfp4-ocp") for stack in stacks)
        for first in (0, -1)
    )
    assert unit.options[0].error == pytest.approx(all_experts, rel=1e-9)
    assert all_experts != pytest.approx(last, rel=1e-4)


def test_the_assignment_is_optimal(models: Path) -> None:
    """No other assignment within the budget has a smaller error."""
    for bits in (4.6, 5.0, 6.5, 9.0):
        found = assign_recipes(models / "fused", bits)
        budget = bits * found.weights
        every = itertools.product(*(unit.options for unit in found.units))
        fitting = (sum(o.error for o in chosen) for chosen in every if sum(o.bits for o in chosen) <= budget)
        assert found.chosen.error == pytest.approx(min(fitting), rel=1e-12)
        assert found.bits_of(found.chosen) <= bits


def _converted(model: Path, out: Path, found: Assignment) -> None:
    wishes = Wishes(keep=found.kept)
    convert(model, out, found.default, recipes=found.recipes, wishes=wishes, format="compressed-tensors")


@pytest.mark.parametrize("name", ["dense", "moe", "fused"])
@pytest.mark.parametrize("bits", [5.0, 7.0])
def test_the_result_has_the_assigned_recipes_and_bits(models: Path, tmp_path: Path, name: str, bits: float) -> None:
    """The converted model has the recipes, and the bytes, of the assignment; verify is clean."""
    found = assign_recipes(models / name, bits, format="compressed-tensors")
    _converted(models / name, tmp_path / "out", found)
    assert verify(tmp_path / "out", models / name).clean
    changed = {k: v for k, v in load(tmp_path / "out").items() if load(models / name).get(k) != v}
    kept = sum(o.bits for o in found.options if o.name == KEEP)
    assert 8 * sum(len(data) for _, _, data in changed.values()) + kept == found.chosen.bits


def test_column_weights(models: Path, tmp_path: Path) -> None:
    """Column weights weight both sums of the error, and may change the assignment."""
    x = oracle.arrays(load(models / "dense"))
    weights = {
        name: np.exp(synthetic.random(name, (x[name].shape[1],), 2.0, np.dtype(np.float32)))
        for name in x
        if name.endswith("_proj.weight")
    }
    synthetic.write_file(tmp_path / "weights.safetensors", weights)
    columns = ScaleSearch.of("mse", tmp_path / "weights.safetensors")
    found = assign_recipes(models / "dense", 5.0, columns=columns)
    name = "model.layers.1.mlp.down_proj"
    unit = next(unit for unit in found.units if unit.name == name)
    expected = ratio([x[f"{name}.weight"]], "nvfp4-te", weights[f"{name}.weight"].astype(np.float64))
    assert unit.options[0].error == pytest.approx(expected, rel=1e-9)
    del weights[f"{name}.weight"]
    synthetic.write_file(tmp_path / "fewer.safetensors", weights)
    with refused("1 layers have no column weights"):
        assign_recipes(models / "dense", 5.0, columns=ScaleSearch.of("mse", tmp_path / "fewer.safetensors"))


def test_layers_that_a_candidate_cannot_hold(tmp_path: Path) -> None:
    """A layer whose rows are no whole blocks gets another candidate, and without one it is named."""
    tensors = {f"{name}.down_proj.weight": synthetic.random(name, (32, k)) for name, k in (("a", 64), ("b", 40))}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    found = assign_recipes(tmp_path / "m", 9.0, ("nvfp4-te", FP8))
    assert [[option.name for option in unit.options] for unit in found.units] == [["nvfp4-te", FP8], [FP8]]
    _converted(tmp_path / "m", tmp_path / "out", found)
    assert verify(tmp_path / "out", tmp_path / "m").clean
    shapes = {"gate": (40, 64), "up": (40, 64), "down": (64, 40)}
    tensors = {f"m.experts.0.{name}_proj.weight": synthetic.random(name, shape) for name, shape in shapes.items()}
    synthetic.write_model(tmp_path / "experts", {"model_type": "llama"}, tensors)
    (unit,) = assign_recipes(tmp_path / "experts", 9.0, ("nvfp4-te", FP8)).units  # nvfp4-te fits gate and up alone
    assert [option.name for option in unit.options] == [FP8]


def test_what_is_refused(models: Path, tmp_path: Path) -> None:
    model = models / "dense"
    convert(model, tmp_path / "q")
    x = {name: array.copy() for name, array in oracle.arrays(load(model)).items()}
    x["model.layers.0.mlp.down_proj.weight"][0, 0] = np.nan
    synthetic.write_model(tmp_path / "nan", json.loads((model / "config.json").read_text()), x)
    cases: list[tuple[Path, float, tuple[str, ...], str]] = [
        (model, 4.0, ("nvfp4-te", FP8, KEEP), "bits: 4 per weight are too few; these candidates need at least 4.5"),
        *((model, bits, (KEEP,), "a positive number of bits") for bits in (0.0, -1.0, float("nan"), float("inf"))),
        (model, 5.0, ("nvfp4-te", "nvfp4-te"), "at least one recipe is needed, and each candidate only once"),
        (model, 5.0, (KEEP,), "at least one recipe is needed, and each candidate only once"),
        (tmp_path / "q", 5.0, ("nvfp4-te",), "is quantized; convert the unquantized release"),
        (tmp_path / "nan", 5.0, ("nvfp4-te",), "holds NaN or infinity, so its error is not defined"),
    ]
    for source, bits, candidates, text in cases:
        with refused(text):
            assign_recipes(source, bits, candidates)


def test_the_command(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(models / "dense"), str(tmp_path / "out")
    assert main(["convert", model, out, "--bits", "5", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "bits per weight" in text and "chosen" in text and "(optimal), 8 groups of layers" in text
    assert main(["convert", model, out, "--bits", "5", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)["assignment"]
    assert body["budget"] == 5 and 4.5 < body["bits"] <= 5 and len(body["layers"]) == 8
    errors = [point["error"] for point in body["curve"]]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    assert body["error"] == pytest.approx(sum(layer["error"] for layer in body["layers"]))
    assert verify(out, model).clean
    for arguments, message in (
        (["--bits", "5", "--recipe", "mxfp4"], "leave --recipe out"),
        (["--candidates", "mxfp4"], "add --bits"),
        (["--bits", "5", "--scale-search", "mse"], "leave --scale-search out"),
        (["--bits", "20"], "--bits 20: every layer stays at 16 bits; needs 4.508 or more, below 16"),
        (["--bits", "16"], "--bits 16: every layer stays at 16 bits; needs 4.508 or more, below 16"),
    ):
        assert main(["convert", model, str(tmp_path / "x"), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_default_is_a_recipe_if_all_units_stay_unquantized():
    """A unit that fits no candidate has "keep" as its only option."""
    kept = LayerGroup("a", ("a",), 32, (Option(KEEP, 512, 0.0),))
    both = LayerGroup("b", ("b",), 32, (Option("nvfp4-te", 144, 0.1), Option(KEEP, 512, 0.0)))
    for units, choices, default in (((kept, both), (0, 1), "nvfp4-te"), ((kept,), (0,), "")):
        point = Point(512 * len(units), 0.0, choices)
        found = Assignment(16.0, units, point, (point,))
        assert (found.default, found.recipes, found.kept) == (default, (), tuple(unit.name for unit in units))


def drawn(rng: np.random.Generator, count: int, options: int, ties: bool = False) -> list[LayerGroup]:
    """Return random units. ties: True to draw sizes and errors from few values, so that many assignments are equal."""
    units = []
    for i in range(count):
        size = int(rng.integers(1, 5)) * 16 if ties else int(rng.integers(1, 5000))
        rates = rng.choice([4, 5, 8, 16], options, replace=ties)
        errors = rng.integers(0, 4, options) / 4 if ties else np.exp(rng.normal(-5, 2, options))
        extra = rng.integers(0, 2, options) * (not ties) * 7
        found = (
            Option(f"{k}", int(r) * size + int(x), float(e))
            for k, (r, x, e) in enumerate(zip(rates, extra, errors, strict=True))
        )
        units.append(LayerGroup(f"u{i}", (f"u{i}",), size, tuple(found)))
    return units


def brute(units: list[LayerGroup], budget: int) -> float:
    """Return the smallest error within the budget, by trying every assignment."""
    found = (unit_options for unit_options in itertools.product(*(unit.options for unit in units)))
    return min(sum(o.error for o in chosen) for chosen in found if sum(o.bits for o in chosen) <= budget)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_equals_brute_force(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    units = drawn(rng, int(rng.integers(1, 7)), int(rng.integers(1, 5)), ties)
    low = sum(min(o.bits for o in unit.options) for unit in units)
    high = sum(max(o.bits for o in unit.options) for unit in units)
    for budget in {low, high, *(int(one) for one in rng.integers(low, high + 1, 8))}:
        found = solve(units, budget)
        assert found.bits <= budget
        assert found.error == pytest.approx(brute(units, budget), rel=1e-12, abs=1e-14)
        assert found.bits == sum(unit.options[c].bits for unit, c in zip(units, found.choices, strict=True))


@together("seed", range(10))
def test_the_curve_is_optimal_at_its_points(seed: int) -> None:
    units = drawn(np.random.default_rng(seed), 5, 3)
    points = curve(units)
    assert [p.bits for p in points] == sorted(p.bits for p in points)
    for point in points:
        assert point.error == pytest.approx(brute(units, point.bits), rel=1e-12)
        assert solve(units, point.bits).error == pytest.approx(point.error, rel=1e-12)


def test_a_large_model_is_solved_quickly() -> None:
    """Two hundred units of similar layers with three options take far less than a second per budget."""
    rng = np.random.default_rng(1)
    units = []
    for i in range(200):
        size = (4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096)[i % 4]
        errors = (0.009 * np.exp(rng.normal(0, 0.2)), 0.0007 * np.exp(rng.normal(0, 0.2)), 0.0)
        options = zip((size * 9 // 2 + 32, size * 8 + 4096 * 32, size * 16), errors, strict=True)
        units.append(LayerGroup(f"u{i}", (), size, tuple(Option("", *one) for one in options)))
    total = sum(unit.weights for unit in units)
    start = time.process_time()
    bound = curve(units)
    for bits in (4.6, 5.0, 6.0, 9.0):
        found = solve(units, int(bits * total))
        below = [point.error for point in bound if point.bits >= int(bits * total)]
        above = [point.error for point in bound if point.bits <= int(bits * total)]
        assert below[0] <= found.error <= above[-1]
    assert time.process_time() - start < 20


def test_budgets_that_are_too_small_or_ample() -> None:
    units = [LayerGroup("a", ("a",), 10, (Option("x", 45, 0.5), Option("y", 80, 0.1)))]
    with refused("bits: 4 per weight are too few; these candidates need at least 4.5"):
        solve(units, 40)
    assert solve(units, 45).choices == (0,) and solve(units, 79).choices == (0,)
    assert solve(units, 80).choices == solve(units, 10**9).choices == (1,)
    steep = LayerGroup("b", ("b",), 10, (Option("x", 0, 1.0), Option("y", 50, 0.0)))
    late = LayerGroup("c", ("c",), 10, (Option("x", 0, 1.0), Option("y", 100, 0.5), Option("z", 110, 0.46)))
    assert solve([late, steep], 100).choices == (0, 1)  # z alone would cost 110 bits, not the 10 more than y


def test_options_of_no_use_are_never_chosen() -> None:
    """An option that takes more bits and has no smaller error is not chosen, however large the budget is."""
    units = [LayerGroup("a", ("a",), 10, (Option("x", 45, 0.5), Option("worse", 60, 0.5), Option("y", 80, 0.1)))]
    assert solve(units, 70).choices == (0,)


def test_shown_points() -> None:
    points = [Point(bits, 1 / bits, ()) for bits in range(1, 101)]
    found = shown_points(points, 5)
    assert found[0] == points[0] and found[-1] == points[-1] and len(found) == 5
    assert shown_points(points[:3], 5) == points[:3]


DOWN = [("*.down_proj", "nvfp4-te-2d")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the small dense model once, and return its directory."""
    root = tmp_path_factory.mktemp("model") / "m"
    synthetic.dense(root)
    return root


def test_each_layer_has_the_bytes_of_its_recipe(model: Path, tmp_path: Path) -> None:
    """Layers that match get the other recipe; both kinds of layers have the bytes of a conversion by one recipe."""
    convert(model, tmp_path / "mixed", "nvfp4-te", recipes=DOWN, format="modelopt")
    mixed = load(tmp_path / "mixed")
    one = {}
    for recipe in ("nvfp4-te", "nvfp4-te-2d"):
        convert(model, tmp_path / recipe, recipe, format="modelopt")
        one[recipe] = load(tmp_path / recipe)
    for name, tensor in mixed.items():
        assert tensor == one["nvfp4-te-2d" if ".down_proj." in name else "nvfp4-te"][name], name
    codes = "model.layers.0.mlp.down_proj.weight"
    assert one["nvfp4-te"][codes] != one["nvfp4-te-2d"][codes]


def test_records_and_verify(model: Path, tmp_path: Path) -> None:
    """Config and manifest record the patterns; verify encodes each layer with its own recipe."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    own = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["fp4kit"]
    assert own["recipe"] == "nvfp4-te" and own["recipes"] == [["*.down_proj", "nvfp4-te-2d"]]
    report = verify(tmp_path / "out", model)
    assert report.clean and report.recipe == "nvfp4-te, *.down_proj=nvfp4-te-2d"
    assert all(layer.compared and not layer.differing for layer in report.layers)
    given = verify(tmp_path / "out", model, "nvfp4-te")
    assert {layer.name.rpartition(".")[2] for layer in given.layers if layer.differing} == {"down_proj"}
    (tmp_path / "out" / "fp4kit_manifest.json").unlink()  # the record in the config alone suffices
    assert verify(tmp_path / "out", model).clean
    convert(tmp_path / "out", tmp_path / "other", format="modelopt")  # the codes are carried, and so is the record
    assert verify(tmp_path / "other", model).clean


def test_the_record_in_a_single_file(tmp_path: Path) -> None:
    tensors = {f"mlp.{name}.weight": synthetic.random(name, (32, 64)) for name in ("gate_proj", "up_proj", "down_proj")}
    synthetic.write_file(tmp_path / "m.safetensors", tensors)
    convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", recipes=DOWN)
    report = verify(tmp_path / "out.safetensors", tmp_path / "m.safetensors")
    assert report.clean and report.recipe == "nvfp4-te, *.down_proj=nvfp4-te-2d"


def test_stacks_match_under_their_own_names(tmp_path: Path) -> None:
    """A pattern matches the names of the source, so that a stack of experts gets one recipe."""
    synthetic.fused(tmp_path / "m")
    plan = make_plan(tmp_path / "m", recipes=[("*.experts.down_proj", "nvfp4-te-2d")])
    found = {one.name.rpartition(".experts.")[2]: one.recipe and one.recipe.id for one in plan.converted}
    assert (found["down_proj"], found["gate_up_proj"]) == ("nvfp4-te-2d", "nvfp4-te")
    convert(tmp_path / "m", tmp_path / "out", recipes=[("*.experts.down_proj", "nvfp4-te-2d")])
    assert verify(tmp_path / "out", tmp_path / "m").clean


def test_the_first_pattern_decides(model: Path) -> None:
    plan = make_plan(model, recipes=[("*.0.mlp.down_proj", "nvfp4-modelopt"), *DOWN])
    ids = {tensor.name: tensor.recipe.id for tensor in plan.converted if tensor.recipe is not None}
    assert ids["model.layers.0.mlp.down_proj.weight"] == "nvfp4-modelopt"
    assert ids["model.layers.1.mlp.down_proj.weight"] == "nvfp4-te-2d"


REFUSED: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {  # part of the message -> (patterns, options)
    "did you mean 'model.layers.0.mlp.down_proj'?; near": (
        [("model.layers.0.mlp.down_prj", "nvfp4-te-2d")],
        {},
    ),
    "an earlier pattern, *.down_proj, matches all its layers": ([*DOWN, ("*0.mlp.down_proj", "nvfp4-te")], {}),
    "every module that it matches stays unquantized: model.embed_": ([("model.embed_tokens", "nvfp4-te-2d")], {}),
    "(q_proj|k_proj|v_proj): model.layers.0.self_attn.q_proj would get the recipe": ([("*.q_proj", "nvfp4-te-2d")], {}),
    "(gate_proj|up_proj): ": ([("*.gate_proj", "nvfp4-te-2d")], {}),
    "--recipe *.down_proj=...: is given twice": ([*DOWN, *DOWN], {}),
    "has no effect with --format bf16": (DOWN, {"format": "bf16"}),
    "(--keep *.down_proj)": (DOWN, {"wishes": Wishes(keep=("*.down_proj",))}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_patterns(model: Path, text: str) -> None:
    recipes, options = REFUSED[text]
    with refused(text):
        make_plan(model, recipes=recipes, **options)


def test_the_command_with_patterns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", str(model), out, "--recipe", "*.down_proj=nvfp4-te-2d", "--dry-run", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["recipe"] == "nvfp4-te" and body["recipes"] == [{"pattern": "*.down_proj", "recipe": "nvfp4-te-2d"}]
    assert main(["convert", str(model), out, "--recipe", "mxfp4", "--recipe", "mxfp8"]) == 2
    assert "only one recipe can be the default" in capsys.readouterr().err
    assert main(["convert", str(model), out, "--recipe", "*.q_proj="]) == 2
    assert "PATTERN=RECIPE is needed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--recipe", "*.q_proj=mxfp8-te")])
def test_an_empty_recipe_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """--recipe "" is an error in convert and verify, instead of standing for the default recipe."""
    commands = (["convert", str(model), str(tmp_path / "out")], ["verify", str(model), "--source", str(model)])
    for command in commands:
        assert main([*command, "--recipe", "", *more]) == 2
        assert "--recipe '': is empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_takes_patterns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patterns tell verify which recipe made which layers if no recipe is recorded."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    declare(tmp_path / "out", fp4kit=None)
    (tmp_path / "out" / "fp4kit_manifest.json").unlink()
    command = ["verify", str(tmp_path / "out"), "--source", str(model), "--recipe", "nvfp4-te"]
    assert main(command) == 1 and "bytes of codes that differ" in capsys.readouterr().out
    assert main([*command, "--recipe", "*.down_proj=nvfp4-te-2d", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["clean"] and body["recipe"] == "nvfp4-te, *.down_proj=nvfp4-te-2d"
    assert all(layer["codes"]["compared"] for layer in body["layers"])
    assert main([*command, "--recipe", "*.down_prj=nvfp4-te-2d"]) == 2
    assert "*.down_prj=...: decides about no layer that is compared with the source" in capsys.readouterr().err
    synthetic.write_file(tmp_path / "norm.safetensors", {"norm.weight": np.ones(4, np.float32)})
    assert main([*command[:3], str(tmp_path / "norm.safetensors"), *command[4:], "--recipe", "x=nvfp4-te"]) == 2
    assert "with the source; no layer is compared; a pattern" in " ".join(capsys.readouterr().err.split())
    assert main(["verify", str(tmp_path / "out"), "--recipe", "*.down_proj=nvfp4-te-2d"]) == 2
    assert "--recipe: says how layers were made from a source; add --source SRC" in capsys.readouterr().err


def test_patterns_replace_those_that_are_recorded(model: Path, tmp_path: Path) -> None:
    """The recorded default holds for layers that no given pattern matches."""
    convert(model, tmp_path / "out", "nvfp4-te", recipes=DOWN)
    report = verify(tmp_path / "out", model, recipes=[("*.0.mlp.down_proj", "nvfp4-te-2d")])
    assert {layer.name for layer in report.layers if layer.differing} == {"model.layers.1.mlp.down_proj"}
    assert report.recipe == "nvfp4-te, *.0.mlp.down_proj=nvfp4-te-2d"


def test_a_search_covers_the_recipes_that_allow_it(model: Path, tmp_path: Path) -> None:
    """Scales are searched only where the recipe accepts any block scale; verify knows which layers these are."""
    search = ScaleSearch.of("mse", None, None)
    recipes = [("*.down_proj", "nvfp4-te")]
    report = convert(model, tmp_path / "out", "nvfp4-modelopt-static", recipes=recipes, search=search)
    assert report.gains and not any(name.endswith("down_proj") for name in report.gains)
    assert verify(tmp_path / "out", model).clean
