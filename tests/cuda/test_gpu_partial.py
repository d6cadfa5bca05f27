"""Test partial_amax, partial_cast and cast_master_weights on a GPU: they give the bytes of the CPU, however matrices
are divided.
"""

from __future__ import annotations

import re
from itertools import pairwise
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from hypothesis import given
from hypothesis import strategies as st
from inputs import NAMES
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, cupy, differing, examples, gpu_only
from thread_group import ThreadGroup, run_threads

import fp4kit
from fp4kit import Shard
from fp4kit.recipes import RECIPES
from fp4kit.training.communicators import Nccl, SingleProcess
from fp4kit.training.master_weights import MasterWeightsPlan

pytestmark = ON_GPU

ALLOWED = [
    name
    for name, r in RECIPES.items()
    if name in NAMES and r.block and r.tensor_scaling in ("none", "tensor") and not (r.four_over_six or r.search)
]
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def cast_both(x: np.ndarray, name: str, edges: list[int]) -> None:
    """Assert that partial_amax and partial_cast give equal amaxes and codes of the shards of x on CPU and GPU.

    edges: the indices at which the flattened matrix is divided into shards.
    """
    flat, on_gpu = x.reshape(-1), cupy.asarray(x.reshape(-1))
    amax = np.zeros((1, 1), np.float32)
    for a, b in pairwise(edges):
        cpu = fp4kit.partial_amax(flat[a:b], x.shape, a, name)
        assert differing(fp4kit.partial_amax(on_gpu[a:b], x.shape, a, name), cpu) == 0
        amax = np.fmax(amax, np.where(np.isnan(cpu), np.float32(np.inf), cpu))
    whole = fp4kit.quantize(x, name)
    # Some recipes compute the tensor amax over finite elements only. If x has infinities, pass quantize's tensor amax.
    limit = whole.tensor_amax if np.isinf(amax).any() and RECIPES[name].amax_nan == "lanes" else None
    cpu = np.full(whole.packed.shape, 0xA5, np.uint8)
    gpu = cupy.full(cpu.shape, 0xA5, np.uint8)
    for a, b in list(pairwise(edges))[::2]:  # every other shard, so that nibbles beside each shard must stay unchanged
        fp4kit.partial_cast(flat[a:b], cpu, amax, x.shape, a, name, tensor_amax=limit)
        fp4kit.partial_cast(on_gpu[a:b], gpu, cupy.asarray(amax), x.shape, a, name, tensor_amax=limit)
    assert differing(gpu, cpu) == 0


