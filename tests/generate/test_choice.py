"""Choice of tokens from logits, and the uniform numbers that it takes."""

from __future__ import annotations

import pytest
import torch

from meshwright.generate import choose_tokens, uniform

LOGITS = torch.log(torch.tensor([0.5, 0.2, 0.2, 0.1]))
MANY = torch.linspace(0, 1, 1001)[:-1].double()


def drawn(**options: float | int) -> list[float]:
    """Return how often each token is drawn, over evenly spaced uniform numbers."""
    tokens, _ = choose_tokens(LOGITS.expand(len(MANY), -1), MANY, **options)  # pyright: ignore[reportArgumentType] - by name
    return [round(int((tokens == t).sum()) / len(MANY), 2) for t in range(4)]


def test_tokens_are_drawn_by_their_probabilities() -> None:
    assert drawn() == [0.5, 0.2, 0.2, 0.1]


def test_temperature_sharpens_the_distribution() -> None:
    wanted = (LOGITS / 0.5).softmax(-1)
    assert drawn(temperature=0.5) == pytest.approx(wanted.tolist(), abs=0.01)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"top_k": 1}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 2}, [0.56, 0.22, 0.22, 0.0]),  # two tokens are equally probable, and both stay
        ({"top_k": 9}, [0.5, 0.2, 0.2, 0.1]),
        ({"top_p": 0.4}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.6}, [0.71, 0.29, 0.0, 0.0]),
        ({"top_p": 1.0}, [0.5, 0.2, 0.2, 0.1]),
        ({"top_k": 3, "top_p": 0.5}, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_improbable_tokens_are_removed(options: dict[str, float], wanted: list[float]) -> None:
    assert drawn(**options) == pytest.approx(wanted, abs=0.011)


def test_the_log_probability_is_that_of_the_whole_distribution() -> None:
    for options in ({}, {"top_k": 1}, {"top_p": 0.6}):
        tokens, found = choose_tokens(LOGITS[None], torch.tensor([0.3]), 2.0, **options)
        assert found == (LOGITS / 2).log_softmax(-1)[tokens]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    tokens, _ = choose_tokens(logits, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3]


def test_temperature_0_tells_logits_apart_whose_probabilities_are_equal() -> None:
    tokens, _ = choose_tokens(torch.tensor([[0.0, 1e-9]]), torch.zeros(1), temperature=0)
    assert tokens == 1


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
def test_a_row_without_probabilities_gets_nan(logits: list[float], temperature: float) -> None:
    assert choose_tokens(torch.tensor([logits]), torch.zeros(1), temperature)[1].isnan()


def test_uniform_numbers_depend_on_each_of_their_integers() -> None:
    grid = [uniform(*at) for at in torch.cartesian_prod(*[torch.arange(8)] * 4).tolist()]
    assert len(set(grid)) == 8**4
    assert 0.0 <= min(grid) < 0.01
    assert 0.99 < max(grid) < 1.0
    assert abs(sum(grid) / len(grid) - 0.5) < 0.01
    assert uniform(-1, 2**70, 0, 0) == uniform(-1, 2**70, 0, 0)


def test_consecutive_uniform_numbers_are_not_correlated() -> None:
    steps = torch.tensor([uniform(7, 0, 0, step) for step in range(4000)], dtype=torch.float64)
    samples = torch.tensor([uniform(7, 0, sample, 0) for sample in range(4000)], dtype=torch.float64)
    for x in (steps, samples):
        pairs = torch.stack([x[:-1], x[1:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05
