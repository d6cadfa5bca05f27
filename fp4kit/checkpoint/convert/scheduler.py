"""Schedule the jobs of a conversion in one pass over the source, so that reading, writing, syncing and hashing overlap.

A group is the set of jobs that share a tensor scale. Its jobs write as soon as all of them are measured, while their
bytes are still in the page cache. A file is synced to disk and hashed as soon as all jobs that write into it are done.
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
Check = Callable[[Job, Measured], None]  # raises if a measured weight holds what the request does not allow


class JobScheduler:
    """Run the jobs of a plan, in its order.

    all_jobs: the jobs.
    files: the files of the partial directory that the jobs write into.
    check: called with the measurements of a weight before anything of its group is written.
    tick: called with numbers of bytes of source tensors; the bytes of a job that is measured count twice.

    After ``run``, ``done`` holds every job by its key, and ``digests`` the digest of every file by its path.
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
        """Do everything that an interrupted run has not done. width: as for run_all."""
        self._in_process = executor is None
        self._take_over(executor)
        queue = deque(self._first())
        with closing(run_all(executor, queue, width)) as results:
            for one in results:
                queue.extendleft(reversed(self._after(one)))

    def _take_over(self, executor: Executor | None) -> None:
        """Accept the jobs of an interrupted run whose bytes are still those that they wrote."""
        noted = self._journal.done
        for now in run_all(
            executor, deque((run_job.read_back, (job,)) for job in self._jobs.values() if job.key in noted)
        ):
            if now.crc32 == noted[now.key].crc32:
                self._take_done(noted[now.key])
                self._tick(self._jobs[now.key].nbytes_in)

    def _first(self) -> Iterator[Call[Any]]:
        """Yield the calls that need no result of this run."""
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

    def _call(self, function: Callable[..., Any], job: Job, *arguments: Any) -> Call[Any]:
        """Return a job as a call for run_all. In this process, the call reports progress after every read."""
        return (
            (_metered, (self._tick, function, job, *arguments)) if self._in_process else (function, (job, *arguments))
        )

    def _after(self, result: Measured | Done | Digest | None) -> list[Call[Any]]:
        """Record a result and return the calls that waited for it. A result of None means that a file was synced."""
        if result is None:
            return []
        if isinstance(result, Digest):
            self.digests[result.path] = result
            return []
        if isinstance(result, Measured):
            self._journal.note_measured(result)
            calls = self._take_measured(result)
        else:
            self._journal.note_done(result)
            calls = self._take_done(result)
        if not self._in_process:
            self._tick(self._jobs[result.key].nbytes_in)
        return calls

    def _take_measured(self, found: Measured) -> list[Call[Any]]:
        """Record a measurement; if it was the last of its group, return the calls that write the group."""
        job = self._jobs[found.key]
        self._check(job, found)
        self._measured[found.key] = found
        self._unmeasured[job.group].remove(found.key)
        if self._unmeasured[job.group]:
            return []
        members = self._groups[job.group]
        shared = run_job.join_group([self._measured[member.key] for member in members])
        return [self._call(run_job.write, member, shared) for member in members if member.key not in self.done]

    def _take_done(self, result: Done) -> list[Call[Any]]:
        """Record that a job is done; return the final calls for files that no other job writes into."""
        self.done[result.key] = result
        calls: list[Call[Any]] = []
        for path in dict.fromkeys(target.path for target in self._jobs[result.key].targets):
            self._unwritten[path].remove(result.key)
            if not self._unwritten[path]:
                calls += _last_calls(path)
        return calls


def _last_calls(path: Path) -> list[Call[Any]]:
    """Return the final calls for a file: sync and hash. They are separate, because one waits for the disk and one for a
    CPU.
    """
    return [(staging.sync_file, (path,)), (digest_of, (path,))]


def _metered(tick: Tick, function: Callable[..., T], job: Job, *arguments: Any) -> T:
    """Run a job's call and report progress as it reads; in total, the number of bytes that it is planned to read."""
    left = job.nbytes_in

    def count(nbytes: int) -> None:
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        if nbytes:
            tick(nbytes)

    result = function(job, *arguments, count)
    count(left)
    return result
