"""A lock that lets only one job at a time save into a folder of steps.

Rank 0 of the job holds the lock from its first save on: `flock` on the folder itself, or on a file in it if the file
system does not lock folders. The system releases the lock when the process ends, however it ends. Reading needs no
lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from meshwright.layout import warn_user

from .._errors import CheckpointWarning, FolderInUseError, write_error
from ..contents.rank_world import World

LOCK_FILE = ".meshwright.lock"
PATIENCE = 2.0
"""Seconds in which a job that is ending may still hold the lock."""
_held: dict[tuple[int, int], int] = {}
"""Device and inode of a folder → the descriptor that holds its lock."""
_writing: set[int] = set()
"""Descriptors that hold the locks of folders in which checkpoints are written."""
_one_by_one = threading.Lock()
_users: dict[tuple[int, int], set[int]] = {}
"""Device and inode of a folder → ids of the jobs of this process that save there."""
_NOT_HERE = {errno.EBADF, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM}
"""Errors of file systems that lock only files."""


def hold_folder(folder: str | os.PathLike[str], ranks: World) -> None:
    """Hold the lock of a folder until the job ends; every rank calls it.

    If the file system has no locks, a CheckpointWarning says so.

    Raises:
        FolderInUseError: another job holds the lock; raised on every rank.
    """
    ranks.agreed(lambda: hold_folder_on_first_rank(Path(folder).absolute(), ranks) if ranks.rank == 0 else None)


def hold_folder_on_first_rank(folder: Path, ranks: World) -> None:
    """Hold the lock of a folder until the job ends; only rank 0 calls it. Raises the errors of `hold_folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts = os.stat(folder)
        key = (facts.st_dev, facts.st_ino)
        with _one_by_one:
            if key not in _held:
                _held[key] = _locked(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    if ranks.communicator is None:
        _users.setdefault(key, set()).add(0)
    elif id(ranks.communicator) not in _users.setdefault(key, set()):
        _users[key].add(id(ranks.communicator))
        weakref.finalize(ranks.communicator, _release, key, id(ranks.communicator)).atexit = False


def _release(key: tuple[int, int], user: int) -> None:
    """Release the lock once the last job of this process that used it has ended."""
    users = _users.get(key, set())
    users.discard(user)
    if not users and key in _held:
        os.close(_held.pop(key))


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock, or one without it if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(descriptor, folder)
        return descriptor
    except FolderInUseError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NOT_HERE:
            return _without(folder, error)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _take(descriptor, folder)
    except FolderInUseError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        return _without(folder, error)
    return descriptor


def _take(descriptor: int, folder: Path) -> None:
    """Take the lock. Raises FolderInUseError if another process holds it, OSError if there are no locks."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise FolderInUseError(
                    f"to save into {folder}",
                    "another job that saves there" + _holder(descriptor),
                    "two jobs would remove and replace each other's steps",
                    "save to another folder, or end the other job first",
                ) from error
        time.sleep(0.05)


def _holder(descriptor: int) -> str:
    """Return the process that holds the lock, in words, if the system says so."""
    inode = str(os.fstat(descriptor).st_ino)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and words[5].split(":")[-1] == inode:
                return f" (process {words[4]})"
    return ""


def _without(folder: Path, error: OSError) -> int:
    """Warn that there are no locks; return a descriptor that holds none."""
    warn_user(
        f"{folder}: the file system has no locks ({error.strerror}), so a second job that saves there is not noticed",
        CheckpointWarning,
    )
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def is_locked(folder: Path) -> bool:
    """True if a living process holds the lock of a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def lock_new(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of a new folder; None if there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    _writing.add(descriptor)
    return descriptor


def release_new(descriptor: int | None) -> None:
    """Release the lock that `lock_new` took."""
    if descriptor in _writing:
        _writing.discard(descriptor)
        os.close(descriptor)


def _after_fork() -> None:
    """Close the descriptors in a child: the lock is the parent's."""
    for descriptor in (*_held.values(), *_writing):
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _writing.clear()
    _users.clear()


os.register_at_fork(after_in_child=_after_fork)
