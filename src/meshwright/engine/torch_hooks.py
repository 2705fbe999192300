"""The private names of torch that this package needs, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _foreach_utils  # holds the types of devices below

top_saved_hooks: Callable[[bool], tuple[Any, Any] | None]
top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
"""The hooks that see what is saved for backward passes; the hooks entered last hide all others."""

call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function at the end of the backward pass that this thread is in."""

foreach_devices: Callable[[], list[str]] = _foreach_utils._get_foreach_kernels_supported_devices
"""Return the types of devices for which torch's optimizers use lists of tensors by default."""

is_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of `torch.func`."""
