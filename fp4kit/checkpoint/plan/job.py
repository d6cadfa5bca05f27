"""A job: what becomes of one tensor, or of one matrix of a weight, as data that any process can take up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.weights import Located, Weight
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
SEARCHED = (QUANTIZE, REQUANTIZE, CAST)  # actions that may make new codes, whose scales can be searched
ON_DEVICE = 32 << 20  # bytes of source elements that go to a GPU at a time
Tick = Callable[[int], None]  # called with bytes that were read


class Sink(Protocol):
    """What takes the bytes of a job."""

    def has(self, part: str) -> bool:
        """Whether a part is wanted."""

    def put(self, part: str, array: Any) -> None:
        """Take the next bytes of a part."""


def action_of(have: Container | None, form: Container | None) -> str:
    """How a weight that is stored in one form gets into another; None: numbers."""
    if have is None:
        return COPY if form is None else QUANTIZE
    if form is None:
        return DEQUANTIZE
    if have.same_codes(form):
        return RENAME
    return {("mxfp4", "nvfp4"): CAST, ("fp8", "mxfp8"): CARRY}.get((have.kind, form.kind), REQUANTIZE)


class Target(NamedTuple):
    """Bytes of an output file: [position, position + nbytes), the part of a layer that they are, and their safetensors
    dtype.
    """

    part: str
    path: Path
    position: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Job:
    """What becomes of one tensor, or of the rows [span) of matrix `expert` of a weight. key: names it in a run.

    group: key of those that share a tensor scale. recipe: of quantized ones. form: what is written, None for numbers.
    transposed: numbers are written as columns, [K, N].
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
    device: int | None = None  # of CUDA; None: the CPU
    search: str = ""  # of block scales: by which error
    columns: Located | None = None  # the weights of that error

    @property
    def name(self) -> str:
        """The tensor that is read."""
        return self.source.entry.name if isinstance(self.source, Located) else self.source.tensor

    @property
    def weight(self) -> Weight:
        """The weight that is read."""
        assert isinstance(self.source, Weight)
        return self.source

    @property
    def new_recipe(self) -> Recipe:
        """The recipe of codes that are made anew."""
        assert self.recipe is not None
        return self.recipe

    @property
    def container(self) -> Container:
        """The form that is written, where it is not numbers."""
        assert self.form is not None
        return self.form

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, or of the rows, that the job is about."""
        rows, columns = self.weight.shape[-2:]
        first, end = self.span or (0, rows)
        return end - first, columns

    @property
    def slab_bytes(self) -> int | None:
        """Source elements in memory at a time, in bytes; None: as the CPU likes it."""
        return None if self.device is None else ON_DEVICE

    @property
    def nbytes_in(self) -> int:
        """Bytes that it reads, once."""
        if isinstance(self.source, Located):
            return self.source.entry.nbytes
        return self.weight.nbytes * self.shape[0] // (self.weight.experts * self.weight.shape[-2])

    @property
    def is_measured(self) -> bool:
        """Whether it is read first for what it holds."""
        checked = {DEQUANTIZE: self.nonfinite != "keep", RENAME: self.nonfinite == "error"}
        return self.action in (QUANTIZE, CAST, CARRY, REQUANTIZE) or checked.get(self.action, False)


class Measured(NamedTuple):
    """What a job's weight holds. low, high: exponents of MX blocks that are not zero. exact: scales are powers of
    two.
    """

    key: str
    amax: float = 0.0
    nonfinite: int = 0
    low: int = 1 << 20
    high: int = -(1 << 20)
    exact: bool = True


class Done(NamedTuple):
    """A job that wrote its bytes: their CRC-32, of one target after the other; its action as it was; NaN and inf
    replaced.

    losses: of a search of scales: the sums of Losses.
    """

    key: str
    crc32: str
    action: str
    replaced: int = 0
    losses: tuple[float, float, float] = (0.0, 0.0, 0.0)
