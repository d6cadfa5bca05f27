"""Experts in amax states: how many there are, their global numbers, one array for all of them, and the exchange among
ranks.
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
    """{name without number: N} of the numbered names: 0 ... N - 1 must be there, N = count or what the largest number
    says.

    Raises ValueError, naming the key, for a missing or surplus expert, and with same_shape for one that has not expert
    0's shape.
    """
    numbers: dict[AmaxName, set[int]] = {}
    for name in named:
        if name.index is not None:
            numbers.setdefault(name.at(None), set()).add(name.index)
    found = {base: max(present) + 1 if count is None else count for base, present in numbers.items()}
    for base, n in found.items():
        check_numbers(base, numbers[base], n, op)
        first = np.shape(named[base.at(0)])
        odd = next((i for i in range(n) if np.shape(named[base.at(i)]) != first), None) if same_shape else None
        if odd is not None:
            raise ValueError(
                f"{op}: {base.at(odd).key()} has shape {np.shape(named[base.at(odd)])}, and expert 0 has {first}; needs"
                " one shape"
            )
    return found


def check_numbers(base: AmaxName, present: set[int], n: int, op: str) -> None:
    """Raise ValueError unless the experts are 0 ... n - 1."""
    missing = next((i for i in range(n) if i not in present), None)
    if missing is not None:
        more = n - sum(i < n for i in present) - 1  # n may be any number that a file names
        rest = f" and {more} more are" if more else " is"
        raise ValueError(
            f"{op}: {base.at(missing).key()}{rest} missing; needs experts 0 to {n - 1}, and has {len(present)}"
        )
    if len(present) > n:
        raise ValueError(f"{op}: {base.at(max(present)).key()} is surplus; there are {n} experts, 0 to {n - 1}")


def join(
    named: dict[AmaxName, Any],
    values: dict[AmaxName, Any],
    experts: str,
    numbers: Any,
    offsets: dict[AmaxName, int],
    rank: int,
) -> None:
    """Put the values of a rank into named: its experts under their global numbers, maxima of all else."""
    own = {name: value for name, value in values.items() if name.index is not None and name.matches(experts)}
    for name in values.keys() - own.keys():
        merge(named, name, values[name], f"gather: rank {rank}")
    for name, target in _global_names(own, numbers, offsets, f"gather: rank {rank}").items():
        if target in named:
            raise ValueError(f"gather: {target.key()} is held twice; rank {rank} has it as local {name.index}")
        named[target] = own[name]


def _global_names(
    own: Mapping[AmaxName, Any], numbers: Sequence[int] | None, offsets: dict[AmaxName, int], op: str
) -> dict[AmaxName, AmaxName]:
    """{local name: global name}; without numbers they follow those of the ranks before, which offsets counts."""
    if numbers is None:
        first = {base: offsets[base] for base in {name.at(None) for name in own}}
        for base, n in counts(own, op).items():
            offsets[base] += n
        return {name: name.at(first[name.at(None)] + (name.index or 0)) for name in own}
    for name in own:
        if (name.index or 0) >= len(numbers) or min(numbers) < 0:
            raise ValueError(
                f"{op}: {name.key()} has no global number: numbers is {list(numbers)}; needs one >= 0 for each"
            )
    return {name: name.at(numbers[name.index or 0]) for name in own}


def unstack(
    named: dict[AmaxName, np.ndarray], said: Any, given: Mapping[str, int], op: str
) -> dict[AmaxName, np.ndarray]:
    """named with the arrays that stand for all experts cut into one for each; every expert must be there.

    said: {key without number: N}, from the file. given: {wildcard: N}, from the caller.
    """
    named = dict(named)
    for base, n in _wanted(named, said, given, op).items():
        stack = named.pop(base, None)
        present = {name.index for name in named if name.index is not None and name.at(None) == base}
        if stack is None:
            check_numbers(base, present, n, op)
        elif stack.shape[:1] != (n,):
            raise ValueError(
                f"{op}: {base.key()} has shape {stack.shape}; needs ({n}, ...), one amax for each of {n} experts"
            )
        elif present:
            raise ValueError(
                f"{op}: {base.key()} stands there for all experts, and {base.at(min(present)).key()} for one; needs one"
                " form"
            )
        else:
            named |= {base.at(i): stack[i, ...] for i in range(n)}
    counts(named, op)
    return named


def _wanted(named: Mapping[AmaxName, Any], said: Any, given: Mapping[str, int], op: str) -> dict[AmaxName, int]:
    if not isinstance(said, dict) or not all(
        type(n) is int and n > 0 and AmaxName.find(key) for key, n in said.items()
    ):
        raise ValueError(f"{op}: its metadata says experts {said!r}; needs a positive number for each quantizer")
    wanted = {AmaxName.parse(key): n for key, n in said.items()}
    for pattern, number in as_mapping(op, "experts", given).items():
        n = as_index(op, f"experts[{pattern!r:.60}]", number)
        as_word(op, "a wildcard of experts", pattern)
        bases = {name.at(None) for name in (*named, *wanted) if name.matches(pattern)}
        if not bases:
            raise ValueError(f"{op}: {pattern!r} matches no key")
        for base in bases:
            if wanted.setdefault(base, n) != n:
                raise ValueError(f"{op}: {base.key()} has {wanted[base]} experts in this file; {n} were asked for")
    return wanted


def all_gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """The bytes of every rank, in two messages: how many, then all of them."""
    check_communicator("gather", comm, "all_gather")
    counts = [int(n) for n in comm.all_gather(np.array([len(data)], np.int64))]
    flat = comm.all_gather(np.frombuffer(data, np.uint8).copy(), counts)
    return [part.tobytes() for part in np.split(flat, np.cumsum(counts)[:-1])]
