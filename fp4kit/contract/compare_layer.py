"""Compare one layer of two sides, and explain the first step that differs.

A side is the trainer or the rollout engine of fp4kit.parity. A step is a stage of its arithmetic, such as the tensor
scale, the block scale or the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

from fp4kit.contract import sides as side_rows
from fp4kit.contract.schema import Contract, ContractDiff, only_decoding, recipe_difference
from fp4kit.contract.sides import NO_CONTRACT, Arithmetic, Matrix, Rows, Side, StepName, differing_bits, first_place
from fp4kit.display import Panel
from fp4kit.layouts import unpack, unpacked
from fp4kit.layouts.kv import KV_LAYOUTS, KVCache, KVParts, PageShape
from fp4kit.ops.compare import Count
from fp4kit.ops.explain import Explanation, explain
from fp4kit.ops.matmul import matmul
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import ALL_RECIPES, Recipe
from fp4kit.storage.files import counted
from fp4kit.units import ENGINE_ORDERS

Kind: TypeAlias = Literal["weight", "input", "input scale", "kv cache", "other tensor", "tensor"]
# kind of a LayerParity -> noun in texts; others are layers
_NOUNS = {"input": "input", "input scale": "input scale", "kv cache": "KV cache", "other tensor": "other tensor"}
MOST_ROWS = 12  # of the table that print shows
COLUMNS = ("layer", "codes", "block scales", "values", "products", "first step that differs")


@dataclass(frozen=True)
class LayerParity:
    """How the two sides of a parity check differ in one layer.

    codes, scales, tensor_scales, values and products are pairs (number that differ, number compared). A pair is (0, 0)
    if a side lacks such data, or if the formats of the two sides differ.

    Attributes:
        name: the layer.
        kind: "weight", "input" (activations), "input scale" (how a layer's inputs are quantized), "kv cache", "other
            tensor" (a norm, a bias or another tensor of a checkpoint that is no layer) or "tensor" (values that no
            contract describes).
        elements: the number of elements that were compared.
        total: the number of elements of the layer.
        codes: element codes.
        scales: block scales.
        tensor_scales: tensor scales.
        values: decoded values, bit by bit; NaN equals NaN.
        products: elements of the matrix products of inputs and weights, bit by bit; NaN equals NaN.
        step: the first step of the arithmetic that differs, such as "block scale"; None if everything is equal.
        result: the intermediate result that differs at this step, such as "block amax".
        count: the number of examined elements whose first difference is at this step.
        examined: the number of elements whose code, scale or value differs and whose steps were compared. For the step
            "product", count and examined are both the number of products that differ.
        steps: (step, number of examined elements whose first difference is at this step) pairs, in the order of steps.
        element: one element that differs, with its values on both sides, as text; if tensor scales differ and all
            values are equal, one tensor scale.
        setting: the setting that differs, with advice on how to make the sides equal; "" if none is known to differ.
        worked: the steps by which each side computes this element. None if a side's recipe is unknown, if the order of
            stored bytes is wrong, if a tensor amax is NaN, or if only products differ. Elements are shown after the
            Hadamard transform of their side.
        same_codes: True if all codes and block scales are equal, and tensor scales differ by at most 2 float32 ulp, as
            they do if one side stores reciprocals. Values then differ only by rounding.
    """

    name: str
    kind: Kind
    elements: int
    total: int
    codes: Count = (0, 0)
    scales: Count = (0, 0)
    tensor_scales: Count = (0, 0)
    values: Count = (0, 0)
    products: Count = (0, 0)
    step: StepName | None = None
    result: str = ""
    count: int = 0
    examined: int = 0
    steps: tuple[tuple[StepName, int], ...] = ()
    element: str = ""
    setting: str = ""
    worked: Explanation | None = None
    same_codes: bool = False

    @property
    def equal(self) -> bool:
        """True if everything that was compared is equal in every bit."""
        return self.step is None

    def __str__(self) -> str:
        """Return the text of `lines`, and below it the worked element if there is one."""
        return "\n".join([*self.lines, *([] if self.worked is None else [str(self.worked)])])

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of text about this layer: the first step that differs with its counts, the setting, and the element.

        If the layer is equal on both sides, there is one line that says so.
        """
        if self.equal:
            return (f"{self.kind} {self.name}: equal in every bit",)
        where = f" ({self.result})" if self.result and self.result != self.step else ""
        count = f", {self.count:,} of {self.examined:,} examined differing elements" if self.examined else ""
        lines = [f"{self.kind} {self.name}: first step that differs: {self.step}{where}{count}"]
        if len(self.steps) > 1:
            later = ", ".join(f"{step} {count:,}" for step, count in self.steps[1:])
            lines.append(f"  elements that differ first at a later step: {later}")
        lines += [f"  {text}" for text in (f"setting: {self.setting}" * bool(self.setting), self.element) if text]
        return tuple(lines)


