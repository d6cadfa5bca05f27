"""Collect the amaxes of the inputs of layers, per layer and per expert, and merge what several processes collected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from fp4kit.arguments import as_entries, as_flag, as_index, as_path, as_word
from fp4kit.arrays import imports
from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.calibration.collector_file import CollectedInputs, decode, encode
from fp4kit.calibration.expert_names import expert_name, expert_of
from fp4kit.calibration.headroom import BLOCK, Headroom
from fp4kit.calibration.scales import input_scale
from fp4kit.calibration.totals import LARGEST, Totals
from fp4kit.layouts import pad
from fp4kit.ops.amax import amax
from fp4kit.storage.errors import listed
from fp4kit.storage.whole_file import whole_file, write_file
from fp4kit.training.amax_experts import all_gather_bytes
from fp4kit.training.communicators import Communicator

AmaxRule = Literal["max", "headroom"]
Unseen = Literal["error", "layer", "none"]
RULES, UNSEEN = get_args(AmaxRule), get_args(Unseen)
_RECIPE = "nvfp4-modelopt"  # the recipe whose block amaxes are collected; they propagate NaN
_Key = tuple[str, int | None]  # (layer, number of experts); None for a layer without experts, or for one expert


class Collector:
    """Keep, for each layer, the largest magnitude of its inputs, its number of tokens and a histogram of block amaxes.

    A layer is named as its module in the checkpoint, such as "model.layers.0.mlp.down_proj". A token is one row of
    inputs, and a block is 16 consecutive inputs of one token. The experts of a mixture-of-experts layer are separate
    layers: "model.layers.0.mlp.experts.3.up_proj".

    The result does not depend on the order of calls, nor on how inputs are distributed among calls, processes and
    files: it is bit-identical to what one call with all inputs collects.

    Args:
        histogram: True to count block amaxes, which the rule "headroom" needs. False saves time, and up to 4 KiB of
            memory per layer and expert.

    Raises:
        TypeError: if histogram is not a bool.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.calibration import Collector
        >>> collector = Collector()
        >>> collector.collect("mlp.down_proj", np.float32([[1, -3] * 8, [0.5, 2] * 8]))
        >>> collector.amaxes(), collector.tokens()
        ({'mlp.down_proj': np.float32(3.0)}, {'mlp.down_proj': 2})
    """

    def __init__(self, *, histogram: bool = True) -> None:
        self.histogram = as_flag("Collector", "histogram", histogram)
        self._columns: dict[str, int] = {}
        self._totals: dict[_Key, dict[int | None, Totals]] = {}  # per key: CUDA device, or None for the host -> totals

    def add_layer(self, layer: str, columns: int, experts: int | None = None) -> None:
        """Register a layer without inputs, so that the collector knows it even if it never sees a token.

        If it never does, ``amaxes`` raises an error that names the layer or, for an expert, does what its argument
        ``unseen`` says. Does nothing if the layer is known with these numbers of columns and experts.

        Args:
            layer: the name of the layer; with ``experts``, without an expert number.
            columns: K, the number of inputs per token.
            experts: the number of experts, or None for a layer without experts or for one expert.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if the name is empty, if columns or experts is not positive, or if the layer has another number
                of columns already; with ``experts``, also if the layer is not directly in a module called ``experts``.
        """
        self._key("add_layer", layer, columns, experts)

    def collect(self, layer: str, x: Any, *, expert: Any = None, experts: int | None = None) -> None:
        """Collect the inputs of one call of a layer.

        On a GPU this launches a few kernels and does not wait, unless ``expert`` is an array. If an error is raised,
        nothing of the call is collected.

        Args:
            layer: the name of the layer; with ``expert``, the name of the layer of all experts without a number, such
                as "model.layers.0.mlp.experts.up_proj".
            x: the inputs, (..., K), of float32, float16 or bfloat16, of any library and on any device. Rows shorter
                than whole blocks of 16 are padded with zeros. An array without rows adds no token.
            expert: the number of the expert, or an integer array x.shape[:-1] with the expert of each token. If several
                processes share the experts, use the number of the expert in the whole model.
            experts: the number of experts. Needed if ``expert`` is an array, and allowed only with ``expert``.

        Raises:
            TypeError: if x has an unsupported dtype, or another argument the wrong type.
            ValueError: if x holds NaN or infinity. On a GPU they are found later, when results are read.
            ValueError: if x is 0-d, has no columns, or has a different number of columns from an earlier call.
            ValueError: if an expert number is out of range, if ``expert`` does not have the shape of the tokens, or if
                ``expert`` is an array without ``experts``.
            ValueError: if ``experts`` is given without ``expert``.
            ValueError: if ``layer`` is empty or, with experts, is not directly in a module called ``experts``.

        Numerics:
            Exact: amaxes, counts and bins have no rounding. -0 counts as 0. Subnormals are kept.
        """
        name = as_word("collect", "layer", layer)
        op = f"collect: {name}"
        given = {} if expert is None or _is_int(expert) else {"expert": expert}
        x, *ids = import_arrays(op, x=_detached(x), **given)
        if x.ndim == 0 or not x.shape[-1]:
            raise ValueError(f"{op}: x has shape {x.shape}; needs (..., K), one row of inputs per token")
        if given and experts is None:
            raise ValueError(f"{op}: expert is an array; needs experts=, the number of experts, too")
        if expert is None and experts is not None:
            raise ValueError(
                f"{op}: experts is {experts!r:.60}, without expert; needs expert=, the expert of each token"
            )
        columns, tokens = x.shape[-1], x.shape[:-1]
        owner: Any = as_index(op, "expert", expert) if expert is not None and not given else None
        if owner is not None and not 0 <= owner < (owner + 1 if experts is None else as_index(op, "experts", experts)):
            raise ValueError(f"{op}: expert is {owner}; needs 0 to {experts if experts is None else experts - 1}")
        if given:
            owner = _owners(op, ids[0], tokens, as_index(op, "experts", experts))
        blocks = _block_amaxes(op, x)
        if owner is not None and experts is None:
            name, owner = expert_name(op, name, owner), None
        key = self._key("collect", name, columns, experts)
        self._on(key, blocks).include(blocks, 0 if owner is None else owner)

    @property
    def layers(self) -> tuple[str, ...]:
        """The sorted names of all layers, with one name per expert.

        Raises ValueError in the cases in which the method ``columns`` raises it.
        """
        return tuple(self._entries("layers"))

    def columns(self) -> dict[str, int]:
        """Return {layer: K}, where K is the number of inputs per token.

        Raises ValueError in two cases:

        - An input on a GPU was NaN or infinite.
        - An expert was collected both under its own name and with ``expert=``, with different numbers of columns.
        """
        return {name: entry.columns for name, entry in self._entries("columns").items()}

    def tokens(self) -> dict[str, int]:
        """Return {layer: number of tokens that it saw}, which is 0 for a layer or expert that saw none.

        Raises ValueError in the cases in which the method ``columns`` raises it.
        """
        return {name: entry.tokens for name, entry in self._entries("tokens").items()}

    def amaxes(self, rule: AmaxRule | Headroom = "max", *, unseen: Unseen = "error") -> dict[str, np.float32]:
        """Return the amax of the inputs of each layer.

        Args:
            rule: "max" for the largest input; "headroom" or a Headroom for an amax above it.
            unseen: what to do with an expert that saw no token, or only zeros. "error" raises ValueError. "layer" gives
                it the largest amax of the experts of its layer; if this is 0 too, ValueError is raised. "none" leaves
                it out of the result. For any other layer without a nonzero input, ValueError is always raised.

        Returns:
            {layer: amax}. Amaxes are positive float32 numbers.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if ``rule`` or ``unseen`` is unknown; if layers have no amax, in which case the message names
                them; if the rule needs histograms, but none were collected; or in a case in which columns raises it.

        Exact:
            "max" equals max calibration of Model-Optimizer 0.47; for "headroom", see Headroom. unseen="layer" equals
            the fill of missing experts in Model-Optimizer's export.

        Source:
            Model-Optimizer 0.47, modelopt/torch/quantization/calib/max.py and modelopt/torch/export/layer_utils.py,
            set_expert_quantizer_amax.

        Examples:
            >>> import numpy as np
            >>> from fp4kit.calibration import Collector
            >>> collector = Collector()
            >>> collector.collect("mlp.experts.up_proj", np.full((1, 16), 0.5, np.float32), expert=0, experts=2)
            >>> collector.amaxes(unseen="layer")
            {'mlp.experts.0.up_proj': np.float32(0.5), 'mlp.experts.1.up_proj': np.float32(0.5)}
        """
        return filled("amaxes", self.found(rule), unseen)

    def found(self, rule: AmaxRule | Headroom = "max") -> dict[str, np.float32]:
        """Return {layer: amax} as ``amaxes`` does, but with 0 for layers and experts that saw no nonzero input.

        Raises ValueError if the rule is unknown, if it needs histograms that were not collected, or in a case in which
        columns raises it.
        """
        chosen = rule_of("amaxes", rule)
        entries = self._entries("amaxes")
        if chosen is None:
            return {name: entry.amax for name, entry in entries.items()}
        if not self.histogram:
            raise ValueError(
                "amaxes: the rule headroom needs histograms, which were not collected; collect with"
                " Collector(histogram=True), or use the rule max"
            )
        return {
            name: chosen.amax(entry.histogram, entry.amax)
            for name, entry in entries.items()
            if entry.histogram is not None
        }

    def input_scales(self, rule: AmaxRule | Headroom = "max", *, unseen: Unseen = "error") -> dict[str, np.float32]:
        """Return the input scale of each layer, which multiplies on decode: ``amax / (6 * 448)``.

        Args:
            rule: "max" for the largest input; "headroom" or a Headroom for an amax above it.
            unseen: what to do with an expert that saw no token, or only zeros: "error", "layer" or "none", as for
                amaxes.

        Returns:
            {layer: input scale}, float32. See fp4kit.calibration.input_scale; input_global_scale gives the divisor of
            compressed-tensors.

        Raises:
            TypeError, ValueError: as for amaxes.
        """
        return {name: input_scale(amax) for name, amax in self.amaxes(rule, unseen=unseen).items()}

    # ---- public methods that combine several collectors

    @classmethod
    def merge(cls, collectors: Iterable[Collector]) -> Collector:
        """Return a new Collector with the inputs of several collectors.

        Args:
            collectors: at least one, all with or all without histograms. They are not changed.

        Returns:
            The Collector, with the largest of the amaxes, and the sums of the token counts and of the histograms.

        Raises:
            TypeError: if `collectors` is not iterable, or an entry is not a Collector.
            ValueError: if there is no collector, if only some have histograms, or if a layer has different numbers of
                columns.
            ValueError: if an input on a GPU was NaN or infinite.
        """
        members = as_entries("merge", "collectors", collectors)
        for member in members:
            if not isinstance(member, Collector):
                raise TypeError(f"merge: collectors has a {type(member).__name__}; needs Collectors")
        if len({member.histogram for member in members}) != 1:
            state = "some without histograms" if members else "none"
            raise ValueError(f"merge: collectors are {state}; needs one or more, all with histograms or all without")
        whole = cls(histogram=members[0].histogram)
        for member in members:
            whole._include(member._entries("merge"), "merge")
        return whole

    def gather(self, comm: Communicator) -> Collector:
        """Return, on every rank, a Collector with the inputs that all ranks collected.

        Args:
            comm: the group of processes (fp4kit.training.communicators). Experts have the numbers of the whole model on
                every rank.

        Returns:
            The merged Collector, the same on every rank.

        Raises:
            TypeError: if comm is not a communicator.
            ValueError: as for merge, on every rank. If the method ``columns`` would raise it on one rank, that rank
                raises that error, and every other rank an error that names the rank.
        """
        failure = None
        try:
            data = encode(self._entries("gather"), self.histogram)
        except ValueError as error:
            failure, data = error, b""  # the other ranks wait for a message
        parts = all_gather_bytes(comm, data)
        if failure is not None:
            raise failure
        if failed := [rank for rank, data in enumerate(parts) if not data]:
            raise ValueError(f"gather: rank {failed[0]} has no inputs to send; see the error of that rank")
        return type(self).merge([self._decoded(data, f"gather: rank {rank}") for rank, data in enumerate(parts)])

    # ---- public methods that save and load

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, from which load returns an equal Collector. It appears only when it is complete.

        Args:
            path: the file. An existing file is replaced. Equal contents give equal bytes.

        Raises:
            TypeError: if path is not a path.
            ValueError: if path does not end with the name of a file, or if an input on a GPU was NaN or infinite.
            ValueError: if an expert was collected both under its own name and with ``expert=``, with different numbers
                of columns.
            OSError: if the file cannot be written.
        """
        target = as_path("save", path)
        data = encode(self._entries("save"), self.histogram)
        with whole_file(target) as temporary:
            write_file(temporary, data)

    @classmethod
    def load(cls, *paths: str | os.PathLike[str]) -> Collector:
        """Read one or more files that save wrote, and merge them.

        Args:
            paths: the files, of different ranks, batches or runs.

        Returns:
            The merged Collector.

        Raises:
            TypeError: if an argument is not a path.
            ValueError: if there is no path, if a path does not end with the name of a file, or if save did not write
                one of the files.
            ValueError: if only some files have histograms, or if a layer has different numbers of columns in them.
            OSError: if a file cannot be read.
        """
        if not paths:
            raise ValueError("load: got no path; needs one or more files of Collector.save")
        files = [as_path("load", path) for path in paths]
        return cls.merge([cls._decoded(path.read_bytes(), f"load: {path.name}") for path in files])

    @classmethod
    def _decoded(cls, data: bytes, label: str) -> Collector:
        """Return the Collector in the bytes of a file."""
        entries, histogram = decode(data, label)
        found = cls(histogram=histogram)
        found._include(entries, label)
        return found

    # ---- private methods

    def __repr__(self) -> str:
        return f"Collector({len(self._columns)} layers{'' if self.histogram else ', histogram=False'})"

    def _key(self, op: str, layer: str, columns: int, experts: int | None) -> _Key:
        """Check the name and sizes of a layer, add the layer if it is new, and return its key in the dict
        ``_totals``.
        """
        name, k = as_word(op, "layer", layer), as_index(op, "columns", columns)
        count = None if experts is None else as_index(op, "experts", experts)
        if not name or k < 1 or (count is not None and count < 1):
            raise ValueError(f"{op}: {name!r} has {k} columns and {count} experts; needs a name and positive numbers")
        if count is not None:
            expert_name(op, name, 0)  # raises an error unless the name can name a stack of experts
        if self._columns.setdefault(name, k) != k:
            raise ValueError(
                f"{op}: {name} has {k} columns, but had {self._columns[name]} before; "
                "needs one number of columns per layer"
            )
        self._totals.setdefault((name, count), {})
        return name, count

    def _on(self, key: _Key, like: Any) -> Totals:
        """Return the Totals of a layer that are on the device of the array ``like``."""
        places, experts = self._totals[key], key[1] or 1
        device = like.device.id if on_device(like) else None
        if device not in places:
            places[device] = Totals.empty(experts, self.histogram, np if device is None else imports.cupy())
        return places[device]

    def _entries(self, op: str) -> dict[str, CollectedInputs]:
        """Return {layer: CollectedInputs} of everything collected on all devices, sorted by name."""
        found: dict[str, CollectedInputs] = {}
        for (name, experts), places in self._totals.items():
            whole = Totals.empty(experts or 1, self.histogram)
            for totals in places.values():
                whole.add(totals.on_host())
            if (whole.amax > LARGEST).any():
                raise ValueError(f"{op}: {name}: its inputs hold NaN or infinity; needs finite inputs")
            for i in range(experts or 1):
                layer = name if experts is None else expert_name(op, name, i)
                histogram = None if whole.histogram is None else whole.histogram[i]
                one = CollectedInputs(
                    self._columns[name], whole.amax[i].view(np.float32), int(whole.tokens[i]), histogram
                )
                found[layer] = one if layer not in found else found[layer].plus(one, f"{op}: {layer}")
        return dict(sorted(found.items()))

    def _include(self, entries: Mapping[str, CollectedInputs], op: str) -> None:
        """Add the entries of another collector or of a saved file to this collector, to its totals on the host."""
        for name, entry in entries.items():
            places = self._totals[self._key(op, name, entry.columns, None)]
            whole = places.setdefault(None, Totals.empty(1, self.histogram))
            whole.add(entry.totals())


