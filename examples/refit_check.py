"""Check after a refit that the rollout engine holds the trainer's weights, quantized as a contract says.

A refit sends the trainer's weights to a running engine. The functions of this file compare the model that the engine
has in memory with these weights. If they differ, they raise RuntimeError with the first step that differs. The contract
is the file that the environment variable REFIT_CONTRACT names, such as the fp4kit_contract.json that `fp4kit convert`
wrote. refit_verl.py, refit_nemo_rl.py, refit_slime.py and refit_miles.py call them where each framework has a place for
it.

The names of weights are those of the checkpoint, and each rank must hold whole layers. Read in vLLM 0.33.0
(worker_extension_cls) and SGLang 0.5.23 (WeightUpdater.update_weights_from_tensor, custom_weight_loader).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import fp4kit

EVERY = 8  # a refit is checked in every eighth decoder layer, other ones each time


def check(model: Any, trained: Any, seconds: float = 2.0) -> fp4kit.Parity:
    """Compare an engine's model with weights of the trainer: a mapping, or the path of a file or a model directory."""
    contract = fp4kit.Contract.load(os.environ["REFIT_CONTRACT"])
    found = fp4kit.parity(contract, model, weights=trained, seconds=seconds)
    if found.differing or found.missing:
        raise RuntimeError(f"the engine does not hold the trainer's weights\n{found}")
    return found


class Received:
    """Extend a vLLM worker: keep some of the weights that it receives, and compare them with its model."""

    refit_step = 0
    refit_weights: dict[str, Any] = {}  # noqa: RUF012 - never changed in place

    def keep_received(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Keep copies of the weights of some decoder layers, other ones in each refit."""
        layers = ((re.search(r"\.layers\.(\d+)\.", name), name, x) for name, x in weights if x.ndim > 1)
        kept = {
            name: x.detach().to("cpu", copy=True)
            for n, name, x in layers
            if n and (int(n[1]) - self.refit_step) % EVERY == 0
        }
        self.refit_weights = {**self.refit_weights, **kept}

    def check_received(self, model: Any) -> None:
        """Compare the model with the kept weights, and forget them."""
        weights, self.refit_weights = self.refit_weights, {}
        self.refit_step += 1
        if weights:
            check(model, weights)


def check_folder(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Compare SGLang's model with a model directory: a custom weight loader, for which the first name is its path."""
    check(model, named_tensors[0][0])


def ask_sglang(urls: Iterable[str], folder: str, ranks: int) -> None:
    """Let SGLang servers started with `--custom-weight-loader refit_check.check_folder` call check_folder."""
    import requests
    import torch
    from sglang.srt.utils import MultiprocessingSerializer

    named = MultiprocessingSerializer.serialize([(folder, torch.empty(0))], output_str=True)
    body = {
        "serialized_named_tensors": [named] * ranks,
        "load_format": "refit_check.check_folder",
        "flush_cache": False,
    }
    for url in urls:
        answer = requests.post(f"{url}/update_weights_from_tensor", json=body, timeout=600)
        if not answer.ok:  # the report is in the log of the server, whose scheduler raised it
            raise RuntimeError(f"{url} does not hold the weights in {folder}: {answer.text}")
