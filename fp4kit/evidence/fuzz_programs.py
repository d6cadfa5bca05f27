"""What a case calls, as a program: recipes, arrays, calls, and statements that two results are the same.

A program is data. It is run on one engine beside another (fuzz_check), and printed as Python (fuzz_print), so that what is printed
is what ran. The statements of sameness hold on every engine: they need no second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fp4kit.evidence.fuzz_arrays import Array, View
from fp4kit.evidence.fuzz_cases import Case, Options
from fp4kit.evidence.fuzz_recipes import Variant
from fp4kit.layouts import padded_shape
from fp4kit.ops.check import tensor_amax_shape
from fp4kit.quantized import packed_shape, scale_shape


class Ref(NamedTuple):
    """A result by name, or a part of it: attributes, indices and slices."""

    name: str
    path: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> Any:
        """ref["packed"] and ref[0] of a reference are references to that part."""
        return Ref(self.name, (*self.path, part))

    def __str__(self) -> str:
        """As Python has it."""
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """A dtype by name."""

    name: str


class Make(NamedTuple):
    """target = an Array or a recipe."""

    target: str
    value: Array | Variant


class Call(NamedTuple):
    """target = function(*arguments, **options). function: fp4kit.name, name of fuzz_arrays, or result.method.

    host_only: CuPy arrays are refused by design. writes: names of arrays that may change.
    """

    target: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    host_only: bool = False
    writes: tuple[str, ...] = ()


class Same(NamedTuple):
    """Two results, or a result and a number, agree in every bit."""

    a: Any
    b: Any
    host_only: bool = False


Statement = Make | Call | Same


class Program:
    """Statements, in order."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def make(self, target: str, value: Array | Variant) -> Ref:
        """target = value."""
        self.statements.append(Make(target, value))
        return Ref(target)

    def call(self, target: str, function: str, *arguments: Any, **options: Any) -> Ref:
        """target = function(...), without the options that are None."""
        given = {name: value for name, value in options.items() if value is not None}
        self.statements.append(Call(target, function, arguments, given))
        return Ref(target)

    def mark(self, **fields: Any) -> None:
        """Set fields of the latest statement."""
        self.statements[-1] = self.statements[-1]._replace(**fields)

    def same(self, a: Any, b: Any) -> None:
        """a and b agree."""
        self.statements.append(Same(a, b))


def program(case: Case) -> list[Statement]:
    """The statements of a case."""
    p = Program()
    p.make("r", case.recipe)
    _PROGRAMS[case.operation](p, _faulty(case))
    return p.statements


def _faulty(case: Case) -> Case:
    """The case with its fault, where that is one of an array."""
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


# ---- arguments ----------------------------------------------------------------------------------------------------------


