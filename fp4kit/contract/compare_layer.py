"""Compare one layer of two sides, and explain the first step that differs.
A side is the trainer or the rollout engine of fp4kit.parity. A step is a stage of its arithmetic, such as the tensor
scale, the block scale or the code. Weights are a Quantized or, for a side without codes, an array of values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fp4kit.contract import words
from fp4kit.contract.making import Making, differing_bits, values_of
from fp4kit.contract.result import Count, LayerParity
from fp4kit.contract.sides import Weights, has_nan
from fp4kit.contract.steps import Arithmetic, StepName, first_step
from fp4kit.layouts import unpacked
from fp4kit.ops.explain import Explanation, explain

_SIGNS = " with signs "  # what stands between the size and the signs in the text of a transform
_SHOWN = 4  # smallest number of signs that messages show


class ComparedRows(NamedTuple):
    """The compared rows of one layer on one side.

    label: the name of the side.
    part: the compared rows.
    making: how the side made these rows: recipe, tensor amax and order of the bytes, as far as known.
    x: the same rows of the unquantized weight, after the side's Hadamard transform if the side quantizes the layer;
        None if the weight is unknown.
    container: the container whose loaders decode the codes; None if the side's contract names none.
    """

    label: str
    part: Weights
    making: Making
    x: np.ndarray | None = None
    container: str | None = None


def compare_layer(
    name: str,
    kind: Literal["weight", "input", "kv cache", "other tensor", "tensor"],
    sides: tuple[ComparedRows, ComparedRows],
    rows: np.ndarray,
    total: int,
) -> LayerParity:
    """Return a LayerParity with the counts of codes, scales, tensor scales and values in which two sides differ."""
    a, b = sides
    codes, scales, tensor_scales, affected, other_scales = _differences(a.part, b.part)
    value_a, value_b = values_of(a.part, b.part), values_of(b.part, a.part)
    values = differing_bits(value_a, value_b)
    counts: dict[str, Any] = {
        "codes": codes,
        "scales": scales,
        "tensor_scales": tensor_scales,
        "values": (int(values.sum()), values.size),
    }
    found = LayerParity(name, kind, values.size, total, **counts, same_codes=_same_codes(a.part, b.part, codes, scales))
    if not any(count for count, _ in counts.values()):
        return found
    affected |= values
    affected = affected if affected.any() else np.ones_like(affected)
    return _explained(found, sides, rows, (affected, other_scales), (value_a, value_b))


_NEAR = 2  # float32 ulp between a tensor scale and the reciprocal of its stored, rounded reciprocal


def _same_codes(a: Weights, b: Weights, codes: Count, scales: Count) -> bool:
    """Return whether two sides store equal codes and scales, so that only the rounding of decoded values may differ."""
    if a.q is None or b.q is None or codes[0] or not codes[1] or scales[0]:
        return False
    if not scales[1] and not (a.q.block_scale is None and b.q.block_scale is None):
        return False
    p, q = a.q.tensor_scale, b.q.tensor_scale
    if p is None or q is None or np.shape(p) != np.shape(q):
        return p is None and q is None
    x, y = np.asarray(p, np.float32), np.asarray(q, np.float32)
    return bool(np.all(np.abs(x - y) <= _NEAR * np.spacing(np.maximum(np.abs(x), np.abs(y)))))


def _differences(a: Weights, b: Weights) -> tuple[Count, Count, Count, np.ndarray, np.ndarray]:
    """Return the counts of codes, block scales and tensor scales, then two masks: affected elements, other scales."""
    none = (0, 0)
    shape = a.values.shape if a.q is None else a.q.shape  # type: ignore[union-attr]
    affected, other_scales = np.zeros(shape, bool), np.zeros(shape, bool)
    if a.q is None or b.q is None:
        return none, none, none, affected, other_scales
    r, s = a.q.recipe, b.q.recipe
    codes = scales = tensor_scales = none
    if r.element == s.element:
        differs = unpacked(a.q.packed, r.element.packing) != unpacked(b.q.packed, s.element.packing)
        codes, affected = (int(differs.sum()), differs.size), affected | differs
    p, q = a.q.block_scale, b.q.block_scale
    if p is not None and q is not None and r.scale == s.scale and p.shape == q.shape:
        differs = p != q
        scales = int(differs.sum()), differs.size
        other_scales = np.repeat(differs, r.block_size, axis=1)
        affected = affected | other_scales
    p, q = a.q.tensor_scale, b.q.tensor_scale
    if p is not None and q is not None and np.shape(p) == np.shape(q):
        differs = differing_bits(np.asarray(p), np.asarray(q))
        tensor_scales = int(differs.sum()), differs.size
    return codes, scales, tensor_scales, affected, other_scales


def _explained(
    found: LayerParity,
    sides: tuple[ComparedRows, ComparedRows],
    rows: np.ndarray,
    masks: tuple[np.ndarray, np.ndarray],
    values: tuple[np.ndarray, np.ndarray],
) -> LayerParity:
    """Explain a difference: return a copy of ``found`` that also has the first step that differs and its cause."""
    (a, b), (affected, other_scales) = sides, masks
    wrong = [(one.making.step, f"{one.label}: {one.making.wrong}") for one in sides if one.making.wrong]
    setting = [text for _, text in wrong]
    p, q = a.making.arithmetic, b.making.arithmetic
    at, step, result, count, examined = _first(affected), None, "", 0, 0
    steps: tuple[tuple[StepName, int], ...] = ()
    if p is not None and q is not None and a.x is not None and b.x is not None:
        setting += _settings((a.label, b.label), (p, q), (a.container, b.container))
        untraced = wrong or has_nan(p.amax) or has_nan(q.amax)  # quantize, which is traced, rejects NaN
        first = None if untraced else first_step((a.x, b.x), p, q, affected, other_scales)
        if first is not None:
            step, result, count, examined, at = first.step, first.name, first.elements, first.examined, first.place
            steps = first.steps
    if step is None and wrong:
        step, count, examined = wrong[0][0], int(affected.sum()), int(affected.sum())
    if step is None:
        step = _step_by_parts(found, a.part, b.part)
        count = examined = int(affected.sum())
        setting += [f"{one.label}: {one.making.nearest}" for one in sides if one.making.nearest and not wrong]
        if {a.part.q is None, b.part.q is None} == {True, False} and not setting:
            setting.append(f"{a.label if a.part.q is None else b.label} has values instead of codes")
    worked = None
    if not wrong:
        worked = _worked(sides, at, int(rows[at[0]]))
    element = f"element [{int(rows[at[0]])}, {at[1]}]: " + " and ".join(
        f"{one.label} {value[at]!s}{_code_text(one.part, at)}" for one, value in zip(sides, values, strict=True)
    )
    return replace(
        found,
        step=step,
        result=result,
        count=count,
        examined=examined,
        steps=steps or ((step, count),),
        element=element,
        setting="; ".join(setting),
        worked=worked,
    )


def _first(mask: np.ndarray) -> tuple[int, int]:
    """Return (row, column) of the first True in a mask, row by row. At least one entry must be True."""
    i, j = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(i), int(j)


def _step_by_parts(found: LayerParity, a: Weights, b: Weights) -> StepName:
    """Return the step that makes the first stored part that differs."""
    if a.q is None or b.q is None:
        return "value"
    if found.tensor_scales[0]:
        return "tensor scale"
    if found.scales[0] or found.scales == (0, 0) != found.codes:
        return "block scale" if found.scales[0] else "code" if found.codes[0] else "decode"
    return "code" if found.codes[0] else "decode"


def _settings(
    labels: tuple[str, str], sides: tuple[Arithmetic, Arithmetic], containers: tuple[str | None, str | None]
) -> list[str]:
    """Return one text per setting in which two sides differ: recipe or container, Hadamard transform and tensor
    amax.
    """
    (a, b), texts = sides, []
    if a.recipe != b.recipe:
        what = ", ".join(words.recipe_difference(a.recipe, b.recipe))
        setting, values = "recipe", (a.recipe.id, b.recipe.id)
        if a.recipe.id == b.recipe.id and containers[0] != containers[1] and words.only_decoding(a.recipe, b.recipe):
            setting, values = "container", (containers[0] or "none", containers[1] or "none")
        both = f"{values[0]} in {labels[0]} and {values[1]} in {labels[1]}"
        texts.append(f"{setting} {both} ({what}); use one {setting} on both sides")
    if a.transform != b.transform:
        one, other = _shown_transforms(a.transform or "none", b.transform or "none")
        texts.append(f"hadamard is {one} in {labels[0]} and {other} in {labels[1]}; use one on both sides")
    return texts + _amax_settings(labels, a, b)


def _amax_settings(labels: tuple[str, str], a: Arithmetic, b: Arithmetic) -> list[str]:
    """Return a list with one text that says which tensor amax each side uses; [] if the amaxes do not differ."""
    if a.amax is None or b.amax is None or a.recipe.tensor_scaling != b.recipe.tensor_scaling:
        return []
    other_group = bool(a.layers and b.layers and a.layers != b.layers)
    equal = np.shape(a.amax) == np.shape(b.amax) and not differing_bits(a.amax, b.amax).any()
    if equal or (a.transform != b.transform and not other_group):
        return []
    uses = [f"{label} uses {_amax_text(one)}{_whose(one)}" for label, one in zip(labels, (a, b), strict=True)]
    advice = "; let the same layers share an amax (shared_amax)" if other_group else ""
    advice = "; use the same input scales on both sides (input_scales)" if a.static or b.static else advice
    return [f"tensor amax: {' and '.join(uses)}{advice}"]


def _shown_transforms(a: str, b: str) -> tuple[str, str]:
    """Return the texts of two different Hadamard transforms, shortened so that they still differ, for a message."""
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)

    def shown(text: str) -> str:
        size, _, signs = text.partition(_SIGNS)
        length = max(len(size) + len(_SIGNS) + _SHOWN, first + 1)
        return f"{text[:length]}..." if signs and length < len(text) else text

    return shown(a), shown(b)


def _amax_text(one: Arithmetic) -> str:
    """Return the tensor amax of a side as text, such as "3.5"; "one per row" if it is an array of several amaxes."""
    return f"{one.amax!s}" if one.amax is not None and not one.amax.ndim else "one per row"


def _whose(one: Arithmetic) -> str:
    """Return text for a message that says where a tensor amax comes from."""
    if one.static:
        return ", which its stored input scale gives"
    if len(one.layers) > 1:
        return f", the largest of {', '.join(one.layers)}"
    return ", its own" if one.layers else ", which its tensor scale implies"


def _worked(sides: tuple[ComparedRows, ComparedRows], at: tuple[int, int], row: int) -> Explanation | None:
    """Compute one element step by step on both sides, and return the steps for display."""
    steps, names = [], []
    for one in sides:
        arithmetic = one.making.arithmetic
        if arithmetic is None or one.x is None or has_nan(arithmetic.amax):
            return None
        steps.append(explain(one.x, arithmetic.recipe, at, tensor_amax=arithmetic.amax).steps[0])
        names.append(f"{one.label} {arithmetic.recipe.id}")
    return Explanation((row, at[1]), tuple(names), tuple(steps))


def _code_text(part: Weights, at: tuple[int, int]) -> str:
    """Return the code and the block scale of an element as text; "" for values without codes."""
    if part.q is None:
        return ""
    r = part.q.recipe
    code = int(unpacked(part.q.packed[at[0]], r.element.packing)[at[1]])
    scale = (
        ""
        if part.q.block_scale is None
        else f", block scale 0x{int(part.q.block_scale[at[0], at[1] // r.block_size]):02x}"
    )
    return f" (code 0x{code:x}{scale})"
