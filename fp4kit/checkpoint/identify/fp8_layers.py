"""Explain FP8 layers: E4M3 codes with float scales, one per tensor, per row or per square block. An explanation is a
Diagnosis, which names the recipe or rule that makes all codes and scales from the source (the original weight).

The known rules are scale = amax / 448, in float32 or rounded to bfloat16, and code = the E4M3 value nearest to
x / scale. Tools compute the quotient in float32, or round it to bfloat16 before it becomes a code.

Sources: Model-Optimizer 0.47 fp8_tensor.py and export/quant_utils.py; compressed-tensors 0.20 forward.py; amd-quark
0.13. Measured with files that these tools wrote: all codes and scales are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from fp4kit.checkpoint.identify.calibrated import LEAST_DB, LIKE, is_near_one
from fp4kit.checkpoint.identify.diagnose import NEAR, SIGNS_OF_ANOTHER, Diagnosis
from fp4kit.checkpoint.identify.hypotheses import CHUNK
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.formats import E4M3, ElementFormat
from fp4kit.ops.identify import either
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.codec import encode

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, eq=False)
class Fp8Layer:
    """One FP8 layer as its file stores it.

    codes: uint8 (N, K), bit patterns of E4M3.
    scales: float32 multipliers on decode, of shape (1, 1), (N, 1), or (ceil(N / side), ceil(K / side)).
    scaling: "tensor", "row" or "block" (square), which determines the shape of ``scales``.
    side: the number of rows and columns of a block.
    element: the format of the codes.
    is_cast: True if the file has no scales, so that the codes are the values.
    own: the amax of the whole source, if only some rows of a layer with one scale are here; otherwise None.
    """

    codes: np.ndarray
    scales: np.ndarray
    scaling: str
    side: int = 128
    element: ElementFormat = E4M3
    is_cast: bool = False
    own: np.float32 | None = None

    @property
    def name(self) -> str:
        """The words for the layer's format, such as "FP8 per row"."""
        words = {"E4M3": "FP8", "E5M2": "FP8 E5M2"}.get(self.element.name, self.element.name)
        return f"{words} per {f'{self.side}x{self.side} block' if self.scaling == 'block' else self.scaling}"

    def amaxes(self, x: np.ndarray) -> np.ndarray:
        """Return, for each scale, the amax of the elements of ``x`` (N, K) that share this scale."""
        if self.own is not None:
            return self.own.reshape(1, 1)
        magnitudes = np.abs(x).astype(np.float32)
        if self.scaling == "tensor":
            return magnitudes.max(initial=0).reshape(1, 1)
        if self.scaling == "row":
            return magnitudes.max(axis=1, initial=0)[:, None]
        rows, columns = (np.arange(0, length, self.side) for length in x.shape)
        return np.maximum.reduceat(np.maximum.reduceat(magnitudes, rows, axis=0), columns, axis=1)

    def spread(self, scales: np.ndarray) -> np.ndarray:
        """Return the scales in a shape that broadcasts against the codes."""
        if self.scaling != "block":
            return scales
        rows, columns = self.codes.shape
        return np.repeat(np.repeat(scales, self.side, axis=0)[:rows], self.side, axis=1)[:, :columns]


