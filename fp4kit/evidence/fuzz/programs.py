"""Write the program of each operation: the calls to make, and which of their results must be equal.
`p` runs the statements at once on one or two engines (check.Running) or prints them (check.Printed), and `case`
describes the arrays (x is the first), the recipe and the options. A result that differs between engines is a failure.

`p.same` requires that two results are equal on every engine, so it checks an engine even if that engine runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.call.search_scales import has_grid
from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.check import Dtype, Ended, Printed, Ref, Running, Verdict
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOperand, DrawnOptions, DrawnProduct
from fp4kit.evidence.testing import ComparedEngine
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES
from fp4kit.recipes.schema import faking
from fp4kit.reference.tensor_rules import encodes_by_amax

Program = Running | Printed
R = Ref("r")  # the recipe of the case


def check(case: DrawnCase, engine: ComparedEngine | None = None) -> Verdict:
    """Run a fuzz case on the specification and, unless ``engine`` is None, on ``engine`` too."""
    p, ended = Running(engine), Ended("equal", "")
    try:
        program(p, case)
        for place in p.places:
            place.check_inputs()
    except Ended as error:
        ended = error
    return Verdict(ended.kind, ended.text, ended.function, p.number, p.calls, p.total.values, p.total.differing)


def script(case: DrawnCase, verdict: Verdict, engine: ComparedEngine | None) -> str:
    """Return a Python program that reproduces a failing case."""
    p = Printed()
    program(p, case)
    return p.source(verdict.step, verdict.kind == "written", engine.module.__name__ if engine else None)


def program(p: Program, case: DrawnCase) -> None:
    """Run or print the program of a fuzz case."""
    if case.product is not None:
        _matmul(p, case.product)
    else:
        p.make("r", case.recipe)
        _PROGRAMS[case.operation](p, _with_fault(case))


def _with_fault(case: DrawnCase) -> DrawnCase:
    """Return the case with its fault applied to x or the axis, or unchanged if the fault concerns other arguments."""
    fault, x = case.options.fault, case.x
    if fault == "length" and case.r.length_multiple > 1:
        shape = list(x.shape)
        shape[case.axis] += 1
        return replace(case, arrays=(replace(x, shape=tuple(shape)), *case.arrays[1:]))
    if fault == "axis":
        return replace(case, axis=x.ndim + 1)
    if fault == "dtype" and x.dtype != "uint8":
        return replace(case, arrays=(replace(x, dtype="float64", kind="constant"), *case.arrays[1:]))
    return case


# ---- arguments of calls ----


def _moved_shape(case: DrawnCase, i: int = 0) -> tuple[int, ...]:
    """Return the shape of array ``i`` of a case with the quantized axis last."""
    shape = case.x.shape[1:] if case.options.stacked else case.arrays[i].shape
    axis = case.axis % len(shape) if -len(shape) <= case.axis < len(shape) else len(shape) - 1
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def _auxiliary(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> DrawnArray:
    """Return the description of an auxiliary array for a call, such as amaxes or random bytes."""
    return DrawnArray(kind, dtype, tuple(shape), seed, View.plain(len(shape)))


def _tensor_amax(p: Program, case: DrawnCase, i: int = 0, name: str = "amax") -> Any:
    """Return the argument tensor_amax for array ``i`` of a fuzz case: None, a number, or a reference to an array."""
    o, r = case.options, case.r
    if o.fault == "negative amax":
        return -1.0
    if o.fault == "amax shape":
        return p.make(name, _auxiliary("amaxes", "float32", (3, 5, 7), o.seed))
    if not o.tensor_amax or r.tensor_scaling == "none":
        return None
    moved = _moved_shape(case, i)
    shape = moved[:1] if r.tensor_scaling == "tensor" else tensor_amax_shape(moved, r)
    if r.tensor_scaling == "tensor" and (o.tensor_amax == "number" or len(moved) < 3):
        return (3.7, 1, 0, 1e-30, 3e38, float("inf"), 2688.0, 0.3, -0.0)[(o.seed + i) % 9]
    return p.make(
        name, _auxiliary("amaxes", "float32", (*shape, 1) if o.tensor_amax == "column" else shape, o.seed + i)
    )


def _block_amax(p: Program, case: DrawnCase, i: int = 0, name: str = "block_amax") -> Any:
    """Return the argument block_amax for array ``i`` of a fuzz case: a reference to an array, or None."""
    o = case.options
    if not (o.block_amax and case.r.static) and o.fault != "block_amax":
        return None
    return p.make(name, _auxiliary("amaxes", "float32", scale_shape(_moved_shape(case, i), case.r), o.seed + 99 + i))


def _rounding_options(p: Program, case: DrawnCase) -> dict[str, Any]:
    """Return the options rounding and seed for the call of a fuzz case, or {} for rounding to nearest."""
    o = case.options
    if o.fault == "seed":
        return {"seed": 5}
    if o.rounding == "nearest":
        return {}
    dtype = {"bytes": "uint8", "numbers": "float32"}.get(o.rounding)
    seed = p.make("random", _auxiliary(o.rounding, dtype, case.x.shape, o.seed + 7)) if dtype else o.seed
    return {"rounding": "stochastic", "seed": seed}


def _codes_options(p: Program, case: DrawnCase) -> dict[str, Any]:
    """Return the options that quantize and its variants share: axis, scale_layout, hadamard, rounding and seed."""
    o = case.options
    layout = "swizzled" if o.fault == "layout" else o.layout  # the fault is an unknown layout
    common = {"axis": case.axis, "scale_layout": None if layout == "linear" else layout, "hadamard": o.hadamard or None}
    return common | _rounding_options(p, case)


def _quantized(p: Program, case: DrawnCase) -> tuple[Ref, Ref]:
    """Make x and quantize it. Return (x, result)."""
    x = p.make("x", case.x)
    options = _codes_options(p, case)
    return x, p.call("q", "fp4kit.quantize", x, R, **options, tensor_amax=_tensor_amax(p, case))


def _decoded(p: Program, case: DrawnCase, q: Any) -> Ref:
    dtype = case.options.decoded
    return p.call("v", "fp4kit.dequantize", q, Dtype(dtype) if dtype else None)


def _call_with_out(p: Program, o: DrawnOptions, expected: Ref, function: str, *arguments: Any, **options: Any) -> None:
    """Make two equal calls that write into one preallocated output, surrounded by guard bytes (arrays.guarded)."""
    if not o.out:
        return
    step = 2 if o.out == "strided" else 1
    host_only = step > 1 and function == "fp4kit.quantize"
    out = p.call("out", "guarded", expected, *((step,) if step > 1 else ()))
    for i in range(2):
        again = p.call(f"again{i}", function, *arguments, **options, out=out["value"], host_only=host_only)
        p.same(again, expected, host_only=host_only)
    p.same(p.call("guards", "touched", out), 0)


def _call_with_copy(p: Program, case: DrawnCase, expected: Ref, function: str, *arguments: Any, **options: Any) -> None:
    """If x is strided, require that a contiguous copy of x gives the same result."""
    if not case.x.view.is_plain:
        copy = p.call("copy", "x.copy", "C")
        p.same(expected, p.call(f"{expected}_copy", function, copy, *arguments, **options))


# ---- matrix products ----


def _matmul(p: Program, product: DrawnProduct) -> None:
    """Multiply two operands, and make calls whose results must agree with the product."""
    a, b = (_operand(p, x, name) for x, name in ((product.a, "a"), (product.b, "b")))
    c = None if product.c is None else p.make("c", product.c)
    options = {"unit": product.unit, "out_dtype": Dtype(product.out_dtype), "alpha": product.alpha}
    d = p.call("d", "fp4kit.matmul", a, b, c=c, **options)
    ndims = product.a.codes.ndim, product.b.codes.ndim
    if product.swapped:
        *lead, row, column = range(max(ndims))
        c_swapped = None if c is None else p.call("c_swapped", "c.transpose", *lead, column, row)
        p.call("t", "fp4kit.matmul", b, a, c=c_swapped, **options)
        p.same(p.call("t_swapped", "t.transpose", *lead, column, row), d)
    if product.a.recipe is None and product.b.recipe is None:
        # the first matrix of a stack, or the first row of a product of two matrices
        is_stack_a, is_stack_b = (ndim > 2 for ndim in ndims)
        a, b = a[0:1] if is_stack_a or not is_stack_b else a, b[0:1] if is_stack_b else b
        first = p.call("first", "fp4kit.matmul", a, b, c=None if c is None else c[0:1], **options)
        p.same(d[0:1], first)


def _operand(p: Program, x: DrawnOperand, name: str) -> Ref:
    """Make an operand of matmul: an array or a Quantized."""
    if x.recipe is None:
        if not x.dtype.startswith("float8"):
            return p.make(name, x.codes)
        return p.call(name, "as_float8", p.make(f"{name}_codes", x.codes), x.dtype)
    codes = p.make(f"{name}_codes", x.codes)
    recipe = p.make(f"{name}_recipe", x.recipe)
    packed = p.call(f"{name}_packed", "fp4kit.pack", codes) if x.recipe.recipe.is_packed else codes
    scales = None if x.scales is None else p.make(f"{name}_scales", x.scales)
    tensor = None if x.tensor_scale is None else p.make(f"{name}_tensor_scale", x.tensor_scale)
    *lead, rows, K = x.codes.shape
    shape = (*lead, K, rows) if x.columns else x.codes.shape
    axis = len(shape) - 1 - x.columns
    target = name if x.layout == "linear" else f"{name}_linear"
    q = p.call(target, "fp4kit.Quantized", packed, scales, tensor, None, shape, Dtype("float32"), axis, recipe)
    return q if x.layout == "linear" else p.call(name, "fp4kit.swizzle", q, x.layout)


# ---- one array ----


def _quantize(p: Program, case: DrawnCase) -> None:
    x = p.make("x", case.x)
    options = _codes_options(p, case)
    options |= {"tensor_amax": _tensor_amax(p, case), "block_amax": _block_amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, R, **options)
    _decoded(p, case, q)
    _call_with_copy(p, case, q, "fp4kit.quantize", R, **options)
    _call_with_out(p, case.options, q, "fp4kit.quantize", x, R, **options)
    _experts(p, case, q, x, options)


def _experts(p: Program, case: DrawnCase, q: Ref, x: Ref, options: dict[str, Any]) -> None:
    """Quantize up to three experts of x separately, each with its own amax."""
    # The case must also round to nearest, and not quantize along the axis of experts.
    amax, ndim = options["tensor_amax"], case.x.ndim
    alone = isinstance(amax, Ref) and case.r.tensor_scaling == "tensor" and case.x.shape[0] > 1 and case.axis % ndim > 0
    if not alone or case.options.rounding != "nearest" or options["block_amax"] is not None:
        return
    for i in range(min(case.x.shape[0], 3)):
        own = options | {"axis": case.axis % ndim - ndim, "tensor_amax": amax[i]}
        single = p.call(f"expert{i}", "fp4kit.quantize", x[i], R, **own)
        p.same([q["packed"][i], q["tensor_scale"][i]], [single["packed"], single["tensor_scale"]])
        if case.r.scale is not None:
            p.same(q["block_scale"][i], single["block_scale"])


def _quantize_both(p: Program, case: DrawnCase) -> None:
    """Quantize along both axes: one call of quantize_both, and two calls of quantize, with equal results."""
    x = p.make("x", case.x)
    options = _codes_options(p, case)
    del options["axis"]
    options["tensor_amax"] = _tensor_amax(p, case) if case.r.tensor_scaling == "tensor" else None
    q = p.call("q", "fp4kit.quantize_both", x, R, **options)
    row = p.call("row", "fp4kit.quantize", x, R, **options | {"hadamard": None})
    if "seed" in options:
        options["seed"] += 1
    p.same(q, [row, p.call("column", "fp4kit.quantize", x, R, **options, axis=-2)])


SCALES = (0.37, 1.0, 0.0, 1e-40, 3e38, float("inf"), 2.0**-12, 1e-6)  # tensor scales to quantize with


def _with_scales(p: Program, case: DrawnCase) -> None:
    """Quantize x as usual, then with the scales of the first result, then with random scales."""
    x, o, moved, r = p.make("x", case.x), case.options, _moved_shape(case), case.r
    options, amax = _codes_options(p, case), _tensor_amax(p, case)
    amaxes = _block_amax(p, case)
    q = p.call("q", "fp4kit.quantize", x, R, **options, tensor_amax=amax, block_amax=amaxes)
    names = ["block_scale"] * (r.scale is not None) + ["tensor_scale"] * (r.tensor_scaling != "none")
    own = {name: q[name] for name in names}
    found = p.call("found", "fp4kit.quantize", x, R, **options, **own)
    reads_amax = r.block_rule is not None and BLOCK_RULES[r.block_rule].reads_amax
    has_others = amaxes is not None or bool(r.search) or r.stochastic == "mslk"
    if gives_back(r, case.x.dtype) and not (has_others and (r.flush or reads_amax)):
        p.same(found["packed"], q["packed"])
    p.same([found[name] for name in own], [q[name] for name in own])
    given: dict[str, Any] = {}
    if "block_scale" in own:
        scales = _auxiliary("bytes", "uint8", padded_shape(scale_shape(moved, r), o.layout), o.seed + 2)
        given["block_scale"] = p.make("scales", scales)
    if "tensor_scale" in own:
        shape = tensor_amax_shape(moved, r)
        whole = SCALES[o.seed % len(SCALES)]
        given["tensor_scale"] = p.make("scale", _auxiliary("amaxes", "float32", shape, o.seed + 3)) if shape else whole
    other = p.call("other", "fp4kit.quantize", x, R, **options, **given)
    _decoded(p, case, other)
    _call_with_out(p, o, other, "fp4kit.quantize", x, R, **options, **given)


def gives_back(r: Recipe, dtype: str) -> bool:
    """Return True if quantizing with the scales of an earlier result must give that result's codes again."""
    return not encodes_by_amax(r) or (dtype != "float32" and r.tensor_rule != "te_primary_weight")


