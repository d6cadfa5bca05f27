"""Compare a producer's decoder with fp4kit.dequantize on random codes and scales. A producer is a library that
quantizes, such as torchao; a ProducerCall says how to call it.

The codes and scales include some that no quantizer gives, such as NaN scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz.arrays import DTYPES
from fp4kit.evidence.live.adapter import ProducerCall
from fp4kit.evidence.live.compare import PartDifference, ProducerComparison, difference_of
from fp4kit.evidence.live.script import lines_of, program

ROWS, BLOCKS = (1, 2, 3), (2, 3, 6)
EDGES = (0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF)  # the smallest, largest and NaN scales of E8M0 and E4M3


def draw_stored(r: fp4kit.Recipe, call: ProducerCall, seed: int, number: int) -> fp4kit.Quantized:
    """Return a Quantized with random codes and scales, determined by ``seed``, ``number`` and the recipe's id."""
    rng = np.random.default_rng([seed, number, zlib.crc32(r.id.encode())])
    rows, blocks = int(rng.choice(ROWS)) * r.block_rows, int(rng.choice(BLOCKS)) * max(1, call.columns // r.block_size)
    codes = rng.integers(0, 1 << r.element.bits, (rows, blocks * r.block_size), np.uint8)
    one = np.where(rng.random((rows, blocks)) < 0.5, 127 if r.scale is fp4kit.formats.E8M0 else 0x38, 0)
    any_byte = np.where(rng.random(one.shape) < 0.2, rng.choice(EDGES, one.shape), rng.integers(0, 256, one.shape))
    scales = np.where(one > 0, one + rng.integers(-8, 8, one.shape), any_byte).astype(np.uint8)
    scales = np.repeat(scales[:: r.block_rows], r.block_rows, axis=0)[:rows]
    tensor = np.float32(np.exp2(rng.uniform(-16, 4))) if r.tensor_scaling == "tensor" else None
    dtype = DTYPES[call.decodes[number // 4 % len(call.decodes)]]
    return _stored(codes, scales, tensor, dtype, r)


def _stored(codes: np.ndarray, scales: np.ndarray, tensor: Any, dtype: np.dtype, r: fp4kit.Recipe) -> fp4kit.Quantized:
    """Return a Quantized with the given codes (one per byte), block scales and tensor scale, in the linear layout."""
    packed = fp4kit.pack(codes) if r.is_packed else codes
    tensor = None if tensor is None else np.asarray(tensor)
    return fp4kit.Quantized(packed, scales, tensor, None, codes.shape, dtype, -1, r)


def compare_decoded(q: fp4kit.Quantized, call: ProducerCall) -> ProducerComparison:
    """Decode q with the producer and with fp4kit, compare the values, and return a ProducerComparison."""
    # ``call.decode`` must not be None.
    assert call.decode is not None
    with np.errstate(all="ignore"):
        theirs, ours = call.decode(q), fp4kit.dequantize(q)
        difference = difference_of("values", theirs, ours, np.zeros(np.shape(theirs), bool), q.recipe)
    return ProducerComparison([replace(difference, part="decoded")] if difference else [], elements=ours.size)


def shrunk(q: fp4kit.Quantized, call: ProducerCall, differs: Callable[[fp4kit.Quantized], bool]) -> fp4kit.Quantized:
    """Return a simpler Quantized for which ``differs`` still holds, or q itself if none is found."""
    # A column keeps its codes if q would no longer differ.
    for candidate in _smaller(q, call):
        if differs(candidate):
            q = candidate
            break
    for i in range(q.shape[-1]):
        codes = fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed.copy()
        codes[:, i] = 0
        candidate = _stored(codes, q.block_scale, q.tensor_scale, q.dtype, q.recipe)
        q = candidate if differs(candidate) else q
    return q


def _smaller(q: fp4kit.Quantized, call: ProducerCall) -> Iterator[fp4kit.Quantized]:
    """Yield slices of q, as new Quantized: one row of blocks, and as few columns of blocks as the producer accepts."""
    r = q.recipe
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    step = max(1, call.columns // r.block_size)
    for row in range(0, q.shape[0], r.block_rows):
        for block in range(0, q.block_scale.shape[1], step):
            rows, columns = slice(row, row + r.block_rows), slice(block * r.block_size, (block + step) * r.block_size)
            yield _stored(codes[rows, columns], q.block_scale[rows, block : block + step], q.tensor_scale, q.dtype, r)


def script(id: str, call: ProducerCall, q: fp4kit.Quantized, difference: PartDifference | str, versions: str) -> str:
    """Return a Python program that reproduces a difference between a producer's decoder and fp4kit.dequantize."""
    assert call.decode is not None
    parts = ["packed", "block_scale"] + ["tensor_scale"] * (q.tensor_scale is not None)
    body = [line for name in parts for line in lines_of(name, np.asarray(getattr(q, name)))]
    dtype = f"ml_dtypes.{q.dtype}" if q.dtype == "bfloat16" else f"np.{q.dtype}"
    tensor = "None" if q.tensor_scale is None else "tensor_scale"
    made = f'fp4kit.Quantized(packed, block_scale, {tensor}, None, {q.shape}, {dtype}, -1, "{id}")'
    body += ["", f"q = {made}", "theirs = {call}"]
    if not isinstance(difference, str):
        body.append("assert_same_bits(theirs, fp4kit.dequantize(q))")
    return program(f"{id} and {versions}", difference, call.decode, body, q.dtype == "bfloat16", "q")
