"""`sync`: the sampler gets the trainer's weights in its own layouts; shared memory where both have the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from meshwright.checkpoint import World, current_world
from meshwright.tensor import Mark, local_parts, mark_of

from ._errors import StaleWeightsError, WeightError
from ._pairs import ASKED, TensorPair, pairs_of
from ._rounds import Move, keep, rounds_of, run_round
from ._tensors import (
    empty_part,
    module_of,
    named_tensors,
    part_of,
    replace_tensor,
    shares_memory,
    with_part,
)
from ._versions import largest_on_ranks, observed_version, versions_of

WhenStale = Literal["error", "sync", "keep"]
MEMORY_CAP = 256 << 20


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of `sync` on this rank.

    Attributes:
        version: Number of the version that the sampler has now.
        shared: Names of the tensors whose memory the sampler shares with the trainer.
        copied: Names of the tensors that were written to the sampler's own memory by this call.
        received: Bytes that this rank received for them.
        rounds: Number of exchanges among the ranks.
    """

    version: int
    shared: tuple[str, ...]
    copied: tuple[str, ...]
    received: int
    rounds: int


@dataclass(slots=True)
class Link:
    """A sampler's model and the trainer that it gets its weights from; `sync` makes it."""

    trainer: nn.Module
    sampler: ReferenceType[nn.Module]
    memory_cap: int
    when_stale: WhenStale
    version: int = 0
    asleep: bool = False
    shared: frozenset[str] = frozenset()
    """Names of the sampler's tensors whose memory is a trainer's: this one's, or the one's before it."""
    copied: dict[str, Mark] = field(default_factory=dict[str, Mark])
    """Name of a tensor with memory of its own → its mark after the last copy. Tied weights have an entry for each."""
    places: dict[str, tuple[object, int]] = field(default_factory=dict[str, tuple[object, int]])
    """Name of a tensor of the sampler → its memory and its address after the last sync."""

    def refresh(self, number: int | None = None) -> Synced:
        """Bring all weights to the current version, of which the caller may know the number."""
        number = observed_version(self.trainer) if number is None else number
        world, model = current_world(), self._model()
        pairs = self._pairs(model, world)
        _check_rounds(pairs, self.memory_cap)
        self.asleep, _links[model] = True, self  # until all is done, so that half of it is not used
        shared = _share(model, [pair for pair in pairs if pair.is_shared])
        self.shared |= frozenset(shared)  # known even if a later line fails
        copies = self._with_memory(model, [pair for pair in pairs if not pair.is_shared])
        late = self._late(copies, world)
        received, rounds = _moved(late, self.memory_cap, world)
        self.version, self.asleep = number, False
        self.shared = frozenset(shared)
        self.copied = {name: mark_of(pair.target) for pair in copies for name in pair.names}
        self.places = {name: mark_of(x)[:2] for name, x in named_tensors(model).items()}
        return Synced(number, shared, _names(late), received, rounds)

    def _pairs(self, model: nn.Module, world: World) -> list[TensorPair]:
        """Return the pairs of tensors; weights that are kept share no memory."""
        pairs = pairs_of(self.trainer, model, world)
        return [replace(pair, is_shared=False) for pair in pairs] if self.when_stale == "keep" else list(pairs)

    def _with_memory(self, model: nn.Module, copies: Sequence[TensorPair]) -> list[TensorPair]:
        """Return the pairs, of which each has memory of its own."""
        found: list[TensorPair] = []
        for pair in copies:
            target = pair.target
            if target.device.type == "meta" or pair.names[0] in self.shared or shares_memory(pair.source, target):
                target = with_part(target, empty_part(target, pair.source.device))
                replace_tensor(model, pair.target, target)
            found.append(TensorPair(pair.names, pair.source, target, pair.moves, pair.is_shared))
        return found

    def _late(self, copies: Sequence[TensorPair], world: World) -> list[TensorPair]:
        """Return the pairs that are to be copied: the trainer's tensor has changed, or the copy on some rank."""
        if not copies:
            return []
        written = versions_of(self.trainer).written
        flags = [
            int(self.copied.get(pair.names[0]) != mark_of(pair.target) or written[pair.names[0]] > self.version)
            for pair in copies
        ]
        return [pair for pair, flag in zip(copies, largest_on_ranks(flags, world), strict=True) if flag]

    def ready_version(self) -> int:
        """Return the version to sample with; every rank makes the call.

        Raises:
            WeightError: the sampler sleeps.
            StaleWeightsError: the trainer has newer weights, or the sampler has others, and `when_stale` is "error".
        """
        if self.asleep and self.when_stale == "sync":
            return self.refresh().version
        if self.asleep:
            raise WeightError(
                "tokens of a sampler",
                "a sampler that sleeps, or whose last sync failed",
                "it does not have all of its weights",
                "call sampler.wake(), or mw.weights.sync(trainer, sampler), before",
            )
        if self.when_stale == "keep":
            return self.version
        number = observed_version(self.trainer)
        changed, replaced = self._changed_names(), self._replaced_names()
        stale = changed + [name for name in replaced if name not in changed]
        if stale and self.when_stale == "sync":
            self.refresh(number)
        elif stale:
            raise StaleWeightsError(
                "tokens of a sampler",
                f"weights of version {self.version}, and the trainer has version {number}: {stale[0]} "
                + ("has changed" if changed else "was replaced in the sampler")
                + (f", and {len(stale) - 1} more" if len(stale) > 1 else ""),
                "the tokens would be those of weights that the trainer does not have",
                'call mw.weights.sync(trainer, sampler) after each step, or once with when_stale="sync"',
            )
        self.version = number
        return number

    def _changed_names(self) -> list[str]:
        """Return the tensors that changed in the trainer after the last sync, or that one model alone has now."""
        versions = versions_of(self.trainer)
        copied = [name for name in self.copied if versions.written[name] > self.version]
        shared = [name for name in sorted(self.shared) if versions.moved[name] > self.version]
        known = self.copied.keys() | self.shared
        new = dict(self.trainer.named_parameters(remove_duplicate=False)).keys() - known
        return list(dict.fromkeys([*copied, *shared, *sorted(new), *sorted(known - versions.marks.keys())]))

    def _replaced_names(self) -> list[str]:
        """Return the sampler's parameters that have other memory than after the last sync, as after `model.to(dtype)`.

        Buffers are left out: a model may compute them anew in a call.
        """
        targets = dict(self._model().named_parameters(remove_duplicate=False))
        known = [name for name in self.places if name in targets]
        return [name for name in known if mark_of(targets[name])[:2] != self.places[name]]

    def release(self) -> None:
        """Free the memory of the copies."""
        model = self._model()
        tensors = named_tensors(model)
        for name in self.copied:
            target = tensors[name]
            replace_tensor(model, target, with_part(target, empty_part(target, torch.device("meta"))))
        self.copied, self.asleep = {}, True

    def _model(self) -> nn.Module:
        model = self.sampler()
        if model is None:
            raise ReferenceError("the sampler's model no longer exists")
        return model


