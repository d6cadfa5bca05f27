"""Load one file of an installed package without importing the package.

vLLM, SGLang and Transformer Engine need CUDA libraries when they are imported. Their files with reference arithmetic
are plain PyTorch and need none of these libraries. A stand-in is a module that is put in the place of one that such a
file imports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any


class Anything(ModuleType):
    """Stand in for any module: every attribute exists and is another stand-in.

    A call with one argument returns the argument, like a decorator that changes nothing.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package, so that its modules can be imported

    def __getattr__(self, name: str) -> Any:
        """Return another stand-in as the attribute, and store it."""
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = Anything(f"{self.__name__}.{name}")
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return the argument if there is exactly one, otherwise this stand-in."""
        return given[0] if len(given) == 1 and not options else self


def triton() -> dict[str, ModuleType]:
    """Return stand-ins for the modules of Triton, as {name: module}. Its kernels are not run."""
    whole = Anything("triton")
    whole.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    return {"triton": whole, "triton.language": whole.language}


@contextlib.contextmanager
def _standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Put modules into sys.modules for the duration of a ``with`` statement.

    Modules of the same packages that are imported meanwhile are removed at the end.
    """
    before = dict(sys.modules)
    tops = {name.partition(".")[0] for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            if name not in before:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in tops})


def directory(package: str) -> Path:
    """Return the directory of an installed package without importing it.

    Raises ImportError if it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def load(package: str, file: str, modules: Mapping[str, ModuleType] = {}) -> ModuleType:
    """Return the module of a file in an installed package, such as ("vllm", "scalar_type.py").

    Args:
        package: the package.
        file: path of the file in the package.
        modules: stand-ins for what the file imports, by name. They are removed again before this returns.

    Raises:
        ImportError: if the package or the file is missing, or if the file imports something else.
    """
    path = directory(package) / file
    name = ".".join([package, *Path(file).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{package} has no {file}")
    module = importlib.util.module_from_spec(spec)
    with _standing_in({**modules, name: module}):
        spec.loader.exec_module(module)
    return module


cached = lru_cache(None)  # decorator for an adapter's function that loads a file, so that it is loaded once


@cached
def packages(*names: str) -> dict[str, ModuleType]:
    """Return {name: stand-in} for the given module names, to pass to load. Their attributes do nothing."""
    return {name: Anything(name) for name in names}
