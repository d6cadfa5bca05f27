"""Hold a registry of functions, through which methods of basic modules call functions of modules that import them.

For example, `Quantized.dequantize` calls `fp4kit.dequantize`, whose module imports Quantized. To avoid a circular
import, the method looks the function up in FUNCTIONS. fp4kit/__init__.py fills FUNCTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}