def filled(op: str, amaxes: Mapping[str, np.float32], unseen: str) -> dict[str, np.float32]:
    """Return {layer: amax} after applying a policy to the experts whose amax is 0."""
    if unseen not in UNSEEN:
        raise ValueError(f"{op}: unseen is {unseen!r:.60}; needs one of {', '.join(UNSEEN)}")
    largest: dict[str, np.float32] = {}
    for name, value in amaxes.items():
        if expert := expert_of(name):
            largest[expert.stack] = max(largest.get(expert.stack, np.float32(0)), value)
    found, missing = {}, []
    for name, value in amaxes.items():
        expert = expert_of(name)
        if not value and expert is not None and unseen != "error":
            if unseen == "none":
                continue
            value = largest[expert.stack]
        if not value:
            missing.append(name)
        found[name] = value
    if missing:
        raise ValueError(_unseen_text(op, missing, unseen))
    return found


def _unseen_text(op: str, missing: list[str], unseen: str) -> str:
    """Return the error message for layers that saw no nonzero input."""
    fill = " For experts, unseen='layer' takes the largest amax of the layer's experts."
    more = fill if unseen == "error" and any(map(expert_of, missing)) else ""
    verb = "s have" if len(missing) > 1 else " has"
    return (
        f"{op}: {len(missing)} layer{verb} seen no input other than zero: {listed(missing)}; run more tokens through"
        f" the model.{more}"
    )


