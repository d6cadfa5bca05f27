"""Recognize layers whose nibbles are swapped, by the magnitudes of their columns. The unquantized source is not needed.
A profile is the logarithm of each column's magnitude, shifted and scaled to mean 0 and standard deviation 1.

Swapped nibbles exchange neighboring columns within their block, so codes still fit their scales. But in trained models,
the sizes of a layer's columns are correlated with tensors that nibbles do not touch. These tensors are the weight of
the norm before the layer, and the columns of unquantized layers that read the same vector. If such a correlation exists
only after neighboring columns are exchanged, the nibbles are swapped. Random weights have no such correlation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight, located
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorEntry

_Floats = npt.NDArray[np.float64]
_ROWS = 128  # number of a layer's first rows from which the sizes of its columns are computed
_MOST_LAYERS, _MOST_REFERENCES = 512, 64  # how many layers, and how many references, are read per number of columns
# A correlation over K columns counts if it is above 0.4 and above 6 sigma, with sigma = 1 / sqrt(K). Profiles of random
# weights stay below 6 sigma.
_LEAST, _SIGMAS = 0.4, 6.0
_GAIN = 0.25  # the correlation must be larger by this, and by 6 sigma, than that of the columns as stored


SWAPPED_NIBBLES = (
    "neighboring columns seem to be exchanged, because only then their sizes follow those of norms or of unquantized"
    " layers; swapped nibbles look so; run fp4kit identify with the unquantized source"
)


def swapped_layers(
    weights: Iterable[Weight], tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]]
) -> list[Weight]:
    """Return the layers whose nibbles seem to be swapped; [] if there are none."""
    weights = [*weights]
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.container is not None and weight.container.element.bits == 4 and len(weight.shape) == 2:
            layers[weight.shape[-1]].append(weight)
    found = []
    with Readers() as readers:
        for columns, own in layers.items():
            references = dict(_references(weights, tensors, columns, readers)) if columns >= _ROWS else {}
            examined = own[:_MOST_LAYERS] if references else []
            found += [weight for weight in examined if _is_swapped(_sizes(weight, readers), references.values())]
    return found


def _references(
    weights: Iterable[Weight],
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]],
    columns: int,
    readers: Readers,
) -> Iterator[tuple[str, _Floats]]:
    """Yield (name, profile) for tensors to compare columns with: norms and unquantized matrices."""
    norms = [
        located(file, entry)
        for name, (file, entry) in tensors.items()
        if "norm" in name.lower() and entry.shape == (columns,) and entry.dtype in FLOAT_DTYPES
    ]
    plain = [w for w in weights if w.dtype in FLOAT_DTYPES and len(w.shape) == 2 and w.shape[-1] == columns]
    for place in norms[:_MOST_REFERENCES]:
        yield from _if_varied(place.entry.name, np.abs(readers.array(place).astype(np.float64)))
    for weight in plain[:_MOST_REFERENCES]:
        yield from _if_varied(weight.tensor, _sizes(weight, readers))


def _if_varied(name: str, sizes: _Floats) -> Iterator[tuple[str, _Floats]]:
    """Yield (name, profile) once, or nothing if the columns do not vary enough to tell their order."""
    usable = np.isfinite(sizes) & (sizes > 0)
    if 2 * np.count_nonzero(usable) > sizes.size:
        profile = np.where(usable, np.log(np.where(usable, sizes, 1)), 0)
        profile[usable] -= profile[usable].mean()
        if profile.std() > 1e-3:
            yield name, profile / profile.std()


def _sizes(weight: Weight, readers: Readers) -> _Floats:
    """Return the root mean square of each column over the first rows (at most 128) of a weight: float64 (K,)."""
    count = min(_ROWS, weight.shape[-2])
    slab = next(slabs(readers, weight, 0, (0, count), max_bytes=1 << 40))
    with np.errstate(all="ignore"):
        values = values_of(weight, slab._replace(column_scale=None)).astype(np.float64)
        sizes: _Floats = np.sqrt(np.square(values).mean(0))
    return sizes


def _is_swapped(sizes: _Floats, references: Iterable[_Floats]) -> bool:
    """Return whether a layer's columns match a reference only if neighboring columns are exchanged."""
    # The correlation with the best reference must be large if neighbors are exchanged, and clearly larger than without
    # the exchange (see _LEAST, _GAIN and _SIGMAS).
    profile = next((found for _, found in _if_varied("", sizes)), None)
    if profile is None:
        return False
    exchanged = profile.reshape(-1, 2)[:, ::-1].reshape(-1)
    others = [*references]
    stored, swapped = (max(abs(float((own * one).mean())) for one in others) for own in (profile, exchanged))
    noise = _SIGMAS / np.sqrt(sizes.size)
    return swapped >= max(_LEAST, noise) and swapped >= stored + max(_GAIN, noise)
