"""Bad input gets an error of four parts: request, observation, reason, and remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import make_fx

import meshwright as mw
from meshwright import (
    checkpoint,
    comm,
    cost,
    engine,
    generate,
    graph,
    layout,
    pipeline,
    report,
    search,
    spmd,
    tensor,
    weights,
)
from meshwright.layout import Layout, parse_layout, parse_spec
from meshwright.reshard import ReshardError, plan

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
PAIR = mw.ProcessMesh([0, 1], ["x"])
ROWS = [mw.Shard(0)]


LINEAR = torch.nn.Linear(2, 1)
SGD = torch.optim.SGD(LINEAR.parameters(), 0.1)


def x(*shape: int, at: Any = (), mesh: mw.ProcessMesh = MESH, **kwargs: Any) -> Any:
    return mw.shard_tensor(torch.ones(shape or (4, 6)), mesh, at, **kwargs)


def uses_a_cache(cache: dict[str, Any] = {}) -> Any:  # noqa: B006 - the test needs a cache that is a default argument
    if "mask" not in cache:
        cache["mask"] = x(at=ROWS)
    return cache["mask"].sum().item()


def on_ranks(fn: Callable[[], Any], ranks: int = 4) -> Callable[[], Any]:
    return lambda: mw.simulate(fn, ranks)


def saves_a_plain_tensor() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a.to_local())
            return a * a

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2 * ctx.saved_tensors[0]

    Square.apply(x(at=ROWS, requires_grad=True)).sum().backward()


def stale_tokens() -> None:
    trainer, sampler = torch.nn.Linear(1, 1), mw.sampler(torch.nn.Linear(1, 1).bfloat16())
    mw.weights.sync(trainer, sampler)
    with torch.no_grad():
        trainer.weight.zero_()
    sampler.generate([[1]])


def other_calls() -> None:
    comm.current_communicator().all_reduce(torch.ones(2 + mw.get_rank()), "sum", (0, 1))


def in_a_ring() -> None:
    me = mw.get_rank()
    for group in [(0, 1), (1, 2), (0, 2)] if me != 2 else [(1, 2)]:
        if me in group:
            comm.current_communicator().barrier(group if me != 0 else (0, 2))


def leaves_early() -> None:
    if mw.get_rank() == 0:
        comm.current_communicator().barrier((0, 1))


class TwoResults(mw.LocalLayer):
    """An operator that declares one result and returns two."""

    def __init__(self) -> None:
        super().__init__([(MESH, ROWS)])

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return a, a


class Asks(torch.nn.Linear):
    """A model with a branch that depends on a tensor's value."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input).sum()
        return out if out > 0 else -out


class Slope(torch.nn.Linear):
    """A model that takes a derivative through an operator that keeps a tensor for it."""

    def forward(self, input: Tensor) -> Tensor:
        out = torch.nn.functional.multilabel_margin_loss(super().forward(input), torch.ones(2, 2, dtype=torch.int64))
        return torch.autograd.grad(out, self.weight, create_graph=True)[0].sum()


