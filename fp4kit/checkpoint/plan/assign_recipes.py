"""Assign recipes to the layers of a model within a budget of bits per weight (--bits): measure errors, then choose. A
unit is a group of layers that must share a recipe, because engines fuse them. A piece is some rows of one matrix of a
weight; its rows are measured together.

The error of a linear operator under a recipe is its noise-to-signal ratio: the sum of squared errors of its weights,
divided by the sum of their squares. If column weights are given, both sums weight each column by the mean square of its
input. This ratio estimates the relative noise power of the operator's output, so that operators of all sizes and
magnitudes are comparable. The error of an assignment is the sum over all operators. The loss of a language model grows
by about a weighted sum of these ratios ("Pushing the Limits of Large Language Model Quantization via the Linearity
Theorem", arXiv 2411.17525). The weights of that sum are not known here, so all operators get equal weights.

An operator consists of the layers that engines compute as one product: q, k and v; gate and up; or one kind of layer
of all experts of a decoder layer.
"""

from __future__ import annotations

import glob
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import checks_kinds
from fp4kit.checkpoint.convert.job import ChannelWeights
from fp4kit.checkpoint.executors import run_all
from fp4kit.checkpoint.loaders.exclusions import container_of
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Piece, Weight, pieces
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.names import fused_groups, group_name, shared_amax_groups, split_module
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.cpu.library import num_threads
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.files import DTYPE_BITS, CheckpointError, shown

# Errors are rounded to multiples of this before they are compared. All further arithmetic is in exact integers.
_GRAIN = 2.0**-50


class Option(NamedTuple):
    """One choice for a unit, usually a recipe.

    Attributes:
        name: the id of a recipe, or another name of the choice, such as "keep".
        bits: the number of bits that the unit's layers take with this choice.
        error: the error that the choice causes, at least 0.
    """

    name: str
    bits: int
    error: float


@dataclass(frozen=True)
class LayerGroup:
    """A unit: layers that must share a choice, and the options that there are.

    Attributes:
        name: a readable name, for messages.
        layers: the names of the layers in the source.
        weights: the number of elements of these layers.
        options: the possible choices, at least one.
    """

    name: str
    layers: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


class Point(NamedTuple):
    """An assignment of one option to every unit.

    Attributes:
        bits: the total number of bits.
        error: the total error.
        choices: per unit, the index of the chosen option.
    """

    bits: int
    error: float
    choices: tuple[int, ...]


class _Step(NamedTuple):
    """A step replaces one option of a unit by the next option on the unit's hull, which has more bits and less error.

    Attributes:
        unit: the index of the unit.
        options: the indices of the option that it replaces, and of the new one.
        gain: by how much the error falls, in grains (multiples of 2^-50).
        cost: by how many bits the size grows.
    """

    unit: int
    options: tuple[int, int]
    gain: int
    cost: int


def _grains(option: Option) -> int:
    """Return the error of an option as a whole number of grains: error / 2^-50, rounded to the nearest integer."""
    # ``solve`` calculates with grains, so that its comparisons are exact.
    return round(option.error / _GRAIN)


def _hull(options: Sequence[Option]) -> list[int]:
    """Return the indices of the options on the lower convex hull of the points (bits, error), by increasing bits."""
    found: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].bits, options[i].error)):
        one = options[i]
        if found and _grains(one) >= _grains(options[found[-1]]):
            continue
        while len(found) > 1:
            a, b = options[found[-2]], options[found[-1]]
            falls = (_grains(a) - _grains(b), _grains(b) - _grains(one))
            if falls[0] * (one.bits - b.bits) > falls[1] * (b.bits - a.bits):
                break
            found.pop()
        found.append(i)
    return found


def _path(units: Sequence[LayerGroup]) -> tuple[list[int], list[_Step]]:
    """Return the smallest choice of every unit, and the steps along the hulls, sorted by decreasing gain per bit."""
    hulls = [_hull(unit.options) for unit in units]
    found = []
    for number, hull in enumerate(hulls):
        for pair in pairwise(hull):
            a, b = (units[number].options[i] for i in pair)
            found.append(_Step(number, pair, _grains(a) - _grains(b), b.bits - a.bits))
    # Within a unit, the ratio falls strictly along the hull, so that a unit's steps stay in their order.
    return [hull[0] for hull in hulls], sorted(found, key=lambda step: -step.gain / step.cost)


