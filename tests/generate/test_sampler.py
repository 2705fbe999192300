"""The sampler: the tokens of one device on every mesh, and errors for requests that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import DisagreementError
from meshwright.generate import Generated, GenerationError, choose_tokens, uniform

WORDS, WIDTH, HEADS = 19, 16, 4
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [2, 2]]


class Cached:
    """The keys and values of one layer."""

    def __init__(self) -> None:
        self.parts: tuple[Tensor, Tensor] | None = None


class Output(dict[str, Any]):
    """A result whose entries are attributes, too."""

    logits = property(lambda self: self["logits"])
    past_key_values = property(lambda self: self.get("past_key_values"))


class Decoder(nn.Module):
    """A decoder of one layer, with learned positions, dropout, and the parameters of models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, WORDS)
        with torch.no_grad():
            self.head.weight.mul_(8)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cached | None = None,
        use_cache: bool = False,
    ) -> Output:
        del use_cache
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        cache = past_key_values or Cached()
        x = self.words(input_ids) + self.places(position_ids)
        x = x + self.o(self._attend(x, cache, attention_mask))
        x = self.dropout(x + self.down(self.up(x).relu()))
        return Output(logits=self.head(x), past_key_values=cache)

    def _attend(self, x: Tensor, cache: Cached, mask: Tensor | None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cache.parts is not None:
            k, v = torch.cat([cache.parts[0], k], 2), torch.cat([cache.parts[1], v], 2)
        cache.parts = k, v
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        hidden = seen if mask is None else seen & mask[:, None, None].bool()
        hidden = hidden | ~seen.any(-1, keepdim=True) if mask is None else hidden
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~hidden, -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Config:
    """The sizes of the model, by the names of transformers."""

    vocab_size, max_position_embeddings = WORDS, 16


class Configured(Decoder):
    """The same decoder with a configuration."""

    config = Config()


class Plain(nn.Module):
    """The same decoder as a function of tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits


class Counting(Decoder):
    """The same decoder, with positions that it counts by its cache; its attention mask cannot change them."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - other parameters are the point
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Cached | None = None
    ) -> Output:
        begin = past_key_values.parts[0].shape[2] if past_key_values and past_key_values.parts else 0
        places = torch.arange(begin, begin + input_ids.shape[1])[None]
        return super().forward(input_ids, attention_mask, places, past_key_values)


class OtherNames(Plain):
    """The same decoder, with a cache but no parameter `input_ids`."""

    def forward(self, tokens: Tensor, past_key_values: Cached | None = None) -> Tensor:
        return self.inner(tokens, past_key_values=past_key_values).logits


STYLES = {
    **{name: mw.ColwiseParallel() for name in ("*q", "*k", "*v", "*up", "*head")},
    **{name: mw.RowwiseParallel() for name in ("*o", "*down", "*words")},
}
MESHES: dict[str, tuple[Any, list[str]]] = {
    "dp": ([0, 1, 2], ["dp"]),
    "tp": ([0, 1], ["tp"]),
    "dp x tp": ([[0, 1], [2, 3]], ["dp", "tp"]),
    "cp": ([0, 1], ["cp"]),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 5},
    "samples of each prompt": {"n": 3, "top_k": 6, "top_p": 0.8, "temperature": 0.7},
    "stopped": {"seed": 1, "stop": [1, 4, 7, 10, 13]},
}


def generate(model: nn.Module, prompts: Any = PROMPTS, **options: Any) -> Generated:
    return mw.sampler(model, ask_every=2).generate(prompts, 6, **options)


def on_mesh(mesh: str, make: Callable[[], nn.Module], **options: Any) -> tuple[Generated, list[str]]:
    """Return what the last rank gets, and the steps of its collectives."""
    ids, axes = MESHES[mesh]

    def go() -> tuple[Generated, list[str]]:
        model, _ = mw.parallelize(make(), None, mw.ProcessMesh(ids, axes), mw.Parallelism(STYLES))
        with mw.trace_comm() as trace:
            found = generate(model, **options)
        return found, [call.step for call in trace.calls if call.axes]

    return mw.simulate(go, len(torch.tensor(ids).flatten()))[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_those_of_one_device_on_every_mesh(mesh: str, way: str) -> None:
    wanted = generate(Decoder(), **WAYS[way])
    found, _ = on_mesh(mesh, Decoder, **WAYS[way])
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.lengths, wanted.lengths)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_a_model_without_a_cache_gives_the_tokens_of_one_with_a_cache(mesh: str) -> None:
    wanted = generate(Decoder(), seed=5)
    assert torch.equal(generate(Plain(), seed=5).tokens, wanted.tokens)
    assert torch.equal(on_mesh(mesh, Plain, seed=5)[0].tokens, wanted.tokens)


