"""Convert and compare values of amax states: float32 arrays on the host or a GPU, compared by their bits.

The maximum of two amaxes is the maximum of their bit patterns. For nonnegative values this is the order of the values;
infinity, NaN and negative values have larger bit patterns, in this order. So a NaN or a negative value, once collected,
stays until a check on the host finds it. Values are moved and compared as bits only, because CuPy's float arithmetic
flushes subnormals to zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.arrays.imports import import_arrays
from fp4kit.call.parse import check_float
from fp4kit.training.amax_names import AmaxName


def _xp(value: Any) -> Any:
    """Return the library that an array belongs to: the module numpy or cupy."""
    return imports.cupy() if imports.on_device(value) else np


@ieee("amax")
def import_amax(op: str, name: AmaxName, amax: Any) -> Any:
    """Return a float32 copy of ``amax`` on its device, as a NumPy or CuPy array of its shape."""
    (value,) = import_arrays(f"{op}: {name.key()}", amax=amax)
    check_float(f"{op}: {name.key()}", value, "amax")
    xp = _xp(value)
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
    if (
        old.shape != value.shape
        or type(old) is not type(value)
        or getattr(old, "device", 0) != getattr(value, "device", 0)
    ):
        raise ValueError(
            f"{op}: {name.key()} is {_where(value)}, but was {_where(old)} before; needs one shape and one device in "
            "all calls"
        )
    xp = _xp(value)
    named[name] = xp.asarray(xp.maximum(old.view(xp.uint32), value.view(xp.uint32))).view(xp.float32)


def _where(value: Any) -> str:
    """Return the shape and device of an amax as text, for an error message."""
    return f"{value.shape} on {value.device if imports.on_device(value) else 'the CPU'}"


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
