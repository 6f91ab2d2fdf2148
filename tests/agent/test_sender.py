"""The transport against a real gRPC server that misbehaves as told."""

import os
import socket
import threading
import time
import uuid

import pytest

from rankscope.agent.transport import Transport, TransportConfig
from rankscope.agent.transport.segment import read_frames
from rankscope.agent.transport.sender import load_grpc
from rankscope.v1 import collector_pb2 as pb

load_grpc(lambda level, text: None)  # as the agent does: before anything else imports grpc
import grpc  # noqa: E402
import scripted_collector as scripted  # noqa: E402


class Source:
    """Hands out one batch per `record`; what was taken together is merged as a recorder does."""

    def __init__(self):
        self.waiting = []
        self.lost_batches = []
        self._guard = threading.Lock()

    def record(self, step, size=100):
        batch = pb.Batch(
            steps=[pb.StepEvent(step=step, kind=pb.StepEvent.END)],
            columns=pb.Columns(max=b"x" * size),
        )
        with self._guard:
            self.waiting.append(batch)

    def take(self):
        with self._guard:
            return self.waiting.pop(0) if self.waiting else None

    def lost(self, batch, reason):
        self.lost_batches.append((batch, reason))
        again = pb.Batch(steps=batch.steps, drops=batch.drops)
        again.drops.add(step=batch.steps[-1].step, events=1, reason=reason)
        with self._guard:
            self.waiting.insert(0, again)


class Agent:
    """A transport with its source and log."""

    def __init__(self, tmp_path, *addresses, **settings):
        self.uuid = uuid.uuid4().hex
        self.log = []
        self.source = Source()
        settings = {"flush_seconds": 0.01, "settle_seconds": 0.0} | settings
        self.config = TransportConfig(
            dump_path=tmp_path / "dump",
            collector=addresses,
            spool_path=tmp_path / "spool",
            **settings,
        )
        self.hello = pb.Hello(process_uuid=self.uuid, pid=os.getpid(), host="here", boot_id="b")
        self.transport = Transport(
            self.config, self.hello, self.source, lambda level, text: self.log.append(text)
        )
        self.transport.start()

    def record(self, *steps, size=100):
        """Each step becomes a batch of its own."""
        for step in steps:
            spooled = self.transport.stats().spooled_batches
            self.source.record(step, size)
            self.transport.wake()
            until(lambda before=spooled: self.transport.stats().spooled_batches > before)

    def spool_files(self):
        return sorted(self.config.spool_folder().glob("*.spool"))


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


@pytest.fixture
def agents(tmp_path):
    made = []

    def make(*addresses, **settings):
        made.append(Agent(tmp_path, *addresses, **settings))
        return made[-1]

    yield make
    for agent in made:
        agent.transport.close("exit", 0.0)


@pytest.fixture
def collectors():
    made = []

    def make(**script):
        made.append(scripted.ScriptedCollector(**script))
        return made[-1]

    yield make
    for collector in made:
        collector.stop()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_everything_arrives_in_order_and_the_spool_is_gone(agents, collectors):
    collector = collectors()
    agent = agents(collector.address)
    agent.record(*range(1, 6))
    assert agent.transport.flush(10)
    result = agent.transport.close("exit", 10)
    assert (result.complete, result.farewell) == (True, True)
    assert result.folders == ("step0/rank0",)
    assert collector.sequences(agent.uuid) == [1, 2, 3, 4, 5, 6]
    assert [collector.batches[agent.uuid, n].steps[0].step for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert collector.batches[agent.uuid, 6].goodbye.reason == "exit"
    assert list(agent.config.spool_folder().iterdir()) == []
    assert len(agent.log) == 1
    assert "records to" in agent.log[0]
    assert "/runs/run" in agent.log[0]
    assert agent.transport.close("again", 10) is result


def test_the_hello_says_where_the_spool_lies_and_learns_the_rank(agents, collectors):
    collector = collectors()
    agent = agents(collector.address)
    collector.wait_for(lambda: collector.hellos)
    assert collector.hellos[0].spool_path == str(agent.config.spool_folder())
    agent.hello.rank.rank = 3
    agent.transport.update_hello(agent.hello)
    port = collector.port
    collector.stop()
    again = collectors(port=port)
    again.wait_for(lambda: again.hellos)
    assert again.hellos[0].rank.rank == 3


def test_a_lost_collector_is_resumed_after_what_it_has(agents, collectors):
    collector = collectors()
    agent = agents(collector.address)
    agent.record(1, 2)
    assert agent.transport.flush(10)
    collector.stop()
    agent.record(3, 4)
    again = collectors(port=collector.port)
    again.durable[agent.uuid] = 3
    again.wait_for(lambda: len(again.arrivals) == 1)
    assert agent.transport.flush(10)
    assert again.sequences(agent.uuid) == [4]
    assert sum("lost the collector" in line for line in agent.log) == 1


def test_unacknowledged_batches_are_sent_again_on_a_new_stream(agents, collectors):
    def break_once(collector, process, sequence, batch):
        if collector.streams == 1:
            return [grpc.StatusCode.INTERNAL] if sequence == 3 else []
        return scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=break_once)
    agent = agents(collector.address)
    agent.record(1, 2, 3)
    assert agent.transport.flush(10)
    assert collector.sequences(agent.uuid) == [1, 2, 3, 1, 2, 3]


