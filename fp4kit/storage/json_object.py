"""Read JSON objects strictly: bounded size, UTF-8, an object at the top level, no duplicate key."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fp4kit.storage.errors import CheckpointError, other_file, shown

MAX_BYTES = 256 << 20  # far above real files: the largest published checkpoint index is below 20 MB


class _DuplicateKey(ValueError):
    """The error that is raised if an object in JSON text has a key twice. Its text is the key."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (key, value) pairs of a JSON object as a dict."""
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)  # in the order of first occurrence
        raise _DuplicateKey(next(key for key, count in counts.items() if count > 1))
    return result


def parse_object(text: bytes, label: str) -> dict[str, Any]:
    """Return the JSON object in ``text``."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except _DuplicateKey as error:
        raise CheckpointError(f"{label}: the key {shown(str(error))!r} occurs twice; keep one of them") from None
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
