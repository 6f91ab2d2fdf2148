"""Scripted agents whose processes are to be told apart, and what is known of each step."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from batches import linear_batch
from fake_agent import Daemon, FakeAgent, goodbye, hello, step_batch, wait_for

from rankscope.collector.query import open_run
from rankscope.v1 import collector_pb2 as pb

BEGIN, PAUSE, END = pb.StepEvent.BEGIN, pb.StepEvent.PAUSE, pb.StepEvent.END
SWARM = Path(__file__).parent.parent / "support" / "swarm.py"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    options = ["--lost-after-seconds", "0.5", "--seal-after-seconds", "1.0"]
    daemon = Daemon(tmp_path_factory.mktemp("daemon") / "store", *options)
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


def rank(number, **fields):
    made = {"rank": number, "world_size": 2, "source": "process_group"}
    return pb.Rank(**(made | fields))


def completeness(run):
    """By (step, rank), what the view says."""
    rows = open_run(run).sql("select * from completeness").to_pylist()
    return {(row["step"], row["rank"]): row for row in rows}


def sealed(run, step, times=1):
    """Wait for the n-th seal of a step: (ranks expected, rank to why it is missing)."""

    def look():
        events = open_run(run).sql(
            f"select * from steps where event = 'sealed' and step = {step} order by time"
        )
        return events.to_pylist() if events.num_rows >= times else None

    row = wait_for(look)[times - 1]
    ranks = {p["process"]: p["rank"] for p in open_run(run).processes().to_pylist()}
    missing = {ranks[p]: why for p, why in json.loads(row["missing"]).items()}
    return {ranks[p] for p in json.loads(row["expected"])}, missing


def layout(run):
    return sorted(str(path.relative_to(run)) for path in run.glob("*/*"))


def test_64_processes_of_which_3_are_killed(daemon, run, tmp_path):
    go = tmp_path / "go"
    numbers = ["64", "3", "3"]
    swarm = subprocess.Popen(
        [sys.executable, str(SWARM), daemon.address, run.name, *numbers, str(go)]
    )
    wait_for(lambda: (run.parent / f"{run.name}.rankscope" / "tables").is_dir(), timeout=60)

    def counts():
        states = open_run(run).sql("select state, count(*) as n from processes group by state")
        return dict(zip(states["state"].to_pylist(), states["n"].to_pylist(), strict=True))

    wait_for(lambda: counts() == {"live": 61, "lost": 3}, timeout=60)
    go.touch()
    assert swarm.wait(timeout=60) == 0
    wait_for(lambda: counts() == {"left": 61, "lost": 3}, timeout=60)
    found = completeness(run)
    assert sorted(found) == [(step, rank) for step in range(3) for rank in range(64)]
    for (step, number), row in found.items():
        dead = step == 2 and number < 3
        assert row["received"] == 4
        assert row["recorded"] == (None if dead else 4)

    def settled():
        rows = completeness(run)
        done = all(row["seals"] for row in rows.values()) and rows[2, 63]["missing"] is None
        return rows if done else None

    found = wait_for(settled)
    assert {at: r["missing"] for at, r in found.items() if r["missing"]} == {
        (2, number): "lost" for number in range(3)
    }
    assert all(row["expected"] for row in found.values())
    assert len(layout(run)) == 3 * 64


def test_one_pid_on_two_hosts(run, agents):
    hosts = [{"host": "h1", "boot_id": "b1"}, {"host": "h2", "boot_id": "b2"}]
    pair = [agents(pid=7, **host) for host in hosts]
    for number, agent in enumerate(pair):
        agent.send(step_batch(1, 0, events=2 + number))
    folders = [list(agent.farewell().folders) for agent in pair]
    assert folders == [["step0/proc7"], ["step0/proc7.h2"]]
    documents = [json.loads((run / name / "dump.json").read_text()) for (name,) in folders]
    assert [len(document["data"]) for document in documents] == [2, 3]


def test_what_is_known_of_each_rank_and_step(run, agents):
    whole, lossy, late = (agents(rank=number, pid=number + 1) for number in range(3))
    whole.send(step_batch(1, 0))
    drop = pb.DropCount(step=0, events=9, reason="spool_full")
    lossy.send(step_batch(1, 0, drops=[drop]))
    late.send(step_batch(1, 0, events=2, kinds=(BEGIN,)))
    assert sealed(run, 0) == ({0, 1, 2}, {2: "late"})
    found = completeness(run)
    assert [found[0, n]["missing"] for n in range(3)] == [None, None, "late"]
    assert [found[0, n]["recorded"] for n in range(3)] == [4, 4, None]
    assert (found[0, 1]["dropped"], found[0, 1]["drop_reasons"]) == (9, "spool_full")
    first_seal = found[0, 0]["sealed_at"]
    more = linear_batch(2, 0, events=3)
    more.steps.add(step=0, kind=END, events=5, time=1.0)
    late.send(more)
    assert sealed(run, 0, times=2) == ({0, 1, 2}, {})
    row = completeness(run)[0, 2]
    assert (row["recorded"], row["received"], row["missing"], row["late"]) == (5, 5, None, True)
    assert row["seals"] == 2
    assert row["sealed_at"] > first_seal
    filtered = pb.StepEvent(step=1, kind=pb.StepEvent.SKIPPED, reason="rank")
    whole.send(step_batch(2, 1))
    lossy.send(pb.Batch(steps=[filtered]))
    late.send(step_batch(3, 1))
    assert sealed(run, 1) == ({0, 2}, {})
    row = completeness(run)[1, 1]
    assert (row["filtered"], row["expected"], row["received"]) == ("rank", False, 0)


def test_ranks_that_begin_late_and_end_early(run, agents):
    first = agents(rank=0, pid=1)
    first.send(step_batch(1, 0))
    assert sealed(run, 0) == ({0}, {})
    second = agents(rank=1, pid=2)
    second.send(step_batch(1, 1))
    first.send(step_batch(2, 1))
    assert sealed(run, 1) == ({0, 1}, {})
    first.farewell()
    second.send(step_batch(2, 2))
    assert sealed(run, 2) == ({1}, {})


def test_micro_steps_are_one_step(run, agents):
    """start and stop many times before step(), as gradient accumulation does; two ranks that pass
    through them at different times."""
    pair = [agents(rank=number, pid=number + 1) for number in (0, 1)]
    for sequence in range(1, 4):
        for agent in pair:
            micro = linear_batch(sequence, 0)
            micro.steps.add(step=0, kind=PAUSE, time=1.0)
            agent.send(micro)
    for agent in pair:
        agent.send(pb.Batch(steps=[pb.StepEvent(step=0, kind=END, events=12)]))
    assert sealed(run, 0) == ({0, 1}, {})
    assert [completeness(run)[0, n]["received"] for n in (0, 1)] == [12, 12]
    order = open_run(run).sql("select rank, list(seq order by seq) as s from nodes group by rank")
    for sequence in order["s"].to_pylist():
        assert sequence == sorted(set(sequence))


def test_a_pipeline_whose_ranks_are_in_different_steps(run, agents):
    ahead, behind = agents(rank=0, pid=1), agents(rank=1, pid=2)
    for step in range(3):
        ahead.send(step_batch(step + 1, step))
    ahead.wait_durable()
    for step in range(3):
        behind.send(step_batch(step + 1, step))
    behind.wait_durable()

    def settled():
        rows = completeness(run)
        return all(row["seals"] and row["missing"] is None for row in rows.values()) and rows

    found = wait_for(settled)
    assert sorted(found) == [(step, number) for step in range(3) for number in (0, 1)]
    assert all(row["received"] == row["recorded"] == 4 for row in found.values())


REPLICAS = [(0, "a:1"), (0, "b:1"), (1, "b:1"), (1, "a:1")]


def test_replicas_keep_their_ranks_when_the_collector_dies(tmp_path):
    daemon = Daemon(tmp_path / "store", "--split-replicas")
    made = []
    for pid, (number, group) in enumerate(REPLICAS, 1):
        agent = FakeAgent(daemon.address, hello("r", pid=pid))
        agent.connect()
        agent.send(step_batch(1, 0, events=pid, rank=rank(number, group=group)))
        agent.wait_durable()
        assert agent.all("notice") == []
        made.append(agent)
    run = tmp_path / "store/r"
    daemon.kill()
    daemon = Daemon(tmp_path / "store", "--split-replicas")
    for agent in reversed(made):
        agent.address = daemon.address
        assert agent.connect().durable_sequence == 1
        agent.send(goodbye())
    for agent, number in zip(made, (0, 2, 3, 1), strict=True):
        assert list(agent.wait("farewell").folders) == [f"step0/rank{number}"]
        agent.close()
    assert daemon.stop() == 0
    lengths = [
        len(json.loads((run / f"step0/rank{n}/dump.json").read_text())["data"]) for n in range(4)
    ]
    assert lengths == [1, 4, 2, 3]
    stored = open_run(run).sql("select rank, count(*) as n from nodes group by rank order by rank")
    assert stored["n"].to_pylist() == [1, 4, 2, 3]
    (row, *_) = open_run(run).sql("select * from processes where rank = 3").to_pylist()
    assert (row["replica"], row["claimed_rank"], row["group"]) == (1, 1, "b:1")


def test_replicas_whose_folders_move_lose_nothing(tmp_path):
    """The second group is told to be replica 0 when steps of both are written: they trade names."""
    daemon = Daemon(tmp_path / "store", "--split-replicas")
    run = tmp_path / "store/r"
    pair = []
    for pid, group in enumerate(("a:1", "b:1"), 1):
        agent = FakeAgent(daemon.address, hello("r", pid=pid))
        agent.connect()
        agent.send(step_batch(1, 0, events=pid, rank=rank(0, world_size=1, group=group)))
        agent.wait_durable()
        pair.append(agent)
    wait_for(lambda: layout(run) == ["step0/rank0", "step0/rank1"])
    told = rank(0, world_size=1, group="a:1", replica=1)
    pair[0].send(step_batch(2, 1, events=5, rank=told))
    folders = [list(agent.farewell().folders) for agent in pair]
    assert folders == [["step0/rank1", "step1/rank1"], ["step0/rank0"]]
    lengths = {
        name: len(json.loads((run / name / "dump.json").read_text())["data"])
        for name in layout(run)
    }
    assert lengths == {"step0/rank0": 2, "step0/rank1": 1, "step1/rank1": 5}
    for agent in pair:
        agent.close()
    assert daemon.stop() == 0
