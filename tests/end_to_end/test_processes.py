"""Processes that begin, live and end in unusual ways: all they recorded is stored."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from fake_agent import wait_for

from rankscope.collector.query import open_run

SCRIPT = Path(__file__).with_name("process_job.py")
CONFIG = {"level": "L1", "risk_level": "ALL"}
SQL = "select step, count(distinct record) as records from nodes group by step order by step"


def container():
    """What makes a process the first of a container; skips where the system forbids it."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("no process may have a pid namespace of its own here")
    return command


def records(done):
    return [row["records"] for row in open_run(done.dump).sql(SQL).to_pylist()]


def left(done):
    where = "select reason from steps where event = 'left'"
    return [row["reason"] for row in open_run(done.dump).sql(where).to_pylist()]


@pytest.mark.parametrize("scenario", ["spawn", "forkserver", "fork", "in_pool"])
def test_children_of_multiprocessing(scenario, job, shared_daemon):
    done = job(SCRIPT, scenario, name=scenario, config=CONFIG, daemon=shared_daemon).finish()
    assert records(done) == [7, 7, 7]
    assert left(done) == ["exit"]


@pytest.mark.parametrize(
    ("scenario", "status"), [("device_fault", 1), ("exit_of_another", 6), ("exit_in_thread", 0)]
)
def test_ends(scenario, status, job, shared_daemon):
    done = job(SCRIPT, scenario, name=scenario, config=CONFIG, daemon=shared_daemon).finish(status)
    assert records(done) == [7, 7, 7]
    assert left(done) == ["exit"]


def test_abort_loses_only_what_was_not_flushed(job, shared_daemon):
    done = job(SCRIPT, "abort", name="abort", config=CONFIG, daemon=shared_daemon)
    done.finish(-signal.SIGABRT)
    assert wait_for(lambda: records(done) == [7, 7, 7])
    wait_for(lambda: (done.dump / "step2").exists())
    # The open step is in the layout, and the table says that nobody ended it.
    assert len(done.document(step=2)["data"]) == 7
    ended = "select step from steps where event = 'end' order by step"
    assert [row["step"] for row in open_run(done.dump).sql(ended).to_pylist()] == [0, 1]


def test_the_first_process_of_a_container_goes_on_after_sigterm(job, shared_daemon):
    name = "first_of_container"
    under = container()
    done = job(SCRIPT, name, name=name, config=CONFIG, daemon=shared_daemon, under=under).finish()
    assert records(done) == [7, 7, 7]
    assert left(done) == ["exit"]


def test_the_first_process_of_a_container_waits_for_its_own_collector(job):
    """Which the kernel kills with it."""
    under = container()
    done = job(SCRIPT, "first_of_container", config=CONFIG, under=under).finish()
    assert records(done) == [7, 7, 7]
    assert len(done.document(step=2)["data"]) == 7


def test_two_libraries_share_one_debugger_and_are_told(job, shared_daemon):
    name = "two_libraries"
    done = job(SCRIPT, name, name=name, config=CONFIG, daemon=shared_daemon).finish()
    assert records(done) == [7, 7, 8]
    text = "PrecisionDebugger(dump_path='/elsewhere', level='L0') changes nothing"
    assert done.output.count(text) == 1
