"""Describe how a trainer or a server quantizes, as a Contract, and check that two sides compute with equal bits.

schema.py has the settings of one side, sides.py the weights and values of a side and how it made them, compare_layer.py
the comparison of one layer, parity.py the comparison of two sides, fp4kit.parity, engines.py what engines compute, and
engine_table.py the table of engines.
"""

from typing import Any

from fp4kit.arguments import explains_calls, only_public
from fp4kit.lazy import FUNCTIONS

__all__ = ["of_module"]


@explains_calls
def of_module(model: Any, *, recipe: Any = None) -> tuple[Any, Any]:
    """Return a live PyTorch model as a side of fp4kit.parity: fp4kit.torch.of_module, which says what it reads.

    Args:
        model: a torch.nn.Module of a trainer or of a running engine.
        recipe: the recipe by which codes are decoded; None for that of the engine or of the other side.

    Returns:
        (contract, tensors): a Contract, and a mapping from layer name to rows that are read when they are compared.
    """
    found: tuple[Any, Any] = FUNCTIONS["parity.live"](model, recipe)
    return found


only_public(globals())
