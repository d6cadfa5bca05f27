"""Compare a producer's arrays with fp4kit's arrays for the same input, bit for bit. A producer is a library that
quantizes, such as torchao. A part is one array of the result, such as "codes" (PARTS lists them). `theirs` is a part
from the producer, and `ours` the part from fp4kit.
"""

from __future__ import annotations

import ast
import inspect
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz.arrays import DTYPES
from fp4kit.evidence.live.adapter import Parts, ProducerCall
from fp4kit.formats import bit_patterns
from fp4kit.reference.codec import decode

# {part that a producer may give: fp4kit expression that must equal it}. In the expressions, x is the input, r the
# recipe, q the Quantized and v the producer's array.
PARTS = {
    # Producers give one code per element, although q.packed may hold two codes per byte.
    "codes": "fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed",
    "block_scale": "q.block_scale",  # compared as bit patterns
    "tensor_scale": "q.tensor_scale.reshape(v.shape)",  # float32, multiplies on decode
    "values": "fp4kit.dequantize(q, v.dtype)",  # decoded values
    "values_float16": "fp4kit.dequantize(q, v.dtype)",
    "values_bfloat16": "fp4kit.dequantize(q, v.dtype)",
    "fake": "fp4kit.fake_quantize(x, r).astype(v.dtype)",  # values of a fake quantizer
}


@dataclass(frozen=True)
class PartDifference:
    """The difference between a producer and fp4kit in one part of the result, such as "codes".

    Attributes:
        part: name of the part.
        differing: number of elements that differ.
        size: number of elements of the part.
        at: index of the first difference, or None if the arrays differ in shape or dtype.
        theirs: the producer's element at this index. If ``at`` is None, the dtype and shape of the producer's array.
        ours: the same for fp4kit.
    """

    part: str
    differing: int
    size: int
    at: tuple[int, ...] | None
    theirs: str
    ours: str

    def __str__(self) -> str:
        """Return the difference as one line: the part, the number of differences, and the first of them."""
        at = "" if self.at is None else f", first at {self.at}"
        return f"{self.part}: {self.differing} of {self.size} differ{at}: producer {self.theirs}, fp4kit {self.ours}"


@dataclass
class ProducerComparison:
    """The result of comparing a producer with fp4kit on one input array.

    Attributes:
        differences: the parts that differ.
        excused: {name of an exception: number of parts in which it excused a difference}.
        elements: number of elements of the input.
    """

    differences: list[PartDifference] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)
    elements: int = 0


def compare(id: str, x: np.ndarray, call: ProducerCall, theirs: Parts | None = None) -> ProducerComparison:
    """Compare every array that a producer returns for x with fp4kit's array, and return a ProducerComparison."""
    theirs = call.function(x) if theirs is None else theirs
    r = fp4kit.recipe(id)
    q = None if r.fake_only else fp4kit.quantize(x, r)
    result = ProducerComparison(elements=x.size)
    with np.errstate(all="ignore"):
        for part, v in theirs.items():
            ours = np.asarray(eval(PARTS[part], {"fp4kit": fp4kit}, {"q": q, "v": v, "x": x, "r": r}))
            masked = np.zeros(np.shape(v), bool)
            if call.exempt and masked.shape == ours.shape:
                differs = _differing(part, v, ours, r)
                for exempt in call.exempt if differs.any() else ():
                    where = _over_part(part, exempt.where(x, q), exempt.scales, r)
                    result.excused += Counter({exempt.name: int((differs & where & ~masked).any())})
                    masked |= where
            difference = difference_of(part, v, ours, masked, r)
            result.differences += [difference] if difference else []
    return result


def _over_part(part: str, where: np.ndarray, scales: bool, r: fp4kit.Recipe) -> np.ndarray:
    """Convert a mask of the elements of x to a mask of a part, such as the block scales."""
    if part == "block_scale":
        return np.asarray(scales & where.reshape(*where.shape[:-1], -1, r.block_size).any(axis=-1))
    return np.asarray(scales & where.all()) if part == "tensor_scale" else where


def _differing(part: str, theirs: np.ndarray, ours: np.ndarray, r: fp4kit.Recipe) -> np.ndarray:
    """Return a mask of the elements whose bits differ in two arrays of equal shape. A NaN equals a NaN."""
    fmt = {"codes": r.element, "block_scale": r.scale}.get(part)
    differ = np.asarray(bit_patterns(np.asarray(theirs)) != bit_patterns(ours))
    if differ.any():
        a, b = (np.asarray(x).astype(np.float64) if fmt is None else decode(x, fmt) for x in (theirs, ours))
        differ &= ~(np.isnan(a) & np.isnan(b))
    return differ


