"""Recording of operators called on fake tensors, as nodes without writes; each tensor is mapped to its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue, user_frame
from meshwright.tensor import DistTensor, backward_running, tensors_in

from .._errors import CaptureError, HiddenTensorError
from ..program.effects import is_random_operator, returns_memory_of_arguments, writes_to
from ..program.node import ArgumentPosition, Node, Op, Origin, Value, WriteToCopies, argument_at, values_in
from ..program.program import Input, Role
from ..program.shape_inference import FreshNames, as_values, stem_of
from ..torch_hooks import FakeTensor, Operator, forget_numbers, memory_of
from .detached_writes import DetachedWrite
from .functionalization import FRESH, IDENTITIES, Cell, TensorMemory, TensorView
from .out_of_place_form import out_of_place_form
from .symbolic_numbers import Numbers

aten = torch.ops.aten

SECRET_WRITES: dict[str, tuple[tuple[int, ...], int]] = {
    "aten::batch_norm": ((3, 4), 5),
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::_batch_norm_impl_index": ((3, 4), 5),
    "aten::instance_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
}
"""Operators whose schema hides that they write to arguments: written positions, and the enabling argument."""

SILENT = {"prim::device", "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::is_same_size"}
"""Operators that only query metadata; they are not recorded."""


_LIFTED = "_meshwright_lifted"


def is_lifted(x: Tensor) -> bool:
    """True for a tensor that the recorded code created from Python numbers, such as `torch.tensor(0.0)`."""
    return _LIFTED in x.__dict__


def lifted_copy(x: Tensor) -> Tensor:
    """Return a copy of a constant that is marked as lifted if the constant is."""
    copy = x.clone()
    if is_lifted(x):
        setattr(copy, _LIFTED, True)
    return copy


@dataclass(slots=True)
class Recording:
    """The nodes recorded so far, and the cell of every tensor that was seen.

    `above` says that the recording is above autograd: operators that matter only to autograd are kept. With `forgets`,
    Python code cannot read the elements of tensors that it creates from numbers, as if they were inputs.
    """

    inputs: list[Input] = field(default_factory=list[Input])
    nodes: list[Node] = field(default_factory=list[Node])
    names: FreshNames = field(default_factory=FreshNames)
    numbers: Numbers = field(default_factory=Numbers)
    cells: dict[int, Cell] = field(default_factory=dict[int, Cell])
    memories: dict[Any, list[Cell]] = field(default_factory=dict[Any, list[Cell]])
    kept: list[Any] = field(default_factory=list[Any])
    origin: Callable[[], Origin] = Origin
    above: bool = False
    forgets: bool = False
    detached_writes: list[DetachedWrite] = field(default_factory=list[DetachedWrite])
    _given: list[tuple[Input, Tensor]] = field(default_factory=list[tuple[Input, Tensor]])
    _needed_gradient: dict[int, Input] = field(default_factory=dict[int, Input])
    _without_gradient: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def add_input(
        self,
        x: Tensor,
        role: Role,
        name: str,
        spec: Spec | None = None,
        source: object = None,
        frozen: bool = False,
    ) -> Value:
        """Add the tensor `x` as an input of the program, and return its value."""
        value = Value.of(self.names.fresh(name.replace(".", "_")), x)
        self.inputs.append(Input(value, role, name, spec, source, frozen=frozen))
        self._given.append((self.inputs[-1], x))
        if x.requires_grad or frozen:
            self._needed_gradient[id(x)] = self.inputs[-1]
        self._bind(x, Cell(value, TensorMemory(), x))
        return value

    def add_number(self, symbol: TorchValue, role: Role, name: str, source: object) -> Value:
        """Add a symbolic number as an input of the program, and return its value."""
        kind = float if isinstance(symbol, torch.SymFloat) else int
        value = Value(self.names.fresh(name.replace(".", "_")), (), kind)
        self.inputs.append(Input(value, role, name, None, source))
        self.numbers.bind(symbol, value)
        return value

    def specs(self) -> dict[Value, Spec]:
        """Return the specs of the latest values of all DistTensors."""
        tensors = [x for x in self.kept if isinstance(x, DistTensor)]
        return {self.cells[id(x)].value: x.spec for x in tensors}

    def input_of(self, x: Tensor) -> Value:
        """Return the value of the input that was added for `x`."""
        return next(given.value for given, t in self._given if t is x)

    def value_of(self, x: Tensor) -> Value:
        """Return the current value of `x`. An unseen tensor is added as a constant.

        Raises CaptureError for an unseen tensor that is fake or requires gradients.
        """
        value = self._latest_value(x)
        given = self._needed_gradient.get(id(x)) if self.above else None
        return value if given is None or x.requires_grad is not given.frozen else self._switched(x, given, value)

    def _latest_value(self, x: Tensor) -> Value:
        cell = self._find(x)
        if cell is not None:
            return (_cell_before_saving(x, cell) if self.above else cell).read(self._node)
        _check_constant(x, self.above)
        return self.add_input(x, "constant", "constant", source=x)

    def _switched(self, x: Tensor, given: Input, value: Value) -> Value:
        """Return the value of an input for which the code that is recorded switched the gradient off.

        Raises CaptureError if the code switched the gradient of a frozen parameter on.
        """
        if given.frozen:
            raise CaptureError(
                f"recording {user_frame() or 'a program'}",
                f"requires_grad_() of {given.name}, which was frozen before the call",
                "a program computes gradients of the parameters that require one when it is recorded",
                f"call requires_grad_() of {given.name} before the step, and x.detach() on values without gradients",
            )
        if value not in self._without_gradient:
            self._without_gradient[value] = self._node(aten.detach.default, (value,), {}, x)
        return self._without_gradient[value]

    def is_constant(self, value: Value) -> bool:
        """True if a value depends on constants alone, and on no random numbers."""
        return self.constants_behind(value) is not None

    def constants_behind(self, value: Value) -> list[Tensor] | None:
        """Return the constants that a value depends on; None if it depends on other inputs or on random numbers."""
        makers = {v: node for node in self.nodes for v in node.outs}
        inputs = {given.value: given for given in self.inputs}
        found: list[Tensor] = []
        left, seen = [value], set[Value]()
        while left:
            v = left.pop()
            given, maker = inputs.get(v), makers.get(v)
            if given is not None:
                if given.role != "constant":
                    return None
                found.append(given.source)
            elif maker is not None:
                if is_random_operator(maker.op):
                    return None
                new = set(maker.ins) - seen
                seen |= new
                left += new
        return found

    def made(self, x: Tensor) -> bool:
        """True if the tensor is in memory of a recorded tensor that is no constant."""
        constants = {
            memory_of(t) for given, fake in self._given if given.role == "constant" for t in (fake, given.source)
        }
        return memory_of(x) in self.memories and memory_of(x) not in constants

    def stand_for(self, x: Tensor, real: Tensor) -> None:
        """Bind the tensor `real` to the cell of the constant `x`."""
        cell = self._find(x)
        assert cell is not None
        self._bind(real, cell)

    def written(self) -> tuple[tuple[Value, Value], ...]:
        """Return the inputs that were written to, and their final values."""
        found = [(given.value, self._latest_value(x)) for given, x in self._given]
        return tuple((x, v) for x, v in found if x is not v)

    def tree_of(self, tree: TorchValue) -> TorchValue:
        """Return `tree` with tensors and symbolic numbers replaced by values."""
        if isinstance(tree, Tensor):
            return self.value_of(tree)
        if isinstance(tree, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.numbers.value_of(tree, self)
        if isinstance(tree, (tuple, list)):
            items = [self.tree_of(v) for v in tree]
            return items if type(tree) is list else tuple(items)
        if isinstance(tree, Mapping):
            return {k: self.tree_of(v) for k, v in tree.items()}
        if isinstance(tree, slice):
            return slice(self.tree_of(tree.start), self.tree_of(tree.stop), self.tree_of(tree.step))
        return tree

    def note(self, op: Op, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue], out: TorchValue) -> None:
        """Record that `op(*args, **kwargs)` was called and returned `out`."""
        if isinstance(op, Operator):
            if op._schema.name in SILENT:
                return
            if self._is_identity(op) and isinstance(out, Tensor):
                self._bind_identity(op, args[0], out)
                return
            written = written_by(op, args, kwargs)
            if written:
                self._note_write(op, args, kwargs, out, written)
                return
            if any(out is a for a in tensors_in(args)):
                return  # `x.float()` of a float tensor is `x`
        values = self.tree_of(args), self.tree_of(kwargs)
        shown = self._node(op, *values, out)
        self._bind_results(op, args, values, out, shown)

    def emit_number(self, op: Op, args: tuple[Any, ...], kind: type) -> Value:
        """Add a node on Python numbers, and return its value."""
        out = Value(self.names.fresh(stem_of(op)), (), kind)
        self.nodes.append(Node(op, args, {}, out, self.origin()))
        return out

    def _is_identity(self, op: Operator) -> bool:
        """True if the result is the argument itself."""
        return op._schema.name.split("::")[1] in (FRESH if self.above else IDENTITIES)

    def _bind_identity(self, op: Operator, x: Tensor, out: Tensor) -> None:
        """Bind the result `out` of an identity to the value of its argument; `lift_fresh` has memory of its own."""
        is_fresh = op._schema.name == "aten::lift_fresh"
        if is_fresh and type(x) is Tensor:
            setattr(x, _LIFTED, True)
            if self.forgets:
                forget_numbers(out)
        self.value_of(x)
        cell = self._find(x)
        assert cell is not None
        self._bind(out, Cell(cell.value, TensorMemory(), out) if is_fresh else cell)

    def _node(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: TorchValue) -> TorchValue:
        shown = as_values(out, lambda: self.names.fresh(stem_of(op)))
        self.nodes.append(Node(op, args, kwargs, shown, self.origin()))
        self.numbers.see(out, shown)
        return shown

    def _find(self, x: Tensor) -> Cell | None:
        """Return the cell of a tensor, or None if it is in the memory of no recorded tensor."""
        cell = self.cells.get(id(x))
        if cell is None:
            cell = self._cell_of_unseen(x)
            if cell is not None:
                self._bind(x, cell)
        return cell

    def _cell_of_unseen(self, x: Tensor) -> Cell | None:
        """Return the cell of a recorded tensor with the elements of `x`, or a new one for a view of such a tensor."""
        cell = next((c for c in self.memories.get(memory_of(x), []) if _looks_alike(c.like, x)), None)
        if not self.above:
            return cell
        if cell is None:
            return self._view_of_known(x)
        return cell if isinstance(x, FakeTensor) else self._detached(x, cell)

    def _detached(self, x: Tensor, base: Cell) -> Cell:
        """Record a `detach` node for `x`, the `.data` of a real tensor, since torch calls no operator for it."""
        detach = aten.detach.default
        shown = self._node(detach, (base.read(self._node),), {}, x)
        return Cell(shown, base.memory, x, base.version, TensorView(detach, (base,), {}, base, x, None))

    def _view_of_known(self, x: Tensor) -> Cell | None:
        """Return a cell for a view that an operator took internally and saved for its backward pass, or None.

        Examples are a transposed weight and a flattened input.
        """
        for cell in self.memories.get(memory_of(x), []):
            found = _view_between(cell.like, x)
            if found is not None:
                op, argument = found
                return Cell(self._node(op, (cell.read(self._node), argument), {}, x), TensorMemory(), x)
        return None

    def _bind(self, x: Tensor, cell: Cell) -> None:
        self.cells[id(x)] = cell
        self.kept.append(x)
        cells = self.memories.setdefault(memory_of(x), [])
        if cell not in cells:
            cells.append(cell)

    def _bind_results(
        self, op: Op, args: Sequence[TorchValue], values: TorchValue, out: TorchValue, shown: TorchValue
    ) -> None:
        base = self._viewed_cell(op, args)
        many = not isinstance(out, Tensor)
        given = {id(t) for t in tensors_in(args)}
        for at, (t, v) in enumerate(zip(tensors_in(out), _tensor_values(shown), strict=True)):
            if id(t) in given and isinstance(op, Operator):  # one of several results is an argument
                continue
            if base is None or memory_of(t) != memory_of(base.like):
                self._bind(t, Cell(v, TensorMemory(), t))
                continue
            assert isinstance(op, Operator)
            held = (base, *values[0][1:])
            view = TensorView(op, held, values[1], base, out, at if many else None)
            self._bind(t, Cell(v, base.memory, t, base.memory.version, view))

    def _viewed_cell(self, op: Op, args: Sequence[TorchValue]) -> Cell | None:
        """Return the cell of the first argument if results of `op` may be views of it, otherwise None."""
        if not isinstance(op, Operator) or not returns_memory_of_arguments(op):
            return None
        return self._find(args[0]) if args and isinstance(args[0], Tensor) else None

    def _note_write(
        self,
        op: Operator,
        args: Sequence[TorchValue],
        kwargs: Mapping[str, TorchValue],
        out: TorchValue,
        written: dict[ArgumentPosition, Tensor],
    ) -> None:
        """Record a call that writes to the tensors `written`."""
        if self.above:
            self._note_detached(written.values())
        trained = self.above and any(t.requires_grad for t in tensors_in((args, kwargs)))
        new = self._values_after_write(op, args, kwargs, out, written)
        for t, v in zip(written.values(), new, strict=True):
            cell = self._find(t)
            assert cell is not None
            if self.above and not torch.is_grad_enabled():
                cell.write_beside_gradients(v, self._node)
            else:
                cell.write(v, self._node, trained)
        if _gives_arguments(op):
            for result, t in zip(tensors_in(out), written.values(), strict=True):
                cell = self._find(t)
                if cell is not None and result is not t:  # a fake tensor instead of a real one
                    self._bind(result, cell)

    def _values_after_write(
        self,
        op: Operator,
        args: Sequence[TorchValue],
        kwargs: Mapping[str, TorchValue],
        out: TorchValue,
        written: dict[ArgumentPosition, Tensor],
    ) -> list[Value]:
        """Add a node that computes what the call writes; return the value for each tensor in `written`."""
        values = self.tree_of(args), self.tree_of(kwargs)
        twin = out_of_place_form(op, args, kwargs) if list(written) == [0] else None
        if twin is aten.copy.default and self.above:
            return [self._copied_into(args[0], values[0][1])]
        if twin is not None:
            return [self._node(twin, *values, written[0])]
        result, *new = self._node(WriteToCopies(op, tuple(written)), *values, (out, *written.values()))
        self._bind_other_results(op, out, result, written)
        return new

    def _note_detached(self, written: Iterable[Tensor]) -> None:
        """Note writes through `.data` and detached views."""
        for t in written:
            cell = self._find(t)
            if cell is not None and cell.is_detached:
                self.detached_writes.append(DetachedWrite(cell.root.value, len(self.nodes), user_frame() or ""))

    def _copied_into(self, x: Tensor, value: Value) -> Value:
        """Return the value of `x` after a copy of `value` into it, without `aten.copy`, which has no gradient."""
        like = torch.empty(value.shape, dtype=x.dtype, device=x.device) if tuple(x.shape) != value.shape else x
        if (value.dtype, value.device) != (x.dtype, str(x.device)):
            value = self._node(aten.to.device, (value, x.device, x.dtype), {}, like)
        return value if like is x else self._node(aten.expand.default, (value, tuple(x.shape)), {}, x)

    def _bind_other_results(
        self, op: Operator, out: TorchValue, shown: TorchValue, written: dict[ArgumentPosition, Tensor]
    ) -> None:
        """Bind the results of an in-place operator that are not its written arguments."""
        if _gives_arguments(op):
            return
        mine = {memory_of(w) for w in written.values()}
        for t, v in zip(tensors_in(out), _tensor_values(shown), strict=True):
            if memory_of(t) not in mine:
                self._bind(t, Cell(v, TensorMemory(), t))


@lru_cache(maxsize=4096)
def _gives_arguments(op: Operator) -> bool:
    """True if all results of `op` are arguments that it wrote to."""
    infos = [r.alias_info for r in op._schema.returns]
    return bool(infos) and all(info is not None and info.is_write for info in infos)


def written_by(
    op: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]
) -> dict[ArgumentPosition, Tensor]:
    """Return the tensors that the call writes to, by position or name of the argument."""
    places: list[int | str] = list(writes_to(op))
    secret = SECRET_WRITES.get(op._schema.name)
    if secret is not None and len(args) > secret[1] and args[secret[1]]:
        places += secret[0]
    found: dict[ArgumentPosition, Tensor] = {}
    for place in places:
        given = argument_at(place, args, kwargs)
        if isinstance(given, Tensor):
            found[place] = given
        elif isinstance(given, (list, tuple)):
            found |= {(place, at): t for at, t in enumerate(given) if isinstance(t, Tensor)}
    return found


def _cell_before_saving(x: Tensor, cell: Cell) -> Cell:
    """Return the cell of the original tensor for a tensor that autograd saved for its backward pass.

    Autograd detaches a saved tensor and restores its `grad_fn`.
    """
    view = cell.view
    return view.base if view is not None and view.op is aten.detach.default and x.grad_fn is not None else cell


def _check_constant(x: Tensor, is_captured: bool) -> None:
    """Raise CaptureError for a tensor that cannot be a constant: a fake one, or one that requires gradients."""
    is_fake = isinstance(x, FakeTensor)
    if is_fake and is_captured and backward_running() != -1:
        raise HiddenTensorError(
            f"capturing {user_frame() or 'a forward pass'}",
            f"a derivative that reads a tensor of shape {tuple(x.shape)}, which no operator returned",
            "an operator of the forward pass computes the tensor for its own backward pass, so a program lacks it",
            "write the operator as several simpler ones; or, without a pipeline, pass Strategy(full_graph=False), "
            "which runs code that cannot be captured in Python",
        )
    if is_fake or x.requires_grad:
        raise CaptureError(
            f"recording {user_frame() or 'a program'}",
            f"{'a fake tensor of another capture' if is_fake else 'a tensor that requires gradients'}, of shape "
            f"{tuple(x.shape)}",
            "the tensor is not in the model or the batch, so the program would treat it as a constant",
            "put trained tensors into the model (model.loss = loss), call requires_grad_(False) on others, or "
            "detach() a constant",
        )


def _looks_alike(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and tuple(a.shape) == tuple(b.shape)
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def _view_between(a: Tensor, b: Tensor) -> tuple[Operator, list[Any]] | None:
    """Return the operator that makes the view `b` of `a` (`view` or `permute`) and its argument, or None."""
    if a.dtype != b.dtype or a.storage_offset() != b.storage_offset() or a.numel() != b.numel():
        return None
    if a.is_contiguous() and b.is_contiguous():
        return aten.view.default, list(b.shape)
    orders = permutations(range(a.dim())) if a.dim() == b.dim() <= 4 else ()
    found = (list(p) for p in orders if _looks_alike(a.permute(p), b))
    order = next(found, None)
    return None if order is None else (aten.permute.default, order)


def _tensor_values(tree: TorchValue) -> Sequence[Value]:
    return [v for v in values_in(tree) if v.is_tensor]
