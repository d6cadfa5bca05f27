"""Compare a producer's arrays with fp4kit's arrays for the same input, bit for bit. A producer is a library that
quantizes, such as torchao. A part is one array of the result, such as "codes" (PARTS lists them). `theirs` is a part
from the producer, and `ours` the part from fp4kit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Parts, ProducerCall
from fp4kit.formats import ElementFormat, bit_patterns
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
            ours = eval(PARTS[part], {"fp4kit": fp4kit}, {"q": q, "v": v, "x": x, "r": r})
            difference = difference_of(part, v, ours, _mask(part, x, q, call, r, v, ours, result.excused), r)
            result.differences += [difference] if difference else []
    return result


def _mask(
    part: str,
    x: np.ndarray,
    q: Any,
    call: ProducerCall,
    r: fp4kit.Recipe,
    theirs: np.ndarray,
    ours: np.ndarray,
    excused: Counter[str],
) -> np.ndarray:
    """Return a mask of the elements of a part whose difference is excused by an exception of the call."""
    shape = np.shape(theirs)
    masked = np.zeros(shape, bool)
    if not call.exempt or shape != np.shape(ours):
        return masked
    differs = _differing(part, theirs, ours, r)
    if not differs.any():
        return masked
    for exempt in call.exempt:
        where = _over_part(part, exempt.where(x, q), exempt.scales, r)
        if where is not None:
            if (differs & where & ~masked).any():
                excused[exempt.name] += 1
            masked |= np.broadcast_to(where, shape)
    return masked


def _over_part(part: str, where: np.ndarray, scales: bool, r: fp4kit.Recipe) -> np.ndarray | None:
    """Convert a mask of the elements of x to a mask of a part, such as the block scales."""
    if part in ("block_scale", "tensor_scale") and not scales:
        return None
    if part == "block_scale":
        return np.asarray(where.reshape(*where.shape[:-1], -1, r.block_size).any(axis=-1))
    return np.asarray(where.all()) if part == "tensor_scale" else where


def _differing(part: str, theirs: np.ndarray, ours: np.ndarray, r: fp4kit.Recipe) -> np.ndarray:
    """Return a mask of the elements whose bits differ in two arrays of equal shape."""
    fmt = {"codes": r.element, "block_scale": r.scale}.get(part)
    a, b = np.asarray(theirs), np.asarray(ours)
    differ = np.asarray(bit_patterns(a) != bit_patterns(b))
    if differ.any():
        differ &= ~(_is_nan(a, fmt) & _is_nan(b, fmt))
    return differ


def _is_nan(a: np.ndarray, fmt: ElementFormat | None) -> np.ndarray:
    """Return a mask of the elements that are NaN."""
    numbers = a.astype(np.float64) if fmt is None else decode(a, fmt)
    return np.isnan(numbers)


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
