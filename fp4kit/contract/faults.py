"""Find the fault behind bytes or values that no recipe gives: a scale, dtype, order or orientation, or another weight.

A fault is a pair (step, text). Texts say what one side has, such as "the tensor scale is inverted".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.contract import sides as side_rows
from fp4kit.contract.compare_layer import LayerParity
from fp4kit.contract.sides import Arithmetic, Matrix, Rows, StepName, Whole, same
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.rules import ROUNDINGS
from fp4kit.storage.files import listed


class Fault(NamedTuple):
    """A fault in the bytes of a side, and the step at which it shows."""

    step: StepName
    text: str


_NARROW = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_BLOCKS = (16, 32, 64, 128)
_PROBE = 16  # rows on which every recipe is tried
_EVERY = "every quantized layer differs, so the recipe or the weights are others"
_SAME_CODES = "codes and scales are equal, so the sides only decode differently; decode alike, from one container"
_UNKNOWN = "; either the weight is another one (stale), or fp4kit does not know the arithmetic"
VECTOR = "nothing quantizes these values, so one side has others: stale ones, from an earlier step; send them again"
_CORNER = 128  # rows and columns of which a matrix and its transpose are compared by their angle
_WHOLE = "iub"  # kinds of dtypes without fractions
_DISTINCT = 8  # smallest number of different values that show a common rounding or factor
_NEAR = 0.04  # a factor this near to 1 is not named
_ALIKE = 0.9  # smallest cosine between a decoded weight and its transpose, decoded from another quantization


def with_making(
    found: Rows,
    x: np.ndarray,
    whole: Whole,
    rows: np.ndarray,
    tried: Sequence[Arithmetic],
    weight: Callable[[], np.ndarray],
    amaxes: Callable[[Recipe], Sequence[Any]],
) -> Rows:
    """Find out how the bytes of a layer were made from its weight, or which fault they have.

    x, weight: the compared rows of the weight, and a function that returns all rows, after the side's transform.
    amaxes: a function that returns, for a recipe, each tensor amax of the compared rows that is to be tried.
    """
    part, made = found.part, side_rows.with_making(found, x, whole, rows, tried)
    if made.how is not None:
        return made
    rights = [(one, side_rows.made(x, one.recipe, one.amax)) for one in tried]
    for one, right in rights:
        if fault := between(part, right, one.recipe.title):
            return replace(found, how=one, step=fault.step, wrong=fault.text)
    if not isinstance(part, Quantized):
        made = side_rows.fake_making(found, x, part, tried)
        if made.how is not None:
            return made
    for one in variants(tried, part):
        if _gives(one, x, part):
            return replace(found, how=one)
    fault = orientation(weight(), part, rows, tried, "the unquantized weight")
    for _, right in rights:
        fault = fault or other_order(side_rows.whole_of(whole), part, right, rows, "the unquantized weight")
    if fault:
        return replace(found, step=fault.step, wrong=fault.text)
    if isinstance(part, Quantized):
        return side_rows.identified(found, x, part)
    for one in by_recipe(part, x, amaxes):
        if _gives(one, x, part):
            return replace(found, how=one)
    return found


def _gives(one: Arithmetic, x: np.ndarray, part: Matrix) -> bool:
    """Return whether an Arithmetic gives the bytes of a side, or the values by its rule of fake_quantize."""
    if side_rows.gives(one, x, part):
        return True
    if isinstance(part, Quantized) or one.recipe.fake_rule is None:
        return False
    return same(side_rows.faked(x, one.recipe, one.amax).astype(np.float32), part.astype(np.float32))


def between_sides(compared: Sequence[Rows], wholes: Sequence[Whole | None], rows: np.ndarray) -> list[Rows]:
    """Return the compared rows with the fault of one side, judged by the other side, if nothing is known yet."""
    train, rollout = compared
    right, whole = wholes
    a, b = train.part, rollout.part
    if any(one.wrong for one in compared) or right is None or whole is None or _alike(a, b):
        return [*compared]
    p, q = train.how, rollout.how
    if p is not None and q is not None and (_dtypes(a, b) < 2 or p.recipe != q.recipe):
        return [*compared]
    fault = between(b, a, train.label)
    if p is None and q is None:
        right, whole = side_rows.whole_of(right), side_rows.whole_of(whole)
        fault = fault or orientation(right, b, rows, (), f"that of {train.label}")
        fault = fault or other_order(whole, b, a, rows, train.label)
    if fault:
        return [train, replace(rollout, step=fault.step, wrong=fault.text)]
    fault = between(a, b, rollout.label)
    return [replace(train, step=fault.step, wrong=fault.text), rollout] if fault else [*compared]


def _dtypes(a: Matrix, b: Matrix) -> int:
    return len({one.dtype for one in (a, b) if isinstance(one, np.ndarray)})


def _alike(a: Matrix, b: Matrix) -> bool:
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return a.recipe == b.recipe and side_rows.equal(a, b)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and same(a, b)


def turned(name: str, shapes: Sequence[tuple[int, ...]], labels: tuple[str, str]) -> LayerParity | None:
    """Return the result for a layer that one side stores as the transpose of what the other side stores."""
    a, b = shapes
    if len(a) < 2 or a[:-2] != b[:-2] or a[-2:] != b[:-3:-1]:
        return None
    text = f"{labels[1]} has the shape {b}, that of the transpose of {labels[0]}'s {a}; transpose it"
    size = int(np.prod(a))
    return LayerParity(name, "weight", 0, size, values=(size, size), step="value", setting=text)


def variants(tried: Sequence[Arithmetic], part: Matrix) -> Iterator[Arithmetic]:
    """Yield copies of ``tried`` with another rounding, another application of the factor or another block size."""
    changes: list[dict[str, Any]] = [{"rounding": one} for one in ROUNDINGS]
    changes += [{"apply": one} for one in ("multiply", "divide")]
    if not isinstance(part, Quantized):
        changes += [{"block": (1, size)} for size in _BLOCKS if part.shape[1] % size == 0]
    for one in tried:
        for change in changes:
            if "block" in change and (one.recipe.block is None or one.recipe.block_rows > 1):
                continue
            try:
                recipe = replace(one.recipe, **change)
            except ValueError:  # the recipe does not allow the change
                continue
            if recipe != one.recipe:
                yield one._replace(recipe=recipe)


def by_recipe(part: np.ndarray, x: np.ndarray, amaxes: Callable[[Recipe], Sequence[Any]]) -> Iterator[Arithmetic]:
    """Yield the Arithmetic of each listed recipe that gives the values of the first rows of a side without codes."""
    for r in RECIPES.values():
        rows = min(len(x), -(-_PROBE // r.block_rows) * r.block_rows)
        if x.shape[1] % r.length_multiple or r.stochastic_only:
            continue
        for amax in amaxes(r):
            one = Arithmetic(r, amax, ())
            start = one if amax is None or not amax.ndim else one._replace(amax=amax[:rows])
            if _gives(start, x[:rows], part[:rows]):
                yield one


def between(part: Matrix, right: Matrix, of: str) -> Fault | None:
    """Return the fault that makes ``part`` from ``right``, which texts call ``of``; None if no known fault does."""
    with np.errstate(all="ignore"):
        if isinstance(part, Quantized):
            return _of_scales(part, right, of) if isinstance(right, Quantized) else None
        if part.dtype.kind in _WHOLE or (isinstance(right, np.ndarray) and right.dtype.kind in _WHOLE):
            return None
        if len(np.unique(_values(part).reshape(-1)[: 1 << 12].astype(np.float64))) < _DISTINCT:
            return None  # a constant may be many roundings and multiples of another one
        step: StepName = "decode" if isinstance(right, Quantized) else "value"
        for text, values in _decodings(right, of):
            if same(side_rows.values_of(values, part), side_rows.values_of(part, values)):
                return Fault(step, text)
        factor = _factor(part, right)
        return Fault(step, f"the values are {factor:.4g} times those of {of}; apply one scale") if factor else None


def _of_scales(part: Quantized, right: Quantized, of: str) -> Fault | None:
    p, q = part.tensor_scale, right.tensor_scale
    if part.recipe.element != right.recipe.element or not same(part.packed, right.packed):
        return None
    if same(part.block_scale, right.block_scale) and p is not None and q is not None and np.shape(p) == np.shape(q):
        found, scale = np.asarray(p, np.float32), np.asarray(q, np.float32)
        inverse = np.float32(1) / scale
        if np.all(np.abs(found - inverse) <= 2 * np.spacing(np.abs(inverse))) and not same(found, scale):
            text = f"the tensor scale is inverted: it is 1 / that of {of}, a divisor, but decoding multiplies by it"
            return Fault("tensor scale", text)
        if np.all(found == 1) and not same(found, scale):
            return Fault("tensor scale", f"the tensor scale is 1: that of {of} is not applied")
        for name, dtype in _NARROW.items():
            if same(found, scale.astype(dtype).astype(np.float32)) and not same(found, scale):
                text = f"the tensor scale is that of {of} rounded to {name}; load scales in float32"
                return Fault("tensor scale", text)
    step: StepName = "tensor scale" if same(part.block_scale, right.block_scale) else "block scale"
    factor = _factor(part, right)
    return Fault(step, f"every {step} is {factor:.4g} times that of {of}; apply one scale") if factor else None


def _factor(part: Matrix, right: Matrix) -> float | None:
    """Return the factor, far from 1, by which all values of ``part`` are those of ``right``; None if there is none."""
    a, b = (np.asarray(_values(one), np.float64).reshape(-1) for one in (part, right))
    sizes = np.abs(b)
    if not np.isfinite(sizes).all() or len(np.unique(sizes[: 1 << 12])) < _DISTINCT:
        return None
    factor = float(a[sizes.argmax()] / sizes.max() * np.sign(b[sizes.argmax()]))
    is_far = np.isfinite(factor) and abs(factor - 1) > _NEAR
    return factor if is_far and np.allclose(a, factor * b, rtol=_NEAR / 4, atol=0) else None


def _values(matrix: Matrix) -> np.ndarray:
    return np.asarray(matrix.dequantize(np.float32) if isinstance(matrix, Quantized) else matrix)


def _decodings(right: Matrix, of: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (text, values) for the ways in which load routes decode codes, or round values, that differ in dtype."""
    if not isinstance(right, Quantized):
        for name, dtype in (_NARROW | {"float32": np.dtype(np.float32)}).items():
            yield f"the values are those of {of} rounded to {name}; use one dtype on both sides", right.astype(dtype)
        wide = right.astype(np.float32)
        for name, number in (("plus", 1), ("minus", -1)):
            text = f"the values are those of {of} {name} 1, as some formats store norms; store them alike"
            yield text, (wide + number).astype(right.dtype)
        return
    values = _values(right)
    for name, dtype in _NARROW.items():
        yield f"the values are decoded from {of}, then rounded to {name}; decode to one dtype", values.astype(dtype)
    scale = right.tensor_scale
    for name, dtype in _NARROW.items() if scale is not None else ():
        rounded = np.asarray(scale, np.float32).astype(dtype).astype(np.float32)
        text = f"the values are decoded from {of} with the scale rounded to {name} (load route)"
        routed = _values(replace(right, tensor_scale=rounded, tensor_amax=None))
        yield f"{text}; load scales in float32", routed
        yield f"{text} and are rounded to {name} themselves; load scales in float32", routed.astype(dtype)


