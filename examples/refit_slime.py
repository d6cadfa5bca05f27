"""Check before each rollout that slime's SGLang engines hold the trainer's weights; see refit_check.py.

    --rollout-function-path refit_slime.generate_rollout --save-hf /shared/hf/{rollout_id} --save-interval 20
    --sglang-custom-weight-loader refit_check.check_folder

With train.py, slime saves the model after a training step, sends its weights to the engines, and calls the rollout
function of the next step. If the model was saved, this function lets the engines compare their weights with it. The
engines must quantize the weights themselves (--hf-checkpoint is unquantized), and must see the folder. If the weights
differ, the log of the engine says where.

Read in slime 0.3.1, commit 624b824: slime/rollout/sglang_rollout.py (generate_rollout, /workers), train.py,
slime/backends/megatron_utils/actor.py (save_hf), slime/backends/sglang_utils/sglang_engine.py (the payload).
"""

import os
from argparse import Namespace
from typing import Any

import requests
from refit_check import ask_sglang
from slime.rollout import sglang_rollout


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    folder = args.save_hf.format(rollout_id=rollout_id - 1)
    if not evaluation and os.path.isdir(folder):
        answer = requests.get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers", timeout=60)
        ask_sglang([worker["url"] for worker in answer.json()["workers"]], folder, args.sglang_tp_size)
    return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation)
