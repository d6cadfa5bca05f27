"""Collect the amaxes of many quantizers during training; freeze, save, and redistribute them among ranks.

    collector = AmaxCollector()
    # the maximum over all calls:
    collector.collect("layers.0.mlp.experts.fc1.weight_quantizer.3", fp4kit.amax(w))
    # [N, ...], one amax per expert 0 ... N - 1:
    collector.collect_grouped("layers.0.mlp.experts.fc1.weight_quantizer", amaxes)
    state = collector.freeze(share=[("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")])
    state.gather(comm).save("amax.safetensors")                           # from any number of ranks
    mine = AmaxState.load("amax.safetensors").part(comm.rank, comm.size)  # to any other number

An amax is float32 of any shape: () for a tensor, [rows, 1] for channels, or one value per block. The shape is kept.
float16 and bfloat16 values are converted exactly.

NaN and negative values are errors, but they are found only on the host: for NumPy arrays in freeze, for all arrays in
checked, save, gather and load. Once collected, such a value stays in the maximum, so it is found even if later values
are valid. CuPy arrays stay on the GPU until then.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from fp4kit.arguments import (
    as_entries,
    as_flag,
    as_index,
    as_indices,
    as_mapping,
    as_path,
    as_shape,
    as_word,
    is_one_of,
)
from fp4kit.storage.whole_file import whole_file, write_file
from fp4kit.training.amax_experts import all_gather_bytes, counts, join, unstack
from fp4kit.training.amax_file import decode, encode
from fp4kit.training.amax_names import SEPARATORS, AmaxName
from fp4kit.training.amax_values import check, import_amax, merge, on_host
from fp4kit.training.communicators import Communicator


class AmaxCollector:
    """A collector that keeps the elementwise maximum of all amaxes so far, for each quantizer name.

    The module docstring has an example.
    """

    def __init__(self) -> None:
        self._single: dict[AmaxName, Any] = {}
        self._grouped: dict[AmaxName, Any] = {}

    def collect(self, name: str, amax: Any) -> None:
        """Collect the amax of one call."""
        key = AmaxName.parse(name)
        if key.index is not None and key.at(None) in self._grouped:
            raise ValueError(
                f"collect: {key.key()} is collected by collect_grouped already; use one of the two functions"
            )
        merge(self._single, key, import_amax("collect", key, amax), "collect")

    def collect_grouped(self, name: str, amaxes: Any) -> None:
        """Collect the amaxes of all local experts from one array: amaxes[i] is the amax of expert i."""
        key = AmaxName.parse(name)
        if key.index is not None or any(other.at(None) == key for other in self._single):
            raise ValueError(
                f"collect_grouped: {key.key()} names one expert, or collect has some of its experts already; use one "
                "of the two functions"
            )
        stack = import_amax("collect_grouped", key, amaxes)
        if stack.ndim == 0:
            raise ValueError(f"collect_grouped: {key.key()} is 0-d; needs [N, ...], one amax per expert")
        merge(self._grouped, key, stack, "collect_grouped")

    def freeze(self, share: Iterable[Collection[str]] = ()) -> AmaxState:
        """Return the current state."""
        experts = {key.at(i): stack[i, ...] for key, stack in self._grouped.items() for i in range(len(stack))}
        state = AmaxState(_share({**self._single, **experts}, _groups(share)))
        check("freeze", {name: value for name, value in state.named.items() if isinstance(value, np.ndarray)})
        return state


class AmaxState(Mapping[str, Any]):
    """Frozen amaxes as a mapping {key: amax}, such as those of all quantizers of a model.

    Iteration yields keys such as "...quantizer.3._amax". In a lookup, the expert number may follow "." or "_", and a
    key without the name of a buffer stands for the buffer "_amax". The constructor takes {AmaxName: amax}, and raises
    TypeError for anything else.

    Attributes:
        named: the amaxes under AmaxName keys instead of str keys, sorted. It cannot be changed.
    """

    def __init__(self, named: Mapping[AmaxName, Any]) -> None:
        if not all(isinstance(name, AmaxName) for name in as_mapping("AmaxState", "named", named)):
            raise TypeError("AmaxState: named has keys that are not AmaxName; make them with AmaxName.parse")
        self.named: Mapping[AmaxName, Any] = MappingProxyType(
            {name: named[name] for name in sorted(named, key=AmaxName.order)}
        )

    def __getitem__(self, key: str) -> Any:
        """Return the amax under a key."""
        name = AmaxName.find(key)
        if name is None or name not in self.named:
            raise KeyError(key)
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in sorted order. Experts are sorted by number."""
        return (name.key() for name in self.named)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.named)

    def select(self, *patterns: str) -> AmaxState:
        """Return a state with only the keys that match at least one of the wildcards (fnmatch; case matters)."""
        for pattern in patterns:
            if not any(name.matches(as_word("select", "a pattern", pattern)) for name in self.named):
                raise ValueError(
                    f"select: {pattern!r} matches none of {len(self)} keys, such as {next(iter(self), None)!r}"
                )
        return AmaxState({name: v for name, v in self.named.items() if any(name.matches(p) for p in patterns)})

    def fit(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the amaxes for a caller's buffers: {key: amax} with exactly the keys and shapes in ``shapes``."""
        shapes = {key: as_shape("fit", shape) for key, shape in as_mapping("fit", "shapes", shapes).items()}
        key_of = _named(shapes, "fit")
        key_of = dict(zip(key_of, shapes, strict=True))
        for name in [*(n for n in key_of if n not in self.named), *(n for n in self.named if n not in key_of)]:
            what = "missing in the state" if name in key_of else "in the state, but not requested"
            raise ValueError(f"fit: {name.key()} is {what}; needs the same keys on both sides")
        return {key: _reshape(name, self.named[name], shapes[key]) for name, key in key_of.items()}

    def checked(self) -> AmaxState:
        """Return a new state with read-only NumPy arrays, after checking that no value is NaN or negative."""
        return AmaxState(check("checked", on_host(self.named)))

    def stacked(self) -> dict[str, np.ndarray]:
        """Return {"<base>._amax": [N, ...]} with all experts of a quantizer in one array, and other amaxes by key."""
        named = check("stacked", on_host(self.named))
        numbers = counts(named, "stacked", same_shape=True)
        plain = {name.key(): value for name, value in named.items() if name.index is None}
        both = min((base.key() for base in numbers if base in named), default=None)
        if both is not None:
            raise ValueError(f"stacked: {both} is present for all experts and for each expert; remove one of the forms")
        return plain | {base.key(): np.stack([named[base.at(i)] for i in range(n)]) for base, n in numbers.items()}

    # ---- ranks

    def gather(
        self, comm: Communicator, *, experts: str = "*", numbers: Sequence[int] | None = None, count: int | None = None
    ) -> AmaxState:
        """Merge the states of all expert-parallel ranks."""
        as_word("gather", "experts", experts)
        count = None if count is None else as_index("gather", "count", count)
        own = {name.key(): value for name, value in on_host(self.named).items()}
        facts = {"numbers": None if numbers is None else as_indices("gather", "numbers", numbers)}
        named: dict[AmaxName, Any] = {}
        offsets: dict[AmaxName, int] = defaultdict(int)
        for rank, data in enumerate(all_gather_bytes(comm, encode(own, facts))):
            arrays, sent = decode(data, f"gather: rank {rank}")
            join(
                named,
                {AmaxName.parse(key): value for key, value in arrays.items()},
                experts,
                sent["numbers"],
                offsets,
                rank,
            )
        matching = {name: value for name, value in named.items() if name.matches(experts)}
        if not counts(matching, "gather", count, same_shape=True) and count:
            raise ValueError(f"gather: {experts!r} matches no expert on any rank; needs experts 0 to {count - 1}")
        return AmaxState(check("gather", named))

    def part(self, rank: int, size: int, *, experts: str = "*", numbers: Sequence[int] | None = None) -> AmaxState:
        """Return one rank's part of a gathered state, for ``size`` ranks."""
        rank, size = as_index("part", "rank", rank), as_index("part", "size", size)
        given_numbers = None if numbers is None else as_indices("part", "numbers", numbers)
        as_word("part", "experts", experts)
        if not 0 <= rank < size:
            raise ValueError(f"part: rank {rank} of {size}; needs 0 to {size - 1}")
        named = {name: v for name, v in self.named.items() if name.index is None or not name.matches(experts)}
        for base, n in counts({name: v for name, v in self.named.items() if name not in named}, "part").items():
            local_experts = range(n * rank // size, n * (rank + 1) // size) if given_numbers is None else given_numbers
            if len(set(local_experts)) != len(local_experts) or not all(0 <= i < n for i in local_experts):
                raise ValueError(
                    f"part: {base.key()}: numbers {list(local_experts)}; needs different ones from 0 to {n - 1}"
                )
            named |= {base.at(local): self.named[base.at(i)] for local, i in enumerate(local_experts)}
        return AmaxState(named)

    # ---- files

    def save(self, path: str | os.PathLike[str], *, separator: str = ".", stacked: bool = False) -> None:
        """Write a safetensors file."""
        path, stacked = as_path("save", path), as_flag("save", "stacked", stacked)
        if not is_one_of(separator, SEPARATORS):
            raise ValueError(f"save: separator is {separator!r:.60}; needs '.' or '_'")
        named = check("save", on_host(self.named))
        experts = {name.key(): n for name, n in counts(named, "save").items()}
        arrays = self.stacked() if stacked else {name.key(separator): value for name, value in named.items()}
        with whole_file(path) as temporary:
            write_file(temporary, encode(arrays, {"experts": experts}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, experts: Mapping[str, int] | None = None) -> AmaxState:
        """Read a safetensors file with amaxes, and return them as an AmaxState."""
        path = as_path("load", path)
        label = f"load: {path.name}"
        arrays, facts = decode(path.read_bytes(), label)
        if not arrays:
            raise ValueError(f"{label}: has no tensor whose name ends in 'amax'; needs a file with amaxes")
        stated, requested = facts.get("experts", {}), {} if experts is None else experts
        return cls(check(label, unstack(_named(arrays, label), stated, requested, label)))


def _named(items: Mapping[str, Any], op: str) -> dict[AmaxName, Any]:
    """Return the items with each key replaced by the AmaxName that it spells."""
    named: dict[AmaxName, Any] = {}
    for key, item in items.items():
        name = AmaxName.parse(key, op)
        if name in named:
            raise ValueError(f"{op}: {key!r} occurs with both separators, '.' and '_'; needs one of them")
        named[name] = item
    return named


def _reshape(name: AmaxName, value: Any, shape: tuple[int, ...]) -> Any:
    """Return the amax `value` in the given shape, as a view."""
    if value.shape != shape and not value.size == prod(shape) == 1:
        raise ValueError(f"fit: {name.key()} has shape {value.shape}; needs {shape}")
    return value.reshape(shape)


def _groups(share: Any) -> list[tuple[str, ...]]:
    """Return the argument ``share`` of freeze as a list of tuples of names."""
    groups = as_entries("freeze", "share", share)
    for group in groups:
        if (
            isinstance(group, str)
            or not isinstance(group, Collection)
            or not all(isinstance(name, str) for name in group)
        ):
            raise TypeError(f"freeze: share has {group!r:.60}; needs groups of names, such as ('gate_proj', 'up_proj')")
    return [tuple(group) for group in groups]


def _share(named: dict[AmaxName, Any], groups: list[tuple[str, ...]]) -> dict[AmaxName, Any]:
    """Return a new dict of the amaxes, in which modules that share an amax all have the largest amax among them."""
    group_of = {member: group for group in groups for member in group}
    if len(group_of) != sum(map(len, groups)):
        raise ValueError(f"freeze: share is {groups}; needs each name in one group only, once")
    shared: dict[Any, Any] = {}
    shared_name = {}
    for name, value in named.items():
        module, _, quantizer = name.base.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in group_of and value.size == 1:
            shared_name[name] = AmaxName(f"{parent}.({'|'.join(group_of[leaf])}).{quantizer}", name.index, name.buffer)
            merge(shared, shared_name[name], value.reshape(()), "freeze")
    return {
        name: shared[shared_name[name]].reshape(value.shape) if name in shared_name else value
        for name, value in named.items()
    }
