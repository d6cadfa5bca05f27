"""Benchmark quantize along rows, for every family of recipes.

Rows vary the input dtype, the amax (given, or computed by the call), the scale layout, and the rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import peers
from measure import BF16, F16, F32, Bench, Call, check_quantized, main, poison
from rows import BenchmarkRow, Beside, element_bytes, quantized_bytes

import fp4kit

# Target efficiencies: time of a copy / time of the call. A search computes errors before it quantizes.
MX, NVFP4, PER_TOKEN, LESS_COMMON, SEARCHED = 0.95, 0.93, 0.85, 0.70, 0.20
EVERY_DTYPE = {
    "mxfp4-ocp": MX,
    "mxfp8-te": MX,
    "nvfp4-te": NVFP4,
}
FROM_BF16 = {
    "mxfp4-torchao-rceil": MX,
    "mxfp4-flashinfer": MX,
    "mxfp8-torchao-rceil": MX,
    "nvfp4-te-reference": NVFP4,
    "nvfp4-te-rowscaled": NVFP4,
    "nvfp4-flashinfer": NVFP4,
    "nvfp4-flashinfer-precise": NVFP4,
    "nvfp4-torchao": NVFP4,
    "nvfp4-modelopt": NVFP4,
    "nvfp4-compressed-tensors": NVFP4,
    "mxfp4-modelopt": LESS_COMMON,  # rounds ties toward zero
    "nvfp4-te-4over6-mse-448": LESS_COMMON,
    "nvfp4-te-4over6-mae-256": LESS_COMMON,
    "nvfp4-flashinfer-4over6-mse-448": LESS_COMMON,
    "hif4-hifloat4": LESS_COMMON,
    "mxfp4-msmodelslim": LESS_COMMON,
    "mxfp4-msmodelslim-ceil-x": LESS_COMMON,
    "mxfp4-msmodelslim-4over6": SEARCHED,
    "mxfp8-msmodelslim-mse": SEARCHED,
    "mxfp4-msmodelslim-dual": LESS_COMMON,  # with amaxes of 512 elements, which the call finds
    "fp8-modelopt": None,
}
WITH_AMAX_PASS = ("nvfp4-te", "nvfp4-flashinfer", "nvfp4-torchao", "nvfp4-modelopt")
# MiB of x: the time with a given amax, relative to the time without one, that quantize should reach at least.
AMAX_BY_SIZE = {8: 0.75, 16: 0.75, 32: 0.75, 64: 0.70, 128: 0.64, 256: 0.60}
ROW_SCALED = (
    "nvfp4-te-rowscaled",
    "nvfp4-flashinfer-token",
    "nvfp4-flashinfer-token-4over6-mse-256",
    "nvfp4-flashinfer-token-4over6-mae-448",
)
SWIZZLED = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te")
STOCHASTIC = ("nvfp4-te", "mxfp4-te")


def prepared(x: Any, recipe: str, **options: Any) -> tuple[fp4kit.Quantized, Call]:
    """Return (q, call) for quantize of x. `call` writes its result into q.

    The amax of the tensor or of rows is given to both, if the recipe has one.

    The call is made once into memory that is filled with bytes 0xEE. AssertionError is raised if the result differs
    from the CPU's.

    Args:
        x: the input
        recipe: the id of the recipe
        options: further arguments of fp4kit.quantize
    """
    scaling = fp4kit.recipe(recipe).tensor_scaling
    amax = {"tensor_amax": fp4kit.quantize(x, recipe).tensor_amax} if scaling in ("tensor", "row") else {}
    q = fp4kit.quantize(x, recipe, **amax, **options)

    def call() -> object:
        return fp4kit.quantize(x, recipe, out=q, **amax, **options)

    poison(q)
    call()
    check_quantized(q, x, **{name: value for name, value in options.items() if name not in ("axis", "scale_layout")})
    return q, call


def rowwise(bench: Bench, recipe: str, x: Any, target: float | None) -> BenchmarkRow:
    """Time quantize along rows, add its row to `bench`, and return the row.

    The tensor amax is given, if the recipe has one.

    target: the smallest efficiency that the row should have, or None for no target.
    """
    q, call = prepared(x, recipe)
    others = peers.quantize_mx(bench, x, recipe)
    if recipe == "nvfp4-torchao":
        others = peers.quantize_nvfp4(bench, x, q.tensor_amax)
    if recipe == "nvfp4-modelopt":
        others = peers.modelopt_nvfp4(bench, x, q.tensor_amax)
    given = fp4kit.recipe(recipe).tensor_scaling in ("tensor", "row")
    operation = "quantize, amax given" if given else "quantize"
    return bench.row(operation, recipe, x, traffic(recipe, x), call, target=target, peers=others)


def traffic(recipe: str, x: Any) -> Any:
    """Return {array: bytes moved per element}: x, its codes and its scales, each once."""
    return element_bytes(x=x.dtype) | quantized_bytes(recipe)


def with_amax_pass(bench: Bench, recipe: str, x: Any) -> None:
    """Time quantize without a given amax, and add its row to `bench`.

    The call reads x twice: for the amax, then for the codes.
    """
    q = fp4kit.quantize(x, recipe)
    others = {}
    if recipe == "nvfp4-torchao":
        others = peers.quantize_nvfp4(bench, x)
    if recipe == "nvfp4-modelopt":
        others = peers.modelopt_nvfp4(bench, x)
    twice = element_bytes(**{"x for amax": x.dtype}) | traffic(recipe, x)
    bench.row(
        "quantize with amax", recipe, x, twice, lambda: fp4kit.quantize(x, recipe, out=q), target=NVFP4, peers=others
    )


def amax_by_size(bench: Bench, recipe: str, mib: int, least: float) -> None:
    """Time quantize with and without a given amax, of several arrays in turn, so that no x is in a cache.

    Args:
        mib: the size of an array, in MiB of bfloat16
        least: the first time divided by the second should be at least this
    """
    first = bench.normal(BF16, (mib << 7, 4096))
    xs = [first, *(first.copy() for _ in range(max(600 // mib, 2)))]
    qs = [fp4kit.quantize(x, recipe) for x in xs]
    times = []
    for name, amaxes in ((", amax given", [q.tensor_amax.copy() for q in qs]), (" with amax", [None] * len(qs))):
        calls = [
            partial(fp4kit.quantize, x, recipe, tensor_amax=amax, out=q)
            for x, q, amax in zip(xs, qs, amaxes, strict=True)
        ]
        twice = {} if name == ", amax given" else element_bytes(**{"x for amax": BF16})
        beside = {"beside": Beside("amax given", times[0], 1 / least)} if times else {}
        row = bench.row(
            f"quantize{name}, {mib} MiB in turn", recipe, first, twice | traffic(recipe, first), *calls, **beside
        )
        times.append(row.us)


def with_row_amaxes(bench: Bench, recipe: str, x: Any) -> None:
    """Time quantize per token, where the kernel finds the amaxes of rows itself, and add its rows to `bench`.

    The call reads x once, unlike with_amax_pass. One row is for linear and one for swizzled scales.
    """
    for name, layout in (("", "linear"), (", swizzled_128x4", "swizzled_128x4")):
        q = fp4kit.quantize(x, recipe, scale_layout=layout)
        call = partial(fp4kit.quantize, x, recipe, scale_layout=layout, out=q)
        bench.row(f"quantize per token{name}", recipe, x, traffic(recipe, x), call, target=PER_TOKEN)


def run(bench: Bench) -> None:
    """Time quantize for the recipes of the tables above, and add the rows to `bench`.

    All are timed with bfloat16, and those of EVERY_DTYPE also with float32 and float16. Calls are grouped by dtype, so
    that only one large input is in memory at a time.
    """
    for dtype in (F32, F16):
        for recipe, target in EVERY_DTYPE.items():
            rowwise(bench, recipe, bench.normal(dtype), target)
    x = bench.normal(BF16)
    for recipe, target in (EVERY_DTYPE | FROM_BF16).items():
        row = rowwise(bench, recipe, x, target)
        if recipe in SWIZZLED:
            _, call = prepared(x, recipe, scale_layout="swizzled_128x4")
            beside = Beside("linear", row.us, 1.03)
            bench.row("quantize, swizzled_128x4", recipe, x, traffic(recipe, x), call, beside=beside)
        if recipe in WITH_AMAX_PASS:
            with_amax_pass(bench, recipe, x)
    for recipe in ROW_SCALED:
        with_row_amaxes(bench, recipe, bench.normal(BF16, (16384, 8192)))
    for mib, least in AMAX_BY_SIZE.items():
        amax_by_size(bench, "nvfp4-te", mib, least)
    for recipe in STOCHASTIC:
        _, call = prepared(x, recipe, rounding="stochastic", seed=1)
        bench.row("quantize, stochastic", recipe, x, traffic(recipe, x), call, target=LESS_COMMON)


if __name__ == "__main__":
    main(run)
