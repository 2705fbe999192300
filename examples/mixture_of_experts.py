"""A layer of experts whose rows travel to the ranks that hold their experts, and back: `meshwright run --ranks 4`.

The same ranks cut the batch and the experts. On one device `dispatch_experts` does the same without sending anything.
"""

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

EXPERTS, CHOICES, DIM, HIDDEN = 8, 2, 16, 32


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, indices = scores.topk(CHOICES)
        chosen = F.one_hot(indices, EXPERTS).sum(1).float().mean(0)
        balance = EXPERTS * (chosen * scores.mean(0)).sum()
        return mw.dispatch_experts(x, indices, weights, self.make, [self.up, self.down]), balance

    def make(self, rows, ends, up, down):
        return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


def cut(name, layer, mesh):
    for key, weight in list(layer.named_parameters(recurse=False)):
        if weight.dim() == 3:
            setattr(layer, key, mw.shard_tensor(weight, mesh, [mw.Shard(0)]))


mesh = mw.init_mesh(ep=-1)
torch.manual_seed(0)
model = mw.shard_layer(Experts(), mesh, cut)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

data = torch.randn(4, 50, DIM, generator=torch.Generator().manual_seed(1))

for tokens in mw.shard_dataloader(data, mesh, "ep"):
    out, balance = model(tokens)
    loss = (out - tokens).square().mean() + 0.01 * balance
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
