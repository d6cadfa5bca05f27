"""Implement fp4kit.matmul: the product of two quantized arrays, with the sums of a matrix unit or of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log10, nan, prod
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import a_type, as_entries, explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import check_one_device, import_arrays, to_host
from fp4kit.arrays.returns import first_array, returns_in_library
from fp4kit.call.inputs import AbstractArray
from fp4kit.call.linear import LinearSettings, check_product, linear_settings
from fp4kit.call.matmul import (
    GROUPED,
    check_axis,
    decoding_of,
    empty_result,
    first_sums,
    is_single,
    list_call,
    matmul_call,
    quantized_operand,
    rows_call,
    scale_decoding_of,
)
from fp4kit.display import Panel, Shown
from fp4kit.layouts import unpack
from fp4kit.ops.engines import convert_and_call, run, with_threads
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.ops.transforms import unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of, on_host
from fp4kit.recipes import Recipe
from fp4kit.reference.matmul import rounded
from fp4kit.units import Unit, unit_of

# For the unit "dequantized": if the decoded values of both operands take more bytes than this, the operands are decoded
# in panels, which are some rows at a time.
MAX_DECODED_BYTES = 64 << 20
PANEL_ELEMENTS = 1 << 23  # elements of an operand that are decoded at once: 16 MiB of bfloat16
PANEL_ROWS = 2048  # so that the product of two panels has at most 16 MiB of float32


@with_threads
def matmul(
    a: Any,
    b: Any,
    *,
    unit: str | Unit | None = None,
    out_dtype: Any = None,
    alpha: float | tuple[Any, Any] | None = None,
    c: Any = None,
    threads: int | None = None,
) -> Any:
    """Return `a @ b.T` of two quantized arrays, bit for bit as a matrix unit computes it: D = alpha * (C + A B^T).

        D[..., m, n] = alpha * (c[..., m, n] + sum over k of a[..., m, k] * b[..., n, k])

    A matrix unit adds the products in steps along K, and each step keeps a limited number of bits. `unit` names the
    hardware whose result is reproduced bit for bit, on any machine. fp4kit.units() lists the units and says which of
    them have been compared with hardware.

    Args:
        a: the operand A. Either a Quantized with float elements, whose quantized axis is K and one of the last two
            axes: (..., M, K) for axis=-1, (..., K, M) for axis=-2. Or an array (..., M, K) of bfloat16, float16,
            float32 (which units multiply as TF32, without the low 13 bits), int8, uint8, or a float8, float6 or float4
            dtype of ml_dtypes; or a Sparse. Axes before the last two are a stack of matrices. For the engines "mlx-cpu"
            and "ggml-...", A is an unquantized array.
        b: the operand B, as a, with N in place of M. It is one matrix, or a stack like that of a.
        unit: a Unit or its id. None means "sm100", and is refused for float32 arrays, because units cut them to TF32.
            "sm100" (Blackwell), "sm90" (Hopper), "sm89" (Ada), "sm80" (Ampere), "sm75" (Turing),
            "sm70" (Volta) and "cdna3" (MI300) add as that hardware does, and "sm90-mma" and "sm100-mma" as its older
            instruction mma.sync does for FP8. "sm90-mma-f16" and other units "...-f16" keep sums in float16. Some units
            add in a stated order instead:

            - "exact": the exact sum, rounded once to float32.
            - "float64": sums in float64, k ascending, each sum rounded; the result is then rounded to float32.
            - "float32-blocks": per block, blocks ascending, c += (scale_a * scale_b) * (exact sum of the block's
              products), each product and each sum rounded to float32, as Transformer Engine's reference adds NVFP4.
              Both operands need E2M1 elements with blocks of one size, a multiple of 16 up to 512.
            - "dequantized": both operands are decoded to bfloat16, tensor scales included. Then products and sums are
              computed in float32, k ascending, each of them rounded.
            - "mlx-cpu": as mx.quantized_matmul of MLX does on an x86-64 CPU. A is float32, float16 or bfloat16; B is
              NVFP4, MXFP4 or MXFP8 (E4M3). Every product and sum is rounded to the dtype of A: k ascending within a
              block of B, the sum of a block times its scale, and blocks ascending.
            - "ggml-avx2": as llama.cpp does on a CPU with AVX2 (vec_dot). A is float32, and is quantized to Q8_0: int8
              codes with a float16 scale of amax / 127 per 32 elements. B is MXFP4, or NVFP4 with K a multiple of 64.
              Sums of 4 products are exact, and are added to 8 lanes by fused multiply-adds.
            - "ggml-avx2-repacked": as llama.cpp does for MXFP4 weights that it repacked when it loaded them, as it does
              by default if N is a multiple of 8. The exact sums of blocks are added by fused multiply-adds. A is as
              for "ggml-avx2".
        out_dtype: float32, float16 or bfloat16; int32 for operands of integers. None means float32 or int32.
        alpha: a number by which the sums are multiplied. Or a tuple of two float32 arrays, (M,) and (N,), the scales of
            rows of a and of b: sums are multiplied by that of b, and then by that of a, as cuBLASLt does. None means
            the tensor scale of a times that of b, where a missing tensor scale counts as 1.
        c: a float32, float16 or bfloat16 array of the result's shape, whose values the sums begin with; None means
            zeros. It must be float16 for sums in float16, int32 for integers, and None for "mlx-cpu" and "ggml-...".
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        An array (..., M, N) of out_dtype, in the library and on the device of a. Besides the arguments and the result,
            the call needs at most 64 MiB of memory, and linear copies of swizzled block scales.

    Raises:
        TypeError: an operand, c, alpha or a dtype has the wrong type.
        ValueError: shapes or lengths along K differ, the unit is unknown, or it has no instruction for these operands.
            The message says which operands the unit multiplies.
        NotImplementedError: the operands are on a GPU, and the unit is an engine on a CPU.

    Numerics:
        - K is padded with zeros to a whole number of steps. A step is one instruction; see DotAdd.
        - FP8 with float32 scales per 128 elements: each 128 elements are a chain from zero, and a fused multiply-add
          adds it: c = fma(sum * scale_a, scale_b, c), or c = fma(sum, scale_a * scale_b, c) if 128 rows of a or of b
          share a scale. So cuBLASLt does on Hopper, and DeepGEMM by its source.
        - int8 and uint8: exact sums, which wrap around, or saturate after each step (IntegerAdd).
        - alpha: the tensor scales are multiplied in float32; the sum times their product is rounded to float32, then to
          out_dtype, to nearest even.
        - Signs of E4M3 block scales are ignored, except by "mlx-cpu".
        - NVIDIA's units: float32 operands lose their low 13 bits first. A sum of zero is +0, and results of 2^128 and
          more are infinite. Subnormal elements, sums and scales are kept.
        - Infinities and NaN in the operands give what IEEE 754 gives. Every NaN of the result is 0x7FFFFFFF in float32,
          and 0x7FFF in 16 bits.
        - "mlx-cpu": scales and elements decode as in the recipes ...-mlx-cpu. B may have no tensor scale, unless alpha
          is given. The result is a number of the dtype of A before alpha and out_dtype.
        - "ggml-...": scales and elements decode as in the recipes ...-gguf. llama.cpp multiplies by the tensor scale of
          an NVFP4 weight after the product, as alpha does.

    Exact:
        Equals MLX 0.32.4 and llama.cpp (xllamacpp 2026.10.11549) on x86-64 for their units, also for subnormals, NaN
        and infinities. One exception: for "ggml-avx2-repacked", llama.cpp multiplies the last M % 4 rows, and all rows
        of experts, by another function. It differs in rows with NaN, infinities or numbers from 8.3e6 on, whose Q8_0
        scale is infinite.

        Equals MMA-Sim 2.1.1 for every matrix unit with float32 sums, and the hardware that Unit.checked names. Slow
        accumulation of cuBLASLt is `dataclasses.replace(fp4kit.unit("sm90"), promote=128)`. A kernel that splits K, or
        adds in another order, gives other bits.

    Source:
        MMA-Sim, arXiv 2511.10909. MLX 0.32.4 backend/cpu/quantized.cpp. llama.cpp ggml-cpu/arch/x86/quants.c and
        repack.cpp.

    Examples:
        >>> import fp4kit, ml_dtypes, numpy as np
        >>> a = np.full((1, 4096), 1.125, ml_dtypes.float8_e4m3fn)
        >>> b = np.full((1, 4096), 1.25, ml_dtypes.float8_e4m3fn)
        >>> fp4kit.matmul(a, b, unit="exact"), fp4kit.matmul(a, b, unit="sm90")
        (array([[5760.]], dtype=float32), array([[5080.]], dtype=float32))
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4-te")
        >>> fp4kit.matmul(q, q, unit="sm100").shape
        (32, 32)
        >>> w = fp4kit.quantize(np.ones((8, 64), np.float32), "mxfp4-gguf")
        >>> float(fp4kit.matmul(np.full((1, 64), 0.3, np.float32), w, unit="ggml-avx2")[0, 0])
        19.192626953125
    """
    return convert_and_call(_matmul, a, b, unit, out_dtype, alpha, c)


def prepared(op: str, name: str, x: Any, u: Unit) -> Any:
    """Return an operand of matmul in the form that the CPU and GPU engines accept."""
    if not isinstance(x, Quantized):
        return x
    if u.order != "dequantized":
        return unswizzle(x) if x.scale_layout != "linear" else x
    check_axis(op, name, x)
    values = dequantize(x, ml_dtypes.bfloat16)
    return values if x.axis == len(x.shape) - 1 else values.swapaxes(-1, -2)


@returns_in_library
def _matmul(a: Any, b: Any, unit: str | Unit | None, out_dtype: Any, alpha: Any, c: Any) -> Any:
    """Check the arguments of matmul, and return the product in the library of a."""
    u = _default_unit("matmul", unit, a=a, b=b)
    decoded = 2 * sum(prod(x.shape) for x in (a, b) if isinstance(x, Quantized))  # bytes
    if u.order == "dequantized" and decoded > MAX_DECODED_BYTES:
        return _by_panels(a, b, u, out_dtype, alpha, c)
    return _product(a, b, u, out_dtype, alpha, c)


def _default_unit(op: str, unit: str | Unit | None, **operands: Any) -> Unit:
    """Return the argument `unit` as a Unit. None stands for "sm100", and raises ValueError for a float32 array."""
    for name, x in operands.items() if unit is None else ():
        if not isinstance(x, Quantized) and str(getattr(x, "dtype", "")).endswith("float32"):
            raise ValueError(
                f'{op}: {name} is float32, which most units cut to TF32; name the unit: unit="sm100" for TF32 as on'
                ' Blackwell, unit="exact" for all bits'
            )
    return unit_of(op, "sm100" if unit is None else unit)


def _product(a: Any, b: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any) -> Any:
    """Return the product of two whole operands as a NumPy or CuPy array."""
    a, b = (prepared("matmul", name, x, u) for name, x in (("a", a), ("b", b)))
    call, shape = matmul_call(a, b, u, out_dtype, alpha, c)
    return run("matmul", "matmul", call.on_device, [call])[0].reshape(shape)


def _by_panels(a: Any, b: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any) -> Any:
    """Return the product for the unit "dequantized", decoding only a panel (some rows) of each operand at a time."""
    left, right = (_Rows.of(name, x) for name, x in (("a", a), ("b", b)))
    # The product of the first rows checks all arguments but c. Its library and dtype are those of the result.
    corner = slice(0, left.multiple), slice(0, right.multiple)
    first = _product(left.cut(corner[0]), right.cut(corner[1]), u, out_dtype, _cut(alpha, corner), None)
    shape = (*first.shape[:-2], left.count, right.count)
    if c is not None:
        check_one_device("matmul", a=first_array(a), c=c)
        c = first_sums("matmul", "c", c, shape, u, None)
    out = empty_result(shape, first.dtype, first)
    for rows in left.panels():
        panel = prepared("matmul", "a", left.cut(rows), u)
        for columns in right.panels():
            sums = None if c is None else c[..., rows, columns]
            part = _cut(alpha, (rows, columns))
            out[..., rows, columns] = _product(panel, right.cut(columns), u, out_dtype, part, sums)
    return out


def _cut(alpha: Any, panel: tuple[slice, slice]) -> Any:
    """Return the argument alpha of matmul for some rows of a and of b."""
    if not isinstance(alpha, tuple) or len(alpha) != 2:
        return alpha
    return tuple(x[..., rows] if getattr(x, "ndim", 0) else x for x, rows in zip(alpha, panel, strict=True))


@dataclass(frozen=True)
class _Rows:
    """The rows (M or N) of an operand, which can be cut at multiples of the rows per block."""

    x: Any
    axis: int  # the axis that counts the rows: of the last two, the one that is not K
    count: int
    multiple: int

    @classmethod
    def of(cls, name: str, x: Any) -> _Rows:
        """Return the rows of the argument `name` of matmul, with linear block scales."""
        shape, multiple = getattr(x, "shape", ()), 1
        axis = len(shape) - 2
        if isinstance(x, Quantized):
            check_axis("matmul", name, x)
            x = x if x.scale_layout == "linear" else unswizzle(x)
            axis, multiple = 2 * axis + 1 - x.axis, x.recipe.block_rows
        return cls(x, axis, int(shape[axis]) if axis >= 0 else 0, multiple)

    def cut(self, rows: slice) -> Any:
        """Return the given rows of every matrix: a new Quantized, or a view of an array."""
        if not isinstance(self.x, Quantized):
            return self.x[..., rows, :] if self.axis >= 0 else self.x
        box = [slice(0, n) for n in self.x.shape]
        box[self.axis] = slice(rows.start, min(rows.stop, self.count))
        return box_of(self.x, tuple(box))

    def panels(self) -> Iterator[slice]:
        """Return slices that divide the rows into panels, in order."""
        elements = prod(self.x.shape) // max(self.count, 1)
        step = max(min(PANEL_ELEMENTS // max(elements, 1), PANEL_ROWS) // self.multiple, 1) * self.multiple
        return (slice(start, min(start + step, self.count)) for start in range(0, self.count, step))


@with_threads
def matmul_grouped(
    a: Any,
    b: Any,
    *,
    m_indptr: Any = None,
    unit: str | Unit | None = None,
    out_dtype: Any = None,
    alpha: float | Sequence[float] | None = None,
    c: Any = None,
    threads: int | None = None,
) -> Any:
    """Return the products of a group of matrices, such as the experts of a layer, as a matrix unit computes them.

        D[i] = matmul(a[i], b[i], ...)

    The sizes of the products may differ, such as the number of tokens per expert. On a GPU, all products whose operands
    have equal formats usually take one launch.

    Args:
        a: a sequence of matrices (M_i, K_i), each as in matmul. With m_indptr, a single matrix (rows, K), such as the
            tokens sorted by expert.
        b: a sequence of matrices (N_i, K_i), one per product, each as in matmul; or a single stack (products, N, K).
        m_indptr: None if a is a sequence. Otherwise integers (products + 1,), which begin with 0, do not decrease, and
            end with the number of rows of a. Product i has the rows of a from m_indptr[i] to m_indptr[i + 1] - 1. If
            m_indptr is an array on a GPU, the call waits for the GPU to copy it to the host.
        unit: as in matmul, for all products.
        out_dtype: as in matmul, for all products.
        alpha: a number or None, as in matmul, for all products; or a sequence with one alpha per product.
        c: the arrays with which the sums begin, as in matmul: a sequence of arrays, one per product; or, with m_indptr,
            one array (rows, N). None means zeros.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of arrays (M_i, N_i), one per product; with m_indptr, one array (rows, N). They have the dtype out_dtype,
            and are in the library and on the device of a. For the unit "dequantized", the call first decodes every
            Quantized among the operands, which takes 2 bytes per element.

    Raises:
        TypeError: a is a single matrix without m_indptr, or a sequence with it; m_indptr does not consist of integers;
            or an argument has a type that matmul rejects.
        ValueError: the numbers of matrices differ, m_indptr does not fit the rows, or a product is one that matmul
            rejects. The message numbers the matrix, as in "a[2]".

    Exact:
        Equals [matmul(x, y, ...) for x, y in zip(a, b)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> tokens = fp4kit.quantize(np.ones((5, 64), np.float32), "nvfp4-te")
        >>> experts = [fp4kit.quantize(np.full((3, 64), x, np.float32), "nvfp4-te") for x in (1, 2)]
        >>> fp4kit.matmul_grouped(tokens, experts, m_indptr=[0, 2, 5])[:, 0]
        array([ 64.,  64., 128., 128., 128.], dtype=float32)
        >>> [d.shape for d in fp4kit.matmul_grouped([tokens, experts[0]], experts)]
        [(5, 3), (3, 3)]
    """
    return _matmul_grouped(a, b, m_indptr, unit, out_dtype, alpha, c)


@returns_in_library
def _matmul_grouped(a: Any, b: Any, m_indptr: Any, unit: str | Unit | None, out_dtype: Any, alpha: Any, c: Any) -> Any:
    """Check the arguments of matmul_grouped, and return the products in the library of a."""
    b = _prepared_all("b", b, unit)
    u = _default_unit(GROUPED, unit)
    if m_indptr is not None:
        if not is_single(a):
            raise TypeError(f"{GROUPED}: a is {a_type(a)}; needs one matrix if m_indptr is given")
        calls, out = rows_call(_prepared_all("a", a, unit), b, m_indptr, u, out_dtype, alpha, c)
        run(GROUPED, "matmul", calls[0].on_device, calls)
        return out
    if is_single(a):
        raise TypeError(f"{GROUPED}: a is one {type(a).__name__}; needs a sequence of matrices, or m_indptr")
    calls = list_call(_prepared_all("a", a, unit), b, u, out_dtype, alpha, c)
    found = run(GROUPED, "matmul", calls[0].on_device, calls) if calls else []
    return [d.reshape(d.shape[1:]) for d in found]


def _prepared_all(name: str, xs: Any, unit: str | Unit | None) -> Any:
    """Return one operand, or the operands of a sequence as a list, in the form that the engines accept."""
    if is_single(xs):
        return prepared(GROUPED, name, xs, _default_unit(GROUPED, unit, **{name: xs}))
    named = {f"{name}[{i}]": x for i, x in enumerate(as_entries(GROUPED, name, xs))}
    u = _default_unit(GROUPED, unit, **named)
    return [prepared(GROUPED, each, x, u) for each, x in named.items()]


BUDGET = "error_budget"
_RATIOS = ("weight", "activation", "interaction", "quantization", "accumulation", "rounding", "total")
_CHUNK = 1 << 20  # values of y per step; a step holds about nine float64 arrays of that size


@dataclass(frozen=True)
class ErrorBudget(Shown):
    """The error of a quantized matrix product, split by source, as signal-to-noise ratios. print() shows a table.

    fp4kit.error_budget returns an ErrorBudget, and its documentation defines each ratio. All ratios are in dB. A larger
    ratio means a smaller error. inf means no error, -inf means that the exact product is all zeros but the error is
    not, and NaN means that a sum of squares is not finite.

    Attributes:
        weight: ratio of the error that comes from quantizing w.
        activation: ratio of the error that comes from quantizing x.
        interaction: ratio of the error that only both quantizations together cause: the product of the error of x
            and that of w.
        quantization: ratio of the sum of the three errors weight, activation and interaction.
        accumulation: ratio of the matrix unit's error: its float32 result compared with the exact product of the
            quantized operands.
        rounding: ratio of the error of rounding the unit's float32 result to out_dtype.
        total: ratio of the sum of all errors: the result compared with the product of the unquantized x and w.
        recipe_x: title of the recipe of x.
        recipe_w: title of the recipe of w.
        unit: id of the matrix unit.
        out_dtype: name of the dtype of the result.
        shape: (M, N, K), for x of shape (M, K) and w of shape (N, K).
    """

    weight: float
    activation: float
    interaction: float
    quantization: float
    accumulation: float
    rounding: float
    total: float
    recipe_x: str
    recipe_w: str
    unit: str
    out_dtype: str
    shape: tuple[int, int, int]

    def __repr__(self) -> str:
        """Return one line with all ratios except interaction."""
        names = ("weight", "activation", "quantization", "accumulation", "rounding", "total")
        return f"ErrorBudget({', '.join(f'{name}={getattr(self, name):.2f}' for name in names)} dB)"

    def _sources(self) -> dict[str, float]:
        """Return {source of error: its ratio}, with the sums "= quantization" and "= total" below their parts."""
        return {
            f"weight, {self.recipe_w}": self.weight,
            f"activation, {self.recipe_x}": self.activation,
            "interaction of both": self.interaction,
            "= quantization": self.quantization,
            f"accumulation, {self.unit}": self.accumulation,
            f"rounding to {self.out_dtype}": self.rounding,
            "= total": self.total,
        }

    def _panels(self) -> Iterator[Panel]:
        """Yield the table: one row per source of error, and the two sums quantization and total."""
        M, N, K = self.shape
        title, columns = f"Error budget of x w^T, {M} x {N}, K = {K}", ("source", "SQNR", "relative error")
        rows = ((name, f"{ratio:.2f} dB", f"{10 ** (-ratio / 20):.2e}") for name, ratio in self._sources().items())
        yield Panel(title, columns=columns, rows=tuple(rows))


@explains_calls
@ieee(BUDGET)
def error_budget(
    x: Any,
    w: Any,
    recipe_x: str | Recipe,
    recipe_w: str | Recipe | None = None,
    unit: str | Unit = "sm100",
    *,
    out_dtype: Any = "bfloat16",
) -> ErrorBudget:
    """Split the error of a quantized matrix product x w^T into its sources.

    Let x' and w' be the quantized operands. The total error is the sum of five errors:

        weight        x (w' - w)^T
        activation    (x' - x) w^T
        interaction   (x' - x) (w' - w)^T
        accumulation  u - x' w'^T
        rounding      r - u
        total         r - x w^T

    Here u is matmul(quantize(x, recipe_x), quantize(w, recipe_w), unit=unit) in float32, and r is u rounded to
    out_dtype. So "accumulation" compares the unit with the exact product. It includes the product of the tensor scales,
    which is multiplied in float32. The result also has "quantization", the sum of the first three, which is x' w'^T - x
    w^T.

    Each error e is reported as a signal-to-quantization-noise ratio (SQNR) in dB, always relative to the unquantized
    product:

        SQNR = 10 log10(sum (x w^T)^2 / sum e^2)

    The table also shows the relative error, sqrt(sum e^2 / sum (x w^T)^2). The errors of the elements add up exactly,
    but their squares do so only if the errors are uncorrelated.

    Args:
        x: float32, float16 or bfloat16 array (..., K), such as the activations of a layer. Its leading axes are joined
            to M.
        w: float32, float16 or bfloat16 array (N, K), the weight.
        recipe_x: the recipe of x.
        recipe_w: the recipe of w; None for recipe_x.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: float32, float16 or bfloat16, the dtype of the result. For float32, rounding is inf.

    Returns:
        An ErrorBudget.

    Raises:
        TypeError: x or w has a dtype other than these three, or out_dtype is none of them.
        ValueError: x and w differ in K, K is not a whole number of blocks, or the unit has no instruction for the two
            recipes.
        ValueError: a recipe or the unit is unknown, or a recipe only fake-quantizes.

    Numerics:
        - x' and w' are code times block scale times tensor scale, exact. For unit="dequantized", they are the float32
          values of fp4kit.dequantize. The unit rounds these to bfloat16, and this rounding counts as accumulation.
        - Products other than u are computed in float64, on the host, with NumPy's matrix product. Its order of sums is
          not fixed. So a ratio above about 280 dB means that the only error is float64 rounding.
        - An error of zero gives inf. NaN or infinities in x or w give NaN.

        The call needs four float64 arrays: two of the size of x, and two of the size of w. Arrays on a GPU are
        quantized and multiplied there, and then copied.

    Examples:
        >>> import fp4kit, numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x, w = rng.standard_normal((64, 512), np.float32), rng.standard_normal((32, 512), np.float32)
        >>> print(fp4kit.error_budget(x, w, "nvfp4-te", "nvfp4-te-2d"))
        Error budget of x w^T, 64 x 32, K = 512
          source                     SQNR  relative error
          weight, nvfp4-te-2d    19.11 dB        1.11e-01
          activation, nvfp4-te   20.49 dB        9.45e-02
          interaction of both    39.50 dB        1.06e-02
          = quantization         16.79 dB        1.45e-01
          accumulation, sm100   150.58 dB        2.96e-08
          rounding to bfloat16   55.66 dB        1.65e-03
          = total                16.79 dB        1.45e-01
    """
    x, w = import_arrays(BUDGET, x=x, w=w)
    s = linear_settings(BUDGET, (recipe_x, recipe_w, None), None, unit, out_dtype, "straight-through", "nearest", False)
    check_product(BUDGET, s, AbstractArray(x.shape, x.dtype), AbstractArray(w.shape, w.dtype))
    x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    q_x, q_w = quantize(x, s.recipe_x), quantize(w, s.recipe_w)
    u = to_host(matmul(q_x, q_w, unit=s.unit))
    of_x, of_w = ((to_host(a).astype(np.float64), _values(q, s)) for a, q in ((x, q_x), (w, q_w)))
    with np.errstate(all="ignore"):
        signal, *noise = _energies(of_x, of_w, u, rounded(u, s.out_dtype))
    ratios: dict[str, Any] = dict(zip(_RATIOS, (decibels(signal, e) for e in noise), strict=True))
    return ErrorBudget(
        **ratios,
        recipe_x=s.recipe_x.title,
        recipe_w=s.recipe_w.title,
        unit=s.unit.title,
        out_dtype=s.out_dtype.name,
        shape=(x.shape[0], w.shape[0], x.shape[1]),
    )


@np.errstate(all="ignore")
def _values(q: Quantized, s: LinearSettings) -> np.ndarray:
    """Return the values of a quantized matrix as a float64 NumPy array, with the quantized axis last."""
    q = on_host(q, BUDGET)
    if s.unit.order == "dequantized":
        decoded: np.ndarray = dequantize(q, np.float32).astype(np.float64)
        return decoded
    found = quantized_operand(BUDGET, "q", q)
    codes = unpack(found.codes) if found.element == "E2M1" else found.codes
    values = decoding_of(found.element).values[codes]
    if found.scales is not None and found.scale is not None:
        values *= scale_decoding_of(found.scale).values[found.scales].repeat(found.block, axis=-1)
    if found.chains is not None:
        values *= found.chains.repeat(found.block, axis=-1)
    return values if found.factor is None else values * found.factor[:, None].astype(np.float64)


def _energies(
    x: tuple[np.ndarray, np.ndarray], w: tuple[np.ndarray, np.ndarray], u: np.ndarray, r: np.ndarray
) -> np.ndarray:
    """Return eight sums of squares, float64: first that of x w^T, and then one per error, in the order of _RATIOS."""
    total = np.zeros(8)
    (plain, quantized), (w_plain, w_quantized) = x, w
    w_error = w_quantized - w_plain
    rows = max(_CHUNK // max(len(w_plain), 1), 1)
    for start in range(0, len(plain), rows):
        cut = slice(start, start + rows)
        x_error, y = quantized[cut] - plain[cut], plain[cut] @ w_plain.T
        weight, activation, interaction = plain[cut] @ w_error.T, x_error @ w_plain.T, x_error @ w_error.T
        both = weight + activation + interaction
        accumulation = u[cut] - quantized[cut] @ w_quantized.T
        result = r[cut].astype(np.float64)
        parts = (y, weight, activation, interaction, both, accumulation, result - u[cut], result - y)
        total += [np.square(part).sum() for part in parts]
    return total


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) in dB, from two sums of squares."""
    if not np.isfinite([signal, noise]).all():
        return nan
    if noise == 0:
        return inf
    return 10 * (log10(signal) - log10(noise)) if signal else -inf
