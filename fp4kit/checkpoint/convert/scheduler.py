"""The jobs of a conversion in one sweep over its source, so that reading, writing, the disk and hashing go on side by
side.

The jobs of a group, which share a tensor scale, write as soon as all of them are measured, while their bytes are in the
page cache. A file is pushed to the disk, and hashed, as soon as all jobs that write into it are done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from fp4kit.checkpoint.convert import run_job
from fp4kit.checkpoint.convert.journal import Journal
from fp4kit.checkpoint.model.manifest import Digest, digest_of
from fp4kit.checkpoint.plan.job import Done, Job, Measured, Tick
from fp4kit.checkpoint.run import staging
from fp4kit.checkpoint.run.executors import Call, run_all

T = TypeVar("T")
Check = Callable[[Job, Measured], None]  # raises for what a measured weight may not hold


class JobScheduler:
    """The jobs of a run, in the order of the plan. files: those that they write into, in the partial directory.

    check: sees what a weight holds as soon as it is measured, before anything is written of its group.
    tick: called with bytes of source tensors; a job that is measured counts twice.
    After run: done has every job by its key, and digests has every file by its path.
    """

    def __init__(
        self, all_jobs: Sequence[Job], files: Iterable[Path], journal: Journal, check: Check, tick: Tick
    ) -> None:
        self._jobs = {job.key: job for job in all_jobs}
        self._journal, self._check, self._tick = journal, check, tick
        self._measured: dict[str, Measured] = {}
        self.done: dict[str, Done] = {}
        self.digests: dict[Path, Digest] = {}
        self._in_process = True
        self._groups: dict[str, list[Job]] = defaultdict(list)
        self._unwritten: dict[Path, set[str]] = {path: set() for path in files}  # keys of jobs that are not done
        for job in all_jobs:
            if job.is_measured:
                self._groups[job.group].append(job)
            for target in job.targets:
                self._unwritten[target.path].add(job.key)
        self._unmeasured = {group: {job.key for job in members} for group, members in self._groups.items()}

    def run(self, executor: Executor | None, width: int) -> None:
        """Do everything that an interrupted run has not done. width: passed to run_all as max_pending."""
        self._in_process = executor is None
        self._take_over(executor)
        queue = deque(self._first())
        with closing(run_all(executor, queue, width)) as results:
            for one in results:
                queue.extendleft(reversed(self._after(one)))

    def _take_over(self, executor: Executor | None) -> None:
        """Jobs of an interrupted run whose bytes are still those that they wrote."""
        noted = self._journal.done
        for now in run_all(
            executor, deque((run_job.read_back, (job,)) for job in self._jobs.values() if job.key in noted)
        ):
            if now.crc32 == noted[now.key].crc32:
                self._take_done(noted[now.key])
                self._tick(self._jobs[now.key].nbytes_in)

    def _first(self) -> Iterator[Call[Any]]:
        """The calls that need no result of this run."""
        for path, waiting in self._unwritten.items():
            if not waiting:
                yield from _last_calls(path)
        for job in self._jobs.values():
            if job.is_measured and job.key not in self._journal.measured:
                yield self._call(run_job.measure, job)
            elif job.is_measured:
                self._tick(job.nbytes_in)
                yield from self._take_measured(self._journal.measured[job.key])
            elif job.key not in self.done:
                yield self._call(run_job.write, job, None)

    def _call(self, function: Callable[..., Any], job: Job, *rest: Any) -> Call[Any]:
        """A job for run_all; in this process it ticks read by read."""
        return (_metered, (self._tick, function, job, *rest)) if self._in_process else (function, (job, *rest))

    def _after(self, one: Measured | Done | Digest | None) -> list[Call[Any]]:
        """Write a result down; returns the calls that waited for it. None: a file that is on the disk."""
        if one is None:
            return []
        if isinstance(one, Digest):
            self.digests[one.path] = one
            return []
        if isinstance(one, Measured):
            self._journal.note_measured(one)
            calls = self._take_measured(one)
        else:
            self._journal.note_done(one)
            calls = self._take_done(one)
        if not self._in_process:
            self._tick(self._jobs[one.key].nbytes_in)
        return calls

    def _take_measured(self, found: Measured) -> list[Call[Any]]:
        """What a weight holds; returns the writing of its group, if that was the last of it."""
        job = self._jobs[found.key]
        self._check(job, found)
        self._measured[found.key] = found
        self._unmeasured[job.group].remove(found.key)
        if self._unmeasured[job.group]:
            return []
        members = self._groups[job.group]
        shared = run_job.join_group([self._measured[member.key] for member in members])
        return [self._call(run_job.write, member, shared) for member in members if member.key not in self.done]

    def _take_done(self, one: Done) -> list[Call[Any]]:
        """A job wrote its bytes; returns what is left to do for files that no other job writes into."""
        self.done[one.key] = one
        calls: list[Call[Any]] = []
        for path in dict.fromkeys(target.path for target in self._jobs[one.key].targets):
            self._unwritten[path].remove(one.key)
            if not self._unwritten[path]:
                calls += _last_calls(path)
        return calls


def _last_calls(path: Path) -> list[Call[Any]]:
    """What is left to do for a file: two calls, since one waits for the disk and the other for a processor."""
    return [(staging.sync_file, (path,)), (digest_of, (path,))]


def _metered(tick: Tick, function: Callable[..., T], job: Job, *rest: Any) -> T:
    """A call of a job with progress as it reads, but in sum what it is planned to read."""
    left = job.nbytes_in

    def count(nbytes: int) -> None:
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        if nbytes:
            tick(nbytes)

    result = function(job, *rest, count)
    count(left)
    return result
