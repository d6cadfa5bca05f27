"""Functions that methods of lower modules call although they are defined in higher ones.

`Quantized.dequantize` is `fp4kit.dequantize`, which is built on Quantized. So that imports point one way, the method
looks the function up in FUNCTIONS, which fp4kit/__init__.py fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}
