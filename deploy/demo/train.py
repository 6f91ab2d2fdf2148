"""A small GPT learns English, character by character, on two ranks: the job that the demo watches.

    torchrun --standalone --nproc_per_node 2 train.py [--config config.json] [--report report.json]

The text is the Python language reference that comes with Python. Its windows are dealt to the ranks
like cards, and they do not come out even: the last batch of each epoch is smaller on rank 1. DDP
averages gradients over ranks, not over rows, so those rows weigh more. No error tells of it.
"""

import argparse
import gc
import json
import pydoc_data.topics
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent import PrecisionDebugger, seed_all

STEPS = 20
CHARACTERS = 20_050
WINDOW = 64
BATCH = 16
WIDTH = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.zeros(WINDOW, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.token(tokens) + self.position)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(text: str, rank: int, world_size: int) -> tuple[int, list[torch.Tensor]]:
    """Size of the vocabulary, and this rank's batches of one epoch: (rows, WINDOW + 1) numbers."""
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    windows = numbers.unfold(0, WINDOW + 1, WINDOW)
    return len(letters), list(windows[rank::world_size].split(BATCH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="config.json of the debugger; without it nobody watches")
    parser.add_argument("--report", help="file for exact losses and gradients, one per rank")
    options = parser.parse_args()
    debugger = PrecisionDebugger(options.config) if options.config else None
    seed_all(1234)
    dist.init_process_group("gloo")
    losses, model = train(debugger)
    if options.report:
        write_report(f"{options.report}.{dist.get_rank()}", losses, model)
    # DDP goes before its process group: torch can deadlock when it frees the last reference to one.
    del model
    gc.collect()
    dist.destroy_process_group()


def train(debugger: PrecisionDebugger | None) -> tuple[list[float], nn.Module]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = "\n".join(pydoc_data.topics.topics.values())[:CHARACTERS]
    vocabulary, epoch = batches(text, rank, world_size)
    model = DistributedDataParallel(GPT(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        batch = epoch[step % len(epoch)]
        if debugger:
            debugger.start(model)
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if debugger:
            debugger.stop()
            debugger.step()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step:2d}  loss {losses[-1]:.4f}", flush=True)
    return losses, model


def write_report(path: str, losses: list[float], model: nn.Module) -> None:
    """Losses to the last bit, and a checksum of each last gradient and final weight."""
    tensors = {name: (p.detach(), p.grad) for name, p in model.named_parameters()}
    sums = {
        name: [zlib.crc32(t.numpy().tobytes()) for t in pair if t is not None]
        for name, pair in tensors.items()
    }
    with open(path, "w") as file:
        json.dump({"losses": [loss.hex() for loss in losses], "tensors": sums}, file, indent=1)


if __name__ == "__main__":
    main()
