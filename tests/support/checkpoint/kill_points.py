"""Kill a conversion with SIGKILL at many points: kill_points.py SOURCE FOLDER POINTS SEED. Print how the runs ended.

A child process kills itself at the n-th call of a C function after the conversion began. For half of the points, only
calls of the operating system count. After each kill the script checks:

- the source is unchanged;
- a directory with the destination's name has the whole result, and resuming removes whatever else is left in it;
- resuming gives the same bytes as an undisturbed run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert.convert import convert, execute
from fp4kit.checkpoint.convert.run_jobs import leftovers_of, remove_leftovers
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import differences, file_digest, names_in
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import Plan


def files_of(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256} for all files in a checkpoint directory, fp4kit's manifest included."""
    return {
        name: file_digest(folder / name)
        for name in [*names_in(folder), "fp4kit_manifest.json"]
        if (folder / name).exists()
    }


def counted(wanted: int | None, of_system: bool, call: Callable[[], object]) -> int:
    """Return the number of C functions that `call` calls.

    Args:
        wanted: kill this process at the call with this number; None to kill nothing.
        of_system: True to count calls of the operating system only.
        call: a function of no arguments.
    """
    count = 0

    def see(frame: Any, event: str, function: Any) -> None:
        nonlocal count
        if event != "c_call" or (of_system and getattr(function, "__module__", "") != "posix"):
            return
        if count == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def kill_at(plan: Plan, out: Path, wanted: int, of_system: bool) -> None:
    """Execute a plan, which writes `out`, in a child process that kills itself at C function call number `wanted`.

    Args:
        plan: the plan of the conversion.
        out: the directory that the plan writes.
        wanted: the number of the call at which the child kills itself.
        of_system: True to count calls of the operating system only.
    """
    child = os.fork()
    if child == 0:
        counted(wanted, of_system, lambda: execute(plan, out))
        os._exit(0)
    os.waitpid(child, 0)


def state_after(out: Path, whole: dict[str, str]) -> str:
    """Return what a killed conversion had left: "whole", "partial" or "nothing". Complete the conversion if needed.

    "whole" is a finished directory, from which leftovers are removed. "partial" is an unfinished directory, which is
    resumed. After "nothing", the conversion is started again. Raise AssertionError if a finished directory differs from
    ``whole``, or if a hidden file is left in it.

    Args:
        out: the directory that the conversion writes. Its source is "m" beside it.
        whole: {file name: SHA-256} of a finished directory, with which the result is compared.
    """
    partial = staging.partial_of(out)
    if out.exists():
        if staging.JOURNAL in {path.name for path in leftovers_of(out)}:
            convert(out.parent / "m", out, options=Options(resume=True))
        remove_leftovers(out)  # a run that is killed between removing its journal and its lock leaves the lock
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")], "not tidied up"
        assert files_of(out) == whole and not partial.exists(), "not whole under its name"
        return "whole"
    if not partial.exists():
        convert(out.parent / "m", out)
        return "nothing"
    convert(out.parent / "m", out, options=Options(resume=True))
    return "partial"


def main() -> None:
    """Kill conversions at random points, check what is left, resume, and compare with an undisturbed conversion."""
    source, folder, points, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    shutil.copytree(source, folder / "m")
    before, out = files_of(folder / "m"), folder / "out"
    whole = files_of(convert(folder / "m", folder / "whole").destination)
    plan, generator = make_plan(folder / "m"), random.Random(seed)
    ends: Counter[str] = Counter()
    for of_system in (False, True):
        total = counted(None, of_system, lambda: execute(plan, folder / "count"))
        shutil.rmtree(folder / "count")
        for wanted in sorted(generator.sample(range(total), min(points // 2, total))):
            kill_at(plan, out, wanted, of_system)
            assert files_of(folder / "m") == before, "the source was touched"
            ends[state_after(out, whole)] += 1
            assert files_of(out) == whole and differences(out) == [], f"other bytes after a kill at {wanted} of {total}"
            assert {path.name for path in folder.iterdir()} == {"m", "whole", "out"}
            shutil.rmtree(out)
    print(sum(ends.values()), "kills:", dict(ends))


if __name__ == "__main__":
    main()
