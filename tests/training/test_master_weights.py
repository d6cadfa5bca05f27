"""Test that cast_master_weights gives every process the bytes of whole quantized matrices, however these are
divided.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import sampled
from hypothesis import strategies as st
from thread_group import run_threads

import fp4kit
from fp4kit import Shard
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.training.communicators import SingleProcess
from fp4kit.training.master_weights import MasterWeightsPlan

NAMES = ("nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "nvfp4-modelopt")


@sampled(
    50,
    300,
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    size=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3),
    cuts=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    seed=st.integers(0, 99),
    layout=st.sampled_from(SCALE_LAYOUTS),
)
def test_any_partition(name, dtype, size, shapes, cuts, seed, layout) -> None:
    rng = np.random.default_rng(seed)
    block = fp4kit.recipe(name).block_size
    arrays = [rng.standard_normal((rows, blocks * block)).astype(dtype) for rows, blocks in shapes]

    def shards_of(rank: int):
        shards = []
        for i, x in enumerate(arrays):
            edges = [0, *sorted(int(c * x.size) for c in cuts[3 * i : 3 * i + size - 1]), x.size]
            shards.append(Shard(x.reshape(-1)[edges[rank] : edges[rank + 1]], x.shape, edges[rank]))
        return shards

    def cast(comm):
        return fp4kit.cast_master_weights(shards_of(comm.rank), comm, name, scale_layout=layout)

    for quantized in run_threads(size, cast):
        for q, x in zip(quantized, arrays, strict=True):
            assert_same_bits(q, fp4kit.quantize(x, name, scale_layout=layout))
            assert q.scale_layout == layout


def test_single_process_and_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((32, 80)).astype(np.float32)
    (q,) = fp4kit.cast_master_weights([Shard(x.reshape(-1), x.shape)], SingleProcess())
    assert_same_bits(q, fp4kit.quantize(x, "nvfp4-te-2d"))
    assert fp4kit.cast_master_weights([], SingleProcess()) == []


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-te-reference-2d", "nvfp4-flashinfer", "mxfp8-te-2d"])
def test_infinities_are_those_of_the_whole(name) -> None:
    x = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    x[3, 5], x[20, 40] = np.inf, -np.inf
    shards = [(Shard(x.reshape(-1)[:1001], x.shape), Shard(x.reshape(-1)[1001:], x.shape, 1001))[i] for i in range(2)]
    for quantized in run_threads(2, lambda comm: fp4kit.cast_master_weights([shards[comm.rank]], comm, name)):
        assert_same_bits(quantized[0], fp4kit.quantize(x, name))


def test_nan() -> None:
    """NaN is ignored if the recipe ignores it. If a scale would be NaN, every process raises an error."""
    x = np.random.default_rng(3).standard_normal((32, 96)).astype(np.float32)
    x[3, 5] = np.nan
    shards = [Shard(x.reshape(-1)[:7], x.shape), Shard(x.reshape(-1)[7:], x.shape, 7)]
    for quantized in run_threads(2, lambda comm: fp4kit.cast_master_weights([shards[comm.rank]], comm)):
        assert_same_bits(quantized[0], fp4kit.quantize(x, "nvfp4-te-2d"))

    def raises(comm) -> None:
        with pytest.raises(ValueError, match="matrix 0 has NaN, for which nvfp4-te-reference-2d has no scale"):
            fp4kit.cast_master_weights([shards[comm.rank]], comm, "nvfp4-te-reference-2d")

    run_threads(2, raises)


@pytest.mark.parametrize("size", [1, 3])
def test_columnwise_and_plans(size) -> None:
    rng = np.random.default_rng(5)
    xs = [rng.standard_normal(shape).astype(np.float32) for shape in ((32, 80), (16, 16), (0, 16), (48, 48))]

    def work(comm) -> None:
        edges = [[0, *(min(x.size * i // size | 1, x.size) for i in range(1, size)), x.size] for x in xs]
        cuts = [edge[comm.rank :][:2] for edge in edges]
        mine = [x.reshape(-1)[a:b].copy() for (a, b), x in zip(cuts, xs, strict=True)]
        plan = MasterWeightsPlan(
            [Shard(v, x.shape, a) for v, x, (a, _) in zip(mine, xs, cuts, strict=True)], comm, columnwise=True
        )
        for factor in (1, 3, 0):
            for v, x, (a, b) in zip(mine, xs, cuts, strict=True):
                v[...] = x.reshape(-1)[a:b] * np.float32(factor)
            if factor == 3:
                mine = [v.copy() for v in mine]
                plan.refresh(mine)
            for (row, column), x in zip(plan.cast(), xs, strict=True):
                whole = fp4kit.quantize(x * np.float32(factor), "nvfp4-te-2d")
                assert_same_bits(row, whole)
                assert_same_bits(column, fp4kit.transpose(whole))

    run_threads(size, work)


def plan_of_one() -> MasterWeightsPlan:
    return MasterWeightsPlan([Shard(np.ones(16, np.float32), (1, 16))], SingleProcess())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cast((3, 5, 16)), "matrix 0: no process owns elements [0, 3) of 16; needs each element in exactly"),
        (lambda: cast((0, 5, 16)), "matrix 0: no process owns elements [5, 16) of 16"),
        (lambda: cast((0, 16, 16), recipe="nvfp4-te-4over6-mae-256-2d"), "chooses scales from whole blocks"),
        (lambda: cast((0, 16, 16), recipe="nvfp4-te", columnwise=True), "nvfp4-te has 1x16 blocks; needs square"),
        (lambda: cast((0, 16, 16), scale_layout="tiled"), "cast_master_weights: scale_layout is 'tiled'; needs one of"),
        (lambda: cast((0, 16, 16), columnwise=True, scale_layout="swizzled_8x4"), "scale_layout is 'swizzled_8x4'"),
        (lambda: cast((0, 16, 16), columnwise=True), "the other axis has length 1; needs a multiple of 16"),
        (lambda: plan_of_one().refresh([]), "array 0 of 0 has another"),
        (lambda: plan_of_one().refresh([np.ones(16)]), "array 0 of 1 has another dtype, length or device than before"),
    ],
)
def test_errors(call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def cast(cut: tuple[int, int, int], **options) -> None:
    start, end, size = cut
    fp4kit.cast_master_weights([Shard(np.ones(end - start, np.float32), (1, size), start)], SingleProcess(), **options)


VARIANT = replace(fp4kit.recipe("nvfp4-te-2d"), scale_max=256)  # has the id of another recipe


@pytest.mark.parametrize(
    ("dtypes", "recipes"),
    [
        ((np.float32, ml_dtypes.bfloat16), ("nvfp4-te-2d", "nvfp4-te-2d")),
        ((np.float16, ml_dtypes.bfloat16), ("nvfp4-te-2d", "nvfp4-te-2d")),
        ((np.float32, np.float32), ("nvfp4-te-2d", "nvfp4-te")),
        ((np.float32, np.float32), ("nvfp4-te-2d", VARIANT)),
    ],
)
def test_processes_that_disagree(dtypes, recipes) -> None:
    """If processes give different dtypes or recipes, all raise an equal error before any has cast."""

    def error_of(comm) -> str:
        shard = Shard(np.ones(16 * 8, dtypes[comm.rank]), (16, 16), 16 * 8 * comm.rank)
        with pytest.raises(ValueError, match="cast_master_weights") as caught:
            fp4kit.cast_master_weights([shard], comm, recipes[comm.rank])
        return str(caught.value)

    first, second = run_threads(2, error_of)
    assert first == second and "processes have [1, 1] matrices, or different shapes, dtypes or recipes" in first


def test_errors_come_before_anything_is_sent() -> None:
    class Silent(SingleProcess):
        def all_reduce_max(self, array):
            raise AssertionError("sent")

    with pytest.raises(ValueError, match=re.escape("cast_master_weights: shard is elements [1, 17) of a matrix of 16")):
        fp4kit.cast_master_weights([Shard(np.ones(16, np.float32), (1, 16), 1)], Silent())


@pytest.mark.parametrize("shards", [None, 3, "deleted"])
def test_whatever_one_process_gives_the_others_are_told(shards) -> None:
    """If one process gives wrong shards, every process raises an error, and none waits forever."""
    w = np.ones((16, 32), np.float32).reshape(-1)

    def work(comm):
        given = [Shard(w[comm.rank * 256 : comm.rank * 256 + 256], (16, 32), comm.rank * 256)]
        if comm.rank == 1:
            given = [Shard(deleted(), (16, 32), 256)] if shards == "deleted" else shards
        with pytest.raises((TypeError, ValueError, BufferError)) as error:
            fp4kit.cast_master_weights(given, comm)
        return str(error.value)

    texts = run_threads(3, work)
    for rank in (0, 2):
        assert texts[rank] == "cast_master_weights: processes [1] have invalid shards; see the errors that they raised"
    assert "cast_master_weights: " in texts[1] and "found" not in texts[1]


def deleted():
    """Return a JAX array whose memory has been deleted."""
    array = pytest.importorskip("jax.numpy").ones(256)
    array.delete()
    return array


def test_refresh_with_what_is_no_sequence() -> None:
    with pytest.raises(TypeError, match=re.escape("refresh: values is a NoneType; needs a sequence of arrays")):
        plan_of_one().refresh(None)
