"""Check that the config files of a model do not declare quantization if none of its tensors is quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp4kit.arguments import is_one_of
from fp4kit.checkpoint.model.config_items import METHODS
from fp4kit.checkpoint.model.declarations import KEYS, sections
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, MSMODELSLIM, Source
from fp4kit.checkpoint.model.weights import Weight, any_quantized
from fp4kit.storage.errors import CheckpointError, shown


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if a config file declares quantization although no tensor is quantized.

    Args:
        source: the model.
        weights: the weights that ``weights_of`` finds in the source.
    """
    why = "" if any_quantized(weights.values()) else unfulfilled(source.config, source.hf_quant_config)
    if why:
        raise CheckpointError(why)


def unfulfilled(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> str:
    """Return the error message for config files that declare quantization, for a model without quantized tensors.

    Return "" if they declare none. If there are several declarations, the message is about the first.

    Args:
        config, hf_quant_config: the contents of config.json and hf_quant_config.json; None if that file is missing.
    """
    return next(_declarations(config, hf_quant_config), "")


def _declarations(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield an error message per config entry or file that declares quantization.

    - An entry of config.json that is empty or null declares nothing.
    - An hf_quant_config.json always declares quantization, whatever it contains.
    - An entry with an unknown quant_method gets a message of its own.

    Args:
        config, hf_quant_config: the contents of config.json and hf_quant_config.json; None if that file is missing.
    """
    what = "but no tensor is quantized; remove this entry or file from the source"
    for prefix, section in sections(config):
        for key in KEYS:
            value = section.get(key)
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and method == MSMODELSLIM:
                yield f"{value['file']}: describes quantized weights, {what}"
            elif method is not None and not is_one_of(method, METHODS):
                yield (
                    f"{CONFIG}: {prefix}{key} declares quant_method {shown(repr(method))}, which fp4kit does not read;"
                    " convert the unquantized release of the model"
                )
            elif value:
                yield f"{CONFIG}: has {prefix}{key}, {what}"
    if hf_quant_config is not None:
        yield f"{HF_QUANT_CONFIG}: exists, {what}"
