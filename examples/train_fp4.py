"""Train a small network on NVFP4 weights in several ways, and check that their losses are bit-identical.

    python examples/train_fp4.py                          # whole matrices; flat shards on 1, 2 and 4 ranks (threads)
    python examples/train_fp4.py --gpu                    # also with CuPy: the quantizer alone, and all of it
    mpiexec -n 4 python examples/train_fp4.py --mpi       # flat shards on MPI processes

The network is y = relu(x A^T) B^T. Its float32 master weights are in one flat buffer. The buffer is cut at odd elements
into one shard per rank, as optimizers that shard their state do. The samples of a step are divided among the ranks,
too. Every step

1. quantizes the master weights (recipe nvfp4-te-2d);
2. multiplies with the decoded 4-bit weights;
3. updates the master weights with the straight-through gradient.

fp4kit gives the same codes and scales everywhere, but BLAS may add in any order. To make losses comparable bit for bit,
every sum here is exact in float64, whatever its order:

- All factors are multiples of a power of two. Codes times block scales are such multiples; the tensor scale is applied
  after the sum; activations and errors are rounded to multiples of GRID.
- Every sum stays below 2^53 units. `product` checks this bound.

The results then do not depend on the machine, the number of ranks or the device.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit import Quantized, Shard
from fp4kit.formats import E2M1, E4M3
from fp4kit.training.communicators import Communicator, Mpi, SingleProcess

RECIPE = "nvfp4-te-2d"
SHAPES = ((64, 48), (16, 64))  # A and B
SAMPLES, BATCH = 512, 128
LEARNING_RATE, MOMENTUM = 0.5, 0.875
GRID = 2.0**-16  # unit of activations and errors
INPUT_UNIT = 2.0**-3
WEIGHT_UNIT = E2M1.min_subnormal * E4M3.min_subnormal  # unit of codes times block scales

# Turns the shards of one rank into the quantized matrices, whole on every rank.
Quantizer = Callable[[Sequence[Shard], Communicator], list[Quantized]]


class Result(NamedTuple):
    """Hold the loss of every step, and a digest of the codes and scales after the last step."""

    losses: list[float]
    digest: str


# ---- quantizers ----


def whole(shards: Sequence[Shard], comm: Communicator) -> list[Quantized]:
    """Quantize whole matrices. This works with one rank only, whose shards are the whole matrices."""
    return [fp4kit.quantize(shard.values.reshape(shard.shape), RECIPE) for shard in shards]


def sharded(shards: Sequence[Shard], comm: Communicator) -> list[Quantized]:
    """Quantize flat shards of the master weights. Every rank gets the whole matrices."""
    return fp4kit.cast_master_weights(shards, comm, RECIPE)


def whole_on_gpu(shards: Sequence[Shard], comm: Communicator) -> list[Quantized]:
    """Quantize whole matrices on the GPU, and return the results in host memory."""
    import cupy

    on_gpu = [Shard(cupy.asarray(shard.values), shard.shape, shard.start) for shard in shards]
    return [
        Quantized(
            q.packed.get(),
            q.block_scale.get(),
            q.tensor_scale.get(),
            q.tensor_amax.get(),
            q.shape,
            q.dtype,
            q.axis,
            q.recipe,
        )
        for q in whole(on_gpu, comm)
    ]


# ---- exact arithmetic ----


def product(a: Any, unit_a: float, b: Any, unit_b: float) -> Any:
    """Return a @ b exactly, in float64. The elements of a and b are multiples of `unit_a` and `unit_b`.

    Raises OverflowError if a sum could reach 2^53 times the product of the units.
    """
    largest = float(abs(a).max()) * float(abs(b).max()) * a.shape[1]
    if not largest < 2.0**53 * unit_a * unit_b:
        raise OverflowError(f"product: sums may reach {largest:g}; they are exact below {2.0**53 * unit_a * unit_b:g}")
    return a @ b


def on_grid(x: Any, xp: Any) -> Any:
    """Return x rounded to multiples of GRID. `xp` is numpy or cupy."""
    return xp.rint(x / GRID) * GRID


def factors(q: Quantized, xp: Any) -> tuple[Any, Any]:
    """Return (codes times block scales, tensor scale) as float64.

    Their product is the decoded weight. The first factor is a multiple of WEIGHT_UNIT, so that `product` can add it
    exactly.
    """
    codes = xp.asarray(E2M1.values, np.float64)[fp4kit.unpack(q.packed)]
    scales = xp.asarray(E4M3.values, np.float64)[q.block_scale]
    return codes * xp.repeat(scales, q.recipe.block_size, axis=1), xp.asarray(q.tensor_scale).astype(np.float64)


# ---- the network ----


def step(weights: Sequence[Quantized], x: Any, target: Any, xp: Any) -> Any:
    """Return the sum of squared errors and its gradients with respect to A and B, as one flat float64 array.

    All are exact sums, so that the arrays of the ranks can be added in any order.
    """
    (a, a_scale), (b, b_scale) = (factors(q, xp) for q in weights)
    hidden = on_grid(xp.maximum(product(x, INPUT_UNIT, a.T, WEIGHT_UNIT) * a_scale, 0), xp)
    error = on_grid(product(hidden, GRID, b.T, WEIGHT_UNIT) * b_scale, xp) - target
    d_hidden = on_grid(product(error, GRID, b, WEIGHT_UNIT) * b_scale, xp) * (hidden > 0)
    loss = product(error.reshape(1, -1), GRID, error.reshape(-1, 1), GRID)
    gradients = product(d_hidden.T, GRID, x, INPUT_UNIT), product(error.T, GRID, hidden, GRID)
    return xp.concatenate([part.reshape(-1) for part in (loss, *gradients)])


def data(xp: Any) -> tuple[Any, Any, Any]:
    """Return inputs, target outputs of a teacher network, and initial master weights (flat, float32).

    xp: the library of the arrays, numpy or cupy.
    """
    rng = np.random.default_rng(4)
    x = rng.integers(-8, 9, (SAMPLES, SHAPES[0][1])) * INPUT_UNIT
    a, b = (on_grid(uniform(rng, *shape), np) for shape in SHAPES)
    hidden = on_grid(np.maximum(product(x, INPUT_UNIT, a.T, GRID), 0), np)
    target = on_grid(product(hidden, GRID, b.T, GRID), np)
    first = np.concatenate([uniform(rng, *shape).reshape(-1) for shape in SHAPES]).astype(np.float32)
    return xp.asarray(x), xp.asarray(target), xp.asarray(first)


def uniform(rng: np.random.Generator, m: int, k: int) -> np.ndarray:
    """Return uniformly distributed values of shape (m, k) and variance 1 / k.

    They are made from integers, because normal values need logarithms, which differ between machines.
    """
    return rng.integers(-(2**15), 2**15, (m, k)) * (2.0**-15 * np.sqrt(3 / k))


def cuts(total: int, size: int) -> list[int]:
    """Return the boundaries of the ranks' parts of the flat buffer.

    Inner boundaries are odd, so they fall inside bytes and blocks, which is the hardest case for `sharded`.
    """
    return [0, *((total * rank // size) | 1 for rank in range(1, size)), total]


def shards_of(flat: Any, start: int) -> list[Shard]:
    """Return, for each matrix, the shard that lies in `flat`, a part of the flat buffer that begins at element `start`.

    A shard may be empty.
    """
    shards, begin = [], 0
    for m, k in SHAPES:
        low, high = (min(max(edge - begin, 0), m * k) for edge in (start, start + flat.size))
        shards.append(Shard(flat[begin + low - start : begin + high - start] if high > low else flat[:0], (m, k), low))
        begin += m * k
    return shards


def train(steps: int, quantizer: Quantizer, comm: Communicator | None = None, xp: Any = np) -> Result:
    """Train for a number of steps, and return the Result, which is equal on all ranks.

    Args:
        steps: number of steps
        quantizer: `whole`, `sharded` or `whole_on_gpu`
        comm: the ranks to train on, of which the caller is one; None for a single process
        xp: numpy or cupy
    """
    comm = comm or SingleProcess()
    x, target, first = data(xp)
    edges = cuts(first.size, comm.size)
    mine = slice(edges[comm.rank], edges[comm.rank + 1])
    master, velocity = first[mine].copy(), xp.zeros(mine.stop - mine.start)
    losses = []
    for number in range(steps):
        weights = quantizer(shards_of(master, mine.start), comm)
        samples = slice(number * BATCH % SAMPLES + comm.rank, number * BATCH % SAMPLES + BATCH, comm.size)
        sums = step(weights, x[samples], target[samples], xp)
        sums = comm.all_gather(sums).reshape(comm.size, -1).sum(axis=0) / (BATCH * SHAPES[1][0])
        losses.append(float(sums[0]))
        # Straight-through: the gradient with respect to the quantized weights updates the master weights.
        velocity = MOMENTUM * velocity + sums[1:][mine]
        master = (master.astype(np.float64) - LEARNING_RATE * velocity).astype(np.float32)
    parts = [
        part
        for q in quantizer(shards_of(master, mine.start), comm)
        for part in (q.packed, q.block_scale, q.tensor_scale)
    ]
    as_bytes = b"".join((part if xp is np else part.get()).tobytes() for part in parts)
    return Result(losses, hashlib.sha256(as_bytes).hexdigest()[:16])


# ---- ranks ----


class Thread:
    """Act as one rank in a group of threads.

    Implements fp4kit.training.communicators.Communicator. If a rank fails, the other ranks stop waiting for it.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, barrier.parties, barrier, slots

    def all_reduce_max(self, array: Any) -> Any:
        """Return the elementwise maximum of the arrays of all ranks."""
        return functools.reduce(np.maximum, self._share(array)).reshape(array.shape)

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the concatenated arrays of all ranks, in `out` if it is given."""
        found = (np if isinstance(array, np.ndarray) else sys.modules["cupy"]).concatenate(self._share(array))
        if out is None:
            return found
        out[...] = found
        return out

    def _share(self, array: Any) -> list[Any]:
        """Return copies of the arrays of all ranks, by rank."""
        self._slots[self.rank] = array.copy()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()  # so that no rank overwrites its slot before all have copied the list
        return found


def on_threads(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Call work(communicator) on each of `size` threads. Return the results by rank, or raise the first error."""
    barrier, slots = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, barrier, slots))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


