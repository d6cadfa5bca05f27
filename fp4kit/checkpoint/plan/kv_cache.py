"""Copy the scales of a quantized KV cache into the output of a conversion, and declare them as its format requires. Two
formats can keep a KV cache, "modelopt" and "compressed-tensors": each attention module has one scale for keys and one
for values.

The table describes an attention module P. In both formats, value = stored value * scale.

| format             | tensors                                        | declared in                                               |
|--------------------|------------------------------------------------|-----------------------------------------------------------|
| modelopt           | P.k_proj.k_scale, P.v_proj.v_scale F32 []      | kv_cache_scheme, and kv_cache_quant_algo of hf_quant_config |
| compressed-tensors | P.k_scale, P.v_scale                           | kv_cache_scheme                                           |

Sources: Model-Optimizer 0.47 export/quant_utils.py; compressed-tensors 0.20 quantization/lifecycle.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.config_entries import brief
from fp4kit.checkpoint.containers.configs import declared, entries, with_declaration
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import located
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

_CACHE_LEAVES = {"k_scale": "k_proj", "v_scale": "v_proj"}
CACHE_FORMATS = ("modelopt", "compressed-tensors")
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_FP8_COMPRESSED = {**_FP8, "strategy": "tensor", "symmetric": True}


class KvCache(NamedTuple):
    """The quantized KV cache of a source, as its config files declare it and its tensors store it.

    Attributes:
        scheme: ``kv_cache_scheme`` in ``quantization_config`` of config.json; None if there is none.
        algorithm: ``kv_cache_quant_algo`` of hf_quant_config.json or config.json, in capitals; None if there is none.
        format: the format of the source, "modelopt" or "compressed-tensors"; "" for any other format.
        tensors: the names of the tensors that hold scales of the cache; () if there are none.
    """

    scheme: Mapping[str, Any] | None
    algorithm: str | None
    format: str
    tensors: tuple[str, ...]

    @property
    def is_fp8(self) -> bool:
        """True if the cache is FP8 (8-bit floats) with static scales, the only cache that both formats support."""
        # ``scheme`` decides if there is one, and otherwise ``algorithm``.
        if self.scheme is None:
            return self.algorithm == "FP8"
        kind = self.scheme.get("num_bits"), self.scheme.get("type")
        return kind == (8, "float") and not self.scheme.get("dynamic")

    @property
    def is_declared(self) -> bool:
        """True if the source declares a quantized KV cache or stores scales for one."""
        return bool(self.scheme or self.algorithm or self.tensors)

    def declaration(self, format: str) -> tuple[Mapping[str, Any] | None, str | None]:
        """Return (kv_cache_scheme, kv_cache_quant_algo), which the config files of the output must declare."""
        if not self.is_carried(format):
            return None, None
        if not self.is_fp8:
            return self.scheme, self.algorithm
        usual = _FP8 if format == "modelopt" else _FP8_COMPRESSED
        scheme = self.scheme if format == self.format and self.scheme is not None else usual
        return scheme, "FP8" if format == "modelopt" else None

    def is_carried(self, format: str) -> bool:
        """Return whether an output of the given format keeps the scales and the declaration of the KV cache."""
        undeclared = self.scheme is None and self.algorithm is None
        return self.is_declared and format in CACHE_FORMATS and (format == self.format or self.is_fp8 or undeclared)

    def reason(self, format: str, format_name: str) -> str:
        """Return the reason why an output of a format cannot keep the KV cache, for the user."""
        if format not in CACHE_FORMATS:
            return f"{format_name} has no place for it; {' and '.join(CACHE_FORMATS)} have"
        cache = self.algorithm or brief(self.scheme)
        return (
            f"the cache is {cache}, and {format_name} can declare only FP8 with static scales; {self.format} keeps it"
        )

    def name(self, tensor: str, format: str) -> str:
        """Return the output name of a tensor with a scale of the KV cache, such as "attn.k_scale"."""
        attention, _, leaf = tensor.rpartition(".")
        projection = _CACHE_LEAVES.get(leaf)
        if projection is None:
            return tensor
        attention = attention.removesuffix(f".{projection}")
        return f"{attention}.{projection}.{leaf}" if format == "modelopt" else f"{attention}.{leaf}"


def kv_cache_of(source: Source) -> KvCache:
    """Return the quantized KV cache of a source, as its config files declare it and its tensors store it."""
    # Never None.
    found = declared(with_declaration(source.config, source.hf_quant_config))
    scheme = found.get("kv_cache_scheme")
    declares = entries(source.config, source.hf_quant_config)
    algorithm = next((value for key, value in declares if key == "kv_cache_quant_algo" and value), None)
    method = str(found.get("quant_method", "")).lower()
    form = next((one for one in CACHE_FORMATS if method.startswith(one)), "")
    tensors = tuple(name for name in source.tensors if name.rpartition(".")[2] in _CACHE_LEAVES)
    name = None if algorithm is None else str(algorithm).upper()
    return KvCache(scheme if isinstance(scheme, Mapping) and scheme else None, name, form, tensors)


def cache_troubles(tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]]) -> Iterator[tuple[str, str, str]]:
    """Yield (severity, name, reason) for each scale of the KV cache that is wrong or has no counterpart."""
    scales = {name: place for name, place in tensors.items() if name.rpartition(".")[2] in _CACHE_LEAVES}
    layers: dict[str, set[str]] = defaultdict(set)
    with Readers() as readers:
        for name, place in scales.items():
            attention, _, leaf = name.rpartition(".")
            layers[attention.removesuffix(f".{_CACHE_LEAVES[leaf]}")].add(leaf)
            values = np.asarray(readers.array(located(*place)).reshape(-1), np.float32)
            wrong = values[~((values > 0) & np.isfinite(values))]
            if wrong.size:
                yield "error", name, f"is {wrong[0]}; a positive finite number is needed as scale of the KV cache"
    for attention, found in layers.items():
        if len(found) == 1:
            (leaf,) = found
            other = next(one for one in _CACHE_LEAVES if one != leaf)
            yield "warning", attention, f"has a {leaf}, but no {other}; most engines need both for the KV cache"
