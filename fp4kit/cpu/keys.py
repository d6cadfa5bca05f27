"""Names of what the compiled engine has: rules of scales, and the arithmetic of elements, by the fields that they depend on.

A variant of a recipe whose fields have a name there is computed by it, whatever its other fields are.
"""

from __future__ import annotations

from fp4kit import formats
from fp4kit.cuda.traits import is_same
from fp4kit.formats import ElementFormat
from fp4kit.recipes import Recipe


def rule_key(r: Recipe) -> str | None:
    """Of the rule that makes block scales of amaxes; None for a recipe without one, and for 4over6, which tries two scales."""
    if r.block_rule is None or r.scale is None or r.four_over_six:
        return None
    propagate = "propagate" if r.amax_nan == "propagate" else "ignore"
    return f"{r.block_rule} {_name(r.element)} {_name(r.scale)} {r.scale_max} {propagate}"


def tensor_key(r: Recipe) -> str | None:
    """Of the rule that makes a tensor's scale of its amax; None for a recipe without one."""
    return None if r.tensor_rule is None else f"{r.tensor_rule} {_name(r.element)} {r.scale_max}"


def element_key(r: Recipe) -> str:
    """Of what makes a code of an element and a factor, where both are finite."""
    flags = [name for name in ("flush", "round_scaled", "narrow") if getattr(r, name)]
    return " ".join([_name(r.element), r.apply, r.rounding, r.sign, *flags])


def _name(f: ElementFormat) -> str:
    """Of a format that fp4kit has, which another of the same numbers may be; else its own, that no key has."""
    known = getattr(formats, f.name, None)
    return f.name if isinstance(known, ElementFormat) and is_same(f, known) else f"other {f.name}"
