"""`out=` with tensors of other shapes and dtypes: the same as on one device, or a MeshwrightError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

Call = Callable[..., Any]
MESH = mw.ProcessMesh([0, 1], ["x"])
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements")
A = (torch.arange(24.0).view(4, 6) * 7) % 11 - 4
V = A[1]
EYE = A[:, :4] + 9 * torch.eye(4)

CALLS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "add": (torch.add, (A, A)), "mul": (torch.mul, (A, 3)), "sin": (torch.sin, (A,)), "pow": (torch.pow, (A, 2)),
    "add of transposes": (lambda a, out: torch.add(a.t(), a.t(), out=out), (A,)), "eq": (torch.eq, (A, A)),
    "stack": (lambda a, out: torch.stack([a, a], out=out), (V,)), "lerp": (torch.lerp, (A, A + 1, 0.5)),
    "cat": (lambda a, out: torch.cat([a, a], out=out), (A,)), "matmul": (torch.matmul, (A, A.t())),
    "mm": (torch.mm, (A, A.t())), "mv": (torch.mv, (A, V)), "dot": (torch.dot, (V, V)), "outer": (torch.outer, (V, V)),
    "bmm": (torch.bmm, (A.view(2, 2, 6), A.view(2, 6, 2))), "addmm": (torch.addmm, (EYE, A, A.t())),
    "addcmul": (torch.addcmul, (A, A, A)), "sum": (torch.sum, (A, 0)), "mean": (torch.mean, (A, 1)),
    "std": (torch.std, (A, 0)), "norm": (torch.linalg.vector_norm, (A,)), "amax": (torch.amax, (A, 0)),
    "logsumexp": (torch.logsumexp, (A, 0)), "cumsum": (torch.cumsum, (A, 0)), "clamp": (torch.clamp, (A, -1, 1)),
    "index_select": (torch.index_select, (A, 0, torch.tensor([0, 2, 1]))), "tril": (torch.tril, (A,)),
    "gather": (torch.gather, (A, 1, torch.zeros(4, 2, dtype=torch.int64))), "kron": (torch.kron, (V, V)),
    "masked_select": (torch.masked_select, (A, A > 0)), "nonzero": (torch.nonzero, (A,)), "msort": (torch.msort, (A,)),
    "argmax": (torch.argmax, (A, 0)), "diag": (torch.diag, (V,)), "inv": (torch.linalg.inv, (EYE,)),
    "all": (torch.all, (A, 0)), "isin": (torch.isin, (A, V)), "tensordot": (torch.tensordot, (A, A.t(), 1)),
    "bucketize": (torch.bucketize, (A, torch.arange(4.0))), "histc": (torch.histc, (A,)),
    "take": (torch.take, (A, torch.tensor([1, 3]))),
    "softmax": (torch.softmax, (A, 1)), "where": (torch.where, (A > 0, A, -A)),
    "concatenate": (lambda a, out: torch.concatenate((a, a), 1, out=out), (A,)),
}  # fmt: skip
PAIRS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "sort": (torch.sort, (A,)), "max": (torch.max, (A, 1)), "min": (torch.min, (A, 0)), "topk": (torch.topk, (A, 2)),
    "kthvalue": (torch.kthvalue, (A, 2)), "median": (torch.median, (A, 1)), "cummax": (torch.cummax, (A, 0)),
    "mode": (torch.mode, (A, 1)),
}  # fmt: skip

TARGETS: dict[str, Callable[[Any], Any]] = {
    "empty": lambda r: torch.empty(0, dtype=r.dtype),
    "another size": lambda r: torch.zeros(3, dtype=r.dtype),
    "a view": lambda r: torch.zeros(*r.shape, 2, dtype=r.dtype)[..., 0],
    "a view of another size": lambda r: torch.zeros(9, dtype=r.dtype)[2:5],
    "another dtype": lambda r: torch.zeros(r.shape, dtype=torch.float64),
    "empty of another dtype": lambda r: torch.empty(0, dtype=torch.float64),
    "empty integers": lambda r: torch.empty(0, dtype=torch.int32),
}


def run(call: Call, args: tuple[Any, ...], out: Any) -> Any:
    """Return the targets after the call with their values and strides, or the kind of error."""
    try:
        given = call(*args, out=out)
    except mw.MeshwrightError:
        return "refused"
    except (RuntimeError, TypeError) as error:
        return type(error)
    targets = out if isinstance(out, tuple) else (out,)
    results = given if isinstance(out, tuple) else (given,)
    return [(r is t, t.dtype, t.shape, t.stride()) for r, t in zip(results, targets, strict=True)], targets


def lay(x: Any, place: mw.Placement) -> Any:
    return mw.shard_tensor(x, MESH, [place]) if isinstance(x, Tensor) and x.is_floating_point() else x


def check(call: Call, args: tuple[Any, ...], make: Callable[[], Any], name: str) -> None:
    wanted = run(call, args, make())
    for place in (mw.Shard(0), mw.Replicate()):
        for found in mw.simulate(lambda place=place: run(call, tuple(lay(x, place) for x in args), make()), 2):
            if isinstance(wanted, type):
                assert found == "refused" or isinstance(found, type), name
            elif found != "refused":
                assert found[0] == wanted[0], (name, place)
                torch.testing.assert_close(found[1], wanted[1], msg=lambda m, place=place: f"{name}, {place}: {m}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_a_plain_target_equals_that_of_one_device(name: str, target: str) -> None:
    call, args = CALLS[name]
    result = call(*args, out=None)
    check(call, args, lambda: TARGETS[target](result), f"{name}, {target}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PAIRS)
def test_plain_targets_equal_those_of_one_device(name: str, target: str) -> None:
    call, args = PAIRS[name]
    results = call(*args)
    check(call, args, lambda: tuple(TARGETS[target](r) for r in results), f"{name}, {target}")


def test_plain_targets_are_resized() -> None:
    for name in ("add", "stack", "cat", "matmul", "sum", "index_select"):
        call, args = CALLS[name]
        whole = call(*args, out=None)

        def on_rank(call: Call = call, args: tuple[Any, ...] = args) -> Any:
            out = torch.empty(0)
            call(*(lay(x, mw.Shard(0)) for x in args), out=out)
            return out

        for found in mw.simulate(on_rank, 2):
            torch.testing.assert_close(found, whole)


def test_a_target_with_elements_is_resized_with_a_warning() -> None:
    def on_rank() -> None:
        torch.add(lay(A, mw.Shard(0)), 1, out=torch.zeros(3))

    with pytest.warns(UserWarning, match="was resized"):
        mw.simulate(on_rank, 2)


def test_a_distributed_target_keeps_its_shape() -> None:
    def on_rank() -> None:
        with pytest.raises(mw.OperationError, match="keeps its shape"):
            torch.add(lay(A, mw.Shard(0)), 1, out=lay(torch.empty(0), mw.Shard(0)))

    mw.simulate(on_rank, 2)
