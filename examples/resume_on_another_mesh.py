"""Five steps on all ranks, saved; then five more on half of them: `meshwright run --ranks 4`; its argument is a folder.

Parameters, states of the optimizer and the place in the data are read by ranks that never had them.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw

if len(sys.argv) != 2:
    sys.exit("usage: python resume_on_another_mesh.py FOLDER, where FOLDER is a new folder for checkpoints")
folder = Path(sys.argv[1])
everyone = mw.init_mesh(dp=-1)
half = mw.ProcessMesh(range((everyone.size + 1) // 2), ["tp"])
cuts = {"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()}
generator = torch.Generator().manual_seed(1)
samples = TensorDataset(torch.randn(60, 8, generator=generator), torch.randint(0, 4, (60,), generator=generator))


def run(mesh, config, end):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    mw.parallelize(model, optimizer, mesh, config)
    loader = DataLoader(samples, batch_sampler=mw.GlobalSampler(60, 6, seed=3))
    data = mw.shard_dataloader(loader, mesh, "dp" if "dp" in mesh.dim_names else None)
    latest = mw.latest_checkpoint(folder)
    step = mw.load_checkpoint(latest, model, optimizer, data=data).step if latest else 0
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step} loss {loss.item():.5f}")
        if step == end:
            break
    mw.save_checkpoint(folder, step, model, optimizer, data=data)


run(everyone, mw.Parallelism(zero=1), 5)
run(half, mw.Parallelism(cuts), 10)
