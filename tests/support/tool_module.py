"""Import the programs of tools/, which are not part of the package, for tests of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool_module(name: str) -> ModuleType:
    """Import tools/NAME.py anew and return the module. Later imports of NAME in this process get the same module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there, and tools import each other
    spec.loader.exec_module(module)
    return module
