"""What the recorder keeps between batches."""

import json

import numpy as np
import pytest
import torch

from rankscope.agent import outline
from rankscope.agent import recorder as rec
from rankscope.agent.recorder import Recorder
from rankscope.v1 import collector_pb2 as pb


def record(recorder, *arguments):
    name = recorder.name_id("Functional.f.0.forward")
    parts = (("input_args", arguments),)
    recorder.event(0, name, rec.INPUT, rec.API, rec.FORWARD, parts=parts)


def shown(batch):
    """(shapes, values) of each event of a batch."""
    columns = batch.columns
    outlines = [pb.Outline.FromString(payload) for payload in columns.outlines]
    values = ["", *columns.values]
    numbers = iter(np.frombuffer(columns.leaf_value, "<u4").tolist())
    result = []
    for index in np.frombuffer(columns.event_outline, "<u4").tolist():
        leaves = outlines[index - 1].leaves
        texts = [values[next(numbers)] for _ in leaves]
        result.append(
            ([list(x.shape) for x in leaves if x.form == pb.TENSOR], [t for t in texts if t])
        )
    return result


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(outline, "MOST_KNOWN", 20)


def test_shapes_and_numbers_that_never_repeat_are_forgotten(small):
    recorder = Recorder()
    for number in range(200):
        record(recorder, torch.zeros(number + 1), number + 0.5)
        (seen,) = shown(recorder.take())
        assert seen == ([[number + 1]], [json.dumps(number + 0.5)])
        assert len(recorder.outlines.payloads) <= 22
        assert len(recorder.outlines.texts) <= 22


def test_an_event_that_is_scanned_while_they_are_forgotten_is_whole(small):
    recorder = Recorder()
    for number in range(40):
        record(recorder, torch.zeros(number + 1), number + 0.5)

    class Late:
        """Its text is asked for in the middle of a scan."""

        def __str__(self):
            if not taken:
                taken.append(recorder.take())
            return "late"

    taken = []
    record(recorder, torch.zeros(3), {Late(): 7.5}, 8.5)
    assert len(shown(taken[0])) == 40
    (seen,) = shown(recorder.take())
    assert seen == ([[3]], ["7.5", "8.5"])
