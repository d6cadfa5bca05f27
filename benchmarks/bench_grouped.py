"""Grouped operations by a plan: against one launch on the concatenation, a loop of single calls, and Model-Optimizer's loop."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import peers
from measure import BF16, Bench, Call, main
from rows import Beside, Traffic, element_bytes, quantized_bytes

import fp4kit
from fp4kit.testing import assert_same_bits

EXPERT = (1856, 2688)
COUNTS = (8, 32, 128, 256)
FAKE = ("fp8-modelopt", "int8-modelopt-channel", "nvfp4-modelopt", "nvfp4-te", "mxfp4-flashinfer")
CODES = ("nvfp4-te", "nvfp4-modelopt", "mxfp4-flashinfer")
AT_MOST = 1.05  # of one launch on the concatenation
HOST_US = 50  # of a step of 128 tensors
NO_BYTES: Traffic = {"nothing": Fraction(0)}


class Tensors:
    """N experts, equal or not, as parts of one array, with the amaxes of each."""

    def __init__(self, bench: Bench, count: int, equal: bool) -> None:
        rows, K = EXPERT
        sizes = np.full(count, rows) if equal else np.random.default_rng(count).integers(0, 2 * rows + 1, count)
        sizes[1] = sizes[1] if equal else 0
        self.ends = np.cumsum(sizes).tolist()
        self.whole = bench.normal(BF16, (self.ends[-1], K))
        self.xs = self.parts(self.whole)
        self.name = f"{count} {'equal' if equal else 'unequal'}"  # of a row's operation, with what is done to them

    def parts(self, whole: Any) -> list[Any]:
        """The experts' parts of an array of all rows."""
        return [whole[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]


def operation(recipe: str, fake: bool, amaxes: Any) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Call]]:
    """A single call of an array with an amax, and the call of a plan that takes the amaxes as they are."""
    given = (lambda a: {}) if amaxes is None else (lambda a: {"tensor_amax": a})
    if fake:
        return lambda x, a: fp4kit.fake_quantize(x, recipe, **given(a)), lambda p: lambda: p.fake_quantize(keep_amax=True)
    return lambda x, a: fp4kit.quantize(x, recipe, **given(a)), lambda p: lambda: p.quantize(keep_amax=True)


