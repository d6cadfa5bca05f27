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
        "quantize with amax, * in turn",
        ("nvfp4-te",),
        BF16,
        "The call reads x for the amax, and then quantizes it. The second launch gains little from the part of x that"
        " is in the L2 cache, because its own instructions take as long: 10 us for 32 MiB in shared memory.",
        (
            (
                "one launch that reads x once: thread blocks keep 26 MB in shared memory, meet at a counter, and then"
                " encode, 8, 32, 64, 128 and 256 MiB: 1.69, 1.72, 1.79, 1.78 and 1.82"
            ),
            (
                "the second launch starts before the first one ends (programmatic dependent launch): 1.56, 1.64, 1.75,"
                " 1.75 and 1.74"
            ),
            "a second launch whose thread blocks stay and load by bulk copies: 1.56, 1.58, 1.74, 1.76 and 1.78",
        ),
    ),
    Reason(
        "quantize*, 64 x 4096*",
        ("nvfp4-te", "nvfp4-te-rowscaled", "nvfp4-flashinfer-token*"),
        BF16,
        "Host time, mostly of Python and of CuPy's allocations. Hosts differ: here, x * 2 of PyTorch takes 8.4 us.",
        (
            "the same calls on the host of an earlier record, where x * 2 of PyTorch takes 7.2 us: 12.8 to 13.7 us",
            "quantize into given arrays, nvfp4-te: 14.1 us",
        ),
    ),
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
        "transpose, swizzled_*",
        ("nvfp4-te-2d",),
        BF16,
        "These rows are within 3% of the target. In another run they were within 1% of it. The time of 8x4 varies"
        " between runs (78.0 to 79.9 us).",
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
        "quantize per token*",
        ("nvfp4-flashinfer-token-4over6-*",),
        BF16,
        "Arithmetic limits these rows. A warp needs 388 instructions for 512 elements, and issuing them takes 49 of the"
        " 65 us for 16384 x 4096 elements. On an H100, whose memory is slower, the same kernels reach 0.85 to 0.93.",
        (
            "each thread loads its next block before it encodes a block, 16384 x 4096: 0.646 (kept: 0.671)",
            "five thread blocks per multiprocessor, with spilled registers, 16384 x 4096: 0.609",
            "three thread blocks per multiprocessor, 16384 x 4096: 0.660",
            "one warp per row, 16384 x 4096: 0.611",
        ),
    ),
    Reason(
        "amax 8 unequal",
        ("fp8-modelopt",),
        BF16,
        "The launch takes only 23 us, of which 1.3 us are spent on the group, for example to find the matrix of each"
        " part. For 128 matrices the ratio is 0.99. Another run gave 1.045 for 8. The other designs were tried for"
        " quantize of the same matrices.",
        (
            "arguments from a table in memory: 1.069 for quantize",
            "arguments copied for every part of a matrix: 1.065 for quantize",
        ),
    ),
)


def reason_of(row: BenchmarkRow, reasons: Sequence[Reason] = REASONS) -> Reason | None:
    """Return the first reason that covers a row, or None if no reason covers it."""
    return next((reason for reason in reasons if reason.covers(row)), None)
