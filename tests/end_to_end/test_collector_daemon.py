"""A real `rankscope serve` process against scripted agents."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batches import Event, batch, linear_batch
from fake_agent import Daemon, FakeAgent, goodbye, hello, here, step_batch, wait_for, write_spool

from rankscope.collector.store import open_readonly
from rankscope.v1 import collector_pb2 as pb

BEGIN, PAUSE, END = pb.StepEvent.BEGIN, pb.StepEvent.PAUSE, pb.StepEvent.END


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("daemon") / "store", "--lost-after-seconds", "0.3")
    yield daemon
    assert daemon.stop() == 0


_numbers = itertools.count()


@pytest.fixture
def run(daemon):
    """Folder of a run that is this test's own."""
    return daemon.store / f"run{next(_numbers)}"


@pytest.fixture
def agents(daemon, run):
    """Makes agents connected to the daemon, in the test's run."""
    made = []

    def connect(**fields):
        agent = FakeAgent(daemon.address, hello(**({"run": run.name} | fields)))
        made.append(agent)
        agent.connect()
        return agent

    yield connect
    for agent in made:
        agent.close()


def rows(run_path, step, process=None):
    """(nodes, records) counts as stored."""
    nodes, records = open_readonly(run_path).read_step(step, process and [process])
    return nodes.num_rows, records.num_rows


def steps(run_path, event):
    return [
        row for row in open_readonly(run_path).steps_rows().to_pylist() if row["event"] == event
    ]


def dump(run_path, step, folder):
    return json.loads((run_path / f"step{step}" / folder / "dump.json").read_text())


def test_from_batch_to_layout(run, agents):
    agent = agents(rank=0)
    welcome = agent.all("welcome")[0]
    assert (welcome.run, welcome.run_path, welcome.durable_sequence) == (run.name, str(run), 0)
    agent.send(step_batch(1, 0, events=5, kinds=(BEGIN,)))
    end = pb.StepEvent(step=0, kind=END, events=6)
    node = Event("Functional.relu.0.forward", what=pb.NODE, stack=9)
    stack = pb.Stack(id=9, frames=["File b.py, line 2"])
    agent.send(batch([node], 5, stacks=[stack], steps=[end]))
    agent.wait_durable()
    assert rows(run, 0) == (6, 10)
    farewell = agent.farewell()
    assert list(farewell.folders) == ["step0/rank0"]
    document = dump(run, 0, "rank0")
    assert list(document)[:4] == ["task", "level", "framework", "dump_data_dir"]
    assert document["dump_data_dir"] is None
    assert list(document["data"])[:5] == [f"Functional.linear.{n}.forward" for n in range(5)]
    stacks = json.loads((run / "step0/rank0/stack.json").read_text())
    linear = [f"Functional.linear.{n}.forward" for n in range(5)]
    assert stacks == {
        "0": [linear, ["File a.py, line 1"]],
        "1": [["Functional.relu.0.forward"], ["File b.py, line 2"]],
    }
    sealed = wait_for(lambda: steps(run, "sealed"))
    assert [(s["step"], s["events"], s["missing"]) for s in sealed] == [(0, 6, "{}")]
    assert json.loads(sealed[0]["expected"]) == [agent.process]
    agent.wait_end()


