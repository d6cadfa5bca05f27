"""Primary weights: quantize matrices whose master weights lie in flat shards, cut anywhere, on the processes of a
group.

Six stages, each for all matrices at once:

1. amax     block amaxes, and the tensor's, of the owned elements; 0 elsewhere
2. reduce   their maximum over the group: one message of float32 bit patterns
3. scales   tensor scale, block scales and factors, the same on every process
4. cast     codes of the owned elements, into a message
5. gather   the messages of all processes, one after the other: half a byte travels for an element, once
6. place    codes from the messages into the matrices

A message holds, for each matrix, the bytes or runs in which the process owns a code. Two processes whose cut lies
inside a byte both send that byte, each with its own nibble right; placing takes from each message the nibbles that its
sender owns and no other, so both are right. Who owns what is exchanged once, when a plan is made, and checked: each
element must have one owner.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.arguments import as_entries, as_flag
from fp4kit.arrays.imports import device_name, import_arrays
from fp4kit.arrays.returns import PlanLibrary, returns_in_plan_library
from fp4kit.call.shards import check_castable, check_shard, square_block
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.training.communicators import Communicator, check_communicator
from fp4kit.training.master_weights_device import DeviceStages
from fp4kit.training.master_weights_host import HostStages
from fp4kit.training.partition import exchange_cuts, refusing


@dataclass(frozen=True)
class Shard:
    """What one process owns of a matrix: elements [start, start + n) of the flattened (M, K), n = 0 for none.

    values: float32, float16 or bfloat16 (n,), of the same dtype on every process, an empty shard too.
    """

    values: Any
    shape: tuple[int, int]
    start: int = 0


def cast_master_weights(
    shards: Sequence[Shard], comm: Communicator, recipe: str | Recipe = "nvfp4-te-2d", *, columnwise: bool = False
) -> list[Any]:
    """Quantize matrices from the shards of all processes; every process gets the bytes that the whole matrices give.

    shards: one per matrix, in the same order on every process; for each matrix the shards of the group must cover every
    element
        once. Any cut will do: odd offsets, inside a byte, a block or a row; empty shards; all of it on one process.
    comm: the group. Its processes all hold arrays of the host, or all of GPUs, of any library; results are in that of
    the shards. recipe: blocks under one tensor scale, or none; not 4over6. columnwise: also the transposed copies, for
    square blocks and M a multiple of them. Returns a Quantized per matrix (rowwise, linear scales), equal to
    quantize(whole matrix, recipe) in every byte; with
        columnwise a pair (rowwise, columnwise), the second as fp4kit.transpose gives it.
    Raises ValueError or TypeError as partial_amax does, before anything is sent; ValueError on every process where
    shards leave
        out or repeat an element, or processes name different matrices. NaN is a ValueError on a CPU; a GPU does not
        look for it.
    For training steps make a MasterWeightsPlan once: this function makes one for the call.
    Source: the algorithm of TE's quantize_master_weights, right at odd offsets and for K % 64 != 0 too.

    >>> import fp4kit, numpy as np
    >>> from fp4kit.training.communicators import SingleProcess
    >>> w = np.ones((16, 32), np.float32)
    >>> fp4kit.cast_master_weights([fp4kit.Shard(w.reshape(-1), w.shape)], SingleProcess())
    [Quantized(nvfp4-te-2d, shape=(16, 32), dtype=float32, axis=1, scale_layout='linear', 4.56 bits a value)]
    """
    return MasterWeightsPlan(shards, comm, recipe, columnwise=columnwise).cast()


class MasterWeightsPlan:
    """cast_master_weights of the same shards at every step: tables and buffers are made once.

    Arguments and errors are those of cast_master_weights. The plan holds the arrays of the shards: change their values
    in place, or pass new arrays to refresh. Making a plan exchanges the cuts and waits for that. On a GPU arrays must
    be contiguous, and a step is one launch or message a stage (one launch a dtype), without work for each matrix on the
    host, without copies to the host and without waiting; with Nccl a CUDA graph can capture it. stages: names and calls
    of what cast does, in order.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        comm: Communicator,
        recipe: str | Recipe = "nvfp4-te-2d",
        *,
        columnwise: bool = False,
    ) -> None:
        check_communicator("cast_master_weights", comm)
        with refusing(comm):
            shards = as_entries("cast_master_weights", "shards", shards)
            self._comm, self._home = comm, PlanLibrary([getattr(s, "values", None) for s in shards])
        with self._home.context():
            self._make(shards, recipe, columnwise)

    def _make(self, shards: Sequence[Shard], recipe: str | Recipe, columnwise: bool) -> None:
        comm = self._comm
        with refusing(comm):
            r = recipe_of("cast_master_weights", recipe)
            columnwise = as_flag("cast_master_weights", "columnwise", columnwise)
            values, shapes = _check_shards(shards, r, columnwise)
            on_host = all(isinstance(v, np.ndarray) for v in values)
            if not on_host:
                DeviceStages.check(values, shapes, r)
        dtypes, lengths, starts = (
            [v.dtype for v in values],
            [v.size for v in values],
            [operator.index(s.start) for s in shards],
        )
        partition = exchange_cuts(shapes, dtypes, starts, lengths, r, comm, on_host=on_host)
        self._kinds = [_kind(v) for v in values]
        make = HostStages if on_host else DeviceStages
        self._work = make(values, shapes, r, partition, comm.rank, columnwise) if shards else None
        self.stages = tuple(self._make_stages(self._work)) if self._work else ()
        results = (self._work.quantized, self._work.columnwise) if self._work else ([], [])
        self._result = list(zip(*results, strict=True)) if columnwise else results[0]

    def refresh(self, values: Sequence[Any]) -> None:
        """Take other arrays for the shards' values, of the same lengths, dtypes and device.

        Raises ValueError if they are not.
        """
        arrays = _import(as_entries("refresh", "values", values))
        kinds = [_kind(v) for v in arrays]
        if kinds != self._kinds:
            at = next(
                (i for i, (a, b) in enumerate(zip(kinds, self._kinds, strict=False)) if a != b),
                min(len(kinds), len(self._kinds)),
            )
            raise ValueError(
                f"refresh: array {at} of {len(kinds)} has another dtype, length or device than the {len(self._kinds)}"
                " shards"
            )
        if self._work is not None:
            self._work.replace(arrays)

    @returns_in_plan_library
    def cast(self) -> list[Any]:
        """Quantize the values as they are now; what cast_master_weights returns.

        The arrays of the result belong to the plan, and the next call overwrites them.
        """
        with nullcontext() if self._work is None else self._work.device():
            for _, stage in self.stages:
                stage()
        return self._result

    def _make_stages(self, s: HostStages | DeviceStages) -> Iterator[tuple[str, Callable[[], None]]]:
        alone = self._comm.size == 1
        yield "amax", s.amax
        if not alone:
            yield "reduce", lambda: _reduce(s.bits, self._comm)
        yield "scales", s.scales
        yield "cast", s.cast
        if not alone:
            yield "gather", lambda: _gather(s.message, s.counts, s.gathered, self._comm)
            yield "place", s.place
        if s.columnwise:
            yield "transpose", s.transpose


