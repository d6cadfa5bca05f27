"""Compare what a checkpoint holds beside its weights with its source: config.json, the tokenizer and other files that
engines read, and the header of a GGUF file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.containers.config_entries import brief
from fp4kit.checkpoint.containers.configs import ConfigDifference, differences_of
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import CONFIG, Source, is_gguf_config, scan
from fp4kit.checkpoint.plan.gguf_model import header_keys
from fp4kit.checkpoint.selection.names import ARCHITECTURE
from fp4kit.storage.files import CheckpointError, listed, load_object
from fp4kit.storage.gguf_file import is_gguf


def unlike_source(model: Checkpoint, source: Source) -> tuple[list[Issue], str]:
    """Return (issues about what differs from the source, what could not be compared, in words, or "")."""
    if is_gguf(model.root):
        return _of_header(model, source)
    issues = [*_of_config(model.config or {}, source.config)]
    if model.root.is_dir() and source.root.is_dir():
        issues += _of_files(model.root, source.root)
    return issues, ""


# config.json ----------------------------------------------------------------------------------------------------------

# Keys of config.json that tools write anew, or that change no result of the model.
_OWN_KEYS = re.compile(
    r"(.*\.)?(quantization(_config)?|compression_config|expert_dtype|transformers(_|\.js_)\w+|(torch_)?dtype|auto_map"
    r"|_\w+|architectures|use_cache|return_dict|output_\w+|initializer_\w+|\w*dropout\w*|pretraining_tp|\w+_loss\w*)(\..*)?"
)


def _of_config(config: Mapping[str, Any], source: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield what config.json says otherwise than the source's: an error per value, a warning about other keys."""
    if is_gguf_config(config) or is_gguf_config(source) or not config or not source:
        return
    lacks, adds = list[str](), list[str]()
    for one in differences_of(CONFIG, "", source, config):
        leaf = one.key.rpartition(".")[2]
        if _OWN_KEYS.fullmatch(one.key) or one.a == one.b or (not one.a and not one.b):
            continue
        if one.kind == "value":
            severity = "warning" if leaf.endswith("token_id") else "error"
            yield Issue(severity, CONFIG, f"{one.key} is {brief(one.b)}; the source has {brief(one.a)}")
        elif not _names(config if one.kind == "missing" else source, leaf):  # newer versions nest keys
            (lacks if one.kind == "missing" else adds).append(one.key)
    if lacks:
        yield Issue("warning", CONFIG, f"lacks {listed(lacks)}, which the source has; engines use their defaults")
    if adds:
        yield Issue("warning", CONFIG, f"has {listed(adds)}, which the source lacks")


