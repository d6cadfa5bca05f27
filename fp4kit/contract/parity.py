"""Implement fp4kit.parity, which checks that a trainer and a server compute with equal bits, layer by layer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import lcm
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_index, explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.contract import compare_layer, faults
from fp4kit.contract import sides as side_rows
from fp4kit.contract.compare_layer import INPUTS_DIFFER, Kind, LayerParity, Parity
from fp4kit.contract.engines import FUSED, OF_CHECKPOINTS, serving_of
from fp4kit.contract.schema import Contract, only_decoding
from fp4kit.contract.sides import (
    NO_CONTRACT,
    OP,
    Arithmetic,
    InputScale,
    Matrix,
    RowReader,
    Rows,
    Side,
    Whole,
    array_of,
    rows_of,
    same,
)
from fp4kit.formats import FLOATS
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.storage.files import counted, listed

SideLike: TypeAlias = "Contract | str | Path | Mapping[str, Any] | Callable[[str, Any], Any] | tuple[Contract, Any]"
"""The description of a side: a Contract, a path, tensors by name, a function, or a Contract with one of the others."""

_TOKENS = 64  # number of rows of random inputs
_SIGNIFICANDS = (1, 1.25, 1.5, 1.75, 1.875)  # random amaxes are near products of these numbers and powers of two
_PRODUCT_ROWS = 128  # largest number of rows of a weight that are multiplied
_DRAWN = (128, 512)  # the shape of random weights
_FIRST_ELEMENTS = 1 << 14  # elements of the first layer if there is a time limit
_HEAD_DIM = 128  # columns of random keys and values
_CALIBRATE = "calibrate once, and use the same input scales on both sides (inputs)"
_INPUT_SCALES = ("input_global_scale", "input_scale")  # names in checkpoints


@explains_calls
@ieee(OP)
def parity(
    train: SideLike,
    rollout: SideLike | None = None,
    *,
    weights: str | Path | Mapping[str, Any] | None = None,
    inputs: str | Path | Mapping[str, Any] | None = None,
    kv: str | Path | Mapping[str, Any] | None = None,
    elements: int = 1 << 18,
    layers: int | None = None,
    seconds: float | None = None,
    engine: str | None = None,
    scheme: str | None = None,
) -> Parity:
    """Check that a trainer and a rollout engine compute with equal bits, and name the first step that differs.

    Each side is one of these:

    - a Contract, which quantizes `weights` by its recipes;
    - a path: a contract file (.json), a model directory, a .safetensors file or a GGUF file;
    - tensors by name: a Quantized or an array per layer, such as weights, activations or logits;
    - a torch.nn.Module, such as a trainer's model or that of a running engine (see fp4kit.torch.of_module);
    - a function f(layer, weight) that returns a Quantized or an array of values, such as a trainer's fake quantizer;
    - a pair of a Contract and a model, tensors or a function. The Contract replaces the contract that a model has.

    A stack of matrices, such as a Quantized of shape (experts, N, K), counts as one layer per matrix. Matrix 3 of
    "experts.up_proj" is the layer "experts.3.up_proj".

    For each layer, codes, block scales, tensor scales, values and matrix products are compared. Where they differ, the
    steps of the arithmetic are compared one after another. The first step that differs is reported with counts, one
    element worked step by step, and the setting that would make the sides equal. The other tensors of checkpoints, such
    as norms, biases and input scales, are compared by their values, as far as both sides have them.

    Args:
        train: the side of the trainer.
        rollout: the side of the rollout engine; None for the contract of `engine` alone.
        weights: the unquantized weights, by layer, or a path to them. A contract or a function without tensors needs
            them. They are also needed to name the steps behind differing bytes. If both sides are contracts, None
            stands for random weights.
        inputs: layer -> array (tokens, K), the inputs of layers, or a path to a file of them. None stands for random
            inputs. They are quantized if both contracts state the recipe of activations, except on a side that does
            not quantize the layer. They are multiplied by the weights if both contracts also state a matrix unit.
        kv: name -> array (..., head_dim), keys or values, or a path to a file of them. None stands for random arrays.
            They are quantized if both contracts state the recipe of the KV cache. If the layouts of the pages differ
            too, arrays (tokens, heads, head_dim) are quantized by the trainer's recipe, written in the trainer's layout
            and read in the rollout's layout.
        elements: the number of elements per layer that are compared, rounded up to whole rows, and to whole blocks of
            several rows. The rows are evenly spaced. A tensor amax is always computed over the whole layer.
        layers: the largest number of layers to compare; they are evenly spaced. None compares all.
        seconds: a time limit. Fewer than `elements` elements per layer are compared, so that all layers are, and no new
            layer is begun after this time; one layer is always compared. Other tensors are compared first, in at most
            half of the time. `notes` of the result says what was left out, and with which chance the sample misses a
            fault (Numerics). None for no limit.
        engine, scheme: the engine of the rollout, such as "transformers" and "nvfp4-w4a4", as in fp4kit.serving. Its
            contract states how the tensors of `rollout` are computed with.

    Returns:
        A Parity. `equal` is True if both sides have all layers and all compared bits are equal, and if the exclusion
        lists of checkpoints mean the same layers to each engine, however they are spelled. Settings in which only the
        contracts differ do not count; `contracts` lists them. If only one side states or stores how inputs are
        quantized, `uncompared` and the verdict say so.

    Raises:
        TypeError: a side is of the wrong kind, a tensor is not an array, `elements` or `layers` is not an int, or
            `seconds` is not a number.
        ValueError: in one of these cases:

            - Weights are missing or not floats.
            - The sides have no layer in common, or the shapes of a layer differ.
            - `elements` or `layers` is below 1, or `seconds` is negative or NaN.
            - A tensor holds complex numbers or numbers of more than 64 bits.
            - A matrix, an input or an array of `kv` has no elements, or a contract must quantize an array of more than
              two axes.
            - A contract that must determine codes alone searches block scales, or its recipe of weights is unknown.
        CheckpointError: a path cannot be read.

    Numerics:
        All comparisons are of bits, except that NaN equals NaN. fp4kit.matmul computes the products, for up to 128 rows
        of a weight. If activations or a layer's weights are unquantized, the unit multiplies bfloat16. The tensor amax
        of inputs is computed from the given or random inputs. If input_scales of a side is "static", the amax follows
        from the input scale that the side stores for the layer instead. If one side has none, the input scales of the
        other side apply to both. If both sides have them, they are compared per layer too.

        Let n of N elements be compared. If d elements differ at random places, the chance that none of them is compared
        is (1 - n/N)(1 - n/(N-1))...(1 - n/(N-d+1)), which is at most (1 - n/N)^d. If m of the M rows of a layer are
        compared, a fault in a single row is missed with the chance 1 - m/M. A fault in every row of a layer, such as
        another recipe or order, or weights of an earlier step, is never missed.

        The contract's Hadamard transform is applied to quantized weights and to their inputs.

        Values are decoded by the recipe's rule. If the contract of a side names a container, they are decoded as its
        loaders decode them, from the stored tensor scale.

    Examples:
        >>> import fp4kit, numpy as np
        >>> train = fp4kit.Contract("nvfp4-te", activations="nvfp4-te", unit="sm100")
        >>> fp4kit.parity(train, train).equal
        True
        >>> w = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
        >>> found = fp4kit.parity(train, fp4kit.Contract("nvfp4-compressed-tensors"), weights={"mlp.up_proj": w})
        >>> found.layers[0].step, found.layers[0].setting.partition(" (")[0]
        ('tensor scale', 'recipe nvfp4-te in train and nvfp4-compressed-tensors in rollout')
    """
    elements = as_index(OP, "elements", elements)
    if elements < 1 or (layers is not None and as_index(OP, "layers", layers) < 1):
        raise ValueError(f"{OP}: elements is {elements} and layers {layers}; needs at least 1")
    if seconds is not None and (not isinstance(seconds, (int, float)) or isinstance(seconds, bool)):
        raise TypeError(f"{OP}: seconds is {seconds!r:.60}; needs a number or None")
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"{OP}: seconds is {seconds:g}; needs 0 or more")
    served = None if engine is None and scheme is None else serving_of(OP, engine, scheme).contract
    if rollout is None and served is None:
        raise TypeError(f"{OP}: rollout is missing; needs a contract, a model or tensors, or an engine and a scheme")
    sides = side_rows.side_of("train", train), side_rows.side_of("rollout", served if rollout is None else rollout)
    if rollout is not None and served is not None:
        sides[1].contract = _serving_codes(served, sides[1].contract)
    source = side_rows.source_of("weights", weights)
    check = _Check(sides, source, side_rows.source_of("inputs", inputs), elements)
    return check.run(layers, seconds, side_rows.source_of("kv", kv))


def _serving_codes(served: Contract, own: Contract) -> Contract:
    """Return the contract of an engine that serves stored codes: they are its checkpoint's, decoded as it does."""
    known = {name: getattr(own, name) for name in (*OF_CHECKPOINTS, "shared_amax") if name not in own.unknown}
    if isinstance(own.weights, Recipe) and isinstance(served.weights, Recipe):
        known["weights"] = replace(own.weights, decode_rule=served.weights.decode_rule)
    return served.stating(**known)


