"""Writing a checkpoint: under another name, each rank its files, and the name at the end, by one rank.

Ranks meet only at the beginning (what there is to save, where) and in `wait`. In between each has a thread of its own
that writes and then leaves a report in the folder; rank 0's thread looks for the reports, writes what describes the
whole, and gives the folder its name. So a checkpoint is complete as soon as it can be, also where nobody waits for it.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from meshwright.layout import JsonValue, warn_user

from .._errors import (
    CheckpointError,
    CheckpointWarning,
    FolderInUseError,
    WriteTimeoutError,
    error_from_text,
    error_text,
    removed_folder_error,
    write_error,
)
from ..contents.part_writers import assign_writers
from ..contents.rank_world import World, current_world
from ..files.file_operations import WRITING, with_time_limit, write_operation
from ..formats.format_interface import Format, Parts, PartWriters, SaveJob
from ..formats.saved_state import HeldTensor, StateTable, table_of
from .folder_lock import hold_folder_on_first_rank, is_locked, lock_new, release_new
from .step_folders import abandoned_folders, is_complete, is_step, prune, set_aside, sync_folder, temporary_path

T = TypeVar("T")
GRACE = 60.0
"""Seconds that rank 0 waits for the others' reports once its own program has ended."""
REPORTS = "reports"


class _Nobody:
    """The key of the saver in a world without ranks."""


_nobody = _Nobody()
_under_way: WeakKeyDictionary[Any, Saving] = WeakKeyDictionary()
"""Communicator → the last save of its rank."""
_untold: dict[int, str] = {}
"""Failures of saves that nobody has waited for yet."""


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, HeldTensor],
    values: Mapping[str, Any],
    format: Format,
    background: bool = False,
    keep: int | None = None,
    ranks: World | None = None,
) -> Saving:
    """Begin to write a checkpoint, which becomes `path`; every rank calls it. Wait for the Saving that it returns.

    In the background the tensors are copied first, so that they may change at once. With `keep`, only so many steps
    are left beside it. With `ranks=World()`, the caller saves alone. If an earlier save failed and nobody waited for
    it, a CheckpointWarning tells so, on every rank, and this one is made. Raises CheckpointError, on every rank, for
    what cannot be saved, and for a path that is there; FolderInUseError for a folder of steps into which another job
    saves.
    """
    ranks = current_world() if ranks is None else ranks
    earlier = finish_earlier(ranks)
    table = table_of(tensors, values, ranks)

    def taken(mine: Sequence[str]) -> Parts:
        return {name: _taken(tensors[name].part, background) for name in mine}

    saving = begin_save(Path(path).absolute(), format, ranks, table, assign_writers(table.specs), taken, tensors, keep)
    _under_way[ranks.communicator or _nobody] = saving
    warn_of_earlier_failure(earlier)
    return saving


def begin_save(
    final: Path,
    format: Format,
    ranks: World,
    table: StateTable,
    shares: PartWriters,
    taken: Callable[[Sequence[str]], Parts],
    held: Mapping[str, HeldTensor] | None = None,
    keep: int | None = None,
) -> Saving:
    """Return a checkpoint whose writing has begun; `taken` gives the parts that this rank writes, by their names."""

    def new_folder() -> str | None:
        if ranks.rank != 0:
            return None
        return _on_disk(final, lambda: write_operation(final, _prepare_folder, final, keep, ranks))

    name, _ = ranks.agreed(new_folder)
    folder = final.with_name(ranks.gathered(name)[0])
    job = SaveJob(folder, ranks, table, shares, {}, held or {})
    lock = lock_new(folder) if ranks.rank == 0 else None

    def prepare() -> None:
        _on_disk(final, lambda: write_operation(folder, _check_shared, folder))
        job.parts.update(taken([name for name, _ in job.mine()]))

    try:
        ranks.agreed(prepare)
        work = _with_system_errors(final, lambda: format.prepared(job))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        release_new(lock)
        raise
    return Saving(final, job, format, work, keep, lock)


