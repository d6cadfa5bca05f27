"""Convert checkpoints to FP4 and back: plan a conversion, run it, and report what was done.

``make_plan`` decides what happens to each tensor of a model directory or GGUF file; ``execute`` runs the plan.
``convert`` does both. ``assign_recipes`` finds the recipes of smallest error within a budget of bits.
``verify_checkpoint`` checks a checkpoint, and ``identify_checkpoint`` says which recipe made it.
``open_checkpoint`` reads the quantized layers of a checkpoint as Quantized objects.
``convert_tensors`` and ``TensorConverter`` apply the rules of a conversion to tensors that are already in memory.
"""

from fp4kit.arguments import only_public
from fp4kit.checkpoint.convert.convert import ConversionReport, convert, execute
from fp4kit.checkpoint.convert.in_memory import Rules, TensorConverter, convert_tensors
from fp4kit.checkpoint.delta import apply, diff
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import QuantizedLayers, open_checkpoint
from fp4kit.checkpoint.plan.assign_recipes import Assignment, assign_recipes
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.plan.scale_search import Activations, ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.compare import CheckpointComparison, compare_checkpoints
from fp4kit.checkpoint.verify.verify import VerifyReport, verify_checkpoint
from fp4kit.storage.files import CheckpointError

__all__ = [
    "Activations",
    "Assignment",
    "CheckpointComparison",
    "CheckpointError",
    "ConversionReport",
    "Options",
    "Plan",
    "QuantizedLayers",
    "Rules",
    "ScaleSearch",
    "TensorConverter",
    "VerifyReport",
    "Wishes",
    "apply",
    "assign_recipes",
    "compare_checkpoints",
    "convert",
    "convert_tensors",
    "diff",
    "execute",
    "identify_checkpoint",
    "make_plan",
    "open_checkpoint",
    "verify_checkpoint",
]

only_public(globals())
