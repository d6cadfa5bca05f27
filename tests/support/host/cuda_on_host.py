"""Simulate cupy.cuda on the CPU: two devices with few multiprocessors, streams and memory pools.

See cupy_on_host.py for the arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

from host.device_memory import (
    Memory,
    MemoryPointer,
    MemoryPool,
    Stream,
    alloc,
    is_capturing,
    on_stream,
    using_allocator,
    wait,
)

from fp4kit.cuda import launch

DEVICES = 2
MULTIPROCESSORS = 2  # few, so that the grid is smaller than the work


class Device:
    """A stand-in for cupy.cuda.Device: one of the two simulated devices."""

    _current: ClassVar[list[int]] = [0]
    capability: ClassVar[tuple[int, int]] = (9, 0)  # the compute capability of both devices; see of_capability

    def __init__(self, device: int | None = None) -> None:
        self.id = self._current[-1] if device is None else int(device)
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __enter__(self) -> Device:
        self._current.append(self.id)
        return self

    def __exit__(self, *exception: object) -> None:
        self._current.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    @property
    def compute_capability(self) -> str:
        """Return the compute capability, such as "90"."""
        return "".join(map(str, self.capability))

    def synchronize(self) -> None:
        """Do nothing, because all work is done already."""
        wait()


class CUDARuntimeError(RuntimeError):
    """A stand-in for cupy.cuda.runtime.CUDARuntimeError."""


class CUDADriverError(RuntimeError):
    """A stand-in for cupy.cuda.driver.CUDADriverError."""


def _properties(device: int) -> dict[str, Any]:
    major, minor = Device.capability
    count = {"multiProcessorCount": MULTIPROCESSORS, "major": major, "minor": minor}
    return count | {"name": b"the host", "device": device}


@contextmanager
def of_capability(major: int, minor: int) -> Iterator[None]:
    """Give the simulated devices another compute capability while the context lasts."""
    caches = (launch.architecture_of, launch.prepared, launch.function_of)
    with patch.object(Device, "capability", (major, minor)):
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


runtime = SimpleNamespace(
    getDeviceCount=lambda: DEVICES,
    getDevice=lambda: Device().id,
    getDeviceProperties=_properties,
    memGetInfo=lambda: (1 << 30, 1 << 30),
    memsetAsync=lambda at, value, size, stream: on_stream(lambda: ctypes.memset(at, value, size)),
    streamIsCapturing=lambda stream: is_capturing(),
    CUDARuntimeError=CUDARuntimeError,
)
cuda = SimpleNamespace(
    Device=Device,
    Event=lambda disable_timing: object(),
    Memory=Memory,
    MemoryPointer=MemoryPointer,
    MemoryPool=MemoryPool,
    Stream=Stream,
    driver=SimpleNamespace(CUDADriverError=CUDADriverError),
    alloc=lambda size: alloc(size, Device().id),
    get_current_stream=Stream,
    runtime=runtime,
    using_allocator=using_allocator,
)