def test_at_most_the_window_is_in_flight_and_a_large_batch_goes_alone(agents, collectors):
    release = threading.Event()

    def hold(collector, process, sequence, batch):
        if not release.is_set():
            return []
        return scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=hold)
    agent = agents(collector.address, in_flight_bytes=10_000, heartbeat_seconds=0.05)
    agent.record(1, 2, 3, 4, size=4000)
    collector.wait_for(lambda: collector.heartbeats >= 2)
    assert collector.sequences(agent.uuid) == [1, 2]
    agent.record(5, size=50_000)
    release.set()
    collector.durable[agent.uuid] = 2  # the next heartbeat's answer says it
    assert agent.transport.flush(10)
    assert collector.sequences(agent.uuid) == [1, 2, 3, 4, 5]


def test_a_collector_that_hangs_is_left_for_a_new_stream(agents, collectors):
    def hang_first(collector, process, sequence, batch):
        if collector.streams == 1:
            return ()
        return scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=hang_first)
    agent = agents(collector.address, ack_timeout_seconds=0.3)
    agent.record(1)
    assert agent.transport.flush(10)
    assert collector.streams == 2
    assert "nothing heard" in agent.transport.stats().last_problem


def test_heartbeats_keep_a_stream_that_only_waits_for_space(agents, collectors):
    collector = collectors(on_batch=scripted.silence)
    agent = agents(collector.address, ack_timeout_seconds=0.4, heartbeat_seconds=0.1)
    agent.record(1)
    collector.wait_for(lambda: collector.heartbeats >= 8)
    assert collector.streams == 1


def test_the_next_address_is_tried_and_remembered(agents, collectors):
    dead = f"127.0.0.1:{free_port()}"
    collector = collectors()
    agent = agents(dead, collector.address, connect_notice_seconds=0.2)
    agent.record(1)
    assert agent.transport.flush(10)
    assert agent.transport.stats().address == collector.address
    second = collectors()
    agent2 = agents(collector.address, second.address, connect_notice_seconds=0.2)
    agent2.record(1)
    assert agent2.transport.flush(10)
    collector.stop()
    agent2.record(2)
    assert agent2.transport.flush(10)
    assert second.sequences(agent2.uuid)[-1] == 2


def test_an_address_nobody_listens_on_is_said_once_and_kept(agents):
    address = f"127.0.0.1:{free_port()}"
    agent = agents(address, connect_notice_seconds=0.1, unreachable_exit_seconds=0.3)
    agent.record(1, 2)
    until(lambda: agent.log)
    time.sleep(0.3)  # long enough for several more looks: none may say it again
    began = time.monotonic()
    result = agent.transport.close("exit", 5)
    assert time.monotonic() - began < 1.5
    assert (result.complete, result.unsent_batches) == (False, 3)
    folder = str(agent.config.spool_folder())
    assert len(agent.log) == 2
    assert address in agent.log[0]
    assert folder in agent.log[0]
    assert f"rankscope deliver {folder}" in agent.log[1]
    assert len(agent.spool_files()) == 1


def test_a_collector_that_comes_late_gets_everything(agents, collectors):
    port = free_port()
    agent = agents(f"127.0.0.1:{port}")
    agent.record(1, 2, 3)
    collector = collectors(port=port)
    assert agent.transport.flush(10)
    assert collector.sequences(agent.uuid) == [1, 2, 3]


def test_a_refused_batch_is_skipped_and_counted(agents, collectors):
    def refuse_second(collector, process, sequence, batch):
        if sequence == 2:
            yield pb.FromCollector(
                problem=pb.Problem(
                    code=pb.Problem.INVALID, message="column max is short", refused_sequence=2
                )
            )
        else:
            yield from scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=refuse_second)
    agent = agents(collector.address)
    agent.record(1, 2)
    assert agent.transport.flush(10)
    agent.record(3)
    assert agent.transport.flush(10)
    assert collector.sequences(agent.uuid) == [1, 2, 3]
    stats = agent.transport.stats()
    assert (stats.refused_batches, stats.acked_batches) == (1, 3)
    assert sum("column max is short" in line for line in agent.log) == 1


