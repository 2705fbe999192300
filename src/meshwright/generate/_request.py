"""The arguments of a call for tokens, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from meshwright.engine import unshard_dtensor

from ._errors import GenerationError

Prompt = tuple[int, ...]
Prompts = Sequence[Sequence[int] | Tensor] | Tensor
"""Prompts: a sequence of token ids for each, or one tensor [prompts, length]."""

_IDS, _LIST = "pass tokenizer(texts).input_ids", "pass a list of prompts, such as [tokenizer(text).input_ids]"
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for tokens: token ids of each prompt without padding, and the options of `Sampler.generate`.

    Raises:
        GenerationError: there is no prompt, an empty one, or an option with an invalid value.
    """

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: tuple[int, ...]
    n: int
    seed: int
    prefill_chunk_size: int | None = None
    page_size: int | None = None
    cache_positions: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise _invalid("prompts", "no prompt", "there is nothing to continue", "pass at least one prompt")
        for at, prompt in enumerate(self.prompts):
            if not prompt:
                raise _invalid(
                    f"prompt {at}",
                    "no token",
                    "the first new token follows from the tokens before it",
                    "begin the prompt with a token such as tokenizer.bos_token_id, or leave the prompt out",
                )
            for token in prompt:
                check_whole(f"prompt {at}", token, 0)
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("n", self.n, 1)
        check_whole("seed", self.seed, None)
        for name in ("top_k", "prefill_chunk_size", "page_size", "cache_positions"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        _check_real("temperature", self.temperature, 0.0, None)
        if self.top_p is not None:
            _check_real("top_p", self.top_p, 0.0, 1.0)
            if self.top_p == 0:
                raise _invalid("top_p", "0", "no token would be left", "pass temperature=0 for the most probable token")
        for token in self.stop:
            check_whole("stop", token, 0)

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The prompt and the sample of each row of the batch: the `n` samples of a prompt follow each other."""
        return tuple((prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.n))

    @property
    def is_paged(self) -> bool:
        """True if the keys and values of rows are in pages."""
        return self.page_size is not None or self.cache_positions is not None

    @property
    def positions(self) -> int:
        """Upper bound of the positions with keys of the longest row: the last new token needs none."""
        return max(map(len, self.prompts)) + self.max_new_tokens - 1

    def refuse_pages(self, found: str) -> None:
        """Raise GenerationError if the request is for pages. `found` says why no decode step fits."""
        options = {"page_size": self.page_size, "cache_positions": self.cache_positions}
        given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        if given:
            why = "only decode steps read and write pages, and no decode step fits"
            raise _invalid(given, found, why, "leave page_size and cache_positions out")

    def check_prompts(self, vocabulary: int) -> None:
        """Raise GenerationError for a token of a prompt that a vocabulary of this size does not have."""
        for at, prompt in enumerate(self.prompts):
            _check_tokens(f"prompt {at}", prompt, vocabulary)

    def check_stop(self, vocabulary: int) -> None:
        """Raise GenerationError for a token of `stop` that a vocabulary of this size does not have."""
        _check_tokens("stop", self.stop, vocabulary)

    def check_capacity(self, positions: int, has_encoder: bool) -> None:
        """Raise GenerationError if a row gets more tokens than the model has positions.

        With an encoder, the prompt takes positions of the encoder, and the decoder has one start token before new ones.
        """
        longest = max(map(len, self.prompts))
        most = positions - (1 if has_encoder else longest)
        if longest > positions or self.max_new_tokens > most:
            fits_in_part = longest <= positions and most > 0
            raise _invalid(
                "prompts and max_new_tokens",
                f"a prompt of {longest} tokens and {self.max_new_tokens} new ones",
                f"the model has {positions} positions",
                f"pass max_new_tokens={most} or less" if fits_in_part else "shorten the prompt",
            )


def request_of(
    prompts: Prompts, mask: Tensor | None, stop: int | Iterable[int] | None, **options: Any
) -> GenerationRequest:
    """Return the request for prompts in any form; `mask` is False or 0 for padding, on either side.

    Raises:
        GenerationError: the prompts are no token ids, or an option is invalid.
    """
    return GenerationRequest(prompts=_token_ids(prompts, mask), stop=_stop_ids(stop), **options)


def _token_ids(prompts: Any, mask: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompts, str) or not isinstance(prompts, (Sequence, Tensor)):
        raise _no_ids(type(prompts).__name__, _fix_of(prompts))
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise _no_ids(f"a tensor of {prompts.dim()} dims", _LIST if prompts.dim() == 1 else _IDS)
    rows = [_one_prompt(p) for p in (unshard_dtensor(prompts) if isinstance(prompts, Tensor) else prompts)]
    return tuple(rows) if mask is None else _without_padding(rows, mask)


def _without_padding(rows: Sequence[tuple[int, ...]], mask: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of prompts that a mask shows. Raises GenerationError for a mask of another shape."""
    is_table = isinstance(mask, Tensor) and mask.dim() == 2
    seen = unshard_dtensor(mask).bool().tolist() if is_table else []
    if [len(row) for row in rows] != [len(row) for row in seen]:
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        fix = "pass a tensor with one flag for each token"
        raise _invalid("mask", found, "it differs from the shape of the prompts", fix)
    return tuple(_unpadded(row, flags) for row, flags in zip(rows, seen, strict=True))


def _unpadded(tokens: Sequence[int], flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(token for token, flag in zip(tokens, flags, strict=True) if flag)


def _one_prompt(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.dtype not in _INTEGERS:
            raise _no_ids(f"a {prompt.dtype} tensor of {prompt.dim()} dims")
        return tuple(unshard_dtensor(prompt).tolist())
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise _no_ids(type(prompt).__name__, _LIST if _is_whole(prompt) else _fix_of(prompt))
    tokens: Sequence[Any] = prompt
    for token in tokens:
        if not _is_whole(token):
            raise _no_ids(f"{token!r} among the tokens")
    return tuple(int(token) for token in tokens)


def _stop_ids(stop: int | Iterable[int] | None) -> tuple[int, ...]:
    if stop is None:
        return ()
    given: tuple[Any, ...] = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    for token in given:
        if not _is_whole(token):
            raise _invalid(
                "stop", repr(token), "a row ends with a token id", "pass ids, such as tokenizer.eos_token_id"
            )
    return tuple(int(token) for token in given)


def _no_ids(found: str, fix: str = _IDS) -> GenerationError:
    return _invalid("prompts", found, "a prompt is a sequence of token ids", fix)


def _fix_of(prompts: Any) -> str:
    """Return the fix for prompts, or one prompt, of a wrong type."""
    if isinstance(prompts, Mapping):
        return 'pass encoded["input_ids"], and mask=encoded["attention_mask"] if they are padded'
    return "pass prompts.tolist()" if hasattr(prompts, "tolist") else _IDS


def _is_whole(value: object) -> bool:
    """True for whole numbers, also those of NumPy; a bool is no number."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def check_whole(name: str, value: Any, least: int | None) -> None:
    """Raise GenerationError if the argument is no whole number, or one below `least`."""
    if not _is_whole(value) or (least is not None and value < least):
        above = "a whole number" if least is None else f"a whole number of at least {least}"
        fix = f"pass {name}=8" if name.isidentifier() and name != "stop" else "pass ids of the model's own tokenizer"
        raise _invalid(name, repr(value), f"{name} must be {above}", fix)


def _check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    for token in tokens:
        if token >= vocabulary:
            raise _invalid(
                name,
                f"the token {token}",
                f"the vocabulary of the model has the tokens 0 to {vocabulary - 1}",
                "pass ids of the model's own tokenizer",
            )


def _check_real(name: str, value: object, least: float, most: float | None) -> None:
    if not isinstance(value, bool) and isinstance(value, Real) and isfinite(value):
        if least <= float(value) and (most is None or float(value) <= most):
            return
    most_text = "" if most is None else f" and at most {most:g}"
    raise _invalid(name, repr(value), f"{name} must be a number of at least {least:g}{most_text}", f"pass {name}=1.0")


def _invalid(name: str, found: str, why: str, fix: str) -> GenerationError:
    return GenerationError(f"tokens with {name}" if name != "prompts" else "tokens after prompts", found, why, fix)
