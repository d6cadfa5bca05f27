"""Build the program of each operation: the calls to make, and which of their results must be equal.
`p` is the program, to which statements are appended, and `case` describes the arrays (x is the first), the recipe and
the options. A program is run later, on one or two engines; a result that differs between engines is a failure, too.

A Same statement requires that two results are equal. It must hold on every engine, so it checks an engine even if that
engine runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arguments import (
    auxiliary,
    block_amax,
    call_with_out,
    codes_options,
    decode_dtype,
    moved_shape,
    rounding_options,
    tensor_amax,
    with_fault,
)
from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.program_ir import Program, Ref, Statement
from fp4kit.evidence.fuzz.programs_matmul import matmul
from fp4kit.evidence.fuzz.programs_search import search_scales
from fp4kit.evidence.fuzz.programs_with_scales import with_scales
from fp4kit.layouts import padded_shape
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes.schema import faking


def program(case: DrawnCase) -> list[Statement]:
    """Return the program of a fuzz case: its calls and required equalities, as a list of statements."""
    p = Program()
    if case.product is not None:
        matmul(p, case)
        return p.statements
    p.make("r", case.recipe)
    _PROGRAMS[case.operation](p, with_fault(case))
    return p.statements


# ---- programs ----


def _quantize(p: Program, case: DrawnCase) -> None:
    """Append calls that quantize and decode x."""
    x = p.make("x", case.x)
    options = codes_options(p, case) | {"tensor_amax": tensor_amax(p, case), "block_amax": block_amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **options)
    p.call("v", "fp4kit.dequantize", q, decode_dtype(case.options))
    if not case.x.view.is_plain:
        copy = p.call("copy", "x.copy", "C")
        p.same(q, p.call("q_copy", "fp4kit.quantize", copy, Ref("r"), **options))
    if case.options.out:
        call_with_out(p, case.options, q, "fp4kit.quantize", x, Ref("r"), **options)
    _experts(p, case, q, x, options)


def _experts(p: Program, case: DrawnCase, q: Ref, x: Ref, options: dict[str, Any]) -> None:
    """Append calls that quantize up to three experts of x separately, each with its own amax."""
    # The case must also round to nearest, and not quantize along the axis of experts.
    amax, ndim = options["tensor_amax"], case.x.ndim
    alone = isinstance(amax, Ref) and case.r.tensor_scaling == "tensor" and case.x.shape[0] > 1 and case.axis % ndim > 0
    if not alone or case.options.rounding != "nearest" or options["block_amax"] is not None:
        return
    for i in range(min(case.x.shape[0], 3)):
        own = options | {"axis": case.axis % ndim - ndim, "tensor_amax": amax[i]}
        single = p.call(f"expert{i}", "fp4kit.quantize", x[i], Ref("r"), **own)
        p.same([q["packed"][i], q["tensor_scale"][i]], [single["packed"], single["tensor_scale"]])
        if case.r.scale is not None:
            p.same(q["block_scale"][i], single["block_scale"])


def _quantize_both(p: Program, case: DrawnCase) -> None:
    """Append calls that quantize along both axes: one call of quantize_both, and two calls of quantize."""
    # The results must be equal.
    x = p.make("x", case.x)
    options = codes_options(p, case)
    del options["axis"]
    amax = tensor_amax(p, case) if case.r.tensor_scaling == "tensor" else None
    q = p.call("q", "fp4kit.quantize_both", x, Ref("r"), tensor_amax=amax, **options)
    hadamard = options.pop("hadamard", None)
    row = p.call("row", "fp4kit.quantize", x, Ref("r"), tensor_amax=amax, **options)
    if "seed" in options:
        options |= {"seed": options["seed"] + 1}
    options |= {"axis": -2, "hadamard": hadamard, "tensor_amax": amax}
    column = p.call("column", "fp4kit.quantize", x, Ref("r"), **options)
    p.same(q, [row, column])


def _decode(p: Program, case: DrawnCase) -> None:
    """Append calls that decode random codes under random block scales (if the recipe has any)."""
    # If the case has the option ``out``, decoding into a preallocated output must give the same values.
    x, o = p.make("x", case.x), case.options
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **codes_options(p, case), tensor_amax=tensor_amax(p, case))
    moved, r = moved_shape(case, case.x), case.r
    kind = "codes of 6 bits" if r.element.bits == 6 else "bytes"
    parts: dict[str, Any] = {"packed": p.make("packed", auxiliary(kind, "uint8", packed_shape(moved, r), o.seed + 1))}
    if r.scale is not None:
        shape = padded_shape(scale_shape(moved, r), o.layout)
        parts["block_scale"] = p.make("scales", auxiliary("bytes", "uint8", shape, o.seed + 2))
    q = p.call("q2", "replace", q, **parts)
    v = p.call("v", "fp4kit.dequantize", q, decode_dtype(o))
    if o.out:
        call_with_out(p, o, v, "fp4kit.dequantize", q, decode_dtype(o))


def _fake_quantize(p: Program, case: DrawnCase) -> None:
    """Append calls that fake-quantize x."""
    # The result must equal dequantize(quantize(x)), unless the recipe has a fake rule, has no codes, or decodes by
    # another rule in fake_quantize.
    x, r = p.make("x", case.x), case.r
    options = {
        "axis": case.axis,
        "tensor_amax": tensor_amax(p, case),
        "block_amax": block_amax(p, case),
        **rounding_options(p, case),
    }
    v = p.call("v", "fp4kit.fake_quantize", x, Ref("r"), **options)
    if r.fake_rule is None and not r.fake_only and faking(r) == r:
        q = p.call("q", "fp4kit.quantize", x, Ref("r"), **options)
        p.same(v, p.call("decoded", "fp4kit.dequantize", q))


def _members(p: Program, case: DrawnCase) -> tuple[Any, list[Ref]]:
    """Append the statements that make the arrays of a group."""
    if case.options.stacked:
        x = p.make("x", case.x)
        return x, [x[i] for i in range(case.x.shape[0])]
    xs = [p.make(f"x{i}", a) for i, a in enumerate(case.arrays)]
    return xs, xs


def _per_member(p: Program, case: DrawnCase, make: Callable[..., Any], name: str, count: int) -> list[Any] | None:
    """Return one argument of a grouped function, such as its amaxes: a list with one entry per array of the group."""
    found = [make(p, case, i, f"{name}{i}") for i in range(count)]
    return None if not found or found[0] is None else found


def _grouped(p: Program, case: DrawnCase) -> None:
    """Append a call that quantizes or fake-quantizes a group of arrays at once, and a call for each array by itself."""
    # The results must be equal.
    xs, members = _members(p, case)
    fake = case.operation == "fake_quantize_grouped"
    options = {"axis": case.axis, **rounding_options(p, case)} if fake else codes_options(p, case)
    amaxes = _per_member(p, case, tensor_amax, "amax", len(members))
    blocks = _per_member(p, case, block_amax, "block_amax", len(members))
    function = "fp4kit.fake_quantize" if fake else "fp4kit.quantize"
    found = p.call("found", f"{function}_grouped", xs, Ref("r"), tensor_amax=amaxes, block_amax=blocks, **options)
    singles = [
        p.call(f"single{i}", function, x, Ref("r"), tensor_amax=_at(amaxes, i), block_amax=_at(blocks, i), **options)
        for i, x in enumerate(members)
    ]
    p.same(found, singles)


def _at(values: list[Any] | None, i: int) -> Any:
    """Return values[i], the argument of array i of a group, or None if ``values`` is None."""
    return None if values is None else values[i]


def _amax_grouped(p: Program, case: DrawnCase) -> None:
    """Append calls that compute the amaxes of a group of arrays at once, and of each array by itself."""
    # The results must be equal.
    xs, members = _members(p, case)
    recipe, axis = _reduced(case)
    found = p.call("found", "fp4kit.amax_grouped", xs, *recipe, axis=axis)
    p.same(found, [p.call(f"single{i}", "fp4kit.amax", x, *recipe, axis=axis) for i, x in enumerate(members)])


def _reduced(case: DrawnCase) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a call of amax besides x: (positional arguments after x, argument axis)."""
    if case.options.cuts:
        return (Ref("r"),), case.axis
    ndim = case.x.ndim - case.options.stacked
    return (), tuple(range(ndim)) if case.options.axes == "all" else case.options.axes


