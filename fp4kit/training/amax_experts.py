"""Handle experts in amax states: their number, global numbering, stacking into one array, and the exchange among ranks.
A quantizer of a mixture-of-experts layer has one amax per expert, whose name ends in the number of the expert. The
base of such a name is the name without the number.

A key without an expert number is a base; its experts are numbered 0 ... N - 1. Every error message begins with ``op``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp4kit.arguments import as_index, as_mapping, as_word
from fp4kit.training.amax_names import AmaxName
from fp4kit.training.amax_values import merge
from fp4kit.training.communicators import Communicator, check_communicator


def counts(
    named: Mapping[AmaxName, Any], op: str, count: int | None = None, same_shape: bool = False
) -> dict[AmaxName, int]:
    """Return {base: N}, the number of experts of each quantizer."""
    numbers: dict[AmaxName, set[int]] = {}
    for name in named:
        if name.index is not None:
            numbers.setdefault(name.at(None), set()).add(name.index)
    found = {base: max(present) + 1 if count is None else count for base, present in numbers.items()}
    for base, n in found.items():
        check_numbers(base, numbers[base], n, op)
        first = np.shape(named[base.at(0)])
        differing = next((i for i in range(n) if np.shape(named[base.at(i)]) != first), None) if same_shape else None
        if differing is not None:
            raise ValueError(
                f"{op}: {base.at(differing).key()} has shape {np.shape(named[base.at(differing)])}, and expert 0 has "
                f"{first}; needs one shape for all experts"
            )
    return found


def check_numbers(base: AmaxName, present: set[int], n: int, op: str) -> None:
    """Raise ValueError unless the expert numbers in ``present`` are exactly 0 ..."""
    missing = next((i for i in range(n) if i not in present), None)
    if missing is not None:
        more = n - sum(i < n for i in present) - 1  # do not enumerate: n comes from a file and may be huge
        others = f" and {more} more are" if more else " is"
        raise ValueError(
            f"{op}: {base.at(missing).key()}{others} missing; needs experts 0 to {n - 1}, and has {len(present)}"
        )
    if len(present) > n:
        raise ValueError(f"{op}: {base.at(max(present)).key()} is surplus; needs exactly {n} experts")


def join(
    named: dict[AmaxName, Any],
    values: dict[AmaxName, Any],
    experts: str,
    numbers: Any,
    offsets: dict[AmaxName, int],
    rank: int,
) -> None:
    """Merge the amaxes of one rank (``values``) into those of all ranks (``named``), for AmaxState.gather."""
    own = {name: value for name, value in values.items() if name.index is not None and name.matches(experts)}
    for name in values.keys() - own.keys():
        merge(named, name, values[name], f"gather: rank {rank}")
    for name, target in _global_names(own, numbers, offsets, f"gather: rank {rank}").items():
        if target in named:
            raise ValueError(
                f"gather: {target.key()} is present twice; rank {rank} has it as local expert {name.index}; give each "
                "expert one global number"
            )
        named[target] = own[name]


def _global_names(
    own: Mapping[AmaxName, Any], numbers: Sequence[int] | None, offsets: dict[AmaxName, int], op: str
) -> dict[AmaxName, AmaxName]:
    """Return {local name: global name} for the experts of one rank."""
    if numbers is None:
        first = {base: offsets[base] for base in {name.at(None) for name in own}}
        for base, n in counts(own, op).items():
            offsets[base] += n
        return {name: name.at(first[name.at(None)] + (name.index or 0)) for name in own}
    for name in own:
        if (name.index or 0) >= len(numbers) or min(numbers) < 0:
            raise ValueError(
                f"{op}: {name.key()} has no global number: numbers is {list(numbers)}; needs one >= 0 for each local "
                "expert"
            )
    return {name: name.at(numbers[name.index or 0]) for name in own}


def unstack(
    named: dict[AmaxName, np.ndarray], stated: Any, requested: Mapping[str, int], op: str
) -> dict[AmaxName, np.ndarray]:
    """Return a copy of ``named`` in which each stacked array [N, ...] is split into N arrays, one per expert."""
    named = dict(named)
    for base, n in _wanted(named, stated, requested, op).items():
        stack = named.pop(base, None)
        present = {name.index for name in named if name.index is not None and name.at(None) == base}
        if stack is None:
            check_numbers(base, present, n, op)
        elif stack.shape[:1] != (n,):
            raise ValueError(f"{op}: {base.key()} has shape {stack.shape}; needs ({n}, ...), one amax per expert")
        elif present:
            raise ValueError(
                f"{op}: {base.key()} holds all experts, but {base.at(min(present)).key()} is present too; needs one of "
                "the two forms"
            )
        else:
            named |= {base.at(i): stack[i, ...] for i in range(n)}
    counts(named, op)
    return named


def _wanted(named: Mapping[AmaxName, Any], stated: Any, requested: Mapping[str, int], op: str) -> dict[AmaxName, int]:
    """Return {base: N}, the number of experts of each quantizer for which the file or the caller gives one."""
    if not isinstance(stated, dict) or not all(
        type(n) is int and n > 0 and AmaxName.find(key) for key, n in stated.items()
    ):
        raise ValueError(f"{op}: its metadata says experts {stated!r}; needs a positive number per quantizer")
    count_of = {AmaxName.parse(key): n for key, n in stated.items()}
    for pattern, number in as_mapping(op, "experts", requested).items():
        n = as_index(op, f"experts[{pattern!r:.60}]", number)
        as_word(op, "a wildcard of experts", pattern)
        bases = {name.at(None) for name in (*named, *count_of) if name.matches(pattern)}
        if not bases:
            raise ValueError(f"{op}: {pattern!r} matches no key; needs a wildcard that matches a quantizer")
        for base in bases:
            if count_of.setdefault(base, n) != n:
                raise ValueError(f"{op}: {base.key()} has {count_of[base]} experts in this file; {n} were requested")
    return count_of


def all_gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Send this rank's byte string `data` to all ranks."""
    check_communicator("gather", comm, "all_gather")
    counts = [int(n) for n in comm.all_gather(np.array([len(data)], np.int64))]
    flat = comm.all_gather(np.frombuffer(data, np.uint8).copy(), counts)
    return [part.tobytes() for part in np.split(flat, np.cumsum(counts)[:-1])]
