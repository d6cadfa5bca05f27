"""The digest of the sources that the CPU engine is compiled from. setup.py runs this file by itself, so it imports
nothing of fp4kit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
SUFFIXES = (".cpp", ".h", ".inc")  # of files that are compiled, unlike README.md
RULES = Path(__file__).parent.parent / "cuda" / "kernels" / "rules"


def digest() -> str:
    """Return a digest of all sources. A library that was compiled from other sources is not used."""
    found = hashlib.sha256()
    for path in sorted([*(path for path in SOURCE.iterdir() if path.suffix in SUFFIXES), *RULES.glob("*.cuh")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:32]
