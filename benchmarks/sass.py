"""Count the instructions of a kernel's main loop in its machine code (SASS).

The main loop is found as follows. Every jump back to an earlier instruction closes a loop. A way through a loop leads
from its first instruction to such a jump. It avoids loops inside it, or counts them once if it cannot. Of all ways,
those that access the most bytes of global memory by the kernel's widest accesses are taken (16 bytes per thread in most
kernels: the usual case, not the end of a row), then those that access the most by words of at least 4 bytes, so that
codes are stored. Of these, the shortest one is counted. A kernel whose widest accesses are outside of every loop is
counted from its start to its end.

Elements per iteration: the bytes that these accesses load or store, whichever are more, divided by the size of an
element. `setup` counts the shortest way from the kernel's start to the main loop. Instructions that a predicate
disables count, because they are issued. Called functions do not count. If a kernel goes through a tile in several loops
(quantize_columns, quantize_tile), the counts cover only one of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)(.*);")
WIDTH = re.compile(r"^(LDG|STG)\.(?:.*\.)?(U?8|U?16|64|128|256|S8|S16)?(?:\.|$)")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP")


class Loop(NamedTuple):
    """The counts of a main loop.

    Attributes:
        instructions: instructions per iteration and thread
        bytes: bytes per iteration and thread, loaded or stored, whichever are more
        setup: instructions before the loop; those after it are not counted
    """

    instructions: int
    bytes: int
    setup: int


class _Way(NamedTuple):
    wide: int
    words: int
    shortness: int
    loaded: int
    stored: int


@cache
def disassembler() -> str:
    """Return the path of nvdisasm, which CUDA and the wheel nvidia-cuda-nvdisasm contain, or "" without it."""
    return shutil.which("nvdisasm") or ""


def disassembled(cubin: bytes) -> str:
    """Return the SASS of all functions of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [disassembler(), "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Code:
    """The instructions of one function: what each accesses, and where the next one is."""

    def __init__(self, sass: str, kernel: str) -> None:
        body = sass[sass.index(f".text.{kernel}:") :].split("\n\t.section", 1)[0]
        labels: dict[str, int] = {}
        names: list[tuple[str, str, str]] = []
        for line in body.split("\n"):
            if line.startswith(".L"):
                labels[line.partition(":")[0]] = len(names)
            elif found := INSTRUCTION.match(line):
                names.append((found[2] or "", found[3], found[4]))
        self.size = len(names)
        self.loaded, self.stored = [0] * self.size, [0] * self.size
        self.exits = [i for i, (_, name, _) in enumerate(names) if name == "EXIT"]
        self.next: list[list[int]] = []
        for i, (predicate, name, rest) in enumerate(names):
            access = WIDTH.match(name)
            if access:
                size = int((access[2] or "32").lstrip("US")) // 8
                (self.loaded if access[1] == "LDG" else self.stored)[i] = size
            target = re.search(r"`\((\.L\w+)\)", rest)
            always = not predicate and not re.search(r"\bU?P\d", rest)
            following = [] if name.startswith(_ENDS) and always else [i + 1]
            if name.startswith("BRA") and target:
                following.append(labels[target[1]])
            self.next.append([j for j in following if j < self.size])

    def ways(self, start: int, wide: int, avoided: set[int]) -> dict[int, _Way]:
        """Return the best way from `start` to each instruction, without jumps back and without `avoided` instructions.

        wide: the width of accesses that counts.
        """
        best = {start: _Way(0, 0, 0, 0, 0)}
        for i in range(start, self.size):
            if i not in best or i in avoided:
                best.pop(i, None)
                continue
            way = best[i] = self._with(best[i], i, wide)
            for j in self.next[i]:
                if j > i:
                    best[j] = max(best.get(j, way), way)
        return best

    def distance(self, end: int) -> int:
        """Return the fewest instructions that are executed before the instruction `end`."""
        count, frontier, seen = 0, {0}, {0}
        while end not in seen:
            frontier = {j for i in frontier for j in self.next[i]} - seen
            seen |= frontier
            count += 1
        return count

    def _with(self, way: _Way, i: int, wide: int) -> _Way:
        sizes = self.loaded[i], self.stored[i]
        loaded, stored = (size if size >= wide else 0 for size in sizes)
        words = way.words + sum(size for size in sizes if size >= 4)
        return _Way(way.wide + loaded + stored, words, way.shortness - 1, way.loaded + loaded, way.stored + stored)


def main_loop(sass: str, kernel: str) -> Loop | None:
    """Return the counts of a kernel's main loop, or None if none is found that accesses global memory."""
    code = _Code(sass, kernel)
    wide = min(max(code.loaded + code.stored, default=0), 16)
    if not wide:
        return None
    back = [(j, i) for i in range(code.size) for j in code.next[i] if j <= i]
    best, start = _Way(0, 0, 0, 0, 0), 0
    for first in sorted({j for j, _ in back}):
        ends = {i for j, i in back if j == first}
        inner = {k for j, i in back if first < j and i < max(ends) for k in range(j, i + 1)}
        for ways in (code.ways(first, wide, inner), code.ways(first, wide, set())):
            if found := [(ways[i], first) for i in ends if i in ways]:
                best, start = max((best, start), *found)
                break
    if not best.wide:
        ways = code.ways(0, wide, set())
        best = max((ways[i] for i in code.exits if i in ways), default=best)
    if not best.wide:
        return None
    return Loop(-best.shortness, max(best.loaded, best.stored), code.distance(start))
