"""Add the update of a LoRA adapter to the rows of a weight, as PEFT merges it: W + s (B A), with A [r, K] and B [N, r].

Numerics: A, B, W and s are taken as float32. B A is NumPy's float32 product, in which every element is a chain of fused
multiply-adds in the order of the rank (with NumPy's OpenBLAS on x86-64). It is multiplied by s, then added to W in
float32. An unquantized W keeps its dtype: the sum is rounded to it, once. For an embedding, PEFT also rounds the update
to the dtype of W before it adds it. Source: peft 0.21 tuners/lora/layer.py merge, with adapters in float32 (default).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee


class UpdateRows(NamedTuple):
    """The update of some rows: b float32 [n, r], a float32 [r, K], and the factor of their product.

    With ``rounded``, the update is rounded to the dtype of the values before it is added.

    Values (n, K) that it is added to may be those of any rows, because row i of b belongs to row i of the values.
    """

    b: npt.NDArray[np.float32]
    a: npt.NDArray[np.float32]
    scale: np.float32
    rounded: bool = False

    @property
    def delta(self) -> npt.NDArray[np.float32]:
        """The update itself, float32 [n, K]."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(self.b @ self.a, self.scale, dtype=np.float32)

    @ieee("merge_adapter")
    def added_to(self, values: np.ndarray) -> np.ndarray:
        """Return values + delta, computed in float32 and rounded to the dtype of ``values``."""
        with np.errstate(over="ignore", invalid="ignore"):
            delta = self.delta.astype(values.dtype).astype(np.float32) if self.rounded else self.delta
            return (values.astype(np.float32, copy=False) + delta).astype(values.dtype, copy=False)

    def rows(self, index: Any) -> UpdateRows:
        """Return the update of the rows that ``index``, a slice or an array, selects."""
        return self._replace(b=self.b[index])
