"""Simulation of all ranks in this process: one thread per rank, of which exactly one runs at a time.

The running rank holds the *baton*. It passes the baton on only when it must wait for others, inside a collective or for
a message, and when it ends. The next rank, in rank order, that can run gets it. So a run is deterministic and without
races, and a debugger may stop inside a rank. The last rank to arrive at a collective computes the results of all ranks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from meshwright.layout import autocast_modes, generator_states, set_generator_states, user_frame, user_place

from .._errors import (
    CallError,
    DeadlockError,
    MissingCallError,
    NestedSimulationError,
    disagreement_error,
    missing_call_error,
)
from ..communicators.call import CommCall, Group, call_mismatch, is_pairwise
from ..communicators.communicator import Communicator, Receive, check_message, contiguous_copy
from ..communicators.current_communicator import current_communicator, using_communicator
from ..communicators.reductions import reduce_terms
from ..torch_hooks import GLOBAL_HOOKS, ForwardState, saved_mutable, set_saved_mutable
from .forward_mode import Scheduler, SharedLevel
from .profiler_guard import one_profiler
from .rank_globals import RankGlobals

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_AFTER_INTERRUPT = 10.0
_SHOWN_MESSAGES = 8


class Abandoned(BaseException):
    """Raised inside the other ranks once one has failed; not an Exception, so that programs do not catch it."""


class _PendingCollective:
    """The ranks that have arrived at one collective, with the input and the result of each."""

    def __init__(self) -> None:
        self.calls: dict[int, CommCall] = {}
        self.brought: dict[int, object] = {}
        self.taken: dict[int, object] = {}


class _Address(NamedTuple):
    """Source, target and tag of a message."""

    source: int
    target: int
    tag: int

    @staticmethod
    def of(rank: int, call: CommCall) -> _Address:
        """Return the address in a send or a receive of `rank`."""
        peer, *_ = call.message
        return _Address(rank, peer, call.tag) if call.kind == "send" else _Address(peer, rank, call.tag)


class _World:
    """The baton, waiting ranks, collectives and messages in flight. Only the rank with the baton accesses it."""

    def __init__(self, size: int, program: Callable[..., Any]) -> None:
        self.size = size
        self.turns = [threading.Lock() for _ in range(size)]
        for turn in self.turns:
            turn.acquire()
        self.over = threading.Lock()
        self.over.acquire()
        self.pending: list[CommCall | None] = [None] * size
        self.ended = [False] * size
        self.torch_state = [_TorchState.now()] * size
        self.globals = RankGlobals(size if size > 1 else 0, program)
        self.meetings: dict[tuple[int, ...], _PendingCollective] = {}
        self.boxes: dict[_Address, deque[tuple[str, Tensor]]] = {}
        self.failure: tuple[int | None, BaseException] | None = None
        self.running = 0
        self.threads: list[threading.Thread] = []
        self.shared: dict[object, Any] = {}

    def meet(self, rank: int, call: CommCall, brings: object, finish: Callable[[_PendingCollective], None]) -> object:
        """Return the result of `rank` from the collective of `call.group`; the last rank to arrive runs `finish`.

        Inputs are released afterwards: a rank that continues later must not hold the memory of one that continues now.
        """
        if self.failure is not None:
            raise Abandoned
        members = tuple(sorted(call.group))
        meeting = self.meetings.get(members)
        if meeting is None:
            meeting = self.meetings[members] = _PendingCollective()
        self._check_agreement(meeting, rank, call)
        meeting.calls[rank] = call
        meeting.brought[rank] = brings
        if len(meeting.calls) < len(members):
            self._wait(rank, call)
        else:
            del self.meetings[members]
            finish(meeting)
            meeting.brought.clear()
            for member in members:
                self.pending[member] = None
        return meeting.taken.pop(rank, None)

    def send(self, rank: int, call: CommCall, x: Tensor) -> None:
        """Store a message for its receiver, and wake the receiver if it waits for this message."""
        if self.failure is not None:
            raise Abandoned
        address = _Address.of(rank, call)
        self.boxes.setdefault(address, deque()).append((str(call), x))
        waits_in = self.pending[address.target]
        if waits_in is not None and waits_in.kind == "receive" and _Address.of(address.target, waits_in) == address:
            self.pending[address.target] = None

    def receive(self, rank: int, call: CommCall) -> Tensor:
        """Wait for the message and return it."""
        if self.failure is not None:
            raise Abandoned
        address = _Address.of(rank, call)
        if address not in self.boxes:
            self._wait(rank, call)
        box = self.boxes[address]
        sent, x = box.popleft()
        if not box:
            del self.boxes[address]
        check_message(call, rank, sent)
        return x

    def start(self) -> None:
        self._give(0)

    def end(self, rank: int) -> None:
        """Mark `rank` as ended; pass the baton on, or end the simulation."""
        self.ended[rank] = True
        self._leave(rank)
        following = self._next(rank)
        if following is None and not all(self.ended):
            self.fail(None, self._stuck())
            following = self._next(rank)
        elif following is None and self.boxes:
            self.fail(None, missing_call_error("a receive for every message", self._not_received(), message=True))
        if following is None:
            self.over.release()
        else:
            self._give(following)

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Store the first failure; from then on every rank that waits or makes a call is abandoned."""
        if self.failure is None:
            self.failure = (rank, error)

    def wait(self, rank: int, call: CommCall) -> None:
        """Let other ranks run until `release(rank)`; errors name `call` as the call in which the rank waits."""
        self._wait(rank, call)

    def release(self, rank: int) -> None:
        """Let a waiting rank run again, once it gets the baton."""
        self.pending[rank] = None

    def let_run(self, rank: int, others: Iterable[int]) -> bool:
        """Let the ranks after `rank` run until it is its turn again; False if none of `others` can run."""
        if all(self.ended[other] or self.pending[other] is not None for other in others):
            return False
        following = self._next(rank)
        assert following is not None, "at least `rank` can run"
        self._pass_baton(rank, following)
        return True

    def _wait(self, rank: int, call: CommCall) -> None:
        self.pending[rank] = call
        following = self._next(rank)
        if following is None:
            raise self._stuck()
        self._pass_baton(rank, following)

    def _pass_baton(self, rank: int, following: int) -> None:
        """Give the baton to the rank `following`, and return when `rank` has it again."""
        self._leave(rank)
        self._give(following)
        self.turns[rank].acquire()
        self.enter(rank)
        if self.failure is not None:
            raise Abandoned

    def _leave(self, rank: int) -> None:
        """Save the rank's values of the state that torch and the program keep once per process."""
        self.torch_state[rank] = _TorchState.now()
        self.globals.leave(rank)

    def enter(self, rank: int) -> None:
        """Restore the rank's values of that state."""
        self.torch_state[rank].set()
        self.globals.enter(rank)

    def _give(self, rank: int) -> None:
        self.running = rank
        self.turns[rank].release()

    def _next(self, rank: int) -> int | None:
        """Return the first rank after `rank` that can run; after a failure, every rank that has not ended can."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if not self.ended[other] and (self.pending[other] is None or self.failure is not None):
                return other
        return None

    def _stuck(self) -> DeadlockError | MissingCallError:
        """Return the error for ranks that all wait, or that wait for ranks that have ended."""
        waiting = {rank: call for rank, call in enumerate(self.pending) if call is not None and not self.ended[rank]}
        found = "; ".join(f"rank {rank} waits in {call}{self._line_of(rank)}" for rank, call in waiting.items())
        if self.boxes:
            found += f"; {self._not_received()}"
        calls = list(waiting.values())
        ended = {peer for call in calls for peer in call.group if self.ended[peer]}
        return _ended_ranks_error(found, calls, ended) if ended else _deadlock_error(found, calls)

    def _check_agreement(self, meeting: _PendingCollective, rank: int, call: CommCall) -> None:
        for peer, other in meeting.calls.items():
            why = call_mismatch(call, rank, other, peer)
            if why is not None:
                raise disagreement_error(
                    rank, f"{call}{self._line_of(rank)}", peer, f"{other}{self._line_of(peer)}", why
                )
            if not is_pairwise(call):
                return

    def _line_of(self, rank: int) -> str:
        """Return the line of the user's code at which a rank runs or waits."""
        frame = sys._current_frames().get(self.threads[rank].ident or 0) if self.threads else None
        line = user_frame(frame) if frame is not None else ""
        return f" at {line}" if line else ""

    def _not_received(self) -> str:
        sent = [f"rank {address.source} calls {call}" for address, box in self.boxes.items() for call, _ in box]
        more = f", and {len(sent) - _SHOWN_MESSAGES} more" if len(sent) > _SHOWN_MESSAGES else ""
        return f"not received: {', '.join(sent[:_SHOWN_MESSAGES])}{more}"


