"""Create output directories and files that appear complete or not at all. A run writes to the partial directory, which
is the hidden directory ``.NAME.partial`` beside the destination NAME. At the end, the partial directory (or a single
file in it) is renamed to the destination. A lock file in it shows that a run is alive, and a journal records finished
work.

The destination of a split GGUF model is NAME.gguf, and its files have final paths such as NAME-00001-of-00003.gguf. At
the end, each file is renamed to its final path, the first file last, because users pass the first file to loaders.
Before that, the journal records the inodes of the files. If the run is killed between two renames, a resumed run moves
the renamed files back.

While it writes, a run holds a lock on the partial directory. The system releases the lock however the run ends. If a
run is interrupted, or fails for a reason outside the model, the partial directory is kept with a journal of the
finished jobs. A later run can resume it. If the run cannot succeed, because of the model or the request, the partial
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
from fp4kit.storage.files import MAX_BYTES, CheckpointError, shown, sync_directory
from fp4kit.storage.gguf_file import first_parts_of, whole_path

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows: two runs into one destination cannot detect each other
    HAS_LOCKS = False

# Absolute path of a destination -> (final path, device, inode) of the directory or file that this process renamed to
# the final path. The final path is the destination itself or, for a split GGUF model, that of its first file.
_PUBLISHED: dict[str, tuple[Path, int, int]] = {}
# Files of the run itself in the partial directory. Their names differ from all output files, because no output file
# has a name that begins with a dot.
LOCK, JOURNAL = ".lock", ".journal.jsonl"
_MOVED = '{"moved": '  # the beginning of the journal lines that _note_moves writes


def is_published(destination: Path) -> bool:
    """Return whether this process has renamed a complete result to the final path, and the result is still there."""
    path, *inode = _PUBLISHED.get(os.path.abspath(destination), (destination, -1, -1))
    return _inode(path) == tuple(inode)


def _inode(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a file or directory, or None if the path does not exist or cannot be examined."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def result_of(destination: Path) -> Path:
    """Return the path of a run's result: the destination or, for a split GGUF model, the path of its first file."""
    if os.path.lexists(destination) or destination.suffix.lower() != ".gguf":
        return destination
    return next(iter(first_parts_of(destination)), destination)


def partial_of(destination: Path) -> Path:
    """Return the path of the partial directory of a destination: the hidden directory beside it to which a run
    writes.
    """
    return destination.parent / f".{destination.name}.partial"


def check_destination(source: Path, destination: Path, paths: Iterable[Path] = (), resume: bool = False) -> None:
    """Raise CheckpointError if a run cannot write ``destination``."""
    # The destination must not exist, and its parent must be a writable directory.
    check_apart(destination, source)  # before the advice to remove what exists
    moved = _moved_files(destination) if resume else {}
    for path in dict.fromkeys((destination, *paths)):
        if os.path.lexists(path) and path.absolute() not in moved:
            raise CheckpointError(f"{path}: exists; name a new directory, or remove it first")
    if not resolved(destination.parent).is_dir():
        raise CheckpointError(f"{destination}: its parent directory does not exist; create {destination.parent} first")
    if not os.access(destination.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination}: no write permission in {destination.parent}; name another directory")


def check_apart(destination: Path, *sources: Path) -> None:
    """Raise CheckpointError if ``destination`` is one of the sources, contains one, or is inside one."""
    real = Path(os.path.realpath(resolved(destination.parent) / destination.name))
    for source in sources:
        real_source = resolved(source)
        if real == real_source:
            raise CheckpointError(f"{destination}: is the source {source}, which is never changed; give another name")
        if real.is_relative_to(real_source):
            raise CheckpointError(f"{destination}: is inside the source {source}; name a directory outside it")
        if real_source.is_relative_to(real):
            raise CheckpointError(f"{destination}: contains the source {source}; name another directory")


def free_space(destination: Path) -> int:
    """Return the number of bytes that are free for ``destination`` on its file system."""
    # Files that an interrupted run left in the partial directory count as free, because a new run overwrites them.
    free = shutil.disk_usage(destination.parent).free
    with suppress(OSError):
        free += sum(path.stat().st_blocks * 512 for path in partial_of(destination).iterdir() if path.is_file())
    return free


def check_space(destination: Path, needed: int) -> None:
    """Raise CheckpointError if fewer than ``needed`` bytes are free for ``destination`` (see free_space)."""
    free = free_space(destination)
    if free < needed:
        raise CheckpointError(
            f"{destination}: needs {needed} bytes, but {free} bytes are free; free some space or use another disk"
        )


def check_partial(destination: Path, resume: bool) -> None:
    """Raise CheckpointError if the state of the partial directory does not allow a run to begin or to resume."""
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
    """Return whether the path of a partial directory exists."""
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
    """Return advice, for an error message, on what to do about an interrupted run."""
    resuming = "continue it with --resume, or " if (partial_of(destination) / JOURNAL).is_file() else ""
    return f"{resuming}remove its files with fp4kit convert --remove-stale {shlex.quote(str(destination))}"