@pytest.mark.parametrize("make", [Counting, OtherNames])
def test_a_model_that_is_told_no_positions_gives_the_tokens_of_one_that_is(make: Callable[[], nn.Module]) -> None:
    wanted = generate(Decoder(), seed=5)
    assert torch.equal(generate(make(), seed=5).tokens, wanted.tokens)
    assert torch.equal(generate(make(), PROMPTS[:1], seed=5).tokens, wanted.tokens[:1])
    assert torch.equal(on_mesh("dp x tp", make, seed=5)[0].tokens, wanted.tokens)


@pytest.mark.parametrize("make", [Decoder, Plain])
def test_there_may_be_fewer_rows_than_ranks(make: Callable[[], nn.Module]) -> None:
    for count in (1, 2):
        options: dict[str, Any] = {"prompts": PROMPTS[:count], "seed": 5, "stop": 1, "top_k": 9, "top_p": 0.9}
        assert torch.equal(on_mesh("dp", make, **options)[0].tokens, generate(make(), **options).tokens)


def test_a_whole_number_of_numpy_is_a_seed() -> None:
    numpy = pytest.importorskip("numpy")
    assert torch.equal(generate(Decoder(), seed=numpy.int64(5)).tokens, generate(Decoder(), seed=5).tokens)


def test_tokens_depend_neither_on_other_prompts_nor_on_the_number_of_samples() -> None:
    batch = generate(Decoder(), seed=5, n=2)
    alone = generate(Decoder(), PROMPTS[:1], seed=5)
    assert torch.equal(batch.tokens[0], alone.tokens[0])
    assert not torch.equal(batch.tokens[0], batch.tokens[1])
    greedy = generate(Decoder(), temperature=0)
    for at, prompt in enumerate(PROMPTS):
        assert torch.equal(generate(Decoder(), [prompt], temperature=0).tokens[0], greedy.tokens[at])


def test_padding_on_either_side_is_removed() -> None:
    longest = max(map(len, PROMPTS))
    wanted = generate(Decoder(), seed=5).tokens
    for left in (True, False):
        padded, mask = [], []
        for prompt in PROMPTS:
            pad = [0] * (longest - len(prompt))
            padded.append([*pad, *prompt] if left else [*prompt, *pad])
            mask.append([0 * t for t in pad] + [1] * len(prompt) if left else [1] * len(prompt) + pad)
        found = generate(Decoder(), torch.tensor(padded), mask=torch.tensor(mask), seed=5)
        assert torch.equal(found.tokens, wanted)


def test_log_probabilities_are_those_of_a_pass_over_the_whole_sequence() -> None:
    found = generate(Decoder(), seed=5, temperature=0.5)
    model = Decoder().eval()
    for row, prompt in enumerate(PROMPTS):
        whole = torch.tensor([[*prompt, *found.tokens[row].tolist()]])
        log_probs = (model(whole).logits[0, len(prompt) - 1 : -1] / 0.5).log_softmax(-1)
        wanted = log_probs.gather(-1, found.tokens[row][:, None])[:, 0]
        torch.testing.assert_close(found.log_probs[row], wanted, atol=1e-5, rtol=0)


def test_a_row_ends_with_its_first_stop_token() -> None:
    free, stop = generate(Decoder(), seed=1), WAYS["stopped"]["stop"]
    found = generate(Decoder(), **WAYS["stopped"])
    for row, tokens in enumerate(free.tokens.tolist()):
        length = next((at + 1 for at, t in enumerate(tokens) if t in stop), len(tokens))
        assert found.lengths[row] == length
        assert found.tokens[row, :length].tolist() == tokens[:length]
        assert not found.tokens[row, length:].any()
        assert not found.log_probs[row, length:].any()
    assert len(set(found.lengths.tolist())) > 1


