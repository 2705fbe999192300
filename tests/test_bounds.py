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
    "checkpoint._lock._held": "folders that this process saves to",
    "checkpoint._lock._users": "folders that this process saves to",
    "checkpoint._lock._writing": "saves that are under way",
    "checkpoint._save._untold": "failed saves, until they are told",
    "comm._identity.facts": "at most _MOST_FACTS entries; the oldest goes",
    "comm._rank_globals._found": "a module's globals, one entry a module",
    "engine._mesh._everywhere": "one entry, which is replaced",
    "engine._stop._wishes": "signals of one run; cleared at its end",
    "graph._inductor._BEGUN": "tickets in flight; each is taken",
    "graph._inductor._CALLS": "steps of compiled programs, which name them by number",
    "graph._inductor._CARRIED": "steps of compiled programs, which name them by number",
    "graph._inductor._NUMBER_OF": "steps of compiled programs, which name them by number",
    "graph._inductor._OVER": "steps of compiled programs, which name them by number",
    "graph._pass._PASSES": "a registry that code fills",
    "graph._pass._RULES": "a registry that code fills",
    "graph._reader.SPELLINGS": "a registry that code fills",
    "graph._reader._KNOWN": "operators of torch",
    "tensor._explain._keepers": "records that are open",
    "tensor._identity._functions": "cleared when it has _MOST_FUNCTIONS entries",
    "tensor._functions._TOLD": "functions that are open",
    "tensor._places._backward": "a registry that code fills",
    "tensor.torch_hooks._AROUND": "functions of torch that are wrapped",
    "tensor.torch_hooks._LIBRARIES": "libraries of torch",
    "cli._once.defined_once.known": "operators that a script defines",
    "comm._counters.record_calls.log": "the caller's own record, while it is open",
    "tensor._dispatch._by_setting.plans": "dtypes and settings of torch",
    "tensor._outside.plan_outside.plans": "dtypes and settings of torch",
    "tensor._outside.telling.known": "one entry",
    "tensor._run._raising.known": "dtypes",
}
"""Containers that functions fill and that outlive the call: the reason why they stay small."""

CALLS = frozenset({
    "checkpoint._load.load.ready",
    "checkpoint._open.open_together.found", "cli._run.run_simulated.failed", "comm._launch._forwarded_signals.seen",
    "comm._profiler.one_profiler.running", "engine._materialize._children_first.seen", "engine._regather.before.pairs",
    "engine._sharding.around.wholes", "engine._split._layers.found", "engine._trace_work.of_modules.updates",
    "graph._execute.carrying.ways", "graph._package.save_kernels.made", "graph._rule_test.run.lie",
    "graph._text.numbered.seen", "search._pipelines._found.found", "tensor._capture._captured.inputs",
    "tensor._capture._captured.nodes", "tensor._capture.taken_apart.nodes", "tensor._outside._of_fill.nodes",
})  # fmt: skip
"""Containers of one call, filled by functions inside it."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text())


def assigned(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Name and value of an assignment to one name."""
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
    """Names of what the function stores into."""
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
    """Module globals that functions fill, and locals that functions inside fill after the call may have ended."""
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
    """Functions with arguments whose results are kept without a bound."""
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.args.args or node.args.kwonlyargs):
                names = {ast.unparse(each) for each in node.decorator_list}
                if names & {"cache", "functools.cache", "lru_cache", "lru_cache(maxsize=None)", "lru_cache(None)"}:
                    yield f"{module}.{node.name}"


def test_every_container_that_grows_has_a_bound_or_a_reason() -> None:
    found = set(growing_containers())
    assert sorted(found - set(UNBOUNDED) - CALLS - {"graph._decode._CARRIED"}) == []
    assert sorted(set(UNBOUNDED) - found) == []
    assert sorted(CALLS - found) == []


def test_every_cached_function_has_a_bound() -> None:
    local = {"pipeline._mirror.opposite"}  # lives as long as one call
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
