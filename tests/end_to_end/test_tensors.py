"""Whole tensors from a real job to .pt files that torch loads: every way, and through crashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch
from fake_agent import Daemon, wait_for

SCRIPT = Path(__file__).with_name("tensor_job.py")
CONFIG = {"task": "tensor", "level": "mix"}
BIG_MIB = 40


def check(run, kept, steps=1, folder="*"):
    """Every file is what dump.json says of it, and those that the job kept are what it saw."""
    for step in range(steps):
        (path,) = (run / f"step{step}").glob(f"{folder}/dump.json")
        document = json.loads(path.read_text())
        data = path.parent / "dump_tensor_data"
        assert document["dump_data_dir"] == str(data)
        entries = {entry["data_name"]: entry for entry in tensors(document["data"])}
        assert set(entries) == set(os.listdir(data))
        for name, entry in entries.items():
            loaded = torch.load(data / name, weights_only=True)
            assert (str(loaded.dtype), list(loaded.shape)) == (entry["dtype"], entry["shape"])
            if loaded.dim():
                assert loaded.max().item() == entry["Max"]
    for name, value in kept.items():
        step, _, file = name.partition("/")
        (path,) = (run / step).glob(f"{folder}/dump_tensor_data/{file}")
        loaded = torch.load(path, weights_only=True)
        assert not loaded.requires_grad
        assert torch.equal(loaded, value)


def tensors(value):
    """The tensor entries anywhere in a value of dump.json."""
    if isinstance(value, dict):
        if "data_name" in value:
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from tensors(item)


def blobs(run):
    return sorted((run.parent / f"{run.name}.rankscope" / "blobs").glob("??/*.pt"))


def left_in(folder):
    return [path for path in folder.rglob("*") if ".tensor" in path.name]


@pytest.fixture
def kept(tmp_path):
    """The file the job saves to, and what it saved."""
    path = tmp_path / "kept.pt"
    return path, lambda: torch.load(path)


def arguments(kept, steps=1, big=BIG_MIB):
    return ("--steps", steps, "--big", big, "--keep", kept[0])


def test_embedded(tmp_path, kept):
    job = jobs.start(SCRIPT, *arguments(kept, 2), folder=tmp_path, config=CONFIG).finish()
    check(job.dump, kept[1](), 2)
    sidecar = tmp_path / "dump.rankscope"
    wait_for(lambda: not (sidecar / "port").exists(), 60)  # it ends, and leaves nothing behind
    assert left_in(sidecar / "spool") == []
    linked = job.dump / "step0"
    (big,) = linked.glob("*/dump_tensor_data/Torch.sin.0.forward.input.0.pt")
    assert any(os.path.samefile(big, path) for path in blobs(job.dump))
    command = ["-m", "rankscope.collector.cli", "export", job.dump, "--to", tmp_path / "out"]
    subprocess.run([sys.executable, *map(str, command)], check=True)
    check(tmp_path / "out", kept[1](), 2)


@pytest.mark.parametrize("way", ["auto", "stream"])
def test_daemon(tmp_path, kept, way):
    daemon = Daemon(tmp_path / "store", "--tensors", way)
    try:
        job = jobs.start(
            SCRIPT, *arguments(kept), folder=tmp_path / "job", config=CONFIG, daemon=daemon
        ).finish()
        check(job.dump, kept[1]())
        assert left_in(tmp_path / "job" / "spool") == []
    finally:
        assert daemon.stop() == 0


def test_equal_tensors_of_ranks_are_stored_once(tmp_path):
    job = jobs.start(SCRIPT, "--big", 4, folder=tmp_path, ranks=2, config=CONFIG).finish()
    names = ["Module.0.Linear.forward.0.parameters.weight.pt", "Torch.sin.0.forward.input.0.pt"]
    for name in names:
        paths = [job.dump / "step0" / f"rank{r}" / "dump_tensor_data" / name for r in (0, 1)]
        assert os.path.samefile(*paths)


def test_a_collector_s_quota_is_refused_at_capture(tmp_path):
    """Whole tensors or none: what is left out is counted, what is there is what it was."""
    quota = {"RANKSCOPE_SERVE_TENSOR_QUOTA_BYTES": str(5 << 20)}
    arguments = ("--steps", 8, "--big", 2, "--pause", 0.7)  # for an acknowledgement to arrive
    job = jobs.start(SCRIPT, *arguments, folder=tmp_path, config=CONFIG, **quota).finish()
    command = ["-m", "rankscope.collector.cli", "ls", str(job.dump), "--json"]
    listed = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    steps = {part["step"]: part for part in json.loads(listed.stdout)["steps"]}
    assert steps[0]["why"] == ""
    assert "tensors left out: tensor_quota" in steps[7]["why"]
    assert all(part["state"] == "complete" for part in steps.values())
    assert sum(path.stat().st_size for path in blobs(job.dump)) < 20 << 20
    for path in job.dump.rglob("*.pt"):
        torch.load(path, weights_only=True)


def test_tensor_list_keeps_tensors_of_some_records(tmp_path):
    config = {"task": "statistics", "level": "mix", "statistics": {"tensor_list": ["relu"]}}
    job = jobs.start(SCRIPT, folder=tmp_path, config=config).finish()
    (data,) = job.dump.glob("step0/*/dump_tensor_data")
    names = os.listdir(data)
    assert all(name.startswith("Functional.relu.0.") for name in names)
    assert len(names) == 4  # in and out, forward and backward


def test_a_killed_job_keeps_what_it_recorded(tmp_path, kept):
    job = jobs.start(SCRIPT, "--die", *arguments(kept, 2), folder=tmp_path, config=CONFIG)
    job.finish(status=-9)
    sidecar = tmp_path / "dump.rankscope"
    wait_for(lambda: not (sidecar / "port").exists() and job.dump.exists(), 90)
    check(job.dump, kept[1](), 2)
    assert left_in(sidecar / "spool") == []


@pytest.mark.parametrize("way", ["auto", "stream"])
def test_a_killed_collector_leaves_nothing_half_and_the_next_one_gets_all(tmp_path, kept, way):
    first = Daemon(tmp_path / "store", "--tensors", way)
    job = jobs.start(
        SCRIPT, *arguments(kept, 4), folder=tmp_path / "job", config=CONFIG, daemon=first
    )
    try:
        side = tmp_path / "store" / "job.rankscope" / "blobs"
        wait_for(lambda: list(side.glob("incoming/*")) or list(side.glob("??/*")), 60)
        first.kill()
        for path in blobs(job.dump):
            torch.load(path, weights_only=True)
        second = Daemon(tmp_path / "store", "--tensors", way, "--listen", first.address)
        try:
            job.finish()
            check(job.dump, kept[1](), 4)
            assert list((side / "incoming").iterdir()) == []
        finally:
            assert second.stop() == 0
    finally:
        job.process.kill()
