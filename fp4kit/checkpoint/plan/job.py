"""Define jobs. A job describes the conversion of one tensor, or of some rows of a matrix. Any process can execute it.

Actions, the values of Job.action:
  copy: copy a tensor's bytes.
  quantize: quantize unquantized values.
  rename: keep codes and scales; only names, layout or direction of the tensor scale change.
  cast: MXFP4 to NVFP4 with the same codes, except in blocks whose scales NVFP4 cannot hold.
  carry: FP8 with 128x128 scales to MXFP8 with the same codes, if the scales are powers of two.
  requantize: decode, then quantize.
  dequantize: decode to unquantized values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fp4kit.checkpoint.containers.container import MODELOPT_AWQ, MODELOPT_NVFP4, Container
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.checkpoint.plan.imatrix import ChannelWeights
from fp4kit.recipes import Recipe

NONFINITE = ("error", "keep", "saturate")
COPY, QUANTIZE, RENAME, CAST, CARRY, REQUANTIZE, DEQUANTIZE = (
    "copy",
    "quantize",
    "rename",
    "cast",
    "carry",
    "requantize",
    "dequantize",
)
# Actions that may compute new codes, so that a scale search applies.
SEARCHED = (QUANTIZE, REQUANTIZE, CAST)
DEVICE_SLAB_BYTES = 32 << 20  # bytes of source elements per slab that is sent to a GPU
Tick = Callable[[int], None]  # called with the number of bytes after each read


class Sink(Protocol):
    """Receive the output of a job, part by part. Parts are CODES, SCALES, TENSOR_SCALE, INPUT_SCALE and VALUES."""

    def has(self, part: str) -> bool:
        """Return whether the sink accepts ``part``. Only accepted parts may be put."""

    def put(self, part: str, array: Any) -> None:
        """Write ``array`` after everything that was put into this part before."""


def target_of(have: Container | None, form: Container) -> Container:
    """Return the container to write for a weight, if the output format is that of ``form``.

    It is ``form``, except that Model-Optimizer's AWQ layers keep their factor per column in its own format.
    """
    return MODELOPT_AWQ if have is MODELOPT_AWQ and form is MODELOPT_NVFP4 else form


def action_of(have: Container | None, form: Container | None) -> str:
    """Return the action (see the head of this file) that brings a weight into the container to write.

    have: the container of the weight; None if it is unquantized.
    form: the container to write; None to write unquantized values.
    """
    if have is None:
        return COPY if form is None else QUANTIZE
    if form is None:
        return DEQUANTIZE
    if have.same_codes(form):
        return RENAME
    return {("mxfp4", "nvfp4"): CAST, ("fp8", "mxfp8"): CARRY}.get((have.kind, form.kind), REQUANTIZE)


class Target(NamedTuple):
    """Locate the bytes [position, position + nbytes) of an output file, which a job writes.

    part: what they hold: CODES, SCALES, TENSOR_SCALE, INPUT_SCALE or VALUES.
    dtype: the safetensors dtype of their tensor.
    """

    part: str
    path: Path
    position: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Job:
    """Describe the conversion of one tensor, or of some rows of one matrix of a weight.

    key: identifies the job within a run and in its journal.
    action: one of the actions at the head of this file.
    source: the weight to read; for "copy", the tensor to read.
    targets: where to write each part of the output (codes, scales, ...).
    expert: the index of the matrix to read; 0 for a single layer.
    span: the rows (first, end) to read; None for all.
    group: identifies the jobs that share a tensor scale.
    recipe: how new codes are computed.
    form: the container to write; None to write unquantized values.
    input_scale: the activation scale that the user gave, or None. A layer that keeps its codes and has an input scale
        keeps that one.
    nonfinite: what to do with NaN and infinity, one of NONFINITE.
    transposed: True to write unquantized values as [K, N].
    device: the CUDA device that computes; None for the CPU.
    search: the error that a search of block scales minimizes; "" for no search.
    columns: the column weights of that error, or None.
    input_amax: the amax of the inputs, from which the input scale of a layer without one follows; or None.
    """

    key: str
    action: str
    source: Weight | Located
    targets: tuple[Target, ...]
    expert: int = 0
    span: tuple[int, int] | None = None
    group: str = ""
    recipe: Recipe | None = None
    form: Container | None = None
    input_scale: float | None = None
    nonfinite: str = "error"
    transposed: bool = False
    device: int | None = None
    search: str = ""
    columns: Located | ChannelWeights | None = None
    input_amax: float | None = None

    @property
    def name(self) -> str:
        """The name of the tensor that is read."""
        return self.source.entry.name if isinstance(self.source, Located) else self.source.tensor

    @property
    def weight(self) -> Weight:
        """The weight that is read; the job must not be a copy of a tensor."""
        assert isinstance(self.source, Weight)
        return self.source

    @property
    def new_recipe(self) -> Recipe:
        """The recipe for new codes; the job must have one."""
        assert self.recipe is not None
        return self.recipe

    @property
    def container(self) -> Container:
        """The container to write; the job must have one."""
        assert self.form is not None
        return self.form

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the part of the matrix that the job converts."""
        rows, columns = self.weight.shape[-2:]
        first, end = self.span or (0, rows)
        return end - first, columns

    @property
    def slab_bytes(self) -> int | None:
        """The slab size for reading, in bytes of source elements; None for the default on a CPU."""
        return None if self.device is None else DEVICE_SLAB_BYTES

    @property
    def nbytes_in(self) -> int:
        """The number of bytes that the job reads in one pass."""
        if isinstance(self.source, Located):
            return self.source.entry.nbytes
        return self.weight.nbytes * self.shape[0] // (self.weight.experts * self.weight.shape[-2])

    @property
    def is_measured(self) -> bool:
        """True if a first pass over the source must find its amax, scale exponents or non-finite values."""
        checked = {DEQUANTIZE: self.nonfinite != "keep", RENAME: self.nonfinite == "error"}
        return self.action in (QUANTIZE, CAST, CARRY, REQUANTIZE) or checked.get(self.action, False)


