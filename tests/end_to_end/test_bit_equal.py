"""Recording changes no bit of losses, gradients, weights, buffers or random state."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, 2, dropout=0.1), nn.GRU(5, 5, bidirectional=True)
        self.cell = nn.LSTMCell(10, 6)

    def forward(self, x):
        y, (h, _) = self.lstm(x.view(-1, 4, 4))
        y, g = self.gru(y)
        state = None
        for step in y.unbind(1):
            state = self.cell(step, state)
        return state[0].sum(0) + h.sum() + g.mean()


class Reused(nn.Module):
    """One module three times, and a tensor given to it twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.mix = nn.Linear(16, 16), nn.Bilinear(16, 16, 16)

    def forward(self, x):
        y = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.layer(self.mix(y, y) + y)


class Recomputed(nn.Module):
    """Both ways of recomputing."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Half(), Half(), Half()

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        again = torch.is_grad_enabled()  # torch warns where there is nothing to recompute
        x = checkpoint(self.second, x, use_reentrant=True) if again else self.second(x)
        return self.third(x) + x


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.body(x)
        y += x
        return self.act(self.body(self.act(y)).add_(y))


class Experts(nn.Module):
    """Rows go to the two experts that a gate chooses, and come back by index."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out + x


class LowPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = Half()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.branches(x)[None]
            y = y + self.attention(y, y, y, need_weights=False)[0]
        return y.float()


class Keywords(nn.Module):
    """Gradients of keyword tensors, outputs in a mapping, and one that is a view."""

    def __init__(self):
        super().__init__()
        self.inner = _Keyword()

    def forward(self, x):
        out = self.inner(scale=x.exp(), x=x)
        return out["y"] * out["rest"][0] + out["y"].relu()


class _Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, *, x, scale):
        y, z = self.layer(x).chunk(2, -1)
        return {"y": y * scale, "rest": [z, None]}


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


NETS = [
    *(Residual, Transformer, Convolution, Recurrent, Reused, Recomputed, InPlace, Experts),
    *(LowPrecision, Keywords, Perceptron),
]
#: More of what a configuration may ask for.
TASKS = [
    {"statistics": {"summary_mode": "md5"}},
    {"task": "structure"},
    {"rankscope": {"samples": 8, "std": True, "object_names": True}},
]


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
@pytest.mark.parametrize("build", NETS)
def test_no_bit_changes(record, build, level):
    bare = train(build)
    recorded = record(level)
    pairs = enumerate(zip(bare, train(build, recorded), strict=True))
    assert [index for index, (a, b) in pairs if not torch.equal(a, b)] == []
    assert any("backward" in name for name in recorded.names(step=2))


@pytest.mark.parametrize("config", TASKS, ids=["md5", "structure", "more figures"])
@pytest.mark.parametrize("build", [Residual, Recurrent, Recomputed])
def test_no_bit_changes_by_what_is_recorded(record, build, config):
    recorded = record("mix", **config)
    pairs = zip(train(build), train(build, recorded), strict=True)
    assert [index for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("level", LEVELS)
def test_no_bit_changes_under_ddp(job, tmp_path, shared_daemon, level):
    script = Path(__file__).with_name("bit_equal_ddp.py")
    name = f"ddp-{level}"
    done = job(script, level, tmp_path, name=name, ranks=2, daemon=shared_daemon).finish()
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (report["different"], report["compared"] > 20) == ([], True)
        assert any("backward" in n for n in done.document(folder=f"rank{rank}", step=2)["data"])
