"""`TorchValue` and `JsonValue`: the names of values whose type nothing states."""

from __future__ import annotations

from typing import Any, TypeAlias

TorchValue: TypeAlias = Any
"""An argument or a result of a call of torch, or a tree of them: torch's own annotation of these is `Any`."""

JsonValue: TypeAlias = Any
"""A value read from JSON or TOML before it is checked: number, text, truth value, null, list or mapping."""
