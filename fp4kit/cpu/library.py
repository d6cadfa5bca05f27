"""Load the compiled library, declare its functions and their arguments, and set the number of threads they use.
The library is compiled once per level, which is a kind of processor: base, avx2, avx512. The ctypes structures mirror
the C++ structs in source/ field by field; the files there say what the fields mean.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_index, explains_calls, warn
from fp4kit.call.parse import Declined
from fp4kit.cpu.source_digest import digest
from fp4kit.reference.arith import reciprocal_table

ELEMENTS_PER_THREAD = 1 << 16  # with fewer elements per thread, waking another thread costs more than it saves
QUICK_FACTOR = 4  # quick operations (amaxes, decoding by look-up) need this many times as many elements per thread
# The most elements per call to the library. Such a call takes some tens of milliseconds, and Python can handle Ctrl-C
# only between calls.
ELEMENTS_PER_CALL = 1 << 26
_threads: ContextVar[int | None] = ContextVar("threads", default=None)
_default: list[int] = []
_warned: list[str] = []
# True if only the specification computes on NumPy arrays, as within fp4kit.specification().
specification_only: ContextVar[bool] = ContextVar("specification_only", default=False)


_KINDS: dict[str, Any] = {
    "pointer": c_void_p,
    "int64": c_int64,
    "int32": c_int32,
    "float": c_float,
    "double": c_double,
    "words": POINTER(c_uint64),
}


def _fields(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a C struct, from text such as "pointer x out; int64 rows"."""
    groups = (group.split() for group in text.split(";"))
    return [(name, _KINDS[kind]) for kind, *names in groups for name in names]


class SourceMatrix(ctypes.Structure):
    """The address, shape and strides of a matrix in memory. It mirrors the C++ struct Source of source/input_types.h.

    Strides (row_step, column_step) are in elements. hadamard is 1 + the sign mask of a Hadamard transform that the
    library applies while it reads, or 0 for no transform.
    """

    _fields_ = _fields("pointer data; int64 rows columns row_step column_step hadamard")


_KINDS["source"] = SourceMatrix


class EncodeCall(ctypes.Structure):
    """The arguments of the C function fp4kit_encode, which writes the codes and block scales of a matrix.

    source/encode_matrix.h describes the fields.
    """

    _fields_ = _fields(
        "source x; pointer encode decode amax; int64 tensor_step; pointer block_amax factors; int64 block_step; "
        "float min_factor max_factor; pointer random; int64 random_step; words seed; "
        "int64 stream_first stream_stride; pointer packed scales; int64 packed_step scales_step; "
        "pointer needs_fallback; int64 tile_rows tile_columns; "
        "int32 input block_rule element block block_rows threads"
    )


class OwnFormat(ctypes.Structure):
    """The tables by which the library encodes and decodes a user-defined format.

    source/own_format.h describes the fields. cpu/codec.py makes the tables.
    """

    _fields_ = _fields(
        "pointer bounds codes values scale_bounds scale_codes scale_values; float largest; "
        "int32 uses_tables is_nibble has_scales has_pairs"
    )


class AmaxCall(ctypes.Structure):
    """The arguments of the C function fp4kit_amax, which computes the amax of a matrix and those of its blocks.

    source/tensor_scale.h describes the fields.
    """

    _fields_ = _fields(
        "source x; pointer out; int64 out_step tile_rows tile_columns; int32 input block block_rows threads"
    )


class DecodeCall(ctypes.Structure):
    """The arguments of the C function fp4kit_decode, which writes the values of a quantized matrix.

    source/decode_matrix.h describes the fields.
    """

    _fields_ = _fields(
        "pointer packed scales encode decode amax; int64 row_step block_step; pointer out; "
        "int64 rows columns packed_step scales_step out_step; pointer needs_fallback; "
        "int64 tile_rows tile_columns tables_from; int32 decoder output block threads"
    )


class SearchScalesCall(ctypes.Structure):
    """The arguments of the C function fp4kit_search_scales, which finds the best E4M3 scale of each block.

    source/search_scales.h describes the fields.
    """

    _fields_ = _fields(
        "source x; pointer amaxes scales reciprocals weights hessian out; int64 out_step; pointer unproven; "
        "int64 tile_rows tile_columns lower upper; double power; float tensor_amax; "
        "int32 input block_rule block_rows is_pruned threads"
    )


class SearchFactorsCall(ctypes.Structure):
    """The arguments of the C function fp4kit_search_factors, which finds the best multiple of each block's amax.

    source/search_factors.h describes the fields.
    """

    _fields_ = _fields(
        "source x; pointer encode decode amax factors; int64 tensor_step count; pointer out; int64 out_step; "
        "pointer needs_fallback; int64 tile_rows tile_columns; "
        "int32 input block_rule element decoder block factors_by_code threads"
    )


class SearchQuestCall(ctypes.Structure):
    """The arguments of the C functions fp4kit_search_quest, which computes block amaxes by FP-Quant's method QuEST, and
    fp4kit_search_powers and fp4kit_search_ceil_x, which compute them by msmodelslim's methods.

    source/search_quest.h and search_powers.h describe the fields.
    """

    _fields_ = _fields("source x; pointer out; int64 out_step tile_rows tile_columns; int32 input block emax threads")


