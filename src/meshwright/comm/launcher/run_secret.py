"""The secret of a run, which identifies its ranks, and sealed values in the store that only its ranks can write.

Any process that reaches the store can read and write there. If `launch` started the ranks, the secret is in their
environment. Otherwise rank 0 creates it. On one machine the secret is in a file that only the user can read, and the
store holds the name of the file. On several machines the secret is in the store itself.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from .._errors import NoCommunicatorError
from ..torch_hooks import Store
from .rendezvous import RankAddress

VARIABLE = "MESHWRIGHT_TOKEN"
LENGTH = 16
_SEAL = 32
_PREFIX = "meshwright-token-"
_MEMORY = Path("/dev/shm")


def new_token() -> str:
    """Return a new secret, as text."""
    return secrets.token_hex(LENGTH)


def run_token(place: RankAddress, store: Store, env: Mapping[str, str] | None = None) -> bytes:
    """Return the secret of the run; every rank must call this once."""
    env = os.environ if env is None else env
    if VARIABLE in env:
        return _parsed(env[VARIABLE], f"in {VARIABLE}")
    if not place.loopback:
        if place.rank == 0:
            store.set("token", new_token())
        return _parsed(_of_rank_0(place, store, env), "in the store")
    if place.rank == 0:
        store.set("token", _written(new_token()))
    name = _of_rank_0(place, store, env)
    token = _parsed(_read_own(name), "in the file that the store names")
    if store.add("tokens read", 1) == place.size:
        with suppress(OSError):
            os.unlink(_folder() / name)
    return token


def _of_rank_0(place: RankAddress, store: Store, env: Mapping[str, str]) -> str:
    """Return the text that rank 0 writes; raise NoCommunicatorError if it has not come within the patience."""
    seconds = float(env.get("MESHWRIGHT_PATIENCE", "1800"))
    try:
        store.wait(["token"], timedelta(seconds=seconds))
        return store.get("token").decode(errors="replace")
    except RuntimeError as error:
        raise NoCommunicatorError(
            f"rank {place.rank} in the run at {place.host}:{place.port}",
            f"no value from rank 0 in the store after {seconds:g} s: {str(error)[:200]}",
            "rank 0 has not started, or the store there belongs to another job",
            "look at the output of rank 0; set MASTER_PORT to a port that only this run uses",
        ) from error


def sealed(token: bytes, key: str, value: str) -> str:
    """Return the value with a seal for this key that only the ranks of the run can compute."""
    return _seal(token, key, value) + value


def unsealed(token: bytes, key: str, text: bytes) -> str:
    """Return the value of a sealed text. Raises NoCommunicatorError if no rank of the run wrote it."""
    found = text.decode(errors="replace")
    value = found[_SEAL:]
    if not hmac.compare_digest(found[:_SEAL].encode(), _seal(token, key, value).encode()):
        raise NoCommunicatorError(
            f"{key!r} of the run's store",
            f"{len(text)} bytes without the seal of this run",
            "another process has written into the store",
            "use a port that only this run uses, and start the run with `meshwright run` or your own user's launcher",
        )
    return value


def _seal(token: bytes, key: str, value: str) -> str:
    return hmac.new(token, f"{key}\0{value}".encode(errors="replace"), "sha256").hexdigest()[:_SEAL]


def _folder() -> Path:
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


def _written(token: str) -> str:
    """Return the name of a new file with the secret, readable by the user only."""
    name = _PREFIX + secrets.token_hex(8)
    file = os.open(_folder() / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(token)
    return name


def _read_own(name: str) -> str:
    """Return the content of a private file of the user; "" if it is no such file."""
    if not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isalnum():
        return ""
    try:
        file = os.open(_folder() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file, errors="replace") as found:
        about = os.fstat(file)
        own = about.st_uid == os.getuid() and stat.S_ISREG(about.st_mode) and not about.st_mode & 0o077
        return found.read(2 * LENGTH) if own else ""


def _parsed(text: str, where: str) -> bytes:
    with suppress(ValueError):
        if len(text) == 2 * LENGTH:
            return bytes.fromhex(text)
    raise NoCommunicatorError(
        "the secret of this run",
        f"no {2 * LENGTH} hexadecimal digits {where}",
        "the ranks of a run identify each other by the secret",
        f"start all ranks of the run with one launcher, and unset {VARIABLE} of another run",
    )
