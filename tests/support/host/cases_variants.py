"""Cases of variants of recipes: other element formats, blocks of zeros under other shapes, scales next to a tie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from host.cases import Quantize, Result, device
from host.cases_patch import Patch
from host.harness import DeviceArray

from fp4kit.cuda.launch import matrix as launch
from fp4kit.cuda.launch.matrix import Matrix
from fp4kit.formats import ElementFormat
from fp4kit.recipes import RECIPES, Recipe

E2M1_BIAS0 = ElementFormat("E2M1", 2, 1, 0)  # the name does not tell
E2M1_BIAS3 = ElementFormat("E2M1_BIAS3", 2, 1, 3)
E3M4 = ElementFormat("E3M4", 3, 4, 3)
E4M3_IEEE = ElementFormat("E4M3_IEEE", 4, 3, 7, specials="ieee")


def of_elements(id: str, element: ElementFormat) -> Recipe:
    """A recipe with other elements; with square blocks, too, where the id of a recipe of the table goes on with -2d."""
    base = RECIPES.get(id) or replace(RECIPES[id.removesuffix("-2d")], block=(16, 16))
    return replace(base, id=f"{id}-{element.name}-{element.bias}", element=element)


def square(id: str, rows: int = 16, columns: int = 16) -> Recipe:
    """A recipe with blocks of several rows."""
    return replace(RECIPES[id], id=f"{id}-{rows}x{columns}", block=(rows, columns))


def with_zeros(x: np.ndarray) -> np.ndarray:
    """The matrix with zeros of both signs in whole blocks of 16x16, and one block below the normal range of float32."""
    x = x.copy()
    x[16:32, 16:48] = np.copysign(np.zeros(1, x.dtype), x[16:32, 16:48])
    x[:16, :16] = np.float32(3e-39)
    return x


@dataclass(frozen=True)
class ZeroBlocks(Quantize):
    """Blocks of zeros, and of elements that ftz arithmetic takes for zeros, in all matrices that are tall enough."""

    def matrix(self, kind: str) -> np.ndarray:
        return with_zeros(super().matrix(kind))


@dataclass(frozen=True)
class Subnormal(Quantize):
    """Subnormal elements of both signs among ordinary ones."""

    def matrix(self, kind: str) -> np.ndarray:
        x = super().matrix(kind).copy()
        tiny = np.finfo(x.dtype) if x.dtype.kind == "f" else ml_dtypes.finfo(x.dtype)
        x[:, 3::8], x[:, 5::8] = tiny.smallest_subnormal * 8, -tiny.smallest_subnormal * 8
        return x


@dataclass(frozen=True)
class ZeroPatches(Patch):
    """The same along columns, both ways, and square."""

    def matrices(self) -> Iterator[np.ndarray]:
        yield from map(with_zeros, super().matrices())


# Under a tensor amax of 3, whose encode scale is 896: 896 TIE / 6 = 21 / 256 is a tie of E4M3, whose even neighbour is
# below.
TIE = 9 * 2.0**-14
TE_CODES = [
    27 + 8 * k for k in range(12)
]  # te's product is above the tie; (amax * S_enc) * (1 / 6) is not, and has 26 + 8 k


def blocks_at_ties(dtype: np.dtype) -> np.ndarray:
    """(12, 16): block k has the amax 2^k TIE, which every type holds."""
    x = np.outer(np.exp2(np.arange(12)) * TIE, np.linspace(-0.5, 1, 16))
    return x.astype(dtype)


@dataclass(frozen=True)
class TeProduct(Quantize):
    """The scales of blocks where amax * (S_enc * (1 / 6)) and (amax * S_enc) * (1 / 6) have other codes."""

    def run(self) -> Iterator[Result]:
        x, amax = blocks_at_ties(self.dtype), np.float32(3)
        packed, scales, decode = (DeviceArray.output(s, t) for s, t in (((12, 8), "u1"), ((12, 1), "u1"), ((), "f4")))
        launch.quantize_matrix(Matrix(DeviceArray(x), packed, scales, None, device(amax), decode), self.work(x))
        yield "scales", scales.array[:, 0], np.array(TE_CODES, np.uint8)