class ProductOperand(ctypes.Structure):
    """One operand of a ProductCall: a matrix of codes with its scales. source/matmul.h describes the fields."""

    _fields_ = _fields(
        "pointer codes scales factors chains values powers scale_values scale_powers; "
        "int64 codes_step scales_step factors_step chains_step; int32 code_bits block"
    )


_KINDS["operand"] = ProductOperand


class ProductCall(ctypes.Structure):
    """One matrix product, or some rows of it. The C function fp4kit_matmul takes an array of such structs.

    source/matmul.h describes the fields.
    """

    _fields_ = _fields(
        "operand a b; pointer c out; int64 rows columns length; "
        "int32 adder step promote fraction_bits output_bits zero_exponent sums c_vanishes group in_turn output input"
    )


class RotateCall(ctypes.Structure):
    """The arguments of the C function fp4kit_rotate, which rotates blocks of elements.

    source/rotate.h describes the fields.
    """

    _fields_ = _fields(
        "pointer x out signs matrices; int64 outer length inner matrix_step; float factor; "
        "int32 input size is_inverse threads"
    )


LEVELS = ("base", "avx2", "avx512")  # from the lowest to the highest


class CompiledLibrary(NamedTuple):
    """The compiled library that this process uses, if any.

    functions: its C functions; None if no library can be used.
    level: the level of the library, such as "avx2"; or the reason why no library can be used.
    why: the reason why no higher level is used; "" if this is the highest level that the processor supports, or if no
        library can be used.
    """

    functions: Any
    level: str
    why: str = ""


def _open(level: str) -> Any:
    """Open the library of a level, and return it, without checking that it was compiled from the current sources."""
    found = [path for path in Path(__file__).parent.glob(f"_{level}.*") if path.suffix in (".so", ".dylib")]
    if not found:
        where = "where there is a C++ compiler" if level == "base" else "on this machine, or with FP4KIT_CPU_LEVELS=all"
        raise OSError(f"it is not compiled here; install fp4kit {where}")
    # The shortest name has no Python tag, which libraries compiled by fp4kit 0.2 have.
    functions = ctypes.CDLL(str(min(found, key=lambda path: len(path.name))))
    functions.fp4kit_digest.restype = functions.fp4kit_level.restype = c_char_p
    return functions


