"""Compare recipes with recorded outputs of producers (libraries that quantize), bit for bit. A row (GoldenRow) says
which recorded outputs a recipe must equal. A case (RecordedCase) is one input of a row. A part is one recorded array of
a case, such as "codes". A mask is a bool array in the shape of the input, True for excused elements: they may differ.

`fp4kit recipes --check` prints the result; the tests assert it.

By default the results of the specification are compared. `fp4kit selftest` passes the EngineOperations of another
engine instead. Every array is compared bit for bit, with two exceptions. A row may excuse differences by `skip` and
`inputs`. The sign bit of a NaN is not compared, because no producer keeps it stable. fp4kit/evidence/recorded/README.md
lists and explains the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.inputs import torch_words
from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import ROWS, GoldenRow
from fp4kit.formats import E8M0, bit_patterns
from fp4kit.layouts import pack, pack_gguf, pack_mlx, unpack, unpack_gguf
from fp4kit.ops.amax import amax as op_amax
from fp4kit.ops.amax import search_scales
from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import dequantize, fake_quantize, fake_quantize_backward, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, recipe
from fp4kit.reference.arith import ONE
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import block_amax, decode
from fp4kit.reference.tensor_rules import tensor_scale

# (key, fp4kit's array, recorded array, mask of elements that are not compared)
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


def result_of(recipe: str, arrays: Iterable[tuple[str, Compared]]) -> GoldenResult:
    """Compare arrays and return the GoldenResult."""
    compared, values, differences = 0, 0, []
    for file, (key, ours, recorded, skip) in arrays:
        compared, values = compared + 1, values + np.size(recorded)
        different = _differs(ours, recorded)
        if np.shape(ours) == np.shape(recorded):
            different &= ~skip
        if different.any():
            differences.append(ArrayDifference(f"{file}: {key}", int(different.sum()), different.size))
    return GoldenResult(recipe, compared, tuple(differences), values)


def _differs(ours: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return a mask, in the shape of ``recorded``, of the elements whose bits differ in two arrays."""
    if ours.shape != recorded.shape or ours.dtype != recorded.dtype:
        return np.ones(recorded.shape, bool)
    bits = bit_patterns(ours) != bit_patterns(recorded)
    if ours.dtype == np.uint8:
        return bits
    return bits & ~(np.isnan(ours.astype(np.float32)) & np.isnan(recorded.astype(np.float32)))


_TYPES = {"dequant": np.float32, "dequant_bf16": ml_dtypes.bfloat16, "dequant_f16": np.float16}


class Bytes(NamedTuple):
    """The recorded arrays for a recipe that a producer computed from codes and scales, without input values.

    Attributes:
        recipe: id of the recipe.
        file: file of the golden set.
        variant: variant with the decoded values of all codes with all scales.
        blocks: variants with blocks as stored in GGUF files.
    """

    recipe: str
    file: str
    variant: str
    blocks: tuple[str, ...] = ()


BYTES = (
    Bytes("mxfp4-gguf", "gguf", "mxfp4", ("mxfp4_python", "repack_mxfp4")),
    Bytes("nvfp4-gguf", "gguf", "nvfp4", ("repack_nvfp4",)),
    *(Bytes(f"{name}-mlx-cpu", "mlx", name) for name in ("mxfp4", "nvfp4", "mxfp8")),
)


def byte_arrays(name: str, golden: GoldenSet, dequantize: Callable[..., Any]) -> Iterator[tuple[str, Compared]]:
    """Yield (file, item) for each recorded array that was computed from codes and scales of the recipe ``name``."""
    for each in BYTES:
        if each.recipe == name:
            for key, ours, recorded in (*_values(each, golden, dequantize), *_blocks(each, golden)):
                yield each.file, (key, ours, recorded, np.False_)


