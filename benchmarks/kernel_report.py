"""Report registers, spills, shared memory and instructions of the CUDA kernels. No GPU is needed.

    python benchmarks/kernel_report.py [--arch sm_90] [--kernel TEXT] [--output FILE]

Prints a table. Resident threads is the number of threads that fit on a multiprocessor with 65,536 registers and 2,048
threads. The last two columns count thread instructions: per element in the main loop, and before it (see sass.py). They
need nvdisasm, which is part of CUDA (on the PATH), or the wheel nvidia-cuda-nvdisasm. The exit status is 1 if a kernel
spills registers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sass

from fp4kit.cuda import compiler
from fp4kit.cuda.compiler import TYPES, Resources, instantiation, recipe_struct
from fp4kit.cuda.dispatch import TABLE_THREADS, LaunchRequest, find_kernel, kernel_for
from fp4kit.cuda.launch import THREADS
from fp4kit.cuda.transforms import transpose_struct
from fp4kit.formats import FLOATS
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.schema import decoding, with_row_blocks
from fp4kit.reference.stochastic import TE_SIGN_MASK

F32, F16, BF16 = FLOATS
OTHER_INPUTS = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt")


class ReportedKernel(NamedTuple):
    """Describe one instantiation of a kernel.

    Attributes:
        kernel: the kernel's function name
        recipe: id of the recipe, or "" if the kernel does not depend on one
        types: the element type, as shown in the table
        options: further template arguments, as shown in the table
        source: the CUDA source to compile
    """

    kernel: str
    recipe: str
    types: str
    options: str
    source: str

    def instructions(self, loop: sass.Loop) -> float | None:
        """Return the instructions per element in the kernel's main loop, or None if it loads or stores no elements."""
        sizes = {"4 bits": 0.5, "8 bits": 1.0, "scales": 1.0}
        size = sizes[self.types] if self.types in sizes else np.dtype(self.types).itemsize
        size = 1.0 if self.kernel == "pack_codes_kernel" else size  # it loads one code per byte
        elements = (loop.stored if self.kernel == "dequantize_kernel" else loop.loaded) / size
        return loop.instructions / elements if elements else None


def request_of(r: Recipe, dtype: np.dtype, layout: str = "linear") -> LaunchRequest:
    """Return the request for a matrix of 1024 x 4096 elements in a group."""
    return LaunchRequest(with_row_blocks(r), dtype, (1024, 4096), layout, grouped=True)


def quantize_kernel(
    r: Recipe, dtype: np.dtype, aligned: bool = True, layout: str = "linear", **options: object
) -> ReportedKernel:
    """Return the kernel that quantizes arrays of `dtype` to a recipe.

    Args:
        r: the recipe
        dtype: dtype of the input
        aligned: False for the variant for misaligned input
        layout: layout of the block scales
        options: further arguments of recipe_struct, such as stochastic=True
    """
    request = request_of(r, dtype, layout)
    file = kernel_for(request).kernel
    struct = recipe_struct(request.recipe, layout, **options)  # type: ignore[arg-type]
    names = [layout] * (layout != "linear") + ["misaligned"] * (not aligned)
    step: Any = options.get("row_step", ())
    shown = {"sign_mask": "hadamard", "row_step": " ".join(map(str, step))}
    names += [shown.get(name, name) for name in options]
    source = instantiation(file, struct, Input=TYPES[dtype], kAligned=aligned)
    return ReportedKernel(f"{file}_kernel", r.id, str(dtype), ", ".join(names), source)


def table_kernel(r: Recipe) -> ReportedKernel:
    """Return the kernel that quantizes large bfloat16 matrices to a 4over6 recipe."""
    source = instantiation("quantize_table", recipe_struct(r), threads=TABLE_THREADS, Input=TYPES[BF16], kAligned=True)
    return ReportedKernel("quantize_table_kernel", r.id, str(BF16), "", source)


def dequantize_kernel(r: Recipe, dtype: np.dtype) -> ReportedKernel:
    """Return the kernel that decodes a recipe's codes to `dtype`."""
    source = instantiation(
        "dequantize", recipe_struct(decoding(with_row_blocks(r), dtype)), Input=TYPES[dtype], Output=TYPES[dtype]
    )
    return ReportedKernel("dequantize_kernel", r.id, str(dtype), "", source)


