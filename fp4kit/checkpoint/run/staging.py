"""A directory that appears whole or not at all: it is filled under a hidden name beside its place, then renamed.

The hidden name is ``.NAME.partial``. A run holds a lock there, which the system takes back however the run ends. A run
that was interrupted, or that the machine failed, leaves it with a journal of what was done; one that cannot succeed
removes it.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4kit.checkpoint.model.model_files import resolved
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.whole_file import sync_directory

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows: two runs into one place are not told apart
    HAS_LOCKS = False

_PUBLISHED: dict[
    str, tuple[int, int]
] = {}  # destination -> device and inode of the directory that this process made for it
LOCK, JOURNAL = (
    ".lock",
    ".journal.jsonl",
)  # in the partial directory; no file of a model has a name that begins with a dot


def is_published(destination: Path) -> bool:
    """Whether a destination is what this process filled and renamed: then it is whole, whatever was raised since."""
    try:
        found = os.lstat(destination)
    except OSError:
        return False
    return _PUBLISHED.get(os.path.abspath(destination)) == (found.st_dev, found.st_ino)


def partial_of(destination: Path) -> Path:
    """Where a run into a destination fills its files. There is one of "." and "/", too, which nothing can be converted
    into.
    """
    return destination.parent / f".{destination.name}.partial"


def check_destination(source: Path, destination: Path) -> None:
    """Raise CheckpointError unless ``destination`` is new, in an existing directory, and apart from ``source``."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists; name a new directory, or remove it first")
    if not resolved(destination.parent).is_dir():
        raise CheckpointError(f"{destination}: its parent directory does not exist; create {destination.parent} first")
    if not os.access(destination.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{destination}: nothing can be written into {destination.parent}; name another directory"
        )
    real_source = resolved(source)
    real = resolved(destination.parent) / destination.name
    if real.is_relative_to(real_source):
        raise CheckpointError(f"{destination}: lies inside the source {source}; name a directory outside it")
    if real_source.is_relative_to(real):
        raise CheckpointError(f"{destination}: holds the source {source}; name a directory outside it")


def free_space(destination: Path) -> int:
    """Bytes free for ``destination`` on its file system. What an interrupted run left counts as free: it is written
    over.
    """
    free = shutil.disk_usage(destination.parent).free
    with suppress(OSError):
        free += sum(path.stat().st_blocks * 512 for path in partial_of(destination).iterdir() if path.is_file())
    return free


def check_space(destination: Path, needed: int) -> None:
    """Raise CheckpointError if fewer than ``needed`` bytes are free for ``destination``."""
    free = free_space(destination)
    if free < needed:
        raise CheckpointError(f"{destination}: needs {needed} bytes, {free} are free; free space or name another disk")


def check_partial(destination: Path, resume: bool) -> None:
    """Raise CheckpointError for what another run left, unless it is to be resumed, or is writing; and if nothing is to
    resume.
    """
    partial = partial_of(destination)
    there = _is_there(partial)
    if there and not _is_folder(partial):
        raise CheckpointError(f"{partial}: was not made by a conversion; move it away, or name another directory")
    if there and is_live(partial):
        raise _taken(destination)
    if there and not resume:
        raise CheckpointError(f"{partial}: left by an interrupted run; {ways_on(destination)}")
    if resume and not there:
        raise CheckpointError(f"{destination}: there is no interrupted run to resume; leave --resume out")


def _is_there(partial: Path) -> bool:
    """Whether there is something of this name. Raises CheckpointError for a name that nothing can have."""
    try:
        partial.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _not_created(partial, error) from None
    return True


