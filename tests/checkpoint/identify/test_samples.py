"""Test that identify gives the verdict of a whole read from samples, and what it says of a wrong source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import synthetic
from exhaustive import by_default

from fp4kit.checkpoint import CheckpointError, Options, convert
from fp4kit.checkpoint.identify import hypotheses
from fp4kit.checkpoint.identify.layer_pairs import SAMPLED_ROWS, rows_in, sample_spans
from fp4kit.checkpoint.identify.run import PreparedIdentification, identify_checkpoint
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import weights_of
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
    """Copy a checkpoint of one file, with ``change(name, bytes (rows, bytes))`` of each matrix."""
    copy.mkdir()
    for file in path.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little") + 8
            parts = bytearray(data)
            for name, entry in json.loads(data[8:length]).items():
                if name != "__metadata__" and len(entry["shape"]) == 2:
                    a, b = (length + at for at in entry["data_offsets"])
                    array = np.frombuffer(data[a:b], np.uint8).reshape(entry["shape"][0], -1)
                    parts[a:b] = change(name, array.copy()).tobytes()
            data = bytes(parts)
        (copy / file.name).write_bytes(data)
    return copy


RECIPES = ("nvfp4-modelopt", "mxfp4-ocp", "nvfp4-te-2d", "fp8-modelopt", "mxfp8-te")


@pytest.mark.parametrize("recipe", by_default(RECIPES[:2], RECIPES))
def test_a_sample_gives_the_verdict_of_all_rows(made: Callable[[str], Path], recipe: str) -> None:
    path = made(recipe)
    some, every = (identify_checkpoint(path, path.parent / "m", all_rows=value) for value in (False, True))
    assert recipe in some.recipes and some.is_clean and some.sentence == every.sentence
    assert some.coverage is not None and every.coverage is not None
    assert some.coverage.read < some.coverage.total == every.coverage.read
    assert "fewer than 1 of 85 rows" in some.coverage.sentence and every.coverage.sentence == ""


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
    assert main(command) == 0 and "sampled: " in capsys.readouterr().out
    assert main([*command, "--all-rows", "--workers", "1"]) == 0 and "sampled: " not in capsys.readouterr().out
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


def said(verdict: CheckpointVerdict) -> str:
    return "; ".join([*verdict.problems, verdict.hint or ""])


@pytest.mark.parametrize("case", by_default(CASES[:4], [*CASES, *((wrong, "nvfp4-modelopt") for wrong in WRONG)]))
def test_a_wrong_source_is_named(made: Callable[[str], Path], tmp_path: Path, case: tuple[str, str]) -> None:
    wrong, recipe = case
    change, words = WRONG[wrong]
    source = write(tmp_path / "s", cast(change(weights())))
    verdict = identify_checkpoint(made(recipe), source)
    assert words in said(verdict) and not verdict.is_clean, str(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", ["another model", "layers in another order", "fine-tuned"])
def test_a_wrong_source_of_fp8_is_named(made: Callable[[str], Path], tmp_path: Path, wrong: str) -> None:
    change, words = WRONG[wrong]
    verdict = identify_checkpoint(made("fp8-modelopt"), write(tmp_path / "s", cast(change(weights()))))
    assert words in said(verdict) and not verdict.is_clean, str(verdict)


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
