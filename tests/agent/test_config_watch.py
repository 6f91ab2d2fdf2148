"""dump_enable: a running job follows its config.json."""

import json
import os

import pytest
import torch
from recorded import Recorded
from torch import nn

from rankscope.agent.config import Config
from rankscope.agent.config_watch import OFF_SECONDS, ON_SECONDS, ConfigWatch
from rankscope.agent.recording import Recording


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Job:
    """A recording in memory whose file and clock the test moves."""

    def __init__(self, monkeypatch, path, **content):
        self.path, self.clock, self._edits = path, Clock(), 0
        self._content = {"dump_path": str(path.parent / "dump"), "risk_level": "ALL"}
        self.edit(**content)
        self.recorded = Recorded(monkeypatch, "L1")
        recording = Recording(self._load(), self._load)
        recording._watch._clock = self.clock
        recording._watch._looked = self.clock.now
        self.recorded._recording = recording

    def _load(self):
        return Config.load(self.path, environ={})

    def edit(self, **content):
        self._content |= content
        self.write(json.dumps(self._content))

    def write(self, text):
        self.path.write_text(text)
        self._edits += 1
        os.utime(self.path, ns=(self._edits, self._edits))  # the file system's clock is coarse

    def step(self, seconds=10.0, model=None):
        """One step of a job; it begins `seconds` after the last."""
        self.clock.now += seconds
        self.recorded.start(model)
        (model or torch.relu)(torch.ones(1))
        self.recorded.stop()
        self.recorded.step()


@pytest.fixture
def job(monkeypatch, tmp_path):
    return lambda **content: Job(monkeypatch, tmp_path / "config.json", **content)


def steps(job, count):
    return [bool(job.recorded.data(step)) for step in range(count)]


def test_recording_follows_the_switch(job):
    running = job(dump_enable=False)
    running.step()
    running.edit(dump_enable=True)
    running.step()
    running.edit(dump_enable=False)
    running.step()
    running.edit(dump_enable=True)
    running.step()
    assert steps(running, 4) == [False, True, False, True]


def test_the_file_is_looked_at_more_often_while_recording_is_on(job):
    running = job(dump_enable=True)
    running.step(0)
    running.edit(dump_enable=False)
    running.step(ON_SECONDS / 2)
    running.step(ON_SECONDS / 2)
    running.edit(dump_enable=True)
    running.step(OFF_SECONDS / 2)
    running.step(OFF_SECONDS / 2)
    assert steps(running, 5) == [True, True, False, False, True]


def test_switching_off_inside_a_step_stops_it(job):
    running = job(dump_enable=True)
    running.recorded.start()
    torch.relu(torch.ones(1))
    running.clock.now += 10
    running.edit(dump_enable=False)
    running.recorded.step()  # no stop(): recording would go on in the next step
    torch.exp(torch.ones(1))
    running.recorded.step()
    assert running.recorded.forwards(0) == ["Torch.relu.0"]
    assert running.recorded.names(1) == []


def test_a_broken_file_switches_off_until_it_is_right(job, capsys):
    running = job(dump_enable=True)
    running.step()
    running.write('{"dump_enable": tr')
    running.step()
    running.step()
    running.edit(dump_enable=True)
    running.step()
    assert steps(running, 4) == [True, False, False, True]
    assert capsys.readouterr().err.count("recording is off until the configuration is right") == 1


def test_a_removed_key_keeps_the_last_state(job):
    running = job(dump_enable=True)
    running.step()
    running.edit(dump_enable=None)
    running.step()
    assert steps(running, 2) == [True, True]


def test_other_keys_hold_from_the_next_step(job):
    running = job(dump_enable=True, level="L1")
    net = nn.Sequential(nn.Tanh())
    running.step(model=net)
    running.edit(level="mix", statistics={"list": ["Tanh"]})
    running.step(model=net)
    assert running.recorded.forwards(0) == ["Torch.tanh.0"]
    assert running.recorded.forwards(1) == ["Torch.tanh.0", "Module.0.Tanh.0"]


def test_what_cannot_change_is_said(job, capsys):
    running = job(dump_enable=True)
    running.step()
    running.edit(statistics={"summary_mode": "md5"}, precision="high")
    running.step()
    assert "a running job keeps its summary_mode, precision" in capsys.readouterr().err
    assert steps(running, 2) == [True, True]


def test_a_level_that_needs_the_model_does_not_end_a_job_that_gave_none(job, capsys):
    running = job(dump_enable=True)
    running.step()
    running.edit(level="mix")
    running.step()
    running.step()
    assert steps(running, 3) == [True, False, False]
    assert capsys.readouterr().err.count("start() needs the model at level mix") == 1


def test_a_file_that_goes_away_and_comes_back(tmp_path):
    path, clock = tmp_path / "config.json", Clock()
    path.write_text('{"dump_enable": true}')
    load = lambda: Config.load(path, environ={})  # noqa: E731
    config = load()
    watch = ConfigWatch(path, True, load, clock)
    text = path.read_text()
    path.unlink()
    clock.now += ON_SECONDS
    assert watch.look(config) is config
    assert not watch.is_on
    path.write_text(text)
    clock.now += OFF_SECONDS
    assert watch.look(config) is config
    assert watch.is_on