def _plan(p: Program, case: DrawnCase) -> None:
    """Append calls that make a GroupedPlan and run it twice."""
    # The results must equal the results of single calls.
    o = case.options
    xs, members = _members(p, case)
    options = codes_options(p, case)
    amaxes = _per_member(p, case, tensor_amax, "amax", len(members))
    blocks = _per_member(p, case, block_amax, "block_amax", len(members))
    p.call("plan", "fp4kit.GroupedPlan", xs, Ref("r"), tensor_amax=amaxes, block_amax=blocks, **options)
    fake = case.r.fake_only or (o.fake and not o.hadamard and (case.r.fake_rule is None or o.rounding == "nearest"))
    method = "fake_quantize" if fake else "quantize"
    given = {name: value for name, value in options.items() if not fake or name in ("axis", "rounding", "seed")}
    for step in range(2):
        found = p.call(f"found{step}", f"plan.{method}")
        for i, x in enumerate(members):
            amax = {"tensor_amax": _at(amaxes, i), "block_amax": _at(blocks, i)}
            p.same(found[i], p.call(f"single{step}{i}", f"fp4kit.{method}", x, Ref("r"), **given, **amax))
        if step == 0:
            _overwrite(p, case, members)


def _overwrite(p: Program, case: DrawnCase, members: list[Ref]) -> None:
    """Append calls that overwrite the arrays of a group in place with new random values, of normal distribution."""
    for i, x in enumerate(members):
        stacked = case.options.stacked
        a = case.arrays[0 if stacked else i]
        other = auxiliary("ordinary", a.dtype, a.shape[1:] if stacked else a.shape, case.options.seed + 50 + i)
        p.call(f"written{i}", "overwrite", x, p.make(f"y{i}", other))
        p.mark(writes=(x.name,))