def orientation(x: Matrix, part: Matrix, rows: np.ndarray, tried: Sequence[Arithmetic], of: str) -> Fault | None:
    """Return a fault if ``part`` is the rows of the transpose of x: of its values, or of its codes by ``tried``."""
    if x.shape[0] != x.shape[1]:
        return None
    fault = Fault("value", f"the weight is the transpose of {of}; transpose it")
    if isinstance(x, Quantized) or (isinstance(part, Quantized) and not tried):
        first = np.flatnonzero(rows < _CORNER)
        own = _corner(part, len(first), x.shape[1])
        cosine = _cosine(_corner(x, x.shape[0], _CORNER).T[rows[first]], own)
        return fault if cosine > _ALIKE > _cosine(_corner(x, _CORNER, x.shape[1])[rows[first]], own) else None
    turned = np.ascontiguousarray(x.T[rows])
    if isinstance(part, np.ndarray) and same(turned, part):
        return fault
    for one in tried:
        one = one if one.amax is None or not one.amax.ndim else one._replace(amax=side_rows.amax_of(turned, one.recipe))
        if side_rows.gives(one, turned, part):
            return fault
    return None


def _corner(matrix: Matrix, rows: int, columns: int) -> np.ndarray:
    box = slice(0, min(rows, matrix.shape[0])), slice(0, min(columns, matrix.shape[1]))
    return _values(box_of(matrix, box) if isinstance(matrix, Quantized) else matrix[box])


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of the angle between two arrays as vectors; 0 if one has no length."""
    p, q = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    with np.errstate(all="ignore"):
        length = float(np.sqrt(p @ p) * np.sqrt(q @ q))
        return float(p @ q) / length if 0 < length < np.inf else 0.0


def other_order(whole: Matrix, part: Matrix, right: Matrix, rows: np.ndarray, of: str) -> Fault | None:
    """Return a fault if a side has ``right``, the rows that belong at the indices ``rows``, in another order.

    whole, part: all rows of the side, and those that it has at these indices.
    """
    if isinstance(whole, Quantized) != isinstance(right, Quantized):
        return None
    size = right.recipe.block_size if isinstance(right, Quantized) else 1
    count = right.shape[1] // size
    found = {"row": _moved(_rows(whole), _rows(right), rows.tolist())}
    if all(one.shape[1] % count == 0 for one in (*_stored(part), *_stored(right))):
        noun = "column" if size == 1 else "block of columns"
        found[noun] = _moved(_columns(part, count), _columns(right, count), range(count))
    for noun, moved in found.items():
        if moved:
            text = f"the {noun.partition(' ')[0]}s are in another order: {noun} {moved[0]} of {of} is {noun} {moved[1]}"
            return Fault("value", f"{text} (interleaved, swapped or permuted)")
    return None


def _moved(own: list[bytes], wanted: list[bytes], places: Sequence[int]) -> tuple[int, int] | None:
    """Return (place, place in ``own``) of the first of ``wanted`` that is elsewhere; None if one is nowhere."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for i, one in enumerate(own):
        found[one].append(i)
    moved = None
    for i, one in zip(places, wanted, strict=True):
        if one not in found or (i not in found[one] and len(found[one]) > 1):  # rows of zeros tell nothing
            return None
        if i not in found[one] and moved is None:
            moved = i, found[one][0]
    return moved


