"""Find the system's C++ compiler and compile kernels for the CPU; reuse the programs of earlier test runs."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from host.cache import key_of, shared

HERE = Path(__file__).parent
# Do not optimize, because optimizing takes longer than it saves in short runs.
FLAGS = ("-std=c++20", "-O0", "-g1", "-ffp-contract=off", "-frounding-math", "-Wno-unknown-pragmas")
# Make the undefined-behaviour sanitizer trap, so that the process needs no runtime library. The sanitizer also detects
# misaligned addresses, which a GPU rejects and the CPU accepts. Do not check for address 0, because the signal's
# message says more.
TRAPS = ("-fsanitize=undefined", "-fno-sanitize=null", "-fsanitize-undefined-trap-on-error")
PROBE = '#include "library.h"\nint main(int n, char**) { return static_cast<int>(static_cast<_Float16>(n - 1)); }\n'
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)


class Compiler(NamedTuple):
    """Describe a C++ compiler that can build the kernels, and the flags to call it with."""

    command: tuple[str, ...]

    @property
    def traps(self) -> bool:
        """True if kernels stop at undefined behaviour and at misaligned addresses."""
        return TRAPS[0] in self.command

    def build(self, text: str, program: Path, *include: Path) -> None:
        """Compile the text of a translation unit to `program`, or copy the result of an earlier identical compilation.

        include: the folders of headers. Raises AssertionError with the compiler's output.
        """
        folders = (*include, HERE)
        key = key_of([*identity(self.command[0]), *self.command, text, *closure(text, folders)])
        found = shared().get(key, lambda path: self._compile(text, path, folders))
        shutil.copy(found, program)  # a copy, because the cache may remove its file

    def _compile(self, text: str, program: Path, folders: tuple[Path, ...]) -> None:
        source = program.with_suffix(".cpp")
        source.write_text(text)
        command = [*self.command, *(f"-I{folder}" for folder in folders), str(source), "-o", str(program)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join(self.command)} {source}:\n{result.stderr[-4000:]}"


def closure(text: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the names and texts of all files that a text includes, directly or indirectly, from the given folders."""
    found: dict[Path, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        for path in (folder / name for folder in folders):
            if path not in found and path.exists():
                found[path] = path.read_text()
                pending += _INCLUDE.findall(found[path])
    return [part for path in sorted(found, key=lambda path: path.name) for part in (path.name, found[path])]


@cache
def identity(command: str) -> tuple[str, ...]:
    """Return what may change a compiler's output: its path and version, the C library, and the processor."""
    path = os.path.realpath(shutil.which(command) or command)
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return (path, version, *platform.libc_ver(), platform.machine())


def find_compiler(folder: Path) -> Compiler | str:
    """Return the first compiler of $CXX, or of c++, g++ and clang++, that can build a small program in `folder`.

    A compiler with traps is preferred. If none works, return the reason as text.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [[name] for name in ("c++", "g++", "clang++")]
    found = [command for command in candidates if shutil.which(command[0])]
    reason = f"no C++ compiler found (looked for {', '.join(command[0] for command in candidates)})"
    for traps in (TRAPS, ()):
        for command in found:
            compiler = Compiler((*command, *FLAGS, *traps))
            try:
                compiler.build(PROBE, folder / "probe")
                subprocess.run([folder / "probe"], check=True, capture_output=True)
            except (AssertionError, OSError, subprocess.CalledProcessError) as error:
                reason = f"the C++ compiler cannot build the kernels: {error}"
            else:
                return compiler
    return reason


def require_compiler(folder: Path) -> Compiler:
    """Return a compiler, or skip the test if there is none.

    With CI=true, fail instead, and also fail if the compiler has no traps.
    """
    compiler, in_ci = find_compiler(folder), os.environ.get("CI") == "true"
    if isinstance(compiler, str):
        (pytest.fail if in_ci else pytest.skip)(f"kernels do not run on the host: {compiler}")
    if in_ci and not compiler.traps:
        pytest.fail(f"{compiler.command[0]} has no sanitizer of undefined behaviour; CI needs it")
    return compiler