class _Check:
    """One parity check of two sides, which ``run`` executes.

    A side without input scales uses those of the other side. If ``source`` is
    None and both sides are contracts, random weights are used.

    source: the unquantized weights by layer, or None.
    inputs: the inputs of layers, or None for random inputs.
    elements: how many elements per layer are compared.
    others: the tensors of the unquantized model that are no layers, such as norms and biases; empty if unknown.
    left: layer -> the side whose contract does not know `excluded`, for layers that the other side leaves unquantized;
        None if the other side does not say which layers are excluded.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        source: Mapping[str, Any] | None,
        inputs: Mapping[str, Any] | None,
        elements: int,
    ) -> None:
        self.sides, self.inputs, self.elements = sides, inputs, elements
        self.labels = sides[0].label, sides[1].label
        self.others: Mapping[str, Any] = getattr(source, "others", {})
        self.notes: dict[str, None] = {}
        self.uncompared: dict[str, None] = {}
        self.left: dict[str, int] | None = {}
        self.amaxes: dict[Any, Any] = {}
        self.seen: dict[str, faults.Seen] = {}
        stacks = side_rows.stacks_in(source, True).union(*(side_rows.stacks_in(side.stored, False) for side in sides))
        self.source = None if source is None else side_rows.unstacked(source, stacks)
        self.own_scales = [side.input_scales for side in sides]
        for side, scales in zip(sides, self.own_scales[::-1], strict=True):
            side.check()
            side.input_scales = side.input_scales or scales
            if side.stored is not None:
                side.stored = side_rows.unstacked(side.stored, stacks)
        if source is None and all(side.stored is None and side.function is None for side in sides):
            contracts = [side.contract for side in sides]
            patterns = _patterns(contracts)
            self.source = _drawn(contracts, patterns)
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in self.source):
                    self.notes[f"layers of the pattern {pattern!r}, which no random layer matches"] = None
        elif source is None and any(side.stored is None for side in sides):
            label = next(side.label for side in sides if side.stored is None)
            way = "pass the unquantized model as --weights MODEL"
            raise ValueError(f"{OP}: {label} quantizes weights, but none are given; {way}")

    def run(self, most: int | None, seconds: float | None, kv: Mapping[str, Any] | None) -> Parity:
        """Compare all layers, then inputs and KV caches, and return the result."""
        end = None if seconds is None else time.monotonic() + seconds
        names, missing = self._names()
        chosen = names if most is None or most >= len(names) else [names[i * len(names) // most] for i in range(most)]
        half = None if end is None or seconds is None else end - seconds / 2
        others = list(self._of_others(half))  # first, because they are few bytes, and a limit must not leave them out
        found = self._of_layers(chosen, end, seconds)
        every = self.left and len(self.left) == len(found)
        if every and not any(side.leaves(name) is False for side in self.sides for name in names):
            self.left = None  # a side that quantizes no layer at all does not say which are excluded
            found = self._of_layers(chosen, end, seconds)
        for i, side in enumerate(self.sides):
            if left := [name for name, at in (self.left or {}).items() if at == i]:
                other, count = self.labels[1 - i], counted(len(left), "layer")
                text = f"whether {side.label} also leaves {count} unquantized, as {other} does: {listed(left)}"
                self.notes[f"{text}; its contract does not know `excluded`"] = None
        if end is not None and (text := compare_layer.chance_of_a_miss(found)):
            self.notes[text] = None
        found = list(faults.by_other_layers(found, self.seen, self.labels, self.source is not None))
        layers = f"{len(found):,} of " * (len(found) < len(names)) + counted(len(names), "layer")
        elements, total = sum(one.elements for one in found), sum(one.total for one in found)
        sampled = f"compared {elements:,} of {total:,} elements in {layers}"
        scales = list(self._of_input_scales([layer.name for layer in found if layer.kind == "weight"]))
        found += [*others, *scales, *self._of_inputs(), *self._of_kv(kv)]
        a, b = (side.contract for side in self.sides)
        diff = None if a is NO_CONTRACT or b is NO_CONTRACT else a.diff(b)
        exclusions = tuple(self._exclusions(names))
        uncompared = " and ".join(sorted(self.uncompared))
        return Parity(tuple(found), diff, tuple(missing), tuple(self.notes), sampled, exclusions, uncompared)

    def _of_layers(self, chosen: Sequence[str], end: float | None, seconds: float | None) -> list[LayerParity]:
        """Compare the chosen layers, as far as the time allows."""
        found: list[LayerParity] = []
        most_elements = self.elements
        self.elements = most_elements if end is None else min(most_elements, _FIRST_ELEMENTS)
        for i, name in enumerate(chosen):
            start = time.monotonic()
            if end is not None and i and start > end:
                left = counted(len(chosen) - i, "layer")
                self.notes[f"{left}, because {seconds:g} s had passed: {listed(chosen[i:])}"] = None
                break
            found.append(self._layer(name))
            if end is not None:
                share, took = (end - start) / (len(chosen) - i), time.monotonic() - start
                doubled = self.elements * 2 if took < share / 3 else self.elements
                self.elements = min(most_elements, self.elements // 2 + 1 if took > share else doubled)
        return found

    def _exclusions(self, names: Collection[str]) -> Iterator[str]:
        """Yield a text per side and engines for the layers that these engines leave unquantized on this side alone."""
        read, engines = [side.unquantized for side in self.sides], dict[str, list[str]]()
        for engine in dict.fromkeys((*read[0], *read[1])):
            asked = {name for one in read for name in one.get(engine, ())}.intersection(names)
            found = [_unquantized(side, engine, asked) for side in self.sides]
            for i, (a, b) in enumerate((found, found[::-1])):
                alone = sorted(name for name in a.keys() & b.keys() if a[name] and not b[name])
                if alone:
                    labels = self.sides[i].label, self.sides[1 - i].label
                    text = f"{listed(alone)} unquantized in {labels[0]}, but not in {labels[1]}"
                    engines.setdefault(text, []).append(engine)
        for text, names in engines.items():
            yield f"{listed(names)} {'leaves' if len(names) == 1 else 'leave'} {text}"

    def _names(self) -> tuple[list[str], list[str]]:
        """Return (names of the layers to compare, one text per layer that only one side has)."""
        stored = [side for side in self.sides if side.stored is not None]
        given = [list(side.stored) for side in stored] or [list(self.source or ())]  # type: ignore[arg-type]
        first, last = given[0], given[-1]
        in_last = {*last}
        names = [name for name in first if name in in_last]
        missing = [
            f"{name}: not in {side.label}"
            for side, own, others in ((self.sides[1], in_last, first), (self.sides[0], {*first}, last))
            for name in others
            if name not in own and name not in side.others  # _of_others compares these
        ]
        lacking = "the sides have no layer in common"
        if len(stored) == 1:
            assert self.source is not None
            lacking = "no layer of the sides has an unquantized weight" if names else lacking
            absent = [name for name in names if name not in self.source]
            if absent:
                count = counted(len(absent), "layer")
                self.notes[f"{count} without an unquantized weight: {listed(absent)}"] = None
            names = [name for name in names if name in self.source]
        only_others = not first and not last and all(side.others for side in self.sides)
        if not names and not only_others:
            models = [one for one in (first, last, self.source) if one]
            if len({any(name.startswith("blk.") for name in one) for one in models}) > 1:
                lacking = "only one of the models is a GGUF file, whose layers have other names"
                raise ValueError(f"{OP}: {lacking}; fp4kit compare A B pairs the layers of a directory and a GGUF file")
            raise ValueError(f"{OP}: {lacking}; needs equal names of layers, such as {listed(first)}")
        return names, missing

    def _x(self, name: str) -> np.ndarray | None:
        """Return the unquantized weight of a layer; None if there is none."""
        if self.source is None or name not in self.source:
            return None
        x = array_of(f"weights: {name}", self.source[name])
        if x.dtype not in FLOATS or x.ndim < 2:
            raise ValueError(
                f"{OP}: weights: {name} is {x.dtype} {x.shape}; needs a matrix of float32, float16 or bfloat16"
            )
        return x

    def _layer(self, name: str) -> LayerParity:
        """Compare one layer of both sides, and return a LayerParity."""
        x = self._x(name)
        weight = None if self.source is None else self.source.get(name)
        wholes = [side.given(name, weight) for side in self.sides]
        alone = [side.label for side, whole in zip(self.sides, wholes, strict=True) if whole is None]
        shapes = {whole.shape for whole in (*wholes, x) if whole is not None}
        if len(shapes) > 1:
            of_sides = [whole.shape if whole is not None else np.shape(x) for whole in wholes]  # type: ignore[arg-type]
            if turned := faults.turned(name, of_sides, self.labels):
                return turned
            raise ValueError(f"{OP}: {name} has the shapes {' and '.join(map(str, sorted(shapes)))}; needs one shape")
        (shape,) = shapes
        if len(shape) != 2:
            if alone:
                raise ValueError(
                    f"{OP}: {name} has the shape {shape}; needs a matrix, because {alone[0]} has only a contract"
                )
            return self._tensor(name, [side_rows.whole_of(whole) for whole in wholes if whole is not None])
        if 0 in shape:
            raise ValueError(f"{OP}: {name} has the shape {shape}; needs at least one element")
        recipes = [side.recipe_of(name, whole) for side, whole in zip(self.sides, wholes, strict=True)]
        for i, side in enumerate(self.sides):
            follows = self.left is not None and wholes[i] is None and "excluded" in side.contract.unknown
            if follows and recipes[i] is not None and self._leaves(1 - i, name, wholes[1 - i], recipes[1 - i], x):
                recipes[i], self.left = None, {**(self.left or {}), name: i}
        rows = self._rows(shape, [r for r in recipes if r is not None])
        part = None if x is None else np.ascontiguousarray(x[rows])
        values = [whole.read(rows) for whole in wholes if isinstance(whole, RowReader) and whole.recipe is None]
        if len(values) == 2 and same(_values(values[0]), _values(values[1])):
            part = None  # no recipe has to be found, which takes long for values
        by_side: dict[int, Rows] = {}
        for i in sorted((0, 1), key=lambda i: isinstance(wholes[i], RowReader)):  # a reader follows the other side
            own = part if part is None or recipes[i] is None else self.sides[i].transformed(part)
            by_side[i] = self._compared(i, name, wholes[i], own, rows, recipes, by_side.get(1 - i))
        compared = faults.between_sides((by_side[0], by_side[1]), wholes, rows)
        plain = []
        for one, r, whole in zip((by_side[0], by_side[1]), recipes, wholes, strict=True):
            is_plain = r is None and isinstance(one.part, np.ndarray) and (part is None or same(one.part, part))
            plain.append(is_plain and not (isinstance(whole, RowReader) and whole.decoded))
        if all(self._leaves(i, name, wholes[i], recipes[i], None) for i in (0, 1)):
            plain = [True, True]  # both say so, whatever the weights are
        are_tensors = all(side.contract is NO_CONTRACT for side in self.sides) and all(plain)
        kind: Kind = "tensor" if are_tensors else "weight"
        found = compare_layer.compare_layer(name, kind, (compared[0], compared[1]), rows, shape[0] * shape[1])
        if found.step == "value" and plain[0] != plain[1] and name not in (self.left or ()):
            found = self._half_quantized(found, plain, recipes)
        self.seen[name] = faults.seen(compared, recipes, found, plain)
        return self._with_products(found, name, compared, recipes, shape)

    def _leaves(self, i: int, name: str, whole: Whole | None, r: Recipe | None, x: np.ndarray | None) -> bool:
        """Return whether a side leaves a layer unquantized, by its contract or by its values."""
        if isinstance(whole, RowReader):
            return whole.recipe is None and not whole.decoded
        if isinstance(whole, np.ndarray) and x is not None and r is None:
            return same(whole, x.astype(whole.dtype))
        return self.sides[i].leaves(name) is True

    def _half_quantized(
        self, found: LayerParity, plain: Sequence[bool], recipes: Sequence[Recipe | None]
    ) -> LayerParity:
        """Return a copy of ``found`` with the step "quantization" and a text that says which side does not quantize."""
        at = 0 if plain[0] else 1
        other = recipes[1 - at]
        is_input = found.kind in ("input", "input scale")
        what, it = ("the inputs", "them") if is_input else ("this layer", "it")
        text = f"{self.labels[at]} does not quantize {what}, and {self.labels[1 - at]} does"
        way = f"; quantize {it} by {other.id}, or exclude {it} on both sides" if other else ""
        return replace(found, step="quantization", setting=text + way)

    def _tensor(self, name: str, wholes: Sequence[Matrix], kind: Kind = "tensor") -> LayerParity:
        """Compare the values of two tensors that are not matrices, such as logits of three axes, as one row each."""
        a, b = (Rows(label, _values(whole).reshape(1, -1)) for label, whole in zip(self.labels, wholes, strict=True))
        found = compare_layer.compare_layer(name, kind, (a, b), np.zeros(1, np.intp), np.size(a.part))
        if found.equal:
            return found
        if kind == "other tensor" and name.rpartition(".")[2] in _INPUT_SCALES:
            at = np.argmax(side_rows.differing_bits(np.ravel(a.part), np.ravel(b.part)))
            both = " and ".join(f"{one.label} stores {np.ravel(one.part)[at]}" for one in (a, b))
            return replace(found, setting=f"another calibration (input scales): {both}; {_CALIBRATE}")
        if fault := faults.between(b.part, a.part, a.label):
            return replace(found, setting=f"{b.label}: {fault.text}")
        is_vector = kind == "other tensor" or wholes[0].shape == (np.size(a.part),)
        return replace(found, setting=faults.VECTOR * is_vector)

    def _rows(self, shape: tuple[int, ...], recipes: Sequence[Recipe]) -> np.ndarray:
        """Return the ascending indices of the rows to compare, which hold at least ``self.elements`` elements."""
        # The height of a group is the least common multiple of the rows per block of the recipes, so that blocks stay
        # whole.
        height = min(lcm(*(r.block_rows for r in recipes), 1), shape[0])
        groups, needed = -(-shape[0] // height), -(-self.elements // (height * max(shape[1], 1)))
        if needed >= groups:
            return np.arange(shape[0])
        starts = np.arange(needed) * groups // needed * height
        rows = (starts[:, None] + np.arange(height)).reshape(-1)
        return rows[rows < shape[0]]

    def _compared(
        self,
        i: int,
        name: str,
        whole: Whole | None,
        x: np.ndarray | None,
        rows: np.ndarray,
        recipes: Sequence[Recipe | None],
        other: Rows | None,
    ) -> Rows:
        """Return the compared rows of side i, and how that side made them."""
        side, recipe = self.sides[i], recipes[i]
        stated = side if "served_dtype" not in side.contract.unknown else self.sides[1 - i]
        served: dict[str, Any] = {"container": side.contract.container, "served_dtype": stated.contract.served_dtype}
        if whole is None:
            assert x is not None
            if recipe is None:
                return Rows(side.label, x, x)
            one = self._arithmetic(side, name, recipe, self._group(side, name), rows)
            found = Rows(side.label, side_rows.made(x, one.recipe, one.amax), x, one, **served)
            zeros = None if served["container"] is None else side_rows.as_zeros(found, one, x)
            return zeros or found
        if isinstance(whole, Quantized):
            decodes = recipe is not None and recipe != whole.recipe and only_decoding(recipe, whole.recipe)
            r = side.decoding(recipe if recipe is not None and decodes else whole.recipe)
            whole = side_rows.as_loaded(replace(whole, recipe=r))
        part = rows_of(whole, rows)
        if isinstance(whole, RowReader):
            if isinstance(part, Quantized):
                part = replace(part, recipe=side.decoding(part.recipe))
                follow, right = whole.follow, None if other is None else other.part
                if follow and other and isinstance(right, Quantized) and side_rows.fits(part, right.recipe):
                    part = follow(part, right)
                    served = {"container": other.container, "served_dtype": other.served_dtype}
            if (fault := whole.fault()) is not None:
                return Rows(side.label, part, x, step=fault[0], wrong=fault[1], **served)
        is_decoded = isinstance(whole, RowReader) and whole.decoded
        is_plain = isinstance(part, np.ndarray) and recipe is None and side.function is None and not is_decoded
        if x is None or (is_plain and side.contract is not NO_CONTRACT):
            return self._order_without_source(Rows(side.label, part, **served), i, name, whole, rows)
        usual = Contract(shared_amax=FUSED) if "shared_amax" in side.contract.unknown else side.contract
        contracts = (side.contract, Contract(), self.sides[1 - i].contract, usual)
        groups = dict.fromkeys(one.group_of(name, self.source or {}) for one in contracts)
        tried = [
            self._arithmetic(side, name, r, group, rows)
            for r in (recipe, recipes[1 - i])
            if r is not None and not r.stochastic_only and side_rows.fits(part, r)
            for group in groups
        ]
        found = Rows(side.label, part, x, **served)
        return faults.with_making(
            found,
            x,
            whole,
            rows,
            tried,
            lambda: side.transformed(array_of(name, self._x(name))),
            lambda r: [
                self._arithmetic(side, name, r, group, rows).amax
                for group in (groups if r.tensor_scaling == "tensor" else [(name,)])
            ],
        )

    def _order_without_source(self, found: Rows, i: int, name: str, whole: Whole, rows: np.ndarray) -> Rows:
        """Return ``found`` with the wrong order in which the rollout stores the trainer's bytes, if it does."""
        given = self.sides[1 - i].given(name, None) if i and self.sides[1 - i].stored is not None else None
        right, part = None if given is None else rows_of(given, rows), found.part
        if not (isinstance(right, Quantized) and isinstance(part, Quantized)):
            return found
        other_codes = right.recipe.element == part.recipe.element and not np.array_equal(right.packed, part.packed)
        if not other_codes and same(right.block_scale, part.block_scale):
            return found
        right, whole = side_rows.whole_of(given), side_rows.whole_of(whole)  # type: ignore[arg-type]
        assert isinstance(right, Quantized) and isinstance(whole, Quantized)
        for step, wrong, q in side_rows.orders(whole):
            if np.array_equal(q.packed, right.packed) and same(q.block_scale, right.block_scale):
                return replace(found, step=step, wrong=wrong)
        return found

    def _group(self, side: Side, name: str) -> tuple[str, ...]:
        """Return the names of the layers that share one tensor amax, including ``name``, by the contract of a side."""
        return side.contract.group_of(name, self.source or {})

    def _arithmetic(self, side: Side, name: str, r: Recipe, group: tuple[str, ...], rows: np.ndarray) -> Arithmetic:
        """Return the Arithmetic of one layer on a side: the recipe, the tensor amaxes and the Hadamard transform."""
        # The recipe in the result has the side's decode rule, and amaxes are measured after the side's Hadamard
        # transform.
        shared = group if r.tensor_scaling == "tensor" else (name,)
        amax = side_rows.largest(self._amax(side, layer, r) for layer in shared)
        rows_of_amax = amax if amax is None or not amax.ndim else amax[rows]
        return Arithmetic(side.decoding(r), rows_of_amax, shared, side.transform)

    def _amax(self, side: Side, layer: str, r: Recipe) -> Any:
        """Return the tensor amaxes of a whole layer after the side's Hadamard transform, for a recipe."""
        key = layer, r.tensor_scaling, r.amax_nan, r.flush, side.transform
        if key not in self.amaxes:
            x = self._x(layer)
            assert x is not None
            self.amaxes[key] = side_rows.amax_of(side.transformed(x), r)
        return self.amaxes[key]

    def _with_products(
        self,
        found: LayerParity,
        name: str,
        compared: Sequence[Rows],
        recipes: Sequence[Recipe | None],
        shape: tuple[int, ...],
    ) -> LayerParity:
        """Multiply the layer by inputs on both sides, and return the result with the counts of differing products."""
        # The products cannot be computed if a side has no contract that states how, or if its matrix unit has no
        # instruction for the operands.
        for side in self.sides:
            if why := compare_layer.why_no_products(side.contract):
                self.notes[f"products: {side.label}: {why}"] = None
                return found
        inputs, limit = self._input(name, shape[1]), np.arange(_PRODUCT_ROWS)
        results, quantizers = [], []
        for side, one, recipe in zip(self.sides, compared, recipes, strict=True):
            part = rows_of(one.part, limit[: one.part.shape[0]])
            try:
                results.append(compare_layer.products(side, inputs, part, recipe is not None, name))
            except ValueError as error:
                self.notes[f"products: {one.label}: {error}"] = None
                return found
            quantizers.append(() if recipe is None else _input_quantizer(side, name, inputs))
        settings, units = [_operands(compared)], [side.contract.unit for side in self.sides if side.contract.unit]
        if units[0] != units[1]:
            both = " and ".join(f"{unit.title} in {label}" for unit, label in zip(units, self.labels, strict=True))
            settings.insert(0, f"unit {both}; use one unit on both sides")
        if quantizers[0] != quantizers[1]:
            settings.append(INPUTS_DIFFER)
        text = "; ".join(filter(None, settings))
        return compare_layer.with_products(found, results[0], results[1], text, self.labels)

    def _input(self, name: str, columns: int) -> np.ndarray:
        """Return the inputs of a layer as an array (tokens, K)."""
        if self.inputs is not None and name in self.inputs:
            x = _matrix(f"inputs: {name}", self.inputs[name])
            if x.shape[1] != columns or x.dtype not in FLOATS:
                raise ValueError(f"{OP}: inputs: {name} is {x.dtype} {x.shape}; needs floats of {columns} columns")
            return x
        return np.random.default_rng(0).standard_normal((_TOKENS, columns), np.float32).astype(ml_dtypes.bfloat16)

    def _of_others(self, end: float | None) -> Iterator[LayerParity]:
        """Compare the tensors of checkpoints that are no layers, such as norms and biases."""
        # A side may also store such a tensor as a layer.
        of_sides = [
            (self.others, self.source or {}) if side.stored is None else (side.others, side.stored)
            for side in self.sides
        ]
        lacking: dict[str, list[str]] = {}
        names = list(dict.fromkeys(name for side in self.sides for name in side.others))
        for i, name in enumerate(names):
            if end is not None and time.monotonic() > end:
                self.notes[f"{counted(len(names) - i, 'tensor')} besides the layers, because the time had passed"] = (
                    None
                )
                break
            a, b = (
                next(
                    (side_rows.as_matrix(f"{side.label}: {name}", place[name]) for place in places if name in place),
                    None,
                )
                for side, places in zip(self.sides, of_sides, strict=True)
            )
            if a is not None and b is not None:
                yield self._compared_other(name, a, b)
            elif name.rpartition(".")[2] not in _INPUT_SCALES or not all(
                name.rpartition(".")[0] in own
                for own in self.own_scales  # _of_input_scales compares these
            ):
                lacking.setdefault(self.labels[b is None], []).append(name)
        for label, absent in lacking.items():
            count = counted(len(absent), "tensor")
            self.notes[f"{count} besides the layers, which {label} does not have: {listed(absent)}"] = None

    def _compared_other(self, name: str, a: Matrix, b: Matrix) -> LayerParity:
        """Compare a tensor of both sides that is no layer, by its values."""
        x, y = _values(a), _values(b)
        found = LayerParity(name, "other tensor", x.size, x.size)
        if x.shape != y.shape and not x.size == y.size == 1:
            shapes = f"{self.labels[0]} has the shape {x.shape}, and {self.labels[1]} {y.shape}"
            return replace(found, step="value", setting=shapes)
        if x.dtype == y.dtype and np.array_equal(_bytes(x), _bytes(y)):
            return replace(found, values=(0, x.size))
        if x.dtype in FLOATS and y.dtype in FLOATS:
            return self._tensor(name, (a, b), "other tensor")
        numbers = list(zip(x.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True))
        differing = [i for i, (p, q) in enumerate(numbers) if p != q and (p == p or q == q)]  # NaN equals NaN
        count, found = len(differing), replace(found, values=(len(differing), x.size))
        if not differing:
            return found
        p, q = numbers[differing[0]]
        text = f"element {differing[0]:,} of {x.size:,}: {self.labels[0]} {p} and {self.labels[1]} {q}"
        return replace(found, step="value", count=count, examined=count, element=text)

    def _of_input_scales(self, names: Sequence[str]) -> Iterator[LayerParity]:
        """Compare how both sides quantize the inputs of each layer: whether they do, and with which input scale."""
        in_others = [{*side.others} for side in self.sides]
        others: dict[Any, str] = {}  # recipes that the contracts do not state for all layers -> first layer
        stated = [side.contract.activations for side in self.sides if "activations" not in side.contract.unknown]
        for name in names:
            if any(side.leaves(name) for side in self.sides):
                continue
            known, recipes = zip(*(side.activation_of(name) for side in self.sides), strict=True)
            if all(recipes) and recipes[0] != recipes[1] and [*recipes] != stated:
                others.setdefault((recipes[0], recipes[1]), name)
            scales = [own.get(name) for own in self.own_scales]
            plain = [is_known and r is None for is_known, r in zip(known, recipes, strict=True)]
            if known[0] != known[1] and (any(recipes) or any(scales)):
                self.uncompared["activations"] = None
            if all(known) and any(plain):
                if not all(plain) and not (len(stated) == 2 and (stated[0] is None) != (stated[1] is None)):
                    yield self._half_quantized(LayerParity(name, "input scale", 1, 1, values=(1, 1)), plain, recipes)
                continue  # otherwise the inputs that are compared show it
            if not any(scales):
                if [side.contract.input_scales for side in self.sides].count("static") == 1:
                    self.uncompared["input scales"] = None
                continue
            ways = [self._way(i, name, scale, recipes[i]) for i, scale in enumerate(scales)]
            if None in ways:
                self.uncompared |= {} if all(known) else {"activations": None}
                self.uncompared["input scales"] = None
            elif not all(any(f"{name}.{leaf}" in one for leaf in _INPUT_SCALES) for one in in_others):
                yield self._input_scale(name, scales, recipes, ways)  # others are compared as other tensors
        for pair, name in others.items():
            x = self._input("drawn", _DRAWN[1])
            yield self._quantized_by(f"drawn for {name}", "input", x, [Side(label) for label in self.labels], pair)

    def _input_scale(
        self, name: str, scales: Sequence[Any], recipes: Sequence[Recipe | None], ways: Sequence[str | None]
    ) -> LayerParity:
        """Compare the input scale of a layer, which ``ways`` describes for each side."""
        a, b = scales
        storing = [r for r, one in zip(recipes, scales, strict=True) if r and one and not one.is_amax]
        judge = next((r for r in (*storing, *recipes) if r), None)
        is_equal = a is not None and b is not None and a.equals(b, judge)
        found = LayerParity(name, "input scale", 1, 1, values=(int(not is_equal), 1))
        if is_equal:
            return found
        text = f"input scale of {name}: " + " and ".join(map(" ".join, zip(self.labels, map(str, ways), strict=True)))
        if recipes[0] and recipes[1] and recipes[0] != recipes[1]:
            both = f"{recipes[0].id} in {self.labels[0]} and {recipes[1].id} in {self.labels[1]}"
            text = f"activations: recipe {both}; use one recipe on both sides; {text}"
        return replace(found, step="tensor scale", count=1, examined=1, setting=f"{text}; {_CALIBRATE}")

    def _way(self, i: int, name: str, scale: InputScale | None, r: Recipe | None) -> str | None:
        """Return in words where a side takes a layer's input scale from; None if this is unknown."""
        if scale is not None:
            return scale.text(r)
        side = self.sides[i]
        is_dynamic = side.contract.input_scales == "dynamic" or (name in side.activations and r is not None)
        return "computes it in each call" if is_dynamic else None

    def _of_inputs(self) -> Iterator[LayerParity]:
        """Quantize inputs on both sides, and yield one comparison per input."""
        tensors = self.inputs or {"drawn": self._input("drawn", _DRAWN[1])}
        found = [*self._by_setting("activations", "input", tensors)]
        # Drawn inputs are those of no layer. Stored scales are compared for themselves (_of_input_scales).
        lacking = [
            side.label
            for side in self.sides
            if found and side.contract.input_scales == "static"
            for absent in [[name for name in tensors if name not in side.input_scales]]
            if (self.inputs or not side.input_scales)
            and any(self._input_recipe(side, "activations", name) for name in absent)
        ]
        if lacking:
            text = f"stored input scales of {' and '.join(lacking)}; inputs are compared with their own amax"
            self.notes[text] = None
        yield from found

    def _of_kv(self, kv: Mapping[str, Any] | None) -> Iterator[LayerParity]:
        """Quantize keys and values by the recipe of each side's KV cache, and yield one comparison per array."""
        tensors = kv or {"drawn": self._input("drawn", _HEAD_DIM)}
        yield from self._by_setting("kv_cache", "kv cache", tensors)
        a, b = (side.contract for side in self.sides)
        if (
            a.kv_layout is not None
            and b.kv_layout is not None
            and a.kv_cache is not None
            and a.kv_layout != b.kv_layout
        ):
            own = {} if kv is None else {name: array_of(f"kv: {name}", x) for name, x in kv.items()}
            yield from compare_layer.compare_layouts(a.kv_layout, b.kv_layout, a.kv_cache, self.labels, own)

    def _by_setting(self, setting: str, kind: Kind, tensors: Mapping[str, Any]) -> Iterator[LayerParity]:
        """Quantize tensors on both sides, by the recipes in one setting of the contracts, and yield the comparisons."""
        contracts = [side.contract for side in self.sides]
        if any(setting in one.unknown for one in contracts) or not any(getattr(one, setting) for one in contracts):
            return
        for name, given in tensors.items():
            recipes = [self._input_recipe(side, setting, name) for side in self.sides]
            x = np.ascontiguousarray(_matrix(f"{kind}: {name}", given))
            sides = self.sides if kind == "input" else [Side(side.label) for side in self.sides]
            yield self._quantized_by(name, kind, x, sides, recipes)

    def _quantized_by(
        self, name: str, kind: Kind, x: np.ndarray, sides: Sequence[Side], recipes: Sequence[Recipe | None]
    ) -> LayerParity:
        """Quantize an array by the recipes of both sides, and return the comparison."""
        rows = self._rows(x.shape, [r for r in recipes if r is not None])
        compared = [_quantized(side, name, x, rows, r) for side, r in zip(sides, recipes, strict=True)]
        found = compare_layer.compare_layer(name, kind, (compared[0], compared[1]), rows, x.size)
        plain = [r is None for r in recipes]
        return self._half_quantized(found, plain, recipes) if plain[0] != plain[1] and not found.equal else found

    def _input_recipe(self, side: Side, setting: str, name: str) -> Recipe | None:
        """Return the recipe by which a side quantizes an input, keys or values; None if it leaves them unquantized."""
        one = side.contract
        left = [each.leaves(name) for each in (side, *self.sides)]
        is_left = next((each for each in left if each is not None), False)
        is_plain = setting == "activations" and bool(self.inputs) and (is_left or name in (self.left or ()))
        found: Recipe | None = None if is_plain else getattr(one, setting)
        return found