def _rows(matrix: Matrix) -> list[bytes]:
    arrays = [*map(np.ascontiguousarray, _stored(matrix))]
    return [b"".join(one[i].tobytes() for one in arrays) for i in range(len(arrays[0]))]


def _columns(matrix: Matrix, count: int) -> list[bytes]:
    """Return the bytes of each of ``count`` equal groups of columns: its codes and block scales, or its values."""
    parts = [one.reshape(len(one), count, -1).swapaxes(0, 1) for one in _stored(matrix)]
    return [b"".join(one[i].tobytes() for one in parts) for i in range(count)]


def _stored(matrix: Matrix) -> list[np.ndarray]:
    parts = (matrix.packed, matrix.block_scale) if isinstance(matrix, Quantized) else (matrix,)
    return [part for part in parts if part is not None]


@dataclass(frozen=True)
class Seen:
    """The parts of a compared layer that are kept for comparisons with other layers, one per side: (train, rollout).

    digests: hashes of the compared codes and block scales, or of the values. scales: tensor scales, None for others.
    plain: True if no side quantizes the layer. makers: the recipes that give the bytes of a side; None for unknown.
    known: True if both sides are explained by their recipes, or by a fault.
    """

    digests: tuple[int, int]
    scales: tuple[bytes | None, bytes | None]
    recipes: tuple[Any, ...]
    plain: bool
    makers: tuple[str | None, ...]
    known: bool


