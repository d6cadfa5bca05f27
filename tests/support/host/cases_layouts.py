"""Cases of the kernels that move bytes: transpose, swizzle and unswizzle, pack and unpack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from host.cases import Result
from host.harness import DeviceArray

import fp4kit
from fp4kit import layouts
from fp4kit.cuda.launch import pack_codes, swizzle, transpose
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes import Recipe


def random_bytes(shape: tuple[int, ...]) -> np.ndarray:
    """None is zero, so that padding is seen."""
    return np.random.default_rng(prod(shape)).integers(1, 256, shape, np.uint8)


def laid_out(linear: np.ndarray, layout: str) -> np.ndarray:
    """Scales in a layout, with padding that is not zero."""
    padding = layouts.swizzle_scales(np.ones_like(linear), layout) == 0
    return layouts.swizzle_scales(linear, layout) | padding * np.uint8(0xEE)


@dataclass(frozen=True)
class Transpose:
    """An instantiation or more of the transpose kernel: matrices (B, M, K), both ways, at addresses of any
    alignment.
    """

    recipe: Recipe
    layout: str = "linear"
    shapes: tuple[tuple[int, int, int], ...] = ((1, 64, 128), (2, 320, 192), (1, 144, 176), (3, 32, 32), (1, 48, 144))
    misalignment: int = 0

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.layout}{'-misaligned' * bool(self.misalignment)}"

    def run(self) -> Iterator[Result]:
        size = self.recipe.block_size
        for B, rows, columns in self.shapes:
            shape = (B, -(-rows // size) * size, -(-columns // size) * size)
            q = square_blocks(self.recipe, self.layout, shape)
            expected = fp4kit.transpose(q)
            outputs = (expected.packed, expected.block_scale)
            codes, scales = (DeviceArray.output(a.shape, np.uint8, self.misalignment) for a in outputs)
            given = (DeviceArray(a, self.misalignment) for a in (q.packed, q.block_scale))
            transpose.transpose(*given, self.recipe, self.layout, codes, scales, shape)
            yield f"codes of {shape}", codes.array, expected.packed
            yield f"scales of {shape}", scales.array, expected.block_scale


def square_blocks(r: Recipe, layout: str, shape: tuple[int, ...]) -> Quantized:
    """Random codes, and scales that are equal in all rows of a block; padding not zero."""
    linear = scale_shape(shape, r)
    scales = np.repeat(random_bytes((*linear[:-2], linear[-2] // r.block_size, linear[-1])), r.block_size, axis=-2)
    packed = random_bytes(packed_shape(shape, r))
    amax = None if r.tensor_rule is None else np.ones((), np.float32)
    return Quantized(packed, laid_out(scales, layout), amax, amax, shape, np.float32, len(shape) - 1, r, layout)


@dataclass(frozen=True)
class Swizzle:
    """Instantiations of the swizzle kernel, from one layout to another: by quads of chunks where it can, else by
    bytes.
    """

    source: str
    target: str
    misalignment: int = 0

    def __str__(self) -> str:
        return f"{self.source}-to-{self.target}{'-misaligned' * bool(self.misalignment)}"

    def run(self) -> Iterator[Result]:
        for shape in ((1, 256, 64), (2, 37, 80), (3, 130, 16), (1, 1, 1), (2, 33, 7), (1, 129, 130)):
            linear = random_bytes(shape)
            scales, expected = laid_out(linear, self.source), layouts.swizzle_scales(linear, self.target)
            out = DeviceArray.output(expected.shape, np.uint8)
            swizzle.swizzle(DeviceArray(scales, self.misalignment), self.source, out, self.target, shape)
            yield f"scales of {shape}", out.array, expected


@dataclass(frozen=True)
class Pack:
    """The kernels of pack and unpack."""

    misalignment: int = 0

    def __str__(self) -> str:
        return f"misalignment {self.misalignment}"

    def run(self) -> Iterator[Result]:
        for count in (1, 7, 8, 1000, 100_003):
            packed = random_bytes((count,))
            codes = layouts.unpack(packed)
            out = DeviceArray.output((count,), np.uint8)
            with_high_nibbles = codes | random_bytes(codes.shape) << 4  # they are dropped
            pack_codes.pack(DeviceArray(with_high_nibbles, self.misalignment), out)
            yield f"{count} packed bytes", out.array, packed
            out = DeviceArray.output(codes.shape, np.uint8)
            pack_codes.unpack(DeviceArray(packed, self.misalignment), out)
            yield f"{count} unpacked bytes", out.array, codes
