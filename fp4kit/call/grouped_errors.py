"""Calls for each of N tensors, whose errors say which one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_ERRORS = (TypeError, ValueError, NotImplementedError)
_PLURALS = {"x": "xs", "grad": "grads"}
_ARGUMENT = re.compile(r"(x|grad|tensor_amax|block_amax|amax)\b")


def each(op: str, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """[function(*entries) for each], for columns of one length; an error begins with op, and names the argument by its
    number.

    "quantize: tensor_amax holds ..." of the second tensor becomes "quantize_grouped: tensor_amax[1] holds ...".
    """
    results: list[Any] = []
    try:
        for entries in zip(*columns, strict=True):
            results.append(function(*entries))
    except _ERRORS as error:
        raise type(error)(numbered(op, len(results), str(error))) from error
    return results


def numbered(op: str, i: int, text: str) -> str:
    """The text of a single call's error for tensor i of a grouped call."""
    text = re.sub(r"^\w+: ", "", text)  # the single function's name
    argument = _ARGUMENT.match(text)
    if argument is None:
        return f"{op}: xs[{i}]: {text}"
    name = argument.group()
    return f"{op}: {_PLURALS.get(name, name)}[{i}]{text[len(name) :]}"