def _moved(case: Case, x: Array) -> tuple[int, ...]:
    """Shape with the quantized axis last; of a member of a stack."""
    shape = x.shape[1:] if case.options.stacked else x.shape
    axis = case.axis % len(shape) if -len(shape) <= case.axis < len(shape) else len(shape) - 1
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def _auxiliary(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    return Array(kind, dtype, tuple(shape), seed, View.plain(len(shape)))


def _amax(p: Program, case: Case, i: int = 0, name: str = "amax") -> Any:
    """tensor_amax of array i: None, a number or an array."""
    o, r = case.options, case.r
    if o.fault == "negative amax":
        return -1.0
    if o.fault == "amax shape":
        return p.make(name, _auxiliary("amaxes", "float32", (3, 5, 7), o.seed))
    if not o.tensor_amax or r.tensor_scaling == "none":
        return None
    moved = _moved(case, case.arrays[0 if o.stacked else i])
    if r.tensor_scaling == "tensor":
        if o.tensor_amax == "number" or len(moved) < 3:
            return (3.7, 1, 0, 1e-30, 3e38, float("inf"), 2688.0, 0.3)[(o.seed + i) % 8]
        return p.make(name, _auxiliary("amaxes", "float32", moved[:1], o.seed + i))
    return p.make(name, _auxiliary("amaxes", "float32", tensor_amax_shape(moved, r), o.seed + i))


def _block_amax(p: Program, case: Case, i: int = 0, name: str = "block_amax") -> Any:
    o = case.options
    if not (o.block_amax and case.r.static) and o.fault != "block_amax":
        return None
    moved = _moved(case, case.arrays[0 if o.stacked else i])
    return p.make(name, _auxiliary("amaxes", "float32", scale_shape(moved, case.r), o.seed + 99 + i))


def _random(p: Program, case: Case) -> dict[str, Any]:
    o = case.options
    if o.fault == "seed":
        return {"seed": 5}
    if o.rounding == "nearest":
        return {}
    if o.rounding == "bytes":
        return {"rounding": "stochastic", "seed": p.make("random", _auxiliary("bytes", "uint8", case.x.shape, o.seed + 7))}
    return {"rounding": "stochastic", "seed": o.seed}


def _codes_options(p: Program, case: Case) -> dict[str, Any]:
    """Options that quantize and its kin share, but for the amaxes."""
    o = case.options
    layout = "swizzled" if o.fault == "layout" else o.layout
    found = {"axis": case.axis, "scale_layout": layout if layout != "linear" else None, "hadamard": o.hadamard or None}
    return {name: value for name, value in found.items() if value is not None} | _random(p, case)


def _decoded(o: Options) -> Dtype | None:
    return Dtype(o.decoded) if o.decoded else None


# ---- programs -----------------------------------------------------------------------------------------------------------


def _quantize(p: Program, case: Case) -> None:
    x = p.make("x", case.x)
    options = _codes_options(p, case) | {"tensor_amax": _amax(p, case), "block_amax": _block_amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **options)
    p.call("v", "fp4kit.dequantize", q, _decoded(case.options))
    if not case.x.view.is_plain:
        copy = p.call("copy", "x.copy", "C")
        p.same(q, p.call("q_copy", "fp4kit.quantize", copy, Ref("r"), **options))
    if case.options.out:
        _into(p, case.options, q, "fp4kit.quantize", x, Ref("r"), **options)


def _into(p: Program, o: Options, expected: Ref, function: str, *arguments: Any, **options: Any) -> None:
    """The same call with guarded outputs, twice."""
    step = 2 if o.out == "strided" else 1
    host_only = step > 1 and function == "fp4kit.quantize"
    out = p.call("out", "guarded", expected, *((step,) if step > 1 else ()))
    for i in range(2):
        p.call(f"again{i}", function, *arguments, **options, out=out["value"])
        p.mark(host_only=host_only)
        p.same(Ref(f"again{i}"), expected)
        p.mark(host_only=host_only)
    p.same(p.call("guards", "touched", out), 0)


def _quantize_both(p: Program, case: Case) -> None:
    x = p.make("x", case.x)
    options = _codes_options(p, case)
    del options["axis"]
    amax = _amax(p, case) if case.r.tensor_scaling == "tensor" else None
    q = p.call("q", "fp4kit.quantize_both", x, Ref("r"), tensor_amax=amax, **options)
    hadamard = options.pop("hadamard", None)
    row = p.call("row", "fp4kit.quantize", x, Ref("r"), tensor_amax=amax, **options)
    if "seed" in options:
        options |= {"seed": options["seed"] + 1}
    options |= {"axis": -2, "hadamard": hadamard, "tensor_amax": amax}
    column = p.call("column", "fp4kit.quantize", x, Ref("r"), **options)
    p.same(q, [row, column])


def _decode(p: Program, case: Case) -> None:
    """Any codes under any scales, padding included."""
    x, o = p.make("x", case.x), case.options
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **_codes_options(p, case), tensor_amax=_amax(p, case))
    moved, r = _moved(case, case.x), case.r
    kind = "codes of 6 bits" if r.element.bits == 6 else "bytes"
    parts: dict[str, Any] = {"packed": p.make("packed", _auxiliary(kind, "uint8", packed_shape(moved, r), o.seed + 1))}
    if r.scale is not None:
        shape = padded_shape(scale_shape(moved, r), o.layout)
        parts["block_scale"] = p.make("scales", _auxiliary("bytes", "uint8", shape, o.seed + 2))
    q = p.call("q2", "replace", q, **parts)
    v = p.call("v", "fp4kit.dequantize", q, _decoded(o))
    if o.out:
        _into(p, o, v, "fp4kit.dequantize", q, _decoded(o))


def _fake_quantize(p: Program, case: Case) -> None:
    x, r = p.make("x", case.x), case.r
    options = {"axis": case.axis, "tensor_amax": _amax(p, case), "block_amax": _block_amax(p, case), **_random(p, case)}
    v = p.call("v", "fp4kit.fake_quantize", x, Ref("r"), **options)
    if r.fake_rule is None and not r.fake_only:
        q = p.call("q", "fp4kit.quantize", x, Ref("r"), **options)
        p.same(v, p.call("decoded", "fp4kit.dequantize", q))


def _members(p: Program, case: Case) -> tuple[Any, list[Ref]]:
    """The argument xs, and its members."""
    if case.options.stacked:
        x = p.make("x", case.x)
        return x, [x[i] for i in range(case.x.shape[0])]
    xs = [p.make(f"x{i}", a) for i, a in enumerate(case.arrays)]
    return xs, xs