def _values(each: Bytes, golden: GoldenSet, dequantize: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, fp4kit's values, recorded values) for all codes with all scales, one tuple per recorded dtype."""
    for part, dtype in _TYPES.items():
        key = f"all_bytes/{each.variant}/{part}"
        if key in golden.keys(each.file):
            recorded = golden.get(each.file, key)
            ours = dequantize(all_bytes(recipe(each.recipe), np.dtype(dtype)), np.dtype(dtype))[:, : recorded.shape[1]]
            yield key, ours, recorded.view(dtype)


def _blocks(each: Bytes, golden: GoldenSet) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, fp4kit's array, recorded array) for blocks as stored in GGUF files."""
    for key in golden.keys(each.file):
        head, _, part = key.rpartition("/")
        variant = head.rpartition("/")[2]
        if part != "raw" or variant not in each.blocks:
            continue
        raw, codes, scales = (golden.get(each.file, f"{head}/{name}") for name in ("raw", "codes", "scales"))
        yield key, pack_gguf(codes, scales, each.variant), raw
        if variant.startswith("repack_"):  # other variants are compared with the results of quantize
            ours = unpack_gguf(raw, each.variant)
            yield from ((f"{head}/codes", ours[0], codes), (f"{head}/scales", ours[1], scales))


def all_bytes(r: Recipe, dtype: np.dtype) -> Quantized:
    """Return a Quantized of 256 rows that pairs every element code with every scale code, to test decoding."""
    count = 2**r.element.bits
    length = max(count, r.block_size)
    codes = np.ascontiguousarray(np.broadcast_to(np.arange(length) % count, (256, length)).astype(np.uint8))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], length // r.block_size, axis=1)
    tensor_scale = None if r.tensor_rule is None else np.float32(1)
    return Quantized(pack(codes) if r.is_packed else codes, scales, tensor_scale, None, codes.shape, dtype, -1, r)


RAW: dict[str, Callable[[Any], np.ndarray]] = {  # {GoldenRow.raw: function from a Quantized to its stored bytes}
    "gguf_mxfp4": lambda q: pack_gguf(q.packed, q.block_scale, "mxfp4"),
    "gguf_nvfp4": lambda q: pack_gguf(q.packed, q.block_scale, "nvfp4"),
    "mlx": lambda q: pack_mlx(q.packed),
}

# {recorded part with decoded values: the decode rule that gives them; None for that of the recipe}
DECODED = {"dequant": None, "dequant_i32": "fouroversix_float32"}


def stored_arrays(case: Any, skip: np.ndarray) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield items to compare for a RecordedCase: stored bytes, decoded values, and arrays that are not stored."""
    raw = case.part("raw")
    if case.row.raw and raw is not None:
        yield case.key("raw"), RAW[case.row.raw](case.q), raw, np.False_
    for part, rule in DECODED.items() if case.row.decoded else ():
        if (values := case.part(part)) is not None:
            q = replace(case.q, recipe=replace(case.recipe, decode_rule=rule)) if rule else case.q
            yield case.key(part), case.ops.dequantize(q, values.dtype), values, skip
    yield from _unstored_arrays(case)


def searched_arrays(case: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield items to compare for a RecordedCase: the block amaxes that search_scales chooses, and the tensor amax."""
    amax, key = case.part("global_amax"), f"hessian_{case.x.shape[-1]}"
    terms = {"hessian": case.golden.get(case.row.file, key)} if case.row.searched == "by hessian" else {}
    if amax is not None:
        yield case.key("global_amax"), case.ops.amax(case.x), amax, np.False_
    yield (
        case.key("block_amax"),
        case.ops.search_scales(case.x, case.recipe, **terms),
        case.part("block_amax"),
        np.False_,
    )


