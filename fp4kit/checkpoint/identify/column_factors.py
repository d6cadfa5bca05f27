"""Recognize layers whose columns were multiplied by factors before they were quantized, as AWQ and SmoothQuant do. A
column's factor is estimated by comparing the decoded layer with its source (the original weight). Tools round factors
to bfloat16, and multiply or divide by them. So the true factor is one of a few bfloat16 numbers near the estimate.

Each of these numbers gives codes with the stored scales, and comparing them with the stored codes shows which number is
right.

Sources: Model-Optimizer 0.47 model_calib.py awq_lite; llm-compressor 0.14 smoothquant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import amaxes_of, candidates_of
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe

MAX_ROWS = 512  # the largest number of rows from which factors are estimated
MIN_ROWS = 32  # layers with fewer rows are not examined
GAIN_DB = 0.5  # factors per column must improve the signal-to-noise ratio by this, compared with one common factor
MIN_DB = 12.0  # signal-to-noise ratio that the layer must have with factors
# Recipes whose ids end in one of these are tried, because their tools can scale weights per column.
PRODUCERS = ("-compressed-tensors", "-modelopt")
STEPS = 12  # the number of bfloat16 numbers that are tried on each side of an estimate


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """The first rows of a layer, their source and the estimated factors of the columns.

    q: the stored rows.
    x: the source rows (n, K).
    factors: the estimated factor of each column, float32 (K,), so that the stored values are near x * factors.
    """

    q: Quantized
    x: np.ndarray
    factors: np.ndarray


def scaled_rows(layer: StoredLayer, x: np.ndarray) -> ScaledRows | None:
    """Estimate the factors by which the columns of a layer were multiplied, from its first rows."""
    r, scale, rows = layer.recipe, layer.tensor_scale, min(len(x), MAX_ROWS)
    in_order = layer.shape == x.shape and layer.block_scale.size * r.block_size == x.size
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if not in_order or not usable or rows < MIN_ROWS or layer.scale_layout != "linear":
        return None
    if (r.tensor_scaling == "tensor") != (scale is not None) or not np.isfinite(part := x[:rows]).all():
        return None
    scales = np.ascontiguousarray(layer.block_scale.reshape(len(x), -1)[:rows])
    codes = np.ascontiguousarray(layer.codes[:rows])
    q = Quantized(codes, scales, scale, None, part.shape, x.dtype, 1, r)
    with np.errstate(all="ignore"):
        d, s = np.asarray(dequantize(q, np.float32), np.float64), part.astype(np.float64)
        factors = np.nan_to_num((d * s).sum(0) / (s * s).sum(0), nan=1.0)
    if not np.isfinite(d).all() or not (factors > 0).all():
        return None
    common = float((d * s).sum() / (s * s).sum())  # one factor for all columns, as from a wrong tensor scale
    plain, scaled = (sqnr_db(float((d * d).sum()), float(((d - s * f) ** 2).sum())) for f in (common, factors))
    if scaled < max(MIN_DB, plain + GAIN_DB):
        return None
    return ScaledRows(q, np.ascontiguousarray(part), factors.astype(np.float32))


Scaling = Callable[[np.ndarray], np.ndarray]


def scalings(found: ScaledRows) -> Iterator[Scaling]:
    """Yield functions that scale the columns of the source as a tool may have done before it quantized the layer."""
    near, inverse = (_neighbors(f) for f in (found.factors, 1 / found.factors))
    for r in _rules(found.q.recipe):
        yield _chosen(found, r, near, _multiplied)
        yield _chosen(found, r, inverse, _divided)
        yield _chosen(found, r, [np.float32(1) / f for f in inverse], _multiplied)


def _multiplied(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return x with its columns multiplied by ``factors`` in float32, rounded to the dtype of x."""
    return (x.astype(np.float32) * factors).astype(x.dtype)


def _divided(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return x with its columns divided by ``factors`` in float32, rounded to the dtype of x."""
    return (x.astype(np.float32) / factors).astype(x.dtype)


def _neighbors(factors: np.ndarray) -> list[np.ndarray]:
    """Return 25 arrays of bfloat16 numbers near the given positive factors, as float32, the nearest first."""
    bits = factors.astype(ml_dtypes.bfloat16).view(np.int16)
    steps = sorted(range(-STEPS, STEPS + 1), key=abs)
    return [(bits + np.int16(step)).view(ml_dtypes.bfloat16).astype(np.float32) for step in steps]


def _chosen(found: ScaledRows, r: Recipe, candidates: list[np.ndarray], apply: Callable) -> Scaling:
    """Return a function that scales each column of a matrix (N, K) by the candidate factor that fits the column
    best.
    """
    wrong = np.stack([_wrong(found, r, apply(found.x, factors)) for factors in candidates])
    best = np.stack(candidates)[np.argmin(wrong, axis=0), np.arange(found.x.shape[1])]
    return lambda x: apply(x, best)


def _wrong(found: ScaledRows, r: Recipe, x: np.ndarray) -> np.ndarray:
    """Return, per column, how many stored codes and block scales differ from those that a recipe gives, int64 (K,)."""
    q = found.q
    amax = None if q.tensor_scale is None else next(amaxes_of(q.tensor_scale, r, x.dtype))
    with np.errstate(all="ignore"):
        made = quantize(x, r, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        scales = quantize(x, r, tensor_amax=amax).block_scale
    assert scales is not None and q.block_scale is not None
    codes = [unpacked(packed, r.element.packing) for packed in (made.packed, q.packed)]
    wrong = np.count_nonzero(codes[0] != codes[1], axis=0)
    blocks = np.abs(x.astype(np.float32)).reshape(len(x), -1, r.block_size)
    columns = np.argmax(blocks, axis=2) + np.arange(blocks.shape[1]) * r.block_size
    np.add.at(wrong, columns[scales.reshape(columns.shape) != q.block_scale.reshape(columns.shape)], 1)
    return wrong


def _rules(own: Recipe) -> Iterator[Recipe]:
    """Yield recipes to try for a layer in the format of ``own``, one for each rule of block scales."""
    seen = set()
    for r in candidates_of(own):
        fits = r.tensor_scaling == own.tensor_scaling and r.block_rows == 1 and r.id.endswith(PRODUCERS)
        if fits and r.block_rule not in seen:
            seen.add(r.block_rule)
            yield r
