"""External tensors that a forward pass writes to, such as a running mean of a loss; the program writes them.

During capture nothing may be written, since each pass would write again. From the first write on, a fake tensor stands
for the external tensor: its content is unknown and Python cannot read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import map_tensors, tensors_in

from .._errors import CaptureError, capture_error
from ..completion.stage_sends import meshes_of
from ..program.effects import is_view, writes_to
from ..program.node import ArgumentPosition
from ..program.program import Program
from ..recording.functionalization import FRESH, IDENTITIES
from ..recording.recording import is_lifted
from ..torch_hooks import FakeMode, FakeTensor, Operator, faked, memory_of, no_modes

PLAIN = (Tensor, nn.Parameter)


@dataclass(slots=True)
class ExternalTensors:
    """The external tensors that were written to, identified by their memory, and the fake tensors for them."""

    mode: FakeMode
    _written: set[int] = field(default_factory=set[int])
    _arrays: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _fakes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])

    def was_written(self, x: Tensor) -> bool:
        """True if the tensor is in external memory that was written to."""
        return memory_of(x) in self._written

    def lifted(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor made of Python numbers, so that a write does not change the program's constant."""
        copy = x.clone()
        if not x.untyped_storage().resizable():  # a NumPy array owns its memory
            self._arrays[memory_of(copy)] = copy  # kept alive, so that no other tensor gets its memory
        return copy

    def note(self, written: Mapping[ArgumentPosition, Tensor], inside: Callable[[Tensor], bool]) -> None:
        """Note the external tensors that an operator is about to write to.

        Raises CaptureError for a tensor in the memory of a NumPy array.
        """
        if self._arrays and any(memory_of(x) in self._arrays for x in written.values()):
            raise capture_error(
                "a write to a tensor in the memory of a NumPy array",
                "a program does not know if each call makes a new array, and would not change the array",
                "copy the array with torch.tensor(array), or make the tensor outside of forward() and the loss",
            )
        self._written |= {memory_of(x) for x in written.values() if not isinstance(x, FakeTensor) and not inside(x)}

    def stands_in(self, op: Operator, args: TorchValue) -> bool:
        """True if the operator must run on fake tensors; one that only takes a view runs on the tensor itself."""
        if not self._written or not any(map(self.was_written, tensors_in(args))):
            return False
        return bool(writes_to(op)) or not _returns_view(op)

    def run(self, op: Operator, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]) -> TorchValue:
        """Return the operator's results without writing.

        Raises CaptureError if the write changes the shape of a tensor or adds a gradient history.
        """
        fake_args, fake_kwargs = map_tensors(self._fake, (args, kwargs))
        with self.mode:
            out = op(*fake_args, **fake_kwargs)
        stood = {id(fake): x for x, fake in self._fakes.values()}
        for x, fake in self._fakes.values():
            _check_kept(x, fake)
        return map_tensors(lambda t: stood.get(id(t), t), out)

    def _fake(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) or not self.was_written(x):
            return x
        if id(x) not in self._fakes:
            self._fakes[id(x)] = (x, faked(self.mode, x))
        return self._fakes[id(x)][1]


def takes_view(op: Operator, args: TorchValue) -> bool:
    """True if the operator takes a view of a real tensor: a write through the view must reach the tensor."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and not isinstance(first, FakeTensor) and not writes_to(op) and _returns_view(op)


def real_view(op: Operator, args: TorchValue, kwargs: TorchValue) -> Tensor:
    """Return the view as a real tensor, with fake tensor modes disabled."""
    with no_modes():
        return op(*args, **kwargs)


def _returns_view(op: Operator) -> bool:
    name = op._schema.name.split("::")[1]
    return name not in FRESH and (is_view(op) or name in IDENTITIES)


def _check_kept(x: Tensor, fake: Tensor) -> None:
    """Raise CaptureError for a write that gives the tensor another shape or a gradient history."""
    if (fake.requires_grad and not x.requires_grad) or fake.shape != x.shape:
        found = "a value that requires gradients" if fake.requires_grad else f"the shape {tuple(fake.shape)}"
        raise capture_error(
            f"a write to an outside tensor of shape {tuple(x.shape)}, which gets {found}",
            "the tensor is kept from step to step, so a later backward pass would reach into earlier steps",
            "write a detached value (detach()) of the tensor's own shape",
        )


def writes_external_tensors(program: Program) -> bool:
    """True if the program writes a tensor that Python code holds and that is no buffer of a module."""
    outside = {i.value for i in program.inputs if i.role == "constant" and not is_lifted(i.source)}
    return any(x in outside for x, _ in program.writes)


def check_stages(program: Program) -> None:
    """Raise CaptureError for a program on several meshes that writes an external tensor, which all ranks hold."""
    if writes_external_tensors(program) and len(meshes_of(program)) > 1:
        raise CaptureError(
            "capturing a model whose modules are on several meshes",
            "a write to an outside tensor",
            "every rank holds the tensor, but only the ranks of the writing module would see the write",
            "use a buffer (register_buffer), which is on the mesh of the module",
        )


def check_buffers(step: Program, buffers: Mapping[int, str]) -> None:
    """Raise CaptureError if a hook uses one of the `buffers`, by id, that the forward pass writes to."""
    for given in step.inputs:
        name = buffers.get(id(given.source)) if given.role == "constant" else None
        if name is not None:
            raise CaptureError(
                "recording a backward pass",
                f"a hook that uses {name}, which the forward pass also writes to",
                "a program writes each buffer once, at its end",
                "use two buffers, or make the whole change in forward()",
            )
