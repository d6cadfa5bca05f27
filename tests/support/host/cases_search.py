"""The kernels that search block scales, and what the specification finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from host.harness import DeviceArray
from powers import POWERS, errors
from searched import STATIC, hessians, of_nearly_equal_errors, searched_blocks

from fp4kit.call.parse import Call
from fp4kit.call.search_scales import PLAIN, Terms
from fp4kit.call.search_scales import Search as SearchCall
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import recipe_struct
from fp4kit.cuda.engine import search_amaxes
from fp4kit.cuda.engine.search_amaxes import bits_of
from fp4kit.cuda.engine.search_factors import search_factors
from fp4kit.cuda.engine.search_scales import SEARCH_THREADS, search_group, search_matrix
from fp4kit.cuda.launch.geometry import THREADS, Launch, address, grid
from fp4kit.formats import E2M1, E4M3
from fp4kit.host import engine
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.codec import decode
from fp4kit.reference.hadamard import hadamard_blocks
from fp4kit.reference.pow import power
from fp4kit.reference.search_amaxes import multiples
from fp4kit.reference.search_factors import search_matrix as specified
from fp4kit.reference.search_scales import SIXTH

Result = tuple[str, np.ndarray, np.ndarray]


STATIC_RECIPE = RECIPES[STATIC]
SQUARE = replace(STATIC_RECIPE, id="static-16x16", block=(16, 16))
SIDES = {"weights": np.linspace(0, 2, 64, dtype=np.float32), "hessian": hessians(64)}
KINDS: dict[str, tuple[Recipe, Terms]] = {  # the pruned searches, then those of every candidate
    "plain": (STATIC_RECIPE, Terms()),
    "near": (STATIC_RECIPE, Terms(offsets=(-8, 8))),
    "few": (STATIC_RECIPE, Terms(offsets=(-2, 7))),
    "weights": (STATIC_RECIPE, Terms(weights=SIDES["weights"])),
    "hessian": (STATIC_RECIPE, Terms(hessian=SIDES["hessian"])),
    "square": (SQUARE, Terms(offsets=(-8, 8))),
    "square hessian": (SQUARE, Terms(hessian=SIDES["hessian"])),
    "mae": (STATIC_RECIPE, Terms(power=1, weights=SIDES["weights"])),
    "max": (SQUARE, Terms(power=np.inf)),
    "powers": (RECIPES["mxfp4-ocp"], Terms(weights=SIDES["weights"])),
    "powers mae": (RECIPES["mxfp8-te"], Terms(power=1, offsets=(-3, 4))),
    "p2.4": (STATIC_RECIPE, Terms(power=2.4, weights=SIDES["weights"])),
    "square p3": (SQUARE, Terms(power=3.0, offsets=(-8, 8))),
    "powers p1.5": (RECIPES["mxfp8-te"], Terms(power=1.5, weights=SIDES["weights"])),
}


@dataclass(frozen=True)
class Search:
    """Instantiations of the kernels that search block scales."""

    dtype: np.dtype
    kind: str = "plain"

    def __str__(self) -> str:
        return f"{self.dtype}-{self.kind}"

    def run(self) -> Iterator[Result]:
        r, terms = KINDS[self.kind]
        x, amax = searched_blocks(self.dtype)[:43], None if r.tensor_scaling == "none" else np.float32([4])
        there = terms._replace(**{name: DeviceArray(a) for name in SIDES if (a := getattr(terms, name)) is not None})
        call = Call("search_scales", x, r, 1, x, None if amax is None else amax.reshape(()))
        for misalignment in (0, self.dtype.itemsize):
            out = DeviceArray.output((43, 64 // r.block_size), np.float32)
            device_amax = None if amax is None else DeviceArray(amax)
            search_matrix(DeviceArray(x, misalignment), out, device_amax, r, there)
            yield f"search of {self}", out.array, engine.search_scales(SearchCall(call, terms))


@dataclass(frozen=True)
class GroupedSearch:
    """Instantiations of the grouped kernel; so often that they are a table in device memory, or arguments of the
    kernel.
    """

    dtype: np.dtype
    times: int = 1
    mask: int | None = None

    def __str__(self) -> str:
        return f"{self.dtype}-grouped{f'-{self.times}-times' * (self.times > 1)}{'-hadamard' * (self.mask is not None)}"

    def run(self) -> Iterator[Result]:
        x = searched_blocks(self.dtype)
        xs = [x[:33], x[33:34], x[34:43, :16]] * self.times
        for misalignment in (0, self.dtype.itemsize):
            group = [
                (
                    DeviceArray(a, misalignment * (i != 1)),
                    DeviceArray.output((len(a), a.shape[1] // 16), np.float32),
                    DeviceArray(np.float32([4])),
                )
                for i, a in enumerate(xs)
            ]
            search_group(group, STATIC_RECIPE, self.mask)()
            for i, (a, (_, out, _)) in enumerate(zip(xs, group, strict=True)):
                seen = a if self.mask is None else hadamard_blocks(a, self.mask)
                call = Call("search_scales", seen, STATIC_RECIPE, 1, seen, np.float32(4))
                yield f"search of {i}", out.array, engine.search_scales(SearchCall(call))


@dataclass(frozen=True)
class Multiples:
    """Instantiations of the kernel of a recipe that chooses among multiples of each block's amax."""

    recipe: Recipe
    dtype: np.dtype
    mask: int | None = None  # of a Hadamard transform

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}{'-hadamard' * (self.mask is not None)}"

    def run(self) -> Iterator[Result]:
        x = np.concatenate([searched_blocks(self.dtype)[:48], of_nearly_equal_errors().astype(self.dtype)])
        amax = None if self.recipe.tensor_scaling == "none" else np.asarray(np.float32(4))
        expected = np.zeros((len(x), 64 // self.recipe.block_size), np.float32)
        with np.errstate(all="ignore"):
            specified(x, expected, amax, self.recipe, self.mask)
        for misalignment in (0, self.dtype.itemsize):
            out = DeviceArray.output(expected.shape, np.float32)
            device_amax = None if amax is None else DeviceArray(amax)
            search_factors([(DeviceArray(x, misalignment), out, device_amax)], self.recipe, self.mask)
            yield f"search of {self}", out.array, expected


@dataclass(frozen=True)
class Amaxes:
    """Instantiations of the kernels that search amaxes of tensors or rows, losses of all multiples in one part or in
    several.
    """

    recipe: Recipe
    dtype: np.dtype
    terms: Terms = PLAIN

    def __str__(self) -> str:
        return (
            f"{self.recipe.id}-{self.dtype}-power-{self.terms.power:g}{'-weights' * (self.terms.weights is not None)}"
        )

    def run(self) -> Iterator[Result]:
        x, r, terms = searched_blocks(self.dtype)[:43], self.recipe, self.terms._replace(grid=(0.5, 1.5, 0.05))
        amax = compute_tensor_amax(np.nan_to_num(x.astype(np.float32), nan=1, posinf=1, neginf=1), r)
        factors = multiples((0.5, 1.5, 0.05))
        for misalignment, most in ((0, 1 << 25), (self.dtype.itemsize, 300)):
            out = DeviceArray.output(amax.shape, np.float32)
            there = terms._replace(weights=None if terms.weights is None else DeviceArray(terms.weights))
            with patch.object(search_amaxes, "MOST_LOSSES", most):
                search_amaxes.search_matrix(
                    DeviceArray(x, misalignment), DeviceArray(amax), out, r, there, DeviceArray(factors)
                )
            call = Call("search_scales", x, r, 1, x, amax)
            yield f"search of {self}", out.array, engine.search_scales(SearchCall(call, terms))


@dataclass(frozen=True)
class Power:
    """What losses of powers are made of, alone."""

    def __str__(self) -> str:
        return "power"

    def run(self) -> Iterator[Result]:
        d = errors()
        for p in POWERS:
            out = DeviceArray.output(d.shape, np.float64)
            put_powers(DeviceArray(d), out, p)
            with np.errstate(all="ignore"):
                yield f"{p}", out.array, power(d, p)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of losses alone, of blocks below 7 scales of a normal code: never above a loss, seldom far below
    it.
    """

    def __str__(self) -> str:
        return "bounds"

    def run(self) -> Iterator[Result]:
        rng, units, blocks = np.random.default_rng(0), 85, 8192
        first = rng.integers(8, 119, blocks).astype(np.uint32)
        codes = (first[:, None] + np.arange(8)).astype(np.uint8)
        scales = (np.float32(3.7) * (decode(codes, E4M3) * np.float32(1 / 448)) * SIXTH).astype(np.float32)
        ends = (
            rng.integers(0, 447, (blocks, 16)) + 0.5 + rng.choice([-1e-4, 0, 1e-4], (blocks, 16))
        ) / 64  # of a table's rows
        u = np.where(rng.random((blocks, 16)) < 0.5, rng.random((blocks, 16)) * 6.998, ends)
        u[: blocks // 2, 1:] = 0  # what one element adds
        x = (u * scales[:, :1]).astype(np.float32)
        sums = DeviceArray.output((blocks, 8), np.uint32)
        put_bounds(*map(DeviceArray, (x, np.float32(1) / scales[:, 0], first)), sums)
        values = decode(np.arange(8, dtype=np.uint8), E2M1) * scales[..., None].astype(np.float64)
        left = np.abs(values[:, :, None, :] - x[:, None, :, None]).min(axis=-1) / scales[:, :1, None]
        most = np.floor(units * (left**2).sum(axis=-1)).astype(np.uint32)
        closed = np.arange(8) > np.arange(blocks)[:, None] % 8
        places, found = sums.array % 8, sums.array // 8
        yield "places", places, np.broadcast_to(np.arange(8, dtype=np.uint32), places.shape).copy()
        yield "bounds above a loss", (found > most) & ~closed, np.zeros_like(closed)
        yield "bounds of codes that are no candidates", found[closed] > 16 * units, np.ones(closed.sum(), bool)
        far = np.mean(((found < 0.8 * most) & ~closed)[blocks // 2 :]) > 0.1
        yield "bounds far below", np.array(far), np.array(False)


def put_bounds(x: Any, reciprocals: Any, first: Any, out: Any) -> None:
    """Sums of bounds by the header of the kernels."""
    text = instantiation("search", recipe_struct(STATIC_RECIPE)).replace("search.cu", "search_loss_bounds.cuh")
    text += Path(__file__).with_name("bounds.cu").read_text()
    fields = np.dtype([(name, "u8") for name in ("x", "reciprocals", "first", "out", "count")])
    function = loader.function(text, "bounds_kernel", x.device.id)
    Launch(function, 2, fields, len(x.array), threads=SEARCH_THREADS)(*map(address, (x, reciprocals, first, out)))


def put_powers(d: Any, out: Any, p: float) -> None:
    """d^p by the header of the kernels, into out: float64."""
    text = '#include "pow.cuh"\n' + Path(__file__).with_name("power.cu").read_text()
    fields = np.dtype([("d", "u8"), ("out", "u8"), ("count", "i8"), ("power", "f8")])
    function = loader.function(text, "power_kernel", d.device.id)
    Launch(function, grid(-(-d.size // THREADS), d.device.id), fields, d.size, bits_of(p))(address(d), address(out))


AMAXES = (
    Amaxes(RECIPES["fp8-modelopt"], np.dtype(np.float32), Terms(weights=SIDES["weights"])),
    Amaxes(RECIPES["int8-modelopt-channel"], np.dtype(np.float16), Terms(power=np.inf)),
    Amaxes(RECIPES["fp8-modelopt-channel"], np.dtype(np.float32), Terms(power=1.5, weights=SIDES["weights"])),
)
