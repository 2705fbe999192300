"""Guards of a recorded program, and the check that a forward pass changes no Python state.

A program is valid while everything that Python code read during recording is unchanged. `Guards` stores all values that
the executed code could read (`reachable_slots`), and compares them before each step. `check_repeatable` compares the
same slots before and after a forward pass: state that changes in each pass cannot be part of a program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.tensor import map_tensors, tensors_in

from .._errors import SideEffectError
from ..torch_hooks import FakeTensor
from .executed import Executed, executed_code, writes
from .kept_tensors import KeptTensor
from .object_equivalence import are_twins
from .reachable_slots import LAYER_HOOKS, NUMBERED_HOOKS, Reach, any_name
from .slots import Change, ContainerSlot, NamespaceSlot, Slot, content, same_content

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = {}


class Guards:
    """The slots that were read, with their values at that time."""

    def __init__(self, slots: Iterable[Slot], names: Collection[str] = (), parts: Collection[str] = ()) -> None:
        self.slots, self.names, self.parts = tuple(slots), names, parts

    @classmethod
    def of(cls, roots: Mapping[str, Any], ran: Executed | None = None) -> Guards:
        """Return the guards for the code in `ran`; if it is None, for all code that the roots could call.

        Raises SideEffectError if the forward pass reads the states of an optimizer.
        """
        reach = Reach(roots, ran)
        slots = [*reach.slots(), *_layer_slots(reach)]
        if reach.meets_optimizers and ran is not None:
            reads = Reach(roots, ran.only_forward(), reads_optimizers=True)
            _check_states(reads)
            slots += reads.slots()
        return cls(slots, reach.names, reach.parts)

    def holds(self) -> bool:
        """True if nothing changed: all values are the same objects, or equal plain values."""
        return next(self.changes(), None) is None

    def changes(self) -> Iterator[Change]:
        """Yield the label of each changed slot, with its value before and now."""
        for slot in self.slots:
            yield from slot.changes()

    def restore(self) -> None:
        """Restore the stored values."""
        for slot in self.slots:
            slot.restore()


def _check_states(reach: Reach) -> None:
    """Raise SideEffectError for a forward pass that reads the states of an optimizer, which its step changes."""
    if reach.reads_states():
        raise SideEffectError(
            "recording a training step",
            "the forward pass or the loss reads optimizer.state",
            "only the optimizer's step, which is part of the program, may read and write states",
            "keep the values that the forward pass reads in a buffer (register_buffer)",
        )


def _layer_slots(reach: Reach) -> Iterator[Slot]:
    """Yield slots for the submodules, parameters, buffers and hooks of layers."""
    for label, layer in reach.modules:
        for table in ("_modules", "_parameters", "_buffers", *LAYER_HOOKS):
            held: dict[Any, Any] | None = layer.__dict__.get(table)
            if held is not None:
                unordered = table in ("_parameters", "_buffers")
                yield ContainerSlot(f"{label}{table}", held, unordered, numbered=table in NUMBERED_HOOKS)


class _Restored:
    """State that the code of a call could change, stored for comparison and restoration, with random generators.

    Before the call it is unknown which attributes the code of installed packages reads, so all attributes of layers
    are restored.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.guards, self.drawn = Guards.of(roots), _generators()
        self.attributes = [*_attributes(roots)]

    def moved(self) -> str | None:
        """Return the name of a library whose random generator advanced, or None."""
        pairs = zip(_GENERATORS, self.drawn, _generators(), strict=True)
        return next((name for name, before, now in pairs if before != now), None)

    def restore(self) -> None:
        self.guards.restore()
        for attributes in self.attributes:
            attributes.restore()
        _set_generators(self.drawn)


def _attributes(roots: Mapping[str, Any]) -> Iterator[NamespaceSlot]:
    """Yield a slot for all attributes of each layer."""
    layers = {m: name for root in roots.values() if isinstance(root, nn.Module) for name, m in root.named_modules()}
    for layer, name in layers.items():
        yield NamespaceSlot(f"{name}." if name else "", vars(layer), tuple(vars(layer)), any_name, layer)


