"""Test conversions with a search for scales, of rows and of GGUF blocks: bytes, plans, and what verify says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf_files
import numpy as np
import oracle
import processes
import pytest
import synthetic
from exhaustive import half
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import ConversionReport, Options, ScaleSearch, convert, make_plan
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.checkpoint.identify import hypotheses
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict, LayerVerdict
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.formats import E2M1, E4M3
from fp4kit.layouts import pack_gguf
from fp4kit.recipes import recipe
from fp4kit.reference.search import SearchTerms, losses
from fp4kit.storage.gguf_file import read_gguf

RECIPE = "nvfp4-modelopt-static"
QUERY = "encoder.layer.0.attention.self.query"
QKV = tuple(f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key", "value"))
DENSE = "encoder.layer.0.intermediate.dense.weight"
CONVERTED = (*QKV, "encoder.layer.0.attention.output.dense.weight", DENSE)
Run = Callable[..., processes.Run]


def searched(source: Path, target: Path, weights: Path | None = None, **options) -> ConversionReport:
    return convert(source, target, RECIPE, search=ScaleSearch.of("mse", weights), **options)


def column_weights(
    path: Path, tensors: synthetic.Tensors, by_module: bool = False, **changed: np.ndarray | None
) -> Path:
    """Write a safetensors file with one random weight per column of every layer in CONVERTED. Return its path.

    tensors: the model's tensors.
    by_module: True to use names of modules as keys, False to use names of tensors.
    changed: {last part of a module's name: vector to write instead, or None to leave the module out}.
    """
    rng, found = np.random.default_rng(5), {}
    for name in CONVERTED:
        vector = (rng.random(tensors[name].shape[1]) ** 4).astype(np.float32)
        given = changed.get(name.split(".")[-2], vector)
        if given is not None:
            found[name.removesuffix(".weight") if by_module else name] = given
    synthetic.write_file(path, found)
    return path


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, synthetic.Tensors]:
    return tmp_path / "m", synthetic.bert(tmp_path / "m")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the fp4kit command in this process and returns its exit code, stdout and stderr."""
    return processes.in_this_process(capsys)


# ---- bytes ----


@pytest.mark.parametrize(
    ("format", "objective", "weighted"),
    [("modelopt", "mse", True), ("compressed-tensors", "mse", False), ("modelopt", "mae", False)],
)
def test_bytes_are_those_of_search_and_quantize(
    model, tmp_path: Path, format: str, objective: str, weighted: bool
) -> None:
    """convert writes the bytes of search_scales and quantize, with the tensor amax of all layers that share a scale.

    weighted: whether the search weights the errors of columns
    """
    source, tensors = model
    weights = column_weights(tmp_path / "w.safetensors", tensors) if weighted else None
    search = ScaleSearch.of(objective, weights)
    convert(source, tmp_path / "d", RECIPE, search=search, format=format)
    found = oracle.arrays(oracle.load(tmp_path / "d"))
    vectors = oracle.arrays(oracle.load(tmp_path)) if weights else {}
    group = max(float(np.abs(tensors[name]).max()) for name in QKV)
    for name in CONVERTED:
        x = tensors[name].astype(np.float32)
        amax = np.float32(group if name in QKV else np.abs(x).max())
        given = {"objective": objective, "weights": vectors.get(name)}
        best = fp4kit.search_scales(x, RECIPE, tensor_amax=amax, **given)
        q = fp4kit.quantize(x, RECIPE, tensor_amax=amax, block_amax=best)
        module = name.removesuffix(".weight")
        codes = found[f"{module}.{'weight' if format == 'modelopt' else 'weight_packed'}"]
        assert codes.tobytes() == q.packed.tobytes()
        assert found[f"{module}.weight_scale"].tobytes() == q.block_scale.tobytes()
    report = verify(tmp_path / "d", source, search=search if weighted else None)
    assert report.clean and report.scales == f"searched by {'weighted ' * weighted}{objective}"


def test_slabs_threads_and_resuming_do_not_matter(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, tensors = model
    weights = column_weights(tmp_path / "w.safetensors", tensors)
    whole = searched(source, tmp_path / "a", weights)
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 16 * 64 * 4)
    parts = searched(source, tmp_path / "b", weights, options=Options(2))
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b").equal
    for name, expected in whole.gains.items():
        np.testing.assert_allclose(parts.gains[name], expected, rtol=1e-12)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    tensors = synthetic.moe(tmp_path / "m")
    report = searched(tmp_path / "m", tmp_path / "d", format="modelopt")
    assert [f"{name}.weight" for name in report.gains] == [
        t.name for t in report.plan.converted if tensors[t.name].any()
    ]
    assert all(0 < gain.after < gain.before < gain.signal for gain in report.gains.values())
    assert verify(tmp_path / "d", tmp_path / "m").clean


def test_a_layer_of_zeros_has_nothing_to_search(tmp_path: Path) -> None:
    source = tmp_path / "m"
    tensors = {
        "layers.0.a_proj.weight": np.zeros((16, 64), np.float32),
        "layers.0.b_proj.weight": np.ones((16, 64), np.float32),
    }
    synthetic.write_model(source, {"model_type": "llama"}, tensors)
    assert set(searched(source, tmp_path / "d").gains) == {"layers.0.b_proj"}
    assert verify(tmp_path / "d", source).clean


# ---- what the plan and reports say ----


def test_the_report_tells_errors_before_and_after(model, tmp_path: Path) -> None:
    source, tensors = model
    losses = searched(source, tmp_path / "d", format="modelopt").gains["encoder.layer.0.intermediate.dense"]
    x = tensors[DENSE].astype(np.float32)
    best = fp4kit.search_scales(x, RECIPE)
    wide = x.astype(np.float64)
    for noise, amaxes in ((losses.before, None), (losses.after, best)):
        values = fp4kit.dequantize(fp4kit.quantize(x, RECIPE, block_amax=amaxes), np.float32)
        np.testing.assert_allclose(noise, np.sum((wide - values) ** 2), rtol=1e-12)
    np.testing.assert_allclose(losses.signal, np.sum(wide**2), rtol=1e-12)


def test_weighted_errors(model, tmp_path: Path) -> None:
    source, tensors = model
    vector = np.zeros(64, np.float32)
    vector[7] = 3
    weights = column_weights(tmp_path / "w.safetensors", tensors, query=vector)
    losses = searched(source, tmp_path / "d", weights).gains[QUERY]
    np.testing.assert_allclose(
        losses.signal, 3 * np.sum(tensors[f"{QUERY}.weight"][:, 7].astype(np.float64) ** 2), rtol=1e-12
    )
    assert losses.after < losses.before / 4  # the loss of one column, which gets a scale of its own


def test_the_command(model, tmp_path: Path, run: Run) -> None:
    source, _ = model
    code, text, _ = run("convert", source, tmp_path / "d", "--scale-search", "mse")
    assert code == 0 and "SQNR dB by amax" in text
    assert "scales searched by mse: SQNR 20.36 dB by amax, 21.69 dB searched" in text
    code, text, _ = run("verify", tmp_path / "d", "--source", source)
    made = f"0 of 13844 bytes differ from the source encoded with {RECIPE} with scales searched by mse"
    assert code == 0 and made in text
    code, text, _ = run("identify", tmp_path / "d", "--source", source)
    assert code == 0 and text.startswith("nvfp4-modelopt-mse (Model-Optimizer) made 5 layers\n")
    found = json.loads(run("convert", source, tmp_path / "plain", "--json").out)
    assert (found["recipe"], found["scale_search"], found["searched"]) == ("nvfp4-te", None, [])
    for name in ("config.json", "fp4kit_manifest.json"):
        assert "scale_search" not in (tmp_path / "plain" / name).read_text()


def test_dry_run_and_json(model, tmp_path: Path, run: Run) -> None:
    source, tensors = model
    weights = column_weights(tmp_path / "w.safetensors", tensors, by_module=True)
    code, text, _ = run(
        "convert", source, tmp_path / "d", "--scale-search", "mse", "--column-weights", weights, "--dry-run"
    )
    assert code == 0 and "quantized, scales searched by weighted mse" in text
    command = ("convert", source, tmp_path / "d", "--scale-search", "mse", "--column-weights", weights, "--json")
    planned, made = (json.loads(run(*command, *more)[1]) for more in (("--dry-run",), ()))
    assert planned["scale_search"] == made["scale_search"]
    assert made["scale_search"]["objective"] == "mse" and made["scale_search"]["column_weights"] == "w.safetensors"
    assert planned["recipe"] == RECIPE and len(made["searched"]) == 5
    assert all(layer["sqnr_db"] > layer["sqnr_db_by_amax"] for layer in made["searched"])
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["quantization_config"]["fp4kit"]["scale_search"] == "weighted mse"


def test_compare_says_what_scales_are(model, tmp_path: Path) -> None:
    source, _ = model
    convert(source, tmp_path / "a", RECIPE)
    searched(source, tmp_path / "b")
    found = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [(d.key, d.kind) for d in found.configs] == [("quantization_config.fp4kit.scale_search", "extra")]
    assert len(found.layers) == 5 and all(layer.scales for layer in found.layers)


# ---- verify and identify ----


def test_verify_needs_the_column_weights(model, tmp_path: Path) -> None:
    source, tensors = model
    searched(source, tmp_path / "d", column_weights(tmp_path / "w.safetensors", tensors))
    without = verify(tmp_path / "d", source)
    needed = (
        "5 layers are not re-encoded: their scales were searched with column weights; give the weights with "
        "--column-weights or --imatrix"
    )
    assert without.clean and [issue.text for issue in without.issues] == [needed]
    others = column_weights(tmp_path / "v.safetensors", tensors, dense=np.ones(64, np.float32))
    found = verify(tmp_path / "d", source, search=ScaleSearch.of("mse", others))
    wrong = "the column weights differ from those that the checkpoint was made with"
    assert not found.clean and wrong in [issue.text for issue in found.issues]


@pytest.mark.parametrize("manifest", half([True, False]))
def test_verify_takes_the_recorded_error_under_column_weights(model, tmp_path: Path, run: Run, manifest: bool) -> None:
    source, tensors = model
    weights = column_weights(tmp_path / "w.safetensors", tensors)
    convert(source, tmp_path / "d", RECIPE, search=ScaleSearch.of("mae", weights))
    if not manifest:
        (tmp_path / "d" / "fp4kit_manifest.json").unlink()
    command = ("verify", tmp_path / "d", "--source", source, "--column-weights", weights)
    made = f"differ from the source encoded with {RECIPE} with scales searched by weighted"
    code, text, _ = run(*command)
    assert code == 0 and f"0 of 13844 bytes {made} mae" in text
    code, text, _ = run(*command, "--scale-search", "mse")
    assert code == 1 and f"{made} mse;" in text


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("nvfp4-te", "nvfp4-te computes its block scales from x"),
        ("mxfp8-te", "mxfp8-te cannot be searched, because its element is E4M3"),
        ("nvfp4-modelopt-mse", "nvfp4-modelopt-mse already searches its scales"),
    ],
)
def test_verify_refuses_a_search_that_the_recipe_has_not(
    model, tmp_path: Path, run: Run, recipe: str, text: str
) -> None:
    """verify rejects a search that the recipe does not allow.

    Without the check, it would say that a search had made bytes with power-of-two scales.
    """
    convert(model[0], tmp_path / "d", recipe)
    code, out, error = run("verify", tmp_path / "d", "--source", model[0], "--scale-search", "mse")
    assert (code, out) == (2, "") and error.startswith(f"fp4kit verify: scale search: {text}")