def rule_of(op: str, rule: Any) -> Headroom | None:
    """Return the Headroom that a rule stands for, or None for the rule "max"."""
    if isinstance(rule, Headroom):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{op}: rule is {rule!r:.60}; needs {' or '.join(map(repr, RULES))}, or a Headroom")
    return None if rule == "max" else Headroom()


def _is_int(value: Any) -> bool:
    """Return whether an argument is one integer of Python or NumPy. A bool and an array of integers give False."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _detached(x: Any) -> Any:
    """Return ``x.detach()``, which shares memory with x, if x is a PyTorch tensor that requires a gradient."""
    return x.detach() if getattr(x, "requires_grad", False) else x


def _block_amaxes(op: str, x: Any) -> Any:
    """Return the amax of each block of 16 inputs, as the bit patterns of float32 numbers: uint32 (tokens, blocks)."""
    try:
        blocks = amax(pad(x, BLOCK), _RECIPE)
    except TypeError as error:
        raise TypeError(str(error).replace("amax", op, 1)) from None
    bits = blocks.reshape(-1, blocks.shape[-1]).view(np.uint32)
    if not on_device(bits) and bits.size and bits.max() > LARGEST:
        kind = "NaN" if np.isnan(blocks).any() else "infinity"
        raise ValueError(f"{op}: x holds {kind}; needs finite inputs; find the layer that makes it")
    return bits


def _owners(op: str, expert: Any, tokens: tuple[int, ...], experts: int) -> Any:
    """Return the expert of each token as an int64 array (tokens,), in the library of ``expert``."""
    if expert.dtype.kind not in "iu":
        raise TypeError(f"{op}: expert is {expert.dtype}; needs an integer or an array of integers")
    if expert.shape != tokens:
        raise ValueError(f"{op}: expert has shape {expert.shape}; needs {tokens}, one expert per token")
    flat = expert.reshape(-1).astype(np.int64)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < experts:
        raise ValueError(f"{op}: experts are {int(flat.min())} to {int(flat.max())}; needs 0 to {experts - 1}")
    return flat
