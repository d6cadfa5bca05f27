"""Test that identify gives the verdict of a whole read from samples, and what it says of a wrong source."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import by_default, every

from fp4kit.checkpoint import CheckpointError, Options, convert
from fp4kit.checkpoint.identify import hypotheses, run
from fp4kit.checkpoint.identify.run import (
    SAMPLED_ROWS,
    PreparedIdentification,
    identify_checkpoint,
    rows_in,
    sample_spans,
    scaling_of,
)
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import weights_of
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.cli.output import Meter

BF16 = np.dtype(ml_dtypes.bfloat16)
DATA = Path(__file__).parents[2] / "data"
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
Tensors = dict[str, np.ndarray]
ROWS = 288  # of most layers, so that they are sampled


@pytest.fixture(autouse=True)
def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample also small models."""
    monkeypatch.setattr(run, "SMALL", 0)


def weights(tag: str = "", hidden: int = 64) -> Tensors:
    """Return the float32 tensors of a llama with 2 layers. ``tag`` makes others of equal shapes."""
    tensors = {f"{name}.weight": np.ones((32, hidden), np.float32) for name in ("model.embed_tokens", "lm_head")}
    for i in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            module = f"model.layers.{i}.{name}"
            tensors[f"{module}.weight"] = synthetic.random(tag + module, (ROWS, hidden), 0.02, np.dtype("f4"))
        module = f"model.layers.{i}.mlp.down_proj"
        tensors[f"{module}.weight"] = synthetic.random(tag + module, (hidden, ROWS), 0.02, np.dtype("f4"))
    return tensors


def cast(tensors: Tensors, dtype: np.dtype = BF16) -> Tensors:
    return {name: x.astype(dtype) for name, x in tensors.items()}


def write(root: Path, tensors: Tensors) -> Path:
    synthetic.write_model(root, dict(CONFIG), tensors)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a checkpoint made by a recipe, from the source "m" beside it."""
    root = tmp_path_factory.mktemp("made")
    write(root / "m", cast(weights()))

    def made_by(recipe: str) -> Path:
        if not (root / recipe).exists():
            convert(root / "m", root / recipe, recipe)
        return root / recipe

    return made_by


def changed(path: Path, copy: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """Write a copy of a checkpoint, with ``change(name, bytes (rows, bytes))`` of each matrix."""
    tensors = {name: np.array(x) for name, x in oracle.arrays(oracle.load(path)).items()}
    tensors |= {name: change(name, x.view(np.uint8)).view(x.dtype) for name, x in tensors.items() if x.ndim == 2}
    synthetic.write_model(copy, json.loads((path / "config.json").read_text()), tensors)
    return copy


RECIPES = ("nvfp4-modelopt", "mxfp4-ocp", "nvfp4-te-2d", "fp8-modelopt", "mxfp8-te")


@pytest.mark.parametrize("recipe", by_default(RECIPES[:2], RECIPES))
def test_a_sample_gives_the_verdict_of_all_rows(made: Callable[[str], Path], recipe: str) -> None:
    path = made(recipe)
    some, every = (identify_checkpoint(path, path.parent / "m", all_rows=value) for value in (False, True))
    assert recipe in some.recipes and some.is_clean and some.sentence == every.sentence
    assert some.coverage is not None and every.coverage is not None
    assert some.coverage.read < some.coverage.total == every.coverage.read
    assert "fewer than 1 of 85 rows" in some.coverage.sentence and every.coverage.sentence.startswith("not sampled: ")


def test_few_rows_are_encoded_and_few_bytes_read(made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first layer, each layer is encoded at most once per recipe that is left, on 256 rows."""
    path = made("mxfp4-ocp")
    counts = {"rows": 0, "bytes": 0}
    encode, read = hypotheses.quantize, Readers.bytes

    def encoded(x: np.ndarray, *rest: object, **options: object) -> object:
        counts["rows"] += len(x)
        return encode(x, *rest, **options)

    def bytes_read(self: Readers, *rest: object) -> np.ndarray:
        data = read(self, *rest)  # type: ignore[arg-type]
        counts["bytes"] += data.size
        return data

    monkeypatch.setattr(hypotheses, "quantize", encoded)
    monkeypatch.setattr(Readers, "bytes", bytes_read)
    found = {}
    for layers in (("model.layers.0.mlp.gate_proj",), ()):
        counts.update(rows=0, bytes=0)
        verdict = identify_checkpoint(path, path.parent / "m", layers=layers)
        found[layers] = dict(counts), verdict
    one, every = found.values()
    left = len(every[1].recipes)
    assert len(every[1].layers) == 12
    assert every[0]["rows"] - one[0]["rows"] <= 11 * (left + 1) * SAMPLED_ROWS
    source = 12 * ROWS * 64 * 2
    assert every[0]["bytes"] <= 1.5 * source


