"""Files that are read into the page cache before a run needs them: which pieces, how far, and that no thread outlives it."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import until

from fp4kit.checkpoint import ahead
from fp4kit.storage.safetensors_file import SafetensorsFile


def threads_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that a module begins from now on."""
    begun: list[threading.Thread] = []

    class Noted(threading.Thread):
        def start(self) -> None:
            begun.append(self)
            super().start()

    monkeypatch.setattr(module, "Thread", Noted)
    return begun


@pytest.mark.parametrize("piece", [64, 256])
@pytest.mark.parametrize(("stop_at", "read"), [(None, "aaaabbbbccc"), ("b", "aaaab"), ("a", "a")])
def test_files_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str | None, read: str, piece: int
) -> None:
    """Piece by piece in their order until it is stopped; what is not there, or is no file, is passed over in silence."""
    monkeypatch.setattr(ahead, "PIECE", piece)
    monkeypatch.setattr(ahead, "STEP", 64)
    monkeypatch.setattr(ahead, "READERS", 1)
    stopped, found, bytes_of = threading.Event(), [], {"a": 200, "b": 256, "c": 129}

    class Watched(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            path, start = Path(os.readlink(f"/proc/self/fd/{self.fileno()}")), self.tell()
            if path.name == stop_at:
                stopped.set()
            count = super().readinto(buffer)
            if count:
                found.append((path.name, start, count))
            return count

    for name, size in bytes_of.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(ahead, "open", lambda descriptor, mode, buffering: Watched(descriptor), raising=False)
    monkeypatch.setattr(ahead, "Event", lambda: stopped)
    threads = threads_of(ahead, monkeypatch)
    files = [SafetensorsFile(tmp_path / name, name, bytes_of.get(name, 70), (), {}) for name in ("a", "none", "folder", "b", "c")]
    with ahead.ReadingAhead(files, 1, print):
        until(lambda: not any(thread.is_alive() for thread in threads))
    assert "".join(name for name, _, _ in found) == read
    assert all(count == min(64, bytes_of[name] - start) for name, start, count in found)


def test_reading_ahead_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece once, whichever thread takes it; no thread lives longer than it is waited for."""
    monkeypatch.setattr(ahead, "PIECE", 64)
    monkeypatch.setattr(ahead, "STEP", 64)
    taken, lock = [], threading.Lock()

    def read(descriptor: int, mode: str, buffering: int) -> io.FileIO:
        with lock:
            taken.append(descriptor)
        return io.FileIO(descriptor)

    (tmp_path / "a").write_bytes(bytes(64 * 5000))
    monkeypatch.setattr(ahead, "open", read, raising=False)
    file, threads = SafetensorsFile(tmp_path / "a", "a", 64 * 5000, (), {}), threads_of(ahead, monkeypatch)
    with ahead.ReadingAhead([file], 1, print):
        until(lambda: not any(thread.is_alive() for thread in threads))
    assert len(taken) == 5000
    with ahead.ReadingAhead([file], 1, print):
        pass
    assert len(threads) == 2 * ahead.READERS and not any(thread.is_alive() for thread in threads)


def test_no_further_than_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run comes on, by the share of what it reads; what it has passed is not read any more."""
    monkeypatch.setattr(ahead, "PIECE", 64)
    monkeypatch.setattr(ahead, "STEP", 64)
    monkeypatch.setattr(ahead, "READERS", 1)
    monkeypatch.setattr(ahead.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 64, "SC_PHYS_PAGES": 10 * ahead.PART}[name])
    begun: list[int] = []

    class Watched(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            begun.append(self.tell())
            return super().readinto(buffer)

    (tmp_path / "a").write_bytes(bytes(6400))
    monkeypatch.setattr(ahead, "open", lambda descriptor, mode, buffering: Watched(descriptor), raising=False)
    told: list[int] = []
    with ahead.ReadingAhead([SafetensorsFile(tmp_path / "a", "a", 6400, (), {})], 2 * 6400, told.append) as tick:
        until(lambda: len(begun) == 11)  # places 0 to 640
        tick(2 * 640)
        until(lambda: len(begun) == 21)
        tick(2 * 3200)  # the run is at 3840
        until(lambda: begun[-1] == 4480)
        assert told == [1280, 6400]
    assert begun == [*range(0, 1281, 64), *range(3840, 4481, 64)]
