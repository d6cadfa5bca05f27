"""Build the program that quantizes with given scales (arguments block_scale and tensor_scale).
`p` is the program, to which statements are appended, and `case` describes the array x, the recipe and the options.
"""

from __future__ import annotations

from typing import Any

from fp4kit.evidence.fuzz.arguments import (
    auxiliary,
    block_amax,
    call_with_out,
    codes_options,
    decode_dtype,
    moved_shape,
    tensor_amax,
)
from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.program_ir import Program, Ref
from fp4kit.layouts import padded_shape
from fp4kit.quantized.part_shapes import scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES
from fp4kit.reference.implied_amax import encodes_by_amax

SCALES = (0.37, 1.0, 0.0, 1e-40, 3e38, float("inf"), 2.0**-12, 1e-6)  # tensor scales to quantize with


def with_scales(p: Program, case: DrawnCase) -> None:
    """Append calls that quantize x: first as usual, then with the scales of the first result, then with random
    scales.
    """
    x, o, moved, r = p.make("x", case.x), case.options, moved_shape(case, case.x), case.r
    options, amax = codes_options(p, case), tensor_amax(p, case)
    amaxes = block_amax(p, case)
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **options, tensor_amax=amax, block_amax=amaxes)
    own = {name: q[name] for name, has in _scales_of(r).items() if has}
    found = p.call("found", "fp4kit.quantize", x, Ref("r"), **options, **own)
    reads_amax = r.block_rule is not None and BLOCK_RULES[r.block_rule].reads_amax
    has_others = amaxes is not None or bool(r.search) or r.stochastic == "mslk"
    depends_on_them = has_others and (r.flush or reads_amax)
    if gives_back(r, case.x.dtype) and not depends_on_them:
        p.same(found["packed"], q["packed"])
    p.same([found[name] for name in own], [q[name] for name in own])
    given: dict[str, Any] = {}
    if r.scale is not None:
        scales = auxiliary("bytes", "uint8", padded_shape(scale_shape(moved, r), o.layout), o.seed + 2)
        given["block_scale"] = p.make("scales", scales)
    if r.tensor_scaling != "none":
        shape = tensor_amax_shape(moved, r)
        whole = SCALES[o.seed % len(SCALES)]
        given["tensor_scale"] = p.make("scale", auxiliary("amaxes", "float32", shape, o.seed + 3)) if shape else whole
    other = p.call("other", "fp4kit.quantize", x, Ref("r"), **options, **given)
    p.call("v", "fp4kit.dequantize", other, decode_dtype(o))
    if o.out:
        call_with_out(p, o, other, "fp4kit.quantize", x, Ref("r"), **options, **given)


def _scales_of(r: Recipe) -> dict[str, bool]:
    """Return {"block_scale": b, "tensor_scale": t}, where b and t say whether the recipe has such scales."""
    return {"block_scale": r.scale is not None, "tensor_scale": r.tensor_scaling != "none"}


def gives_back(r: Recipe, dtype: str) -> bool:
    """Return True if quantizing with the scales of an earlier result must give that result's codes again."""
    return not encodes_by_amax(r) or (dtype != "float32" and r.tensor_rule != "te_primary_weight")
