"""State why rows of the committed GPU records miss their target, and which other designs were tried.

report.py prints these reasons below its table. A figure in `Reason.tried` is an efficiency: the time of a copy of the
same number of bytes, divided by the time of the operation. Two kinds of figures are not efficiencies: figures with a
unit, and ratios in rows that are compared with another timed call. Each figure was measured on the record's device in
another run, beside a copy in that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rows import BenchmarkRow


class Reason(NamedTuple):
    """Explain why some rows miss their target.

    Attributes:
        operation: shell pattern of the operations that the reason covers
        recipes: shell patterns of the recipes
        dtypes: names of the dtypes
        why: the cause
        tried: other designs, with the figure that each reached
    """

    operation: str
    recipes: tuple[str, ...]
    dtypes: tuple[str, ...]
    why: str
    tried: tuple[str, ...]

    def covers(self, row: BenchmarkRow) -> bool:
        """Return True if the reason applies to a row: operation, recipe and dtype match."""
        return (
            fnmatchcase(row.operation, self.operation)
            and any(fnmatchcase(row.recipe, pattern) for pattern in self.recipes)
            and row.dtype in self.dtypes
        )


BF16 = ("bfloat16",)
REASONS = (
    Reason(
        "quantize* Hadamard",
        ("nvfp4-te",),
        BF16,
        "The transform adds 8 instructions per element to the 14 of plain quantization. Its sums take 80 registers per"
        " thread, which leaves 24 warps per multiprocessor. Computing the sums on tensor cores would free these"
        " registers.",
        (
            "a transposed copy and the row kernel, with sums in double: 0.08 along columns, 0.09 in both directions",
            (
                "sums in float32, and a function call that recomputes from stored rows the columns for which"
                " float32 is not exact enough: 0.48 and 0.47, with 192 bytes of stack"
            ),
            (
                "64 registers per thread and four thread blocks per multiprocessor, with some spilled registers: 0.50"
                " and 0.49"
            ),
            (
                "test only whether sums are exact, not whether their rounding is certain, so that more columns are read"
                " again: 0.51 and 0.47"
            ),
            "tensor cores (mma m16n8k16) in the row kernel: 223 us, where sums in float32 took 203 us",
        ),
    ),
    Reason(
        "quantize along columns",
        ("nvfp4-te", "nvfp4-te-2d"),
        BF16,
        "The times of these two rows spread over 30 and 41 us, which the kernels do not cause. In a separate process on"
        " the same day, the same kernels reached efficiencies of 0.947 and 0.949, with a spread of 0.4 us. The host,"
        " which checks each call along columns, was probably late, because other libraries in this run kept it busy."
        " Since then, timings are queued behind 2 ms of copies instead of 0.1 ms.",
        (
            "patches of 8 rows, two threads per column block, 128 registers per thread: 0.58 and 0.65",
            "persistent thread blocks, with and without prefetching: at most 0.60",
            "five thread blocks per multiprocessor, 48 registers per thread: 0.71",
            "three thread blocks per multiprocessor: 0.01 to 0.03 less than with four",
        ),
    ),
    Reason(
        "transpose, swizzled_*",
        ("nvfp4-te-2d",),
        BF16,
        "These rows are within 1% of the target. The copy that they are compared with varies as much between runs"
        " (70.0 to 70.6 us).",
        (
            (
                "scales separate from codes, in tiles of 128 to 1024 columns: 0.896 to 0.903 for 8x4 (kept), 0.886 to"
                " 0.896 for 128x4"
            ),
            "scales first, then codes: 0.887 to 0.893",
            (
                "four and five thread blocks per multiprocessor instead of three: 0.888 and 0.785 (8x4), 0.899 and"
                " 0.892 (128x4)"
            ),
        ),
    ),
    Reason(
        "quantize 8 unequal",
        ("nvfp4-te",),
        BF16,
        "The launch takes only 29 us, and each thread block computes a table of factors for every matrix it has a part"
        " of. Two other runs on the same day gave 1.025 and 1.049.",
        (
            "arguments from a table in memory: 1.069",
            "arguments copied for every part of a matrix: 1.065",
            "persistent thread blocks that prefetch, in 18 settings: 1.065 at best",
            "arguments staged in shared memory: 1.045, but up to 1.064 for other recipes",
        ),
    ),
)


def reason_of(row: BenchmarkRow, reasons: Sequence[Reason] = REASONS) -> Reason | None:
    """Return the first reason that covers a row, or None if no reason covers it."""
    return next((reason for reason in reasons if reason.covers(row)), None)