def _decode(p: Program, case: DrawnCase) -> None:
    """Decode random codes under random block scales (if the recipe has any)."""
    o, r, moved = case.options, case.r, _moved_shape(case)
    _, q = _quantized(p, case)
    kind = "bytes" if r.element.bits in (4, 8) else f"codes of {r.element.bits} bits"
    parts: dict[str, Any] = {"packed": p.make("packed", _auxiliary(kind, "uint8", packed_shape(moved, r), o.seed + 1))}
    if r.scale is not None:
        shape = padded_shape(scale_shape(moved, r), o.layout)
        parts["block_scale"] = p.make("scales", _auxiliary("bytes", "uint8", shape, o.seed + 2))
    q = p.call("q2", "replace", q, **parts)
    v = _decoded(p, case, q)
    _call_with_out(p, o, v, "fp4kit.dequantize", q, Dtype(o.decoded) if o.decoded else None)


def _fake_quantize(p: Program, case: DrawnCase) -> None:
    """Fake-quantize x, which must equal dequantize(quantize(x)) for recipes that decode alike in both."""
    x, r = p.make("x", case.x), case.r
    amaxes = {"tensor_amax": _tensor_amax(p, case), "block_amax": _block_amax(p, case)}
    options = {"axis": case.axis, **amaxes, **_rounding_options(p, case)}
    v = p.call("v", "fp4kit.fake_quantize", x, R, **options)
    if r.fake_rule is None and not r.fake_only and faking(r) == r:
        q = p.call("q", "fp4kit.quantize", x, R, **options)
        p.same(v, p.call("decoded", "fp4kit.dequantize", q))