def explain_fp8(layer: Fp8Layer, x: np.ndarray, amaxes: tuple[float, ...] = ()) -> Diagnosis:
    """Find the recipe or the rule that reproduces every code and scale of an FP8 layer, and return it in a
    Diagnosis.
    """
    total = layer.codes.size + layer.scales.size
    name, most = layer.name, float(layer.element.max)
    if layer.codes.shape != x.shape:
        return _unexplained(
            f"nothing explains these bytes: {name}, codes have shape {layer.codes.shape}; the source has shape"
            f" {x.shape}",
            0,
            0,
            total,
        )
    recipes = tuple(r.id for r in _recipes(layer) if _recipe_gives(layer, x, r, amaxes))
    dtypes, equal_scales = _scale_rules(layer, x, amaxes)
    found = _quotients(layer, x)
    equal_codes = max(found.values())
    quotients = [dtype for dtype, equal in found.items() if equal == layer.codes.size]
    rules = tuple(_rule(name, most, scales, quotient) for scales in dtypes for quotient in quotients)
    if recipes or rules:
        sentence = f"{either(recipes)} made these bytes" if recipes else f"{either(rules)}; no recipe has this rule"
        first = recipes[0] if recipes else None
        return Diagnosis(first, None, layer.codes.size, layer.scales.size, total, sentence, recipes, rules=rules)
    if quotients and layer.is_cast:
        text = f"a cast to {layer.element.name} without scales"
        return Diagnosis(None, None, layer.codes.size, 0, layer.codes.size, text, (), rules=(text,))
    if quotients:
        text = (
            f"{name} under given scales, which are not amax / {most:g}; codes nearest to the quotient in {quotients[0]}"
        )
        cause = f"{name} under given scales: codes are nearest, and scales are not amax / {most:g}"
        method = "given scales" if _has_signal(layer, x) else None
        return Diagnosis(None, None, equal_codes, equal_scales, total, text, searched=True, cause=cause, method=method)
    if _are_reciprocals(layer, x):
        cause = f"{name}: scales are inverted, because their reciprocals decode to the source"
        return Diagnosis(None, None, equal_codes, equal_scales, total, cause, cause=cause)
    share = min(100 * equal_codes / max(layer.codes.size, 1), 99.99)
    text = f"nothing explains these bytes: {name}; {share:.2f}% of codes are nearest under the stored scales"
    unknown = _unexplained(text, equal_codes, equal_scales, total)
    correlation, gain, signs = _likeness(layer, x)
    if correlation >= LIKE and is_near_one(gain, correlation) and equal_codes < _NEARLY_ALL * layer.codes.size:
        text = f"{NEAR}; correlation {correlation:.4f}, {share:.2f}% of codes are nearest under the stored scales"
        return replace(unknown, cause=NEAR, sentence=text, correlation=round(correlation, 4))
    return replace(unknown, unlike=signs < SIGNS_OF_ANOTHER, correlation=round(correlation, 4))


def _likeness(layer: Fp8Layer, x: np.ndarray) -> tuple[float, float, float]:
    """Return the likeness of the decoded values and the source."""
    # The result is (correlation, factor by which the source must be multiplied to fit best, share of nonzero codes that
    # have the sign of the source).
    rows = min(len(x), _MOST_ROWS)
    with np.errstate(all="ignore"):
        values = (E4M3.values[layer.codes] * layer.spread(layer.scales))[:rows].astype(np.float64)
        wanted = x[:rows].astype(np.float64)
        signs = (np.signbit(values) == np.signbit(wanted))[values != 0]
        a, b = values - values.mean(), wanted - wanted.mean()
        ab, bb = (a * b).sum(), (b * b).sum()
        correlation, gain = float(ab / np.sqrt((a * a).sum() * bb)), float(ab / bb)
    return (correlation if np.isfinite(correlation) else 0.0), gain, float(signs.mean()) if signs.size else 1.0


_MOST_ROWS = 1024


# Smallest share of codes that must be nearest to the source if the scales are inverted. A reciprocal of a reciprocal
# may be 1 ulp off.
_NEARLY_ALL = 0.98


def _are_reciprocals(layer: Fp8Layer, x: np.ndarray) -> bool:
    """Return whether at least 98% of the codes are nearest to the source if the stored scales are taken as divisors."""
    # Fewer than all are needed, because the reciprocal of a reciprocal may be off by 1 ulp.
    with np.errstate(all="ignore"):
        inverted = replace(layer, scales=np.float32(1) / layer.scales)
    return max(_quotients(inverted, x).values()) >= _NEARLY_ALL * layer.codes.size