# ---- the command ----


def ways(ranks: Sequence[int], gpu: bool) -> dict[str, Callable[[int], list[Result]]]:
    """Return {name: function} of the ways to train.

    A function takes the number of steps and returns the results of all ranks. If `gpu` is true, ways with CuPy are
    included.
    """

    def group(size: int, xp: Any) -> Callable[[int], list[Result]]:
        return lambda steps: on_threads(size, lambda comm: train(steps, sharded, comm, xp))

    found = {f"flat shards, {size} rank{'s' * (size > 1)}": group(size, np) for size in ranks}
    if gpu:
        import cupy

        found["GPU quantizer in the CPU loop"] = lambda steps: [train(steps, whole_on_gpu)]
        found["GPU, whole matrices"] = lambda steps: [train(steps, whole, xp=cupy)]
        found |= {f"GPU, flat shards, {size} rank{'s' * (size > 1)}": group(size, cupy) for size in ranks}
    return found


def all_results(mine: Result, comm: Communicator) -> list[Result]:
    """Return the results of all MPI processes, of which `mine` is this process's."""
    losses = comm.all_gather(np.array(mine.losses)).reshape(comm.size, -1).tolist()
    digests = comm.all_gather(np.frombuffer(bytes.fromhex(mine.digest), np.uint8).copy()).reshape(comm.size, -1)
    return [Result(*result) for result in zip(losses, (digest.tobytes().hex() for digest in digests), strict=True)]