def patch_kernel(r: Recipe, dtype: np.dtype, mask: int | None = None) -> ReportedKernel:
    """Return the kernel that quantizes along columns, in both directions, and in square blocks.

    Args:
        r: the recipe
        dtype: the dtype of the input
        mask: the sign mask of the Hadamard transform, or None for no transform
    """
    source = instantiation("quantize_columns", recipe_struct(r, sign_mask=mask), Input=TYPES[dtype], kAligned=True)
    return ReportedKernel("quantize_columns_kernel", r.id, str(dtype), "hadamard" * (mask is not None), source)


def amax_kernel(dtype: np.dtype, hadamard: bool) -> ReportedKernel:
    """Return the kernel that computes the amax of a tensor, after a Hadamard transform if `hadamard` is true."""
    transform = f"struct Transform {{ static constexpr bool kHadamard = {str(hadamard).lower()}; "
    transform += f"static constexpr u32 kSignMask = {TE_SIGN_MASK}u; }};"
    source = instantiation("amax", transform, Input=TYPES[dtype], kCounted="AmaxInput::all", kAligned=True)
    return ReportedKernel("amax_kernel", "", str(dtype), "hadamard" * hadamard, source)


def kernels() -> Iterator[ReportedKernel]:
    """Yield the kernels of the report.

    Every recipe that a quantize kernel supports has its bfloat16 kernel. A few recipes also have kernels for other
    dtypes and options, for dequantize, amax, shards and layouts.
    """
    for r in RECIPES.values():
        if not (r.fake_only or r.stochastic_only) and find_kernel(request_of(r, BF16)) is not None:
            yield quantize_kernel(r, BF16)
        if r.four_over_six:
            yield table_kernel(r)
    for id in ("nvfp4-te", "nvfp4-te-2d", "nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te", "mxfp8-te-2d"):
        yield from (patch_kernel(RECIPES[id], dtype) for dtype in (BF16, F32))
    yield patch_kernel(RECIPES["nvfp4-te"], BF16, TE_SIGN_MASK)
    for id in OTHER_INPUTS:
        yield from (quantize_kernel(RECIPES[id], dtype) for dtype in (F32, F16))
        yield quantize_kernel(RECIPES[id], BF16, aligned=False)
        yield quantize_kernel(RECIPES[id], BF16, fake=True)
        yield quantize_kernel(RECIPES[id], BF16, stochastic=True)
        if RECIPES[id].tensor_scaling == "tensor":
            yield from (quantize_kernel(RECIPES[id], dtype, finds_amax=True) for dtype in (F32, BF16))
        yield from (dequantize_kernel(RECIPES[id], dtype) for dtype in (F32, BF16))
    yield dequantize_kernel(RECIPES["nvfp4-modelopt"], BF16)
    for id in ("nvfp4-te-rowscaled", "nvfp4-flashinfer-token"):
        for step in (("several", 64), ("one", 64), ("one", 128), ("part", 128)):
            yield quantize_kernel(RECIPES[id], BF16, row_step=step)
        yield quantize_kernel(RECIPES[id], BF16, aligned=False, row_step=("one", 64))
    for id in ("nvfp4-te", "nvfp4-te-2d", "mxfp4-ocp"):
        yield quantize_kernel(RECIPES[id], BF16, layout="swizzled_128x4")
    yield quantize_kernel(RECIPES["nvfp4-te-reference"], BF16, sign_mask=TE_SIGN_MASK)
    yield from (amax_kernel(dtype, hadamard) for dtype in (F32, BF16) for hadamard in (False, True))
    for id in ("nvfp4-te", "mxfp4-ocp", "fp8-modelopt", "nvfp4-te-4over6-mse-256"):
        source = instantiation("quantize_with_scales", recipe_struct(RECIPES[id]), Input=TYPES[BF16], kAligned=True)
        yield ReportedKernel("quantize_with_scales_kernel", id, str(BF16), "", source)
    yield from partial_kernels()
    yield from layout_kernels()


def partial_kernels() -> Iterator[ReportedKernel]:
    """Yield the kernels of partial_amax and partial_cast, which work on shards of a matrix."""
    for id in ("nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d"):
        for dtype in (F32, BF16):
            for file in ("partial_amax", "partial_cast"):
                source = instantiation(file, recipe_struct(RECIPES[id]), Input=TYPES[dtype])
                yield ReportedKernel(f"{file}_kernel", id, str(dtype), "", source)


