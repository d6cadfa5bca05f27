"""Define CheckpointError, and helpers that show names from files in error messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


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
