"""Compare recipes with the recorded arrays of rows. `fp4kit recipes --check` prints it; the tests assert it.

What is compared is the specification; with other Operations another engine (`fp4kit selftest`).

Every array is compared in every bit, but for what a row names in `skip` and `inputs` and for the sign bit of a NaN,
which no producer keeps stable (fp4kit/evidence/recorded/README.md lists and explains these exceptions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.recorded_bytes import byte_arrays
from fp4kit.evidence.golden.result import Compared, GoldenResult, result_of
from fp4kit.evidence.golden.rows import ROWS, GoldenRow
from fp4kit.evidence.golden.stored_bytes import searched_arrays, stored_arrays, unpack_fp6
from fp4kit.formats import E8M0
from fp4kit.layouts import unpack
from fp4kit.ops.amax import amax as op_amax
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.fake_quantize import fake_quantize, fake_quantize_backward
from fp4kit.ops.quantize import quantize
from fp4kit.ops.search_scales import search_scales
from fp4kit.recipes import Recipe, recipe
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import tensor_scale

Mask = np.ndarray


class Operations(NamedTuple):
    """What is compared: the public functions of these names, with NumPy arrays in and out."""

    quantize: Callable[..., Any]
    fake_quantize: Callable[..., np.ndarray]
    fake_quantize_backward: Callable[..., np.ndarray]
    amax: Callable[..., np.ndarray]
    dequantize: Callable[..., np.ndarray]
    search_scales: Callable[..., np.ndarray]

    @classmethod
    def of(cls, engine: ComparedEngine) -> Operations:
        """Those of an engine."""
        functions = (quantize, fake_quantize, fake_quantize_backward, op_amax, dequantize, search_scales)
        return cls(*(partial(engine.call, function) for function in functions))


SPECIFIED = Operations.of(SPECIFICATION)


# ---- exceptions: what of an array is not compared, as a mask over elements
# ------------------------------------------------


def _block_amax(case: RecordedCase) -> np.ndarray:
    x = np.abs(case.x.astype(np.float32))
    size = case.recipe.block_size
    return np.repeat(np.max(x.reshape(len(x), -1, size), axis=-1), size, axis=1)


def _skip_nan_scale(case: RecordedCase) -> Mask:
    """Codes under a NaN scale carry no meaning."""
    scale = decode(case.q.block_scale, case.recipe.scale or E8M0)
    return np.repeat(np.isnan(scale), case.recipe.block_size, axis=1)


def _skip_nonfinite_block(case: RecordedCase) -> Mask:
    """Casts of inf and NaN to uint8 are undefined in C."""
    return ~np.isfinite(_block_amax(case))


def _skip_overflowing_block(case: RecordedCase) -> Mask:
    """compressed-tensors corrupts blocks whose amax rounds up to a power of two beyond the input dtype."""
    limit = 1.75 * 2.0 ** (15 if case.x.dtype == np.float16 else 127)
    return ~(_block_amax(case) < limit)


def _skip_uncertain(case: RecordedCase) -> Mask:
    """Bytes that depend on which neighbour rcp.approx returns: the file marks those that do not."""
    certain = case.part("codes_certain")
    if certain is None:
        return np.zeros(case.x.shape, bool)
    return np.repeat(certain != 1, case.x.shape[1] // certain.shape[1], axis=1)


def _skip_undefined(case: RecordedCase) -> Mask:
    """NaN elements read an uninitialised variable there; the file marks what is defined."""
    valid = case.part("valid")
    return np.zeros(case.x.shape, bool) if valid is None else ~valid


def _skip_cpu_only_rows(case: RecordedCase) -> Mask:
    """fp8-modelopt-channel: inputs recorded on a CPU alone, which evaluates 448 / amax as (1 / amax) * 448; a GPU
    divides.
    """
    cpu_only = case.recipe.id == "fp8-modelopt-channel" and case.part("amax") is None
    amax = np.max(np.abs(case.x.astype(np.float32)), axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        differs = np.float32(448) / amax != np.float32(1) / amax * np.float32(448)
    return np.broadcast_to(cpu_only & differs, case.x.shape)


def _skip_nonfinite_tensor(case: RecordedCase) -> Mask:
    """fouroversix: of tensors with inf or NaN those in float32, where the processor decides the sign of a NaN scale,
    and those that its Triton kernels quantize in blocks of 16x16, where rows with inf or NaN do not count.
    """
    undecided = case.x.dtype == np.float32 or (case.recipe.keep_infinity and case.recipe.block_rows > 1)
    return np.full(case.x.shape, undecided and not np.isfinite(_block_amax(case)).all())


def _skip_nan_element(case: RecordedCase) -> Mask:
    """triton_kernels: the sign of the code of an element that is NaN, or became it of inf * 0."""
    return ~np.isfinite(case.x.astype(np.float32))


def _skip_infinite_quotient(case: RecordedCase) -> Mask:
    """Quark packs an infinity as 4: a tensor with inf or NaN, and elements whose quotient overflows, under the scale
    2^-23.
    """
    scale = case.part("global_scale")
    if scale is None or not np.isfinite(scale).all():
        return np.ones(case.x.shape, bool)
    zero = np.repeat(decode(case.q.block_scale, case.recipe.scale or E8M0) == 0, case.recipe.block_size, axis=1)
    return zero & (np.abs(case.x.astype(np.float64)) * 2.0**23 >= 2.0**128)


def _skip_applied_scale(case: RecordedCase) -> Mask:
    """Quark's values under scales that it stores as others (the file has them), and blocks with inf or NaN."""
    skip, applied = _skip_nonfinite_block(case), case.part("scale_applied")
    if applied is None:
        return skip
    stored = decode(case.part("scales"), case.recipe.scale or E8M0)
    return skip | np.repeat(applied != stored, case.recipe.block_size, axis=1)


