"""Compare arrays that producers computed from codes and scales alone, without input values.
These arrays are of two kinds: the decoded values of all codes with all scales, and GGUF blocks that converters made
from other producers' codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.result import Compared
from fp4kit.layouts import pack, pack_gguf, unpack_gguf
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe

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
