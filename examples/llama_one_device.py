"""A small Llama on one device: what a training script looks like before anything is parallel."""

import torch

from meshwright.models import Llama, LlamaConfig

torch.manual_seed(0)
model = Llama(LlamaConfig(vocab=256, hidden=64, layers=4, heads=4, kv_heads=2, feed_forward=176))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
data = torch.randint(0, 256, (5, 16, 33), generator=torch.Generator().manual_seed(1))

for batch in data:
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