def test_the_result_does_not_depend_on_workers(made: Callable[[str], Path]) -> None:
    path, done = made("nvfp4-modelopt"), []
    prepared = PreparedIdentification(path, path.parent / "m")
    alone = prepared.run(Options(progress=done.append))
    assert sum(done) == prepared.nbytes > 0
    assert prepared.run(Options(workers=2)) == alone


def test_layers_are_chosen_by_globs(made: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = made("mxfp4-ocp")
    verdict = identify_checkpoint(path, path.parent / "m", layers=["*.gate_proj", "model.layers.0.*"])
    assert len(verdict.layers) == 7
    with pytest.raises(CheckpointError, match="matches no quantized layer"):
        identify_checkpoint(path, path.parent / "m", layers=["*.gate_proj", "mlp"])
    command = ["identify", str(path), "--source", str(path.parent / "m"), "--layers", "*.0.*"]
    assert main(command) == 0 and "\nsampled: " in capsys.readouterr().out
    assert main([*command, "--all-rows", "--workers", "1"]) == 0 and "\nsampled: " not in capsys.readouterr().out
    assert main(["identify", str(path), "--all-rows"]) == 2 and "add --source" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [257, 1000, 10007])
def test_a_sample_has_the_ends_and_a_part_of_everything_between(made: Callable[[str], Path], rows: int) -> None:
    stored = open_source(made("fp8-modelopt"))
    weight = next(one for one in weights_of(stored.tensors, stored.config).values() if one.container is not None)
    spans = sample_spans(replace(weight, shape=(rows, 64)))
    assert spans is not None and spans[0][0] == 0 and spans[-1][1] == rows
    index = rows_in(spans)
    assert len(index) <= SAMPLED_ROWS and (np.diff(index) > 0).all()
    assert np.diff(index).max() <= 2 * rows / len(spans) and len(index) >= min(SAMPLED_ROWS - 16, rows - 16)


def test_samples_of_layers_lie_in_different_places(made: Callable[[str], Path]) -> None:
    """The rows within the parts of a layer are drawn from its name, so that one fault does not miss all samples."""
    stored = open_source(made("fp8-modelopt"))
    weight = next(one for one in weights_of(stored.tensors, stored.config).values() if one.container is not None)
    places = set()
    for name in ("a", "b", "c"):
        spans = sample_spans(replace(weight, name=name, shape=(16 * 1600, 64)))
        assert spans is not None and spans == sample_spans(replace(weight, name=name, shape=(16 * 1600, 64)))
        inner = {start % 1600 for start, _ in spans[1:-1]}  # 16 parts of 1600 rows
        assert len(inner) > 10 and max(inner) > 800 and all(start % 16 == 0 for start in inner)
        places.add(spans[1:-1])
    assert len(places) == 3


def damaged(share: float) -> Callable[[str, np.ndarray], np.ndarray]:
    """Return a change that inverts some bytes of the last rows of gate_proj."""

    def change(name: str, x: np.ndarray) -> np.ndarray:
        if "0.mlp.gate_proj" in name and x.shape[1] >= 32:
            x[-int(share * len(x)) :] ^= 0x5A
        return x

    return change


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_damage_at_the_end_is_found(made: Callable[[str], Path], tmp_path: Path, share: float) -> None:
    path = changed(made("mxfp4-ocp"), tmp_path / "q", damaged(share))
    verdict = identify_checkpoint(path, made("mxfp4-ocp").parent / "m")
    assert [layer.name for layer in verdict.exceptions] == ["model.layers.0.mlp.gate_proj"] and not verdict.is_clean


