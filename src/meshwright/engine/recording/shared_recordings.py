"""Record programs once for all simulated ranks: ranks in one process reuse what the first one recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, TypeVar

from torch import Tensor

from meshwright.comm import Communicator, SimulatedCommunicator
from meshwright.graph import (
    BatchPredicate,
    Capture,
    Executed,
    Input,
    Layouts,
    Program,
    Run,
    are_alike,
    canonical_text_or_none,
    captured_for,
    complete,
    is_lifted,
    is_plain,
    runner,
    specs_in,
    with_layouts,
)
from meshwright.layout import Cache, Spec
from meshwright.tensor import leaves_in

from ..marks.default_mesh import get_mesh
from .setting import Roots, torch_state
from .setting_text import layout_text

T = TypeVar("T")
MOST_KEPT = 128
"""Results that are kept for other ranks; a rank that comes too late makes its own."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program, the rank that recorded it, and those of its constants that were the captured program's."""

    program: Program
    fits: BatchPredicate
    rank: int
    constants: tuple[Tensor, ...]
    ran: Executed


def recorded_once(
    here: Communicator, captured: Capture, how: object, record: Callable[[], Program], alike: bool
) -> tuple[Program, BatchPredicate]:
    """Return `record()` and the test of batches that fit it, or both as an earlier simulated rank recorded them.

    `how` is everything beside the captured program that the recording depends on. The n-th program that a rank records
    is shared with the n-th programs of other ranks only, since a later model may have other hooks or another optimizer.
    A rank with parts of other shapes records its own program. `alike` is True if each rank makes the same tensors of
    Python numbers while it records.
    """
    if not isinstance(here, SimulatedCommunicator):
        return record(), captured.fits()
    specs = tuple((i.name, i.spec and i.spec.concrete) for i in captured.program.inputs)
    modes = tuple((n.origin.grad, n.origin.autocast, n.origin.context) for n in captured.program.nodes)
    number = nth_request(here, "program")
    known: list[_Recorded] = _shared_results(here).setdefault(
        ("programs", number, captured.program.numbered_text, specs, modes, repr(how)), []
    )
    for found in known:
        fits_here = are_alike(specs_in(found.program), found.rank, here.rank)
        if fits_here and is_shared(found.program, found.constants, alike):
            captured.ran.update(found.ran)
            return _with_constants(found, constants_of(captured)), found.fits
    program = record()
    fits = captured.fits()
    known.append(_Recorded(program, fits, here.rank, constants_of(captured), captured.ran))
    return program, fits


def captured_once(
    here: Communicator, batch: Sequence[Any], how: object, roots: Roots, make: Callable[[], Capture]
) -> Capture:
    """Return `make()`, or what it returned to a simulated rank whose module is alike wherever the code can read.

    `how` is all that decides beside the batch, the roots and the state of torch.
    """
    if not isinstance(here, SimulatedCommunicator) or here.size == 1 or not all(map(_is_bare, leaves_in(batch))):
        return make()
    leaves = [_tensor_facts(x) if isinstance(x, Tensor) else x for x in leaves_in(batch)]
    key = ("captures", nth_request(here, "capture"), repr((leaves, how, [*torch_state()], get_mesh())))
    known: list[Capture] = _shared_results(here).setdefault(key, [])
    for each in known:
        found = captured_for(each, roots.network, roots.named())
        if found is not None:
            return found
    captured = make()
    if not captured.is_own:
        known.append(captured)
    return captured


def _is_bare(x: object) -> bool:
    """True for a plain value, and for a tensor without attributes that a forward pass sees."""
    return all(name.startswith("_") for name in vars(x)) if isinstance(x, Tensor) else is_plain(x)


def _tensor_facts(x: Tensor) -> object:
    return type(x), layout_text(x), x.device, x.requires_grad


class SteadyCalls:
    """Checksums of calls that changed nothing in two runs: those of saved programs and of other simulated ranks."""

    def __init__(self, here: Communicator, saved: Iterable[str]) -> None:
        self._saved, self._others = set(saved), set[str]()
        if isinstance(here, SimulatedCommunicator):
            self._others = here.shared.setdefault(("steady calls", nth_request(here, "steady call")), set())

    def __contains__(self, checksum: str) -> bool:
        return checksum in self._saved or checksum in self._others

    def add(self, checksum: str | None) -> None:
        if checksum is not None:
            self._others.add(checksum)


