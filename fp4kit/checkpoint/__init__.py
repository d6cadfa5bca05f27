"""Checkpoints: plan and convert Hugging Face directories, look into them, compare them; the same rules for tensors in memory."""

from fp4kit.checkpoint.convert import ConversionReport, Options, convert, execute
from fp4kit.checkpoint.plan import Plan, make_plan
from fp4kit.checkpoint.scale_search import ScaleSearch
from fp4kit.checkpoint.selection import Wishes
from fp4kit.checkpoint.tensors import Rules, convert_tensors
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
