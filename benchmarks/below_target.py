"""Rows of the committed records that miss their target: why, and what else was tried. report.py puts them below the
table.

A figure in `tried` was measured on the device of the record, in another run, against a copy in that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rows import BenchmarkRow


class Reason(NamedTuple):
    """Why the rows of an operation, recipes and input dtypes are where they are, and the other designs that were
    tried.
    """

    operation: str
    recipes: tuple[str, ...]
    dtypes: tuple[str, ...]
    why: str
    tried: tuple[str, ...]

    def covers(self, row: BenchmarkRow) -> bool:
        """Whether it is about this row. Patterns are those of the shell."""
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
        "The transform adds 8 instructions an element to 14, and its sums take 80 registers, which leaves 24 warps a "
        "multiprocessor. Tensor cores would take the sums off them.",
        (
            "a transposed copy and the row kernel, sums in double: 0.08 along columns, 0.09 both ways",
            (
                "sums in float32, the rows kept for columns that these do not tell, as a call: 192 bytes of stack, 0.48"
                " and 0.47"
            ),
            "64 registers and four thread blocks, some registers spilled: 0.50 and 0.49",
            (
                "only the exactness of sums tested, not whether their rounding is certain: more columns are read again,"
                " 0.51, 0.47"
            ),
            "tensor cores (mma m16n8k16) in the row kernel: 223 us where sums in float32 took 203 us",
        ),
    ),
    Reason(
        "quantize along columns",
        ("nvfp4-te", "nvfp4-te-2d"),
        BF16,
        "The spread of 30 and 41 us is not the kernel's: in a process of their own, that day, the same kernels had"
        " 0.947 and 0.949, and a spread of 0.4 us. Likely the host, which checks each call along columns, was late"
        " while other libraries of this run kept it busy. Timings have since been queued behind 2 ms of copies instead"
        " of 0.1 ms.",
        (
            "patches of 8 rows, two threads for a block of a column, 128 registers: 0.58 and 0.65",
            "persistent thread blocks, with and without loads ahead: 0.60 and less",
            "five thread blocks a multiprocessor, 48 registers: 0.71",
            "three thread blocks a multiprocessor: 0.01 to 0.03 less than four",
        ),
    ),
    Reason(
        "transpose, swizzled_*",
        ("nvfp4-te-2d",),
        BF16,
        "Within 1% of the target: the copy that they are held against changes as much from run to run (70.0 to 70.6"
        " us).",
        (
            (
                "scales of 8x4 apart from codes, in tiles of 128 to 1024 columns: 0.896 to 0.903 (kept); of 128x4:"
                " 0.886 to 0.896"
            ),
            "scales before the codes: 0.887 to 0.893",
            (
                "four and five thread blocks a multiprocessor instead of three: 0.888 and 0.785 (8x4), 0.899 and 0.892"
                " (128x4)"
            ),
        ),
    ),
    Reason(
        "quantize 8 unequal",
        ("nvfp4-te",),
        BF16,
        "29 us in all, and each thread block makes a table of factors for each matrix that it has a part of. Two other"
        " runs that day gave 1.025 and 1.049.",
        (
            "arguments from a table in memory: 1.069",
            "arguments copied for every piece: 1.065",
            "persistent thread blocks that fetch ahead, 18 settings: 1.065 at best",
            "arguments staged in shared memory: 1.045, but other recipes up to 1.064",
        ),
    ),
)


def reason_of(row: BenchmarkRow, reasons: Sequence[Reason] = REASONS) -> Reason | None:
    """The first reason that covers a row; None without one."""
    return next((reason for reason in reasons if reason.covers(row)), None)