def _unquantized(side: Side, engine: str, names: Collection[str]) -> Mapping[str, bool]:
    """Return layer -> whether an engine leaves it unquantized on a side, for the layers for which this is known."""
    if side.unquantized or side.stored is not None or {"weights", "excluded"} & {*side.contract.unknown}:
        return {name: left for name, left in side.unquantized.get(engine, {}).items() if name in names}
    return {name: side.contract.recipe_of(name) is None for name in names}


def _matrix(what: str, given: Any) -> np.ndarray:
    """Return an array of any library as a NumPy matrix, with all axes but the last merged."""
    x = array_of(what, given)
    if not x.ndim or not x.size:
        raise ValueError(f"{OP}: {what} has the shape {x.shape}; needs at least one axis and one element")
    return x.reshape(-1, x.shape[-1])


def _quantized(side: Side, name: str, x: np.ndarray, rows: np.ndarray, r: Recipe | None) -> Rows:
    """Return some rows of an array as a side quantizes them by a recipe."""
    if r is None:
        return Rows(side.label, x[rows], x[rows])
    x = side.transformed(x)
    r, static = side.of_inputs(name, r, x.dtype)
    amax = side_rows.amax_of(x, r) if static is None else static
    rows_of_amax = amax if amax is None or not amax.ndim else amax[rows]
    one = Arithmetic(r, rows_of_amax, (name,) if static is None else (), side.transform, static is not None)
    part = np.ascontiguousarray(x[rows])
    return Rows(side.label, side_rows.made(part, r, one.amax), part, one)