def difference_of(
    part: str, theirs: np.ndarray, ours: Any, masked: np.ndarray, r: fp4kit.Recipe
) -> PartDifference | None:
    """Return the difference between the producer's and fp4kit's arrays of a part; None if no compared element
    differs.
    """
    ours = np.asarray(ours)
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        kinds = f"{theirs.dtype} {theirs.shape}", f"{ours.dtype} {ours.shape}"
        return PartDifference(part, max(ours.size, 1), ours.size, None, *kinds)
    differ = _differing(part, theirs, ours, r) & ~masked
    if not differ.any():
        return None
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
    shown = (_shown(theirs[at]), _shown(ours[at]))
    return PartDifference(part, int(np.count_nonzero(differ)), differ.size, at, *shown)


def _shown(value: Any) -> str:
    """Return an element as text: a uint8 code as an integer, and a value with its bits, such as "0.5 (0x3f000000)"."""
    return str(int(value)) if value.dtype == np.uint8 else f"{value} ({int(bit_patterns(np.asarray(value))):#x})"


def differing_parts(differences: Iterable[PartDifference]) -> frozenset[str]:
    """Return the names of the parts that differ, such as "codes", without repetitions."""
    return frozenset(difference.part for difference in differences)


PER_LINE = 8


def script(
    id: str, function: Callable[..., Any], x: np.ndarray, difference: PartDifference | str, versions: str
) -> str:
    """Return a Python program that raises AssertionError as long as a producer and fp4kit differ on x."""
    body = [*lines_of("x", x), "", "theirs = {call}"]
    if not isinstance(difference, str):
        body.append(f'r, v = fp4kit.recipe("{id}"), theirs["{difference.part}"]')
        if difference.part != "fake":
            body.append("q = fp4kit.quantize(x, r)")
        body.append(f"assert_same_bits(v, {PARTS[difference.part]})")
    return program(f"{id} and {versions}", difference, function, body, x.dtype == "bfloat16", "x")


def program(
    title: str,
    difference: PartDifference | str,
    function: Callable[..., Any],
    body: list[str],
    narrow: bool,
    argument: str,
) -> str:
    """Return the whole program: a description, imports, the source of the adapter's function, and the body."""
    given: list[str] = []
    if isinstance(function, partial):
        given = [f"{name}={value!r}" for name, value in function.keywords.items()]
        function = function.func
    call = f"{function.__name__}({', '.join([argument, *given])})"
    imports = ["import ml_dtypes"] * narrow + ["import numpy as np"]
    imports += ["import fp4kit", "from fp4kit.evidence.testing import assert_same_bits"]
    used, source = _source(function)
    lines = [line.replace("{call}", call) for line in body]
    return "\n".join([f"# {title}", f"# {difference}", *_sorted({*imports, *used}), *source, "", "", *lines, ""])


def lines_of(name: str, x: np.ndarray) -> list[str]:
    """Return the source lines of a statement that sets the variable ``name`` to the array x, written as bit
    patterns.
    """
    bits = bit_patterns(x)
    width = 2 * x.dtype.itemsize
    numbers = [f"{int(b):#0{width + 2}x}" for b in bits.reshape(-1)]
    lines = [", ".join(numbers[i : i + PER_LINE]) for i in range(0, len(numbers), PER_LINE)]
    dtype = f"ml_dtypes.{x.dtype}" if x.dtype == "bfloat16" else f"np.{x.dtype}"
    view = "" if x.dtype == bits.dtype else f".view({dtype})"
    return [
        f"{name} = np.array([",
        *(f"    {line}," for line in lines),
        f"], np.{bits.dtype}){view}.reshape({x.shape})",
    ]


def _sorted(imports: set[str]) -> list[str]:
    """Return import statements as lines in the usual order: standard library, installed packages, fp4kit."""
    groups: tuple[list[str], ...] = ([], [], [])
    for line in sorted(imports, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].split(".")[0]
        groups[2 if package == "fp4kit" else 0 if package in sys.stdlib_module_names else 1].append(line)
    return [line for group in groups if group for line in ("", *group)][1:]


