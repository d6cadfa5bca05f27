"""Check that a source model's tensors agree with its configs.

Each quantized tensor must belong to a container (a way to store quantized layers) that fp4kit knows. If no tensor is
quantized, no config may declare quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, Source
from fp4kit.checkpoint.model.weights import Weight, looks_quantized, part_names
from fp4kit.storage.errors import CheckpointError, listed


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if the tensors and the configs of a source disagree.

    Errors are: a quantized tensor in no known container; a config that declares quantization although no tensor is
    quantized.
    """
    stored = [weight for weight in weights.values() if weight.container is not None]
    parts = part_names(stored)
    unknown = [name for name, (_, entry) in source.tensors.items() if looks_quantized(entry) and name not in parts]
    if unknown:
        raise CheckpointError(
            f"{listed(unknown)}: packed weights or scales in a format that fp4kit does not know; "
            "convert the unquantized release of the model"
        )
    declared = None if stored else next(_declarations(source), None)
    if declared is not None:
        raise CheckpointError(f"{declared}, but no tensor is quantized; remove this entry or file from the source")


def _declarations(source: Source) -> Iterator[str]:
    """Yield a phrase for an error message per config entry or file that declares the source to be quantized."""
    text = source.config.get("text_config")
    for section in (source.config, text if isinstance(text, dict) else {}):
        yield from (f"{CONFIG}: has {key}" for key in ("quantization_config", "compression_config") if section.get(key))
    if (source.root / HF_QUANT_CONFIG).exists():
        yield f"{HF_QUANT_CONFIG}: exists"
