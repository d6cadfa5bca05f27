"""Communicator: what casting sharded weights needs of a group of processes, and the group of one."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Communicator(Protocol):
    """A group of `size` processes, of which this is number `rank`."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def all_reduce_max(self, array: np.ndarray) -> np.ndarray:
        """Elementwise maximum over the group, on every process: same shape and dtype (float32 or uint8)."""
        ...


class SingleProcess:
    """The group of one process."""

    rank = 0
    size = 1

    def all_reduce_max(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array
