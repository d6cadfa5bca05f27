"""Checkpoints: plan and convert Hugging Face directories, look into them, compare them."""

from fp4kit.checkpoint.compare import CheckpointComparison, compare_checkpoints
from fp4kit.checkpoint.convert import ConversionReport, convert, execute
from fp4kit.checkpoint.inspect import Checkpoint, open_checkpoint
from fp4kit.checkpoint.plan import Plan, make_plan
from fp4kit.storage.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointComparison",
    "CheckpointError",
    "ConversionReport",
    "Plan",
    "compare_checkpoints",
    "convert",
    "execute",
    "make_plan",
    "open_checkpoint",
]
