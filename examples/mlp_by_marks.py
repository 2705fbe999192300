"""An MLP made parallel by two marks: `meshwright run --ranks 4`. The losses are those of one device."""

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

mesh = mw.init_mesh(dp=-1, tp=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def mark(name, layer, mesh):
    if name == "0":
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(0)])
    if name == "2":
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(1)])


mw.shard_layer(model, mesh, mark)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
mw.shard_optimizer(optimizer)
data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(5)]

for x, y in mw.shard_dataloader(data, mesh, "dp"):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