@dataclass(frozen=True)
class Parity:
    """The result of fp4kit.parity. It prints as a table of layers and an explanation per kind of difference.

    Attributes:
        layers: one LayerParity per compared layer, followed by one per compared other tensor, such as a norm, one per
            compared input scale, one per compared input, one per compared array of a KV cache, and those of compared
            layouts of KV pages.
        contracts: how the contracts differ; None if a side has none.
        missing: the layers that only one side has, with the name of the side that lacks them.
        notes: what was not compared, and why.
        sampled: what was compared, in words.
        exclusions: the layers that an engine would leave unquantized on one side only, because the exclusion lists in
            the configs mean different layers to this engine, in words per engine.
        uncompared: what one side states or stores about inputs and the other side does not, such as "activations and
            input scales"; "" if there is nothing of this kind. `equal` says nothing about it.
    """

    layers: tuple[LayerParity, ...]
    contracts: ContractDiff | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sampled: str = ""
    exclusions: tuple[str, ...] = ()
    uncompared: str = ""

    @property
    def equal(self) -> bool:
        """True if every layer is on both sides, engines leave the same layers unquantized, and all bits are equal.

        Settings in which only the contracts differ do not count.
        """
        return not self.missing and not self.exclusions and all(layer.equal for layer in self.layers)

    @property
    def differing(self) -> tuple[LayerParity, ...]:
        """The layers that differ, in the order of ``layers``; () if there are none."""
        return tuple(layer for layer in self.layers if not layer.equal)

    @property
    def examples(self) -> tuple[LayerParity, ...]:
        """One example per kind of difference: the first layer for each combination of kind, step and result."""
        first: dict[tuple[object, ...], LayerParity] = {}
        for layer in self.differing:
            first.setdefault((layer.kind, layer.step, layer.result), layer)
        return tuple(first.values())

    def __bool__(self) -> bool:
        """Return `equal`: True if every layer is on both sides and nothing that was compared differs."""
        return self.equal

    def __str__(self) -> str:
        """Return the verdict, a table of the layers that differ, the examples and the remarks as text."""
        lines = [self.verdict]
        if self.differing:
            lines.append(self._panel("layers that differ").text())
        lines += map(str, self.examples)
        for title, texts in self.remarks:
            lines += [f"{title}: {text}" for text in texts]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        return f"Parity({self.verdict})"

    def _repr_html_(self) -> str:
        """Return the verdict and the table of differing layers as HTML, which notebooks show."""
        return self._panel(self.verdict).html()

    @property
    def verdict(self) -> str:
        """The result in one line: how many layers differ or are equal, how many one side lacks, and what was compared.

        For example, it begins with "3 layers and 1 input are equal in every bit" or "1 of 3 layers differs".
        """
        counts: dict[str, list[int]] = {}  # noun -> [differing, compared]
        for layer in self.layers:
            of_noun = counts.setdefault(_NOUNS.get(layer.kind, "layer"), [0, 0])
            of_noun[0] += not layer.equal
            of_noun[1] += 1
        kinds = {layer.kind for layer in self.differing}  # norms, which are equal, have no part in the total
        values = [sum(layer.values[i] for layer in self.layers if layer.kind in kinds) for i in (0, 1)]
        if values[0] and all(layer.same_codes and layer.step != "product" for layer in self.differing):
            parts = [
                f"codes and scales are equal in all layers; {values[0]:,} of {values[1]:,} values differ by rounding,"
                f" in {counted(len(self.differing), 'layer')}, because the sides decode in another order, to another"
                " dtype or from a reciprocal"
            ]
        elif self.differing:
            differing = [f"{n:,} of {counted(total, noun)}" for noun, (n, total) in counts.items() if n]
            parts = [f"{_joined(differing)} {'differs' if len(self.differing) == 1 else 'differ'}"]
        else:
            equal = [counted(total, noun) for noun, (_, total) in counts.items()]
            parts = [f"{_joined(equal)} {'is' if len(self.layers) == 1 else 'are'} equal in every bit"]
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            parts.append(f"{counted(len(self.missing), 'layer')} {verb} on one side only")
        if self.exclusions:
            parts.append("engines would not leave the same layers unquantized")
        if self.uncompared:
            parts.append(f"{self.uncompared} were not compared")
        return "; ".join(filter(None, (*parts, self.sampled)))

    @property
    def remarks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Pairs (title, texts): missing layers, settings that differ or are unknown, and what was not compared.

        Pairs without texts are left out.
        """
        contracts = self.contracts or ContractDiff()
        found = (
            ("on one side only", self.missing),
            ("exclusions", self.exclusions),
            ("setting", contracts.differences),
            ("unknown setting", _in_one_line(contracts.uncertain)),
            ("not compared", self.notes),
        )
        return tuple((title, texts) for title, texts in found if texts)

    def rows(self, most: int | None = None) -> tuple[tuple[str, ...], ...]:
        """Return the cells of the table as texts: one row per layer that differs, and one cell per name in COLUMNS.

        most: the largest number of rows, of which the last counts the other layers; None for all.
        """
        found = self.differing if most is None or len(self.differing) <= most else self.differing[: most - 1]
        rest = len(self.differing) - len(found)
        more = ((f"and {counted(rest, 'other')}", *[""] * (len(COLUMNS) - 1)),) if rest else ()
        return (
            tuple(
                (
                    layer.name if layer.kind == "weight" else f"{layer.kind} {layer.name}",
                    *(
                        f"{differing:,} of {total:,}" if total else "-"
                        for differing, total in (layer.codes, layer.scales, layer.values, layer.products)
                    ),
                    str(layer.step),
                )
                for layer in found
            )
            + more
        )

    def _panel(self, title: str) -> Panel:
        """Return a Panel (a table with a title) with one row per differing layer."""
        return Panel(title, columns=COLUMNS, rows=self.rows(MOST_ROWS))


_UNUSUAL = ("patterns", "hadamard", "hadamard_signs", "scale_search")  # a side that uses one of these states it


def _in_one_line(uncertain: tuple[str, ...]) -> tuple[str, ...]:
    """Return texts about unknown settings, one for all settings that are unknown in the same contracts."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for text in uncertain:
        name, _, rest = text.partition(": ")
        where, _, said = rest.partition("; the other says ")
        if said != "none" or name not in _UNUSUAL:
            alike.setdefault(where, []).append((name, said))
    side = {"unknown in the first contract": "rollout alone", "unknown in the second contract": "train alone"}
    return tuple(
        f"{side.get(where, 'neither side')} states "
        + ", ".join(f"{name} ({said})" if said else name for name, said in found)
        for where, found in alike.items()
    )


