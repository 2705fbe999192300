"""Random programs in plain torch source, and the table of operators that they are drawn from.

A program is data: a mesh shape and lines of Python. The same lines run on plain tensors and on distributed ones. Only
the three names `leaf`, `reshard` and `plain` have another meaning there. An entry of `OPS` is a line with placeholders.
`{x}` is an earlier value. The function of the same name in `HOLES` fills every other placeholder, from left to right,
and may use the values that were drawn before. An entry with `{v}` is a statement that makes the new value `v` itself.

A program is rejected if its single-device value is not finite, or jumps when the leaves move a little. Near a kink
(a tie, a zero under `relu`) two correct implementations may differ.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks._samples import channels_last, transposed

MESHES = (
    *((2,), (3,), (4,), (4,), (2, 2), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)),
    *((1,), (1, 3), (4, 1), (1, 2, 2)),
)
LARGEST = 50.0  # a program with larger values is rejected
NUDGE = 1e-7


# --- programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A program with one value per line, `pass` for a dropped line; `twice` requests second derivatives."""

    seed: int
    mesh: tuple[int, ...]
    lines: tuple[str, ...]
    twice: bool = False

    def __str__(self) -> str:
        head = f"# chain {self.seed} on a mesh of {' x '.join(map(str, self.mesh))}"
        tail = ["# gradients of the gradients' squares"] if self.twice else []
        return "\n".join([head, *(line for line in self.lines if line != "pass"), *tail])


def _itself(x: Tensor, *_: Any) -> Tensor:
    return x


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Sequence[int]], Tensor]]] = {
    "usual": (_itself, _itself),
    "transposed": (transposed, _itself),
    "channels last": (channels_last, _itself),
    "with gaps": (lambda x: torch.stack([x, x], -1).flatten(-2), lambda x, shape: x[..., ::2]),
    "expanded": (lambda x: x[:1].clone(), lambda x, shape: x.expand(shape)),
}
"""Memory formats of a leaf with two or more dims: a function that makes the leaf, and one that gives its value."""


@dataclass
class Machine:
    """Meaning of the names in a program: by default one device; `lay` and `move` distribute with a library."""

    lay: Callable[[Tensor, str, int], Any] = lambda value, layout, seed: value
    move: Callable[[Any, str], Any] = lambda x, layout: x
    nudge: float = 0.0
    leaves: list[Any] = field(default_factory=list)

    def names(self) -> dict[str, Any]:
        given = {"leaf": self.leaf, "reshard": self.move, "plain": plain, "ints": ints, "mask": mask, "order": order}
        return {"torch": torch, "F": F, "checkpoint": checkpoint, "math": math, **given}

    def leaf(self, seed: int, shape: Sequence[int], layout: str, order: str = "usual") -> Any:
        value = plain(seed, *shape)
        if self.nudge:
            value = value * (1 + self.nudge * plain(seed + 1, *shape))
        made, viewed = ORDERS[order]
        self.leaves.append(self.lay(made(value).requires_grad_(), layout, seed))
        return viewed(self.leaves[-1], shape)


def plain(seed: int, *shape: int) -> Tensor:
    """Return different numbers of both signs, with magnitudes between 0.3 and 1.5."""
    rng = torch.Generator().manual_seed(seed)
    size = 0.3 + 1.2 * torch.rand(shape, generator=rng, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=rng) < 0.4, -size, size)


