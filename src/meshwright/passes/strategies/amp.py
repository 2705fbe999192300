"""Automatic mixed precision: operators run in half precision; parameters and optimizer states keep their dtype.

The pass works on the captured model before gradients are recorded, so that casts are differentiated like other
operators. Thus master weights, and gradients in their dtype, need no extra code. torch's autocast decides the dtype of
each node. Level "O2" also casts parameters and inputs, and runs norms and losses in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch

from meshwright.graph import (
    Change,
    Input,
    Node,
    Op,
    Origin,
    Pass,
    Program,
    RewriteError,
    Value,
    map_values,
    name_of,
    register_pass,
)

aten = torch.ops.aten

SINGLE = {
    *("rms_norm", "layer_norm", "group_norm", "batch_norm", "instance_norm"),
    *("softmax", "log_softmax", "logsumexp", "cumsum", "norm"),
    *("cross_entropy_loss", "nll_loss_nd", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "cosine_similarity"),
}
"""Operators that run in float32 at level O2."""


@register_pass
@dataclass(frozen=True)
class Amp(Pass):
    """Mixed precision pass. Level "O1" is `torch.autocast`; "O2" also casts parameters, except those of norms.

    At "O2", operators in `single` run in float32. A model with casts of its own must be captured under autocast, as
    `to_static` does, because some of its casts have no effect in float32.

    Gradients in float16 underflow without a loss scale, which is not part of the pass: `Strategy(amp=...)` has both.

    Raises:
        RewriteError: `dtype` is not bfloat16 or float16, or `level` is unknown.
    """

    name: ClassVar[str] = "amp"
    on: ClassVar[Literal["captured", "recorded"]] = "captured"
    dtype: torch.dtype = torch.bfloat16
    level: Literal["O1", "O2"] = "O1"
    single: frozenset[str] = field(default=frozenset(SINGLE), repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise RewriteError(
                f"Amp({self.dtype})",
                "an unsupported dtype",
                "Amp runs operators in bfloat16 or float16",
                "write Amp(torch.bfloat16)",
            )
        if self.level not in ("O1", "O2"):
            raise RewriteError(
                f"Amp(level={self.level!r})", "no such level", "the levels are O1 and O2", 'write level="O1"'
            )

    def run(self, program: Program) -> Program:
        cast = _Cast(self, program)
        nodes = tuple(cast.nodes())
        writes = tuple((x, cast.low(v)) for x, v in program.writes)
        out = replace(program, nodes=nodes, outputs=map_values(cast.low, program.outputs), writes=writes)
        casts = len(nodes) - len(program.nodes)
        what = f"{self.level}: {len(program.nodes)} operators under autocast to {self.dtype}, {casts} casts"
        return out.with_changes(Change(self.name, what))


@dataclass
class _Cast:
    """The nodes of a program with their modes set, and casts between them."""

    how: Amp
    before: Program
    lower: dict[Value, Value] = field(default_factory=dict[Value, Value])
    count: int = 0

    def low(self, v: Value) -> Value:
        """Return the cast of `v` if there is one, otherwise `v`."""
        return self.lower.get(v, v)

    def nodes(self) -> Iterator[Node]:
        for given in self._cast_inputs():
            origin = Origin("forward", given.name.rpartition(".")[0], autocast=self._mode(given.value))
            node = self._cast(given.value, self.how.dtype, origin)
            self.lower[given.value] = node.out
            yield node
        for node in self.before.nodes:
            yield from self._single(node) if self._is_single(node.op) else self._plain(node)

    def _cast_inputs(self) -> Iterator[Input]:
        for given in self.before.inputs:
            norm = given.role == "parameter" and self._is_norm(given.value)
            cast = self.how.level == "O2" and given.role in ("parameter", "batch") and not norm
            if cast and given.value.dtype == torch.float32:
                yield given

    def _is_norm(self, v: Value) -> bool:
        """True for parameters that are read only by operators in float32."""
        users = self.before.users.get(v, ())
        return bool(users) and all(self._is_single(node.op) for node in users)

    def _is_single(self, op: Op) -> bool:
        return self.how.level == "O2" and name_of(op).removeprefix("aten.").split(".")[0] in self.how.single

    def _plain(self, node: Node) -> Iterator[Node]:
        args, kwargs = map_values(self.low, (node.args, dict(node.kwargs)))
        mode = node.origin.autocast if self._has_modes else self._mode(*node.ins)
        yield replace(node, args=args, kwargs=kwargs, origin=replace(node.origin, autocast=mode))

    @cached_property
    def _has_modes(self) -> bool:
        """True for a program captured under autocast; nodes that the model excluded from autocast stay excluded."""
        return any(n.origin.autocast is not None and n.origin.autocast[1] == self.how.dtype for n in self.before.nodes)

    def _single(self, node: Node) -> Iterator[Node]:
        """Yield the node without autocast, after casts of its operands to float32."""
        origin = replace(node.origin, autocast=None)
        raised: dict[Value, Value] = {}
        for v in dict.fromkeys(node.ins):
            if isinstance(v.dtype, torch.dtype) and v.dtype.is_floating_point:
                cast = self._cast(self.low(v), torch.float32, origin)
                raised[v] = cast.out
                yield cast
        args, kwargs = map_values(lambda v: raised.get(v, v), (node.args, dict(node.kwargs)))
        yield replace(node, args=args, kwargs=kwargs, origin=origin)

    def _cast(self, v: Value, dtype: torch.dtype, origin: Origin) -> Node:
        self.count += 1
        out = Value(f"{v.name}_as_{str(dtype).rpartition('.')[2]}_{self.count}", v.shape, dtype, v.device)
        return Node(aten.to.dtype, (v, dtype), {}, out, origin)

    def _mode(self, *values: Value) -> tuple[str, torch.dtype]:
        device = next((v.device for v in values if v.is_tensor), "cpu")
        return device.split(":")[0], self.how.dtype