_RARE = 1_000_000  # chance_of_a_miss is stated for one differing element in this many


def chance_of_a_miss(layers: Sequence[LayerParity]) -> str:
    """Return a text: with which chance the compared elements of layers miss a fault; "" if all are compared."""
    compared, total = sum(one.elements for one in layers), sum(one.total for one in layers)
    if compared == total:
        return ""
    differing = -(-total // _RARE)
    chance = prod(1 - compared / (total - i) for i in range(differing))
    row = max(1 - one.elements / one.total for one in layers)
    fault, them = f"{differing:,} elements differ at random places", "all of them"
    if differing == 1:
        fault, them = "1 element differs at a random place", "it"
    return (
        f"{total - compared:,} of {total:,} elements, which are not in the sample: if {fault}, the sample misses"
        f" {them} with a chance of {chance:.2g}; it misses a single differing row"
        f" of a layer with a chance of up to {row:.2%}, and a fault in every row of a layer never"
    )


def _joined(texts: list[str]) -> str:
    """Return texts joined with commas and "and": "a", "a and b", or "a, b and c"; "" for []."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


_SIGNS = " with signs "  # what stands between the size and the signs in the text of a transform
_SHOWN = 4  # smallest number of signs that messages show


def compare_layer(name: str, kind: Kind, sides: tuple[Rows, Rows], rows: np.ndarray, total: int) -> LayerParity:
    """Compare the rows of one layer on two sides, and explain the first step that differs."""
    a, b = sides
    if (equal := _equal_bytes(name, kind, a, b, total)) is not None:
        return equal
    decoded = side_rows.values_of(a.part, b.part), side_rows.values_of(b.part, a.part)
    values = side_rows.served(decoded[0], a), side_rows.served(decoded[1], b)
    masks = {**_differing_parts(a.part, b.part), "values": differing_bits(*values)}
    counts: dict[str, Any] = {part: (int(mask.sum()), mask.size) for part, mask in masks.items()}
    found = LayerParity(name, kind, values[0].size, total, **counts, same_codes=_same_codes(a.part, b.part, counts))
    if not any(count for count, _ in counts.values()):
        return found
    affected, other_scales = masks["values"], np.zeros(values[0].shape, bool)
    if "codes" in masks:
        affected = affected | masks["codes"]
    if "scales" in masks and isinstance(a.part, Quantized):
        other_scales = np.repeat(masks["scales"], a.part.recipe.block_size, axis=1)
    affected = affected | other_scales
    alone = masks["tensor_scales"] if "tensor_scales" in masks and not affected.any() else None
    affected = affected if affected.any() else np.ones_like(affected)
    if a.served_dtype != b.served_dtype and not any(mask.any() for part, mask in masks.items() if part != "values"):
        both = f"{a.served_dtype or 'none'} in {a.label} and {b.served_dtype or 'none'} in {b.label}"
        wrong = f"served_dtype is {both}; decode to one dtype on both sides"
        if not differing_bits(*decoded).any():
            sides = replace(a, how=None), replace(b, how=None, step="decode", wrong=wrong)
    codes = masks.get("codes", np.zeros_like(affected))
    found = _explained(found, sides, rows, (affected, other_scales, codes), values)
    return found if alone is None else replace(found, **_of_tensor_scales(sides, alone))


def _of_tensor_scales(sides: tuple[Rows, Rows], differ: np.ndarray) -> dict[str, Any]:
    """Return what explains a layer in which tensor scales differ, and decoded values do not."""
    at = int(np.argmax(differ))
    parts = [(one.label, one.part) for one in sides if isinstance(one.part, Quantized)]
    both = [(label, np.ravel(np.asarray(q.tensor_scale))[at]) for label, q in parts]
    values = " and ".join(f"{label} {value!s} ({_bits(value)})" for label, value in both)
    text = f"tensor scales: {int(differ.sum()):,} of {differ.size:,} differ: {values}; all decoded values are equal"
    return {"count": 0, "examined": 0, "steps": (), "element": text}


def _equal_bytes(name: str, kind: Kind, a: Rows, b: Rows, total: int) -> LayerParity | None:
    """Return the result for codes that are equal in every byte and decoded alike, so that their values are equal."""
    p, q = a.part, b.part
    if not (isinstance(p, Quantized) and isinstance(q, Quantized)) or a.served_dtype != b.served_dtype:
        return None
    is_alike = p.recipe == q.recipe and p.dtype == q.dtype and side_rows.same(p.tensor_amax, q.tensor_amax)
    if not (is_alike and side_rows.equal(p, q)):
        return None
    size = p.shape[0] * p.shape[1]
    scales, tensor_scales = (0 if x is None else np.size(x) for x in (p.block_scale, p.tensor_scale))
    counts: dict[str, Any] = {"codes": (0, size), "scales": (0, scales), "tensor_scales": (0, tensor_scales)}
    found = LayerParity(name, kind, size, total, **counts, values=(0, size))
    return replace(found, same_codes=_same_codes(p, q, counts))


_NEAR = 2  # float32 ulp between a tensor scale and the reciprocal of its stored, rounded reciprocal


def _same_codes(a: Matrix, b: Matrix, counts: Mapping[str, Count]) -> bool:
    """Return whether two sides store equal codes and scales, so that only the rounding of decoded values may differ."""
    codes, scales = counts.get("codes", (0, 0)), counts.get("scales", (0, 0))
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)) or codes[0] or not codes[1] or scales[0]:
        return False
    if not scales[1] and not (a.block_scale is None and b.block_scale is None):
        return False
    p, q = a.tensor_scale, b.tensor_scale
    if p is None or q is None or np.shape(p) != np.shape(q):
        return p is None and q is None
    x, y = np.asarray(p, np.float32), np.asarray(q, np.float32)
    return bool(np.all(np.abs(x - y) <= _NEAR * np.spacing(np.maximum(np.abs(x), np.abs(y)))))


def _differing_parts(a: Matrix, b: Matrix) -> dict[str, np.ndarray]:
    """Return masks of differing codes, scales and tensor_scales, for the parts that both sides store alike."""
    found: dict[str, np.ndarray] = {}
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return found
    r, s = a.recipe, b.recipe
    if r.element == s.element:
        found["codes"] = unpacked(a.packed, r.element.packing) != unpacked(b.packed, s.element.packing)
    p, q = a.block_scale, b.block_scale
    if p is not None and q is not None and r.scale == s.scale and p.shape == q.shape:
        found["scales"] = p != q
    p, q = a.tensor_scale, b.tensor_scale
    if p is not None and q is not None and np.shape(p) == np.shape(q):
        found["tensor_scales"] = differing_bits(np.asarray(p), np.asarray(q))
    return found


def _explained(
    found: LayerParity,
    sides: tuple[Rows, Rows],
    rows: np.ndarray,
    masks: tuple[np.ndarray, np.ndarray, np.ndarray],
    values: tuple[np.ndarray, np.ndarray],
) -> LayerParity:
    """Explain a difference: return a copy of ``found`` that also has the first step that differs and its cause."""
    (a, b), (affected, other_scales, codes) = sides, masks
    wrong = [one.step for one in sides if one.wrong]
    setting = [f"{one.label}: {one.wrong}" for one in sides if one.wrong]
    p, q = a.how, b.how
    first = None
    if p is not None and q is not None and a.x is not None and b.x is not None:
        setting += _settings((a.label, b.label), (p, q), (a.container, b.container))
        untraced = wrong or side_rows.has_nan(p.amax) or side_rows.has_nan(q.amax)  # quantize, traced, rejects NaN
        first = None if untraced else side_rows.first_step((a.x, b.x), p, q, affected, other_scales)
    if first is None:
        examined = int(affected.sum())
        by_step = _by_parts(found, a.part, b.part, affected, other_scales, codes)
        if wrong:
            by_step = {step: affected for step in wrong[:1] if step is not None}
        if not wrong:
            setting += [f"{one.label}: {one.nearest}" for one in sides if one.nearest]
        with_values = [one.label for one in sides if not isinstance(one.part, Quantized)]
        if len(with_values) == 1 and not setting:
            setting.append(f"{with_values[0]} has values instead of codes")
        steps = tuple((one, int(mask.sum())) for one, mask in by_step.items())
        facts: dict[str, Any] = {"step": steps[0][0], "count": steps[0][1], "examined": examined, "steps": steps}
        first = first_place(next(iter(by_step.values()))), facts
    at, facts = first
    element = f"element [{int(rows[at[0]])}, {at[1]}]: " + " and ".join(
        f"{one.label} {value[at]!s} ({_bits(value[at])}{_code_text(one.part, at)})"
        for one, value in zip(sides, values, strict=True)
    )
    worked = None if wrong else _worked(sides, at, int(rows[at[0]]))
    return replace(found, **facts, element=element, setting="; ".join(setting), worked=worked)


def _by_parts(
    found: LayerParity, a: Matrix, b: Matrix, affected: np.ndarray, scales: np.ndarray, codes: np.ndarray
) -> dict[StepName, np.ndarray]:
    """Return, for each step, the affected elements of which it makes the first stored part that differs."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return {"value": affected}
    if found.tensor_scales[0]:
        return {"tensor scale": affected}
    masks: dict[StepName, np.ndarray] = {
        "block scale": affected & scales,
        "code": affected & codes & ~scales,
        "decode": affected & ~codes & ~scales,
    }
    return {step: mask for step, mask in masks.items() if mask.any()}


def _title(r: Recipe) -> str:
    """Return the title of a recipe without its rule of decoding, which is that of a container's loaders."""
    listed = ALL_RECIPES.get(r.id, r)
    return replace(r, decode_rule=listed.decode_rule, fake_rule=listed.fake_rule).title


def _settings(
    labels: tuple[str, str], sides: tuple[Arithmetic, Arithmetic], containers: tuple[str | None, str | None]
) -> Iterator[str]:
    """Yield one text per setting in which two sides differ: recipe or container, Hadamard transform, tensor amax."""
    a, b = sides
    if a.recipe != b.recipe:
        what = ", ".join(recipe_difference(a.recipe, b.recipe))
        setting, values = "recipe", (_title(a.recipe), _title(b.recipe))
        if a.recipe.id == b.recipe.id and containers[0] != containers[1] and only_decoding(a.recipe, b.recipe):
            setting, values = "container", (containers[0] or "none", containers[1] or "none")
        both = f"{values[0]} in {labels[0]} and {values[1]} in {labels[1]}"
        yield f"{setting} {both} ({what}); use one {setting} on both sides"
    if a.transform != b.transform:
        one, other = _shown_transforms(a.transform or "none", b.transform or "none")
        yield f"hadamard is {one} in {labels[0]} and {other} in {labels[1]}; use one on both sides"
    if a.amax is None or b.amax is None or a.recipe.tensor_scaling != b.recipe.tensor_scaling:
        return
    other_group = bool(a.layers and b.layers and a.layers != b.layers)
    if not side_rows.same(a.amax, b.amax) and (a.transform == b.transform or other_group):
        uses = [f"{label} uses {_amax_text(one)}" for label, one in zip(labels, (a, b), strict=True)]
        advice = "; let the same layers share an amax (shared_amax)" if other_group else ""
        advice = "; use the same input scales on both sides (input_scales)" if a.static or b.static else advice
        yield f"tensor amax: {' and '.join(uses)}{advice}"


def _shown_transforms(a: str, b: str) -> tuple[str, str]:
    """Return the texts of two different Hadamard transforms, shortened so that they still differ, for a message."""
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)

    def shown(text: str) -> str:
        size, _, signs = text.partition(_SIGNS)
        length = max(len(size) + len(_SIGNS) + _SHOWN, first + 1)
        return f"{text[:length]}..." if signs and length < len(text) else text

    return shown(a), shown(b)


