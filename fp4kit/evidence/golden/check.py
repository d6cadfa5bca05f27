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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.inputs import torch_words
from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.recorded_bytes import byte_arrays
from fp4kit.evidence.golden.result import Compared, GoldenResult, result_of
from fp4kit.evidence.golden.rows import ROWS, GoldenRow
from fp4kit.evidence.golden.stored_bytes import searched_arrays, stored_arrays, unpack_fp6
from fp4kit.formats import E8M0
from fp4kit.layouts import unpack
from fp4kit.ops.amax import amax as op_amax
from fp4kit.ops.amax import search_scales
from fp4kit.ops.quantize import dequantize, fake_quantize, fake_quantize_backward, quantize
from fp4kit.recipes import Recipe, recipe
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import tensor_scale

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
