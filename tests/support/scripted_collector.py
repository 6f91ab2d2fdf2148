"""A real gRPC server that answers as a test tells it to."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc


class ScriptedCollector(collector_pb2_grpc.CollectorServicer):
    """Keeps what it gets; by default acknowledges each batch and answers a goodbye.

    `on_batch(collector, stream, batch)` may yield answers of its own instead.
    """

    def __init__(self, port=0, on_batch=None, on_hello=None):
        self.on_batch = on_batch or acknowledge
        self.on_hello = on_hello or welcome
        self.hellos = []
        self.batches = {}  # (process, sequence) -> Batch
        self.arrivals = []  # (process, sequence), repeats included
        self.durable = {}  # process -> sequence
        self.heartbeats = 0
        self.streams = 0
        self.largest_unacked = 0
        self._changed = threading.Condition()
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 20)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        collector_pb2_grpc.add_CollectorServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def Collect(self, request_iterator, context):
        answers = queue.Queue()
        threading.Thread(target=self._read, args=(request_iterator, answers), daemon=True).start()
        with self._changed:
            self.streams += 1
            self._changed.notify_all()
        while (answer := answers.get()) is not None:
            if isinstance(answer, grpc.StatusCode):
                context.abort(answer, "as the script says")
            yield answer

    def _read(self, request_iterator, answers):
        process = ""
        try:
            for message in request_iterator:
                kind = message.WhichOneof("message")
                if kind == "hello":
                    process = message.hello.process_uuid
                    self.hellos.append(message.hello)
                    found = self.on_hello(self, message.hello)
                elif kind == "batch":
                    found = self._take(process, message.batch)
                else:
                    self.heartbeats += 1
                    found = [ack(self.durable.get(process, 0))]
                for answer in found:
                    answers.put(answer)
                with self._changed:
                    self._changed.notify_all()
        except grpc.RpcError:
            pass
        answers.put(None)

    def _take(self, process, sequenced):
        batch = pb.Batch.FromString(sequenced.payload)
        self.arrivals.append((process, sequenced.sequence))
        self.batches.setdefault((process, sequenced.sequence), batch)
        return self.on_batch(self, process, sequenced.sequence, batch)

    def wait_for(self, condition, seconds=10.0):
        """Wait until condition() holds, fail loudly otherwise."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "the collector never saw it"

    def sequences(self, process):
        return [sequence for owner, sequence in self.arrivals if owner == process]

    def stop(self):
        self._server.stop(grace=0).wait(5)


def ack(sequence):
    return pb.FromCollector(ack=pb.Ack(durable_sequence=sequence))


def welcome(collector, hello, **fields):
    yield pb.FromCollector(
        welcome=pb.Welcome(
            protocol_version=1,
            collector_id="scripted",
            durable_sequence=collector.durable.get(hello.process_uuid, 0),
            run="run",
            run_path="/runs/run",
            **fields,
        )
    )


def acknowledge(collector, process, sequence, batch):
    collector.durable[process] = max(collector.durable.get(process, 0), sequence)
    yield ack(collector.durable[process])
    if batch.HasField("goodbye"):
        farewell = pb.Farewell(run_path="/runs/run", folders=["step0/rank0"])
        yield pb.FromCollector(farewell=farewell)


def silence(collector, process, sequence, batch):
    return ()
