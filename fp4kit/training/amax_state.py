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

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fp4kit import arguments
from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.call.parse import check_float
from fp4kit.storage.files import FLOAT_DTYPES, NUMPY_DTYPES, parse_object, unusable, whole_file, write_file
from fp4kit.training.communicators import Communicator, all_gather_bytes
from fp4kit.training.settings import are_words

SEPARATORS = (".", "_")
_FORM = "<module>.weight_quantizer.<i>._amax or <module>.weight_quantizer_<i>._amax"
_NAME = re.compile(r"(?P<base>(?:.+\.)?\w*?quantizers?)(?:[._](?P<index>[0-9]{1,7}))?(?:\.(?P<buffer>_\w*amax))?")


@dataclass(frozen=True)
class AmaxName:
    """The name of one amax buffer: "<base>.<index>.<buffer>" or "<base>_<index>.<buffer>".

    The index is absent for a module without experts, and for an amax that covers all experts of a module.

    Attributes:
        base: "<module>.weight_quantizer", or another quantizer of the module, such as input_quantizer.
        index: number of the expert, or None.
        buffer: the name of the buffer, such as "_amax" or "_global_amax".

    Source: Model-Optimizer's GroupedQuantizer writes ".<i>"; its pull request 1717 wrote "_<i>".
    """

    base: str
    index: int | None = None
    buffer: str = "_amax"

    @classmethod
    def find(cls, key: Any) -> AmaxName | None:
        """Return the AmaxName of a checkpoint's key, or None if the key names no amax buffer of a quantizer."""
        match = _NAME.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            return None
        index = match["index"]
        return cls(match["base"], None if index is None else int(index), match["buffer"] or "_amax")

    @classmethod
    def parse(cls, key: Any, op: str = "amax state") -> AmaxName:
        """Return the AmaxName of a checkpoint's key."""
        name = cls.find(key)
        if name is None:
            raise ValueError(f"{op}: {key!r:.200} names no quantizer; needs {_FORM}")
        return name

    def key(self, separator: str = ".") -> str:
        """Return the name as a checkpoint spells it, such as "m.weight_quantizer.3._amax"."""
        return f"{self._quantizer(separator)}.{self.buffer}"

    def at(self, index: int | None) -> AmaxName:
        """Return a new AmaxName with the expert number ``index``, and this base and buffer."""
        return replace(self, index=index)

    def matches(self, pattern: str) -> bool:
        """Return whether a wildcard (fnmatch; case matters) matches one of the spellings of this name."""
        spellings = {self.base, *(self._quantizer(separator) for separator in SEPARATORS)}
        return any(fnmatchcase(s, pattern) or fnmatchcase(f"{s}.{self.buffer}", pattern) for s in spellings)

    def order(self) -> tuple[str, str, int]:
        """Return a sort key: by base, then buffer, then expert number, where a name without a number comes first."""
        return self.base, self.buffer, -1 if self.index is None else self.index

    def _quantizer(self, separator: str) -> str:
        """Return the name without the buffer: the base and, after the separator, the expert number."""
        return self.base if self.index is None else f"{self.base}{separator}{self.index}"


@ieee("amax")
def import_amax(op: str, name: AmaxName, amax: Any) -> Any:
    """Return a float32 copy of ``amax`` on its device, as a NumPy or CuPy array of its shape."""
    (value,) = imports.import_arrays(f"{op}: {name.key()}", amax=amax)
    check_float(f"{op}: {name.key()}", value, "amax")
    xp = imports.cupy() if imports.on_device(value) else np
    if value.dtype == ml_dtypes.bfloat16:
        bits = value.view(xp.uint16).astype(xp.uint32) << xp.uint32(16)
    else:
        bits = value.astype(xp.float32).view(xp.uint32)
    return xp.asarray(bits * (bits != xp.uint32(0x80000000))).view(xp.float32)


def merge(named: dict[AmaxName, Any], name: AmaxName, value: Any, op: str) -> None:
    """Set named[name] to the elementwise maximum of the old named[name] and ``value``, as a new array."""
    old = named.get(name)
    if old is None:
        named[name] = value
        return
    places = [f"{one.shape} on {one.device if imports.on_device(one) else 'the CPU'}" for one in (value, old)]
    if places[0] != places[1]:
        raise ValueError(
            f"{op}: {name.key()} is {places[0]}, but was {places[1]} before; needs one shape and one device in all"
            " calls"
        )
    xp = imports.cupy() if imports.on_device(value) else np
    named[name] = xp.asarray(xp.maximum(old.view(xp.uint32), value.view(xp.uint32))).view(xp.float32)


