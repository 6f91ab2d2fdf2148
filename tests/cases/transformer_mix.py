"""A small decoder with attention and a dropout of 0, every risk level, at level mix."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"level": "mix", "risk_level": "ALL"}


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(x).split(d, dim=2)
        # One line: the three transposes share a stack.
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 2)
        wide = 4 * dim
        self.mlp = nn.Sequential(
            nn.Linear(dim, wide), nn.SiLU(), nn.Linear(wide, dim), nn.Dropout(0.0)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab=17, dim=8, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(1, 6, dim))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[:, : ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def run(debugger):
    torch.manual_seed(2)
    model = Decoder()
    ids = torch.randint(0, 17, (2, 7))
    debugger.start(model=model)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 17), ids[:, 1:].reshape(-1))
    loss.backward()
    debugger.stop()
    debugger.step()