def _input_quantizer(side: Side, name: str, x: np.ndarray) -> tuple[Any, ...]:
    """Return what a side quantizes the inputs of a layer with: (recipe, static amax or None, transform)."""
    activations = side.contract.activations
    recipe, amax = (None, None) if activations is None else side.of_inputs(name, activations, x.dtype)
    return recipe, None if amax is None else float(amax), side.transform


def _operands(compared: Sequence[Rows]) -> str:
    """Return a text that explains differing products if one side multiplies values and the other side codes."""
    values, codes = ([one for one in compared if isinstance(one.part, kind)] for kind in (np.ndarray, Quantized))
    if not values or not codes:
        return ""
    return (
        f"{values[0].label} has values, which are multiplied as bfloat16, and {codes[0].label} multiplies codes;"
        " multiply codes on both sides"
    )


def _bytes(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in row-major order, as uint8."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _values(matrix: Matrix) -> np.ndarray:
    """Return an array itself, or the values of a Quantized, decoded to float32."""
    return np.asarray(matrix.dequantize(np.float32) if isinstance(matrix, Quantized) else matrix)


def _patterns(contracts: Sequence[Contract]) -> list[str]:
    """Return the patterns of two contracts for which random layers are drawn, without duplicates."""
    found = [pattern for one in contracts for pattern, _ in one.patterns]
    found += [pattern for one in contracts for pattern in one.excluded[:1]]
    excluded = [{*one.excluded} for one in contracts]
    return [*dict.fromkeys([*found, *sorted(excluded[0] ^ excluded[-1])])]


def _name_of(pattern: str) -> str:
    """Return the name of a random layer for a wildcard of fnmatch."""

    def character(found: re.Match[str]) -> str:
        if found[0] == "*":
            return "drawn"
        return next((one for one in ascii_letters + digits if fnmatchcase(one, found[0])), "")

    return re.sub(r"\*|\?|\[!?\]?[^]]*\]", character, pattern)


def _drawn(contracts: Sequence[Contract], patterns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return random weights (128, 512) with which to compare two contracts: {layer: array}, equal in every run."""
    # The magnitudes of layers differ, so that sharing an amax matters.
    leaves = [leaf for one in contracts for group in one.shared_amax for leaf in group]
    matching = [name for pattern in patterns if fnmatchcase(name := _name_of(pattern), pattern)]
    names = dict.fromkeys(["drawn.linear", *(f"drawn.{leaf}" for leaf in leaves), *matching])
    rng = np.random.default_rng(0)
    found = {}
    for i, name in enumerate(names):
        x = rng.standard_normal(_DRAWN, np.float32) * np.float32(1 + i / 4)
        x[0], x[1] = 0, rng.integers(-24, 25, _DRAWN[1]) / 4
        found[name] = x.astype(ml_dtypes.bfloat16)
    amax = 2.0 ** rng.integers(-8, 3, (_DRAWN[0], _DRAWN[1] // 32, 1)) * rng.choice(_SIGNIFICANDS, (1, 1, 1))
    amax = amax * rng.choice(_SIGNIFICANDS, amax.shape) * (1 + rng.integers(-1, 2, amax.shape) * 2.0**-23)
    edges = amax * np.clip(rng.standard_normal((*amax.shape[:2], 32)) / 2, -1, 1)
    edges[..., :1] = amax
    return found | {"drawn.edges": edges.reshape(_DRAWN).astype(np.float32)}