def test_the_recipe_that_searches_writes_the_same(model, tmp_path: Path) -> None:
    searched(model[0], tmp_path / "a")
    convert(model[0], tmp_path / "b", "nvfp4-modelopt-mse")
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b").tensors == ()
    assert verify(tmp_path / "b", model[0]).clean


def test_identify_tells_searched_scales_of_no_known_rule(model, tmp_path: Path) -> None:
    source, tensors = model
    searched(source, tmp_path / "d", column_weights(tmp_path / "w.safetensors", tensors))
    verdict = identify_checkpoint(tmp_path / "d", source)
    assert verdict.recipe is None and len(verdict.exceptions) == 5
    found = "codes are right under the stored scales, which no rule known to fp4kit gives"
    assert verdict.sentence == f"searched scales in 5 layers: {found}"
    strange = LayerVerdict("strange", replace(verdict.layers[0].explanation, searched=False, cause=None))
    mixed = CheckpointVerdict((), None, (*verdict.layers, strange))
    assert mixed.sentence == f"searched scales in 5 of 6 layers: {found}; nothing explains the others"
    for layer in verdict.layers:
        assert layer.explanation.sentence.startswith("searched scales: codes are those of nvfp4-")
        assert layer.explanation.sentence.endswith("under the stored block scales, which no rule known to fp4kit gives")