def _names(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a config or one of its sections has a key."""
    return key in config or any(_names(part, key) for part in config.values() if isinstance(part, dict))


# The tokenizer and other files ---------------------------------------------------------------------------------------

_TOKENIZER = "tokenizer.json"
# Files that map text to tokens. Where there is a tokenizer.json, engines read none of the others except *.model.
_TOKENS = re.compile(
    rf"{re.escape(_TOKENIZER)}|[\w.-]+\.(model|tiktoken)|[\w-]*vocab[\w-]*\.(json|txt)|merges\.txt|tekken\.json"
)
_OTHERS = re.compile(r"(tokenizer|generation|\w*processor)_config\.json|chat_template\.\w+")
# Entries of tokenizer.json that decide which tokens a text has, and entries that each call of the tokenizer sets.
_IDS, _OF_CALLS = ("model.vocab", "model.merges"), ("truncation", "padding", "version")


def is_tokenizer(name: str) -> bool:
    """Return whether a file of this name maps text to tokens."""
    return _TOKENS.fullmatch(name) is not None


def _of_files(root: Path, source: Path) -> Iterator[Issue]:
    """Yield an error per file that maps text to other tokens than the source's, and a warning per other difference."""
    for file in scan(source, set()).copied:
        folder, _, name = file.name.rpartition("/")
        is_tokens, own = is_tokenizer(name), root / file.name
        if not (is_tokens or _OTHERS.fullmatch(name)):
            continue
        if own.is_file():
            if not cmp(own, file.path, shallow=False):
                yield from _of_file(file.name, own, file.path, is_tokens)
        elif not folder and (name == _TOKENIZER or not is_tokens or not (root / _TOKENIZER).is_file()):
            yield Issue("warning", name, "is missing; the source has it")


def _of_file(name: str, own: Path, source: Path, is_tokens: bool) -> Iterator[Issue]:
    if own.suffix != ".json":
        yield Issue("error" if is_tokens else "warning", name, "its bytes differ from the source's")
        return
    try:
        a, b = (_normal(load_object(path, name)) for path in (source, own))
    except CheckpointError as error:
        yield Issue("error", name, str(error).removeprefix(f"{name}: "))
        return
    found = [one for one in differences_of(name, "", a, b) if (one.a or one.b) and not one.key.startswith(_OF_CALLS)]
    if not is_tokens:
        found = [one for one in found if one.kind == "value"]  # versions of transformers add and drop keys
    vital = [one for one in found if is_tokens and (own.name != _TOKENIZER or one.key.startswith(_IDS))]
    for severity, ones in (("error", vital), ("warning", [] if vital else found)):
        if ones:
            more = f" ({len(ones) - 1} more differences)" if len(ones) > 1 else ""
            yield Issue(severity, name, f"{_words(ones[0])}{more}")


def _normal(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json with the merges as strings, as versions below 0.20 of tokenizers write."""
    model = content.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(merges, list):
        return content
    pairs = [" ".join(map(str, one)) if isinstance(one, list) else one for one in merges]
    return {**content, "model": {**model, "merges": pairs}}


def _words(one: ConfigDifference) -> str:
    if one.kind == "value":
        return f"{one.key} is {brief(one.b)}; the source has {brief(one.a)}"
    return f"{'lacks' if one.kind == 'missing' else 'has'} {one.key}, unlike the source"


# The header of a GGUF file -------------------------------------------------------------------------------------------


_TEMPLATE = "tokenizer.chat_template"


def _of_header(model: Checkpoint, source: Source) -> tuple[list[Issue], str]:
    """Compare the keys of a GGUF file about the model and its tokenizer with those that the source gives."""
    own, why = _of_model(model.files[0].metadata), ""
    if is_gguf(source.root):
        expected = _of_model(source.files[0].metadata)
    else:
        found, why = header_keys(source)
        expected = _of_model(found)
    subject = f"header of {model.root.name}"
    issues = []
    for key in expected.keys() & own.keys():
        if own[key] != expected[key]:
            differs = f"is {own[key]}; the source gives {expected[key]}"
            text = "differs from what the source gives" if " sha256 " in differs else differs
            issues.append(Issue("warning" if key == _TEMPLATE else "error", subject, f"{key} {text}"))
    unknown = ("tokenizer.",) if why and expected else ("",) if why else ()
    lacks = [key for key in expected if key not in own and expected[key] != _default(key, own)]
    adds = [key for key in own if key not in expected and not key.startswith(unknown)]
    if lacks:
        text = f"lacks {listed(lacks)}, which the source gives; llama.cpp uses its defaults"
        issues.append(Issue("warning", subject, text))
    if adds:
        issues.append(Issue("warning", subject, f"has {listed(adds)}, which the source does not give"))
    return issues, f"the header or parts of it ({why})" if why else ""


def _of_model(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a header that change what the model computes: its architecture, sizes and tokenizer."""
    own = (ARCHITECTURE, f"{metadata.get(ARCHITECTURE)}.", "tokenizer.")
    return {key: value for key, value in metadata.items() if key.startswith(own)}


def _default(key: str, own: Mapping[str, str]) -> str | None:
    """Return the value that llama.cpp uses for a key that a header lacks; None if it is not known."""
    prefix, _, name = key.partition(".")
    heads, width = (own.get(f"{prefix}.{one}", "") for one in ("attention.head_count", "embedding_length"))
    if name == "attention.head_count_kv":
        return heads
    if name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        return str(int(width) // int(heads)) if heads.isdigit() and width.isdigit() and int(heads) else None
    return "10000.0" if name == "rope.freq_base" else None
