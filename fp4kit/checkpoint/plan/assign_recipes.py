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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.loaders.exclusions import container_of
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Piece, Weight, pieces
from fp4kit.checkpoint.plan.bit_budget import LayerGroup, Option, Point, curve, solve
from fp4kit.checkpoint.plan.imatrix import Imatrix
from fp4kit.checkpoint.plan.job import ChannelWeights
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.mixture import LayerQuantization
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.names import fused_groups, group_name, shared_amax_groups, split_module
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.cpu.library import num_threads
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import DTYPE_BITS

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
        An Assignment. Pass its ``default`` to make_plan as ``recipe_id``, and its ``recipes`` as ``recipes``. Add its
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
    named = {name: recipe(name) for name in candidates if name != KEEP}
    if len({*candidates}) != len(candidates) or not named:
        raise CheckpointError(
            f"candidates {','.join(candidates)}: at least one recipe is needed, and each candidate only once;"
            f" {KEEP} stands for no recipe"
        )
    found = _Candidates(Path(source), named, format, wishes or Wishes())
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

    Args:
        source: an unquantized model directory or safetensors file.
        named: name of a candidate -> its recipe, at least one.
        format: the output format; None for one that can hold all candidates.
        wishes: which layers to quantize.

    Raises:
        CheckpointError: if the layers are quantized, or if a candidate fits no layer.
    """

    def __init__(self, source: Path, named: Mapping[str, Recipe], format: str | None, wishes: Wishes) -> None:
        first, *others = named.values()
        pairs = tuple((one.id, one) for one in others)
        self.source = open_source(source)
        request = Request(first, format, wishes, recipes=pairs)
        # The request has no input scales. Model-Optimizer's FP8 needs them only when it is written, not for errors.
        mixture = request.mixture_for(self.source.config)
        self.forms: dict[str, LayerQuantization] = {first.id: mixture.default}
        self.forms |= {choice.recipe.id: choice for _, choice in mixture.choices}
        self.weights: dict[str, Weight] = {}
        self.fits: dict[str, set[str]] = {}
        for name, choice in self.forms.items():
            assert choice.form is not None
            scaled = 1.0 if choice.form.has_tensor_scale else None
            plan = make_plan(source, choice.recipe, format=choice.form.format, wishes=wishes, input_scale=scaled)
            found = {tensor.name: tensor.pieces[0].weight for tensor in plan.converted}
            quantized = next((weight for weight in found.values() if weight.container is not None), None)
            if quantized is not None:
                raise CheckpointError(f"--bits: {shown(quantized.name)} is quantized; convert the unquantized release")
            self.fits[name] = set(found)
            self.weights |= found

    def parts(self, weight: Weight) -> list[Piece]:
        """Return the pieces of a weight."""
        # The rows of a piece are measured together, and get one recipe.
        form = next(iter(self.forms.values())).form
        assert form is not None
        return list(pieces(weight, form, self.source.config, False))


_Key = tuple[str, int]


def _key(piece: Piece) -> _Key:
    """Return the key of a piece (some rows of a weight): (name of its output layer, Piece.number)."""
    return piece.module, piece.number


class _Sums(NamedTuple):
    """Sums over one piece (some rows of a weight), in which each term is multiplied by the weight of its column.

    Attributes:
        signal: the sum of the squares of the values.
        errors: recipe id -> the sum of the squared errors under this recipe.
    """

    signal: float
    errors: Mapping[str, float]


def _measured(
    found: _Candidates, keeps: bool, columns: ScaleSearch | None, tick: Callable[[int], None] | None
) -> tuple[LayerGroup, ...]:
    """Return the units of a model, each with its options: the number of bits and the error under each candidate."""
    work = [(tensor, piece) for tensor, weight in found.weights.items() for piece in found.parts(weight)]
    _check_columns(columns, [piece for _, piece in work])
    amax_groups = shared_amax_groups(piece.module for _, piece in work)
    groups: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for tensor, piece in work:
        groups[amax_groups.get(piece.module, f"{piece.module}#{piece.number}")].append((tensor, piece))
    with ThreadPoolExecutor(max(num_threads(), 1)) as executor:
        measured = executor.map(lambda members: _sums_of_group(found, members, columns, tick), groups.values())
        sums = {key: one for part in measured for key, one in part.items()}
    fused = {name: group_name(*key) for key, names in fused_groups(p.module for _, p in work).items() for name in names}
    units: dict[str, dict[str, list[tuple[str, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for tensor, piece in work:
        operator, holder = fused.get(piece.module, piece.module), container_of(piece.module)
        key = (operator, operator) if holder is None else (f"{holder}.*", split_module(operator)[1])
        units[key[0]][key[1]].append((tensor, piece))
    return tuple(_unit(name, [*operators.values()], found, sums, keeps) for name, operators in units.items())


def _check_columns(columns: ScaleSearch | None, found: Sequence[Piece]) -> None:
    """Raise CheckpointError if column weights are missing or invalid for the pieces in ``found``."""
    # A file of column weights must have all layers.
    if columns is None or columns.columns is None:
        return
    if isinstance(columns.columns, Imatrix):
        columns.columns.check((piece.module, piece.weight, piece.expert) for piece in found)
    else:
        columns.columns.check((piece.module, piece.weight) for piece in found)


def _sums_of_group(
    found: _Candidates,
    members: Sequence[tuple[str, Piece]],
    columns: ScaleSearch | None,
    tick: Callable[[int], None] | None,
) -> dict[_Key, _Sums]:
    """Measure the pieces that share a tensor scale: return a dict from the key of each piece to its _Sums."""
    with Readers(tick) as readers:
        amax = max(_amax(readers, piece) for _, piece in members)
        sums = {}
        for tensor, piece in members:
            recipes = [one.recipe for name, one in found.forms.items() if tensor in found.fits[name]]
            sums[_key(piece)] = _sums(readers, piece, amax, recipes, _column_weights(readers, piece, columns))
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


def _column_weights(readers: Readers, piece: Piece, columns: ScaleSearch | None) -> np.ndarray | None:
    """Return the column weights of a piece, float64 (K,), or None if all columns have equal weights."""
    found = None if columns is None else columns.columns_of((piece.module, piece.weight), piece.expert)
    if found is None:
        return None
    return np.asarray(found.read() if isinstance(found, ChannelWeights) else readers.array(found), np.float64)


def _sums(
    readers: Readers, piece: Piece, amax: np.float32, recipes: Sequence[Recipe], weights: np.ndarray | None
) -> _Sums:
    """Return the sums of one piece: of its squares, and of its squared errors under each recipe."""
    signal, errors = 0.0, dict.fromkeys((one.id for one in recipes), 0.0)
    by_column = np.ones(piece.weight.shape[-1]) if weights is None else weights
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
    operators: Sequence[Sequence[tuple[str, Piece]]],
    found: _Candidates,
    sums: Mapping[_Key, _Sums],
    keeps: bool,
) -> LayerGroup:
    """Return one unit (layers that must get one recipe) with its options."""
    whole = [pair for operator in operators for pair in operator]
    tensors = dict.fromkeys(tensor for tensor, _ in whole)
    options = []
    for one, choice in found.forms.items():
        if choice.form is not None and all(tensor in found.fits[one] for tensor in tensors):
            error = sum(_ratio([sums[_key(piece)] for _, piece in operator], one) for operator in operators)
            options.append(Option(one, sum(_bits(piece, choice.form) for _, piece in whole), error))
    if keeps:
        plain = (found.weights[tensor] for tensor in tensors)
        options.append(Option(KEEP, sum(prod(w.shape) * DTYPE_BITS[w.dtype] for w in plain), 0.0))
    if not options:
        raise CheckpointError(f"{shown(name)}: fits no candidate as a whole; add {KEEP} to --candidates")
    layers = tuple(dict.fromkeys(found.weights[tensor].name for tensor in tensors))
    return LayerGroup(name, layers, sum(prod(found.weights[tensor].shape) for tensor in tensors), tuple(options))


def _ratio(sums: Sequence[_Sums], recipe_id: str) -> float:
    """Return the noise-to-signal ratio of an operator under a recipe; 0 for an operator of zeros."""
    signal = sum(one.signal for one in sums)
    return sum(one.errors[recipe_id] for one in sums) / signal if signal else 0.0


def _bits(piece: Piece, form: Container) -> int:
    """Return the number of bits that the rows of a piece would take in a container as a layer of their own."""
    shape = piece.span[1] - piece.span[0], piece.weight.shape[-1]
    return 8 * sum(output.nbytes for output in form.outputs(piece.module, shape))
