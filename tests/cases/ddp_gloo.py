"""Two ranks: DDP, collectives with and without waiting, point to point."""

import torch
import torch.distributed as dist
from torch import nn

CONFIG = {"level": "mix"}
RANKS = 2


def collectives(t):
    dist.all_reduce(t)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.all_gather([torch.zeros(4) for _ in range(2)], t)
    dist.broadcast(t, src=1)
    dist.all_gather_into_tensor(torch.zeros(8), t)


def point_to_point(t, rank):
    """Twice to the same peer: first without waiting, then waiting."""
    if rank == 0:
        dist.isend(t + 1, dst=1).wait()
        dist.send(t * 3, dst=1)
    else:
        buffer = torch.zeros(4)
        dist.irecv(buffer, src=0).wait()
        dist.recv(buffer, src=0)


def run(debugger):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net = nn.parallel.DistributedDataParallel(layers)
    torch.manual_seed(100 + rank)
    debugger.start(model=net)
    net(torch.randn(3, 4)).sum().backward()
    t = torch.full((4,), float(rank + 1))
    collectives(t)
    point_to_point(t, rank)
    dist.reduce(t, dst=0)
    dist.barrier()
    debugger.stop()
    debugger.step()
    dist.destroy_process_group()
