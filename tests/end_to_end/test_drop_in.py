"""An msProbe user's script, and what it is told when something is wrong."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch
from torch import nn

from rankscope.agent import PrecisionDebugger
from rankscope.agent.errors import ConfigError, UsageError
from rankscope.collector.query import open_run

SCRIPT = Path(__file__).with_name("drop_in.py")
CONFIG = {
    "task": "statistics",
    "rank": [],
    "step": ["0", 2],
    "level": "mix",
    "enable_dataloader": False,  # keys that we do not have are left alone
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """The class as in a new process."""
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    monkeypatch.chdir(tmp_path)


def test_a_script_runs_with_its_import_replaced(job):
    done = job(SCRIPT, config=CONFIG).finish()
    assert "same object: True" in done.output
    written = sorted(p.relative_to(done.dump) for p in done.dump.rglob("*.json"))
    folders = sorted({p.parent for p in written})
    assert [f.parent.name for f in folders] == ["step0", "step2"]  # as config.json selects
    assert all(re.fullmatch(r"proc\d+", f.name) for f in folders)
    assert len(written) == 6
    assert sorted(p.name for p in done.dump.iterdir()) == ["step0", "step2"]
    assert list(done.document(step=2)["data"])[:2] == [
        "Functional.linear.0.forward",
        "Module.0.Linear.forward.0",
    ]
    told = [line for line in done.output.splitlines() if line.startswith("rankscope:")]
    (line,) = [line for line in told if "there is one in a process" not in line]
    assert len(told) == 2  # the script makes it twice
    assert line.endswith(f"files under {done.dump}")


def test_nobody_listens(job, tmp_path, shared_daemon):
    """The job goes on and says so once; what it could not send is delivered later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        done = job(
            SCRIPT,
            config=CONFIG | {"step": [], "rankscope": {"exit_seconds": 0.5}},
            RANKSCOPE_COLLECTOR=nowhere,
            RANKSCOPE_RUN="late",
            RANKSCOPE_SPOOL=str(tmp_path / "spool"),
        ).finish()
    loss = [line for line in done.output.splitlines() if line.startswith("loss")]
    assert loss == ["loss 0.133853"]
    told = [line for line in done.output.splitlines() if line.startswith("rankscope:")]
    (line,) = [line for line in told if "there is one in a process" not in line]
    assert len(told) == 2  # the script makes it twice
    count, folder = re.search(
        r"(\d+) batches not delivered, kept in (\S+); to deliver", line
    ).groups()
    assert (int(count) > 0, Path(folder).is_relative_to(tmp_path / "spool")) == (True, True)
    assert not done.dump.exists()

    command = [Path(sys.executable).with_name("rankscope"), "deliver", tmp_path / "spool"]
    command += ["--collector", shared_daemon.address]
    told = subprocess.run(command, capture_output=True, text=True, env=jobs.environment())
    assert (told.returncode, "delivered" in told.stdout) == (0, True), told.stdout + told.stderr
    assert not list((tmp_path / "spool").rglob("*.spool"))
    run = open_run(shared_daemon.store / "late")
    steps = run.sql("select step, count(*) as n from nodes group by step order by step")
    assert steps["step"].to_pylist() == [0, 1, 2]
    assert len(set(steps["n"].to_pylist())) == 1
    assert len(list((shared_daemon.store / "late").glob("step*/proc*/dump.json"))) == 3


def debugger(tmp_path, text='{"level": "L0"}', **arguments):
    path = tmp_path / "config.json"
    path.write_text(text)
    return PrecisionDebugger(str(path), **{"dump_path": tmp_path / "dump", **arguments})


BAD = {
    "task": (
        '{"task": "statistik"}',
        ConfigError,
        r"task in .*config\.json: 'statistik' is not allowed; allowed: .*statistics",
    ),
    "level": ('{"level": "L3"}', ConfigError, r"level in .*: 'L3' is not allowed; allowed: .*mix"),
    "json": ('{"task": "statistics",}', ConfigError, r"config\.json: not valid JSON at line 1"),
    "list": ("[]", ConfigError, r"holds \[\]; allowed: an object"),
    "setting": (
        '{"rankscope": {"colector": "a:1"}}',
        ConfigError,
        r"rankscope\.colector in .*there is no such setting \(did you mean collector\?\)",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_configuration_says_where_and_what_is_allowed(tmp_path, bad):
    text, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        debugger(tmp_path, text)
    # Nothing is left behind: the next construction is the first.
    good = debugger(tmp_path)
    assert isinstance(good, PrecisionDebugger)
    assert good is PrecisionDebugger()


def test_arguments_win_and_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="argument level: 'L9' is not allowed"):
        debugger(tmp_path, level="L9")
    with pytest.raises(ConfigError, match="argument task: 'x' is not allowed"):
        debugger(tmp_path, task="x")


def test_start_without_a_model(tmp_path):
    made = debugger(tmp_path)
    with pytest.raises(UsageError, match=r"needs the model at level L0: start\(model=net\)"):
        made.start()
    with pytest.raises(UsageError, match=r"model must be a torch\.nn\.Module"):
        made.start([nn.ReLU(), "net"])
    assert torch._C._len_torch_function_stack() == 0
    assert not (tmp_path / "dump").exists()


def test_methods_on_the_class_need_an_object():
    for method in (PrecisionDebugger.start, PrecisionDebugger.stop, PrecisionDebugger.step):
        with pytest.raises(UsageError, match="make it first: PrecisionDebugger"):
            method()


def test_token_range_is_checked(tmp_path):
    made = debugger(tmp_path, '{"level": "L1"}')
    for wrong in ([2, 1], [1], "12", [0, True]):
        with pytest.raises(UsageError, match="must be \\[first, last\\]"):
            made.start(nn.ReLU(), token_range=wrong)
    with pytest.raises(UsageError, match="needs the model whose calls are counted"):
        made.start(token_range=[0, 1])


def test_step_and_stop_before_start_only_count(record):
    recorded = record("L1")
    recorded.step()
    recorded.stop()
    recorded.step()
    with recorded:
        torch.relu(torch.ones(1))
    assert recorded.forwards(step=2) == ["Torch.relu.0"]
    assert (recorded.data(0), recorded.data(1)) == ({}, {})
