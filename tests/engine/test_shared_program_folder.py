"""One folder of programs for all ranks: ranks with parts of the same shapes share one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.engine import StaticError
from meshwright.graph import ProgramFileError, are_alike, first_alike, read_specs, specs_data, specs_in


class Plain:
    """An object that a layer holds."""

    kind: str | None = None


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.config = nn.Linear(4, width), nn.Linear(width, 4), Plain()
        self.config.kind = None

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:  # only the first call changes it, as in models of transformers
            self.config.kind = "squared"
        out = self.down(F.gelu(self.up(x)))
        return out.square() if self.config.kind == "squared" else out


class Counting(torch.optim.SGD):
    """An optimizer with a user-defined step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * torch.tensor(0.1))


def model(ranks: int, width: int, optimizer: Any = torch.optim.AdamW) -> mw.DistModel:
    torch.manual_seed(0)
    net, mesh = Net(width), mw.ProcessMesh(list(range(ranks)), ["tp"])
    net.up.weight = mw.shard_tensor(net.up.weight, mesh, [mw.Shard(0)])
    return mw.to_static(net, None, F.mse_loss, optimizer(net.parameters(), lr=0.1))


BATCH = torch.ones(4, 4), torch.zeros(4, 4)


def saved(folder: Path, ranks: int, width: int, optimizer: Any = torch.optim.AdamW) -> list[str]:
    """Return the names of the files that all ranks save."""
    for rank in range(ranks):
        with using_communicator(PeerlessCommunicator(rank, ranks)):
            made = model(ranks, width, optimizer)
            made.compile(*BATCH)
            made.save(folder)
    return sorted(path.name.rpartition("-")[0] or path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("ranks", "width", "writers"),
    [(2, 8, (0,)), (4, 8, (0,)), (3, 8, (0, 2)), (4, 6, (0, 3)), (4, 5, (0, 2, 3)), (1, 8, (0,))],
)
def test_one_rank_of_each_kind_writes_and_all_load(tmp_path: Path, ranks: int, width: int, writers: Any) -> None:
    assert saved(tmp_path, ranks, width) == sorted(
        [*(f"program-{rank}" for rank in writers), *("programs" for _ in writers)]
    )
    for rank in range(ranks):
        with using_communicator(PeerlessCommunicator(rank, ranks)):
            loaded, alone = model(ranks, width).load(tmp_path), model(ranks, width)
            found, wanted = loaded.compile(*BATCH), alone.compile(*BATCH)
            assert (loaded.recordings, str(found)) == (0, str(wanted))


def test_the_number_of_ranks_changes_no_file(tmp_path: Path) -> None:
    sizes: list[int] = []
    for ranks in (8, 64, 4096):
        with using_communicator(PeerlessCommunicator(0, ranks)):
            made = model(ranks, 4096)
            made.compile(*BATCH)
            made.save(tmp_path / str(ranks))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(ranks)).iterdir()))
    assert max(sizes) < 1.01 * sizes[0]


def test_programs_of_a_user_defined_optimizer_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(StaticError, match="an optimizer of your own"):
        saved(tmp_path, 3, 9, Counting)


def test_files_of_unused_kinds_are_removed(tmp_path: Path) -> None:
    assert len(saved(tmp_path, 4, 5)) == 6
    assert saved(tmp_path, 2, 8) == ["program-0", "programs"]


def test_a_rank_of_another_kind_raises(tmp_path: Path) -> None:
    with using_communicator(PeerlessCommunicator(0, 3)):
        made = model(3, 8)
        made.compile(*BATCH)
        made.save(tmp_path)
    with (
        using_communicator(PeerlessCommunicator(2, 3)),
        pytest.raises(ProgramFileError, match="the parts of rank 2 have other shapes"),
    ):
        model(3, 8).load(tmp_path)


def test_a_loaded_program_repeats_the_changes_of_the_first_call(tmp_path: Path) -> None:
    saved(tmp_path, 2, 8)
    with using_communicator(PeerlessCommunicator(0, 2)):
        loaded = model(2, 8).load(tmp_path)
        loaded.compile(*BATCH)
        assert (loaded.recordings, loaded.network.config.kind) == (0, "squared")
        other = model(2, 8).load(tmp_path)
        other.network.config.kind = "plain"
        other.compile(*BATCH)
        assert (other.recordings, other.network.config.kind) == (1, "plain")


def test_kinds_of_ranks_follow_from_meshes_and_shapes() -> None:
    one, both = mw.ProcessMesh([0], ["dp"]), mw.ProcessMesh([0, 1, 2], ["dp"])
    with using_communicator(PeerlessCommunicator(0, 3)):
        specs = [mw.shard_tensor(torch.ones(4), both, [mw.Shard(0)]).spec]
        assert [first_alike(specs, rank) for rank in range(3)] == [0, 0, 2]
        empty = mw.shard_tensor(torch.ones(0), one, [mw.Replicate()]).spec
        assert not are_alike([empty], 0, 1)  # both hold nothing, and one is in no mesh


def test_specs_are_restored_from_data() -> None:
    with using_communicator(PeerlessCommunicator(0, 4)):
        specs = specs_in(model(4, 5).compile(*BATCH))
    assert read_specs(specs_data(specs)) == specs
