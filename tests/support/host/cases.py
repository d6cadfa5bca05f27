"""Cases: what launches a kernel through fp4kit.cuda.launch, and what the NumPy specification expects of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import ml_dtypes
import numpy as np
from host.harness import DeviceArray
from inputs import BF16, ordinary

import fp4kit
from fp4kit.call.amaxes import tensor_amax_shape
from fp4kit.cuda.launch import matrix as launch
from fp4kit.cuda.launch.amax_columns import amax_columns
from fp4kit.cuda.launch.dispatch import WAYS, LaunchRequest, Way
from fp4kit.cuda.launch.matrix import Matrix
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.layouts import padded_shape
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.recipes.schema import faking
from fp4kit.reference.hadamard import TE_SIGN_MASK, hadamard_blocks
from fp4kit.reference.tensor_rules import tensor_scale

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
Result = tuple[str, np.ndarray, np.ndarray]  # name, actual, expected


def matrix(kind: str, dtype: np.dtype, r: Recipe) -> np.ndarray:
    """A matrix of whole blocks: adversarial; ordinary, wider or taller than whole tiles; of one row; with inf and
    NaN.
    """
    if kind == "adversarial":
        return np.resize(adversarial_blocks(dtype), (64, 256))
    size = r.block_size if r.block else 18 if r.is_packed else 19
    few = size > 32
    blocks = {"uneven": (37, 3 if few else 19), "row": (1, 5 if few else 261), "nonfinite": (33, 4), "tall": (299, 5)}
    rows, columns = blocks[kind]
    x = ordinary(4, (rows, columns * size), dtype)
    if kind == "nonfinite":
        places = np.random.default_rng(1).permutation(x.size // 8)[: x.size // 80]
        x.reshape(-1)[places] = np.resize(np.array([np.inf, np.nan, -np.inf, -np.nan], dtype), len(places))
    return x


def way(kernel: str) -> Way:
    """The way of a kernel, which a call might not choose."""
    return next(way for way in WAYS if way.kernel == kernel)


def device(array: np.ndarray | None) -> DeviceArray | None:
    return None if array is None else DeviceArray(array)


def copies(amax: np.ndarray | None) -> DeviceArray | None:
    """Where a kernel writes the tensor scales of an amax."""
    return None if amax is None else DeviceArray.output(amax.shape, np.float32)


@dataclass(frozen=True)
class Quantize:
    """One instantiation of a quantize kernel or more, and what it is run on."""

    recipe: Recipe
    dtype: np.dtype = BF16
    layout: str = "linear"
    fake: bool = False
    rounding: str = "nearest"  # or "seed", "bytes": stochastic
    hadamard: bool | str = False
    block_amax: bool = False
    misaligned: bool = False  # also at an address that is a multiple of an element only: another instantiation

    def __str__(self) -> str:
        flags = {
            "fake": self.fake,
            "hadamard": self.hadamard,
            "block_amax": self.block_amax,
            "misaligned": self.misaligned,
        }
        named = [
            self.layout,
            self.rounding,
            *(name if flag is True else f"{name}_{flag}" for name, flag in flags.items() if flag),
        ]
        return "-".join(
            [self.recipe.id, str(self.dtype), *(name for name in named if name not in ("linear", "nearest"))]
        )

    @property
    def kernel(self) -> str:
        """The one that is tested: by rows of blocks, by tiles of threads, or without blocks."""
        if self.recipe.block is None:
            return "quantize_unblocked"
        return "quantize_tile" if self.recipe.block_rows > 1 or self.recipe.four_over_six else "quantize"

    def work(self, x: np.ndarray) -> LaunchRequest:
        mask = {False: None, True: TE_SIGN_MASK, "no_signs": 0}[self.hadamard]
        stochastic = self.rounding != "nearest"
        return LaunchRequest(
            self.recipe, self.dtype, x.shape, self.layout, self.fake, False, stochastic, mask, self.block_amax
        )

    def matrix(self, kind: str) -> np.ndarray:
        """One of the matrices, in whole runs of a transform."""
        x = matrix(kind, self.dtype, self.recipe)
        return x if self.hadamard is False else np.ascontiguousarray(x[:, : x.shape[1] // 16 * 16])

    def options(self, x: np.ndarray) -> dict[str, object]:
        """Arguments of fp4kit.quantize."""
        rng = np.random.default_rng(2)
        seed = {"seed": 0x123456789ABCDEF, "bytes": rng.integers(0, 256, x.shape, np.uint8)}.get(self.rounding)
        found = {} if seed is None else {"rounding": "stochastic", "seed": seed}
        if self.block_amax:
            found["block_amax"] = np.exp2(rng.uniform(-8, 8, scale_shape(x.shape, self.recipe))).astype(np.float32)
        return found

    def run(self) -> Iterator[Result]:
        for kind in ("adversarial", "uneven", "row", "nonfinite") + ("tall",) * (self.layout != "linear"):
            x = self.matrix(kind)
            yield from self.compare(x, 0, None)
            if self.recipe.tensor_scaling == "tensor":  # adversarial blocks are too far apart for one tensor scale
                yield from self.compare(x, 0, np.float32(3.7))
            if self.misaligned:
                yield from self.compare(x, self.dtype.itemsize, None)

    def compare(self, x: np.ndarray, misalignment: int, amax: np.float32 | None) -> Iterator[Result]:
        q, options = expected_codes(self, x.tobytes(), x.shape, amax), self.options(x)
        seed = options.get("seed")
        packed, scales, decode_scale, values = (None,) * 4
        if self.fake:
            values = DeviceArray.output(x.shape, x.dtype, misalignment)
        else:
            ragged = (
                4 if self.recipe.block is None and amax is not None else 0
            )  # a matrix of a stack may begin anywhere
            packed, decode_scale = DeviceArray.output(q.packed.shape, np.uint8, ragged), copies(q.tensor_amax)
            if q.block_scale is not None:
                make = DeviceArray.output if self.layout == "linear" else DeviceArray.zeros
                scales = make(q.block_scale.shape, np.uint8)
        arrays = Matrix(
            DeviceArray(x, misalignment),
            packed,
            scales,
            values,
            device(q.tensor_amax),
            decode_scale,
            block_amax=device(options.get("block_amax")),
            random=device(seed) if isinstance(seed, np.ndarray) else None,
        )
        launch.quantize_matrix(arrays, self.work(x), seed if isinstance(seed, int) else 0, way(self.kernel))
        if self.fake:
            yield "values", values.array, fp4kit.dequantize(replace(q, recipe=faking(q.recipe)))
            return
        yield "packed", packed.array, q.packed
        for name, actual, expected in (
            ("scales", scales, q.block_scale),
            ("tensor_scale", decode_scale, q.tensor_scale),
        ):
            if actual is not None:
                yield name, actual.array, expected


@dataclass(frozen=True)
class SecondOfStack(Quantize):
    """A matrix that comes after another one among those that a seed's bytes are of."""

    rounding: str = "seed"

    def run(self) -> Iterator[Result]:
        x = np.resize(matrix("nonfinite", self.dtype, self.recipe), (2, 32, 160))
        q = fp4kit.quantize(x, self.recipe, **self.options(x), tensor_amax=np.full(2, 3.7, np.float32))
        packed, scales = (
            None if a is None else DeviceArray.output(a.shape[1:], np.uint8) for a in (q.packed, q.block_scale)
        )
        amax, seed = device(np.float32(3.7)), self.options(x)["seed"]
        arrays = Matrix(DeviceArray(x[1]), packed, scales, None, amax, copies(np.float32(0)), group=x[0].size // 16)
        launch.quantize_matrix(arrays, self.work(x[1]), seed, way(self.kernel))
        yield "packed", packed.array, q.packed[1]


@dataclass(frozen=True)
class WithAmaxOut(Quantize):
    """A launch as prepared calls make it: the kernel copies tensor_amax too."""

    def run(self) -> Iterator[Result]:
        x = matrix("row", self.dtype, self.recipe)
        q = fp4kit.quantize(x, self.recipe)
        arrays = {"x": DeviceArray(x), "tensor_amax": device(q.tensor_amax)}
        for name, a in (("packed", q.packed), ("scales", q.block_scale)):
            if a is not None:
                arrays[name] = DeviceArray.output(a.shape, a.dtype)
        arrays |= {name: copies(q.tensor_amax) for name in ("tensor_scale", "amax_out")}
        launch.quantize_matrix(Matrix(**arrays), self.work(x), 0, way(self.kernel))
        yield "packed", arrays["packed"].array, q.packed
        yield "tensor_scale", arrays["tensor_scale"].array, q.tensor_scale
        yield "tensor_amax", arrays["amax_out"].array, q.tensor_amax


@dataclass(frozen=True)
class Thresholds(Quantize):
    """Every element below 8 of a type of 16 bits, under the scale 1, with the random bytes about which its E2M1 code
    changes.
    """

    rounding: str = "bytes"

    def options(self, x: np.ndarray) -> dict[str, object]:
        a = np.abs(x.astype(np.float64))
        step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(a, 0.5))), 0) - 1)
        first = np.ceil((1 - a / step % 1) * 256)  # that rounds up; 256: none does
        turns = np.arange(x.shape[1]) % 4
        found = np.select(
            [turns == 0, turns == 1, turns == 2], [first - 1, np.minimum(first, 255), np.zeros_like(a)], 255
        )
        return {"rounding": "stochastic", "seed": found.astype(np.uint8)}

    def run(self) -> Iterator[Result]:
        bits = np.arange(np.array(8, self.dtype).view(np.uint16), dtype=np.uint16)
        signs = np.random.default_rng(0).integers(0, 2, bits.size * 4, np.uint16) << 15
        x = np.resize(np.repeat(bits, 4) | signs, (-(-bits.size * 4 // 124), 124)).view(self.dtype)
        four = np.full((len(x) * 4, 1), 4, self.dtype)  # the scale of amaxes from 4 to 8 is 1
        yield from self.compare(np.concatenate([x.reshape(-1, 31), four], 1).reshape(-1, 128), 0, None)


@dataclass(frozen=True)
class Guards(Quantize):
    """Blocks on both sides of every guard of the fast paths of 4over6 and of stochastic rounding, under many tensor
    amaxes.
    """

    def run(self) -> Iterator[Result]:
        amaxes = (
            (0.02, 1e-38, 2.0**-61, 2.0**-59, 2.0**61, 3e38, 0.0, np.inf)
            if self.recipe.tensor_scaling == "tensor"
            else ()
        )
        for x in guarded(self.dtype):
            for amax in (None, *amaxes):
                yield from self.compare(x, 0, amax if amax is None else np.float32(amax))


@dataclass(frozen=True)
class ByTable(Guards):
    """The same, ordinary blocks and nearly equal errors by the tables of 4over6, which are made for large matrices
    only.
    """

    kernel = "quantize_table"

    def __str__(self) -> str:
        return f"{super().__str__()}-table"

    def run(self) -> Iterator[Result]:
        few = np.round(np.random.default_rng(4).standard_normal((64, 2048)).clip(-4, 4) * 4) / 4
        yield from super().run()
        yield from Quantize.run(self)
        yield from self.compare(few.astype(self.dtype), 0, np.float32(4.0))  # errors differ by roundings


def guarded(dtype: np.dtype) -> Iterator[np.ndarray]:
    """Matrices (32, 160) of blocks far apart, of one magnitude, few, zeros, large and tiny ones; larger, smaller, with
    NaN.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((32, 10, 16)) * np.exp2(rng.integers(-24, 1, (1, 10, 1)))
    x[:, 1] = rng.choice([-1.0, 0.0, 1.0], (32, 16))  # one magnitude: the same error under both scales
    x[:, 2] = np.copysign(0.0, x[:, 2])
    x[16:, 3] = np.copysign(0.0, x[16:, 3])  # zero in part
    x[:, 4] = np.round(x[:, 4] / np.abs(x[:, 4]).max() * 12) / 2  # few values
    x[:, 5] *= np.where(rng.random((32, 16)) < 0.1, 1, 2.0**-130)
    x = x.reshape(32, 160)
    top = float(ml_dtypes.finfo(dtype).max)
    for scale in (1.0, 40.0, 2.0**70, 2.0**126, 2.0**-70, 2.0**-130):
        yield np.clip(x * scale, -top, top).astype(dtype)
    x[::7, ::13] = rng.choice([np.nan, np.inf, -np.inf], x[::7, ::13].shape)
    yield x.astype(dtype)


@cache
def expected_codes(case: Quantize, data: bytes, shape: tuple[int, int], amax: np.float32 | None) -> Quantized:
    x = np.frombuffer(data, case.dtype).reshape(shape)
    options = case.options(x) | {"tensor_amax": amax, "scale_layout": case.layout, "hadamard": case.hadamard}
    return fp4kit.quantize(x, case.recipe, **options)


@dataclass(frozen=True)
class Dequantize:
    """Instantiations of the dequantize kernel, one an output type, on every code under every scale."""

    recipe: Recipe
    dtype: np.dtype = BF16  # of the array that was quantized
    layout: str = "linear"
    outputs: tuple[np.dtype, ...] = (F32,)
    rows: int = 64  # with 512 codes are fetched ahead, too

    def __str__(self) -> str:
        large = "-large" if self.rows > 64 else ""
        return f"{self.recipe.id}-{self.dtype}-{self.layout}-to-{'-'.join(map(str, self.outputs))}{large}"

    def run(self) -> Iterator[Result]:
        for shape in ((self.rows, 256), (3, 3 * self.recipe.block_size) if self.recipe.block else (5, 38)):
            for number, (name, scale, amax) in enumerate(self.tensors(shape)):
                q = random_codes(self, shape, scale, amax)
                for dtype in self.outputs:
                    ragged = self.recipe.block is None and number == 0  # a matrix of a stack may begin anywhere
                    values = DeviceArray.output(shape, dtype, dtype.itemsize * ragged)
                    arrays = device(q.packed), device(q.block_scale)
                    tensor = device(q.tensor_scale), device(q.tensor_amax)
                    launch.dequantize_matrix(*arrays, self.recipe, self.layout, *tensor, self.dtype, values)
                    yield f"{dtype} values of {name}", values.array, expected_values(self, shape, name, dtype)

    def tensors(self, shape: tuple[int, int]) -> Iterator[tuple[str, np.ndarray | None, np.ndarray | None]]:
        """Tensor scales and amaxes: what an amax can be, NaN where recipes let it through; unknown, wrong and
        impossible ones.
        """
        r = self.recipe
        if r.tensor_scaling == "none":
            yield "no tensor scale", None, None
            return
        covered = tensor_amax_shape(shape, r)
        for amax in (3.7, 0.0, 1e-45, np.inf) + (np.nan,) * (r.amax_nan == "propagate"):
            full = np.full(covered, amax, np.float32)
            yield f"amax {amax}", self.decode_scale(full), full
        if not DECODE_RULES[r.decode_rule].needs_amax:
            return
        rng = np.random.default_rng(7)
        for size in (3.7, 1e-3, 1e30, 1e-37):
            amax = np.asarray(rng.uniform(1, 2, covered) * size, np.float32)
            for name, amaxes in (("full", amax), ("bfloat16", amax.astype(BF16).astype(np.float32))):
                yield f"unknown {name} amax near {size}", self.decode_scale(amaxes), None
        shifts, wrong = rng.integers(-1, 2, covered), np.where(rng.random(covered) < 0.5, amax, np.float32(5))
        scale = np.asarray(rng.uniform(1e-4, 1, covered), np.float32)
        yield "scales of anywhere", scale, None
        yield (
            "scales beside those of wrong amaxes",
            (scale.view(np.int32) + shifts).astype(np.int32).view(np.float32),
            wrong,
        )

    def decode_scale(self, amax: np.ndarray) -> np.ndarray:
        """The scales of amaxes, as quantize gives them."""
        return np.asarray(tensor_scale(amax, self.recipe, self.dtype).decode, np.float32)


def random_codes(
    case: Dequantize, shape: tuple[int, int], scale: np.ndarray | None, amax: np.ndarray | None
) -> Quantized:
    """Random bytes for codes, and each scale byte in turn."""
    r, rng = case.recipe, np.random.default_rng(3)
    packed = rng.integers(0, 2 ** (8 if r.is_packed else r.element.bits), packed_shape(shape, r), np.uint8)
    scales = padded_shape(scale_shape(shape, r), case.layout)
    return Quantized(
        packed,
        None if r.scale is None else np.resize(np.arange(256, dtype=np.uint8), scales),
        scale,
        amax,
        shape,
        case.dtype,
        1,
        r,
        case.layout,
    )


@cache
def expected_values(case: Dequantize, shape: tuple[int, int], name: str, dtype: np.dtype) -> np.ndarray:
    scale, amax = next((scale, amax) for found, scale, amax in case.tensors(shape) if found == name)
    with np.errstate(all="ignore"):
        return fp4kit.dequantize(random_codes(case, shape, scale, amax), dtype)


@dataclass(frozen=True)
class Amax:
    """Instantiations of the amax kernels: of an array or of its rows."""

    dtype: np.dtype
    counted: str = "all"  # or "no_nan", "finite"
    by_row: bool = False
    mask: int | None = None

    def __str__(self) -> str:
        return f"{self.dtype}-{self.counted}{'-by_row' * self.by_row}{'-hadamard' * (self.mask is not None)}"

    def run(self) -> Iterator[Result]:
        for shape in self.shapes():
            x = np.resize(adversarial_blocks(self.dtype)[::-1], shape)
            for place, value, misalignment in (
                (None, 0, 0),
                (x.size // 2, np.inf, self.dtype.itemsize),
                (-1, np.nan, 0),
            ):
                if place is not None:
                    x.reshape(-1)[place] = value
                actual = launch.amax(DeviceArray(x, misalignment), self.counted, self.by_row, self.mask)
                yield f"amax of {shape} with {value}", actual.array, self.expected(x)

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Matrices; rows of both kinds: long ones, and short ones of one element up, more of them than a warp takes at
        once.
        """
        if self.mask is not None:
            return (28, 256), (1, 16), (131, 48), (2, 1040)
        short = ((700, 1), (301, 3), (131, 16), (67, 32), (130, 48), (5, 100), (3, 1024), (2, 1040))
        return ((3, 37), (1, 1), (2, 4099), *(short if self.by_row else ()))

    def expected(self, x: np.ndarray) -> np.ndarray:
        a = np.abs(x if self.mask is None else hadamard_blocks(x, self.mask)).astype(np.float32)
        axis = -1 if self.by_row else None
        if self.counted != "all":
            a = np.where(np.isfinite(a) if self.counted == "finite" else ~np.isnan(a), a, np.float32(0))
        return np.max(a, axis=axis)


@dataclass(frozen=True)
class AmaxColumns:
    """Instantiations of the kernel of the amax of columns."""

    dtype: np.dtype

    def __str__(self) -> str:
        return str(self.dtype)

    def run(self) -> Iterator[Result]:
        for shape in (
            (1, 1, 1),
            (1, 1, 520),
            (2, 300, 37),
            (3, 150, 264),
            (1, 5000, 8),
            (1, 700, 1),
            (2, 0, 3),
            (0, 3, 3),
        ):
            x = np.resize(adversarial_blocks(self.dtype)[::-1], shape)
            for place, value, misalignment in (
                (None, 0, 0),
                (x.size // 2, -np.inf, self.dtype.itemsize),
                (-1, np.nan, 0),
            ):
                if place is not None and x.size:
                    x.reshape(-1)[place] = value
                expected = np.max(np.abs(x).astype(np.float32), axis=1, initial=0)
                yield (
                    f"amax of columns of {shape} with {value}",
                    amax_columns(DeviceArray(x, misalignment)).array,
                    expected,
                )
