"""Quantize a weight by a recipe and write it, slab by slab (some rows at a time). A job describes one such conversion:
the weight to read, the recipe, and the container to write (the names, dtypes and layout of the output tensors).
"""

from __future__ import annotations

from math import lcm
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import making_current, to_device
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.convert.put_scalars import put_scalars
from fp4kit.checkpoint.convert.searched_rows import search_rows
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import MERGE, ChannelWeights, Job, Sink, Survival
from fp4kit.checkpoint.plan.scale_search import Losses
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import of_zeros
from fp4kit.recipes import Recipe
from fp4kit.reference.tensor_rules import tensor_scale
from fp4kit.storage.files import CheckpointError, shown


class Weak:
    """Count the new blocks whose values may be lost, at little cost: only codes and scales are examined.

    These are blocks of zeros, and blocks whose scale is at an end of its format, where it has few significant bits or
    saturates.
    """

    def __init__(self) -> None:
        self._ends = self._scales = self._empty = self._words = 0

    def add(self, q: Quantized) -> None:
        """Count the blocks of some rows."""
        words = np.ascontiguousarray(q.packed).reshape(-1)
        words = words[: words.size // 8 * 8].view(np.uint64)
        mask = np.uint64(0x7777777777777777 if q.recipe.element.bits == 4 else 0x7F7F7F7F7F7F7F7F)
        self._words += words.size
        self._empty += int(np.count_nonzero((words & mask) == 0))
        scale = q.recipe.scale
        if scale is not None and q.block_scale is not None:
            codes = np.asarray(q.block_scale) & np.uint8(~scale.sign_bit & 0xFF)
            low = _LOW_CODE if scale.has_zero else 0
            self._scales += codes.size
            self._ends += int(np.count_nonzero((codes <= low) | (codes >= scale.max_code)))

    @property
    def is_weak(self) -> bool:
        """True if a quarter of the blocks may be lost."""
        return 4 * self._empty > self._words or 4 * self._ends > self._scales


_LOW_CODE = 2  # E4M3 scales up to this code, 2^-8, are rounded by up to half of their value


def write_quantized(job: Job, readers: Readers, output: Sink, amax: np.float32) -> tuple[int, Losses, Survival, bool]:
    """Quantize the weight of a job, and write its codes and the scales of its blocks or rows."""
    tensor_amax = amax if job.new_recipe.tensor_scaling == "tensor" else None
    replaced, q, losses, survival = 0, None, Losses(), Survival()
    weights, weak = column_weights(job, readers), Weak()
    height = lcm(job.new_recipe.block_rows, job.container.slab_rows)
    for slab in slabs(readers, job.weight, job.expert, job.span, height, job.slab_bytes):
        x = values_of(job.weight, slab)
        if job.nonfinite == "saturate":
            x, count = saturated(x, amax)
            replaced += count
        # If the recipe has a tensor scale, amax 0 means that all values are zero, so there is nothing to search. If it
        # has none, the search does not depend on amax, which may be 0.
        if job.search and (amax or tensor_amax is None):
            q, more = search_rows(x, job, amax, weights)
            losses = losses.plus(more)
        else:
            q = quantized_slab(x, job, tensor_amax)
        check_scales(job, q)
        weak.add(q)
        put_rows(job, output, q.packed, stored_scales(q))
        if slab.update is not None:
            packed = q.packed if job.action == MERGE else None
            survival = survival.plus(survival_of(job.weight, slab, dequantize(q, np.float32), packed))
    if q is not None and q.recipe.tensor_scaling == "tensor":
        put_scalars(job, output, np.float32(q.tensor_scale), divisor_of(job.new_recipe, job.container, amax, x.dtype))
    return replaced, losses, survival, weak.is_weak


def survival_of(weight: Weight, slab: Slab, stored: np.ndarray, packed: Any = None) -> Survival:
    """Return how much of the update of a slab is left in the values that were stored for it."""
    if slab.update is None:
        return Survival()
    delta = slab.update.delta if slab.rotation is None else slab.rotation.of(slab.update.delta)
    found = survival(values_of(weight, slab._replace(update=None)), delta, stored)
    if packed is None or slab.codes is None or weight.container is None:
        return found
    return with_codes(found, slab.codes, packed, weight.container.element.bits)


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
