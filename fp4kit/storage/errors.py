"""The one error of files and checkpoints, and how names from files are shown in messages."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint, request or destination that cannot be used. Its text says what came, what is needed and how."""


def shown(name: str) -> str:
    """Return ``name`` with unprintable characters escaped; names in checkpoints are data, terminal codes too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def listed(names: list[str], most: int = 3) -> str:
    """Return the first few of ``names`` for a message, and how many more there are."""
    head = ", ".join(shown(name) for name in names[:most])
    return head if len(names) <= most else f"{head} and {len(names) - most} more"
