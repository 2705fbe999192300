"""A network that solves the heat equation, with second derivatives in its loss: `meshwright run --ranks 4`.

u_t = u_xx on [0, 1] × [0, 1], u(0, x) = sin(πx), u(t, 0) = u(t, 1) = 0. The points are cut over "dp", the hidden layers
over "tp"; derivatives of derivatives go through the same layouts as everything else.
"""

import math

import torch
from torch import nn

import meshwright as mw

mesh = mw.init_mesh(dp=-1, tp=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-6)
plan = {"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()}
mw.parallelize(net, optimizer, mesh, mw.Parallelism(plan))


def derivative(u, x):
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def residual(points):
    """u_t - u_xx at points [n, (t, x)]."""
    points = points.detach().requires_grad_()
    first = derivative(net(points), points)
    second = derivative(first[:, 1:], points)
    return first[:, :1] - second[:, 1:]


inside = torch.rand(64, 2)
begin = torch.stack([torch.zeros(16), torch.rand(16)], 1)
edges = torch.cat([begin, torch.stack([torch.rand(16), torch.randint(2, (16,)).float()], 1)])
values = torch.where(edges[:, :1] == 0, torch.sin(math.pi * edges[:, 1:]), 0.0)
inside, edges, values = (mw.shard_tensor(x, mesh, [mw.Shard(0), mw.Replicate()]) for x in (inside, edges, values))

for _ in range(10):
    loss = residual(inside).square().mean() + (net(edges) - values).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
