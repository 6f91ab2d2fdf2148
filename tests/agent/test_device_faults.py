"""A device that fails or hangs: its tensors go without values, everything else is there.

The device is a stand-in: CPU tensors take the way of an accelerator's, and its events fail.
"""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rankscope.agent.capture import Capture, blob
from rankscope.agent.recorder import API, FORWARD, INPUT, Recorder
from rankscope.agent.statistics import Wanted, device, device_figures, faults, tensors
from rankscope.agent.statistics.device import DeviceResults
from rankscope.collector.decode import decode

TEXT = "CUDA error: device-side assert triggered"
ERROR = torch.AcceleratorError(TEXT + "\nCompile with TORCH_USE_CUDA_DSA ...")
ON_DEVICE = torch.float16  # tensors of this dtype are on the device


def fail(*_):
    raise ERROR


def never():
    return SimpleNamespace(query=lambda: False)


class Stand:
    """Where the device fails: `stream` records its events, `fetch` brings results over."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        common = tensors.TensorStatistics._add_common
        anything = tensors.TensorStatistics._add_any

        def add_common(statistics, entry, tensor):
            return tensor.dtype is not ON_DEVICE and common(statistics, entry, tensor)

        def add_any(statistics, entry, tensor):
            if tensor.dtype is ON_DEVICE:
                return statistics._add_on_device(entry, tensor)
            return anything(statistics, entry, tensor)

        monkeypatch.setattr(tensors.TensorStatistics, "_add_common", add_common)
        monkeypatch.setattr(tensors.TensorStatistics, "_add_any", add_any)
        monkeypatch.setattr(tensors, "loop_over", lambda kernel: None)
        monkeypatch.setattr(
            DeviceResults, "_remember_stream", lambda results: self.remember(results)
        )
        self.record_event = lambda: SimpleNamespace(query=lambda: True)
        self.use(faults.Patience(0.3))

    def remember(self, results):
        results._streams[0] = SimpleNamespace(record_event=lambda: self.record_event())

    def use(self, patience):
        for module in (device, device_figures, blob):
            self.monkeypatch.setattr(module, "PATIENCE", patience)
        self.patience = patience

    def break_at(self, place):
        if place == "the event is recorded":
            self.record_event = fail
        elif place == "the event is waited for":
            self.record_event = lambda: SimpleNamespace(synchronize=fail)
        elif place == "the event is asked":
            self.record_event = lambda: SimpleNamespace(query=fail)
        elif place == "the results come over":
            self.monkeypatch.setattr(device, "fetch", fail)
        else:
            self.record_event = never


@pytest.fixture
def stand(monkeypatch):
    return Stand(monkeypatch)


def record(recorder, *values):
    name = recorder.name_id("Torch.add.0.forward")
    recorder.event(0, name, INPUT, API, FORWARD, parts=(("input_args", values),))


def rows(batch, sequence=1):
    payload = batch.SerializeToString()
    decoded = decode(payload, process="a" * 32, sequence=sequence, summary_mode="statistics")
    assert decoded.nodes.num_rows == 2
    return decoded.records.to_pylist()


HALF, SINGLE = torch.tensor([2.0, 4.0], dtype=ON_DEVICE), torch.tensor([1.0, 5.0])
PLACES = {
    "the event is recorded": f"AcceleratorError: {TEXT}",
    "the event is waited for": f"AcceleratorError: {TEXT}",
    "the event is asked": f"AcceleratorError: {TEXT}",
    "the results come over": f"AcceleratorError: {TEXT}",
    "never": "TimeoutError: the device did not answer for 0.3 s",
}


@pytest.mark.parametrize("wanted", [None, Wanted(samples=2, std=True)], ids=["usual", "details"])
@pytest.mark.parametrize("place", PLACES)
def test_records_of_a_broken_device_come_without_its_values(stand, place, wanted):
    recorder = Recorder(wanted=wanted)
    record(recorder, HALF, SINGLE)
    record(recorder, HALF, SINGLE)
    assert [row["max"] for row in rows(recorder.take())] == [4.0, 5.0] * 2
    stand.break_at(place)
    record(recorder, HALF, SINGLE)
    record(recorder, SINGLE, HALF)
    found = rows(recorder.take(), 2)
    assert [row["max"] for row in found] == [None, 5.0, 5.0, None]
    assert [row["shape"] for row in found] == [[2]] * 4
    notes = [json.loads(row["value"])["note"] for row in (found[0], found[3])]
    assert notes == [f"statistics failed: {PLACES[place]}"] * 2


def test_a_silent_device_is_waited_for_once(stand):
    recorder = Recorder()
    stand.break_at("never")
    took = []
    for _ in range(3):
        record(recorder, HALF)
        began = time.monotonic()
        assert recorder.take() is not None
        took.append(time.monotonic() - began)
    assert took[0] >= 0.3
    assert took[1] >= 0.1
    assert max(took[1:]) < 0.3
    stand.record_event = lambda: SimpleNamespace(query=lambda: True)  # it was only slow
    record(recorder, HALF)
    record(recorder, HALF)
    assert [row["max"] for row in rows(recorder.take())] == [4.0, 4.0]


def test_the_end_cuts_a_wait_short(stand):
    stand.use(faults.Patience(600.0))
    recorder = Recorder()
    stand.break_at("never")
    record(recorder, HALF, SINGLE)
    record(recorder, SINGLE, HALF)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(recorder.take()))
    thread.start()
    stand.patience.shorten(0.05)
    thread.join(20)
    assert [row["max"] for row in rows(taken[0])] == [None, 5.0, 5.0, None]


def test_tensors_that_a_broken_device_keeps_are_counted(stand, monkeypatch):
    capture = Capture(lambda name: True, 1 << 20, 1.0)
    capture.keeper = SimpleNamespace(refused=False, keep=lambda new: len(new))
    recorder = Recorder(capture=capture)
    one = torch.ones(4, dtype=torch.uint8)
    monkeypatch.setattr(type(capture._devices), "copy", lambda self, tensor: (one, None))
    fetched = capture._fetch(torch.ones(4))
    fetched.event = SimpleNamespace(query=fail)
    record(recorder, SINGLE)
    capture._leaves[:] = [fetched]
    batch = recorder.take()
    assert [(drop.step, drop.reason) for drop in batch.drops] == [
        (0, "tensor_device_failed: 1 tensors")
    ]
    assert not batch.blobs
    assert fetched.region is None  # its memory is free again
