"""Find what the config files of a checkpoint declare about quantization, wherever they declare it. A config
(config.json) may have nested configs, such as ``text_config``; KEYS are the entries that declare quantization in any of
them.

Most tools write ``quantization_config`` at the top level of config.json. Multimodal models may have it in a nested
config. Older versions of compressed-tensors wrote ``compression_config``. Older versions of Model-Optimizer wrote only
hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("quantization_config", "compression_config")
# The entries that list unquantized layers, in the configs of all tools.
EXCLUSIONS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers")


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, content) for a config and for each config nested in it, at any depth."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and key not in KEYS and isinstance(value, Mapping):
            yield from ((f"{key}.{path}", section) for path, section in sections(value))


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first nonempty object under one of KEYS in config.json and its nested configs; {} if there is none."""
    values = (section.get(key) for _, section in sections(config) for key in KEYS)
    return next((value for value in values if isinstance(value, Mapping) and value), {})


def with_declaration(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the config with the checkpoint's declaration of its quantization under the key ``quantization_config``."""
    # If config.json declares a quantization, that is used; otherwise the declaration in hf_quant_config.json.
    found = declared(config)
    other = (found or hf_quant_config or {}).get("quantization")
    if isinstance(other, Mapping):
        found = {"quant_method": "modelopt", **other, "ignore": other.get("exclude_modules") or []}
    elif config.get("quantization_config"):
        return config
    return {**config, "quantization_config": found} if found else config


def without_declarations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of config.json, and of the configs nested in it, without the entries that declare quantization."""
    return _without(config, (*KEYS, "quantization", "expert_dtype"))


def _without(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of a config without the given keys."""
    return {
        key: _without(value, keys if key == "text_config" else KEYS)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in keys
    }


def entries(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all entries that the config files of a checkpoint declare about its quantization."""
    for found in (declared(config), hf_quant_config or {}):
        inner = found.get("quantization")
        yield from found.items() if found is not hf_quant_config else ()
        yield from inner.items() if isinstance(inner, Mapping) else ()