def _ended_ranks_error(found: str, calls: Sequence[CommCall], ended: set[int]) -> MissingCallError:
    """Return the error for calls that wait for ranks that have ended."""
    names = " and ".join(f"rank {rank}" for rank in sorted(ended))
    message = all(call.kind == "receive" for call in calls if not ended.isdisjoint(call.group))
    return missing_call_error(f"a call that {names} should make", f"{found}; {names} ended", message)


def _deadlock_error(found: str, calls: Sequence[CommCall]) -> DeadlockError:
    """Return the error for calls that wait for one another."""
    if any(call.kind == "receive" for call in calls):
        return DeadlockError(
            "messages between ranks",
            found,
            "every rank waits for a rank that is waiting too",
            "make each send before its rank waits, and give each send the tag that is received",
        )
    return DeadlockError(
        "collectives on several groups",
        found,
        "every rank waits for a rank that waits in another group",
        "make collectives in the same order on all ranks that share them",
    )


class _TorchState(NamedTuple):
    """State that torch keeps once per process and of which each rank has its own."""

    random: dict[str, Tensor]
    """States of the generators by device."""
    forward: ForwardState
    dtype: torch.dtype
    anomaly: tuple[bool, bool]
    hooks: tuple[dict[Any, Any], ...]
    """Hooks on all modules, by table; empty if there are none."""
    mutable: bool
    """True inside `allow_mutation_on_saved_tensors`."""

    @staticmethod
    def now() -> _TorchState:
        anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        hooks = tuple(dict(table) for table in GLOBAL_HOOKS) if any(GLOBAL_HOOKS) else ()
        dtype = torch.get_default_dtype()
        return _TorchState(generator_states(), ForwardState.now(), dtype, anomaly, hooks, saved_mutable())

    def set(self) -> None:
        set_generator_states(self.random)
        self.forward.set()
        torch.set_default_dtype(self.dtype)
        torch.set_anomaly_enabled(*self.anomaly)
        set_saved_mutable(self.mutable)
        if self.hooks or any(GLOBAL_HOOKS):
            for at, table in enumerate(GLOBAL_HOOKS):
                table.clear()
                table.update(self.hooks[at] if self.hooks else {})


