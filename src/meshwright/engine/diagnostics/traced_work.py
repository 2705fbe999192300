"""Record the work of a rank with its times: passes of modules, updates, programs, and the actions of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter, time
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.comm import Counters, NoCommunicatorError, current_communicator
from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, local_parts, tensors_in

_SINCE = time() - perf_counter()
PLAIN = (Tensor, nn.Parameter, DistTensor)


def clock() -> float:
    """Return the seconds since 1970, by a clock that never goes back."""
    return _SINCE + perf_counter()


@dataclass(frozen=True, slots=True)
class TracedWork:
    """A piece of work: its kind (forward, backward, update, program, pipeline), name, start and duration."""

    kind: str
    name: str
    began: float
    seconds: float


class WorkRecorder:
    """A recorder of the work of the rank with the counters `seen`; each piece is added when it has ended."""

    def __init__(self, seen: Counters, found: list[TracedWork]) -> None:
        self._seen, self._found = seen, found
        self._forward: list[tuple[str, float]] = []
        self._names: dict[nn.Module, str] = {}
        self._backward: tuple[str, float] | None = None

    def watch(self, kind: str, name: str) -> Callable[[], None]:
        """Begin a piece of work; call the returned function when it has ended."""
        self._end_of_backward()
        began = clock()

        def ended() -> None:
            self._end_of_backward()
            self._note(kind, name, began)

        return ended

    @contextmanager
    def of_modules(self) -> Generator[None]:
        """Record passes of modules and updates of optimizers inside the block."""
        updates: list[Callable[[], None]] = []

        def update(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if self._is_here():
                updates.append(self.watch("update", type(optimizer).__name__))

        def updated(*_: object) -> None:
            if self._is_here() and updates:
                updates.pop()()

        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._behind, always_call=True),
                register_optimizer_step_pre_hook(update),
                register_optimizer_step_post_hook(updated),
            ):
                stack.callback(handle.remove)
            yield
            self._end_of_backward()

    def _before(self, module: nn.Module, _: object) -> None:
        if isinstance(module, fx.GraphModule) or not self._is_here():  # the code of a program is no module of the user
            return
        if not self._forward:
            self._end_of_backward()
            if module not in self._names:
                self._names |= {m: path or type(m).__name__ for path, m in module.named_modules()}
        self._forward.append((self._names.get(module, type(module).__name__), clock()))

    def _behind(self, module: nn.Module, _: object, out: TorchValue) -> None:
        if isinstance(module, fx.GraphModule) or not self._is_here() or not self._forward:
            return
        name, began = self._forward.pop()
        self._note("forward", name, began)
        for x in tensors_in(out):
            self._tell_of_gradient(name, x)

    def _tell_of_gradient(self, name: str, x: Tensor) -> None:
        """Register a hook that is called when the backward pass reaches the module, at the gradient of its output.

        If several modules return the same tensor, the innermost one counts. Fake tensors of a capture get no hook.
        """
        with local_parts():  # the node of the plain tensor, which computes this rank's part
            node = x.grad_fn if type(x) in PLAIN else None
        if node is None:
            return
        known = cast(dict[str, str], node.metadata)
        if known.setdefault("meshwright_module", name) is name:
            node.register_prehook(lambda _: self._reached(name))

    def _reached(self, name: str) -> None:
        if self._is_here():
            self._end_of_backward()
            self._backward = (name, clock())

    def _end_of_backward(self) -> None:
        """End the recorded backward pass of a module: it lasts until the next one or other work begins."""
        if self._backward is not None:
            self._note("backward", *self._backward)
            self._backward = None

    def _note(self, kind: str, name: str, began: float) -> None:
        self._found.append(TracedWork(kind, name, began, clock() - began))

    def _is_here(self) -> bool:
        """True if the recorded rank is the running one: hooks are called for all ranks of the process."""
        try:
            return current_communicator().seen is self._seen
        except NoCommunicatorError:
            return False
