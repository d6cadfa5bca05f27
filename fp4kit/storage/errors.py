"""CheckpointError, and helpers that show names from files in error messages."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Report a checkpoint, request or destination that cannot be used: what came, what is needed, what to do."""


def shown(name: str) -> str:
    """Return ``name`` with unprintable characters escaped.

    Names in a checkpoint are untrusted data and may contain terminal control codes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def listed(names: list[str], most: int = 3) -> str:
    """Return the first ``most`` names as text for a message, followed by the number of names left out."""
    head = ", ".join(shown(name) for name in names[:most])
    return head if len(names) <= most else f"{head} and {len(names) - most} more"
