"""Whether a source is what its configs say: quantized in forms that are known here, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, Source
from fp4kit.checkpoint.model.weights import Weight, looks_quantized, part_names
from fp4kit.storage.errors import CheckpointError, listed


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError for a quantized tensor of no known form, and for a config that declares what no tensor
    is.
    """
    stored = [weight for weight in weights.values() if weight.container is not None]
    known = part_names(stored)
    strange = [name for name, (_, entry) in source.tensors.items() if looks_quantized(entry) and name not in known]
    if strange:
        raise CheckpointError(
            f"{listed(strange)}: packed weights or their scales, of no form that is known here; "
            "start from the unquantized release"
        )
    declared = None if stored else next(_declarations(source), None)
    if declared is not None:
        raise CheckpointError(f"{declared}, but no tensor is quantized; remove it from the source first")


def _declarations(source: Source) -> Iterator[str]:
    """What says that a source is quantized."""
    text = source.config.get("text_config")
    for section in (source.config, text if isinstance(text, dict) else {}):
        yield from (f"{CONFIG}: has {key}" for key in ("quantization_config", "compression_config") if section.get(key))
    if (source.root / HF_QUANT_CONFIG).exists():
        yield f"{HF_QUANT_CONFIG}: is there"