def _requantize(p: Program, case: DrawnCase) -> None:
    target = p.make("target", case.options.target or case.recipe)
    _, q = _quantized(p, case)
    _decoded(p, case, p.call("t", "fp4kit.requantize", q, target)["quantized"])


def _backward(p: Program, case: DrawnCase) -> None:
    """Compute the gradient of fake_quantize. With pass_through, it must equal the incoming gradient."""
    x, o = p.make("x", case.x), case.options
    grad = p.make("grad", replace(case.x, kind="bits", seed=o.seed + 1, dtype=o.decoded or case.x.dtype, kept=None))
    options = {"axis": case.axis, "amax": _tensor_amax(p, _with_one_amax(case)), "pass_through": o.pass_through}
    g = p.call("g", "fp4kit.fake_quantize_backward", grad, x, R, **options)
    if o.pass_through:
        p.same(g, grad)


def _with_one_amax(case: DrawnCase) -> DrawnCase:
    """Return the case with a single amax, not one per expert, because fake_quantize_backward accepts no others."""
    o = case.options
    return replace(case, options=replace(o, tensor_amax=o.tensor_amax and "number"))


def _transpose(p: Program, case: DrawnCase) -> None:
    """Transpose a Quantized twice, and quantize x along the other axis, which must give the transpose."""
    x, o = p.make("x", case.x), case.options
    options = {"scale_layout": o.layout if o.layout != "linear" else None, "tensor_amax": _tensor_amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, R, axis=case.axis, **options)
    t = p.call("t", "fp4kit.transpose", q)
    p.same(p.call("back", "fp4kit.transpose", t), q)
    if case.r.amax_nan != "lanes" and not case.r.four_over_six:
        p.same(t, p.call("other", "fp4kit.quantize", x, R, axis=-3 - case.axis, **options))