def _not_created(partial: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{shown(str(partial))}: cannot be created ({error.strerror}); name another directory")


def ways_on(destination: Path) -> str:
    """What may be done about a run that was interrupted: one without a journal, such as a reconciliation, cannot go
    on.
    """
    going_on = "go on with --resume, or " if (partial_of(destination) / JOURNAL).is_file() else ""
    return f"{going_on}remove it with fp4kit convert --remove-stale {shlex.quote(str(destination))}"


def is_live(partial: Path) -> bool:
    """Whether a run holds the lock of a partial directory."""
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _take(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take a lock; False if another process has it. Where the file system knows no locks, nobody has it."""
    if not HAS_LOCKS:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_folder(partial: Path) -> bool:
    return os.path.isdir(partial) and not os.path.islink(partial)


def is_partial(folder: Path) -> bool:
    """Whether a run made a directory: it has a lock, or is empty, where the run ended before that."""
    return _is_folder(folder) and ((folder / LOCK).is_file() or not any(folder.iterdir()))


def removable(destination: Path) -> Path | None:
    """What remove_partial would remove. Raises what that raises."""
    partial = partial_of(destination)
    if not os.path.lexists(partial):
        return None
    if not is_partial(partial):
        raise CheckpointError(f"{partial}: was not made by a conversion; remove it yourself")
    if is_live(partial):
        raise _taken(destination)
    return partial


def remove_partial(destination: Path) -> Path | None:
    """Remove what an interrupted run into a destination left; returns what was removed, None if there was nothing.

    Raises CheckpointError while a run is writing there, and for anything that no run made.
    """
    partial = removable(destination)
    if partial is None:
        return None
    lock = _locked(partial, destination)
    try:
        _remove(partial)
    finally:
        os.close(lock)
    return partial


def _remove(partial: Path) -> None:
    """Remove a partial directory, the lock at last: until then, no other run takes it over."""
    clear(partial, {LOCK})
    (partial / LOCK).unlink(missing_ok=True)
    partial.rmdir()


def clear(folder: Path, keep: Collection[str]) -> None:
    """Remove all of a directory but the regular files of these names; no link is followed."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name not in keep or not entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def copy_file(source: Path, destination: Path) -> None:
    """Copy the bytes of a regular file into a new file, creating its directories."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as reader, destination.open("xb") as writer:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(
                f"{shown(source.name)}: is no regular file any more; run again when nothing writes there"
            )
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def sync_file(path: Path) -> None:
    """Push a file of a partial directory to the disk. What a disk did not take is not known: the journal is removed
    then.
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
    """The partial directory of a run. is_ours: what is in it may be removed; published: it has got its name."""

    def __init__(self, folder: Path, is_ours: bool) -> None:
        self.folder, self.is_ours, self.published = folder, is_ours, False

    def is_kept_after(self, error: BaseException) -> bool:
        """Whether there is something to go on with: not after a verdict on the model or the request, which would come
        again.
        """
        return not self.is_ours or ((self.folder / JOURNAL).exists() and not isinstance(error, CheckpointError))


@contextmanager
def staged_directory(destination: Path, resume: bool = False, file: str | None = None) -> Iterator[Stage]:
    """Yield the partial directory of a destination; at the end it gets its name, or the file in it that is all that is
    made.

    After a CheckpointError it is removed. After all else (KeyboardInterrupt, SystemExit, a full disk, workers that
    died) it stays if it has a journal. One that is to be resumed stays in any case until the run calls it its own: see
    Stage.
    """
    partial = partial_of(destination)
    check_partial(destination, resume)
    try:
        partial.mkdir(mode=0o700, exist_ok=resume)
    except FileExistsError:
        raise _taken(destination) from None
    except OSError as error:
        raise _not_created(partial, error) from None
    stage = Stage(partial, is_ours=not resume)
    lock = _locked(partial, destination)
    try:
        yield stage
        _publish(stage, destination, file)
    except BaseException as error:
        if partial.exists() and not stage.published and not stage.is_kept_after(error):
            with suppress(OSError):
                _remove(partial)
        raise
    finally:
        try:
            _tidy(destination)
        except BaseException:  # a signal, perhaps between the two
            _tidy(destination)
            raise
        finally:
            os.close(lock)
    sync_directory(destination.parent)


def _publish(stage: Stage, destination: Path, file: str | None) -> None:
    """Give a partial directory, or a file of it, its name."""
    partial = stage.folder if file is None else stage.folder / file
    os.chmod(partial, (0o777 if file is None else 0o666) & ~_umask())
    for folder, _, _ in os.walk(stage.folder):
        sync_directory(Path(folder))
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: appeared while the conversion ran; nothing was written to it")
    _PUBLISHED[os.path.abspath(destination)] = partial.stat().st_dev, partial.stat().st_ino
    os.rename(partial, destination)
    stage.published = True


def _tidy(destination: Path) -> None:
    """Remove what a run needed, of what has got its name. Not before: another run could take it for its own."""
    if not is_published(destination):
        return
    if destination.is_dir():
        for name in (JOURNAL, LOCK):
            (destination / name).unlink(missing_ok=True)
    elif is_partial(partial_of(destination)):
        _remove(partial_of(destination))


def _locked(partial: Path, destination: Path) -> int:
    """The lock of a partial directory, as an open file."""
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointError(
            f"{partial}: cannot be locked ({error.strerror}); another run may just have ended there"
        ) from None
    if not (_take(descriptor) and _is_still(descriptor, partial / LOCK)):
        os.close(descriptor)
        raise _taken(destination)
    return descriptor


def _taken(destination: Path) -> CheckpointError:
    return CheckpointError(f"{destination}: another run is writing to it; wait for that one, or name another directory")


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether an open file has its name yet: the run that had it may have ended just now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found