def _names(pairs: Sequence[TensorPair]) -> tuple[str, ...]:
    return tuple(name for pair in pairs for name in pair.names)


def _share(model: nn.Module, pairs: Sequence[TensorPair]) -> tuple[str, ...]:
    """Let the model use the trainer's memory, and return the names."""
    for pair in pairs:
        if not shares_memory(pair.source, pair.target):
            replace_tensor(model, pair.target, with_part(pair.target, part_of(pair.source)))
    return _names(pairs)


def _move(pair: TensorPair) -> Move:
    return Move(pair.names[0], part_of(pair.source), part_of(pair.target), pair.moves)


def _check_rounds(pairs: Sequence[TensorPair], cap: int) -> None:
    """Raise WeightError if a copy does not fit into the cap."""
    rounds_of([_move(pair) for pair in pairs if not pair.is_shared], cap, ASKED)


def _moved(pairs: Sequence[TensorPair], cap: int, world: World) -> tuple[int, int]:
    """Copy the pairs, and return the bytes that this rank received and the number of exchanges."""
    with torch.no_grad(), local_parts():
        return move_all([_move(pair) for pair in pairs], cap, world, ASKED)


def move_all(moves: Sequence[Move], cap: int, world: World, asked: str) -> tuple[int, int]:
    """Carry out the moves, and return the bytes that this rank received and the number of exchanges."""
    rounds = rounds_of(moves, cap, asked)
    for move in moves:
        keep(move, world.rank)
    if not rounds or world.communicator is None:
        return 0, 0
    before = world.communicator.seen.total_received
    for found in rounds:
        run_round(found, world.communicator, world.ranks)
    return world.communicator.seen.total_received - before, len(rounds)


_links: WeakKeyDictionary[nn.Module, Link] = WeakKeyDictionary()


