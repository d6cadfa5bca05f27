"""Create output directories and files that appear complete or not at all.

A run fills the partial directory, which is hidden beside the destination NAME as ``.NAME.partial``. At the end, the
partial directory (or a single file in it) is renamed to the destination.

A GGUF model of several files is renamed file by file, its first file last, because loaders are given the first file.
The journal then names these files by their inodes. If the run is killed in between, a resumed run moves the renamed
files back.

While it writes, a run holds a lock on the partial directory. The system releases the lock however the run ends. If a
run is interrupted, or fails for a reason outside the model, the partial directory stays with a journal of the finished
jobs, and a later run can resume it. If the run cannot succeed, because of the model or the request, the partial
directory is removed.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4kit.checkpoint.model.model_files import resolved
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.split_gguf import first_parts_of, whole_path
from fp4kit.storage.whole_file import sync_directory

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows: two runs into one destination cannot detect each other
    HAS_LOCKS = False

# Destination -> (final path, device, inode) of the directory or file that this process renamed to its final path. This
# is the destination, or the first file of a split GGUF model.
_PUBLISHED: dict[str, tuple[Path, int, int]] = {}
# Files in the partial directory. They cannot collide with files of a model, whose names never begin with a dot.
LOCK, JOURNAL = ".lock", ".journal.jsonl"
_MOVED = '{"moved": '  # begins the lines of a journal that say which files are renamed at the end


def is_published(destination: Path) -> bool:
    """Return whether this process has written ``destination`` completely and given it its final name.

    This tells, after an exception, whether the result is complete nevertheless.
    """
    path, *inode = _PUBLISHED.get(os.path.abspath(destination), (destination, -1, -1))
    return _inode(path) == tuple(inode)


def _inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file or directory; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def result_of(destination: Path) -> Path:
    """Return the path under which loaders find a result: the destination, or the first file of a split GGUF model.

    Return the destination if there is no result.
    """
    if os.path.lexists(destination) or destination.suffix.lower() != ".gguf":
        return destination
    return next(iter(first_parts_of(destination)), destination)


def partial_of(destination: Path) -> Path:
    """Return the partial directory of a destination: the hidden directory beside it that a run fills.

    The destinations "." and "/" are invalid, but do not raise an error here.
    """
    return destination.parent / f".{destination.name}.partial"


def check_destination(source: Path, destination: Path, paths: Iterable[Path] = (), resume: bool = False) -> None:
    """Raise CheckpointError if a run cannot write ``destination``.

    It must not exist, its parent must be a writable directory, and neither of source and destination may contain the
    other.

    paths: the files to write, if the result is not a directory. None of them may exist.
    resume: accept files that the run to be resumed had renamed already.
    """
    moved = _moved_files(destination) if resume else {}
    for path in dict.fromkeys((destination, *paths)):
        if os.path.lexists(path) and path.absolute() not in moved:
            raise CheckpointError(f"{path}: exists; name a new directory, or remove it first")
    if not resolved(destination.parent).is_dir():
        raise CheckpointError(f"{destination}: its parent directory does not exist; create {destination.parent} first")
    if not os.access(destination.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination}: no write permission in {destination.parent}; name another directory")
    real_source = resolved(source)
    real = resolved(destination.parent) / destination.name
    if real.is_relative_to(real_source):
        raise CheckpointError(f"{destination}: is inside the source {source}; name a directory outside it")
    if real_source.is_relative_to(real):
        raise CheckpointError(f"{destination}: contains the source {source}; name another directory")


def free_space(destination: Path) -> int:
    """Return the bytes that are free for ``destination`` on its file system.

    Files that an interrupted run left in the partial directory count as free, because they are overwritten.
    """
    free = shutil.disk_usage(destination.parent).free
    with suppress(OSError):
        free += sum(path.stat().st_blocks * 512 for path in partial_of(destination).iterdir() if path.is_file())
    return free


def check_space(destination: Path, needed: int) -> None:
    """Raise CheckpointError if fewer than ``needed`` bytes are free for ``destination`` (see free_space)."""
    free = free_space(destination)
    if free < needed:
        raise CheckpointError(
            f"{destination}: needs {needed} bytes, but {free} are free; free some space or use another disk"
        )


def check_partial(destination: Path, resume: bool) -> None:
    """Raise CheckpointError if the state of the partial directory does not allow a run to begin or to resume.

    Errors are: it was not made by a run; another run is writing to it; an interrupted run left it and ``resume`` is
    False; or it does not exist and ``resume`` is True.
    """
    partial = partial_of(destination)
    exists = _exists(partial)
    if exists and not _is_folder(partial):
        raise CheckpointError(f"{partial}: was not made by fp4kit; move it away, or name another destination")
    if exists and is_live(partial):
        raise _busy(destination)
    if exists and not resume:
        raise CheckpointError(f"{partial}: was left by an interrupted run; {recovery_advice(destination)}")
    if resume and not exists:
        raise CheckpointError(f"{destination}: has no interrupted run to resume; run again without --resume")


def _exists(partial: Path) -> bool:
    """Return whether a path exists. Raises CheckpointError if it cannot exist, for example because it is too long."""
    try:
        partial.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _not_created(partial, error) from None
    return True


def _not_created(partial: Path, error: OSError) -> CheckpointError:
    """Return the error for a partial directory that the system refuses to create."""
    return CheckpointError(f"{shown(str(partial))}: cannot be created ({error.strerror}); name another directory")


def recovery_advice(destination: Path) -> str:
    """Return advice, for an error message, on what to do about an interrupted run: resume it, or remove its files.

    Only runs with a journal can be resumed; ``fp4kit reconcile``, for example, writes none.
    """
    resuming = "continue it with --resume, or " if (partial_of(destination) / JOURNAL).is_file() else ""
    return f"{resuming}remove its files with fp4kit convert --remove-stale {shlex.quote(str(destination))}"


def is_live(partial: Path) -> bool:
    """Return whether a run is writing to a directory, so that it holds the lock in it.

    partial: a partial directory, or a destination that a run has just renamed and still holds the lock of.
    """
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock on an open file. Return False if another process holds it.

    Returns True if the platform or the file system does not support locks.
    """
    if not HAS_LOCKS:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_folder(partial: Path) -> bool:
    """Return whether a path is a directory and not a link to one."""
    return os.path.isdir(partial) and not os.path.islink(partial)