def test_a_gap_is_filled_from_the_spool(agents, collectors):
    seen = []

    def lose_second(collector, process, sequence, batch):
        seen.append(sequence)
        if sequence == 2 and seen.count(2) == 1:
            problem = pb.Problem(code=pb.Problem.SEQUENCE_GAP, message="expected 2")
            yield pb.FromCollector(problem=problem)
        elif sequence == collector.durable.get(process, 0) + 1:
            yield from scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=lose_second)
    agent = agents(collector.address)
    agent.record(1, 2, 3)
    assert agent.transport.flush(10)
    assert sorted(set(collector.sequences(agent.uuid))) == [1, 2, 3]
    assert collector.streams == 1


@pytest.mark.parametrize("closes", [True, False])
def test_pushback_is_obeyed(agents, collectors, closes):
    times = []

    def overloaded(collector, process, sequence, batch):
        times.append(time.monotonic())
        if len(times) == 1:
            yield pb.FromCollector(
                problem=pb.Problem(
                    code=pb.Problem.OVERLOADED,
                    message="busy",
                    retry_after_seconds=0.6,
                    closes_stream=closes,
                )
            )
            if closes:
                yield grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            yield from scripted.acknowledge(collector, process, sequence, batch)

    collector = collectors(on_batch=overloaded)
    agent = agents(collector.address)
    agent.record(1)
    collector.wait_for(lambda: times)
    time.sleep(0.05)  # the answer is under way; a batch recorded now must wait
    agent.record(2)
    assert agent.transport.flush(10)
    assert times[1] - times[0] > 0.55


def test_a_replaced_store_gets_a_note_in_place_of_what_is_gone(agents, collectors):
    collector = collectors()
    agent = agents(collector.address)
    agent.record(1, 2, 3, size=40)
    assert agent.transport.flush(10)
    agent.transport._backlog.spool._end_segment()  # the segment was full: it goes with its ack
    assert agent.spool_files() == []
    collector.stop()
    empty = collectors(port=collector.port)
    agent.record(4)
    assert agent.transport.flush(10)
    assert empty.sequences(agent.uuid) == [3, 4]
    drop = empty.batches[agent.uuid, 3].drops[0]
    assert (drop.first_sequence, drop.last_sequence, drop.reason) == (1, 3, "not_kept")
    assert sum("its store was replaced" in line for line in agent.log) == 1


def test_a_batch_larger_than_the_collector_takes_is_replaced_by_a_note(agents, collectors):
    collector = collectors(on_hello=lambda c, h: scripted.welcome(c, h, max_message_bytes=5000))
    agent = agents(collector.address)
    agent.record(1, size=6000)
    agent.record(2)
    assert agent.transport.flush(10)
    assert collector.batches[agent.uuid, 1].drops[0].reason == "too_large"
    assert collector.batches[agent.uuid, 2].steps[0].step == 2


def test_a_full_spool_drops_whole_batches_and_keeps_their_steps(agents, collectors):
    port = free_port()
    agent = agents(f"127.0.0.1:{port}", spool_limit_bytes=20_000)
    agent.record(1, 2, size=8000)
    for step in (3, 4):
        agent.source.record(step, size=8000)
        agent.transport.wake()
        until(lambda step=step: len(agent.source.lost_batches) == step - 2)
    assert [reason for _, reason in agent.source.lost_batches] == ["spool_full"] * 2
    collector = collectors(port=port)
    agent.record(5, size=100)
    assert agent.transport.flush(10)
    sequences = collector.sequences(agent.uuid)
    assert sequences == list(range(1, len(sequences) + 1))  # what was dropped has no number
    arrived = [collector.batches[agent.uuid, sequence] for sequence in sequences]
    assert [step.step for batch in arrived for step in batch.steps] == [1, 2, 3, 4, 5]
    assert [drop.step for batch in arrived for drop in batch.drops] == [3, 4]
    assert [n for n in (len(batch.columns.max) for batch in arrived) if n] == [8000, 8000, 100]
    assert agent.transport.stats().dropped_batches == 2
    assert sum("is full" in line for line in agent.log) == 1


def test_a_full_spool_may_wait_for_space_within_its_bound(agents, collectors):
    port = free_port()
    agent = agents(
        f"127.0.0.1:{port}", spool_limit_bytes=20_000, on_full="block", block_seconds=10.0
    )
    agent.record(1, 2, size=8000)
    agent.source.record(3, size=8000)
    agent.transport.wake()
    until(lambda: agent.transport._backlog.waits_for_space)
    collectors(port=port)
    agent.transport.throttle()
    assert not agent.transport._backlog.waits_for_space
    assert agent.transport.flush(10)
    assert agent.transport.stats().acked_batches == 3
    assert agent.source.lost_batches == []


