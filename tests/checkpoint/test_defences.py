"""Attack each defence against hostile and broken checkpoints.

| defence | attacked in |
| --- | --- |
| 1 no shell, no pickle, no code of the model | test_no_way_to_run_code, test_code_of_the_model_is_not_run |
| 2 shard names, links, pipes | model/test_model_files: test_shard_name_*, test_index_leads_out, test_shard_link_that_leads_out, \
test_names_that_differ_in_case; here test_pipe_instead_of_a_shard, test_shard_that_is_replaced |
| 3 the output is new, apart from the source, and appears whole | convert/test_runs: test_destination_*; \
cli/test_guard: test_kills*; run/test_staging: test_link*_in_the_partial_directory*; here test_output_is_private |
| 4 headers | model/test_model_files: test_malformed_*, test_key_twice_*; here test_hostile_header |
| 5 the index and the shards agree | model/test_model_files: test_index_*, test_tensor_in_two_files, test_unindexed_series_* |
| 6 names are data | model/test_model_files: test_shown_*; here test_names_are_data, test_patterns_take_no_time |
| 7 configs | model/test_model_files: test_source_with_bad_config; here test_hostile_config, test_config_of_any_size |
| 8 other files in the directory | test_files_beside |
| 9 resource limits | test_hostile_header (2^40 elements), test_config_of_any_size, convert/test_runs: test_space_*, \
run/test_prefetch |
| 10 numbers | test_nan_scales, test_nan_tensor_scale; convert/test_runs: test_nonfinite_*, test_subnormal_* |
| 11 locks; only a run with equal source and options is resumed | run/test_staging: test_two_runs_*, test_lock_*; \
convert/test_runs: test_other_* |
| 12 strict flags; the environment changes no byte | cli/test_convert; run/test_executors: test_environment_* |
| 13 manifest | model/test_model_files: test_manifest_* |
"""  # noqa: E501

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from seconds import TEN, cpu_seconds
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert.convert import convert, execute
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import MANIFEST, differences, open_source
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.contract.schema import FILE as CONTRACT
from fp4kit.storage.files import CheckpointError, read_header

PACKAGE = Path(fp4kit.__file__).parent
FORBIDDEN = {"subprocess", "pickle", "marshal", "shelve", "torch", "transformers", "runpy", "importlib", "ctypes"}


@pytest.mark.parametrize("folder", ["checkpoint", "storage"])
def test_no_way_to_run_code(folder: str) -> None:
    """No module that reads checkpoints can run code that it has read.

    It starts no programs, unpickles nothing, and calls none of eval, exec, os.system and the like.
    """
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [(node.module or "").partition(".")[0]]
            assert not FORBIDDEN & set(names) or (path.name == "demo.py" and names == ["importlib"]), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), (path, called)
                assert not called.startswith(("os.exec", "os.spawn", "np.load", "pickle.")), (path, called)


