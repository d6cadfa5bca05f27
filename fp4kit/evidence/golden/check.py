"""Compare recipes with recorded outputs of producers (libraries that quantize), bit for bit, and with one another.

A row (GoldenRow) says which recorded outputs a recipe must equal; a case is one input of a row. A row may excuse
differences by `skip` and `inputs`. The sign of a NaN is not compared, because no producer keeps it stable.
fp4kit/evidence/recorded/README.md lists and explains the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.inputs import torch_words
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import ROWS, GoldenRow
from fp4kit.evidence.testing import SPECIFICATION, ComparedEngine, differing
from fp4kit.formats import E8M0
from fp4kit.layouts import pack, pack_gguf, pack_mlx, unpack, unpack_gguf
from fp4kit.ops.amax import amax as op_amax
from fp4kit.ops.amax import search_scales
from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import dequantize, fake_quantize, fake_quantize_backward, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, recipe
from fp4kit.reference.arith import ONE
from fp4kit.reference.ascend import CHOICES, Scaled, msmodelslim_ceil_x, scaled_msmodelslim
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import block_amax, decode
from fp4kit.reference.search import ceil_x_constant
from fp4kit.reference.tensor_rules import tensor_scale

# ("file: key", fp4kit's array, recorded array, mask of elements that are not compared)
Compared = tuple[str, Any, Any, Any]


class ArrayDifference(NamedTuple):
    """A recorded array that differs from fp4kit's result: its key, how many of its elements differ, and its size."""

    key: str
    differing: int
    size: int


class GoldenResult(NamedTuple):
    """The result of comparing the recorded arrays for a recipe or a GoldenRow.

    Attributes:
        recipe: id of the recipe.
        compared: number of arrays compared.
        differences: the arrays that differ.
        values: number of values in all compared arrays, excused elements included.
    """

    recipe: str
    compared: int
    differences: tuple[ArrayDifference, ...]
    values: int

    @property
    def equal(self) -> int:
        """Return the number of compared arrays without a difference."""
        return self.compared - len(self.differences)


def result_of(recipe: str, arrays: Iterable[Compared]) -> GoldenResult:
    """Compare arrays and return the GoldenResult."""
    compared, values, differences = 0, 0, []
    for key, ours, recorded, skip in arrays:
        compared, values = compared + 1, values + np.size(recorded)
        different = np.ones(recorded.shape, bool)
        if ours.shape == recorded.shape:
            different = (differing(ours, recorded) if ours.dtype == recorded.dtype else different) & ~skip
        if different.any():
            differences.append(ArrayDifference(key, int(different.sum()), different.size))
    return GoldenResult(recipe, compared, tuple(differences), values)


# ---- inputs of rows ----