def _point(units: Sequence[LayerGroup], choices: Sequence[int]) -> Point:
    """Return the Point of an assignment: its total bits, its total error and its choices."""
    chosen = [unit.options[choice] for unit, choice in zip(units, choices, strict=True)]
    return Point(sum(one.bits for one in chosen), sum(one.error for one in chosen), tuple(choices))


def curve(units: Sequence[LayerGroup]) -> list[Point]:
    """Return optimal assignments by growing size and falling error, from the smallest possible size on."""
    # No assignment of the same size or smaller has a smaller error, because each result minimizes error + slope * bits
    # for some slope.
    choices, steps = _path(units)
    found = [_point(units, choices)]
    for step in steps:
        choices[step.unit] = step.options[1]
        found.append(_point(units, choices))
    return found


def solve(units: Sequence[LayerGroup], budget: int) -> Point:
    """Return the assignment with the smallest total error of all that take at most ``budget`` bits."""
    # The slope is taken at the step at which the budget is exhausted, because the bound is tightest there.
    # Errors are compared as whole multiples of 2^-50, and the slope is a ratio of integers, so that no comparison is
    # rounded.
    choices, steps = _path(units)
    used = _point(units, choices).bits
    if used > budget:
        total = sum(unit.weights for unit in units)
        raise CheckpointError(
            f"bits: {budget / total:.4g} per weight are too few; these candidates need at least {used / total:.4g}"
        )
    slope: _Step | None = None
    for step in steps:
        # After the first step that exceeds the budget, later steps of its unit have no option to start from.
        if used + step.cost <= budget and choices[step.unit] == step.options[0]:
            choices[step.unit], used = step.options[1], used + step.cost
        elif slope is None:
            slope = step
    return _point(units, choices if slope is None else _branch(units, budget, slope, choices))


def _branch(units: Sequence[LayerGroup], budget: int, slope: _Step, known: Sequence[int]) -> list[int]:
    """Return an optimal assignment within the budget: for each unit, the index of its option."""
    p, q = slope.gain, slope.cost
    errors = [[_grains(option) for option in unit.options] for unit in units]
    prices = [
        [q * e + p * o.bits for e, o in zip(es, u.options, strict=True)] for es, u in zip(errors, units, strict=True)
    ]
    least = [min(row) for row in prices]
    best = sum(errors[i][choice] for i, choice in enumerate(known))
    slack = q * best + p * budget - sum(least)  # the prices of a better assignment exceed ``least`` by at most this sum
    keep = [[i for i, price in enumerate(row) if price - low <= slack] for row, low in zip(prices, least, strict=True)]
    # By how much the second smallest price of each unit exceeds the smallest; 0 if there is only one price.
    seconds = [sorted(row)[min(1, len(row) - 1)] - low for row, low in zip(prices, least, strict=True)]
    order = sorted(range(len(units)), key=lambda i: (len(keep[i]), -seconds[i]))
    smallest = [min(units[i].options[option].bits for option in keep[i]) for i in order]
    rest = [sum(smallest[k:]) for k in range(len(order) + 1)]
    # A partial assignment: (bits, error in grains, excess, options as a linked list). A price is error + slope * bits
    # of an option. The excess is the sum of the chosen prices minus the sum of the smallest prices.
    states: list[tuple[int, int, int, Any]] = [(0, 0, 0, None)]
    for k, i in enumerate(order):
        grown = []
        for bits, error, excess, chain in states:
            for option in keep[i]:
                total = bits + units[i].options[option].bits
                more = excess + prices[i][option] - least[i]
                if total + rest[k + 1] <= budget and more <= slack:
                    grown.append((total, error + errors[i][option], more, (option, chain)))
        states = []  # those that no other one dominates, by increasing bits
        for state in sorted(grown, key=lambda state: state[:2]):
            if not states or state[1] < states[-1][1]:
                states.append(state)
    found = list(known)
    linked = min(states, key=lambda state: (state[1], state[0]))[3]
    for i in reversed(order):
        found[i], linked = linked
    return found


