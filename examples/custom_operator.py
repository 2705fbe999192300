"""An operator that torch has never heard of, with a rule of one line: `meshwright run --ranks 4`.

The rule says that rows are independent and that a row's channels belong together (`c!`): it is cut over rows without
communication, and whole along channels. Its backward pass needs no rule of its own for values to be right: an operator
without one runs on whole tensors.
"""

import torch
from torch import nn

import meshwright as mw


@torch.library.custom_op("examples::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Each row, bent to a length below `cap`."""
    length = x.norm(dim=-1, keepdim=True)
    return x * (cap * torch.tanh(length / cap) / length)


@softcap.register_fake
def _(x, cap):
    return torch.empty_like(x)


def gradient(ctx, grad):
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        length = x.norm(dim=-1, keepdim=True)
        out = x * (ctx.cap * torch.tanh(length / ctx.cap) / length)
        return torch.autograd.grad(out, x, grad)[0], None


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.cap = inputs[1]


softcap.register_autograd(gradient, setup_context=save)
mw.register_rule("examples.softcap", "... c! -> ... c!")

mesh = mw.init_mesh(dp=-1)
torch.manual_seed(0)
model = nn.Linear(8, 8)
mw.shard_layer(model, mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = mw.shard_tensor(torch.randn(12, 8), mesh, [mw.Shard(0)])

for _ in range(3):
    loss = softcap(model(x), 2.0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
