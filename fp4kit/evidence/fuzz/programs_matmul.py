"""Build the program of a matrix product (operation "matmul"): the calls to make, and which results must be equal.
`p` is the program, to which statements are appended.
"""

from __future__ import annotations

from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.products import DrawnOperand, DrawnProduct
from fp4kit.evidence.fuzz.program_ir import Dtype, Program, Ref


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
