"""Collect the inputs of the linear layers of the demo model, which fp4kit.checkpoint.convert.demo runs.

bench_scale_search.py uses the collected inputs as calibration data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fp4kit.checkpoint.convert.demo import Seen, encode, tensors_of, tokens_of

__all__ = ["LENGTH", "linear_names", "run", "tensors_of", "tokens_of"]

LENGTH = 128  # tokens per sequence


def linear_names(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the linear weights in the encoder's layers, layer by layer."""
    return [name for name, x in tensors.items() if name.endswith(".weight") and x.ndim == 2 and ".layer." in name]


def run(tensors: Mapping[str, np.ndarray], tokens: list[int], seen: Seen) -> None:
    """Run the encoder on consecutive sequences of LENGTH tokens, and call `seen` for every linear layer of each.

    Tokens after the last whole sequence are ignored.
    """
    for start in range(0, len(tokens) - LENGTH + 1, LENGTH):
        encode(tensors, tokens[start : start + LENGTH], seen)