def on_host(named: Mapping[AmaxName, Any]) -> dict[AmaxName, np.ndarray]:
    """Return ``named`` as a new dict of NumPy arrays."""
    found = {name: value for name, value in named.items() if not imports.on_device(value)}
    devices: dict[int, list[AmaxName]] = defaultdict(list)
    for name in named.keys() - found.keys():
        devices[named[name].device.id].append(name)
    for device, names in devices.items():
        with imports.cupy().cuda.Device(device):
            flat = imports.cupy().concatenate([named[name].reshape(-1) for name in names]).get()
        cuts = np.cumsum([named[name].size for name in names])[:-1]
        found |= {name: part.reshape(named[name].shape) for name, part in zip(names, np.split(flat, cuts), strict=True)}
    return found


def check(op: str, named: dict[AmaxName, np.ndarray]) -> dict[AmaxName, np.ndarray]:
    """Return ``named`` itself, after making its arrays read-only."""
    for name in sorted(named, key=AmaxName.order):
        value = named[name]
        bad = ~(value >= 0)
        if bad.any():
            what = "NaN" if np.isnan(value).any() else "negative values"
            raise ValueError(f"{op}: {name.key()} holds {what} ({int(bad.sum())} of {value.size}); needs amax >= 0")
        value.flags.writeable = False
    return named


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
        for i in range(n) if same_shape else ():
            if np.shape(named[base.at(i)]) != first:
                raise ValueError(
                    f"{op}: {base.at(i).key()} has shape {np.shape(named[base.at(i)])}, and expert 0 has {first}; needs"
                    " one shape for all experts"
                )
    return found


def check_numbers(base: AmaxName, present: set[int], n: int, op: str) -> None:
    """Raise ValueError unless the expert numbers in ``present`` are exactly 0 to n - 1."""
    missing = next((i for i in range(n) if i not in present), None)
    if missing is not None:
        more = n - sum(i < n for i in present) - 1  # do not enumerate: n comes from a file and may be huge
        others = f" and {more} more are" if more else " is"
        raise ValueError(
            f"{op}: {base.at(missing).key()}{others} missing; needs experts 0 to {n - 1}, and has {len(present)}"
        )
    if len(present) > n:
        raise ValueError(f"{op}: {base.at(max(present)).key()} is surplus; needs exactly {n} experts")


def _global_names(
    own: Mapping[AmaxName, Any], numbers: Sequence[int] | None, offsets: dict[AmaxName, int], op: str
) -> Iterator[tuple[AmaxName, AmaxName]]:
    """Yield (local name, global name) for the experts of one rank; without numbers, ``offsets`` counts those before."""
    if numbers is None:
        count_of = counts(own, op)
        numbered = {name: offsets[name.at(None)] + (name.index or 0) for name in own}
        for base, n in count_of.items():
            offsets[base] += n
    else:
        for name in own:
            if (name.index or 0) >= len(numbers) or min(numbers) < 0:
                raise ValueError(
                    f"{op}: {name.key()} has no global number: numbers is {list(numbers)}; needs one >= 0 for each"
                    " local expert"
                )
        numbered = {name: numbers[name.index or 0] for name in own}
    for name, number in numbered.items():
        yield name, name.at(number)


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
    for pattern, number in arguments.as_mapping(op, "experts", requested).items():
        n = arguments.as_index(op, f"experts[{pattern!r:.60}]", number)
        arguments.as_word(op, "a wildcard of experts", pattern)
        bases = {name.at(None) for name in (*named, *count_of) if name.matches(pattern)}
        if not bases:
            raise ValueError(f"{op}: {pattern!r} matches no key; needs a wildcard that matches a quantizer")
        for base in bases:
            if count_of.setdefault(base, n) != n:
                raise ValueError(f"{op}: {base.key()} has {count_of[base]} experts in this file; {n} were requested")
    return count_of


FACTS = "fp4kit_amax"  # the metadata entry that encode writes


