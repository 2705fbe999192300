"""Sizes: integers, or symbolic ones that stand for any size while programs are recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

Size = int | torch.SymInt


def hint(n: Any) -> int:
    """The size itself; of a symbolic one, what it was when it was made."""
    return n if isinstance(n, int) else int(n.node.hint)


def identity(n: Any) -> Hashable:
    """What two sizes share when they are the same."""
    return n if isinstance(n, int) else (n.node.shape_env, n.node.expr)