def is_live(partial: Path) -> bool:
    """Return whether a run is writing to a directory, which is the case while it holds the lock there."""
    try:
        descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock on an open file."""
    if not HAS_LOCKS:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_folder(partial: Path) -> bool:
    """Return whether a path is a directory; False for a link to a directory."""
    return os.path.isdir(partial) and not os.path.islink(partial)


def is_partial(folder: Path) -> bool:
    """Return whether a directory is the partial directory of a run, judged by its lock file."""
    return _is_folder(folder) and ((folder / LOCK).is_file() or not any(folder.iterdir()))


def removable(destination: Path) -> Path | None:
    """Return the partial directory that ``remove_partial`` would remove, or None if there is none."""
    partial = partial_of(destination)
    if not os.path.lexists(partial):
        return None
    if not is_partial(partial):
        raise CheckpointError(f"{partial}: was not made by fp4kit; remove it yourself")
    if is_live(partial):
        raise _busy(destination)
    return partial


def remove_partial(destination: Path) -> Path | None:
    """Remove the partial directory that an interrupted run left beside a destination."""
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
    """Remove a partial directory. The lock file is removed last, so that no other run can take over the directory."""
    clear(partial, {LOCK})
    (partial / LOCK).unlink(missing_ok=True)
    partial.rmdir()


def clear(folder: Path, keep: Collection[str]) -> None:
    """Remove everything in a directory except the regular files named in ``keep``. Links are removed, not followed."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name not in keep or not entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def copy_file(source: Path, destination: Path) -> None:
    """Copy a regular file to a new file and flush the new file to disk."""
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
    """Flush a file of the partial directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        path.with_name(JOURNAL).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class Stage:
    """The state of the partial directory to which a run writes.

    folder: the partial directory.
    is_ours: True if this run may remove the content of the directory. It is False at first for a resumed run, which
        sets it to True once it has accepted the journal.
    published: True once the directory, or the result files in it, have been renamed to their final paths.
    """

    def __init__(self, folder: Path, is_ours: bool) -> None:
        self.folder, self.is_ours, self.published = folder, is_ours, False

    def is_kept_after(self, error: BaseException) -> bool:
        """Return whether the partial directory must be kept after ``error``, so that a later run can resume."""
        return not self.is_ours or ((self.folder / JOURNAL).exists() and not isinstance(error, CheckpointError))


@contextmanager
def staged_directory(
    destination: Path, resume: bool = False, paths: Mapping[str, Path] | None = None
) -> Iterator[Stage]:
    """Create and lock the partial directory of a destination, yield it, and rename it to the destination at the end."""
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
        except BaseException:  # a signal may have interrupted the removal: remove the rest
            _remove_lock_and_journal(destination)
            raise
        finally:
            os.close(lock)
    sync_directory(destination.parent)


def _publish(stage: Stage, destination: Path, paths: Mapping[str, Path]) -> None:
    """Flush the partial directory to disk, then rename it, or files in it, to their final paths."""
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
    """Record in the journal which files are about to be renamed: name, final path, device and inode per file."""
    lines = [json.dumps({"moved": [part.name, str(final.absolute()), *(_inode(part) or ())]}) for part, final in moves]
    with journal.open("a") as file:
        file.write("\n".join([*lines, ""]))
        file.flush()
        os.fsync(file.fileno())


def _moved_files(destination: Path) -> dict[Path, str]:
    """Return {final path: earlier name} for the files that an interrupted run had already renamed."""
    journal, lines = partial_of(destination) / JOURNAL, list[str]()
    with suppress(OSError, ValueError):
        if journal.stat().st_size <= MAX_BYTES:  # a larger one is damaged
            lines = journal.read_text().splitlines()
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
    """Move the files that an interrupted run had renamed to their final paths back into its partial directory."""
    for path, name in _moved_files(destination).items():
        os.rename(path, partial_of(destination) / name)


def _remove_lock_and_journal(destination: Path) -> None:
    """Remove the lock and the journal of a run after its result has been renamed to the final path."""
    # Does nothing before the rename, because another run could take over a partial directory that has no lock.
    if not is_published(destination):
        return
    if destination.is_dir():
        for name in (JOURNAL, LOCK):
            (destination / name).unlink(missing_ok=True)
    elif is_partial(partial_of(destination)):
        _remove(partial_of(destination))


def _locked(partial: Path, destination: Path) -> int:
    """Take the lock of a partial directory, and return the open descriptor of the lock file."""
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
    """Return the error to raise for a destination that another run is writing to, with advice to wait."""
    return CheckpointError(
        f"{destination}: another run is writing to it; wait for that run to end, or name another destination"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at ``path``. Another run may have removed or replaced the file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _umask() -> int:
    """Return the umask of this process. It is set to 0 for a moment, because it can only be read by setting it."""
    found = os.umask(0)
    os.umask(found)
    return found
