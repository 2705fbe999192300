"""Capture of a model: a forward pass on fake unsharded tensors, recorded as the operators that autograd would see.

Parameters, buffers and batches are neither allocated nor computed with. Small tensors that the forward pass creates
without operands (`torch.arange`) are real, and so are small values computed from them alone, so that a model may keep
or read them. Values of more than 1 GiB are never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import communicator_lookups
from meshwright.layout import Spec, TorchValue
from meshwright.tensor import DistTensor, full_tensor, map_leaves

from .._errors import HiddenTensorError, SideEffectError
from ..analysis.constant_folding import constant_values, folded
from ..files.canonical_text import canonical_text_or_none
from ..guards import Executed, PassComparison, ReadSlots, RepeatableCall, check_repeatable, code_text
from ..program.node import Value
from ..program.program import Program
from ..recording.detached_writes import check_late_writes
from ..recording.dynamic_sizes import BatchPredicate, BatchSize, DynamicSizes, size_conditions
from ..recording.recording import Recording
from ..torch_hooks import FakeMode, new_sizes
from .capture_environment import CaptureEnvironment, called
from .interception import check_hooks


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer: its first name, all module tables that hold it, and its spec if it is a DistTensor."""

    name: str
    tensor: Tensor
    places: tuple[tuple[dict[str, Any], str], ...]
    is_parameter: bool

    @property
    def spec(self) -> Spec | None:
        return self.tensor.spec if isinstance(self.tensor, DistTensor) else None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured forward pass: its program, the model's parameters and buffers, and the symbols that are inputs."""

    program: Program
    slots: tuple[ModelTensor, ...]
    mode: FakeMode = field(repr=False)
    symbols: Mapping[Value, Any] = field(repr=False)
    opened: Sequence[tuple[BatchSize, Any]] = field(repr=False, default=())
    asked: Sequence[Tensor] = field(repr=False, default=())
    """Constants whose elements Python code read."""
    ran: Executed = field(repr=False, default_factory=Executed)
    """The code that ran in the forward pass and in the recording."""
    checksum: str | None = None
    """Checksum of the first pass and of the code that ran in it; None if one pass was enough."""
    recording: Recording | None = field(repr=False, default=None)
    """The recording of the pass, which knows the value of each tensor; None after the last pass."""
    places: ReadSlots | None = field(repr=False, default=None)
    """All places that the code which ran can read; None if the call set some."""
    is_own: bool = True
    """True if the capture is right for its own module alone, even if another one is alike wherever code can read."""
    looks: Sequence[Any] = field(repr=False, default=())
    """Each parameter and buffer as the pass saw it."""

    def fits(self) -> BatchPredicate:
        """Return a predicate on batches: True if their sizes meet the conditions recorded so far."""
        sources = {i.value: i.source for i in self.program.inputs if i.role == "size"}
        return size_conditions(self.mode, self.symbols, sources, self.opened)