def sync(trainer: Any, sampler: Any, *, memory_cap: int = MEMORY_CAP, when_stale: WhenStale = "error") -> Synced:
    """Give `sampler` the weights of `trainer` in the sampler's layouts, and return what was done.

    Every rank makes the call. Both models have the same parameters and buffers, on one mesh with any two layouts, or on
    two meshes of any ranks. If both have the same ranks, a tensor with equal parts on each rank is not copied:
    the sampler uses the trainer's memory, so it has each update at once. Every other tensor is copied if it has changed
    since the last call, such as only the adapters of LoRA. A rank receives exactly the elements that it does not hold,
    in messages of at most `memory_cap` bytes at a time. A sampler on the meta device gets memory for the copies only.

    Until the trainer changes, `sampler.generate` samples with this version, and returns its number.

    Args:
        trainer: A model, or the result of `mw.to_static`.
        sampler: A model, or a `mw.sampler` of it.
        memory_cap: Upper bound of the bytes of all messages that a rank holds at once.
        when_stale: "error" makes `generate` raise a StaleWeightsError after the trainer has changed, until the next
            call; "sync" makes it call `sync` itself, also after `sampler.sleep()`; "keep" makes it sample with the
            weights of the last call. Then no memory is shared, and ranks that hold a part of the sampler only need not
            wait for the trainer.

    Raises:
        WeightError: the models have other names, shapes, dtypes or devices; or a row of a tensor exceeds the cap.

    >>> import meshwright as mw
    >>> def go():
    ...     mesh = mw.ProcessMesh([0, 1], ["tp"])
    ...     trainer, model = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta")
    ...     trainer.weight = mw.shard_tensor(trainer.weight, mesh, [mw.Shard(0)])
    ...     model.weight = mw.shard_tensor(model.weight, mesh, [mw.Shard(1)])
    ...     return mw.weights.sync(trainer, model)
    >>> mw.simulate(go, 2)[0]
    Synced(version=1, shared=(), copied=('weight',), received=16, rounds=1)
    """
    source, model = module_of(trainer), module_of(sampler)
    _check_options(memory_cap, when_stale)
    if source is model:
        if when_stale == "keep":
            raise WeightError(
                f'{ASKED} with when_stale="keep"',
                "one model as trainer and sampler",
                "it has one set of weights, so none can be older",
                "pass a second model for the sampler, which may be on the meta device",
            )
        return Synced(observed_version(model), tuple(named_tensors(model)), (), 0, 0)
    link = _links.get(model)
    if link is None or link.trainer is not source:
        borrowed = frozenset[str]() if link is None else link.shared  # memory of the trainer before, not to be written
        link = Link(source, ref(model), memory_cap, when_stale, shared=borrowed)
    link.memory_cap, link.when_stale = memory_cap, when_stale
    return link.refresh()


def _check_options(memory_cap: object, when_stale: object) -> None:
    check_cap(f"{ASKED} with memory_cap={memory_cap!r}", memory_cap)
    if when_stale not in get_args(WhenStale):
        raise WeightError(
            ASKED,
            f"when_stale={when_stale!r}",
            "a sampler with older weights than the trainer raises an error, gets the new ones or keeps its own",
            'pass when_stale="error", "sync" or "keep"',
        )


def check_cap(asked: str, memory_cap: object) -> None:
    """Raise WeightError if the cap is no number of bytes."""
    if isinstance(memory_cap, bool) or not isinstance(memory_cap, int) or memory_cap < 1:
        raise WeightError(
            asked,
            f"a {type(memory_cap).__name__}" if not isinstance(memory_cap, int) else "no memory",
            "the cap is a positive whole number of bytes",
            "pass memory_cap=256 << 20",
        )


def version_to_sample(model: nn.Module) -> int:
    """Return the number of the weights that `model` samples with; every rank makes the call.

    Raises StaleWeightsError if the model gets its weights from a trainer that has newer ones, unless `when_stale` is
    "sync"; then the model gets them.
    """
    link = _links.get(model)
    return observed_version(model) if link is None else link.ready_version()


def is_compared(model: nn.Module) -> bool:
    """True if `model` gets its weights from a trainer, and their versions are compared before it samples."""
    link = _links.get(model)
    return link is not None and link.when_stale != "keep"


def release(model: nn.Module) -> None:
    """Free the copies of a model that gets its weights from a trainer; memory that it shares stays."""
    link = _links.get(model)
    if link is not None:
        link.release()


def restore(model: nn.Module) -> None:
    """Give a model after `release` the trainer's current weights; every rank makes the call."""
    link = _links.get(model)
    if link is not None and link.asleep:
        link.refresh()
