"""Provide recorded matrix products, and draw random operands of every kind for fp4kit.matmul."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit import formats
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.units import Unit

DATA = Path(__file__).parents[1] / "data" / "matmul"
BF16 = ml_dtypes.bfloat16
_DTYPES = {
    "bf16": BF16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "f32": np.float32,
    "s8": np.int8,
    "u8": np.uint8,
    "f4": ml_dtypes.float4_e2m1fn,
    "f6": ml_dtypes.float6_e3m2fn,
}
_MX = {
    "e4m3": "mxfp8-te",
    "e5m2": "mxfp8-te-e5m2",
    "e2m1": "mxfp4-ocp",
    "e2m3": "mxfp6-torchao-floor-e2m3",
    "e3m2": "mxfp6-torchao-floor-e3m2",
}


class Recorded(NamedTuple):
    """A recorded matrix product: the arguments of fp4kit.matmul, and the recorded result.

    Attributes:
        name: the name of the product in its file.
        a, b: the operands, arrays or Quantized.
        unit: the unit to compute with.
        c: the array with which the sums begin, or None.
        d: the recorded result.
    """

    name: str
    a: Any
    b: Any
    unit: Unit
    c: np.ndarray | None
    d: np.ndarray


def recorded(file: str) -> Iterator[Recorded]:
    """Yield the matrix products recorded in a file of tests/data/matmul, sorted by name.

    Args:
        file: the name of the file without .npz, such as "h100".
    """
    with np.load(DATA / f"{file}.npz") as arrays:
        found = dict(arrays)
    for name in sorted({key.rpartition("/")[0] for key in found}):
        case = {key.rpartition("/")[2]: found[key] for key in found if key.startswith(f"{name}/")}
        kinds, unit = _kinds(name.partition("/")[0])
        operands = [_operand(kind, case[x], case.get(f"scale_{x}")) for kind, x in zip(kinds, "ab", strict=True)]
        yield Recorded(name, *operands, unit, case.get("c"), case["d"])


_CARDS = {"V100": "sm70", "A100": "sm80", "A2": "sm80", "L40S": "sm89", "Ada": "sm89"}
_CARDS |= {"H100": "sm90", "H200": "sm90", "B200": "sm100"}
_TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
_TYPES |= {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
_TYPES |= {"tf32": np.float32, "s8": np.int8, "u8": np.uint8}


def of_cards() -> Iterator[Recorded]:
    """Yield the sums that real GPUs returned. Published ones are a stack of products of one row and one column each."""
    with np.load(DATA / "silicon.npz") as arrays:
        found = dict(arrays)
    for name in sorted({key.rpartition("/")[0] for key in found}):
        card, (*kinds, last) = name.split("/")[0], name.split("/")[1].split("-")
        types = [kind for kind in (*kinds, last) if kind in _TYPES] * 2
        id = _CARDS[card.partition(" ")[0]]
        if id in ("sm90", "sm100") and (last == "f16" or (types[0][0] == "E" and (" " in card or card == "B200"))):
            id += "-mma"  # the published float32 sums of FP8 of the H100 and the H200 are those of sm90
        unit = fp4kit.unit(f"{id}-f16" if last == "f16" else id)
        if last == "sat":
            unit = replace(unit, int8=fp4kit.IntegerAdd(saturate=True))
        a, b = (found[f"{name}/{x}"].view(_TYPES[one]) for x, one in zip("ab", types[:2], strict=True))
        sums = np.float16 if last == "f16" else np.int32 if types[0] in ("s8", "u8") else np.float32
        c, d = (found[f"{name}/{x}"].view(sums) if f"{name}/{x}" in found else None for x in "cd")
        if " " not in card:
            a, b, c, d = a[:, None], b[:, None], None if c is None else c[:, None, None], d[:, None, None]
        yield Recorded(name, a, b, unit, c, d)


def of_cublas() -> Iterator[tuple[str, np.ndarray, np.ndarray, dict[str, Any], np.ndarray]]:
    """Yield the name, A, B, options of fp4kit.matmul, and the result of products that cuBLASLt computed on an H100."""
    sm90 = fp4kit.unit("sm90")
    types = {"tf32": np.float32, "f16": np.float16, "bf16": BF16, "int_mm": np.int8}
    with np.load(DATA / "cublas_h100.npz") as found:
        for name in sorted({key.rpartition("/")[0] for key in found}):
            operation, case = name.split("/")
            a, b = (found[f"{name}/{x}"].view(types.get(operation, _DTYPES["e4m3"])) for x in "ab")
            d = found[f"{name}/d"].view(types.get(operation, BF16)) if operation != "int_mm" else found[f"{name}/d"]
            options: dict[str, Any] = {"unit": sm90, "out_dtype": d.dtype}
            if operation == "tf32":
                a, b = rounded_to_tf32(a), rounded_to_tf32(b)
                options["unit"] = replace(sm90, promote=64 if case.endswith("1024") else 32)
            if operation.startswith("scaled"):
                options["unit"] = replace(sm90, promote=128) if operation.endswith("slow") else sm90
                options["alpha"] = (found[f"{name}/sa"][:, 0], found[f"{name}/sb"][0])
            yield name, a, b, options, d


def of_cublas_on_h200() -> Iterator[tuple[str, Any, Any, dict[str, Any], np.ndarray]]:
    """Yield what of_cublas yields, on an H200: FP8 with scales of blocks, and a K that the kernel splits."""
    sm90 = fp4kit.unit("sm90")
    types = {"tf32": np.float32, "f16": np.float16, "bf16": BF16, "s8": np.int8, "e4m3": _DTYPES["e4m3"]}
    with np.load(DATA / "cublas_h200.npz") as found:
        for name in sorted({key.rpartition("/")[0] for key in found}):
            what, size, *kinds = name.split("-")
            if what not in ("block", "split"):  # tests/quantized/test_sparse.py has the others
                continue
            a, b, d = (found[f"{name}/{x}"] for x in "abd")
            if what == "block":
                scales = (found[f"{name}/s{x}"].view(np.float32) for x in "ab")
                forms = ("128x128", "128") if size == "square" else ("128", size)
                recipes = [recipe_of(f"e4m3-{form}") for form in forms]
                operands = [quantized(r, x, None, s) for r, x, s in zip(recipes, (a, b), scales, strict=True)]
                yield name, *operands, {"unit": sm90}, d.view(np.float32)
            else:
                unit = replace(sm90, promote=int(size))
                d = d.view(BF16 if kinds[0] == "e4m3" else np.float32)
                yield name, a.view(types[kinds[0]]), b.view(types[kinds[0]]), {"unit": unit, "out_dtype": d.dtype}, d


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """Round finite float32 numbers to the 10 fraction bits of TF32, to nearest even, as cuBLAS does first."""
    bits = x.view(np.uint32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def of_tcgen05() -> Iterator[Recorded]:
    """Yield the result words of tcgen05.mma that a B200 returned, each with one row and one column.

    Operands of sparse products are cut to the elements of K that the metadata keep, and to the scales of these.
    """
    sm100 = fp4kit.unit("sm100")
    for word in json.loads((DATA / "tcgen05_b200.json").read_text()):
        kind, has_blocks, unit, operands = word["kind"], "scale" in word, sm100, []
        kept = _kept(word["sparse_metadata"], len(word["a"]), kind != "mxf8f6f4") if "sparse_metadata" in word else None
        for x in "ab":
            element, codes = word[f"{x}_format"], np.array([word[x]], np.uint32)
            codes = codes if kept is None else codes[:, kept]
            if kind == "bf16":
                codes = codes >> 16  # stored as float32, whose low bits the card drops
            if element in ("tf32", "s8", "u8"):
                size = np.uint32 if element == "tf32" else np.uint8
                operands.append(codes.astype(size).view(_TYPES[element]))
            elif element in ("bf16", "f16"):
                operands.append(codes.astype(np.uint16).view(_TYPES["bf16" if element == "bf16" else "fp16"]))
            elif not has_blocks:
                operands.append(_operand(element, codes.astype(np.uint8), None))
            else:
                form = f"mx-{element}" if kind == "mxf8f6f4" else "nvfp4" if word["scale"] == "ue4m3" else "mxfp4"
                form = "mxfp4-block16" if form == "mxfp4" and word["scale_vec"] == 4 else form
                block = 16 if word["scale_vec"] == 4 else 32
                scales = np.array([word[f"scale_{x}"][: codes.shape[1] // block]], np.uint8)
                operands.append(_operand(form, codes.astype(np.uint8), scales))
        if kind == "mxf8f6f4":
            unit = replace(sm100, fp4=None)  # this instruction multiplies E2M1 as the other MX formats
        if kind == "i8":
            unit = replace(sm100, int8=fp4kit.IntegerAdd(saturate=word["saturate"]))
        is_half = word.get("d_type") == "f16"
        unit = fp4kit.unit("sm100-f16") if is_half else unit
        bits, sums = (np.uint16, np.float16) if is_half else (np.uint32, np.int32 if kind == "i8" else np.float32)
        c, d = (np.array([[word[x]]], bits).view(sums) for x in "cd")
        yield Recorded(f"tcgen05 {word['name']}", *operands, unit, c, d)


def _kept(metadata: list[int], K: int, in_pairs: bool) -> np.ndarray:
    """Return the indices along K that a sparse operand keeps: two elements, or pairs of elements, of each four.

    metadata: words of 32 bits; each 4 bits, the lowest first, hold the two positions among the four.
    """
    size = 2 if in_pairs else 1
    nibbles = np.array([word >> shift & 15 for word in metadata for shift in range(0, 32, 4)][: K // (4 * size)])
    positions = 4 * np.arange(len(nibbles))[:, None] + np.stack([nibbles & 3, nibbles >> 2], -1)
    return (positions.reshape(-1, 1) * size + np.arange(size)).ravel()


def _kinds(case: str) -> tuple[list[str], Unit]:
    """Return the kinds of both operands, and the Unit, which the name of a recorded matrix product begins with.

    Kinds are names listed in KINDS, such as "nvfp4", "mx-e4m3" or "bf16".
    """
    if case.startswith("fp8-cublaslt"):
        sm90 = fp4kit.unit("sm90")
        return ["e4m3", "e4m3"], replace(sm90, promote=128) if "slow" in case else sm90
    *parts, unit = case.removeprefix("mx-").replace("bf16-mma", "bf16").split("-")
    if parts[0] in ("nvfp4", "mxfp4"):
        return ["-".join(parts)] * 2, fp4kit.unit(unit)
    if case.startswith("mx-"):
        u = fp4kit.unit(unit)
        return [f"mx-{part}" for part in parts], replace(u, fp4=None)  # E2M1 is multiplied as other MX formats, too
    return (parts * 2)[:2], fp4kit.unit(unit)


def _operand(kind: str, codes: np.ndarray, scales: np.ndarray | None) -> Any:
    """Return an operand of matmul from recorded codes, one per byte, and block scales.

    Args:
        kind: the name of a dtype, for an array without scales, or of a block format, for a Quantized.
        codes: the codes, one per byte.
        scales: the block scales as stored; None for an array without scales.
    """
    if kind in _DTYPES:
        return np.ascontiguousarray(codes).view(_DTYPES[kind])
    return quantized(recipe_of(kind), codes, scales)


def recipe_of(kind: str) -> Recipe:
    """Return a recipe for a kind of operand: "nvfp4", "mxfp4", "mxfp4-block16", "mx-<element>", or a plain element."""
    if kind == "nvfp4":
        return RECIPES["nvfp4-te"]
    if kind.startswith("mxfp4"):
        return replace(RECIPES["mxfp4-ocp"], block=(1, 16 if kind.endswith("16") else 32))
    if kind.endswith("128"):
        return RECIPES["fp8-deepgemm-block" if kind.endswith("x128") else "fp8-compressed-tensors-group"]
    if kind.startswith("mx-"):
        return RECIPES[_MX[kind.removeprefix("mx-")]]
    return replace(RECIPES["fp8-modelopt"], element=getattr(formats, kind.upper()), nan_code=None)


def quantized(r: Recipe, codes: np.ndarray, scales: np.ndarray | None, tensor_scale: Any = None) -> Quantized:
    """Return a Quantized of given codes, one per byte, and block scales. Its axis is the last one.

    Args:
        r: the recipe.
        codes: the codes, one per byte, of a matrix.
        scales: the block scales as stored; None if the recipe has no blocks.
        tensor_scale: a number; None takes 1 if the recipe has a tensor scale.
    """
    packed = fp4kit.pack(codes) if r.element.bits == 4 else codes
    if r.tensor_scaling != "none" and tensor_scale is None:
        tensor_scale = np.float32(1)
    tensor = None if tensor_scale is None else np.asarray(tensor_scale, np.float32)
    return Quantized(packed, scales, tensor, None, codes.shape, np.dtype(np.float32), codes.ndim - 1, r)


KINDS = (
    "e4m3-128",
    "e4m3-128x128",
    "nvfp4",
    "mxfp4",
    "mxfp4-block16",
    *(f"mx-{e}" for e in _MX),
    "e2m1",
    "e2m3",
    "e3m2",
    *_DTYPES,
)


def drawn(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    """Draw a random matmul operand of the given kind, which is a name in KINDS.

    In some calls the operand has any codes and scales, in others only ordinary numbers. Columns of Quantized operands
    may be zero.
    """
    wild = rng.random() < 0.4
    if kind in _DTYPES:
        dtype = np.dtype(_DTYPES[kind])
        if wild:
            bits = {"f4": 4, "f6": 6}.get(kind, 8 * dtype.itemsize)
            return rng.integers(0, 2**bits, shape).astype(f"u{dtype.itemsize}").view(dtype)
        if dtype.kind in "iu":
            return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)
    r = recipe_of(kind)
    codes = rng.integers(0, 2**r.element.bits, shape, np.uint8)
    if r.element.bits == 8:
        codes = codes if wild else rng.integers(0x20, 0x60, shape, np.uint8)
    codes[..., rng.random(shape[-1]) < rng.choice([0, 0.5, 1], p=[0.6, 0.3, 0.1])] = 0
    if r.tensor_scaling == "block":
        sizes = rng.random((*shape[:-1], shape[-1] // 128)) * 2.0 ** rng.integers(-60, 60)
        return quantized(r, codes, None, sizes.astype(np.float32))
    if r.scale is None:
        return quantized(r, codes, None, np.float32(rng.random() + 0.5))
    low, high = (0, 256) if wild else (0x20, 0x70) if r.scale.name == "E4M3" else (100, 150)
    scales = rng.integers(low, high, (*shape[:-1], shape[-1] // r.block_size), np.uint8)
    return quantized(r, codes, scales, None if r.tensor_scaling == "none" else np.float32(rng.random() + 0.5))


# (unit, kind of a, kind of b): every unit's way of adding, and every kind of operands.
PAIRS = [
    *((u, "nvfp4", "nvfp4") for u in ("sm100", "exact", "float64", "float32-blocks", "dequantized")),
    *((u, "mxfp4", "mxfp4") for u in ("sm100", "exact", "float64", "float32-blocks", "dequantized")),
    ("sm100", "mxfp4-block16", "mxfp4-block16"),
    *(("sm100", f"mx-{a}", f"mx-{b}") for a, b in (("e4m3", "e5m2"), ("e2m1", "e3m2"), ("e2m3", "e2m3"))),
    *(("sm100", a, b) for a, b in (("e2m1", "e4m3"), ("e3m2", "e2m3"), ("e4m3", "e5m2"))),
    *((u, "bf16", "bf16") for u in ("sm100", "sm90", "sm80", "cdna3", "exact", "float64", "dequantized")),
    *((u, "f16", "f16") for u in ("sm100", "sm90", "sm89", "sm75", "sm70", "cdna3")),
    *((u, "f16", "f16") for u in ("sm100-f16", "sm89-f16", "sm70-f16")),
    *((u, "f32", "f32") for u in ("sm100", "sm80", "exact", "float64")),
    *((u, "e4m3", "e5m2") for u in ("sm90", "sm89", "sm90-mma", "sm90-mma-f16", "sm89-f16", "exact")),
    *(("sm90", a, b) for a, b in (("s8", "s8"), ("u8", "s8"), ("u8", "u8"))),
    *(("sm100", a, b) for a, b in (("f4", "f6"), ("f4", "f4"))),
    ("sm100-f16", "e2m1", "e4m3"),
    *((u, "e4m3-128", b) for u, b in (("sm90", "e4m3-128"), ("sm90", "e4m3-128x128"), ("sm100", "e4m3-128x128"))),
    *(("cdna3", a, "e4m3fnuz") for a in ("e4m3fnuz", "e5m2fnuz")),
    ("exact", "f16", "bf16"),
    ("exact", "mx-e4m3", "nvfp4"),
]


def drawn_options(rng: np.random.Generator, unit: str) -> dict[str, Any]:
    """Draw random options of matmul: alpha, out_dtype, and the unit, in some draws with another promotion length."""
    u = fp4kit.unit(unit)
    if u.order is None and u.fp8_as is None and rng.random() < 0.3:
        u = replace(u, promote=int(rng.choice([128, 384])))
    alpha = None if rng.random() < 0.6 else float(rng.standard_normal())
    return {"unit": u, "alpha": alpha, "out_dtype": rng.choice([np.float32, np.float32, np.float16, BF16])}


def drawn_call(rng: np.random.Generator, pair: tuple[str, str, str], shape: tuple[int, int]) -> dict[str, Any]:
    """Draw the arguments c, unit, alpha and out_dtype of matmul for a pair of PAIRS and a shape (M, N)."""
    unit, left, _ = pair
    found = {"c": drawn_c(rng, shape), **drawn_options(rng, unit)}
    if left in ("s8", "u8"):
        c = None if found["c"] is None else rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        saturating = replace(fp4kit.unit(unit), int8=fp4kit.IntegerAdd(saturate=bool(rng.random() < 0.5)))
        return {"c": c, "unit": saturating}
    if unit.endswith("f16") and found["c"] is not None:
        with np.errstate(all="ignore"):
            found["c"] = found["c"].astype(np.float16)
    if left == "nvfp4" and found["unit"].fp4 and rng.random() < 0.4:
        found["unit"] = replace(found["unit"], fp4=replace(found["unit"].fp4, group=4))
    if left == "e4m3-128":
        found["unit"] = fp4kit.unit(unit)
    elif rng.random() < 0.25:
        found["alpha"] = tuple(rng.standard_normal(n).astype(np.float32) for n in shape)
    return found


def drawn_c(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
    """Draw the argument c of a matmul, an array of the given shape with which sums begin.

    Return None in some draws. The array has numbers of many sizes, and zeros, infinities and NaN.
    """
    if rng.random() < 0.4:
        return None
    c = (rng.standard_normal(shape) * 2.0 ** rng.integers(-rng.integers(1, 149), 60, shape)).astype(np.float32)
    c[rng.random(shape) < 0.1] = 0
    c[rng.random(shape) < 0.01] = rng.choice([np.inf, np.nan, -0.0, 3e38])
    return c


def as_quantized(x: Any) -> Any:
    """Return an operand in a form that CuPy, which has no float8 arrays, can hold.

    A float8, float6 or float4 array becomes a Quantized with the tensor scale 1. Other operands are returned unchanged.
    Return None for AMD's FNUZ formats, which no recipe has.
    """
    kind = str(getattr(x, "dtype", ""))
    if isinstance(x, Quantized) or kind[:7] not in ("float8_", "float6_", "float4_"):
        return x
    return None if "fnuz" in kind else quantized(recipe_of(kind[7:11]), x.view(np.uint8), None)


TINY = [
    ("sm100", "bf16"),
    ("sm90", "bf16"),
    ("cdna3", "bf16"),
    ("sm100", "mxfp4"),
    ("sm100", "mx-e4m3"),
    ("exact", "bf16"),
]


def tiny(kind: str) -> tuple[Any, Any]:
    """Return two operands, (40, 64) and (33, 64), in which the product of two elements is about 2^-128.

    Args:
        kind: the kind of both operands, as for `recipe_of`, or "bf16" for plain arrays.
    """
    rng = np.random.default_rng(8)
    x, y = (rng.standard_normal((n, 64)) * 2.0**-64 for n in (40, 33))
    if kind == "bf16":
        return x.astype(BF16), y.astype(BF16)
    r = recipe_of(kind)
    with np.errstate(all="ignore"):
        return fp4kit.quantize(x.astype(np.float32), r), fp4kit.quantize(y.astype(np.float32), r)


def far_apart(kind: str, rng: np.random.Generator) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Yield arguments a, b and c of matmul whose magnitudes differ so much that terms lose bits in the sum.

    Args:
        kind: the kind of a and b, one with block scales.
        rng: the source of random numbers.
    """
    a, b = (drawn(rng, kind, n, 192) for n in (33, 70))
    for sizes in (60, 20):
        c = (rng.standard_normal((33, 70)) * 2.0 ** rng.integers(-sizes, sizes, (33, 70))).astype(np.float32)
        for extreme in (None, 1, 126 if kind == "nvfp4" else 253):
            scales = a.block_scale.copy()
            if extreme is not None:
                scales[:, ::3] = extreme
            yield replace(a, block_scale=scales), b, c


