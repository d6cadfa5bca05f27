"""Cases of what primary weights need: shards cut anywhere, one at a time and many in one launch; transposed copies of
many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from host.cases import Result, matrix
from host.harness import DeviceArray
from inputs import ordinary

import fp4kit
from fp4kit.cuda.launch import partial
from fp4kit.cuda.launch.grouped_transpose import TransposeMatrix, transpose_group
from fp4kit.layouts import packed
from fp4kit.ops.partial import amax_shape
from fp4kit.quantized.part_shapes import packed_shape
from fp4kit.recipes import Recipe
from fp4kit.reference import partial as reference
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.blocks import spread_rows
from fp4kit.reference.quantize import encode_elements, tensor_amax
from fp4kit.reference.tensor_rules import tensor_scale

TENSOR_AMAX = np.float32(3.7)


def cuts(shape: tuple[int, int], seed: int) -> list[int]:
    """Edges of shards of a matrix: inside bytes, runs, blocks and rows, and at the ends of rows; some shards are
    empty.
    """
    M, K = shape
    some = {1, 2, 5, 16, 17, K - 1, K, K + 1, 2 * K, M * K // 2 | 1, M * K - 3, M * K}
    some |= set(np.random.default_rng(seed).integers(0, M * K + 1, 3).tolist())
    return [0, *sorted(min(cut, M * K) for cut in some), M * K]


def matrices(r: Recipe, dtype: np.dtype) -> list[np.ndarray]:
    """Matrices of whole blocks along rows; the last rows of blocks may be short."""
    wide = [
        ordinary(5, shape, dtype)
        for shape in ((37, 5 * r.block_size), (3, r.block_size), (2 * r.block_rows, 8 * r.block_size))
    ]
    return [matrix("adversarial", dtype, r), matrix("nonfinite", dtype, r), *wide]


def without_nan(amax: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(amax), np.float32(np.inf), amax)


@dataclass(frozen=True)
class Partial:
    """Every kernel of one recipe and type, on shards at every alignment."""

    recipe: Recipe
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.recipe.id}-{self.dtype}"

    def run(self) -> Iterator[Result]:
        adversarial, nonfinite, *others = matrices(self.recipe, self.dtype)
        size = adversarial.size
        yield from self.one_by_one(adversarial, [(0, size), (5, size - 2), *pairwise(cuts(adversarial.shape, 0)[::3])])
        yield from self.one_by_one(nonfinite, [(0, nonfinite.size), *pairwise(cuts(nonfinite.shape, 1)[1::3])])
        yield from self.together([nonfinite, *others])

    def one_by_one(self, x: np.ndarray, shards: list[tuple[int, int]]) -> Iterator[Result]:
        """A launch for each shard: its amaxes, and its codes beside other bits."""
        r, flat = self.recipe, x.reshape(-1)
        amax = without_nan(reference.partial_amax(flat, x.shape, 0, r))
        whole = None if r.tensor_scaling == "none" else TENSOR_AMAX
        for k, (a, b) in enumerate(s for s in shards if s[0] < s[1]):
            shard = DeviceArray(flat[a:b], k * self.dtype.itemsize % 16)
            out = DeviceArray.zeros(amax_shape(x.shape, r), np.float32)
            partial.amax_shard(shard, out, x.shape, a, r)
            yield f"amax of [{a}, {b}) of {x.shape}", out.array, reference.partial_amax(flat[a:b], x.shape, a, r)
            expected = np.full(packed_shape(x.shape, r), 0xA5, np.uint8)
            packed = DeviceArray(expected, partial.run_bytes(r) * (k % 2) % 16, is_output=True)
            reference.partial_cast(flat[a:b], expected, amax, x.shape, a, r, whole)
            first, last = partial.factor_rows(a, b, x.shape, r)
            factors = DeviceArray.output((last - first, amax.shape[1]), np.float32)
            given = None if whole is None else DeviceArray(whole)
            partial.cast_shard(shard, packed, DeviceArray(amax), given, factors, x.shape, a, r)
            yield f"codes of [{a}, {b}) of {x.shape}", packed.array, expected

    def together(self, xs: list[np.ndarray]) -> Iterator[Result]:
        """Every stage as one launch over all shards of all matrices, as master weights have it."""
        r = self.recipe
        shards = [(t, a, b) for t, x in enumerate(xs) for a, b in pairwise(cuts(x.shape, t) if t else [0, x.size])]
        tensors, starts, ends = np.array(shards).T
        held = [DeviceArray(xs[t].reshape(-1)[a:b], t * self.dtype.itemsize % 16) for t, a, b in shards]
        M, K = np.array([x.shape for x in xs]).T
        blocks = np.array([np.prod(amax_shape(x.shape, r)) for x in xs])
        block_at, run_at = np.cumsum(blocks) - blocks, np.cumsum(M * K // 16) - M * K // 16
        shard_fields = {
            "values": np.array([s.data.ptr for s in held], np.uint64),
            "start": starts,
            "end": ends,
            "columns": K[tensors],
        }
        sizes = np.array([s.size for s in held])

        amax, whole = DeviceArray.zeros(int(blocks.sum()), np.float32), DeviceArray.zeros(len(xs), np.float32)
        fields = {"block_amax": amax, "tensor_amax": whole, "rows": M[tensors]}
        fields |= {"block_at": block_at[tensors], "tensor_at": tensors}
        self.launch("partial_amax", shard_fields | fields, sizes, held, amax, whole)
        found = [reference.partial_amax(x.reshape(-1), x.shape, 0, r) for x in xs]
        if r.amax_nan != "lanes":  # which NaN count there depends on the cuts
            yield "block amaxes", amax.array, np.concatenate([a.reshape(-1) for a in found])
        if r.tensor_scaling == "tensor":
            yield "tensor amaxes", whole.array, np.array([tensor_amax(x, r) for x in xs], np.float32)

        amax = DeviceArray(np.concatenate([without_nan(a).reshape(-1) for a in found]))
        whole = DeviceArray(without_nan(whole.array))
        rows = int((M * (K // r.block_size)).sum())
        factors, scales = DeviceArray.output(int(blocks.sum()), np.float32), DeviceArray.output(rows, np.uint8)
        decode_scales = DeviceArray.output(len(xs), np.float32)
        scale_at = np.cumsum(M * (K // r.block_size)) - M * (K // r.block_size)
        fields = {
            "block_amax": amax,
            "tensor_amax": whole,
            "factors": factors,
            "scales": scales,
            "tensor_scale": decode_scales,
        }
        fields |= {"rows": M, "columns": K, "block_at": block_at, "factor_at": block_at, "scale_at": scale_at}
        fields |= {"tensor_at": np.arange(len(xs))}
        self.launch("partial_scales", fields, blocks, amax, whole, factors, scales, decode_scales)
        expected = [self.expected_scales(x, without_nan(a), t) for x, a, t in zip(xs, found, whole.array, strict=True)]
        yield "scales", scales.array, np.concatenate([e[0].reshape(-1) for e in expected])
        yield "factors", factors.array, np.concatenate([e[1].reshape(-1) for e in expected])
        yield "tensor scales", decode_scales.array, np.array([e[2] for e in expected], np.float32)

        runs = int((M * K // 16).sum())
        packed = DeviceArray.output(runs * partial.run_bytes(r), np.uint8)
        places = {"tensor_amax": whole, "tensor_at": tensors, "factor_at": block_at[tensors]}
        fields = {"packed": packed, "factors": factors, "run_at": run_at[tensors]} | places
        self.launch("partial_cast", shard_fields | fields, sizes, held, packed, factors, whole)
        yield "codes", packed.array, np.concatenate(list(map(self.expected_codes, xs, expected, whole.array)))

        counts = partial.run_count(starts, ends)
        from_at = np.cumsum(counts) - counts - starts // 16
        message = DeviceArray.output(int(counts.sum()) * partial.run_bytes(r), np.uint8)
        fields = {"packed": message, "factors": factors, "run_at": from_at} | places
        self.launch("partial_cast", shard_fields | fields, sizes, held, message, factors, whole)
        placed = DeviceArray.output(packed.size, np.uint8)
        fields = {"from": DeviceArray(message.array), "to": placed, "from_at": from_at, "to_at": run_at[tensors]}
        self.launch("partial_place", fields | {"start": starts, "end": ends}, sizes, *fields.values())
        yield "codes placed", placed.array, packed.array

    def launch(self, kernel: str, fields: dict[str, object], work: np.ndarray, *held: object) -> None:
        table = partial.arguments(kernel, len(work), **fields)
        partial.prepare(kernel, self.recipe, self.dtype, table, work, 0, *held)()

    def expected_scales(
        self, x: np.ndarray, amax: np.ndarray, whole: np.float32
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r = self.recipe
        tensor = tensor_scale(whole, r, self.dtype)
        with np.errstate(all="ignore"):
            codes = BLOCK_RULES[r.block_rule].code(amax, tensor, r, self.dtype)
            factor = BLOCK_RULES[r.block_rule].factor(codes, amax, tensor, r, self.dtype)
        return spread_rows(codes, r, len(x)), factor, tensor.decode if r.tensor_scaling == "tensor" else np.float32(1)

    def expected_codes(self, x: np.ndarray, scales: tuple[np.ndarray, ...], whole: np.float32) -> np.ndarray:
        r = self.recipe
        tensor = tensor_scale(whole, r, self.dtype)
        factor = spread_rows(scales[1], r, len(x))[..., None]
        blocks = x.astype(np.float32).reshape(len(x), -1, r.block_size)
        with np.errstate(all="ignore"):
            codes = encode_elements(blocks, factor, r, self.dtype, None, tensor).reshape(x.shape)
        return packed(codes, r.element.packing).reshape(-1)


@dataclass(frozen=True)
class GroupedTranspose:
    """The columnwise copies of several matrices in one launch."""

    recipe: Recipe
    shapes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.recipe.id}-{'-'.join(f'{M}x{K}' for M, K in self.shapes)}"

    def run(self) -> Iterator[Result]:
        wholes = [fp4kit.quantize(ordinary(i, shape), self.recipe) for i, shape in enumerate(self.shapes)]
        moved = [fp4kit.transpose(q) for q in wholes]
        matrices = [
            TransposeMatrix(
                DeviceArray(q.packed),
                DeviceArray(q.block_scale),
                DeviceArray.output(t.packed.shape, np.uint8),
                DeviceArray.output(t.block_scale.shape, np.uint8),
                q.shape,
            )
            for q, t in zip(wholes, moved, strict=True)
        ]
        transpose_group(matrices, self.recipe)()
        for m, t in zip(matrices, moved, strict=True):
            yield f"codes of {m.shape}", m.out.array, t.packed
            yield f"scales of {m.shape}", m.scales_out.array, t.block_scale
