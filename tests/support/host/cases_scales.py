"""Cases of codes under given scales: those of quantize, and any bytes, signs and NaN among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from host.cases import Quantize, Result, device, way
from host.harness import DeviceArray

import fp4kit
from fp4kit.cuda.launch import matrix as launch
from fp4kit.cuda.launch.matrix import Matrix
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import NEVER_NAN
from fp4kit.reference.implied_amax import encodes_by_amax

TENSOR_SCALES = np.array([np.nan, 1.0, 0.3, 0.0, 1e-40, 7e-6, 3e38, np.inf, 2.0**-20], np.float32)


@dataclass(frozen=True)
class WithScales(Quantize):
    """One instantiation of quantize_with_scales, and where codes meet the encode scale of implied, on one matrix at a
    time.
    """

    kernel = "quantize_with_scales"

    def __str__(self) -> str:
        return f"{super().__str__()}-scaled"

    def run(self) -> Iterator[Result]:
        for kind in ("adversarial", "uneven", "row", "nonfinite"):
            x = self.matrix(kind)
            for q in self.scales_of(x):
                yield from self.compare_under(x, q, 0)
                if self.misaligned:
                    yield from self.compare_under(x, q, self.dtype.itemsize)

    def scales_of(self, x: np.ndarray) -> Iterator[Quantized]:
        """What quantize finds, and any bytes under tensor scales of every size."""
        with np.errstate(all="ignore"):
            q = fp4kit.quantize(x, self.recipe, scale_layout=self.layout, hadamard=self.hadamard)
        yield q
        rng, changed = np.random.default_rng(3), {}
        if q.block_scale is not None:
            changed["block_scale"] = rng.integers(0, 256, q.block_scale.shape, np.uint8)
        if q.tensor_scale is not None:
            scales = TENSOR_SCALES[self.recipe.tensor_rule in NEVER_NAN :]
            for scale in scales if q.tensor_scale.ndim == 0 else (np.resize(scales, q.tensor_scale.shape),):
                yield replace(q, **changed, tensor_scale=np.array(scale), tensor_amax=None)
        elif changed:
            yield replace(q, **changed)

    def compare_under(self, x: np.ndarray, q: Quantized, misalignment: int) -> Iterator[Result]:
        options = self.options(x) | {"scale_layout": self.layout, "hadamard": self.hadamard}
        expected = fp4kit.quantize(x, self.recipe, **options, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        seed, tensor = options.get("seed"), device(q.tensor_scale)
        amax = launch.implied_amaxes(tensor, None, self.recipe, self.dtype) if encodes_by_amax(self.recipe) else None
        packed = DeviceArray.output(q.packed.shape, np.uint8, 4 if self.recipe.block is None and misalignment else 0)
        arrays = Matrix(
            DeviceArray(x, misalignment),
            packed,
            device(q.block_scale),
            tensor_amax=amax,
            tensor_scale=tensor,
            random=device(seed) if isinstance(seed, np.ndarray) else None,
        )
        work = self.work(x)._replace(scaled=True)
        launch.quantize_matrix(arrays, work, seed if isinstance(seed, int) else 0, way(self.kernel))
        yield "packed", packed.array, expected.packed