def _load(level: str) -> Any:
    """Return the C functions of a level's library, with their argument and result types set."""
    functions = _open(level)
    if functions.fp4kit_digest().decode() != digest():
        raise OSError("it was compiled from other sources; install fp4kit again")
    for name, result, arguments in (
        *((name, c_int, [c_char_p]) for name in ("block_rule", "element", "tensor_rule", "decoder")),
        ("set_reciprocals", None, [c_void_p]),
        ("encode", None, [POINTER(EncodeCall)]),
        ("amax", c_uint32, [POINTER(AmaxCall)]),
        ("quantize_matrix", c_int32, [POINTER(EncodeCall), *[c_void_p] * 6, c_int32, c_int32]),
        ("fake_quantize", c_int32, [POINTER(EncodeCall), POINTER(DecodeCall), *[c_void_p] * 4, c_int32, c_int32]),
        ("group", None, [c_void_p, c_int64, c_void_p, c_int32]),
        ("decode", None, [POINTER(DecodeCall)]),
        ("encode_own", None, [POINTER(EncodeCall), POINTER(OwnFormat)]),
        ("decode_own", None, [POINTER(DecodeCall), POINTER(OwnFormat)]),
        ("dequantize", c_int32, [POINTER(DecodeCall), *[c_void_p] * 4, c_int32]),
        ("search_scales", None, [POINTER(SearchScalesCall)]),
        ("search_factors", None, [POINTER(SearchFactorsCall)]),
        ("search_quest", None, [POINTER(SearchQuestCall)]),
        ("search_powers", None, [POINTER(SearchQuestCall)]),
        ("search_ceil_x", None, [POINTER(SearchQuestCall), c_void_p]),
        ("ceil_x_amaxes", None, [c_void_p, c_int64, c_int32, c_int32]),
        ("matmul", None, [POINTER(ProductCall), c_int64, c_int32]),
        ("low_rank", None, [*[c_void_p] * 3, *[c_int64] * 3, c_int32]),
        ("compare_stored", c_int64, [*[c_void_p] * 6, c_int64, c_int64, c_int32, c_float]),
        ("rotate", None, [POINTER(RotateCall)]),
        ("transpose", None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32]),
    ):
        function = getattr(functions, f"fp4kit_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


@cache
def library() -> CompiledLibrary:
    """Return the library of the highest level that this processor supports and that can be loaded."""
    try:
        best = _open("base").fp4kit_level().decode()  # correct even if the library was compiled from other sources
    except (OSError, AttributeError) as error:
        return CompiledLibrary(None, str(error))
    functions, missing = None, []
    for level in reversed(LEVELS[: LEVELS.index(best) + 1]):
        try:
            functions = _load(level)
            break
        except (OSError, AttributeError) as error:
            missing.append((level, str(error)))
    if functions is None:
        found = CompiledLibrary(None, missing[-1][1])
        _warn_once(f"fp4kit computes by its specification in NumPy, which is 10 to 120 times slower: {found.level}")
        return found
    functions.fp4kit_set_reciprocals(reciprocal_table().ctypes.data)
    found = CompiledLibrary(functions, level, "; ".join(f"cpu-{name}: {error}" for name, error in missing))
    if found.why:
        _warn_once(
            f"fp4kit computes by its engine for {level} processors, which is slower than this one's: {found.why}"
        )
    return found


def _warn_once(text: str) -> None:
    """Issue a RuntimeWarning, unless this function has warned before in this process."""
    if not _warned:
        _warned.append(text)  # before the warning, because a filter may turn it into an exception
        warn(text, RuntimeWarning)


def functions() -> Any:
    """Return the library's C functions. Raise Declined if there is no usable library."""
    found = library()
    if found.functions is None:
        raise Declined(f"the CPU engine is not available: {found.level}")
    return found.functions


def is_compiled() -> bool:
    """Return whether calls on NumPy arrays use the compiled engine in this thread or task."""
    return not specification_only.get() and library().functions is not None


@explains_calls
def set_num_threads(count: int) -> None:
    """Set how many CPU threads one call may use on NumPy arrays, in this process from now on.

    The default is OMP_NUM_THREADS if it is set, as in the workers of joblib and dask. Otherwise, the default is the
    number of CPUs that the process may run on.

    If two calls run at the same time, only the first uses several threads. The second runs on its calling thread alone.

    Args:
        count: a positive int; 1 uses only the calling thread.

    Raises:
        TypeError: count is not an int.
        ValueError: count is not positive.

    Examples:
        >>> import fp4kit
        >>> before = fp4kit.num_threads()
        >>> fp4kit.set_num_threads(1)
        >>> fp4kit.num_threads()
        1
        >>> fp4kit.set_num_threads(before)
    """
    _default[:] = [_checked("set_num_threads", count)]


def _checked(op: str, count: Any) -> int:
    """Return a number of threads as an int."""
    number = as_index(op, "threads", count)
    if number < 1:
        raise ValueError(f"{op}: threads is {number}; needs 1 or more")
    return number


def num_threads() -> int:
    """Return how many CPU threads one call may use on NumPy arrays in the current thread or task.

    Returns:
        The number that the innermost `with fp4kit.threads(...)` of this thread or task sets. Outside of a `with
        fp4kit.threads` block, it is the number from set_num_threads. If that was not called, it is the default that
        set_num_threads describes.

    Examples:
        >>> import fp4kit
        >>> with fp4kit.threads(3):
        ...     fp4kit.num_threads()
        3
    """
    in_context = _threads.get()
    if in_context is not None:
        return in_context
    if not _default:
        _default[:] = [_default_threads()]
    return _default[0]


def _default_threads() -> int:
    """Return the first number in OMP_NUM_THREADS if it is positive, else the number of processors of this process."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@explains_calls
def threads(count: int) -> AbstractContextManager[None]:
    """Limit the CPU threads of each call on NumPy arrays within a with block.

    The limit applies only to the current thread or task.

    Args:
        count: a positive int; 1 uses only the calling thread.

    Returns:
        A context manager, which raises the errors below when the with block is entered.

    Raises:
        TypeError: count is not an int.
        ValueError: count is not positive.

    Examples:
        >>> import fp4kit
        >>> with fp4kit.threads(1):
        ...     fp4kit.num_threads()
        1
    """
    return limited_threads("threads", count)


@contextmanager
def limited_threads(op: str, count: int) -> Iterator[None]:
    """Return the context manager that threads(count) returns."""
    token = _threads.set(_checked(op, count))
    try:
        yield
    finally:
        _threads.reset(token)


def alone() -> None:
    """Make all further calls from the current thread or task use this thread alone."""
    _threads.set(1)


def threads_for(elements: int, is_quick: bool = False) -> int:
    """Return how many threads a call on this number of elements should use: from 1 to num_threads()."""
    return max(1, min(num_threads(), elements // (ELEMENTS_PER_THREAD * (QUICK_FACTOR if is_quick else 1))))


def _reader() -> Callable[[np.ndarray], int]:
    """Return a function that returns the address of an array's first element."""
    # ndarray.ctypes.data takes 0.8 us, because it allocates an object, and a call needs five addresses.
    head, read = object.__basicsize__, ctypes.c_size_t.from_address

    def data_pointer(a: np.ndarray) -> int:
        return read(id(a) + head).value

    probes = np.zeros(3)[1:], np.zeros((), np.uint8), np.zeros((2, 2), np.float32).T[::-1]
    is_right = sys.implementation.name == "cpython" and all(data_pointer(a) == a.ctypes.data for a in probes)
    return data_pointer if is_right else lambda a: int(a.ctypes.data)


_read = _reader()


def address(a: np.ndarray | None) -> int | None:
    """Return the address of an array's first element, or None for None."""
    return None if a is None else _read(a)
