"""Define jobs. A job describes the conversion of one tensor or of some rows of one matrix, so that any process can
execute it. A part is one tensor of the output: VALUES if it is unquantized, otherwise CODES, SCALES and the other parts
of the container.

Actions, the values of Job.action:
  copy: copy a tensor's bytes.
  quantize: quantize unquantized values.
  rename: keep codes and scales. Only their names, their layout or the direction of the tensor scale change.
  cast: convert MXFP4 to NVFP4. Codes are kept, except in blocks whose scales NVFP4 cannot hold.
  carry: convert FP8 with 128x128 scales to MXFP8. Codes are kept, which needs scales that are powers of two.
  fold: drop the tensor scale of NVFP4, by which block scales are multiplied. Codes are kept, and values where the
    format of block scales holds the products.
  rescale: convert MXFP4 or MXFP8 to FP8 or MXFP8. Values are kept where powers of two as scales allow it.
  requantize: decode, then quantize.
  merge: decode, add an adapter's update, and quantize again with the scales of the source or better ones. A layer
    without an update is one that shares its tensor scale with such layers; it keeps its codes if the scale is kept.
  dequantize: decode to unquantized values; in a new GGUF file, also write unquantized ones in another dtype or order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.formats import E4M3, FLT_MAX, FLT_MIN
from fp4kit.layouts import pack_gguf, swizzle_scales
from fp4kit.recipes import Recipe
from fp4kit.storage.files import CheckpointError, shown

NONFINITE = ("error", "keep", "saturate")
COPY, QUANTIZE, RENAME, CAST, CARRY = "copy", "quantize", "rename", "cast", "carry"
FOLD, RESCALE, REQUANTIZE, DEQUANTIZE, MERGE = "fold", "rescale", "requantize", "dequantize", "merge"
# Actions that may compute new codes. A search of block scales applies to these actions only.
SEARCHED = (QUANTIZE, REQUANTIZE, CAST, MERGE)
DEVICE_SLAB_BYTES = 32 << 20  # bytes of source elements per slab that is sent to a GPU
_RESCALED = {(have, form) for have in ("mxfp4", "mxfp8") for form in ("fp8", "fp8 rows")} | {("mxfp4", "mxfp8")}


class Sink(Protocol):
    """Receive the output of a job, for example to write it to a file. The output consists of parts (see job.py)."""

    def has(self, part: str) -> bool:
        """Return whether the sink accepts ``part``. A job must call ``put`` only for parts that the sink accepts."""

    def put(self, part: str, array: Any) -> None:
        """Append ``array`` to the data of ``part``, which the sink must accept (see ``has``)."""


def target_of(have: table.Container | None, form: table.Container) -> table.Container:
    """Return the container to write for a weight: ``form``, except for AWQ layers."""
    # If ``have`` is AWQ, of Model-Optimizer or of ComfyUI, and ``form`` is NVFP4 of one of them, return the container
    # of AWQ that belongs to ``form``, so that the layer keeps its factors per column.
    return _AWQ.get(form, form) if have in _AWQ.values() else form


_AWQ = {table.MODELOPT_NVFP4: table.MODELOPT_AWQ, table.COMFY_NVFP4: table.COMFY_AWQ}


def action_of(weight: Weight, form: table.Container | None) -> str:
    """Return the action that brings a weight into the container to write (see the head of this file)."""
    have = weight.container
    if have is None and form is None:
        return COPY if weight.update is None else DEQUANTIZE
    if have is None:
        return QUANTIZE
    if form is None:
        return DEQUANTIZE
    if weight.rotation:
        return REQUANTIZE
    if weight.update is not None:
        plain = not {table.COLUMN_SCALE, table.LOW_RANK_A} & weight.parts.keys() and not is_rounded(weight)
        return MERGE if plain and have.same_codes(form) else REQUANTIZE
    if have.same_codes(form) and (form.rounds or not is_rounded(weight)):
        return RENAME
    if have.folds_into(form):
        return FOLD
    if (have.kind, form.kind) == ("mxfp4", "nvfp4"):  # only a tensor scale brings exponents into the range of E4M3
        return CAST if form.has_tensor_scale else REQUANTIZE
    if (have.kind, form.kind) == ("fp8", "mxfp8"):
        return CARRY
    return RESCALE if (have.kind, form.kind) in _RESCALED else REQUANTIZE


def is_rounded(weight: Weight) -> bool:
    """Return whether decoding rounds the values of a weight to 16 bits, the dtype of its scales."""
    place = weight.parts.get(table.SCALES, weight.parts.get(table.TENSOR_SCALE))
    rounds = weight.container is not None and weight.container.rounds
    return rounds and place is not None and place.entry.dtype != "F32"


class Target(NamedTuple):
    """The bytes [position, position + nbytes) of an output file to which a job writes one part of its output.

    Attributes:
        part: the part of the output, such as CODES or SCALES; VALUES for unquantized output.
        path: the output file.
        position: the offset of the first byte in the file.
        nbytes: the number of bytes.
        dtype: the safetensors dtype of the output tensor that these bytes belong to.
    """

    part: str
    path: Path
    position: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Job:
    """One unit of work of a conversion: a tensor to copy, or some rows of one matrix to convert.

    Attributes:
        key: identifies the job within a run and in the journal, which records finished jobs.
        action: what to do, one of the actions at the head of this file.
        source: the weight to read; for "copy", the tensor to read.
        targets: where to write each part of the output (codes, scales, ...).
        expert: the index of the matrix to read; 0 for a single layer.
        span: the rows (first, end) to read; None for all.
        group: the name of a group, whose jobs share a tensor scale; "" if the job shares none.
        recipe: how new codes are computed; None for "copy".
        form: the container to write; None to write unquantized values.
        input_scale: the activation scale to write, as the user gave it; None if the user gave none. A layer that keeps
            its codes also keeps its own input scale if it has one.
        nonfinite: what to do with NaN and infinity, one of NONFINITE.
        transposed: True to write unquantized values as [K, N].
        device: the number of the CUDA device that computes; None for the CPU.
        search: the error that a search of block scales minimizes, such as "mse"; "" for no search.
        columns: where the column weights of that error are; None weights all columns equally.
        input_amax: the amax of the layer's inputs, from which its input scale is computed; None if it was not measured.
            A layer that keeps its codes also keeps its own input scale if it has one.
        merge_scales: for the action "merge", the block scales to use, one of ADAPTER_SCALES; otherwise "".
        counts: True to count the values that decoding to the dtype of the output rounds.
    """

    key: str
    action: str
    source: Weight | Located
    targets: tuple[Target, ...]
    expert: int = 0
    span: tuple[int, int] | None = None
    group: str = ""
    recipe: Recipe | None = None
    form: table.Container | None = None
    input_scale: float | None = None
    nonfinite: str = "error"
    transposed: bool = False
    device: int | None = None
    search: str = ""
    columns: Located | ChannelWeights | None = None
    input_amax: float | None = None
    merge_scales: str = ""
    counts: bool = False

    @property
    def name(self) -> str:
        """The name of the tensor that is read. For a quantized weight, this is its tensor of codes."""
        return self.source.entry.name if isinstance(self.source, Located) else self.source.tensor

    @property
    def weight(self) -> Weight:
        """The weight that the job reads. An assertion fails for "copy", which reads a plain tensor instead."""
        assert isinstance(self.source, Weight)
        return self.source

    @property
    def new_recipe(self) -> Recipe:
        """The job's ``recipe``, which must not be None. An assertion fails for "copy", which has no recipe."""
        assert self.recipe is not None
        return self.recipe

    @property
    def container(self) -> table.Container:
        """The container to write: ``form``, which must not be None. An assertion fails if the output is unquantized."""
        assert self.form is not None
        return self.form

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of what the job converts: the rows of ``span``, or all rows of the matrix."""
        rows, columns = self.weight.shape[-2:]
        first, end = self.span or (0, rows)
        return end - first, columns

    @property
    def slab_bytes(self) -> int | None:
        """The largest size of a slab (rows that are read at a time), in bytes of source elements."""
        return None if self.device is None else DEVICE_SLAB_BYTES

    @property
    def nbytes_in(self) -> int:
        """The number of source bytes that the job reads in one pass over its source, scales included."""
        if isinstance(self.source, Located):
            return self.source.entry.nbytes
        return self.weight.nbytes * self.shape[0] // (self.weight.experts * self.weight.shape[-2])

    @property
    def is_measured(self) -> bool:
        """True if the job reads its source twice."""
        return self.action != COPY


class Measured(NamedTuple):
    """The result of a job's first pass over its source.

    Attributes:
        key: the key of the job.
        amax: the largest magnitude of the finite values; 0 if none is finite, or if the action is "rename".
        nonfinite: the number of NaN and infinite values.
        low, high: for the action "cast", the smallest and the largest scale exponent of the nonzero blocks. If there
            are no nonzero blocks, and for all other actions, low > high.
        exact: for the action "carry", True if all scales are powers of two; True for all other actions.
        reach: the largest magnitude that the scales of a quantized weight allow; 0 for an unquantized one.
        lost: the number of blocks of a quantized weight whose scales are 0 although their codes are not.
        doubt: a warning that the codes of a quantized weight do not seem to belong to its scales; "" if nothing is odd.
    """

    key: str
    amax: float = 0.0
    nonfinite: int = 0
    low: int = 1 << 20
    high: int = -(1 << 20)
    exact: bool = True
    reach: float = 0.0
    lost: int = 0
    doubt: str = ""


class Changes(NamedTuple):
    """The numbers of blocks and values that a cast, a fold, a rescaling or the rounding of decoded values changed.

    Attributes:
        blocks: the number of blocks that the recipe quantized again: MXFP4 blocks of 32 values whose scales NVFP4
            cannot hold, or blocks of the new format that are not exact. For a fold, the blocks whose scale changed.
        values: the number of values that changed in these blocks.
        largest_error: the largest |new - old| of these values; 0 if none changed.
    """

    blocks: int = 0
    values: int = 0
    largest_error: float = 0.0

    def plus(self, other: Changes) -> Changes:
        """Return the combined changes of two parts of a layer or of two layers."""
        error = max(self.largest_error, other.largest_error)
        return Changes(self.blocks + other.blocks, self.values + other.values, error)


class Survival(NamedTuple):
    """How much of an adapter's update is left in the stored values, as sums in float64 over the values of a layer.

    base is the value before the merge, delta the update, stored the decoded value of the result.

    Attributes:
        kept: the sum of (stored - base) * delta.
        wanted: the sum of delta^2.
        error: the sum of (stored - base - delta)^2.
        signal: the sum of base^2.
        changed: the number of codes that differ from those of the source; 0 for an unquantized source.
        codes: the number of codes that were compared; 0 for an unquantized source or another element format.
    """

    kept: float = 0.0
    wanted: float = 0.0
    error: float = 0.0
    signal: float = 0.0
    changed: int = 0
    codes: int = 0

    def plus(self, other: Survival) -> Survival:
        """Return the sums over two parts of a layer, or over two layers."""
        return Survival(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]

    @property
    def share(self) -> float:
        """The projection of stored - base on the update: 1 if it survived, 0 if it vanished; 1 if it is zero."""
        return self.kept / self.wanted if self.wanted else 1.0

    @property
    def relative_error(self) -> float:
        """|stored - base - delta| / |delta|; 0 if nothing was to be added and nothing changed, otherwise inf."""
        if not self.wanted:
            return float("inf") if self.error else 0.0
        return math.sqrt(self.error / self.wanted)

    @property
    def relative_size(self) -> float:
        """|delta| / |base|, the size of the update beside the weights; inf if all weights are 0."""
        if not self.signal:
            return float("inf") if self.wanted else 0.0
        return math.sqrt(self.wanted / self.signal)


class Losses(NamedTuple):
    """The squared errors of a layer before and after a scale search, summed in float64.

    If there are column weights, every term of the three sums is multiplied by its column's weight.

    Attributes:
        signal: the sum of x^2 over the unquantized values x.
        before: the sum of squared errors with scales computed from the block amax.
        after: the sum of squared errors with the searched scales.
    """

    signal: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def plus(self, other: Losses) -> Losses:
        """Return the sum of these Losses and ``other``, field by field, for example over the parts of a layer."""
        return Losses(*(a + b for a, b in zip(self, other, strict=True)))


class Done(NamedTuple):
    """A record that a job has written its output.

    Attributes:
        key: the key of the job.
        crc32: the CRC-32 of the bytes written to each target, in the order of ``Job.targets``.
        action: the action that was taken. It may differ from ``Job.action``: a cast may become a requantization.
        replaced: the number of NaN and infinite values that were replaced.
        losses: the squared errors without and with the scale search; zeros if the job searched no block scales.
        changes: what changed; zeros unless the action was "cast", "fold" or "rescale", or a "dequantize" that counts.
        survival: how much of an adapter's update is left; zeros if the job added no update.
        is_weak: True if many new blocks are zero, or have a scale at an end of its format, so that their values may be
            lost.
        nan: the number of NaN in a tensor that was copied.
    """

    key: str
    crc32: str
    action: str
    replaced: int = 0
    losses: Losses = Losses()
    changes: Changes = Changes()
    survival: Survival = Survival()
    is_weak: bool = False
    nan: int = 0

    @property
    def layer(self) -> str:
        """The name of the layer or stack that the job converts."""
        return self.key.rpartition("#")[0]


class ChannelWeights(NamedTuple):
    """Describe where an imatrix file stores the column weights of one matrix, so that a job can read them later.

    Attributes:
        path: the imatrix file.
        position: the offset in bytes of the matrix's first value in the file.
        columns: K, the number of float32 values, one per column of the matrix.
        divisor: the number to divide the values by. 0 means that the expert was never called; every weight is then 1.
    """

    path: Path
    position: int
    columns: int
    divisor: float

    def read(self) -> np.ndarray:
        """Read the values and return the column weights, float32 (K,): values / divisor, or ones if divisor is 0."""
        if self.divisor == 0:
            return np.ones(self.columns, np.float32)
        values = np.fromfile(self.path, "<f4", self.columns, offset=self.position)
        return np.asarray(values / np.float32(self.divisor), np.float32)


def put_rows(job: Job, output: Sink, codes: Any, scales: Any) -> None:
    """Write the next rows of a layer: their packed codes and their block scales."""
    # If the container stores blocks (GGUF), codes and scales are interleaved in one tensor; otherwise they are two
    # tensors.
    # If the container stores swizzled scales, every call but the last must get a multiple of 128 rows.
    form = job.container
    if form.in_blocks:
        output.put(table.CODES, pack_gguf(codes, scales, form.kind))
        return
    if form.high_first:
        codes = (codes << np.uint8(4)) | (codes >> np.uint8(4))
    output.put(table.CODES, codes)
    if output.has(table.SCALES):
        output.put(table.SCALES, swizzle_scales(scales, "swizzled_128x4") if form.swizzled else scales)


def usable_tensor_scale(scale: Any) -> bool:
    """Return whether a scale is a positive normal float32, so that every loader can use it."""
    # Subnormals are not usable, because loaders that flush subnormals would read them as 0.
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, stored: np.float32 | None = None) -> None:
    """Write the tensor scale of a layer in the direction and unit of the container."""
    form = job.container
    if stored is None:
        with np.errstate(over="ignore", divide="ignore"):  # an unusable result is rejected below
            stored = np.float32(1) / scale if form.divides else scale * np.float32(form.tensor_scale_unit)
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(job.name)}: tensor scale is {scale}; a positive normal float32 is needed; "
            "leave the layer out with --keep, or use another recipe"
        )
    output.put(table.TENSOR_SCALE, np.array([stored], np.float32))


def put_input_scale(job: Job, output: Sink, scale: np.float32) -> None:
    """Write the input scale of a layer, or its reciprocal if the container stores divisors."""
    check_input_scale(job, scale)
    output.put(table.INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def check_input_scale(job: Job, stored: np.float32) -> None:
    """Raise CheckpointError unless an input scale and its reciprocal are both positive normal float32 numbers."""
    if not usable_tensor_scale(stored) or not usable_tensor_scale(np.float32(1) / stored):
        raise CheckpointError(
            f"{shown(job.name)}: input scale is {stored}; a positive normal float32 is needed; repair the source, or"
            " leave the layer out with --keep"
        )


def input_scale_of(form: table.Container, amax: np.float32) -> np.float32:
    """Compute an input scale from the amax of a layer's inputs."""
    if form.kind == "fp8 tensor":  # Model-Optimizer 0.47 export/quant_utils.py get_activation_scaling_factor
        return np.float32(np.float32(amax) / np.float32(E4M3.max))
    return input_global_scale(amax) if form.divides else input_scale(amax)


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write a new input scale for a layer: from the measured amax of its inputs, or else the number that the user
    gave.
    """
    # Call this for layers that have no input scale, and for layers with new codes, because the input scale of the
    # source belongs to the old codes.
    if job.input_amax is not None:
        stored = input_scale_of(job.container, np.float32(job.input_amax))
        output.put(table.INPUT_SCALE, np.array([stored], np.float32))
    elif job.input_scale is None:
        why = "gets new codes, so its old input scale is not valid; other layers have input scales"
        raise CheckpointError(f"{shown(job.name)}: {why}; give one with --input-scale, or --activations")
    else:
        put_input_scale(job, output, np.float32(job.input_scale))
