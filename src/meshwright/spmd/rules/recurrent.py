"""Rules of recurrent layers: samples are independent, and time is whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..notation.dim_names import operand_text
from ..notation.rule import Entry


def recurrent(states: int) -> Entry:
    """Return the rule of a layer with `states` states.

    The arguments are `(input, states, params, has_biases, layers, dropout, train, both_ways, first)`. Dropout between
    layers is random, so there is no rule, and torch's operators of each step run instead.
    """

    def entry(
        x: Tensor,
        state: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> str | None:
        if (dropout and train and layers > 1) or x.dim() != BATCHED:
            return None
        given = [state] if isinstance(state, Tensor) else list(state)
        held = [f"l{n}! b h{n}!" for n in range(len(given))]
        weights = [operand_text([f"p{n}d{d}" for d in range(p.dim())], range(p.dim())) for n, p in enumerate(params)]
        before, after = ("b t! i!", "b t new") if batch_first else ("t! b i!", "t b new")
        ends = [f"l{n} b h{n}" for n in range(len(given))]
        return f"{', '.join([before, *held, *weights])} -> {' ; '.join([after, *ends[:states]])}"

    return entry


BATCHED = 3
"""Number of dims of an input with a batch."""

RECURRENT: dict[str, Entry] = {
    "aten.lstm.input": recurrent(2),
    **dict.fromkeys(("aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"), recurrent(1)),
}