def encode(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file with the arrays as tensors."""
    # All facts are one metadata entry, because the safetensors library writes several entries in random order.
    metadata = {FACTS: json.dumps(facts, sort_keys=True)}
    return save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata)


@ieee("AmaxState")
def decode(data: bytes, label: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (amaxes, facts) from the bytes of a safetensors file."""
    try:
        tensors = sorted((item for item in deserialize(data) if item[0].endswith("amax")), key=lambda item: item[0])
    except SafetensorError as error:
        raise unusable(label, error) from None
    header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")], label)
    # A file that was not written by fp4kit may have no metadata, or metadata without FACTS.
    facts = (header.get("__metadata__") or {}).get(FACTS, "{}")
    amaxes = {}
    for key, info in tensors:
        if info["dtype"] not in FLOAT_DTYPES:
            raise ValueError(f"{label}: {key!r} is {info['dtype']}; needs F32, F16 or BF16")
        value = np.frombuffer(info["data"], NUMPY_DTYPES[info["dtype"]]).reshape(info["shape"]).astype(np.float32)
        amaxes[key] = np.asarray(value + np.float32(0))  # -0 becomes +0
    return amaxes, parse_object(facts.encode(), f"{label}: metadata {FACTS}")


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
        state = AmaxState(_share({**self._single, **experts}, share))
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
        if not all(isinstance(name, AmaxName) for name in arguments.as_mapping("AmaxState", "named", named)):
            raise TypeError("AmaxState: named has keys that are not AmaxName; make them with AmaxName.parse")
        ordered = {name: named[name] for name in sorted(named, key=AmaxName.order)}
        self.named: Mapping[AmaxName, Any] = MappingProxyType(ordered)

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
            if not any(name.matches(arguments.as_word("select", "a pattern", pattern)) for name in self.named):
                raise ValueError(
                    f"select: {pattern!r} matches none of {len(self)} keys, such as {next(iter(self), None)!r}"
                )
        return AmaxState({name: v for name, v in self.named.items() if any(name.matches(p) for p in patterns)})

    def fit(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the amaxes for a caller's buffers: {key: amax} with exactly the keys and shapes in ``shapes``."""
        shapes = {
            key: arguments.as_shape("fit", shape)
            for key, shape in arguments.as_mapping("fit", "shapes", shapes).items()
        }
        key_of = dict(zip(_named(shapes, "fit"), shapes, strict=True))
        for name in [*(n for n in key_of if n not in self.named), *(n for n in self.named if n not in key_of)]:
            what = "missing in the state" if name in key_of else "in the state, but not requested"
            raise ValueError(f"fit: {name.key()} is {what}; needs the same keys on both sides")
        found = {}
        for name, key in key_of.items():
            value, shape = self.named[name], shapes[key]
            if value.shape != shape and not value.size == prod(shape) == 1:
                raise ValueError(f"fit: {name.key()} has shape {value.shape}; needs {shape}")
            found[key] = value.reshape(shape)
        return found

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
        arguments.as_word("gather", "experts", experts)
        count = None if count is None else arguments.as_index("gather", "count", count)
        own = {name.key(): value for name, value in on_host(self.named).items()}
        facts = {"numbers": None if numbers is None else arguments.as_indices("gather", "numbers", numbers)}
        named: dict[AmaxName, Any] = {}
        offsets: dict[AmaxName, int] = defaultdict(int)
        for rank, data in enumerate(all_gather_bytes(comm, encode(own, facts))):
            arrays, sent = decode(data, f"gather: rank {rank}")
            values, op = {AmaxName.parse(key): value for key, value in arrays.items()}, f"gather: rank {rank}"
            local = {name: v for name, v in values.items() if name.index is not None and name.matches(experts)}
            for name in values.keys() - local.keys():
                merge(named, name, values[name], op)
            for name, target in _global_names(local, sent["numbers"], offsets, op):
                if target in named:
                    raise ValueError(
                        f"gather: {target.key()} is present twice; rank {rank} has it as local expert {name.index};"
                        " give each expert one global number"
                    )
                named[target] = local[name]
        matching = {name: value for name, value in named.items() if name.matches(experts)}
        if not counts(matching, "gather", count, same_shape=True) and count:
            raise ValueError(f"gather: {experts!r} matches no expert on any rank; needs experts 0 to {count - 1}")
        return AmaxState(check("gather", named))

    def part(self, rank: int, size: int, *, experts: str = "*", numbers: Sequence[int] | None = None) -> AmaxState:
        """Return one rank's part of a gathered state, for ``size`` ranks."""
        rank, size = arguments.as_index("part", "rank", rank), arguments.as_index("part", "size", size)
        given_numbers = None if numbers is None else arguments.as_indices("part", "numbers", numbers)
        arguments.as_word("part", "experts", experts)
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
        path, stacked = arguments.as_safetensors_path("save", path), arguments.as_flag("save", "stacked", stacked)
        if not arguments.is_one_of(separator, SEPARATORS):
            raise ValueError(f"save: separator is {separator!r:.60}; needs '.' or '_'")
        named = check("save", on_host(self.named))
        experts = {name.key(): n for name, n in counts(named, "save").items()}
        arrays = self.stacked() if stacked else {name.key(separator): value for name, value in named.items()}
        with whole_file(path) as temporary:
            write_file(temporary, encode(arrays, {"experts": experts}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, experts: Mapping[str, int] | None = None) -> AmaxState:
        """Read a safetensors file with amaxes, and return them as an AmaxState."""
        path = arguments.as_path("load", path)
        label = f"load: {path}"
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


def _share(named: dict[AmaxName, Any], share: Any) -> dict[AmaxName, Any]:
    """Return a new dict of the amaxes, in which modules that share an amax all have the largest amax among them."""
    groups = arguments.as_entries("freeze", "share", share)
    for group in groups:
        if not are_words(group):
            raise TypeError(f"freeze: share has {group!r:.60}; needs groups of names, such as ('gate_proj', 'up_proj')")
    groups = [tuple(group) for group in groups]
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
