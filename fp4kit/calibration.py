"""Collect the amaxes of activations, from which the input scales of NVFP4 layers are computed.

    collector = Collector()
    for batch in calibration_set:
        collector.collect("model.layers.0.mlp.down_proj", inputs_of_that_layer(batch))
    collector.save("activations.safetensors")        # for fp4kit convert --activations
    collector.input_scales()["model.layers.0.mlp.down_proj"]

fp4kit.torch.collect fills a Collector while a PyTorch model runs. An input scale is the tensor scale of a layer's
inputs. An engine that quantizes activations to NVFP4 needs one per layer, because it cannot know the largest input in
advance.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fp4kit.arguments import (
    a_type,
    as_entries,
    as_flag,
    as_float32,
    as_index,
    as_path,
    as_safetensors_path,
    as_word,
    explains_calls,
    explains_class,
)
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import cupy, import_arrays, on_device, to_host
from fp4kit.formats import E4M3, NVFP4
from fp4kit.layouts import pad
from fp4kit.ops.amax import amax
from fp4kit.storage.files import listed, parse_object, unusable, whole_file, write_file
from fp4kit.training.communicators import Communicator, all_gather_bytes

__all__ = ["Collector", "Headroom", "input_global_scale", "input_scale"]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no others."""
    return list(__all__)


BINS, BLOCK = 512, NVFP4.block_size
_LOW, _HIGH = -40.0, 40.0  # log2 of the block amaxes at both ends of the histogram
_NORMAL_RANGE = E4M3.max / float(E4M3.min_normal)  # 28672: the range of normal block scales
_IGNORED = 1e6  # blocks below the upper end by more than this factor do not determine the anchor
_SEARCHED = 256  # bit patterns to either side of the exact edge among which the edge of the float32 rule lies