def _requantize(p: Program, case: DrawnCase) -> None:
    """Append calls that quantize with one recipe, requantize to another recipe, and decode the result."""
    x, o = p.make("x", case.x), case.options
    target = p.make("target", o.target or case.recipe)
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **codes_options(p, case), tensor_amax=tensor_amax(p, case))
    t = p.call("t", "fp4kit.requantize", q, target)
    p.call("v", "fp4kit.dequantize", t["quantized"], decode_dtype(o))


def _backward(p: Program, case: DrawnCase) -> None:
    """Append a call that computes the gradient of fake_quantize from a random incoming gradient."""
    # With pass_through, the result must equal the incoming gradient.
    x, o = p.make("x", case.x), case.options
    grad = p.make("grad", replace(case.x, kind="bits", seed=o.seed + 1, dtype=o.decoded or case.x.dtype, bits=b""))
    # fake_quantize_backward accepts a single amax, not one per expert.
    one = replace(case, options=replace(o, tensor_amax=o.tensor_amax and "number"))
    options = {"axis": case.axis, "amax": tensor_amax(p, one), "pass_through": o.pass_through}
    g = p.call("g", "fp4kit.fake_quantize_backward", grad, x, Ref("r"), **options)
    if o.pass_through:
        p.same(g, grad)


def _backward_grouped(p: Program, case: DrawnCase) -> None:
    """Append a call that computes the gradients of fake_quantize for a group at once, and a call for each array."""
    # The results must be equal.
    xs, members = _members(p, case)
    o = case.options
    grads = [p.make(f"grad{i}", replace(a, kind="bits", seed=o.seed + i, bits=b"")) for i, a in enumerate(case.arrays)]
    given: Any = grads[0] if o.stacked else grads
    one = replace(case, options=replace(o, tensor_amax=o.tensor_amax and "number"))
    amaxes = _per_member(p, one, tensor_amax, "amax", len(members))
    options = {"axis": case.axis, "pass_through": o.pass_through}
    found = p.call("found", "fp4kit.fake_quantize_grouped_backward", given, xs, Ref("r"), amax=amaxes, **options)
    singles = [
        p.call(f"single{i}", "fp4kit.fake_quantize_backward", given[i], x, Ref("r"), amax=_at(amaxes, i), **options)
        for i, x in enumerate(members)
    ]
    p.same(found, singles)


def _transpose(p: Program, case: DrawnCase) -> None:
    """Append calls that transpose a Quantized."""
    # Transposing again must give the Quantized back.
    # Quantizing x along the other axis must give the transpose.
    x, o = p.make("x", case.x), case.options
    options = {"scale_layout": o.layout if o.layout != "linear" else None, "tensor_amax": tensor_amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), axis=case.axis, **options)
    t = p.call("t", "fp4kit.transpose", q)
    p.same(p.call("back", "fp4kit.transpose", t), q)
    if case.r.amax_nan != "lanes" and not case.r.four_over_six:
        p.same(t, p.call("other", "fp4kit.quantize", x, Ref("r"), axis=-3 - case.axis, **options))


def _swizzle(p: Program, case: DrawnCase) -> None:
    """Append calls that convert the block scales of a Quantized to the layout ``target_layout``, and back."""
    x, o = p.make("x", case.x), case.options
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **codes_options(p, case), tensor_amax=tensor_amax(p, case))
    s = p.call("s", "fp4kit.swizzle", q, o.target_layout)
    linear = p.call("linear", "fp4kit.unswizzle", s)
    p.same(linear, p.call("straight", "fp4kit.unswizzle", q))
    p.same(p.call("back", "fp4kit.swizzle", linear, o.layout), q)
    p.same(p.call("v", "fp4kit.dequantize", s), p.call("w", "fp4kit.dequantize", q))


def _swizzle_bytes(p: Program, case: DrawnCase) -> None:
    """Append calls that convert a byte matrix to a swizzled layout and back, which must restore the matrix."""
    x, layout = p.make("x", case.x), case.options.target_layout
    s = p.call("s", "fp4kit.swizzle", x, layout)
    p.same(p.call("back", "fp4kit.unswizzle", s, layout, case.x.shape), x)