def _source(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Return (imports, source lines) that a program needs to define a function of an adapter."""
    text = inspect.getsource(sys.modules[function.__module__])
    statements = ast.parse(text).body
    needed, used = {function.__name__}, set()
    while new := {i for i, s in enumerate(statements) if i not in used and _defines(s) & needed}:
        used |= new
        needed |= {n.id for i in new for n in ast.walk(statements[i]) if isinstance(n, ast.Name)}
    imports, lines = set(), []
    for i in sorted(used):
        statement = statements[i]
        if isinstance(statement, ast.Import):
            imports.add(ast.unparse(statement))
        elif isinstance(statement, ast.ImportFrom):
            names = [ast.unparse(alias) for alias in statement.names if (alias.asname or alias.name) in needed]
            imports.add(f"from {statement.module} import {', '.join(names)}")
        else:
            start = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            lines += ["", "", *text.splitlines()[start - 1 : statement.end_lineno]]
    return imports, lines


def _defines(statement: ast.stmt) -> set[str]:
    """Return the names that a module-level statement of an adapter defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {t.id for t in targets if isinstance(t, ast.Name)}


ROWS, BLOCKS = (1, 2, 3), (2, 3, 6)
EDGES = (0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF)  # the smallest, largest and NaN scales of E8M0 and E4M3


def draw_stored(r: fp4kit.Recipe, call: ProducerCall, seed: int, number: int) -> fp4kit.Quantized:
    """Return a Quantized with random codes and scales, determined by ``seed``, ``number`` and the recipe's id."""
    rng = np.random.default_rng([seed, number, zlib.crc32(r.id.encode())])
    rows, blocks = int(rng.choice(ROWS)) * r.block_rows, int(rng.choice(BLOCKS)) * max(1, call.columns // r.block_size)
    codes = rng.integers(0, 1 << r.element.bits, (rows, blocks * r.block_size), np.uint8)
    one = np.where(rng.random((rows, blocks)) < 0.5, 127 if r.scale is fp4kit.formats.E8M0 else 0x38, 0)
    any_byte = np.where(rng.random(one.shape) < 0.2, rng.choice(EDGES, one.shape), rng.integers(0, 256, one.shape))
    scales = np.where(one > 0, one + rng.integers(-8, 8, one.shape), any_byte).astype(np.uint8)
    scales = np.repeat(scales[:: r.block_rows], r.block_rows, axis=0)[:rows]
    tensor = np.float32(np.exp2(rng.uniform(-16, 4))) if r.tensor_scaling == "tensor" else None
    dtype = DTYPES[call.decodes[number // 4 % len(call.decodes)]]
    return _stored(codes, scales, tensor, dtype, r)


def _stored(codes: np.ndarray, scales: np.ndarray, tensor: Any, dtype: np.dtype, r: fp4kit.Recipe) -> fp4kit.Quantized:
    """Return a Quantized with the given codes (one per byte), block scales and tensor scale, in the linear layout."""
    packed = fp4kit.pack(codes) if r.is_packed else codes
    tensor = None if tensor is None else np.asarray(tensor)
    return fp4kit.Quantized(packed, scales, tensor, None, codes.shape, dtype, -1, r)


def compare_decoded(q: fp4kit.Quantized, call: ProducerCall) -> ProducerComparison:
    """Decode q with the producer and with fp4kit, compare the values, and return a ProducerComparison."""
    # ``call.decode`` must not be None.
    assert call.decode is not None
    with np.errstate(all="ignore"):
        theirs, ours = call.decode(q), fp4kit.dequantize(q)
        difference = difference_of("values", theirs, ours, np.zeros(np.shape(theirs), bool), q.recipe)
    return ProducerComparison([replace(difference, part="decoded")] if difference else [], elements=ours.size)


def shrunk_stored(
    q: fp4kit.Quantized, call: ProducerCall, differs: Callable[[fp4kit.Quantized], bool]
) -> fp4kit.Quantized:
    """Return a simpler Quantized for which ``differs`` still holds, or q itself if none is found."""
    # A column keeps its codes if q would no longer differ.
    for candidate in _smaller(q, call):
        if differs(candidate):
            q = candidate
            break
    for i in range(q.shape[-1]):
        codes = fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed.copy()
        codes[:, i] = 0
        candidate = _stored(codes, q.block_scale, q.tensor_scale, q.dtype, q.recipe)
        q = candidate if differs(candidate) else q
    return q


def _smaller(q: fp4kit.Quantized, call: ProducerCall) -> Iterator[fp4kit.Quantized]:
    """Yield slices of q, as new Quantized: one row of blocks, and as few columns of blocks as the producer accepts."""
    r = q.recipe
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    step = max(1, call.columns // r.block_size)
    for row in range(0, q.shape[0], r.block_rows):
        for block in range(0, q.block_scale.shape[1], step):
            rows, columns = slice(row, row + r.block_rows), slice(block * r.block_size, (block + step) * r.block_size)
            yield _stored(codes[rows, columns], q.block_scale[rows, block : block + step], q.tensor_scale, q.dtype, r)


def decoder_script(
    id: str, call: ProducerCall, q: fp4kit.Quantized, difference: PartDifference | str, versions: str
) -> str:
    """Return a Python program that reproduces a difference between a producer's decoder and fp4kit.dequantize."""
    assert call.decode is not None
    parts = ["packed", "block_scale"] + ["tensor_scale"] * (q.tensor_scale is not None)
    body = [line for name in parts for line in lines_of(name, np.asarray(getattr(q, name)))]
    dtype = f"ml_dtypes.{q.dtype}" if q.dtype == "bfloat16" else f"np.{q.dtype}"
    tensor = "None" if q.tensor_scale is None else "tensor_scale"
    made = f'fp4kit.Quantized(packed, block_scale, {tensor}, None, {q.shape}, {dtype}, -1, "{id}")'
    body += ["", f"q = {made}", "theirs = {call}"]
    if not isinstance(difference, str):
        body.append("assert_same_bits(theirs, fp4kit.dequantize(q))")
    return program(f"{id} and {versions}", difference, call.decode, body, q.dtype == "bfloat16", "q")