class Evil:
    """Create a file when unpickled, so that tests notice if pickled data is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_of_the_model_is_not_run(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    trap = tmp_path / "trap"
    for name in ("modeling_evil.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (tmp_path / "m" / name).write_text(f"import os; os.mkdir({str(trap)!r})")
    for name in ("pytorch_model.bin", "training_args.bin", "x.pt", "vocab.pkl"):
        (tmp_path / "m" / name).write_bytes(pickle.dumps(Evil(trap)))
    config = {"auto_map": {"AutoModel": "modeling_evil.X"}, "$(touch trap)": "`touch trap`; touch trap"}
    config |= {"model_type": "llama"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    plan = make_plan(tmp_path / "m")
    execute(plan, tmp_path / "out; touch trap $(touch trap)", Options(2))
    assert not trap.exists() and not list(tmp_path.rglob("trap"))
    skipped = {name for name, _ in plan.auxiliary.skipped}
    assert skipped >= {"modeling_evil.py", "pytorch_model.bin", "x.pt", "vocab.pkl"}
    assert not list(tmp_path.glob("out*/*.py")) + list(tmp_path.glob("out*/*.bin"))


def test_pipe_instead_of_a_shard(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    plan = make_plan(tmp_path / "m")
    path = tmp_path / "m" / "model-00002-of-00002.safetensors"
    path.unlink()
    os.mkfifo(path)
    with refused("model-00002-of-00002.safetensors: is not a regular file"):
        open_source(tmp_path / "m")
    with refused("model-00002-of-00002.safetensors: not a regular file"):
        execute(plan, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_shard_that_is_replaced(tmp_path: Path) -> None:
    """If a shard is replaced between plan and execution, the run fails.

    Positions from one file's header are never applied to the bytes of another file.
    """
    tensors = synthetic.dense(tmp_path / "m")
    plan = make_plan(tmp_path / "m")
    names = sorted(tensors, reverse=True)
    path = tmp_path / "m" / "model-00001-of-00002.safetensors"
    held = [name for name in names if name in {entry.name for entry in read_header(path).entries}]
    synthetic.write_file(path, {name: tensors[name] for name in held})
    with refused(
        "model-00001-of-00002.safetensors: changed since the conversion was planned; run again when nothing writes"
    ):
        execute(plan, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_output_is_private(tmp_path: Path) -> None:
    """Other users cannot read the output until it is complete. Then it has the permissions of any new directory."""
    synthetic.dense(tmp_path / "m")
    seen = []
    before = os.umask(0o022)
    try:

        def tick(count: int) -> None:
            seen.append(stat.S_IMODE((tmp_path / ".out.partial").stat().st_mode))

        convert(tmp_path / "m", tmp_path / "out", options=Options(progress=tick))
    finally:
        os.umask(before)
    assert set(seen) == {0o700} and stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def header(text: str | bytes, body: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + body


def tensor(dtype: str, shape: list[Any], begin: int, end: int) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


HOSTILE = {
    "2^40 elements": header(f'{{"a": {tensor("U8", [2**40], 0, 2**40)}}}'),
    "2^40 elements in no bytes": header(f'{{"a": {tensor("U8", [2**40], 0, 0)}}}'),
    "2^128 elements": header(f'{{"a": {tensor("F32", [2**32] * 4, 0, 8)}}}', bytes(8)),
    "product that wraps to 0": header(f'{{"a": {tensor("F32", [2**62, 4], 0, 0)}}}'),
    "negative": header(f'{{"a": {tensor("U8", [-4], 0, 4)}}}', bytes(4)),
    "a fraction": header(f'{{"a": {tensor("U8", [4.5], 0, 4)}}}', bytes(4)),
    "depth": header('{"a": ' + "[" * 50_000),
    "depth in pairs": header('{"a":' * 20_000 + "1" + "}" * 20_000),
    "length of 2^63": (2**63).to_bytes(8, "little") + b"{}",
    "length of all bits": b"\xff" * 8 + b"{}",
    "key twice, escaped": header(f'{{"a": {tensor("U8", [1], 0, 1)}, "\\u0061": {tensor("U8", [1], 0, 1)}}}', b"x"),
    "metadata that is no text": header('{"__metadata__": {"a": 1}}'),
    "no object": header("[]"),
    "not UTF-8": header(b'{"\xff": 1}'),
    "overlap": header(f'{{"a": {tensor("U8", [4], 0, 4)}, "b": {tensor("U8", [4], 2, 6)}}}', bytes(6)),
    "hole": header(f'{{"a": {tensor("U8", [2], 0, 2)}, "b": {tensor("U8", [2], 4, 6)}}}', bytes(6)),
    "unknown dtype": header(f'{{"a": {tensor("F3", [8], 0, 3)}}}', bytes(3)),
    "half a byte": header(f'{{"a": {tensor("F4", [3], 0, 1)}}}', bytes(1)),
    "bytes behind": header(f'{{"a": {tensor("U8", [2], 0, 2)}}}', bytes(3)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(tmp_path: Path, name: str) -> None:
    synthetic.bert(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(HOSTILE[name])

    def refuse() -> None:
        with refused("model.safetensors"):
            convert(tmp_path / "m", tmp_path / "out")

    assert cpu_seconds(refuse) < TEN
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


NAMES = (
    "../../evil",
    "/etc/passwd",
    "a\x1b[31mred\x07",
    "a\u202eb",
    "a\nb",
    "C:\\x",
    "%s%n{0}",
    "$(touch x)",
    "con",
    "é",
    "*[!",
)
NAMES += ("a" * 3000,)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_data(tmp_path: Path, name: str) -> None:
    """Tensor names are written as they were read, and never used as paths, patterns or terminal codes."""
    tensors = {f"{name}.weight": synthetic.random("a", (32, 64)), f"{name}.bias": np.ones(3, np.float32)}
    synthetic.write_model(tmp_path / "m", {}, tensors)
    plan = make_plan(tmp_path / "m")
    assert all(line.isprintable() for line in plan.warnings)
    execute(plan, tmp_path / "out", Options(2 if name == NAMES[0] else 1))
    found = {entry.name for entry in read_header(tmp_path / "out" / "model.safetensors").entries}
    assert f"{name}.bias" in found and all(tensor.startswith(f"{name}.") for tensor in found) and len(found) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [
            "config.json",
            CONTRACT,
            MANIFEST,
            "model.safetensors",
            "tokenizer_config.json",
            *(["hf_quant_config.json"] if (tmp_path / "out" / "hf_quant_config.json").exists() else []),
        ]
    )
    tensors[f"{name}.weight"][0, 0] = np.nan
    shutil.rmtree(tmp_path / "m")
    synthetic.write_model(tmp_path / "m", {}, tensors)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "m", tmp_path / "out2")
    assert str(caught.value).isprintable()


def test_patterns_take_no_time(tmp_path: Path) -> None:
    """Globs of users and configs are matched quickly, without the backtracking of regular expressions.

    With backtracking, matching a hostile glob could take years.
    """
    synthetic.write_model(tmp_path / "m", {}, {f"{'a' * 3000}.weight": synthetic.random("a", (32, 64))})

    def refuse() -> None:
        with refused("matches no"):
            make_plan(tmp_path / "m", wishes=Wishes(keep=("*a" * 40 + "*b",)))

    assert cpu_seconds(refuse) < TEN


CONFIGS: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**400},
    {"num_hidden_layers": -3},
    {"num_hidden_layers": 1e300},
    {"num_hidden_layers": float("inf")},
    {"num_hidden_layers": float("nan")},
    {"num_hidden_layers": "two"},
    {"num_hidden_layers": None},
    {"num_hidden_layers": [2]},
    {"num_hidden_layers": True},
    {"text_config": 3},
    {"text_config": {"num_hidden_layers": "x"}},
    {"model_type": 7},
    {"architectures": "x"},
    {"model_type": ["llama"]},
    {"tie_word_embeddings": "maybe"},
    {"num_nextn_predict_layers": 10**30},
    {"architectures": [None, 3]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config)[:40])
@pytest.mark.parametrize("wishes", [Wishes(), Wishes(keep_first=1, keep_last=1)], ids=["all", "ends"])
def test_hostile_config(tmp_path: Path, config: dict[str, Any], wishes: Wishes) -> None:
    """A model with an unusual config is converted, or rejected with a clear error; no other exception occurs."""
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": synthetic.random(str(i), (32, 64)) for i in range(4)}
    synthetic.write_model(tmp_path / "m", config, tensors)
    try:
        convert(tmp_path / "m", tmp_path / "out", wishes=wishes)
    except CheckpointError as error:
        assert str(error).isprintable()
        assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_config_of_any_size(tmp_path: Path, name: str) -> None:
    synthetic.dense(tmp_path / "m")
    os.truncate(tmp_path / "m" / name, 300 << 20)  # zeros that take no disk space
    with refused(f"{name}: 314572800 bytes; at most 268435456 bytes are read from a JSON file"):
        convert(tmp_path / "m", tmp_path / "out")


def test_files_beside(tmp_path: Path) -> None:
    """Only regular files of known kinds inside the directory are copied.

    None of them replaces a file of the run.
    """
    model = tmp_path / "m"
    synthetic.dense(model)
    (tmp_path / "secret.txt").write_text("secret")
    (model / "LICENSE").symlink_to(tmp_path / "secret.txt")
    (model / "README.md").symlink_to("/etc/hostname")
    (model / "folder").symlink_to(tmp_path)
    os.mkfifo(model / "pipe.txt")
    for name in (".lock", ".journal.jsonl", ".hidden.json", MANIFEST, "x.sh", "y.gguf"):
        (model / name).write_text("{}")
    (model / "config.json").chmod(0o777)
    (model / "notes.txt").write_text("kept")
    plan = make_plan(model)
    assert [file.name for file in plan.auxiliary.copied] == ["notes.txt", "tokenizer_config.json"]
    assert dict(plan.auxiliary.skipped) == {
        "LICENSE": "a link to a file outside the directory",
        "README.md": "a link to a file outside the directory",
        "folder": "a link to a directory",
        "pipe.txt": "not a regular file",
        ".lock": "hidden file",
        ".journal.jsonl": "hidden file",
        ".hidden.json": "hidden file",
        "x.sh": "kind of file that is not copied",
        "y.gguf": "weights that are not part of the model",
    }
    execute(plan, tmp_path / "out")
    assert not {".lock", ".journal.jsonl", "LICENSE", "folder"} & {p.name for p in (tmp_path / "out").iterdir()}
    assert differences(tmp_path / "out") == []
    assert not any(p.stat().st_mode & 0o111 for p in (tmp_path / "out").iterdir())


def test_file_beside_that_becomes_a_link(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    (tmp_path / "secret.txt").write_text("secret")
    plan = make_plan(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    for text in ("symbolic links", "is no longer a regular file"):
        path.unlink()
        path.symlink_to(tmp_path / "secret.txt") if text == "symbolic links" else os.mkfifo(path)
        with pytest.raises((OSError, CheckpointError), match=text):
            execute(plan, tmp_path / "out")
        staging.remove_partial(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def quantized(folder: Path, recipe: str, form: str) -> Path:
    """Write a model with two layers, quantize it to the format `form`, and return the directory of the result."""
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": synthetic.random(str(i), (32, 64)) for i in range(2)}
    synthetic.write_model(folder / "m", {"model_type": "llama", "num_hidden_layers": 2}, tensors)
    return convert(folder / "m", folder / "q", recipe, format=form).destination


def overwrite(model: Path, name: str, data: bytes) -> None:
    entry = next(entry for entry in read_header(model / "model.safetensors").entries if entry.name == name)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(entry.start)
        file.write(data)


SCALES = [
    ("nvfp4-te", "modelopt", "weight_scale", b"\x7f", "bf16", 16),
    ("nvfp4-te", "modelopt", "weight_scale", b"\xff", "bf16", 16),
    ("nvfp4-te", "modelopt", "weight_scale", b"\x7f", "compressed-tensors", 16),
    ("mxfp4-ocp", "compressed-tensors", "weight_scale", b"\xff", "bf16", 32),
    ("mxfp8-te", "modelopt", "weight_scale", b"\xff\xff", "bf16", 64),
    ("mxfp8-te", "modelopt", "weight_scale", b"\xff", "compressed-tensors", 32),
    ("mxfp8-te", "modelopt", "weight", b"\x7f\xff", "compressed-tensors", 2),
    ("mxfp8-te", "modelopt", "weight", b"\x7f", "bf16", 1),
]


@pytest.mark.parametrize(("recipe", "form", "part", "data", "to", "count"), SCALES)
def test_nan_scales(tmp_path: Path, recipe: str, form: str, part: str, data: bytes, to: str, count: int) -> None:
    """A NaN scale (E4M3's NaN of either sign, E8M0's 255) is found, whether codes are copied, cast or decoded."""
    model = quantized(tmp_path, recipe, form)
    overwrite(model, f"model.layers.1.mlp.down_proj.{part}", data)
    with refused(f"{count} of 2048 values are NaN or infinite"):
        convert(model, tmp_path / "out", recipe, format=to)
    assert not (tmp_path / "out").exists() and not staging.partial_of(tmp_path / "out").exists()
    convert(model, tmp_path / "out", recipe, format=to, nonfinite="keep")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("to", ["bf16", "compressed-tensors"])
def test_nan_tensor_scale(tmp_path: Path, value: float, to: str) -> None:
    model = quantized(tmp_path, "nvfp4-te", "modelopt")
    overwrite(model, "model.layers.0.mlp.down_proj.weight_scale_2", np.float32(value).tobytes())
    with refused("model.layers.0.mlp.down_proj") as caught:
        convert(model, tmp_path / "out", format=to)
    assert "values are NaN or infinite" in str(caught.value)