def nth_request(here: Communicator, what: str) -> int:
    """Return the number of earlier requests for `what` on this rank; simulated ranks make them in the same order."""
    if not isinstance(here, SimulatedCommunicator):
        return 0
    return next(here.shared.setdefault((what, here.rank), count()))


def completed_once(here: Communicator, program: Program, given: Mapping[str, Spec]) -> Layouts:
    """Return the completed layouts of the program; simulated ranks with the same program and marks share them.

    Layouts of symbolic sizes are shared with no other rank, which has symbols of its own.
    """
    symbolic = any(i.role == "size" for i in program.inputs)
    meaning = canonical_text_or_none(program) if isinstance(here, SimulatedCommunicator) and not symbolic else None
    if meaning is None:
        return complete(program, given)
    names = tuple(v.name for v in chain((i.value for i in program.inputs), *(node.outs for node in program.nodes)))
    key = ("layouts", meaning, names, tuple(sorted(given.items(), key=lambda item: item[0])))
    return made_once(here, key, lambda: complete(program, given))


def laid_once(here: Communicator, program: Program, layouts: Layouts) -> Program:
    """Return the program with the layouts; simulated ranks that share both share it, with all that it remembers."""
    key = ("laid out", id(program), id(layouts))
    return made_once(here, key, lambda: (program, layouts, with_layouts(program, layouts)))[2]


def searched_once(here: Communicator, program: Program, how: object, search: Callable[[], T]) -> T:
    """Return `search()`, or its result on a simulated rank with the same program; `how` is what it depends on besides.

    All ranks then share one result, and each reads it by the names of its own values.
    """
    if not isinstance(here, SimulatedCommunicator):
        return search()
    frozen = tuple(i.frozen for i in program.inputs)
    return made_once(here, ("searches", program.numbered_text, frozen, repr(how)), search)


def made_once(here: Communicator, key: object, make: Callable[[], T]) -> T:
    """Return `make()`, or its result on a simulated rank with an equal key."""
    if not isinstance(here, SimulatedCommunicator):
        return make()
    kept = _shared_results(here)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _shared_results(here: SimulatedCommunicator) -> Cache[Any, Any]:
    """Return what ranks made for each other."""
    return here.shared.setdefault("made once", Cache[Any, Any](MOST_KEPT))


def runner_once(here: Communicator, program: Program) -> Run:
    """Return the function that runs the program; simulated ranks with one program share it, whatever its constants."""
    key = ("runs", program.nodes, program.writes, id(program.outputs))
    return made_once(here, key, lambda: (program, runner(program)))[1]


def is_shared(program: Program, constants: Iterable[Tensor], alike: bool) -> bool:
    """True if each constant of the program is one of the captured call's `constants`, or equal on all ranks.

    `alike` is True if each rank makes the same tensors of Python numbers while it records.
    """
    known = {id(x) for x in constants}
    own = (i.source for i in program.inputs if i.role == "constant" and id(i.source) not in known)
    return all(alike and is_lifted(x) for x in own)


def constants_of(captured: Capture) -> tuple[Tensor, ...]:
    """Return the constants of the captured program."""
    return tuple(i.source for i in captured.program.inputs if i.role == "constant")


def constant_numbers(program: Program, constants: Sequence[Tensor]) -> dict[int, int]:
    """Return the places of the inputs that are `constants` of the captured call: place → number of the constant."""
    numbers = {id(x): number for number, x in enumerate(constants)}
    places = ((at, numbers.get(id(given.source))) for at, given in enumerate(program.inputs))
    return {at: number for at, number in places if number is not None}


def _with_constants(found: _Recorded, mine: Sequence[Tensor]) -> Program:
    """Return the program with this rank's own constants in place of the other rank's."""
    became = {id(x): y for x, y in zip(found.constants, mine, strict=True)}

    def own(given: Input) -> Input:
        new = became.get(id(given.source)) if given.role == "constant" else None
        return given if new is None else replace(given, source=new)

    return replace(found.program, inputs=tuple(map(own, found.program.inputs)))
