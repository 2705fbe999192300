"""Architectures of `transformers` and `diffusers` as data: a small configuration each, and the inputs of a batch.

No model has code of its own here. Each is built from its class, its configuration class and options, with random
weights, and is called with its inputs by name. Dropout stays as the configuration sets it. Only random choices in
Python (dropped layers, masked time steps) are off, because a program does not repeat them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, WORDS, CLASSES = 8, 12, 48, 6
"""Samples of a batch, words of a sample, words of a vocabulary, classes of images."""


@dataclass(frozen=True)
class Numbers:
    """Integers below `below`, with this shape for each sample."""

    below: int
    shape: tuple[int, ...] = ()

    def draw(self, g: torch.Generator) -> Tensor:
        return torch.randint(self.below, (ROWS, *self.shape), generator=g)


@dataclass(frozen=True)
class Noise:
    """Normally distributed numbers, with this shape for each sample."""

    shape: tuple[int, ...]

    def draw(self, g: torch.Generator) -> Tensor:
        return torch.randn(ROWS, *self.shape, generator=g)


@dataclass(frozen=True)
class Ones:
    """Ones, with this shape for each sample."""

    shape: tuple[int, ...]

    def draw(self, g: torch.Generator) -> Tensor:
        del g
        return torch.ones(ROWS, *self.shape)


class Task(nn.Module):
    """The loss of a model whose inputs have names; `wanted` is compared with the first output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.constants = model, names, dict(constants)

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        wanted = given.pop("wanted", None)
        out = self.model(**given, **self.constants)
        return out.loss if wanted is None else F.mse_loss(out[0], wanted)


@dataclass(frozen=True)
class Subject:
    """An architecture: class of the model, its options, the inputs of a batch, and other arguments of its calls."""

    family: str
    model: str
    options: Mapping[str, Any]
    batch: Mapping[str, Numbers | Noise | Ones]
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: str = ""
    library: str = "transformers"

    def make(self) -> Task:
        """Return the model with random weights, which depend on the seed only."""
        library = importlib.import_module(self.library)
        cls = getattr(library, self.model)
        made = cls(getattr(library, self.config)(**self.options)) if self.config else cls(**self.options)
        return Task(made.train(), tuple(self.batch), self.constants)

    def draw(self, seed: int) -> tuple[Tensor, ...]:
        """Return a batch, in the order of the inputs' names."""
        g = torch.Generator().manual_seed(seed)
        return tuple(part.draw(g) for part in self.batch.values())


TEXT = {"input_ids": Numbers(WORDS, (LENGTH,)), "labels": Numbers(WORDS, (LENGTH,))}
NO_CACHE = {"use_cache": False}


def text(family: str, model: str, config: str, **options: Any) -> Subject:
    """Return a language model whose loss compares with labels."""
    return Subject(family, model, {"vocab_size": WORDS, **options}, TEXT, NO_CACHE, config)


def encoder(model: str, config: str, **options: Any) -> Subject:
    return Subject("encoder", model, {"vocab_size": WORDS, **options}, TEXT, {}, config)


def vision(model: str, config: str, side: int = 16, **options: Any) -> Subject:
    """Return an image model whose loss compares with classes."""
    batch = {"pixel_values": Noise((3, side, side)), "labels": Numbers(CLASSES)}
    return Subject("vision", model, {"num_labels": CLASSES, **options}, batch, {}, config)


def seq2seq(model: str, config: str, **options: Any) -> Subject:
    """Return an encoder and a decoder of two layers each."""
    return text("encoder-decoder", model, config, **SEQ2SEQ, **options)


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options without the named ones."""
    return {key: value for key, value in options.items() if key not in names}


SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
PATCHES = {**{k: BERT[k] for k in BERT if k != "max_position_embeddings"}, "image_size": 16, "patch_size": 4}
