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
        """Collect the amax of one call. The stored value becomes the elementwise maximum over all calls.

        On a GPU, this method launches a few small kernels and does not wait.

        Args:
            name: name of the quantizer, such as "m.weight_quantizer.3" or "m.weight_quantizer_3._amax". These two
                spellings are one quantizer.
            amax: float32, float16 or bfloat16, with the same shape and device in every call.

        Raises:
            ValueError: if ``name`` is not the name of a quantizer, if the shape or device changes, or if the experts of
                the quantizer were collected with collect_grouped.
            TypeError: for an unsupported dtype.
        """
        key = AmaxName.parse(name)
        if key.index is not None and key.at(None) in self._grouped:
            raise ValueError(
                f"collect: {key.key()} is collected by collect_grouped already; use one of the two functions"
            )
        merge(self._single, key, import_amax("collect", key, amax), "collect")

    def collect_grouped(self, name: str, amaxes: Any) -> None:
        """Collect the amaxes of all local experts from one array: amaxes[i] is the amax of expert i.

        This is equivalent to collect(f"{name}.{i}", amaxes[i]) for every expert i.

        Args:
            name: name of the quantizer without an expert number.
            amaxes: [N, ...], with a dtype that collect accepts. N must be equal in every call.

        Raises:
            ValueError: if ``name`` is not the name of a quantizer, or has an expert number, or if the array is 0-d.
            ValueError: if single experts of the quantizer were collected with collect, or if shape or device change.
            TypeError: for an unsupported dtype.
        """
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
        """Return the current state. Amaxes that are collected later do not change it.

        Args:
            share: groups of modules whose tensors get one amax, the largest. A group lists the last parts of module
                names, such as ("gate_proj", "up_proj"). Modules share if they have the same parent and the same expert
                number, and only amaxes of one element are shared. fp4kit.checkpoint.selection.fused_layers.FUSIONS
                lists the modules that loaders fuse.

        Raises:
            ValueError: if an amax on the host is NaN or negative. The message names the key. Amaxes on a GPU are not
                checked here.
            ValueError: if amaxes to share are on different devices, or if a name occurs twice in ``share``.
            TypeError: if ``share`` is not iterable, or if a group is a single name or contains something other than
                names.
        """
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
        """Return the amax under a key. The key may have "." or "_" before the expert number.

        Raises KeyError if the state has no such key.
        """
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
        """Return a state with only the keys that match at least one of the wildcards (fnmatch; case matters).

        "*weight_quantizer" matches all experts of every weight quantizer. Without wildcards the result is an empty
        state.

        Raises:
            ValueError: if a wildcard matches no key.
            TypeError: if a wildcard is not a string.
        """
        for pattern in patterns:
            if not any(name.matches(as_word("select", "a pattern", pattern)) for name in self.named):
                raise ValueError(
                    f"select: {pattern!r} matches none of {len(self)} keys, such as {next(iter(self), None)!r}"
                )
        return AmaxState({name: v for name, v in self.named.items() if any(name.matches(p) for p in patterns)})

    def fit(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the amaxes for a caller's buffers: {key: amax} with exactly the keys and shapes in ``shapes``.

        An amax with one element is reshaped to any shape with one element.

        Args:
            shapes: {key: shape} of the buffers. A key may have either separator, and the result has the same spelling.

        Raises:
            ValueError: if a value is missing, is left over or has the wrong shape. The message names the key.
            ValueError: if a key names no quantizer, or if ``shapes`` has a key in both spellings.
            TypeError: if ``shapes`` is not a mapping to shapes.
        """
        shapes = {key: as_shape("fit", shape) for key, shape in as_mapping("fit", "shapes", shapes).items()}
        key_of = _named(shapes, "fit")
        key_of = dict(zip(key_of, shapes, strict=True))
        for name in [*(n for n in key_of if n not in self.named), *(n for n in self.named if n not in key_of)]:
            what = "missing in the state" if name in key_of else "in the state, but not requested"
            raise ValueError(f"fit: {name.key()} is {what}; needs the same keys on both sides")
        return {key: _reshape(name, self.named[name], shapes[key]) for name, key in key_of.items()}

    def checked(self) -> AmaxState:
        """Return a new state with read-only NumPy arrays, after checking that no value is NaN or negative.

        Arrays on a GPU are copied to the host, in one transfer per GPU. NumPy arrays are not copied, so those of this
        state become read-only too. Raises ValueError if a value is NaN or negative, naming the first key with such a
        value.
        """
        return AmaxState(check("checked", on_host(self.named)))

    def stacked(self) -> dict[str, np.ndarray]:
        """Return {"<base>._amax": [N, ...]} with all experts of a quantizer in one array, and other amaxes by key.

        All arrays are on the host. The stacked ones are new; the others are those of this state if they were NumPy
        arrays.

        Raises:
            ValueError: a value is NaN or negative; experts are missing or have different shapes; or a quantizer has
            both numbered experts and an amax without a number. The message names the key.
        """
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
        """Merge the states of all expert-parallel ranks. Return the whole state on every rank, as NumPy arrays.

        Experts get their global numbers. Two messages are sent, whatever the number of quantizers.

        Args:
            comm: the group of processes.
            experts: a wildcard for the names of quantizers that are numbered by local expert. Any other quantizer is
                the same on every rank, and its largest value is kept.
            numbers: global numbers of the local experts 0 ... n - 1, in any order. None: each rank holds consecutive
                experts, beginning with rank 0.
            count: the number of experts that must be present. None: as many as the largest number implies.

        Raises:
            ValueError: if an expert is missing, superfluous or duplicate, a local expert has no global number, the
                amaxes of a quantizer differ in shape, or a value is NaN or negative. Every rank raises it, and the
                message names the key.
            ValueError: if ``count`` is given and no expert matches ``experts``.
            TypeError: if an argument has the wrong type.
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
            raise ValueError(f"gather: {experts!r} matches no expert on any rank; needs experts 0 to {count - 1}")
        return AmaxState(check("gather", named))

    def part(self, rank: int, size: int, *, experts: str = "*", numbers: Sequence[int] | None = None) -> AmaxState:
        """Return one rank's part of a gathered state, for ``size`` ranks.

        The experts in the part are numbered from 0 again. Every part also includes all amaxes that do not belong to an
        expert.

        Args:
            rank: the number of the rank.
            size: the number of ranks.
            experts: a wildcard for the names of quantizers that are numbered by expert.
            numbers: global numbers of the rank's experts. None distributes N experts in order, so that N * rank // size
                is the first expert of a rank. gather reverses this for any N.

        Raises:
            ValueError: for a rank out of range, for missing experts, and for numbers that repeat or that the state
                lacks.
            TypeError: if an argument has the wrong type.
        """
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
        """Write a safetensors file. It appears only when it is complete.

        Args:
            path: the file. An existing file is replaced.
            separator: "." or "_", between quantizer and expert number.
            stacked: True to write one array [N, ...] for all experts, as the method ``stacked`` returns it.

        Raises:
            ValueError: if a value is NaN or negative, or an expert is missing. The message names the key.
            ValueError: if separator is neither "." nor "_", or if path does not end with the name of a file.
            ValueError: if stacked is True, in the cases in which the method ``stacked`` raises it.
            TypeError: if path is not a path, or stacked is not a bool.
            OSError: if the file cannot be written.
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
        """Read a safetensors file with amaxes, and return them as an AmaxState.

        The file was written by save or by Model-Optimizer, or it has one array for all experts of a quantizer.

        Names may have either separator, "." or "_", before the expert number. An array for all experts is [N] or
        [N, ...]. Tensors whose names do not end in "amax" are left out.

        Args:
            path: the file.
            experts: {wildcard: N} for files that do not state the number of experts. A matching array without a number
                is a stack of N experts; numbered experts must be 0 ... N - 1. A file that save wrote states N itself,
                and must agree.

        Returns:
            The AmaxState, with NumPy arrays.

        Raises:
            ValueError: if a size is wrong, experts are missing or superfluous, or a key occurs in two spellings; for a
                dtype other than F32, F16 and BF16; for NaN and for negative values. The message names the file and the
                key.
            ValueError: if a wildcard matches nothing, if the file is not a safetensors file or has no amax, or if a
                name in it ends in "amax" but names no quantizer.
            ValueError: if path does not end with the name of a file.
            TypeError: if path is not a path, or ``experts`` is not a mapping of strings to ints.
            OSError: if the file cannot be read.
        """
        path = as_path("load", path)
        label = f"load: {path.name}"
        arrays, facts = decode(path.read_bytes(), label)
        if not arrays:
            raise ValueError(f"{label}: has no tensor whose name ends in 'amax'; needs a file with amaxes")
        stated, requested = facts.get("experts", {}), {} if experts is None else experts
        return cls(check(label, unstack(_named(arrays, label), stated, requested, label)))


def _named(items: Mapping[str, Any], op: str) -> dict[AmaxName, Any]:
    """Return the items with each key replaced by the AmaxName that it spells.

    Raises ValueError if a key is not the name of a quantizer's amax, or if two keys spell one name, one with "." and
    the other with "_" before the number of the expert.

    op: the public function, with which the message begins.
    """
    named: dict[AmaxName, Any] = {}
    for key, item in items.items():
        name = AmaxName.parse(key, op)
        if name in named:
            raise ValueError(f"{op}: {key!r} occurs with both separators, '.' and '_'; needs one of them")
        named[name] = item
    return named


def _reshape(name: AmaxName, value: Any, shape: tuple[int, ...]) -> Any:
    """Return the amax `value` in the given shape, as a view.

    Raise ValueError, naming the key of ``name``, unless the amax has this shape already, or both have one element.
    """
    if value.shape != shape and not value.size == prod(shape) == 1:
        raise ValueError(f"fit: {name.key()} has shape {value.shape}; needs {shape}")
    return value.reshape(shape)


def _groups(share: Any) -> list[tuple[str, ...]]:
    """Return the argument ``share`` of freeze as a list of tuples of names.

    Raises TypeError if ``share`` is not iterable or a group is not a collection of strings. A common mistake is
    ("up_proj"), which is a str and not a tuple.
    """
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
    """Return a new dict of the amaxes, in which modules that share an amax all have the largest amax among them.

    Two modules share an amax if all of these hold:

    - One of ``groups`` has the last parts of both names.
    - Their parent, quantizer, expert number and buffer are equal.
    - Their amaxes have one element.

    All other amaxes keep their values, and all amaxes keep their shapes.

    named: the amaxes, which are not changed.
    groups: tuples of the last parts of module names (see freeze).

    Raises ValueError if a name occurs twice in ``groups``, or if amaxes to share are on different devices.
    """
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
