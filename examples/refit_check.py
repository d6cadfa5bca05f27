"""Check after a refit that the rollout engine holds the trainer's weights, quantized as a contract says.

A refit sends the trainer's weights to a running engine. The trainer passes some of its own weights again, and ``check``
compares them with the model that the engine has in memory, after its weights were processed. If they differ, it raises
RuntimeError with the first step that differs. The contract is the file that the environment variable REFIT_CONTRACT
names, such as the fp4kit_contract.json that `fp4kit convert` wrote.

- verl and NeMo-RL with vLLM: let the worker extension of the framework inherit from ``Checked``, or pass
  `--worker-extension-cls refit_check.Checked`. After the refit, rank 0 of the trainer calls

      save_file(sample(model.named_parameters(), step), "/dev/shm/refit.safetensors")
      llm.collective_rpc("check_refit", args=("/dev/shm/refit.safetensors",))

  In verl, ``llm`` is vLLMHttpServer or AsyncLLM; in NeMo-RL, the LLM of its generation worker.
- slime and miles with SGLang: start the engine with `--sglang-custom-weight-loader refit_check.check`. After the refit,

      tensors = [*sample(model.named_parameters(), step).items()]
      engine.update_weights_from_tensor(tensors, load_format="refit_check.check")

  SGLang calls ``check(model, named_tensors)`` in place of a loader, and nothing is loaded.

Each rank must hold whole layers. The names of parameters are those of the checkpoint (as Megatron's bridges give them).
Read in vLLM 0.33.0 (Worker.get_model, worker_extension_cls), SGLang 0.5.23 (WeightUpdater.update_weights_from_tensor).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import fp4kit

LAYERS = 4  # decoder layers per check


def sample(named_parameters: Iterable[tuple[str, Any]], step: int, layers: int = LAYERS) -> dict[str, Any]:
    """Return the weights of some decoder layers, other ones in each step."""
    weights = {name: x.detach() for name, x in named_parameters if x.ndim > 1 and ".layers." in name}
    numbers = sorted({int(found[1]) for name in weights if (found := re.search(r"\.layers\.(\d+)\.", name))})
    chosen = {numbers[(step * layers + i) % len(numbers)] for i in range(layers)} if numbers else set()
    return {name: x for name, x in weights.items() if any(f".layers.{i}." in name for i in chosen)}


def check(model: Any, trained: Any, seconds: float = 2.0) -> fp4kit.Parity:
    """Compare an engine's model with weights of the trainer: a mapping, (name, tensor) pairs, or a file of them."""
    contract = fp4kit.Contract.load(os.environ["REFIT_CONTRACT"])
    weights = trained if isinstance(trained, str) else {name: x.cpu() for name, x in dict(trained).items()}
    found = fp4kit.parity(contract, model, weights=weights, seconds=seconds)
    if found.differing or found.missing:
        raise RuntimeError(f"the engine does not hold the trainer's weights\n{found}")
    return found


class Checked:
    """Extend vLLM's worker by the method that collective_rpc calls."""

    def check_refit(self, path: str) -> str:
        """Check the model of this worker, and return the verdict."""
        return check(self.get_model(), path).verdict  # type: ignore[attr-defined]
