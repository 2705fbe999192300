"""transformers, PEFT and Accelerate on a mesh give the files, losses and gathered values of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(240),
]

IDS = torch.arange(8).view(2, 4)
PLAN = {f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "k", "v", "up", "gate")} | {
    f"*.{name}_proj": mw.RowwiseParallel() for name in ("o", "down")
}
SETTINGS = {
    "dp x tp": (4, {"dp": 2, "tp": 2}, mw.Parallelism(PLAN)),
    "ZeRO-3": (2, {"dp": 2}, mw.Parallelism(zero=3)),
    "ZeRO-3 x tp": (4, {"dp": 2, "tp": 2}, mw.Parallelism(PLAN, zero=3)),
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=24,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def adapted() -> Any:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora)


def one_step(model: nn.Module, setting: str | None) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if setting is not None:
        _, axes, config = SETTINGS[setting]
        mw.parallelize(model, optimizer, mw.init_mesh(**axes), config)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return model


def files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [llama, adapted], ids=["transformers", "peft"])
def test_save_pretrained_writes_the_files_of_one_device(make: Any, setting: str, tmp_path: Path) -> None:
    one = one_step(make(), None)
    one.save_pretrained(tmp_path / "one")
    ranks = SETTINGS[setting][0]
    mw.simulate(lambda: one_step(make(), setting).save_pretrained(tmp_path / "mesh"), ranks)
    wanted, found = files(tmp_path / "one"), files(tmp_path / "mesh")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in (tmp_path / "mesh").iterdir()}
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "mesh") if make is adapted else None
    again = again or transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mesh")
    torch.testing.assert_close(again(IDS).logits, one(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("words", [20, 30])
def test_embeddings_are_resized(words: int) -> None:
    def resized(setting: str | None) -> tuple[Any, ...]:
        model = llama(tied=False)
        if setting is not None:
            _, axes, config = SETTINGS[setting]
            mw.parallelize(model, torch.optim.SGD(model.parameters()), mw.init_mesh(**axes), config)
        torch.manual_seed(3)
        model.resize_token_embeddings(words, mean_resizing=False)
        out = model(IDS, labels=IDS)
        return out.loss.item(), tuple(out.logits.shape)

    loss, shape = resized(None)
    for found in mw.simulate(lambda: resized("ZeRO-3 x tp"), 4):
        assert found == (pytest.approx(loss, rel=1e-5), shape)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        row = torch.randint(0, 24, (6,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": row, "labels": row}


def trained(setting: str | None, folder: Path, accumulated: int) -> tuple[float, float]:
    model = llama()
    if setting is not None:
        _, axes, config = SETTINGS[setting]
        mw.parallelize(model, None, mw.init_mesh(**axes), config)
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        max_steps=2,
        report_to=[],
        disable_tqdm=True,
        learning_rate=0.1,
        optim="sgd",
        logging_strategy="no",
        save_strategy="no",
        gradient_accumulation_steps=accumulated,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("setting", ["dp x tp", "ZeRO-3"])
def test_the_trainers_losses_are_those_of_one_device(setting: str, tmp_path: Path) -> None:
    wanted = trained(None, tmp_path, 2)
    for found in mw.simulate(lambda: trained(setting, tmp_path, 2), SETTINGS[setting][0]):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_accelerate_gathers_the_values_of_one_device() -> None:
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    whole = torch.arange(10.0).view(5, 2)

    def go() -> list[Tensor]:
        accelerator = accelerate.Accelerator(cpu=True)
        x = mw.shard_tensor(whole, mesh, [mw.Shard(0)])
        found = [
            accelerator.gather_for_metrics(x),
            accelerator.gather(x),
            accelerator.reduce(x, "sum"),
            accelerator.reduce(x, "mean"),
            accelerator.pad_across_processes(x),
        ]
        return [mw.unshard_dtensor(f) for f in found]

    for found in mw.simulate(go, 2):
        assert all(torch.equal(f, whole) for f in found)
