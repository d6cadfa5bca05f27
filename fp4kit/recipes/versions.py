"""The versions of a producer that a recipe is known to equal."""

from __future__ import annotations

from typing import Any, NamedTuple


class Versions(NamedTuple):
    """The oldest version of a producer known to give a recipe's bits, and the newest with which the recipe was checked.

    A version is what its producer calls it: a release ("0.32.4"), a development version ("0.19 dev") or a commit
    ("d0067d0").

    >>> str(Versions("0.32.2", "0.32.4")), str(Versions("d0067d0", "d0067d0"))
    ('0.32.2 to 0.32.4', 'd0067d0')
    """

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def as_versions(id: object, versions: Any) -> Versions | None:
    """Return versions as Versions; None for None. Raises TypeError unless they are two strings, ValueError for an empty
    one.
    """
    if versions is None:
        return None
    is_pair = isinstance(versions, (tuple, list)) and len(versions) == 2
    if not is_pair or not all(isinstance(version, str) for version in versions):
        raise TypeError(f"Recipe {id}: versions is {versions!r}; needs (first, last checked), two str, or None")
    if not all(versions):
        raise ValueError(f"Recipe {id}: versions is {versions!r}; needs the name of a version twice, or None")
    return Versions(*versions)