def is_partial(folder: Path) -> bool:
    """Return whether a run made this directory, judged by its lock file.

    An empty directory counts too, because a run may have ended before it created the lock file.
    """
    return _is_folder(folder) and ((folder / LOCK).is_file() or not any(folder.iterdir()))


def removable(destination: Path) -> Path | None:
    """Return the partial directory that remove_partial would remove, or None if there is none.

    Raises CheckpointError if a run is writing to it, or if no run made it.
    """
    partial = partial_of(destination)
    if not os.path.lexists(partial):
        return None
    if not is_partial(partial):
        raise CheckpointError(f"{partial}: was not made by fp4kit; remove it yourself")
    if is_live(partial):
        raise _busy(destination)
    return partial


def remove_partial(destination: Path) -> Path | None:
    """Remove the partial directory that an interrupted run left beside a destination.

    Return the removed path, or None if there was none. Raises CheckpointError if a run is writing to it, or if no run
    made it.
    """
    partial = removable(destination)
    if partial is None:
        return None
    lock = _locked(partial, destination)
    try:
        _move_back(destination)
        _remove(partial)
    finally:
        os.close(lock)
    return partial


def _remove(partial: Path) -> None:
    """Remove a partial directory. The lock file is removed last, so that no other run can take the directory over."""
    clear(partial, {LOCK})
    (partial / LOCK).unlink(missing_ok=True)
    partial.rmdir()