@pytest.mark.parametrize("mesh", MESHES)
def test_all_rows_may_end_at_once(mesh: str) -> None:
    found, steps = on_mesh(mesh, Decoder, temperature=0, stop=range(WORDS))
    assert found.tokens.shape == (len(PROMPTS), 1)
    assert found.lengths.tolist() == [1] * len(PROMPTS)
    assert len(steps) <= 12


def test_the_ranks_ask_for_the_end_every_few_tokens_and_send_no_tokens_in_between() -> None:
    _, free = on_mesh("dp", Plain, seed=5)
    _, asking = on_mesh("dp", Plain, seed=5, stop=0)
    assert len(free) == 1  # the result
    assert len(asking) == len(free) + 2  # after 2 and 4 of 6 tokens


def test_a_token_of_a_tensor_parallel_model_takes_one_reduction_for_each_sum() -> None:
    """There are three sums: the embedding, the attention and the feed-forward layer. The logits are gathered."""
    passes = {2: range(WORDS), 6: ()}
    calls = [len(on_mesh("tp", Decoder, prompts=[[3, 4]], temperature=0, stop=stop)[1]) for stop in passes.values()]
    assert calls[1] - calls[0] == (6 - 2) * (3 + 1)


def test_each_module_gets_its_mode_back() -> None:
    model = Decoder()
    model.head.eval()
    generate(model)
    assert model.training
    assert model.dropout.training
    assert not model.head.training


