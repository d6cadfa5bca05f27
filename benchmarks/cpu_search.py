"""Define the searches of block scales that bench_cpu.py times, and their baseline: a NumPy loop over the candidates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cpu_cases import CpuCase

import fp4kit
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.cpu.engine import search_matrix
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference.codec import decode

RECIPE = "nvfp4-modelopt-mse"


def cases(x: np.ndarray) -> Iterator[CpuCase]:
    """Yield the cases of search_scales on a matrix. Then yield the case of quantize with RECIPE, which searches too.

    The searches try all candidates, try only candidates near the amax, have column weights, or have Hessians.
    """
    K, rng = x.shape[1], np.random.default_rng(1)
    weights = (rng.random(K) + 0.1).astype(np.float32)
    samples = rng.standard_normal((K // 16, 64, 16))
    hessian = (samples.transpose(0, 2, 1) @ samples / 64).astype(np.float32)
    kinds = {
        "": {},
        " near": {"candidates": "near"},
        " weights": {"weights": weights},
        " hessian": {"hessian": hessian},
    }
    for what, terms in kinds.items():
        yield CpuCase(f"search_scales{what}", lambda terms=terms: fp4kit.search_scales(x, RECIPE, **terms), x.nbytes)  # type: ignore[misc]
    yield CpuCase("quantize", lambda: fp4kit.quantize(x, RECIPE), x.nbytes)


def loop(x: np.ndarray) -> np.ndarray:
    """Return the block scale codes with the smallest squared errors, found by a loop over all E4M3 codes.

    This is the NumPy baseline. For a few blocks, its codes differ from the codes that search_scales finds.
    """
    a = np.abs(x.astype(np.float32)).reshape(-1, 16)
    scales = a.max() / E2M1.max * (decode(np.arange(1, 127, dtype=np.uint8), E4M3) / E4M3.max)
    values, between = E2M1.magnitudes.astype(np.float32), E2M1.midpoints.astype(np.float32)
    best, code = np.full(len(a), np.inf, np.float32), np.zeros(len(a), np.uint8)
    for i, scale in enumerate(scales):
        error = a - values[np.searchsorted(between, a / scale)] * scale
        loss = np.einsum("ij,ij->i", error, error)
        better = loss < best
        best[better], code[better] = loss[better], i + 1
    return code


def unproven(x: np.ndarray) -> float:
    """Return the share of blocks for which the search tries all candidates.

    For these blocks, bounds of the errors cannot exclude candidates.
    """
    search = search_call("search_scales", x, RECIPE, -1, None, SearchRequest())
    found, counted = np.zeros((len(x), x.shape[1] // 16), np.float32), np.zeros(1, np.uint64)
    search_matrix(x, found, fp4kit.amax(x), search, counted)
    return int(counted[0]) / found.size
