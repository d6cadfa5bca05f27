"""Find the first step of the arithmetic that differs between two sides, and one element to show.
A side is the trainer or the rollout engine of fp4kit.parity. The steps are, in order: amax, tensor scale, block scale,
quotient (the scaled element), code and decode. Each step may record several results, such as "block amax".

The steps are recorded while the specification computes (fp4kit/reference/codec.py), so no formula is repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fp4kit.contract.sides import Amax, made
from fp4kit.formats import ElementFormat, bit_patterns
from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import dequantize
from fp4kit.recipes import Recipe
from fp4kit.reference.codec import TILE_ELEMENTS, traced

StepName: TypeAlias = Literal[
    "quantization",
    "amax",
    "tensor scale",
    "block scale",
    "quotient",
    "tie",
    "code",
    "decode",
    "value",
    "product",
]
"""The steps of the arithmetic, in their order. "quantization": only one side quantizes. "tie": the quotients are equal
and lie in the middle between two codes. "value": values differ, and nothing is known about the steps before."""

_ORDER: tuple[StepName, ...] = ("amax", "tensor scale", "block scale", "quotient", "code", "decode")
# beginning of a recorded name -> step; the first entry that fits the name decides
_STEPS = (
    ("tensor amax", "amax"),
    ("block amax", "amax"),
    ("tensor", "tensor scale"),
    ("amax", "block scale"),
    ("log2", "block scale"),
    ("exponent", "block scale"),
    ("block scale", "block scale"),
    ("error", "block scale"),
    ("factor", "quotient"),
    ("scaled", "quotient"),
    ("element *", "quotient"),
    ("element /", "quotient"),
    ("code before", "code"),
    ("value before", "code"),
    ("value scaled", "code"),
    ("code", "code"),
    ("element value", "decode"),
    ("magnitude", "decode"),
    ("decoded", "decode"),
    ("result", "decode"),
)
_QUOTIENTS = ("element * factor", "element / factor")
# step -> names of its final result. Other results of the step affect the decoded value only through the final result.
_ENDS = {"block scale": ("block scale",), "quotient": ("code", "code of the magnitude"), "code": ("code",)}
_MOST_WINDOWS = 8  # largest number of parts of a layer whose steps are recorded


class Arithmetic(NamedTuple):
    """Everything that determines the codes of a layer: recipe, tensor amaxes and transform.

    recipe: the recipe.
    amax: the tensor amaxes, of shape () for one amax or (N,) for one per row; None if the recipe needs none.
    layers: the layers that share ``amax``, which is the largest of their amaxes; () if it was derived from stored
        scales.
    transform: the Hadamard transform that the elements went through before, in words; "" for none.
    static: True if the amax follows from a stored input scale.
    """

    recipe: Recipe
    amax: Amax
    layers: tuple[str, ...] = ()
    transform: str = ""
    static: bool = False


class FirstStep(NamedTuple):
    """The first step of the arithmetic that differs between two sides.

    step: the name of the step.
    name: the name of the recorded result, such as "block amax".
    elements: the number of affected elements whose first difference is at this step.
    examined: the number of affected elements whose steps were compared.
    place: the row and column of one element whose first difference is at this step.
    steps: (step, number of affected elements whose first difference is there) pairs, in the order of the steps.
    """

    step: StepName
    name: str
    elements: int
    examined: int
    place: tuple[int, int]
    steps: tuple[tuple[StepName, int], ...]


@dataclass(frozen=True)
class _RecordedStep:
    """The result of one step of the arithmetic, with one entry per element (m, k).

    bits: the bit patterns of the result.
    format: the name of the format or dtype of the bits.
    numbers: the numbers that the bits stand for, float64.
    """

    bits: np.ndarray
    format: str
    numbers: np.ndarray


def first_step(
    x: tuple[np.ndarray, np.ndarray], a: Arithmetic, b: Arithmetic, affected: np.ndarray, scales: np.ndarray
) -> FirstStep | None:
    """Return the earliest step that differs for the affected elements; None if no recorded step differs."""
    found: dict[tuple[int, StepName, str], list[tuple[int, tuple[int, int]]]] = {}
    traced_count = 0
    for rows, columns in _windows(affected, scales, a.recipe, b.recipe):
        part = affected[rows, columns]
        traced_count += int(part.sum())
        recorded = [_recorded(each, one, rows, columns) for each, one in zip(x, (a, b), strict=True)]
        for order, step, name, mask in _differing(recorded[0], recorded[1], part):
            i, j = (int(n) for n in np.unravel_index(int(mask.argmax()), mask.shape))
            found.setdefault((order, step, name), []).append((int(mask.sum()), (rows.start + i, columns.start + j)))
    if not found:
        return None
    order, step, name = min(found)
    totals: dict[StepName, int] = {}
    for key in sorted(found):
        totals[key[1]] = totals.get(key[1], 0) + sum(count for count, _ in found[key])
    place = found[order, step, name][0][1]
    return FirstStep(step, name, totals[step], traced_count, place, tuple(totals.items()))


def _windows(affected: np.ndarray, scales: np.ndarray, a: Recipe, b: Recipe) -> list[tuple[slice, slice]]:
    """Return at most eight parts of a matrix that hold affected elements, as slices (rows, columns)."""
    M, K = affected.shape
    height = lcm(a.block_rows, b.block_rows)
    multiple = lcm(a.length_multiple, b.length_multiple)
    width = max(min(K, 1024, TILE_ELEMENTS // height) // multiple, 1) * multiple
    rows = max(TILE_ELEMENTS // width // height, 1) * height
    every = [
        (slice(row, min(row + rows, M)), slice(column, min(column + width, K)))
        for row in range(0, M, rows)
        for column in range(0, K, width)
    ]
    found = [window for window in every if affected[window].any()]
    if len(found) <= _MOST_WINDOWS:
        return found
    chosen = [found[i * len(found) // _MOST_WINDOWS] for i in range(_MOST_WINDOWS)]
    if not any(scales[window].any() for window in chosen):
        chosen[-1] = next((window for window in found if scales[window].any()), chosen[-1])
    return chosen


def _recorded(x: np.ndarray, one: Arithmetic, rows: slice, columns: slice) -> dict[str, _RecordedStep]:
    """Quantize and decode a part of x, and return the result of each step in order, as {name of the result: result}."""
    part = np.ascontiguousarray(x[rows, columns])
    amax = one.amax if one.amax is None or not one.amax.ndim else one.amax[rows]
    with specification(), np.errstate(all="ignore"), traced() as steps:
        q, _ = made(part, one.recipe, amax)
        if q is not None:
            dequantize(q, part.dtype)
    found: dict[str, _RecordedStep] = {}
    for step in steps:
        spread = _per_element(step.result, part.shape, one.recipe)
        name = "scaled element" if step.name in _QUOTIENTS else step.name
        if spread is not None and (name not in found or name == "code"):
            format = step.result.dtype.name if step.format is None else step.format.name
            found[name] = _RecordedStep(_bits(spread), format, _numbers(spread, step.format))
    return found


def _per_element(result: np.ndarray, shape: tuple[int, int], r: Recipe) -> np.ndarray | None:
    """Repeat the entries of a recorded result, so that there is one entry per element, and return it as (m, k)."""
    m, k = shape
    flat = result.reshape(-1)
    blocks, block_rows = k // r.block_size, -(-m // r.block_rows)
    if flat.size == m * k:
        return flat.reshape(m, k)
    if flat.size == 1:
        return np.broadcast_to(flat, (m, k))
    if flat.size == m * blocks:
        return np.repeat(flat.reshape(m, blocks), r.block_size, axis=1)
    if flat.size == block_rows * blocks:
        return np.repeat(np.repeat(flat.reshape(block_rows, blocks), r.block_rows, axis=0)[:m], r.block_size, axis=1)
    return np.broadcast_to(flat[:, None], (m, k)) if flat.size == m else None


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of values, with one pattern for all NaN."""
    if values.dtype.kind in "iub":
        return values
    return bit_patterns(np.where(np.isnan(values), np.full_like(values, np.nan), values))


