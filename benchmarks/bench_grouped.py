"""Benchmark grouped operations: GroupedPlan quantizes the tensors of many experts in one launch.

Each row is compared with one launch on the concatenated tensors. For tensors of equal sizes, a loop of single calls and
Model-Optimizer's loop are timed too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from measure import BF16, Bench, Call, main
from modelopt_loop import Loop
from rows import NO_BYTES, Beside, Traffic, element_bytes, quantized_bytes

import fp4kit
from fp4kit.cuda.dispatch import LaunchRequest
from fp4kit.cuda.matrix import Matrix, quantize_matrix
from fp4kit.evidence.testing import assert_same_bits

EXPERT = (1856, 2688)
UNEQUAL, EQUAL = (8, 32, 128, 256), (32, 128)  # numbers of tensors of unequal and equal sizes
FAKE = ("fp8-modelopt", "int8-modelopt-channel", "nvfp4-modelopt", "mxfp4-flashinfer")
CODES = ("nvfp4-te", "mxfp4-flashinfer")
WITH_AMAX = ("fp8-modelopt", "nvfp4-te")  # also timed with computed amaxes, which takes two launches
AT_MOST = 1.05  # target: largest time relative to one launch on the concatenated tensors
STEP, HOST_US = 128, 50  # tensors in a step, and the target for its host time


class Tensors:
    """The tensors of `count` experts, as slices of one array.

    Args:
        bench: provides the array
        count: number of experts
        equal: True for equal sizes; False for random sizes, with one expert that has no rows
        shape: shape of a tensor of equal size; the mean of the random sizes
    """

    def __init__(self, bench: Bench, count: int, equal: bool, shape: tuple[int, int] = EXPERT) -> None:
        rows, K = shape
        sizes = np.full(count, rows) if equal else np.random.default_rng(count).integers(0, 2 * rows + 1, count)
        sizes[1] = sizes[1] if equal else 0
        self.ends, self.equal = np.cumsum(sizes).tolist(), equal
        self.whole = bench.normal(BF16, (self.ends[-1], K))
        self.xs = self.parts(self.whole)
        self.name = f"{count} {'equal' if equal else 'unequal'}"  # follows the verb in a row's operation

    def parts(self, whole: Any) -> list[Any]:
        """Return the slice of each expert from `whole`, an array with the rows of all experts."""
        return [whole[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]


def one_launch(x: Any, r: fp4kit.Recipe, fake: bool, amax: Any) -> Call:
    """Return a call that quantizes the concatenated tensors x in one launch, the baseline for grouped calls.

    The call skips the argument checks of a public call, which would take longer than the kernel for 8 tensors.

    Args:
        x: the concatenated tensors
        r: the recipe
        fake: True for fake_quantize, False for quantize
        amax: the tensor amax or row amaxes, or None
    """
    if fake:
        values = x.copy()
        return lambda: quantize_matrix(
            Matrix(x, values=values, tensor_amax=amax), LaunchRequest(r, x.dtype, x.shape, values=True)
        )
    q = fp4kit.quantize(x, r, tensor_amax=amax)
    arrays = Matrix(x, q.packed, q.block_scale, None, amax, q.tensor_scale)
    return lambda: quantize_matrix(arrays, LaunchRequest(r, x.dtype, x.shape))


def check(tensors: Tensors, results: list[Any], recipe: str, amaxes: Any) -> None:
    """For a sample of the tensors, check that the last rows of the result equal the CPU's result.

    Raise AssertionError if they differ.

    results: the results of a grouped call, one per tensor.
    amaxes: the tensor amaxes that the call used, one per tensor, or None if the recipe has none.
    """
    by_row = fp4kit.recipe(recipe).tensor_scaling == "row"
    for i in range(0, len(tensors.xs), max(len(tensors.xs) // 4, 1)):
        x, result = tensors.xs[i][-32:].get(), results[i]
        if not len(x):
            continue
        given = {} if amaxes is None else {"tensor_amax": amaxes[i].get()[-32:] if by_row else amaxes[i].get()}
        if isinstance(result, fp4kit.Quantized):
            assert_same_bits(
                result.packed[-32:].get(), fp4kit.quantize(x, recipe, **given).packed, f"{recipe}: packed of {i}"
            )
        else:
            assert_same_bits(result[-32:].get(), fp4kit.fake_quantize(x, recipe, **given), f"{recipe}: values of {i}")


def grouped(bench: Bench, tensors: Tensors, recipe: str, fake: bool, loop: Loop) -> None:
    """Time a GroupedPlan with given amaxes, and add its row to `bench`.

    For recipes of WITH_AMAX, also add a row with computed amaxes. Raises AssertionError if a result is wrong.

    Args:
        tensors: the tensors to quantize
        recipe: the id of the recipe
        fake: True for fake_quantize, False for quantize
        loop: makes the calls that loop over Model-Optimizer's quantizers. They are timed beside fake_quantize of
            tensors of equal shapes
    """
    r, plan = fp4kit.recipe(recipe), fp4kit.GroupedPlan(tensors.xs, recipe)
    amaxes = None if r.tensor_scaling == "none" else plan.amax()
    method, single = (plan.fake_quantize, fp4kit.fake_quantize) if fake else (plan.quantize, fp4kit.quantize)
    call, name = partial(method, keep_amax=True), "fake_quantize" if fake else "quantize"
    check(tensors, call(), recipe, amaxes)
    whole_amax = (
        None if amaxes is None else plan.amax_vector if r.tensor_scaling == "row" else fp4kit.amax(tensors.whole)
    )
    traffic = element_bytes(x=BF16) | (element_bytes(values=BF16) if fake else quantized_bytes(recipe))
    one = Beside("one launch", bench.time(one_launch(tensors.whole, r, fake, whole_amax)).median, AT_MOST)
    others: dict[str, Call] = {}
    if tensors.equal:
        pairs = [*zip(tensors.xs, amaxes or [None] * len(tensors.xs), strict=True)]
        others["loop of single calls"] = lambda: [single(x, recipe, tensor_amax=a) for x, a in pairs]
        others |= loop.calls(recipe, tensors.xs, amaxes) if fake else {}
    bench.row(f"{name} {tensors.name}", recipe, tensors.whole, traffic, call, beside=one, peers=others)
    if amaxes is not None and recipe in WITH_AMAX:
        with_amaxes(bench, tensors, recipe, name, method, traffic)


def with_amaxes(bench: Bench, tensors: Tensors, recipe: str, name: str, call: Call, traffic: Traffic) -> None:
    """Time a grouped call that computes the amaxes, and add its row to `bench`.

    It is compared with a single call on the concatenated tensors. Each takes two launches.

    Args:
        tensors: the tensors to quantize
        recipe: the id of the recipe
        name: "quantize" or "fake_quantize"
        call: the grouped call
        traffic: the traffic without the read for the amaxes
    """
    single = fp4kit.fake_quantize if name.startswith("fake") else fp4kit.quantize
    one = Beside("one launch each", bench.time(lambda: single(tensors.whole, recipe)).median, AT_MOST)
    twice = element_bytes(**{"x for amax": BF16}) | traffic
    bench.row(f"{name} {tensors.name}, amax", recipe, tensors.whole, twice, call, beside=one)


def amaxes_alone(bench: Bench, tensors: Tensors) -> None:
    """Time grouped amaxes and add their row to `bench`, compared with one amax of the concatenated tensors."""
    plan = fp4kit.GroupedPlan(tensors.xs, "fp8-modelopt")
    for i, amax in enumerate(plan.amax()):
        assert_same_bits(amax.get(), fp4kit.amax(tensors.xs[i]).get(), f"amax of {i}")
    one = Beside("one launch", bench.time(lambda: fp4kit.amax(tensors.whole)).median, AT_MOST)
    bench.row(f"amax {tensors.name}", "fp8-modelopt", tensors.whole, element_bytes(x=BF16), plan.amax, beside=one)


def clipped(bench: Bench, tensors: Tensors) -> None:
    """Time the grouped backward pass with a clip mask, and add its row to `bench`.

    The gradient is zero where x is clipped.
    """
    whole, grad, amax = tensors.whole, tensors.whole.copy(), fp4kit.amax(tensors.whole) / 2
    grads = tensors.parts(grad)
    plan = fp4kit.GroupedPlan(tensors.xs, "fp8-modelopt", tensor_amax=[amax] * len(tensors.xs))
    one = bench.time(
        lambda: fp4kit.fake_quantize_backward(grad, whole, "fp8-modelopt", amax=amax, pass_through=False)
    ).median
    bench.row(
        f"clip gradients {tensors.name}",
        "fp8-modelopt",
        whole,
        element_bytes(grad=BF16, x=BF16, out=BF16),
        lambda: plan.fake_quantize_backward(grads, pass_through=False),
        beside=Beside("one launch", one, AT_MOST),
    )


def host(bench: Bench) -> None:
    """Time grouped calls on the host and add their rows to `bench`.

    The time does not depend on the sizes of the tensors. A call that computes amaxes makes two launches.
    """
    tensors = Tensors(bench, STEP, False, (16, EXPERT[1]))
    for recipe in (*FAKE, CODES[0]):
        plan = fp4kit.GroupedPlan(tensors.xs, recipe)
        name, call = ("quantize", plan.quantize) if recipe in CODES[:1] else ("fake_quantize", plan.fake_quantize)
        call()
        bench.row(f"{name} {tensors.name}", recipe, tensors.whole, NO_BYTES, call, kind="host", target_us=HOST_US)


def run(bench: Bench) -> None:
    """Time all grouped calls and add their rows to `bench`.

    Experts of equal sizes come last, because by then Model-Optimizer's extensions have been compiled in the background.
    """
    loop = Loop(bench)
    host(bench)
    for count, equal in [*((n, False) for n in UNEQUAL), *((n, True) for n in EQUAL)]:
        bench.release()
        tensors = Tensors(bench, count, equal)
        for recipe in FAKE:
            grouped(bench, tensors, recipe, True, loop)
        for recipe in CODES:
            grouped(bench, tensors, recipe, False, loop)
        amaxes_alone(bench, tensors)
        clipped(bench, tensors)


if __name__ == "__main__":
    main(run)