@pytest.mark.parametrize("name", all_or_few(ALLOWED))
@pytest.mark.parametrize("dtype", [DTYPES[0], *exhaustive(DTYPES[2:])])
def test_every_recipe(name, dtype) -> None:
    x = np.ascontiguousarray(blocks(dtype)[:, : 5 * RECIPES[name].block_size])
    cast_both(x, name, [0, 1, 18, 18, 335, x.shape[1] * 20 + 7, x.size // 2 | 1, x.size - 3, x.size])


@pytest.mark.exhaustive
@examples(1000)
@given(
    name=st.sampled_from(["nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "nvfp4-modelopt", "nvfp4-flashinfer"]),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 70),
    wide=st.integers(1, 9),
    fractions=st.lists(st.floats(0, 1), max_size=6),
    seed=st.integers(0, 99),
)
def test_any_cuts(name, dtype, rows, wide, fractions, seed) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, wide * RECIPES[name].block_size)).astype(dtype)
    cast_both(x, name, [0, *sorted(int(f * x.size) for f in fractions), x.size])


@pytest.mark.exhaustive
def test_large_and_adversarial() -> None:
    x = np.resize(blocks(np.float32), (1024, 4112))
    for start in (0, 1, 2, 3, 4112 * 16 + 5):
        cast_both(x, "nvfp4-te-2d", [start, x.size // 3, x.size // 3 + 1, x.size])


def test_strides_and_alignment() -> None:
    x = np.random.default_rng(1).standard_normal((32, 80)).astype(np.float32)
    whole = fp4kit.quantize(x, "nvfp4-te-2d")
    amax, shard = cupy.asarray(fp4kit.amax(x, "nvfp4-te-2d")), cupy.zeros((2, x.size), np.float32)
    shard[1] = cupy.asarray(x.reshape(-1))
    strided = cupy.asfortranarray(shard)[1]
    for out in (cupy.zeros((32, 80), np.uint8)[:, ::2], cupy.zeros(32 * 40 + 3, np.uint8)[3:].reshape(32, 40)):
        fp4kit.partial_cast(strided, out, amax, x.shape, 0, "nvfp4-te-2d")
        assert differing(cupy.ascontiguousarray(out), whole.packed) == 0
    assert differing(fp4kit.partial_amax(strided, x.shape, 0, "nvfp4-te-2d"), amax.get()) == 0
    fp4kit.partial_cast(strided[:0], cupy.zeros((32, 40), np.uint8), amax, x.shape, 77, "nvfp4-te-2d")
    assert not fp4kit.partial_amax(strided[:0], x.shape, 77, "nvfp4-te-2d").any()


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-te-reference-2d", "mxfp8-te-2d"])
def test_amax_of_tall_blocks(name) -> None:
    for shape in ((64, 96), (37, 160), (2, 3, 33, 64), (2, 64, 32), (96,), (0, 32)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        x.reshape(-1)[::97] = np.nan
        agree(fp4kit.amax, x, name)
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    agree(fp4kit.amax, x, name, axis=0)


@examples(1000)
@given(
    name=st.sampled_from(["nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "nvfp4-flashinfer"]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3),
    size=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), min_size=1, max_size=3),
    cuts=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    seed=st.integers(0, 99),
    chunk=st.sampled_from([1 << 26, 1500]),
    overlapping=st.sampled_from([Nccl, ThreadGroup]),
)
def test_any_partition(name, dtypes, size, shapes, cuts, seed, chunk, overlapping) -> None:
    """cast_master_weights gives the CPU's bytes for any division of matrices among ranks.

    Ranks are threads that share the GPU.

    size: the number of ranks.
    shapes: (rows, blocks per row) of each matrix.
    cuts: where each matrix is divided, as fractions of its elements.
    chunk: the number of elements per message.
    overlapping: the class of communicators with which cast overlaps messages.
    """
    rng, block = np.random.default_rng(seed), RECIPES[name].block_size
    kinds = zip(shapes, dtypes, strict=False)
    xs = [rng.standard_normal((rows, wide * block)).astype(dtype) for (rows, wide), dtype in kinds]

    def work(comm) -> None:
        shards = []
        for i, x in enumerate(xs):
            edges = [0, *sorted(int(c * x.size) for c in cuts[3 * i : 3 * i + size - 1]), x.size]
            rank = (comm.rank + i) % size
            shards.append(Shard(cupy.asarray(x.reshape(-1)[edges[rank] : edges[rank + 1]]), x.shape, edges[rank]))
        for q, x in zip(fp4kit.cast_master_weights(shards, comm, name), xs, strict=True):
            assert_same(q, fp4kit.quantize(x, name))

    with patch("fp4kit.cuda.shards.CHUNK", chunk), patch("fp4kit.training.master_weights.Nccl", overlapping):
        run_threads(size, work)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te-2d"])
@pytest.mark.parametrize("layout", ["swizzled_128x4", *exhaustive(["swizzled_8x4"])])
def test_layouts_of_scales(name, layout) -> None:
    """Scales are stored in tiled layouts, whose padding is zero, also in a second step."""
    rng, block = np.random.default_rng(4), RECIPES[name].block_size
    xs = [rng.standard_normal((rows, wide * block)).astype(np.float32) for rows, wide in ((70, 5), (0, 2), (129, 3))]

    def work(comm) -> None:
        cuts = [(0, min(x.size // 2 | 1, x.size), x.size)[comm.rank :][:2] for x in xs]
        parts = [cupy.asarray(x.reshape(-1)[a:b]) for x, (a, b) in zip(xs, cuts, strict=True)]
        shards = [Shard(v, x.shape, a) for v, x, (a, _) in zip(parts, xs, cuts, strict=True)]
        plan = MasterWeightsPlan(shards, comm, name, scale_layout=layout)
        for _ in range(2):
            for q, x in zip(plan.cast(), xs, strict=True):
                assert_same(q, fp4kit.quantize(x, name, scale_layout=layout))

    run_threads(2, work)


def test_plan_columnwise_refresh_and_graph() -> None:
    rng = np.random.default_rng(2)
    kinds = (((64, 80), np.float32), ((16, 16), np.float32), ((48, 64), np.float16))
    xs = [rng.standard_normal(shape).astype(dtype) for shape, dtype in kinds]
    mine = [cupy.asarray(x.reshape(-1)) for x in xs]
    shards = [Shard(v, x.shape) for v, x in zip(mine, xs, strict=True)]
    plan = MasterWeightsPlan(shards, SingleProcess(), columnwise=True)

    def check(pairs) -> None:
        for (row, column), v, x in zip(pairs, mine, xs, strict=True):
            whole = fp4kit.quantize(v.get().reshape(x.shape), "nvfp4-te-2d")
            assert_same(row, whole)
            assert_same(column, fp4kit.transpose(whole))

    check(plan.cast())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan.cast()
        stream.begin_capture()
        result = plan.cast()
        graph = stream.end_capture()
        for v in mine:
            v[...] = v[::-1].copy()
        graph.launch()
    stream.synchronize()
    check(result)
    mine = [v * v.dtype.type(2) for v in mine]
    plan.refresh(mine)
    check(plan.cast())


@gpu_only
def test_nothing_waits() -> None:
    """MasterWeightsPlan.cast returns while earlier work in the device's queue is still running."""
    x = cupy.zeros(1 << 28, np.uint8)
    values = cupy.ones(256 * 256, np.float32)
    plan = MasterWeightsPlan([Shard(values, (256, 256))], SingleProcess(), columnwise=True)
    amax, out = fp4kit.partial_amax(values, (256, 256), 0, "nvfp4-te-2d"), cupy.zeros((256, 128), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            plan.cast()
            fp4kit.partial_cast(values, out, amax, (256, 256), 0, "nvfp4-te-2d")
            event = cupy.cuda.Event()
            for _ in range(400):
                x.copy()
            event.record()
        plan.cast()
        fp4kit.partial_cast(values, out, amax, (256, 256), 0, "nvfp4-te-2d")
        assert not event.done
    stream.synchronize()


@gpu_only
def test_nccl_group_of_one() -> None:
    comm = Nccl(0, 1, Nccl.unique_id())
    x = cupy.arange(7, dtype=np.uint32)
    assert comm.all_reduce_max(x) is x and differing(x, np.arange(7, dtype=np.uint32)) == 0
    assert differing(comm.all_gather(x), x.get()) == 0
    assert comm.all_gather(np.arange(3)).tolist() == [0, 1, 2]


def cast(out, amax) -> None:
    fp4kit.partial_cast(cupy.ones(64, np.float32), out, amax, (4, 16), 0, "nvfp4-te-2d")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cast(cupy.zeros((4, 4), "u1"), cupy.ones((1, 1), "f4")), "out is uint8 (4, 4); needs uint8 (4, 8)"),
        (
            lambda: cast(cupy.zeros((4, 8), np.uint8), cupy.ones((4, 1), "f4")),
            "block_amax is float32 (4, 1); nvfp4-te-2d needs float32 (1, 1)",
        ),
        (lambda: cast(np.zeros((4, 8), np.uint8), cupy.ones((1, 1), "f4")), "must be on one device"),
        (
            lambda: fp4kit.partial_amax(cupy.ones(64, "f4"), (4, 16), 1, "nvfp4-te-2d"),
            "elements [1, 65) of a matrix of 64",
        ),
        (
            lambda: fp4kit.cast_master_weights([Shard(cupy.ones(64, "f4")[::2], (2, 16))], SingleProcess()),
            "values of shard 0 are strided; needs a contiguous array",
        ),
    ],
)
def test_errors(call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