def test_identify_tries_no_other_orders_of_searched_layers(model, tmp_path: Path, monkeypatch) -> None:
    """identify does not try row orders other than the stored one if a layer's scales were searched.

    Trying them takes as long per layer as all other faults together: 50 s for 48 layers of 32 rows.
    """
    source, tensors = model
    searched(source, tmp_path / "d", column_weights(tmp_path / "w.safetensors", tensors))
    tried, right = [], hypotheses.try_layout
    counted = lambda layout, *rest: tried.append(layout) or right(layout, *rest)  # noqa: E731
    monkeypatch.setattr(hypotheses, "try_layout", counted)
    assert all(layer.explanation.searched for layer in identify_checkpoint(tmp_path / "d", source).layers)
    assert len(tried) == 5 and not any(layout.mishaps for layout in tried)


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nvfp4-te"}, "scale search: nvfp4-te computes its block scales from x, and takes no"),
        ({"recipe": "mxfp4-ocp"}, "scale search: mxfp4-ocp cannot be searched, because its scale is E8M0"),
        (
            {"recipe": "nvfp4-modelopt-mse"},
            f"nvfp4-modelopt-mse already searches its scales; leave the scale search out, or use {RECIPE}",
        ),
        ({"format": "bf16"}, "scale search: not supported for bf16; use --format modelopt or compressed-tensors"),
        ({"nonfinite": "keep"}, "scale search: a block with NaN or infinity has no smallest error; use --nonfinite"),
    ],
)
def test_refused_requests(model, options: dict[str, str], message: str) -> None:
    with refused(message):
        make_plan(model[0], **{"recipe": RECIPE, **options}, search=ScaleSearch())


