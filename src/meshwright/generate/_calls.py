"""Calls of a model for the logits of the next token: with a cache, as encoder and decoder, or on whole sequences.

The calls know parameters by their names in `model.forward`, as models of transformers have them. A model without these
names is called on whole sequences. So is one whose cached call would count padding among the positions.

Shapes: r rows, s positions so far, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ._cache import holds_keys_only, write_in_place
from ._errors import GenerationError
from ._rows import Rows, rows_of

CACHES = ("past_key_values", "cache_params")
"""Names of a cache among the parameters of `forward`, and in its result."""


class TokenCalls(Protocol):
    """The calls of a model for one batch. `rows` is known after the first one."""

    rows: Rows

    def first(self) -> Tensor:
        """Return the logits [r, v] of the token after each prompt."""
        ...

    def after(self, tokens_r1: Tensor) -> Tensor:
        """Return the logits [r, v] of the token after `tokens_r1`, the tokens that were chosen last."""
        ...


def token_calls(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    new_tokens: int,
    chunk: int | None = None,
) -> TokenCalls:
    """Return the calls that fit the model, for a batch with a prompt in each row.

    Caches get memory for `new_tokens` after the prompts. Prompts are read in chunks of this many tokens, if the model
    has a cache of keys and values.
    """
    if has_encoder(model):
        return EncoderDecoderCalls(model, prompts, device, new_tokens)
    names = _parameters(model)
    cache = next((name for name in CACHES if name in names), None)
    is_even = len({len(prompt) for prompt in prompts}) == 1
    if cache is None or "input_ids" not in names or not (is_even or _takes_padding(names)):
        return WholeSequenceCalls(model, prompts, device)
    return CachedCalls(model, prompts, device, cache, new_tokens, chunk=chunk)


def decoder_cache(model: nn.Module) -> str | None:
    """Return the name of the cache of a decoder of transformers that takes a mask and positions, or None."""
    needed = {"input_ids", "attention_mask", "position_ids", "past_key_values"}
    is_decoder = hasattr(getattr(model, "config", None), "get_text_config") and not has_encoder(model)
    return "past_key_values" if is_decoder and needed <= _parameters(model).keys() else None


def takes_cache(model: nn.Module) -> bool:
    """True if `forward` takes `past_key_values`."""
    return "past_key_values" in _parameters(model)


def _takes_padding(names: Mapping[str, object]) -> bool:
    """True if padding on the left changes no token: the model is told positions.

    A recurrence is not: the logits of Mamba of transformers change by 0.06 if any row of the batch has padding.
    """
    return {"attention_mask", "position_ids"} <= names.keys()


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of `forward`. A PEFT model with adapters passes its arguments on to the model inside."""
    adapters: Any = getattr(model, "active_peft_config", None)
    called: Any = model if adapters is None or adapters.is_prompt_learning else cast(Any, model).get_base_model()
    return dict(inspect.signature(called.forward).parameters)


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device, left: bool, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Return token ids [r, s] with zeros as padding on one side, and the mask that is 0 there.

    `s` is rounded up to a multiple.
    """
    longest = -(-max(map(len, prompts)) // multiple) * multiple
    ids, mask = [], []
    for prompt in prompts:
        pad = longest - len(prompt)
        ids.append([0] * pad + [*prompt] if left else [*prompt] + [0] * pad)
        mask.append([0] * pad + [1] * len(prompt) if left else [1] * len(prompt) + [0] * pad)
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class CachedCalls:
    """Calls of a decoder with a cache. Prompts are padded on the left, and positions count from their first token.

    Prompts are padded to a `multiple` of tokens, and read in chunks of `chunk` tokens.
    """

    rows: Rows

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        cache: str,
        new_tokens: int,
        multiple: int = 1,
        chunk: int | None = None,
    ) -> None:
        self.chunk = chunk
        self.model, self.cache_name, self.names = model, cache, _parameters(model)
        self.ids_rs, self.mask_rs = _padded(prompts, device, left=True, multiple=multiple)
        self.capacity = self.ids_rs.shape[1] + new_tokens
        self.is_even = bool(self.mask_rs.all())
        self.cache: Any = None

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of the cache of transformers; () for another cache."""
        return getattr(self.cache, "layers", None) or ()

    def first(self) -> Tensor:
        length = self.ids_rs.shape[1]
        chunk = min(self.chunk or length, length)
        logits_rv = self._read(0, chunk)
        if chunk < length and not holds_keys_only(self.cache):
            self.cache, chunk = None, length
            logits_rv = self._read(0, length)
        for begin in range(chunk, length, chunk):
            write_in_place(self.cache, self.capacity)
            logits_rv = self._read(begin, min(begin + chunk, length))
        self.rows = rows_of(logits_rv)
        return logits_rv

    def _read(self, begin: int, end: int) -> Tensor:
        """Return the logits [r, v] after these tokens of the prompts."""
        positions_rs = (self.mask_rs.cumsum(-1) - 1).clamp(min=0)
        return self._call(self.ids_rs[:, begin:end], self.mask_rs[:, :end], positions_rs[:, begin:end])

    def rows_after(self, logits_rv: Tensor) -> Tensor:
        """Return the logits of this rank's rows, with the whole vocabulary."""
        return self.rows.logits_here(logits_rv)

    def after(self, tokens_r1: Tensor) -> Tensor:
        write_in_place(self.cache, self.capacity)  # layers that are written in place stay
        self.mask_rs = torch.cat([self.mask_rs, self.mask_rs.new_ones(len(self.mask_rs), 1)], -1)
        positions_r1 = self.mask_rs.sum(-1, keepdim=True) - 1
        # a mask that is sharded over rows would take two collectives in each step, to ask if anything is masked
        mask_rs, positions_r1 = self.rows.replicated(self.mask_rs), self.rows.spread(positions_r1)
        return self._call(tokens_r1, mask_rs, positions_r1)

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [r, v] after the last token."""
        given: dict[str, Any] = {"input_ids": ids, self.cache_name: self.cache}
        if "use_cache" in self.names or any(p.kind is p.VAR_KEYWORD for p in self.names.values()):
            given["use_cache"] = True
        if "attention_mask" in self.names and not self.is_even:
            given["attention_mask"] = mask
        if "position_ids" in self.names:
            given["position_ids"] = positions
        if "logits_to_keep" in self.names:
            given["logits_to_keep"] = 1
        out = self.model(**given)
        self.cache = _cache_of(self.model, out, self.cache_name)
        return _logits_of(self.model, out, len(ids))[:, -1]


class EncoderDecoderCalls:
    """Calls of an encoder and decoder: the prompts go to the encoder, and the decoder begins with its start token."""

    rows: Rows

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device, new_tokens: int
    ) -> None:
        self.model, self.capacity = model, 1 + new_tokens
        self.ids_rs, self.mask_rs = _padded(prompts, device, left=False)
        self.encoded: Any = None
        self.cache: Any = None

    def first(self) -> Tensor:
        start = _decoder_start(self.model)
        begin_r1 = torch.full((len(self.ids_rs), 1), start, device=self.ids_rs.device)
        out = self.model(input_ids=self.ids_rs, attention_mask=self.mask_rs, decoder_input_ids=begin_r1, use_cache=True)
        logits_rv = _logits_of(self.model, out, len(self.ids_rs))[:, -1]
        self.encoded, self.cache = (out.encoder_last_hidden_state,), _cache_of(self.model, out, "past_key_values")
        write_in_place(self.cache, self.capacity)
        self.rows = rows_of(logits_rv)
        self.mask_rs = self.rows.replicated(self.mask_rs)
        return logits_rv

    def after(self, tokens_r1: Tensor) -> Tensor:
        out = self.model(
            encoder_outputs=self.encoded,
            attention_mask=self.mask_rs,
            decoder_input_ids=tokens_r1,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = _cache_of(self.model, out, "past_key_values")
        return _logits_of(self.model, out, len(tokens_r1))[:, -1]


def has_encoder(model: nn.Module) -> bool:
    """True for an encoder with a decoder, by its configuration."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _decoder_start(model: nn.Module) -> int:
    """Return the token that a decoder begins with. Raises GenerationError if the model does not name it."""
    for place in ("generation_config", "config"):
        start = getattr(getattr(model, place, None), "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    raise GenerationError(
        f"tokens of {type(model).__name__}",
        "no config.decoder_start_token_id",
        "the decoder of an encoder and decoder begins with this token",
        "set model.config.decoder_start_token_id",
    )