def model_tensors(module: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the module's parameters and buffers, each once under its first name."""
    found: dict[int, tuple[str, Tensor, bool, list[tuple[dict[str, Any], str]]]] = {}
    for path, part in module.named_modules():
        for table, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for key, value in table.items():
                if value is None:
                    continue
                name = f"{path}.{key}" if path else key
                found.setdefault(id(value), (name, value, is_parameter, []))[3].append((table, key))
    return tuple(ModelTensor(name, x, tuple(places), is_p) for name, x, is_p, places in found.values())


def capture(
    module: nn.Module,
    call: Callable[..., Any],
    batch: Sequence[Any],
    dynamic: Mapping[int, Collection[int]] | None = None,
    most: int | None = None,
    others: Sequence[Any] = (),
    is_known: Callable[[str], bool] | None = None,
    beside: Mapping[str, Any] | None = None,
    is_run: bool = True,
) -> Capture:
    """Return the capture of `call(*batch)`, which runs `module` and `others`.

    `dynamic` are the dims, by leaf of the batch, whose sizes may be others in later calls: they are symbolic.
    `call` may return any tree of tensors. Raises CaptureError, with the user's source line, for what cannot become
    part of one program or takes more than `most` operators, and SideEffectError for a forward pass that changes what
    is no tensor. What only the first pass sets may stay: then the second one is captured, if it changes nothing and is
    the same program. `beside` are objects by name that count for the places of the capture, such as the optimizer.
    `is_known` tells by its checksum whether an earlier pass was like the first one; then that one is
    captured. A program that is only read, and never run (`is_run=False`), needs no second pass either.
    """

    roots, reads = {"network": module, **{f"call{at}": x for at, x in enumerate(others)}}, communicator_lookups()
    asked = f"capturing the forward pass of {type(module).__name__}"
    checksum: str | None = None

    def known(first: Capture, ran: Executed) -> bool:
        nonlocal checksum
        checksum = None if is_known is None else _checksum(first.program, ran)
        return not is_run or (checksum is not None and is_known is not None and is_known(checksum))

    def repeated(in_parts: bool) -> RepeatableCall[Capture]:
        run = partial(_capture_once, module, call, batch, dynamic or {}, most, in_parts)
        how = PassComparison(_same_program, known, _numbers_of, _asked_by)
        return check_repeatable(roots, run, how, asked, beside or {})

    try:
        done = repeated(in_parts=False)
    except HiddenTensorError:
        done = repeated(in_parts=True)
    found, ran = done.gave, done.ran
    own = communicator_lookups() > reads or ran.asks_thread or found.symbols or _holds_objects(found.program)
    return replace(found, ran=ran, checksum=checksum, recording=None, places=done.places, is_own=bool(own))


def _asked_by(captured: Capture) -> Sequence[Tensor]:
    return captured.asked


def _holds_objects(program: Program) -> bool:
    """True if the program holds tensors or code of the module that was captured."""
    return any(i.role == "constant" for i in program.inputs) or canonical_text_or_none(program) is None


def captured_for(captured: Capture, module: nn.Module, roots: Mapping[str, Any]) -> Capture | None:
    """Return the capture for a module that is alike wherever the code that ran can read; None if it is not.

    `roots` are all objects that count for the places. The batch, and the state of torch, have to be alike too.
    """
    slots = model_tensors(module)
    if captured.places is None or captured.is_own or list(map(_tensor_state, slots)) != captured.looks:
        return None
    tensors = {id(other.tensor): slot.tensor for slot, other in zip(slots, captured.slots, strict=True)}
    places = captured.places.of_twin(roots, tensors)
    return None if places is None else replace(captured, slots=slots, ran=places.ran.copy(), places=places)


def _tensor_state(slot: ModelTensor) -> tuple[object, ...]:
    """Return all that a pass can see of a parameter or buffer, without the attributes that users give it."""
    x = slot.tensor
    keys = tuple(key for _, key in slot.places)
    return slot.name, slot.is_parameter, keys, type(x), x.shape, x.dtype, x.device, x.requires_grad, slot.spec


def _checksum(program: Program, ran: Executed) -> str | None:
    """Return a checksum of the captured program and of the code from files that ran; None if the program has none."""
    meaning = canonical_text_or_none(program)
    codes = sorted(code_text(code) for code, _ in ran.codes.values() if not code.co_filename.startswith("<"))
    return None if meaning is None else sha256("\n".join([meaning, *codes]).encode()).hexdigest()


def _same_program(first: Capture, second: Capture) -> bool:
    """True if the programs have the same text and equal constants, before or after constant folding.

    Folding is needed if the first pass caches a table that the second pass sees as a constant or a new buffer.
    """
    one, other = first.program, second.program
    pairs = [(a.source, b.source) for a, b in zip(one.inputs, other.inputs, strict=False) if a.role == "constant"]
    if one.numbered_text == other.numbered_text:
        return all(torch.equal(a, b) for a, b in pairs)
    return folded(one, buffers_of(first)).equals(folded(other, buffers_of(second)))


def buffers_of(captured: Capture) -> dict[str, Tensor]:
    """Return the buffers of the captured model by name."""
    return {slot.name: slot.tensor for slot in captured.slots if not slot.is_parameter}


def _numbers_of(first: Capture, kept: Sequence[Tensor]) -> list[Tensor | None]:
    """Return real tensors for fake ones that Python objects keep, and None for those without known numbers.

    These depend on parameters, on the batch, or on random numbers.
    """
    recording = first.recording
    assert recording is not None
    values = [recording.value_of(x) for x in kept]
    known = constant_values(first.program, buffers_of(first))
    return [full_tensor(known[v]) if v in known else None for v in values]


def _capture_once(
    module: nn.Module,
    call: Callable[..., Any],
    batch: Sequence[Any],
    dynamic: Mapping[int, Collection[int]],
    most: int | None,
    in_parts: bool,
) -> Capture:
    """Return the capture of one pass.

    A composite operator may compute a tensor that only its backward pass reads, such as a variance or a mask. With
    `in_parts`, the operators that it consists of are captured, and so are these tensors.
    """
    check_hooks(module)
    slots = model_tensors(module)
    recording = Recording(above=True)
    sizes = new_sizes(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # inputs tell all sizes
    mode = FakeMode(allow_non_fake_inputs=True, shape_env=sizes)
    stage = CaptureEnvironment(module, mode, recording, DynamicSizes(mode, recording, dynamic), most, in_parts)
    fakes = [stage.given(s.tensor, "parameter" if s.is_parameter else "buffer", s.name, s.spec) for s in slots]
    args = _fake_batch(stage, tuple(batch))
    with _with_fakes(slots, fakes):
        with stage.watching():
            out = called(call, args)
        assigned = _replaced_buffers(slots, fakes)
        _check_gradients_wanted(slots, fakes)
    outputs = recording.tree_of(out)
    values = {id(f): recording.inputs[i].value for i, f in enumerate(fakes)}
    writes = dict(recording.written()) | {values[id(old)]: recording.value_of(new) for old, new in assigned}
    program = Program(tuple(recording.inputs), tuple(recording.nodes), outputs, tuple(writes.items()))
    check_late_writes(program, recording.detached_writes)
    opened, asked, looks = tuple(stage.sizes.open), tuple(stage.asked), list(map(_tensor_state, slots))
    return Capture(program, slots, mode, stage.sizes.values, opened, asked, recording=recording, looks=looks)


def _replaced_buffers(slots: Sequence[ModelTensor], fakes: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers that the forward pass replaced, each with its new tensor.

    Raises SideEffectError for a replaced parameter, and for a buffer whose shape or dtype changed.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for slot, fake in zip(slots, fakes, strict=True):
        for table, key in slot.places:
            new = table.get(key)
            if new is fake:
                continue
            if slot.is_parameter or not isinstance(new, Tensor) or new.shape != fake.shape or new.dtype != fake.dtype:
                raise SideEffectError(
                    "capturing the forward pass",
                    f"the forward pass replaces {slot.name} by a {type(new).__name__}",
                    "a program keeps its parameters, and the shapes and dtypes of its buffers",
                    "use a buffer of one shape, and write to it by tensor operations",
                )
            found.append((fake, new))
    return found


def _check_gradients_wanted(slots: Sequence[ModelTensor], fakes: Sequence[Tensor]) -> None:
    """Raise SideEffectError if the forward pass changed, for good, which parameters and buffers require gradients.

    A buffer into which the pass wrote a value with a gradient is no leaf.
    """
    for slot, fake in zip(slots, fakes, strict=True):
        if fake.is_leaf and fake.requires_grad != slot.tensor.requires_grad:
            raise SideEffectError(
                "capturing the forward pass",
                f"the forward pass calls {slot.name}.requires_grad_({fake.requires_grad}), and leaves it so",
                "a program computes gradients of the parameters that require one when it is recorded",
                f"call {slot.name}.requires_grad_({fake.requires_grad}) before the step; or switch it back before "
                "forward returns",
            )


def _fake_batch(stage: CaptureEnvironment, batch: tuple[TorchValue, ...]) -> TorchValue:
    """Return the batch with fake tensors. Each one is an input; its source is its index among the batch's leaves."""
    number = count()

    def given(x: TorchValue) -> TorchValue:
        at = next(number)
        if not isinstance(x, Tensor):
            return x
        return stage.given(x, "batch", f"batch_{at}", x.spec if isinstance(x, DistTensor) else None, at)

    return map_leaves(given, batch)


@contextmanager
def _with_fakes(slots: Sequence[ModelTensor], fakes: Sequence[Tensor]) -> Generator[None]:
    """Replace the modules' tensors by the fake tensors inside the context."""
    try:
        for slot, fake in zip(slots, fakes, strict=True):
            for table, key in slot.places:
                table[key] = fake
        yield
    finally:
        for slot in slots:
            for table, key in slot.places:
                table[key] = slot.tensor
