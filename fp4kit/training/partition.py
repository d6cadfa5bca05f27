"""Exchange which elements of each matrix each process owns, and check that every element has one owner.
The shard of a process is the range [start, end) of a flattened matrix that the process owns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np

from fp4kit.call.parse import Partition
from fp4kit.recipes import Recipe
from fp4kit.training.communicators import Communicator

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