def _bins_of(amaxes: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the number of the bin, from 0 to 511, of each positive block amax, as int64 in the shape of ``amaxes``."""
    log2 = np.log2(amaxes.astype(np.float64)).astype(np.float32)
    fraction = (log2 - np.float32(_LOW)) / np.float32(_HIGH - _LOW)
    return np.clip(np.floor(fraction * np.float32(BINS)).astype(np.int64), 0, BINS - 1)


@cache
@ieee("headroom")
def edges() -> npt.NDArray[np.uint32]:
    """Return the lower edges of bins 1 ..."""
    exact = np.exp2(_LOW + np.arange(1, BINS) * ((_HIGH - _LOW) / BINS)).astype(np.float32)
    bits = exact.view(np.uint32)[:, None] + np.arange(-_SEARCHED, _SEARCHED, dtype=np.int64)
    inside = _bins_of(bits.astype(np.uint32).view(np.float32)) >= np.arange(1, BINS)[:, None]
    assert not inside[:, 0].any() and inside[:, -1].all()
    found = bits[np.arange(BINS - 1), inside.argmax(axis=1)].astype(np.uint32)
    found.flags.writeable = False
    return found


def bin_of(amax: np.float32) -> int:
    """Return the number of the bin, from 0 to 511, that counts a positive block amax."""
    return int(np.searchsorted(edges(), np.float32(amax).view(np.uint32), side="right"))


@explains_class
@dataclass(frozen=True)
class Headroom:
    """Choose an amax that is usually far above the collected inputs, so that larger inputs do not saturate.

    The rule is Model-Optimizer's nvfp4_act_headroom:

        upper  = upper_percentile of the block amaxes
        anchor = anchor_percentile of the block amaxes from the bin of upper / 1e6 on
        amax   = max(rho * anchor, upper)

    With amax = rho * anchor, a block as small as the anchor gets the block scale 448 / rho, which is low in the range
    of E4M3. The rest of the range is headroom for larger inputs. A percentile is the center of the first bin whose
    cumulated count reaches that share of all blocks.

    Args:
        anchor_percentile: the percentile of the anchor, above 0 and at most 100.
        upper_percentile: the percentile of the upper end, above 0 and at most 100. 100 stands for the largest block
            amax itself, so that no collected input saturates.
        rho: the factor of the anchor, above 0 and below 28672, the ratio of the largest and the smallest normal E4M3
            number.

    Raises:
        ValueError: if an argument is out of range.

    Exact:
        Equals Model-Optimizer 0.47 with PyTorch on a CPU, for up to 2^24 blocks per layer. Beyond that, Model-Optimizer
        sums counts in float32, whose rounding depends on the device; fp4kit rounds the exact sums to float32. With
        several ranks, Model-Optimizer takes the largest of the ranks' amaxes. fp4kit merges the ranks' histograms
        first, which gives the amax of all their inputs together.

    Source:
        Model-Optimizer 0.47, modelopt/torch/quantization/calib/nvfp4_act_headroom.py.

    Examples:
        >>> from fp4kit.calibration import Headroom
        >>> Headroom(rho=1024.0)
        Headroom(anchor_percentile=1.0, upper_percentile=99.99, rho=1024.0)
    """

    anchor_percentile: float = 1.0
    upper_percentile: float = 99.99
    rho: float = 16384.0

    def __post_init__(self) -> None:
        for name in ("anchor_percentile", "upper_percentile"):
            if not 0 < getattr(self, name) <= 100:
                raise ValueError(f"Headroom: {name} is {getattr(self, name)}; needs a number above 0 and at most 100")
        if not 0 < self.rho < _NORMAL_RANGE:
            raise ValueError(f"Headroom: rho is {self.rho}; needs a number above 0 and below {_NORMAL_RANGE:g}")

    @ieee("Headroom.amax")
    def amax(self, histogram: npt.NDArray[np.int64], largest: np.float32) -> np.float32:
        """Return the amax with headroom of one layer.

        Args:
            histogram: int64 (512,), the number of nonzero blocks per bin.
            largest: the largest block amax.

        Returns:
            float32: max(rho * anchor, upper), by the formulas in Headroom. It is 0 if no block is nonzero. It is
            ``largest`` if there is no anchor, because the bin of upper / 1e6 and all higher bins are empty.
        """
        upper = float(largest) if self.upper_percentile >= 100 else _percentile(histogram, self.upper_percentile, 0)
        if not upper:
            return np.float32(0)
        first = bin_of(np.float32(upper / _IGNORED)) if np.float32(upper / _IGNORED) > 0 else 0
        anchor = _percentile(histogram, self.anchor_percentile, first)
        return np.float32(max(self.rho * anchor, upper)) if anchor else np.float32(largest)


def _percentile(histogram: npt.NDArray[np.int64], percentile: float, first: int) -> float:
    """Return a percentile of the block amaxes: the amax at the (logarithmic) center of the first bin that reaches
    it.
    """
    counts = histogram.astype(np.float32).astype(np.float64)
    counts[:first] = 0
    sums = np.cumsum(counts).astype(np.float32)
    if sums[-1] <= 0:
        return 0.0
    target = np.float32(percentile / 100.0) * sums[-1]
    found = min(int(np.searchsorted(sums, target)), BINS - 1)
    return float(2.0 ** (_LOW + (found + 0.5) / BINS * (_HIGH - _LOW)))


@explains_calls
@ieee("input_scale")
def input_scale(amax: Any) -> np.float32:
    """Return the input scale that multiplies on decode, as Model-Optimizer stores it: ``amax / (6 * 448)``.

    Args:
        amax: the largest magnitude of the layer's inputs, a number that float32 represents.

    Returns:
        float32.

    Raises:
        TypeError: amax is not a real number.
        ValueError: amax is negative.

    Numerics:
        One division in float32, rounded to nearest even. An amax of 0 gives 0, which no engine can use. NaN gives NaN,
        and infinity gives infinity.

    Exact:
        Equals Model-Optimizer 0.47 with PyTorch on a CPU. On CUDA, PyTorch multiplies by the rounded reciprocal of
        2688, so the last bit may differ there.

    Source:
        Model-Optimizer 0.47, modelopt/torch/quantization/qtensor/nvfp4_tensor.py, get_activation_scaling_factor.

    Examples:
        >>> from fp4kit.calibration import input_scale
        >>> input_scale(1344.0)
        np.float32(0.5)
    """
    return np.float32(_checked("input_scale", amax) / np.float32(NVFP4.max))


@explains_calls
@ieee("input_global_scale")
def input_global_scale(amax: Any) -> np.float32:
    """Return the input scale that divides on decode, as compressed-tensors stores it: ``448 * 6 * (1 / amax)``.

    Args:
        amax: the largest magnitude of the layer's inputs, a number that float32 represents.

    Returns:
        float32.

    Raises:
        TypeError: amax is not a real number.
        ValueError: amax is negative.

    Numerics:
        The reciprocal and then the product are rounded to float32, to nearest even. An amax below the smallest normal
        number is replaced by that number. A result that overflows, or that is NaN, becomes 1. So an amax of 0 or NaN
        gives 1, and infinity gives 0.

    Exact:
        Equals compressed-tensors 0.20 for a float32 amax. For a bfloat16 amax, llm-compressor divides in bfloat16.

    Source:
        compressed-tensors 0.20, compressed_tensors/quantization/utils/helpers.py, generate_gparam. PyTorch computes a
        number divided by a tensor with a reciprocal.

    Examples:
        >>> from fp4kit.calibration import input_global_scale
        >>> input_global_scale(1344.0)
        np.float32(2.0)
    """
    largest = np.maximum(_checked("input_global_scale", amax), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        scale = np.float32(np.float32(NVFP4.max) * (np.float32(1) / largest))
    return scale if np.isfinite(scale) else np.float32(1)


def _checked(op: str, amax: Any) -> np.float32:
    """Return an amax as float32."""
    found = as_float32(op, "amax", amax, "needs a number")
    if found < 0:
        raise ValueError(f"{op}: amax is {found}; needs a number >= 0")
    return found


_STACK = re.compile(r"(?P<parent>(?:.+\.)?experts)\.(?P<leaf>(?![0-9]+\.)[^.].*)")
_EXPERT = re.compile(r"(?P<parent>(?:.+\.)?experts)\.(?P<number>[0-9]{1,7})\.(?P<leaf>.+)")


class Expert(NamedTuple):
    """One expert's layer, described by the two parts of its name.

    stack: the name that the layer has in all experts, without the number: "mlp.experts.up_proj".
    number: the number of the expert, from 0.
    """

    stack: str
    number: int


def expert_of(layer: str) -> Expert | None:
    """Return the stack and the number of the expert that a layer name contains, or None if it contains none."""
    match = _EXPERT.fullmatch(layer)
    return None if match is None else Expert(f"{match['parent']}.{match['leaf']}", int(match["number"]))


def expert_name(op: str, stack: str, number: int) -> str:
    """Return the layer name of one expert: ("mlp.experts.up_proj", 3) gives "mlp.experts.3.up_proj"."""
    match = None if expert_of(stack) else _STACK.fullmatch(stack)
    if match is None:
        raise ValueError(
            f"{op}: {stack!r:.200} is given with an expert; needs the name of a layer of all experts, such as"
            " 'model.layers.0.mlp.experts.up_proj'"
        )
    return f"{match['parent']}.{number}.{match['leaf']}"


LARGEST = np.finfo(np.float32).max.view(np.uint32)  # the bit pattern of the largest finite float32


@dataclass
class Totals:
    """The totals that were collected for the experts of a layer. A layer without experts counts as one expert.

    Attributes:
        columns: K, the number of inputs per token.
        amax: uint32 (experts,), the bit patterns of the largest inputs; 0 if there was no nonzero input.
        tokens: int64 (experts,), the number of inputs (rows).
        histogram: int64 (experts, 512), the number of nonzero blocks per bin of block amaxes; None to count no blocks.
    """

    columns: int
    amax: Any
    tokens: Any
    histogram: Any

    @classmethod
    def empty(cls, columns: int, experts: int, histogram: bool, xp: Any = np) -> Totals:
        """Return totals of zero, to which inputs can be added."""
        counts = xp.zeros((experts, BINS), xp.int64) if histogram else None
        return cls(columns, xp.zeros(experts, xp.uint32), xp.zeros(experts, xp.int64), counts)

    def include(self, blocks: Any, expert: Any) -> None:
        """Add the inputs of one call of the layer to these totals, in place."""
        xp, tokens = cupy() if on_device(blocks) else np, len(blocks)
        if not tokens:
            return
        per_token = blocks.max(axis=1)
        if isinstance(expert, int):
            self.amax[expert] = xp.maximum(self.amax[expert], per_token.max())
            self.tokens[expert] += tokens
        else:
            xp.maximum.at(self.amax, expert, per_token)
            self.tokens += xp.bincount(expert, minlength=len(self.tokens))
        if self.histogram is None:
            return
        bins = xp.searchsorted(xp.asarray(edges()), blocks.reshape(-1), side="right").reshape(blocks.shape)
        if isinstance(expert, int):
            self.histogram[expert] += xp.bincount(bins[blocks > 0], minlength=BINS)
        else:
            places = (expert[:, None] * BINS + bins)[blocks > 0]
            self.histogram += xp.bincount(places, minlength=self.histogram.size).reshape(self.histogram.shape)

    def add(self, other: Totals) -> None:
        """Add the totals of further inputs to these totals, in place: keep the larger amaxes, and sum the counts."""
        # If these totals have a histogram, ``other`` must have one.
        np.maximum(self.amax, other.amax, out=self.amax)
        self.tokens += other.tokens
        if self.histogram is not None:
            self.histogram += other.histogram

    def on_host(self) -> Totals:
        """Return a copy of these totals in host memory, as NumPy arrays."""
        parts = (self.amax, self.tokens, self.histogram)
        return Totals(self.columns, *(None if part is None else np.array(to_host(part)) for part in parts))

    def expert(self, i: int) -> Totals:
        """Return the totals of one expert, which share the memory of these."""
        parts = (self.amax, self.tokens, self.histogram)
        return Totals(self.columns, *(None if part is None else part[i : i + 1] for part in parts))


ENTRY, VERSION = "fp4kit_activations", 1
_DTYPES = {"amax": np.float32, "tokens": np.int64, "columns": np.int64, "bins": np.int32, "counts": np.int64}


def encode(entries: Mapping[str, Totals], histogram: bool) -> bytes:
    """Return the bytes of a safetensors file with entries of one expert each, from which ``decode`` returns them."""
    found = list(entries.values())
    counted = [entry.histogram for entry in found if entry.histogram is not None]
    table = np.array(counted, np.int64).reshape(-1, BINS)
    bins = np.argwhere(table)
    arrays: dict[str, npt.NDArray[Any]] = {
        "amax": np.array([entry.amax[0] for entry in found], np.uint32).view(np.float32),
        "tokens": np.array([entry.tokens[0] for entry in found], np.int64),
        "columns": np.array([entry.columns for entry in found], np.int64),
        "bins": np.ascontiguousarray(bins.astype(np.int32)),
        "counts": table[tuple(bins.T)],
    }
    facts = {"version": VERSION, "layers": list(entries), "histogram": histogram}
    return save(arrays, {ENTRY: json.dumps(facts, sort_keys=True)})


@ieee("Collector")
def decode(data: bytes, label: str) -> tuple[dict[str, Totals], bool]:
    """Return ({layer: its totals}, whether they have histograms) from the bytes of a file."""
    text = None
    try:
        arrays = load(data)
        header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")], label)
        text = (header.get("__metadata__") or {}).get(ENTRY)
    except SafetensorError as error:
        raise unusable(label, error) from None
    except KeyError:  # the file has a dtype that NumPy lacks
        pass
    if text is None:
        raise ValueError(f"{label}: holds no activations; needs a file that fp4kit.calibration.Collector.save wrote")
    facts = parse_object(text.encode(), f"{label}: metadata {ENTRY}")
    if facts.get("version") != VERSION:
        raise ValueError(f"{label}: has version {facts.get('version')!r}; needs version {VERSION}; update fp4kit")
    fault = _fault(arrays, facts)
    if fault:
        raise ValueError(f"{label}: is damaged: {fault}; collect again, or take another copy of the file")
    table = np.zeros((len(facts["layers"]), BINS), np.int64)
    table[tuple(arrays["bins"].T)] = arrays["counts"]
    amax, histogram = arrays["amax"].view(np.uint32), table if facts["histogram"] else None
    columns = arrays["columns"].tolist()
    return {
        name: Totals(columns[i], amax, arrays["tokens"], histogram).expert(i) for i, name in enumerate(facts["layers"])
    }, facts["histogram"]


def _fault(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> str:
    """Return a description of the first fault in the contents of a file, or "" if there is none."""
    names = facts.get("layers")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return "its layers have no names"
    if sorted(set(names)) != names or not isinstance(facts.get("histogram"), bool):
        return "its layers are not sorted, or occur twice"
    shapes = {key: array.shape for key, array in arrays.items()}
    n, m = len(names), len(arrays.get("counts", ()))
    if shapes != {"amax": (n,), "tokens": (n,), "columns": (n,), "bins": (m, 2), "counts": (m,)}:
        return f"its tensors have the shapes {shapes}"
    if any(array.dtype != _DTYPES[key] for key, array in arrays.items()):
        return "its tensors have other dtypes"
    return str(next(filter(None, _wrong_values(arrays, facts["histogram"])), ""))


def _wrong_values(arrays: Mapping[str, npt.NDArray[Any]], histogram: bool) -> Iterator[Any]:
    """Yield a description of each impossible value in the arrays of a file, and False or "" for other rules."""
    amax, tokens, bins = arrays["amax"], arrays["tokens"], arrays["bins"]
    yield not (np.isfinite(amax) & ~np.signbit(amax)).all() and "an amax is negative, NaN or infinite"
    impossible = (tokens < 0).any() or (arrays["columns"] < 1).any() or ((amax > 0) & (tokens == 0)).any()
    yield impossible and "a number of tokens or columns is impossible"
    yield not histogram and len(bins) > 0 and "it has histogram entries, and says that it has none"
    inside = (bins >= 0).all() and (bins < np.array([len(amax), BINS])).all()
    once = len(np.unique(bins, axis=0)) == len(bins)
    yield not (inside and once and (arrays["counts"] > 0).all()) and "a histogram entry is out of range"
    with_blocks = np.isin(np.arange(len(amax)), bins[:, 0])
    yield histogram and (with_blocks != (amax > 0)).any() and "its histograms do not belong to its amaxes"


AmaxRule = Literal["max", "headroom"]
Unseen = Literal["error", "layer", "none"]
RULES, UNSEEN = get_args(AmaxRule), get_args(Unseen)
_RECIPE = "nvfp4-modelopt"  # the recipe whose block amaxes are collected; they propagate NaN
_Key = tuple[str, int | None]  # (layer, number of experts); None for a layer without experts, or for one expert


@explains_class
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
        is_int = isinstance(expert, (int, np.integer)) and not isinstance(expert, bool)
        given = {} if expert is None or is_int else {"expert": expert}
        x, *ids = import_arrays(op, x=x.detach() if getattr(x, "requires_grad", False) else x, **given)
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
        # Without `experts`, any number from 0 on is allowed.
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
        return {name: int(entry.tokens[0]) for name, entry in self._entries("tokens").items()}

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
        largest = {name: (entry, entry.amax.view(np.float32)[0]) for name, entry in self._entries("amaxes").items()}
        if chosen is None:
            return {name: amax for name, (_, amax) in largest.items()}
        if not self.histogram:
            raise ValueError(
                "amaxes: the rule headroom needs histograms, which were not collected; collect with"
                " Collector(histogram=True), or use the rule max"
            )
        return {name: chosen.amax(entry.histogram[0], amax) for name, (entry, amax) in largest.items()}

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
        members = as_entries("merge", "collectors", collectors, "Collectors")
        for member in members:
            if not isinstance(member, Collector):
                raise TypeError(f"merge: collectors has {a_type(member)}; needs Collectors")
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
            path: the file, such as "activations.safetensors". An existing file is replaced. Equal contents give equal
                bytes.

        Raises:
            TypeError: if path is not a path.
            ValueError: if path does not end with the name of a file, or has the suffix of another format, such as .npz.
            ValueError: if an input on a GPU was NaN or infinite.
            ValueError: if an expert was collected both under its own name and with ``expert=``, with different numbers
                of columns.
            OSError: if the file cannot be written.
        """
        target = as_safetensors_path("save", path)
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
        return cls.merge([cls._decoded(path.read_bytes(), f"load: {path}") for path in files])

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
            xp = np if device is None else cupy()
            places[device] = Totals.empty(self._columns[key[0]], experts, self.histogram, xp)
        return places[device]

    def _entries(self, op: str) -> dict[str, Totals]:
        """Return {layer: its totals} of everything collected on all devices, sorted by name, one expert each."""
        found: dict[str, Totals] = {}
        for (name, experts), places in self._totals.items():
            whole = Totals.empty(self._columns[name], experts or 1, self.histogram)
            for totals in places.values():
                whole.add(totals.on_host())
            if (whole.amax > LARGEST).any():
                raise ValueError(f"{op}: {name}: its inputs hold NaN or infinity; needs finite inputs")
            for i in range(experts or 1):
                layer = name if experts is None else expert_name(op, name, i)
                one = whole.expert(i)
                known = found.setdefault(layer, one)
                if known.columns != one.columns:
                    raise ValueError(
                        f"{op}: {layer} has {known.columns} and {one.columns} columns; needs one number of columns per"
                        " layer"
                    )
                if known is not one:
                    known.add(one)
        return dict(sorted(found.items()))

    def _include(self, entries: Mapping[str, Totals], op: str) -> None:
        """Add the entries of another collector or of a saved file to this collector, to its totals on the host."""
        for name, entry in entries.items():
            self._on(self._key(op, name, entry.columns, None), entry.amax).add(entry)


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
        fill = " For experts, unseen='layer' takes the largest amax of the layer's experts."
        more = fill if unseen == "error" and any(map(expert_of, missing)) else ""
        verb = "s have" if len(missing) > 1 else " has"
        raise ValueError(
            f"{op}: {len(missing)} layer{verb} seen no input other than zero: {listed(missing)}; run more tokens"
            f" through the model.{more}"
        )
    return found


def rule_of(op: str, rule: Any) -> Headroom | None:
    """Return the Headroom that a rule stands for, or None for the rule "max"."""
    if isinstance(rule, Headroom):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{op}: rule is {rule!r:.60}; needs {' or '.join(map(repr, RULES))}, or a Headroom")
    return None if rule == "max" else Headroom()


def _block_amaxes(op: str, x: Any) -> Any:
    """Return the amax of each block of 16 inputs, as the bit patterns of float32 numbers: uint32 (tokens, blocks)."""
    try:
        blocks = amax(pad(x, BLOCK), _RECIPE)
    except TypeError as error:
        raise TypeError(str(error).replace("amax", op, 1)) from None
    bits = blocks.reshape(-1, blocks.shape[-1]).view(np.uint32)
    # On a GPU, this check would wait for the kernel; _entries rejects NaN and infinities there.
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
