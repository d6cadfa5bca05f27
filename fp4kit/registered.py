"""Functions of higher modules that methods of lower modules call.

For example, `Quantized.dequantize` calls `fp4kit.dequantize`, which itself imports Quantized. To keep imports one-way,
the method looks the function up in FUNCTIONS. fp4kit/__init__.py fills FUNCTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}
