"""amax state of many quantizers: collected during training, frozen, saved, and moved between numbers of ranks.

    collector = AmaxCollector()
    collector.collect("layers.0.mlp.experts.fc1.weight_quantizer.3", fp4kit.amax(w))       # largest over the calls
    collector.collect_grouped("layers.0.mlp.experts.fc1.weight_quantizer", amaxes)         # [N, ...]: experts 0 ... N -
    1 state = collector.freeze(share=[("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")])
    state.gather(comm).save("amax.safetensors")                                            # from any number of ranks
    mine = AmaxState.load("amax.safetensors").part(comm.rank, comm.size)                   # to any other

An amax is float32 of any shape: () for a tensor, [rows, 1] for channels, or one per block; the shape is kept. float16
and bfloat16 come in exactly. A NaN, once collected, stays, and so does a negative value; both are errors that name the
key where values reach the host: NumPy values in freeze, all in checked, save, gather and load. CuPy values are not
copied there before.
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
    """Running maxima, by name of the quantizer; see the module's docstring."""

    def __init__(self) -> None:
        self._single: dict[AmaxName, Any] = {}
        self._grouped: dict[AmaxName, Any] = {}

    def collect(self, name: str, amax: Any) -> None:
        """Take the amax of one call: the state becomes the elementwise maximum of this and all before.

        name: of the quantizer, such as "m.weight_quantizer.3" or "m.weight_quantizer_3._amax".
        amax: float32, float16 or bfloat16, of the same shape and on the same device in every call.
        Raises ValueError if the name is none, if shape or device change, or if collect_grouped has the same experts;
        TypeError for other dtypes. On a GPU: a few small kernels, nothing waits.
        """
        key = AmaxName.parse(name)
        if key.index is not None and key.at(None) in self._grouped:
            raise ValueError(
                f"collect: {key.key()} belongs to experts that collect_grouped collects; use one of the two"
            )
        merge(self._single, key, import_amax("collect", key, amax), "collect")

    def collect_grouped(self, name: str, amaxes: Any) -> None:
        """Take the amaxes of all local experts in one array [N, ...]; as collect for each expert i of name.i."""
        key = AmaxName.parse(name)
        if key.index is not None or any(other.at(None) == key for other in self._single):
            raise ValueError(
                f"collect_grouped: {key.key()} names one quantizer, or collect has some of these; use one of the two"
            )
        stack = import_amax("collect_grouped", key, amaxes)
        if stack.ndim == 0:
            raise ValueError(f"collect_grouped: {key.key()} is 0-d; needs [N, ...], one amax for each expert")
        merge(self._grouped, key, stack, "collect_grouped")

    def freeze(self, share: Iterable[Collection[str]] = ()) -> AmaxState:
        """The state so far; what is collected later does not change it.

        share: groups of modules whose tensors get one amax, the largest, by the last parts of their names, such as
            ("gate_proj", "up_proj") and ("q_proj", "k_proj", "v_proj"): those of one parent and one expert share. Only
            amaxes of one element are shared. fp4kit.checkpoint.selection.fused_layers.FUSIONS lists those that loaders
            fuse.
        Raises ValueError, naming the key, for NaN and negative values on the host (those on a GPU are checked later),
        and for a name that stands in two groups; TypeError for a group that is one name, or holds what is none.
        """
        experts = {key.at(i): stack[i, ...] for key, stack in self._grouped.items() for i in range(len(stack))}
        state = AmaxState(_share({**self._single, **experts}, _groups(share)))
        check("freeze", {name: value for name, value in state.named.items() if isinstance(value, np.ndarray)})
        return state


