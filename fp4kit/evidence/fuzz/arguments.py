"""Build arguments for the calls in fuzz programs: amaxes, options, and preallocated outputs.
A case describes one random test, and a program is the list of calls that the test makes. A fault is a deliberate
mistake in a case, so that fp4kit must reject its call. The functions here also apply the fault of a case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOptions
from fp4kit.evidence.fuzz.program_ir import Dtype, Program, Ref
from fp4kit.quantized.part_shapes import scale_shape, tensor_amax_shape


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