def test_nothing_to_search(model, tmp_path: Path) -> None:
    convert(model[0], tmp_path / "d", RECIPE, format="modelopt")
    with refused("scale search: no layer gets new codes, so there are no scales to search; leave it out"):
        make_plan(tmp_path / "d", RECIPE, format="compressed-tensors", search=ScaleSearch())


def test_unknown_objectives_and_files(tmp_path: Path) -> None:
    with refused("scale search: objective is 'rmse'; needs 'mse', 'mae', 'max', or 'p' and a number from 1 to 16"):
        ScaleSearch.of("rmse")
    with refused("column weights: are used only by a scale search; add --scale-search mse"):
        ScaleSearch.of(None, tmp_path / "w.safetensors")
    with refused(f"column weights {tmp_path / 'w.safetensors'}: is not a file; a safetensors file is needed"):
        ScaleSearch.of("mse", tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_text("no header")
    with refused("w.safetensors: not a usable safetensors file"):
        ScaleSearch.of("mse", tmp_path / "w.safetensors")


BAD = "weights are negative, NaN or infinite; needs finite weights >= 0"
NAMED, ONES = f"w.safetensors: {QUERY}.weight", np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": None, "key": None}, f"w.safetensors: 2 layers have no column weights: {QUERY}, encoder"),
        ({"query": np.ones(63, np.float32)}, f"{NAMED}: is F32 [63]; needs F32 [64], one weight per column"),
        ({"query": ONES.astype(np.float16)}, f"{NAMED}: is F16 [64]; needs F32 [64], one weight per column"),
        ({"query": ONES.reshape(1, 64)}, f"{NAMED}: is F32 [1, 64]; needs F32 [64], one weight per column"),
        ({"query": -ONES}, f"{NAMED}: 64 of 64 {BAD}"),
        ({"query": np.where(np.arange(64) < 2, np.nan, ONES).astype(np.float32)}, f"{NAMED}: 2 of 64 {BAD}"),
    ],
)
def test_column_weights_that_do_not_fit(
    model, tmp_path: Path, changed: dict[str, np.ndarray | None], message: str
) -> None:
    weights = column_weights(tmp_path / "w.safetensors", model[1], **changed)
    with refused(message):
        make_plan(model[0], RECIPE, search=ScaleSearch.of("mse", weights))


RECIPES = ("nvfp4-gguf", "mxfp4-gguf")
GAIN = {"nvfp4-gguf": 0.97, "mxfp4-gguf": 1}  # the largest share of llama.cpp's error that a search leaves
OBJECTIVES = {"mse": 2.0, "mae": 1.0, "max": np.inf, "p3": 3.0}