def _pack(p: Program, case: DrawnCase) -> None:
    """Append calls that pack codes and unpack them, which must restore the codes."""
    x = p.make("x", case.x)
    packed = p.call("packed", "fp4kit.pack", x)
    p.same(p.call("codes", "fp4kit.unpack", packed), x)


def _amax_program(p: Program, case: DrawnCase) -> None:
    """Append a call that computes the amax of x and, if x is strided, one for a contiguous copy of x."""
    x = p.make("x", case.x)
    recipe, axis = _reduced(case)
    a = p.call("a", "fp4kit.amax", x, *recipe, axis=axis)
    if not case.x.view.is_plain:
        p.same(a, p.call("a_copy", "fp4kit.amax", p.call("copy", "x.copy", "C"), *recipe, axis=axis))


def _pieces(case: DrawnCase) -> list[tuple[int, int]]:
    """Return the shards of the flattened matrix as ranges [start, stop) of elements, in order."""
    ends = [0, *(int(cut * case.x.size) for cut in case.options.cuts), case.x.size]
    return list(pairwise(ends))


def _partial(p: Program, case: DrawnCase) -> None:
    """Append calls that compute amaxes and codes shard by shard, with cuts at arbitrary elements."""
    # The maximum of the shards' amaxes must be the amax of x, and the shards' codes must be those that quantize gives
    # for x.
    x, r, shape = p.make("x", case.x), case.r, case.x.shape
    flat = p.call("flat", "x.reshape", -1)
    pieces = _pieces(case)
    parts = [
        p.call(f"part{i}", "fp4kit.partial_amax", flat[a:b], shape, a, Ref("r")) for i, (a, b) in enumerate(pieces)
    ]
    whole = p.call("whole", "largest", parts)
    p.same(whole, p.call("amax_of_x", "fp4kit.amax", x, Ref("r")))
    given = tensor_amax(p, case, name="given")
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), tensor_amax=given)
    amax = q["tensor_amax"] if given is None and _scales_by_finite(case) else given
    before = auxiliary("bytes", "uint8", packed_shape(shape, r), case.options.seed + 3)
    out, unchanged = p.make("out", before), p.make("before", before)
    cast_pieces = pieces[: len(pieces) - (len(pieces) > 1 and case.options.pass_through)]
    for i, (a, b) in enumerate(cast_pieces):
        p.call(f"done{i}", "fp4kit.partial_cast", flat[a:b], out, whole, shape, a, Ref("r"), tensor_amax=amax)
        p.mark(writes=("out",))
    p.same(out, p.call("wanted", "with_codes", unchanged, q["packed"], cast_pieces, r.element.packing.codes))


def _scales_by_finite(case: DrawnCase) -> bool:
    """Return True if the tensor scale comes from an amax without infinities while the block amaxes contain
    infinities.
    """
    finite = case.r.amax_nan == "lanes" and case.r.tensor_scaling == "tensor"
    return finite and bool(np.isinf(case.x.values().astype(np.float32)).any())


def _master_weights(p: Program, case: DrawnCase) -> None:
    """Append a call of cast_master_weights that casts several weights in one process, and one quantize per weight."""
    # The results must be equal.
    columnwise = case.options.columnwise and case.r.block_rows == case.r.block_size
    shards, singles = [], []
    for i, a in enumerate(case.arrays):
        x = p.make(f"x{i}", a)
        flat = p.call(f"flat{i}", f"x{i}.reshape", -1)
        shards.append(p.call(f"shard{i}", "fp4kit.Shard", flat, a.shape))
        q = p.call(f"q{i}", "fp4kit.quantize", x, Ref("r"))
        singles.append([q, p.call(f"t{i}", "fp4kit.transpose", q)] if columnwise else q)
    p.call("alone", "SingleProcess")
    options = {"columnwise": True} if columnwise else {}
    p.same(p.call("cast", "fp4kit.cast_master_weights", shards, Ref("alone"), Ref("r"), **options), singles)


_PROGRAMS: dict[str, Callable[[Program, DrawnCase], None]] = {
    "quantize": _quantize,
    "quantize_both": _quantize_both,
    "with_scales": with_scales,
    "decode": _decode,
    "fake_quantize": _fake_quantize,
    "quantize_grouped": _grouped,
    "fake_quantize_grouped": _grouped,
    "amax_grouped": _amax_grouped,
    "plan": _plan,
    "requantize": _requantize,
    "backward": _backward,
    "backward_grouped": _backward_grouped,
    "transpose": _transpose,
    "swizzle": _swizzle,
    "swizzle_bytes": _swizzle_bytes,
    "pack": _pack,
    "amax": _amax_program,
    "partial": _partial,
    "master_weights": _master_weights,
    "search_scales": search_scales,
}
