"""The private torch names that this package needs, each with the reason."""

from __future__ import annotations

import torch

plain_calls = torch._C.DisableTorchFunction
"""Context in which no function mode sees the calls. In a backward pass, the block would see each attribute."""