def test_the_end_waits_for_no_space(agents):
    agent = agents(
        f"127.0.0.1:{free_port()}", spool_limit_bytes=3000, on_full="block", block_seconds=60.0
    )
    agent.record(1)
    agent.source.record(2, size=5000)
    agent.transport.wake()
    until(lambda: agent.transport._backlog.waits_for_space)
    began = time.monotonic()
    result = agent.transport.close("signal 15", 1.0)
    assert time.monotonic() - began < 5
    assert not result.complete
    assert len(agent.source.lost_batches) == 1


def test_an_interpreter_that_starts_no_threads_is_not_waited_for(agents, collectors, monkeypatch):
    """As Python 3.12 in its exit handlers; what is left stays in the spool."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "rankscope-stream":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    agent = agents(collectors().address)
    agent.record(1)
    began = time.monotonic()
    result = agent.transport.close("exit", 30.0)
    assert time.monotonic() - began < 10
    assert (result.complete, result.unsent_batches) == (False, 2)
    assert len(agent.spool_files()) == 1


def test_a_goodbye_fits_into_a_full_spool(agents):
    agent = agents(f"127.0.0.1:{free_port()}", spool_limit_bytes=20_000, connect_notice_seconds=9)
    agent.record(1, 2, size=8000)
    agent.source.record(3, size=8000)
    result = agent.transport.close("exit", 0.1)
    assert result.unsent_batches == 3
    assert len(agent.source.lost_batches) == 1
    last = list(read_frames(agent.spool_files()[-1]))[-1].stored
    batch = pb.Batch.FromString(last.payload)
    assert batch.goodbye.reason == "exit"
    assert [drop.step for drop in batch.drops] == [3]


def test_without_a_usable_disk_memory_serves(tmp_path, monkeypatch, collectors):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    (tmp_path / "file").write_text("")
    (tmp_path / "spool").write_text("")
    collector = collectors()
    agent = Agent(tmp_path, collector.address)
    agent.record(1)
    assert agent.transport.flush(10)
    assert agent.transport.stats().spool_path == ""
    assert agent.transport.close("exit", 5).complete
    assert collector.sequences(agent.uuid) == [1, 2]
    assert sum("no spool on disk" in line for line in agent.log) == 1


def test_a_source_that_raises_does_not_stop_the_pump(agents, collectors):
    collector = collectors()
    agent = agents(collector.address)
    healthy = agent.source.take

    def broken():
        raise RuntimeError("broken recorder")

    agent.source.take = broken
    until(lambda: any("broken recorder" in line for line in agent.log))
    agent.source.take = healthy
    agent.record(1)
    assert agent.transport.flush(10)


def test_wakes_in_a_burst_share_a_batch(agents, collectors):
    collector = collectors()
    agent = agents(collector.address, flush_seconds=5.0, settle_seconds=0.1)
    assert agent.transport.flush(10)
    takes = []
    taken = agent.source.take
    agent.source.take = lambda: takes.append(time.monotonic()) or taken()
    for _ in range(50):
        agent.transport.wake()
        time.sleep(0.005)
    assert 1 <= len(takes) <= 4


def test_a_call_that_comes_before_start_or_after_close_is_harmless(tmp_path):
    source = Source()
    config = TransportConfig(
        dump_path=tmp_path / "d", collector=("127.0.0.1:1",), spool_path=tmp_path
    )
    log = []
    transport = Transport(
        config, pb.Hello(process_uuid=uuid.uuid4().hex), source, lambda *line: log.append(line)
    )
    transport.wake()
    assert transport.stats().state == "new"
    source.record(1)
    result = transport.close("exit", 1)
    assert result.unsent_batches == 2
    assert transport.flush(1) is False
    transport.start()
    transport.wake()
    assert transport.stats().state == "closed"


def test_leftovers_of_dead_processes_are_delivered_under_their_own_name(agents, collectors):
    collector = collectors()
    dead = agents(collector.address)
    collector.wait_for(lambda: collector.hellos)
    assert dead.transport.flush(10)
    collector.stop()
    dead.record(1, 2)
    assert not dead.transport.close("exit", 0.1).complete
    assert len(dead.spool_files()) == 1
    again = collectors(port=collector.port)
    agent = agents(collector.address, leftovers_seconds=0.05)
    agent.record(7)
    until(lambda: dead.spool_files() == [p for p in dead.spool_files() if agent.uuid in p.name])
    assert again.sequences(dead.uuid) == [1, 2, 3]
    later = [hello for hello in again.hellos if hello.process_uuid == dead.uuid]
    assert [hello.delivered_later for hello in later] == [True]
    assert again.sequences(agent.uuid) == [1]