def clear(folder: Path, keep: Collection[str]) -> None:
    """Remove everything in a directory except regular files named in ``keep``. Links are removed, never followed."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name not in keep or not entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def copy_file(source: Path, destination: Path) -> None:
    """Copy a regular file to a new file and flush it to disk. Missing parent directories are created."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as reader, destination.open("xb") as writer:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(
                f"{shown(source.name)}: is no longer a regular file; run again when nothing changes the source"
            )
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def sync_file(path: Path) -> None:
    """Flush a file of the partial directory to disk.

    If that fails, remove the journal before raising: it is unknown which bytes were lost, so the run cannot be resumed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        path.with_name(JOURNAL).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class Stage:
    """Hold the state of the partial directory that a run fills.

    folder: the partial directory.
    is_ours: True if this run may remove the content. A resumed run sets it once it has accepted the journal.
    published: True once the directory or file has been renamed to the destination.
    """

    def __init__(self, folder: Path, is_ours: bool) -> None:
        self.folder, self.is_ours, self.published = folder, is_ours, False

    def is_kept_after(self, error: BaseException) -> bool:
        """Return whether the partial directory must be kept after ``error``, so that the run can be resumed.

        It is not kept after a CheckpointError, because a resumed run would fail for the same reason.
        """
        return not self.is_ours or ((self.folder / JOURNAL).exists() and not isinstance(error, CheckpointError))


@contextmanager
def staged_directory(
    destination: Path, resume: bool = False, paths: Mapping[str, Path] | None = None
) -> Iterator[Stage]:
    """Yield the partial directory of a destination, to be filled, and rename it to the destination at the end.

    Yields it as a Stage. Raises CheckpointError if another run is writing to it, or if check_partial does.

    After a CheckpointError, the partial directory is removed. After any other exception (KeyboardInterrupt, SystemExit,
    a full disk, a dead worker), it is kept if it has a journal. A resumed directory is kept in every case until the run
    sets Stage.is_ours.

    resume: True to continue in the partial directory of an interrupted run.
    paths: name in the partial directory -> final path. If given, only these files are renamed, the first one last.
    """
    partial = partial_of(destination)
    check_partial(destination, resume)
    try:
        partial.mkdir(mode=0o700, exist_ok=resume)
    except FileExistsError:
        raise _busy(destination) from None
    except OSError as error:
        raise _not_created(partial, error) from None
    stage = Stage(partial, is_ours=not resume)
    lock = _locked(partial, destination)
    try:
        if resume:
            _move_back(destination)
        yield stage
        _publish(stage, destination, paths or {})
    except BaseException as error:
        if partial.exists() and not stage.published and not stage.is_kept_after(error):
            with suppress(OSError):
                _remove(partial)
        raise
    finally:
        try:
            _remove_lock_and_journal(destination)
        except BaseException:  # a signal may have interrupted it: do the rest
            _remove_lock_and_journal(destination)
            raise
        finally:
            os.close(lock)
    sync_directory(destination.parent)


def _publish(stage: Stage, destination: Path, paths: Mapping[str, Path]) -> None:
    """Give the result its final name: flush the partial directory to disk, then rename it or its files.

    paths: name in it -> final path, for the files to rename; empty if the directory itself is the result.
    """
    moves = [(stage.folder / name, path) for name, path in paths.items()] or [(stage.folder, destination)]
    for partial, _ in moves:
        os.chmod(partial, (0o666 if paths else 0o777) & ~_umask())
    for folder, _, _ in os.walk(stage.folder):
        sync_directory(Path(folder))
    for _, final in moves:
        if os.path.lexists(final):
            raise CheckpointError(f"{final}: was created by another program during the run; name another destination")
    if len(moves) > 1:
        _note_moves(stage.folder / JOURNAL, moves)
    first, final = moves[0]
    _PUBLISHED[os.path.abspath(destination)] = final, first.stat().st_dev, first.stat().st_ino
    try:
        for partial, path in reversed(moves[1:]):
            os.rename(partial, path)
        os.rename(first, final)
    except BaseException:
        if not is_published(destination):
            with suppress(OSError):
                _move_back(destination)
        raise
    stage.published = True


def _note_moves(journal: Path, moves: Iterable[tuple[Path, Path]]) -> None:
    """Append to the journal which files are about to be renamed: name, final path, device and inode of each."""
    lines = [json.dumps({"moved": [part.name, str(final.absolute()), *(_inode(part) or ())]}) for part, final in moves]
    with journal.open("a") as file:
        file.write("\n".join([*lines, ""]))
        file.flush()
        os.fsync(file.fileno())


def _moved_files(destination: Path) -> dict[Path, str]:
    """Return the files that an interrupted run had renamed to their final paths: absolute path -> name before.

    The journal in the partial directory of ``destination`` names them. A file with another inode is not one of them.
    Return {} if the first file, which is renamed last, is one of them, because then the run had ended.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = (partial_of(destination) / JOURNAL).read_text().splitlines()
    found: dict[Path, str] = {}
    for i, line in enumerate(line for line in lines if line.startswith(_MOVED)):
        with suppress(ValueError, TypeError):  # a damaged line
            name, path, *inode = json.loads(line)["moved"]
            if _inode(Path(path)) == tuple(inode) and whole_path(Path(path)) == destination.absolute():
                if i == 0:
                    return {}
                found[Path(path)] = Path(name).name
    return found


def _move_back(destination: Path) -> None:
    """Move the files that an interrupted run had renamed back into its partial directory."""
    for path, name in _moved_files(destination).items():
        os.rename(path, partial_of(destination) / name)


def _remove_lock_and_journal(destination: Path) -> None:
    """Remove the run's lock and journal after the result has been renamed to the destination.

    Does nothing before that, because another run could otherwise take over the partial directory.
    """
    if not is_published(destination):
        return
    if destination.is_dir():
        for name in (JOURNAL, LOCK):
            (destination / name).unlink(missing_ok=True)
    elif is_partial(partial_of(destination)):
        _remove(partial_of(destination))


def _locked(partial: Path, destination: Path) -> int:
    """Take the lock of a partial directory, and return its open file descriptor.

    Raises CheckpointError if another run holds the lock or has just removed it.
    """
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointError(
            f"{partial}: cannot be locked ({error.strerror}); another run may just have ended; run again"
        ) from None
    if not (_try_lock(descriptor) and _is_at(descriptor, partial / LOCK)):
        os.close(descriptor)
        raise _busy(destination)
    return descriptor


def _busy(destination: Path) -> CheckpointError:
    """Return the error for a destination that another run is writing to."""
    return CheckpointError(
        f"{destination}: another run is writing to it; wait for that run to end, or name another destination"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at ``path``. A lock file may just have been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    found = os.umask(0)
    os.umask(found)
    return found