def _reduce(bits: Any, comm: Communicator) -> None:
    """Maximum over the group, in place."""
    reduced = comm.all_reduce_max(bits)
    if reduced is not bits:
        bits[...] = reduced


def _gather(message: Any, counts: list[int], gathered: Any, comm: Communicator) -> None:
    comm.all_gather(message, counts, gathered)


def _check_shards(shards: Sequence[Shard], r: Recipe, columnwise: bool) -> tuple[list[Any], list[tuple[int, int]]]:
    """Arrays and shapes, if they are right."""
    for i, shard in enumerate(shards):
        if not isinstance(shard, Shard):
            raise TypeError(f"cast_master_weights: shards[{i}] is a {type(shard).__name__}; needs a fp4kit.Shard")
    values = _import([s.values for s in shards])
    check_castable("cast_master_weights", r)
    shapes = [check_shard("cast_master_weights", v, s.shape, s.start, r) for v, s in zip(values, shards, strict=True)]
    for M, _ in shapes if columnwise else ():
        square_block("cast_master_weights", r, M)
    return values, shapes


def _kind(values: Any) -> tuple[np.dtype, tuple[int, ...], str]:
    return values.dtype, values.shape, device_name(values)


def _import(values: Sequence[Any]) -> list[Any]:
    named = {f"values of shard {i}": v for i, v in enumerate(values)}
    return list(import_arrays("cast_master_weights", **named))