def at_bounds(rng: np.random.Generator, spread: int) -> Iterator[tuple[Any, Any, np.ndarray | None]]:
    """Yield arguments (a, b, c) of matmul for which sums are near the bounds of the CPU engine's fast paths.

    The bounds are in matmul_vnni.h. c is None in some of the arguments.

    Args:
        spread: the difference between the largest and the smallest exponent of products of scales, at most 28 for E4M3
            scales. For E8M0 scales it is twice as large.
    """
    for kind, steps in (("nvfp4", 1), ("mxfp4-block16", 2)):
        low, high = _scales_of(kind, spread * steps)
        scales = [np.full((n, 8), high[side], np.uint8) for side, n in enumerate((8, 32))]
        scales[0][3::4, 1], scales[1][::16, 1] = low[0], low[1]
        largest = [np.full((n, 128), 7, np.uint8) for n in (8, 32)]
        any_codes = [rng.integers(0, 16, (n, 128), np.uint8) for n in (8, 32)]
        tiny_term = [np.zeros((n, 128), np.uint8) for n in (8, 32)]  # 1 * 1 in group 0, and 0.5 * -0.5 in group 1
        for codes, code in zip(tiny_term, (1, 9), strict=True):
            codes[:, 0], codes[:, 16] = 2, code
        exponents = [int(np.log2(float(x))) for x in (_value(kind, low), _value(kind, high))]
        for codes in (largest, any_codes, tiny_term):
            a, b = (quantized(recipe_of(kind), one, scale) for one, scale in zip(codes, scales, strict=True))
            yield a, b, None
            middle = (exponents[0] + 28 + exponents[1] - 12) // 2
            for exponent in (
                exponents[1] - 14,
                exponents[1] - 12,
                middle,
                *range(exponents[0] + 24, exponents[0] + 45, 4),
            ):
                size = 2.0 ** np.clip(exponent, -120, 120)
                signs = rng.choice([-1, 1], (8, 32)) * size
                yield a, b, (rng.uniform(1, 2, (8, 32)) * signs).astype(np.float32)
                yield a, b, signs.astype(np.float32)


def _scales_of(kind: str, spread: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return two pairs of scale codes (for a, for b): a small pair, and a pair whose exponents sum to `spread` more.

    kind: the kind of both operands; "nvfp4" has E4M3 scales, any other E8M0 scales.
    """
    first = spread // 2
    if kind == "nvfp4":  # code = exponent field << 3 | 7, which is 1.875 * 2^(field - 7)
        return (15, 15), ((1 + first) << 3 | 7, (1 + spread - first) << 3 | 7)
    return (110, 110), (110 + first, 110 + spread - first)


def _value(kind: str, codes: tuple[int, int]) -> float:
    """Decode two block scale codes for a kind of operands, and return the product of the two scales."""
    scale = recipe_of(kind).scale
    assert scale is not None
    return float(scale.values[codes[0]]) * float(scale.values[codes[1]])