def _swizzle(p: Program, case: DrawnCase) -> None:
    """Convert the block scales of a Quantized to the layout ``target_layout``, and back."""
    _, q = _quantized(p, case)
    s = p.call("s", "fp4kit.swizzle", q, case.options.target_layout)
    linear = p.call("linear", "fp4kit.unswizzle", s)
    p.same(linear, p.call("straight", "fp4kit.unswizzle", q))
    p.same(p.call("back", "fp4kit.swizzle", linear, case.options.layout), q)
    p.same(p.call("v", "fp4kit.dequantize", s), p.call("w", "fp4kit.dequantize", q))


def _swizzle_bytes(p: Program, case: DrawnCase) -> None:
    x, layout = p.make("x", case.x), case.options.target_layout
    s = p.call("s", "fp4kit.swizzle", x, layout)
    p.same(p.call("back", "fp4kit.unswizzle", s, layout, case.x.shape), x)


def _pack(p: Program, case: DrawnCase) -> None:
    x = p.make("x", case.x)
    p.same(p.call("codes", "fp4kit.unpack", p.call("packed", "fp4kit.pack", x)), x)


def _amax(p: Program, case: DrawnCase) -> None:
    x = p.make("x", case.x)
    recipe, axis = _reduced(case)
    a = p.call("a", "fp4kit.amax", x, *recipe, axis=axis)
    _call_with_copy(p, case, a, "fp4kit.amax", *recipe, axis=axis)


