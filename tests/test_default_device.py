"""The package names the device of each tensor it makes, so that `torch.set_default_device` changes none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def without_device(text: str) -> Iterator[int]:
    """Yield the lines of calls of torch's factories that name no device."""
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and _is_factory(call.func):
            if not any(word.arg in ("device", None) for word in call.keywords):
                yield call.lineno


def _is_factory(called: ast.expr) -> bool:
    of_torch = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "torch"
    return of_torch and called.attr in FACTORIES


def test_the_law_finds_a_call_without_a_device() -> None:
    assert list(without_device("torch.zeros(3)\ntorch.zeros(3, device=d)\ntorch.zeros(3, **options)")) == [1]


def test_factories_name_their_device() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in without_device(path.read_text())
    ]
    assert found == []
