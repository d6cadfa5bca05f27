"""Compute the digest of the sources from which the CPU engine is compiled.

setup.py runs this file alone, so it must not import fp4kit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
SUFFIXES = (".cpp", ".h", ".inc")  # of the files in SOURCE that are compiled; README.md is not
RULES = Path(__file__).parent.parent / "cuda" / "kernels" / "rules"


def digest() -> str:
    """Return a digest of the names and contents of all sources, as 32 hexadecimal digits."""
    # The compiled library contains the digest of the sources that it was compiled from, so that fp4kit can reject a
    # stale library.
    found = hashlib.sha256()
    for path in sorted([*(path for path in SOURCE.iterdir() if path.suffix in SUFFIXES), *RULES.glob("*.cuh")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:32]