def _amax_text(one: Arithmetic) -> str:
    """Return the tensor amax of a side and where it comes from, such as "3.5, its own"."""
    amax = f"{one.amax!s}" if one.amax is not None and not one.amax.ndim else "one per row"
    if one.static:
        return f"{amax}, which its stored input scale gives"
    if len(one.layers) > 1:
        return f"{amax}, the largest of {', '.join(one.layers)}"
    return f"{amax}, {'its own' if one.layers else 'which its tensor scale implies'}"


def _worked(sides: tuple[Rows, Rows], at: tuple[int, int], row: int) -> Explanation | None:
    """Compute one element step by step on both sides, and return the steps for display."""
    steps, names = [], []
    for one in sides:
        if one.how is None or one.x is None or side_rows.has_nan(one.how.amax):
            return None
        steps.append(explain(one.x, one.how.recipe, at, tensor_amax=one.how.amax).steps[0])
        names.append(f"{one.label} {one.how.recipe.title}")
    return Explanation((row, at[1]), tuple(names), tuple(steps))


def _code_text(q: Matrix, at: tuple[int, int]) -> str:
    """Return the code and the block scale of an element as text after a comma; "" for values without codes."""
    if not isinstance(q, Quantized):
        return ""
    code = int(unpacked(q.packed[at[0]], q.recipe.element.packing)[at[1]])
    scale = None if q.block_scale is None else int(q.block_scale[at[0], at[1] // q.recipe.block_size])
    return f", code 0x{code:x}" if scale is None else f", code 0x{code:x}, block scale 0x{scale:02x}"


def _bits(number: Any) -> str:
    """Return the bit pattern of a NumPy scalar, such as "0x3f800000"."""
    return f"0x{int.from_bytes(number.tobytes(), sys.byteorder):0{2 * number.itemsize}x}"


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INPUTS_DIFFER = "the inputs are quantized differently; see the inputs"


def why_no_products(contract: Contract) -> str:
    """Return the reason why the contract of a side does not say how products are computed; "" if it does."""
    if contract is NO_CONTRACT:
        return "no contract states the matrix unit"
    if contract.unit is None:
        return "the contract states no matrix unit"
    return "the recipe of activations is unknown" if "activations" in contract.unknown else ""


def products(side: Side, inputs: np.ndarray, weights: Matrix, quantized: bool, layer: str = "") -> np.ndarray:
    """Multiply inputs (tokens, K) by weights (N, K) as the matrix unit of a side's contract does."""
    unit, recipe = side.contract.unit, side.contract.activations
    assert unit is not None
    inputs = side.transformed(inputs) if quantized else inputs
    if unit.order in ENGINE_ORDERS and isinstance(weights, Quantized):  # these take inputs as they are
        return np.asarray(matmul(inputs, weights, unit=unit))
    left: Matrix = inputs
    if quantized and recipe is not None:
        left = side_rows.made(inputs, *side.of_inputs(layer, recipe, inputs.dtype))
    if isinstance(left, Quantized) and isinstance(weights, Quantized):
        return np.asarray(matmul(left, weights, unit=unit))
    decoded = (dequantize(one, BFLOAT16) if isinstance(one, Quantized) else one for one in (left, weights))
    return np.asarray(matmul(*(np.asarray(one).astype(BFLOAT16) for one in decoded), unit=unit))


def with_products(
    found: LayerParity, a: np.ndarray, b: np.ndarray, setting: str, labels: tuple[str, str]
) -> LayerParity:
    """Compare the products of two sides, and return a copy of a layer's result with the count of those that differ."""
    differs = differing_bits(a, b)
    found = replace(found, products=(int(differs.sum()), differs.size))
    if not differs.any() or not found.equal:
        return found
    at, count = first_place(differs), int(differs.sum())
    values = " and ".join(f"{label} {one[at]!s} ({_bits(one[at])})" for label, one in zip(labels, (a, b), strict=True))
    element = f"product of token {at[0]} and row {at[1]}: {values}"
    return replace(
        found, step="product", count=count, examined=count, element=element, setting=setting or INPUTS_DIFFER
    )


_BLOCK_SIZE = 16  # tokens per page
_DRAWN = (32, 2, 128)  # tokens, heads and head_dim of random keys and values
_MAX_TOKENS = 1024  # at most this many tokens of the caller's keys or values are compared


def compare_layouts(
    train: str, rollout: str, recipe: Recipe, labels: tuple[str, str], given: Mapping[str, np.ndarray]
) -> Iterator[LayerParity]:
    """Yield, per array, how many codes and scales the rollout misreads if pages are in the trainer's layout."""
    multiple = 64 if KV_LAYOUTS[train].swizzled or KV_LAYOUTS[rollout].swizzled else 16
    own = {name: x for name, x in given.items() if x.ndim == 3 and x.size and x.shape[-1] % multiple == 0}
    for name, x in own.items():
        yield _compared(f"layout of {name}", train, rollout, recipe, labels, np.stack([x[:_MAX_TOKENS]] * 2))
    if not own:
        x = np.random.default_rng(0).standard_normal((2, *_DRAWN), np.float32)
        yield _compared("layout", train, rollout, recipe, labels, x)


def _compared(
    name: str, train: str, rollout: str, recipe: Recipe, labels: tuple[str, str], x: np.ndarray
) -> LayerParity:
    """Write keys and values in one layout, read them in the other, and return how many codes and scales then differ."""
    setting = f"kv_layout {train} in {labels[0]} and {rollout} in {labels[1]}; use one layout, or convert the pages"
    a, b = KV_LAYOUTS[train], KV_LAYOUTS[rollout]
    total, scales = x.size, x.size // 16
    if recipe.element.name != "E2M1" or recipe.block != (1, 16) or a.container != b.container:
        counts = (total, total), (scales, scales)
        return LayerParity(name, "kv cache", total, total, *counts, step="code", setting=setting)
    tokens, heads, head_dim = x.shape[1:]
    shape = PageShape(-(-tokens // _BLOCK_SIZE), _BLOCK_SIZE, heads, head_dim)
    k, v = (quantize(np.ascontiguousarray(one), recipe) for one in x)
    written, slots = a.zeros(shape), np.arange(tokens)
    parts = KVParts(k.packed, k.block_scale, v.packed, v.block_scale)
    written.write(slots, parts)
    arrays = tuple(one.reshape(each) for one, each in zip(written.arrays, b.array_shapes(shape).values(), strict=True))
    pairs = list(zip(KVCache(b, arrays).read(slots), parts, strict=True))  # codes, scales, codes, scales
    codes = sum(int((unpack(one) != unpack(other)).sum()) for one, other in pairs[::2])
    wrong = sum(int((one != other).sum()) for one, other in pairs[1::2])
    step: StepName = "code" if codes else "block scale"
    counts = (codes, total), (wrong, scales)
    if not codes and not wrong:  # for example, two orders of heads have equal offsets for one head
        return LayerParity(name, "kv cache", total, total, *counts)
    return LayerParity(name, "kv cache", total, total, *counts, step=step, setting=setting)