def _has_signal(layer: Fp8Layer, x: np.ndarray) -> bool:
    """Return whether the decoded values have a signal-to-noise ratio of at least 12 dB, with x as the signal."""
    with np.errstate(all="ignore"):
        values = layer.element.values[layer.codes] * layer.spread(layer.scales)
        noise = np.sum(np.square(values - x.astype(np.float32), dtype=np.float64))
    return sqnr_db(float(np.sum(np.square(x, dtype=np.float64))), float(noise)) >= LEAST_DB


def _rule(name: str, most: float, scales: str, quotient: str) -> str:
    """Return a text that describes one rule by which tools quantize to FP8, for a Diagnosis."""
    rounded = " rounded to bfloat16" * (scales == "bfloat16")
    return f"{name} (amax / {most:g}{rounded}, codes nearest to the quotient in {quotient})"


def _unexplained(text: str, codes: int, scales: int, total: int) -> Diagnosis:
    """Return a Diagnosis without a recipe."""
    return Diagnosis(None, None, codes, scales, total, text)


def _recipes(layer: Fp8Layer) -> Iterator[Recipe]:
    """Yield the recipes that make E4M3 codes with float scales, one scale per tensor, row or block as in ``layer``."""
    # Recipes with blocks of one row are left out, because checkpoints have one scale per square block.
    for r in RECIPES.values():
        is_fp8 = r.element == layer.element and r.scale is None and not r.fake_only
        if is_fp8 and r.tensor_scaling == layer.scaling and r.block in (None, (layer.side, layer.side)):
            yield r


def _recipe_gives(layer: Fp8Layer, x: np.ndarray, r: Recipe, amaxes: tuple[float, ...]) -> bool:
    """Return whether a recipe reproduces all codes and scales of a layer, from its own amax or from one of
    ``amaxes``.
    """
    if x.shape[1] % r.length_multiple:
        return False
    own = layer.amaxes(x)
    shared = [np.float32(max(a, own.max(initial=0))) for a in amaxes] if layer.scaling == "tensor" else []
    for amax in [layer.own, *shared]:
        with np.errstate(all="ignore"):
            q = quantize(np.ascontiguousarray(x), r, tensor_amax=amax)
        scales = np.asarray(q.tensor_scale, np.float32)
        scales = (scales[:: r.block_rows] if r.block else scales).reshape(layer.scales.shape)
        if np.array_equal(scales, layer.scales) and np.array_equal(q.packed, layer.codes):
            return True
    return False


def _scale_rules(layer: Fp8Layer, x: np.ndarray, amaxes: tuple[float, ...]) -> tuple[list[str], int]:
    """Return (dtypes, count) for the rule scale = amax / 448, rounded to float32 or to bfloat16."""
    own = layer.amaxes(x)
    candidates = [own, *(np.full_like(own, max(a, float(own.max()))) for a in amaxes if own.size == 1)]
    found = {}
    for dtype, kind in _DTYPES.items():
        made = [(a / np.float32(layer.element.max)).astype(kind).astype(np.float32) for a in candidates]
        found[dtype] = max(int(np.count_nonzero(scales == layer.scales)) for scales in made)
    return [dtype for dtype, equal in found.items() if equal == layer.scales.size], max(found.values())


def _quotients(layer: Fp8Layer, x: np.ndarray) -> dict[str, int]:
    """Return how many codes are nearest to x / scale, for quotients in "float32" and in "bfloat16", as a dict by
    dtype.
    """
    found = dict.fromkeys(_DTYPES, 0)
    step = max(CHUNK // max(x.shape[1], 1) // 128, 1) * 128
    for rows in (slice(start, start + step) for start in range(0, len(x), step)):
        tall = {"block": layer.side, "row": 1}.get(layer.scaling)  # rows per scale
        scales = layer.scales if tall is None else layer.scales[rows.start // tall : -(-rows.stop // tall)]
        part = replace(layer, codes=layer.codes[rows], scales=scales)
        with np.errstate(all="ignore"):
            quotient = x[rows].astype(np.float32) / part.spread(part.scales)
            for dtype, kind in _DTYPES.items():
                codes = encode(quotient.astype(kind).astype(np.float32), layer.element)
                found[dtype] += int(np.count_nonzero(codes == part.codes))
    return found
