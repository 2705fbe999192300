"""Choice of a token for each row: the most probable one, or the one at a uniform number among those that are left.

Shapes: r rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._request import GenerationRequest
from ._uniform import uniform


def choose_rows(
    logits_rv: Tensor, request: GenerationRequest, rows: Sequence[tuple[int, int]], steps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return a token for each row, which is a prompt and a sample at a step of its own, and its log-probability."""
    is_drawn = request.temperature != 0
    numbers = [uniform(request.seed, *row, step) for row, step in zip(rows, steps, strict=True)] if is_drawn else []
    uniforms_r = torch.tensor(numbers, dtype=torch.float64, device=logits_rv.device)
    return choose_tokens(logits_rv, uniforms_r, request.temperature, request.top_k, request.top_p)


def choose_tokens(
    logits_rv: Tensor,
    uniforms_r: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a token for each row, and its log-probability.

    With temperature 0 the first of the most probable tokens is chosen. Else a token is drawn from the distribution
    `softmax(logits / temperature)`, of which `top_k` keeps the k most probable tokens, and `top_p` the smallest set of
    the most probable tokens with at least this probability. `uniforms_r` are the random numbers, in [0, 1). The
    log-probability is that of `softmax(logits / temperature)`, before tokens are removed; with temperature 0 that of
    `softmax(logits)`. It is NaN for a row without probabilities: one with NaN, with inf, or with -inf alone.

    >>> choose_tokens(torch.tensor([[0.0, 2.0, 2.0]]), torch.tensor([0.9]), temperature=0.0)[0]
    tensor([1])
    """
    scores_rv = logits_rv.float()
    if temperature not in (0, 1):
        scores_rv = scores_rv / temperature
    log_probs_rv = scores_rv.log_softmax(-1)
    # not the log-probabilities: their rounding makes logits equal that differ
    tokens_r = scores_rv.argmax(-1) if temperature == 0 else _drawn(scores_rv, uniforms_r, top_k, top_p)
    return tokens_r, log_probs_rv.gather(-1, tokens_r[:, None])[:, 0]


def _drawn(scores_rv: Tensor, uniforms_r: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the first token of each row whose cumulated probability exceeds the uniform number."""
    if top_k is not None:
        scores_rv = _most_probable(scores_rv, top_k)
    probs_rv = scores_rv.double().softmax(-1)
    if top_p is not None:
        probs_rv = _smallest_set(probs_rv, top_p)
    cumulated_rv = probs_rv.cumsum(-1)
    total_r1 = cumulated_rv[:, -1:]
    below_r = (cumulated_rv <= uniforms_r[:, None].to(cumulated_rv) * total_r1).sum(-1)
    last_r = (cumulated_rv < total_r1).sum(-1)  # the last token with a probability: a product may round up to the total
    return torch.minimum(below_r, last_r)


def _most_probable(scores_rv: Tensor, k: int) -> Tensor:
    """Return the scores with -inf for all but the `k` largest of each row, and those equal to the smallest of them."""
    least_r1 = scores_rv.topk(min(k, scores_rv.shape[-1]), dim=-1).values[:, -1:]
    return scores_rv.masked_fill(scores_rv < least_r1, -torch.inf)


def _smallest_set(probs_rv: Tensor, p: float) -> Tensor:
    """Return the probabilities with 0 for the tokens that the smallest set of probability `p` does not need."""
    sorted_rv, order_rv = probs_rv.sort(dim=-1, descending=True, stable=True)
    before_rv = sorted_rv.cumsum(-1) - sorted_rv
    return torch.zeros_like(probs_rv).scatter(-1, order_rv, sorted_rv.masked_fill(before_rv >= p, 0.0))
