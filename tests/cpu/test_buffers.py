"""Test that the memory of a freed large result is reused for a later result, and that memory in use never is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from inputs import BF16, ordinary

import fp4kit
from fp4kit.cpu import cached_calls, library
from fp4kit.cpu import library as native

pytestmark = pytest.mark.skipif(native.library().functions is None, reason="the compiled engine is not there")
F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)


@pytest.fixture(autouse=True)
def no_kept_buffers(monkeypatch):
    """Make fp4kit reuse buffers of any size, not only large ones. Start and end each test without a kept buffer."""
    monkeypatch.setattr(cached_calls, "MIN_BYTES", 1)
    cached_calls._kept.clear()
    yield
    cached_calls._kept.clear()


def address(a):
    return a.__array_interface__["data"][0]


def test_memory_of_a_freed_result_is_reused():
    first = cached_calls.reusable_empty((8, 4), F32)
    at = address(first)
    other = cached_calls.reusable_empty((8, 4), F32)
    assert address(other) != at and at % cached_calls.HUGE_PAGE == 0 and not cached_calls._kept
    del first
    third = cached_calls.reusable_empty((4, 4, 4), BF16)
    assert address(third) == at and third.shape == (4, 4, 4) and third.dtype == BF16 and third.flags.writeable
    third[...] = 1
    other[...] = 2
    assert (third == 1).all() and (other == 2).all()


HOLDERS = {
    "a view": lambda y: y[1:, ::2],
    "its base": lambda y: y.base,
    "a memoryview": memoryview,
    "DLPack": np.from_dlpack,
    "another dtype": lambda y: y.reshape(-1).view(np.uint8),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_of_a_live_result_is_not_reused(hold):
    first = cached_calls.reusable_empty((8, 4), F32)
    first[...] = 3
    held = hold(first)
    del first
    before = np.array(held)
    other = cached_calls.reusable_empty((8, 4), F32)
    other[...] = 5
    assert not cached_calls._kept and np.array(held).tobytes() == before.tobytes()
    del other, held
    assert len(cached_calls._kept) == 1


def test_one_buffer_is_kept_and_no_large_one():
    def kept_after(*rows):
        arrays = [cached_calls.reusable_empty((n, 16), F32) for n in rows]
        while arrays:
            arrays.pop()
        return [piece.nbytes for piece in cached_calls._kept]

    assert kept_after(16, 8, 4) == [16 * 64]  # only the buffer that was freed last is kept
    assert kept_after(9) == [16 * 64]
    assert kept_after(7) == [7 * 64]  # more than half of the buffer would have been unused
    assert cached_calls.reusable_empty((cached_calls.MAX_BYTES + 1,), U8).flags.owndata and kept_after() == [7 * 64]


def test_calls_of_many_threads(monkeypatch):
    """Results that many threads compute at once are right: no thread gets a buffer that another thread still uses."""
    monkeypatch.setattr(native, "ELEMENTS_PER_THREAD", 1 << 10)
    wrong = []

    def repeat(seed):
        x = ordinary(seed, (32, 128), BF16)
        with fp4kit.specification():
            expected = fp4kit.fake_quantize(x, "nvfp4-te")
        q = fp4kit.quantize(x, "nvfp4-te")
        for _ in range(150):
            y, z = fp4kit.dequantize(q), fp4kit.fake_quantize(x, "nvfp4-te")
            wrong.extend([seed] * (y.tobytes() != expected.tobytes() or z.tobytes() != expected.tobytes()))

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cached_calls._kept) == 1


def test_addresses_are_those_of_numpy():
    x = np.zeros((4, 6), BF16)
    views = (
        x,
        x[1:, 2:],
        x.T,
        x[::-1],
        x[:, ::-2],
        x[0, 0:1].reshape(()),
        x.view(np.uint8),
        np.broadcast_to(x[:1], (9, 6)),
    )
    for a in (*views, np.empty((0, 3), np.float32)):
        assert library.address(a) == a.ctypes.data
    assert library.address(None) is None


def test_addresses_where_arrays_are_otherwise(monkeypatch):
    monkeypatch.setattr(library.sys, "implementation", SimpleNamespace(name="another"))
    x = np.zeros(3, np.float32)[1:]
    assert library._reader()(x) == x.ctypes.data
