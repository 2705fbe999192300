"""Bytes that the busiest rank receives when a tensor changes layout, divided by the lower bound.

Every transition between {Replicate, Shard(0), Shard(1), Partial} per mesh axis is measured: all of them on one and two
axes, a fixed sample on three, on even and uneven shapes. No clock and no network: our bytes and steps are those of the
plan, which the tests compare with the count of a communicator. DTensor's are those of the collectives that
`redistribute` issues on a fake process group, in the better of two runs: with and without flattened meshes.
DTensor refuses Shard → Partial; only our figures exist for those transitions.

    python -m benchmarks.reshard            prints every transition where two of the three figures differ
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import torch

from benchmarks._reshard_bound import lower_bound
from meshwright.layout import Partial, Placement, ProcessMesh, Replicate, Shard, Spec, layout_of
from meshwright.reshard import AllReduce, AllToAll, ConversionPlan, ReduceScatter, plan

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
MESHES = {1: [(4,)], 2: [(2, 2), (2, 4)], 3: [(2, 2, 2)]}
SHAPES = {"even": (16, 24), "uneven": (13, 9)}
AXES = ("x", "y", "z")
ITEM = 4


@dataclass(frozen=True)
class Case:
    """One transition."""

    mesh: tuple[int, ...]
    shape: tuple[int, int]
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]

    def plan(self) -> ConversionPlan:
        mesh = ProcessMesh(torch.arange(prod(self.mesh)).reshape(self.mesh).numpy(), AXES[: len(self.mesh)])
        sides = [Spec(mesh, layout_of(p, 2, mesh), self.shape, torch.float32) for p in (self.src, self.dst)]
        return plan(*sides)


@dataclass(frozen=True)
class Row:
    """Result of one transition: bytes received by the busiest rank, and steps in which ranks communicate."""

    case: str
    path: str
    bound: int
    ours: int
    dtensor: int | None
    steps: int
    dtensor_steps: int | None
    reachable: bool


def cases(quick: bool) -> Iterator[Case]:
    """Yield every transition on one and two axes, and a sample on three."""
    chooser = random.Random(0)
    for axes, meshes in MESHES.items():
        pairs = [(a, b) for a, b in product(product(PLACEMENTS, repeat=axes), repeat=2) if a != b]
        if axes == 3 or quick:
            pairs = chooser.sample(pairs, min(len(pairs), 40 if quick else 300))
        for mesh, shape, (src, dst) in product(meshes, SHAPES.values(), pairs):
            yield Case(mesh, shape, src, dst)


def is_reachable(made: ConversionPlan) -> bool:
    """True if collectives can reach the bound, which lets the ranks share the summation in any way.

    A reduce-scatter shares it by the layout. That is not even if the parts are uneven, and not the best way if a part
    must be moved afterwards.
    """
    kinds = {type(step) for step in made.steps}
    if not kinds & {ReduceScatter, AllReduce}:
        return True
    return AllToAll not in kinds and not any(n % made.src.mesh.size for n in made.src.shape)


def measure(case: Case, rival: Rival) -> Row:
    """Return the row of one transition: our plan and the rival's collectives."""
    made = case.plan()
    theirs = rival.cost(case)
    return Row(
        case=f"{'x'.join(map(str, case.mesh))} {case.shape}: {_text(case.src)} -> {_text(case.dst)}",
        path=repr(made),
        bound=lower_bound(made.src, made.dst),
        ours=made.busiest,
        dtensor=theirs[0] if theirs else None,
        steps=made.rounds,
        dtensor_steps=theirs[1] if theirs else None,
        reachable=is_reachable(made),
    )


def _text(placements: Sequence[Placement]) -> str:
    names = {Replicate(): "R", Shard(0): "S0", Shard(1): "S1", Partial(): "P"}
    return " ".join(names[p] for p in placements)


