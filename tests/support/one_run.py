"""One run in the test's process, without gRPC: processes that stream into it."""

import zlib

from fake_agent import goodbye, wait_for

from rankscope.collector.store import open_readonly
from rankscope.v1 import collector_pb2 as pb


class Recorder:
    """A session that keeps what it is sent."""

    def __init__(self):
        self.got, self.closed, self.released = [], False, 0

    def send(self, message):
        self.got.append(message)

    def close(self):
        self.closed = True

    def release(self, size):
        self.released += size

    def all(self, kind):
        return [getattr(m, kind) for m in self.got if m.HasField(kind)]

    def durable(self):
        return max((ack.durable_sequence for ack in self.all("ack")), default=0)


class Client:
    """A process that streams into a service."""

    def __init__(self, service, said):
        self.service, self.hello, self.session = service, said, Recorder()
        self.sequence = 0
        committer = service.committer
        committer.post(lambda: committer.hello(said, self.session))
        wait_for(lambda: self.session.all("welcome"))

    def send(self, batch):
        self.sequence += 1
        payload = batch.SerializeToString()
        sent = pb.SequencedBatch(sequence=self.sequence, payload=payload, crc32=zlib.crc32(payload))
        committer = self.service.committer
        committer.post(lambda: committer.batch(self.hello.process_uuid, sent, self.session))

    def wait_durable(self):
        wait_for(lambda: self.session.durable() == self.sequence)

    def farewell(self):
        self.send(goodbye())
        return wait_for(lambda: self.session.all("farewell"))[0]


def events(run, kind):
    return [row for row in open_readonly(run).steps_rows().to_pylist() if row["event"] == kind]
