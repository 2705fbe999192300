"""A model made on the meta device: each rank makes its own part, with the numbers of one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.engine import MaterializeError
from meshwright.tensor import local_parts


class Net(nn.Module):
    """Sizes that no mesh divides evenly, a tied weight, a frozen layer, buffers with and without their own values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(51, 35)
        self.attend = nn.MultiheadAttention(35, 5)
        self.conv, self.normed = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)
        self.frozen = nn.Linear(35, 35).requires_grad_(False)
        self.norm = nn.LayerNorm(35)
        self.head = nn.Linear(35, 51, bias=False)
        self.head.weight = self.words.weight


def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    for key, p in list(layer.named_parameters(recurse=False)):
        if p.dim() > 1 and not isinstance(p, mw.DistTensor):
            placements = [mw.Shard(i % p.dim()) for i in range(len(mesh.dim_names))]
            setattr(layer, key, mw.shard_tensor(p, mesh, placements))


def on_meta(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return make()


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: mw.unshard_dtensor(x.detach()).clone() for name, x in model.state_dict().items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name


MESHES: dict[str, tuple[Any, list[str]]] = {
    "cut": ([0, 1, 2], ["tp"]),
    "grid": ([[0, 1], [2, 3]], ["dp", "tp"]),
    "outside": ([1, 2], ["tp"]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_are_those_of_constructing_on_one_device(mesh: str) -> None:
    torch.manual_seed(5)
    one = Net()
    after = torch.rand(1)

    def go() -> Any:
        model = mw.shard_layer(on_meta(), mw.ProcessMesh(*MESHES[mesh]), cut)
        torch.manual_seed(5)
        assert mw.materialize(model) is model
        assert model.head.weight is model.words.weight
        return numbers(model), torch.rand(1), [p.requires_grad for p in model.parameters()]

    for found, drawn, graded in mw.simulate(go, 4 if mesh == "grid" else 3):
        same(found, numbers(one))
        assert torch.equal(drawn, after)
        assert graded == [p.requires_grad for p in one.parameters()]


def test_one_device_and_other_sources_of_randomness() -> None:
    def go(parallel: bool) -> Any:
        model = mw.shard_layer(on_meta(), mw.ProcessMesh([0, 1], ["tp"]), cut if parallel else None)
        torch.manual_seed(5)
        with mw.random_source("counter"):
            return numbers(mw.materialize(model))

    for cut_found, found in zip(mw.simulate(go, 2, True), mw.simulate(go, 2, False), strict=True):
        same(cut_found, found)
    torch.manual_seed(5)
    one = Net()
    torch.manual_seed(5)
    same(numbers(mw.materialize(on_meta())), numbers(one))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_it_trains_like_one_device_with_an_existing_optimizer(zero: int) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 3))

    def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = list[float]()
        for _ in range(3):
            loss = net(torch.ones(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    one = made()
    wanted = trained(one, torch.optim.AdamW(one.parameters(), lr=0.01))

    def go() -> list[float]:
        net = on_meta(made)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        plan = {"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()}
        mw.parallelize(net, optimizer, mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), mw.Parallelism(plan, zero=zero))
        torch.manual_seed(0)
        mw.materialize(net)
        assert [id(p) for p in net.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        return trained(net, optimizer)

    for found in mw.simulate(go, 4):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_stages_of_a_pipeline() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3))

    torch.manual_seed(0)
    one = made()

    def go() -> dict[str, Tensor]:
        net = mw.split_pipeline(on_meta(made), mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"]))
        torch.manual_seed(0)
        return numbers(mw.materialize(net))

    for found in mw.simulate(go, 4):
        same(found, numbers(one))


class Peak(TorchDispatchMode):
    """A mode that measures the peak of the bytes held by operators of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in (out,) if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ():
            if isinstance(t, Tensor) and t.device.type != "meta" and id(t.untyped_storage()) not in self.known:
                self.took(t.untyped_storage())
        return out

    def took(self, storage: Any) -> None:
        nbytes = storage.nbytes()
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.known[id(storage)] = weakref.finalize(storage, self.gone, id(storage), nbytes)

    def gone(self, name: int, nbytes: int) -> None:
        self.now -= nbytes
        del self.known[name]


@pytest.mark.parametrize(("source", "wholes"), [("torch", 1.0), ("rank", 0.5)])
def test_a_rank_holds_its_share_and_one_parameter(source: Any, wholes: float) -> None:
    """16 weights, of which a rank has a quarter each: the whole model is 4 times its part."""
    one = 256 * 256 * 4

    def go() -> tuple[int, int]:
        layers = on_meta(lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))))
        net = mw.shard_layer(layers, mw.ProcessMesh([0, 1, 2, 3], ["tp"]), cut)
        with mw.random_source(source), Peak() as peak:
            mw.materialize(net)
        with local_parts():
            return peak.most, sum(p.numel() * 4 for p in net.parameters())

    for most, share in mw.simulate(go, 4):
        assert share == 16 * one // 4
        assert most <= share + wholes * 1.5 * one, (most - share) / one


class Scaled(nn.Module):
    """A module with a parameter that `reset_parameters` does not initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))


def test_parameters_without_initial_values_are_named() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.ones_(module.gain)

    with pytest.raises(MaterializeError, match="gain"):
        mw.materialize(on_meta(lambda: nn.Sequential(Scaled())))
    found = mw.materialize(on_meta(lambda: nn.Sequential(Scaled())), init=fill)
    assert torch.equal(found[0].gain, torch.ones(4))

    class Loose(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.mask = torch.ones(2)

    with pytest.raises(MaterializeError, match="mask"):
        mw.materialize(on_meta(Loose))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(4))

    with pytest.raises(MaterializeError, match="places"):
        mw.materialize(on_meta(Whole))


def test_tensors_with_values_keep_them() -> None:
    net = nn.Sequential(nn.Linear(3, 3), on_meta(lambda: nn.Linear(3, 3)))
    before = net[0].weight.detach().clone()
    mw.materialize(net)
    assert torch.equal(net[0].weight, before)
    assert net[1].weight.device.type == "cpu"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "vit", "mixtral"])
def test_models_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 48}),
        "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        "bert": ("BertForSequenceClassification", {"intermediate_size": 48}),
        "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}),
        "vit": ("ViTForImageClassification", {"intermediate_size": 48, "image_size": 16, "patch_size": 8}),
        "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4}),
    }
    name, own = small[kind]
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    cls = getattr(transformers, name)
    sizes = {} if kind in ("gpt2", "t5") else sizes
    config = cls.config_class(**{"vocab_size": 64, **sizes, **own})
    torch.manual_seed(3)
    if kind in ("gpt2", "vit"):  # constructors that do not draw in reset_parameters
        one = mw.materialize(on_meta(lambda: cls(config)))
    else:
        one = cls(config)
    buffers = {k: x.clone() for k, x in one.named_buffers()}

    def go() -> Any:
        net = on_meta(lambda: cls(config))
        mw.shard_layer(net, mw.ProcessMesh([0, 1], ["tp"]), cut)
        torch.manual_seed(3)
        mw.materialize(net)
        return numbers(net), {k: mw.unshard_dtensor(x).clone() for k, x in net.named_buffers()}

    for found, there in mw.simulate(go, 2):
        same(found, numbers(one))
        same(there, buffers)
