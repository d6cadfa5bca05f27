"""Compare random matrix products of the compiled CPU engine with the specification, and print the sums per unit.

    python tools/compare_products.py [--sums N] [--seed S] [--units ID ...]

The operands stress the rounding of a matrix unit. Products cancel, or one product pushes others out of the kept bits.
There are also zeros beside tiny C, subnormal scales, NaN and infinities. K is one step or a few, any number below 700,
or 65,536. `fp4kit fuzz --operations matmul` draws strides, stacks, layouts and variants of units too, and is slower.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import isqrt
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz.arrays import as_float8, drawn
from fp4kit.evidence.fuzz.draw import C_KINDS, LONGEST, DrawnOperand, draw_operand, draw_patterns
from fp4kit.evidence.fuzz.recipes import Picks, Pool, Variant
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3
from fp4kit.units import Unit

MX = [*map(Variant, ("mxfp8-te", "mxfp8-te-e5m2", "mxfp6-torchao-floor-e2m3", "mxfp6-torchao-floor-e3m2", "mxfp4-ocp"))]
# Elements of 4, 6 and 8 bits without block scales.
PLAIN = [Variant("fp8-modelopt", (("element", each), ("nan_code", None))) for each in (E2M1, E2M3, E3M2, E4M3)]
# {kind of operands, a field of Unit: pairs of operands, each a dtype or a recipe}
PAIRS: dict[str, list[tuple[Any, Any]]] = {
    "float16": [("float16", "float16")],
    "bfloat16": [("bfloat16", "bfloat16")],
    "tf32": [("float32", "float32")],
    "fp8": [*combinations_with_replacement(("float8_e4m3fn", "float8_e5m2"), 2)],
    "fp8_fnuz": [*combinations_with_replacement(("float8_e4m3fnuz", "float8_e5m2fnuz"), 2)],
    "fp6_fp4": [*combinations_with_replacement(PLAIN, 2)][:-1],  # without two operands of 8 bits
    "mx": [*combinations_with_replacement(MX, 2)][:-1],  # without two operands of 4 bits
    "fp4": [(Variant(id), Variant(id)) for id in ("nvfp4-te", "mxfp4-ocp")],
    "int8": [*product(("int8", "uint8"), repeat=2)],
}
PROMOTE = 384  # a multiple of the step of every unit
LARGEST = 1 << 21  # the largest number of products of elements per matrix product


def operand(x: DrawnOperand) -> Any:
    """Return a drawn operand in the form that matmul accepts: contiguous, with scales in the linear layout."""
    codes = x.codes.values()
    if x.recipe is None:
        return as_float8(codes, x.dtype) if x.dtype.startswith("float8") else codes
    r = x.recipe.recipe
    scales, tensor_scale = (None if part is None else part.values() for part in (x.scales, x.tensor_scale))
    packed = fp4kit.pack(codes) if r.is_packed else codes
    return fp4kit.Quantized(packed, scales, tensor_scale, None, codes.shape, np.dtype(np.float32), 1, r)


def shape_of(d: Picks, step: int, multiple: int) -> tuple[int, int, int]:
    """Return random M, N and K with M * N * K of at most LARGEST, and M and N of at most 256.

    step: the K of one step of the unit. multiple: a number that divides the returned K.
    """
    chance = d.rng.random()
    if chance < 0.88:
        K = step * int(d.pick((1, 1, 1, 2, 3, 8)))
    else:
        K = LONGEST if chance < 0.94 else int(d.rng.integers(1, 700))
    K = -(-K // multiple) * multiple
    largest = min(isqrt(LARGEST // K), 256)
    M, N = (int(d.rng.integers(-(-largest // 2), largest + 1)) for _ in "MN")
    return max(M, 1), max(N, 1), K


def products(unit: Unit, seed: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield arguments of random calls to fp4kit.matmul on a unit, without end: a, b, and a dict of the others.

    All of them are determined by `seed`.
    """
    d = Picks(seed, Pool())
    while True:
        kind = d.pick([*unit.steps()])
        pair = d.pick(PAIRS[kind])
        multiple = max(1 if isinstance(each, str) else each.recipe.length_multiple for each in pair)
        step = getattr(unit, kind)
        M, N, K = shape_of(d, step.k, multiple)
        if kind == "int8":
            a, b = (
                np.frombuffer(d.rng.bytes(rows * K), each).reshape(rows, K)
                for each, rows in zip(pair, (M, N), strict=True)
            )
            c = np.frombuffer(d.rng.bytes(4 * M * N), np.int32).reshape(M, N)
            yield a, b, {"unit": replace(unit, int8=replace(step, saturate=d.chance(0.5))), "c": c}
            continue
        patterns = draw_patterns(d)
        a, b = (
            operand(draw_operand(d, each, (rows, K), pattern))
            for each, rows, pattern in zip(pair, (M, N), patterns, strict=True)
        )
        c = None
        if d.chance(0.7):
            sums = getattr(step, "output", "float32")
            c = drawn(d.pick(C_KINDS), sums, (M, N), int(d.rng.integers(1 << 40)))
        promotes = unit.fp8_as is None and d.chance(0.2)
        yield a, b, {"unit": replace(unit, promote=PROMOTE) if promotes else unit, "c": c, "alpha": 1.0}


def compare(unit: Unit, sums: int, seed: int) -> Counter[str]:
    """Compare at least `sums` sums of a unit, for random operands that `seed` determines.

    Return {"sums": number of sums, "different": number that differ}.
    """
    counts: Counter[str] = Counter()
    for a, b, options in products(unit, seed):
        if counts["sums"] >= sums:
            break
        with np.errstate(all="ignore"):
            d = fp4kit.matmul(a, b, **options)
            with fp4kit.specification():
                expected = fp4kit.matmul(a, b, **options)
        counts.update(sums=d.size, different=int((d.view(np.uint32) != expected.view(np.uint32)).sum()))
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Compare products of every unit, and print a table. Return 0 if all sums are equal, otherwise 1."""
    hardware = [unit.id for unit in fp4kit.units() if unit.order is None]
    parser = argparse.ArgumentParser(description="Compare drawn matrix products.", allow_abbrev=False)
    parser.add_argument("--sums", type=int, default=10_000_000, help="number of sums, over all units")
    parser.add_argument("--seed", type=int, default=0, help="seed of the products")
    parser.add_argument("--units", nargs="+", default=hardware, choices=hardware, metavar="ID", help="units to compare")
    given = parser.parse_args(arguments)
    print(f"{fp4kit.engine()}, seed {given.seed}")
    total: Counter[str] = Counter()
    for id in given.units:
        start = time.perf_counter()
        counts = compare(fp4kit.unit(id), -(-given.sums // len(given.units)), given.seed)
        total += counts
        seconds = time.perf_counter() - start
        print(f"{id}: {counts['sums']:,} sums, {counts['different']:,} different, {seconds:.0f} s", flush=True)
    print(f"all: {total['sums']:,} sums, {total['different']:,} different")
    return 1 if total["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