def seen(compared: Sequence[Rows], recipes: Sequence[Recipe | None], found: LayerParity, plain: Sequence[bool]) -> Seen:
    """Return the Seen of a layer, of which ``plain`` says for each side that it has the unquantized weight."""
    digests, scales = [], []
    for one in compared:
        digests.append(hash((one.part.shape, *(part.tobytes() for part in _stored(one.part)))))
        scale = one.part.tensor_scale if isinstance(one.part, Quantized) else None
        scales.append(None if scale is None or np.ndim(scale) else np.float32(scale).tobytes())
    unknown = [one.label for one in compared if one.how is None and not one.wrong]
    recipe = tuple(r.title if r is not None else None for r in recipes)
    makers = tuple(None if one.how is None else one.how.recipe.title for one in compared)
    known = found.equal or not unknown or _is_named(found)
    return Seen((digests[0], digests[1]), (scales[0], scales[1]), recipe, all(plain), makers, known)


def _is_named(found: LayerParity) -> bool:
    return bool(found.setting) and "nearest is" not in found.setting and "instead of codes" not in found.setting


def by_other_layers(
    found: Sequence[LayerParity], kept: Mapping[str, Seen], labels: tuple[str, str], has_weights: bool
) -> Iterator[LayerParity]:
    """Yield the layers, and name causes that only other layers show: swapped layers, shared amaxes, stale weights.

    has_weights: whether the unquantized weights are known, so that recipes were tried.
    """
    owners: tuple[dict[int, list[str]], ...] = (defaultdict(list), defaultdict(list))
    for name, one in kept.items():
        for owner, digest in zip(owners, one.digests, strict=True):
            owner[digest].append(name)
    of_kept = [(layer, kept[layer.name]) for layer in found if layer.name in kept]
    equal = {(one.recipes, one.plain) for layer, one in of_kept if layer.equal}
    quantized = [layer for layer, one in of_kept if not one.plain]
    all_differ = len(quantized) > 1 and not any(layer.equal for layer in quantized)
    for layer in found:
        if layer.name not in kept or kept[layer.name].known:
            yield layer
            continue
        if layer.same_codes:
            yield replace(layer, setting=layer.setting or _SAME_CODES)
            continue
        one = kept[layer.name]
        text = _cause(layer, kept, owners, equal, labels)
        if not text and all_differ and not one.plain:
            pairs = zip(labels, one.makers, strict=True)
            made = [f"{label} has the bits of {maker}" for label, maker in pairs if maker]
            way = [] if has_weights else ["pass the unquantized weights (weights=) to name the recipe"]
            every = f"every quantized layer differs: {others}" if (others := _recipes_differ(one)) else _EVERY
            text = "; ".join(filter(None, (layer.setting, *made, every, *way)))
        yield replace(layer, setting=text or layer.setting + _UNKNOWN * ("nearest is" in layer.setting))


