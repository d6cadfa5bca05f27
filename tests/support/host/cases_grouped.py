"""Cases of the grouped kernels: a group of unequal tensors, and what the specification expects of each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from host.cases import F32, Amax, Quantize, Result, copies, device, expected_codes, matrix
from host.harness import DeviceArray
from inputs import BF16, ordinary

import fp4kit
from fp4kit.cuda.launch import grouped
from fp4kit.cuda.launch.dispatch import LaunchRequest
from fp4kit.cuda.launch.matrix import Matrix
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.fake import clip_gradient

KINDS = ("row", "adversarial", "uneven", "nonfinite")
MISALIGNED = (1, 2)  # places of a group that begin one element after a multiple of 16 bytes


@dataclass(frozen=True)
class GroupedQuantize:
    """Instantiations of a grouped quantize kernel: all tensors aligned, and some of them."""

    single: Quantize
    times: int = 1  # that the group has each tensor

    def __str__(self) -> str:
        return f"{self.single}{f'-{self.times}-times' * (self.times > 1)}"

    def run(self) -> Iterator[Result]:
        case, count = self.single, len(KINDS) * self.times
        tensors = [case.matrix(kind) for kind in KINDS * self.times]
        amaxes = [np.float32(2**i) for i in range(count)] if case.recipe.tensor_scaling == "tensor" else [None] * count
        for misaligned in ((), MISALIGNED) if case.misaligned else ((),):
            places = [case.dtype.itemsize * (i in misaligned) for i in range(count)]
            codes = [expected_codes(case, x.tobytes(), x.shape, amax) for x, amax in zip(tensors, amaxes, strict=True)]
            of_codes = [
                8 * (i % 2) if misaligned else 0 for i in range(count)
            ]  # as in a stack of matrices of few elements
            yield from self.compare([*zip(tensors, places, of_codes, codes, strict=True)])

    def compare(self, tensors: list[tuple[np.ndarray, int, int, Quantized]]) -> Iterator[Result]:
        case = self.single
        members = [self.member(*tensor) for tensor in tensors]
        nothing = empty(case.recipe, case.dtype)
        members.insert(1, nothing)
        seed = case.options(tensors[0][0]).get("seed") or 0
        grouped.quantize_group(members, [case.work(m.x) for m in members], seed)()
        if nothing.tensor_scale is not None and not case.fake:
            x = np.zeros((0, 2 * case.recipe.length_multiple), case.dtype)
            yield (
                "nothing",
                nothing.tensor_scale.array,
                fp4kit.quantize(x, case.recipe, tensor_amax=0.7).tensor_scale.reshape(1),
            )
        del members[1]
        for i, (m, (*_, q)) in enumerate(zip(members, tensors, strict=True)):
            parts = {
                "packed": (m.packed, q.packed),
                "scales": (m.scales, q.block_scale),
                "tensor_scale": (m.tensor_scale, q.tensor_scale),
            }
            if case.fake:
                parts = {"values": (m.values, fp4kit.dequantize(q))}
            for name, (actual, expected) in parts.items():
                if actual is not None:
                    yield f"{name} of {i}", actual.array, expected

    def member(self, x: np.ndarray, misalignment: int, at: int, q: Quantized) -> Matrix:
        array, amax = DeviceArray(x, misalignment), device(q.tensor_amax)
        block_amax = device(self.single.options(x).get("block_amax"))
        if self.single.fake:
            values = DeviceArray.output(x.shape, x.dtype, misalignment)
            return Matrix(array, values=values, tensor_amax=amax, block_amax=block_amax)
        make = DeviceArray.output if self.single.layout == "linear" else DeviceArray.zeros
        scales = None if q.block_scale is None else make(q.block_scale.shape, np.uint8)
        packed, decode = DeviceArray.output(q.packed.shape, np.uint8, at), copies(q.tensor_amax)
        return Matrix(array, packed, scales, None, amax, decode, block_amax)


def empty(r: Recipe, dtype: np.dtype) -> Matrix:
    """A tensor without elements; with a tensor scale, where there is one for all."""
    scales = int(r.tensor_scaling == "tensor")
    amax, out = (
        (DeviceArray(np.full(1, 0.7, np.float32)), DeviceArray.output((1,), np.float32)) if scales else (None, None)
    )
    x, values = DeviceArray(np.zeros((scales, 0), dtype)), DeviceArray.output((0,), dtype)
    return Matrix(x, tensor_amax=amax, tensor_scale=out, values=values)


@dataclass(frozen=True)
class GroupedAmax:
    """Instantiations of the grouped amax kernels."""

    single: Amax
    times: int = 1  # that the group has each tensor

    def __str__(self) -> str:
        return f"{self.single}{f'-{self.times}-times' * (self.times > 1)}"

    def run(self) -> Iterator[Result]:
        case = self.single
        shapes = ((3, 37), (1, 1), (64, 129), (5, 7)) if case.mask is None else ((28, 256), (1, 16))
        for misaligned in ((), MISALIGNED):
            xs = [np.resize(adversarial_blocks(case.dtype)[i:], shape) for i, shape in enumerate(shapes * self.times)]
            xs[-1].reshape(-1)[2], xs[0].reshape(-1)[-1] = np.inf, np.nan
            arrays = [DeviceArray(x, case.dtype.itemsize * (i in misaligned)) for i, x in enumerate(xs)]
            outs = [DeviceArray.zeros(x.shape[:1] if case.by_row else (1,), np.float32) for x in xs]
            grouped.amax_group(arrays, outs, case.counted, case.by_row, case.mask)()
            for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
                yield f"amax of {i}", out.array, case.expected(x).reshape(out.shape)


@dataclass(frozen=True)
class GroupedFake:
    """Instantiations of the grouped fake kernel."""

    recipe: Recipe
    dtype: np.dtype = BF16

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}"

    def run(self) -> Iterator[Result]:
        r = self.recipe
        xs = [matrix(kind, self.dtype, r) for kind in KINDS]
        amaxes = [compute_tensor_amax(x, r) if r.tensor_scaling in ("tensor", "row") else None for x in xs]
        for misaligned in ((), MISALIGNED):
            places = [self.dtype.itemsize * (i in misaligned) for i in range(len(xs))]
            outs = [DeviceArray.output(x.shape, x.dtype, place) for x, place in zip(xs, places, strict=True)]
            parts = zip(xs, places, amaxes, outs, strict=True)
            members = [Matrix(DeviceArray(x, p), values=y, tensor_amax=device(a)) for x, p, a, y in parts]
            grouped.quantize_group(members, [LaunchRequest(r, self.dtype, x.shape, values=True) for x in xs])()
            for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
                yield f"values of {i}", out.array, fp4kit.fake_quantize(x, r)


@dataclass(frozen=True)
class GroupedClip:
    """Instantiations of the grouped clip kernel."""

    dtype: np.dtype = BF16
    grad: np.dtype = F32

    def __str__(self) -> str:
        return f"{self.dtype}-{self.grad}"

    def run(self) -> Iterator[Result]:
        for places in ((0, 0, 0, 0), (0, 1, 1, 0)):
            clips, expected = [], []
            for i, (shape, covered) in enumerate((((33, 64), 33 * 64), ((7, 37), 37), ((64, 256), 16), ((1, 1), 1))):
                x, grad = ordinary(i, shape, self.dtype), ordinary(9, shape, self.grad)
                x.reshape(-1)[::7], x.reshape(-1)[1::31] = 2, np.nan
                amax = np.abs(np.random.default_rng(7).standard_normal(x.size // covered, np.float32))
                amax[::3] = 2
                g, d, o = (DeviceArray(a, places[i] * a.itemsize) for a in (grad, x, grad))
                o.is_output = True
                clips.append(grouped.Clip(g, d, DeviceArray(amax), o))
                expected.append(clip_gradient(grad, x, np.repeat(amax, covered).reshape(shape)))
            grouped.clip_group(clips)()
            for i, (clip, gradient) in enumerate(zip(clips, expected, strict=True)):
                yield f"gradient of {i}", clip.out.array, gradient


BF16_KINDS = ("nvfp4-te", "mxfp4-flashinfer", "nvfp4-te-2d", "fp8-modelopt", "int8-modelopt-channel")
QUANTIZE_KINDS = [GroupedQuantize(Quantize(fp4kit.recipe(id), BF16, misaligned=True)) for id in BF16_KINDS]
EVERY_KIND = [*QUANTIZE_KINDS, GroupedAmax(Amax(BF16)), GroupedAmax(Amax(BF16, by_row=True))]
EVERY_KIND += [GroupedFake(fp4kit.recipe("nvfp4-modelopt-fake")), GroupedClip()]