# ---- the comparison
# -----------------------------------------------------------------------------------------------------


@dataclass
class RecordedCase:
    """One input of a row: what the file recorded, and what the recipe gives."""

    row: GoldenRow
    golden: GoldenSet
    name: str
    recipe: Recipe
    x: np.ndarray
    ops: Operations = SPECIFIED
    q: Any = None

    def key(self, part: str) -> str:
        """Key of one recorded array."""
        return f"{self.name}/{self.row.variant}/{part}"

    def part(self, part: str) -> np.ndarray | None:
        """A recorded array; the one that a GPU gave where there are two. bfloat16 comes typed."""
        places = [(f"{self.row.file.removesuffix('_fake')}_h200", self.key(part)), (self.row.file, self.key(part))]
        if self.row.on_gpu:
            places.insert(0, ("producers_h200", f"{self.name}/{self.row.on_gpu}/{part}"))
        for file, key in places:
            if key in self.golden.keys(file):
                array = self.golden.get(file, key)
                return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
        return None

    def global_scale(self) -> np.ndarray | None:
        """MLX's, which is an amax; its Metal variants have that of the CPU."""
        own = self.part("global_scale")
        key = f"{self.name}/{self.row.variant.removesuffix('_metal')}/global_scale"
        return self.golden.get(self.row.file, key) if own is None else own

    def arguments(self) -> dict[str, Any]:
        """Arguments of the call: the row's options, and the amaxes that the file supplies."""
        options = dict(self.row.options)
        amax = self.part("global_amax") if self.part("global_amax") is not None else self.part("amax")
        amax = self.global_scale() if self.row.given == "global_scale" else amax
        if self.row.given and amax is not None and not np.isnan(amax).any():
            options["tensor_amax"] = amax.astype(np.float32)
        block = self.part("block_amax")
        if self.row.given == "static" and block is not None and not np.isnan(block.astype(np.float32)).any():
            options["block_amax"] = block.astype(np.float32)
        return options


SKIPS: dict[str, Callable[[RecordedCase], Mask]] = {
    "nan_scale": _skip_nan_scale,
    "nonfinite_block": _skip_nonfinite_block,
    "overflowing_block": _skip_overflowing_block,
    "uncertain": _skip_uncertain,
    "undefined": _skip_undefined,
    "cpu_only_rows": _skip_cpu_only_rows,
    "nonfinite_tensor": _skip_nonfinite_tensor,
    "nan_element": _skip_nan_element,
    "infinite_quotient": _skip_infinite_quotient,
    "applied_scale": _skip_applied_scale,
}
SKIPPED_SCALES = (
    "nonfinite_block",
    "overflowing_block",
    "nonfinite_tensor",
)  # blocks whose scales are not compared either


def cases(row: GoldenRow, golden: GoldenSet, ops: Operations = SPECIFIED) -> Iterator[RecordedCase]:
    """The inputs that the set holds for a row."""
    r = recipe(row.recipe)
    r = r if row.block is None else replace(r, block=row.block)
    for name in golden.variants(row.file).get(row.variant, ()):
        if name.endswith(row.inputs):
            x = golden.input(name, row.file)
            yield RecordedCase(row, golden, name, r, x.astype(np.float32) if row.widen else x, ops)


