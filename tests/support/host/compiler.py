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
# Compared with -O0, -Og takes 1.2 times as long to compile, and kernels run in 0.4 times the time. -O1 takes 2 times as
# long to compile. The order of variables is kept, because the gaps between variables in shared memory depend on this
# order.
FLAGS = (
    "-std=c++20",
    "-Og",
    "-fno-toplevel-reorder",
    "-g1",
    "-ffp-contract=off",
    "-frounding-math",
    "-Wno-unknown-pragmas",
)
# Make the undefined-behavior sanitizer trap, so that the process needs no runtime library. The sanitizer also detects
# misaligned addresses, which a GPU rejects and the CPU accepts. Do not check for address 0 and for the
# ends of objects, because other checks report these faults with more detail.
TRAPS = ("-fsanitize=undefined", "-fno-sanitize=null,object-size", "-fsanitize-undefined-trap-on-error")
PREFIX = '#include "library.h"\n'
PROBE = PREFIX + "int main(int n, char**) { return static_cast<int>(static_cast<_Float16>(n - 1)); }\n"
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
# Lines that do not change a program, which has no line numbers (no assert or __LINE__): comments and blank lines.
_COMMENTS = re.compile(r"^[ \t]*(//.*)?\n", re.MULTILINE)


class Compiler(NamedTuple):
    """A C++ compiler that can build the kernels, and the flags to call it with."""

    command: tuple[str, ...]

    @property
    def traps(self) -> bool:
        """Return True if kernels stop at undefined behavior and at misaligned addresses."""
        return TRAPS[0] in self.command

    def build(self, text: str, program: Path, *include: Path) -> None:
        """Compile the text of a translation unit to `program`, or copy the result of an earlier identical compilation.

        Args:
            text: the C++ source code.
            program: the path of the file to write.
            include: further folders with headers.

        Raises:
            AssertionError: if the compiler fails. The message is the compiler's output.
        """
        folders = (*include, HERE)
        key = key_of([*identity(self.command[0]), *self.command, text, *closure(text, folders)])
        found = shared().get(key, lambda path: self._compile(text, path, folders))
        shutil.copy(found, program)  # a copy, because the cache may remove its file

    def _compile(self, text: str, program: Path, folders: tuple[Path, ...]) -> None:
        source = program.with_suffix(".cpp")
        source.write_text(text)
        options = self._prefix() if text.startswith(PREFIX) else []
        self._run(*options, *(f"-I{folder}" for folder in folders), str(source), "-o", str(program))

    def _prefix(self) -> list[str]:
        """Return options that include library.h precompiled. Parsing it takes longer than compiling a small kernel.

        Return no options for clang, whose precompiled headers cannot be used from another checkout.
        """
        compiler = identity(self.command[0])
        if "clang" in compiler[1]:
            return []
        key = key_of([*compiler, *self.command, *closure(PREFIX, (HERE,))])
        return ["-include", str(shared().get(f"{key}.gch", self._precompile).with_suffix(""))]

    def _precompile(self, header: Path) -> None:
        source = header.with_suffix(".h")
        source.write_text(PREFIX)
        self._run(f"-I{HERE}", "-x", "c++-header", str(source), "-o", str(header))

    def _run(self, *arguments: str) -> None:
        result = subprocess.run([*self.command, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join((*self.command, *arguments))}:\n{result.stderr[-4000:]}"


def closure(text: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the names and texts of all files that a text includes, directly or indirectly, from the given folders.

    The texts lack lines that hold only a comment, so that an edit of comments does not compile the kernels again.
    """
    found: dict[Path, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        for path in (folder / name for folder in folders):
            if path not in found and path.exists():
                found[path] = path.read_text()
                pending += _INCLUDE.findall(found[path])
    return [
        part
        for path in sorted(found, key=lambda path: path.name)
        for part in (path.name, _COMMENTS.sub("", found[path]))
    ]


@cache
def identity(command: str) -> tuple[str, ...]:
    """Return what may change the output of the compiler `command`: its path, its version, C library and processor."""
    path = os.path.realpath(shutil.which(command) or command)
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return (path, version, *platform.libc_ver(), platform.machine())


def find_compiler(folder: Path) -> Compiler | str:
    """Return the first compiler of $CXX, or of c++, g++ and clang++, that can build a small program in `folder`.

    A compiler that can make kernels stop at undefined behavior (TRAPS) is preferred. If no compiler works, return the
    reason as text.
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
    """Return a compiler that builds a small program in `folder`, or skip the test if there is none.

    With CI=true, fail instead, and also fail if the compiler has no sanitizer of undefined behavior (TRAPS).
    """
    compiler, in_ci = find_compiler(folder), os.environ.get("CI") == "true"
    if isinstance(compiler, str):
        (pytest.fail if in_ci else pytest.skip)(f"kernels do not run on the host: {compiler}")
    if in_ci and not compiler.traps:
        pytest.fail(f"{compiler.command[0]} has no sanitizer of undefined behaviour; CI needs it")
    return compiler
