"""List calls to public functions that together launch every kind of kernel. The calls run on the CPU or on a GPU.

A function with the arguments `place` and `call` makes the call that the KernelCall `call` describes, and returns its
results as a list of arrays. It moves NumPy arrays to the device with the function `place`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from inputs import BF16, ordinary
from searched import STATIC, hessians, nearly_equal_blocks, searched_blocks
from thread_group import ThreadGroup, run_threads

import fp4kit
from fp4kit import Shard
from fp4kit.cuda import dispatch
from fp4kit.cuda.launch import LAUNCHES, SMALL_GROUP
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.training.communicators import SingleProcess
from fp4kit.training.master_weights import MasterWeightsPlan

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
Place = Callable[[Any], Any]  # moves a NumPy array to the device on which a call runs
SHAPE = (64, 256)


class KernelCall(NamedTuple):
    """One call to a public function, which can be made on any device.

    Attributes:
        make: called as make(place, call). It calls the public function and returns the results as a list of arrays. The
            argument `place` is a function that moves a NumPy array to the device.
        recipe, options: the arguments of the function; options are (name, value) pairs.
        dtype, shape: the dtype and shape of the input.
        misaligned: True if x begins one element after a multiple of 16 bytes.
    """

    make: Callable[[Place, KernelCall], list[Any]]
    recipe: Recipe
    dtype: np.dtype = BF16
    options: tuple[tuple[str, Any], ...] = ()
    shape: tuple[int, ...] = SHAPE
    misaligned: bool = False

    def __str__(self) -> str:
        options = [
            f"{name}_{value if isinstance(value, (str, int)) else type(value).__name__}" for name, value in self.options
        ]
        parts = (self.make.__name__, self.recipe.id, str(self.dtype), *options, "misaligned" * self.misaligned)
        return "-".join(filter(None, parts))

    def run(self, place: Place = lambda a: a) -> list[Any]:
        """Make the call and return its arrays. `place` moves each input array, for example to a device."""
        with np.errstate(all="ignore"):
            return self.make(place, self)

    def x(self, place: Place) -> Any:
        """Return the input array of the call, moved by `place`."""
        x = np.resize(adversarial_blocks(self.dtype), self.shape)
        x.reshape(-1)[-1] = 100  # the largest element of a small array is the last
        if not self.misaligned:
            return place(x)
        flat = place(np.concatenate([np.zeros(1, self.dtype), x.reshape(-1)]))
        return flat[1:].reshape(self.shape)

    def given(self, place: Place) -> dict[str, Any]:
        """Return the options of the call. `place` moves the arrays among them."""
        return {name: place(value) if isinstance(value, np.ndarray) else value for name, value in self.options}


def other_rows(architecture: str) -> Any:
    """Return a context in which every kernel has a row of LAUNCHES for an architecture. New rows allow one thread block
    per multiprocessor, and have 128 threads unless their number is fixed.
    """
    rows = {f"{kernel} {architecture}": row for kernel, row in LAUNCHES.items() if " " not in kernel}
    new = {key: row._replace(limit=1, threads=row.threads if row.fixed else 128) for key, row in rows.items()}
    return patch.dict(LAUNCHES, new | LAUNCHES)


def parts(q: Any) -> list[Any]:
    """Return the arrays of a Quantized that are not None."""
    found = [q.packed, q.block_scale, q.tensor_scale, q.tensor_amax]
    return [a for a in found if a is not None]


def quantize(place: Place, call: KernelCall) -> list[Any]:
    return parts(fp4kit.quantize(call.x(place), call.recipe, **call.given(place)))


def quantize_by_table(place: Place, call: KernelCall) -> list[Any]:
    """Quantize with the 4over6 kernel that uses tables, which is otherwise chosen for large matrices only."""
    with patch.object(dispatch, "MIN_TABLE_ELEMENTS", 0):
        return quantize(place, call)


def quantize_both(place: Place, call: KernelCall) -> list[Any]:
    return [a for q in fp4kit.quantize_both(call.x(place), call.recipe, **call.given(place)) for a in parts(q)]


def fake_quantize(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.fake_quantize(call.x(place), call.recipe, **call.given(place))]


def fake_quantize_backward(place: Place, call: KernelCall) -> list[Any]:
    grad = place(ordinary(9, call.shape))
    return [fp4kit.fake_quantize_backward(grad, call.x(place), call.recipe, pass_through=False, **call.given(place))]


def quantized(place: Place, call: KernelCall, **options: Any) -> Any:
    """Return the input quantized by the specification on the CPU, with its arrays moved by `place`."""
    q = fp4kit.quantize(call.x(lambda a: a), call.recipe, **options)
    moved = {
        name: None if (a := getattr(q, name)) is None else place(a)
        for name in ("packed", "block_scale", "tensor_scale", "tensor_amax")
    }
    return replace(q, **moved)


def dequantize(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.dequantize(quantized(place, call, **call.given(lambda a: a)), F32)]


def dequantize_as_it_was(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.dequantize(quantized(place, call))]


def dequantize_without_amax(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.dequantize(replace(quantized(place, call), tensor_amax=None), F32)]


def quantize_with_scales(place: Place, call: KernelCall) -> list[Any]:
    """Quantize with the scales of the specification's result."""
    given = call.given(place)
    q = quantized(place, call, **{k: v for k, v in call.given(lambda a: a).items() if k != "seed" and k != "rounding"})
    return [
        fp4kit.quantize(
            call.x(place), call.recipe, block_scale=q.block_scale, tensor_scale=q.tensor_scale, **given
        ).packed
    ]


