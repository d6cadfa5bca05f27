"""Build the program that searches block scales (operation "search_scales"): calls, and which results must be equal.
`p` is the program, to which statements are appended, and `case` describes the array x, the recipe and the options.
"""

from __future__ import annotations

from typing import Any

from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.call.search_scales import has_grid
from fp4kit.evidence.fuzz.arguments import auxiliary, moved_shape, tensor_amax
from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.program_ir import Program, Ref

# Limits to pass as the argument ``candidates``, for the three kinds of recipes that _candidates distinguishes.
SOME_CODES, SOME_POWERS, SOME_MULTIPLES = (-5, 3), (-3, 1), (0.5, 1.25, 0.25)


def search_scales(p: Program, case: DrawnCase) -> None:
    """Append calls to search_scales, and Same statements for the results that must be equal."""
    x, o, K = p.make("x", case.x), case.options, moved_shape(case, case.x)[-1]
    options = {"axis": case.axis, "tensor_amax": tensor_amax(p, case), "candidates": _candidates(case)}
    terms: dict[str, Any] = {"objective": o.objective if o.objective != "mse" else None}
    if o.columns == "weights":
        terms["weights"] = p.make("weights", auxiliary("weights", "float32", (K,), o.seed + 5))
    if o.columns == "hessian":
        terms["hessian"] = p.make("hessian", auxiliary("hessians", "float32", (K // 16, 16, 16), o.seed + 5))
    found = p.call("found", "fp4kit.search_scales", x, Ref("r"), **options, **terms)
    if not case.x.view.is_plain:
        copy = p.call("copy", "x.copy", "C")
        p.same(found, p.call("found_copy", "fp4kit.search_scales", copy, Ref("r"), **options, **terms))
    if not o.columns:
        ones = p.make("ones", auxiliary("ones", "float32", (K,), 0))
        p.same(found, p.call("weighted", "fp4kit.search_scales", x, Ref("r"), weights=ones, **options, **terms))


def _candidates(case: DrawnCase) -> Any:
    """Return the argument ``candidates`` of search_scales: None, "near", or limits that fit the recipe's search."""
    o, r = case.options, case.r
    if o.candidates == "near" and has_grid(r):
        return None
    if o.candidates != "some":
        return o.candidates or None
    return SOME_MULTIPLES if has_grid(r) else SOME_POWERS if takes_e8m0_amaxes(r) else SOME_CODES
