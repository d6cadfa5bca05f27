"""Describe rotations of weights: Hadamard transforms of blocks of columns, with or without sign changes. A row of n
columns is multiplied by H / sqrt(n), where H is Sylvester's Hadamard matrix, after its signs are changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.ops.transforms import hadamard, random_signs


@dataclass(frozen=True)
class WeightRotation:
    """Describe a Hadamard transform of blocks of columns, as fp4kit.hadamard defines it.

    Attributes:
        size: the number of columns per block.
        signs: the signs of the transform's inputs, one "+" or "-" per column of a block; "" for no sign changes.
        inverse: True to undo the transform.
    """

    size: int
    signs: str = ""
    inverse: bool = False

    @classmethod
    def drawn(cls, size: int, seed: int | None) -> WeightRotation:
        """Return a transform with the signs that fp4kit.random_signs(size, seed) gives; without signs if seed is
        None.
        """
        return cls(size) if seed is None else cls(size, _text(random_signs(size, seed)))

    @property
    def factors(self) -> npt.NDArray[np.int8]:
        """The signs as factors 1 and -1, a new array int8 (size,); all 1 if there are no sign changes."""
        return np.array([-1 if sign == "-" else 1 for sign in self.signs or "+" * self.size], np.int8)

    @property
    def inverted(self) -> WeightRotation:
        """The transform that undoes this one: a copy in which ``inverse`` is the opposite."""
        return replace(self, inverse=not self.inverse)

    @property
    def matrix(self) -> npt.NDArray[np.float32]:
        """The matrix M of the transform, float32 [size, size] with elements 1 and -1."""
        return _sylvester(self.size) * self.factors[:, None].astype(np.float32)

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the matrix ``values`` with every row rotated, as a new array of the same dtype."""
        # The number of columns must be a multiple of ``size``.
        return hadamard(values, self.size, signs=self.factors if self.signs else None, inverse=self.inverse)


def rotation_of(matrix: np.ndarray) -> WeightRotation | None:
    """Return the transform that has this matrix (see WeightRotation.matrix), with ``inverse`` False."""
    size = len(matrix)
    if size not in HADAMARD_SIZES or matrix.shape != (size, size):
        return None
    signs = _text(matrix[:, 0])  # the first column of Sylvester's matrix is 1
    found = WeightRotation(size, signs if "-" in signs else "")
    return found if np.array_equal(matrix.astype(np.float32), found.matrix) else None


def _text(factors: np.ndarray) -> str:
    """Return factors 1 and -1 as text for WeightRotation.signs: "+" for 1, "-" for -1."""
    return "".join("-" if factor < 0 else "+" for factor in factors)


def _sylvester(size: int) -> npt.NDArray[np.float32]:
    """Return Sylvester's Hadamard matrix, float32 [size, size], with elements 1 and -1."""
    # ``size`` must be one of HADAMARD_SIZES.
    return np.rint(hadamard(np.eye(size, dtype=np.float32), size) * np.sqrt(np.float32(size)))
