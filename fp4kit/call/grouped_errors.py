"""Call a function for each tensor of a group, so that an error names the tensor that caused it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_ERRORS = (TypeError, ValueError, NotImplementedError)
_PLURALS = {"x": "xs", "grad": "grads"}
_ARGUMENT = re.compile(r"(x|grad|tensor_amax|block_amax|amax)\b")


def each(op: str, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Call a function once per tensor of a group: return [function(*entries) for entries in zip(*columns)]."""
    results: list[Any] = []
    try:
        for entries in zip(*columns, strict=True):
            results.append(function(*entries))
    except _ERRORS as error:
        raise type(error)(numbered(op, len(results), str(error))) from error
    return results


def numbered(op: str, i: int, text: str) -> str:
    """Return the error message of a grouped operation op, made from `text`, the message of a single call for tensor
    i.
    """
    text = re.sub(r"^\w+: ", "", text)  # remove the name of the single function
    argument = _ARGUMENT.match(text)
    if argument is None:
        return f"{op}: xs[{i}]: {text}"
    name = argument.group()
    return f"{op}: {_PLURALS.get(name, name)}[{i}]{text[len(name) :]}"