class Counts(torch.nn.Linear):
    """A model that counts its calls in Python."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input).sum()


def a_program_of(module: torch.nn.Module) -> Callable[[], Any]:
    return on_ranks(lambda: mw.to_static(module)(torch.ones(2, 3)), 1)


def a_value_that_nothing_makes() -> None:
    graph.verify(graph.Program((), (), graph.Value("a", (), torch.float32)))


def loader(batch: Any, *args: Any, **kwargs: Any) -> Any:
    return on_ranks(lambda: list(mw.shard_dataloader([batch], *args, **kwargs)))


def dispatched(experts: Any = None, at: Any = None, **other: Any) -> Any:
    tokens = torch.ones(4, 6) if at is None else x(at=at)
    given = {"indices": torch.zeros(4, 1, dtype=torch.int64), "weights": torch.ones(4, 1), **other}
    return mw.dispatch_experts(tokens, experts=experts, **{"parameters": [torch.ones(2, 6)], **given})


def trains(data: Any, steps: int, **how: Any) -> None:
    layer = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    mw.train(layer, sgd, data, mw.Training(steps, show=False, **how))


def scales_microbatches() -> None:
    mesh = mw.ProcessMesh([0, 1], ["pp"])
    net = mw.split_pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), mesh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    mw.train(mw.microbatched(net, None, mesh, 2, scaler=scaler), sgd, [], mw.Training(1, show=False))


def lays_two_layouts() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight.data = net[0].weight.data
    mw.parallelize(net, None, PAIR, mw.Parallelism({"0": mw.ColwiseParallel(axis="x")}))


def steps_what_was() -> None:
    layer = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    mw.shard_layer(layer, PAIR)
    layer(torch.ones(3, 2)).sum().backward()
    sgd.step()


Case = tuple[str, Callable[[], Any], type[mw.MeshwrightError], str]
CASES: list[Case] = [
    # meshes
    ("a rank twice", lambda: mw.ProcessMesh([0, 1, 1], ["x"]), layout.MeshError, "each rank once"),
    ("a negative rank", lambda: mw.ProcessMesh([-1, 0], ["x"]), layout.MeshError, "≥ 0"),
    ("no ranks", lambda: mw.ProcessMesh([], ["x"]), layout.MeshError, r"ProcessMesh\(\[0\]\)"),
    ("ragged rows", lambda: mw.ProcessMesh([[0, 1], [2]], ["x", "y"]), layout.MeshError, r"\[\[0, 1\], \[2, 3\]\]"),
    ("too few names", lambda: mw.ProcessMesh([[0, 1]], ["x"]), layout.MeshError, "2 different names"),
    ("no such axis", lambda: MESH.get_dim_size("pp"), layout.MeshError, "'dp', 'tp'"),
    ("no such line", lambda: MESH["dp", 7], layout.MeshError, "inside the mesh"),
    ("which line", lambda: MESH["dp"], layout.MeshError, "get_submesh_with_dim"),
    ("a rank elsewhere", lambda: PAIR.coordinate(7), layout.MeshError, "rank in mesh"),
    ("beyond the world", on_ranks(lambda: x(at=ROWS), 2), layout.MeshError, r"ranks=4"),
    ("no mesh at all", on_ranks(lambda: mw.shard_tensor(torch.ones(2))), layout.MeshError, r"mw\.set_mesh"),
    ("a list as a mesh", on_ranks(lambda: mw.shard_tensor(torch.ones(2), [0, 1])), layout.MeshError, "dim_names"),
    ("a list as the default mesh", lambda: mw.set_mesh([0, 1]), layout.MeshError, "dim_names"),
    # placements and layouts
    ("a dim that is no number", lambda: mw.Shard(cast(Any, 1.0)), layout.PlacementError, r"Shard\(0\)"),
    ("no such dim", on_ranks(lambda: x(at=[mw.Shard(2)])), layout.PlacementError, "from -2 to 1"),
    ("a scalar that is cut", on_ranks(lambda: mw.shard_tensor(1.0, MESH, ROWS)),
     layout.PlacementError, r"Replicate\(\)"),
    ("too many placements", on_ranks(lambda: x(at=ROWS * 3)), layout.PlacementError, "at most 2"),
    ("no placement", on_ranks(lambda: x(at=["rows"])), layout.PlacementError, r"mw\.Shard\(0\)"),
    ("one placement", on_ranks(lambda: x(at=mw.Shard(0))), layout.PlacementError, r"\[Shard\(0\)\]"),
    ("one placement to reshard", on_ranks(lambda: mw.reshard(x(), None, mw.Shard(0))),
     layout.PlacementError, r"\[Shard"),
    ("an unknown operation", lambda: mw.Partial("median"), layout.PlacementError, "one of sum"),
    ("an axis twice", lambda: Layout((("dp",), ("dp",))), layout.LayoutError, "each axis once"),
    ("text that is no layout", lambda: parse_layout("rows"), layout.LayoutError, "f32"),
    ("a layout of another mesh", lambda: parse_spec("f32[4@pp]", MESH), layout.LayoutError, "one of dp, tp"),
    ("a dim without a size", lambda: parse_spec("f32[:]", MESH), layout.LayoutError, r"f32\[8@dp, 16\]"),
    # tensors
    ("two meshes", on_ranks(lambda: x(at=ROWS) + x(at=ROWS, mesh=PAIR)), tensor.MixedMeshError, r"mw\.reshard"),
    ("parts that do not fit", on_ranks(lambda: mw.dtensor_from_local(torch.ones(3), MESH, ROWS, shape=(4,))),
     tensor.LocalShapeError, "shape="),
    ("shapes torch refuses", on_ranks(lambda: x(4, 3) + x(2, 3)), tensor.OperationError, "whole tensors"),
    ("plain in backward", on_ranks(saves_a_plain_tensor), tensor.PlainInBackwardError, "local_map"),
    ("a cache of another rank", on_ranks(uses_a_cache), tensor.SimulatedRankError, r"mw\.get_rank\(\)"),
    ("pickled", on_ranks(lambda: pickle.dumps(x())), tensor.PickleError, r"mw\.unshard_dtensor"),
    ("saved", on_ranks(lambda: torch.save({"x": x()}, "/dev/null")), tensor.PickleError, r"mw\.unshard_dtensor"),
    ("memory of a part", on_ranks(lambda: torch.Tensor(x(at=ROWS))), tensor.MemoryAccessError, "torch.tensor"),
    ("a storage that is written to", on_ranks(lambda: x(at=ROWS).untyped_storage().fill_(0)),
     tensor.MemoryAccessError, r"x\.fill_"),
    ("a collective of torch", on_ranks(lambda: functional_collectives.wait_tensor(x(at=ROWS))),
     tensor.CollectiveError, "x itself"),
    ("asked outside", on_ranks(lambda: x(at=ROWS, mesh=PAIR)[x(mesh=PAIR) > 0]), tensor.AbsentError, r"mw\.reshard"),
    ("shapes that do not broadcast", on_ranks(lambda: x(4, 6, at=ROWS) + x(5, 6, at=ROWS)),
     mw.MeshwrightError, "valid on one device"),
    ("shapes that do not multiply", on_ranks(lambda: x(4, 6, at=ROWS) @ x(5, 6)),
     mw.MeshwrightError, "valid on one device"),
    ("a reshape to another size", on_ranks(lambda: x(4, 6, at=ROWS).view(5, 5)),
     mw.MeshwrightError, "valid on one device"),
    ("a source of randomness that is not there", lambda: mw.random_source("fast"), tensor.RandomSourceError, "counter"),
    # rules and conversions
    ("a rule without a result", lambda: spmd.parse_rule("a b"), spmd.RuleError, "m k"),
    ("a rule with a stranger", lambda: spmd.parse_rule("a -> b"), spmd.RuleError, "operand"),
    ("a rule that is not registered", lambda: mw.register_rule("aten.relu", "a ( b -> a"), spmd.RuleError, r"\(a b\)"),
    ("another shape", lambda: plan(parse_spec("f32[4]", PAIR), parse_spec("f32[5]", PAIR)),
     ReshardError, "reshape"),
    ("another dtype", lambda: plan(parse_spec("f32[4]", PAIR), parse_spec("f64[4]", PAIR)),
     ReshardError, "cast"),
    # the public API
    ("inputs that lie otherwise", on_ranks(lambda: mw.local_map(lambda a: a, [ROWS], [ROWS])(x())),
     engine.LocalMapError, "reshard_inputs=True"),
    ("placements for other arguments", on_ranks(lambda: mw.local_map(lambda a: a, [ROWS], [ROWS] * 2)(x(at=ROWS))),
     engine.LocalMapError, "any other argument"),
    ("placements for other results", on_ranks(lambda: mw.local_map(lambda a: (a, a), [ROWS])(x(at=ROWS))),
     engine.LocalMapError, "any other result"),
    ("shapes for other results", on_ranks(lambda: mw.local_map(lambda a: a, [ROWS], out_shapes=[])(x(at=ROWS))),
     engine.LocalMapError, "one shape per result"),
    ("a distributed tensor inside", on_ranks(lambda: mw.local_map(lambda a: a + x(2, 6), [ROWS])(x(at=ROWS))),
     engine.LocalMapError, "as arguments"),
    ("a layer with other results", on_ranks(lambda: TwoResults()(x(at=ROWS))), engine.LocalMapError, "other result"),
    ("parameters of no experts", lambda: dispatched(parameters=[]), engine.ExpertsError, "stack the parameters"),
    ("parameters of other experts", lambda: dispatched(parameters=[torch.ones(2, 4), torch.ones(3, 4)]),
     engine.ExpertsError, "stack the parameters"),
    ("indices of other tokens", lambda: dispatched(indices=torch.zeros(5, 1, dtype=torch.int64)),
     engine.ExpertsError, r"weights \[\.\.\., k\]"),
    ("experts that take nothing", lambda: dispatched(capacity=0), engine.ExpertsError, "None for all rows"),
    ("experts that lose rows", lambda: dispatched(lambda rows, ends, w: rows[:1]), engine.ExpertsError, "features"),
    ("experts that draw", on_ranks(lambda: dispatched(lambda rows, *_: torch.dropout(rows, 0.5, True), at=ROWS)),
     engine.ExpertsError, "dropout to the tokens"),
    ("experts that meet distributed tensors", on_ranks(lambda: dispatched(lambda rows, *_: rows * x(1), at=ROWS)),
     engine.ExpertsError, "as one of the parameters"),
    ("inputs without a mesh", loader((torch.ones(2),) * 3, [MESH, PAIR]), engine.BatchError, "one mesh per input"),
    ("keys that are not there", loader({"a": torch.ones(2)}, [MESH, PAIR], input_keys=["b"]),
     engine.BatchError, r"\['a'\]"),
    ("axes for other meshes", loader(torch.ones(2), [MESH], ["dp", "tp"]), engine.BatchError, "one axis per mesh"),
    ("a loader without a place", on_ranks(lambda: mw.shard_dataloader([x()], MESH).state_dict()),
     engine.BatchError, "GlobalSampler"),
    ("an epoch without a batch", lambda: mw.GlobalSampler(3, 4, drop_last=True), engine.BatchError, "drop_last=False"),
    ("a place in other data", lambda: mw.GlobalSampler(3, 2).load_state_dict(mw.GlobalSampler(4, 2).state_dict()),
     engine.BatchError, "data set of the saved run"),
    ("data that end", lambda: trains(iter([torch.ones(2)]), 3), engine.BatchError, "DataLoader"),
    ("a run that could not go on", lambda: trains([torch.ones(2)], 1, folder="/tmp/none"),
     engine.BatchError, "GlobalSampler"),
    ("no first values", lambda: mw.materialize(torch.nn.Embedding.from_pretrained(torch.empty(2, 2, device="meta")),
                                               init=lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight + 1))),
     engine.MaterializeError, "in place"),
    ("one memory in two layouts", on_ranks(lays_two_layouts, 2), engine.SharedMemoryError, "give both the same layout"),
    ("an optimizer made before the marks", on_ranks(steps_what_was, 2), engine.TrainingError, "after the marks"),
    ("no steps", lambda: mw.Training(0), engine.TrainingError, "steps=100"),
    ("checkpoints nowhere", lambda: mw.Training(1, save_every=1), engine.TrainingError, "folder="),
    ("a static model in the loop", lambda: mw.train(mw.to_static(Asks(3, 2)), None, [], mw.Training(1)),
     engine.TrainingError, "dist_model"),
    ("a scaler for microbatches", on_ranks(scales_microbatches, 2), engine.TrainingError, "scaler=scaler"),
    ("gradients that are no numbers", lambda: trains([torch.full((2,), torch.nan)], 1),
     engine.NonFiniteGradientError, "from before the step"),
    ("a loader on no such axis", loader(torch.ones(2), MESH, "pp"), layout.MeshError, "'dp', 'tp'"),
    ("a loader on no such position", loader(torch.ones(2), MESH, 2), layout.MeshError, "dp"),
    ("no process group", on_ranks(lambda: mw.to_torch_dtensor(x())), engine.TorchDTensorError, "unshard_dtensor"),
    ("a picture of what lies nowhere", lambda: mw.show(torch.ones(2)), report.ShowError, "DistTensor"),
    ("a picture without a mesh", lambda: mw.show("f32[2]"), report.ShowError, "mesh"),
    ("a model that differs", lambda: mw.verify(torch.nn.Linear(6, 2), [torch.ones(4, 6)], mesh=MESH,
                                               marks=mw.Parallelism(), rtol=-1.0).check(),
     engine.DifferenceError, "look at"),
    ("marks that are none", lambda: mw.verify(torch.nn.ReLU(), [], mesh=MESH, marks="tp"),
     engine.StrategyError, "Parallelism"),
    # programs
    ("a branch by numbers", a_program_of(Asks(3, 2)), graph.CaptureError, r"torch\.where"),
    ("a derivative of hidden tensors", a_program_of(Slope(3, 2)), graph.HiddenTensorError, "full_graph=False"),
    ("a count in Python", a_program_of(Counts(3, 2)), graph.SideEffectError, "register_buffer"),
    ("a static model that was not called", lambda: mw.to_static(Asks(3, 2)).program, engine.StaticError, "first"),
    ("a value that nothing makes", a_value_that_nothing_makes, graph.ProgramError, "Draft"),
    ("no file of a program", lambda: graph.load_program("nowhere"), graph.ProgramFileError, "save_program"),
    ("a state that no file can hold", lambda: mw.save_state_dict({"f": print}, "/tmp/none"),
     checkpoint.CheckpointError, "tensors, numbers"),
    ("no checkpoint", lambda: mw.load_state_dict({}, "nowhere"),
     checkpoint.CheckpointFileError, "path of a checkpoint"),
    ("attention by no such name", lambda: mw.context_parallel("rings"), engine.StrategyError, "ulysses"),
    ("a plan by no such name", lambda: mw.Parallelism(context="p2p"), engine.StrategyError, "ring"),
    ("an option that is not there", lambda: mw.Strategy.of(shardings=1), engine.StrategyError, "sharding"),
    ("a pass without a name", lambda: graph.register_pass(graph.Pass), graph.RewriteError, "frozen"),
    ("a device that nobody knows", lambda: cost.device_of("abacus"), cost.CostError, "Device"),
    (
        "a schedule of another placement",
        lambda: pipeline.check_fits(pipeline.one_f_one_b(2, 2), pipeline.Stages(((0,), (1,)), (0, 1, 0, 1))),
        pipeline.StageError,
        "marks",
    ),
    ("a schedule that nobody knows", lambda: pipeline.schedule_by_name("1F2B"), pipeline.ScheduleError, "1F1B"),
    (
        "a schedule without memory",
        lambda: search.find_schedule(search.Problem((0, 1), 2, capacity=0.5)),
        search.SearchError,
        "recompute",
    ),
    ("a plan without a mesh", lambda: search.parse_mesh_plan("layouts = {}"), search.SearchError, "mesh"),
    ("a plan in no language", lambda: search.parse_plan("dp: 8"), search.SearchError, "dp = 8"),
    (
        "an empty prompt",
        lambda: mw.sampler(torch.nn.Linear(1, 1)).generate([[]]),
        generate.GenerationError,
        "begin the prompt",
    ),
    (
        "weights of another model",
        lambda: mw.weights.sync(torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)),
        weights.WeightError,
        "same configuration",
    ),
    ("tokens of stale weights", stale_tokens, weights.StaleWeightsError, 'when_stale="sync"'),
    # between ranks
    ("no ranks", lambda: x(at=ROWS), comm.NoCommunicatorError, r"mw\.simulate"),
    ("sizes of no mesh", on_ranks(lambda: mw.init_mesh(dp=3)), layout.MeshError, "--ranks 3"),
    ("a size that is a text", on_ranks(lambda: mw.init_mesh(dp=cast(Any, "2"))), layout.MeshError, "tp=2"),
    ("no size", on_ranks(mw.init_mesh), layout.MeshError, "dp=4"),
    ("two open sizes", on_ranks(lambda: mw.init_mesh(dp=-1, tp=-1)), layout.MeshError, "remaining ranks"),
    ("an empty axis", on_ranks(lambda: mw.init_mesh(dp=0)), layout.MeshError, "dp=4"),
    (
        "nothing left for the model", lambda: mw.plan(torch.nn.Linear(2, 1), [torch.ones(4, 2)], torch.sub, ranks=2),
        engine.BatchError, "labels",
    ),
    (
        "a batch in the place of an optimizer", lambda: mw.auto(LINEAR, [(torch.ones(2),)], optimizer=[torch.ones(2)]),
        engine.BatchError, r"model, loader, loss, optimizer",
    ),
    (
        "a batch in the place of a loader", lambda: mw.auto(LINEAR, (torch.ones(2), torch.ones(2)), optimizer=SGD),
        engine.BatchError, r"\[\(inputs, labels\)\]",
    ),
    (
        "a loader without batches", lambda: mw.auto(LINEAR, [], optimizer=SGD), engine.BatchError,
        "first batch",
    ),
    (
        "one graph", on_ranks(lambda: torch.compile(lambda t: t.sin(), backend="eager", fullgraph=True)(x())),
        tensor.CompileError, "leave out fullgraph=True",
    ),
    ("a trace", on_ranks(lambda: make_fx(torch.sin)(x())), tensor.TraceError, "plain model"),
    ("no ranks to be", mw.get_rank, comm.NoCommunicatorError, r"mw\.simulate"),
    ("a simulation inside one", on_ranks(lambda: mw.simulate(mw.get_rank, 2)), comm.NestedSimulationError, "outside"),
    ("no ranks to simulate", on_ranks(mw.get_rank, 0), comm.CallError, r"simulate\(fn, 1\)"),
    ("a text that is no JSON", lambda: layout.read_json(b"{"), layout.InputError, "JSON"),
    ("ranks that disagree", on_ranks(other_calls, 2), comm.DisagreementError, "same call"),
    ("ranks in a ring", on_ranks(in_a_ring, 3), comm.DeadlockError, "same order"),
    ("a rank that left", on_ranks(leaves_early, 2), comm.MissingCallError, "same collectives"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "remedy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_gives_an_error_of_four_parts(
    act: Callable[[], Any], kind: type[mw.MeshwrightError], remedy: str
) -> None:
    with pytest.raises(kind) as caught:
        act()
    error = caught.value
    assert isinstance(error, mw.MeshwrightError)
    assert all((error.asked, error.found, error.why, error.write))
    with pytest.raises(kind, match=remedy):
        raise copy.copy(error)
    lines = str(error).splitlines()
    assert [line.split(":")[0].strip() for line in lines if line.startswith(("  found", "  why", "  fix"))] == [
        "found",
        "why",
        "fix",
    ]


# Raised where a process or the command line is needed, or by packages above the engine and beside it.
ELSEWHERE = {
    *(
        "CalibrationError",
        "CommError",
        "DeadPeerError",
        "FolderInUseError",
        "GenerationError",
        "LaunchError",
        "ModelError",
        "NewerFormatError",
        "NoAnswerError",
        "PlatformError",
        "QuantizeError",
        "SameNumbersError",
        "ReadTimeoutError",
    ),
    "ReplicaError",
    "WriteTimeoutError",
}


def test_every_error_class_has_a_case() -> None:
    def below(root: type[Exception]) -> set[str]:
        own = [c for c in root.__subclasses__() if c.__module__.startswith("meshwright.")]
        return {c.__name__ for c in own}.union(*(below(c) for c in own))

    assert below(mw.MeshwrightError) - {kind.__name__ for _, _, kind, _ in CASES} <= ELSEWHERE


def test_simulated_ranks_and_the_users_line_are_named_in_a_note() -> None:
    with pytest.raises(layout.PlacementError) as caught:
        mw.simulate(lambda: x(at=[mw.Shard(5)]), 4)
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised on rank 0 of 4 simulated ranks, at {__file__}:")


def test_the_module_is_named_too() -> None:
    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with pytest.raises(mw.MeshwrightError) as caught:
        mw.simulate(lambda: net(x(4, 6, at=ROWS)), 4)
    assert caught.value.__notes__[0].endswith(" in 1.0")


def test_errors_of_disagreeing_or_waiting_ranks_name_their_lines() -> None:
    for act, kind, ranks in [(other_calls, comm.DisagreementError, 2), (leaves_early, comm.MissingCallError, 2)]:
        with pytest.raises(kind, match=rf"ranks 0, 1 at {__file__}:\d+; rank 1"):
            mw.simulate(act, ranks)
