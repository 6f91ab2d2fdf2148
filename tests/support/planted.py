"""A small decoder, faults that can be planted in it, and recordings of it as sides to compare."""

import pyarrow as pa
import torch
from recorded import Recorded
from torch import nn
from torch.nn import functional as F

from rankscope.collector.analysis import sides


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.masked_row = heads, None
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        layers = (self.q, self.k, self.v)
        q, k, v = (layer(x).view(b, t, self.heads, -1).transpose(1, 2) for layer in layers)
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        if self.masked_row is not None:
            mask[self.masked_row] = True
        scores = torch.matmul(q, k.transpose(-2, -1)).masked_fill(mask, float("-inf"))
        return self.o(torch.matmul(F.softmax(scores, -1), v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 2)
        self.up, self.act, self.down = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        self.drop, self.residual = nn.Dropout(0.1), True

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y = self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return x + y if self.residual else y


class Decoder(nn.Module):
    def __init__(self, vocab=31, dim=16, layers=3):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class InBfloat16(nn.Linear):
    def forward(self, x):
        low = (value.bfloat16() for value in (x, self.weight, self.bias))
        return F.linear(*low).float()


def transposed(model):
    layer = model.layers[1].attn.o
    layer.weight.data = layer.weight.data.t().contiguous()


def dropout_left_on(model):
    model.layers[1].drop.train()


def wrong_eps(model):
    model.layers[2].norm1.eps = 1e-4


def bfloat16(model):
    model.layers[1].up.__class__ = InBfloat16


def masked_row(model):
    model.layers[1].attn.masked_row = 2


def wrong_init(model):
    model.layers[2].down.weight.data *= 1.1


def no_residual(model):
    model.layers[1].residual = False


#: fault -> (record at L1 and mix, record at L0)
PLANTED = {
    transposed: ("Functional.linear.9.forward", "Module.layers.1.attn.o.Linear.forward.0"),
    dropout_left_on: ("Functional.dropout.1.forward", "Module.layers.1.drop.Dropout.forward.0"),
    wrong_eps: ("Functional.layer_norm.4.forward", "Module.layers.2.norm1.LayerNorm.forward.0"),
    bfloat16: ("Functional.linear.10.forward", "Module.layers.1.up.Linear.forward.0"),
    masked_row: ("Functional.softmax.1.forward", "Module.layers.1.attn.Attention.forward.0"),
    wrong_init: ("Functional.linear.17.forward", "Module.layers.2.down.Linear.forward.0"),
    no_residual: ("Tensor.__add__.3.forward", "Module.layers.1.Layer.forward.0"),
}  # fmt: skip


def side(monkeypatch, seed, level, fault=None, label_smoothing=0.0, data_seed=None, **config):
    """Two steps of training, recorded in this process."""
    torch.manual_seed(seed)
    model = Decoder().eval()
    if fault is not None:
        fault(model)
    recorded = Recorded(monkeypatch, level, model=model, risk_level="FOCUS", **config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1000 + seed if data_seed is None else data_seed)
    for _ in range(2):
        ids = torch.randint(0, 31, (3, 9))
        with recorded:
            logits = model(ids[:, :-1]).reshape(-1, 31)
            target = ids[:, 1:].reshape(-1)
            F.cross_entropy(logits, target, label_smoothing=label_smoothing).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorded.step()
    return side_of(recorded)


def side_of(recorded):
    recorded.end()
    _, records, _, header = recorded._tables
    table = records.append_column("place", pa.array([0] * records.num_rows, pa.int64()))
    known = {0: {"versions": "{}", "device": "cpu"}}
    return sides.of_table(table, header.task, header.summary_mode, known)