def test_one_changed_byte_of_a_small_model_is_found(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models are read whole, also those of exactly the bound."""
    name, source = "model.layers.0.mlp.gate_proj", made("mxfp4-ocp").parent / "m"
    stored = open_source(made("mxfp4-ocp"))
    weight = next(one for one in weights_of(stored.tensors, stored.config).values() if one.name == name)
    spans = sample_spans(weight)
    assert spans is not None
    row = np.setdiff1d(np.arange(ROWS), rows_in(spans))[0]

    def one_byte(tensor: str, x: np.ndarray) -> np.ndarray:
        if tensor.startswith(name) and x.shape[1] >= 32:
            x[row, 0] ^= 0x11
        return x

    path = changed(made("mxfp4-ocp"), tmp_path / "bad", one_byte)
    assert identify_checkpoint(path, source).is_clean
    monkeypatch.setattr(run, "SMALL", 12 * ROWS * 64)
    verdict = identify_checkpoint(path, source)
    assert [layer.name for layer in verdict.exceptions] == [name] and not verdict.is_clean
    assert verdict.coverage is not None and "all " in verdict.coverage.sentence
    monkeypatch.setattr(run, "SMALL", 12 * ROWS * 64 - 1)
    assert identify_checkpoint(path, source).is_clean


def swapped(name: str, x: np.ndarray) -> np.ndarray:
    return x << 4 | x >> 4 if x.shape[1] in (32, ROWS // 2) else x


def rows_exchanged(name: str, x: np.ndarray) -> np.ndarray:
    """Exchange the halves of the rows of codes and scales."""
    return np.concatenate([x[len(x) // 2 :], x[: len(x) // 2]]) if "_proj" in name else x


FAULTS = [(swapped, "nibbles are swapped"), (rows_exchanged, "halves of the rows (gate and up) are exchanged")]


@pytest.mark.parametrize("fault", by_default(FAULTS[:1], FAULTS))
def test_faults_of_sampled_layers_are_named(
    made: Callable[[str], Path], tmp_path: Path, fault: tuple[Callable[[str, np.ndarray], np.ndarray], str]
) -> None:
    change, words = fault
    path = changed(made("mxfp4-ocp"), tmp_path / "q", change)
    verdict = identify_checkpoint(path, made("mxfp4-ocp").parent / "m")
    assert verdict.mishap == words and not verdict.exceptions, str(verdict)


# ---- wrong sources


def fine_tuned(share: float) -> Callable[[Tensors], Tensors]:
    delta = weights("tuned")
    return lambda tensors: {name: x + share * delta[name] for name, x in tensors.items()}


def other_order(tensors: Tensors) -> Tensors:
    exchange = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    return {exchange.get(name[:15], name[:15]) + name[15:]: x for name, x in tensors.items()}


def turned(tensors: Tensors) -> Tensors:
    return {name: np.ascontiguousarray(x.T) if "_proj" in name else x for name, x in tensors.items()}


def exchanged(tensors: Tensors) -> Tensors:
    other = {"gate": "up", "up": "gate"}
    return {re.sub("(gate|up)_proj", lambda found: f"{other[found[1]]}_proj", name): x for name, x in tensors.items()}


NOT_THE_SOURCE = "this is probably not the source"
WRONG = {
    "another model": (lambda tensors: weights("other"), f"{NOT_THE_SOURCE}: nothing matches"),
    "layers in another order": (other_order, f"{NOT_THE_SOURCE}, or its layers are in another order"),
    "fine-tuned a little": (fine_tuned(0.003), f"{NOT_THE_SOURCE}, but a model near it"),
    "fine-tuned": (fine_tuned(0.1), f"{NOT_THE_SOURCE}, but a model near it"),
    "fine-tuned much": (fine_tuned(0.3), f"{NOT_THE_SOURCE}, but a model near it"),
    "gate and up exchanged": (exchanged, "gate and up are exchanged"),
    "transposed": (turned, "quantized transposed"),
}
CASES = [(wrong, "mxfp4-ocp") for wrong in WRONG]
OTHER_CASES = [(wrong, "nvfp4-modelopt") for wrong in WRONG]
OTHER_CASES += [(wrong, "fp8-modelopt") for wrong in ("another model", "layers in another order", "fine-tuned")]


MLPS = {f"model.layers.0.mlp.{leaf}": f"model.layers.1.mlp.{leaf}" for leaf in ("gate_proj", "down_proj")}
EXCHANGES = {
    "an MLP": MLPS,
    "k and v": {"model.layers.1.self_attn.k_proj": "model.layers.1.self_attn.v_proj"},
    "three in a ring": {"model.layers.0.self_attn.q_proj": "model.layers.1.self_attn.k_proj", "": ""},
}
RING = "model.layers.0.self_attn.k_proj"  # with the two of "three in a ring"


def with_exchanged(path: Path, copy: Path, holds: dict[str, str]) -> Path:
    """Write a copy of a checkpoint in which layers hold the tensors of others: {layer: the layer whose it holds}."""
    tensors = {name: np.array(x) for name, x in oracle.arrays(oracle.load(path)).items()}
    new = dict(tensors)
    for layer, other in holds.items():
        ends = [name.removeprefix(other) for name in tensors if name.startswith(f"{other}.")]
        new |= {layer + end: tensors[other + end] for end in ends}
    synthetic.write_model(copy, json.loads((path / "config.json").read_text()), new)
    return copy


def holds_of(exchange: str) -> dict[str, str]:
    """Return {layer: the layer that it holds} of an exchange."""
    pairs = {one: other for one, other in EXCHANGES[exchange].items() if one}
    if "" not in EXCHANGES[exchange]:
        return pairs | {other: one for one, other in pairs.items()}
    ((first, second),) = pairs.items()
    return {first: second, second: RING, RING: first}


EXCHANGED = [(exchange, recipe) for exchange in EXCHANGES for recipe in ("nvfp4-te", "mxfp4-ocp", "fp8-modelopt")]


@pytest.mark.parametrize("case", by_default(EXCHANGED[::4], EXCHANGED))
def test_exchanged_layers_are_explained(
    made: Callable[[str], Path], tmp_path: Path, case: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exchanged layers are a fault that is explained, by identify and by verify; the source counts as right."""
    exchange, recipe = case
    holds = holds_of(exchange)
    path, source = with_exchanged(made(recipe), tmp_path / "q", holds), made(recipe).parent / "m"
    verdict = identify_checkpoint(path, source)
    assert {one.name: one.explanation.sentence.split(", by")[0] for one in verdict.exceptions} == {
        layer: f"holds {other}" for layer, other in holds.items()
    }
    assert all(recipe in one.explanation.recipes for one in verdict.layers) and not verdict.is_clean
    assert verdict.problems == (f"holds another layer, {len(holds)} of 12 layers",) and verdict.mishap is None
    assert main(["identify", str(path), "--source", str(source)]) == 1
    text = capsys.readouterr().out
    assert (NOT_THE_SOURCE in text) == (2 * len(holds) >= 12) and "nearest is" not in text
    named = {issue.subject: issue.text for issue in verify(path, source).issues if issue.text.startswith("holds ")}
    assert {layer: text.split(",")[0] for layer, text in named.items()} == {
        layer: f"holds {other}" for layer, other in holds.items()
    }


PARTS = {  # part: the ends of its tensor in the containers that convert writes
    "codes": (".weight", ".weight_packed"),
    "block scales": (".weight_scale",),
    "tensor scale": (".weight_scale_2", ".weight_global_scale"),
}
# The others of a gated pair share a tensor scale, and their rows are tried as another order of rows.
PARTS_OF = [
    (part, recipe, pair)
    for recipe in ("nvfp4-te", "mxfp4-ocp", "nvfp4-te-2d")
    for part in PARTS
    for pair in ("0.mlp.down_proj 1.mlp.down_proj", "0.mlp.gate_proj 0.mlp.up_proj", "0.mlp.gate_proj 1.mlp.gate_proj")
    if part != "tensor scale" or (recipe != "mxfp4-ocp" and "up_proj" not in pair)
]


@pytest.mark.parametrize("both", [True, False], ids=["exchanged", "copied"])
@pytest.mark.parametrize("case", every(5, PARTS_OF), ids="-".join)
def test_parts_of_other_layers_are_named(
    made: Callable[[str], Path], tmp_path: Path, case: tuple[str, str, str], both: bool
) -> None:
    part, recipe, pair = case
    one, other = (f"model.layers.{name}" for name in pair.split())
    tensors = {name: np.array(x) for name, x in oracle.arrays(oracle.load(made(recipe))).items()}
    new = dict(tensors)
    for layer, from_ in ((one, other), (other, one))[: 1 + both]:
        new |= {layer + end: tensors[from_ + end] for end in PARTS[part] if layer + end in tensors}
    path, source = tmp_path / "q", made(recipe).parent / "m"
    synthetic.write_model(path, json.loads((made(recipe) / "config.json").read_text()), new)
    verdict = identify_checkpoint(path, source)
    wanted = {one: f"holds the {part} of {other}", other: f"holds the {part} of {one}"}
    assert {x.name: x.explanation.sentence.split(", by")[0] for x in verdict.exceptions} == dict(
        list(wanted.items())[: 1 + both]
    )
    assert verdict.problems == (f"holds the {part} of another layer, {1 + both} of 12 layers",)
    found = {x.subject: x.text for x in verify(path, source).issues if x.text.startswith("holds ")}
    assert {layer: text.split(", as")[0] for layer, text in found.items()} == (dict(list(wanted.items())[: 1 + both]))


def test_a_part_that_is_not_whole_is_not_named(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Block scales are those of another layer in the first rows, but not in the last one."""
    one, other = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
    new = {name: np.array(x) for name, x in oracle.arrays(oracle.load(made("nvfp4-te"))).items()}
    for end in PARTS["block scales"]:
        if other + end in new:
            new[one + end] = new[other + end].copy()
            assert len(new[one + end]) > 32
            new[one + end][-1].view(np.uint8)[:] ^= 1
    synthetic.write_model(tmp_path / "q", json.loads((made("nvfp4-te") / "config.json").read_text()), new)
    (found,) = identify_checkpoint(tmp_path / "q", made("nvfp4-te").parent / "m").exceptions
    assert found.name == one and "holds the" not in found.explanation.sentence


def said(verdict: CheckpointVerdict) -> str:
    return "; ".join([*verdict.problems, verdict.hint or ""])


@pytest.mark.parametrize("case", by_default(CASES[:2], [*CASES, *OTHER_CASES]))
def test_a_wrong_source_is_named(made: Callable[[str], Path], tmp_path: Path, case: tuple[str, str]) -> None:
    wrong, recipe = case
    change, words = WRONG[wrong]
    source = write(tmp_path / "s", cast(change(weights())))
    verdict = identify_checkpoint(made(recipe), source)
    assert words in said(verdict) and not verdict.is_clean, str(verdict)
    assert wrong != "another model" or "nearest is" not in str(verdict)


@pytest.mark.parametrize("form", ["itself", "bf16"])
@pytest.mark.parametrize("recipe", by_default(RECIPES[:2], RECIPES))
def test_a_source_that_holds_the_decoded_values(
    made: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, form: str
) -> None:
    """Many recipes keep such values, so that none of them is claimed."""
    path = source = made(recipe)
    if form == "itself":
        source = Path(shutil.copytree(path, tmp_path / "source"))
    else:
        convert(path, source := tmp_path / "source", format="bf16")
    assert main(["identify", str(path), "--source", str(source)]) == 1
    first, problem, *rest = capsys.readouterr().out.splitlines()
    said = "the source is quantized (" if form == "itself" else "the source already holds decoded values; "
    assert first.startswith(said) and first.endswith("; give the unquantized model that this was made from")
    assert problem == "PROBLEM: the source already holds decoded values, 12 of 12 layers"
    assert " made " not in "".join(rest) and sum("model.layers" in line for line in rest) == 1
    assert not identify_checkpoint(path, source).recipes


def test_a_recorded_recipe_that_does_not_give_the_bytes(made: Callable[[str], Path], tmp_path: Path) -> None:
    path, source = made("nvfp4-modelopt"), made("nvfp4-modelopt").parent / "m"
    said = "nvfp4-te-2d is recorded, and does not give these bytes"
    assert "is recorded" not in identify_checkpoint(path, source).sentence
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace("nvfp4-modelopt", "nvfp4-te-2d"))
    assert identify_checkpoint(copy, source).sentence.endswith(said)


def test_a_source_in_another_dtype_is_named(made: Callable[[str], Path], tmp_path: Path) -> None:
    """A source in higher precision than the one that was quantized gives all bytes after a conversion."""
    verdict = identify_checkpoint(made("mxfp4-ocp"), write(tmp_path / "s", weights()))
    assert verdict.is_clean and "12 layers made from the source converted to bfloat16" in verdict.sentence
    assert {layer.explanation.dtype for layer in verdict.layers} == {"bfloat16"}


def test_no_time_left_before_enough_was_measured() -> None:
    meter = Meter("identifying", 10**10, 0.0)
    meter.add(10**7)
    assert meter.text(4.0).endswith("2.5 MB/s")
    meter.add(10**7)
    assert meter.text(11.0).endswith(" left")
    meter = Meter("identifying", 10**10, 0.0)
    meter.add(10**9)
    assert meter.text(1.0).endswith(" left")


# identify refuses the other recorded checkpoint, whose biases lie in a format that it does not know.
RECORDED = sorted(
    path.name for path in (DATA / "foreign").iterdir() if path.is_dir() and "gpt_oss-MXFP4" not in path.name
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_checkpoints_have_the_verdict_of_a_whole_read(name: str) -> None:
    source = DATA / "foreign_sources" / ("gpt_oss" if "gpt_oss" in name else "llama")
    some, every = (identify_checkpoint(DATA / "foreign" / name, source, all_rows=value) for value in (False, True))
    assert some.sentence == every.sentence and some.problems == every.problems


FOREIGN, SOURCES = DATA / "foreign", DATA / "foreign_sources"
IN_BF16 = "codes nearest to the quotient in bfloat16)"
F32 = "codes nearest to the quotient in float32)"
BLOCKS, TENSOR = "FP8 per 128x128 block (amax / 448", "FP8 per tensor (amax / 448"
AGREE = "(they agree on these layers)"
MODELOPT = "nvfp4-modelopt, nvfp4-modelopt-static, nvfp4-modelopt-static-4over6 or nvfp4-comfy-kitchen-static made"
VERDICTS = {
    "modelopt--FP8_DEFAULT_CFG": f"{TENSOR}, {IN_BF16} in 7 layers",
    "modelopt--FP8_PER_CHANNEL_PER_TOKEN_CFG": f"FP8 per row (amax / 448, {F32} in 7 layers",
    "modelopt--FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": f"fp8-modelopt made 4 layers; {BLOCKS}, {F32} in 3 layers",
    "modelopt--NVFP4_DEFAULT_CFG+FP8DOWN": f"{MODELOPT} 6 layers {AGREE}; {TENSOR}, {IN_BF16} in 1 layer",
    "modelopt--NVFP4_DEFAULT_CFG+FP8_KV_CFG": f"{MODELOPT} 7 layers {AGREE}",
    "modelopt--gpt_oss-NVFP4_DEFAULT_CFG": f"{MODELOPT} 12 layers {AGREE}",
    "llm-compressor--MIXED": "nvfp4-compressed-tensors or nvfp4-compressed-tensors-static made 6 layers (they agree on"
    " these layers); fp8-compressed-tensors-token made 1 layer",
    "llm-compressor--FP8_BLOCK": f"{BLOCKS} rounded to bfloat16, {IN_BF16} in 7 layers",
    "quark--MXFP4_FP8ATT": "fp8-compressed-tensors made 4 layers; mxfp4-quark-even made 3 layers",
    "torchao--NVFP4WO": "nvfp4-torchao made 7 layers",
}


def source_of(name: str) -> Path:
    return SOURCES / ("gpt_oss" if "gpt_oss" in name else "llama")


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    verdict = identify_checkpoint(FOREIGN / name, source_of(name))
    assert verdict.sentence == VERDICTS[name]
    assert verdict.is_clean


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("modelopt--W4A8_NVFP4_FP8_CFG", "nvfp4-modelopt with block=(1, 32)"), ("torchao--MXFP4", "mxfp4-torchao-rceil")],
)
def test_the_tool_that_wrote_the_file_is_named_first(name: str, recipe: str) -> None:
    """Among recipes that agree, that of the container's producer comes first, also in the short sentence."""
    verdict = identify_checkpoint(FOREIGN / name, source_of(name))
    assert verdict.recipe == recipe and verdict.is_clean and len(verdict.layers) == 7
    shown = {"nvfp4": f"{recipe} (Model-Optimizer)", "mxfp4": recipe}[recipe[:5]]  # the id contains "torchao"
    count = len(verdict.recipes) - 1
    assert verdict.short_sentence == f"{shown} or {count} others that agree made 7 layers"


@pytest.mark.exhaustive
def test_awq_is_told() -> None:
    verdict = identify_checkpoint(FOREIGN / "modelopt--NVFP4_AWQ_LITE_CFG", SOURCES / "llama")
    assert verdict.is_clean and len(verdict.exceptions) == 7
    assert verdict.sentence.startswith("weights scaled per column (AWQ) in 7 layers: ")
    assert {layer.explanation.method for layer in verdict.layers} == {"AWQ"}


@pytest.mark.parametrize(
    ("modifiers", "method"),
    [
        ([], "AWQ"),
        (["AWQModifier"], "AWQ"),  # both declare the one method
        (["SmoothQuantModifier"], ""),
        (["SmoothQuantModifier", "AWQModifier"], ""),
    ],
)
def test_the_method_that_scaled_weights_is_declared_by_factors_and_by_a_recipe(
    modifiers: list[str], method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOREIGN / "modelopt--NVFP4_AWQ_LITE_CFG", folder)
    (folder / "recipe.yaml").write_text("".join(f"  {name}: {{}}\n" for name in modifiers))
    source = open_source(folder)
    assert scaling_of(source, weights_of(source.tensors, source.config).values()) == method


@pytest.mark.exhaustive
def test_svdquant_is_told() -> None:
    verdict = identify_checkpoint(FOREIGN / "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG", SOURCES / "llama")
    assert verdict.sentence == (
        "low-rank part (SVDQuant) in 7 layers: the codes store the rest of the weight, which is not known in every bit"
    )
    assert verdict.is_clean and verdict.hint is None
    shares = [layer.explanation.sentence.rpartition(" gives ")[2] for layer in verdict.layers]
    assert all(float(share.removesuffix("% of bytes")) > 95 for share in shares)


def test_a_layer_without_a_counterpart_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(SOURCES / "llama", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    assert data.count(b"q_proj.weight") == 1
    path.write_bytes(data.replace(b"q_proj.weight", b"x_proj.weight"))
    name = str(FOREIGN / "torchao--NVFP4WO")
    assert main(["identify", name, "--source", str(SOURCES / "llama")]) == 0
    capsys.readouterr()
    assert main(["identify", name, "--source", str(tmp_path / "m"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unpaired"] == ["model.layers.0.self_attn.q_proj"] and found["recipes"] == ["nvfp4-torchao"]
    assert found["sentence"].endswith(
        "1 layer without a counterpart in the source, of 7: model.layers.0.self_attn.q_proj"
    )


def test_wrapped_names_are_paired(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "llama", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip().replace(b'"model.layers', b'"_orig_mod.module.model.layers')
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    verdict = identify_checkpoint(FOREIGN / "torchao--NVFP4WO", tmp_path / "m")
    assert verdict.is_clean and len(verdict.layers) == 7
