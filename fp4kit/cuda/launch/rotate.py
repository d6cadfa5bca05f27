"""Launch rotate.cu, which rotates blocks along an axis by a Hadamard transform or by given matrices."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import Launch, address, grid
from fp4kit.reference.rotate import hadamard_factor

TILE = 4096  # elements that a thread block takes at a time, as in rotate.cu
_NAMES = ("x", "out", "signs", "matrices", "outer", "length", "inner", "matrix_step")
_ARGUMENTS = np.dtype([(name, "u8") for name in _NAMES])


class Kernel(NamedTuple):
    """Name an instantiation of rotate.cu.

    Attributes:
        dtype: the dtype of the elements.
        size: the number of elements of a block.
        contiguous: whether the elements of a block are neighbors in memory.
        has_signs, has_matrices, inverse: whether there are signs, matrices instead of a Hadamard transform, and whether
            signs apply to the results.
    """

    dtype: np.dtype
    size: int
    contiguous: bool
    has_signs: bool
    has_matrices: bool
    inverse: bool


def source(kernel: Kernel) -> str:
    """Return the C++ text of an instantiation."""
    factor = float(hadamard_factor(kernel.size)).hex()
    struct = f"constexpr int kSize = {kernel.size};\nconstexpr float kFactor = {factor}f;\n"
    return instantiation(
        "rotate",
        struct,
        Input=TYPES[kernel.dtype],
        kContiguous=kernel.contiguous,
        kHasSigns=kernel.has_signs,
        kHasMatrices=kernel.has_matrices,
        kIsInverse=kernel.inverse,
    )


@cache
def _function(kernel: Kernel, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    return loader.function(source(kernel), "rotate_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(kernel: Kernel, shape: tuple[int, int, int], matrix_step: int, device: int) -> Launch:
    """Return the prepared launch for arrays of this shape (outer, length, inner)."""
    outer, length, inner = shape
    lanes = TILE // kernel.size
    groups = -(-outer // lanes) if kernel.contiguous else outer * -(-inner // lanes)
    blocks = groups * (length // kernel.size)
    return Launch(_function(kernel, device), grid(blocks, device), _ARGUMENTS, *shape, matrix_step)


def rotate(x: Any, out: Any, size: int, signs: Any, matrices: Any, inverse: bool) -> None:
    """Rotate the blocks along the middle axis of x, and write the results into out, on the current stream.

    Args:
        x, out: contiguous (outer, length, inner), not empty, of one dtype.
        size, inverse: as in Rotation.
        signs: uint8 (length,) on the device, 1 for a negative sign; None without signs.
        matrices: float32 (n, size, size), contiguous, for n = 1 or n = length / size; None for a Hadamard transform.
    """
    kernel = Kernel(x.dtype, size, x.shape[2] == 1, signs is not None, matrices is not None, inverse)
    step = 0 if matrices is None or len(matrices) == 1 else size * size
    _launch(kernel, x.shape, step, x.device.id)(*map(address, (x, out, signs, matrices)))
