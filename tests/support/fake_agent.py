"""A scripted agent: speaks the protocol and keeps all answers. Also starts real collectors."""

import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
import zlib
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from batches import linear_batch

from rankscope.collector import liveness
from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc

STATISTICS = pb.Recording(
    task="statistics", level="L1", summary_mode="statistics", precision="low", extra_info=True
)


def hello(run="", rank=None, **fields):
    """A Hello of a process on another host, unless fields say otherwise."""
    made = {
        "protocol_version": 1,
        "process_uuid": uuid.uuid4().hex,
        "run": run,
        "run_key": "test:1",
        "host": "elsewhere",
        "boot_id": "another-boot",
        "pid": 1234,
        "process_started": 1000.0,
        "recording": STATISTICS,
    }
    if rank is not None:
        made["rank"] = pb.Rank(rank=rank, world_size=2, local_rank=rank, source="RANK")
    return pb.Hello(**(made | fields))


def here(pid=None):
    """Fields of a Hello of a process of this host (default: of this process)."""
    pid = os.getpid() if pid is None else pid
    started = liveness.start_time(pid) or 1.0
    return {
        "host": socket.gethostname(),
        "boot_id": liveness.boot_id(),
        "pid": pid,
        "process_started": started,
    }


def step_batch(sequence, step, events=4, *, kinds=(pb.StepEvent.BEGIN, pb.StepEvent.END), **more):
    """Some linear calls of a step that begins and ends with them."""
    made = linear_batch(sequence, step, events)
    made.steps.extend(pb.StepEvent(step=step, kind=k, events=events, time=1.0) for k in kinds)
    made.MergeFrom(pb.Batch(**more))
    return made


def goodbye(reason="exit"):
    return pb.Batch(goodbye=pb.Goodbye(reason=reason))


class FakeAgent:
    """One process; `connect` may be called again after a break, and forgets what was got before."""

    def __init__(self, address, said):
        self.address, self.hello = address, said
        self.process = said.process_uuid
        self.sequence = 0
        self.got = []
        self._arrived = threading.Condition()
        self._channel = None

    def connect(self, wait=True):
        self.close()
        self.got, self.ended = [], False
        self._out = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(self.address, [("grpc.enable_http_proxy", 0)])
        stub = collector_pb2_grpc.CollectorStub(self._channel)
        self._out.put(pb.FromAgent(hello=self.hello))
        self._call = stub.Collect(iter(self._out.get, None), wait_for_ready=True)
        threading.Thread(target=self._listen, args=(self._call, self.got), daemon=True).start()
        return self.wait("welcome") if wait else None

    def _listen(self, call, got):
        try:
            for message in call:
                with self._arrived:
                    got.append(message)
                    self._arrived.notify_all()
        except grpc.RpcError:
            pass
        with self._arrived:
            self.ended = self.ended or call is self._call
            self._arrived.notify_all()

    def send(self, batch, sequence=None, crc32=None):
        """Send a Batch, or bytes that are none; returns its sequence."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        payload = batch if isinstance(batch, bytes) else batch.SerializeToString()
        crc = zlib.crc32(payload) if crc32 is None else crc32
        sent = pb.SequencedBatch(sequence=self.sequence, payload=payload, crc32=crc)
        self._out.put(pb.FromAgent(batch=sent))
        return self.sequence

    def heartbeat(self):
        self._out.put(pb.FromAgent(heartbeat=pb.Heartbeat(time=1.0)))

    def half_close(self):
        self._out.put(None)

    def wait(self, kind, check=lambda message: True, timeout=20.0):
        """The newest such message that passes the check."""

        def found():
            messages = [getattr(m, kind) for m in self.got if m.HasField(kind)]
            return next((m for m in reversed(messages) if check(m)), None)

        with self._arrived:
            assert self._arrived.wait_for(found, timeout), f"no {kind} in {self.got}"
            return found()

    def wait_durable(self, sequence=None):
        wanted = self.sequence if sequence is None else sequence
        return self.wait("ack", lambda ack: ack.durable_sequence >= wanted)

    def wait_end(self, timeout=20.0):
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.ended, timeout)

    def farewell(self):
        """Say goodbye and wait for the answer."""
        self.send(goodbye())
        return self.wait("farewell")

    def all(self, kind):
        return [getattr(m, kind) for m in self.got if m.HasField(kind)]

    def close(self):
        """Break the stream off."""
        if self._channel is not None:
            self._call.cancel()
            self._out.put(None)
            self._channel.close()


def write_spool(folder, said, batches):
    """A segment as a dead agent leaves it: with a torn frame at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    data = b"RSSPOOL1"
    frames = {0: said} | batches
    for sequence, message in frames.items():
        payload = message.SerializeToString()
        data += struct.pack("<IIQ", len(payload), zlib.crc32(payload), sequence) + payload
    torn = struct.pack("<IIQ", 1000, 1, 99) + b"torn"
    (folder / f"{said.process_uuid}-{1:020d}.spool").write_bytes(data + torn)


def wait_for(condition, timeout=20.0):
    """The first true value of the condition."""
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return value


class Daemon:
    """A `rankscope serve` process on port 0."""

    def __init__(self, store, *options):
        self.store = Path(store)
        self.port_file = self.store.parent / "port.json"
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "rankscope.collector.cli", "serve", "--store", str(store)]
        command += ["--listen", "127.0.0.1:0", "--port-file", str(self.port_file), *options]
        self.log = open(self.store.parent / "daemon.log", "ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        wait_for(lambda: self.port_file.exists() or self.process.poll() is not None)
        self.address = json.loads(self.port_file.read_text())["address"]

    def stop(self):
        """Its exit status after SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
        self.log.close()
        return self.process.wait(timeout=30)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
