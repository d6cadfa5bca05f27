"""Collect the kernel instantiations that fp4kit.cuda requests, and write source text that contains many of them."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fp4kit.cuda
from fp4kit.arrays import imports
from fp4kit.cuda import compiler, launch

MULTIPROCESSORS = 2  # multiprocessors of the simulated device: few, so that the grid is smaller than the work


class Instantiation(NamedTuple):
    """One request to compiler.function for a kernel with given template arguments.

    Attributes:
        source: the text of the stub, a few lines of CUDA that instantiate a kernel.
        kernel: the name of the kernel in the stub.
    """

    source: str
    kernel: str

    @property
    def threads(self) -> str:
        """The line of the stub that sets the number of threads of a block; "" if headers set it."""
        return "".join(re.findall(r"^#define FP4KIT_THREADS \d+\n", self.source))


_INCLUDE = re.compile(r'^#include "(\w+\.cuh?)"', re.MULTILINE)


def included(names: Iterable[str], tree: Mapping[str, str]) -> list[str]:
    """Return the sorted list of `names` and of all files that these files include, directly or indirectly.

    Names that are not in `tree` are left out.

    Args:
        names: names of files.
        tree: {file name: text}.
    """
    found, pending = dict[str, None](), [*names]
    while pending:
        name = pending.pop()
        if name in tree and name not in found:
            found[name] = None
            pending += _INCLUDE.findall(tree[name])
    return sorted(found)


def program_text(instantiations: Iterable[Instantiation], sources: Path) -> str:
    """Return one translation unit for many instantiations.

    The text has the headers once, so that all instantiations must have one number of threads. Each instantiation
    follows in a separate namespace, with a separate kernel name.

    sources: the folder with the kernels' source files.
    """
    instantiations = list(instantiations)
    tree = {name: path.read_text() for name, path in compiler.files(sources).items()}
    files = cache(lambda names: included(names, tree))  # cached, because many instantiations include the same files
    needed = [files(tuple(_INCLUDE.findall(source))) for source, _ in instantiations]
    headers = sorted({name for names in needed for name in names if name.endswith(".cuh")})
    lines = ['#include "library.h"', instantiations[0].threads, *(f'#include "{name}"' for name in headers)]
    entries = []
    for i, ((source, kernel), names) in enumerate(zip(instantiations, needed, strict=True)):
        text = "".join([source, *(tree[name] for name in names if name.endswith(".cu"))])
        every, (arguments,) = re.findall(r"\b(\w+_kernel)\(", text), re.findall(rf"\b{kernel}\(([\w<>]+) ", text)
        lines += [f"namespace instance_{i} {{", *(f"#define {name} {name}_{i}" for name in every), source]
        lines += [
            *(f"#undef {name}" for name in every),
            f"constexpr Launch entry = launch<{arguments}, {kernel}_{i}>;",
            "}",
        ]
        entries.append(f"instance_{i}::entry")
    table = f"static const Launch launches[] = {{{', '.join(entries)}}};"
    return "\n".join(
        [
            *lines,
            f"int main(int argc, char** argv) {{ {table}",
            "HOST_GAP(0) host_last_gap<0>(); return host_main(argc, argv, launches); }",
            "",
        ]
    )


@contextmanager
def launching_on(function: Callable[[str, str, int], Callable[..., None]], cupy: Any) -> Iterator[None]:
    """Make launchers of fp4kit.cuda take kernels from `function` and use `cupy` as CuPy while the context lasts.

    Args:
        function: called as function(source, kernel, device).
        cupy: a module with the interface of CuPy.
    """
    modules = pkgutil.walk_packages(fp4kit.cuda.__path__, "fp4kit.cuda.")
    launchers = [importlib.import_module(module.name) for module in modules]
    caches = {f for m in launchers if m is not compiler for f in vars(m).values() if hasattr(f, "cache_clear")}
    with ExitStack() as stack:
        for cached in caches:  # they hold functions of a real device
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(patch.object(compiler, "function", function))
        stack.enter_context(patch.object(imports, "cupy", lambda: cupy))
        stack.enter_context(patch.object(launch, "multiprocessors", lambda device: MULTIPROCESSORS))
        yield
