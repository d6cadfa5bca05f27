"""Test groups on the compiled engine: a plan is one library call, a plain group a loop of cached single calls.

Results equal single calls for any values, also after the values change, and errors come before any work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, as_large_ones, assert_equal
from exhaustive import every
from float_modes import BITS, NEEDS_ENVIRONMENT, mode, tiny
from inputs import BF16, ordinary
from together import together

import fp4kit
from fp4kit.cpu import cached_calls, library
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.ops import engines, grouped
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
KINDS = ("nvfp4-te", "nvfp4-te-2d", "fp8-modelopt-channel", "mxfp4-ocp")  # one tensor scale, square, rows, none
OTHERS = {"nvfp4-te": "swizzled_128x4", "mxfp4-ocp": "swizzled_8x4"}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list to which each library call for a group adds its number of matrices."""
    found, real = list[int](), library.functions()

    class Counted:
        def fp4kit_group(self, first: int, count: int, *rest: Any) -> None:
            found.append(count)
            real.fp4kit_group(first, count, *rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    with monkeypatch.context() as patch:
        patch.setattr(cached_calls, "functions", Counted)
        yield found


def loop(function: Callable[..., Any], xs: Any, name: str, amaxes: Any = None, **options: Any) -> list[Any]:
    columns = zip(xs, [None] * len(xs) if amaxes is None else amaxes, strict=True)
    return [function(x, name, tensor_amax=a, **options) for x, a in columns]


def check(plan: fp4kit.GroupedPlan, xs: Any, name: str, amaxes: Any = None, **options: Any) -> None:
    """Assert that every method of a plan equals single calls."""
    assert_equal(plan.fake_quantize(), loop(fp4kit.fake_quantize, xs, name, amaxes, **options), f"values of {name}")
    if RECIPES[name].fake_only:
        return
    expected = loop(fp4kit.quantize, xs, name, amaxes, **options)
    of_values = None if plan.amax_vector is None else plan.amax_vector.copy()
    assert_equal(plan.quantize(), expected, name)
    for found, q in zip(plan.amax(), expected, strict=True):
        assert (found is None) == (q.tensor_amax is None)
        if found is not None:
            assert_same_bits(found, q.tensor_amax, f"amax of {name}")
    if of_values is not None:
        assert_equal(plan.amax_vector, of_values, f"amax_vector of {name}")


def arrays(dtype: Any) -> list[np.ndarray]:
    """Return an empty array, one of three dimensions, a large one and two with strides, among others."""
    shapes = ((32, 128), (0, 128), (2, 32, 128), (1024, 128), (32, 128))
    xs = [ordinary(i, shape, dtype) for i, shape in enumerate(shapes)]
    return [*xs, ordinary(7, (32, 256), dtype)[:, ::2], np.asfortranarray(ordinary(8, (32, 128), dtype))]


@pytest.mark.parametrize("name", every(4, [name for name, r in RECIPES.items() if not r.stochastic_only]))
def test_a_plan_follows_its_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_large_ones(monkeypatch)
    xs = [*arrays(np.float32)[:3], *arrays(BF16)[-2:]]
    plan = fp4kit.GroupedPlan(xs, name) if RECIPES[name].tensor_rule != "divisor" else None
    for value in (None, np.nan, -np.inf, 2.5) if plan else ():
        for x in xs:
            x *= np.asarray(-3, x.dtype)
        if value is not None:
            xs[0][3, 5] = xs[-1][7, 70] = value
        check(plan, xs, name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("axis", [0, -1])
def test_axes_options_and_threads(name: str, axis: int) -> None:
    xs = [x for x in arrays(BF16) if x.size and x.ndim == 2]
    for threads in (1, 3):
        with fp4kit.threads(threads):
            check(fp4kit.GroupedPlan(xs, name, axis=axis), xs, name, axis=axis)
    for options in ({"scale_layout": OTHERS.get(name, "linear")}, {"rounding": "stochastic", "seed": 3}):
        plan = fp4kit.GroupedPlan(xs, name, axis=axis, **options)
        for found in (plan.quantize(), plan.quantize(), fp4kit.quantize_grouped(xs, name, axis=axis, **options)):
            assert_equal(found, loop(fp4kit.quantize, xs, name, axis=axis, **options))


def test_given_amaxes_are_read_in_every_call() -> None:
    xs = [ordinary(i, (2, 32, 128)) for i in range(3)]
    for name, shape in (("nvfp4-te", ()), ("nvfp4-te", (2,)), ("fp8-modelopt-channel", (2, 32))):
        for make in (np.float32, np.float64, BF16.type):
            amaxes = [np.full(shape, 3 + i, make, order="F") for i in range(3)]
            plan = fp4kit.GroupedPlan(xs, name, tensor_amax=amaxes)
            for _ in range(3):
                check(plan, xs, name, amaxes)
                assert_equal(fp4kit.quantize_grouped(xs, name, tensor_amax=amaxes), plan.quantize())
                for i, amax in enumerate(amaxes):
                    amax[...] = np.arange(amax.size).reshape(shape) / 4 + i
    check(fp4kit.GroupedPlan(xs, "nvfp4-te", tensor_amax=[1.0, np.float32(2), 3]), xs, "nvfp4-te", [1.0, 2.0, 3.0])
    plan = fp4kit.GroupedPlan(xs, "nvfp4-te")
    plan.amax()
    for kept in ([1, 2, 3], [-0.0, 0, 1e-45], [np.inf, 5, 1]):
        plan.amax_vector[...] = kept
        for _ in range(2):
            assert_equal(plan.quantize(keep_amax=True), loop(fp4kit.quantize, xs, "nvfp4-te", kept))
            values = loop(fp4kit.fake_quantize, xs, "nvfp4-te", kept)
            assert_equal(plan.fake_quantize(keep_amax=True), values)


def test_small_matrices_share_a_library_call(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    xs = arrays(np.float32)
    for name in KINDS:
        plan = fp4kit.GroupedPlan(xs, name)
        calls = [plan.quantize, plan.fake_quantize] + [plan.amax] * (RECIPES[name].tensor_scaling != "none")
        for method in calls:
            method()
        for method in calls:
            counts.clear()
            method()
            # The empty array is left over, and three dimensions with square blocks.
            assert counts == [1 if name == "nvfp4-te-2d" else 2, 1, 3], (name, method.__name__)
    monkeypatch.setattr(cached_calls, "ELEMENTS_PER_CALL", 2 * xs[0].size)
    plan = fp4kit.GroupedPlan([xs[0]] * 5, "nvfp4-te")
    counts.clear()
    assert_equal(plan.quantize(), [fp4kit.quantize(xs[0], "nvfp4-te")] * 5)
    assert counts == [2, 2, 1]


@NEEDS_ENVIRONMENT
@together("name", [None, *BITS])
def test_other_modes_and_the_specification(name: str | None, counts: list[int]) -> None:
    xs = [tiny(np.dtype(np.float32)), tiny(BF16)]
    plans = {kind: fp4kit.GroupedPlan(xs, kind) for kind in KINDS}
    for kind, plan in plans.items():
        check(plan, xs, kind)
    for kind, plan in plans.items():
        expected = loop(fp4kit.quantize, xs, kind), loop(fp4kit.fake_quantize, xs, kind)
        counts.clear()
        with fp4kit.specification() if name is None else mode(name):
            found = plan.quantize(), plan.fake_quantize()
            plain = fp4kit.quantize_grouped(xs, kind), fp4kit.fake_quantize_grouped(xs, kind)
        assert not counts and counts == []
        assert_equal(found, expected, kind)
        assert_equal(plain, expected, kind)


def in_library(lib: str, xs: list[np.ndarray]) -> list[Any]:
    if lib == "numpy":
        return xs
    if lib == "torch":
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(x) for x in xs]
    jax = pytest.importorskip("jax")
    return [jax.numpy.asarray(x) for x in xs]


@pytest.mark.parametrize("lib", ["numpy", "torch", "jax"])
def test_a_repeated_group_is_not_parsed(lib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_CALLS", {})
    xs = in_library(lib, [ordinary(i, (32, 128)) for i in range(4)])
    for name in KINDS:
        amaxes = None if RECIPES[name].tensor_scaling != "tensor" else in_library(lib, [np.full((), 2, np.float32)] * 4)
        for operation in ("quantize", "fake_quantize"):
            function = getattr(fp4kit, f"{operation}_grouped")
            for given in {id(a): a for a in (None, amaxes)}.values():
                expected = function(xs, name, tensor_amax=given)
                assert_equal(expected, loop(getattr(fp4kit, operation), xs, name, given))
                with monkeypatch.context() as patch:
                    for parse in ("quantize_call", "fake_call", "run_call", "GroupedPlan"):
                        patch.setattr(grouped, parse, None)
                    assert_equal(function(xs, name, tensor_amax=given), expected)


def test_groups_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    stack = torch.nn.Parameter(torch.from_numpy(ordinary(3, (4, 32, 128))).bfloat16())
    expected = loop(fp4kit.quantize, stack.detach(), "nvfp4-te")
    for found in (fp4kit.quantize_grouped(stack, "nvfp4-te"), fp4kit.quantize_grouped([*stack.detach()], "nvfp4-te")):
        assert all(type(q.packed) is torch.Tensor for q in found)
        assert_equal([q.to("numpy") for q in found], [q.to("numpy") for q in expected])
    with pytest.raises(ValueError, match=r"^fake_quantize_grouped: xs requires grad.*fp4kit.torch.fake_quantize_grou"):
        fp4kit.fake_quantize_grouped(stack, "nvfp4-te")


ONE, SHORT = ordinary(0, (32, 128)), ordinary(0, (32, 100))
AMAX, BAD = np.full((), 2, np.float32), np.full((), -1, np.float32)
FAILING: list[tuple[str, Callable[[Any], Any], Any, Any]] = [
    ("xs[2]: axis 1", lambda xs: fp4kit.quantize_grouped(xs, "nvfp4-te"), ONE, SHORT),
    ("xs[2]: axis 1", lambda xs: fp4kit.fake_quantize_grouped(xs, "mxfp4-ocp"), ONE, SHORT),
    ("xs[2] is float64", lambda xs: fp4kit.amax_grouped(xs), ONE, ONE.astype(np.float64)),
    ("xs[2]: axis 1", lambda xs: fp4kit.amax_grouped(xs, "nvfp4-te"), ONE, SHORT),
    ("tensor_amax[2] holds", lambda a: fp4kit.quantize_grouped([ONE] * 3, "nvfp4-te", tensor_amax=a), AMAX, BAD),
    ("tensor_amax[2] holds", lambda a: fp4kit.fake_quantize_grouped([ONE] * 3, "nvfp4-te", tensor_amax=a), 2.0, -1.0),
    ("tensor_amax[2] holds", lambda a: fp4kit.quantize_grouped([ONE] * 3, "nvfp4-te", tensor_amax=a), 2.0, np.nan),
    ("grads[2] has shape", lambda g: fp4kit.fake_quantize_grouped_backward(g, [ONE] * 3, "nvfp4-te"), ONE, SHORT),
    (
        "amax[2] holds",
        lambda a: fp4kit.fake_quantize_grouped_backward([ONE] * 3, [ONE] * 3, "nvfp4-te", amax=a, pass_through=False),
        1.0,
        -1.0,
    ),
    ("tensor_amax[2] holds", lambda a: fp4kit.GroupedPlan([ONE] * 3, "nvfp4-te", tensor_amax=a).quantize(), AMAX, BAD),
    ("tensor_amax[2] holds", lambda a: fp4kit.GroupedPlan([ONE] * 3, "nvfp4-te", tensor_amax=a).fake_quantize(), 1, -1),
]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a function that makes every engine refuse to work from now on."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("work began")

    def start() -> None:
        monkeypatch.setattr(engines, "run", refuse)
        monkeypatch.setattr(cached_calls, "is_ieee", refuse)  # every cached call asks it first

    return start


@pytest.mark.parametrize("case", range(len(FAILING)))
@pytest.mark.parametrize("is_cached", [False, True])
def test_errors_come_before_any_work(case: int, is_cached: bool, no_work: Callable[[], Any]) -> None:
    text, call, good, bad = FAILING[case]
    if is_cached:
        call([good] * 3)
    no_work()
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: {re.escape(text)}"):
        call([good, good, bad])
    with pytest.raises(AssertionError, match="work began") if "grads" not in text else nullcontext():
        call([good] * 3)


def test_kept_amaxes_are_checked_before_any_work(no_work: Callable[[], Any]) -> None:
    plan = fp4kit.GroupedPlan([ONE] * 3, "nvfp4-te")
    plan.quantize(), plan.fake_quantize()
    no_work()
    for wrong in (np.nan, -np.nan, -1.0, -1e-45):
        plan.amax_vector[...] = [1, wrong, 2]
        for method in (plan.quantize, plan.fake_quantize):
            with pytest.raises(ValueError, match=re.escape("GroupedPlan: tensor_amax[1] holds 1 ")):
                method(keep_amax=True)
