"""What programs that carry out a plan do alike or differently, as far as it can be felt in time and memory.

These are facts about programs, not numbers that are fitted. `OURS` is what this library does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Software:
    """How a plan is carried out.

    `fused_attention`: scores are never written to memory. `stops_early`: recomputing ends with what is needed, before
    a block's last product. `exposed`: the part of the synchronisation of gradients that nothing hides. `tensor`: the
    same for tensor parallelism. `messages`: the same for messages between stages that have work to hide them behind.
    `accumulation`: bytes that adding a microbatch's gradients costs per parameter. `gradient`: bytes of a gradient.
    `even_context`: whether every rank of a ring has as much attention to
    compute as the others. `scattered`: ranks of a tensor-parallel group send a part of a message each.
    """

    fused_attention: bool = True
    stops_early: bool = False
    exposed: float = 0.3
    tensor: float = 1.0
    messages: float = 0.4
    accumulation: float = 4.0
    gradient: float = 4.0
    even_context: bool = True
    scattered: bool = True
    cross_entropy: float = 28.0
    """Bytes that a loss reads and writes per logit, forward and backward."""
    outputs: float = 0.0
    """How many results of a stage are kept per microbatch that it has begun."""
    logit: float = 6.0
    """Bytes that are held per logit at the peak of the loss."""
    reduced: float = 4.0
    """Bytes of a gradient on its way between ranks."""
    streams: float = 1.0
    """How many times the bytes of fused operators go through memory: more where nothing fuses them."""
    attention: float = 1.0
    """What its kernel of attention reaches of what the device's best one does."""
    casts: float = 3.0
    """Bytes that a number's way to eight bits costs."""
    selective: float | None = None
    """The part of a layer's forward pass that selective recomputation repeats; None is attention's core."""
    casts_first: bool = True
    """Whether each rank casts its own part of what tensor parallelism gathers, so that eight bits go over the wire."""
    reduces_parts: bool = True
    """Whether ZeRO 1 and 2 sum on each rank only the gradients that it updates; otherwise each has all of the sum."""
    live: float = inf
    """Parameters that ZeRO-3 may have gathered; a larger layer is waited for, and gathered for each of its passes."""
    stowed: float | None = None
    """Bytes per second at which the inputs of layers go to the host and come back, waited for; None where they stay."""
    hosted: float | None = None
    """Bytes per second of a node's memory, where the optimizer's states are and its step is done; None: on devices."""
    once: bool = False
    """Whether a token goes once to another node, however many of its experts are there."""


MEGATRON = Software(tensor=0.6)
MEGATRON_2021 = Software(fused_attention=False, exposed=1.0, messages=0.4, accumulation=2.4, gradient=2.0, reduced=2.0)
"""Half-precision gradients, attention of single products, nothing overlapped (arXiv 2104.04473)."""
DEEPSPEED = Software(
    fused_attention=False, exposed=1.0, messages=1.0, accumulation=18.0, outputs=1.0, scattered=False,
    reduces_parts=False,
)  # fmt: skip
"""Megatron's layers under DeepSpeed's pipeline: a gradient is copied to single precision and added to another there."""
DEEPSPEED_ZERO = Software(fused_attention=False, gradient=2.0, reduced=2.0, live=1e9)
"""Megatron's layers under DeepSpeed's ZeRO, with its default of what may be gathered at a time."""
FSDP = Software(stops_early=True, even_context=False, logit=12.0, casts=6.0, selective=0.5)
"""Fully sharded data parallelism of PyTorch, compiled (arXiv 2304.11277, 2410.06511)."""
PAGEABLE = 2e9
"""Bytes per second of a copy between a device and memory that the host may page; published ones reach 1 to 8 GB/s."""
EAGER = 2.0
"""How many times the bytes go through memory where every operator is a kernel of its own."""
OURS = Software()
