"""Cases of the fake quantizers with a rule of their own, of the clip mask of their gradient, and of requantize."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
from host.cases import F32, Quantize, Result, device, matrix, way
from host.harness import DeviceArray
from inputs import BF16, ordinary

import fp4kit
from fp4kit.call.amaxes import tensor_amax_shape
from fp4kit.cuda.launch import clip, requantize
from fp4kit.cuda.launch import matrix as launch
from fp4kit.cuda.launch.dispatch import LaunchRequest
from fp4kit.cuda.launch.matrix import Matrix
from fp4kit.formats import E4M3
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.fake import clip_gradient
from fp4kit.reference.quantize import EncodeOptions, quantize_matrix
from fp4kit.reference.requantize import keep_codes
from fp4kit.reference.tensor_rules import tensor_scale

AMAXES = (3.7, 0.0, 1e-9, 1e-45, 3e38, np.inf)


@dataclass(frozen=True)
class Fake:
    """One instantiation of the fake kernel, or two, and what it is run on."""

    recipe: Recipe
    dtype: np.dtype = BF16
    misaligned: bool = False

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}{'-misaligned' * self.misaligned}"

    def run(self) -> Iterator[Result]:
        for kind in ("adversarial", "uneven", "row", "nonfinite"):
            x = matrix(kind, self.dtype, self.recipe)
            yield from self.compare(x, kind, None, None)
            if self.recipe.tensor_scaling != "none":
                for amax in AMAXES:
                    yield from self.compare(x, f"{kind}, amax {amax}", self.amax(amax, x.shape), None)
            if self.recipe.static:
                block = np.exp2(np.random.default_rng(2).uniform(-30, 20, scale_shape(x.shape, self.recipe))).astype(
                    np.float32
                )
                block[:, ::5], block[:, 2::7], block[:, 3::4] = 0, np.inf, 1e-40
                yield from self.compare(x, f"{kind}, block_amax", None, block)
            if self.misaligned:
                yield from self.compare(x, f"{kind}, misaligned", None, None, self.dtype.itemsize)
        yield from self.compare(self.near(), "near ties and powers of two", self.amax(3.7), None)

    def amax(self, amax: float, shape: tuple[int, int] = (64, 256)) -> np.ndarray | None:
        """The same amax for all tensor scales."""
        if self.recipe.tensor_scaling == "none":
            return None
        return np.full(tensor_amax_shape(shape, self.recipe), amax, np.float32)

    def near(self) -> np.ndarray:
        """Values at and beside ties of the element format under a scale for 3.7, and a few steps below powers of
        two.
        """
        r, rng = self.recipe, np.random.default_rng(5)
        scale = 3.7 * 2.0 ** rng.integers(-3, 1, (64, 256 // 16, 1)) / (2688 if r.scale is E4M3 else r.element.max)
        ties = rng.choice(r.element.midpoints if not r.element.is_integer else np.arange(-7.5, 8), (64, 16, 16))
        ties[..., 0] = r.element.max
        exponents = rng.integers(*((-13, 15) if self.dtype == np.float16 else (-120, 120)), (64, 8, 1)).repeat(
            2, axis=1
        )
        powers = np.exp2(exponents) * rng.choice([0.3, 0.1, 3e-5, 1e-5], (64, 16, 16))
        powers[:, ::2, 0] = np.exp2(exponents[:, ::2, 0])
        x = np.where(rng.random((64, 1, 1)) < 0.5, ties * scale, powers).astype(np.float32).reshape(64, 256)
        steps = rng.integers(-1, 2, x.shape)
        steps[:, ::32] = -rng.choice([0, 1, 2, 3, 5, 6, 10, 11, 12, 21, 22, 23, 40, 41, 42, 44, 45], (64, 8))
        dtype_steps = steps << (0 if self.dtype == F32 else 16 if self.dtype == BF16 else 13)
        return (
            (x.astype(self.dtype).astype(np.float32).view(np.int32) + dtype_steps)
            .astype(np.int32)
            .view(np.float32)
            .astype(self.dtype)
        )

    def compare(
        self, x: np.ndarray, name: str, amax: np.ndarray | None, block: np.ndarray | None, misalignment: int = 0
    ) -> Iterator[Result]:
        r = self.recipe
        values = DeviceArray.output(x.shape, x.dtype, misalignment)
        computed = amax is None and r.tensor_scaling in ("tensor", "row")
        tensor = compute_tensor_amax(x, r) if computed else amax
        arrays = Matrix(
            DeviceArray(x, misalignment), values=values, tensor_amax=device(tensor), block_amax=device(block)
        )
        launch.quantize_matrix(arrays, LaunchRequest(r, self.dtype, x.shape, values=True))
        yield name, values.array, expected(self, x.tobytes(), x.shape, _frozen(amax), _frozen(block))


def _frozen(a: np.ndarray | None) -> tuple[bytes, tuple[int, ...]] | None:
    return None if a is None else (a.tobytes(), a.shape)


def _thawed(frozen: tuple[bytes, tuple[int, ...]] | None) -> np.ndarray | None:
    return None if frozen is None else np.frombuffer(frozen[0], np.float32).reshape(frozen[1])


@cache
def expected(case: Fake, data: bytes, shape: tuple[int, int], amax: object, block: object) -> np.ndarray:
    x = np.frombuffer(data, case.dtype).reshape(shape)
    return fp4kit.fake_quantize(x, case.recipe, tensor_amax=_thawed(amax), block_amax=_thawed(block))


@dataclass(frozen=True)
class NanAmax:
    """A recipe under a tensor amax of NaN, which a device array may hold: nobody looks at it there."""

    recipe: Recipe
    dtype: np.dtype = BF16

    def __str__(self) -> str:
        return f"{self.recipe.id}-nan"

    def run(self) -> Iterator[Result]:
        r, x = self.recipe, matrix("uneven", self.dtype, self.recipe)
        amax = np.full(tensor_amax_shape(x.shape, r), np.nan, np.float32)
        packed = np.empty(packed_shape(x.shape, r), np.uint8)
        scales = None if r.scale is None else np.empty(scale_shape(x.shape, r), np.uint8)
        quantize_matrix(
            x,
            r,
            amax[..., None] if r.tensor_scaling == "row" else amax,
            packed,
            scales,
            EncodeOptions(None, None, None),
        )
        outputs = [None if a is None else DeviceArray.output(a.shape, a.dtype) for a in (packed, scales, amax)]
        codes, scale_bytes, decode = outputs
        arrays = Matrix(DeviceArray(x), codes, scale_bytes, None, DeviceArray(amax), decode)
        launch.quantize_matrix(arrays, LaunchRequest(r, self.dtype, x.shape), 0, way(Quantize(r).kernel))
        expected = (packed, scales, np.asarray(tensor_scale(amax, r, x.dtype).decode, np.float32))
        for name, actual, wanted in zip(("packed", "scales", "tensor_scale"), outputs, expected, strict=True):
            if actual is not None:
                yield name, actual.array, wanted


@dataclass(frozen=True)
class Lanes:
    """A recipe on blocks whose even or odd elements are all NaN, which is where amax_nan="lanes" gives NaN, or not."""

    recipe: Recipe

    def __str__(self) -> str:
        return f"{self.recipe.id}-lanes"

    def run(self) -> Iterator[Result]:
        x = matrix("uneven", BF16, self.recipe)
        x[::3, ::2], x[1::3, 1::2] = np.nan, np.nan
        yield from Quantize(self.recipe).compare(x, 0, None)


@dataclass(frozen=True)
class Clip:
    """An instantiation of the clip kernel, or two: an amax for all elements, for runs of `covered`, at any address."""

    dtype: np.dtype = BF16
    grad: np.dtype = F32

    def __str__(self) -> str:
        return f"{self.dtype}-{self.grad}"

    def run(self) -> Iterator[Result]:
        for shape, covered in (
            ((33, 64), 33 * 64),
            ((33, 64), 64),
            ((33, 64), 16),
            ((7, 37), 37),
            ((7, 37), 7 * 37),
            ((1, 5), 1),
        ):
            x, grad = ordinary(5, shape, self.dtype), ordinary(6, shape, self.grad)
            x.reshape(-1)[::7], x.reshape(-1)[1::31] = 2, np.nan
            x.reshape(-1)[2::29], grad.reshape(-1)[::11] = -np.inf, np.nan
            amax = np.abs(np.random.default_rng(7).standard_normal(x.size // covered, np.float32))
            amax[::3], amax[1::9], amax[2::9], amax[4::9] = 2, np.inf, np.nan, np.float32(2 - 2.0**-20)
            for misalignment in (0, 1):
                places = [misalignment * a.itemsize for a in (grad, x, grad)]
                out = DeviceArray.output(shape, grad.dtype, places[2])
                clip.clip_gradient(DeviceArray(grad, places[0]), DeviceArray(x, places[1]), DeviceArray(amax), out)
                limit = np.repeat(amax, covered).reshape(shape)
                yield f"{shape}, amax of {covered}, {misalignment}", out.array, clip_gradient(grad, x, limit)


@dataclass(frozen=True)
class Keep:
    """The kernels that keep the codes of MXFP4 under the scales of an NVFP4 recipe, or leave the result alone."""

    target: Recipe
    source: Recipe = RECIPES["mxfp4-ocp"]
    dtype: np.dtype = BF16

    def __str__(self) -> str:
        return f"{self.source.id}-to-{self.target.id}-{self.dtype}"

    def run(self) -> Iterator[Result]:
        blocks = (5, 96)
        shape = (blocks[0], blocks[1] * self.source.block_size)
        for top, spread in ((127, 17), (127, 18), (20, 17), (254, 3), (8, 8), (5, 0), (250, 17), (255, 2), (100, 9)):
            rng = np.random.default_rng(top)
            scales = rng.integers(max(top - spread, 0), top + 1, blocks).astype(np.uint8)
            scales[0, :2] = top, max(top - spread, 0)
            packed = rng.integers(0, 256, packed_shape(shape, self.source)).astype(np.uint8)
            by_block = packed.reshape(*blocks, -1)
            by_block[:, 1] = 0x35
            zeros = rng.random(blocks) < (0.2 if spread else 2.0)
            zeros[0, :2] &= not spread
            by_block[zeros] = np.array([0x80, 0x08, 0x88, 0], np.uint8)[rng.integers(0, 4, by_block.shape[-1])]
            scales[zeros] = 255 if top == 100 else rng.integers(0, 255, int(zeros.sum()))
            yield from self.compare(
                Quantized(packed, scales, None, None, shape, self.dtype, 1, self.source), f"{top} - {spread}"
            )

    def compare(self, q: Quantized, name: str) -> Iterator[Result]:
        shapes = {
            "packed": q.packed.shape,
            "block_scale": scale_shape(q.shape, self.target),
            "tensor_scale": (),
            "tensor_amax": (),
        }
        dtypes = dict.fromkeys(shapes, np.uint8) | {"tensor_scale": np.float32, "tensor_amax": np.float32}
        outputs = {part: DeviceArray.output(shape, dtypes[part]) for part, shape in shapes.items()}
        untouched = {part: array.array.copy() for part, array in outputs.items()}
        result = SimpleNamespace(**outputs, recipe=self.target, dtype=q.dtype)
        requantize.keep_codes(DeviceArray(q.packed), DeviceArray(q.block_scale), self.source, result)
        kept = keep_codes(q, self.target)
        for part, array in outputs.items():
            yield f"{part} of {name}", array.array, untouched[part] if kept is None else np.asarray(getattr(kept, part))


@dataclass(frozen=True)
class Changed:
    """The kernel that counts values that changed."""

    def __str__(self) -> str:
        return "changed"

    def run(self) -> Iterator[Result]:
        for size in (1, 255, 12345):
            x = ordinary(1, (1, size))[0]
            y = x.copy()
            y[::17] += 1
            x[::5], y[::5], y[::10], x[::15] = np.nan, np.nan, -np.nan, 0
            expected = np.count_nonzero((x.view(np.uint32) != y.view(np.uint32)) & ~(np.isnan(x) & np.isnan(y)))
            yield (
                f"{size} values",
                requantize.count_changed(DeviceArray(x), DeviceArray(y)).array.view(np.uint64),
                np.uint64(expected),
            )