def check_recipe(name: str, golden: GoldenSet, ops: Operations = SPECIFIED) -> GoldenResult:
    """Compare every recorded array of a recipe with what ops give: those of its rows, and those of bytes alone."""
    results = [check_row(row, golden, ops) for row in ROWS if row.recipe == name]
    results.append(check_bytes(name, golden, ops))
    differences = tuple(difference for result in results for difference in result.differences)
    return GoldenResult(name, sum(r.compared for r in results), differences, sum(r.values for r in results))


def check_bytes(name: str, golden: GoldenSet, ops: Operations = SPECIFIED) -> GoldenResult:
    """Compare what is recorded of a recipe's bytes alone."""
    return result_of(name, byte_arrays(name, golden, ops.dequantize))


def check_row(row: GoldenRow, golden: GoldenSet, ops: Operations = SPECIFIED) -> GoldenResult:
    """Compare every recorded array of a row with what ops give."""
    arrays = searched_arrays if row.searched else _fake_arrays if row.fake else _arrays
    return result_of(
        row.recipe, ((row.file, compared) for case in cases(row, golden, ops) for compared in arrays(case))
    )


def _arrays(case: RecordedCase) -> Iterator[Compared]:
    case.q = case.ops.quantize(case.x, case.recipe, **case.arguments())
    skip = SKIPS[case.row.skip](case) if case.row.skip else np.zeros(case.q.moved_shape, bool)
    codes, scales = case.part("codes"), case.part("scales")
    if codes is not None:
        yield case.key("codes"), *_element_codes(case, codes), skip.T if case.row.columnwise_in_place else skip
    if scales is not None:
        ours = case.q.block_scale.T if case.row.columnwise_in_place else case.q.block_scale
        by_block = skip[:, :: case.recipe.block_size] if case.row.skip in SKIPPED_SCALES else np.False_
        yield (
            case.key("scales"),
            _unsign_nan(np.maximum(ours, np.uint8(case.row.least_scale)), case.recipe.scale),
            _unsign_nan(_crop(scales, ours), case.recipe.scale),
            by_block,
        )
    yield from _tensor_arrays(case)
    yield from stored_arrays(case, skip)


def _element_codes(case: RecordedCase, recorded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes one per element, ours and the recorded ones."""
    if case.recipe.element.packing.codes > 1:
        return unpack(case.q.packed), unpack(recorded)
    ours = case.q.packed.T if case.row.columnwise_in_place else case.q.packed
    if case.recipe.element.bits == 6 and recorded.shape != ours.shape:
        recorded = unpack_fp6(recorded)
    return _unsign_nan(ours, case.recipe.element), _unsign_nan(recorded, case.recipe.element)


def _tensor_arrays(case: RecordedCase) -> Iterator[Compared]:
    """tensor amax and scale, in the direction that the file keeps."""
    amax, scale, block = case.part("global_amax"), case.part("global_scale"), case.part("block_amax")
    none = np.False_
    if amax is not None and not case.row.given:
        ours = np.maximum(case.q.tensor_amax, np.float32(case.row.least_amax))
        yield case.key("global_amax"), ours.reshape(-1), amax.reshape(-1), none
    if scale is not None and case.row.given == "global_scale":
        yield case.key("global_scale"), case.q.tensor_amax.reshape(-1), scale, none
    elif scale is not None and case.q.tensor_amax is not None:
        ours = tensor_scale(case.q.tensor_amax, case.recipe, case.x.dtype)
        decode_direction = case.row.file in ("modelopt", "ao", "quark")
        yield (
            case.key("global_scale"),
            (ours.decode if decode_direction else ours.encode).reshape(-1),
            scale.reshape(-1),
            none,
        )
    if block is not None and not case.row.given:
        yield case.key("block_amax"), case.ops.amax(case.x, case.recipe), block, none


def _fake_arrays(case: RecordedCase) -> Iterator[Compared]:
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
    """Drop padding rows and columns of recorded scales."""
    if recorded.size == ours.size:
        return recorded.reshape(ours.shape)
    return recorded[: ours.shape[0], : ours.shape[1]]


def _unsign_nan(codes: np.ndarray, fmt: Any) -> np.ndarray:
    """NaN codes without their sign."""
    return np.where(np.isnan(decode(codes, fmt)), np.uint8(fmt.nan_code), codes)