@dataclass(frozen=True, slots=True)
class PassComparison(Generic[T]):
    """Functions by which `check_repeatable` compares the passes of a call.

    `alike` is True if two passes gave the same. `known` is True if two passes of an earlier call of the same code gave
    the same as this pass. `numbers_of` returns real tensors for the fake ones that Python keeps of a pass, and None for
    those without numbers. `asked_by` returns the tensors whose numbers Python read through what a pass gave.
    """

    alike: Callable[[T, T], bool]
    known: Callable[[T, Executed], bool]
    numbers_of: Callable[[T, Sequence[Tensor]], Sequence[Tensor | None]]
    asked_by: Callable[[T], Sequence[Tensor]] = lambda _: ()


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """All places that the code which `ran` can read, with what they held."""

    guards: Guards
    ran: Executed

    def of_twin(self, roots: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> ReadSlots | None:
        """Return the places of other roots if the code would read the same from these, else None.

        `tensors` maps the id of each parameter and buffer to that of the other roots.
        """
        found = ReadSlots(Guards.of(roots, self.ran), self.ran)
        return found if are_twins(self.guards.slots, found.guards.slots, tensors) else None

    def are_of(self, ran: Executed) -> bool:
        """True if these are all places that the code which `ran` can read."""
        return ran.codes.keys() == self.ran.codes.keys() and len(ran.asked) == len(self.ran.asked)


@dataclass(frozen=True, slots=True)
class RepeatableCall(Generic[T]):
    """Result of a call, and the code that ran. `places` is None if the call set some places."""

    gave: T
    ran: Executed
    places: ReadSlots | None


def check_repeatable(
    roots: Mapping[str, Any],
    run: Callable[[], T],
    how: PassComparison[T],
    asked: str,
    beside: Mapping[str, Any] = _NOTHING,
) -> RepeatableCall[T]:
    """Return what `run()` gives, after making sure that every further call would do the same.

    The places are those of the roots, and of roots `beside` them that the call does not run.

    State that only the first call changes may stay; then the result of a second call is returned. There is no second
    call if the first one changed nothing that the roots hold, and its result is known or it ran no code of installed
    packages that may change objects.

    Raises:
        SideEffectError: each call changes something, or the results of the first two calls differ. The state is
            restored before.
    """
    before = _Restored(roots)
    try:
        with executed_code() as ran:
            first = run()
        _check_generators(before, asked)
        _check_outside(ran, asked)
        ran.asked += how.asked_by(first)
        ran.before_update()
        all_roots = {**roots, **beside}
        guards, seen = Guards.of(all_roots, ran), ran.copy()
        _check_outside(ran, asked)
        settled = {change[0]: change for change in before.guards.changes()}
        if not settled and (not any(writes(code) for code in ran.installed()) or how.known(first, ran)):
            _replace_fakes(_attributes(roots), first, how)
            return RepeatableCall(first, ran, ReadSlots(guards, seen))
        is_kept = _replace_fakes([*guards.slots, *_attributes(roots)], first, how)
        between = Guards.of(all_roots, ran) if is_kept else guards
        _check_real(between, asked)
        second, again = _run_again(run, before, asked)
        if is_kept:
            _replace_fakes([*Guards.of(all_roots, ran).slots, *_attributes(roots)], second, how)
        _check_unchanged(between, settled, asked)
        if settled and not how.alike(first, second):
            raise side_effect(asked, *next(iter(settled.values())))
    except BaseException:
        before.restore()
        raise
    if not settled and again.codes.keys() <= seen.codes.keys():
        return RepeatableCall(second, ran, ReadSlots(guards, seen))
    again.asked += how.asked_by(second)
    ran.update(again)
    ran.before_update()
    return RepeatableCall(second, ran, None)


def _replace_fakes(slots: Iterable[Slot], gave: T, how: PassComparison[T]) -> bool:
    """Replace fake tensors that Python keeps of a pass: by real ones, or by KeptTensors where they have no numbers.

    Return True if there were any.
    """
    places = [(slot, key, value) for slot in slots for key, value in slot.values() if _has_fakes(value)]
    kept = {id(x): x for _, _, value in places for x in _fakes_in(value)}
    real = dict(zip(kept, how.numbers_of(gave, list(kept.values())), strict=True)) if kept else {}

    def stand_in(x: Tensor, label: str) -> Tensor:
        number = real.get(id(x), x)
        return KeptTensor.at(label) if number is None else number

    for slot, key, value in places:
        slot.put(key, map_tensors(partial(stand_in, label=f"{slot.label}{key}"), value))
    return bool(places)


def _has_fakes(value: object) -> bool:
    return next(_fakes_in(value), None) is not None


def _fakes_in(value: object) -> Iterator[Tensor]:
    """Yield the value if it is a fake tensor, or the fake tensors in a tuple. Other containers have their own slots."""
    if isinstance(value, tuple) or issubclass(type(value), Tensor):
        yield from (x for x in tensors_in(value) if issubclass(type(x), FakeTensor))


def _run_again(run: Callable[[], T], before: _Restored, asked: str) -> tuple[T, Executed]:
    """Return what one more call gives, and the code that ran. Raise SideEffectError if it draws random numbers."""
    with executed_code() as again:
        found = run()
    _check_generators(before, asked)
    return found, again


def _check_unchanged(between: Guards, settled: Mapping[str, Change], asked: str) -> None:
    """Raise SideEffectError if the second call changed something."""
    change = next((c for c in between.changes() if not _is_made_anew(c[1], c[2])), None)
    if change is not None:
        raise side_effect(asked, *settled.get(change[0], change))


def _is_made_anew(before: object, after: object) -> bool:
    """True for two lists or dicts that hold the same objects and KeptTensors: each pass makes a new one."""
    if type(before) is not type(after) or type(before) not in (list, dict):
        return False
    held = content(before)
    return same_content(held, content(after)) and any(isinstance(x, KeptTensor) for x in held)


def _check_generators(before: _Restored, asked: str) -> None:
    moved = before.moved()
    if moved is not None:
        what = f"the state of {moved}'s random generator"
        raise side_effect(asked, what, "another", "advanced", _DRAWN)


def _check_outside(ran: Executed, asked: str) -> None:
    """Raise SideEffectError for a call whose result no guard can compare."""
    for call in ran.outside:
        raise SideEffectError(
            asked,
            f"it calls {call}",
            "a program is recorded once, so the result of the call would never change",
            "pass the result as a tensor of the batch, or make the call outside forward() and the loss",
        )


def _check_real(guards: Guards, asked: str) -> None:
    """Raise SideEffectError if a fake tensor is kept."""
    for slot in guards.slots:
        for key, value in slot.values():
            if _has_fakes(value):
                raise side_effect(asked, f"{slot.label}{key}", "another", "a tensor without numbers", _KEPT)


_DRAWN = "use torch's random operators, a tensor of the batch, or Strategy(full_graph=False), which runs this in Python"
_KEPT = "compute the table in __init__ or again in each call, or write to a buffer by tensor operations"
_BUFFER = "use a buffer (register_buffer), and change it by tensor operations"


def side_effect(asked: str, what: str, before: object, after: object, fix: str = _BUFFER) -> SideEffectError:
    """Return the error for a change of Python state."""
    was, now = _short_text(before), _short_text(after)
    return SideEffectError(
        asked,
        f"{what} was {was}, and is {now} after it" if was != now else f"{what}, {now}, was changed",
        "a program is recorded once, so changes that Python makes in each pass would be lost",
        fix,
    )


def _short_text(value: object) -> str:
    if isinstance(value, Tensor) and not isinstance(value, KeptTensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


_GENERATORS = ("Python", "NumPy", "torch")


def _generators() -> tuple[Any, Any, bytes]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, bytes(np.asarray(keys)), *rest), bytes(torch.get_rng_state().numpy())


def _set_generators(states: tuple[Any, Any, bytes]) -> None:
    python, (kind, keys, *rest), ours = states
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