@dataclass
class RecordedCase:
    """One input of a GoldenRow, the producer's recorded outputs for it, and the recipe that must give these outputs.

    ``q`` is the result of the engine's quantize, once the case is compared.
    """

    row: GoldenRow
    golden: GoldenSet
    name: str
    recipe: Recipe
    x: np.ndarray
    engine: ComparedEngine = SPECIFICATION
    q: Any = None

    def key(self, part: str) -> str:
        """Return the key under which the file stores the recorded array ``part``: <input>/<variant>/<part>."""
        return f"{self.name}/{self.row.variant}/{part}"

    def compared(self, part: str, ours: Any, recorded: Any, skip: Any = np.False_) -> Compared:
        """Return what is compared for the recorded array ``part``."""
        return f"{self.row.file}: {self.key(part)}", ours, recorded, skip

    def part(self, part: str) -> np.ndarray | None:
        """Return the recorded array named ``part``, or None if it was not recorded."""
        places = [(self.row.file, self.key(part))]
        if not self.row.on_cpu:
            places.insert(0, (f"{self.row.file.removesuffix('_fake')}_h200", self.key(part)))
        if self.row.on_gpu:
            places.insert(0, ("producers_h200", f"{self.name}/{self.row.on_gpu}/{part}"))
        for file, key in places:
            if key in self.golden.keys(file):
                array = self.golden.get(file, key)
                array = array.reshape(len(self.x), -1) if self.row.window else array
                return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
        return None

    def recorded_codes(self) -> np.ndarray | None:
        """Return the recorded codes in fp4kit's nibble order, or None if none were recorded."""
        codes, high_first = self.part("codes"), self.part("codes_hi_first")
        return codes if high_first is None else (high_first << 4 | high_first >> 4).astype(np.uint8)

    def global_scale(self) -> np.ndarray:
        """Return the recorded array "global_scale" of MLX, which is an amax."""
        own = self.part("global_scale")
        key = f"{self.name}/{self.row.variant.removesuffix('_metal')}/global_scale"
        return self.golden.get(self.row.file, key) if own is None else own

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the call of quantize or fake_quantize in this case.

        An amax that was not recorded or holds NaN is left out, so that the call computes it.
        """
        options = dict(self.row.options)
        if self.row.torch_seed is not None:
            words = torch_words(self.row.torch_seed, self.x.size).reshape(self.x.shape)
            bits = self.row.torch_bits[str(self.x.dtype)]
            numbers = (words & (2**bits - 1)).astype(np.float32) * np.float32(2.0**-bits)
            options |= {"rounding": "stochastic", "seed": numbers}
        amax = self.part("global_amax") if self.part("global_amax") is not None else self.part("amax")
        amax = self.global_scale() if self.row.given_amaxes == "global_scale" else amax
        given = {"tensor_amax": amax if self.row.given_amaxes else None}
        given["block_amax"] = self.part("block_amax") if self.row.given_amaxes == "static" else None
        for name, value in given.items():
            if value is not None and not np.isnan(value.astype(np.float32)).any():
                options[name] = value.astype(np.float32)
        return options

    def per_element(self, by_block: np.ndarray) -> np.ndarray:
        return np.repeat(by_block, self.recipe.block_size, axis=1)

    def block_amax(self, size: int = 0) -> np.ndarray:
        """Return, for each element of x, the largest magnitude of its block of one row, as float32."""
        size = size or self.recipe.block_size
        x = np.abs(self.x.astype(np.float32))
        return np.repeat(np.max(x.reshape(len(x), -1, size), axis=-1), size, axis=1)

    def block_scales(self) -> np.ndarray:
        """Return the values of the block scales of q."""
        return decode(self.q.block_scale, self.recipe.scale or E8M0)


def cases(row: GoldenRow, golden: GoldenSet, engine: ComparedEngine = SPECIFICATION) -> Iterator[RecordedCase]:
    """Yield a RecordedCase for each input that the golden set has recorded outputs for, in the variant of a row."""
    r = recipe(row.recipe)
    r = r if row.block is None else replace(r, block=row.block)
    for name in golden.variants(row.file).get(row.variant, ()):
        x = golden.input(name, row.file)
        if row.window:
            x = np.ascontiguousarray(x.T if row.variant.endswith("_T") else x).reshape(-1, row.window)
        if row.takes(name, x.size):
            yield RecordedCase(row, golden, name, r, x.astype(np.float32) if row.widen else x, engine)


# ---- exceptions: each function returns a mask of the elements of x that are excused ----


def _uncertain(case: RecordedCase) -> np.ndarray:
    """Blocks whose codes depend on how the GPU instruction rcp.approx rounds."""
    certain = case.part("codes_certain")
    if certain is None:
        return np.zeros(case.x.shape, bool)
    return np.repeat(certain != 1, case.x.shape[1] // certain.shape[1], axis=1)


def _cpu_only_rows(case: RecordedCase) -> np.ndarray:
    """Rows of fp8-modelopt-channel whose result differs between a CPU and a GPU."""
    cpu_only = case.recipe.id == "fp8-modelopt-channel" and case.part("amax") is None
    amax = np.max(np.abs(case.x.astype(np.float32)), axis=1, keepdims=True)
    differs = np.float32(448) / amax != np.float32(1) / amax * np.float32(448)
    return np.broadcast_to(cpu_only & differs, case.x.shape)


def _nonfinite_tensor(case: RecordedCase) -> np.ndarray:
    """All elements of a fouroversix tensor with inf or NaN, in two cases."""
    undecided = case.x.dtype == np.float32 or (case.recipe.keep_infinity and case.recipe.block_rows > 1)
    return np.full(case.x.shape, undecided and not np.isfinite(case.block_amax()).all())


def _infinite_quotient(case: RecordedCase) -> np.ndarray:
    """Elements that Quark turns into infinities."""
    scale = case.part("global_scale")
    if scale is None or not np.isfinite(scale).all():
        return np.ones(case.x.shape, bool)
    return case.per_element(case.block_scales() == 0) & (np.abs(case.x.astype(np.float64)) * 2.0**23 >= 2.0**128)


def _applied_scale(case: RecordedCase) -> np.ndarray:
    """Blocks with inf or NaN, and blocks that Quark did not scale by the stored scale."""
    skip, applied = ~np.isfinite(case.block_amax()), case.part("scale_applied")
    if applied is None:
        return skip
    return skip | case.per_element(applied != decode(case.part("scales"), case.recipe.scale or E8M0))


SKIPS: dict[str, Callable[[RecordedCase], np.ndarray]] = {
    "nan_scale": lambda case: case.per_element(np.isnan(case.block_scales())),  # their codes have no meaning
    "overflowing_scale": lambda case: case.per_element(np.isnan(case.block_scales())),
    "nan_value": lambda case: case.per_element(np.isnan(case.block_scales() * case.q.tensor_scale)),
    "nonfinite_block": lambda case: ~np.isfinite(case.block_amax()),
    # compressed-tensors rounds the amax to a power of two that the dtype of x cannot hold
    "overflowing_block": lambda case: ~(case.block_amax() < 1.75 * 2.0 ** (15 if case.x.dtype == np.float16 else 127)),
    "uncertain": _uncertain,
    # NaN elements, for which the producer reads an uninitialized variable
    "undefined": lambda case: np.zeros(case.x.shape, bool) if (valid := case.part("valid")) is None else ~valid,
    "cpu_only_rows": _cpu_only_rows,
    "nonfinite_tensor": _nonfinite_tensor,
    # blocks whose scale was recorded as 0xFF from fouroversix's IF4
    "signed_nan": lambda case: case.per_element(_crop(case.part("scales"), case.q.block_scale) == 0xFF),
    "nan_element": lambda case: ~np.isfinite(case.x.astype(np.float32)),
    "infinite_quotient": _infinite_quotient,
    "applied_scale": _applied_scale,
    "flushed_block": lambda case: case.block_amax() < 2.0**-124,
    "nonfinite_group": lambda case: ~np.isfinite(case.block_amax(32)),
    # rows whose scale is 0, where FlashInfer divides by 0
    "zero_row": lambda case: np.broadcast_to(case.q.tensor_scale.reshape(-1, 1) == 0, case.x.shape),
}
# Names of exceptions that excuse differences in block scales as well as in codes.
SKIPPED_SCALES = ("overflowing_scale", "nonfinite_block", "overflowing_block", "nonfinite_tensor", "zero_row")


def _skipped(case: RecordedCase, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return SKIPS[case.row.skip](case) if case.row.skip else np.zeros(shape, bool)


# ---- the comparison ----


def check_recipe(name: str, golden: GoldenSet, engine: ComparedEngine = SPECIFICATION) -> GoldenResult:
    """Compare all recorded arrays of a recipe with the results of an engine, and return counts and differences."""
    rows = chain.from_iterable(row_arrays(row, golden, engine) for row in ROWS if row.recipe == name)
    return result_of(name, chain(rows, byte_arrays(name, golden, engine)))


def row_arrays(row: GoldenRow, golden: GoldenSet, engine: ComparedEngine) -> Iterator[Compared]:
    """Yield what is compared for every recorded array of a GoldenRow."""
    arrays = _searched_arrays if row.searched else _fake_arrays if row.fake else _arrays
    return (compared for case in cases(row, golden, engine) for compared in arrays(case))


def _arrays(case: RecordedCase) -> Iterator[Compared]:
    """Quantize a case, and yield one item per recorded array: codes, scales, amaxes and stored bytes."""
    case.q = case.engine.call(quantize, case.x, case.recipe, **case.arguments())
    skip = _skipped(case, case.q.moved_shape)
    codes, scales, turned = case.recorded_codes(), case.part("scales"), case.row.columnwise_in_place
    if codes is not None:
        yield case.compared("codes", *_element_codes(case, codes), skip.T if turned else skip)
    if scales is not None:
        ours = case.q.block_scale.T if turned else case.q.block_scale
        by_block = skip[:, :: case.recipe.block_size] if case.row.skip in SKIPPED_SCALES else np.False_
        found = _unsign_nan(np.maximum(ours, np.uint8(case.row.min_scale)), case.recipe.scale)
        yield case.compared("scales", found, _unsign_nan(_crop(scales, ours), case.recipe.scale), by_block)
    yield from _tensor_arrays(case)
    yield from _stored_arrays(case, skip)


def _element_codes(case: RecordedCase, recorded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (fp4kit's codes, recorded codes) of a case, one code per element, with the sign of NaN codes removed."""
    if case.recipe.element.packing.codes > 1:
        return unpack(case.q.packed), unpack(recorded)
    ours = case.q.packed.T if case.row.columnwise_in_place else case.q.packed
    if case.recipe.element.bits == 6 and recorded.shape != ours.shape:
        recorded = unpack_fp6(recorded)
    return _unsign_nan(ours, case.recipe.element), _unsign_nan(recorded, case.recipe.element)


