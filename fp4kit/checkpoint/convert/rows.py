"""Search the scale bytes of GGUF blocks, which have no tensor scale, for the smallest error.

Candidates and ties:

- nvfp4-gguf: the E4M3 codes 1 to 126. A block whose element codes are all 0 gets the scale byte 0.
- mxfp4-gguf: 2^j times the largest power of two that is at most amax / 4, for j from -1 to 1. The scale with j = 0 is
  the one that llama.cpp computes. With column weights, or for an error sum(abs(x - y) ** p) with p below 2, j begins
  at -4.

Errors are compared in float32, as fp4kit.search_scales computes them. Among equal errors, the smallest scale wins.

For mxfp4-gguf without column weights and with p of at least 2, the range -1 to 1 is sufficient: no other scale byte has
a smaller error. With j = -2, the element of the largest magnitude alone adds more error than the whole block has with
j = 0. With j = 2, the representable values up to the largest magnitude of the block are a subset of those with j = 1.

If all column weights of a block are 0, every scale has the error 0, so the block is searched with equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from math import lcm
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import making_current, to_device
from fp4kit.call.search_scales import power_of
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, INPUT_SCALE, SCALES, Container
from fp4kit.checkpoint.convert.job import (
    MERGE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    RESCALE,
    Changes,
    ChannelWeights,
    Done,
    Job,
    Losses,
    Sink,
    Survival,
    check_input_scale,
    put_given_input_scale,
    put_input_scale,
    put_rows,
    put_tensor_scale,
    usable_tensor_scale,
)
from fp4kit.checkpoint.model.slabs import Readers, Slab, row_chunks, scalar_of, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.weights import TENSOR_SCALE, Weight
from fp4kit.checkpoint.plan.scale_search import BLOCK_RECIPES
from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX, FLT_MIN, ElementFormat
from fp4kit.ops.amax import search_scales
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import of_zeros
from fp4kit.recipes import Recipe
from fp4kit.reference.codec import encode
from fp4kit.reference.dequantize import changed_values, differing, in_blocks, under_powers_of_two
from fp4kit.reference.tensor_rules import full_range, tensor_scale
from fp4kit.storage.files import NUMPY_DTYPES, CheckpointError, shown
from fp4kit.types import Objective

# A recipe with the scale_max 256. Its candidate scale for the E4M3 value c is tensor_amax * c / 256 / 6. With the
# tensor amax 256 * 6 = 1536, this is exactly c in float32, and the block amax that search_scales returns is 6 * c.
_UNIT_RECIPE = "nvfp4-modelopt-static-4over6"
_UNIT_AMAX = np.float32(256 * 6)
_WIDE = (-4, 1)  # the range of j for E8M0 scales if the default range may miss the smallest error


def search_blocks(x: Any, recipe: Recipe, objective: str, weights: Any) -> Quantized:
    """Quantize a matrix for GGUF with the scale byte that gives each block the smallest error."""
    error = cast(Objective, objective)
    weights = None if weights is None else _without_zero_blocks(weights, recipe.block_size)
    if recipe.scale == E8M0:
        is_proven = weights is None and power_of("scale search", objective) >= 2
        found = search_scales(x, recipe, objective=error, weights=weights, candidates="all" if is_proven else _WIDE)
        return quantize(x, recipe, block_amax=found)
    found = search_scales(x, _UNIT_RECIPE, objective=error, tensor_amax=_UNIT_AMAX, weights=weights)
    return _with_searched_scales(x, recipe, found / np.float32(6))


def _with_searched_scales(x: Any, recipe: Recipe, values: Any) -> Quantized:
    """Quantize a matrix with given block scales."""
    on_host = isinstance(values, np.ndarray)
    codes = encode(values if on_host else values.get(), E4M3)
    q = quantize(x, recipe, block_scale=codes if on_host else to_device(codes))
    packed, scales = cast(Any, q.packed), cast(Any, q.block_scale)
    has_codes = (packed.reshape(*scales.shape, -1) != 0).any(axis=-1)
    return replace(q, block_scale=scales * has_codes.astype(np.uint8))


def _without_zero_blocks(weights: Any, size: int) -> Any:
    """Return the column weights, with ones in every block of ``size`` columns whose weights are all zero."""
    blocks = weights.reshape(-1, size)
    is_zero = ~blocks.any(axis=-1, keepdims=True)
    return (blocks + is_zero.astype(np.float32)).reshape(-1)


def search_rows(x: np.ndarray, job: Job, amax: np.float32, weights: np.ndarray | None) -> tuple[Quantized, Losses]:
    """Quantize ``x`` with the block scales that give the smallest error under the objective ``job.search``."""
    if job.device is None:
        before, after = _both(x, job, amax, weights)
    else:
        with making_current(job.device):
            device_weights = None if weights is None else to_device(weights)
            before, after = (q.to("numpy") for q in _both(to_device(x), job, amax, device_weights))
    return after, _losses(x, before, after, weights)


def _both(x: Any, job: Job, amax: np.float32, weights: Any) -> tuple[Quantized, Quantized]:
    """Quantize ``x`` twice, and return (the result without the scale search, the result with it)."""
    r = job.new_recipe
    if r.id in BLOCK_RECIPES:
        return quantize(x, r), search_blocks(x, r, job.search, weights)
    found = search_scales(x, r, objective=cast(Objective, job.search), tensor_amax=amax, weights=weights)
    return quantize(x, r, tensor_amax=amax), quantize(x, r, tensor_amax=amax, block_amax=found)


@ieee("convert")
def _losses(x: np.ndarray, before: Quantized, after: Quantized, weights: np.ndarray | None) -> Losses:
    """Return three sums: of x^2, of the squared errors of ``before``, and of the squared errors of ``after``."""
    # Sums are taken over chunks of rows, in order, so that they are reproducible.
    values = [dequantize(q, np.float32) for q in (before, after)]
    found = Losses()
    for rows in row_chunks(*x.shape):
        wide = x[rows].astype(np.float64)
        found = found.plus(Losses(*(_squares(part, weights) for part in (wide, *(wide - y[rows] for y in values)))))
    return found


def _squares(x: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the sum of squares of ``x``, added in an order that does not depend on the machine."""
    if weights is None:
        flat = x.reshape(-1)
        return float(np.einsum("i,i->", flat, flat))
    return float(np.einsum("ij,ij,j->", x, x, weights.astype(np.float64)))


