"""CheckpointError and its messages, strict JSON, and files that appear under their name when they are complete."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The error that is raised if a checkpoint, a request or a destination is unusable.

    The message says what came, what is needed and what to do.
    """


def shown(name: str) -> str:
    """Return ``name`` with each unprintable character replaced by a backslash escape, such as ``\x1b``."""
    # Messages show names in this way, because names in a checkpoint are untrusted and may contain terminal control
    # codes.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


# {first bytes of a file: what the file is, and what to do}
_OTHER_FILES = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the file; run git lfs pull where it was cloned",
    b"<!doctype html": "it is a web page, not the file; download it with hf download",
    b"<html": "it is a web page, not the file; download it with hf download",
    b"pk\x03\x04": "it is a file of torch.save; load it in PyTorch and write safetensors with model.save_pretrained",
    b"gguf": "it is a GGUF file; give it a name that ends in .gguf",
}


def other_file(path: Path) -> str | None:
    """Recognize a file of a wrong kind by its first bytes."""
    try:
        with path.open("rb") as stream:
            beginning = stream.read(64).lower()
    except OSError:
        return None
    return next((text for start, text in _OTHER_FILES.items() if beginning.startswith(start)), None)


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return up to ``limit`` names as text for a message, such as "a, b, c and 2 more"; "" if there are no names."""
    shown_names = ", ".join(shown(name) for name in names[:limit])
    return shown_names if len(names) <= limit else f"{shown_names} and {len(names) - limit:,} more"


MAX_BYTES = 256 << 20  # far above real files: the largest published checkpoint index is below 20 MB


def parse_object(text: bytes, label: str) -> dict[str, Any]:
    """Return the JSON object in ``text``. Reject a key that occurs twice in one object."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(pairs)) < len(pairs):
            counts = Counter(key for key, _ in pairs)  # in the order of first occurrence
            twice = next(key for key, count in counts.items() if count > 1)
            raise CheckpointError(f"{label}: the key {shown(twice)!r} occurs twice; keep one of them")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: not valid JSON ({shown(str(error))}); download or copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: holds a JSON {type(value).__name__}; an object is needed")
    return value


def load_object(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in the file ``path``."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(f"{label}: {size} bytes; at most {MAX_BYTES} bytes are read from a JSON file")
    text = path.read_bytes()
    other = None if text.lstrip()[:1] == b"{" else other_file(path)
    if other is not None:
        raise CheckpointError(f"{label}: not a JSON file: {other}")
    return parse_object(text, label)


def dump_object(value: dict[str, Any], indent: int = 2) -> bytes:
    """Return ``value`` as JSON bytes in ASCII that end with a newline."""
    return (json.dumps(value, indent=indent) + "\n").encode("ascii")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, to which the caller writes the new file."""
    # The caller flushes the content to the disk if it must survive a crash.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk. Raise FileExistsError if a file or link exists at ``path``."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory (names of new, renamed and removed files) to disk, so they survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
