"""Define the calls that bench_cpu.py times, and check their results against fp4kit's NumPy specification."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from measure import BF16, POISON
from timing import Call

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import PARTS


class CpuCase(NamedTuple):
    """Describe one call to time.

    Attributes:
        operation: the operation's name in the record, such as "quantize"
        call: the call without arguments
        bytes: the number of bytes that its rate in GB/s counts
        target: the preallocated result that `into` (or `call`) writes to, or None if `call` allocates its result
        into: the call that writes its result into `target`, or None if only `call` is timed
    """

    operation: str
    call: Callable[[], Any]
    bytes: int
    target: Any = None
    into: Callable[[], Any] | None = None

    @property
    def calls(self) -> dict[str, Call]:
        """Return {suffix: call}: "" for `call` and, unless `into` is None, " into" for `into`.

        The key of a time in CpuRow.times ends with this suffix, as in "all into".
        """
        return {"": self.call} if self.into is None else {"": self.call, " into": self.into}


def normal(shape: tuple[int, ...], dtype: Any = BF16) -> np.ndarray:
    """Return normally distributed values from a fixed seed.

    cpu_peers.matrix returns equal values before the cast to `dtype`, so that other libraries get the same input.
    """
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype)


def poison(target: Any) -> None:
    """Fill an array, or the codes and block scales of a Quantized, with the byte 0xEE.

    A check then fails if a call leaves part of the memory unwritten.
    """
    parts = (target.packed, target.block_scale) if isinstance(target, fp4kit.Quantized) else (target,)
    for part in parts:
        if part is not None:
            part.view(np.uint8)[...] = POISON


def check(case: CpuCase) -> float:
    """Raise AssertionError unless the result of every call of the case equals the specification's result.

    Return the seconds that the specification took.
    """
    poison(case.target)
    with fp4kit.specification():
        start = time.perf_counter()
        wanted = case.call()
        seconds = time.perf_counter() - start
    wanted = copy.deepcopy(wanted) if wanted is case.target else wanted
    for call in case.calls.values():
        poison(case.target)
        same(call(), wanted, case.operation)
    return seconds


def same(actual: Any, wanted: Any, name: str) -> None:
    """Raise AssertionError unless two results, or two tuples of results, are bit-identical.

    Raise ValueError if the tuples have different lengths.

    Args:
        actual: the result to check
        wanted: the result that is right
        name: the beginning of the message
    """
    if not isinstance(wanted, tuple):
        assert_same_bits(actual, wanted, name)
        return
    for one, other in zip(actual, wanted, strict=True):
        assert_same_bits(one, other, name)


def quantize(recipe: str, x: np.ndarray, operation: str = "quantize", **options: Any) -> CpuCase:
    """Return the case (calls to time) for quantize of x: with a new result, and with a preallocated result.

    Args:
        recipe: the id of the recipe
        x: the input
        operation: the name of the case in the record
        options: further arguments of fp4kit.quantize
    """
    target = copy.deepcopy(fp4kit.quantize(x, recipe, **options))
    into = lambda: fp4kit.quantize(x, recipe, **options, out=target)  # noqa: E731
    return CpuCase(operation, lambda: fp4kit.quantize(x, recipe, **options), x.nbytes, target, into)


def quantize_whole(recipe: str, x: np.ndarray) -> CpuCase:
    """Return the case (calls to time) for quantize of a very large array.

    At most two results exist at a time: the target, and the new result of a call. The function `quantize` needs memory
    for a third result for a moment, because it copies the target.
    """
    target = fp4kit.quantize(x, recipe)
    into = lambda: fp4kit.quantize(x, recipe, out=target)  # noqa: E731
    return CpuCase("quantize", lambda: fp4kit.quantize(x, recipe), x.nbytes, target, into)


def dequantize(recipe: str, x: np.ndarray, dtype: Any = BF16) -> CpuCase:
    """Quantize x, then return the case (a call to time) that dequantizes the result to `dtype`."""
    q, target = fp4kit.quantize(x, recipe), np.empty(x.shape, dtype)
    into = lambda: fp4kit.dequantize(q, dtype, out=target)  # noqa: E731
    return CpuCase("dequantize", lambda: fp4kit.dequantize(q, dtype), target.nbytes, target, into)


def fake_quantize(recipe: str, x: np.ndarray) -> CpuCase:
    """Return the case (a call to time) that fake-quantizes x. The call always allocates its result."""
    return CpuCase("fake_quantize", lambda: fp4kit.fake_quantize(x, recipe), x.nbytes)


def of_recipe(recipe: str, x: np.ndarray) -> Iterator[CpuCase]:
    """Yield the cases of quantize and dequantize, or the case of fake_quantize if the recipe has no codes."""
    if fp4kit.recipe(recipe).fake_only:
        yield fake_quantize(recipe, x)
        return
    yield quantize(recipe, x)
    yield dequantize(recipe, x)


def operations(recipe: str, x: np.ndarray) -> Iterator[CpuCase]:
    """Yield the cases that `of_recipe` does not have: other axes and roundings, quantize_both, and more.

    The case of transpose is left out unless the recipe has square blocks.
    """
    yield quantize(recipe, x, "quantize along columns", axis=0)
    yield fake_quantize(recipe, x)
    yield CpuCase("quantize_both", lambda: fp4kit.quantize_both(x, recipe), x.nbytes)
    yield quantize(recipe, x, "quantize stochastic", rounding="stochastic", seed=1)
    yield quantize(recipe, x, "quantize hadamard", hadamard=True)
    yield partial_cast(recipe, x)
    yield CpuCase("amax of blocks", lambda: fp4kit.amax(x, recipe), x.nbytes)
    if fp4kit.recipe(recipe).block_rows > 1:
        q = fp4kit.quantize(x, recipe)
        yield CpuCase("transpose", lambda: fp4kit.transpose(q), x.nbytes)


def partial_cast(recipe: str, x: np.ndarray) -> CpuCase:
    """Return the case (a call to time) for partial_cast.

    Its flat shard is the whole matrix except the first element, so that it begins inside a byte and a block.
    """
    shard = x.reshape(-1)[1:]
    amax = fp4kit.partial_amax(shard, x.shape, 1, recipe)
    out = np.empty_like(fp4kit.quantize(x, recipe).packed)

    def call() -> np.ndarray:
        fp4kit.partial_cast(shard, out, amax, x.shape, 1, recipe)
        return out

    return CpuCase("partial_cast", call, x.nbytes, out)


def check_rows(q: fp4kit.Quantized, x: np.ndarray, rows: int = 64) -> None:
    """Raise AssertionError unless the first and the last `rows` rows of q have the specification's codes and scales.

    The specification quantizes only these rows of x, with q.tensor_amax, because it is slow for a large array. Tensor
    scales are not compared.
    """
    for part in (slice(rows), slice(-rows, None)):
        with fp4kit.specification():
            wanted = fp4kit.quantize(x[part], q.recipe, tensor_amax=q.tensor_amax)
        for name in ("packed", "block_scale"):
            assert name in PARTS
            assert_same_bits(getattr(q, name)[part], getattr(wanted, name), f"{q.recipe.id}: {name}")
