"""`stream`: a model's weights one after the other, in one order on every rank, for an engine that generates tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from meshwright.checkpoint import World, current_world
from meshwright.layout import Spec, replicated
from meshwright.reshard import element_moves
from meshwright.tensor import DistTensor, local_parts

from ._errors import WeightError
from ._hub_names import hub_name, hub_tensors
from ._rounds import Move
from ._sync import MEMORY_CAP, check_cap, move_all
from ._tensors import module_of, part_of, spec_of

Format = Literal["hf", "meshwright"]
ASKED = "mw.weights.stream(model)"


class StreamedWeight(NamedTuple):
    """A weight: its name, a plain tensor, and the layout of which the tensor is this rank's part."""

    name: str
    part: Tensor
    layout: Spec


def stream(
    model: Any, format: Format = "hf", *, whole: bool = False, memory_cap: int | None = None
) -> Iterator[StreamedWeight]:
    """Yield (name, part, layout) of each weight, in the same order on every rank.

    A part shares the memory of the model. It is empty on a rank outside the weight's mesh. The format "hf" has the
    tensors and names of a checkpoint of transformers: tied weights and buffers that are not saved are left out, and
    adapters of PEFT and wrappers add nothing to the names of the layers. The format "meshwright" has the names in the
    model.

    With `whole`, each rank gets the whole tensors bucket by bucket. Every rank has to read the stream to its end. The
    tensors of a bucket and its messages have at most `memory_cap` bytes: by default 256 MiB, or three times the largest
    tensor if that is more.

    Raises:
        WeightError: the cap is below a tensor, or the library stores a tensor in another form, and `whole` is False.

    >>> import meshwright as mw
    >>> for name, part, layout in mw.weights.stream(nn.Linear(3, 2)): print(name, layout)
    weight f32[2, 3]
    bias f32[2]
    """
    found = module_of(model)
    if format not in get_args(Format):
        raise WeightError(
            f"{ASKED} with format={format!r}",
            "an unknown format",
            'a stream has the names of a checkpoint of transformers ("hf") or those in the model ("meshwright")',
            'pass format="hf" or format="meshwright"',
        )
    if memory_cap is not None:
        check_cap(f"{ASKED} with memory_cap={memory_cap!r}", memory_cap)
    world = current_world()
    named = _named(found)
    if whole:
        return _wholes(found, named, format, memory_cap, world)
    return _parts(found, named, format, world)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Return the saved tensors by their first name."""
    first: dict[int, str] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {name: x for name, x in tensors.items() if first.setdefault(id(x), name) == name}


def _parts(model: nn.Module, named: dict[str, Tensor], format: Format, world: World) -> Iterator[StreamedWeight]:
    for name, x in named.items():
        spec = spec_of(x, world)
        yield StreamedWeight(hub_name(model, name, spec.shape) if format == "hf" else name, part_of(x), spec)


def _wholes(
    model: nn.Module, named: dict[str, Tensor], format: Format, cap: int | None, world: World
) -> Iterator[StreamedWeight]:
    most = max((spec_of(x, world).nbytes for x in named.values()), default=0)
    cap = max(MEMORY_CAP, 3 * most) if cap is None else cap
    for bucket in _buckets(named, cap, world):
        for name, x in _gathered(bucket, named, cap, world):
            for shown, tensor in hub_tensors(model, name, x) if format == "hf" else [(name, x)]:
                whole = Spec(world.mesh, replicated(tensor.dim()), tensor.shape, tensor.dtype)
                yield StreamedWeight(shown, tensor, whole)


def _buckets(named: dict[str, Tensor], cap: int, world: World) -> list[list[str]]:
    """Return the names in order, in buckets of whole tensors that leave a third of the cap for messages."""
    found: list[list[str]] = [[]]
    held, most = 0, cap - cap // 3
    for name, x in named.items():
        size = spec_of(x, world).nbytes if isinstance(x, DistTensor) else 0
        if size > most:
            raise WeightError(
                f"{ASKED} with whole=True and memory_cap={cap}",
                f"{name} has {size} bytes",
                "two thirds of the cap are for whole tensors, and the rest is for messages",
                f"pass memory_cap={size + -(-size // 2)} or more",
            )
        if held + size > most:
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return found


def _gathered(names: Sequence[str], named: dict[str, Tensor], cap: int, world: World) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, which were gathered together; a tensor that this rank has whole is not copied."""
    wholes: dict[str, Tensor] = {}
    moves: list[Move] = []
    with torch.no_grad(), local_parts():
        for name in names:
            part, spec = part_of(named[name]), spec_of(named[name], world).contiguous
            to = Spec(world.mesh, replicated(spec.ndim), spec.shape, spec.dtype)
            steps = element_moves(spec, to)
            wholes[name] = part
            if not steps.same_parts:
                wholes[name] = torch.empty(spec.shape, dtype=spec.dtype, device=part.device)
                moves.append(Move(name, part, wholes[name], steps))
        move_all(moves, max(cap // 3, 1), world, f"{ASKED} with whole=True")
    moves.clear()
    for name in names:
        yield name, wholes.pop(name)