def layout_kernels() -> Iterator[ReportedKernel]:
    """Yield the kernels that only move codes and scales: transpose, swizzle, pack and unpack."""
    for id in ("nvfp4-te-2d", "mxfp8-te-2d"):
        bits = f"{4 if RECIPES[id].is_packed else 8} bits"
        for layout in SCALE_LAYOUTS:
            source = instantiation("transpose", transpose_struct(RECIPES[id], layout, True), kAligned=True)
            yield ReportedKernel("transpose_kernel", id, bits, layout, source)
        source = instantiation("transpose", transpose_struct(RECIPES[id], "linear", False), kAligned=False)
        yield ReportedKernel("transpose_kernel", id, bits, "linear, misaligned", source)
    for layout in SCALE_LAYOUTS[1:]:
        for pair in (("linear", layout), (layout, "linear")):
            traits = {name: f"ScaleLayout::{one}" for name, one in zip(("kFrom", "kTo"), pair, strict=True)}
            source = instantiation("swizzle", **traits, kQuads=True)
            yield ReportedKernel("swizzle_kernel", "", "scales", " to ".join(pair), source)
    for kernel in ("pack_codes_kernel", "unpack_codes_kernel"):
        yield ReportedKernel(kernel, "", "4 bits", "", instantiation("pack_codes", kAligned=True))


class Usage(NamedTuple):
    """What one kernel uses.

    Attributes:
        memory: its registers and memory
        instructions: thread instructions per element in the main loop; None without nvdisasm or such a loop
        setup: thread instructions before the main loop
    """

    memory: Resources
    instructions: float | None = None
    setup: int | None = None

    @property
    def resident_threads(self) -> int:
        """Return the number of threads that fit on a multiprocessor.

        Registers are allocated in multiples of eight per thread.
        """
        blocks = 65536 // (-(-self.memory.registers // 8) * 8 * THREADS)
        return min(blocks * THREADS, 2048)


def usage(kernel: ReportedKernel, arch: str) -> Usage:
    """Compile a kernel for an architecture, and return the resources that the assembler reports.

    arch: the architecture, such as "sm_90".
    """
    memory, cubin = compiler.resources(kernel.source, arch, kernel.kernel)
    loop = sass.main_loop(sass.disassembled(cubin), kernel.kernel) if sass.disassembler() else None
    if loop is None:
        return Usage(memory)
    return Usage(memory, kernel.instructions(loop), loop.setup)


def table(rows: list[tuple[ReportedKernel, Usage]], arch: str) -> str:
    """Return the report as a Markdown table with one line per kernel.

    rows: the kernels with the resources that they use.
    arch: the architecture that they were compiled for, such as "sm_90".
    """
    version = ".".join(map(str, compiler.compiler_version()))
    spilling = [
        f"{k.kernel} of {k.recipe} from {k.types} {k.options}".rstrip() for k, u in rows if u.memory.spill_bytes
    ]
    lines = [
        f"# Registers, memory and instructions of the kernels, {arch}",
        "",
        f"Written by `benchmarks/kernel_report.py` with NVRTC {version}, {date.today()}; blocks of {THREADS} threads.",
        f"Kernels that spill registers: {'; '.join(spilling) or 'none'}.",
        "",
        (
            "| kernel | recipe | elements | options | registers | spill bytes | stack bytes | shared bytes | resident"
            " threads | instructions per element | before the loop |"
        ),
        "| --- | --- | --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for kernel, used in rows:
        counts = ("-", "-") if used.instructions is None else (f"{used.instructions:.1f}", str(used.setup))
        cells = (*kernel[:4], *map(str, used.memory), str(used.resident_threads), *counts)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the report and, if --output names a file, write it. Return 1 if a kernel spills registers, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="sm_90", help="architecture, such as sm_100a (default: sm_90)")
    parser.add_argument("--kernel", default="", help="report only kernels whose name and recipe contain this text")
    parser.add_argument("--output", type=Path, help="file to write the table to")
    options = parser.parse_args()
    chosen = [kernel for kernel in kernels() if options.kernel in f"{kernel.kernel} {kernel.recipe}"]
    rows = [(kernel, usage(kernel, options.arch)) for kernel in chosen]
    text = table(rows, options.arch)
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return int(any(used.memory.spill_bytes for _, used in rows))


if __name__ == "__main__":
    sys.exit(main())
