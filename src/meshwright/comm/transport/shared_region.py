"""Memory that processes of one host share, and waiting for a value that another process writes there.

A number that one process writes and another one reads is a flag. Once the flag is seen, earlier writes are visible.
Processors of the x86 family guarantee that order for plain writes; on others no memory is shared.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

FOLDER = Path("/dev/shm")
_PREFIX = "meshwright-"
_PATIENT, _CROWDED = (400, 1000), (50, 10)
"""Numbers of checks without a pause, and of checks that yield the processor."""
_REST = 50e-6
"""Pause before each later check, in seconds."""
_BETWEEN_ALARMS = 0.05


def host_identity(env: Mapping[str, str] | None = None) -> str:
    """Return a text that is equal for two processes that can share memory; "" for a process that shares none.

    MESHWRIGHT_SHARED_MEMORY=off turns sharing off.
    """
    env = os.environ if env is None else env
    ordered = platform.machine().lower() in ("x86_64", "amd64")
    if env.get("MESHWRIGHT_SHARED_MEMORY") == "off" or not (ordered and FOLDER.is_dir()):
        return ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {FOLDER.stat().st_dev}"
    return ""


def create_region(size: int) -> tuple[str, mmap.mmap] | None:
    """Return the name of new shared memory and the memory, `size` bytes of zeros; None if there is no space."""
    name = _PREFIX + secrets.token_hex(16)
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)  # a full folder raises here; otherwise a later write would kill the process
        return name, mmap.mmap(file, size)
    except OSError:
        unlink_region(name)
        return None
    finally:
        os.close(file)


def attach_region(name: str, size: int) -> mmap.mmap | None:
    """Return the shared memory with that name.

    None if it does not exist, has another size, or belongs to another user.
    """
    if not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isalnum():
        return None
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        about = os.fstat(file)
        return mmap.mmap(file, size) if about.st_size == size and about.st_uid == os.getuid() else None
    except OSError:
        return None
    finally:
        os.close(file)


def unlink_region(name: str) -> None:
    """Remove the name of shared memory. It is freed when the last process unmaps it."""
    with suppress(OSError):
        os.unlink(FOLDER / name)


@cache
def checks_before_sleep() -> tuple[int, int]:
    """Return the numbers of checks before a rank sleeps.

    They are small if there are more ranks than processors, so that other ranks can compute.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return _CROWDED if ranks.isdigit() and int(ranks) > (os.cpu_count() or 1) else _PATIENT


def wait_for(seen: Callable[[], bool], alarm: Callable[[], None], limit: float) -> bool:
    """Wait until `seen()`; False after `limit` seconds. `alarm()` is called now and then, and may raise."""
    return wait_shortly(seen) or _rest_until(seen, alarm, limit)


def wait_shortly(seen: Callable[[], bool]) -> bool:
    """True once `seen()`; False if it is not within the time for which the process does not sleep."""
    looks, yields = checks_before_sleep()
    for _ in range(looks):
        if seen():
            return True
    for _ in range(yields):
        os.sched_yield()
        if seen():
            return True
    return False


def _rest_until(seen: Callable[[], bool], alarm: Callable[[], None], limit: float) -> bool:
    begin = latest = time.monotonic()
    while True:
        time.sleep(_REST)
        if seen():
            return True
        now = time.monotonic()
        if now - latest > _BETWEEN_ALARMS:
            latest = now
            alarm()
        if now - begin > limit:
            return seen()


def is_running(process: int) -> bool:
    """True if the process exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