def _unstored_arrays(case: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield items to compare for arrays of a RecordedCase that the producer computed but does not store."""
    for part in ("scale_applied", "scale"):
        if (applied := case.part(part)) is not None:
            has_blocks = case.recipe.block_rule is not None
            ours = applied_scales(case.x, case.recipe) if has_blocks else case.q.tensor_scale.reshape(-1)
            yield case.key(part), ours, applied, np.False_
    if (values := case.part("values")) is not None:
        # NaN values are not compared, because E2M1 has no code for NaN.
        yield (
            case.key("values"),
            decode(unpack(case.q.packed), case.recipe.element),
            values,
            np.isnan(values),
        )


@np.errstate(all="ignore")
def applied_scales(x: np.ndarray, r: Recipe) -> np.ndarray:
    """Return the scales that a recipe divides the elements of a matrix x by: float32 (rows, blocks)."""
    amax, tensor = block_amax(x.astype(np.float32), r), tensor_scale(None, r, x.dtype)
    rule = BLOCK_RULES[r.block_rule or ""]
    factor = rule.factor(rule.code(amax, tensor, r, x.dtype), amax, tensor, r, x.dtype)
    return factor if r.apply == "divide" else ONE / factor


def unpack_fp6(packed: np.ndarray) -> np.ndarray:
    """Return uint8 codes from compressed-tensors' 6-bit packing: 4 codes in 3 bytes, little-endian."""
    # The length of the last axis must be a multiple of 3.
    b = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    return (
        (word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).astype(np.uint8).reshape(*packed.shape[:-1], -1)
    )


Mask = np.ndarray


class EngineOperations(NamedTuple):
    """The public functions of fp4kit that are compared, bound to one engine. They take and return NumPy arrays."""

    quantize: Callable[..., Any]
    fake_quantize: Callable[..., np.ndarray]
    fake_quantize_backward: Callable[..., np.ndarray]
    amax: Callable[..., np.ndarray]
    dequantize: Callable[..., np.ndarray]
    search_scales: Callable[..., np.ndarray]

    @classmethod
    def of(cls, engine: ComparedEngine) -> EngineOperations:
        """Return the public functions, bound so that they run on ``engine`` and take and return NumPy arrays."""
        functions = (quantize, fake_quantize, fake_quantize_backward, op_amax, dequantize, search_scales)
        return cls(*(partial(engine.call, function) for function in functions))


SPECIFIED = EngineOperations.of(SPECIFICATION)


# ---- exceptions: each function returns the mask of the elements of a case that are not compared


def _block_amax(case: RecordedCase) -> np.ndarray:
    """Return, for each element of the case's input x, the largest magnitude of its block of one row, as float32."""
    x = np.abs(case.x.astype(np.float32))
    size = case.recipe.block_size
    return np.repeat(np.max(x.reshape(len(x), -1, size), axis=-1), size, axis=1)


def _skip_nan_scale(case: RecordedCase) -> Mask:
    """Return a mask of the elements in blocks whose scale is NaN in case.q, because their codes have no meaning."""
    scale = decode(case.q.block_scale, case.recipe.scale or E8M0)
    return np.repeat(np.isnan(scale), case.recipe.block_size, axis=1)


def _skip_nan_value(case: RecordedCase) -> Mask:
    """Return a mask that excuses codes whose combined scale is NaN, because any code then decodes to NaN."""
    with np.errstate(all="ignore"):
        scale = decode(case.q.block_scale, case.recipe.scale or E8M0) * case.q.tensor_scale
    return np.repeat(np.isnan(scale), case.recipe.block_size, axis=1)


def _skip_nonfinite_block(case: RecordedCase) -> Mask:
    """Return a mask that excuses all elements of blocks that contain inf or NaN."""
    return ~np.isfinite(_block_amax(case))


def _skip_nonfinite_group(case: RecordedCase) -> Mask:
    """Return a mask that excuses all elements in groups of 32 elements of a row that contain inf or NaN."""
    groups = np.abs(case.x.astype(np.float32)).reshape(len(case.x), -1, 32)
    return np.repeat(~np.isfinite(groups.max(axis=-1)), 32, axis=1)


def _skip_overflowing_block(case: RecordedCase) -> Mask:
    """Return a mask that excuses blocks that compressed-tensors corrupts."""
    # For an amax of at least 1.75 * 2^15 (float16) or 1.75 * 2^127 (other dtypes), the input dtype cannot hold that
    # power.
    limit = 1.75 * 2.0 ** (15 if case.x.dtype == np.float16 else 127)
    return ~(_block_amax(case) < limit)


def _skip_uncertain(case: RecordedCase) -> Mask:
    """Return a mask that excuses blocks whose codes depend on how the GPU instruction rcp.approx rounds."""
    certain = case.part("codes_certain")
    if certain is None:
        return np.zeros(case.x.shape, bool)
    return np.repeat(certain != 1, case.x.shape[1] // certain.shape[1], axis=1)


def _skip_undefined(case: RecordedCase) -> Mask:
    """Return a mask that excuses NaN elements, because the producer reads an uninitialized variable for them."""
    valid = case.part("valid")
    return np.zeros(case.x.shape, bool) if valid is None else ~valid


def _skip_cpu_only_rows(case: RecordedCase) -> Mask:
    """Return a mask that excuses rows of fp8-modelopt-channel whose result differs between a CPU and a GPU."""
    cpu_only = case.recipe.id == "fp8-modelopt-channel" and case.part("amax") is None
    amax = np.max(np.abs(case.x.astype(np.float32)), axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        differs = np.float32(448) / amax != np.float32(1) / amax * np.float32(448)
    return np.broadcast_to(cpu_only & differs, case.x.shape)


def _skip_nonfinite_tensor(case: RecordedCase) -> Mask:
    """Return a mask that excuses all elements of a fouroversix tensor with inf or NaN, in two cases."""
    undecided = case.x.dtype == np.float32 or (case.recipe.keep_infinity and case.recipe.block_rows > 1)
    return np.full(case.x.shape, undecided and not np.isfinite(_block_amax(case)).all())


def _skip_signed_nan(case: RecordedCase) -> Mask:
    """Return a mask that excuses the elements of blocks whose scale was recorded as 0xFF from fouroversix's IF4."""
    scales = case.part("scales")
    return np.repeat(_crop(scales, case.q.block_scale) == 0xFF, case.recipe.block_size, axis=1)


def _skip_nan_element(case: RecordedCase) -> Mask:
    """Return a mask that excuses the elements of x that are not finite, for recordings of triton_kernels."""
    return ~np.isfinite(case.x.astype(np.float32))


def _skip_infinite_quotient(case: RecordedCase) -> Mask:
    """Return a mask that excuses elements that Quark turns into infinities."""
    scale = case.part("global_scale")
    if scale is None or not np.isfinite(scale).all():
        return np.ones(case.x.shape, bool)
    zero = np.repeat(decode(case.q.block_scale, case.recipe.scale or E8M0) == 0, case.recipe.block_size, axis=1)
    return zero & (np.abs(case.x.astype(np.float64)) * 2.0**23 >= 2.0**128)


def _skip_flushed_block(case: RecordedCase) -> Mask:
    """Return a mask that excuses blocks with an amax below 2^-124."""
    return _block_amax(case) < 2.0**-124


def _skip_applied_scale(case: RecordedCase) -> Mask:
    """Return a mask of the elements that are not compared, because Quark did not scale them by the stored scale."""
    skip, applied = _skip_nonfinite_block(case), case.part("scale_applied")
    if applied is None:
        return skip
    stored = decode(case.part("scales"), case.recipe.scale or E8M0)
    return skip | np.repeat(applied != stored, case.recipe.block_size, axis=1)


# ---- the comparison


@dataclass
class RecordedCase:
    """One input of a GoldenRow, the producer's recorded outputs for it, and the recipe that must give these outputs.

    Attributes:
        row: the GoldenRow.
        golden: the GoldenSet that holds the recorded arrays.
        name: the name of the input.
        recipe: the recipe, with the block size of the row.
        x: the input.
        ops: the engine's functions whose results are compared.
        q: the result of the engine's quantize. It is set when the case is compared.
    """

    row: GoldenRow
    golden: GoldenSet
    name: str
    recipe: Recipe
    x: np.ndarray
    ops: EngineOperations = SPECIFIED
    q: Any = None

    def key(self, part: str) -> str:
        """Return the key under which the file stores the recorded array ``part``: <input>/<variant>/<part>."""
        return f"{self.name}/{self.row.variant}/{part}"

    def part(self, part: str) -> np.ndarray | None:
        """Return the recorded array named ``part``, or None if it was not recorded."""
        places = [(f"{self.row.file.removesuffix('_fake')}_h200", self.key(part)), (self.row.file, self.key(part))]
        if self.row.on_gpu:
            places.insert(0, ("producers_h200", f"{self.name}/{self.row.on_gpu}/{part}"))
        for file, key in places:
            if key in self.golden.keys(file):
                array = self.golden.get(file, key)
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
        """Return the keyword arguments for the call of quantize or fake_quantize in this case."""
        # An amax that was not recorded or holds NaN is left out, so that the call computes it.
        options = dict(self.row.options)
        if self.row.torch_seed is not None:
            words = torch_words(self.row.torch_seed, self.x.size).reshape(self.x.shape)
            bits = self.row.torch_bits[str(self.x.dtype)]
            numbers = (words & (2**bits - 1)).astype(np.float32) * np.float32(2.0**-bits)
            options |= {"rounding": "stochastic", "seed": numbers}
        amax = self.part("global_amax") if self.part("global_amax") is not None else self.part("amax")
        amax = self.global_scale() if self.row.given_amaxes == "global_scale" else amax
        if self.row.given_amaxes and amax is not None and not np.isnan(amax).any():
            options["tensor_amax"] = amax.astype(np.float32)
        block = self.part("block_amax")
        if self.row.given_amaxes == "static" and block is not None and not np.isnan(block.astype(np.float32)).any():
            options["block_amax"] = block.astype(np.float32)
        return options


SKIPS: dict[str, Callable[[RecordedCase], Mask]] = {
    "nan_scale": _skip_nan_scale,
    "overflowing_scale": _skip_nan_scale,
    "nan_value": _skip_nan_value,
    "nonfinite_block": _skip_nonfinite_block,
    "overflowing_block": _skip_overflowing_block,
    "uncertain": _skip_uncertain,
    "undefined": _skip_undefined,
    "cpu_only_rows": _skip_cpu_only_rows,
    "nonfinite_tensor": _skip_nonfinite_tensor,
    "signed_nan": _skip_signed_nan,
    "nan_element": _skip_nan_element,
    "infinite_quotient": _skip_infinite_quotient,
    "applied_scale": _skip_applied_scale,
    "flushed_block": _skip_flushed_block,
    "nonfinite_group": _skip_nonfinite_group,
}
# Names of exceptions (keys of SKIPS) that excuse differences in block scales as well as in codes.
SKIPPED_SCALES = (
    "overflowing_scale",
    "nonfinite_block",
    "overflowing_block",
    "nonfinite_tensor",
)


def cases(row: GoldenRow, golden: GoldenSet, ops: EngineOperations = SPECIFIED) -> Iterator[RecordedCase]:
    """Yield a RecordedCase for each input that the golden set has recorded outputs for, in the variant of a row."""
    r = recipe(row.recipe)
    r = r if row.block is None else replace(r, block=row.block)
    for name in golden.variants(row.file).get(row.variant, ()):
        if name.endswith(row.inputs):
            x = golden.input(name, row.file)
            yield RecordedCase(row, golden, name, r, x.astype(np.float32) if row.widen else x, ops)


def check_recipe(name: str, golden: GoldenSet, ops: EngineOperations = SPECIFIED) -> GoldenResult:
    """Compare all recorded arrays of a recipe with the results of ``ops``, and return the counts and differences."""
    results = [check_row(row, golden, ops) for row in ROWS if row.recipe == name]
    results.append(check_bytes(name, golden, ops))
    differences = tuple(difference for result in results for difference in result.differences)
    return GoldenResult(name, sum(r.compared for r in results), differences, sum(r.values for r in results))


def check_bytes(name: str, golden: GoldenSet, ops: EngineOperations = SPECIFIED) -> GoldenResult:
    """Compare recorded arrays that a producer computed from codes and scales, not from input values."""
    return result_of(name, byte_arrays(name, golden, ops.dequantize))


def check_row(row: GoldenRow, golden: GoldenSet, ops: EngineOperations = SPECIFIED) -> GoldenResult:
    """Compare every recorded array of a GoldenRow with the results of ``ops``, and return the counts and
    differences.
    """
    arrays = searched_arrays if row.searched else _fake_arrays if row.fake else _arrays
    return result_of(
        row.recipe, ((row.file, compared) for case in cases(row, golden, ops) for compared in arrays(case))
    )


def _arrays(case: RecordedCase) -> Iterator[Compared]:
    """Quantize a case, and yield one item per recorded array: codes, scales, amaxes and stored bytes."""
    case.q = case.ops.quantize(case.x, case.recipe, **case.arguments())
    skip = SKIPS[case.row.skip](case) if case.row.skip else np.zeros(case.q.moved_shape, bool)
    codes, scales = case.recorded_codes(), case.part("scales")
    if codes is not None:
        yield case.key("codes"), *_element_codes(case, codes), skip.T if case.row.columnwise_in_place else skip
    if scales is not None:
        ours = case.q.block_scale.T if case.row.columnwise_in_place else case.q.block_scale
        by_block = skip[:, :: case.recipe.block_size] if case.row.skip in SKIPPED_SCALES else np.False_
        yield (
            case.key("scales"),
            _unsign_nan(np.maximum(ours, np.uint8(case.row.min_scale)), case.recipe.scale),
            _unsign_nan(_crop(scales, ours), case.recipe.scale),
            by_block,
        )
    yield from _tensor_arrays(case)
    yield from stored_arrays(case, skip)


def _element_codes(case: RecordedCase, recorded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (fp4kit's codes, recorded codes) of a case, one code per element, with the sign of NaN codes removed."""
    if case.recipe.element.packing.codes > 1:
        return unpack(case.q.packed), unpack(recorded)
    ours = case.q.packed.T if case.row.columnwise_in_place else case.q.packed
    if case.recipe.element.bits == 6 and recorded.shape != ours.shape:
        recorded = unpack_fp6(recorded)
    return _unsign_nan(ours, case.recipe.element), _unsign_nan(recorded, case.recipe.element)


def _tensor_arrays(case: RecordedCase) -> Iterator[Compared]:
    """Yield one item per recorded array of a case: the tensor amax, tensor scales and block amaxes."""
    amax, scale, block = case.part("global_amax"), case.part("global_scale"), case.part("block_amax")
    nothing = np.False_
    if amax is not None and not case.row.given_amaxes:
        ours = np.maximum(case.q.tensor_amax, np.float32(case.row.min_amax))
        yield case.key("global_amax"), ours.reshape(-1), amax.reshape(-1), nothing
    if scale is not None and case.row.given_amaxes == "global_scale":
        yield case.key("global_scale"), case.q.tensor_amax.reshape(-1), scale, nothing
    elif scale is not None and case.q.tensor_amax is not None:
        ours = tensor_scale(case.q.tensor_amax, case.recipe, case.x.dtype)
        decode_direction = case.row.file in ("modelopt", "ao", "quark", "comfy_kitchen")
        yield (
            case.key("global_scale"),
            (ours.decode if decode_direction else ours.encode).reshape(-1),
            scale.reshape(-1),
            nothing,
        )
    if (token := case.part("token_scale")) is not None:
        yield case.key("token_scale"), case.q.tensor_scale, token, nothing
    if block is not None and not case.row.given_amaxes:
        yield case.key("block_amax"), case.ops.amax(case.x, case.recipe), block, nothing


def _fake_arrays(case: RecordedCase) -> Iterator[Compared]:
    """Yield one item for each recorded result of fake_quantize, and for the recorded gradient."""
    arguments = case.arguments()
    skip = SKIPS[case.row.skip](case) if case.row.skip else np.zeros(case.x.shape, bool)
    for name in case.row.values:
        output = case.part(name)
        if output is not None:
            y = case.ops.fake_quantize(case.x, case.recipe, **arguments)
            yield case.key(name), y.astype(output.dtype), output, skip
    gradient = case.part("grad_clip")
    if gradient is not None:
        upstream = case.golden.get(case.row.file, f"{case.name}/upstream/grad_out")
        upstream = upstream.view(ml_dtypes.bfloat16) if upstream.dtype == np.uint16 else upstream
        amax = arguments.get("tensor_amax")
        ours = case.ops.fake_quantize_backward(upstream, case.x, case.recipe, amax=amax, pass_through=False)
        yield case.key("grad_clip"), ours, gradient, np.False_


def _crop(recorded: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return the recorded scales in the shape of ``ours``, fp4kit's scales."""
    if recorded.size == ours.size:
        return recorded.reshape(ours.shape)
    return recorded[: ours.shape[0], : ours.shape[1]]


def _unsign_nan(codes: np.ndarray, fmt: Any) -> np.ndarray:
    """Return codes of the format ``fmt`` in which every NaN is replaced by fmt.nan_code, the NaN without a sign."""
    return np.where(np.isnan(decode(codes, fmt)), np.uint8(fmt.nan_code), codes)


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
    groups = [[r for r in RECIPES.values() if not r.fake_only and r.scale is not None and not r.search]]
    order = {r.id: i for i, r in enumerate(groups[0])}
    for x in data:
        groups = [part for group in groups for part in _parts(group, x) if len(part) > 1]
    yield from sorted((tuple(r.id for r in group) for group in groups), key=lambda ids: order[ids[0]])


def _parts(group: list[Recipe], x: np.ndarray) -> list[list[Recipe]]:
    """Split a group of recipes into groups that give equal codes and block scales for ``x``."""
    found: dict[bytes, list[Recipe]] = {}
    for r in group:
        q = quantize(x, r)
        found.setdefault(b"".join(part.tobytes() for part in (q.packed, q.block_scale) if part is not None), []).append(
            r
        )
    return list(found.values())


def agreement_rows() -> list[tuple[str, ...]]:
    """Return the rows of a table with the header COLUMNS, one per group of recipes that give equal bytes."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, dtype in DTYPES.items():
        for group in agreeing(dtype):
            found.setdefault(group, []).append(name)
    return [(", ".join(names), " = ".join(group)) for group, names in found.items()]