def check(tensors: Tensors, results: list[Any], recipe: str, amaxes: Any) -> None:
    """A few rows of some tensors, against the CPU."""
    by_row = fp4kit.recipe(recipe).tensor_scaling == "row"
    for i in range(0, len(tensors.xs), max(len(tensors.xs) // 4, 1)):
        x, result = tensors.xs[i][-32:].get(), results[i]
        if not len(x):
            continue
        given = {} if amaxes is None else {"tensor_amax": amaxes[i].get()[-32:] if by_row else amaxes[i].get()}
        if isinstance(result, fp4kit.Quantized):
            assert_same_bits(result.packed[-32:].get(), fp4kit.quantize(x, recipe, **given).packed, f"{recipe}: packed of {i}")
        else:
            assert_same_bits(result[-32:].get(), fp4kit.fake_quantize(x, recipe, **given), f"{recipe}: values of {i}")


def modelopt_loop(bench: Bench, tensors: Tensors, recipe: str, amaxes: Any) -> dict[str, Call]:
    """Model-Optimizer's quantizers, one a tensor, with their amaxes set."""
    attributes: dict[str, dict[str, Any]] = {
        "fp8-modelopt": {"num_bits": (4, 3), "axis": None},
        "int8-modelopt-channel": {"num_bits": 8, "axis": 0},
        "nvfp4-modelopt": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
    }
    if not bench.peers or peers.torch() is None or recipe not in attributes:
        return {}
    nn, config = (peers.module(f"modelopt.torch.quantization.{name}") for name in ("nn", "config"))
    if nn is None or config is None:
        return {}

    @cache
    def pairs() -> list[tuple[Any, Any]]:  # made by the first call, so that what fails there is recorded
        found = []
        for x, amax in zip(tensors.xs, amaxes, strict=True):
            if x.size:
                quantizer = nn.TensorQuantizer(config.QuantizerAttributeConfig(**attributes[recipe])).cuda()
                limits = peers.tensor(amax.reshape(-1))
                quantizer.amax = limits.reshape(-1, 1) if amax.ndim else limits.reshape(())
                found.append((quantizer, peers.tensor(x)))
        return found

    return {"Model-Optimizer loop": lambda: [quantizer(x) for quantizer, x in pairs()]}


def grouped(bench: Bench, tensors: Tensors, recipe: str, fake: bool) -> None:
    """A plan with the amaxes as they are, and with the amaxes computed."""
    r, plan = fp4kit.recipe(recipe), fp4kit.GroupedPlan(tensors.xs, recipe)
    amaxes = None if r.tensor_scaling == "none" else plan.amax()
    single, run_plan = operation(recipe, fake, amaxes)
    call, name = run_plan(plan), "fake_quantize" if fake else "quantize"
    check(tensors, call(), recipe, amaxes)
    whole_amax = None if amaxes is None else plan.amax_vector if r.tensor_scaling == "row" else fp4kit.amax(tensors.whole)
    traffic = element_bytes(x=BF16) | (element_bytes(values=BF16) if fake else quantized_bytes(recipe))
    one = Beside("one launch", bench.time(lambda: single(tensors.whole, whole_amax)).us, AT_MOST)
    pairs = [*zip(tensors.xs, amaxes or [None] * len(tensors.xs), strict=True)]
    others = {"loop of single calls": lambda: [single(x, a) for x, a in pairs]}
    others |= modelopt_loop(bench, tensors, recipe, amaxes) if fake else {}
    bench.row(f"{name} {tensors.name}", recipe, tensors.whole, traffic, call, beside=one, peers=others)
    if len(tensors.xs) == COUNTS[2]:
        host(bench, tensors, recipe, name, plan.fake_quantize if fake else plan.quantize)
    if amaxes is not None:
        with_amaxes(bench, tensors, recipe, name, plan.fake_quantize if fake else plan.quantize, traffic)


def with_amaxes(bench: Bench, tensors: Tensors, recipe: str, name: str, call: Call, traffic: Traffic) -> None:
    """Two launches, against the same two on the concatenation."""
    single = fp4kit.fake_quantize if name.startswith("fake") else fp4kit.quantize
    one = Beside("one launch each", bench.time(lambda: single(tensors.whole, recipe)).us, AT_MOST)
    twice = element_bytes(**{"x for amax": BF16}) | traffic
    bench.row(f"{name} {tensors.name}, amax", recipe, tensors.whole, twice, call, beside=one)


def host(bench: Bench, tensors: Tensors, recipe: str, name: str, call: Call) -> None:
    """Time of the host for a step, two launches where amaxes are computed."""
    bench.row(f"{name} {tensors.name}", recipe, tensors.whole, NO_BYTES, call, kind="host", target_us=HOST_US)


def clipped(bench: Bench, tensors: Tensors) -> None:
    """The backward pass with a clip mask."""
    whole, grad, amax = tensors.whole, tensors.whole.copy(), fp4kit.amax(tensors.whole)
    grads = tensors.parts(grad)
    plan = fp4kit.GroupedPlan(tensors.xs, "fp8-modelopt", tensor_amax=[amax] * len(tensors.xs))
    one = bench.time(lambda: fp4kit.fake_quantize_backward(grad, whole, "fp8-modelopt", amax=amax, pass_through=False)).us
    bench.row(
        f"clip gradients {tensors.name}",
        "fp8-modelopt",
        whole,
        element_bytes(grad=BF16, x=BF16, out=BF16),
        lambda: plan.fake_quantize_backward(grads, pass_through=False),
        beside=Beside("one launch", one, AT_MOST),
    )


def run(bench: Bench) -> None:
    """Experts of one size and of unequal sizes, some of them empty."""
    for count in COUNTS[::2] if bench.quick else COUNTS:
        for equal in (True, False):
            bench.release()
            tensors = Tensors(bench, count, equal)
            for recipe in FAKE:
                grouped(bench, tensors, recipe, True)
            for recipe in CODES:
                grouped(bench, tensors, recipe, False)
            clipped(bench, tensors)


if __name__ == "__main__":
    main(run)