class Rival:
    """DTensor on a fake process group and the meta device, whose collectives are recorded as they are issued."""

    def __init__(self, size: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        self.meshes: dict[tuple[tuple[int, ...], bool], Any] = {}

    def close(self) -> None:
        torch.distributed.destroy_process_group()

    def cost(self, case: Case) -> tuple[int, int] | None:
        """Return bytes received by the busiest rank, and collectives; None if DTensor refuses."""
        if any(isinstance(a, Shard) and isinstance(b, Partial) for a, b in zip(case.src, case.dst, strict=True)):
            return None
        runs = [self._run(case, flatten) for flatten in ((False, True) if len(case.mesh) > 1 else (False,))]
        return min(b for b, _ in runs), min(s for _, s in runs)

    def _mesh(self, shape: tuple[int, ...], flatten: bool) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        if (shape, flatten) not in self.meshes:
            names = AXES[: len(shape)]
            mesh = DeviceMesh("meta", torch.arange(prod(shape)).view(shape), mesh_dim_names=names)
            self.meshes[shape, flatten] = mesh
            if flatten:
                groups = [g for n in range(2, len(shape) + 1) for g in combinations(names, n)]
                for group in groups:
                    mesh[group]._flatten("_".join(group))
        return self.meshes[shape, flatten]

    def _run(self, case: Case, flatten: bool) -> tuple[int, int]:
        from torch.distributed import tensor as dt
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor._redistribute import redistribute_local_tensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh = self._mesh(case.mesh, flatten)
        src, dst = ([_theirs(p, dt) for p in side] for side in (case.src, case.dst))
        local = torch.empty(compute_local_shape_and_global_offset(case.shape, mesh, src)[0], device="meta")
        stride = (case.shape[1], 1)
        x = dt.DTensor.from_local(local, mesh, src, run_check=False, shape=torch.Size(case.shape), stride=stride)
        target = DTensorSpec(mesh, tuple(dst), tensor_meta=x._spec.tensor_meta)
        with _Collectives() as seen:
            redistribute_local_tensor(local, x._spec, target)  # `redistribute` itself refuses to make a Partial
        return seen.bytes, seen.steps


def _theirs(placement: Placement, dt: Any) -> Any:
    if isinstance(placement, Shard):
        return dt.Shard(placement.dim)
    return dt.Partial() if isinstance(placement, Partial) else dt.Replicate()


class _Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that counts the bytes that collectives bring to a rank, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.steps = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith(("_c10d_functional::", "_dtensor::")):
            self._note(name.split("::")[1], args, out)
        return out

    def _note(self, name: str, args: Any, out: Any) -> None:
        if name.startswith(("wait", "_wrap")):
            return
        n = _group_size(args[-1])
        whole = args[0].numel() * ITEM
        if name == "all_gather_into_tensor":
            self.bytes += out.numel() * ITEM * (n - 1) // n
        elif name == "reduce_scatter_tensor":
            self.bytes += out.numel() * ITEM * (n - 1)
        elif name == "all_reduce":
            self.bytes += -(-2 * (n - 1) * whole // n)
        elif name == "shard_dim_alltoall":
            self.bytes += whole * (n - 1) // n
        else:
            raise NotImplementedError(f"a collective that is not counted: {name}")
        self.steps += 1


def _group_size(group: Any) -> int:
    found = torch.distributed.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    return found.size()


def measure_all(quick: bool = False) -> list[Row]:
    """Return the rows of all transitions, with one process group per number of ranks."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    rows: list[Row] = []
    wanted = sorted(cases(quick), key=lambda case: prod(case.mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in sorted({prod(case.mesh) for case in wanted}):
            rival = Rival(size)
            try:
                rows += [measure(case, rival) for case in wanted if prod(case.mesh) == size]
            finally:
                rival.close()
    return rows


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: our bytes over the bound, and how often DTensor was better, which should be never."""
    rows = measure_all(quick)
    both = [r for r in rows if r.dtensor is not None]
    moved = [r for r in both if r.bound]
    above = [r for r in rows if r.ours > r.bound and r.reachable]
    more_bytes = [r for r in both if r.dtensor is not None and r.ours > r.dtensor]
    more_steps = [r for r in both if r.dtensor_steps is not None and r.steps > r.dtensor_steps]
    ratios = [r.ours / r.bound for r in moved]
    theirs = [(r.dtensor or 0) / r.bound for r in moved]
    return {
        "name": "reshard",
        "value": {"mean": round(sum(ratios) / len(ratios), 4), "worst": round(max(ratios), 3)},
        "goal": "bytes received = the bound wherever collectives can reach it; never more bytes or steps than DTensor",
        "ok": not above and not more_bytes and not more_steps,
        "rival": {
            "name": f"DTensor, torch {torch.__version__}",
            "value": {"mean": round(sum(theirs) / len(theirs), 4), "worst": round(max(theirs), 3)},
        },
        "details": {
            "transitions": len(rows),
            "beside DTensor": len(both),
            "at the bound": sum(r.ours <= r.bound for r in rows),
            "above the bound, reachable": [asdict(r) for r in above],
            "above the bound, not reachable": sum(r.ours > r.bound and not r.reachable for r in rows),
            "more bytes than DTensor": [asdict(r) for r in more_bytes],
            "more steps than DTensor": [asdict(r) for r in more_steps],
            "fewer bytes than DTensor": sum(r.ours < (r.dtensor or 0) for r in both),
            "fewer steps than DTensor": sum(r.steps < (r.dtensor_steps or 0) for r in both),
            "rows with the widest gap": [asdict(r) for r in sorted(both, key=_gap, reverse=True)[:10]],
            "below the bound": [asdict(r) for r in rows if r.ours < r.bound],
        },
    }


def _gap(row: Row) -> float:
    return (row.dtensor or 0) / max(row.ours, 1) if row.ours else 0.0


if __name__ == "__main__":
    for row in measure_all():
        if len({row.bound, row.ours, row.dtensor}) > 1:
            theirs = f"{row.dtensor} in {row.dtensor_steps}" if row.dtensor is not None else "refused"
            print(
                f"{row.case:44} bound {row.bound:5}  ours {row.ours:5} in {row.steps}  DTensor {theirs:11} {row.path}"
            )
