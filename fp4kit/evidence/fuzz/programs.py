"""Build the program of each operation: the calls to make, and which of their results must be equal.
`p` is the program, to which statements are appended, and `case` describes the arrays (x is the first), the recipe and
the options. A program is run later, on one or two engines; a result that differs between engines is a failure, too.

A Same statement requires that two results are equal. It must hold on every engine, so it checks an engine even if that
engine runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.call.search_scales import has_grid
from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOperand, DrawnOptions, DrawnProduct
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES
from fp4kit.recipes.schema import faking
from fp4kit.reference.tensor_rules import encodes_by_amax


@dataclass(frozen=True, repr=False)
class Ref:
    """A reference to the result of an earlier statement, or to a part of the result.

    Attributes:
        name: the name of the result.
        path: how to get the part: attribute names, indices and slices, applied in order. () stands for the whole.
    """

    name: str
    path: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> Ref:
        """Return a reference to a part of this result."""
        return Ref(self.name, (*self.path, part))

    def __repr__(self) -> str:
        """Return the reference as Python source, such as q.packed[0]."""
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    """Return Python source that takes a part of a value, to append to the value's name."""
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """A dtype that is an argument of a call, given by its name in arrays.DTYPES."""

    name: str


class Make(NamedTuple):
    """The statement target = value, where the value is an array or a recipe."""

    target: str
    value: DrawnArray | Variant


class ProgramCall(NamedTuple):
    """The statement target = function(*arguments, **options).

    Attributes:
        target: name of the result.
        function: "fp4kit.NAME", a name in check.FUNCTIONS, or "RESULT.METHOD" for a method of an earlier result.
        arguments: positional arguments; a Ref stands for an earlier result.
        options: keyword arguments.
        host_only: True if the call is made in the specification only, because fp4kit rejects it for CuPy arrays.
        writes: names of arrays that the call may change.
    """

    target: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    host_only: bool = False
    writes: tuple[str, ...] = ()


class Same(NamedTuple):
    """The statement that two results, or a result and a number, must agree bit for bit.

    If ``host_only`` is True, only the run of the program on the specification checks the statement.
    """

    a: Any
    b: Any
    host_only: bool = False


Statement = Make | ProgramCall | Same


