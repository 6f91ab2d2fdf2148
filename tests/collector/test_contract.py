"""An agent of the first contract is served today; other versions are told why not."""

import queue
import zlib
from pathlib import Path

import grpc
import pytest
from fake_agent import Daemon, goodbye, hello, step_batch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.stream import Stream
from rankscope.collector import contract
from rankscope.collector.query import open_run
from rankscope.v1 import collector_pb2 as pb

FIRST = Path(__file__).parent.parent / "golden/contract/first.binpb"


@pytest.fixture(scope="module")
def first_files():
    """The first contract, as protoc describes it."""
    return descriptor_pb2.FileDescriptorSet.FromString(FIRST.read_bytes()).file


@pytest.fixture(scope="module")
def first(first_files):
    """Message classes of the first contract, by their short names."""
    pool = descriptor_pool.DescriptorPool()
    for file in first_files:
        pool.AddSerializedFile(file.SerializeToString())
    classes = message_factory.GetMessageClassesForFiles([file.name for file in first_files], pool)
    return {name.removeprefix("rankscope.v1."): found for name, found in classes.items()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    started = Daemon(tmp_path_factory.mktemp("contract") / "store")
    yield started
    started.stop()


def as_first(first, kind, message):
    """What an agent of the first contract would send: it knows no field that came later."""
    old = first[kind].FromString(message.SerializeToString())
    old.DiscardUnknownFields()
    return old


def talk(address, first, messages, until):
    """Send messages of the first contract, and read answers with it until one is of that kind."""
    out = queue.SimpleQueue()
    for message in messages:
        out.put(message)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        collect = channel.stream_stream(
            "/rankscope.v1.Collector/Collect",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=first["FromCollector"].FromString,
        )
        answers = []
        for answer in collect(iter(out.get, None), wait_for_ready=True, timeout=20):
            answers.append(answer)
            if answer.WhichOneof("message") == until:
                out.put(None)
                return answers
    return answers


def test_the_first_agent_is_stored_by_the_newest_collector(daemon, first):
    def sequenced(number, batch):
        old = as_first(first, "Batch", batch)
        payload = old.SerializeToString()
        message = first["FromAgent"]()
        message.batch.sequence, message.batch.payload = number, payload
        message.batch.crc32 = zlib.crc32(payload)
        return message

    said = hello("old", rank=0, agent_version="0.0.1")
    greeting = first["FromAgent"](hello=as_first(first, "Hello", said))
    batches = [sequenced(1, step_batch(1, 0, events=6)), sequenced(2, goodbye())]
    answers = talk(daemon.address, first, [greeting, *batches], "farewell")
    assert answers[0].welcome.protocol_version == 1
    assert list(answers[-1].farewell.folders) == ["step0/rank0"]
    run = open_run(daemon.store / "old")
    assert run.sql("select count(*) as events from nodes").to_pylist() == [{"events": 6}]


def test_nothing_of_the_first_contract_was_renumbered_or_taken_away(first_files):
    today = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(today)
    then, now = _fields(first_files[0]), _fields(today)
    assert len(then) > 100
    assert {name: now.get(name) for name in then} == then


def _fields(file):
    """Message and name of a field -> its number, label and type; of enums, their numbers."""
    found = {}
    for message in file.message_type:
        for f in message.field:
            found[message.name, f.name] = (f.number, f.label, f.type, f.type_name)
        for inner in message.enum_type:
            found |= {(message.name, inner.name, v.name): v.number for v in inner.value}
    for enum in file.enum_type:
        found |= {(enum.name, v.name): v.number for v in enum.value}
    return found


@pytest.mark.parametrize(
    ("version", "upgrade"), [(0, "upgrade the agent"), (2, "upgrade the collector")]
)
def test_a_version_that_is_not_served_is_refused(daemon, first, version, upgrade):
    said = hello("versions", protocol_version=version, agent_version="9.9")
    greeting = first["FromAgent"](hello=as_first(first, "Hello", said))
    problem = talk(daemon.address, first, [greeting], "problem")[-1].problem
    assert problem.code == pb.Problem.REFUSED
    assert problem.closes_stream
    assert f"the agent (9.9) speaks version {version} " in problem.message
    assert problem.message.endswith(upgrade)
    assert not (daemon.store / "versions").exists()


def test_a_probe_is_answered_and_leaves_nothing_behind(daemon, first):
    before = sorted(daemon.store.iterdir())
    said = pb.FromAgent(hello=pb.Hello(protocol_version=1, probe=True))
    (answer,) = talk(daemon.address, {"FromCollector": pb.FromCollector}, [said], "none")
    assert answer.welcome.protocol_version == contract.PROTOCOL_VERSION
    assert answer.welcome.collector_version
    assert answer.welcome.time > 1.7e9
    assert sorted(daemon.store.iterdir()) == before


class Listener:
    def __init__(self):
        self.welcomes, self.problems = [], []

    def welcomed(self, welcome):
        self.welcomes.append(welcome)

    def troubled(self, problem):
        self.problems.append(problem)

    def acknowledged(self, sequence):
        pass


@pytest.mark.parametrize(("collectors", "served"), [(1, False), (2, True), (3, True)])
def test_an_agent_sends_nothing_to_a_collector_of_an_older_contract(tmp_path, collectors, served):
    listener = Listener()
    said = pb.Hello(protocol_version=2)
    stream = Stream(TransportConfig(dump_path=tmp_path), said, None, listener)
    stream.hear(pb.FromCollector(welcome=pb.Welcome(protocol_version=collectors)))
    assert bool(listener.welcomes) is served
    if not served:
        assert list(stream.requests()) == [pb.FromAgent(hello=said)]
        (problem,) = listener.problems
        assert problem.code == pb.Problem.REFUSED
        assert "version 1 of the contract, this agent version 2: upgrade the" in problem.message
