"""What the compiled engine was made from. setup.py runs this file by itself, so it imports nothing of fp4kit."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
RULES = Path(__file__).parent.parent / "cuda" / "kernels" / "rules"


def digest() -> str:
    """Of all sources: a library that was made from others is not used."""
    found = hashlib.sha256()
    for path in sorted([*SOURCE.iterdir(), *RULES.glob("*.cuh")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:32]
