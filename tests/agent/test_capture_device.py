"""Copies off an accelerator, against a stand-in that notes what is asked of it.

No accelerator is needed: what counts is the order of the calls and that nothing waits in the loop.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from rankscope.agent.capture import device
from rankscope.agent.capture.blob import Blob
from rankscope.agent.capture.device import DeviceCopies


@dataclass(frozen=True)
class Device:
    type: str = "acc"


class StandIn:
    """An accelerator `torch.acc` whose streams only keep the order of calls in `log`."""

    def __init__(self, monkeypatch, has_streams=True):
        self.log, self.within = [], ["loop"]
        self.acc = SimpleNamespace()
        if has_streams:
            self.acc.Stream = lambda device: self.stream("side")
            self.acc.current_stream = lambda device: self.stream("loop")
            self.acc.stream = self.switch
        names = SimpleNamespace(uint8=torch.uint8, empty=self.empty, acc=self.acc)
        monkeypatch.setattr(device, "torch", names)
        monkeypatch.setattr(device, "dense", lambda tensor: tensor)

    def stream(self, name):
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            record_event=lambda: SimpleNamespace(synchronize=lambda: self.log.append("host waits")),
        )

    @contextmanager
    def switch(self, stream):
        self.within.append(stream.name)
        yield
        self.within.pop()

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        memory = torch.empty(shape, dtype=dtype)

        def copy_(flat, non_blocking=False):
            self.log.append(f"copy on {self.within[-1]}, {'queued' if non_blocking else 'waits'}")
            memory.copy_(flat.values)

        return SimpleNamespace(copy_=copy_, numpy=memory.numpy)

    def tensor(self, values):
        flat = SimpleNamespace(shape=values.shape, values=values)
        flat.record_stream = lambda stream: self.log.append(f"memory kept for {stream.name}")
        return SimpleNamespace(
            device=Device(),
            reshape=lambda size: SimpleNamespace(view=lambda dtype: flat),
        )


def test_nothing_waits_until_the_bytes_are_read(monkeypatch):
    acc, copies = StandIn(monkeypatch), DeviceCopies()
    values = torch.arange(12, dtype=torch.uint8)
    blob = Blob(torch.uint8, (12,), 12)
    blob.host, blob.event = copies.copy(acc.tensor(values))
    assert acc.log == [
        "side waits for loop",  # so that the copy sees what was computed before
        "copy on side, queued",
        "loop waits for side",  # so that what the loop does next to this memory comes after
        "memory kept for side",
    ]
    assert bytes(blob.view) == bytes(range(12))
    assert bytes(blob.view) == bytes(range(12))
    assert acc.log.count("host waits") == 1  # in the transport's thread, once a tensor


def test_many_tensors_share_one_stream_and_no_wait(monkeypatch):
    acc, copies = StandIn(monkeypatch), DeviceCopies()
    made = []
    stream = acc.acc.Stream
    acc.acc.Stream = lambda device: made.append(device) or stream(device)
    one = acc.tensor(torch.ones(4, dtype=torch.uint8))
    for _ in range(100):
        copies.copy(one)
    assert len(made) == 1
    assert "host waits" not in acc.log
    assert acc.log.count("copy on side, queued") == 100


def test_without_streams_the_copy_is_complete_at_once(monkeypatch):
    acc = StandIn(monkeypatch, has_streams=False)
    host, event = DeviceCopies().copy(acc.tensor(torch.ones(4, dtype=torch.uint8)))
    assert event is None
    assert bytes(host.numpy()) == b"\1" * 4
    assert acc.log == ["copy on loop, waits"]