_DECODE_SCALES = (
    "modelopt",
    "ao",
    "quark",
    "comfy_kitchen",
    "jax",
    "jax_gpu",
    "nncf",
)  # global_scale multiplies values


def _tensor_arrays(case: RecordedCase) -> Iterator[Compared]:
    """Yield one item per recorded array of a case: the tensor amax, tensor scales and block amaxes."""
    amax, scale, block = case.part("global_amax"), case.part("global_scale"), case.part("block_amax")
    own, given = case.q.tensor_amax, case.row.given_amaxes
    if (windows := case.part("window_amax")) is not None:
        yield case.compared("window_amax", own.reshape(-1), windows.reshape(-1))
    if amax is not None and not given:
        yield case.compared("global_amax", np.maximum(own, np.float32(case.row.min_amax)).reshape(-1), amax.reshape(-1))
    if scale is not None and given == "global_scale":
        yield case.compared("global_scale", own.reshape(-1), scale)
    elif scale is not None and own is not None:
        both = tensor_scale(own, case.recipe, case.x.dtype)
        ours = both.decode if case.row.file in _DECODE_SCALES else both.encode
        yield case.compared("global_scale", ours.reshape(-1), scale.reshape(-1))
    for part in ("token_scale", "dual_scale", "tensor_scale"):
        if (found := case.part(part)) is not None:
            yield case.compared(part, case.q.tensor_scale, found.reshape(case.q.tensor_scale.shape))
    if block is not None and not given:
        yield case.compared("block_amax", case.engine.call(op_amax, case.x, case.recipe), block)