def inputs(scale: float) -> np.ndarray:
    """Return a float32 matrix of ordinary blocks, which also has blocks of zeros, an outlier and blocks of tiny values.

    scale: the standard deviation of the ordinary values.
    """
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((24, 192)) * scale).astype(np.float32)
    x[0, :64] = 0
    x[1, 3] = 40 * scale
    x[2, :64] *= np.float32(2.0**-9)
    return x


def exhaustive_errors(x: np.ndarray, kind: str, power: float, weights: np.ndarray | None) -> np.ndarray:
    """Return the error of each block under every scale byte that llama.cpp reads, as float64 (bytes, rows, blocks).

    Each element is rounded to the nearest value. The error is the sum of |difference|^power, weighted per element, or
    the largest weighted |difference| if `power` is infinite.

    kind: "nvfp4" or "mxfp4".
    weights: one per column, or None for weights of 1.
    """
    size = 16 if kind == "nvfp4" else 32
    blocks = x.astype(np.float64).reshape(len(x), -1, size)
    w = 1.0 if weights is None else weights.astype(np.float64).reshape(-1, size)
    found = []
    for byte in range(127 if kind == "nvfp4" else 255):
        scale = float(E4M3.values[byte]) if kind == "nvfp4" else 2.0 ** (byte - 127)
        d = np.full(blocks.shape, np.inf)
        for value in E2M1.values.astype(np.float64):
            d = np.minimum(d, np.abs(blocks - value * scale))
        found.append((w * d).max(axis=-1) if power == np.inf else (w * d**power).sum(axis=-1))
    return np.stack(found)


