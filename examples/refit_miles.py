"""Check before each rollout that miles' SGLang engines hold the trainer's weights; see refit_check.py.

    --rollout-function-path refit_miles.CheckedRollout --save-hf /shared/hf/{rollout_id} --save-interval 20
    --sglang-custom-weight-loader refit_check.check_folder

With train.py, miles saves the model after a training step, sends its weights to the engines, and calls the rollout
function of the next step. If the model was saved, this class lets the engines compare their weights with it. The
engines must quantize the weights themselves (--hf-checkpoint is unquantized), and must see the folder. If the weights
differ, the log of the engine says where.

Read in miles 0.1.0, commit 31f1ca9: miles/rollout/inference_rollout/inference_rollout_common.py (InferenceRolloutFn),
inference_rollout_train.py (get_worker_urls), miles/rollout/base_types.py, miles/backends/megatron_utils/hf_export.py.
"""

import asyncio
from pathlib import Path

from miles.rollout.base_types import RolloutFnInput, RolloutFnOutput
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.rollout.inference_rollout.inference_rollout_train import get_worker_urls
from miles.utils.hf_config import HF_EXPORT_COMPLETE_MARKER
from refit_check import ask_sglang


class CheckedRollout(InferenceRolloutFn):
    async def __call__(self, input: RolloutFnInput) -> RolloutFnOutput:
        args = self.state.args
        folder = args.save_hf.format(rollout_id=input.rollout_id - 1)
        if not input.evaluation and (Path(folder) / HF_EXPORT_COMPLETE_MARKER).exists():
            await asyncio.to_thread(ask_sglang, await get_worker_urls(args), folder, args.sglang_tp_size)
        return await super().__call__(input)
