"""Find the source layer from which a stored layer was made, if it does not have the name of the stored layer.

Layers are compared by the signs of a few values, which do not depend on the recipe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.layer_pairs import LayerSpec
from fp4kit.checkpoint.identify.match_layers import TurnedOrigin
from fp4kit.checkpoint.identify.read_layers import stored_layer
from fp4kit.checkpoint.model.slabs import Readers, values_of
from fp4kit.layouts import unpacked

_MOST_LAYERS = 64  # stored layers to look for
_MOST_ORIGINS = 4096  # layers of the source to compare with
_ROWS, _COLUMNS = 32, 64  # the first rows and columns that are compared; a multiple of the rows of a block
_AGREE = 0.97  # least share of nonzero codes that have the sign of the source


def other_places(unlike: Sequence[LayerSpec], every: Sequence[LayerSpec]) -> tuple[tuple[str, str], ...]:
    """Return (layer, layer of the source) for stored layers that were made from source layers of other names."""
    found: list[tuple[str, str]] = []
    with Readers() as readers:
        by_shape: dict[tuple[int, ...], list[tuple[str, npt.NDArray[np.float32]]]] = defaultdict(list)
        shapes = {spec.origin.shape for spec in unlike}
        for spec in [one for one in every if one.origin.shape in shapes][:_MOST_ORIGINS]:
            if not isinstance(spec.origin, TurnedOrigin):
                rows = spec.origin.slab(readers, slice(0, min(_ROWS, spec.origin.shape[0])))
                values = values_of(spec.origin.weight, rows)[:, :_COLUMNS].astype(np.float32)
                by_shape[spec.origin.shape].append((_origin_name(spec), np.where(np.signbit(values), -1, 1).ravel()))
        for spec in unlike[:_MOST_LAYERS]:
            signs, names = _stored_signs(spec, readers), [name for name, _ in by_shape[spec.origin.shape]]
            if signs is None or not names:
                continue
            likeness = np.stack([values for _, values in by_shape[spec.origin.shape]]) @ signs
            best = int(likeness.argmax())
            if likeness[best] >= (2 * _AGREE - 1) * np.count_nonzero(signs) > 0 and names[best] != _origin_name(spec):
                found.append((spec.name, names[best]))
    return tuple(found)


def _origin_name(spec: LayerSpec) -> str:
    """Return the name of the source layer of a spec, with its rows if it is a part of it."""
    origin = spec.origin
    name = origin.weight.name if origin.weight.experts == 1 else f"{origin.weight.name}[{origin.expert}]"
    first, end = origin.span
    return name if end - first == origin.weight.shape[-2] else f"{name} rows {first} to {end - 1}"


def _stored_signs(spec: LayerSpec, readers: Readers) -> npt.NDArray[np.float32] | None:
    """Return the signs of the first codes of a layer: -1, 0 or 1; None for shapes that cannot be compared."""
    if spec.origin.shape != spec.weight.shape[-2:]:
        return None
    layer = stored_layer(spec.weight, spec.expert, readers)
    if isinstance(layer, StoredLayer):
        element = layer.recipe.element
        codes = unpacked(np.ascontiguousarray(layer.codes[:_ROWS]), element.packing)[:, :_COLUMNS]
        signs = np.where(element.values[codes] == 0, 0, np.where(codes & element.sign_bit, -1, 1))
    else:
        codes = layer.codes[:_ROWS, :_COLUMNS]
        signs = np.where(codes & 0x7F == 0, 0, np.where(codes & 0x80, -1, 1))
    return np.ascontiguousarray(signs.ravel(), np.float32)
