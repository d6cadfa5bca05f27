"""Generate one page per producer for the documentation site, from the recipes and the specification.

tools/mkdocs_hooks.py adds the pages to the site.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.cli.output import block_text, markdown
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.recipes import ALL_RECIPES, RECIPES, Recipe
from fp4kit.recipes.schema import PRODUCERS, producer_of
from fp4kit.reference.ascend import SCALED, hif4
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.four_over_six import quantize_four_over_six, quantize_if4
from fp4kit.reference.tensor_rules import TENSOR_RULES

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_explorer import why_not

# {block rule by which a block chooses between two candidates: the function that quantizes by it}
_CHOICES = {"four_over_six": quantize_four_over_six, "fouroversix_if4": quantize_if4}
# {block rule that makes scales and codes together: the function that does so}
_WHOLE = SCALED | {"hif4": hif4, "hif4_amct": hif4}
_EQUAL = "The compiled CPU engine and the CUDA kernels give equal bits."


@cache
def producers() -> dict[str, list[Recipe]]:
    """Return {id of a producer: its recipes}, such as "te", in the order of the table of recipes."""
    found: dict[str, list[Recipe]] = {}
    for r in ALL_RECIPES.values():
        found.setdefault(producer_of(r.id), []).append(r)
    return found


def pages() -> dict[str, str]:
    """Return {file name: Markdown text} of all pages."""
    return {"index.md": overview()} | {f"{name}.md": page(name, rs) for name, rs in producers().items()}


def overview() -> str:
    """Return the Markdown page that lists all producers, with their formats, recorded outputs and versions."""
    rows = []
    for name, recipes in producers().items():
        equal, compared = (sum(counts) for counts in zip(*(_recorded(r) for r in recipes), strict=True))
        formats = ", ".join(sorted({r.id.split("-")[0].upper() for r in recipes}))
        outputs = f"{equal:,} of {compared:,} equal" if compared else "none"
        rows.append((f"[{PRODUCERS[name].name}]({name}.md)", formats, str(len(recipes)), outputs, _versions(recipes)))
    text = (
        "A *producer* is a library that quantizes, and a *recipe* is the arithmetic of one producer. The page of each"
        ' producer lists its recipes, with their formulas. The column "recorded outputs" counts the arrays that the'
        " producer computed and that fp4kit was compared with.\n\n"
    )
    columns = ("producer", "formats", "recipes", "recorded outputs", "versions checked")
    return f"# Producers\n\n{text}{markdown(columns, rows)}\n"


def page(name: str, recipes: list[Recipe]) -> str:
    """Return the Markdown page of one producer: its versions, recipes, formulas, and similar recipes of others.

    name: the producer's id, one of PRODUCERS.
    recipes: the recipes that reproduce the producer; not empty.
    """
    equal, compared = (sum(counts) for counts in zip(*(_recorded(r) for r in recipes), strict=True))
    recorded = (
        f"fp4kit's results equal {equal:,} of {compared:,} recorded outputs of this producer in every bit."
        if compared
        else "No outputs of this producer are recorded. The recipes were derived from the producer's source code."
    )
    about = (
        f"This page lists the recipes that reproduce {PRODUCERS[name].name}, and the formulas that they use. {recorded}"
    )
    lines = [f"# {PRODUCERS[name].name}", "", about, ""]
    lines += [f"Versions checked: {_versions(recipes)}.", "", "## Recipes", ""]
    lines += [*(_entry(r) for r in recipes), ""]
    lines += [
        "## Formulas",
        "",
        f"The NumPy code below defines each rule. {_EQUAL}",
        "",
    ]
    lines += _rules("Block scale", {r.block_rule for r in recipes if r.block_rule in BLOCK_RULES}, _block_source)
    lines += _rules("Choice of each block", {r.block_rule for r in recipes if r.block_rule in _CHOICES}, _choice_source)
    lines += _rules("Scales and codes", {r.block_rule for r in recipes if r.block_rule in _WHOLE}, _whole_source)
    lines += _rules("Tensor scale", {r.tensor_rule for r in recipes if r.tensor_rule in TENSOR_RULES}, _tensor_source)
    relative = _relative(recipes[0])
    if relative:
        lines += ["## Similar recipes of other producers", "", *relative]
    return "\n".join(lines) + "\n"


def _entry(r: Recipe) -> str:
    """Return the Markdown list entry of a recipe: id, block shape, recorded outputs, source, and a link to explore it.

    Its anchor is the id, to which the explorer links.
    """
    equal, compared = _recorded(r)
    counts = f"{equal} of {compared} recorded outputs equal" if compared else "no recorded outputs"
    exact = f" Equal to: {r.exact}." if r.exact else ""
    explorer = f" [Explore](../explorer.html#recipes={r.id})." if r.id in RECIPES and why_not(r) is None else ""
    return f"- **`{r.id}`**{{ #{r.id} }}, blocks of {block_text(r)}, {counts}.{exact} Source: {r.source}.{explorer}"


def _versions(recipes: Iterable[Recipe]) -> str:
    return ", ".join(dict.fromkeys(str(r.versions) for r in recipes if str(r.versions))) or "none"


@cache
def _recorded(r: Recipe) -> tuple[int, int]:
    """Return, for a recipe, (number of recorded arrays that fp4kit reproduces, number of recorded arrays compared)."""
    result = check_recipe(r.id, _golden())
    return result.equal, result.compared


@cache
def _golden() -> GoldenSet:
    return GoldenSet.find()


def _rules(title: str, rules: Iterable[str], source: Callable[[str], str]) -> list[str]:
    """Return Markdown lines with a heading and the source code of each rule, sorted by name.

    title: the kind of the rules, with which every heading begins.
    rules: the names of the rules.
    source: a function from the name of a rule to its source code.
    """
    lines = []
    for rule in sorted(rules):
        lines += [f"### {title}: `{rule}`", "", "```python", source(rule).rstrip(), "```", ""]
    return lines


def _block_source(rule: str) -> str:
    """Return the source code of a block rule: the functions for the scale code and for the factor."""
    found = BLOCK_RULES[rule]
    return "\n".join(inspect.getsource(f) for f in dict.fromkeys((found.code, found.factor)))


def _choice_source(rule: str) -> str:
    return inspect.getsource(_CHOICES[rule])


def _whole_source(rule: str) -> str:
    return inspect.getsource(_WHOLE[rule])


def _tensor_source(rule: str) -> str:
    return inspect.getsource(TENSOR_RULES[rule])


@cache
def _bytes_of(r: Recipe) -> tuple[np.ndarray, np.ndarray] | None:
    """Quantize the matrix of `_drawn` by a recipe, and return (codes, block scales), so that recipes can be compared.

    Return None if the recipe is a fake quantizer, only rounds stochastically, has no block scales, searches scales, or
    has blocks of several rows.
    """
    if r.fake_only or r.stochastic_only or r.scale is None or r.search or r.block != (1, r.block_size):
        return None
    q = fp4kit.quantize(_drawn(), r)
    return fp4kit.unpack(q.packed) if r.is_packed else q.packed, q.block_scale


@cache
def _drawn() -> np.ndarray:
    """Return a fixed random bfloat16 matrix with values like those of weights."""
    weights = np.random.default_rng(5).standard_normal((256, 512)) * 0.02
    return weights.astype(ml_dtypes.bfloat16)


def _relative(r: Recipe) -> list[str]:
    """Return Markdown lines about the recipes of other producers that are closest to r on one random matrix.

    Only recipes of r's format are compared. The lines first name the recipes that give the same bytes, if there are
    any. Then they show, on one block, the recipe with the fewest differing codes and scales among the others. The list
    is empty if r cannot be compared (see `_bytes_of`), or if no other recipe can.
    """
    mine = _bytes_of(r)
    if mine is None:
        return []
    same_format = [
        s
        for s in RECIPES.values()
        if s.id.split("-")[0] == r.id.split("-")[0] and producer_of(s.id) != producer_of(r.id)
    ]
    candidates = {
        s.id: theirs for s in same_format if (theirs := _bytes_of(s)) is not None and theirs[0].shape == mine[0].shape
    }
    candidates = {id: theirs for id, theirs in candidates.items() if theirs[1].shape == mine[1].shape}
    differing = {id: int((mine[0] != t[0]).sum() + (mine[1] != t[1]).sum()) for id, t in candidates.items()}
    parted = {id: n for id, n in differing.items() if n}
    alike = [id for id, n in differing.items() if not n]
    lines = []
    if alike:
        lines += [
            f"For one matrix of random bfloat16 weights, `{r.id}` gives the same bytes as"
            f" {', '.join(f'`{id}`' for id in alike)}. For other matrices, these recipes may differ"
            " ([recipes that agree on more data](../recipes.md#what-equals-what)).",
            "",
        ]
    if parted:
        other = min(parted, key=parted.__getitem__)
        lines += [
            f"Other recipes give different bytes for this matrix. Among them, `{other}` differs least from `{r.id}`."
            " The table shows the block in which the two recipes differ most. It lists the scale byte of the block, and"
            " the quantized value of each element before scaling. An arrow marks differences:",
            "",
        ]
        lines += [_worked(r, other, mine, candidates[other]), ""]
    return lines


def _worked(r: Recipe, other: str, mine: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray]) -> str:
    """Return a Markdown table of the block in which r and `other` differ most.

    It shows the elements, their quantized values before scaling, and the scale bytes of both recipes. An arrow marks
    the rows that differ.

    r: the first recipe.
    other: the id of the second recipe.
    mine, theirs: the results of `_bytes_of` for the first and the second recipe.
    """
    size = r.block_size
    differs = (mine[0] != theirs[0]).reshape(-1, size).sum(axis=1) + (mine[1] != theirs[1]).reshape(-1)
    at = int(differs.argmax())
    x = _drawn().astype(np.float32).reshape(-1, size)[at]
    values = [r.element.decode(part[0]).reshape(-1, size)[at] for part in (mine, theirs)]
    scales = [int(part[1].reshape(-1)[at]) for part in (mine, theirs)]
    rows = [(f"{a:.6g}", f"{b:g}", f"{c:g}", "←" if b != c else "") for a, b, c in zip(x, *values, strict=True)]
    rows = [("scale byte", f"{scales[0]:#04x}", f"{scales[1]:#04x}", "←" if scales[0] != scales[1] else ""), *rows]
    return markdown(("element", r.id, other, ""), rows)
