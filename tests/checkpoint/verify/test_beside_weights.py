"""Test that verify compares what lies beside the weights with the source: tokenizers, other files and GGUF headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import synthetic

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.findings import opened
from fp4kit.checkpoint.model.model_files import MANIFEST, open_original
from fp4kit.checkpoint.verify.beside_weights import is_tokenizer, unlike_source
from fp4kit.checkpoint.verify.verify import prepare, verify_checkpoint
from fp4kit.cli import main
from fp4kit.storage.gguf_file import Field, read_gguf

TOKENIZER = "tokenizer.json"


def model(root: Path, pre: str = "llama-bpe") -> tuple[Path, Path]:
    """Write a model directory and a GGUF file made of it, and return both paths."""
    pytest.importorskip("gguf")
    llama_cpp.directory(root / "m", "Llama", pre)
    convert(root / "m", root / "o.gguf", "nvfp4-gguf")
    return root / "m", root / "o.gguf"


def changed(path: Path, field: Field) -> None:
    """Change the lowest bit of a number, or the last byte of another value, of a GGUF header."""
    data = bytearray(path.read_bytes())
    kind = int.from_bytes(data[field.start + 8 + len(field.key) :][:4], "little")
    data[field.end - {4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}.get(kind, 1)] ^= 1
    path.write_bytes(data)


def found_in(path: Path, source: Path) -> list[tuple[str, str]]:
    """Return (severity, text) per issue about the header, and check that it is said that all was compared."""
    issues, uncompared = unlike_source(opened(path), open_original(source, path))
    assert not uncompared and all(one.subject == f"header of {path.name}" for one in issues)
    return [(one.severity, one.text) for one in issues]


@pytest.mark.parametrize("pre", ["llama-bpe", "spm"])
def test_each_key_of_a_gguf_header_is_compared_with_the_source(tmp_path: Path, pre: str) -> None:
    """The source is a directory, and then the sound GGUF file. Keys that only describe the file are left out."""
    root, path = model(tmp_path, pre)
    sound, fields = path.read_bytes(), read_gguf(path).fields
    (tmp_path / "sound.gguf").write_bytes(sound)
    checked = [one for one in fields if one.key.startswith(("llama.", "tokenizer."))]
    assert len(checked) > 18 and not found_in(path, root) and not found_in(path, tmp_path / "sound.gguf")
    for field in checked:
        changed(path, field)
        for source in (root, tmp_path / "sound.gguf"):
            ((severity, text),) = found_in(path, source)
            assert severity == ("warning" if field.key == "tokenizer.chat_template" else "error"), field
            assert text.startswith((f"{field.key} is ", f"{field.key} differs from what the source gives")), text
        path.write_bytes(sound)
    for name in ("general.name", "fp4kit.version"):
        changed(path, next(one for one in fields if one.key == name))
    assert not found_in(path, root)


def test_keys_that_a_header_lacks_or_adds_are_warnings(tmp_path: Path) -> None:
    """Nothing is said of a key whose value is llama.cpp's default, because its own converter leaves some out."""
    root, path = model(tmp_path)
    made, source = opened(path), open_original(root, path)
    keys, more = dict(made.files[0].metadata), {"llama.rope.scaling.type": "yarn"}
    defaults = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    for leaf in ("attention.layer_norm_rms_epsilon", *defaults, "attention.head_count_kv"):
        left = {key: value for key, value in keys.items() if key != f"llama.{leaf}"}
        issues, _ = unlike_source(replace(made, files=(replace(made.files[0], metadata=left),)), source)
        texts = [(one.severity, one.text) for one in issues]
        said = f"lacks llama.{leaf}, which the source gives; llama.cpp uses its defaults"
        assert texts == ([] if leaf in defaults else [("warning", said)])
    issues, _ = unlike_source(replace(made, files=(replace(made.files[0], metadata=keys | more),)), source)
    assert [one.text for one in issues] == ["has llama.rope.scaling.type, which the source does not give"]


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the tokenizer of the source is not known, the other keys are compared; with an unknown config, no key is."""
    root, path = model(tmp_path)
    llama_cpp.byte_pairs(root, "llama-bpe", pre_tokenizer={"type": "Whitespace"})
    changed(path, next(one for one in read_gguf(path).fields if one.key == "llama.rope.freq_base"))
    assert main(["verify", str(path), "--source", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("llama.rope.freq_base is 10000.0009765625; the source gives 10000.0" in line for line in lines)
    assert any(
        line.startswith("not checked: ") and "the header or parts of it (tokenizer.json" in line for line in lines
    )
    config = json.loads((root / "config.json").read_text()) | {"unheard_of": 5}
    (root / "config.json").write_text(json.dumps(config))
    prepared = prepare(path, root)
    assert not prepared.issues and "unheard_of is 5" in prepared.uncompared


def entries(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that changes a JSON file."""

    def edited(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content, indent=1))

    return edited


