"""TRL's trainers on a mesh give the losses and rewards of one device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

WORDS = 40
PLAN = {f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "k", "v", "up", "gate")} | {
    f"*.{name}_proj": mw.RowwiseParallel() for name in ("o", "down")
}
SETTINGS: dict[str, tuple[dict[str, int], mw.Parallelism]] = {
    "dp x tp": ({"dp": 2, "tp": 2}, mw.Parallelism(PLAN)),
    "ZeRO-3": ({"dp": 2}, mw.Parallelism(zero=3)),
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def llama(setting: str | None) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if setting is not None:
        axes, config = SETTINGS[setting]
        mw.parallelize(model, None, mw.init_mesh(**axes), config)
    return model


def tokenizer() -> Any:
    words = {name: at for at, name in enumerate(["<pad>", "<eos>", "<bos>", *(f"w{n}" for n in range(3, WORDS))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def text(seed: int, length: int) -> str:
    numbers = torch.randint(3, WORDS, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in numbers.tolist())


def options(folder: Path, rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": rows, "learning_rate": 1e-2,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
    }  # fmt: skip


def sft(setting: str | None, folder: Path) -> Any:
    rows = [{"text": text(at, 5 + at % 3)} for at in range(8)]
    config = trl.SFTConfig(**options(folder, 4))
    return trl.SFTTrainer(
        llama(setting), config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer()
    )


def dpo(setting: str | None, folder: Path) -> Any:
    rows = [
        {"prompt": text(at, 4), "chosen": " " + text(at + 10, 4), "rejected": " " + text(at + 20, 3 + at % 3)}
        for at in range(8)
    ]
    config = trl.DPOConfig(**options(folder, 4))
    return trl.DPOTrainer(
        llama(setting), llama(setting), config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )  # fmt: skip


def different_words(completions: list[str], **columns: object) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(setting: str | None, folder: Path) -> Any:
    rows = [{"prompt": text(at, 4)} for at in range(8)]
    config = trl.GRPOConfig(**options(folder, 8), num_generations=4, max_completion_length=6)
    return trl.GRPOTrainer(
        llama(setting), different_words, config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )  # fmt: skip


def history(make: Callable[[str | None, Path], Any], setting: str | None, folder: Path) -> list[tuple[float, float]]:
    """Return the loss of each step, and the reward if there is one."""
    trainer = make(setting, folder)
    trainer.train()
    return [(row["loss"], row.get("reward", 0.0)) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(("make", "setting"), [(sft, "dp x tp"), (dpo, "ZeRO-3"), (grpo, "dp x tp")])
def test_a_trainer_has_the_losses_and_rewards_of_one_device(make: Any, setting: str, tmp_path: Path) -> None:
    wanted = history(make, None, tmp_path / "one")
    ranks = prod(SETTINGS[setting][0].values())
    for found in mw.simulate(lambda: history(make, setting, tmp_path / "mesh"), ranks):
        assert len(found) == 2
        for row, other in zip(found, wanted, strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
