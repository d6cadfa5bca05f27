"""cast_master_weights gives every process the bytes of quantizing the whole matrices, for any partition."""

from __future__ import annotations

import re
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit import Shard
from fp4kit.distributed import SingleProcess
from fp4kit.testing import assert_same_bits

NAMES = ("nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "nvfp4-modelopt")


class Threads:
    """A group whose processes are threads, for tests."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def all_reduce_max(self, array: np.ndarray) -> np.ndarray:
        """Maximum over the threads."""
        self._slots[self.rank] = array
        self._barrier.wait(30)
        result = np.max(self._slots, axis=0)
        self._barrier.wait(30)
        return result


def run(size: int, shards_of) -> list:
    """Result of cast_master_weights on each of `size` threads."""
    barrier, slots, results = threading.Barrier(size), [None] * size, [None] * size

    def work(rank: int) -> None:
        shards, name = shards_of(rank)
        results[rank] = fp4kit.cast_master_weights(shards, Threads(rank, size, barrier, slots), name)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    size=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3),
    cuts=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
def test_any_partition(name, dtype, size, shapes, cuts, seed) -> None:
    rng = np.random.default_rng(seed)
    block = fp4kit.recipe(name).block_size
    arrays = [rng.standard_normal((rows, blocks * block)).astype(dtype) for rows, blocks in shapes]

    def shards_of(rank: int):
        shards = []
        for i, x in enumerate(arrays):
            edges = [0, *sorted(int(c * x.size) for c in cuts[3 * i : 3 * i + size - 1]), x.size]
            shards.append(Shard(x.reshape(-1)[edges[rank] : edges[rank + 1]], x.shape, edges[rank]))
        return shards, name

    for quantized in run(size, shards_of):
        for q, x in zip(quantized, arrays, strict=True):
            assert_same_bits(q, fp4kit.quantize(x, name))


def test_single_process_and_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((32, 80)).astype(np.float32)
    (q,) = fp4kit.cast_master_weights([Shard(x.reshape(-1), x.shape)], SingleProcess())
    assert_same_bits(q, fp4kit.quantize(x, "nvfp4-te-2d"))
    assert fp4kit.cast_master_weights([], SingleProcess()) == []


def test_errors_come_before_anything_is_sent() -> None:
    class Silent(SingleProcess):
        def all_reduce_max(self, array):
            raise AssertionError("sent")

    with pytest.raises(ValueError, match=re.escape("partial_amax: elements [1, 17) of a matrix of 16")):
        fp4kit.cast_master_weights([Shard(np.ones(16, np.float32), (1, 16), 1)], Silent())
