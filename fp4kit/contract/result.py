"""Define the result of fp4kit.parity: per layer, what differs, the first step that differs, and one worked element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp4kit.contract.schema import ContractDiff
from fp4kit.contract.steps import StepName
from fp4kit.display.panel import Panel
from fp4kit.ops.compare import Count
from fp4kit.ops.explain import Explanation

_NOUNS = {
    "input": "input",
    "kv cache": "KV cache",
    "other tensor": "other tensor",
}  # kind of a LayerParity -> noun in texts; others are layers
_COLUMNS = ("layer", "codes", "block scales", "values", "products", "first step that differs")


@dataclass(frozen=True)
class LayerParity:
    """How the two sides of a parity check differ in one layer.

    codes, scales, tensor_scales, values and products are pairs (number that differ, number compared). A pair is (0, 0)
    if a side lacks such data, or if the formats of the two sides differ.

    Attributes:
        name: the layer.
        kind: "weight", "input" (activations), "kv cache", "other tensor" (a norm, a bias or another tensor of a
            checkpoint that is no layer) or "tensor" (values that no contract describes).
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
        element: one element that differs, with its values on both sides, as text.
        setting: the setting that differs, with advice on how to make the sides equal; "" if none is known to differ.
        worked: the steps by which each side computes this element. None if a side's recipe is unknown, if the order of
            stored bytes is wrong, if a tensor amax is NaN, or if only products differ. Elements are shown after the
            Hadamard transform of their side.
        same_codes: True if all codes and block scales are equal, and tensor scales differ by at most 2 float32 ulp, as
            they do if one side stores reciprocals. Values then differ only by rounding.
    """

    name: str
    kind: Literal["weight", "input", "kv cache", "other tensor", "tensor"]
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
            lines.append(f"  elements that differ first at a later step: {_later(self.steps)}")
        lines += [f"  {text}" for text in (f"setting: {self.setting}" * bool(self.setting), self.element) if text]
        return tuple(lines)


@dataclass(frozen=True)
class Parity:
    """The result of fp4kit.parity. It prints as a table of layers and an explanation per kind of difference.

    Attributes:
        layers: one LayerParity per compared layer, followed by one per compared other tensor, such as a norm, one per
            compared input, one per compared array of a KV cache, and those of compared layouts of KV pages.
        contracts: how the contracts differ; None if a side has none.
        missing: the layers that only one side has, with the name of the side that lacks them.
        notes: what was not compared, and why.
        sampled: what was compared, in words.
        exclusions: the layers that an engine would leave unquantized on one side only, because the exclusion lists in
            the configs mean different layers to this engine, in words per engine.
    """

    layers: tuple[LayerParity, ...]
    contracts: ContractDiff | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sampled: str = ""
    exclusions: tuple[str, ...] = ()

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

        For example, it begins with "3 layers and 1 input are equal in every bit" or "1 of 3 layers differ".
        """
        counts: dict[str, list[int]] = {}  # noun -> [differing, compared]
        for layer in self.layers:
            count = counts.setdefault(_NOUNS.get(layer.kind, "layer"), [0, 0])
            count[0] += not layer.equal
            count[1] += 1
        if self.differing and all(layer.same_codes for layer in self.differing):
            values = sum(layer.values[0] for layer in self.differing), sum(layer.values[1] for layer in self.layers)
            noun = f"{len(self.differing):,} layer{_s(len(self.differing))}"
            parts = [
                f"codes and scales are equal in all layers; {values[0]:,} of {values[1]:,} values differ by rounding,"
                f" in {noun}, because the sides decode in another order or from a reciprocal"
            ]
        elif self.differing:
            differing = [f"{n:,} of {total:,} {noun}{_s(total)}" for noun, (n, total) in counts.items() if n]
            parts = [f"{_joined(differing)} differ"]
        else:
            equal = [f"{total:,} {noun}{_s(total)}" for noun, (_, total) in counts.items()]
            parts = [f"{_joined(equal)} {'is' if len(self.layers) == 1 else 'are'} equal in every bit"]
        if self.missing:
            one = len(self.missing) == 1
            parts.append(f"{len(self.missing):,} layer{'' if one else 's'} {'is' if one else 'are'} on one side only")
        if self.exclusions:
            parts.append("engines would not leave the same layers unquantized")
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
            ("unknown setting", contracts.uncertain),
            ("not compared", self.notes),
        )
        return tuple((title, texts) for title, texts in found if texts)

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Return the cells of the table as texts: one row per layer that differs, and one cell per name in COLUMNS."""
        return tuple(
            (
                layer.name if layer.kind == "weight" else f"{layer.kind} {layer.name}",
                *(_cell(pair) for pair in (layer.codes, layer.scales, layer.values, layer.products)),
                str(layer.step),
            )
            for layer in self.differing
        )

    def _panel(self, title: str) -> Panel:
        """Return a Panel (a table with a title) with one row per differing layer."""
        return Panel(title, columns=_COLUMNS, rows=self.rows())


COLUMNS = _COLUMNS


def _s(count: int) -> str:
    """Return the ending of a plural noun for a count: "" for one, otherwise "s"."""
    return "" if count == 1 else "s"


def _joined(texts: list[str]) -> str:
    """Return texts joined with commas and "and": "a", "a and b", or "a, b and c"; "" for []."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def _later(steps: tuple[tuple[StepName, int], ...]) -> str:
    """Return the steps after the first, with their counts, as text such as "code 3, decode 40"."""
    return ", ".join(f"{step} {count:,}" for step, count in steps[1:])


def _cell(pair: Count) -> str:
    """Return a count as text: "3 of 64", or "-" if nothing was compared."""
    return f"{pair[0]:,} of {pair[1]:,}" if pair[1] else "-"
