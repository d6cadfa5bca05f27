"""Test grouped operations on CuPy arrays: each tensor gets the bytes of the CPU.

Without a GPU, the kernels run on the CPU.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from drawn_groups import DrawnGroup, groups
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16, seeded
from on_gpu import (
    ON_GPU,
    agree,
    all_or_few,
    assert_equal,
    assert_same,
    blocks,
    cupy,
    differing,
    examples,
    gpu_only,
    there,
)

import fp4kit
from fp4kit.cuda import compiler, matrix
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU

NAMES = [name for name, r in RECIPES.items() if not r.search and (r.fake_only or not r.stochastic_only)]
DTYPES = dict(zip(NAMES, cycle((BF16, np.float32, np.float16)), strict=False))
FEW = ("nvfp4-te", "nvfp4-te-2d", "mxfp4-flashinfer", "fp8-modelopt", "int8-modelopt-channel", "int4-modelopt")
DRAWN = (BF16, np.dtype(np.float32))  # few dtypes, because each combination of dtypes is compiled


def check(xs, name, **options) -> None:
    """Assert that the grouped functions give equal codes, values and amaxes for the tensors xs on CPU and GPU."""
    r = fp4kit.recipe(name)
    options = seeded(r, xs[0]) | options
    if not r.fake_only:
        agree(fp4kit.quantize_grouped, xs, name, **options)
    if not {"scale_layout", "hadamard"} & set(options):
        agree(fp4kit.fake_quantize_grouped, xs, name, **options)
    if r.block_rows == 1:
        agree(fp4kit.amax_grouped, xs, name)


@pytest.mark.parametrize("name", all_or_few(NAMES))
def test_unequal_tensors(name) -> None:
    x = blocks(DTYPES[name], 70, 1024)
    check([x[:33, :128], x[:0, :256], x[:, :384], x[3], x[:64].reshape(2, 32, 1024), x[:, 128:256]], name)


@pytest.mark.parametrize("name", FEW)
@examples(400)
@given(data=st.data())
def test_any_group(name, data) -> None:
    drawn = data.draw(groups((name,), DRAWN))
    check(drawn.xs, drawn.recipe, **drawn.options)


@examples(1000)
@given(drawn=groups(FEW, DRAWN), axis=st.sampled_from((-1, 0)), pass_through=st.booleans(), by_plan=st.booleans())
def test_gradients(drawn: DrawnGroup, axis: int, pass_through: bool, by_plan: bool) -> None:
    axis = axis if all(x.shape[axis] % RECIPES[drawn.recipe].length_multiple == 0 for x in drawn.xs) else -1
    amaxes = drawn.options.get("tensor_amax") if axis == -1 else None
    grads = [np.resize(np.arange(1, 98, dtype=np.float32), x.shape).astype(x.dtype) for x in drawn.xs]
    if by_plan:
        options = {"axis": axis, "amax": amaxes, "pass_through": pass_through}
        expected = fp4kit.fake_quantize_grouped_backward(grads, drawn.xs, drawn.recipe, **options)
        plan = fp4kit.GroupedPlan(there(drawn.xs), drawn.recipe, axis=axis, tensor_amax=there(amaxes))
        for _ in range(2):
            assert_equal(plan.fake_quantize_backward(there(grads), pass_through=pass_through), expected)
    else:
        options = {"axis": axis, "amax": amaxes, "pass_through": pass_through}
        agree(fp4kit.fake_quantize_grouped_backward, grads, drawn.xs, drawn.recipe, **options)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("axis", [-1, -2, 0])
def test_stacked_arrays(name, axis) -> None:
    x = np.ascontiguousarray(blocks(BF16, 3 * 64, 96).reshape(3, 64, 96))
    if x[0].shape[axis] % RECIPES[name].length_multiple == 0:
        check(x, name, axis=axis)
        check(np.stack([x, x[::-1]]), name)  # each has three dimensions
    assert differing(fp4kit.quantize_grouped(there(x), name)[1].packed, fp4kit.quantize(x[1], name).packed) == 0


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d", "mxfp4-flashinfer"])
def test_scale_layouts(name, layout) -> None:
    x = blocks(np.float32, 140, 192)
    check([x[:5], x[:0], x, x[:120].reshape(3, 40, 192)], name, scale_layout=layout)
    check(x.reshape(4, 35, 192), name, scale_layout=layout)


def test_options() -> None:
    x = blocks(BF16, 64, 256)
    xs = [x[:32], x[:0], x]
    check(xs, "nvfp4-te", rounding="stochastic", seed=7)
    check(xs, "nvfp4-te", tensor_amax=[1.5, 2.0, 300.0])
    check(xs, "nvfp4-te-reference", hadamard=True)
    check(xs, "int4-modelopt", hadamard=True)
    check(xs, "nvfp4-te-rowscaled", tensor_amax=[np.full((len(a), 1), 3, np.float32) for a in xs])
    check([x[:32], x[32:].astype(np.float32), x[:8].astype(np.float16)], "nvfp4-te")


def test_values_of_a_rule_of_its_own_are_rounded_to_nearest() -> None:
    plan = fp4kit.GroupedPlan([cupy.ones((2, 32), np.float32)], "mxfp4-modelopt-fake", rounding="stochastic", seed=1)
    text = "GroupedPlan: mxfp4-modelopt-fake rounds to nearest only; got rounding='stochastic'"
    with pytest.raises(ValueError, match=text):
        plan.fake_quantize()


def test_misaligned_and_strided_tensors() -> None:
    flat = blocks(BF16, 16, 512).reshape(-1)
    d = cupy.asarray(flat)
    for name in FEW:
        parts = ([a[o : o + 32 * 32].reshape(32, 32) for o in (0, 1, 64, 1030)] for a in (d, flat))
        strided = (a[:4096].reshape(64, 64)[::2, ::2] for a in (d, flat))
        gpu, cpu = (fp4kit.quantize_grouped([*p, s], name) for p, s in zip(parts, strided, strict=True))
        assert_equal(gpu, cpu)


@pytest.mark.parametrize("name", FEW)
def test_a_plan_follows_its_tensors(name) -> None:
    x = blocks(BF16, 64, 256)
    xs = [x[:32], x[:0], x]
    d = there(xs)
    plan = fp4kit.GroupedPlan(d, name)
    for step in range(3):
        for a in d:
            a[...] = cupy.asarray(np.roll(x[: len(a)], step))
        before = plan.quantize()
        assert_equal(plan.quantize(), [fp4kit.quantize(array.get(), name) for array in d])
        assert all(a is b for a, b in zip(before, plan.quantize(), strict=True))
        assert_equal(plan.fake_quantize(), [fp4kit.fake_quantize(array.get(), name) for array in d])


def test_amaxes_of_a_plan() -> None:
    x = blocks(BF16, 64, 256)
    d = there([x[:32], x])
    plan = fp4kit.GroupedPlan(d, "nvfp4-te")
    plan.amax()
    assert [float(a) for a in plan.amax_vector] == [float(fp4kit.amax(a)) for a in (x[:32], x)]
    plan.amax_vector[...] *= 0.5  # twice the largest bfloat16 exceeds float32; NumPy would warn, which is an error here
    half = [fp4kit.amax(a) * np.float32(0.5) for a in (x[:32], x)]
    expected = [fp4kit.quantize(a.get(), "nvfp4-te", tensor_amax=amax) for a, amax in zip(d, half, strict=True)]
    assert_equal(plan.quantize(keep_amax=True), expected)
    amaxes = cupy.asarray(np.array([1.0, 2.0], np.float32))
    plan = fp4kit.GroupedPlan(d, "nvfp4-te", tensor_amax=amaxes)
    amaxes[1] = 5
    assert_same(plan.quantize()[1], fp4kit.quantize(x, "nvfp4-te", tensor_amax=5.0))
    assert plan.amax_vector is None


def test_replaced_tensors_are_noticed() -> None:
    x = blocks(BF16, 64, 256)
    d = there([x[:32], x])
    plan = fp4kit.GroupedPlan(d, "fp8-modelopt")
    plan.fake_quantize()
    d[1] = cupy.asarray(-x)
    with pytest.raises(ValueError, match=r"GroupedPlan\.fake_quantize: xs\[1\] was replaced after the plan was made"):
        plan.fake_quantize()
    plan.refresh()
    assert differing(plan.fake_quantize()[1], fp4kit.fake_quantize(-x, "fp8-modelopt")) == 0


@gpu_only
def test_memory_of_pytorch_tensors_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones((16, 64), device="cuda", dtype=torch.bfloat16) * i for i in range(3)]
    plan = fp4kit.GroupedPlan(tensors, "fp8-modelopt")
    plan.fake_quantize()
    tensors[2].data = tensors[2].data.clone()
    with pytest.raises(ValueError, match="xs holds a tensor whose memory was replaced after the plan was made"):
        plan.fake_quantize()


def test_one_launch_and_a_graph(monkeypatch) -> None:
    x = blocks(BF16, 64, 256)
    d = there([x[: 1 + i % 64] for i in range(100)])
    plan = fp4kit.GroupedPlan(d, "nvfp4-te")
    plan.quantize()
    calls = []
    from fp4kit.cuda.launch import GroupedLaunch

    original = GroupedLaunch.__call__
    monkeypatch.setattr(GroupedLaunch, "__call__", lambda self: (calls.append(self), original(self)))
    monkeypatch.setattr(matrix, "amax", None)
    monkeypatch.setattr(compiler, "function", None)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        codes = plan.quantize()
        graph = stream.end_capture()
        assert len(calls) == 2
        for a in d:
            a *= -1
        graph.launch()
    stream.synchronize()
    assert_equal(codes, [fp4kit.quantize(array.get(), "nvfp4-te") for array in d])


def test_an_expert_without_rows_alone() -> None:
    x = np.zeros((0, 64), np.float32)
    for name in FEW:
        check([x], name)
        check(np.zeros((3, 0, 64), np.float32), name)
    assert fp4kit.quantize_grouped([], "nvfp4-te") == []
