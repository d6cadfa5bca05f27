"""Check after each refit that NeMo-RL's vLLM workers hold the weights that NeMo-RL sent; see refit_check.py.

    policy.generation.vllm_kwargs.worker_cls=refit_nemo_rl.Worker

NeMo-RL names its own worker extension to vLLM, and has no option for another one. But vLLM imports the class that
worker_cls names first, so this file replaces the extension, unless refits use a checkpoint engine or quant_cfg. The
extension keeps some layers that it receives, and compares the model with them when the refit is complete. If they
differ, NeMo-RL reports that the refit failed, and the worker's log says why.

Read in NeMo-RL 0.6.0, commit 7ea279a: nemo_rl/models/generation/vllm/vllm_backend.py (VllmInternalWorkerExtension) and
vllm_worker.py (worker_extension_cls, vllm_kwargs).
"""

from typing import Any

from nemo_rl.models.generation.vllm import vllm_backend
from refit_check import Received
from vllm.v1.worker.gpu_worker import Worker as Worker  # the usual one; vLLM adds the extension to its bases


class WorkerExtension(Received, vllm_backend.VllmInternalWorkerExtension):
    def _load_weights(self, weights: list[tuple[str, Any]]) -> None:
        self.keep_received(weights)
        super()._load_weights(weights)

    def update_weights_via_ipc_zmq(self) -> bool:
        return super().update_weights_via_ipc_zmq() and self._checked()

    def update_weights_from_collective(self) -> bool:
        return super().update_weights_from_collective() and self._checked()

    def _checked(self) -> bool:
        self.check_received(self.model_runner.model)
        return True


vllm_backend.VllmInternalWorkerExtension = WorkerExtension
