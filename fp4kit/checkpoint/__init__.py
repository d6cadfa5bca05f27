"""Checkpoints: plan and convert Hugging Face directories, look into them, compare them; the same rules for tensors in
memory.
"""

from fp4kit.checkpoint.convert.convert import ConversionReport, Options, convert, execute
from fp4kit.checkpoint.convert.in_memory import Rules, convert_tensors
from fp4kit.checkpoint.plan.plan import Plan, make_plan
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.storage.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "ConversionReport",
    "Options",
    "Plan",
    "Rules",
    "ScaleSearch",
    "Wishes",
    "convert",
    "convert_tensors",
    "execute",
    "make_plan",
]