def report(name: str, results: list[Result], expected: Result, seconds: float) -> None:
    """Print whether the results of all ranks equal the expected losses and codes, after the name of the way to train.

    seconds: the running time, which is printed, too.
    """
    if all(result == expected for result in results):
        verdict = "every loss and the last codes are equal in every bit"
    else:
        pairs = ((a, b) for result in results for a, b in zip(result.losses, expected.losses, strict=True))
        verdict = f"DIFFERENT: {sum(a != b for a, b in pairs)} losses, codes {[result.digest for result in results]}"
    print(f"{name:32} {verdict}  ({seconds:.1f} s)", flush=True)


def main() -> int:
    """Train in every requested way. Return 0 if all results are equal and the loss did not grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="numbers of threads (default: 1 2 4)")
    parser.add_argument("--gpu", action="store_true", help="train with CuPy too")
    parser.add_argument("--mpi", action="store_true", help="use MPI processes as ranks instead of threads")
    options = parser.parse_args()

    comm = Mpi() if options.mpi else SingleProcess()
    start = time.perf_counter()
    expected = train(options.steps, whole)
    losses, quarter = expected.losses, max(options.steps // 4, 1)
    if comm.rank == 0:
        for number in sorted({0, *range(quarter, options.steps, quarter), options.steps - 1}):
            print(f"step {number:4}  loss {losses[number]:.6f}  {losses[number].hex()}")
        print(
            f"{'whole matrices':32} codes and scales {expected.digest}  ({time.perf_counter() - start:.1f} s)",
            flush=True,
        )
    good = losses[-1] <= losses[0]
    if options.mpi:
        chosen = {
            f"flat shards, {comm.size} MPI processes": lambda steps: all_results(train(steps, sharded, comm), comm)
        }
    else:
        chosen = ways(options.ranks, options.gpu)
    for name, way in chosen.items():
        start = time.perf_counter()
        results = way(options.steps)
        good &= all(result == expected for result in results)
        if comm.rank == 0:
            report(name, results, expected, time.perf_counter() - start)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
