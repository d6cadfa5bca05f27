"""Quantize weight matrices whose master weights are sharded over the processes of a group.

A shard is a contiguous range of a flattened matrix; it may begin and end anywhere. Five stages run, each for all
matrices at once:

1. amax     compute block amaxes and tensor amaxes of the owned elements
2. reduce   take the maximum over the group of those amaxes that processes share, as float32 bit patterns
3. cast     compute the scales, and write the codes of the owned elements into a message
4. gather   concatenate the messages of all processes; each 4-bit code is sent once, in half a byte
5. place    copy the codes from the messages into the matrices

On a GPU, processes share the amaxes of tensors and of blocks that a shard may cut. Scales are sent with the codes, by
the owner of the block's first element. Large messages are sent in chunks: with NCCL, one chunk is sent while the next
is cast. On a host, processes share all amaxes, and each computes all scales.

For each matrix, a message holds the bytes (on a host) or the runs of 16 codes (on a GPU) in which the process owns a
code. If a shard ends inside a byte, both neighbors send that byte, each with its own nibble valid. The place stage
takes from each message only the nibbles that the sender owns. Ownership is exchanged and checked once, when a plan is
made: each element must have exactly one owner.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fp4kit.arguments import a_type, as_entries, as_flag, explains_calls, explains_class
from fp4kit.arrays.imports import device_name, import_arrays
from fp4kit.arrays.returns import PlanLibrary, returns_in_plan_library
from fp4kit.call.parse import Partition, check_castable, check_shard, square_block
from fp4kit.layouts import check_layout
from fp4kit.ops.engines import check_master_weights, new_master_weights
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.training.communicators import Communicator, Nccl, check_communicator
from fp4kit.types import ScaleLayout

_REFUSED = -1  # sent in place of the number of matrices by a process whose shards are invalid


@contextmanager
def refusing(comm: Communicator) -> Iterator[None]:
    """Tell the other processes if the body of the ``with`` statement raises an Exception, then let the Exception
    pass.
    """
    try:
        yield
    except Exception:
        if comm.size > 1:
            _rows(comm, np.array([_REFUSED, 0], np.int64))
        raise


def exchange_cuts(
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[np.dtype],
    starts: Sequence[int],
    lengths: Sequence[int],
    r: Recipe,
    comm: Communicator,
    *,
    on_host: bool,
) -> Partition:
    """Return the Partition: where the shards of every process begin and end in each matrix."""
    facts = repr((asdict(r), [tuple(s) for s in shapes], [str(d) for d in dtypes], on_host))
    digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "little")
    heads = _rows(comm, np.array([len(shapes), digest], np.int64))
    refused = np.flatnonzero(heads[:, 0] == _REFUSED).tolist()
    if refused:
        raise ValueError(
            f"cast_master_weights: processes {refused} have invalid shards; see the errors that they raised"
        )
    if (heads != heads[0]).any():
        raise ValueError(
            f"cast_master_weights: processes have {heads[:, 0].tolist()} matrices, or different shapes, dtypes or "
            "recipes; needs the same list in the same order on each process; pass an empty shard of the right dtype "
            "for a matrix of which a process owns nothing"
        )
    sizes = np.array([M * K for M, K in shapes], np.int64)
    begin = np.array(starts, np.int64)
    cuts = _rows(comm, np.concatenate([begin, begin + np.array(lengths, np.int64)]))
    partition = Partition(*np.split(cuts, 2, axis=1))
    _check_covers(partition, sizes)
    return partition


def _rows(comm: Communicator, mine: np.ndarray) -> np.ndarray:
    """Exchange 1-d arrays of equal length, and return a matrix whose row i is the array of process i."""
    return np.asarray(comm.all_gather(mine)).reshape(comm.size, len(mine)) if comm.size > 1 else mine[None]


def _check_covers(partition: Partition, sizes: np.ndarray) -> None:
    """Raise ValueError unless every element of every matrix is in exactly one shard."""
    empty = partition.starts == partition.ends
    starts, ends = (np.where(empty, sizes, edge) for edge in partition)
    order = np.argsort(starts, axis=0, kind="stable")
    starts, ends = (np.take_along_axis(edge, order, axis=0) for edge in (starts, ends))
    before = np.vstack([np.zeros_like(sizes), ends])
    after = np.vstack([starts, sizes])
    if (before != after).any():
        tensor = int(np.flatnonzero((before != after).any(axis=0))[0])
        cut = int(np.flatnonzero(before[:, tensor] != after[:, tensor])[0])
        a, b = int(before[cut, tensor]), int(after[cut, tensor])
        what = f"no process owns elements [{a}, {b})" if a < b else f"more than one owns elements [{b}, {a})"
        raise ValueError(
            f"cast_master_weights: matrix {tensor}: {what} of {int(sizes[tensor])}; needs each element in exactly one "
            "shard"
        )


@explains_class
@dataclass(frozen=True)
class Shard:
    """The part of a matrix that one process owns: elements [start, start + n) of the flattened matrix.

    Attributes:
        values: float32, float16 or bfloat16 (n,). The dtype must be the same on every process, also for an empty shard
            (n = 0).
        shape: the shape (M, K) of the whole matrix.
        start: index of the first owned element.
    """

    values: Any
    shape: tuple[int, int]
    start: int = 0


@explains_calls
def cast_master_weights(
    shards: Sequence[Shard],
    comm: Communicator,
    recipe: str | Recipe = "nvfp4-te-2d",
    *,
    columnwise: bool = False,
    scale_layout: ScaleLayout = "linear",
) -> list[Any]:
    """Quantize matrices from the shards of all processes.

    Every process gets the same bytes as quantize(whole matrix, recipe) gives. For training steps, make a
    MasterWeightsPlan once; this function makes a new one per call.

    Args:
        shards: one Shard per matrix, in the same order on every process. For each matrix, the shards of the group must
            cover every element once. A shard may begin and end anywhere, also inside a byte, a block or a row, and may
            be empty.
        comm: the group. Its processes all hold host arrays or all hold GPU arrays, of any library. Results are
            arrays of that library.
        recipe: an id or a Recipe. It must have blocks, may have one tensor scale, and must not be a 4over6 recipe.
        columnwise: True to return transposed copies too. Blocks must be square, and M a multiple of their size.
        scale_layout: the layout of block scales, as in quantize. The tiled layouts are those that the matrix products
            of servers read. Columnwise copies need "linear".

    Returns:
        A list with one Quantized per matrix, rowwise. With ``columnwise``, a list of pairs (rowwise,
        columnwise); the second is what fp4kit.transpose returns.

    Raises:
        TypeError, ValueError: as for partial_amax, before anything is sent.
        ValueError: if the layout is unknown, or is tiled and ``columnwise`` is True.
        ValueError: on every process, if the shards miss or repeat an element, or if processes name different matrices.
            On a CPU also if a NaN makes the amax of a block NaN (recipe.amax_nan). A GPU does not check this.

    Exact:
        Equals quantize of the whole matrix in every byte.

    Source:
        The algorithm of Transformer Engine's quantize_master_weights, also correct at odd offsets and for K % 64 != 0.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.training.communicators import SingleProcess
        >>> w = np.ones((16, 32), np.float32)
        >>> fp4kit.cast_master_weights([fp4kit.Shard(w.reshape(-1), w.shape)], SingleProcess())
        [Quantized(nvfp4-te-2d, shape=(16, 32), dtype=float32, axis=1, scale_layout='linear', 4.56 bits per value)]
    """
    return MasterWeightsPlan(shards, comm, recipe, columnwise=columnwise, scale_layout=scale_layout).cast()


@explains_class
class MasterWeightsPlan:
    """Run cast_master_weights repeatedly on shards of the same shapes, with tables and buffers made once.

    Arguments and errors are those of cast_master_weights. The plan keeps references to the shards' arrays: change their
    values in place, or pass new arrays to refresh. Making a plan exchanges the shard ranges and waits for the other
    processes.

    On a GPU, arrays must be contiguous. Each stage of cast is then one message, or one kernel launch per dtype of the
    shards; the stages cast, gather and place divide large shards into chunks. Calling cast does no work per matrix on
    the host, copies nothing to the host, and does not wait. With Nccl, a CUDA graph can capture it.

    Attributes:
        stages: (name, function) of each stage of cast, in order. With Nccl on a GPU, cast sends a chunk while it casts
            the next one; the functions run one stage after the other.
    """

    _work: Any

    def __init__(
        self,
        shards: Sequence[Shard],
        comm: Communicator,
        recipe: str | Recipe = "nvfp4-te-2d",
        *,
        columnwise: bool = False,
        scale_layout: ScaleLayout = "linear",
    ) -> None:
        check_communicator("cast_master_weights", comm)
        with refusing(comm):
            shards = as_entries("cast_master_weights", "shards", shards)
            self._comm, self._home = comm, PlanLibrary([getattr(s, "values", None) for s in shards])
        with self._home.context():
            self._make(shards, recipe, columnwise, scale_layout)

    def _make(self, shards: Sequence[Shard], recipe: str | Recipe, columnwise: bool, layout: ScaleLayout) -> None:
        """Check the shards, exchange their ranges with the other processes, and prepare the stages of cast."""
        comm = self._comm
        with refusing(comm):
            r = recipe_of("cast_master_weights", recipe)
            columnwise = as_flag("cast_master_weights", "columnwise", columnwise)
            check_layout("cast_master_weights", layout)
            if columnwise and layout != "linear":
                raise ValueError(
                    f"cast_master_weights: scale_layout is {layout!r} with columnwise=True; columnwise copies need"
                    " 'linear'; change the layout of a result with fp4kit.swizzle"
                )
            values, shapes = _check_shards(shards, r, columnwise)
            on_host = check_master_weights(values, shapes, r)
        dtypes, lengths = [v.dtype for v in values], [v.size for v in values]
        starts = [operator.index(s.start) for s in shards]
        partition = exchange_cuts(shapes, dtypes, starts, lengths, r, comm, on_host=on_host)
        self._kinds = [_kind(v) for v in values]
        overlaps, facts = isinstance(comm, Nccl), (shapes, r, partition, comm.rank, columnwise, layout)
        self._work = new_master_weights(values, *facts, in_place=overlaps) if shards else None
        self.stages = tuple(self._make_stages(self._work)) if self._work else ()
        self._calls = [stage for _, stage in self.stages]
        if comm.size > 1 and overlaps and not on_host:
            self._calls[2:5] = [lambda: self._work.overlap(comm.all_gather)]
        results = (self._work.quantized, self._work.columnwise) if self._work else ([], [])
        self._result = list(zip(*results, strict=True)) if columnwise else results[0]

    def refresh(self, values: Sequence[Any]) -> None:
        """Replace the arrays of all shards. The next call of cast reads the new arrays.

        Args:
            values: one array per shard, in the order of the shards, with the length, dtype and device of the old array.

        Raises:
            ValueError: if the number of arrays, or the shape, dtype or device of an array, differs.
            TypeError: if ``values`` is not iterable, or an entry is not an array.
        """
        arrays = _import(as_entries("refresh", "values", values))
        kinds = [_kind(v) for v in arrays]
        if kinds != self._kinds:
            differing = (i for i, (a, b) in enumerate(zip(kinds, self._kinds, strict=False)) if a != b)
            at = next(differing, min(len(kinds), len(self._kinds)))
            raise ValueError(
                f"refresh: array {at} of {len(kinds)} has another dtype, length or device than before; needs arrays "
                f"like those of the {len(self._kinds)} shards"
            )
        if self._work is not None:
            self._work.replace(arrays)

    @returns_in_plan_library
    def cast(self) -> list[Any]:
        """Quantize the current values of all shards. Return the same kind of list as cast_master_weights.

        The plan owns the arrays of the result, and the next call overwrites them. Copy them to keep them. On a CPU,
        raises ValueError if a NaN in a shard makes the amax of a block NaN (recipe.amax_nan).
        """
        with nullcontext() if self._work is None else self._work.device():
            for call in self._calls:
                call()
        return self._result

    def _make_stages(self, work: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (name, function) of each stage of cast, in order."""
        alone = self._comm.size == 1
        yield "amax", work.amax
        if not alone:
            yield "reduce", lambda: work.reduce(self._comm.all_reduce_max)
        yield "cast", work.cast
        if not alone:
            yield "gather", lambda: [self._comm.all_gather(*message) for message in work.messages]
        yield "place", work.place
        if work.columnwise:
            yield "transpose", work.transpose


def _check_shards(shards: Sequence[Shard], r: Recipe, columnwise: bool) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return (the values of the shards as NumPy or CuPy arrays, the shapes of their matrices), one entry per shard."""
    for i, shard in enumerate(shards):
        if not isinstance(shard, Shard):
            raise TypeError(f"cast_master_weights: shards[{i}] is {a_type(shard)}; needs a fp4kit.Shard")
    values = _import([s.values for s in shards])
    check_castable("cast_master_weights", r)
    shapes = [check_shard("cast_master_weights", v, s.shape, s.start, r) for v, s in zip(values, shards, strict=True)]
    for M, _ in shapes if columnwise else ():
        square_block("cast_master_weights", r, M)
    return values, shapes


def _kind(values: Any) -> tuple[np.dtype, tuple[int, ...], str]:
    """Return (dtype, shape, device) of an array. refresh rejects an array for which one of these has changed."""
    return values.dtype, values.shape, device_name(values)


def _import(values: Sequence[Any]) -> list[Any]:
    """Return the values of the shards as NumPy or CuPy arrays that share memory with them."""
    named = {f"values of shard {i}": v for i, v in enumerate(values)}
    return list(import_arrays("cast_master_weights", **named))