def finish_earlier(ranks: World) -> CheckpointError | None:
    """Wait for what this rank saved before; return its failure if it was not reported."""
    earlier = _under_way.pop(ranks.communicator or _nobody, None)
    if earlier is None or earlier.is_told:
        return None
    try:
        earlier.wait()
    except CheckpointError as error:
        return error
    return None


def warn_of_earlier_failure(error: CheckpointError | None) -> None:
    """Report the failure that `finish_earlier` returned."""
    if error is not None:
        warn_user(f"an earlier save failed, and the program continued\n{error}", CheckpointWarning)


@atexit.register
def _tell_at_exit() -> None:
    """Report failures that nobody has waited for; the threads that write have ended before."""
    for text in _untold.values():
        print(text, file=sys.stderr)
    _untold.clear()


def _on_disk(final: Path, act: Callable[[], T]) -> T:
    """Return `act()`; raise CheckpointError for what the system says of files, or if it does not answer in time."""
    return _with_system_errors(final, lambda: with_time_limit(act, WRITING))


def _with_system_errors(final: Path, act: Callable[[], T]) -> T:
    """Return `act()`; raise CheckpointError for what the system says of files."""
    try:
        return act()
    except OSError as error:
        raise write_error(final, error) from error


def _prepare_folder(final: Path, keep: int | None, ranks: World) -> str:
    """Return the name of a new folder beside the checkpoint's."""
    if keep is not None and keep < 1:
        raise CheckpointError(
            f"keep={keep}",
            "fewer than one checkpoint",
            "the new checkpoint is always kept",
            "use keep=1 or more, or keep=None to keep all",
        )
    if os.path.lexists(final) and (not is_step(final) or is_complete(final)):
        raise _taken_name(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    if is_step(final):
        hold_folder_on_first_rank(final.parent, ranks)
        if os.path.lexists(final):
            set_aside(final)
    for path in abandoned_folders(final):
        if is_locked(path):
            raise FolderInUseError(
                f"to save {final}",
                f"another job that writes this checkpoint, in {path.name}",
                "two jobs would write one checkpoint",
                "save to another path, or end the other job first",
            )
        shutil.rmtree(path, ignore_errors=True)
    folder = temporary_path(final)
    (folder / REPORTS).mkdir(parents=True)
    return folder.name


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"to save in {folder.parent}",
            "no folder there from rank 0",
            "all ranks write into one folder",
            "use a path on a file system that all ranks share",
        )


def _taken_name(final: Path) -> CheckpointError:
    return CheckpointError(
        f"to save {final}",
        "an existing file or folder",
        "a checkpoint is never overwritten",
        "save to another path, or remove the existing one first",
    )


def _taken(x: Tensor, copy: bool) -> Callable[[], Tensor]:
    """Return the function that returns the tensor on the CPU: a copy made now, or one made on demand."""
    if copy:
        taken = x.detach().to("cpu", copy=True).contiguous()
        return lambda: taken
    return lambda: x.detach().cpu().contiguous()


