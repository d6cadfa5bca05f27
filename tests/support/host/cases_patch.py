"""Cases of quantize_columns: along columns, both ways, square blocks, their fake quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from host.cases import F32, Result, copies, device, matrix, way
from host.harness import DeviceArray
from inputs import BF16, ordinary

import fp4kit
from fp4kit.cuda.launch.dispatch import BAND_SHIFT, TILE_ROWS, LaunchRequest
from fp4kit.cuda.launch.matrix import Matrix, quantize_matrix
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.hadamard import TE_SIGN_MASK

F16, LAYOUTS = np.dtype(np.float16), ("linear", "swizzled_128x4", "swizzled_8x4")


class Side(NamedTuple):
    """The arrays of one direction."""

    packed: DeviceArray
    scales: DeviceArray
    tensor_scale: DeviceArray | None


def side(q: Quantized, layout: str) -> Side:
    """Arrays to fill in place of those of q."""
    make = DeviceArray.output if layout == "linear" else DeviceArray.zeros
    return Side(
        DeviceArray.output(q.packed.shape, np.uint8), make(q.block_scale.shape, np.uint8), copies(q.tensor_amax)
    )


def results(name: str, made: Side, q: Quantized) -> Iterator[Result]:
    yield f"{name} packed", made.packed.array, q.packed
    yield f"{name} scales", made.scales.array, q.block_scale
    if made.tensor_scale is not None:
        yield f"{name} tensor_scale", made.tensor_scale.array, q.tensor_scale


@dataclass(frozen=True)
class Patch:
    """An instantiation of quantize_columns, on matrices of whole tiles and less, finite and not."""

    recipe: Recipe
    dtype: np.dtype = BF16
    layout: str = "linear"
    fake: bool = False
    misaligned: bool = False
    hadamard: bool = False
    tall: bool = False  # more tiles below each other than a band has
    ragged: bool = False  # square blocks that end below the matrix, rowwise

    def __str__(self) -> str:
        flags = [name for name in ("fake", "misaligned", "hadamard", "tall", "ragged") if getattr(self, name)]
        return "-".join([self.recipe.id, str(self.dtype), self.layout, *flags])

    def matrices(self) -> Iterator[np.ndarray]:
        size = self.recipe.block_size
        if self.ragged:
            yield from (ordinary(rows, (rows, 2 * size), self.dtype) for rows in (1, 33, 47))
            return
        if self.tall:
            yield ordinary(9, ((TILE_ROWS << BAND_SHIFT) + TILE_ROWS + size, 192), self.dtype)
            return
        yield ordinary(7, (5 * size, 304 if self.recipe.block_rows < 32 else 320), self.dtype)
        yield matrix("adversarial", self.dtype, self.recipe)[: 3 * size, : 176 if self.recipe.block_rows < 32 else 192]
        x = ordinary(8, (size, 48 if self.recipe.block_rows < 32 else 64), self.dtype)
        places = np.random.default_rng(1).permutation(x.size)[: x.size // 60]
        x.reshape(-1)[places] = np.resize(np.array([np.inf, np.nan, -np.inf, -np.nan], self.dtype), len(places))
        yield x

    def run(self) -> Iterator[Result]:
        for x in self.matrices():
            for amax in (None, np.float32(3.7)) if self.recipe.tensor_scaling == "tensor" else (None,):
                yield from self.compare(x, amax)

    def compare(self, x: np.ndarray, amax: np.float32 | None) -> Iterator[Result]:
        if self.ragged:
            yield from self.compare_rowwise(x, amax)
            return
        column = fp4kit.quantize(
            x, self.recipe, axis=0, tensor_amax=amax, scale_layout=self.layout, hadamard=self.hadamard
        )
        mask = TE_SIGN_MASK if self.hadamard else None
        given, source = device(column.tensor_amax), DeviceArray(x, self.dtype.itemsize * self.misaligned)
        whole = x.shape[1] % self.recipe.block_size == 0 and not (self.hadamard and amax is None)  # one amax for both
        if self.fake:
            values = DeviceArray.output(x.shape, x.dtype)
            work = LaunchRequest(self.recipe, self.dtype, x.shape, values=True)
            quantize_matrix(Matrix(source, values=values, tensor_amax=given), work, 0, way("quantize_columns"))
            yield "values", values.array, fp4kit.dequantize(fp4kit.quantize(x, self.recipe, tensor_amax=amax))
            return
        for rowwise, columnwise in ((False, True), (True, True), (True, False)):
            if rowwise and not whole:
                continue
            row = fp4kit.quantize(x, self.recipe, tensor_amax=amax, scale_layout=self.layout) if rowwise else None
            sides = (side(row, self.layout) if rowwise else None, side(column, self.layout) if columnwise else None)
            row_side, column_side = (part or (None, None, None) for part in sides)
            arrays = Matrix(source, *row_side[:2], None, given, row_side[2], None, None, None, *column_side)
            work = LaunchRequest(self.recipe, self.dtype, x.shape, self.layout, columns=columnwise, mask=mask)
            quantize_matrix(arrays, work, 0, way("quantize_columns"))
            if row is not None:
                yield from results("row", sides[0], row)
            if columnwise:
                yield from results("column", sides[1], column)

    def compare_rowwise(self, x: np.ndarray, amax: np.float32 | None) -> Iterator[Result]:
        """One direction, which needs no whole blocks along the other."""
        row = fp4kit.quantize(x, self.recipe, tensor_amax=amax, scale_layout=self.layout)
        made = side(row, self.layout)
        arrays = Matrix(DeviceArray(x), made.packed, made.scales, None, device(row.tensor_amax), made.tensor_scale)
        quantize_matrix(
            arrays, LaunchRequest(self.recipe, self.dtype, x.shape, self.layout), 0, way("quantize_columns")
        )
        yield from results("row", made, row)


def patches(recipes: list[Recipe]) -> list[Patch]:
    """A case for each recipe, types and options dealt out among them."""
    found = [Patch(r, (BF16, F32, F16)[i % 3], misaligned=i % 4 == 3) for i, r in enumerate(recipes)]
    more = ("mxfp4-te", "nvfp4-modelopt", "mxfp8-te-2d", "nvfp4-te-2d", "mxfp4-flashinfer")
    found += [Patch(r, BF16) for r in recipes if r.id in more]
    square = [r for r in recipes if r.block_rows > 1]
    found += [Patch(r, (BF16, F32)[i % 2], fake=True, misaligned=i % 2 == 1) for i, r in enumerate(square)]
    found += [Patch(r, BF16, tall=True) for r in recipes if r.id in ("nvfp4-te", "mxfp8-te", "mxfp8-te-2d")]
    found += [Patch(r, BF16, layout, hadamard=True) for r in recipes if r.id == "nvfp4-te" for layout in LAYOUTS]
    found += [
        Patch(r, d, misaligned=True, hadamard=True) for r in recipes if r.id == "nvfp4-te-reference" for d in (F32, F16)
    ]
    found += [Patch(r, BF16, ragged=True) for r in square if r.id in ("nvfp4-te-2d", "mxfp8-te-2d")]
    return found + [
        Patch(r, BF16, "swizzled_128x4") for r in recipes if r.id in ("nvfp4-te", "mxfp8-te-2d", "nvfp4-te-2d")
    ]