def _reduced(case: DrawnCase) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a call of amax besides x: (positional arguments after x, argument axis)."""
    if case.options.cuts:
        return (R,), case.axis
    ndim = case.x.ndim - case.options.stacked
    return (), tuple(range(ndim)) if case.options.axes == "all" else case.options.axes


# Limits to pass as the argument ``candidates``, for the three kinds of recipes that _candidates distinguishes.
SOME_CODES, SOME_POWERS, SOME_MULTIPLES = (-5, 3), (-3, 1), (0.5, 1.25, 0.25)


def _search_scales(p: Program, case: DrawnCase) -> None:
    x, o, K = p.make("x", case.x), case.options, _moved_shape(case)[-1]
    options: dict[str, Any] = {
        "axis": case.axis,
        "tensor_amax": _tensor_amax(p, case),
        "candidates": _candidates(case),
        "objective": o.objective if o.objective != "mse" else None,
    }
    if o.columns == "weights":
        options["weights"] = p.make("weights", _auxiliary("weights", "float32", (K,), o.seed + 5))
    if o.columns == "hessian":
        options["hessian"] = p.make("hessian", _auxiliary("hessians", "float32", (K // 16, 16, 16), o.seed + 5))
    found = p.call("found", "fp4kit.search_scales", x, R, **options)
    _call_with_copy(p, case, found, "fp4kit.search_scales", R, **options)
    if not o.columns:
        ones = p.make("ones", _auxiliary("ones", "float32", (K,), 0))
        p.same(found, p.call("weighted", "fp4kit.search_scales", x, R, weights=ones, **options))


def _candidates(case: DrawnCase) -> Any:
    """Return the argument ``candidates`` of search_scales: None, "near", or limits that fit the recipe's search."""
    o, r = case.options, case.r
    if o.candidates == "near" and has_grid(r):
        return None
    if o.candidates != "some":
        return o.candidates or None
    return SOME_MULTIPLES if has_grid(r) else SOME_POWERS if takes_e8m0_amaxes(r) else SOME_CODES


