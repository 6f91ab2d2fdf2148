"""Parts of torch itself that training scripts are made of."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def train(watch, model, loss, steps=2, optimizer=None):
    """Steps that minimise `loss()`; the losses, gradients and weights are kept."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        with watch(model):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
        watch.keep(loss=value, model=model)


def transformer(watch):
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.1, batch_first=True)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    def loss():
        return F.mse_loss(model(source, target, tgt_mask=mask, tgt_is_causal=True), target)

    train(watch, model, loss)


def lstm(watch):
    """Packed sequences of several lengths, both directions."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, dropout=0.1)
            self.head = nn.Linear(12, 4)

        def forward(self, ids, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths, batch_first=True, enforce_sorted=False
            )
            found, _ = self.lstm(packed)
            return self.head(nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0])

    # Sorting the lengths begins with torch.empty: give that a known content.
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Tagger()
    ids, lengths = torch.randint(0, 20, (3, 6)), torch.tensor([6, 2, 4])
    train(watch, model, lambda: model(ids, lengths).square().mean())


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 6) * index
        return torch.sin(x), torch.relu(x).sum()


def data_loader(watch):
    """Workers are forked while the debugger exists, and compute with torch themselves."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        loader = DataLoader(
            Squares(), batch_size=6, num_workers=2, shuffle=True, multiprocessing_context="fork"
        )
        for inputs, wanted in loader:
            with watch(model):
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs).squeeze(-1), wanted)
                loss.backward()
                optimizer.step()
            watch.keep(loss=loss, model=model)


def ddp_accumulation(watch):
    """Gradients of two batches are added, and reduced with the second."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        with watch(model):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(4, 6)).square().mean().backward()
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
        watch.keep(total=total, model=model)
    dist.destroy_process_group()


def fsdp2(watch):
    """Every layer sharded, and the whole; gradients clipped over the shards."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        with watch(model):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 5, 16)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        watch.keep(loss=loss, model=model)
    dist.destroy_process_group()


RANKS = {"ddp_accumulation": 2, "fsdp2": 2}
