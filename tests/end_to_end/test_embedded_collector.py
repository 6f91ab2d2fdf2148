"""The embedded collector as a process: election, detachment, spool of the dead, its end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from batches import linear_batch
from fake_agent import FakeAgent, goodbye, hello, here, step_batch, wait_for, write_spool

from rankscope.collector import liveness
from rankscope.collector.store import open_readonly

MODULE = [sys.executable, "-m", "rankscope.collector.embedded"]


@pytest.fixture
def embedded(tmp_path):
    """Starts collectors for RUN; ends those that are still there."""
    run, started = tmp_path / "dump", []
    side = tmp_path / "dump.rankscope"

    def start():
        subprocess.run([*MODULE, "--run", str(run)], check=True, timeout=30)
        port = wait_for(lambda: read_port(side))
        started.append(port["pid"])
        return port

    yield run, side, start
    for pid in started:
        if liveness.start_time(pid):
            os.kill(pid, 15)
            wait_for(lambda pid=pid: liveness.start_time(pid) is None)


def read_port(side):
    try:
        return json.loads((side / "port").read_text())
    except FileNotFoundError:
        return None


def gone(pid):
    return liveness.start_time(pid) is None


def test_serves_one_run_and_ends_after_the_last_goodbye(embedded):
    run, side, start = embedded
    port = start()
    assert port["boot_id"] == liveness.boot_id()
    agents = [FakeAgent(port["address"], hello("ignored", rank=r, **here())) for r in (0, 1)]
    for agent in agents:
        assert agent.connect().run_path == str(run)
        agent.send(step_batch(1, 0))
    for agent in agents:
        agent.farewell()
        agent.close()
    assert sorted(path.name for path in (run / "step0").iterdir()) == ["rank0", "rank1"]
    assert list(run.iterdir()) == [run / "step0"]
    wait_for(lambda: gone(port["pid"]), timeout=10)
    assert not (side / "port").exists()
    log = (side / "collector.log").read_text()
    assert "ended" in log
    assert "ERROR" not in log


def test_is_a_process_of_its_own(embedded):
    _, _, start = embedded
    pid = start()["pid"]
    assert os.getsid(pid) not in (os.getsid(0), os.getpid())
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    null, log = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1))
    assert null == os.devnull
    assert log.endswith("dump.rankscope/collector.log")


def test_holds_no_descriptor_of_its_starter(embedded):
    run, side, _ = embedded
    read, write = os.pipe()
    subprocess.run([*MODULE, "--run", str(run)], pass_fds=[write], check=True, timeout=30)
    os.close(write)
    assert os.read(read, 1) == b""  # the end, although the collector goes on
    os.close(read)
    port = wait_for(lambda: read_port(side))
    os.kill(port["pid"], 15)
    wait_for(lambda: gone(port["pid"]))


def test_the_loser_of_the_election_ends_at_once(embedded):
    run, side, start = embedded
    port = start()
    loser = [*MODULE, "--foreground", "--run", str(run)]
    done = subprocess.run(loser, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert read_port(side) == port


def test_takes_in_the_spool_of_the_dead_and_ends(embedded, tmp_path):
    run, side, start = embedded
    dead = subprocess.Popen([sys.executable, "-c", ""])
    said = hello(rank=0, **here(dead.pid))
    dead.wait()
    batches = {1: step_batch(1, 0, kinds=()), 2: linear_batch(2, 0), 3: goodbye("signal 9")}
    write_spool(side / "spool", said, batches)
    living = hello(rank=1, **here())
    write_spool(side / "spool", living, {1: linear_batch(1, 0)})
    start()
    dump = run / "step0/rank0/dump.json"
    wait_for(dump.exists)
    assert len(json.loads(dump.read_text())["data"]) == 4  # the names of both batches are equal
    kept = side / "spool" / f"{living.process_uuid}-{1:020d}.spool"
    wait_for(lambda: list((side / "spool").iterdir()) == [kept])
    (row,) = open_readonly(run).processes()
    assert (row["process"], row["folder"]) == (said.process_uuid, "rank0")
    assert open_readonly(run).read_step(0)[0].num_rows == 8


def test_a_killed_process_is_finished_from_its_spool_and_the_collector_ends(embedded):
    run, side, start = embedded
    port = start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    agent = FakeAgent(
        port["address"], hello(rank=0, spool_path=str(side / "spool"), **here(child.pid))
    )
    agent.connect()
    agent.send(step_batch(1, 0, kinds=()))
    agent.wait_durable()
    write_spool(side / "spool", agent.hello, {1: linear_batch(1, 0), 2: linear_batch(2, 0)})
    child.kill()
    child.communicate()
    agent.close()
    wait_for(lambda: gone(port["pid"]), timeout=15)
    assert open_readonly(run).read_step(0)[0].num_rows == 8
    assert (run / "step0/rank0/dump.json").exists()
    assert list((side / "spool").iterdir()) == []


def test_ends_quietly_when_its_folder_is_deleted(embedded):
    run, side, start = embedded
    port = start()
    agent = FakeAgent(port["address"], hello(rank=0, **here()))
    agent.connect()
    agent.send(step_batch(1, 0))
    agent.wait_durable()
    wait_for(lambda: "sealed" in open_readonly(run).steps_rows()["event"].to_pylist())
    shutil.rmtree(side)
    shutil.rmtree(run, ignore_errors=True)
    wait_for(lambda: gone(port["pid"]), timeout=15)
    agent.close()
    assert not side.exists()
    assert not run.exists()


def test_a_new_collector_goes_on_where_a_killed_one_was(embedded):
    run, side, start = embedded
    port = start()
    agent = FakeAgent(port["address"], hello(rank=0, **here()))
    agent.connect()
    agent.send(step_batch(1, 0, kinds=()))
    agent.wait_durable()
    os.kill(port["pid"], 9)
    wait_for(lambda: gone(port["pid"]))
    (side / "port").unlink()
    agent.address = start()["address"]
    assert agent.connect().durable_sequence == 1
    agent.send(step_batch(2, 0))
    assert list(agent.farewell().folders) == ["step0/rank0"]
    agent.close()
    assert open_readonly(run).read_step(0)[0].num_rows == 8