def hadamard(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.hadamard(call.x(place), **call.given(place))]


def rotate(place: Place, call: KernelCall) -> list[Any]:
    matrix = np.roll(np.eye(24, dtype=np.float32), 5, 0)
    return [fp4kit.rotate(call.x(place), matrix, **call.given(place))]


def amax(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.amax(call.x(place), **call.given(place))]


def amax_of_blocks(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.amax(call.x(place), call.recipe)]


def transpose(place: Place, call: KernelCall) -> list[Any]:
    return parts(fp4kit.transpose(quantized(place, call, **call.given(lambda a: a))))


def swizzle(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.unswizzle(fp4kit.swizzle(quantized(place, call), "swizzled_128x4")).block_scale]


def pack(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.pack(fp4kit.unpack(quantized(place, call).packed))]


def requantize(place: Place, call: KernelCall) -> list[Any]:
    found = fp4kit.requantize(quantized(place, call), "nvfp4-te")
    return [*parts(found.quantized), found.changed, found.largest_error]


def matmul(place: Place, call: KernelCall) -> list[Any]:
    """Multiply the quantized input with its own transpose."""
    q = quantized(place, call)
    return [fp4kit.matmul(q, q, **call.given(place))]


def matmul_grouped(place: Place, call: KernelCall) -> list[Any]:
    """Multiply the quantized input with its own transpose, and some of its rows with others."""
    q = quantized(place, call)
    return list(fp4kit.matmul_grouped([q, q[0:32]], [q, q[16:48]], **call.given(place)))


def search_scales(place: Place, call: KernelCall) -> list[Any]:
    x = np.nan_to_num(searched_blocks(call.dtype)[:43].astype(np.float32), nan=1, posinf=1, neginf=1)
    return [fp4kit.search_scales(place(x.astype(call.dtype)), call.recipe, **call.given(place))]


def search_amaxes(place: Place, call: KernelCall) -> list[Any]:
    return [fp4kit.search_scales(place(ordinary(3, (36, 64), call.dtype)), call.recipe, **call.given(place))]


def group(place: Place, call: KernelCall) -> list[Any]:
    """Return the call's input and three smaller tensors, moved by `place`.

    The last element of each of the three is its largest.
    """
    width = 144 + -144 % call.recipe.cut_multiple
    others = [ordinary(4 + i, shape, call.dtype) for i, shape in enumerate(((33, 64), (1, 128), (64, width)))]
    for x in others:
        x[-1, -1] = 100
    return [call.x(place), *map(place, others)]


def quantize_grouped(place: Place, call: KernelCall) -> list[Any]:
    found = fp4kit.quantize_grouped(group(place, call), call.recipe, **call.given(place))
    return [a for q in found for a in parts(q)]