def _numbers(values: np.ndarray, fmt: ElementFormat | None) -> np.ndarray:
    """Return the numbers that a recorded result stands for, as float64, in the shape of ``values``."""
    return np.asarray(values if fmt is None else fmt.values[values.astype(np.int64)], np.float64)


def _differing(
    a: dict[str, _RecordedStep], b: dict[str, _RecordedStep], affected: np.ndarray
) -> Iterator[tuple[int, StepName, str, np.ndarray]]:
    """Yield (order, step, name, mask) for each recorded result in which the sides differ, in the order of the steps."""
    left = affected.copy()
    leads_to = {step: _differs(a, b, names) for step, names in _ENDS.items()}
    for order, step in enumerate(_ORDER):
        names = [name for name in a if name in b and _step(name) == step]
        for name in names:
            differs = _differs(a, b, (name,))
            end = leads_to.get(step)
            differs = left & differs if end is None else left & differs & end
            left &= ~differs
            if name == "code":
                ties = differs & _ties(a, b)
                if ties.any():
                    yield order, "tie", name, ties
                differs &= ~ties
            if differs.any():
                yield order, step, name, differs
        only = next((name for name in (*a, *b) if _step(name) == step and not names and _is_missing(step, a, b)), None)
        if only is not None and left.any():
            yield order, step, only, left
            return


def _is_missing(step: str, a: dict[str, _RecordedStep], b: dict[str, _RecordedStep]) -> bool:
    """Return whether one side recorded results of a step and the other side recorded none."""
    if step not in ("tensor scale", "block scale"):
        return False
    return any(_step(name) == step for name in a) != any(_step(name) == step for name in b)


def _differs(a: dict[str, _RecordedStep], b: dict[str, _RecordedStep], names: tuple[str, ...]) -> Any:
    """Return a mask (m, k) of the elements for which a recorded result differs between the sides."""
    name = next((name for name in names if name in a and name in b), None)
    if name is None:
        return None
    x, y = a[name], b[name]
    if x.format == y.format:
        return x.bits != y.bits
    return (x.numbers != y.numbers) & ~(np.isnan(x.numbers) & np.isnan(y.numbers))


def _step(name: str) -> str:
    """Return the name of the step that gives a recorded result, such as "quotient"; "" if no step gives it."""
    return next((step for start, step in _STEPS if name.startswith(start)), "")


def _ties(a: dict[str, _RecordedStep], b: dict[str, _RecordedStep]) -> np.ndarray:
    """Return a bool mask (m, k) of elements whose quotients are equal and midway between the values of both codes."""
    x, y = a["code"], b["code"]
    last = next((name for name in reversed(a) if _step(name) == "quotient" and name in b), None)
    if last is None or a[last].format != b[last].format:
        return np.zeros(x.bits.shape, bool)
    middle = (x.numbers + y.numbers) / 2
    return (a[last].bits == b[last].bits) & (a[last].numbers == middle)