class WholeSequenceCalls:
    """Calls of a causal model without a cache, on all tokens so far. Prompts are padded on the right."""

    rows: Rows

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.model = model
        self.ids_rs, mask_rs = _padded(prompts, device, left=False)
        self.last_r1 = mask_rs.sum(-1, keepdim=True) - 1

    def first(self) -> Tensor:
        logits_rv = self._logits()
        self.rows = rows_of(logits_rv)
        self.ids_rs, self.last_r1 = self.rows.spread(self.ids_rs), self.rows.spread(self.last_r1)
        return logits_rv

    def after(self, tokens_r1: Tensor) -> Tensor:
        self.last_r1 = self.last_r1 + 1
        self.ids_rs = torch.cat([self.ids_rs, torch.zeros_like(tokens_r1)], -1).scatter(1, self.last_r1, tokens_r1)
        return self._logits()

    def _logits(self) -> Tensor:
        logits_rsv = _logits_of(self.model, self.model(self.ids_rs), *self.ids_rs.shape)
        return torch.take_along_dim(logits_rsv, self.last_r1[:, :, None], 1)[:, 0]


def _logits_of(model: nn.Module, out: Any, *sizes: int) -> Tensor:
    """Return the logits [r, s, v] of a result. Raises GenerationError if they do not begin with these sizes."""
    logits_rsv = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    is_tensor = isinstance(logits_rsv, Tensor)
    if is_tensor and logits_rsv.dim() == 3 and tuple(logits_rsv.shape[: len(sizes)]) == sizes:
        return logits_rsv
    raise GenerationError(
        f"tokens of {type(model).__name__}",
        f"a result of shape {tuple(logits_rsv.shape)}" if is_tensor else f"a {type(out).__name__} without logits",
        "the sampler needs logits [rows, tokens, vocabulary]: the result, or its attribute `logits`",
        "pass a model with a head for the vocabulary, whose forward returns the logits of all tokens",
    )


def _cache_of(model: nn.Module, out: Any, name: str) -> Any:
    """Return the cache of a result. Raises GenerationError if there is none."""
    cache = getattr(out, name, None)
    if cache is None:
        raise GenerationError(
            f"tokens of {type(model).__name__}",
            f"a result without {name}",
            f"forward takes {name}, and the next call needs those of the result",
            f"return {name} from forward; set config.is_decoder=True if the model of transformers has this option",
        )
    return cache