def test_duplicates_are_acknowledged_and_ignored(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    agent.wait_durable()
    for _ in range(3):
        agent.send(step_batch(1, 0), sequence=1)
    agent.send(step_batch(2, 0))
    agent.wait_durable()
    assert rows(run, 0) == (8, 16)


def test_a_gap_is_a_problem_and_ends_the_stream(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    agent.send(step_batch(3, 0), sequence=3)
    problem = agent.wait("problem")
    assert (problem.code, problem.closes_stream) == (pb.Problem.SEQUENCE_GAP, True)
    agent.wait_end()
    assert agent.connect().durable_sequence == 1


def test_a_gap_named_in_drops_is_none(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    drop = pb.DropCount(step=0, events=9, reason="spool_full", first_sequence=2, last_sequence=4)
    agent.send(step_batch(5, 0, drops=[drop]), sequence=5)
    agent.wait_durable()
    assert agent.all("problem") == []
    (dropped,) = steps(run, "dropped")
    assert (dropped["step"], dropped["events"], dropped["reason"]) == (0, 9, "spool_full")


@pytest.mark.parametrize("fault", ["no protobuf", "wrong crc", "wrong columns"])
def test_a_malformed_batch_is_set_aside(run, agents, fault):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    bad = step_batch(2, 0)
    if fault == "wrong columns":
        bad.columns.event_step = bad.columns.event_step[:-1]
    payload = b"\xff\xff\xff" if fault == "no protobuf" else bad.SerializeToString()
    agent.send(payload, crc32=1 if fault == "wrong crc" else None)
    problem = agent.wait("problem")
    assert (problem.code, problem.refused_sequence) == (pb.Problem.INVALID, 2)
    assert not problem.closes_stream
    agent.send(step_batch(3, 0))
    agent.wait_durable()
    side = run.with_name(run.name + ".rankscope")
    (aside,) = (side / "refused").iterdir()
    assert aside.read_bytes() == payload
    assert rows(run, 0) == (8, 16)
    (refused,) = steps(run, "refused")
    assert (refused["process"], refused["batch"]) == (agent.process, 2)
    assert agent.connect().durable_sequence == 3


def test_a_heartbeat_is_acknowledged(agents):
    agent = agents(rank=0)
    agent.heartbeat()
    assert agent.wait("ack").durable_sequence == 0


def test_a_second_stream_takes_over(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    agent.wait_durable()
    second = FakeAgent(agent.address, agent.hello)
    assert second.connect().durable_sequence == 1
    agent.wait_end()
    second.sequence = 1
    second.send(step_batch(2, 0))
    second.wait_durable()
    second.close()


def test_hello_must_come_first(daemon):
    agent = FakeAgent(daemon.address, hello())
    agent.hello = None  # the first message is an empty one
    agent.connect(wait=False)
    assert agent.wait("problem").code == pb.Problem.INVALID
    agent.wait_end()
    agent.close()


@pytest.mark.parametrize("name", ["../r", "a/b", ".hidden", "x.rankscope", "a b"])
def test_run_names_that_are_no_folder_get_one_that_is(daemon, name):
    agent = FakeAgent(daemon.address, hello(name))
    path = Path(agent.connect().run_path)
    agent.close()
    assert path.parent == daemon.store
    assert path.name.startswith("+")


@pytest.mark.parametrize("process", ["", "../../x", "A" * 32, "a" * 31])
def test_process_ids_that_are_none_are_refused(daemon, process):
    agent = FakeAgent(daemon.address, hello("r", process_uuid=process))
    agent.connect(wait=False)
    problem = agent.wait("problem")
    assert problem.code == pb.Problem.REFUSED
    assert "process_uuid" in problem.message
    agent.close()


def test_ranks_and_attempts_that_cannot_be_do_no_harm(run, agents):
    agent = agents(rank=-1, pid=5, attempt=2**32 - 1)
    agent.send(step_batch(1, 0))
    assert list(agent.farewell().folders) == ["step0/proc5"]


def test_a_run_is_named_once_per_live_key(agents):
    first, second = (
        agents(run="", run_key="master:h:1", rank=0),
        agents(run="", run_key="master:h:1", rank=1),
    )
    other = agents(run="", run_key="master:h:2", rank=0)
    names = [agent.all("welcome")[0].run for agent in (first, second, other)]
    assert names[0] == names[1] != names[2]
    assert names[0].endswith("-h-1")
    first.farewell()
    second.farewell()
    assert agents(run="", run_key="master:h:1", rank=0).all("welcome")[0].run not in names


def test_pause_writes_the_layout_of_an_open_step(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0, kinds=(BEGIN, PAUSE)))
    wait_for(lambda: (run / "step0/rank0/dump.json").exists())
    assert len(dump(run, 0, "rank0")["data"]) == 4
    assert steps(run, "sealed") == []


def test_a_late_rank_renames_the_folder(run, agents):
    agent = agents(pid=77)
    agent.send(step_batch(1, 0))
    wait_for(lambda: (run / "step0/proc77/dump.json").exists())
    agent.send(step_batch(2, 1, rank=pb.Rank(rank=3, world_size=4, source="process_group")))
    wait_for(lambda: (run / "step1/rank3/dump.json").exists())
    agent.farewell()
    assert sorted(str(p.relative_to(run)) for p in run.glob("*/*")) == [
        "step0/rank3",
        "step1/rank3",
    ]
    (row,) = open_readonly(run).processes()
    assert (row["rank"], row["rank_source"], row["folder"]) == (3, "process_group", "rank3")
    assert row["state"] == "left" or wait_for(
        lambda: open_readonly(run).processes()[0]["state"] == "left"
    )


def test_a_clash_is_told_to_both(run, agents):
    first, second = agents(rank=0, pid=7), agents(rank=0, pid=8)
    for agent, other in ((first, 8), (second, 7)):
        notice = agent.wait("notice")
        assert notice.level == "warning"
        assert f"process {other} on elsewhere" in notice.text
        assert "rank_id=" in notice.text
    first.send(step_batch(1, 0, events=2))
    second.send(step_batch(1, 0, events=3))
    assert list(first.farewell().folders) == ["step0/rank0"]
    assert list(second.farewell().folders) == ["step0/rank0.elsewhere.8"]
    assert len(dump(run, 0, "rank0")["data"]) == 2
    assert len(dump(run, 0, "rank0.elsewhere.8")["data"]) == 3


def test_a_later_attempt_replaces_the_steps_it_writes(run, agents):
    first = agents(rank=0, pid=7)
    first.send(step_batch(1, 0, events=2))
    first.send(step_batch(2, 1, events=2))
    first.wait_durable()
    first.close()
    second = agents(rank=0, pid=8, attempt=1)
    second.send(step_batch(1, 1, events=3))
    second.farewell()
    assert len(dump(run, 0, "rank0")["data"]) == 2
    assert len(dump(run, 1, "rank0")["data"]) == 3
    assert rows(run, 1) == (5, 10)


def test_a_second_run_into_one_folder_replaces_the_layout(run, agents):
    first = agents(rank=0)
    first.send(step_batch(1, 0))
    first.send(step_batch(2, 5))
    first.farewell()
    second = agents(pid=99)
    assert (run / "step5/rank0").exists()
    second.send(step_batch(1, 0))
    second.farewell()
    assert sorted(str(p.relative_to(run)) for p in run.glob("*/*")) == ["step0/proc99"]
    assert rows(run, 5) == (4, 8)


def test_a_lost_process_is_rendered_and_named_missing(run, agents):
    alive, dying = agents(rank=0, pid=1), agents(rank=1, pid=2)
    alive.send(step_batch(1, 0))
    dying.send(step_batch(1, 0, kinds=(BEGIN,)))
    dying.wait_durable()
    dying.close()
    (sealed,) = wait_for(lambda: steps(run, "sealed"))
    assert json.loads(sealed["missing"]) == {dying.process: "lost"}
    assert len(dump(run, 0, "rank1")["data"]) == 4


def test_a_process_that_comes_back_in_time_is_not_lost(run, agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0, kinds=(BEGIN,)))
    agent.wait_durable()
    agent.close()
    assert agent.connect().durable_sequence == 1
    agent.send(linear_batch(2, 0))
    agent.send(goodbye())
    agent.wait("farewell")
    assert len(open_readonly(run).processes()) == 1
    assert rows(run, 0) == (8, 16)


def test_goodbye_is_answered_again_after_a_break(agents):
    agent = agents(rank=0)
    agent.send(step_batch(1, 0))
    agent.farewell()
    assert agent.connect().durable_sequence == 2
    assert list(agent.wait("farewell").folders) == ["step0/rank0"]


def test_a_dead_neighbours_spool_is_taken_in(run, agents, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    spool = tmp_path / "spool"
    agent = agents(rank=0, spool_path=str(spool), **here(child.pid))
    agent.send(step_batch(1, 0, kinds=(BEGIN,)))
    agent.wait_durable()
    write_spool(spool, agent.hello, {1: linear_batch(1, 0), 2: linear_batch(2, 0, events=3)})
    child.kill()
    child.communicate()
    agent.close()
    wait_for(lambda: list(spool.iterdir()) == [])
    assert rows(run, 0) == (7, 14)
    (sealed,) = wait_for(lambda: steps(run, "sealed"))
    assert json.loads(sealed["missing"]) == {agent.process: "lost"}


def test_sigterm_commits_renders_and_seals_what_is_there(tmp_path):
    daemon = Daemon(tmp_path / "store", "--commit-interval-seconds", "30")
    agent = FakeAgent(daemon.address, hello("r", rank=0))
    agent.connect()
    agent.send(step_batch(1, 0, kinds=(BEGIN,)))
    agent.wait_durable()
    agent.send(linear_batch(2, 0))  # waits for the interval
    agent.heartbeat()
    wait_for(lambda: len(agent.all("ack")) == 2)
    assert daemon.stop() == 0
    agent.wait_durable(2)
    agent.wait_end()
    agent.close()
    run = tmp_path / "store/r"
    assert rows(run, 0) == (8, 16)
    assert (run / "step0/rank0/dump.json").exists()
    (sealed,) = steps(run, "sealed")
    assert json.loads(sealed["missing"]) == {agent.process: "late"}
    assert not daemon.port_file.exists()


def test_kill_9_and_a_new_collector(tmp_path):
    daemon = Daemon(tmp_path / "store")
    agents = [FakeAgent(daemon.address, hello(rank=rank)) for rank in (0, 1)]
    for agent in agents:
        agent.connect()
        agent.send(step_batch(1, 0))
        agent.wait_durable()
    run = agents[0].all("welcome")[0].run
    (tmp_path / "store" / run / "step0/rank0/dump.json").unlink(missing_ok=True)
    daemon.kill()
    daemon = Daemon(tmp_path / "store")
    for agent in agents:
        agent.address = daemon.address
        welcome = agent.connect()
        assert (welcome.run, welcome.durable_sequence) == (run, 1)
        agent.send(step_batch(1, 0), sequence=1)
        agent.send(step_batch(2, 1))
    for agent in agents:
        assert list(agent.farewell().folders) == [
            f"step{s}/rank{agents.index(agent)}" for s in (0, 1)
        ]
        agent.close()
    assert daemon.stop() == 0
    for step in (0, 1):
        assert rows(tmp_path / "store" / run, step) == (8, 16)
        sealed = [s for s in steps(tmp_path / "store" / run, "sealed") if s["step"] == step]
        assert json.loads(sealed[-1]["missing"]) == {}


def test_two_daemons_do_not_share_a_port(daemon, tmp_path):
    command = [sys.executable, "-m", "rankscope.collector.cli", "serve", "--store"]
    command += [str(tmp_path / "other"), "--listen", daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert daemon.address in done.stderr


def test_the_port_file_says_who_listens(tmp_path):
    daemon = Daemon(tmp_path / "store")
    content = json.loads(daemon.port_file.read_text())
    assert content["pid"] == daemon.process.pid
    assert set(content) == {"address", "pid", "boot_id", "collector_id"}
    os.kill(content["pid"], signal.SIGINT)
    assert daemon.process.wait(timeout=20) == 0
    daemon.stop()