RAW: dict[str, Callable[[Any], np.ndarray]] = {  # {GoldenRow.raw: function from a Quantized to its stored bytes}
    "gguf_mxfp4": lambda q: pack_gguf(q.packed, q.block_scale, "mxfp4"),
    "gguf_nvfp4": lambda q: pack_gguf(q.packed, q.block_scale, "nvfp4"),
    "mlx": lambda q: pack_mlx(q.packed),
}
# {recorded part with decoded values: the decode rule that gives them; None for that of the recipe}
DECODED = {"dequant": None, "dequant_i32": "fouroversix_float32"}


def _stored_arrays(case: RecordedCase, skip: np.ndarray) -> Iterator[Compared]:
    """Yield items to compare: stored bytes, decoded values, and arrays that the producer does not store."""
    raw = case.part("raw")
    if case.row.raw and raw is not None:
        yield case.compared("raw", RAW[case.row.raw](case.q), raw)
    for part, rule in DECODED.items() if case.row.decoded else ():
        if (values := case.part(part)) is not None:
            q = replace(case.q, recipe=replace(case.recipe, decode_rule=rule)) if rule else case.q
            yield case.compared(part, case.engine.call(dequantize, q, values.dtype), values, skip)
    for part in ("scale_applied", "scale"):
        if (applied := case.part(part)) is not None:
            has_blocks = case.recipe.block_rule is not None
            ours = _applied_scales(case.x, case.recipe) if has_blocks else case.q.tensor_scale.reshape(applied.shape)
            with np.errstate(over="ignore"):
                ours = ours.astype(applied.dtype)
            yield case.compared(part, ours, applied)
    values = case.part("values")
    if (exponent := case.part("exponent")) is not None:
        found = _scaled(case)
        yield case.compared("exponent", found.exponent.astype(exponent.dtype), exponent)
        if values is not None and case.recipe.element.bits == 8:
            yield case.compared("values", found.values.reshape(values.shape).astype(values.dtype), values)
            return
    if values is not None:
        # NaN values are not compared, because E2M1 has no code for NaN.
        yield case.compared("values", decode(unpack(case.q.packed), case.recipe.element), values, np.isnan(values))


