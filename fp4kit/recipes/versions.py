"""Define Versions: the range of a producer's versions that a recipe is known to equal."""

from __future__ import annotations

from typing import Any, NamedTuple


class Versions(NamedTuple):
    """The oldest version of a producer known to give a recipe's bits (first), and the newest that was checked (last).

    Each is named as the producer names it: a release ("0.32.4"), a development version ("0.19 dev") or a commit
    ("d0067d0").

    >>> str(Versions("0.32.2", "0.32.4")), str(Versions("d0067d0", "d0067d0"))
    ('0.32.2 to 0.32.4', 'd0067d0')
    """

    first: str
    last: str

    def __str__(self) -> str:
        """Return "first to last", or one version if both are equal."""
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def as_versions(id: object, versions: Any) -> Versions | None:
    """Return `versions`, the field Recipe.versions, in its standard form: None, or a Versions."""
    if versions is None:
        return None
    is_pair = isinstance(versions, (tuple, list)) and len(versions) == 2
    if not is_pair or not all(isinstance(version, str) for version in versions):
        raise TypeError(f"Recipe {id}: versions is {versions!r}; needs a pair of str (oldest, newest checked), or None")
    if not all(versions):
        raise ValueError(f"Recipe {id}: versions is {versions!r}; needs two nonempty strings, or None")
    return Versions(*versions)
