"""Context parallelism: select the algorithm for attention along a sharded sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import get_args

from torch import nn

from meshwright.tensor import Context, using_attention

from .._errors import StrategyError


def context_parallel(by: Context) -> AbstractContextManager[None]:
    """Select the algorithm for attention along a sharded sequence: "ring", "ulysses" or "gather".

    The choice holds inside the `with` block; the default is "gather". Attention that the algorithm does not support
    uses "gather". A static program keeps the choice under which it was captured.

    Raises:
        StrategyError: the name is unknown.

    >>> import torch, meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["cp"])
    >>> def attend():
    ...     x = mw.shard_tensor(torch.ones(1, 4, 2), mesh, [mw.Shard(1)])
    ...     with mw.context_parallel("ring"):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x).placements
    >>> mw.simulate(attend, 2)[0]
    (Shard(1),)
    """
    return using_attention(check_context(by))


def check_context(by: Context) -> Context:
    """Return `by`. Raises StrategyError if there is no such algorithm."""
    if by not in get_args(Context):
        raise StrategyError(
            f"context parallelism by {by!r}",
            repr(by),
            "there is no such algorithm for attention along a sharded sequence",
            'write "ring" (keys and values travel), "ulysses" (heads are sharded instead), or "gather"',
        )
    return by


@dataclass(frozen=True)
class ContextHooks:
    """Hooks that select the attention algorithm while a module runs.

    They are on its submodules too, because activation checkpointing may run a submodule again by itself.
    """

    by: Context
    entered: list[AbstractContextManager[None]] = field(default_factory=list[AbstractContextManager[None]])

    def put_on(self, model: nn.Module) -> None:
        for part in model.modules():
            if part is model or any(True for _ in part.children()):
                part.register_forward_pre_hook(self._enter, prepend=True)
                part.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        self.entered.append(using_attention(self.by))
        self.entered[-1].__enter__()

    def _leave(self, *_: object) -> None:
        self.entered.pop().__exit__(None, None, None)