def quantize_large_group(place: Place, call: KernelCall) -> list[Any]:
    """Quantize a group with so many members that their arguments are a table in device memory."""
    xs = [a for _ in range(SMALL_GROUP // 4 + 1) for a in group(place, call)]
    amaxes = [1.0 + i for i in range(len(xs))]
    return [a for q in fp4kit.quantize_grouped(xs, call.recipe, tensor_amax=amaxes) for a in parts(q)]


def quantize_searched(place: Place, call: KernelCall) -> list[Any]:
    """Quantize with a recipe that searches block amaxes.

    The input has blocks of every kind, and blocks in which two candidates have nearly equal errors.
    """
    x = np.concatenate([searched_blocks(call.dtype)[:48], nearly_equal_blocks().astype(call.dtype)])
    return parts(fp4kit.quantize(place(x), call.recipe, **call.given(place)))


def fake_quantize_grouped(place: Place, call: KernelCall) -> list[Any]:
    return fp4kit.fake_quantize_grouped(group(place, call), call.recipe, **call.given(place))


def fake_quantize_grouped_backward(place: Place, call: KernelCall) -> list[Any]:
    xs = group(place, call)
    grads = [place(ordinary(9, a.shape)) for a in xs]
    return fp4kit.fake_quantize_grouped_backward(grads, xs, call.recipe, pass_through=False)


def amax_grouped(place: Place, call: KernelCall) -> list[Any]:
    return fp4kit.amax_grouped(group(place, call), **call.given(place))


def partial(place: Place, call: KernelCall) -> list[Any]:
    """Return the results of partial_amax and partial_cast for shards that begin at every offset within 16 bytes."""
    x, r = np.resize(adversarial_blocks(call.dtype), call.shape), call.recipe
    amaxes, packed = fp4kit.amax(x, r), place(np.full(fp4kit.quantize(x, r).packed.shape, 0xA5, np.uint8))
    found: list[Any] = []
    for start, end in ((0, x.size), (5, x.size), (6, x.size - 3), (7, x.size - 32), (18, 335)):
        shard, out = place(x.reshape(-1)[start:end].copy()), packed.copy()
        fp4kit.partial_cast(shard, out, place(np.nan_to_num(amaxes, nan=np.inf)), x.shape, start, r)
        found += [fp4kit.partial_amax(shard, x.shape, start, r), out]
    return found


def master_weights(place: Place, call: KernelCall) -> list[Any]:
    """Cast master weights to codes, and return the arrays of all results.

    Some of the matrices have whole blocks in both directions. In others, the last blocks have fewer rows.
    """
    found: list[Any] = []
    for shapes, columnwise in ((((64, 80), (16, 16), (48, 64)), True), (((33, 240), (3, 48)), False)):
        shards = [Shard(place(ordinary(6, shape, call.dtype).reshape(-1)), shape) for shape in shapes]
        made = MasterWeightsPlan(shards, SingleProcess(), call.recipe, columnwise=columnwise).cast()
        found += [a for q in made for one in (q if columnwise else (q,)) for a in parts(one)]
    return found


def cast_by_two(place: Place, call: KernelCall) -> list[Any]:
    """Cast two matrices that are divided between two processes, inside a block near the middle.

    Return the arrays that process 0 gets.
    """
    x = ordinary(6, call.shape, call.dtype)

    def cast(comm: ThreadGroup) -> list[Any]:
        start, end = ((0, x.size // 2 + 37), (x.size // 2 + 37, x.size))[comm.rank]
        shard = Shard(place(x.reshape(-1)[start:end]), x.shape, start)
        return [part for q in fp4kit.cast_master_weights([shard, shard], comm, call.recipe) for part in parts(q)]

    return run_threads(2, cast)[0]


def call_of(
    make: Any, id: str | Recipe, dtype: np.dtype = BF16, *, misaligned: bool = False, shape: Any = SHAPE, **options: Any
) -> KernelCall:
    """Return a KernelCall of `make`.

    Args:
        make: called as make(place, call) to make the call, see KernelCall.
        id: a recipe, or the id of a recipe in the table.
        dtype: the dtype of the input.
        misaligned: True if the input begins one element after a multiple of 16 bytes.
        shape: the shape of the input.
        options: the options of the public function.
    """
    r = fp4kit.recipe(id) if isinstance(id, str) else id
    return KernelCall(make, r, dtype, tuple(options.items()), shape, misaligned)


BYTES = np.random.default_rng(2).integers(0, 256, SHAPE, np.uint8)
NUMBERS = np.random.default_rng(3).random(SHAPE, np.float32)
WEIGHTS = np.linspace(0, 2, 64, dtype=np.float32)
SQUARE = replace(RECIPES[STATIC], id="static-16x16", block=(16, 16))
SEARCHES = [
    call_of(search_scales, STATIC, tensor_amax=4.0),
    call_of(search_scales, STATIC, tensor_amax=4.0, candidates="near"),
    call_of(search_scales, STATIC, tensor_amax=4.0, weights=WEIGHTS),
    call_of(search_scales, STATIC, tensor_amax=4.0, hessian=hessians(64)),
    call_of(search_scales, SQUARE, tensor_amax=4.0, candidates="near"),
    call_of(search_scales, SQUARE, tensor_amax=4.0, objective="max"),
    call_of(search_scales, STATIC, tensor_amax=4.0, objective="mae", weights=WEIGHTS),
    call_of(search_scales, STATIC, tensor_amax=4.0, objective="p2.4", weights=WEIGHTS),
    call_of(search_scales, "mxfp4-ocp", weights=WEIGHTS),
    call_of(search_scales, "mxfp8-te", objective="mae", candidates=(-3, 4)),
    call_of(search_amaxes, "fp8-modelopt", F32, weights=WEIGHTS),
    call_of(search_amaxes, "int8-modelopt-channel", F16, objective="max"),
    call_of(search_amaxes, "fp8-modelopt-channel", F32, objective="p1.5", weights=WEIGHTS),
    call_of(quantize_searched, "nvfp4-auto-round-opt", tensor_amax=4.0),
    call_of(quantize_searched, "mxfp4-auto-round-opt", F32),
    call_of(quantize_searched, "mxfp4-fp-quant-quest", F32),
    call_of(quantize_searched, "mxfp4-msmodelslim-4over6", F32),
    call_of(quantize_searched, "mxfp4-msmodelslim-ceil-x-search", F32),
    call_of(quantize_grouped, "nvfp4-modelopt-mse"),
]
KINDS = [
    call_of(quantize, "nvfp4-te"),
    call_of(quantize, "mxfp4-ocp", F32),
    call_of(quantize, "mxfp8-te-e5m2", F16),
    call_of(fake_quantize, "nvfp4-flashinfer"),
    call_of(quantize, "nvfp4-te-2d", scale_layout="swizzled_128x4"),
    call_of(quantize, "nvfp4-flashinfer-4over6-mse-256", F16),
    call_of(quantize, "nvfp4-te-4over6-mse-448-2d"),
    call_of(quantize_by_table, "nvfp4-te-4over6-mse-448", shape=(96, 512)),
    call_of(quantize_by_table, "nvfp4-te-4over6-mae-256-2d", shape=(96, 512)),
    call_of(quantize, "int8-modelopt-channel"),
    call_of(quantize, "nvfp4-te-rowscaled", F32, shape=(300, 48)),
    call_of(quantize, "nvfp4-te-rowscaled", shape=(1, 2**15 + 16)),
    call_of(quantize, "nvfp4-flashinfer-token", scale_layout="swizzled_128x4"),
    call_of(quantize, "mxfp8-te", rounding="stochastic", seed=7),
    call_of(quantize, "nvfp4-te", rounding="stochastic", seed=BYTES),
    call_of(quantize, "nvfp4-comfy-kitchen-stochastic-cuda", rounding="stochastic", seed=NUMBERS),
    call_of(quantize, "mxfp4-mslk-stochastic", F16, rounding="stochastic", seed=7, scale_layout="swizzled_128x4"),
    call_of(fake_quantize, "nvfp4-comfy-kitchen-stochastic", F32, rounding="stochastic", seed=7),
    call_of(fake_quantize, "nvfp4-fouroversix-ms-eden", rounding="stochastic", seed=7),
    call_of(fake_quantize, "if4-fouroversix-ms-eden", F32, rounding="stochastic", seed=7),
    call_of(quantize, "nvfp4-te-reference", hadamard=True),
    call_of(quantize, "nvfp4-te", F32, misaligned=True),
    call_of(dequantize, "nvfp4-te"),
    call_of(dequantize_as_it_was, "nvfp4-te", shape=(33, 256)),
    call_of(dequantize, "mxfp8-te", shape=(512, 256)),
    call_of(dequantize, "fp8-modelopt", shape=(5, 38)),
    call_of(dequantize, "int8-modelopt-channel"),
    call_of(dequantize_without_amax, "nvfp4-flashinfer"),
    call_of(quantize, "hif4-amct", F32, misaligned=True),
    call_of(quantize_grouped, "hifx5-hifloat4"),
    call_of(quantize, "mxfp4-msmodelslim-dual", F32, misaligned=True, shape=(5, 1024)),
    call_of(quantize_grouped, "mxfp4-msmodelslim-dual-64"),
    call_of(fake_quantize, "mxfp4-msmodelslim-dual", shape=(5, 1024)),
    call_of(dequantize_as_it_was, "mxfp4-msmodelslim-dual", F16, shape=(5, 1024)),
    call_of(fake_quantize, "hif4-hifloat4", F16),
    call_of(dequantize, "hif4-hifloat4"),
    call_of(dequantize_as_it_was, "hifx3-hifloat4", F32),
    call_of(amax, "nvfp4-te"),
    call_of(amax, "nvfp4-te", F16, axis=1),
    call_of(amax, "nvfp4-te", axis=0),
    call_of(amax_of_blocks, "mxfp4-flashinfer"),
    call_of(quantize, "nvfp4-te", axis=0, hadamard=True),
    call_of(quantize_both, "nvfp4-te"),
    call_of(quantize, "mxfp8-te", F32, axis=0),
    call_of(quantize_both, "mxfp8-te-2d", F16, misaligned=True),
    call_of(quantize_with_scales, "nvfp4-flashinfer", rounding="stochastic", seed=7),
    call_of(quantize_with_scales, "nvfp4-flashinfer-4over6-mse-256", F16),
    call_of(quantize_with_scales, "int4-modelopt-channel", F32, misaligned=True),
    call_of(quantize_with_scales, "fp8-modelopt-channel", shape=(5, 38)),
    call_of(quantize_with_scales, "mxfp8-te-2d", scale_layout="swizzled_128x4", hadamard=True),
    call_of(partial, "nvfp4-te-2d", F32),
    call_of(partial, "mxfp8-te"),
    call_of(master_weights, "nvfp4-te-2d", F32),
    call_of(cast_by_two, "nvfp4-te-2d", F32),
    call_of(fake_quantize, "nvfp4-modelopt-fake-cuda", misaligned=True),
    call_of(fake_quantize, "mxfp8-modelopt-fake", F16),
    call_of(fake_quantize_grouped, "nvfp4-fouroversix-ms-eden", rounding="stochastic", seed=7),
    call_of(fake_quantize, "mxfp4-microxcaling-even", F32),
    call_of(fake_quantize, "int8-modelopt-channel"),
    call_of(fake_quantize_backward, "nvfp4-te", F16),
    call_of(requantize, "mxfp4-ocp"),
    call_of(hadamard, "nvfp4-te", size=128, seed=3),
    call_of(hadamard, "nvfp4-te", F16, axis=0, size=64, seed=3),
    call_of(rotate, "nvfp4-te", F16, axis=0, inverse=True, shape=(72, 38)),
    call_of(transpose, "nvfp4-te-2d"),
    call_of(transpose, "mxfp8-te-2d", scale_layout="swizzled_128x4"),
    call_of(swizzle, "nvfp4-te"),
    call_of(pack, "nvfp4-te"),
    call_of(matmul, "nvfp4-te", unit="sm100"),
    call_of(matmul, "mxfp4-ocp", unit="sm100"),
    call_of(matmul, "mxfp8-te", unit="sm100"),
    call_of(matmul, "fp8-modelopt", unit="sm90"),
    call_of(matmul, "fp8-modelopt", unit="sm89"),
    call_of(matmul_grouped, "nvfp4-te", unit="sm100"),
    call_of(matmul_grouped, "fp8-modelopt", unit="sm90"),
    *(call_of(matmul, "nvfp4-te", unit=order) for order in ("exact", "float64", "float32-blocks", "dequantized")),
    *SEARCHES,
    call_of(quantize_grouped, "nvfp4-te"),
    call_of(quantize_large_group, "nvfp4-te"),
    call_of(quantize_grouped, "nvfp4-te-2d", F32),
    call_of(quantize_grouped, "fp8-modelopt", F16),
    call_of(quantize_grouped, "nvfp4-te-4over6-mse-448"),
    call_of(fake_quantize_grouped, "int8-modelopt-channel"),
    call_of(fake_quantize_grouped, "nvfp4-modelopt-fake", F32),
    call_of(fake_quantize_grouped_backward, "nvfp4-te"),
    call_of(amax_grouped, "nvfp4-te"),
    call_of(amax_grouped, "nvfp4-te", axis=1),
]
