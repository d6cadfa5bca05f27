"""Launch the kernels that rotate blocks along an axis by a Hadamard transform or by given matrices.
Arrays are reshaped to (outer, length, inner), so that the blocks lie along the middle axis. Signs of -1 or 1 multiply
the elements before the rotation or, for an inverse rotation, the results.

hadamard_rows.cu computes Hadamard transforms of blocks whose elements are neighbors in memory. hadamard_columns.cu
computes Hadamard transforms of other blocks. Both need aligned arrays. rotate.cu does the rest.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Rotation
from fp4kit.cuda import compiler
from fp4kit.cuda.compiler import TYPES, instantiation
from fp4kit.cuda.dispatch import CACHE_SIZE
from fp4kit.cuda.launch import Launch, address, as_aligned, grid
from fp4kit.reference.stochastic import hadamard_factor

TILE = 4096  # elements that a thread block of rotate.cu or hadamard_rows.cu takes at a time
COLUMNS_TILE = 8192  # elements that a thread block of hadamard_columns.cu takes at a time
_NAMES = ("x", "out", "signs", "matrices", "outer", "length", "inner", "matrix_step")
_ARGUMENTS = np.dtype([(name, "u8") for name in _NAMES])
_ROWS_ARGUMENTS = np.dtype([(name, "u8") for name in ("x", "out", "signs", "count", "length")])
_COLUMNS_ARGUMENTS = np.dtype([(name, "u8") for name in ("x", "out", "signs", "outer", "length", "inner")])
MAX_ROW = 1 << 31  # elements; hadamard_rows.cu takes only rows that are shorter than this


class RotateKernel(NamedTuple):
    """The template arguments of rotate.cu.

    Attributes:
        dtype: the dtype of the elements.
        size: the number of elements of a block.
        contiguous: whether the elements of a block are neighbors in memory.
        has_signs: whether elements or results are multiplied by signs.
        has_matrices: whether matrices are given instead of a Hadamard transform.
        inverse: whether signs apply to the results instead of the elements.
    """

    dtype: np.dtype
    size: int
    contiguous: bool
    has_signs: bool
    has_matrices: bool
    inverse: bool


def _constants(size: int) -> str:
    """Return the C++ text that defines two constants for blocks of `size` elements: kSize and kFactor."""
    return f"constexpr int kSize = {size};\nconstexpr float kFactor = {float(hadamard_factor(size)).hex()}f;\n"


def hadamard_source(contiguous: bool, dtype: np.dtype, size: int, has_signs: bool, inverse: bool) -> str:
    """Return the C++ text that instantiates hadamard_rows.cu, or hadamard_columns.cu if contiguous is False."""
    name = "hadamard_rows" if contiguous else "hadamard_columns"
    return instantiation(name, _constants(size), Input=TYPES[dtype], kHasSigns=has_signs, kIsInverse=inverse)


def rotate_source(kernel: RotateKernel) -> str:
    """Return the C++ text that instantiates rotate.cu with the template arguments `kernel`."""
    return instantiation(
        "rotate",
        _constants(kernel.size),
        Input=TYPES[kernel.dtype],
        kContiguous=kernel.contiguous,
        kHasSigns=kernel.has_signs,
        kHasMatrices=kernel.has_matrices,
        kIsInverse=kernel.inverse,
    )


@cache
def _function(kernel: RotateKernel, device: int) -> Any:
    """Return rotate.cu, compiled with the template arguments `kernel`, as a CuPy function on a device."""
    return compiler.function(rotate_source(kernel), "rotate_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(kernel: RotateKernel, shape: tuple[int, int, int], matrix_step: int, device: int) -> Launch:
    """Return the prepared launch of rotate.cu for arrays of the shape (outer, length, inner)."""
    outer, length, inner = shape
    lanes = TILE // kernel.size
    groups = -(-outer // lanes) if kernel.contiguous else outer * -(-inner // lanes)
    blocks = groups * (length // kernel.size)
    return Launch(_function(kernel, device), grid(blocks, device), _ARGUMENTS, *shape, matrix_step)


@cache
def _hadamard_function(device: int, contiguous: bool, *arguments: Any) -> Any:
    """Return the compiled kernel of hadamard_source(contiguous, *arguments) as a CuPy function on a device."""
    name = "hadamard_rows_kernel" if contiguous else "hadamard_columns_kernel"
    return compiler.function(hadamard_source(contiguous, *arguments), name, device)


@lru_cache(CACHE_SIZE)
def _hadamard_launch(
    shape: tuple[int, int, int], device: int, dtype: np.dtype, size: int, has_signs: bool, inverse: bool
) -> Launch:
    """Return the prepared launch of a Hadamard transform of arrays of the shape (outer, length, inner)."""
    outer, length, inner = shape
    function = _hadamard_function(device, inner == 1, dtype, size, has_signs, inverse)
    if inner == 1:
        return Launch(function, grid(-(-outer * length // TILE), device), _ROWS_ARGUMENTS, outer * length, length)
    tiles = outer * (length // size) * -(-inner * size // COLUMNS_TILE)
    return Launch(function, grid(tiles, device), _COLUMNS_ARGUMENTS, *shape)


def _takes_hadamard(x: Any, out: Any) -> bool:
    """Return True if hadamard_rows.cu or hadamard_columns.cu can transform x (outer, length, inner) into out."""
    # If inner is 1, both arrays must begin at multiples of 16 bytes, and length must be below MAX_ROW (2^31).
    _, length, inner = x.shape
    if inner == 1:
        return length < MAX_ROW and x.data.ptr % 16 == 0 and out.data.ptr % 16 == 0
    return inner * x.itemsize % 4 == 0 and x.data.ptr % 4 == 0 and out.data.ptr % 4 == 0


def launch_rotate(x: Any, out: Any, size: int, signs: Any, matrices: Any, inverse: bool) -> None:
    """Rotate the blocks along the middle axis of x, and write the results into out, on the current stream."""
    if matrices is None and _takes_hadamard(x, out):
        launch = _hadamard_launch(x.shape, x.device.id, x.dtype, size, signs is not None, inverse)
        launch(*map(address, (x, out, signs)))
        return
    kernel = RotateKernel(x.dtype, size, x.shape[2] == 1, signs is not None, matrices is not None, inverse)
    step = 0 if matrices is None or len(matrices) == 1 else size * size
    _launch(kernel, x.shape, step, x.device.id)(*map(address, (x, out, signs, as_aligned(matrices))))


@lru_cache(64)
def _signs(signs: bytes, device: int) -> Any:
    """Return the signs of a Hadamard transform as a uint8 array on the current device: 1 for negative, 0 for
    positive.
    """
    # The copy is complete when this function returns, because later calls may use the array on other streams.
    cupy = imports.cupy()
    array = cupy.asarray(np.frombuffer(signs, np.uint8))
    cupy.cuda.get_current_stream().synchronize()
    return array


def rotate(r: Rotation) -> Any:
    """Rotate the blocks of the array in a Rotation."""
    cupy, device = imports.cupy(), r.x.device.id
    with imports.making_current(device):
        x = cupy.ascontiguousarray(r.x).reshape(r.shape)
        out = cupy.empty(r.x.shape, r.x.dtype)
        if x.size:
            signs = None if r.signs is None else _signs(r.signs.tobytes(), device)
            matrices = None if r.matrices is None else cupy.asarray(r.matrices)
            launch_rotate(x, out.reshape(r.shape), r.size, signs, matrices, r.inverse)
        return out