def _scaled(case: RecordedCase) -> Scaled:
    """Return the exponents and values that msmodelslim computes for a case. Its codes and bytes hold fewer of them."""
    r, x = case.recipe, case.x.astype(np.float32)
    with np.errstate(all="ignore"):
        if r.levels:
            x = x / np.repeat(case.q.tensor_scale, r.tensor_columns, 1)[:, : x.shape[1]]
        blocks, dtype = x.reshape(len(x), -1, r.block_size), np.dtype(np.float32) if r.levels else case.x.dtype
        if r.search in CHOICES:
            return CHOICES[r.search](blocks, np.abs(blocks).max(-1), r, dtype)
        if r.search:
            constant, amaxes = ceil_x_constant(case.x, r)
            return msmodelslim_ceil_x(blocks, amaxes, r, dtype, constant)
        return scaled_msmodelslim(blocks, r, dtype)


def _searched_arrays(case: RecordedCase) -> Iterator[Compared]:
    """Yield items to compare: the block amaxes that search_scales chooses, and the tensor amax."""
    amax, key = case.part("global_amax"), f"hessian_{case.x.shape[-1]}"
    terms = {"hessian": case.golden.get(case.row.file, key)} if case.row.searched == "by hessian" else {}
    if amax is not None:
        yield case.compared("global_amax", case.engine.call(op_amax, case.x), amax)
    ours = case.engine.call(search_scales, case.x, case.recipe, **terms)
    yield case.compared("block_amax", ours, case.part("block_amax"))


def _fake_arrays(case: RecordedCase) -> Iterator[Compared]:
    """Yield one item for each recorded result of fake_quantize, and for the recorded gradient."""
    arguments, skip = case.arguments(), _skipped(case, case.x.shape)
    for name in case.row.values:
        if (output := case.part(name)) is not None:
            y = case.engine.call(fake_quantize, case.x, case.recipe, **arguments)
            yield case.compared(name, y.astype(output.dtype), output, skip)
    gradient = case.part("grad_clip")
    if gradient is not None:
        upstream = case.golden.get(case.row.file, f"{case.name}/upstream/grad_out")
        upstream = upstream.view(ml_dtypes.bfloat16) if upstream.dtype == np.uint16 else upstream
        options = {"amax": arguments.get("tensor_amax"), "pass_through": False}
        ours = case.engine.call(fake_quantize_backward, upstream, case.x, case.recipe, **options)
        yield case.compared("grad_clip", ours, gradient)


@np.errstate(all="ignore")
def _applied_scales(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the scales that a recipe divides the elements of a matrix x by: float32 (rows, blocks)."""
    amax, tensor = block_amax(x.astype(np.float32), r), tensor_scale(None, r, x.dtype)
    rule = BLOCK_RULES[r.block_rule or ""]
    factor = rule.factor(rule.code(amax, tensor, r, x.dtype), amax, tensor, r, x.dtype)
    return factor if r.apply == "divide" else ONE / factor


def unpack_fp6(packed: np.ndarray) -> np.ndarray:
    """Return uint8 codes from rows of 6-bit codes, of which 4 are stored in 3 bytes, little-endian."""
    b = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    codes = word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63
    return codes.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def _crop(recorded: Any, ours: np.ndarray) -> np.ndarray:
    """Return the recorded scales in the shape of ``ours``, fp4kit's scales."""
    if recorded.size == ours.size:
        return recorded.reshape(ours.shape)
    return recorded[: ours.shape[0], : ours.shape[1]]


def _unsign_nan(codes: np.ndarray, fmt: Any) -> np.ndarray:
    """Return codes of the format ``fmt`` in which every NaN is replaced by fmt.nan_code, the NaN without a sign."""
    return np.where(np.isnan(decode(codes, fmt)), np.uint8(fmt.nan_code), codes)


# ---- arrays that producers computed from codes and scales alone ----

_TYPES = {"dequant": np.float32, "dequant_bf16": ml_dtypes.bfloat16, "dequant_f16": np.float16}
# {recipe: (file, variant with the decoded values of all codes with all scales, variants with blocks of GGUF files)}
BYTES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mxfp4-gguf": ("gguf", "mxfp4", ("mxfp4_python", "repack_mxfp4")),
    "nvfp4-gguf": ("gguf", "nvfp4", ("repack_nvfp4",)),
    **{f"{name}-mlx-cpu": ("mlx", name, ()) for name in ("mxfp4", "nvfp4", "mxfp8")},
}