# ---- groups of arrays: the results must equal those of single calls ----


def _members(p: Program, case: DrawnCase, writable: bool = False) -> tuple[Any, list[Ref]]:
    """Make the arrays of a group. Return (argument of a grouped function, its members)."""
    if case.options.stacked:
        x = p.make("x", case.x, writable)
        return x, [x[i] for i in range(case.x.shape[0])]
    xs = [p.make(f"x{i}", a, writable) for i, a in enumerate(case.arrays)]
    return xs, xs


def _per_member(p: Program, case: DrawnCase, count: int, **makers: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the options of a grouped function and of each single call, such as amaxes, made by ``makers``."""
    lists = {name: [make(p, case, i, f"{name}{i}") for i in range(count)] for name, make in makers.items()}
    lists = {name: values for name, values in lists.items() if values and values[0] is not None}
    return [lists, *({name: values[i] for name, values in lists.items()} for i in range(count))]


def _grouped(p: Program, case: DrawnCase) -> None:
    """Quantize or fake-quantize a group of arrays at once, and each array by itself."""
    xs, members = _members(p, case)
    fake = case.operation == "fake_quantize_grouped"
    common = {"axis": case.axis, **_rounding_options(p, case)} if fake else _codes_options(p, case)
    given, *own = _per_member(p, case, len(members), tensor_amax=_tensor_amax, block_amax=_block_amax)
    function = "fp4kit.fake_quantize" if fake else "fp4kit.quantize"
    found = p.call("found", f"{function}_grouped", xs, R, **given, **common)
    calls = enumerate(zip(members, own, strict=True))
    p.same(found, [p.call(f"single{i}", function, x, R, **each, **common) for i, (x, each) in calls])


def _amax_grouped(p: Program, case: DrawnCase) -> None:
    xs, members = _members(p, case)
    recipe, axis = _reduced(case)
    found = p.call("found", "fp4kit.amax_grouped", xs, *recipe, axis=axis)
    p.same(found, [p.call(f"single{i}", "fp4kit.amax", x, *recipe, axis=axis) for i, x in enumerate(members)])


def _backward_grouped(p: Program, case: DrawnCase) -> None:
    xs, members = _members(p, case)
    o = case.options
    grads = [p.make(f"grad{i}", replace(a, kind="bits", seed=o.seed + i, kept=None)) for i, a in enumerate(case.arrays)]
    stack: Any = grads[0] if o.stacked else grads
    given, *own = _per_member(p, _with_one_amax(case), len(members), amax=_tensor_amax)
    common = {"axis": case.axis, "pass_through": o.pass_through}
    found = p.call("found", "fp4kit.fake_quantize_grouped_backward", stack, xs, R, **given, **common)
    singles = [
        p.call(f"single{i}", "fp4kit.fake_quantize_backward", stack[i], x, R, **own[i], **common)
        for i, x in enumerate(members)
    ]
    p.same(found, singles)


def _plan(p: Program, case: DrawnCase) -> None:
    """Make a GroupedPlan and run it twice, the second time after its arrays are overwritten in place."""
    o = case.options
    xs, members = _members(p, case, writable=True)
    options = _codes_options(p, case)
    given, *own = _per_member(p, case, len(members), tensor_amax=_tensor_amax, block_amax=_block_amax)
    p.call("plan", "fp4kit.GroupedPlan", xs, R, **given, **options)
    fake = case.r.fake_only or (o.fake and not o.hadamard and (case.r.fake_rule is None or o.rounding == "nearest"))
    method = "fake_quantize" if fake else "quantize"
    common = {name: value for name, value in options.items() if not fake or name in ("axis", "rounding", "seed")}
    for step in range(2):
        found = p.call(f"found{step}", f"plan.{method}")
        for i, x in enumerate(members):
            p.same(found[i], p.call(f"single{step}{i}", f"fp4kit.{method}", x, R, **common, **own[i]))
        for i, x in enumerate(members if step == 0 else ()):
            a = case.arrays[0 if o.stacked else i]
            other = _auxiliary("ordinary", a.dtype, a.shape[1:] if o.stacked else a.shape, o.seed + 50 + i)
            p.call(f"written{i}", "overwrite", x, p.make(f"y{i}", other), writes=x.name)


# ---- flattened matrices ----


def _partial(p: Program, case: DrawnCase) -> None:
    """Compute amaxes and codes shard by shard, with cuts at arbitrary elements, as quantize does for the whole of x."""
    x, r, shape, o = p.make("x", case.x), case.r, case.x.shape, case.options
    flat = p.call("flat", "x.reshape", -1)
    pieces = list(pairwise([0, *(int(cut * case.x.size) for cut in o.cuts), case.x.size]))
    parts = [p.call(f"part{i}", "fp4kit.partial_amax", flat[a:b], shape, a, R) for i, (a, b) in enumerate(pieces)]
    whole = p.call("whole", "largest", parts)
    p.same(whole, p.call("amax_of_x", "fp4kit.amax", x, R))
    given = _tensor_amax(p, case, name="given")
    q = p.call("q", "fp4kit.quantize", x, R, tensor_amax=given)
    # The tensor scale may come from an amax without infinities, while the block amaxes contain them.
    by_finite = r.amax_nan == "lanes" and r.tensor_scaling == "tensor"
    if given is None and by_finite and np.isinf(case.x.values().astype(np.float32)).any():
        given = q["tensor_amax"]
    before = _auxiliary("bytes", "uint8", packed_shape(shape, r), o.seed + 3)
    out, unchanged = p.make("out", before, writable=True), p.make("before", before)
    cast = pieces[: len(pieces) - (len(pieces) > 1 and o.pass_through)]
    for i, (a, b) in enumerate(cast):
        arguments = (flat[a:b], out, whole, shape, a, R)
        p.call(f"done{i}", "fp4kit.partial_cast", *arguments, tensor_amax=given, writes="out")
    p.same(out, p.call("wanted", "with_codes", unchanged, q["packed"], cast, r.element.packing.codes))


def _master_weights(p: Program, case: DrawnCase) -> None:
    """Cast several weights with cast_master_weights in one process, and quantize each, with equal results."""
    columnwise = case.options.columnwise and case.r.block_rows == case.r.block_size
    shards, singles = [], []
    for i, a in enumerate(case.arrays):
        x = p.make(f"x{i}", a)
        flat = p.call(f"flat{i}", f"x{i}.reshape", -1)
        shards.append(p.call(f"shard{i}", "fp4kit.Shard", flat, a.shape))
        q = p.call(f"q{i}", "fp4kit.quantize", x, R)
        singles.append([q, p.call(f"t{i}", "fp4kit.transpose", q)] if columnwise else q)
    alone = p.call("alone", "SingleProcess")
    p.same(p.call("cast", "fp4kit.cast_master_weights", shards, alone, R, columnwise=columnwise or None), singles)


_PROGRAMS: dict[str, Callable[[Program, DrawnCase], None]] = {
    "quantize": _quantize,
    "quantize_both": _quantize_both,
    "with_scales": _with_scales,
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
    "amax": _amax,
    "partial": _partial,
    "master_weights": _master_weights,
    "search_scales": _search_scales,
}
