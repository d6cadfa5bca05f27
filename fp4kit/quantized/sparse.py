"""Define Sparse, a matrix with 2:4 sparsity, as matrix units and cuSPARSELt store it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import explains_class
from fp4kit.arrays.imports import import_arrays, module_of
from fp4kit.layouts import pack, unpack

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")


@explains_class
@dataclass(frozen=True, eq=False)
class Sparse:
    """A matrix (M, K) with at most two elements other than zero among each four along K (2:4 sparsity).

    fp4kit.matmul takes it as A, and adds as the sparse instructions of a matrix unit do: a step has twice as many
    elements along K as a dense one, and the elements of B that A does not keep are not multiplied.

    Args:
        values: the kept elements (M, K / 2), two per group of four: a NumPy or CuPy array of float16, bfloat16,
            float8_e4m3fn, float8_e5m2, int8 or uint8.
        metadata: uint8 (M, K / 8). A group has four bits, `first | second << 2`: the positions of its two elements,
            first < second. A byte holds two groups, the first in the low half, as PTX's mma.sp and tcgen05.mma number
            them.

    Raises:
        TypeError: an argument is not an array of these dtypes.
        ValueError: shapes do not fit, K is not a multiple of 8, or the positions of a group do not ascend.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float16([[0, 1, 0, 2, 3, 0, 0, 0]])
        >>> s = fp4kit.Sparse.compress(x)
        >>> s.values, s.metadata, np.array_equal(s.expand(), x)
        (array([[1., 2., 3., 0.]], dtype=float16), array([[205]], dtype=uint8), True)
    """

    values: Any
    metadata: Any

    def __post_init__(self) -> None:
        for name, allowed in (("values", _DTYPES), ("metadata", ("uint8",))):
            x = getattr(self, name)
            is_known = isinstance(x, np.ndarray) or type(x).__module__.startswith("cupy")
            found = str(x.dtype) if is_known else type(x).__name__
            if found not in allowed:
                raise TypeError(f"Sparse: {name} is {found}; needs a NumPy or CuPy array of {', '.join(allowed)}")
        if self.values.ndim != 2 or self.values.shape[1] % 4:
            raise ValueError(f"Sparse: values has shape {self.values.shape}; needs (M, K / 2), with K a multiple of 8")
        if self.metadata.shape != (rows := len(self.values), self.values.shape[1] // 4):
            raise ValueError(
                f"Sparse: metadata has shape {self.metadata.shape}; needs {(rows, self.values.shape[1] // 4)}"
            )
        first, second = self._positions()
        if bool((first >= second).any()):
            raise ValueError("Sparse: metadata has a group whose positions do not ascend")

    def __repr__(self) -> str:
        """Return the shape and the dtype."""
        return f"Sparse({self.shape[0]} x {self.shape[1]}, {self.values.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (M, K) of the whole matrix."""
        return len(self.values), 2 * self.values.shape[1]

    def _positions(self) -> tuple[Any, Any]:
        """Return the positions of the first and of the second element of each group, (M, K / 4)."""
        nibbles = unpack(self.metadata)
        return nibbles & 3, nibbles >> 2

    @classmethod
    def compress(cls, x: Any) -> Sparse:
        """Return a matrix without the zeros that 2:4 sparsity leaves out, as cuSPARSELt chooses them.

        If a group has one element other than zero, the last of the others is kept too; if it has none, positions 2 and
        3 are. -0 counts as zero.

        Raises:
            TypeError: x is no array of a dtype that `values` may have.
            ValueError: x is no matrix, K is not a multiple of 8, or a group has three or four elements.
        """
        kind = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
        if kind not in _DTYPES:
            raise TypeError(f"Sparse.compress: x is {kind}; needs an array of {', '.join(_DTYPES)}")
        (x,) = (x,) if isinstance(x, np.ndarray) else import_arrays("Sparse.compress", x=x)
        if x.ndim != 2 or x.shape[1] % 8:
            raise ValueError(f"Sparse.compress: x has shape {x.shape}; needs (M, K) with K a multiple of 8")
        library = module_of(x)
        groups = library.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(len(x), -1, 4)
        is_zero = (groups if "int" in kind else groups & ((1 << 8 * x.dtype.itemsize - 1) - 1)) == 0
        if bool((excess := (~is_zero).sum(-1) > 2).any()):
            row, group = (int(i) for i in library.argwhere(excess)[0])
            raise ValueError(
                f"Sparse.compress: x[{row}, {4 * group}:{4 * group + 4}] has more than two elements other than zero"
            )
        places = library.arange(4)
        kept = library.argsort(library.where(is_zero, 7 - places, places), -1)[..., :2]
        kept = library.sort(kept, -1)
        values = library.take_along_axis(groups, kept, -1).reshape(len(x), -1).view(x.dtype)
        nibbles = (kept[..., 0] | kept[..., 1] << 2).astype(np.uint8)
        return cls(values, pack(nibbles))

    def expand(self) -> Any:
        """Return the whole matrix (M, K), with zeros where nothing is kept."""
        library = module_of(self.values)
        bits = self.values.view(f"u{self.values.dtype.itemsize}")
        x = library.zeros((len(bits), bits.shape[1] // 2, 4), bits.dtype)
        for place, value in zip(self._positions(), (bits[:, ::2], bits[:, 1::2]), strict=True):
            for i in range(4):
                x[..., i] |= library.where(place == i, value, bits.dtype.type(0))
        return x.reshape(self.shape).view(self.values.dtype)

    def to_cusparselt(self) -> np.ndarray:
        """Return, on the host, the bytes that cusparseLtSpMMACompress makes on Hopper: the values, then the metadata.

        The metadata are reordered in tiles of 64 rows, and padded to whole ones. Recorded with the cuSPARSELt of
        PyTorch 2.11; where its buffer is longer, the bytes beyond these are undefined.

        Raises:
            ValueError: K is not a multiple of 128.
        """
        values, metadata = (x if isinstance(x, np.ndarray) else x.get() for x in (self.values, self.metadata))
        places, count = _places("Sparse.to_cusparselt", self.shape, values.itemsize)
        nibbles = np.full(count, 14, np.uint8)  # 14: positions 2 and 3
        nibbles[places] = unpack(metadata)
        return np.concatenate([np.ascontiguousarray(values).view(np.uint8).ravel(), pack(nibbles)])

    @classmethod
    def from_cusparselt(cls, buffer: np.ndarray, shape: tuple[int, int], dtype: Any) -> Sparse:
        """Return the matrix of a buffer that cusparseLtSpMMACompress made on Hopper.

        Args:
            buffer: uint8, a NumPy array; bytes behind the metadata are ignored.
            shape: the shape (M, K) of the matrix; K is a multiple of 128.
            dtype: the dtype of the values, such as np.float16.

        Raises:
            TypeError: buffer is no NumPy array of uint8.
            ValueError: the buffer is too short, K is not a multiple of 128, or positions do not ascend.
        """
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8:
            raise TypeError("Sparse.from_cusparselt: buffer must be a NumPy array of uint8")
        kind = np.dtype(getattr(ml_dtypes, str(dtype), dtype) if isinstance(dtype, str) else dtype)
        places, count = _places("Sparse.from_cusparselt", shape, kind.itemsize)
        size, flat = shape[0] * shape[1] // 2 * kind.itemsize, buffer.ravel()
        if flat.size < size + count // 2:
            raise ValueError(f"Sparse.from_cusparselt: buffer has {flat.size} bytes; needs {size + count // 2}")
        nibbles = unpack(flat[size : size + count // 2])[places]
        values = flat[:size].view(kind).reshape(shape[0], shape[1] // 2)
        return cls(values, pack(nibbles))


def _places(op: str, shape: tuple[int, int], size: int) -> tuple[np.ndarray, int]:
    """Return the index of the four bits of every group (M, K / 4) in cuSPARSELt's metadata, and the number of all.

    size: the bytes per value, 1 or 2.
    """
    rows, K = shape
    if K % 128:
        raise ValueError(f"{op}: K is {K}; needs a multiple of 128, the only layout that is known")
    r, g = np.indices((rows, K // 4))
    if size == 2:
        low = (r >> 3 & 1) | (g >> 2 & 1) << 1 | (g & 3) << 2 | (r & 7) << 4 | (r >> 4 & 3) << 7 | g >> 3 << 9
    else:
        low = (g & 1) | (r >> 3 & 1) << 1 | (g >> 3 & 1) << 2 | (g >> 1 & 3) << 3 | (r & 7) << 5
        low |= (r >> 4 & 3) << 8 | g >> 4 << 10
    return low + (r >> 6) * 16 * K, -(-rows // 64) * 16 * K