class AmaxState(Mapping[str, Any]):
    """Frozen amaxes by key; either spelling of a key finds its value. `named` is the same by AmaxName."""

    def __init__(self, named: Mapping[AmaxName, Any]) -> None:
        if not all(isinstance(name, AmaxName) for name in as_mapping("AmaxState", "named", named)):
            raise TypeError("AmaxState: named has keys that are no AmaxName; needs what AmaxName.parse makes of them")
        self.named: Mapping[AmaxName, Any] = MappingProxyType(
            {name: named[name] for name in sorted(named, key=AmaxName.order)}
        )

    def __getitem__(self, key: str) -> Any:
        name = AmaxName.find(key)
        if name is None or name not in self.named:
            raise KeyError(key)
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        return (name.key() for name in self.named)

    def __len__(self) -> int:
        return len(self.named)

    def select(self, *patterns: str) -> AmaxState:
        """Those that one of the wildcards matches: "*weight_quantizer" means every expert in both spellings.

        Raises ValueError for a pattern that matches nothing.
        """
        for pattern in patterns:
            if not any(name.matches(as_word("select", "a pattern", pattern)) for name in self.named):
                raise ValueError(
                    f"select: {pattern!r} matches none of {len(self)} keys, such as {next(iter(self), None)!r}"
                )
        return AmaxState({name: v for name, v in self.named.items() if any(name.matches(p) for p in patterns)})

    def fit(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The value of every key of shapes, under the caller's spelling; single numbers fit any shape of one element.

        Raises ValueError, naming the key, for one that is missing, left over, of another shape, or there in both
        spellings.
        """
        shapes = {key: as_shape("fit", shape) for key, shape in as_mapping("fit", "shapes", shapes).items()}
        wanted = _named(shapes, "fit")
        wanted = dict(zip(wanted, shapes, strict=True))
        for name in [*(n for n in wanted if n not in self.named), *(n for n in self.named if n not in wanted)]:
            what = "missing in the state" if name in wanted else "in the state, but not asked for"
            raise ValueError(f"fit: {name.key()} is {what}")
        return {key: _reshape(name, self.named[name], shapes[key]) for name, key in wanted.items()}

    def checked(self) -> AmaxState:
        """The state with all values on the host, in one copy for each device; ValueError, naming the key, for NaN or <
        0.
        """
        return AmaxState(check("checked", on_host(self.named)))

    def stacked(self) -> dict[str, np.ndarray]:
        """{"<base>._amax": [N, ...]} of all experts, and every other value under its key; on the host.

        Raises ValueError as checked, and for missing experts or experts of different shapes.
        """
        named = check("stacked", on_host(self.named))
        numbers = counts(named, "stacked", same_shape=True)
        plain = {name.key(): value for name, value in named.items() if name.index is None}
        both = min((base.key() for base in numbers if base in named), default=None)
        if both is not None:
            raise ValueError(f"stacked: {both} is there for all experts and for each")
        return plain | {base.key(): np.stack([named[base.at(i)] for i in range(n)]) for base, n in numbers.items()}

    # ---- ranks
    # ------------------------------------------------------------------------------------------------------------

    def gather(
        self, comm: Communicator, *, experts: str = "*", numbers: Sequence[int] | None = None, count: int | None = None
    ) -> AmaxState:
        """The state of all expert-parallel ranks, on every rank and on the host; experts get their global numbers.

        experts: wildcard of the quantizers whose number is that of a local expert. All others are the same quantizer on
        every
            rank: the largest value holds.
        numbers: global numbers of the local experts 0 ... n - 1, in any order; None: ranks hold consecutive experts,
        rank 0 the
            first.
        count: how many experts there must be; None: as many as the largest number says.
        Two messages travel, whatever the number of quantizers. Every rank raises the same ValueError, naming the key,
        for an expert that is missing or held twice, shapes that differ, NaN, or a negative value.
        """
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
            raise ValueError(f"gather: {experts!r} matches no expert of any rank; needs experts 0 to {count - 1}")
        return AmaxState(check("gather", named))

    def part(self, rank: int, size: int, *, experts: str = "*", numbers: Sequence[int] | None = None) -> AmaxState:
        """What rank of size holds of a gathered state; its experts are numbered from 0 again.

        experts, numbers: as gather; None: N experts go in order to size ranks, N * rank // size being the first of a
        rank, which gather undoes for any N. Quantizers that are no experts go to every rank. Raises ValueError for a
        rank out of range, missing experts, and numbers that the state does not have or that repeat.
        """
        rank, size = as_index("part", "rank", rank), as_index("part", "size", size)
        wanted = None if numbers is None else as_indices("part", "numbers", numbers)
        as_word("part", "experts", experts)
        if not 0 <= rank < size:
            raise ValueError(f"part: rank {rank} of {size}; needs 0 to {size - 1}")
        named = {name: v for name, v in self.named.items() if name.index is None or not name.matches(experts)}
        for base, n in counts({name: v for name, v in self.named.items() if name not in named}, "part").items():
            held = range(n * rank // size, n * (rank + 1) // size) if wanted is None else wanted
            if len(set(held)) != len(held) or not all(0 <= i < n for i in held):
                raise ValueError(f"part: {base.key()}: numbers {list(held)}; needs different ones from 0 to {n - 1}")
            named |= {base.at(local): self.named[base.at(i)] for local, i in enumerate(held)}
        return AmaxState(named)

    # ---- files
    # ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, separator: str = ".", stacked: bool = False) -> None:
        """Write a safetensors file, whole or not at all.

        separator: "." or "_", between quantizer and expert. stacked: one [N, ...] for all experts, as stacked gives.
        Raises ValueError, naming the key, as checked and stacked.
        """
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
        """Read a safetensors file: of save, of Model-Optimizer in either spelling, or with one [N] or [N, ...] for all
        experts.

        experts: {wildcard: N}, where the file does not say that it holds N experts: an array without a number is the
        stack of
            them, and the numbers 0 ... N - 1 must be there. A file of save says so itself, and must agree.
        Tensors whose names do not end in "amax" are left out.
        Raises ValueError, naming file and key, for a wrong size, missing or surplus experts, two spellings of one key,
        NaN and negative values, a wildcard that matches nothing, a file without any amax, or one that is no safetensors
        file.
        """
        path = as_path("load", path)
        label = f"load: {path.name}"
        arrays, facts = decode(path.read_bytes(), label)
        if not arrays:
            raise ValueError(f"{label}: holds no tensor whose name ends in 'amax'")
        said, given = facts.get("experts", {}), {} if experts is None else experts
        return cls(check(label, unstack(_named(arrays, label), said, given, label)))


def _named(items: Mapping[str, Any], op: str) -> dict[AmaxName, Any]:
    """What stands under keys, by name; the two spellings of a name may not both be there."""
    named: dict[AmaxName, Any] = {}
    for key, item in items.items():
        name = AmaxName.parse(key, op)
        if name in named:
            raise ValueError(f"{op}: {key!r} is there in both spellings; needs one")
        named[name] = item
    return named


def _reshape(name: AmaxName, value: Any, shape: tuple[int, ...]) -> Any:
    if value.shape != shape and not value.size == prod(shape) == 1:
        raise ValueError(f"fit: {name.key()} has shape {value.shape}; needs {shape}")
    return value.reshape(shape)


def _groups(share: Any) -> list[tuple[str, ...]]:
    """The groups of freeze; a name in the place of a group, ("up_proj"), would be a group of letters."""
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
    """One maximum for the members of a group that have the same parent, quantizer and number, where they are single
    numbers.
    """
    group_of = {member: group for group in groups for member in group}
    if len(group_of) != sum(map(len, groups)):
        raise ValueError(f"freeze: share is {groups}; a name may stand in one group only, once")
    shared: dict[Any, Any] = {}
    place = {}
    for name, value in named.items():
        module, _, quantizer = name.base.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in group_of and value.size == 1:
            place[name] = AmaxName(f"{parent}.({'|'.join(group_of[leaf])}).{quantizer}", name.index, name.buffer)
            merge(shared, place[name], value.reshape(()), "freeze")
    return {name: shared[place[name]].reshape(value.shape) if name in place else value for name, value in named.items()}