def _per_member(p: Program, case: Case, make: Callable[..., Any], name: str, count: int) -> list[Any] | None:
    found = [make(p, case, i, f"{name}{i}") for i in range(count)]
    return None if not found or found[0] is None else found


def _grouped(p: Program, case: Case) -> None:
    xs, members = _members(p, case)
    fake = case.operation == "fake_quantize_grouped"
    options = {"axis": case.axis, **_random(p, case)} if fake else _codes_options(p, case)
    amaxes = _per_member(p, case, _amax, "amax", len(members))
    blocks = _per_member(p, case, _block_amax, "block_amax", len(members))
    function = "fp4kit.fake_quantize" if fake else "fp4kit.quantize"
    found = p.call("found", f"{function}_grouped", xs, Ref("r"), tensor_amax=amaxes, block_amax=blocks, **options)
    singles = [
        p.call(f"single{i}", function, x, Ref("r"), tensor_amax=_at(amaxes, i), block_amax=_at(blocks, i), **options)
        for i, x in enumerate(members)
    ]
    p.same(found, singles)


def _at(values: list[Any] | None, i: int) -> Any:
    return None if values is None else values[i]


def _amax_grouped(p: Program, case: Case) -> None:
    xs, members = _members(p, case)
    recipe, axis = _reduced(case)
    found = p.call("found", "fp4kit.amax_grouped", xs, *recipe, axis=axis)
    p.same(found, [p.call(f"single{i}", "fp4kit.amax", x, *recipe, axis=axis) for i, x in enumerate(members)])


def _reduced(case: Case) -> tuple[tuple[Any, ...], Any]:
    """The recipe and the axis of amax: either may be left out."""
    if case.options.cuts:
        return (Ref("r"),), case.axis
    ndim = case.x.ndim - case.options.stacked
    return (), tuple(range(ndim)) if case.options.axes == "all" else case.options.axes


def _plan(p: Program, case: Case) -> None:
    """A plan twice, with other values in between."""
    o = case.options
    xs, members = _members(p, case)
    options = _codes_options(p, case)
    amaxes = _per_member(p, case, _amax, "amax", len(members))
    blocks = _per_member(p, case, _block_amax, "block_amax", len(members))
    p.call("plan", "fp4kit.GroupedPlan", xs, Ref("r"), tensor_amax=amaxes, block_amax=blocks, **options)
    fake = case.r.fake_only or (o.fake and not o.hadamard and (case.r.fake_rule is None or o.rounding == "nearest"))
    method = "fake_quantize" if fake else "quantize"
    for step in range(2):
        found = p.call(f"found{step}", f"plan.{method}")
        given = {"hadamard": options.get("hadamard"), "scale_layout": options.get("scale_layout")} if method == "quantize" else {}
        given |= {name: options.get(name) for name in ("axis", "rounding", "seed")}
        for i, x in enumerate(members):
            single = p.call(f"single{step}{i}", f"fp4kit.{method}", x, Ref("r"), **given, **_amaxes_at(amaxes, blocks, i))
            p.same(found[i], single)
        if step == 0:
            for i, x in enumerate(members):
                shape = case.x.shape[1:] if o.stacked else case.arrays[i].shape
                other = p.make(f"y{i}", _auxiliary("ordinary", case.arrays[0 if o.stacked else i].dtype, shape, o.seed + 50 + i))
                p.call(f"written{i}", "overwrite", x, other)
                p.mark(writes=(x.name,))


def _amaxes_at(amaxes: list[Any] | None, blocks: list[Any] | None, i: int) -> dict[str, Any]:
    return {"tensor_amax": _at(amaxes, i), "block_amax": _at(blocks, i)}


def _requantize(p: Program, case: Case) -> None:
    x, o = p.make("x", case.x), case.options
    target = p.make("target", o.target or case.recipe)
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **_codes_options(p, case), tensor_amax=_amax(p, case))
    t = p.call("t", "fp4kit.requantize", q, target)
    p.call("v", "fp4kit.dequantize", t["quantized"], _decoded(o))


def _backward(p: Program, case: Case) -> None:
    x, o = p.make("x", case.x), case.options
    grad = p.make("grad", replace(case.x, kind="bits", seed=o.seed + 1, dtype=o.decoded or case.x.dtype, bits=b""))
    one = replace(case, options=replace(o, tensor_amax=o.tensor_amax and "number"))  # not one per expert
    options = {"axis": case.axis, "amax": _amax(p, one), "pass_through": o.pass_through}
    g = p.call("g", "fp4kit.fake_quantize_backward", grad, x, Ref("r"), **options)
    if o.pass_through:
        p.same(g, grad)


