"""Properties of training software that change the time and memory of a plan.

These are facts about programs, not fitted numbers. `MESHWRIGHT` describes this library.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

LayerPart = Literal["attention", "feed-forward", "router", "experts"]
"""Parts of a layer that a host starts one after the other."""
RepeatedPart = Literal["scores", "up-projections", "norms", "activation", "feed-forward", "experts", "shared expert"]
"""Parts of a layer's forward pass that selective recomputation may repeat."""


@dataclass(frozen=True, slots=True)
class Software:
    """Properties of a software that carries out a plan.

    `fused_attention`: scores are never written to memory. `stops_early`: recomputation ends with the last value that is
    needed, before a block's last product. `exposed`: fraction of the reduction of gradients that nothing hides.
    `tensor`: the same for tensor parallelism. `messages`: the same for messages between stages that have work to hide
    them. `exchange`: the same for tokens that travel to experts and back. `accumulation`: bytes of memory traffic, per
    parameter, of adding a microbatch's gradients. `gradient`: bytes of a gradient. `even_context`: every rank of a ring
    has the same amount of attention to compute. `scattered`: each rank of a tensor-parallel group sends a part of a
    message.
    """

    fused_attention: bool = True
    stops_early: bool = False
    exposed: float = 0.3
    tensor: float = 1.0
    messages: float = 0.4
    exchange: float = 1.0
    accumulation: float = 4.0
    gradient: float = 4.0
    even_context: bool = True
    scattered: bool = True
    cross_entropy: float = 28.0
    """Bytes that a loss reads and writes per logit, forward and backward."""
    outputs: float = 0.0
    """Number of a stage's results that are kept per microbatch in flight."""
    logit: float = 6.0
    """Bytes per logit that are held at the peak of the loss."""
    moments: float = 12.0
    """Bytes of the optimizer's states and of a master copy, per parameter: 12 for Adam, 6 with moments of 8 bits."""
    reduced: float = 4.0
    """Bytes of a gradient in communication."""
    streams: float = 1.0
    """Factor on the bytes that fused operators move through memory: larger if nothing fuses them."""
    attention: float = 1.0
    """Rate of the kernel for attention, relative to the best one of the device."""
    casts: float = 3.0
    """Bytes of memory traffic to cast a number to eight bits."""
    selective: float | None = None
    """Fraction of a layer's forward pass that selective recomputation repeats; None for the parts in `repeated`."""
    repeated: frozenset[RepeatedPart] = frozenset(("scores",))
    """Parts of a layer that selective recomputation repeats."""
    casts_first: bool = True
    """True if each rank casts its own part before tensor parallelism gathers it, so that eight bits are sent."""
    reduces_parts: bool = True
    """True if, in ZeRO 1 and 2, each rank sums only the gradients that it updates; otherwise it gets the whole sum."""
    live: float = inf
    """Limit of parameters that ZeRO-3 may have gathered; larger layers are waited for, and gathered for each pass."""
    stowed: float | None = None
    """Bytes per second of moving inputs of layers to the host and back, without overlap; None if they stay."""
    hosted: float | None = None
    """Bytes per second of a node's memory that has the optimizer's states and step; None if they are on devices."""
    offloaded: float = 0.0
    """Fraction of the kept activations that moves to the host while the device computes, and is not recomputed."""
    compiled: bool = False
    """True if layers are compiled, so that selective recomputation keeps no result that no gradient needs."""
    reuses: bool = True
    """True if recomputed layers reuse the memory of the loss; otherwise both peaks add up."""
    once: bool = False
    """True if a token is sent once to a rank, and once to another node, however many of its experts are there."""
    dispatched: float = 2.0
    """Bytes of a number of a token on its way to experts; 1 if it is cast to eight bits before."""
    beside_shared: bool = False
    """True if the shared expert computes while tokens travel."""
    fused_experts: bool = False
    """True if the products of all experts are one kernel, which also computes their activation and casts."""
    gated_gradient: float = 1.0
    """Slowdown of the fused kernel that computes the gradients before the last linear map of experts."""
    narrow_head: bool = False
    """True if the head is a product of 8-bit numbers too, where the layers are."""
    graphs: frozenset[LayerPart] = frozenset()
    """Parts of a layer that device graphs start, so that the host takes no time for them."""
    ask_every: int = 8
    """Number of tokens after which the ranks of a sampler ask if all rows have ended."""
    cache_block: int = 64
    """Memory of keys and values is taken for a multiple of so many positions; a decode step reads all of it."""
    bucket: float = 2.0**28
    """Bytes of the messages that a rank has at once while weights move to a sampler."""


MESHWRIGHT = Software()
