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
from fp4kit.cuda import loader
from fp4kit.cuda.engine import search_amaxes
from fp4kit.cuda.engine.search_amaxes import bits_of
from fp4kit.cuda.engine.search_factors import search_factors
from fp4kit.cuda.engine.search_scales import search_group, search_matrix
from fp4kit.cuda.geometry import THREADS, Launch, address, grid
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference import engine
from fp4kit.reference.engine import compute_tensor_amax
from fp4kit.reference.hadamard import hadamard_blocks
from fp4kit.reference.power import power
from fp4kit.reference.search import search_matrix as specified
from fp4kit.reference.search_amaxes import multiples

Result = tuple[str, np.ndarray, np.ndarray]


STATIC_RECIPE = RECIPES[STATIC]
SQUARE = replace(STATIC_RECIPE, id="static-16x16", block=(16, 16))
SIDES = {"weights": np.linspace(0, 2, 64, dtype=np.float32), "hessian": hessians(64)}
KINDS: dict[str, tuple[Recipe, Terms]] = {  # the pruned searches, then those of every candidate
    "plain": (STATIC_RECIPE, Terms()),
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
    """Instantiations of the grouped kernel; so often that they are a table in device memory, or arguments of the kernel."""

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
    """Instantiations of the kernels that search amaxes of tensors or rows, losses of all multiples in one part or in several."""

    recipe: Recipe
    dtype: np.dtype
    terms: Terms = PLAIN

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}-power-{self.terms.power:g}{'-weights' * (self.terms.weights is not None)}"

    def run(self) -> Iterator[Result]:
        x, r, terms = searched_blocks(self.dtype)[:43], self.recipe, self.terms._replace(grid=(0.5, 1.5, 0.05))
        amax = compute_tensor_amax(np.nan_to_num(x.astype(np.float32), nan=1, posinf=1, neginf=1), r)
        factors = multiples((0.5, 1.5, 0.05))
        for misalignment, most in ((0, 1 << 25), (self.dtype.itemsize, 300)):
            out = DeviceArray.output(amax.shape, np.float32)
            there = terms._replace(weights=None if terms.weights is None else DeviceArray(terms.weights))
            with patch.object(search_amaxes, "MOST_LOSSES", most):
                search_amaxes.search_matrix(DeviceArray(x, misalignment), DeviceArray(amax), out, r, there, DeviceArray(factors))
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


def put_powers(d: Any, out: Any, p: float) -> None:
    """d^p by the header of the kernels, into out: float64."""
    text = '#include "power.cuh"\n' + Path(__file__).with_name("power.cu").read_text()
    fields = np.dtype([("d", "u8"), ("out", "u8"), ("count", "i8"), ("power", "f8")])
    function = loader.function(text, "power_kernel", d.device.id)
    Launch(function, grid(-(-d.size // THREADS), d.device.id), fields, d.size, bits_of(p))(address(d), address(out))


AMAXES = (
    Amaxes(RECIPES["fp8-modelopt"], np.dtype(np.float32), Terms(weights=SIDES["weights"])),
    Amaxes(RECIPES["int8-modelopt-channel"], np.dtype(np.float16), Terms(power=np.inf)),
    Amaxes(RECIPES["fp8-modelopt-channel"], np.dtype(np.float32), Terms(power=1.5, weights=SIDES["weights"])),
)
