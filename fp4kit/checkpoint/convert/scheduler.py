"""Schedule the jobs of a conversion in one pass over the source, so that reading, writing, syncing and hashing overlap.
A job converts or copies one tensor or matrix. A group is the set of jobs that share a tensor scale. The jobs of a group
can be written only when all of them are measured (read once to find the amax).

The jobs of a group are written right after they are measured, while their source bytes are still in the page cache. A
file is synced to disk and hashed as soon as all jobs that write into it are done.
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
from fp4kit.checkpoint.model.model_files import Digest, digest_of
from fp4kit.checkpoint.plan.job import Done, Job, Measured, Tick
from fp4kit.checkpoint.run import staging
from fp4kit.checkpoint.run.executors import FunctionCall, run_all

T = TypeVar("T")
# A function that raises CheckpointError if the measurements show values that the request does not allow.
MeasurementCheck = Callable[[Job, Measured], None]


class JobScheduler:
    """Run the jobs of a plan: measure, write, then sync and hash the finished files.

    all_jobs: the jobs, in the order in which to start them.
    files: the files of the partial directory that the jobs write into.
    journal: the record of what is done, from which an interrupted run continues.
    check: called with a job and its measurements before anything of its group is written; raises to stop the run.
    tick: called with the number of bytes of source tensors processed since its last call. The bytes of a job that is
        measured first count twice.

    After ``run``, ``done`` maps the key of every job to what it did, and ``digests`` maps the path of every file to its
    digest.
    """

    def __init__(
        self, all_jobs: Sequence[Job], files: Iterable[Path], journal: Journal, check: MeasurementCheck, tick: Tick
    ) -> None:
        self._jobs = {job.key: job for job in all_jobs}
        self._journal, self._check, self._tick = journal, check, tick
        self._measured: dict[str, Measured] = {}
        self.done: dict[str, Done] = {}
        self.digests: dict[Path, Digest] = {}
        self._in_process = True
        self._groups: dict[str, list[Job]] = defaultdict(list)
        # file -> keys of the jobs that write into the file and are not done
        self._unwritten: dict[Path, set[str]] = {path: set() for path in files}
        for job in all_jobs:
            if job.is_measured:
                self._groups[job.group].append(job)
            for target in job.targets:
                self._unwritten[target.path].add(job.key)
        self._unmeasured = {group: {job.key for job in members} for group, members in self._groups.items()}

    def run(self, executor: Executor | None, width: int) -> None:
        """Run all jobs of the plan, except those that an interrupted earlier run has already done."""
        self._in_process = executor is None
        self._take_over(executor)
        queue = deque(self._first())
        with closing(run_all(executor, queue, width)) as results:
            for one in results:
                queue.extendleft(reversed(self._after(one)))

    def _take_over(self, executor: Executor | None) -> None:
        """Mark jobs as done if the journal records them as done and their output bytes still have the recorded
        CRC-32.
        """
        noted = self._journal.done
        for now in run_all(
            executor, deque((run_job.read_back, (job,)) for job in self._jobs.values() if job.key in noted)
        ):
            if now.crc32 == noted[now.key].crc32:
                self._take_done(noted[now.key])
                self._tick(self._jobs[now.key].nbytes_in)

    def _first(self) -> Iterator[FunctionCall[Any]]:
        """Yield the calls that can start at once, because they need no result of another call:

        - measurements that the journal does not hold
        - jobs that need no measurement, or only measurements that the journal holds
        - calls that sync and hash files that are complete already
        """
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

    def _call(self, function: Callable[..., Any], job: Job, *arguments: Any) -> FunctionCall[Any]:
        """Return the call ``function(job, *arguments)`` in the form that run_all takes."""
        return (
            (_metered, (self._tick, function, job, *arguments)) if self._in_process else (function, (job, *arguments))
        )

    def _after(self, result: Measured | Done | Digest | None) -> list[FunctionCall[Any]]:
        """Record the result of a finished call, and return the calls that can start because of it; may be []."""
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

    def _take_measured(self, found: Measured) -> list[FunctionCall[Any]]:
        """Check and record the measurements of a job, and return the calls that write its group."""
        # A group is written when the last of its jobs is measured; until then, return [].
        job = self._jobs[found.key]
        self._check(job, found)
        self._measured[found.key] = found
        self._unmeasured[job.group].remove(found.key)
        if self._unmeasured[job.group]:
            return []
        members = self._groups[job.group]
        shared = run_job.join_group([self._measured[member.key] for member in members])
        return [self._call(run_job.write, member, shared) for member in members if member.key not in self.done]

    def _take_done(self, result: Done) -> list[FunctionCall[Any]]:
        """Record in ``done`` what a job did, and return the calls that sync and hash the files that it completed."""
        self.done[result.key] = result
        calls: list[FunctionCall[Any]] = []
        for path in dict.fromkeys(target.path for target in self._jobs[result.key].targets):
            self._unwritten[path].remove(result.key)
            if not self._unwritten[path]:
                calls += _last_calls(path)
        return calls


def _last_calls(path: Path) -> list[FunctionCall[Any]]:
    """Return two calls for a complete file: one syncs it to disk and one hashes it."""
    # The calls are separate, because the first waits for the disk and the second for a CPU.
    return [(staging.sync_file, (path,)), (digest_of, (path,))]


def _metered(tick: Tick, function: Callable[..., T], job: Job, *arguments: Any) -> T:
    """Call ``function(job, *arguments, tick)`` with a tick that reports progress, and return the result."""
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
