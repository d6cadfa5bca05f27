"""Check after each refit that verl's vLLM servers hold the weights that verl sent; see refit_check.py.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=refit_verl.WorkerExtension

verl sends the weights in buckets to its worker extension, which loads them. This class extends the extension: it keeps
some layers of each bucket, and compares the model with them when the last bucket is loaded.

Read in verl 0.8.0.dev, commit b178a3c: verl/workers/rollout/vllm_rollout/utils.py (vLLMColocateWorkerExtension) and
vllm_async_server.py (engine_kwargs replace the arguments that verl gives to vLLM).
"""

from typing import Any

from refit_check import Received
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class WorkerExtension(Received, vLLMColocateWorkerExtension):
    def _update_weights(self, weights: list[tuple[str, Any]], peft_config: dict, base_sync_done: bool) -> None:
        if not (peft_config and base_sync_done):  # otherwise these are the weights of an adapter
            self.keep_received(weights)
        super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)

    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done: bool = False) -> None:
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done)
        self.check_received(self.model_runner.model)
