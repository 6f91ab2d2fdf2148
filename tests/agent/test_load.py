"""config.json's "load": modules get the inputs of an earlier dump, bit by bit."""

import pytest
import torch

from rankscope.agent.errors import UsageError
from rankscope.agent.load import Loader
from rankscope.agent.load_setting import Load

A, B = "Module.a.Linear.forward.0", "Module.b.Pair.forward.1"


class Pair(torch.nn.Module):
    def forward(self, pair, *, scale):
        self.seen = (*pair, scale)
        return pair[0] * scale + pair[1]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), Pair()

    def forward(self, x):
        x = self.a(x)
        for _ in range(2):
            x = self.b([x, x], scale=x)
        return x


@pytest.fixture
def dump(tmp_path):
    """Writes tensors as a dump has them; returns its path."""

    def write(step=0, folder="proc7", **tensors):
        target = tmp_path / f"step{step}" / folder / "dump_tensor_data"
        target.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            torch.save(tensor, target / f"{name}.pt")
        return tmp_path

    return write


def loading(path, *modules, step=0, rank=None, steps=None, ranks=None):
    net = Net()
    load = Load(path, frozenset(modules), steps, ranks, False)
    loader = Loader(load, lambda: step, lambda: rank)
    named = [("Module.a.Linear", net.a), ("Module.b.Pair", net.b)]
    loader.start(named)
    loader.start(named)  # once more changes nothing
    return net, loader


def test_nested_and_keyword_inputs_of_the_named_call(dump):
    torch.manual_seed(0)
    new = {f"{B}.input.0.{i}": torch.randn(2, 3) for i in range(2)}
    new[f"{B}.kwargs.scale"] = torch.tensor([[0.0, -0.0, float("nan")]] * 2)
    net, loader = loading(dump(**new), B)
    net(torch.zeros(2, 3))
    for seen, wanted in zip(net.b.seen, new.values(), strict=True):
        assert torch.equal(seen.detach().view(torch.int32), wanted.view(torch.int32))
        assert seen.is_leaf
        assert seen.requires_grad  # as what it replaces
    loader.stop()
    assert not net.b._forward_pre_hooks


@pytest.mark.parametrize(
    ("steps", "ranks", "rank", "applies"),
    [
        (None, None, None, True),
        (frozenset({0}), None, None, True),
        (frozenset({1}), None, None, False),
        (None, frozenset({1}), 1, True),
        (None, frozenset({1}), 0, False),
        (None, frozenset({1}), None, False),
    ],
)
def test_steps_and_ranks(dump, steps, ranks, rank, applies):
    net, _ = loading(
        dump(**{f"{A}.input.0": torch.ones(2, 3)}), A, steps=steps, ranks=ranks, rank=rank
    )
    x = torch.zeros(2, 3)
    got = net.a(x)
    assert torch.equal(got, torch.nn.functional.linear(torch.ones(2, 3), *net.a.parameters())) == (
        applies
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, f"{A}.input.0.pt does not exist"),
        ({f"{A}.input.0": torch.ones(3, 3)}, r"holds torch.float32 \[3, 3\], the module is given"),
        ({f"{A}.input.0": torch.ones(2, 3).double()}, "holds torch.float64"),
        ({f"{A}.input.0": {"a": 1}}, "holds <class 'dict'>"),
    ],
)
def test_what_cannot_be_loaded_raises(dump, wrong, said):
    net, _ = loading(dump(**wrong), A)
    with pytest.raises(UsageError, match=said):
        net(torch.zeros(2, 3))


def test_whose_folder_is_read(dump):
    for rank in (0, 1):
        path = dump(folder=f"rank{rank}", **{f"{A}.input.0": torch.full((1, 3), float(rank))})
    net, _ = loading(path, A, rank=1)
    wanted = torch.nn.functional.linear(torch.ones(1, 3), *net.a.parameters())
    assert torch.equal(net.a(torch.zeros(1, 3)), wanted)
    for rank, said in ((None, "needs one rank or proc folder"), (2, "needs a folder rank2")):
        net, _ = loading(path, A, rank=rank)
        with pytest.raises(UsageError, match=f"{said}; there is rank0, rank1"):
            net.a(torch.zeros(1, 3))


def test_what_was_never_called_is_said_once(dump, caplog, monkeypatch):
    said = []
    monkeypatch.setattr("rankscope.agent.load.log", lambda level, text: said.append(text))
    _, loader = loading(dump(), "Module.a.Linear.forward.9")
    loader.end_step()
    loader.end_step()
    assert said == ["load: no module was called as Module.a.Linear.forward.9 in step 0"]
