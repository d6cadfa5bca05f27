"""Load one file of an installed package without importing the package.
A stand-in is an empty module that replaces a module that such a file imports.

vLLM, SGLang and Transformer Engine need CUDA libraries when they are imported. Their files with reference arithmetic
are plain PyTorch and need none of these libraries.
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
    """A stand-in for any module: every attribute exists and is another stand-in, except unset names that begin with __.

    A stand-in can be called. A call with exactly one positional argument returns the argument, so that a stand-in also
    works as a decorator that changes nothing. Any other call returns the stand-in itself.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package, so that its modules can be imported

    def __getattr__(self, name: str) -> Any:
        """Create, store and return another stand-in as the attribute `name`, which this stand-in does not have yet."""
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = Anything(f"{self.__name__}.{name}")
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return the argument if the call has exactly one and no keywords, otherwise this stand-in."""
        return given[0] if len(given) == 1 and not options else self


def triton() -> dict[str, ModuleType]:
    """Return {name: stand-in} for the modules of Triton. Kernels are not run, but triton.cdiv works."""
    whole = Anything("triton")
    whole.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    return {"triton": whole, "triton.language": whole.language}


@contextlib.contextmanager
def _standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Return a context manager that puts modules into sys.modules for the time of a ``with`` statement."""
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
    """Return the directory of an installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def load(package: str, file: str, modules: Mapping[str, ModuleType] = {}) -> ModuleType:
    """Load one file of an installed package and return its module, such as load("vllm", "scalar_type.py")."""
    path = directory(package) / file
    name = ".".join([package, *Path(file).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{package} has no {file}")
    module = importlib.util.module_from_spec(spec)
    with _standing_in({**modules, name: module}):
        spec.loader.exec_module(module)
    return module


cached = lru_cache(None)  # decorator for functions that load a file, so that each file is loaded only once


@cached
def packages(*names: str) -> dict[str, ModuleType]:
    """Return {name: stand-in} for modules with the given names, as the argument ``modules`` of ``load``."""
    return {name: Anything(name) for name in names}
