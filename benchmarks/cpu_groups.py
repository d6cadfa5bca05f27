"""Time groups of matrices on the CPU, each beside a loop of single calls.

    python benchmarks/cpu_groups.py [COUNT ROWS COLUMNS] [--torch] [--rounds N]

Prints a Markdown table: the loop's time, and the times of the grouped function and of the method of a GroupedPlan
divided by it. Times are medians of the processor time of one thread, since other programs on the machine disturb the
clock more; loop, function and method take turns. The default is 300 matrices of 128 x 256; 8 matrices of 4096 x 4096
show whether large matrices suffer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from timing import Call, alternate

import fp4kit
from fp4kit.cli.output import markdown

RECIPES = ("nvfp4-te", "mxfp4-ocp", "fp8-modelopt-channel")  # one tensor scale, none, one per row
Calls = dict[str, Call]


def cases(xs: Any, recipe: str) -> Iterator[tuple[str, Calls]]:
    """Yield (operation, {"loop", "group" and "plan": a call})."""
    plan = fp4kit.GroupedPlan(xs, recipe)
    if fp4kit.recipe(recipe).tensor_scaling == "tensor":
        given = [np.float32(4)] * len(xs)
        yield (
            "quantize, amaxes given",
            {
                "loop": lambda: [fp4kit.quantize(x, recipe, tensor_amax=a) for x, a in zip(xs, given, strict=True)],
                "group": lambda: fp4kit.quantize_grouped(xs, recipe, tensor_amax=given),
                "plan": fp4kit.GroupedPlan(xs, recipe, tensor_amax=given).quantize,
            },
        )
    yield (
        "quantize",
        {
            "loop": lambda: [fp4kit.quantize(x, recipe) for x in xs],
            "group": lambda: fp4kit.quantize_grouped(xs, recipe),
            "plan": plan.quantize,
        },
    )
    yield (
        "fake_quantize",
        {
            "loop": lambda: [fp4kit.fake_quantize(x, recipe) for x in xs],
            "group": lambda: fp4kit.fake_quantize_grouped(xs, recipe),
            "plan": plan.fake_quantize,
        },
    )
    yield "amax", {"loop": lambda: [fp4kit.amax(x) for x in xs], "group": lambda: fp4kit.amax_grouped(xs)}
    for through in (True, False):
        options = {"pass_through": through}
        yield (
            f"backward, pass_through={through}",
            {
                "loop": lambda options=options: [fp4kit.fake_quantize_backward(x, x, recipe, **options) for x in xs],
                "group": lambda options=options: fp4kit.fake_quantize_grouped_backward(xs, xs, recipe, **options),
                "plan": lambda options=options: plan.fake_quantize_backward(xs, **options),
            },
        )


def gradients(xs: Any, recipe: str) -> Iterator[tuple[str, Calls]]:
    """Yield forward and backward passes of PyTorch as `cases` does."""
    import torch

    import fp4kit.torch

    leaves = [x.clone().requires_grad_() for x in xs]

    def train(grouped: bool, through: bool) -> None:
        options = {"pass_through": through}
        if grouped:
            ys = fp4kit.torch.fake_quantize_grouped(leaves, recipe, **options)
        else:
            ys = [fp4kit.torch.fake_quantize(x, recipe, **options) for x in leaves]
        torch.autograd.grad(ys, leaves, xs)

    for through in (True, False):
        name = f"fp4kit.torch.fake_quantize and its gradient, pass_through={through}"
        calls = {"loop": False, "group": True}
        yield name, {key: lambda g=grouped, t=through: train(g, t) for key, grouped in calls.items()}


def processor_time(call: Call) -> float:
    """Make a call and return the seconds of processor time that it took."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("size", nargs="*", type=int, default=[300, 128, 256])
    parser.add_argument("--torch", action="store_true", help="PyTorch tensors, and their gradients")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    fp4kit.set_num_threads(1)
    count, *shape = args.size
    rng, rows = np.random.default_rng(0), []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        xs: Any = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(count)]
        if args.torch:
            import torch  # noqa: F401  (tensor_of needs it)

            from fp4kit.arrays.returns import tensor_of

            xs = [tensor_of(x) for x in xs]
        for recipe in RECIPES:
            for operation, calls in (*cases(xs, recipe), *(gradients(xs, recipe) if args.torch else ())):
                for call in (*calls.values(), *calls.values()):
                    call()
                watches = {name: partial(processor_time, call) for name, call in calls.items()}
                times = {name: found.median for name, found in alternate(watches, args.rounds, float("inf")).items()}
                ratios = [f"{times[name] / times['loop']:.2f}" if name in times else "" for name in ("group", "plan")]
                rows.append((operation, recipe, np.dtype(dtype).name, f"{times['loop'] / 1e3:.2f} ms", *ratios))
                print(*rows[-1], flush=True)
    print(markdown(("operation", "recipe", "dtype", "loop", "group / loop", "plan / loop"), rows))


if __name__ == "__main__":
    main()