def shown_points(points: Sequence[Point], count: int) -> list[Point]:
    """Return at most ``count`` points of a curve, spread evenly over its range of bits, with the first and the last."""
    if len(points) <= count:
        return list(points)
    bits = [point.bits for point in points]
    wanted = [bits[0] + (bits[-1] - bits[0]) * i // (count - 1) for i in range(count)]
    return [points[i] for i in sorted({bisect_left(bits, one) for one in wanted})]


KEEP = "keep"  # the candidate that leaves a layer unquantized
Progress = Callable[[int], AbstractContextManager[Any]]  # called with the number of bytes to read; see assign_recipes
CANDIDATES = ("nvfp4-te", "fp8-modelopt-channel", KEEP)


@dataclass(frozen=True)
class Assignment:
    """The choice of a recipe for each layer, within a budget of bits per weight.

    Attributes:
        budget: the budget, in bits per weight.
        units: groups of layers that must share a choice, with the measured errors of their options.
        chosen: the assignment with the smallest error within the budget.
        curve: assignments for other budgets, each optimal for its size, starting at the smallest possible size.
    """

    budget: float
    units: tuple[LayerGroup, ...]
    chosen: Point
    curve: tuple[Point, ...]

    @property
    def weights(self) -> int:
        """The total number of elements of the layers in ``units``. Bits per weight are computed with this number."""
        return sum(unit.weights for unit in self.units)

    def bits_of(self, point: Point) -> float:
        """Return the bits per weight, scales included, of an assignment.

        Args:
            point: an assignment, such as ``chosen`` or a point of ``curve``.
        """
        return point.bits / self.weights

    @property
    def options(self) -> tuple[Option, ...]:
        """The chosen option of every unit, in the order of ``units``."""
        return tuple(unit.options[choice] for unit, choice in zip(self.units, self.chosen.choices, strict=True))

    @property
    def default(self) -> str:
        """The id of the recipe that most units get. Units that stay unquantized do not count.

        Of two equally frequent recipes, it is the one that occurs first in ``units``. If all units stay unquantized, it
        is the first recipe among the options of the units, or "" if no unit fits any candidate.
        """
        used = [option.name for option in self.options if option.name != KEEP]
        offered = (option.name for unit in self.units for option in unit.options if option.name != KEEP)
        return max(dict.fromkeys(used), key=used.count, default=next(offered, ""))

    @property
    def recipes(self) -> tuple[tuple[str, str], ...]:
        """The (glob of layer names, recipe id) pairs for the layers that get a recipe other than ``default``.

        Layers that stay unquantized are not among them (see ``kept``).
        """
        return tuple((pattern, name) for pattern, name in self._patterns() if name not in (KEEP, self.default))

    @property
    def kept(self) -> tuple[str, ...]:
        """Globs of the names of the layers that stay unquantized."""
        return tuple(pattern for pattern, name in self._patterns() if name == KEEP)

    def _patterns(self) -> Iterable[tuple[str, str]]:
        """Yield (glob, name of the chosen option) pairs that together match every layer of every unit."""
        for unit, option in zip(self.units, self.options, strict=True):
            holders = {container_of(layer) for layer in unit.layers}
            if None in holders:
                yield from ((glob.escape(layer), option.name) for layer in unit.layers)
            else:
                yield from ((f"{glob.escape(str(holder))}.*", option.name) for holder in sorted(map(str, holders)))


@checks_kinds
def assign_recipes(
    source: str | Path,
    bits: float,
    candidates: Sequence[str] = CANDIDATES,
    *,
    format: str | None = None,
    wishes: Wishes | None = None,
    columns: ScaleSearch | None = None,
    progress: Progress = nullcontext,
) -> Assignment:
    """Return the assignment of recipes to layers with the smallest error within a budget of bits per weight.

    All layers to convert are read, and quantized with every candidate. The budget counts these layers only, with their
    scales. Embeddings, norms and other tensors that stay unquantized by rule do not count.

    Args:
        source: an unquantized model directory or safetensors file.
        bits: the budget in bits per weight, such as 5.0.
        candidates: ids of recipes, and "keep" to leave layers unquantized.
        format: the output format, as for make_plan; None for one that can hold all candidates.
        wishes: which layers to assign recipes to; None for all linear layers.
        columns: column weights of the error, as for a scale search; None weights all columns equally.
        progress: a function that is called once, with the number of bytes to read, and returns a context manager. If
            the value of the context manager is callable, it is called after each read with the number of bytes read.

    Returns:
        An Assignment. Pass its ``default`` to make_plan as ``recipe``, and its ``recipes`` as ``recipes``. Add its
        ``kept`` to the ``keep`` of the Wishes.

    Raises:
        CheckpointError: in one of these cases:

            - ``bits`` is not positive and finite, or too small for the candidates.
            - A candidate is named twice, no recipe is named, or a candidate fits no layer.
            - No candidate fits all layers of a unit, and "keep" is not a candidate.
            - The source is quantized, or column weights are missing.
            - A layer holds NaN or infinity, for which no error is defined.
        ValueError: if no recipe has the id of a candidate.

    Numerics: squared errors are summed in float64, of values that are decoded to float32.
    """
    if not bits > 0 or bits == float("inf"):
        raise CheckpointError(f"bits {bits}: a positive number of bits per weight is needed, such as 5.0")
    recipes = [recipe(name) for name in candidates if name != KEEP]
    if len({*candidates}) != len(candidates) or not recipes:
        raise CheckpointError(
            f"candidates {','.join(candidates)}: at least one recipe is needed, and each candidate only once;"
            f" {KEEP} stands for no recipe"
        )
    found = _Candidates(Path(source), recipes, format, wishes or Wishes())
    with progress(2 * sum(weight.nbytes for weight in found.weights.values())) as tick:
        units = _measured(found, KEEP in candidates, columns, tick if callable(tick) else None)
    budget = int(bits * sum(unit.weights for unit in units))
    return Assignment(bits, units, solve(units, budget), tuple(curve(units)))


class _Candidates:
    """Find the layers that each candidate can quantize, and how it stores them.

    Attributes:
        forms: recipe id -> the recipe and its container.
        weights: tensor name -> weight, for all layers that at least one candidate can quantize.
        fits: recipe id -> the tensor names of the layers that the candidate can quantize.

    Raises:
        CheckpointError: if the layers are quantized, or if a candidate fits no layer.
    """

    def __init__(self, source: Path, recipes: Sequence[Recipe], format: str | None, wishes: Wishes) -> None:
        first, *others = recipes
        self.config = open_source(source).config
        request = Request(first, format, wishes, recipes=tuple((one.id, one) for one in others))
        # The request has no input scales. Model-Optimizer's FP8 needs them only when it is written, not for errors.
        mixture = request.mixture_for(self.config)
        choices = [mixture.default, *(choice for _, choice in mixture.choices)]
        self.forms = {one.recipe.id: (one.recipe, one.form) for one in choices if one.form is not None}
        self.weights: dict[str, Weight] = {}
        self.fits: dict[str, set[str]] = {}
        for name, (one, form) in self.forms.items():
            scaled = 1.0 if form.has_tensor_scale else None
            plan = make_plan(source, one, format=form.format, wishes=wishes, input_scale=scaled)
            found = {tensor.name: tensor.pieces[0].weight for tensor in plan.converted}
            quantized = next((weight for weight in found.values() if weight.container is not None), None)
            if quantized is not None:
                raise CheckpointError(f"--bits: {shown(quantized.name)} is quantized; convert the unquantized release")
            self.fits[name] = set(found)
            self.weights |= found

    def parts(self, weight: Weight) -> Iterator[Piece]:
        """Yield the pieces of a weight. The rows of a piece are measured together, and get one recipe."""
        _, form = next(iter(self.forms.values()))
        return pieces(weight, form, self.config, False)


_Part = tuple[str, Piece]  # (tensor name, piece of its weight)


class _Sums(NamedTuple):
    """Sums over one piece (some rows of a weight), in which each term is multiplied by the weight of its column.

    Attributes:
        signal: the sum of the squares of the values.
        errors: recipe id -> the sum of the squared errors under this recipe.
    """

    signal: float
    errors: Mapping[str, float]


def _key(piece: Piece) -> tuple[str, int]:
    return piece.module, piece.number


def _measured(
    found: _Candidates, keeps: bool, columns: ScaleSearch | None, tick: Callable[[int], None] | None
) -> tuple[LayerGroup, ...]:
    """Return the units of a model, each with its options: the number of bits and the error under each candidate."""
    work = [(tensor, piece) for tensor, weight in found.weights.items() for piece in found.parts(weight)]
    if columns is not None:
        columns.check_columns(piece for _, piece in work)
    amax_groups = shared_amax_groups(piece.module for _, piece in work)
    groups: dict[str, list[_Part]] = defaultdict(list)
    for tensor, piece in work:
        groups[amax_groups.get(piece.module, f"{piece.module}#{piece.number}")].append((tensor, piece))
    with ThreadPoolExecutor(max(num_threads(), 1)) as executor:
        calls = deque((_sums_of_group, (found, members, columns, tick)) for members in groups.values())
        sums = {key: one for part in run_all(executor, calls) for key, one in part.items()}
    fused = {name: group_name(*key) for key, names in fused_groups(p.module for _, p in work).items() for name in names}
    units: dict[str, dict[str, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    for tensor, piece in work:
        operator, holder = fused.get(piece.module, piece.module), container_of(piece.module)
        key = (operator, operator) if holder is None else (f"{holder}.*", split_module(operator)[1])
        units[key[0]][key[1]].append((tensor, piece))
    return tuple(_unit(name, [*operators.values()], found, sums, keeps) for name, operators in units.items())


def _sums_of_group(
    found: _Candidates, members: Sequence[_Part], columns: ScaleSearch | None, tick: Callable[[int], None] | None
) -> dict[tuple[str, int], _Sums]:
    """Measure the pieces that share a tensor scale: return a dict from the key of each piece to its _Sums."""
    with Readers(tick) as readers:
        amax = max(_amax(readers, piece) for _, piece in members)
        sums = {}
        for tensor, piece in members:
            recipes = [one for name, (one, _) in found.forms.items() if tensor in found.fits[name]]
            place = None if columns is None else columns.columns_of((piece.module, piece.weight), piece.expert)
            weights = place.read() if isinstance(place, ChannelWeights) else place and readers.array(place)
            sums[_key(piece)] = _sums(readers, piece, amax, recipes, weights)
    return sums


def _amax(readers: Readers, piece: Piece) -> np.float32:
    """Return the largest magnitude of a piece."""
    found = np.float32(0)
    for slab in slabs(readers, piece.weight, piece.expert, piece.span):
        found = np.maximum(found, np.abs(values_of(piece.weight, slab).astype(np.float32)).max(initial=0))
    if not np.isfinite(found):
        raise CheckpointError(
            f"{shown(piece.weight.tensor)}: holds NaN or infinity, so its error is not defined; repair the source, or"
            " leave the layer out with --keep"
        )
    return np.float32(found)


def _sums(
    readers: Readers, piece: Piece, amax: np.float32, recipes: Sequence[Recipe], weights: np.ndarray | None
) -> _Sums:
    """Return the sums of one piece: of its squares, and of its squared errors under each recipe."""
    signal, errors = 0.0, dict.fromkeys((one.id for one in recipes), 0.0)
    by_column = np.ones(piece.weight.shape[-1]) if weights is None else np.asarray(weights, np.float64)
    step = max(one.block_rows for one in recipes)
    for slab in slabs(readers, piece.weight, piece.expert, piece.span, step):
        x = values_of(piece.weight, slab)
        exact = x.astype(np.float64)
        signal += float(np.sum(exact * exact, axis=0) @ by_column)
        for one in recipes if amax else ():
            q = quantize(x, one, tensor_amax=amax if one.tensor_scaling == "tensor" else None)
            error = np.asarray(dequantize(q, np.float32), np.float64) - exact
            errors[one.id] += float(np.sum(error * error, axis=0) @ by_column)
    return _Sums(signal, errors)


def _unit(
    name: str,
    operators: Sequence[Sequence[_Part]],
    found: _Candidates,
    sums: Mapping[tuple[str, int], _Sums],
    keeps: bool,
) -> LayerGroup:
    """Return one unit (layers that must get one recipe) with its options."""
    whole = [pair for operator in operators for pair in operator]
    weights = {tensor: found.weights[tensor] for tensor, _ in whole}
    options = []
    for one, (_, form) in found.forms.items():
        if weights.keys() <= found.fits[one]:
            bits = 0
            for _, piece in whole:  # as if the rows of a piece were a layer of their own
                shape = piece.span[1] - piece.span[0], piece.weight.shape[-1]
                bits += 8 * sum(output.nbytes for output in form.outputs(piece.module, shape))
            error = sum(_ratio([sums[_key(piece)] for _, piece in operator], one) for operator in operators)
            options.append(Option(one, bits, error))
    if keeps:
        options.append(Option(KEEP, sum(prod(w.shape) * DTYPE_BITS[w.dtype] for w in weights.values()), 0.0))
    if not options:
        raise CheckpointError(f"{shown(name)}: fits no candidate as a whole; add {KEEP} to --candidates")
    layers = tuple(dict.fromkeys(weight.name for weight in weights.values()))
    return LayerGroup(name, layers, sum(prod(weight.shape) for weight in weights.values()), tuple(options))


def _ratio(sums: Sequence[_Sums], recipe_id: str) -> float:
    """Return the noise-to-signal ratio of an operator under a recipe; 0 for an operator of zeros."""
    signal = sum(one.signal for one in sums)
    return sum(one.errors[recipe_id] for one in sums) / signal if signal else 0.0
