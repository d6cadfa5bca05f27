"""CheckpointError, and helpers that show names from files in error messages."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Report a checkpoint, request or destination that cannot be used: what came, what is needed, what to do."""


def shown(name: str) -> str:
    """Return ``name`` with unprintable characters escaped.

    Names in a checkpoint are untrusted data and may contain terminal control codes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def listed(names: list[str], limit: int = 3) -> str:
    """Return the first ``limit`` names as text for a message, followed by the number of names left out."""
    shown_names = ", ".join(shown(name) for name in names[:limit])
    return shown_names if len(names) <= limit else f"{shown_names} and {len(names) - limit} more"