def test_names_of_files_that_hold_tokens() -> None:
    tokens = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt")
    more = ("merges.txt", "tekken.json", "qwen.tiktoken", "rwkv_vocab_v20230424.txt", "encoder-vocab.json")
    others = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "model.safetensors", "notes.txt")
    assert all(map(is_tokenizer, (*tokens, *more))) and not any(map(is_tokenizer, others))


def swapped(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["th"], vocabulary["in"] = vocabulary["in"], vocabulary["th"]


# Of a file: what changes it, the severity of the issue ("" for none) and its text.
FILES: list[tuple[str, Callable[[Path], Any], str, str]] = [
    (TOKENIZER, entries(lambda one: None), "", ""),  # written in another way
    (TOKENIZER, entries(swapped), "error", "model.vocab.in is "),
    (TOKENIZER, entries(lambda one: one["model"]["vocab"].pop("the")), "error", "lacks model.vocab.the, unlike the"),
    (TOKENIZER, entries(lambda one: one["model"]["merges"].pop()), "error", "model.merges is "),
    (TOKENIZER, entries(lambda one: one["model"].update(merges=[" ".join(x) for x in one["model"]["merges"]])), "", ""),
    (TOKENIZER, entries(lambda one: one.update(truncation={"max_length": 5}, padding=None)), "", ""),
    (TOKENIZER, entries(lambda one: one.update(normalizer={"type": "NFC"})), "warning", "normalizer is "),
    (TOKENIZER, entries(lambda one: one["model"].update(byte_fallback=None, new=False)), "", ""),
    (TOKENIZER, lambda path: path.write_text("{"), "error", "not valid JSON"),
    (TOKENIZER, Path.unlink, "warning", "is missing; the source has it"),
    ("tokenizer.model", lambda path: path.write_bytes(b"1"), "error", "its bytes differ from the source's"),
    ("tokenizer.model", Path.unlink, "", ""),  # the others come from tokenizer.json
    ("vocab.json", entries(lambda one: one.update(a=2)), "error", "a is 2; the source has 1"),
    ("chat_template.jinja", lambda path: path.write_text("b"), "warning", "its bytes differ from the source's"),
    ("chat_template.jinja", Path.unlink, "warning", "is missing; the source has it"),
    ("generation_config.json", entries(lambda one: one.update(top_k=2)), "warning", "top_k is 2; the source has 1"),
    ("generation_config.json", entries(lambda one: one.update(do_sample=True)), "", ""),  # as transformers adds keys
    (TOKENIZER, entries(lambda one: one.update(unheard_of=5)), "warning", "has unheard_of, unlike the source"),
    ("tokenizer_config.json", entries(lambda one: one.update(eos_token="a")), "warning", 'eos_token is "a"; the sour'),
    ("tokenizer/vocab.json", entries(lambda one: one.update(a=2)), "error", "a is 2; the source has 1"),
    ("tokenizer/vocab.json", Path.unlink, "", ""),  # folders of a pipeline may be left out
    ("notes.txt", lambda path: path.write_text("b"), "", ""),
]


@pytest.mark.parametrize("case", range(len(FILES)))
def test_tokenizers_and_other_files_are_compared_with_the_source(tmp_path: Path, case: int) -> None:
    name, change, severity, text = FILES[case]
    root, out = tmp_path / "m", tmp_path / "out"
    synthetic.MODELS["dense"](root)
    llama_cpp.byte_pairs(root, "llama-bpe")
    for own, content in (("tokenizer.model", "m"), ("chat_template.jinja", "a"), ("notes.txt", "a")):
        (root / own).write_text(content)
    (root / "tokenizer").mkdir()
    for own in ("vocab.json", "tokenizer/vocab.json"):
        (root / own).write_text('{"a": 1}')
    (root / "generation_config.json").write_text('{"top_k": 1}')
    convert(root, out, "nvfp4-te")
    assert not prepare(out, root).issues
    (out / MANIFEST).unlink()
    change(out / name)
    found = [(one.severity, one.text[: len(text)]) for one in verify_checkpoint(out, root).issues]
    assert found == ([(severity, text)] if severity else [])