def byte_arrays(id: str, golden: GoldenSet, engine: ComparedEngine) -> Iterator[Compared]:
    """Yield what is compared for the recorded arrays that a producer computed from codes and scales alone."""
    if id not in BYTES:
        return
    file, variant, blocks = BYTES[id]
    for part, dtype in _TYPES.items():
        key = f"all_bytes/{variant}/{part}"
        if key in golden.keys(file):
            recorded, q = golden.get(file, key), all_bytes(recipe(id), np.dtype(dtype))
            ours = engine.call(dequantize, q, np.dtype(dtype))[:, : recorded.shape[1]]
            yield f"{file}: {key}", ours, recorded.view(dtype), np.False_
    for key in golden.keys(file):
        head, _, part = key.rpartition("/")
        name = head.rpartition("/")[2]
        if part != "raw" or name not in blocks:
            continue
        raw, codes, scales = (golden.get(file, f"{head}/{each}") for each in ("raw", "codes", "scales"))
        yield f"{file}: {key}", pack_gguf(codes, scales, variant), raw, np.False_
        if name.startswith("repack_"):  # other variants are compared with the results of quantize
            for each, ours, recorded in zip(
                ("codes", "scales"), unpack_gguf(raw, variant), (codes, scales), strict=True
            ):
                yield f"{file}: {head}/{each}", ours, recorded, np.False_


def all_bytes(r: Recipe, dtype: np.dtype) -> Quantized:
    """Return a Quantized of 256 rows that pairs every element code with every scale code, to test decoding."""
    count = 2**r.element.bits
    length = max(count, r.block_size)
    codes = np.ascontiguousarray(np.broadcast_to(np.arange(length) % count, (256, length)).astype(np.uint8))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], length // r.block_size, axis=1)
    tensor_scale = None if r.tensor_rule is None else np.float32(1)
    return Quantized(pack(codes) if r.is_packed else codes, scales, tensor_scale, None, codes.shape, dtype, -1, r)


# ---- agreement of recipes on ordinary data: finite, without -0 and subnormals ----

COLUMNS = ("input", "recipes that give the same codes and block scales")
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def ordinary_data(dtype: Any) -> list[np.ndarray]:
    """Return the five arrays that recipes are compared on: weights, normal values, heavy tails, wide ranges and
    ties.
    """
    rng = np.random.default_rng(20)
    shape = (256, 512)
    normal = rng.standard_normal(shape)
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    arrays = (normal * 0.02, normal, rng.standard_t(2, shape).clip(-1e3, 1e3), wide)
    steps = 2.0 ** -rng.integers(0, 6, shape) * rng.integers(1, 13, shape) / 4  # full of ties
    smallest = 2.0**-13
    return [np.where(np.abs(a) < smallest, smallest, a).astype(dtype) for a in (*arrays, steps)]


@cache
def agreeing(dtype: Any) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more recipe ids that give equal codes and block scales on ordinary_data(dtype)."""
    data = ordinary_data(dtype)
    with specification():
        return tuple(_agreeing(data))


def _agreeing(data: list[np.ndarray]) -> Iterator[tuple[str, ...]]:
    """Yield groups of two or more recipe ids that give the same bytes on all arrays of ``data``."""
    groups = [[r for r in RECIPES.values() if not (r.fake_only or r.stochastic_only or r.scale is None or r.search)]]
    order = {r.id: i for i, r in enumerate(groups[0])}
    for x in data:
        groups = [part for group in groups for part in _parts(group, x) if len(part) > 1]
    yield from sorted((tuple(r.id for r in group) for group in groups), key=lambda ids: order[ids[0]])


def _parts(group: list[Recipe], x: np.ndarray) -> list[list[Recipe]]:
    """Split a group of recipes into groups that give equal codes and block scales for ``x``."""
    found: dict[bytes, list[Recipe]] = {}
    for r in group:
        q = quantize(x, r)
        found.setdefault(q.packed.tobytes() + q.block_scale.tobytes(), []).append(r)
    return list(found.values())


def agreement_rows() -> list[tuple[str, ...]]:
    """Return the rows of a table with the header COLUMNS, one per group of recipes that give equal bytes."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, dtype in DTYPES.items():
        for group in agreeing(dtype):
            found.setdefault(group, []).append(name)
    return [(", ".join(names), " = ".join(group)) for group, names in found.items()]
