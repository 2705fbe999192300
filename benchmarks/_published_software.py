"""Properties of the software that published runs used."""

from __future__ import annotations

from dataclasses import replace

from meshwright.search import Software

MEGATRON = Software(tensor=0.6)
BRIDGE = replace(MEGATRON, gradient=2.0, reduced=2.0)
"""Megatron with gradients in 16 bits, as in all recipes of Megatron-Bridge (`grad_reduce_in_fp32 = False`)."""
KWAI = replace(MEGATRON, exposed=1.0, tensor=0.5)
"""Megatron of June 2023 (kwai/Megatron-Kwai, examples/atc24/pretrain_llama.sh). Its distributed optimizer reduces
gradients after the last backward pass, and gathers parameters after the update. The sums of tensor parallelism overlap
with products (`--overlap-sp-ag --overlap-sp-rs`), as those of asynchronous tensor parallelism do."""
MEGATRON_2021 = Software(fused_attention=False, exposed=1.0, messages=0.4, accumulation=2.4, gradient=2.0, reduced=2.0)
"""Half-precision gradients, attention of single products, nothing overlapped (arXiv 2104.04473)."""
DEEPSPEED = Software(
    fused_attention=False,
    exposed=1.0,
    messages=1.0,
    accumulation=18.0,
    outputs=1.0,
    scattered=False,
    reduces_parts=False,
)
"""Megatron's layers in DeepSpeed's pipeline, which copies gradients to single precision and adds them to others."""
DEEPSPEED_ZERO = Software(fused_attention=False, gradient=2.0, reduced=2.0, live=1e9)
"""Megatron's layers in DeepSpeed's ZeRO, with the default limit of gathered parameters."""
FSDP = Software(stops_early=True, even_context=False, logit=12.0, casts=6.0, selective=0.5, reuses=False)
"""Fully sharded data parallelism of PyTorch, compiled (arXiv 2304.11277, 2410.06511).

Its published peaks are the memory that the allocator reserves. A stream does not reuse memory that another stream has
freed, so the peaks of the loss and of recomputed layers add up.
"""
COMPILED_LOSS = {"logit": 4.0, "cross_entropy": 8.0}
"""Numbers of a compiled loss: it holds logits and their gradient in 16 bits, and no result in between.

It reads the logits for their maximum, for the sum and for the gradient, and writes the gradient. torchtitan compiles
its loss since March 2025 (pytorch/torchtitan, pull request 1033; Dao-AILab/quack, issue 48).
"""
DEEPSEEK = replace(
    BRIDGE,
    exchange=0.0,
    once=True,
    dispatched=1.0,
    repeated=frozenset({"norms", "up-projections"}),
)
"""The program of arXiv 2412.19437: two microbatches in opposite directions hide the exchange, which sends 8 bits to
experts; norms and up-projections are recomputed."""
PAGEABLE = 2e9
"""Bytes per second of a copy between a device and pageable memory of the host; published ones reach 1 to 8 GB/s."""
EAGER = 2.0
"""Factor on memory traffic if every operator is a kernel of its own."""
