"""Compare recorded arrays other than codes and scales. These are the bytes that a producer stores, decoded values,
scales that it does not store, and the amaxes that a scale search chooses. A producer is a library that quantizes. A
RecordedCase (check.py) is one input and its recorded arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.layouts import pack_gguf, pack_mlx, unpack
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import block_amax
from fp4kit.reference.codec import decode
from fp4kit.reference.tensor_rules import tensor_scale

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