def test_uniform_numbers_are_those_of_seed_prompt_sample_and_step() -> None:
    found = generate(Decoder(), [[3, 4]], n=2, seed=9)
    logits = Decoder().eval()(torch.tensor([[3, 4]])).logits[:, -1]
    for sample in range(2):
        token, _ = choose_tokens(logits, torch.tensor([uniform(9, 0, sample, 0)], dtype=torch.float64))
        assert found.tokens[sample, 0] == token


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompts": []}, "at least one prompt"),
    "an empty prompt": ({"prompts": [[1], []]}, "prompt 1"),
    "all padding": ({"prompts": torch.ones(1, 2).long(), "mask": torch.zeros(1, 2)}, "prompt 0"),
    "an encoding": ({"prompts": {"input_ids": [[1]]}}, "mask=encoded"),
    "an array": ({"prompts": np.array([[1]])}, "tolist"),
    "texts": ({"prompts": ["hello"]}, "input_ids"),
    "one text": ({"prompts": "hello"}, "input_ids"),
    "one prompt without a list": ({"prompts": [1, 2]}, "list of prompts"),
    "numbers with a point": ({"prompts": [[1.5]]}, "token ids"),
    "a float tensor": ({"prompts": torch.ones(2, 3)}, "token ids"),
    "a tensor of one dim": ({"prompts": torch.ones(3).long()}, "list of prompts"),
    "another mask": ({"prompts": torch.ones(2, 3).long(), "mask": torch.ones(2, 4)}, "one flag"),
    "a mask of one dim": ({"prompts": torch.ones(2, 3).long(), "mask": torch.ones(2)}, "one flag"),
    "a mask that is no tensor": ({"prompts": [[1, 2]], "mask": [[0, 1]]}, "one flag"),
    "an unknown token": ({"prompts": [[WORDS]]}, f"the token {WORDS}"),
    "a negative token": ({"prompts": [[-1]]}, "prompt 0 must be"),
    "an unknown stop": ({"stop": WORDS + 5, "max_new_tokens": 2}, f"the token {WORDS + 5}"),
    "a text as stop": ({"stop": "</s>"}, "eos_token_id"),
    "no samples": ({"n": 0}, "n must be"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens must be"),
    "a negative temperature": ({"temperature": -1.0}, "temperature must be"),
    "a temperature of NaN": ({"temperature": float("nan")}, "temperature must be"),
    "a temperature at which logits overflow": ({"temperature": 1e-42, "max_new_tokens": 2}, "temperature=0"),
    "no candidates": ({"top_k": 0}, "top_k must be"),
    "too little probability": ({"top_p": 0.0}, "temperature=0"),
    "too much probability": ({"top_p": 1.5}, "at most 1"),
    "a seed that is no number": ({"seed": 1.5}, "seed must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused(case: str) -> None:
    options, words = BAD[case]
    with pytest.raises(GenerationError, match=words):
        mw.sampler(Configured()).generate(**{"prompts": PROMPTS, **options})


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"words.weight on the meta device"):
        mw.sampler(Configured().to("meta")).generate(PROMPTS, 2)


def test_the_difference_of_long_prompts_is_shown() -> None:
    def go() -> None:
        model, _ = mw.parallelize(Decoder(), None, mw.ProcessMesh([0, 1], ["dp"]))
        generate(model, [[1] * 60 + [mw.get_rank()]])

    with pytest.raises(DisagreementError, match=r"1, 0\),\) on rank 0 and … .*1, 1\),\) on rank 1"):
        mw.simulate(go, 2)


def test_a_prompt_beyond_the_positions_of_the_model_is_refused() -> None:
    model = Configured()
    assert mw.sampler(model).generate(PROMPTS, 11).tokens.shape[1] == 11
    with pytest.raises(GenerationError, match="max_new_tokens=11"):
        mw.sampler(model).generate(PROMPTS, 12)
    with pytest.raises(GenerationError, match="shorten"):
        mw.sampler(model).generate([[1] * 17], 1)


@pytest.mark.parametrize("options", [{"prompts": [[1], [2, 3]]}, {"seed": 3}, {"n": 2}])
def test_requests_that_differ_between_ranks_are_refused(options: dict[str, Any]) -> None:
    def go() -> None:
        model, _ = mw.parallelize(Decoder(), None, mw.ProcessMesh([0, 1], ["dp"]))
        generate(model, **(options if mw.get_rank() else {}))

    with pytest.raises(DisagreementError, match=r"on rank 0 and .* on rank 1"):
        mw.simulate(go, 2)


def test_ranks_that_ask_for_the_end_at_other_tokens_are_refused() -> None:
    def go() -> None:
        model, _ = mw.parallelize(Decoder(), None, mw.ProcessMesh([0, 1], ["dp"]))
        mw.sampler(model, ask_every=2 + mw.get_rank()).generate(PROMPTS, 6, stop=1)

    with pytest.raises(DisagreementError, match="ask_every is 2 on rank 0 and 3 on rank 1"):
        mw.simulate(go, 2)


@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_nan_among_the_logits_is_refused_on_all_ranks(mesh: str) -> None:
    def broken() -> nn.Module:
        model = Decoder()
        with torch.no_grad():
            model.words.weight[6] = torch.nan
        return model

    with pytest.raises(GenerationError, match="NaN or infinity among the logits of row 1"):
        on_mesh(mesh, broken, temperature=0)


def test_an_infinite_logit_is_refused() -> None:
    model = Plain()
    with torch.no_grad():
        model.inner.head.bias[2] = torch.inf
    for temperature in (0, 1.0):
        with pytest.raises(GenerationError, match="infinity among the logits of row 0"):
            generate(model, temperature=temperature)


class WithoutHead(Decoder):
    """A decoder whose result has hidden states in place of logits."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return SimpleNamespace(last_hidden_state=super().forward(*args, **options).logits)


class Forgetful(Decoder):
    """A decoder that takes a cache and returns none."""

    def forward(self, input_ids: Tensor, past_key_values: Cached | None = None, **options: Any) -> Output:
        return Output(logits=super().forward(input_ids, past_key_values=past_key_values, **options).logits)


class LastOnly(Plain):
    """A model that returns the logits after the last token only."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1:]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WithoutHead, "without logits"),
        (Forgetful, "return past_key_values"),
        (LastOnly, r"a result of shape \(4, 1, 19\)"),
    ],
)
def test_a_result_that_gives_no_next_token_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        generate(make(), [[1, 2]] * 4)


def test_something_else_than_a_model_is_refused() -> None:
    anything: Any = "model"
    with pytest.raises(GenerationError, match=r"torch\.nn\.Module"):
        mw.sampler(anything)
    with pytest.raises(GenerationError, match="ask_every=8"):
        mw.sampler(Decoder(), ask_every=0)
