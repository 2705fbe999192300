"""Laws over the whole package: every reader has hostile cases, every cache has a bound or a reason to need none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._hostile_law import EXEMPT, found_readers, uncovered
from benchmarks._hostile_law import functions as functions_of_package
from benchmarks._hostile_readers import Reader, readers
from benchmarks.hostile import hostile

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
CONTAINERS = frozenset({"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque"})
GROWING = frozenset({"append", "add", "setdefault", "update", "extend", "insert", "appendleft"})

UNBOUNDED = {
    "checkpoint.operations.folder_lock._held": "folders that this process saves to",
    "checkpoint.operations.folder_lock._users": "folders that this process saves to",
    "checkpoint.operations.folder_lock._writing": "saves that are under way",
    "checkpoint.operations.save._untold": "failed saves, until they are told",
    "comm.communicators.call_purpose.facts": "at most _MOST_FACTS entries; the oldest goes",
    "comm.simulation.rank_globals._found": "a module's globals, one entry a module",
    "engine.marks.default_mesh._everywhere": "one entry, which is replaced",
    "engine.training.stop_signals._stop_requests": "signals of one run; cleared at its end",
    "graph.execution.inductor._CALLS": "steps of compiled programs, which name them by number",
    "graph.execution.inductor._CARRIED": "steps of compiled programs, which name them by number",
    "graph.execution.inductor._NUMBER_OF": "steps of compiled programs, which name them by number",
    "graph.execution.inductor._OVER": "steps of compiled programs, which name them by number",
    "graph.rewriting.program_pass._PASSES": "a registry that code fills",
    "layout._accelerator._registered": "a registry that code fills",
    "graph.rewriting.program_pass._RULES": "a registry that code fills",
    "graph.rewriting.node_reader.SPELLINGS": "a registry that code fills",
    "graph.rewriting.node_reader._KNOWN": "operators of torch",
    "tensor.planning.decision_record._keepers": "records that are open",
    "tensor.core.computation_numbers._functions": "cleared when it has _MOST_FUNCTIONS entries",
    "tensor.autograd.user_functions._APPLY_HANDLERS": "functions that are open",
    "tensor.core.call_sites._backward": "a registry that code fills",
    "tensor.handlers.torch_hooks._LIBRARIES": "libraries of torch",
    "cli.ranks.define_once.defined_once.known": "operators that a script defines",
    "comm.communicators.counters.record_calls.log": "the caller's own record, while it is open",
    "tensor.execution.run_plan._in_float32.known": "dtypes",
}
"""Containers that functions fill and that outlive the call: the reason why they stay small."""

CALLS = frozenset(
    {
        "checkpoint.operations.load._checked_reads.ready",
        "checkpoint.operations.open_checkpoint.open_together.found",
        "cli.commands.run.run_simulated.failed",
        "comm.launcher.launch._forwarded_signals.seen",
        "comm.simulation.profiler_guard.one_profiler.running",
        "engine.diagnostics.traced_work.of_modules.updates",
        "engine.eager.regather.before.pairs",
        "engine.eager.split_pipeline._layers.found",
        "engine.marks.materialize._children_first.seen",
        "engine.static.program_builder._ready_pipeline.changed",
        "graph.execution.fx_runner.step_function.plans",
        "graph.execution.kernel_files.save_kernels.made",
        "graph.program.node_text.numbered.seen",
        "graph.rewriting.rewrite_driver._try.found",
        "search.module_plans.pipeline_search._found.found",
        "tensor.capture.call_capture._captured.inputs",
        "tensor.capture.call_capture._captured.nodes",
        "tensor.capture.call_capture.taken_apart.nodes",
        "tensor.execution.outside_mesh._result_of_filled.nodes",
        "tensor.execution.outside_mesh._result_of_filled.plain",
    }
)
"""Containers of one call, filled by functions inside it."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text())


def assigned(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return name and value of an assignment to one name."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def is_container(value: ast.expr) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        return True
    call = value.func if isinstance(value, ast.Call) else None
    name = ast.unparse(call.value if isinstance(call, ast.Subscript) else call) if call is not None else ""
    return name.rpartition(".")[2] in CONTAINERS


def grown(function: ast.AST) -> set[str]:
    """Return the names of the containers that the function fills."""
    found = set[str]()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(t.value) for t in targets if isinstance(t, ast.Subscript)}
            found |= {ast.unparse(node.target)} if isinstance(node, ast.AugAssign) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWING:
            found.add(ast.unparse(node.func.value))
    return {name.rpartition(".")[2] for name in found}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def growing_containers() -> Iterator[str]:
    """Yield module globals that functions fill, and locals that inner functions fill after the call may have ended."""
    trees = dict(modules())
    filled = {name for tree in trees.values() for function in functions(tree) for name in grown(function)}
    for module, tree in trees.items():
        own = filter(None, map(assigned, tree.body))
        yield from (f"{module}.{name}" for name, value in own if is_container(value) and name in filled)
        for outer in functions(tree):
            if isinstance(outer, ast.Lambda):
                continue
            inner = {name for f in functions(outer) if f is not outer for name in grown(f)}
            local = filter(None, map(assigned, outer.body))
            yield from (f"{module}.{outer.name}.{n}" for n, value in local if is_container(value) and n in inner)


def endless_caches() -> Iterator[str]:
    """Yield functions with arguments whose results are cached without a bound."""
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.args.args or node.args.kwonlyargs):
                names = {ast.unparse(each) for each in node.decorator_list}
                if names & {"cache", "functools.cache", "lru_cache", "lru_cache(maxsize=None)", "lru_cache(None)"}:
                    yield f"{module}.{node.name}"


def test_every_container_that_grows_has_a_bound_or_a_reason() -> None:
    found = set(growing_containers())
    assert sorted(found - set(UNBOUNDED) - CALLS - {"graph.files.decode._CARRIED"}) == []
    assert sorted(set(UNBOUNDED) - found) == []
    assert sorted(CALLS - found) == []


def test_every_cached_function_has_a_bound() -> None:
    local = {"pipeline.partition.mirrored_model.opposite"}  # lives as long as one call
    assert sorted(set(endless_caches()) - local) == []


@pytest.fixture(scope="module")
def every_reader(tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    return readers(tmp_path_factory.mktemp("readers"))


def test_every_reader_has_hostile_cases(every_reader: list[Reader]) -> None:
    covers = frozenset(name for reader in every_reader for name in reader.covers)
    assert uncovered(covers) == []
    assert sorted(covers - {name for name, _ in functions_of_package()}) == []
    assert len({*found_readers()}) > 60
    assert len(EXEMPT) < 40


def test_good_samples_are_read(every_reader: list[Reader], tmp_path: Path) -> None:
    for reader in every_reader:
        if reader.name == "kept programs":
            continue
        for name in reader.spoils:
            path = reader.sample / name
            reader.read(path.read_text() if reader.text else reader.sample if reader.folder else path)


def test_a_few_hostile_inputs_of_each_reader() -> None:
    found = hostile(4, seed=1)
    ours = [bad for bad in found["bad"] if bad.reader not in ("meshwright", "safetensors", "dcp", "trained")]
    assert ours == []
    assert len(found["inputs"]) > 25