def errors(x: np.ndarray, q: fp4kit.Quantized, power: float, weights: np.ndarray | None) -> np.ndarray:
    """Return the error of each block of x after quantization to q, as float64 (rows, blocks).

    power and weights: as in exhaustive_errors.
    """
    size = q.recipe.block_size
    d = np.abs(fp4kit.dequantize(q, np.float32).astype(np.float64) - x).reshape(len(x), -1, size)
    w = 1.0 if weights is None else weights.astype(np.float64).reshape(-1, size)
    return (w * d).max(axis=-1) if power == np.inf else (w * d**power).sum(axis=-1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("id", RECIPES)
def test_no_scale_byte_has_a_smaller_error(id: str, objective: str, weighted: bool) -> None:
    """The chosen bytes reach the minimum over every byte, up to the rounding of float32 errors.

    Errors are compared in float64. llama.cpp's own rule does not reach the minimum.
    """
    x, kind, power = inputs(0.5), id.partition("-")[0], OBJECTIVES[objective]
    weights = np.random.default_rng(1).random(192).astype(np.float32) + np.float32(0.1) if weighted else None
    best = exhaustive_errors(x, kind, power, weights).min(axis=0)
    found = errors(x, search_blocks(x, recipe(id), objective, weights), power, weights)
    assert (found <= best * (1 + 1e-5)).all()
    assert found.sum() < GAIN[id] * errors(x, fp4kit.quantize(x, id), power, weights).sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nvfp4_bytes_are_those_of_an_exhaustive_search(objective: str, weighted: bool) -> None:
    """The search chooses the byte that a loop over all 127 bytes finds; if errors are equal, the first byte wins.

    The loop computes its errors in float32, as the search does.
    """
    x, r = inputs(3.0), recipe("nvfp4-gguf")
    weights = np.random.default_rng(1).random(192).astype(np.float32) if weighted else None
    terms = SearchTerms(weights=weights, power=OBJECTIVES[objective])
    with np.errstate(all="ignore"):
        tried = np.stack([losses(x, np.float32(max(E4M3.values[b], 1e-9)), r, terms) for b in range(1, 127)])
    best = (1 + tried.argmin(axis=0)).astype(np.uint8)
    wanted = fp4kit.quantize(x, "nvfp4-gguf", block_scale=best)
    empty = (np.asarray(wanted.packed).reshape(24, -1, 8) == 0).all(axis=-1)
    found = search_blocks(x, r, objective, weights)
    np.testing.assert_array_equal(found.block_scale, np.where(empty, 0, best))
    np.testing.assert_array_equal(found.packed, wanted.packed)
    assert empty[0, :4].all() and len(np.unique(best)) > 15


def test_mxfp4_bytes_are_those_of_an_exhaustive_search() -> None:
    """The search takes the block scale of the least error among all scales, and the smallest one on a tie.

    Elements are multiples of 1/16, whose errors are exact in floating point, so that ties occur.
    """
    x = (np.random.default_rng(3).integers(-120, 121, (64, 128)) / 16).astype(np.float32)
    x[0, :32] = np.tile([4, 2, 1, 0.5], 8)
    found = search_blocks(x, recipe("mxfp4-gguf"), "mse", None)
    tried = exhaustive_errors(x, "mxfp4", 2.0, None)
    np.testing.assert_array_equal(found.block_scale, tried.argmin(axis=0))
    assert (np.sort(tried, axis=0)[0] == np.sort(tried, axis=0)[1]).any()


def test_large_scales_that_llama_cpp_rounds_to_448() -> None:
    """The search for NVFP4 scales also uses the bytes 0x78 to 0x7D, which llama.cpp's own rule never stores."""
    x = inputs(3.0) * np.float32(200)
    own, found = fp4kit.quantize(x, "nvfp4-gguf"), search_blocks(x, recipe("nvfp4-gguf"), "mse", None)
    rare = lambda q: np.isin(q.block_scale, np.arange(0x78, 0x7E)).any()  # noqa: E731
    assert rare(found) and not rare(own)


@pytest.mark.parametrize("id", RECIPES)
def test_blocks_whose_weights_are_zero_are_searched_with_equal_weights(id: str) -> None:
    x, weights = inputs(0.5), np.ones(192, np.float32)
    weights[64:128] = 0
    found, equal = (search_blocks(x, recipe(id), "mse", w) for w in (weights, np.ones(192, np.float32)))
    np.testing.assert_array_equal(found.block_scale, equal.block_scale)
    np.testing.assert_array_equal(found.packed, equal.packed)


@pytest.mark.parametrize("id", RECIPES)
def test_files_hold_the_searched_blocks(id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file gets the bytes that the search gives and records its name.

    verify repeats the search and so finds a changed byte.
    """
    tensors, kind = gguf_files.write_model(tmp_path / "m.gguf"), id.partition("-")[0]
    out = tmp_path / "o.gguf"
    assert main(["convert", str(tmp_path / "m.gguf"), str(out), "--recipe", id, "--scale-search", "mse"]) == 0
    assert "searched" in capsys.readouterr().out
    file, whole = read_gguf(out), out.read_bytes()
    assert file.metadata["fp4kit.scale_search"] == "mse"
    converted = [entry for entry in file.entries if entry.dtype == kind.upper()]
    assert len(converted) > 8
    for entry in converted:
        x = tensors[entry.name]
        made = [search_blocks(part, recipe(id), "mse", None) for part in (x if x.ndim == 3 else x[None])]
        raw = b"".join(pack_gguf(q.packed, q.block_scale, kind).tobytes() for q in made)
        assert whole[entry.start : entry.start + entry.nbytes] == raw
    assert verify(out, tmp_path / "m.gguf").clean
    place = next(entry.start for entry in file.entries if entry.name == "blk.0.attn_q.weight")
    out.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert not verify(out, tmp_path / "m.gguf").clean
    with refused("mxfp4-ocp cannot be searched"):
        make_plan(tmp_path / "m.gguf", "mxfp4-ocp", search=ScaleSearch.of("mse"))


@pytest.mark.parametrize("id", RECIPES)
def test_an_outlier_without_weight_does_not_set_the_scale(id: str) -> None:
    """An outlier with weight 0 does not affect the scale: the block gets the scale of its other elements.

    That scale is 2^-4 times the scale that the outlier would need.
    """
    x, weights = np.random.default_rng(2).uniform(-6, 6, (1, 64)).astype(np.float32), np.ones(64, np.float32)
    x[0, 3], weights[3] = 96, 0
    found = search_blocks(x, recipe(id), "mse", weights)
    best = exhaustive_errors(x, id.partition("-")[0], 2.0, weights).min(axis=0)
    assert (errors(x, found, 2.0, weights) <= best * (1 + 1e-5)).all()
    assert errors(x, fp4kit.quantize(x, id), 2.0, weights)[0, 0] > 4 * best[0, 0]