def _recipes_differ(one: Seen) -> str:
    """Return text that names the recipes of both sides if they differ; "" if they do not, or one is unknown."""
    return (
        f"the recipes differ ({', '.join(one.recipes)})"
        if None not in one.recipes and len(set(one.recipes)) > 1
        else ""
    )


def _cause(
    layer: LayerParity,
    kept: Mapping[str, Seen],
    owners: Sequence[Mapping[int, Sequence[str]]],
    equal: set[tuple[Any, bool]],
    labels: tuple[str, str],
) -> str:
    """Return the text of the cause that other layers show for the difference of a layer; "" if they show none."""
    one = kept[layer.name]
    for i in (1, 0):
        there = owners[1 - i].get(one.digests[i], ())
        if there and layer.name not in there:
            return f"{labels[i]} has here the weight that {labels[1 - i]} has as {listed(there)}: swapped layers"
    parent = layer.name.rpartition(".")[0]
    for i in (1, 0):
        siblings = [
            name
            for name, other in kept.items()
            if name != layer.name and name.rpartition(".")[0] == parent and other.scales[i] is not None
            if other.scales[i] == one.scales[i] and other.scales[1 - i] != one.scales[1 - i]
        ]
        if siblings:
            return (
                f"{labels[i]} has one tensor scale for {layer.name} and {listed(siblings)}, and {labels[1 - i]} does"
                " not; let the same layers share an amax (shared_amax)"
            )
    if (one.recipes, one.plain) not in equal:
        return ""
    if layer.kind == "tensor":
        return "other tensors are equal, so this one was computed or sent at another time (stale)"
    if others := _recipes_differ(one):
        return f"{others}, although they give the same bytes in other layers"
    return (
        "other layers of the same recipe are equal, so one side has another weight here: a stale one, from an earlier"
        " step, or a damaged one; send it again"
    )