class SimulatedCommunicator(Communicator):
    """Communicator of one rank of a simulation."""

    kind = "simulated"

    def __init__(self, rank: int, world: _World) -> None:
        super().__init__(rank, world.size)
        self._world = world

    @property
    def shared(self) -> dict[object, Any]:
        """Return a dict that all ranks of the simulation share."""
        return self._world.shared

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        """Do the same as `_all_reduce`, in the memory of `x`.

        Processes may use that memory too, so a program that reads `x` afterwards is wrong in a simulation as well.
        """
        out = self._all_reduce(x, call)
        return x.copy_(out) if x.is_contiguous() else out

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return cast(Tensor, self._world.meet(self.rank, call, x, _finish_all_reduce))

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        return cast(list[Tensor], self._world.meet(self.rank, call, x, _finish_all_gather))

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        return cast(Tensor, self._world.meet(self.rank, call, pieces, _finish_reduce_scatter))

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return cast(list[Tensor], self._world.meet(self.rank, call, pieces, _finish_all_to_all))

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        arrived = cast(list[Tensor], self._world.meet(self.rank, call, sends, _finish_exchange))
        return [x.to(device) for x, (_, _, _, device) in zip(arrived, receives, strict=True)]

    def _send(self, x: Tensor, call: CommCall) -> None:
        self._world.send(self.rank, call, contiguous_copy(x))

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        return self._world.receive(self.rank, call).to(device)

    def _barrier(self, call: CommCall) -> None:
        self._world.meet(self.rank, call, None, _finish_barrier)


def _order(meeting: _PendingCollective) -> Group:
    return next(iter(meeting.calls.values())).group


def _finish_all_reduce(meeting: _PendingCollective) -> None:
    brought = cast(dict[int, Tensor], meeting.brought)
    group = _order(meeting)
    total = reduce_terms([brought[rank] for rank in group], meeting.calls[group[0]].op)
    for rank in group:
        meeting.taken[rank] = total if rank == group[0] else contiguous_copy(total)


def _finish_all_gather(meeting: _PendingCollective) -> None:
    brought = cast(dict[int, Tensor], meeting.brought)
    group = _order(meeting)
    for rank in group:
        meeting.taken[rank] = [contiguous_copy(brought[peer]) for peer in group]


def _finish_reduce_scatter(meeting: _PendingCollective) -> None:
    brought = cast(dict[int, Sequence[Tensor]], meeting.brought)
    group = _order(meeting)
    for place, rank in enumerate(group):
        meeting.taken[rank] = reduce_terms([brought[peer][place] for peer in group], meeting.calls[rank].op)


def _finish_all_to_all(meeting: _PendingCollective) -> None:
    brought = cast(dict[int, Sequence[Tensor]], meeting.brought)
    group = _order(meeting)
    for place, rank in enumerate(group):
        meeting.taken[rank] = [contiguous_copy(brought[peer][place]) for peer in group]


def _finish_exchange(meeting: _PendingCollective) -> None:
    brought = cast(dict[int, Sequence[tuple[int, Tensor]]], meeting.brought)
    for rank, call in meeting.calls.items():
        queues = {peer: iter([x for to, x in brought[peer] if to == rank]) for peer in call.group}
        meeting.taken[rank] = [contiguous_copy(next(queues[source])) for source, _, _ in call.messages[1]]