class Program:
    """The statements of a fuzz program, collected in order."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def make(self, target: str, value: DrawnArray | Variant) -> Ref:
        """Append the statement target = value. Return a reference to the value."""
        self.statements.append(Make(target, value))
        return Ref(target)

    def call(self, target: str, function: str, *arguments: Any, **options: Any) -> Ref:
        """Append the statement target = function(*arguments, **options)."""
        given = {name: value for name, value in options.items() if value is not None}
        self.statements.append(ProgramCall(target, function, arguments, given))
        return Ref(target)

    def mark(self, **fields: Any) -> None:
        """Replace fields of the last statement by the given values, such as host_only=True."""
        self.statements[-1] = self.statements[-1]._replace(**fields)

    def same(self, a: Any, b: Any) -> None:
        """Append a Same statement: a and b (references, numbers or lists of them) must agree bit for bit."""
        self.statements.append(Same(a, b))


def with_fault(case: DrawnCase) -> DrawnCase:
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


def moved_shape(case: DrawnCase, x: DrawnArray) -> tuple[int, ...]:
    """Return the shape of x with the quantized axis last."""
    shape = x.shape[1:] if case.options.stacked else x.shape
    axis = case.axis % len(shape) if -len(shape) <= case.axis < len(shape) else len(shape) - 1
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def auxiliary(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> DrawnArray:
    """Return the description of an auxiliary array for a call, such as amaxes or random bytes."""
    return DrawnArray(kind, dtype, tuple(shape), seed, View.plain(len(shape)))


def tensor_amax(p: Program, case: DrawnCase, i: int = 0, name: str = "amax") -> Any:
    """Return the argument tensor_amax for array ``i`` of a fuzz case: None, a number, or a reference to an array."""
    o, r = case.options, case.r
    if o.fault == "negative amax":
        return -1.0
    if o.fault == "amax shape":
        return p.make(name, auxiliary("amaxes", "float32", (3, 5, 7), o.seed))
    if not o.tensor_amax or r.tensor_scaling == "none":
        return None
    moved = moved_shape(case, case.arrays[0 if o.stacked else i])
    if r.tensor_scaling == "tensor":
        if o.tensor_amax == "number" or len(moved) < 3:
            return (3.7, 1, 0, 1e-30, 3e38, float("inf"), 2688.0, 0.3, -0.0)[(o.seed + i) % 9]
        shape = moved[:1]
    else:
        shape = tensor_amax_shape(moved, r)
    return p.make(name, auxiliary("amaxes", "float32", (*shape, 1) if o.tensor_amax == "column" else shape, o.seed + i))


def block_amax(p: Program, case: DrawnCase, i: int = 0, name: str = "block_amax") -> Any:
    """Return the argument block_amax for array ``i`` of a fuzz case: a reference to an array, or None."""
    o = case.options
    if not (o.block_amax and case.r.static) and o.fault != "block_amax":
        return None
    moved = moved_shape(case, case.arrays[0 if o.stacked else i])
    return p.make(name, auxiliary("amaxes", "float32", scale_shape(moved, case.r), o.seed + 99 + i))


def rounding_options(p: Program, case: DrawnCase) -> dict[str, Any]:
    """Return the options rounding and seed for the call of a fuzz case, or {} for rounding to nearest."""
    o = case.options
    if o.fault == "seed":
        return {"seed": 5}
    if o.rounding == "nearest":
        return {}
    if o.rounding == "bytes":
        return {
            "rounding": "stochastic",
            "seed": p.make("random", auxiliary("bytes", "uint8", case.x.shape, o.seed + 7)),
        }
    return {"rounding": "stochastic", "seed": o.seed}


def codes_options(p: Program, case: DrawnCase) -> dict[str, Any]:
    """Return the options that quantize and its variants share: axis, scale_layout, hadamard, rounding and seed."""
    # If the case has the fault "layout", the layout is an unknown one, which the call must reject.
    o = case.options
    layout = "swizzled" if o.fault == "layout" else o.layout
    found = {"axis": case.axis, "scale_layout": layout if layout != "linear" else None, "hadamard": o.hadamard or None}
    return {name: value for name, value in found.items() if value is not None} | rounding_options(p, case)


def decode_dtype(o: DrawnOptions) -> Dtype | None:
    """Return the argument dtype for dequantize that the options ``o`` of a case name."""
    return Dtype(o.decoded) if o.decoded else None


def call_with_out(p: Program, o: DrawnOptions, expected: Ref, function: str, *arguments: Any, **options: Any) -> None:
    """Append two equal calls that write into one preallocated output, surrounded by guard bytes (arrays.guarded)."""
    step = 2 if o.out == "strided" else 1
    host_only = step > 1 and function == "fp4kit.quantize"
    out = p.call("out", "guarded", expected, *((step,) if step > 1 else ()))
    for i in range(2):
        p.call(f"again{i}", function, *arguments, **options, out=out["value"])
        p.mark(host_only=host_only)
        p.same(Ref(f"again{i}"), expected)
        p.mark(host_only=host_only)
    p.same(p.call("guards", "touched", out), 0)


def matmul(p: Program, case: DrawnCase) -> None:
    """Append a call that multiplies two operands, and calls whose results must agree with its result."""
    product = case.product
    assert product is not None
    a, b = (_operand(p, x, name) for x, name in ((product.a, "a"), (product.b, "b")))
    c = None if product.c is None else p.make("c", product.c)
    options = {"unit": product.unit, "out_dtype": Dtype(product.out_dtype), "alpha": product.alpha}
    d = p.call("d", "fp4kit.matmul", a, b, c=c, **options)
    if product.swapped:
        *lead, row, column = range(max(product.a.codes.ndim, product.b.codes.ndim))
        c_swapped = None if c is None else p.call("c_swapped", "c.transpose", *lead, column, row)
        p.call("t", "fp4kit.matmul", b, a, c=c_swapped, **options)
        p.same(p.call("t_swapped", "t.transpose", *lead, column, row), d)
    if product.a.recipe is None and product.b.recipe is None:
        a, b = _first(product, a, b)
        c = None if c is None else c[0:1]
        p.same(d[0:1], p.call("first", "fp4kit.matmul", a, b, c=c, **options))


def _first(product: DrawnProduct, a: Ref, b: Ref) -> tuple[Ref, Ref]:
    """Return references to the parts of operands `a` and `b` that give one matrix or one row of their product."""
    is_stack_a, is_stack_b = (x.codes.ndim > 2 for x in (product.a, product.b))
    return a[0:1] if is_stack_a or not is_stack_b else a, b[0:1] if is_stack_b else b


def _operand(p: Program, x: DrawnOperand, name: str) -> Ref:
    """Append the statements that make an operand of matmul: an array or a Quantized."""
    if x.recipe is None and not x.dtype.startswith("float8"):
        return p.make(name, x.codes)
    codes = p.make(f"{name}_codes", x.codes)
    if x.recipe is None:
        return p.call(name, "as_float8", codes, x.dtype)
    r, recipe = x.recipe.recipe, p.make(f"{name}_recipe", x.recipe)
    packed = p.call(f"{name}_packed", "fp4kit.pack", codes) if r.is_packed else codes
    scales = None if x.scales is None else p.make(f"{name}_scales", x.scales)
    tensor = None if x.tensor_scale is None else p.make(f"{name}_tensor_scale", x.tensor_scale)
    *lead, rows, K = x.codes.shape
    shape = (*lead, K, rows) if x.columns else x.codes.shape
    axis = len(shape) - 1 - x.columns
    target = name if x.layout == "linear" else f"{name}_linear"
    q = p.call(target, "fp4kit.Quantized", packed, scales, tensor, None, shape, Dtype("float32"), axis, recipe)
    return q if x.layout == "linear" else p.call(name, "fp4kit.swizzle", q, x.layout)


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
    grad = p.make("grad", replace(case.x, kind="bits", seed=o.seed + 1, dtype=o.decoded or case.x.dtype, kept=None))
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
    grads = [p.make(f"grad{i}", replace(a, kind="bits", seed=o.seed + i, kept=None)) for i, a in enumerate(case.arrays)]
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
