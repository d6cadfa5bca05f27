"""Who owns what of each matrix: the cuts of all processes, exchanged once and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.training.communicators import Communicator


class Partition(NamedTuple):
    """starts, ends: int64 (processes, matrices): the elements of each flattened matrix that each process owns."""

    starts: np.ndarray
    ends: np.ndarray

    def pieces(self, unit: int) -> np.ndarray:
        """Length of each process's piece of each matrix in its message, which is cut at multiples of `unit`
        elements.
        """
        return -(-self.ends // unit) - self.starts // unit

    def offsets(self, unit: int) -> np.ndarray:
        """Return where each process's piece of each matrix begins in its message, in units."""
        lengths = self.pieces(unit)
        return np.cumsum(lengths, axis=1) - lengths


_REFUSED = -1  # in the place of a number of matrices


@contextmanager
def refusing(comm: Communicator) -> Iterator[None]:
    """Whatever is wrong with this process's arguments, the others, which wait in exchange_cuts, are told, and raise
    too.
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
    """The cuts of all processes. Every process raises the same ValueError where they do not fit each other.

    Waits for the others. They must name the same recipe and matrices, of the same dtypes, all on hosts or all on
    GPUs, and own every element of each once.
    """
    facts = repr((asdict(r), [tuple(s) for s in shapes], [str(d) for d in dtypes], on_host))
    digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "little")
    heads = _rows(comm, np.array([len(shapes), digest], np.int64))
    refused = np.flatnonzero(heads[:, 0] == _REFUSED).tolist()
    if refused:
        raise ValueError(
            f"cast_master_weights: processes {refused} found their shards wrong; needs right ones; see their errors"
        )
    if (heads != heads[0]).any():
        raise ValueError(
            f"cast_master_weights: processes have {heads[:, 0].tolist()} matrices, or other shapes, dtypes or recipes; "
            "needs the same list in the same order on each; pass empty shards of the right dtype where one owns nothing"
        )
    sizes = np.array([M * K for M, K in shapes], np.int64)
    begin = np.array(starts, np.int64)
    cuts = _rows(comm, np.concatenate([begin, begin + np.array(lengths, np.int64)]))
    partition = Partition(*np.split(cuts, 2, axis=1))
    _check_covers(partition, sizes)
    return partition


def _rows(comm: Communicator, mine: np.ndarray) -> np.ndarray:
    """The arrays of all processes, one a row."""
    return np.asarray(comm.all_gather(mine)).reshape(comm.size, len(mine)) if comm.size > 1 else mine[None]


def _check_covers(partition: Partition, sizes: np.ndarray) -> None:
    """In the order of their starts, shards that are not empty begin where the one before ends."""
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
            f"cast_master_weights: matrix {tensor}: {what} of {int(sizes[tensor])}; needs each element in one shard"
        )