def _finish_barrier(meeting: _PendingCollective) -> None:
    return None


class _ThreadModes:
    """Thread-local state of torch that a rank inherits: default device; grad, inference and autocast modes."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.autocast = autocast_modes()

    @contextmanager
    def entered(self) -> Generator[None]:
        """Set this state in the calling thread.

        Autograd's multithreading is off, so that a backward pass stays in the thread.
        """
        with torch.inference_mode(self.inference), nullcontext() if self.device.type == "cpu" else self.device:
            torch.autograd.set_multithreading_enabled(False)
            torch.set_grad_enabled(self.grad)
            for device, dtype in self.autocast:
                torch.set_autocast_enabled(device, True)
                torch.set_autocast_dtype(device, dtype)
            yield


def simulate(fn: Callable[P, T], ranks: int, *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Return the results of `fn(*args, **kwargs)` by rank; each rank runs it in a thread of this process.

    Every rank has its own state of torch's generators, those of the accelerator included. It has its own globals and
    class attributes where functions of the program assign them. All ranks start with the caller's values; the caller
    continues with those of rank 0. Lists and dicts that are only changed in place are shared. So are the states of
    Python's `random` and of NumPy. A rank that takes a distributed tensor of another rank from such a list or dict
    raises SimulatedRankError.

    The first error of any rank stops the others and is raised here, with a note that names the rank.

    >>> from meshwright.comm import current_communicator
    >>> simulate(lambda: current_communicator().rank * 10, 3)
    [0, 10, 20]
    """
    if getattr(_inside, "rank", False):
        raise NestedSimulationError(
            f"simulate(fn, {ranks}) inside a simulated rank",
            "a rank of another simulation",
            "ranks of two simulations could wait for each other",
            "call simulate once, outside, and use a mesh of some of its ranks",
        )
    if ranks < 1:
        raise CallError(
            f"simulate(fn, {ranks})", f"{ranks} ranks", "a program needs at least one rank", "call simulate(fn, 1)"
        )
    world = _World(ranks, fn)
    results: list[T | None] = [None] * ranks
    mood = _ThreadModes()

    def body(rank: int) -> None:
        results[rank] = fn(*args, **kwargs)

    threads = [
        threading.Thread(
            target=copy_context().run, args=(_run_rank, world, rank, mood, body), name=f"rank {rank}", daemon=True
        )
        for rank in range(ranks)
    ]
    world.threads = threads
    rank_here = _rank_in(world)
    scheduler = Scheduler(world.wait, world.release, world.let_run, lambda: world.failure is not None)
    level = SharedLevel(ranks, rank_here, scheduler)
    with level.installed(), one_profiler(rank_here):
        before = world.torch_state[0]
        for thread in threads:
            thread.start()
        try:
            _run_to_end(world, threads)
        except BaseException:
            before.set()
            raise
        finally:
            world.globals.end()
    world.enter(0)
    return cast(list[T], results)


class _Inside(threading.local):
    rank = False


def _rank_in(world: _World) -> Callable[[], int | None]:
    """Return a function that returns the calling rank of `world`, or None for another thread."""

    def rank() -> int | None:
        here = current_communicator() if _inside.rank else None
        return here.rank if isinstance(here, SimulatedCommunicator) and here._world is world else None

    return rank


_inside = _Inside()


def _run_rank(world: _World, rank: int, mood: _ThreadModes, body: Callable[[int], None]) -> None:
    """Run one rank in its thread, from its first turn to its last."""
    world.turns[rank].acquire()
    try:
        if world.failure is None:
            world.enter(rank)
            _inside.rank = True
            with mood.entered(), using_communicator(SimulatedCommunicator(rank, world)):
                body(rank)
    except Abandoned:
        pass
    except BaseException as error:
        at = user_place(error.__traceback__)
        error.add_note(f"raised on rank {rank} of {world.size} simulated ranks" + (f", at {at}" if at else ""))
        world.fail(rank, error)
    finally:
        world.end(rank)


def _run_to_end(world: _World, threads: list[threading.Thread]) -> None:
    """Give the baton to rank 0 and wait for the end; raise the first failure."""
    try:
        world.start()
        world.over.acquire()
    except BaseException as error:
        world.fail(None, error)
        _interrupt(threads[world.running])
        world.over.acquire(timeout=_PATIENCE_AFTER_INTERRUPT)
    if world.failure is not None:
        try:
            raise world.failure[1]
        finally:
            world.failure = None
    for thread in threads:
        thread.join()


def _interrupt(thread: threading.Thread) -> None:
    """Raise `Abandoned` in a thread at its next bytecode, for a rank that computes without making calls."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