class Measured(NamedTuple):
    """Hold the result of a job's first pass over its source.

    key: the key of the job.
    amax: the largest magnitude of the finite values; 0 if none is finite, or if the action is "rename".
    nonfinite: the number of NaN and infinite values.
    low, high: the smallest and largest scale exponent of the nonzero blocks of an MXFP4 source, if it is to be cast.
    exact: for FP8 that is carried over to MXFP8, True if all scales are powers of two; otherwise True.
    """

    key: str
    amax: float = 0.0
    nonfinite: int = 0
    low: int = 1 << 20
    high: int = -(1 << 20)
    exact: bool = True


class Changes(NamedTuple):
    """Count what a cast from MXFP4 to NVFP4 could not keep.

    blocks: the number of blocks of 32 with new codes, because their scales are out of range.
    values: the number of values that changed in these blocks.
    largest_error: the largest |new - old| of these values; 0 if none changed.
    """

    blocks: int = 0
    values: int = 0
    largest_error: float = 0.0

    def plus(self, other: Changes) -> Changes:
        """Return the changes of two parts of a layer, or of two layers, combined into one."""
        error = max(self.largest_error, other.largest_error)
        return Changes(self.blocks + other.blocks, self.values + other.values, error)


class Done(NamedTuple):
    """Record that a job has written its output.

    key: the key of the job.
    crc32: the CRC-32 of the bytes written to each target, in order.
    action: the action that was taken, which may differ from the planned one (a cast may become a requantization).
    replaced: the number of NaN and infinite values that were replaced.
    losses: the sums of scale_search.Losses, for a job that searches block scales.
    changes: the fields of Changes, for a job that was cast.
    """

    key: str
    crc32: str
    action: str
    replaced: int = 0
    losses: tuple[float, float, float] = (0.0, 0.0, 0.0)
    changes: tuple[int, int, float] = (0, 0, 0.0)