class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self,
        path: Path,
        job: SaveJob,
        format: Format,
        work: Callable[[], Any],
        keep: int | None,
        lock: int | None = None,
    ) -> None:
        self.path, self._lock = path, lock
        self._job, self._format, self._work, self._keep = job, format, work, keep
        self._error: CheckpointError | None = None
        self._told: list[str] | None = None
        self._waited = False
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of rank {job.ranks.rank}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if this rank has no work left; `wait` raises its errors."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if an error is known on this rank; `wait` raises it."""
        return self._error is not None

    @property
    def is_told(self) -> bool:
        """True if `wait` has been called, which raises the error if there is one."""
        return self._waited

    def wait(self) -> Path:
        """Return the checkpoint's path once it is complete; every rank calls it. Raises, on all, what failed on any."""
        if self._waited:
            return self._result()
        self._waited = True
        ranks = self._job.ranks
        if ranks.rank != 0:
            self._thread.join()
        told = ranks.gathered(error_text(self._error) if ranks.rank != 0 and self._error else None)
        self._told = next(filter(None, told), None)
        self._thread.join()
        told = ranks.gathered(error_text(self._error) if self._error else None)
        first = next(filter(None, told), None)  # rank 0's, if it failed: that is the first that it met
        if first is not None and ranks.size > 1:
            self._error = error_from_text(first)
        _untold.pop(id(self), None)
        key = ranks.communicator or _nobody
        if _under_way.get(key) is self:
            del _under_way[key]  # it refers to its communicator, which would never end
        return self._result()

    def _result(self) -> Path:
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self) -> None:
        rank, folder = self._job.ranks.rank, self._job.folder
        try:
            report = _on_disk(self.path, self._work)
            _on_disk(self.path, lambda: write_operation(folder, _write_json, folder / REPORTS / f"{rank}.json", report))
            if rank == 0:
                _on_disk(self.path, self._commit)
        except BaseException as error:
            self._error = error if isinstance(error, CheckpointError) else error_from_text(error_text(error))
            _untold[id(self)] = str(self._error)
            if not isinstance(error, WriteTimeoutError):  # what does not answer now does not answer again
                said = error_text(error)
                with suppress(CheckpointError):
                    _on_disk(self.path, lambda: write_operation(folder, self._clean_up, said))
        finally:
            release_new(self._lock)
            self._work = _nothing
            self._job.parts.clear()  # the copies

    def _clean_up(self, told: list[str]) -> None:
        """Tell rank 0's thread that this rank failed; remove the folder if this is rank 0."""
        rank, folder = self._job.ranks.rank, self._job.folder
        with suppress(OSError):
            _write_json(folder / REPORTS / f"{rank}.failed", told)
        if rank == 0:
            gone = temporary_path(self.path)
            with suppress(OSError):  # under the old name, other ranks could write while the folder is removed
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _commit(self) -> None:
        """Describe the whole and give the folder its name, once all ranks have written."""
        job, final = self._job, self.path
        self._format.finish(job, [self._report(rank) for rank in range(job.ranks.size)])
        write_operation(job.folder, self._rename)
        if self._keep is not None:
            write_operation(final.parent, prune, final.parent, self._keep)

    def _rename(self) -> None:
        """Give the folder its name."""
        folder, final = self._job.folder, self.path
        shutil.rmtree(folder / REPORTS)
        sync_folder(folder)
        if os.path.lexists(final):
            raise _taken_name(final)
        os.rename(folder, final)
        with suppress(OSError):  # the checkpoint is complete under its name
            sync_folder(final.parent)

    def _report(self, rank: int) -> JsonValue:
        """Return the report of a rank, once it has written its part. Raises CheckpointError if the rank failed."""
        path, has_ended = self._job.folder / REPORTS / f"{rank}.json", self._job.ranks.has_ended
        pause, end = 0.001, None
        ended = False
        while not write_operation(path, path.exists):
            failed = path.with_suffix(".failed")
            if write_operation(failed, failed.exists):
                raise error_from_text(json.loads(write_operation(failed, failed.read_text)))
            if not write_operation(path.parent, path.parent.is_dir):
                raise removed_folder_error(self.path, f"no folder {path.parent}")
            if end is None and not threading.main_thread().is_alive():
                end = time.monotonic() + GRACE
            if self._told is not None:
                raise error_from_text(self._told)
            if ended or (end is not None and time.monotonic() > end):
                raise CheckpointError(
                    f"to save {self.path}",
                    f"no report from rank {rank}",
                    "the rank failed or ended before it had written its part",
                    "read the output of that rank",
                )
            time.sleep(pause)
            pause, ended = min(2 * pause, 0.1), has_ended(rank)  # its report may have come just before its end
        return json.loads(write_operation(path, path.read_text))


def _nothing() -> None:
    return None


def _write_json(path: Path, value: JsonValue) -> None:
    """Write a JSON file that appears complete or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value))
    os.replace(beside, path)