_LOW_CODE = 2  # E4M3 scales up to this code, 2^-8, are rounded by up to half of their value


def _weak_counts(q: Quantized) -> np.ndarray:
    """Return the numbers of (words of 8 bytes of zeros, words, scales at an end of their format, scales) of rows."""
    # At an end of its format, a scale has few significant bits or saturates.
    words = np.ascontiguousarray(q.packed).reshape(-1)
    words = words[: words.size // 8 * 8].view(np.uint64)
    mask = np.uint64(0x7777777777777777 if q.recipe.element.bits == 4 else 0x7F7F7F7F7F7F7F7F)
    found = [np.count_nonzero((words & mask) == 0), words.size, 0, 0]
    scale = q.recipe.scale
    if scale is not None and q.block_scale is not None:
        codes = np.asarray(q.block_scale) & np.uint8(~scale.sign_bit & 0xFF)
        low = _LOW_CODE if scale.has_zero else 0
        found[2:] = np.count_nonzero((codes <= low) | (codes >= scale.max_code)), codes.size
    return np.array(found)


def slabs_of(job: Job, readers: Readers) -> Iterator[Slab]:
    """Yield the slabs of a job's weight, each of whole blocks of what the job writes."""
    rows = 1 if job.recipe is None else job.recipe.block_rows  # verify repeats a job that keeps codes of any recipe
    height = lcm(rows, job.container.slab_rows)
    return slabs(readers, job.weight, job.expert, job.span, height, job.slab_bytes)


def write_quantized(
    job: Job, readers: Readers, output: Sink, amax: np.float32, keeps_input_scale: bool = False
) -> Done:
    """Quantize the weight of a job, and write its codes and scales."""
    by_tensor = job.new_recipe.tensor_scaling == "tensor"
    replaced, losses, survival, weak = 0, Losses(), Survival(), np.zeros(4, np.int64)
    weights, made, stored = column_weights(job, readers), None, None
    for slab in slabs_of(job, readers):
        x = values_of(job.weight, slab)
        if job.nonfinite == "saturate":
            x, count = saturated(x, amax)
            replaced += count
        # If the recipe has a tensor scale, amax 0 means that all values are zero, so there is nothing to search. If it
        # has none, the search does not depend on amax, which may be 0.
        if job.search and (amax or not by_tensor):
            q, more = search_rows(x, job, amax, weights)
            losses = losses.plus(more)
        else:
            q = quantized_slab(x, job, amax if by_tensor else None)
        check_scales(job, q)
        weak += _weak_counts(q)
        put_rows(job, output, q.packed, stored_scales(q))
        survival = survival.plus(survival_of(job.weight, slab, q, job.action == MERGE))
        if by_tensor:
            made, stored = np.float32(q.tensor_scale), divisor_of(job.new_recipe, job.container, amax, x.dtype)
    if by_tensor or keeps_input_scale:
        write_scalars(job, readers, output, made, stored, keeps_input_scale)
    empty, words, ends, scales = weak
    action = QUANTIZE if job.action == QUANTIZE else REQUANTIZE
    # If half of all weights are lost, 8 adjacent codes are zero with a probability of 1/256.
    is_weak = bool(256 * empty > words or 4 * ends > scales)
    return Done(job.key, "", action, replaced, losses, survival=survival, is_weak=is_weak)


def survival_of(weight: Weight, slab: Slab, stored: Quantized | np.ndarray, counts_codes: bool = False) -> Survival:
    """Return how much of the update of a slab is left in the values that were stored for it."""
    if slab.update is None:
        return Survival()
    values = dequantize(stored, np.float32) if isinstance(stored, Quantized) else stored
    delta = slab.update.delta if slab.rotation is None else slab.rotation.of(slab.update.delta)
    found = survival(values_of(weight, slab._replace(update=None)), delta, values)
    if not counts_codes or slab.codes is None or weight.container is None or not isinstance(stored, Quantized):
        return found
    return with_codes(found, slab.codes, stored.packed, weight.container.element.bits)


@ieee("merge_adapter")
def survival(base: np.ndarray, delta: np.ndarray, stored: np.ndarray) -> Survival:
    """Return the sums that tell how much of the update ``delta`` is left in the values ``stored``, without codes."""
    base, delta = base.astype(np.float64), delta.astype(np.float64)
    moved = stored.astype(np.float64) - base
    with np.errstate(over="ignore", invalid="ignore"):
        kept, wanted, signal = (float(np.vdot(a, b)) for a, b in ((moved, delta), (delta, delta), (base, base)))
        error = float(np.square(moved - delta).sum())
    return Survival(kept, wanted, error, signal)


def with_codes(found: Survival, before: np.ndarray, after: np.ndarray, bits: int) -> Survival:
    """Return ``found`` with the number of codes, and of those that differ, in two arrays of packed codes."""
    apart = np.asarray(before) ^ np.asarray(after)
    halves = (apart & 15, apart >> 4) if bits == 4 else (apart,)
    changed = sum(int(np.count_nonzero(half)) for half in halves)
    return found._replace(changed=changed, codes=apart.size * len(halves))


def stored_scales(q: Quantized) -> Any:
    """Return the scales of a matrix other than its tensor scale, as containers store them; None if there are none."""
    if q.recipe.scale is not None or q.recipe.tensor_scaling == "tensor":
        return q.block_scale
    return q.tensor_scale if q.recipe.block is None else q.tensor_scale[:: q.recipe.block_rows]


def column_weights(job: Job, readers: Readers) -> np.ndarray | None:
    """Read and return the column weights of a job's scale search, or None if all columns have equal weights."""
    if isinstance(job.columns, ChannelWeights):
        return job.columns.read()
    return None if job.columns is None else readers.array(job.columns)


def quantized_slab(x: np.ndarray, job: Job, tensor_amax: np.float32 | None) -> Quantized:
    """Quantize a slab (some rows of a weight) on the job's device, and return the result as NumPy arrays."""
    if tensor_amax is not None and tensor_amax == 0:
        return of_zeros(quantize(x, job.new_recipe, tensor_amax=tensor_amax))
    if job.device is None:
        return quantize(x, job.new_recipe, tensor_amax=tensor_amax)
    with making_current(job.device):
        return quantize(to_device(x), job.new_recipe, tensor_amax=tensor_amax).to("numpy")


def divisor_of(recipe: Recipe, form: Container, amax: np.float32, dtype: np.dtype) -> np.float32 | None:
    """Return the number to store for the tensor scale, if the tensor scale alone does not determine it; otherwise
    None.
    """
    if form.tensor_scale_unit != 1 and amax > 0:
        made = np.float32(tensor_scale(np.asarray(amax), recipe, dtype).decode)
        return np.float32(amax) if abs(form.multiplier(np.float32(amax)) - made) <= np.spacing(made) else None
    if not form.divides or recipe.tensor_rule != "compressed_tensors" or amax == 0:
        return None
    return np.float32(tensor_scale(np.asarray(amax), recipe, dtype).encode)


def saturated(x: np.ndarray, amax: np.float32) -> tuple[np.ndarray, int]:
    """Return (``x`` with infinities replaced by +-``amax`` and NaN by 0, the number of replaced values)."""
    wide = x.astype(np.float32)
    count = int(np.count_nonzero(~np.isfinite(wide)))
    if not count:
        return x, 0
    largest = min(float(amax), float(ml_dtypes.finfo(x.dtype).max))
    return np.nan_to_num(wide, nan=0.0, posinf=largest, neginf=-largest).astype(x.dtype), count


def check_scales(job: Job, q: Quantized) -> None:
    """Raise CheckpointError if new block scales are NaN or new float32 scales are unusable for every loader."""
    if q.recipe.scale is None:
        scales = np.asarray(q.tensor_scale if q.recipe.tensor_scaling == "tensor" else stored_scales(q), np.float32)
        usable = (scales >= FLT_MIN) & (scales <= FLT_MAX)
        bad = int(np.count_nonzero(~(usable | (~np.isfinite(scales) & (job.nonfinite == "keep")))))
        if bad and q.recipe.tensor_scaling != "tensor":
            covered = f"{q.recipe.tensor_scaling}s"
            raise CheckpointError(
                f"{shown(job.name)}: {bad} scales of {covered} are not positive normal float32 numbers;"
                " leave the layer out with --keep"
            )
        return
    assert q.block_scale is not None
    bad = int(np.count_nonzero((q.block_scale & ~np.uint8(q.recipe.scale.sign_bit)) == q.recipe.scale.nan_code))
    # NaN is never accepted in GGUF blocks, because llama.cpp would read the code of NaN as a number.
    if bad and (job.nonfinite != "keep" or job.container.in_blocks):
        raise CheckpointError(
            f"{shown(job.name)}: {bad} block scales are NaN; leave the layer out with --keep, or use another recipe"
            f" than {q.recipe.id}"
        )


def write_renamed(job: Job, readers: Readers, output: Sink) -> None:
    """Write all parts of a job's weight that the output has: codes, block scales, tensor scale and input scale."""
    dtype = next((target.dtype for target in job.targets if target.part == SCALES), "")
    for slab in slabs_of(job, readers):
        scales = slab.scales
        if job.container.scale is None and scales is not None and dtype:
            scales = scales.astype(NUMPY_DTYPES[dtype])
        put_rows(job, output, slab.codes, scales)
    write_scalars(job, readers, output, keeps_input_scale=True)
    if output.has(COLUMN_SCALE):
        place = job.weight.parts[COLUMN_SCALE]
        if place.entry.dtype != "BF16":
            raise CheckpointError(
                f"{shown(place.entry.name)}: is {place.entry.dtype}; BF16 is needed to keep the scales of AWQ; store"
                " them as BF16, or leave the layer out with --keep"
            )
        output.put(COLUMN_SCALE, readers.bytes(place))


def write_scalars(
    job: Job,
    readers: Readers,
    output: Sink,
    made: np.float32 | None = None,
    stored: np.float32 | None = None,
    keeps_input_scale: bool = False,
) -> None:
    """Write the tensor scale (``made`` for new codes, otherwise that of the source) and the input scale."""
    # A scalar of the source is copied bit for bit if both containers store it in the same direction and unit (see
    # Container.direction); otherwise it is converted.
    have, parts = job.weight.container, job.weight.parts
    if output.has(TENSOR_SCALE) and made is None and have is not None and TENSOR_SCALE in parts:
        scale = scalar_of(readers, job.weight, TENSOR_SCALE, job.expert)
        if have.direction == job.container.direction:
            dtype = next((one.dtype for one in job.targets if one.part == TENSOR_SCALE), "F32")
            output.put(TENSOR_SCALE, np.array([scale], NUMPY_DTYPES[dtype]))
        else:
            put_tensor_scale(job, output, have.multiplier(scale))
    elif output.has(TENSOR_SCALE):
        put_tensor_scale(job, output, np.float32(1) if made is None else made, stored)
    if not output.has(INPUT_SCALE):
        return
    if keeps_input_scale and have is not None and INPUT_SCALE in parts:
        scale = scalar_of(readers, job.weight, INPUT_SCALE, job.expert)
        check_input_scale(job, scale)
        if have.direction == job.container.direction:
            output.put(INPUT_SCALE, np.array([scale], np.float32))
        else:
            put_input_scale(job, output, have.multiplier(scale))
    else:
        put_given_input_scale(job, output)


_LOWEST_SHARE = 512  # a tensor scale that reaches over 512 times the amax leaves no normal E4M3 scale for it
_NEAREST_AMAX = 2.0**-7  # the largest relative difference of a tensor scale that the rule of a recipe may make


def write_merged(job: Job, readers: Readers, output: Sink, amax: np.float32) -> Done:
    """Write the merged weight of a job."""
    scale = tensor_scale_of(readers, job.weight, job.expert)
    if job.merge_scales == "new" or not keeps_tensor_scale(job.container.element, scale, job.new_recipe, amax):
        return write_quantized(job, readers, output, amax, keeps_input_scale=True)._replace(is_weak=False)
    if job.weight.update is None:
        write_renamed(job, readers, output)
        return Done(job.key, "", RENAME)
    losses, survival = Losses(), Survival()
    weights = column_weights(job, readers)

    def new(x: np.ndarray, amax: np.float32 | None) -> Quantized:
        nonlocal losses
        if not job.search:
            return quantized_slab(x, job, amax)
        q, more = search_rows(x, job, np.float32(amax or 0), weights)
        losses = losses.plus(more)
        return q

    for slab in slabs_of(job, readers):
        x = values_of(job.weight, slab)
        q = nearest(x, slab.scales, scale, job.new_recipe, new if job.merge_scales == "nearest" else None, weights)
        put_rows(job, output, q.packed, stored_scales(q))
        survival = survival.plus(survival_of(job.weight, slab, q, counts_codes=True))
    write_scalars(job, readers, output, keeps_input_scale=True)
    return Done(job.key, "", MERGE, losses=losses, survival=survival)


def keeps_tensor_scale(element: ElementFormat, scale: np.float32 | None, recipe: Recipe, amax: np.float32) -> bool:
    """Return whether a tensor scale fits merged values of this amax; True without a tensor scale."""
    if scale is None:
        return True
    second, top = np.sort(element.values[np.isfinite(element.values)])[-2:]
    largest = recipe.scale.max if recipe.scale is not None else 1.0
    limit = np.float64(scale) * largest * (top + (top - second) / 2)
    return not amax or bool(limit / _LOWEST_SHARE <= amax < limit)


def amax_for(scale: np.float32, recipe: Recipe) -> np.float32 | None:
    """Return the amax from which a recipe computes this tensor scale, or nearly; None if there is none."""

    def made(amax: np.float32) -> np.float64:
        return np.float64(np.asarray(tensor_scale(np.asarray(amax), recipe, np.dtype(np.float32)).decode).item())

    first = np.float32(np.float64(scale) / made(np.float32(1)))
    near = [first, *(np.nextafter(first, to) for to in (np.float32(0), np.float32(np.inf)))]
    best = min(near, key=lambda one: abs(made(one) - np.float64(scale)))
    return best if abs(made(best) / np.float64(scale) - 1) <= _NEAREST_AMAX else None


@ieee("merge_adapter")
def nearest(
    x: np.ndarray,
    scales: Any,
    scale: np.float32 | None,
    recipe: Recipe,
    new: Callable[[np.ndarray, np.float32 | None], Quantized] | None,
    weights: np.ndarray | None = None,
) -> Quantized:
    """Quantize rows with the tensor scale ``scale``, and per block the better of ``scales`` and those of ``new``."""
    base = _with_scales(x, recipe, scales, scale)
    fits = None if scale is None else amax_for(scale, recipe)
    if new is None or (scale is not None and (recipe.scale is None or fits is None)):
        return base
    found = new(x, fits)
    other = _with_scales(x, recipe, found.block_scale if recipe.scale is not None else found.tensor_scale, scale)
    height, width = recipe.block_rows, recipe.block_size if recipe.block else x.shape[1]
    errors = []
    for q in (base, other):
        error = np.square(dequantize(q, np.float32).astype(np.float64) - x)
        error = error if weights is None else error * weights
        padded = np.pad(error, ((0, -len(x) % height), (0, -x.shape[1] % width)))
        errors.append(padded.reshape(-1, height, padded.shape[1] // width, width).sum((1, 3)))
    better = np.repeat(errors[1] < errors[0], height, 0)[: len(x)]  # (rows, blocks)
    by_byte = np.repeat(better, width * recipe.element.bits // 8, 1)[:, : base.packed.shape[1]]
    packed = np.where(by_byte, other.packed, base.packed)
    if recipe.scale is not None:
        return replace(base, packed=packed, block_scale=np.where(better, other.block_scale, base.block_scale))
    shape = base.tensor_scale.shape
    chosen = np.where(better.reshape(shape), other.tensor_scale, base.tensor_scale)
    return replace(base, packed=packed, tensor_scale=chosen)


def _with_scales(x: np.ndarray, recipe: Recipe, scales: Any, scale: np.float32 | None) -> Quantized:
    """Quantize rows with given scales: block scales and the tensor scale, or float32 scales of rows or blocks."""
    if recipe.scale is not None:
        return quantize(x, recipe, block_scale=np.ascontiguousarray(scales).view(np.uint8), tensor_scale=scale)
    if recipe.tensor_scaling == "tensor":
        return quantize(x, recipe, tensor_scale=scale)
    rows = np.asarray(scales, np.float32)
    if recipe.block is not None and len(rows) != len(x):
        rows = np.repeat(rows, recipe.block_rows, 0)[: len(x)]
    return quantize(x, recipe, tensor_scale=rows.reshape(len(x)) if recipe.block is None else rows)


def _tensor_scale(q: Quantized) -> np.float32 | None:
    return np.float32(np.asarray(q.tensor_scale).item()) if q.recipe.tensor_scaling == "tensor" else None


def keeps(q: Quantized, largest: np.float32) -> bool:
    """Return whether the tensor scale of a quantized matrix fits merged values whose amax is ``largest``."""
    return keeps_tensor_scale(q.recipe.element, _tensor_scale(q), q.recipe, largest)


def merged(q: Quantized, x: np.ndarray, scales: str, largest: np.float32) -> Quantized:
    """Quantize merged values as ``write_merged`` does, with the scales of ``q`` if they fit, all as NumPy arrays."""
    recipe, scale = q.recipe, _tensor_scale(q)

    def new(x: np.ndarray, amax: np.float32 | None) -> Quantized:
        return quantize(x, recipe, tensor_amax=amax)

    if scales == "new" or not keeps(q, largest):
        return replace(new(x, None if scale is None else largest), dtype=q.dtype)
    own = q.block_scale if recipe.scale is not None else q.tensor_scale
    return replace(nearest(x, own, scale, recipe, new if scales == "nearest" else None), dtype=q.dtype)


def survival_of_merge(q: Quantized, base: np.ndarray, delta: np.ndarray, made: Quantized) -> Survival:
    """Return how much of the update ``delta`` of the values ``base`` of ``q`` is left in the result ``made``."""
    kept = survival(base, delta, dequantize(made, np.float32))
    return with_codes(kept, q.packed, made.packed, q.recipe.element.bits)


_HIGHEST = 8  # exponent of 256, the largest power of two of E4M3
_RANGE = 17  # E4M3 has the powers of two from 2^-9 to 2^8: their exponents differ by at most 17
_MAGNITUDE = (1 << (E2M1.bits - 1)) - 1  # mask of a code without its sign bit
_ANY_MAGNITUDE = np.uint8(_MAGNITUDE | _MAGNITUDE << 4)  # mask of the magnitudes of both codes in a byte
_POWERS = {  # exponent of a power of two -> its E4M3 code
    int(np.log2(value)): code for code, value in enumerate(E4M3.values[:128]) if value > 0 and np.log2(value) % 1 == 0
}


def _holds_something(weight: Weight, slab: Slab) -> npt.NDArray[np.bool_]:
    """Return, for each block of some rows, whether it contains a nonzero code."""
    assert weight.container is not None and slab.codes is not None and slab.scales is not None
    blocks = slab.codes.reshape(*slab.scales.shape, -1)
    found: npt.NDArray[np.bool_] = ((blocks & _ANY_MAGNITUDE) != 0).any(axis=-1)
    return found


def exponents_of_blocks(weight: Weight, slab: Slab) -> tuple[int, int]:
    """Return (smallest, largest) scale exponent of the blocks of a slab (some rows of a weight) with a nonzero code."""
    assert slab.scales is not None
    used = slab.scales[_holds_something(weight, slab)]
    return (int(used.min()) - E8M0.bias, int(used.max()) - E8M0.bias) if used.size else (1 << 20, -(1 << 20))


def is_cast_exactly(low: int, high: int) -> bool:
    """Return whether NVFP4 can hold MXFP4 blocks with the scale exponents ``low`` to ``high`` without loss."""
    # E4M3 must be able to represent all block scales.
    # The tensor scale, and the tensor amax (2688 times the scale), must be normal float32 numbers.
    if high < low:
        return True
    scale = np.ldexp(np.float64(1), high - _HIGHEST)
    return (
        high - low <= _RANGE and usable_tensor_scale(scale) and usable_tensor_scale(scale * float(E2M1.max * E4M3.max))
    )


def block_scales(weight: Weight, slab: Slab, high: int) -> npt.NDArray[np.uint8]:
    """Return the E4M3 scale codes for the 16-element NVFP4 blocks of a slab (some rows of a weight)."""
    # The code is 0 for all-zero blocks, and for blocks whose scale E4M3 cannot represent.
    assert slab.scales is not None
    table = np.zeros(256, np.uint8)
    for code in range(256):
        table[code] = _POWERS.get(code - E8M0.bias - high + _HIGHEST, 0)
    codes = np.where(_holds_something(weight, slab), table[slab.scales], np.uint8(0))
    return np.repeat(codes, 2, axis=1)


def keeps_codes(recipe: Recipe, low: int, high: int) -> bool:
    """Return whether a weight can be cast from MXFP4 to NVFP4, so that all blocks in range keep their codes."""
    if high < low or high - low <= _RANGE:
        return is_cast_exactly(low, high)
    if not is_cast_exactly(high, high) or recipe.tensor_scaling != "tensor" or recipe.block_rows > 1:
        return False
    made = tensor_scale(np.asarray(_amax(recipe, high)), recipe, np.dtype(np.float32)).decode
    return bool(np.float32(made) == np.ldexp(np.float32(1), high - _HIGHEST))


def _amax(recipe: Recipe, high: int) -> np.float32:
    """Return the tensor amax for which ``recipe`` computes the tensor scale 2^(high - 8)."""
    # Blocks out of range are quantized with this amax, so that they get the tensor scale of all other blocks.
    return np.float32(np.ldexp(full_range(recipe), high - _HIGHEST))


def write_cast(job: Job, readers: Readers, output: Sink, high: int) -> Changes:
    """Write the codes of a job's MXFP4 weight with NVFP4 block scales and tensor scale."""
    # Only blocks out of range (whose new scale would be too small for E4M3) get new codes.
    changes = Changes()
    for slab in slabs_of(job, readers):
        codes, scales = slab.codes, block_scales(job.weight, slab, high)
        assert slab.scales is not None
        out = (slab.scales.astype(np.int32) - E8M0.bias < high - _RANGE) & _holds_something(job.weight, slab)
        if out.any():
            codes, scales, more = _encoded(job, slab, out, scales, _amax(job.new_recipe, high))
            changes = changes.plus(more)
        put_rows(job, output, codes, scales)
    scale = np.float32(1) if high < -(1 << 19) else np.ldexp(np.float32(1), high - _HIGHEST)
    write_scalars(job, readers, output, np.float32(scale))
    return changes


def _encoded(
    job: Job, slab: Slab, out: npt.NDArray[np.bool_], scales: npt.NDArray[np.uint8], amax: np.float32
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Changes]:
    """Quantize the blocks of a slab that are out of range."""
    assert slab.codes is not None
    rows = out.any(axis=1)
    x, chosen = np.ascontiguousarray(values_of(job.weight, slab)[rows], np.float32), out[rows]
    q = quantized_slab(x, job, amax)
    check_scales(job, q)
    codes, scales = slab.codes.copy(), scales.copy()
    codes[rows] = np.where(np.repeat(chosen, codes.shape[1] // out.shape[1], axis=1), q.packed, codes[rows])
    scales[rows] = np.where(np.repeat(chosen, 2, axis=1), q.block_scale, scales[rows])
    values = np.repeat(chosen, x.shape[1] // out.shape[1], axis=1)
    count, error = changed_values(x[values], dequantize(q, np.float32)[values])
    return codes, scales, Changes(int(np.count_nonzero(out)), count, float(error))


class Folding(NamedTuple):
    """The change of block scales whose tensor scale was folded or replaced while the codes stayed.

    The blocks are those with a nonzero code. The value of a block scale is its product with the tensor scale, float32.

    Attributes:
        scales: the number of block scales.
        changed: the number of block scales whose value changed, because their format does not hold it.
        underflow, saturated: how many of these became 0, or the largest value of the format.
        largest_error: the largest |new - old| / |old| of the values; 0 if none changed.
    """

    scales: int = 0
    changed: int = 0
    underflow: int = 0
    saturated: int = 0
    largest_error: float = 0.0

    def plus(self, other: Folding) -> Folding:
        """Return what became of both."""
        scales, changed, underflow, saturated = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Folding(scales, changed, underflow, saturated, max(self.largest_error, other.largest_error))

    @property
    def text(self) -> str:
        """The loss in words: "exact" if no value changed."""
        if not self.changed:
            return "exact"
        ends = [f"{n} {what}" for n, what in ((self.underflow, "become 0"), (self.saturated, "saturate")) if n]
        more = f" ({', '.join(ends)})" if ends else ""
        products = f"{self.changed} of {self.scales} products of block and tensor scale change"
        return f"{products}{more}, by up to {100 * self.largest_error:.3g}%"


@ieee("rescale")
def rescaled(scale: ElementFormat, scales: np.ndarray, old: Any, new: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return block scales for the tensor scale ``new`` in place of ``old``: their codes, and the values before they
    were rounded, scale * (old / new) in float32.
    """
    with np.errstate(all="ignore"):
        wanted = scale.values[scales] * (np.float32(old) / np.float32(new))
        return scale.encode(wanted), wanted


@ieee("fold")
def folded(
    weight: Weight, slab: Slab, shared: np.float32 | None = None, divisor: np.float32 | None = None
) -> tuple[npt.NDArray[np.uint8], Folding]:
    """Return the block scales of a slab for another tensor scale, and what became of them.

    shared: the new tensor scale, by which decoding multiplies; None for a layer without one.
    divisor: the new tensor scale, if decoding divides by it; then ``shared`` is its reciprocal.
    """
    scale = weight.form.scale
    assert scale is not None and slab.scales is not None and slab.tensor_scale is not None
    own = np.asarray(slab.scales).view(np.uint8)
    stored = scale.values[own]
    with np.errstate(all="ignore"):  # unusable scales are refused elsewhere
        before = stored * slab.tensor_scale if slab.divisor is None else stored / slab.divisor
        made = (scale.encode(before), before) if shared is None else rescaled(scale, own, slab.tensor_scale, shared)
        codes, wanted = made
        new = scale.values[codes]
        after = new if shared is None else new * shared if divisor is None else new / divisor
        used = _holds_something(weight, slab)
        changed = used & (after != before)
        errors = np.abs(after[changed].astype(np.float64) / before[changed] - 1)
    masks = (used, changed, changed & (new == 0), changed & (np.abs(wanted) > scale.max))
    scales, count, underflow, saturated = (int(np.count_nonzero(one)) for one in masks)
    return codes, Folding(scales, count, underflow, saturated, float(errors.max(initial=0)))


def write_folded(job: Job, readers: Readers, output: Sink) -> Changes:
    """Write the codes of a job's weight, and its block scales multiplied by its tensor scale."""
    changes, weight = Changes(), job.weight
    for slab in slabs_of(job, readers):
        scales, found = folded(weight, slab)
        put_rows(job, output, slab.codes, scales)
        if found.changed:
            plain = slab._replace(scales=scales, tensor_scale=None, divisor=None)
            count, error = changed_values(values_of(weight, slab), values_of(weight, plain))
            changes = changes.plus(Changes(found.changed, count, float(error)))
    write_scalars(job, readers, output, keeps_input_scale=True)
    return changes


def check_folded(weights: Iterable[Weight]) -> None:
    """Raise CheckpointError if block scales cannot hold the tensor scales, with the loss of the first such weight."""
    lossy: list[tuple[Weight, Folding]] = []
    with Readers() as readers:
        for weight in weights:
            loss = Folding()
            for expert in range(1 if weight.members else weight.experts):
                loss = reduce(Folding.plus, (folded(weight, one)[1] for one in slabs(readers, weight, expert)), loss)
            if loss.changed:
                lossy.append((weight, loss))
    if lossy:
        (weight, loss), more = lossy[0], f" (and {len(lossy) - 1} more layers)" if len(lossy) > 1 else ""
        raise CheckpointError(
            f"{shown(weight.tensor)}: has a tensor scale, for which the output has no place; multiplied into the block"
            f" scales: {loss.text}{more}; use --requantize to accept that, or leave the layer out with --keep"
        )


_SPAN = 14  # if the exponents of MXFP4 blocks within an FP8 block differ by at most this much, all codes are exact


def write_rescaled(job: Job, readers: Readers, output: Sink) -> Changes:
    """Write a job's weight, and return the numbers of blocks and values that changed, and the largest change."""
    changes = Changes()
    for slab in slabs_of(job, readers):
        x = np.ascontiguousarray(values_of(job.weight, slab), np.float32)
        own = quantized_slab(x, job, None)
        changed = differing(x, dequantize(own, np.float32)) if own.recipe.scale is not None else None
        q = under_powers_of_two(x, own, changed)
        check_scales(job, q)
        put_rows(job, output, q.packed, stored_scales(q))
        after = dequantize(q, np.float32)
        count, error = changed_values(x, after)
        blocks = in_blocks(differing(x, after), q.recipe).any(axis=(-3, -1)) if count else np.zeros(0)
        changes = changes.plus(Changes(int(np.count_nonzero(blocks)), count, float(error)))
    return changes


def check_rescaled(weights: Iterable[tuple[Weight, Container, Recipe]]) -> None:
    """Raise CheckpointError if values would change, with the numbers of blocks and values of the first such weight."""
    lossy: list[tuple[Weight, Recipe, Changes]] = []
    with Readers() as readers:
        for weight, form, recipe in weights:
            if _has_small_spans(readers, weight, recipe):
                continue
            job, changes = Job("", RESCALE, weight, (), recipe=recipe, form=form, nonfinite="keep"), Changes()
            for expert in range(1 if weight.members else weight.experts):
                changes = changes.plus(write_rescaled(replace(job, expert=expert), readers, _Nothing()))
            if changes.values:
                lossy.append((weight, recipe, changes))
    if lossy:
        raise _refused_rescaling(*lossy[0], len(lossy) - 1)


def _refused_rescaling(weight: Weight, recipe: Recipe, changes: Changes, others: int) -> CheckpointError:
    rows, width = recipe.block or (1, weight.shape[-1])
    total = weight.experts * -(-weight.shape[-2] // rows) * (weight.shape[-1] // width)
    what = f"blocks of {rows}x{width}" if recipe.block else "rows"
    more = f" (and {others} more layers)" if others else ""
    return CheckpointError(
        f"{shown(weight.tensor)}: {changes.values} values in {changes.blocks} of {total} {what} would change, because"
        f" the exponents within a block differ too much for {recipe.element.name} under one scale{more}; use"
        " --requantize to round the values of these blocks, or leave the layer out with --keep"
    )


def _has_small_spans(readers: Readers, weight: Weight, recipe: Recipe) -> bool:
    """Return whether an MXFP4 weight is exact, judged by its scales alone; False if that needs the codes."""
    have, place = weight.container, weight.parts.get(SCALES)
    if have is None or have.kind != "mxfp4":
        return False
    if recipe.scale is not None:
        return True  # a block of 32 E2M1 codes is exact in every MXFP8 recipe
    rows, columns = weight.shape[-2:]
    groups = columns // have.group_size
    if place is None or weight.members or weight.rotation or weight.order or have.in_blocks or have.swizzled:
        return False
    if weight.transposed or place.entry.shape[-2:] != (rows, groups):
        return False
    height, width = recipe.block or (1, columns)
    width //= have.group_size
    for expert in range(weight.experts):
        stored = readers.matrix(place, expert) if len(place.entry.shape) == 3 else readers.array(place)
        exponents = stored.view(np.uint8).astype(np.int16)
        for first in range(0, rows, height):
            tiles = exponents[first : first + height].reshape(-1, groups // width, width)
            spans = tiles.max(axis=(0, 2)) - tiles.min(axis=(0, 2))
            if spans.max(initial=0) > _SPAN or tiles.max(initial=0) == E8M0.nan_code:
                return False
    return True


class _Nothing:
    """A Sink that keeps nothing, to count what a conversion would change."""

    def has(self, part: str) -> bool:
        return False

    def put(self, part: str, array: Any) -> None:
        return None


def _exponent_codes(scales: np.ndarray) -> npt.NDArray[np.int64]:
    """Return the E8M0 code of each scale, or -1 for a scale that is not a power of two that E8M0 can represent."""
    if scales.dtype == np.uint8:
        return np.where(scales == E8M0.nan_code, -1, scales.astype(np.int64))
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    codes = (bits >> np.uint32(23)).astype(np.int64)  # sign and exponent: above 255 if negative, so not usable
    usable = ((bits & np.uint32(0x007FFFFF)) == 0) & (codes > 0) & (codes < E8M0.nan_code)
    return np.where(usable, codes, -1)


def is_carried_exactly(scales: np.ndarray) -> bool:
    """Return whether all scales are powers of two that E8M0 can represent, so that MXFP8 keeps the values."""
    return bool((_exponent_codes(scales) >= 0).all())


def check_carried(weights: Iterable[Weight]) -> None:
    """Raise CheckpointError for the first weight with a scale that is not a power of two that E8M0 can represent."""
    # Only the scales are read, so that a plan can call this before any conversion.
    with Readers() as readers:
        for weight in weights:
            scales = readers.array(weight.parts[SCALES])
            if not is_carried_exactly(scales.view(np.uint8) if scales.dtype.itemsize == 1 else scales):
                raise refused_carry(weight.tensor)


def refused_carry(tensor: str) -> CheckpointError:
    """Return the error to raise for a tensor whose scales are not all powers of two."""
    why = "its scales are not powers of two, so MXFP8 cannot keep its values; use --requantize to accept the loss"
    return CheckpointError(f"{shown(tensor)}: {why}")


def write_carried(job: Job, readers: Readers, output: Sink) -> None:
    """Write a job's codes unchanged, and one E8M0 scale per 1x32 block in place of one scale per 128x128 block."""
    have, wide, columns = job.weight.container, job.container.group_size, job.weight.shape[-1]
    assert have is not None
    height, width = have.block
    for slab in slabs_of(job, readers):
        assert slab.codes is not None and slab.scales is not None
        codes = _exponent_codes(slab.scales).astype(np.uint8)
        rows = np.repeat(codes, height, axis=0)[: len(slab.codes)]
        put_rows(job, output, slab.codes, np.repeat(rows, width // wide, axis=1)[:, : columns // wide])
