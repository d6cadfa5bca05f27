"""Find what the configs of a checkpoint declare about quantization, in whichever config they declare it.

Most tools write ``quantization_config`` at the top of config.json. Multimodal models may have it in a nested config,
such as ``text_config``. Older versions of compressed-tensors wrote ``compression_config``, and older versions of
Model-Optimizer only hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("quantization_config", "compression_config")


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, content) for a config and each config nested in it, such as ("text_config.", {...}).

    The path ends with a dot; that of the config itself is "".
    """
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and key not in KEYS and isinstance(value, Mapping):
            yield from ((f"{key}.{path}", section) for path, section in sections(value))


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization that config.json declares: its first quantization_config; {} if there is none."""
    values = (section.get(key) for _, section in sections(config) for key in KEYS)
    return next((value for value in values if isinstance(value, Mapping) and value), {})


def with_declaration(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return config.json with its declaration at the top, where engines find it too if it is elsewhere.

    A declaration that is only in hf_quant_config.json is translated to the words of config.json.
    """
    if config.get("quantization_config"):
        return config
    found = declared(config)
    other = (hf_quant_config or {}).get("quantization")
    if not found and isinstance(other, Mapping):
        found = {"quant_method": "modelopt", **other, "ignore": other.get("exclude_modules") or []}
    return {**config, "quantization_config": found} if found else config


def without_declarations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of config.json without the entries that declare a quantization, also in nested configs.

    The key ``quantization`` is that of mlx-lm.
    """
    return _without(config, (*KEYS, "quantization"))


def _without(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of a config without some keys. In nested configs other than text_config, only KEYS are left out."""
    return {
        key: _without(value, keys if key == "text_config" else KEYS)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in keys
    }
