"""Implement fp4kit.explain, which shows how a recipe quantizes one element, step by step.

The steps are recorded while the specification computes the block of the element (fp4kit/reference/codec.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_index, explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_to_host
from fp4kit.call.parse import Call, QuantizeOptions, fake_call
from fp4kit.display import Panel, Shown
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.ops.engines import run, specification
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.codec import Step, is_per_expert, show, traced
from fp4kit.reference.search import searched
from fp4kit.reference.stochastic import HADAMARD_BLOCK, RandomStream, stream_of
from fp4kit.types import Array, Hadamard, RecipeId, RoundingMode

OP = "explain"
_ABSENT, _DIFFERS, _FIRST = "-", "  differs", "  <- they part here"


@dataclass(frozen=True)
class ExplainedStep:
    """One step of quantizing an element: an intermediate result such as the block amax, as a number and as bits.

    Attributes:
        name: the name of the intermediate result, such as "block amax". The step "code" has the stored code, and the
            last step, "result", has the dequantized value.
        value: the number. For a code, it is the value that the code stands for.
        bits: the bit pattern of the number or code, as a non-negative integer.
        format: the format of the bits, such as "float32", "E4M3" or "E2M1". "exponent1" is an exponent bit, whose value
            is 2 if it is set and 1 otherwise.
        width: the number of bits.
    """

    name: str
    value: float
    bits: int
    format: str
    width: int

    def __str__(self) -> str:
        """Return the number, the format and the bits, such as "0.25 E8M0 01111101"."""
        bits = f"{self.bits:0{self.width}b}" if self.width <= 8 else f"0x{self.bits:0{self.width // 4}x}"
        number = f"{self.value:.17g}" if self.format == "float64" else f"{np.float32(self.value)!s}".removesuffix(".0")
        return f"{number}  {self.format} {bits}"


@dataclass(frozen=True)
class Explanation(Shown):
    """The steps by which recipes quantize one element. print() shows a table with one column per recipe.

    Attributes:
        index: the index of the element.
        recipes: the titles of the recipes: their ids and, for a variant, the fields that it changes.
        steps: one tuple of ExplainedStep per recipe, in the order in which its producer computes them.
            explanation[name] is the step of the first recipe with this name.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.linspace(-1, 1, 16, dtype=np.float32)
        >>> found = fp4kit.explain(x, "nvfp4-te", 3)
        >>> found["code"].value, found["code"].format, found["result"].value
        (-4.0, 'E2M1', -0.6666666865348816)
    """

    index: tuple[int, ...]
    recipes: tuple[str, ...]
    steps: tuple[tuple[ExplainedStep, ...], ...]

    def __getitem__(self, name: str) -> ExplainedStep:
        """Return the first recipe's step with the given name. Raise KeyError if the recipe has no such step."""
        if name not in (steps := self._column(0)):
            raise KeyError(f"explain: there is no step {name!r}; the steps are {', '.join(steps)}")
        return steps[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps of all recipes, in the order of the table's rows. Each name occurs once.

        The steps of the first recipe come in order. A step that only a later recipe has is inserted after the step that
        precedes it in that later recipe.
        """
        names: list[str] = []
        for steps in self.steps:
            at = 0
            for step in steps:
                if step.name not in names:
                    names.insert(at, step.name)
                at = names.index(step.name) + 1
        return tuple(names)

    @property
    def parting(self) -> str | None:
        """The name of the first step at which the recipes differ. None if they agree, or if there is only one recipe.

        Recipes differ at a step if two of them have different bits or formats there. Steps come in the order of
        `names`. Steps that some recipe lacks are skipped.
        """
        common = set.intersection(*({step.name for step in steps} for steps in self.steps))
        return next((name for name in self.names if name in common and self._differs(name)), None)

    def __repr__(self) -> str:
        """Return one line with the index of the element and the result (the dequantized value) by each recipe."""
        ends = (f"{id}: {steps[-1].value:g}" for id, steps in zip(self.recipes, self.steps, strict=True))
        return f"Explanation(element {self.index}, {', '.join(ends)})"

    def _column(self, i: int) -> dict[str, ExplainedStep]:
        """Return the steps of recipe number i, counted from 0, as {name of the step: step}."""
        return {step.name: step for step in self.steps[i]}

    def _differs(self, name: str) -> bool:
        """Return whether the step `name` has different bits or different formats in two recipes that have it."""
        return len({(step.bits, step.format) for steps in self.steps for step in steps if step.name == name}) > 1

    def _panels(self) -> Iterable[Panel]:
        """Yield the table that print() shows, with one row per step."""
        columns = [self._column(i) for i in range(len(self.recipes))]
        parting, rows, is_compared = self.parting, [], len(columns) > 1
        for name in self.names:
            steps = [column.get(name) for column in columns]
            cells = [cell for step in steps for cell in (str(step).split("  ") if step else (_ABSENT, ""))]
            mark = _FIRST if name == parting else _DIFFERS if self._differs(name) else ""
            rows.append((name, *cells, *((mark,) if is_compared else ())))
        heads = [cell for id in self.recipes for cell in (id, "bits")]
        title = f"Element [{', '.join(map(str, self.index))}], step by step"
        yield Panel(title, columns=("step", *heads, *(("",) if is_compared else ())), rows=tuple(rows))


@explains_calls
@ieee(OP)
def explain(
    x: Array,
    recipe: RecipeId | Recipe | Sequence[RecipeId | Recipe],
    index: int | Sequence[int],
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
) -> Explanation:
    """Show how a recipe quantizes one element of an array, step by step, as its producer computes it.

    The steps are the amaxes, the tensor scale, the block scale before and after rounding, the factor, the quotient or
    product, the code, and the decoded value. Each has its number and its bits. For hierarchical recipes, the scale of
    each level is a step, such as "scale per 512", "block scale" and "exponent bit per 8". Several recipes are shown
    side by side, and the first step at which they differ is marked.

    Args:
        x: float32, float16 or bfloat16 array, as for fp4kit.quantize. It is quantized as a whole: its other elements
            determine the amaxes.
        recipe: a recipe id, an alias or a Recipe; or several of them.
        index: the index of the element in x: one integer per axis, or an integer for x with one axis. Negative integers
            count from the end.
        axis: the axis along which blocks run.
        tensor_amax: as for fp4kit.quantize; None computes it from x.
        block_amax: as for fp4kit.quantize, for recipes that accept it.
        rounding: "nearest" or "stochastic", as for fp4kit.quantize. For "stochastic", the random byte of the element is
            a step.
        seed: the seed or the random bytes for stochastic rounding, as for fp4kit.quantize.
        hadamard: False, True or "no_signs", as for fp4kit.quantize. The transformed element is a step. A block must
            have a multiple of 16 columns, unless the recipe has no blocks.

    Returns:
        An Explanation. `explanation["code"]` is the step "code" of the first recipe, and `explanation.steps` has the
        steps of all recipes.

    Raises:
        TypeError: index does not consist of integers, x has an unsupported dtype, or a recipe is neither an id nor a
            Recipe.
        ValueError: x or another argument does not fit the recipe, as for fp4kit.quantize.
        ValueError: recipe is an empty sequence.
        IndexError: index is out of range, or does not have one integer per axis of x.

    Numerics:
        The last steps, "code" and "result", equal fp4kit.quantize and fp4kit.dequantize in every bit. For recipes that
        only fake-quantize, "result" equals fp4kit.fake_quantize. Arithmetic is float32 unless a step names another
        format. Steps that a recipe does not compute are left out.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.linspace(-1, 1, 32, dtype=np.float32)
        >>> print(fp4kit.explain(x, "mxfp4", 3))
        Element [3], step by step
          step                        mxfp4-ocp                bits
          element                    -0.8064516  float32 0xbf4e739d
          block amax                          1  float32 0x3f800000
          amax, rounded by the rule           1  float32 0x3f800000
          block scale                      0.25       E8M0 01111101
          factor to multiply by               4  float32 0x40800000
          element * factor           -3.2258065  float32 0xc04e739d
          code                               -3           E2M1 1101
          result                          -0.75  float32 0xbf400000
    """
    recipes: list[Any] = list(recipe) if isinstance(recipe, (list, tuple)) else [recipe]
    if not recipes:
        raise ValueError(f"{OP}: recipe is an empty sequence; needs at least one recipe")
    array = import_to_host(OP, x=x)
    at = checked_index(OP, index, array.shape)
    amaxes = {"tensor_amax": _on_host(tensor_amax), "block_amax": _on_host(block_amax)}
    options = QuantizeOptions(rounding=rounding, seed=_on_host(seed), hadamard=hadamard)
    calls = [fake_call(OP, array, r, axis, options, **amaxes) for r in recipes]
    for r in (call.recipe for call in calls if call.mask is not None):
        # Only one block is computed, which must hold whole blocks of the transform.
        if r.block is not None and r.block_size % HADAMARD_BLOCK:
            raise ValueError(
                f"{OP}: {r.id} has blocks of {r.block_size} columns; hadamard needs a multiple of {HADAMARD_BLOCK}"
            )
    return Explanation(at, tuple(call.recipe.title for call in calls), tuple(tuple(_explained(c, at)) for c in calls))


def _on_host(array: Any) -> Any:
    """Return an argument that may be an array on a GPU, such as amaxes or random bytes, as a NumPy array."""
    is_number = isinstance(array, np.generic) or not hasattr(array, "shape")
    return array if is_number else import_to_host(OP, array=array)


def checked_index(op: str, index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element of x as a tuple with one non-negative integer per axis."""
    given = tuple(index) if isinstance(index, (tuple, list)) else (index,)
    parts = tuple(as_index(op, "index", part) for part in given)
    if len(parts) != len(shape):
        raise IndexError(
            f"{op}: index {given} has {len(parts)} integers; needs {len(shape)}, because x has shape {shape}"
        )
    if not all(-n <= i < n for i, n in zip(parts, shape, strict=True)):
        raise IndexError(f"{op}: index {given} is out of range; x has shape {shape}")
    return tuple(i % n for i, n in zip(parts, shape, strict=True))


def _explained(call: Call, index: tuple[int, ...]) -> Iterable[ExplainedStep]:
    """Yield the steps by which the recipe of a call quantizes the element at `index`, and then decodes it."""
    r = call.recipe
    if r.search and rules.SEARCHES[r.search].whole_array and call.x.size:  # it reads the whole array
        call = searched(call, None)
    crop, row, column = _crop(call, index)
    with specification(), np.errstate(all="ignore"), traced() as steps:
        show("element", crop.x)
        if crop.recipe.fake_only:
            run(OP, "fake_quantize", False, crop)
        else:
            run(OP, "dequantize", False, run(OP, "quantize", False, crop), crop.x.dtype)
    # Without block scales, the "tensor scales" of a recipe with one per block are what its users call block scales.
    name = r"\1" if r.tensor_scaling != "block" else r"block \1" if r.scale is None else rf"\1 per {r.tensor_columns}"
    for step in _readable([_picked(step, crop.x.shape, row, column) for step in steps]):
        yield replace(step, name=re.sub("^tensor (.*)", name, step.name)) if r.tensor_scaling == "block" else step


def _crop(call: Call, index: tuple[int, ...]) -> tuple[Call, int, int]:
    """Return (crop, row, column): a call for only the block that holds an element, and the element's position in it."""
    r, moved, amax = call.recipe, call.moved, call.tensor_amax
    where = (*index[: call.axis], *index[call.axis + 1 :], index[call.axis])
    if moved.ndim == 1:
        moved, where = moved[None], (0, *where)
    *lead, row, column = where
    width = r.length_multiple if call.mask is None else max(r.length_multiple, HADAMARD_BLOCK)
    top, left = row // r.block_rows * r.block_rows, column // width * width
    rows, columns = slice(top, top + r.block_rows), slice(left, left + width)
    blocks = slice(left // r.block_size, (left + width) // r.block_size)

    def cut(a: np.ndarray, across: slice | int) -> np.ndarray:
        """Return the part that belongs to the block, from an array with elements, amaxes or bytes of all of x."""
        part: np.ndarray = a.reshape(*moved.shape[:-1], -1)[tuple(lead)][rows, across]
        return part

    if amax is None and r.tensor_scaling != "none":
        amax = compute_tensor_amax(call.moved, r, call.mask)
    if amax is not None and is_per_expert(amax, r):
        amax = np.asarray(amax[lead[0]])
    elif r.tensor_scaling in ("row", "block"):
        outer = slice(left // r.tensor_columns, -(-(left + width) // r.tensor_columns))
        amax = cut(amax, 0 if r.tensor_scaling == "row" else outer)
    block_amax = None if call.block_amax is None else cut(call.block_amax, blocks)
    x, random = np.ascontiguousarray(cut(moved, columns)), call.random
    if isinstance(random, int):
        first = int(np.ravel_multi_index((*lead, 0), moved.shape[:-1])) * moved.shape[-1]
        stream = stream_of(r, random, first, moved.shape[-1])
        part = stream.tile if isinstance(stream, RandomStream) else stream.cut
        random = part(slice(top, min(top + r.block_rows, moved.shape[-2])), columns)
    elif random is not None:
        random = cut(random, columns)
    crop = call._replace(x=x, moved=x, axis=1, tensor_amax=amax, block_amax=block_amax, random=random)
    return crop, row - top, column - left


def _picked(step: Step, shape: tuple[int, ...], row: int, column: int) -> ExplainedStep:
    """Return the ExplainedStep of the element (row, column) of a block, from a step recorded for the whole block.

    A step has one entry for all elements, or one per row, per group of a row or per element.
    """
    flat, fmt, (m, k) = step.result.reshape(-1), step.format, shape
    groups = flat.size // m if flat.size % m == 0 else 0
    entry = flat[row * groups + column // (k // groups) if groups and k % groups == 0 else 0]
    if entry.dtype == bool:
        return ExplainedStep(step.name, 2.0**entry, int(entry), "exponent1", 1)
    if fmt is not None:
        return ExplainedStep(step.name, float(fmt.values[int(entry)]), int(entry), fmt.name, fmt.bits)
    bits = int(entry.reshape(1).view(f"u{entry.dtype.itemsize}")[0])
    format = "bfloat16" if entry.dtype == ml_dtypes.bfloat16 else entry.dtype.name
    return ExplainedStep(step.name, float(entry), bits, format, 8 * entry.dtype.itemsize)


def _readable(steps: list[ExplainedStep]) -> Iterable[ExplainedStep]:
    """Yield the steps with unique names, without those that only repeat another step."""
    # A step whose name begins with "tensor" is computed again for the block, so only the first of a name is yielded.
    seen: dict[str, int] = {}
    by_name = {step.name: step for step in steps}
    code, result = by_name.get("code"), by_name["result"]
    for step in steps:
        repeats_code = step.name == "element value" and code and _same(code.value, step.value)
        repeats_result = step.name == "decoded value" and result.format == step.format
        if repeats_code or repeats_result or (step.name.startswith("tensor") and step.name in seen):
            continue
        count = seen[step.name] = seen.get(step.name, 0) + 1
        yield step if count == 1 else replace(step, name=f"{step.name} ({count})")


def _same(a: float, b: float) -> bool:
    """Return whether two numbers are equal in every bit; NaN equals NaN."""
    return (a == b and np.signbit(a) == np.signbit(b)) or (a != a and b != b)
