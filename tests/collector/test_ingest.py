"""One run in this process, without gRPC: what is stored, answered and written, and when."""

import json
import shutil
import time

from batches import linear_batch
from fake_agent import hello, step_batch, wait_for
from one_run import Client, Recorder, events

from rankscope.collector.config import Config
from rankscope.collector.runs import Runs
from rankscope.collector.store import RunStore, StoreUnavailable, open_readonly
from rankscope.v1 import collector_pb2 as pb


def test_goodbye_does_not_wait_for_the_interval(open_run):
    client = Client(open_run(commit_interval_seconds=100.0), hello(rank=0))
    client.send(step_batch(1, 0))
    client.wait_durable()
    client.send(linear_batch(2, 1))
    assert list(client.farewell().folders) == ["step0/rank0", "step1/rank0"]
    assert client.session.closed
    assert client.session.durable() == 3


def test_batches_after_a_commit_share_the_next_one(open_run):
    client = Client(open_run(commit_interval_seconds=0.5), hello(rank=0))
    client.send(step_batch(1, 0))
    client.wait_durable()
    for number in range(2, 8):
        client.send(linear_batch(number, 0))
    client.wait_durable()
    assert [ack.durable_sequence for ack in client.session.all("ack")] == [1, 7]


def test_bytes_are_released_when_they_are_stored(open_run):
    client = Client(open_run(), hello(rank=0))
    first, second = step_batch(1, 0), linear_batch(2, 0)
    client.send(first)
    client.send(second)
    client.wait_durable()
    assert client.session.released == first.ByteSize() + second.ByteSize()


def test_a_full_disk_stops_acknowledgements_and_is_told_once(open_run, monkeypatch):
    service = open_run(commit_interval_seconds=0.01)
    run = service.run_path
    clients = [Client(service, hello(rank=rank)) for rank in (0, 1)]
    for client in clients:
        client.send(step_batch(1, 0))
        client.wait_durable()
    full, tries, commit = [True], [], RunStore.commit

    def refuse(self, *args, **kwargs):
        if full[0]:
            tries.append(1)
            raise StoreUnavailable("no space left on device")
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(RunStore, "commit", refuse)
    for client in clients:
        client.send(step_batch(2, 1))
    wait_for(lambda: len(tries) > 1)
    for client in clients:
        (problem,) = client.session.all("problem")
        assert problem.code == pb.Problem.NO_SPACE
        assert "no space left on device" in problem.message
        assert not problem.closes_stream
        assert client.session.durable() == 1
    full[0] = False
    for client in clients:
        client.wait_durable()
        assert [n.text for n in client.session.all("notice")] == ["the collector stores again"]
    assert open_readonly(run).read_step(1)[0].num_rows == 8


def test_layout_that_cannot_be_written_is_written_later(open_run, monkeypatch):
    service = open_run()
    client = Client(service, hello(rank=0))
    monkeypatch.setattr("rankscope.collector.runs.RETRY_SECONDS", 0.1)
    write, refused = service._layout.write, []

    def refuse_once(*args):
        if not refused:
            refused.append(args)
            raise OSError(28, "no space left on device")
        return write(*args)

    monkeypatch.setattr(service._layout, "write", refuse_once)
    client.send(step_batch(1, 0))
    wait_for((service.run_path / "step0/rank0/dump.json").exists)
    assert refused


def test_on_demand_writes_no_layout(open_run):
    service = open_run(layout="on_demand")
    client = Client(service, hello(rank=0))
    client.send(step_batch(1, 0))
    assert list(client.farewell().folders) == []
    assert list(service.run_path.iterdir()) == []


def test_many_processes_are_not_rendered(open_run):
    service = open_run(layout_max_processes=2)
    clients = [Client(service, hello(rank=rank)) for rank in range(3)]
    (notice,) = wait_for(lambda: clients[2].session.all("notice"))
    assert "rankscope export" in notice.text
    clients[0].send(step_batch(1, 0))
    assert list(clients[0].farewell().folders) == []


def test_a_restart_writes_what_is_missing_and_seals_what_is_not(open_run):
    service = open_run()
    run = service.run_path
    done, half = (Client(service, hello(rank=rank, pid=rank)) for rank in (0, 1))
    for client in (done, half):
        client.send(step_batch(1, 0))
        client.send(step_batch(2, 1, kinds=(pb.StepEvent.BEGIN,)))
    done.farewell()
    half.wait_durable()
    wait_for(lambda: events(run, "sealed"))
    shutil.rmtree(run / "step0")
    service = open_run(restart_grace_seconds=0.2)
    wait_for((run / "step0/rank0/dump.json").exists)
    wait_for((run / "step0/rank1/dump.json").exists)
    missing = wait_for(
        lambda: [
            m
            for m in (json.loads(row["missing"]) for row in events(run, "sealed"))
            if m.get(half.hello.process_uuid) == "lost"
        ]
    )
    assert missing[-1] == {
        done.hello.process_uuid: "left: exit",
        half.hello.process_uuid: "lost",
    }
    folders = {row["folder"]: row["state"] for row in open_readonly(run).processes()}
    assert folders == {"rank0": "left", "rank1": "lost"}


def test_a_restart_does_not_render_or_seal_what_stands(open_run):
    service = open_run()
    run = service.run_path
    client = Client(service, hello(rank=0))
    client.send(step_batch(1, 0))
    client.farewell()
    wait_for(lambda: events(run, "sealed"))
    wait_for(lambda: not service.is_busy())
    before = (run / "step0/rank0/dump.json").stat().st_mtime_ns
    service = open_run()
    wait_for(lambda: not service.is_busy())
    open_run()
    assert (run / "step0/rank0/dump.json").stat().st_mtime_ns == before
    assert len(events(run, "sealed")) == 1


def test_a_replaced_run_stays_out_of_the_layout_after_a_restart(open_run):
    service = open_run()
    run = service.run_path
    for pid in (7, 8):
        client = Client(service, hello(rank=0, pid=pid))
        client.send(step_batch(1, pid))
        client.farewell()
    service = open_run()
    wait_for(lambda: not service.is_busy())
    assert [path.name for path in run.iterdir()] == ["step8"]
    folders = [row["folder"] for row in open_readonly(run).processes()]
    assert sorted(folders, key=str) == [None, "rank0"]


def test_a_run_key_is_found_again_by_a_restarted_collector(tmp_path):
    said = hello(run_key="slurm:77", rank=0)
    names = []
    for _ in range(2):
        runs = Runs(Config(), "test", "0", store=tmp_path)
        service = runs.enter(said, session := Recorder())
        wait_for(lambda session=session: session.all("welcome"))
        names.append(service.run_path.name)
        runs.close()
    assert names[0] == names[1]
    assert names[0] == time.strftime("%Y") + names[0][4:]
    assert names[0].endswith("-77")
