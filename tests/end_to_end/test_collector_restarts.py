"""A daemon that ends or is killed goes on where it was, also when no agent comes back."""

import json
import subprocess
import sys
import time
from typing import ClassVar

import pytest
from batches import linear_batch
from fake_agent import Daemon, FakeAgent, hello, here, step_batch, wait_for, write_spool

from rankscope.collector.query import RunNotFoundError, open_run
from rankscope.v1 import collector_pb2 as pb

BEGIN = (pb.StepEvent.BEGIN,)


@pytest.fixture
def started(tmp_path):
    """Starts daemons for one store; kills what still runs at the end, ranks too."""
    daemons = []

    def start(*options):
        daemons.append(Daemon(tmp_path / "store", *options))
        return daemons[-1]

    yield start
    for one in (*daemons, *Rank.made):
        one.kill()
    Rank.made.clear()


class Rank:
    """An agent whose process, of this host, can be killed."""

    made: ClassVar = []

    def __init__(self, daemon, **fields):
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.agent = FakeAgent(daemon.address, hello(**fields, **here(self.process.pid)))
        self.agent.connect()
        self.made.append(self)

    def spool(self, folder, *batches):
        write_spool(folder, self.agent.hello, dict(enumerate(batches, 1)))

    def kill(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.wait()
        self.agent.close()


def stored(run_path, what="nodes"):
    """Events, or rows of another table, each once."""
    try:
        run = open_run(run_path)
    except RunNotFoundError:
        return 0
    column = "process, seq" if what == "nodes" else "process, seq, leaf"
    (row,) = run.sql(f"select count(*) n, count(distinct ({column})) d from {what}").to_pylist()
    assert row["n"] == row["d"]
    return row["n"]


def sealed(run_path):
    """Steps that were sealed -> why somebody was missing."""
    rows = open_run(run_path).sql("select step, missing from steps where event = 'sealed'")
    return {row["step"]: json.loads(row["missing"]) for row in rows.to_pylist()}


def test_both_killed_the_spool_is_found_on_this_host(started, tmp_path):
    store, spool = tmp_path / "store", tmp_path / "spool"
    daemon = started()
    rank = Rank(daemon, run="r", rank=0, spool_path=str(spool))
    rank.agent.send(step_batch(1, 0, kinds=BEGIN))
    rank.agent.wait_durable()
    rank.spool(spool, linear_batch(1, 0), linear_batch(2, 0), step_batch(3, 1, kinds=BEGIN))
    daemon.kill()
    rank.kill()
    daemon = started()
    wait_for(lambda: not list(spool.glob("*.spool")))
    assert (stored(store / "r"), stored(store / "r", "records")) == (12, 24)
    wait_for(lambda: sorted(sealed(store / "r")) == [0, 1])
    assert set(sealed(store / "r")[1].values()) == {"lost"}
    assert json.loads((store / "r/step0/rank0/dump.json").read_text())["data"]
    assert daemon.stop() == 0
    assert started().stop() == 0
    assert stored(store / "r") == 12


def test_a_process_that_dies_before_it_comes_back(started, tmp_path):
    store, spool = tmp_path / "store", tmp_path / "spool"
    daemon = started()
    ranks = [
        Rank(daemon, run="r", rank=0, spool_path=str(spool / "0")),
        Rank(daemon, run="r", rank=1, spool_path=str(spool / "1")),
    ]
    for n, rank in enumerate(ranks):
        rank.spool(spool / str(n), step_batch(1, 0, kinds=BEGIN), linear_batch(2, 0))
    daemon.kill()
    ranks[1].kill()
    started()
    wait_for(lambda: not list(spool.glob("1/*.spool")))  # it has looked into both folders
    assert list(spool.glob("0/*.spool"))
    ranks[0].kill()
    wait_for(lambda: not list(spool.glob("0/*.spool")), 40)
    assert stored(store / "r") == 16


def test_a_run_that_was_killed_before_its_first_commit(started, tmp_path):
    store, spool = tmp_path / "store", tmp_path / "spool"
    daemon = started("--commit-interval-seconds", "60")
    rank = Rank(daemon, run_key="test:host:7", rank=0, spool_path=str(spool))
    rank.spool(spool, step_batch(1, 0), linear_batch(2, 0))
    name = rank.agent.all("welcome")[0].run
    daemon.kill()
    assert stored(store / name) == 0
    daemon = started()
    another = FakeAgent(daemon.address, hello(run_key="test:host:7", rank=1))
    assert another.connect().run == name
    another.close()
    rank.kill()
    wait_for(lambda: not list(spool.glob("*.spool")), 30)
    assert stored(store / name) == 8
    assert [path.name for path in store.glob("*.rankscope")] == [f"{name}.rankscope"]


def test_the_spool_of_a_process_of_another_host_is_left_alone(started, tmp_path):
    spool = tmp_path / "spool"
    daemon = started()
    agent = FakeAgent(daemon.address, hello("r", rank=0, spool_path=str(spool)))
    agent.connect()
    write_spool(spool, agent.hello, {1: step_batch(1, 0)})
    daemon.kill()
    agent.close()
    daemon = started()
    wait_for(lambda: (tmp_path / "store/r.rankscope").exists())
    assert daemon.stop() == 0
    assert list(spool.glob("*.spool"))


def test_sigterm_with_many_open_steps_is_bounded_and_the_rest_is_done_later(started, tmp_path):
    steps, run = 100, tmp_path / "store/r"
    daemon = started("--close-seconds", "0.5", "--commit-interval-seconds", "0.05")
    rank = Rank(daemon, run="r", rank=0)
    for step in range(steps):
        rank.agent.send(step_batch(step + 1, step, kinds=BEGIN))
    rank.agent.wait_durable()
    began = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(30) == 0
    assert time.monotonic() - began < 8.0
    rank.kill()
    assert len(sealed(run)) < steps
    started()
    wait_for(lambda: len(sealed(run)) == steps, 90)
    assert stored(run) == 4 * steps
    (files,) = {len(list(run.with_name("r.rankscope").glob("tables/nodes/step=7/seal-*")))}
    assert files >= 1


def test_what_was_half_sealed_when_it_was_killed_is_sealed_again(started, tmp_path):
    steps, run = 40, tmp_path / "store/r"
    daemon = started()
    rank = Rank(daemon, run="r", rank=0)
    for step in range(steps):
        rank.agent.send(step_batch(step + 1, step))
    rank.agent.wait_durable()
    wait_for(lambda: 0 < len(list(run.with_name("r.rankscope").glob("tables/*/*/seal-*"))))
    daemon.kill()
    rank.kill()
    started()
    wait_for(lambda: len(sealed(run)) == steps, 60)
    assert stored(run) == 4 * steps
    assert stored(run, "records") == 8 * steps
