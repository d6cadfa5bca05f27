"""Count the instructions of a kernel's main loop in its machine code (SASS).

A loop is a natural loop of the control-flow graph: an instruction through which every way into the loop leads, and all
instructions on the ways from it back to it. A jump to an earlier address need not close a loop, because compilers move
rare code behind a loop.

The main loop is the one that loads or stores the most bytes of global memory per iteration, by words of at least 8
bytes; of equal ones, the shortest. Its instructions are added up, block by block: a warp issues all sides of a branch
that its threads take. The following code does not count:

- loops inside it, unless all its accesses are in them: in fp4kit's kernels, these handle rare blocks
- functions and lines that ordinary elements do not reach (RARE, RARE_LINES)
- functions of other calls of the same kernel, which the caller names

Functions of one warp (ONE_WARP) count by their share. The cubin's line table says from which function an instruction
comes. A kernel whose accesses are outside of every loop is counted from its start to its end. Instructions that a
predicate disables count, because they are issued. Called functions do not count.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fp4kit.cuda import compiler
from fp4kit.cuda.launch import THREADS

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)(.*);")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}  # bytes, by a part of the name; else 4
FRAME = re.compile(r'^\s+//## File "(?:[^"]*/)?([^"/]+)", line (\d+)')
# Functions that ordinary elements do not reach: the exact path, and what follows from unaligned or incomplete rows.
RARE = frozenset(
    "quantize_any quantize_pending_runs encode_any encode_any_column stage_column decode_end choose_scale store_row"
    " quantize_any_four_over_six".split()
)
# Lines that ordinary calls do not reach: what follows for such blocks, incomplete words of codes and scales, and random
# bytes that the caller passes.
RARE_LINES = re.compile(
    r"pending >> [jk]|encode_any_column<|scales\[j\] = static_cast|row \+ w \* P::kPerWord <|block \+ i < blocks"
    r"|a\.column_scales\[|staging\.scales\[tile_block \+ i\]|\(a\.random\)|a\.random \+|a\.random\["
)
REREADS = frozenset({"quantize_rows"})  # functions that load elements which the loop has loaded before
ONE_WARP = frozenset({"write_scales", "fetch_ahead"})  # functions that one warp of a thread block executes
_DEFINITION = re.compile(r"\b(?!FP4KIT|__launch_bounds__|explicit|constexpr)(\w+)\(")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP")


class Loop(NamedTuple):
    """The counts of a main loop.

    Attributes:
        instructions: instructions per iteration and thread
        loaded, stored: bytes of global memory per iteration and thread, in words of at least 8 bytes
        setup: instructions before the loop; those after it are not counted
    """

    instructions: float
    loaded: int
    stored: int
    setup: int


@cache
def disassembler() -> str:
    """Return the path of nvdisasm, which CUDA and the wheel nvidia-cuda-nvdisasm contain, or "" without it."""
    folders = (f"{folder}/nvidia/{name}/bin" for folder in sys.path for name in ("cu13", "cuda_nvdisasm"))
    return shutil.which("nvdisasm") or next(filter(None, (shutil.which("nvdisasm", path=f) for f in folders)), "")


@lru_cache(4)  # nvdisasm takes 0.3 s
def disassembled(cubin: bytes) -> str:
    """Return the SASS of all functions of a cubin, with the source lines of every instruction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [disassembler(), "-c", "-gi", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _source(name: str) -> list[tuple[str, str]]:
    """Return (function, text) for every line of a kernel's source file; [] for a file that is not fp4kit's."""
    path = compiler.files(compiler.SOURCES).get(name)
    found, function, starts = list[tuple[str, str]](), "", False
    for line in [] if path is None else path.read_text().splitlines():
        starts |= line.lstrip().startswith(("FP4KIT_DEVICE", 'extern "C" __global__'))
        if starts and (definition := _DEFINITION.search(re.sub(r"__launch_bounds__\([^)]*\)", "", line))):
            function, starts = definition[1], False
        found.append((function, line))
    return found


def _share(calls: Iterable[tuple[str, str]], unreached: frozenset[str]) -> float:
    """Return the share of warps that execute an instruction of these (function, line), from the innermost call on."""
    if any(function in unreached or (unreached and RARE_LINES.search(text)) for function, text in calls):
        return 0.0
    return 32 / THREADS if any(function in ONE_WARP for function, _ in calls) else 1.0


class _Code:
    """The instructions of one function: what each accesses, where the next one is, and its share of warps."""

    def __init__(self, sass: str, kernel: str, unreached: frozenset[str] = RARE) -> None:
        body = sass[sass.index(f".text.{kernel}:") :].split("\n\t.section", 1)[0]
        labels: dict[str, int] = {}
        names: list[tuple[str, str, str]] = []
        callers: list[list[tuple[str, str]]] = []  # of each instruction
        calls: list[tuple[str, str]] = []
        is_new = False  # whether a line with a frame begins a new list of calls
        for line in body.split("\n"):
            if line.startswith(".L"):
                labels[line.partition(":")[0]] = len(names)
            elif frame := FRAME.match(line):
                calls = [] if is_new else calls
                calls += _source(frame[1])[int(frame[2]) - 1 : int(frame[2])]
                is_new = False
            elif found := INSTRUCTION.match(line):
                names.append((found[2] or "", found[3], found[4]))
                callers.append(calls)
                is_new = True
        self.size = len(names)
        self.loaded, self.stored = [0] * self.size, [0] * self.size
        self.exits = [i for i, (_, name, _) in enumerate(names) if name == "EXIT"]
        self.next: list[list[int]] = []
        for i, (predicate, name, rest) in enumerate(names):
            size = next((WIDTHS[part] for part in name.split(".") if part in WIDTHS), 4)
            if name.startswith(("LDG.", "STG.")) and size >= 8 and not any(f in REREADS for f, _ in callers[i]):
                (self.loaded if name[0] == "L" else self.stored)[i] = size
            target = re.search(r"`\((\.L\w+)\)", rest)
            always = not predicate and not re.search(r"\bU?P\d", rest)
            following = [] if name.startswith(_ENDS) and always else [i + 1]
            if name.startswith("BRA") and target:
                following.append(labels[target[1]])
            self.next.append([j for j in following if j < self.size])
        # The compiler moves single instructions between blocks, so the share of a block is that of most of them.
        starts = {0, self.size, *labels.values()} | {i + 1 for i, n in enumerate(self.next) if n != [i + 1]}
        bounds = sorted(start for start in starts if start <= self.size)
        shares, self.shares = [_share(calls, unreached) for calls in callers], list[float]()
        for first, end in pairwise(bounds):
            self.shares += [median(shares[first:end])] * (end - first)

    def distance(self, end: int) -> int:
        """Return the fewest instructions that are executed before the instruction `end`."""
        count, frontier, seen = 0, {0}, {0}
        while end not in seen:
            frontier = {j for i in frontier for j in self.next[i]} - seen
            seen |= frontier
            count += 1
        return count

    def loops(self) -> dict[int, set[int]]:
        """Return {first instruction: all instructions} of every natural loop."""
        before: list[list[int]] = [[] for _ in range(self.size)]
        found: dict[int, set[int]] = {}
        path, ways, seen, back = [0], [iter(self.next[0])], {0}, list[tuple[int, int]]()
        is_on_path = {0}
        while path:  # depth first: an edge to an instruction on the path closes a loop
            i, j = path[-1], next(ways[-1], None)
            if j is None:
                is_on_path.remove(path.pop())
                ways.pop()
                continue
            before[j].append(i)
            if j in is_on_path:
                back.append((i, j))
            elif j not in seen:
                seen.add(j)
                is_on_path.add(j)
                path.append(j)
                ways.append(iter(self.next[j]))
        for last, first in back:
            body, pending = {first}, [last]
            while pending:
                if (i := pending.pop()) not in body:
                    body.add(i)
                    pending += before[i]
            if first == 0 or 0 not in body:  # otherwise, a way from the start into the loop does not pass `first`
                found.setdefault(first, set()).update(body)
        return found

    def loop(self, first: int, body: Iterable[int], inner: set[int]) -> Loop:
        """Return the counts of the instructions of a loop (body), without those in loops inside (inner)."""
        counted = [i for i in body if self.shares[i] and i not in inner]
        loaded, stored = (sum(sizes[i] for i in counted) for sizes in (self.loaded, self.stored))
        return Loop(sum(self.shares[i] for i in counted), loaded, stored, first)


def main_loop(sass: str, kernel: str, without: Iterable[str] = ()) -> Loop | None:
    """Return the counts of a kernel's main loop, or None if none is found that accesses global memory.

    If rare code makes most accesses, as in kernels without a fast path, it counts.

    without: the functions that the call does not reach, although other calls of this kernel do.
    """
    usual, whole = (_main_loop(_Code(sass, kernel, found)) for found in (RARE.union(without), frozenset(without)))
    if usual is None or whole is None or 4 * max(usual[1:3]) < max(whole[1:3]):
        return whole
    return usual


def _main_loop(code: _Code) -> Loop | None:
    bodies, found = code.loops(), []
    for first, body in sorted(bodies.items()):
        inner = set().union(*(other for j, other in bodies.items() if j != first and j in body))
        loops = (code.loop(first, body, inner), code.loop(first, body, set()))
        found.append(next((loop for loop in loops if max(loop[1:3])), loops[1]))
    if not any(max(loop[1:3]) for loop in found):
        last = max(code.exits, default=code.size - 1)
        found = [code.loop(0, range(last + 1), set().union(*bodies.values()))]
    best = max(found, key=lambda loop: (max(loop[1:3]), -loop.instructions))
    return best._replace(setup=code.distance(best.setup)) if max(best[1:3]) else None
