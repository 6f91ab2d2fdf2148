"""Recording changes no bit of losses, gradients, weights, buffers or random state."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

LEVELS = ("L0", "L1", "mix")


class Half(nn.Module):
    """A branch beside another: the sum of their gradients depends on the order of arrival."""

    def __init__(self):
        super().__init__()
        self.direct, self.deep = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x):
        return self.direct(x) + self.drop(self.deep(self.norm(x))) + x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList(Half() for _ in range(3))

    def forward(self, x):
        a = self.halves[0](x)
        b = self.halves[1](a)
        return self.halves[2](a * b) + a + b


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = (x.abs() * 10).long().clamp(0, 10)
        return self.head(self.layers(self.embed(tokens)))


class Convolution(nn.Module):
    """Trains and evaluates in turn, and changes an activation in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = F.relu_(self.norm(self.conv(x.view(x.shape[0], 1, 4, 4))))
        y = y + self.conv(x.view(x.shape[0], 1, 4, 4))
        y += 1
        return self.head(F.max_pool2d(y, 2).mean(dim=(2, 3)))


def train(build, recorded=None):
    torch.manual_seed(5)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    bits = []
    for step in range(3):
        if recorded is not None:
            recorded.start(net)
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        net.train(step != 0)
        with torch.no_grad():
            bits.append(net(x))
        net.train()
        if recorded is not None:
            recorded.stop()
            recorded.step()
        bits += [loss.detach(), *(p.grad.clone() for p in net.parameters())]
    return [*bits, *net.state_dict().values(), torch.random.get_rng_state()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("build", [Residual, Transformer, Convolution])
def test_no_bit_changes(record, build, level):
    bare = train(build)
    recorded = record(level)
    pairs = enumerate(zip(bare, train(build, recorded), strict=True))
    assert [index for index, (a, b) in pairs if not torch.equal(a, b)] == []
    assert any("backward" in name for name in recorded.names(step=2))


@pytest.mark.parametrize("level", LEVELS)
def test_no_bit_changes_under_ddp(job, tmp_path, shared_daemon, level):
    script = Path(__file__).with_name("bit_equal_ddp.py")
    name = f"ddp-{level}"
    done = job(script, level, tmp_path, name=name, ranks=2, daemon=shared_daemon).finish()
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (report["different"], report["compared"] > 20) == ([], True)
        assert any("backward" in n for n in done.document(folder=f"rank{rank}", step=2)["data"])
