"""Shapes that depend on values are known in a program if the values are constants, such as the places of a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

MASK = torch.tensor([True, False, True, True])
SIZED = {
    "nonzero": lambda m: m.nonzero()[:, 0],
    "where": lambda m: torch.where(m)[0],
    "masked_select": lambda m: torch.arange(4).masked_select(m),
    "index": lambda m: torch.arange(4)[m],
    "unique": lambda m: (torch.arange(4) // 2).unique(),
    "unique_consecutive": lambda m: torch.unique_consecutive(m.long()),
    "repeat_interleave": lambda m: torch.arange(2).repeat_interleave(m.long()[:2] + 1),
    "argwhere": lambda m: torch.argwhere(m)[:, 0],
    "bincount": lambda m: torch.bincount(m.long()),
}
"""Calls whose result has a shape that depends on the mask."""


class Chosen(nn.Module):
    """Rows selected by a mask of constants."""

    def __init__(self, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(4, 4), places

    def forward(self, x: Tensor) -> Tensor:
        at = self.places(MASK)
        return self.layer(x)[:, at].square().sum() + len(at)


@pytest.mark.parametrize("places", SIZED.values(), ids=SIZED)
def test_places_from_a_mask_of_constants_are_in_the_program(places: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Chosen(places), torch.randn(2, 4)
    wanted = model(x)

    def on_rank() -> Tensor:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        torch.manual_seed(0)
        part = mw.shard_layer(Chosen(places), mesh)
        static = mw.to_static(part, None, None, torch.optim.SGD(part.parameters(), lr=0.0))
        return static(mw.shard_tensor(x, mesh, [mw.Shard(0)]))

    for loss in mw.simulate(on_rank, 2):
        torch.testing.assert_close(loss, wanted.detach())


@pytest.mark.parametrize("places", [*SIZED.values(), lambda m: range(int(m.long().sum()))], ids=[*SIZED, "sum"])
def test_a_mask_that_changes_changes_the_program(
    places: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, x = torch.tensor([True, False, True, True]), torch.randn(2, 4)
    monkeypatch.setattr("tests.engine.test_known_shapes.MASK", mask)

    def on_rank() -> list[Tensor]:
        mesh = mw.ProcessMesh([0], ["dp"])
        model = mw.shard_layer(Chosen(places), mesh)
        static = mw.to_static(model, None, None, torch.optim.SGD(model.parameters(), lr=0.0))
        rows = mw.shard_tensor(x, mesh, [])
        wrong: list[Tensor] = []
        for chosen in ([1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 0]):
            mask.copy_(torch.tensor(chosen).bool())
            wrong.append(static(rows) - mw.unshard_dtensor(model(rows)).detach())
        return wrong

    for difference in mw.simulate(on_rank, 1)[0]:
        torch.testing.assert_close(difference, torch.zeros(()))


def test_places_from_a_mask_of_the_batch_are_refused() -> None:
    model = nn.Linear(4, 4)

    def on_rank() -> None:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        part = mw.shard_layer(model, mesh)
        static = mw.to_static(part, None, lambda y, t: y[y > t].sum(), torch.optim.SGD(part.parameters(), lr=0.0))
        rows = mw.shard_tensor(torch.ones(2, 4), mesh, [mw.Shard(0)])
        static(rows, rows)

    with pytest.raises(mw.CaptureError, match="numbers"):
        mw.simulate(on_rank, 2)


def written(y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[:, mask] = y[:, mask] * 2
    return y


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda y, m: y[:, m],
    "list": lambda y, m: y[:, m.tolist()],
    "computed": lambda y, m: y[:, m.long().cumsum(0) > 1],
    "two dims": lambda y, m: (y.unsqueeze(1) * y.unsqueeze(2))[:, (m.long().outer(m.long()).triu() > 0)],
    "beside indices": lambda y, m: y.unsqueeze(1).expand(-1, 3, -1)[:, torch.ones_like(m)[m].long(), m],
    "rows": lambda y, m: y[m[:2]],
    "written": written,
    "accumulated": lambda y, m: y.index_put((torch.tensor([0]), m), y[:1, m].flatten(), accumulate=True),
}
"""Calls that index a computed tensor by the mask."""


class Masked(nn.Module):
    def __init__(self, select: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.select = nn.Linear(4, 4), select

    def forward(self, x: Tensor) -> Tensor:
        return self.select(self.layer(x), MASK).square().sum()


@pytest.mark.parametrize("select", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("masks", [["1110"] * 2, ["1110", "1011", "0110"]], ids=["2 ranks", "changed masks"])
def test_computed_tensors_are_indexed_by_masks_of_constants(
    masks: Sequence[str], select: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second loss shows the gradients of the first step. A changed mask changes the program."""
    mask, x = torch.tensor([True, True, True, False]), torch.linspace(-1, 2, 8).reshape(2, 4)
    monkeypatch.setattr("tests.engine.test_known_shapes.MASK", mask)
    ranks = 2 if len(masks) == 2 else 1

    def losses(is_static: bool) -> list[Tensor]:
        torch.manual_seed(0)
        mesh, model, found = mw.ProcessMesh(range(ranks), ["dp"]), Masked(select), list[Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = mw.to_static(model, None, None, optimizer) if is_static else model
        for chosen in masks:
            mask.copy_(torch.tensor([c == "1" for c in chosen]))
            loss = step(mw.shard_tensor(x, mesh, [mw.Shard(0)]) if is_static else x)
            if not is_static:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
        return found

    wanted = mw.simulate(losses, ranks, False)[0]
    for found in mw.simulate(losses, ranks, True):
        torch.testing.assert_close(found, wanted)


def test_a_mask_of_another_size_is_refused() -> None:
    def on_rank() -> None:
        model = Masked(lambda y, m: y[:, m[:3]])
        mw.to_static(model, None, None, torch.optim.SGD(model.parameters(), lr=0.0))(torch.ones(2, 4))

    with pytest.raises(mw.CaptureError, match="numbers"):
        mw.simulate(on_rank, 1)
