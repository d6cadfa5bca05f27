"""Test grouped operations: they equal a loop of single calls, for lists and for a stacked array.

A plan follows the current values of its tensors.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from drawn_groups import POOL, DrawnGroup, groups
from exhaustive import sampled
from hypothesis import strategies as st
from inputs import BF16, seeded
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

RNG = np.random.default_rng(8)
XS = [RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (0, 64), (3, 128), (1, 32))]


def loop(operation: Any, drawn: DrawnGroup) -> list[Any]:
    amaxes = drawn.options.get("tensor_amax") or [None] * len(drawn.xs)
    return [operation(x, drawn.recipe, tensor_amax=a) for x, a in zip(drawn.xs, amaxes, strict=True)]


@sampled(50, 300, drawn=groups())
def test_any_group_equals_the_loop(drawn: DrawnGroup) -> None:
    plan = fp4kit.GroupedPlan(drawn.xs, drawn.recipe, **drawn.options)
    codes, values = loop(fp4kit.quantize, drawn), loop(fp4kit.fake_quantize, drawn)
    for found in (fp4kit.quantize_grouped(drawn.xs, drawn.recipe, **drawn.options), plan.quantize(), plan.quantize()):
        for q, expected in zip(found, codes, strict=True):
            assert_same_bits(q, expected)
    for found in (fp4kit.fake_quantize_grouped(drawn.xs, drawn.recipe, **drawn.options), plan.fake_quantize()):
        for y, expected in zip(found, values, strict=True):
            assert_same_bits(y, expected)
    for a, x in zip(fp4kit.amax_grouped(drawn.xs, drawn.recipe), drawn.xs, strict=True):
        assert_same_bits(a, fp4kit.amax(x, drawn.recipe))
    for a, q in zip(plan.amax(), codes, strict=True):
        assert (a is None) == (q.tensor_amax is None)
        if a is not None:
            assert_same_bits(a, q.tensor_amax)


@sampled(50, 300, drawn=groups(), pass_through=st.booleans())
def test_gradients_equal_the_loop(drawn: DrawnGroup, pass_through: bool) -> None:
    amaxes = drawn.options.get("tensor_amax")
    grads = [np.resize(np.arange(1, 98, dtype=np.float32), x.shape).astype(x.dtype) for x in drawn.xs]
    options = {"amax": amaxes, "pass_through": pass_through}
    found = fp4kit.fake_quantize_grouped_backward(grads, drawn.xs, drawn.recipe, **options)
    again = fp4kit.GroupedPlan(drawn.xs, drawn.recipe, **drawn.options).fake_quantize_backward(
        grads, pass_through=pass_through
    )
    for i, (g, x, a) in enumerate(zip(grads, drawn.xs, amaxes or [None] * len(grads), strict=True)):
        expected = fp4kit.fake_quantize_backward(g, x, drawn.recipe, amax=a, pass_through=pass_through)
        assert_same_bits(found[i], expected)
        assert_same_bits(again[i], expected)
        assert not pass_through or found[i] is g


def test_every_recipe() -> None:
    for name, r in RECIPES.items():
        xs = [
            POOL[np.dtype(np.float32)][:4096].reshape(32, 128),
            np.zeros((0, 128), np.float32),
            np.ones((1, 256), BF16),
        ]
        how = seeded(r, xs[0])
        if r.stochastic == "comfyui_nvfp4_cuda":  # its numbers fit one shape alone
            continue
        if not r.fake_only:
            for q, x in zip(fp4kit.quantize_grouped(xs, name, **how), xs, strict=True):
                assert_same_bits(q, fp4kit.quantize(x, name, **how))
        for y, x in zip(fp4kit.fake_quantize_grouped(xs, name, **how), xs, strict=True):
            assert_same_bits(y, fp4kit.fake_quantize(x, name, **how))


def test_options() -> None:
    options: dict[str, dict[str, Any]] = {
        "nvfp4-te": {"axis": 0, "scale_layout": "swizzled_128x4"},
        "mxfp8-te": {"rounding": "stochastic", "seed": 3},
        "nvfp4-te-reference": {"hadamard": True},
    }
    for name, some in options.items():
        for xs in ([np.ones((32, 64), np.float32), np.ones((64, 32), BF16)], np.ones((2, 32, 64), np.float16)):
            for q, x in zip(fp4kit.quantize_grouped(xs, name, **some), xs, strict=True):
                assert_same_bits(q, fp4kit.quantize(x, name, **some))
    blocks = [np.full((len(x), x.shape[1] // 16), 2.0, np.float32) for x in XS]
    for q, x, b in zip(
        fp4kit.quantize_grouped(XS, "nvfp4-modelopt-static", block_amax=blocks), XS, blocks, strict=True
    ):
        assert_same_bits(q, fp4kit.quantize(x, "nvfp4-modelopt-static", block_amax=b))
    for a, x in zip(fp4kit.amax_grouped(XS, axis=1), XS, strict=True):
        assert_same_bits(a, fp4kit.amax(x, axis=1))


def test_a_plan_overwrites_its_results() -> None:
    xs = [x.copy() for x in XS]
    plan = fp4kit.GroupedPlan(xs, "nvfp4-te")
    codes, values = plan.quantize(), plan.fake_quantize()
    for x in xs:
        x *= -3
    assert all(a.packed is b.packed for a, b in zip(plan.quantize(), codes, strict=True))
    assert all(a is b for a, b in zip(plan.fake_quantize(), values, strict=True))
    for q, y, x in zip(codes, values, xs, strict=True):
        assert_same_bits(q, fp4kit.quantize(x, "nvfp4-te"))
        assert_same_bits(y, fp4kit.fake_quantize(x, "nvfp4-te"))


def test_kept_amaxes() -> None:
    plan = fp4kit.GroupedPlan(XS, "nvfp4-te")
    plan.amax()
    assert_same_bits(plan.amax_vector, np.array([fp4kit.amax(x) for x in XS]))
    plan.amax_vector[...] *= 2
    for q, x in zip(plan.quantize(keep_amax=True), XS, strict=True):
        assert_same_bits(q, fp4kit.quantize(x, "nvfp4-te", tensor_amax=2 * fp4kit.amax(x)))
    amaxes = np.ones(4, np.float32)
    plan = fp4kit.GroupedPlan(XS, "nvfp4-te", tensor_amax=amaxes)
    amaxes[2] = 5
    assert_same_bits(plan.fake_quantize()[2], fp4kit.fake_quantize(XS[2], "nvfp4-te", tensor_amax=5.0))
    assert plan.amax_vector is None
    assert fp4kit.GroupedPlan(XS, "mxfp4-ocp").amax() == [None] * 4


def test_replaced_arrays_are_noticed() -> None:
    xs, amaxes = list(XS), [np.float32(1)] * 4
    plan = fp4kit.GroupedPlan(xs, "nvfp4-te", tensor_amax=amaxes)
    xs[2] = -XS[2]
    for method in (plan.amax, plan.quantize, plan.fake_quantize):
        name = f"GroupedPlan.{method.__name__}"
        with pytest.raises(ValueError, match=re.escape(f"{name}: xs[2] was replaced after the plan was made; call")):
            method()
    with pytest.raises(ValueError, match=re.escape("fake_quantize_backward: xs[2] was replaced")):
        plan.fake_quantize_backward(xs)
    plan.refresh()
    assert_same_bits(plan.quantize()[2], fp4kit.quantize(-XS[2], "nvfp4-te", tensor_amax=1.0))
    with pytest.raises(
        ValueError, match=re.escape("GroupedPlan.quantize: xs has 3 entries, but the plan was made for 4; call")
    ):
        plan.quantize(xs[:3])
    amaxes[1] = np.float32(2)
    with pytest.raises(ValueError, match=re.escape("tensor_amax[1] was replaced after the plan was made")):
        plan.quantize()
    plan.refresh(xs[:2], tensor_amax=amaxes[:2])
    assert_same_bits(plan.quantize(tuple(xs[:2]))[0], fp4kit.quantize(XS[0], "nvfp4-te", tensor_amax=1.0))


def test_memory_of_pytorch_tensors_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(16, 64), torch.ones(16, 32)]
    plan = fp4kit.GroupedPlan(tensors, "nvfp4-te")
    plan.quantize()
    tensors[1].data = torch.zeros(16, 32)
    with pytest.raises(ValueError, match="xs holds a tensor whose memory was replaced after the plan was made; call"):
        plan.quantize()
    plan.refresh()
    assert plan.quantize()[1].tensor_amax == 0


ONE, HALF = np.ones((4, 32), np.float32), np.ones((4, 24), np.float32)
PAIR, backward = [ONE, ONE], fp4kit.fake_quantize_grouped_backward


def plan(**options):
    return fp4kit.GroupedPlan([ONE, ONE], "nvfp4-te", **options)


NUMBERED = [
    (lambda: fp4kit.quantize_grouped([ONE, ONE.astype(np.float64)], "nvfp4-te"), "xs[1] is float64"),
    (lambda: fp4kit.quantize_grouped([ONE, HALF], "nvfp4-te"), "xs[1]: axis 1 has length 24; "),
    (lambda: fp4kit.fake_quantize_grouped([ONE, HALF], "nvfp4-te"), "xs[1]: axis 1 has length 24"),
    (lambda: fp4kit.amax_grouped([ONE, HALF], "nvfp4-te"), "xs[1]: axis 1 has length 24"),
    (lambda: fp4kit.amax_grouped([ONE, ONE.astype(int)]), "xs[1] is int64"),
    (lambda: fp4kit.quantize_grouped([ONE, ONE[0]], "mxfp4", axis=1), "xs[1]: axis 1 is out of range for a 1-d array"),
    (lambda: fp4kit.quantize_grouped([ONE, [1.0]], "mxfp4"), "xs[1] is a builtins.list"),
    (lambda: fp4kit.quantize_grouped([ONE, np.ma.array(ONE)], "mxfp4"), "xs[1] is a masked array"),
    (lambda: fp4kit.quantize_grouped([ONE, ONE[0]], "mxfp4", scale_layout="swizzled_8x4"), "xs[1] is 1-d; "),
    (lambda: fp4kit.quantize_grouped([ONE, HALF], "fp8-modelopt", hadamard=True), "xs[1]: axis 1 has length 24; the H"),
    (lambda: fp4kit.fake_quantize_grouped(PAIR, "nvfp4-te", tensor_amax=[1, np.nan]), "tensor_amax[1] holds 1 NaN"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", tensor_amax=[1, [1, 2]]), "tensor_amax[1] has shape (2,)"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", tensor_amax=[1, "2"]), "tensor_amax[1] is <U1"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-modelopt-static", block_amax=[ONE[:, :2], ONE]), "block_amax[1] has"),
    (lambda: backward([ONE, HALF], PAIR, "nvfp4-te"), "grads[1] has shape (4, 24); needs the shape of x, (4, 32)"),
    (lambda: backward(PAIR, PAIR, "nvfp4-te", amax=[1, -1]), "amax[1] holds 1 negative value(s) of 1"),
    (lambda: plan(tensor_amax=[1.0, -1.0]).quantize(), "tensor_amax[1] holds 1 negative value(s)"),
    (lambda: plan(tensor_amax=[1.0, -1.0]).amax(), "tensor_amax[1] holds 1 negative value(s)"),
    (lambda: plan(tensor_amax=[1.0, -1.0]).fake_quantize(), "tensor_amax[1] holds 1 negative"),
    (lambda: plan().fake_quantize_backward([ONE, HALF]), "grads[1] has shape (4, 24)"),
    (lambda: fp4kit.quantize_grouped(np.ones((2, 4, 24), "f4"), "nvfp4-te"), "xs[0]: axis 1 has "),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", tensor_amax=[1]), "tensor_amax has 1 entries and xs 2"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", tensor_amax=1.0), "tensor_amax is float; needs a sequence with"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", block_amax=[1.0]), "block_amax has 1 entries and xs 2 arrays"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", tensor_amax=[1, None]), "tensor_amax[1] is None; needs"),
    (lambda: fp4kit.quantize_grouped(PAIR, "nvfp4-te", axis=3), "xs[0]: axis 3 is out of range for a 2-d array"),
    (lambda: fp4kit.amax_grouped(ONE[0]), "xs is one 1-d array; needs a sequence of arrays, or one"),
    (lambda: backward(PAIR[:1], PAIR, "nvfp4-te"), "grads has 1 arrays and xs 2; needs equally many"),
    (lambda: plan(hadamard=True).fake_quantize(), "hadamard is True, which fake_quantize does not support"),
]


@together("call, text", NUMBERED)
def test_errors_say_which_tensor(call, text):
    with pytest.raises((TypeError, ValueError), match=rf"^(\w+_grouped\w*|GroupedPlan): {re.escape(text)}"):
        call()


def test_an_empty_group() -> None:
    assert fp4kit.quantize_grouped([], "nvfp4-te") == fp4kit.amax_grouped(iter([])) == []


@together("method", ["quantize", "fake_quantize"])
@together("flag", ["no", None, 2, 1.0, [], np.ones(2)])
def test_keep_amax_is_a_flag(method, flag) -> None:
    """keep_amax must be a bool. Another value that counts as True would keep amaxes that were never computed."""
    plan = fp4kit.GroupedPlan(XS, "nvfp4-te")
    with pytest.raises(TypeError, match=r"GroupedPlan: keep_amax is .*; needs True or False"):
        getattr(plan, method)(keep_amax=flag)


def test_a_refresh_that_fails_changes_nothing() -> None:
    """After a refresh that fails, the plan still uses its old tensors, and its results are in their library."""
    torch = pytest.importorskip("torch")
    plan = fp4kit.GroupedPlan(XS, "nvfp4-te")
    before = plan.quantize()
    with pytest.raises(ValueError, match=re.escape("xs[0]: axis 1 has length 5")):
        plan.refresh([torch.ones(3, 5)])
    for q, same in zip(plan.quantize(), before, strict=True):
        assert isinstance(q.packed, np.ndarray) and q.packed is same.packed