def _transpose(p: Program, case: Case) -> None:
    """Of rows and columns in their own arrays: elements of a NaN lane, and errors that 4over6 sums, follow the direction."""
    x, o = p.make("x", case.x), case.options
    options = {"scale_layout": o.layout if o.layout != "linear" else None, "tensor_amax": _amax(p, case)}
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), axis=case.axis, **options)
    t = p.call("t", "fp4kit.transpose", q)
    p.same(p.call("back", "fp4kit.transpose", t), q)
    if case.r.amax_nan != "lanes" and not case.r.four_over_six:
        p.same(t, p.call("other", "fp4kit.quantize", x, Ref("r"), axis=-3 - case.axis, **options))


def _swizzle(p: Program, case: Case) -> None:
    x, o = p.make("x", case.x), case.options
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), **_codes_options(p, case), tensor_amax=_amax(p, case))
    s = p.call("s", "fp4kit.swizzle", q, o.target_layout)
    linear = p.call("linear", "fp4kit.unswizzle", s)
    p.same(linear, p.call("straight", "fp4kit.unswizzle", q))
    p.same(p.call("back", "fp4kit.swizzle", linear, o.layout), q)
    p.same(p.call("v", "fp4kit.dequantize", s), p.call("w", "fp4kit.dequantize", q))


def _swizzle_bytes(p: Program, case: Case) -> None:
    x, layout = p.make("x", case.x), case.options.target_layout
    s = p.call("s", "fp4kit.swizzle", x, layout)
    p.same(p.call("back", "fp4kit.unswizzle", s, layout, case.x.shape), x)


def _pack(p: Program, case: Case) -> None:
    x = p.make("x", case.x)
    packed = p.call("packed", "fp4kit.pack", x)
    p.same(p.call("codes", "fp4kit.unpack", packed), x)


def _amax_program(p: Program, case: Case) -> None:
    x = p.make("x", case.x)
    recipe, axis = _reduced(case)
    a = p.call("a", "fp4kit.amax", x, *recipe, axis=axis)
    if not case.x.view.is_plain:
        p.same(a, p.call("a_copy", "fp4kit.amax", p.call("copy", "x.copy", "C"), *recipe, axis=axis))


def _pieces(case: Case) -> list[tuple[int, int]]:
    ends = [0, *(int(cut * case.x.size) for cut in case.options.cuts), case.x.size]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _partial(p: Program, case: Case) -> None:
    """Shards of any cuts: their amaxes together, and all codes but those of one shard, which must stay as they were."""
    x, r, shape = p.make("x", case.x), case.r, case.x.shape
    flat = p.call("flat", "x.reshape", -1)
    pieces = _pieces(case)
    parts = [p.call(f"part{i}", "fp4kit.partial_amax", flat[a:b], shape, a, Ref("r")) for i, (a, b) in enumerate(pieces)]
    whole = p.call("whole", "largest", parts)
    p.same(whole, p.call("amax_of_x", "fp4kit.amax", x, Ref("r")))
    amax = _amax(p, case, name="given")
    before = _auxiliary("bytes", "uint8", packed_shape(shape, r), case.options.seed + 3)
    out, kept = p.make("out", before), p.make("before", before)
    done = pieces[: len(pieces) - (len(pieces) > 1 and case.options.pass_through)]
    for i, (a, b) in enumerate(done):
        p.call(f"done{i}", "fp4kit.partial_cast", flat[a:b], out, whole, shape, a, Ref("r"), tensor_amax=amax)
        p.mark(writes=("out",))
    q = p.call("q", "fp4kit.quantize", x, Ref("r"), tensor_amax=amax)
    p.same(out, p.call("wanted", "with_codes", kept, q["packed"], done, 2 if r.is_packed else 1))


def _master_weights(p: Program, case: Case) -> None:
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


_PROGRAMS: dict[str, Callable[[Program, Case], None]] = {
    "quantize": _quantize,
    "quantize_both": _quantize_both,
    "decode": _decode,
    "fake_quantize": _fake_quantize,
    "quantize_grouped": _grouped,
    "fake_quantize_grouped": _grouped,
    "amax_grouped": _amax_grouped,
    "plan": _plan,
    "requantize": _requantize,
    "backward": _backward,
    "transpose": _transpose,
    "swizzle": _swizzle,
    "swizzle_bytes": _swizzle_bytes,
    "pack": _pack,
    "amax": _amax_program,
    "partial": _partial,
    "master_weights": _master_weights,
}

