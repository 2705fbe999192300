"""The sampler: tokens from a model, one after the other, for all rows of a batch.

Shapes: r rows, t new tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import current_world
from meshwright.engine import check_equal_options, unshard_dtensor
from meshwright.fixed_order import in_same_numbers
from meshwright.tensor import DistTensor
from meshwright.weights import is_compared, release, restore, version_to_sample

from ._cache import write_in_place
from ._calls import TokenCalls, has_encoder, takes_cache, token_calls
from ._choice import choose_rows
from ._errors import GenerationError
from ._ranks import ASKED, Tokens, made_by, ranks_of
from ._request import GenerationRequest, Prompts, check_whole, request_of
from ._slot_loop import SlotLoop
from ._slots_for import slots_for
from ._step_runs import StepRuns

STATIC_AFTER = 32
"""Number of eager steps whose time recording takes, in order of magnitude."""

_COLD = 1e-6
"""Temperature below which logits of a usual size overflow float32 in the division."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of `Sampler.generate`, the same plain tensors on every rank.

    Row `p * n + k` is sample `k` of prompt `p`.

    Attributes:
        tokens: New tokens [r, t], without the prompt; 0 after the end of a row. `t` is the largest length.
        lengths: Number of new tokens of each row [r], including the token that ended it.
        log_probs: Log-probability of each new token [r, t], in float32; 0 after the end of a row.
        weight_version: Number of the weights that chose the tokens. It grows when a later call finds changed weights.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor
    weight_version: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """A model that generates tokens; `sampler` makes it.

    The ranks ask every `ask_every` tokens if all rows ended. A decode step becomes a program after `static_after`
    tokens.
    """

    model: nn.Module
    ask_every: int = 8
    static_after: int | None = STATIC_AFTER
    _runs: StepRuns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_runs", StepRuns(self.static_after))

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int = 16,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Iterable[int] | None = None,
        n: int = 1,
        seed: int = 0,
        mask: Tensor | None = None,
        batch_size: int | None = None,
        prefill_chunk_size: int | None = None,
        page_size: int | None = None,
        cache_positions: int | None = None,
    ) -> Generated:
        """Return `n` continuations of each prompt; every rank makes the call with the same arguments.

        The same seed gives the prompt at index `p` the same tokens on every mesh, with any other prompts in the batch.
        Dropout is off.

        Args:
            prompts: Token ids: a sequence for each prompt, of any lengths, or one tensor [prompts, length].
            max_new_tokens: Upper bound of the new tokens of a row.
            temperature: 0 takes the most probable token; other values divide the logits.
            top_k: Number of the most probable tokens among which a token is drawn.
            top_p: Probability of the smallest set of the most probable tokens among which a token is drawn.
            stop: Token ids that end a row. None ends rows at `max_new_tokens` only, whatever the model's configuration.
            n: Number of samples of each prompt.
            seed: Seed of the random numbers.
            mask: 0 or False for each token of `prompts` that is padding; these tokens are left out.
            batch_size: Upper bound of the rows that are computed at a time, rounded up to a multiple of the ranks with
                rows of their own. A row that ends makes place for one that waits. None computes all rows at once.
            prefill_chunk_size: Number of tokens of each prompt that a call reads: less memory for long prompts. None
                reads prompts whole, as do models without a cache of keys and values.
            page_size: Number of positions of a page. Rows take pages of the cache as they grow, and samples of a prompt
                share the pages that the prompt fills. None gives each row memory for the longest one, or means 64 if
                there are `cache_positions`.
            cache_positions: Number of positions of all pages, divided among the ranks with rows of their own, and
                rounded up to whole pages. Rows wait until all pages that they may need are left. None takes memory for
                `batch_size` rows of the largest length, if there is a `page_size`.

        Raises:
            GenerationError: there is no prompt, an empty one, one with an unknown token, one that is longer than the
                model's positions or its pages, or an option with an invalid value; or the model is on the meta device,
                has no cache with pages, or returns no logits, no cache, or logits with NaN or infinity.
            StaleWeightsError: the trainer of `mw.weights.sync` has newer weights.
            WeightError: the sampler sleeps.
            DisagreementError: the arguments differ between ranks.

        >>> import meshwright as mw
        >>> class Next(nn.Module):
        ...     def forward(self, tokens):
        ...         return nn.functional.one_hot((tokens + 1) % 5, 5).float()
        >>> mw.sampler(Next()).generate([[0, 1], [3]], 3, temperature=0).tokens
        tensor([[2, 3, 4],
                [4, 0, 1]])
        """
        request = request_of(
            prompts,
            mask,
            stop,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            n=n,
            seed=seed,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            cache_positions=cache_positions,
        )
        if batch_size is not None:
            check_whole("batch_size", batch_size, 1)
        version = version_to_sample(self.model) if is_compared(self.model) else None
        tokens = made_by(
            ranks_of(self.model),
            lambda: self._tokens(request, batch_size, version),
            (len(request.rows), request.max_new_tokens),
            _device_of(self.model),
            self._options(request, batch_size),
        )
        return _generated(request, *tokens)

    def sleep(self) -> None:
        """Free the memory of decode steps, and the weights that `mw.weights.sync` copied; shared weights stay."""
        self._runs.clear()
        release(self.model)

    def wake(self) -> None:
        """Get the weights back that `sleep` freed, as the trainer has them now; every rank makes the call."""
        restore(self.model)

    def _tokens(self, request: GenerationRequest, batch_size: int | None, version: int | None) -> Tokens:
        """Return the tokens; every rank of the model makes the call."""
        self._check(request, batch_size)
        version = version_to_sample(self.model) if version is None else version
        _check_memory(self.model)
        count = min(batch_size or len(request.rows), len(request.rows))
        with torch.no_grad(), _evaluating(self.model), self._runs.call(self._is_distributed):
            found = self._in_slots(request, count)
            return *(self._in_batches(request, count) if found is None else found), version

    def _in_slots(self, request: GenerationRequest, count: int) -> tuple[Tensor, Tensor] | None:
        """Return tokens and log-probabilities by decode steps; None if these do not fit the model, or gain nothing.

        On several ranks a step has tensors of the same sizes for each token. A cache that grows has others, and the
        calls of each size are planned anew.

        `same_numbers` refuses the write of a step at positions that differ between rows.
        """
        gains_nothing = not self._is_distributed and request.n == 1 and count == len(request.rows)
        if in_same_numbers():
            request.refuse_pages("mw.same_numbers(), which refuses writes at positions that differ between rows")
            return None
        if gains_nothing and not request.is_paged:
            return None
        slots = slots_for(self.model, _device_of(self.model), self._runs, request, count)
        return None if slots is None else SlotLoop(slots, request, self.ask_every).run()

    def _in_batches(self, request: GenerationRequest, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of batches of at most `count` rows, one after the other."""
        found: list[tuple[Tensor, Tensor]] = []
        for at in range(0, len(request.rows), count):
            rows = request.rows[at : at + count]
            prompts = [request.prompts[prompt] for prompt, _ in rows]
            chunk = request.prefill_chunk_size
            calls = token_calls(self.model, prompts, _device_of(self.model), request.max_new_tokens, chunk)
            found.append(_Loop(calls, request, rows, self.ask_every).run())
        tokens, log_probs = (
            [nn.functional.pad(x, (0, request.max_new_tokens - x.shape[1])) for x in each]
            for each in zip(*found, strict=True)
        )
        return torch.cat(tokens), torch.cat(log_probs)

    def cache(self, capacity: int) -> Any:
        """Return a cache for `generate(past_key_values=…)` of a model of transformers, which is written in place.

        `capacity` is the number of positions for which memory is taken; a longer sequence is copied for each token.

        Raises:
            GenerationError: the model is not one of transformers, or takes no `past_key_values` (Mamba); or `capacity`
                is no positive whole number.
        """
        check_whole("capacity", capacity, 1)
        config: Any = getattr(self.model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise GenerationError(
                f"a cache for {type(self.model).__name__}",
                "no configuration of transformers",
                "the cache is one of transformers, whose layers follow the configuration",
                "call sampler.generate, which needs no cache",
            )
        if not takes_cache(self.model):
            raise GenerationError(
                f"a cache for {type(self.model).__name__}",
                "a forward without past_key_values",
                "the cache is for keys and values, which grow with each token",
                "call model.generate without it; a state-space model creates its own cache, of constant size",
            )
        library = import_module("transformers")
        made = library.DynamicCache(config=config)
        if has_encoder(self.model):
            made = library.EncoderDecoderCache(made, library.DynamicCache(config=config))
        write_in_place(made, capacity)
        return made

    @property
    def _is_distributed(self) -> bool:
        return any(isinstance(p, DistTensor) for p in self.model.parameters())

    def _options(self, request: GenerationRequest, batch_size: int | None) -> dict[str, object]:
        """Return the options of a call, which are the same on every rank."""
        options: dict[str, object] = {name: getattr(request, name) for name in GenerationRequest.__dataclass_fields__}
        return options | {"ask_every": self.ask_every, "static_after": self.static_after, "batch_size": batch_size}

    def _check(self, request: GenerationRequest, batch_size: int | None) -> None:
        """Raise an error for a request that differs between ranks, or that the model cannot carry out."""
        if self._is_distributed:
            check_equal_options(ASKED, self._options(request, batch_size), current_world())
        is_pair = has_encoder(self.model)
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "get_text_config") and not is_pair:  # of a pair, this would be the decoder's
            config = config.get_text_config()
        words = getattr(config, "vocab_size", None)
        if isinstance(words, int):
            request.check_prompts(words)
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            request.check_capacity(positions, is_pair)


def sampler(model: nn.Module, *, ask_every: int = 8, static_after: int | None = STATIC_AFTER) -> Sampler:
    """Return a sampler of a language model that is marked, planned or plain.

    The model is called as it is: `forward` of a model of transformers with its cache, or `forward(tokens) -> logits` of
    any causal model. `ask_every` is the number of tokens after which the ranks ask if all rows have ended.

    With a decoder of transformers on several ranks, the step for one token becomes a program. It is recorded after
    `static_after` tokens with one number of rows and one length of the cache, since recording takes the time of many
    eager steps. Later calls of the sampler use the program again. With None, all steps run eagerly.

    Raises:
        GenerationError: `model` is no module, `ask_every` no positive whole number, or `static_after` a negative one.

    Warns:
        EagerStepWarning: the step of a long generation cannot become a program, and runs eagerly. Told once.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - the caller may be untyped
        raise GenerationError(
            "a sampler",
            f"a {type(model).__name__}",
            "a sampler calls the forward of a torch.nn.Module",
            "pass the model itself",
        )
    check_whole("ask_every", ask_every, 1)
    if static_after is not None:
        check_whole("static_after", static_after, 0)
    return Sampler(model, ask_every, static_after)


@dataclass(slots=True)
class _Loop:
    """The loop over new tokens; lists have an entry for each step, with this rank's rows."""

    calls: TokenCalls
    request: GenerationRequest
    numbered: tuple[tuple[int, int], ...]
    """The prompt and the sample of each row."""
    ask_every: int
    tokens: list[Tensor] = field(default_factory=list[Tensor])
    log_probs: list[Tensor] = field(default_factory=list[Tensor])

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the tokens and log-probabilities [r, t] of all rows, on every rank."""
        request = self.request
        logits_rv = self.calls.first()
        request.check_stop(logits_rv.shape[-1])
        stop = torch.tensor(request.stop, dtype=torch.int64, device=logits_rv.device)
        rows = self.calls.rows
        mine = self.numbered[rows.first : rows.first + rows.held]
        ended_r = torch.zeros(rows.held, dtype=torch.bool, device=logits_rv.device)
        for step in range(request.max_new_tokens):
            chosen_r, log_probs_r = choose_rows(rows.logits_here(logits_rv), request, mine, [step] * rows.held)
            chosen_r = chosen_r.masked_fill(ended_r, 0)
            self.tokens.append(chosen_r)
            self.log_probs.append(log_probs_r.masked_fill(ended_r, 0.0))
            ended_r = ended_r | torch.isin(chosen_r, stop)
            if step + 1 == request.max_new_tokens or self._all_ended(step, ended_r):
                break
            logits_rv = self.calls.after(rows.joined(chosen_r[:, None]))
        tokens_rt, log_probs_rt = torch.stack(self.tokens, -1), torch.stack(self.log_probs, -1)
        packed_r2t = torch.stack([tokens_rt.double(), log_probs_rt.double()], 1)  # one collective for both
        tokens_rt, log_probs_rt = unshard_dtensor(rows.joined(packed_r2t)).unbind(1)
        return tokens_rt.to(torch.int64), log_probs_rt.to(torch.float32)

    def _all_ended(self, step: int, ended_r: Tensor) -> bool:
        """True if every row has ended; the ranks ask each other after every `ask_every` tokens."""
        if not self.request.stop or (step + 1) % self.ask_every:
            return False
        return bool(unshard_dtensor(self.calls.rows.joined(ended_r)).all())


def _generated(request: GenerationRequest, tokens_rt: Tensor, log_probs_rt: Tensor, version: int) -> Generated:
    """Return the result, up to the end of the longest row. Raises GenerationError for logits without probabilities."""
    broken_r = log_probs_rt.isnan().any(-1)
    if bool(broken_r.any()):
        is_cold = 0 < request.temperature < _COLD
        raise GenerationError(
            "tokens of a model",
            f"NaN or infinity among the logits of row {int(broken_r.int().argmax())}, divided by the temperature"
            + (f" {request.temperature:g}" if is_cold else ""),
            "they give no probabilities",
            "pass temperature=0 for the most probable token"
            if is_cold
            else "look for NaN in the model's parameters: mw.verify compares the model with one device",
        )
    stop = torch.tensor(request.stop, dtype=torch.int64, device=tokens_rt.device)
    is_stop_rt = torch.isin(tokens_rt, stop)
    first_r = is_stop_rt.int().argmax(-1) + 1
    lengths_r = torch.where(is_stop_rt.any(-1), first_r, tokens_rt.shape[-1])
    longest = int(lengths_r.max())
    return Generated(tokens_rt[:, :longest], lengths_r, log_probs_rt[:, :longest], version)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Set the model to evaluation inside the context, and each module back to its own mode after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_memory(model: nn.Module) -> None:
    """Raise GenerationError for a model that is on the meta device."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise GenerationError(
                f"tokens of {type(model).__name__}",
                f"{name} on the meta device",
                "the tensor has no values",
                "call mw.weights.sync(trainer, sampler) before, or load the weights",
            )


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