def ints(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def mask(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def order(seed: int, size: int, count: int) -> Tensor:
    """Return `count` different numbers below `size`."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count]


@dataclass(frozen=True)
class Outcome:
    """Values that the lines made, by name, and gradients of the leaves."""

    values: dict[str, Any]
    grads: list[Any]


def perform(chain: Chain, machine: Machine) -> Outcome:
    """Return the program's values and gradients on a machine."""
    names = machine.names()
    for line in chain.lines:
        exec(line, names)
    values = {name: names[name] for name in results(chain)}
    loss = _loss(chain, values)
    return Outcome(values, _gradients(chain, loss, machine.leaves))


def kernels(chain: Chain) -> AbstractContextManager[None]:
    """Return a context in which every operator of the program has the derivatives that the program needs."""
    return sdpa_kernel(SDPBackend.MATH) if chain.twice else nullcontext()


def results(chain: Chain) -> list[str]:
    return [f"v{k}" for k in range(len(chain.lines)) if re.search(rf"\bv{k}\b", chain.lines[k])]


def _loss(chain: Chain, values: dict[str, Any]) -> Any:
    """Return a weighted sum of the values that no later line uses."""
    total: Any = None
    for k, (name, value) in enumerate(values.items()):
        used = any(re.search(rf"\b{name}\b", line) for line in chain.lines[int(name[1:]) + 1 :])
        if used or not value.requires_grad:
            continue
        part = (value * plain(1000 + k, *value.shape)).sum()
        total = part if total is None else total + part
    return total


def _gradients(chain: Chain, loss: Any, leaves: list[Any]) -> list[Any]:
    if loss is None:
        return [None] * len(leaves)
    if not chain.twice:
        loss.backward()
        return [leaf.grad for leaf in leaves]
    first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    bent = [(g * g).sum() for g in first if g is not None and g.requires_grad]
    if not bent:
        return [*first, *[None] * len(leaves)]
    second = torch.autograd.grad(sum(bent[1:], bent[0]), leaves, allow_unused=True)
    return [*first, *second]


# --- the table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """A line with placeholders, and the condition on `x` under which the line makes sense."""

    code: str
    when: Callable[[Tensor], bool] = lambda x: True
    weight: int = 1


def nd(low: int, high: int = 9) -> Callable[[Tensor], bool]:
    return lambda x: low <= x.ndim <= high


def distinct(x: Tensor) -> bool:
    """True if all elements differ, so that their order is defined."""
    ordered = x.detach().flatten().sort().values
    return x.ndim > 0 and bool((ordered.diff() > 1e-4).all())


def positive(x: Tensor) -> bool:
    return bool((x > 1e-3).any())


def _square(x: Tensor) -> bool:
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def ops(codes: str, when: Callable[[Tensor], bool] = lambda x: True, weight: int = 1) -> list[Op]:
    """Return one entry per line of text; `~` replaces the line break inside an entry."""
    return [Op(line.strip().replace(" ~ ", "\n"), when, weight) for line in codes.strip().splitlines()]


POINTWISE = ops("""
    {x}.sin()
    torch.tanh({x})
    F.gelu({x})
    F.silu({x})
    F.relu({x})
    {x}.sigmoid()
    {x}.square()
    -{x}
    {x}.abs()
    ({x} * 0.3).exp()
    ({x}.square() + 1).log()
    ({x}.square() + 1).rsqrt()
    {x}.clamp(-0.9, 0.9)
    {x} ** 3
    F.softplus({x})
    F.leaky_relu({x}, 0.1)
    {x}.sign() * {x}
    torch.where({x} > {c}, {x}, {x} * 2)
    1 / ({x}.abs() + 0.5)
    {x} + {c}
    {c} - {x}
    {x} * {c}
    {c} / ({x}.square() + 1)
    {x} / {c}
    {x}.add({y}, alpha={c})
    {x} + {y}
    {x} - {y}
    {y} - {x}
    {x} * {y}
    {x} / ({y}.abs() + 0.5)
    torch.maximum({x}, {y})
    torch.minimum({x}, {y})
    torch.lerp({x}, {same}, 0.3)
    torch.lerp({x}, {same}, {same}.sigmoid())
    torch.addcmul({x}, {same}, {y}, value=0.5)
    torch.addcdiv({x}, {same}, {same}.abs() + 1)
    torch.atan2({x}, {same}.abs() + 1)
    torch.hypot({x}, {same})
    torch.logaddexp({x}, {y})
    {x}.remainder(0.7)
    ({x} > 0).double() * {x}
    ({x} > {y}).double() + {x}
    {x}.round().long()
    {x}.detach().bfloat16().double()
    {x}.detach().float().double().round() * {x}
    {x}.to(torch.float64).clone()
    torch.nan_to_num({x})
    torch.clamp({x}, max={y})
    F.hardtanh({x}) + F.hardswish({x})
    {x} * {x}.detach()
""")

PRODUCTS = (
    ops(
        """
    {x} @ {matrix}
    F.linear({x}, {weight})
    F.linear({x}, {weight}, {bias})
    F.linear({x}, {weight}, plain({seed}, {n}))
    torch.einsum('...k,kn->...n', {x}, {matrix})
    {x} * {row}
    torch.tensordot({x}, {matrix}, 1)
    """,
        nd(1),
    )
    + ops(
        """
    {x} @ {x}.mT
    torch.einsum('...ik,...jk->...ij', {x}, {same})
    {x}.mT @ {same}
    torch.linalg.vecdot({x}, {same})
    """,
        nd(2),
    )
    + ops(
        """
    torch.addmm({bias}, {x}, {weight}.t())
    torch.mm({x}, {matrix})
    torch.einsum('ij->ji', {x})
    torch.einsum('ij,kj->ik', {x}, {x})
    torch.einsum('ij,ij->j', {x}, {same})
    torch.mv({x}, {row})
    """,
        nd(2, 2),
    )
    + ops(
        """
    torch.bmm({x}, {same}.mT)
    torch.baddbmm({x} @ {x}.mT, {x}, {same}.mT, beta=0.5)
    torch.einsum('bij,bkj->bik', {x}, {same})
    torch.einsum('bij,kj->bik', {x}, {weight})
    """,
        nd(3, 3),
    )
    + ops(
        """
    torch.outer({x}, {same})
    {x}.dot({same})
    """,
        nd(1, 1),
    )
)

REDUCTIONS = (
    ops(
        """
    {x}.sum()
    {x}.mean()
    {x}.norm()
    {x}.var()
    {x}.logsumexp({ds}) if {x}.ndim else {x}
    """
    )
    + ops(
        """
    {x}.sum({ds}, keepdim={k})
    {x}.mean({ds}, keepdim={k})
    {x}.mean({d})
    {x}.var({ds}, keepdim={k})
    {x}.var({d}, correction=0)
    {x}.std({ds}, keepdim={k})
    torch.var_mean({x}, {d})[1]
    torch.linalg.vector_norm({x}, {ord}, dim={ds}, keepdim={k})
    {x}.logsumexp({ds}, keepdim={k})
    {x}.prod({d}, keepdim={k})
    {x}.prod()
    ({x} > 0).any({d})
    ({x} > 0).all({d}, keepdim={k})
    ({x} > 0).sum({d})
    ({x} > 0).double().mean({ds})
    {x}.count_nonzero({d})
    {x}.nansum({ds})
    torch.dist({x}, {same})
    {x}.norm(dim={d}, keepdim=True) + {x}
    """,
        nd(1),
    )
    + ops(
        """
    {x}.amax({ds}, keepdim={k})
    {x}.amin({ds}, keepdim={k})
    {x}.max()
    {x}.max({d}, keepdim={k}).values
    {x}.min({d})[0]
    {x}.median({d}).values
    {x}.argmax({d}, keepdim={k})
    {x}.argmin()
    {x}.argmax()
    {x}.aminmax().max
    """,
        distinct,
    )
)

LOSSES = (
    ops(
        """
    F.mse_loss({x}, {same}, reduction={red})
    F.huber_loss({x}, {same}, reduction={red})
    F.smooth_l1_loss({x}, {same}, reduction={red})
    F.l1_loss({x}, {same}, reduction={red})
    F.binary_cross_entropy({x}.sigmoid(), {same}.detach().sigmoid(), reduction={red})
    F.binary_cross_entropy_with_logits({x}, {same}.detach().sigmoid(), reduction={red})
    F.binary_cross_entropy_with_logits({x}, {same}.sigmoid(), weight={same}.detach().abs())
    """
    )
    + ops(
        """
    F.kl_div({x}.log_softmax(-1), {same}.softmax(-1), reduction='batchmean')
    F.cosine_similarity({x}, {same}, dim={d})
    """,
        nd(1),
    )
    + ops(
        """
    F.cross_entropy({x}, {classes}, reduction={red})
    F.cross_entropy({x}, {classes}, label_smoothing=0.1, ignore_index=0)
    F.nll_loss({x}.log_softmax(1), {classes}, reduction={red})
    F.nll_loss({x}.log_softmax(1), {classes}, weight=plain(3, {x}.shape[1]).abs(), reduction={red})
    F.cross_entropy({x}, {same}.softmax(1))
    """,
        nd(2),
    )
    + ops(
        """
    F.ctc_loss({x}.log_softmax(-1), {labels}, [{x}.shape[0]] * {x}.shape[1], [1] * {x}.shape[1], reduction={red})
    F.ctc_loss({x}.log_softmax(-1), {labels}.reshape(-1), [{x}.shape[0]] * {x}.shape[1], (1,) * {x}.shape[1])
    """,
        lambda x: x.ndim == 3 and x.shape[2] > 1,
        3,
    )
)

INFINITIES = ops(
    """
    {x}.masked_fill({hidden}, -math.inf).amax({ds}, keepdim={k}).clamp(min=-3)
    {x}.masked_fill({hidden}, -math.inf).max({d}).values.clamp(min=-3)
    {x}.masked_fill({hidden}, -math.inf).max().clamp(min=-3)
    {x}.masked_fill({hidden}, math.inf).amin({ds}).clamp(max=3)
    {x}.masked_fill({hidden}, math.inf).min({d}, keepdim={k})[0].clamp(max=3)
    {x}.masked_fill({hidden}, -math.inf).argmax({d})
    {x}.masked_fill({hidden}, -math.inf).logsumexp({d}).clamp(min=-3)
    {x}.masked_fill({hidden}, -math.inf).softmax({d})
    {x}.masked_fill({hidden}, -math.inf).log_softmax({d}).clamp(min=-3)
    {x}.masked_fill({hidden}, -math.inf).cummax({d}).values.clamp(min=-3)
    {x}.masked_fill({hidden}, -math.inf).logcumsumexp({d}).clamp(min=-3)
    {x}.masked_fill({hidden}, math.nan).nansum({d})
    {x}.masked_fill({hidden}, math.nan).isnan().any({d})
    torch.nan_to_num(({x} * math.inf).amax({d}), 0.5, 2.0, -2.0)
    torch.nan_to_num({x}.detach() / 0.0, 0.5, 2.0, -2.0) * {x}
    torch.linalg.vector_norm({x}.masked_fill({hidden}, math.inf), math.inf, dim={d}).clamp(max=3)
    """,
    distinct,
)

NORMS = ops(
    """
    F.softmax({x}, {d})
    F.log_softmax({x}, {d})
    {x}.softmax(-1) @ {x} if {x}.ndim == 2 and {x}.shape[0] == {x}.shape[1] else {x}.softmax(0)
    F.layer_norm({x}, ({x}.shape[-1],))
    F.layer_norm({x}, ({x}.shape[-1],), {row}, {row})
    F.rms_norm({x}, ({x}.shape[-1],), {row}, 1e-3)
    F.normalize({x}, dim={d})
    """,
    nd(1),
) + ops(
    """
    F.layer_norm({x}, tuple({x}.shape[-2:]))
    F.group_norm({x}, {groups})
    F.group_norm({x}, {groups}, {channel}, {channel})
    F.batch_norm({x}, None, None, {channel}, {channel}, training=True)
    F.batch_norm({x}, plain({seed}, {x}.shape[1]), plain(5, {x}.shape[1]).abs())
    """,
    nd(2),
)

SCANS = ops(
    """
    {x}.cumsum({d})
    {x}.cumsum({d}).flip({d})
    {x}.cumprod({d})
    {x}.logcumsumexp({d})
    torch.diff({x}, dim={d})
    {x}.flip({d}).cumsum({d})
    """,
    nd(1),
) + ops(
    """
    {x}.cummax({d}).values
    {x}.cummin({d})[0]
    """,
    distinct,
)

SHAPES = (
    ops(
        """
    {x}.reshape({newshape})
    {x}.reshape(-1)
    {x}.flatten()
    {x}.contiguous().view({newshape})
    {x}.permute({perm})
    {x}.squeeze()
    {x}.unsqueeze({ud})
    {x}[None]
    {x}.unsqueeze(0).expand(3, *{x}.shape)
    {x}.expand(2, *{x}.shape).clone()
    torch.stack([{x}, {same}], {ud})
    {x}.clone()
    """
    )
    + ops(
        """
    {x}.flatten({d}, -1)
    {x}.unflatten({composite})
    {x}.transpose({d}, {e})
    {x}.squeeze({d})
    {x}.repeat({reps})
    torch.tile({x}, {reps})
    {x}.repeat_interleave(2, {d})
    {x}.roll({shift}, {d})
    {x}.roll({shift})
    {x}.flip({ds})
    {x}.movedim({d}, {e})
    {x}.unfold({d}, 2, 1)
    torch.cat([{x}, {same}], {d})
    torch.cat([{x}, {mate}, {x}], {g})
    F.pad({x}, {pad})
    F.pad({x}, {pad}, value=0.5)
    {x}.narrow({g}, {start}, {length})
    """,
        nd(1),
    )
    + ops(
        """
    {x}.mT
    {x}.tril()
    {x}.triu(1)
    {x}.diagonal()
    {x}.flatten(0, 1)
    {x}.swapaxes(0, -1)
    {x}.rot90()
    """,
        nd(2),
    )
    + ops("{x}.t()", nd(0, 2))
    + ops("torch.diag({x})", nd(1, 2))
)

INDEXING = (
    ops(
        """
    {x}[{i}]
    {x}[..., {j}]
    {x}[{cut}]
    {x}[..., {last}]
    {x}[{cut}, None]
    {x}[mask({seed}, {x}.shape[0])]
    {x}[{x} > 0]
    {x}[ints({seed}, {x}.shape[0], 4)]
    {x}[ints({seed}, {x}.shape[0], 2, 3)]
    {x}[..., ints({seed}, {x}.shape[-1], 3)]
    {x}[[0, -1]]
    {x}.index_select({d}, ints({seed}, {x}.shape[{d}], 3))
    {x}.gather({d}, ints({seed}, {x}.shape[{d}], *{x}.shape))
    torch.take_along_dim({x}, ints({seed}, {x}.shape[{d}], *{x}.shape), {d})
    {x}.scatter({d}, order({seed}, {x}.shape[{d}], 1).expand([1] * {x}.ndim), {c})
    {x}.scatter_add({d}, ints({seed}, {x}.shape[{d}], *{x}.shape), {same})
    {x}.index_add({g}, order({seed}, {x}.shape[{g}], {x}.shape[{g}]), {same})
    {x}.index_copy({g}, order({seed}, {x}.shape[{g}], {x}.shape[{g}]), {same})
    {x}.index_fill({d}, order({seed}, {x}.shape[{d}], 1), {c})
    {x}.index_put((ints({seed}, {x}.shape[0], 3),), {x}[0] * 2, accumulate=True)
    {x}.index_put((order({seed}, {x}.shape[0], 1),), {x}[-1])
    {x}.masked_fill(mask({seed}, *{x}.shape), {c})
    {x}.masked_fill(mask({seed}, {x}.shape[-1]), {c})
    {x}.masked_fill({x} < 0, {c})
    torch.where(mask({seed}, *{x}.shape), {x}, {same})
    torch.where({x} > {same}, {x}, {c})
    {x}.masked_select(mask({seed}, *{x}.shape))
    {x}.masked_scatter(mask({seed}, *{x}.shape), {same})
    {x}.take(ints({seed}, {x}.numel(), 5))
    {x}.select_scatter({x}.select({d}, 0) * 2, {d}, -1)
    ({x} > 0).nonzero()
    """,
        nd(1),
    )
    + ops(
        """
    {x}[:, {i1}]
    {x}[{i}, {i1}]
    {x}[:, {cut1}]
    {x}[{cut}, {cut1}]
    {x}[{i}, ..., None]
    {x}[ints({seed}, {x}.shape[0], 3), ints(5, {x}.shape[1], 3)]
    {x}[:, ints({seed}, {x}.shape[1], 4)]
    {x}[{cut}, ints({seed}, {x}.shape[1], 2)]
    {x}[torch.arange({x}.shape[0]), {x}[:, 0].argsort() % {x}.shape[1]] if {x}.ndim == 2 else {x}
    """,
        nd(2),
    )
    + ops("F.embedding(ints({seed}, {x}.shape[0], 2, 3), {x})", nd(2, 2))
)

WRITES = (
    ops(
        """
    {v} = {x}.clone() ~ {v} += {c}
    {v} = {x}.clone() ~ {v}.mul_({c}).add_({same})
    {v} = {x}.clone() ~ {v}.copy_({same})
    {v} = {x} * 1 ~ {v}.zero_()
    {v} = {x}.clone() ~ {v}.masked_fill_({v} > 0, {c})
    {v} = {x}.clone() ~ {v}[...] = {same}
    {v} = {x}.detach() * 2 ~ {v}.clamp_(min={c})
    """
    )
    + ops(
        """
    {v} = {x}.clone() ~ {v}[{i}] = {c}
    {v} = {x}.clone() ~ {v}[{cut}] = {c}
    {v} = {x}.clone() ~ {v}[{i}] = {x}[{i}] * 2
    {v} = {x}.clone() ~ {v}[{cut}] = {same}[{cut}]
    {v} = {x}.clone() ~ {v}[{cut}].mul_({c})
    {v} = {x}.clone() ~ {v}[..., {last}] += {c}
    {v} = {x}.clone() ~ y = {v}[{cut}] ~ y.add_({c}) ~ {v} = {v} * y.sum()
    {v} = {x}.clone() ~ y = {v}[{cut}] ~ {v}.mul_(2) ~ {v} = {v} + y.sum()
    {v} = {x}.clone() ~ y = {v}[0] ~ {v}.add_({same}) ~ {v} = {v} - y
    {v} = {x}.clone() ~ {v}.view(-1)[{flat}] = {c}
    {v} = {x}.clone(memory_format=torch.contiguous_format) ~ {v}.flatten()[{flat}] = {c}
    {v} = {x}.clone() ~ {v}.view(-1)[:2].mul_({c})
    {v} = {x}.detach().clone() ~ {v}.unbind({d})[0].mul_(2)
    {v} = {x}.detach().clone() ~ {v}.split(2, {d})[-1].add_({c})
    {v} = {x}.detach().clone() ~ {v}.chunk(2, {d})[0].zero_()
    {v} = {x}.clone() ~ {v}[mask({seed}, {x}.shape[0])] = {c}
    {v} = {x}.clone() ~ {v}[ints({seed}, {x}.shape[0], 2)] = {c}
    {v} = {x}.clone() ~ {v}[{v} > 0] = 0.25
    {v} = {x}.clone() ~ {v}[{v} < 0] *= 0.5
    {v} = {x}.clone() ~ {v}.unsqueeze(0)[:, 0].mul_(3)
    {v} = {x}.clone() ~ {v}.narrow({g}, {start}, {length}).fill_({c})
    {v} = {x}.clone() ~ {v}.select({d}, 0).copy_({x}.select({d}, -1))
    {v} = {x}.clone() ~ {v}.index_add_({g}, order({seed}, {x}.shape[{g}], {x}.shape[{g}]), {same})
    {v} = {x}.clone() ~ {v}.index_copy_({g}, order({seed}, {x}.shape[{g}], {x}.shape[{g}]), {same})
    {v} = {x}.clone() ~ {v}.index_fill_({d}, order({seed}, {x}.shape[{d}], 1), {c})
    {v} = {x}.clone() ~ {v}.scatter_({d}, order({seed}, {x}.shape[{d}], 1).expand([1] * {x}.ndim), {c})
    {v} = {x}.clone() ~ {v}.index_put_((order({seed}, {x}.shape[0], 1),), {x}[0], accumulate=True)
    {v} = torch.zeros_like({x}) ~ {v}[{cut}] = {x}[{cut}]
    {v} = torch.zeros_like({x}) ~ for _i in range({x}.shape[0]): {v}[_i] = {x}[_i] * {x}[_i]
    {v} = {x}.clone() ~ for _i in range({x}.shape[0]): {v}[_i] += {v}[_i - 1] * {c}
    {v} = {x}.clone() ~ for _i in range(0, {x}.shape[0], 2): {v}[_i : _i + 2] *= {c}
    {v} = torch.zeros_like({x}) ~ for _i in range({x}.shape[-1]): {v}[..., _i] = {x}[..., _i].sin()
    {v} = torch.zeros({x}.shape, dtype=torch.float64) + 0 * {x}.sum() ~ {v}[{i}] = {x}[{i}]
    {v} = {x}.clone() ~ {v}.unsqueeze_({d})
    """,
        nd(1),
    )
    + ops(
        """
    {v} = {x}.clone() ~ {v}.mT[..., {i1}, :] = {c}
    {v} = {x}.clone() ~ {v}.transpose(0, 1).mul_({c})
    {v} = {x}.clone() ~ {v}.transpose(0, 1)[{i1}].add_({c})
    {v} = {x}.clone() ~ {v}[:, {i1}] = {x}[:, 0]
    {v} = {x}.clone() ~ {v}[{i}, {i1}] = {c}
    {v} = {x}.clone() ~ {v}[:, {cut1}] *= {c}
    {v} = {x}.clone() ~ {v}.diagonal().mul_(2)
    {v} = {x}.clone() ~ {v}.tril_()
    {v} = {x}.clone() ~ y = {v}[:, {i1}] ~ y.sin_() ~ {v} = {v}.cos() + y.sum()
    {v} = {x}.clone() ~ {v}[{cut}][:, {cut1}].add_({c})
    {v} = {x}.clone() ~ {v}.permute({perm}).mul_({c})
    """,
        nd(2),
    )
)

PIECES = ops(
    """
    {x}.unbind({d})[0]
    {x}.unbind({d})[-1]
    {x}.split(2, {d})[-1]
    {x}.split(3, {d})[0]
    {x}.chunk(2, {d})[-1]
    {x}.chunk(3, {d})[0]
    torch.tensor_split({x}, 3, {d})[0]
    torch.cat({x}.chunk(2, {d})[::-1], {d})
    sum(part.sum() for part in {x}.split(2, {d}))
    """,
    nd(1),
)

SORTS = ops(
    """
    {x}.sort({d}).values
    {x}.sort({d}, descending=True)[0]
    {x}.argsort({d})
    {x}.topk(1, {d}).values
    {x}.topk({x}.shape[{d}], {d}, largest=False).values
    {x}.topk(1, {d}).indices
    {x}.kthvalue(1, {d}).values
    {x}.gather({d}, {x}.argsort({d}))
    {x}.msort()
    """,
    distinct,
) + ops(
    """
    torch.unique({x}.detach().round())
    torch.bucketize({x}.detach(), torch.linspace(-2.013, 2.017, 5, dtype=torch.float64))
    """
)

LAYERS = (
    ops(
        """
    F.conv1d({x}, plain({seed}, 2, {x}.shape[1], 2))
    F.conv1d({x}, leaf({seed}, (3, {x}.shape[1], 3), {layout3}), padding=1)
    F.conv1d({x}, plain({seed}, 2, {x}.shape[1], 3), plain(4, 2), stride=2, padding=2)
    F.conv1d({x}, plain({seed}, 2, {x}.shape[1], 4), plain(4, 2), padding='same')
    F.conv_transpose1d({x}, plain({seed}, {x}.shape[1], 2, 2))
    F.avg_pool1d({x}, 2)
    F.scaled_dot_product_attention({x}, {same}, {same}, is_causal=True)
    F.scaled_dot_product_attention({x}, {same}, {same})
    F.scaled_dot_product_attention({x}, {x}, {same}, attn_mask=plain({seed}, {x}.shape[1], {x}.shape[1]))
    F.conv2d({x}, plain({seed}, 2, {x}.shape[0], 2, 2))
    """,
        nd(3, 3),
        2,
    )
    + ops("F.max_pool1d({x}, 2)", lambda x: x.ndim == 3 and distinct(x))
    + ops(
        """
    F.conv2d({x}, plain({seed}, 2, {x}.shape[1], 2, 2), padding=1)
    F.conv2d({x}, plain({seed}, 2, {x}.shape[1], 2, 3), padding='same')
    F.scaled_dot_product_attention({x}, {same}, {same}, is_causal=True)
    F.avg_pool2d({x}, 2)
    """,
        nd(4, 4),
        3,
    )
    + ops(
        """
    torch.manual_seed({seed}) ~ {v} = F.dropout({x}.contiguous(), 0.4)
    torch.manual_seed({seed}) ~ {v} = F.dropout({x}, 0.4)
    torch.manual_seed({seed}) ~ {v} = {x} + torch.randn_like({x})
    torch.manual_seed({seed}) ~ {v} = {x} * torch.rand_like({x}).to({x}.dtype)
    torch.manual_seed({seed}) ~ {v} = {x} * torch.bernoulli({x}.detach().sigmoid())
    torch.manual_seed({seed}) ~ {v} = {x}.detach().clone().uniform_() * {x}
    torch.manual_seed({seed}) ~ {v} = {x} * torch.rand({x}.shape, dtype=torch.float64)
    """
    )
)

CONTROL = ops("""
    {x} * 2 if {x}.sum().item() > 1e-9 else {x} - 1
    {x} / (1 + {x}.detach().abs().mean().item())
    {x} * {x}.numel()**-0.5
    {x} + 1 if ({x} > 0).any() else {x} - 1
    {x} * (1 + float({x}.detach().mean()))
    {x}.detach()
    with torch.no_grad(): {v} = {x} * 3
    checkpoint(lambda t: F.gelu(t * 2).square(), {x}, use_reentrant=False)
    checkpoint(lambda t: t.sin().cumsum(-1) * t, {x}, use_reentrant=False) if {x}.ndim else {x}
    """) + ops(
    """
    w = {weight} ~ {v} = checkpoint(lambda t: F.linear(t, w).tanh(), {x}, use_reentrant=False)
    {x} * len({x})
    sum(row.sum() * k for k, row in enumerate({x}))
    """,
    nd(1),
)

MOVES = ops("reshard({x}, {layout})", weight=8)

OPS: tuple[Op, ...] = tuple(
    POINTWISE
    + PRODUCTS
    + REDUCTIONS
    + LOSSES
    + NORMS
    + SCANS
    + SHAPES
    + INDEXING
    + WRITES
    + PIECES
    + SORTS
    + LAYERS
    + INFINITIES
    + CONTROL
    + MOVES
)


# --- filling placeholders ----------------------------------------------------------------------------------------


@dataclass
class Draft:
    """An unfinished program: its lines, their values on one device, and the placeholder that is being filled."""

    rng: random.Random
    mesh: tuple[int, ...]
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    x: Tensor = field(default_factory=lambda: torch.zeros(()))
    got: dict[str, str] = field(default_factory=dict)

    def seed(self) -> int:
        return self.rng.randrange(10_000)

    def dim(self) -> int:
        return self.rng.randrange(-self.x.ndim, self.x.ndim)

    def layout(self, ndim: int, pending: bool = True) -> str:
        """Return one mark per mesh axis."""
        marks = ["R", *(["P"] if pending else []), *(f"S{d}" for d in range(ndim))] + ["S0"] * (ndim > 0)
        return repr(" ".join(self.rng.choice(marks) for _ in self.mesh))

    def tensor(self, *shape: int) -> str:
        """Return a new operand: a distributed leaf, or a plain tensor."""
        if self.rng.random() < 0.5:
            return f"plain({self.seed()}{''.join(f', {n}' for n in shape)})"
        return self.leaf(shape)

    def leaf(self, shape: Sequence[int]) -> str:
        """Return a distributed leaf; about one third have an unusual memory order."""
        order = self.rng.choice([*ORDERS, *["usual"] * 7]) if len(shape) > 1 else "usual"
        given = "" if order == "usual" else f", {order!r}"
        return f"leaf({self.seed()}, {tuple(shape)}, {self.layout(len(shape))}{given})"


def _partner(s: Draft, fits: Callable[[Tensor], bool], shape: Sequence[int]) -> str:
    """Return an earlier value for which `fits` is true, or else a new tensor of the shape."""
    names = [n for n, v in s.values.items() if v.dtype == torch.float64 and fits(v)]
    return s.rng.choice(names) if names and s.rng.random() < 0.6 else s.tensor(*shape)


def _broadcasts(x: Tensor, y: Tensor) -> bool:
    return y.ndim <= 4 and all(a == b or 1 in (a, b) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False))


def _y(s: Draft) -> str:
    shape = [n if s.rng.random() < 0.7 else 1 for n in s.x.shape][s.rng.randint(0, s.x.ndim) :]
    return _partner(s, lambda y: _broadcasts(s.x, y), shape)


def _slice(rng: random.Random, size: int) -> str:
    start, stop, step = rng.randrange(size), rng.randint(1, size), rng.choice([1, 1, 2, 3])
    first = rng.choice(["", str(start), str(start - size)])
    end = rng.choice(["", str(stop), str(stop - size) if stop < size else ""])
    return f"{first}:{end}" + (f":{step}" if step > 1 else "")


def _factored(rng: random.Random, numel: int) -> tuple[int, ...]:
    """Return a random shape with so many elements."""
    shape: list[int] = []
    while numel > 1 and len(shape) < 3:
        part = rng.choice([n for n in range(1, numel + 1) if numel % n == 0])
        shape.append(part)
        numel //= part
    rng.shuffle(shape)
    return (*shape, numel) if numel > 1 or not shape else tuple(shape)


def _composite(s: Draft) -> str:
    choices = [(d, n) for d, n in enumerate(s.x.shape) if n in (4, 6)] or [(0, s.x.shape[0])]
    d, n = s.rng.choice(choices)
    return f"{d}, {s.rng.choice([(2, n // 2), (n // 2, 2), (1, n), (-1, 1)] if n % 2 == 0 else [(1, n), (n, 1)])}"


def _pad(s: Draft) -> str:
    dims = s.rng.randint(1, min(2, s.x.ndim))
    return repr([s.rng.choice([0, 1, 2, -1]) for _ in range(2 * dims)])


def _classes(s: Draft) -> str:
    shape = [s.x.shape[0], *s.x.shape[2:]]
    return f"ints({s.seed()}, {s.x.shape[1]}{''.join(f', {n}' for n in shape)})"


def _dims(s: Draft) -> str:
    dims = s.rng.sample(range(s.x.ndim), s.rng.randint(1, s.x.ndim)) if s.x.ndim else []
    return repr(tuple(dims))


def _at(k: int) -> Callable[[Draft], str]:
    return lambda s: str(s.rng.randrange(-s.x.shape[k], s.x.shape[k]))


def _matrix(s: Draft) -> str:
    return s.tensor(s.x.shape[-1], s.rng.randint(1, 5))


def _weight(s: Draft) -> str:
    s.got["n"] = str(s.rng.randint(1, 6))
    return s.tensor(int(s.got["n"]), s.x.shape[-1])


def _mate(s: Draft) -> str:
    """Return a tensor with the shape of `x` except for the dim `g`, whose size is drawn."""
    shape = list(s.x.shape)
    shape[int(_g(s))] = s.rng.randint(1, 3)
    return s.tensor(*shape)


def _g(s: Draft) -> str:
    return s.got.setdefault("g", str(s.dim()))


def _start(s: Draft) -> str:
    return s.got.setdefault("start", str(s.rng.randrange(s.x.shape[int(s.got["g"])])))


def _length(s: Draft) -> str:
    return str(s.rng.randint(1, s.x.shape[int(s.got["g"])] - int(s.got["start"])))


def _moves(s: Draft) -> str:
    return s.layout(s.x.ndim)


HOLES: dict[str, Callable[[Draft], str]] = {
    "y": _y,
    "same": lambda s: _partner(s, lambda v: v.shape == s.x.shape, s.x.shape),
    "c": lambda s: s.rng.choice(["0.5", "-1.5", "2", "0.75", "-0.25"]),
    "d": lambda s: s.got.setdefault("d", str(s.dim())),
    "e": lambda s: str(s.dim()),
    "g": _g,
    "ds": _dims,
    "k": lambda s: s.rng.choice(["True", "False"]),
    "ord": lambda s: s.rng.choice(["1", "2", "3"]),
    "red": lambda s: s.rng.choice(["'mean'", "'mean'", "'sum'", "'none'"]),
    "seed": lambda s: str(s.seed()),
    "matrix": _matrix,
    "weight": _weight,
    "n": lambda s: s.got.get("n", "1"),
    "bias": lambda s: s.tensor(int(s.got.setdefault("n", str(s.rng.randint(1, 6))))),
    "row": lambda s: s.tensor(s.x.shape[-1]),
    "channel": lambda s: s.tensor(s.x.shape[1]),
    "groups": lambda s: str(s.rng.choice([n for n in range(1, s.x.shape[1] + 1) if s.x.shape[1] % n == 0])),
    "classes": _classes,
    "labels": lambda s: f"(1 + ints({s.seed()}, {s.x.shape[2] - 1}, {s.x.shape[1]}, 1))",
    "hidden": lambda s: f"mask({s.seed()}, *{tuple(s.x.shape)})",
    "newshape": lambda s: repr(_factored(s.rng, s.x.numel())),
    "perm": lambda s: repr(tuple(s.rng.sample(range(s.x.ndim), s.x.ndim))),
    "ud": lambda s: str(s.rng.randint(-s.x.ndim - 1, s.x.ndim)),
    "composite": _composite,
    "reps": lambda s: repr(tuple(s.rng.choice([1, 1, 2]) for _ in s.x.shape)),
    "shift": lambda s: str(s.rng.choice([1, -1, 2, 3])),
    "pad": _pad,
    "mate": _mate,
    "start": _start,
    "length": _length,
    "i": _at(0),
    "i1": _at(1),
    "j": _at(-1),
    "flat": lambda s: str(s.rng.randrange(s.x.numel())),
    "cut": lambda s: s.got.setdefault("cut", _slice(s.rng, s.x.shape[0])),
    "cut1": lambda s: _slice(s.rng, s.x.shape[1]),
    "last": lambda s: _slice(s.rng, s.x.shape[-1]),
    "layout": _moves,
    "layout3": lambda s: s.layout(3),
}


def fill(op: Op, s: Draft, x: str) -> str:
    """Return the entry as a line of the program."""
    s.x, s.got = s.values[x], {"x": x, "v": f"v{len(s.lines)}"}
    fixed = {"x", "v"}
    code = re.sub(r"\{(\w+)\}", lambda hole: s.got[hole[1]] if hole[1] in fixed else HOLES[hole[1]](s), op.code)
    return code if "{v}" in op.code else f"v{len(s.lines)} = {code}"


# --- drawing -----------------------------------------------------------------------------------------------------


def draw(seed: int) -> Chain:
    """Return the program of a seed: always the same program, with a value on one device."""
    for attempt in range(100):
        chain = _draft(seed, random.Random(f"{seed}.{attempt}"))
        if chain is not None and settled(chain):
            return chain
    raise RuntimeError(f"no program for seed {seed}")


def _draft(seed: int, rng: random.Random) -> Chain | None:
    s = Draft(rng, rng.choice(MESHES))
    leaves = rng.choice([1, 1, 2])
    while len(s.lines) < leaves:
        shape = tuple(rng.choice([1, 2, 3, 4, 5, 5, 6, 7]) for _ in range(rng.choice([1, 2, 2, 2, 3, 3, 4])))
        _extend(s, f"v{len(s.lines)} = {s.leaf(shape)}")
    wanted = len(s.lines) + rng.randint(2, 7)
    for _ in range(4 * wanted):
        if len(s.lines) == wanted:
            return Chain(seed, s.mesh, tuple(s.lines), twice=rng.random() < 0.1)
        x = _recent_value(s)
        op = _choose(rng, s.values[x])
        _extend(s, fill(op, s, x))
    return None


def _recent_value(s: Draft) -> str:
    """Return a random value with a preference for the last ones."""
    floats = [n for n, v in s.values.items() if v.dtype == torch.float64 and v.numel() > 0]
    return s.rng.choice(floats[-1:] * 2 + floats[-3:])


def _choose(rng: random.Random, x: Tensor) -> Op:
    """Return a random entry whose condition holds for `x`."""
    while True:
        op = rng.choices(OPS, _WEIGHTS)[0]
        if op.when(x):
            return op


_WEIGHTS = [op.weight for op in OPS]


def _extend(s: Draft, line: str) -> None:
    """Add the line if all its values can be compared."""
    names = Machine().names()
    name = f"v{len(s.lines)}"
    try:
        for one in [*s.lines, line]:
            exec(one, names)
    except Exception:
        return
    if not _tame(names[name]):
        return
    s.lines.append(line)
    s.values = {f"v{k}": names[f"v{k}"] for k in range(len(s.lines))}


def _tame(value: Any) -> bool:
    if not isinstance(value, Tensor) or not 0 < value.numel() <= 400 or value.ndim > 5:
        return False
    return bool(torch.isfinite(value).all()) and float(value.detach().double().abs().max()) < LARGEST


def settled(chain: Chain) -> bool:
    """True if values and gradients are finite, and change little when the leaves change little."""
    try:
        with kernels(chain):
            here, near = perform(chain, Machine()), perform(chain, Machine(nudge=NUDGE))
    except Exception:
        return False
    pairs = zip([*here.values.values(), *here.grads], [*near.values.values(), *near.grads], strict=True)
    return all(_close(a, b) for a, b in pairs)


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not torch.isfinite(a).all():
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.detach(), b.detach()
    scale = 1 + (float(a.abs().max()) if a.numel() else 0.0)
    return scale < 1e4 and torch.allclose(a, b, rtol=0, atol=1e3 * NUDGE * scale)


# --- shrinking ---------------------------------------------------------------------------------------------------


def shorter(chain: Chain) -> Iterable[Chain]:
    """Yield simpler programs with a value on one device: without a line, or with simpler layouts."""
    for k in reversed(range(len(chain.lines))):
        for line in [*_replacements(chain, k), None]:
            lines = list(chain.lines)
            lines[k : k + 1] = [line] if line is not None else ["pass"]
            smaller = Chain(chain.seed, chain.mesh, tuple(lines), chain.twice)
            if smaller.lines != chain.lines and _runs(smaller):
                yield smaller
    if chain.twice:
        yield Chain(chain.seed, chain.mesh, chain.lines)


def _replacements(chain: Chain, k: int) -> list[str]:
    """Return replacements for a line: one of its operands, or the same leaf replicated on one more axis."""
    line = chain.lines[k]
    if line.startswith(f"v{k} = leaf("):
        return [re.sub(r"'([RPS\d ]+)'", lambda m: repr(re.sub(r"[PS]\d*", "R", m[1], count=1)), line)]
    operands = dict.fromkeys(n for n in re.findall(r"\bv\d+\b", line) if n != f"v{k}")
    simple = [f"v{k} = {name}" for name in operands]
    return [] if line in simple else simple


def _runs(chain: Chain) -> bool:
    return settled(chain)


def shrink(chain: Chain, fails: Callable[[Chain], bool], patience: int = 200) -> Chain:
    """Return the smallest program that still fails, found by dropping lines greedily."""
    for _ in range(patience):
        smaller = next((c for c in shorter(chain) if fails(c)), None)
        if smaller is None:
            return chain
        chain = smaller
    return chain
