"""The kernels that search block scales, and what the specification finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from host.harness import DeviceArray
from searched import STATIC, hessians, of_nearly_equal_errors, searched_blocks

from fp4kit.call.search_scales import Terms
from fp4kit.cuda.engine.search_factors import search_matrix as multiples
from fp4kit.cuda.engine.search_scales import search_matrix
from fp4kit.ops.engines import specification
from fp4kit.ops.search_scales import search_scales
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.search import search_matrix as specified

Result = tuple[str, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Search:
    """Instantiations of the kernels of squared errors, with weights or without, and of Hessians."""

    dtype: np.dtype
    kind: str = "plain"  # or "weights", "hessian"

    def __str__(self) -> str:
        return f"{self.dtype}-{self.kind}"

    def run(self) -> Iterator[Result]:
        x, amax = searched_blocks(self.dtype)[:48], np.float32([4])
        given = {"weights": np.linspace(0, 2, 64, dtype=np.float32), "hessian": hessians(64)}
        terms = {name: array for name, array in given.items() if name == self.kind}
        for misalignment in (0, self.dtype.itemsize):
            out = DeviceArray(np.zeros((48, 4), np.float32))
            there = Terms(**{name: DeviceArray(array) for name, array in terms.items()})
            search_matrix(DeviceArray(x, misalignment), out, DeviceArray(amax), RECIPES[STATIC], there)
            with specification():
                yield f"search of {self}", out.array, search_scales(x, STATIC, tensor_amax=4.0, **terms)


@dataclass(frozen=True)
class Multiples:
    """Instantiations of the kernel of a recipe that chooses among multiples of each block's amax."""

    recipe: Recipe
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}"

    def run(self) -> Iterator[Result]:
        x = np.concatenate([searched_blocks(self.dtype)[:48], of_nearly_equal_errors().astype(self.dtype)])
        amax = None if self.recipe.tensor_scaling == "none" else np.asarray(np.float32(4))
        expected = np.zeros((len(x), 64 // self.recipe.block_size), np.float32)
        with np.errstate(all="ignore"):
            specified(x, expected, amax, self.recipe, None)
        for misalignment in (0, self.dtype.itemsize):
            out = DeviceArray.output(expected.shape, np.float32)
            multiples(DeviceArray(x, misalignment), out, None if amax is None else DeviceArray(amax), self.recipe)
            yield f"search of {self}", out.array, expected
