"""Benchmark search_scales, and a recipe that searches and quantizes in one call.

Model-Optimizer's sweeps are timed beside the searches. Without a Hessian, their scales must be bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import peers
from measure import BF16, F16, F32, Bench, Call, check_quantized, check_rows, main
from rows import element_bytes, quantized_bytes

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

RECIPE, SEARCHED, EXPONENTS = "nvfp4-modelopt-static", "nvfp4-modelopt-mse", "mxfp4-ocp"
TALL = (8192, 4096)
AMAXES = {"amaxes": Fraction(4, 16)}
SWEEP = "modelopt.torch.kernels.quantization.gemm.nvfp4_fp8_sweep"


def sweep(bench: Bench, x: Any, amax: Any, found: Any, hessian: Any = None) -> dict[str, Call]:
    """Return {"Model-Optimizer": call} for Model-Optimizer's sweep over block scales.

    The dict is empty if Model-Optimizer or torch is not installed, or if other libraries are not timed.

    Without a Hessian, raise AssertionError unless the result of the sweep equals `found`, the block amaxes of
    search_scales.

    amax: the tensor amax.
    hessian: one 16 x 16 Hessian per block of columns, or None for a search without weights.
    """
    module = peers.module(SWEEP) if bench.peers and peers.torch() is not None else None
    if module is None:
        return {}
    blocks, top = peers.tensor(x).reshape(-1, 16), peers.tensor(amax)
    call: Callable[[], Any] = lambda: module.nvfp4_fp8_scale_sweep(blocks, top)  # noqa: E731
    if hessian is not None:
        call = lambda: module.nvfp4_fp8_scale_sweep_hessian(blocks, top, peers.tensor(hessian))  # noqa: E731
    theirs = call().cpu().numpy().reshape(found.shape)
    if hessian is None:  # with a Hessian, Model-Optimizer's scales depend on whether its CUDA extension could be built
        assert_same_bits(found.get(), theirs, f"Model-Optimizer's sweep of {x.dtype} {x.shape}")
    return {"Model-Optimizer": call}


def hessians(bench: Bench, columns: int) -> Any:
    """Return one symmetric 16 x 16 Hessian per block of columns, from normally distributed activations.

    Its shape is (columns / 16, 16, 16).
    """
    samples = np.random.default_rng(1).standard_normal((columns // 16, 64, 16))
    return bench.cupy.asarray((samples.transpose(0, 2, 1) @ samples / 64).astype(np.float32))


def run(bench: Bench) -> None:
    """Time searches of scales, and add a row to `bench` for each.

    First come searches over all candidates in two sizes, then with other options, then over exponents. The last call is
    quantize with a recipe that searches.
    """
    traffic = element_bytes(x=BF16) | AMAXES
    for dtype, shape in ((BF16, (bench.size, bench.size)), (BF16, TALL), (F32, TALL), (F16, TALL)):
        x = bench.normal(dtype, shape)
        amax = fp4kit.amax(x)
        found = fp4kit.search_scales(x, RECIPE, tensor_amax=amax)
        check_rows(
            found, lambda part, x=x, a=amax: fp4kit.search_scales(x[part].get(), RECIPE, tensor_amax=a.get()), "search"
        )
        others = sweep(bench, x, amax, found)
        search = lambda x=x, amax=amax: fp4kit.search_scales(x, RECIPE, tensor_amax=amax)  # noqa: E731
        bench.row("search", RECIPE, x, element_bytes(x=dtype) | AMAXES, search, peers=others)
        if x.shape != TALL:
            near = lambda x=x, amax=amax: fp4kit.search_scales(x, RECIPE, tensor_amax=amax, candidates="near")  # noqa: E731
            bench.row("search, near", RECIPE, x, traffic, near)
    x = bench.normal(BF16, TALL)
    amax, columns = fp4kit.amax(x), TALL[1]
    weights = bench.cupy.asarray(np.random.default_rng(2).random(columns, np.float32))
    hessian = hessians(bench, columns)
    kinds: dict[str, Any] = {
        "near": {"candidates": "near"},
        "weights": {"weights": weights},
        "Hessian": {"hessian": hessian},
    }
    kinds |= {objective: {"objective": objective} for objective in ("mae", "p2.4")}
    for name, options in kinds.items():
        search = lambda options=options: fp4kit.search_scales(x, RECIPE, tensor_amax=amax, **options)  # noqa: E731
        others = sweep(bench, x, amax, search(), hessian) if "hessian" in options else {}
        bench.row(f"search, {name}", RECIPE, x, traffic, search, peers=others)
    for objective in ("mse", "p2.4"):
        search = lambda o=objective: fp4kit.search_scales(x, EXPONENTS, objective=o)  # noqa: E731
        bench.row(
            f"search of exponents, {objective}",
            EXPONENTS,
            x,
            element_bytes(x=BF16) | {"amaxes": Fraction(4, 32)},
            search,
        )
    x = bench.normal(BF16)
    q = fp4kit.quantize(x, SEARCHED)
    check_quantized(q, x)
    bench.row(
        "quantize", SEARCHED, x, element_bytes(x=BF16) | quantized_bytes(SEARCHED), lambda: fp4kit.quantize(x, SEARCHED)
    )


if __name__ == "__main__":
    main(run)
