"""The platform of a made-up vendor, whose transport copies to the host and calls Gloo there."""

from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import ProcessGroupGloo

from meshwright import Platform
from tests.device.backend import register  # the vendor's package, which adds its devices to torch


class StagedTransport:
    def __init__(self, group):
        self.gloo, self.size = ProcessGroupGloo(group.store, group.place, group.size, group.limit), group.size

    def all_reduce(self, out, x, op):
        kind = ReduceOp.PRODUCT if op == "prod" else getattr(ReduceOp, op.upper())
        self._staged(out, x, lambda out, x: self.gloo.allreduce([out.copy_(x)], kind))

    def all_gather(self, out, x):
        self._staged(out, x, lambda out, x: self.gloo.allgather([list(out.view(self.size, x.numel()))], [x]))

    def reduce_scatter(self, out, x):
        self._staged(out, x, lambda out, x: self.gloo.reduce_scatter([out], [list(x.view(self.size, out.numel()))]))

    def all_to_all(self, out, x, arriving, leaving):
        self._staged(out, x, lambda out, x: self.gloo.alltoall_base(out, x, arriving, leaving))

    def broadcast(self, x, place):
        self._staged(x, x, lambda out, x: self.gloo.broadcast(out, place))

    def exchange(self, sends, receives):
        sent = [self.gloo.send([x.cpu()], place, tag) for place, tag, x in sends]
        for place, tag, x in receives:
            self._staged(x, x, lambda out, x, at=(place, tag): self.gloo.recv([out], *at))
        for work in sent:
            work.wait()

    def barrier(self):
        self.gloo.barrier().wait()

    def _staged(self, out, x, call):
        host = out.cpu()
        call(host, x.cpu()).wait()
        out.copy_(host)


register()
PLATFORM = Platform("mesh", transport=StagedTransport)
