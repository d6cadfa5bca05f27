"""Check that the config files of a source model do not declare quantization if none of its tensors is quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, Source
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.storage.errors import CheckpointError


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if a config file declares quantization although no tensor is quantized.

    weights: the weights that ``weights_of`` finds in the source.
    """
    stored = [weight for weight in weights.values() if weight.container is not None]
    declared = None if stored else next(_declarations(source), None)
    if declared is not None:
        raise CheckpointError(f"{declared}, but no tensor is quantized; remove this entry or file from the source")


def _declarations(source: Source) -> Iterator[str]:
    """Yield one phrase per config entry or file that declares quantization; nothing if none does.

    A phrase, such as "config.json: has quantization_config", begins an error message.
    """
    text = source.config.get("text_config")
    for section in (source.config, text if isinstance(text, dict) else {}):
        yield from (f"{CONFIG}: has {key}" for key in ("quantization_config", "compression_config") if section.get(key))
    if (source.root / HF_QUANT_CONFIG).exists():
        yield f"{HF_QUANT_CONFIG}: exists"
