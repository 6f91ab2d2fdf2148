"""A collector under load: many simulated agents send prepared batches as fast as it acknowledges
them, or at a given rate. Prints rows made durable a second, times until the acknowledgement, and
the collector's memory.

    python deploy/bench/load.py                          64 agents at full speed for 20 seconds
    python deploy/bench/load.py --rate 200000            the same at 200,000 rows a second
    python deploy/bench/load.py --agents 1024 --steps 1  1,024 ranks in one step
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import numpy as np
import torch

from rankscope.agent import recorder as rec
from rankscope.agent.recorder import Recorder
from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc

WINDOW = 4  # batches that an agent sends before it waits for an acknowledgement


def prepared(rows: int) -> pb.Batch:
    """A batch with so many rows: calls of 100 functions, each with a tensor and a number."""
    recorder = Recorder()
    tensor = torch.randn(8, 16)
    for number in range(rows // 2):
        name = recorder.name_id(f"Functional.f{number % 100}.{number // 100}.forward")
        parts = (("input_args", (tensor, number % 7)),)
        recorder.event(0, name, rec.OUTPUT, rec.API, rec.FORWARD, parts=parts)
    batch = recorder.take()
    assert batch is not None
    return batch


@dataclass
class Totals:
    """What all agents together have seen."""

    rows: int
    durable: int = 0
    sent: int = 0
    waits: list[float] = field(default_factory=list)  # seconds from a batch to its acknowledgement


async def agent(
    address: str, rank: int, options: argparse.Namespace, batch: pb.Batch, totals: Totals
) -> None:
    """One simulated rank: its steps, each of `--batches` batches, until the time is over."""
    process = uuid.uuid4().hex
    recording = pb.Recording(
        task="statistics", level="L1", summary_mode="statistics", precision="low", extra_info=True
    )
    hello = pb.Hello(
        protocol_version=1,
        process_uuid=process,
        run="load",
        run_key="load:1",
        host=f"node{rank // 8}",
        boot_id=f"boot{rank // 8}",
        pid=1000 + rank,
        process_started=1.0,
        recording=recording,
        rank=pb.Rank(rank=rank, world_size=options.agents, local_rank=rank % 8, source="RANK"),
    )
    out: asyncio.Queue[pb.FromAgent | None] = asyncio.Queue()
    sent: dict[int, float] = {}
    acknowledged = asyncio.Event()

    async def messages():
        while (message := await out.get()) is not None:
            yield message

    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        call = collector_pb2_grpc.CollectorStub(channel).Collect(messages(), wait_for_ready=True)
        await out.put(pb.FromAgent(hello=hello))

        async def listen():
            async for message in call:
                if not message.HasField("ack"):
                    continue
                for sequence in [s for s in sent if s <= message.ack.durable_sequence]:
                    totals.waits.append(time.perf_counter() - sent.pop(sequence))
                    totals.durable += totals.rows
                acknowledged.set()

        listener = asyncio.create_task(listen())
        own = pb.Batch()
        own.CopyFrom(batch)
        events = own.columns.event_count
        sequence = step = 0
        end = time.perf_counter() + options.seconds
        pause = options.agents * totals.rows / options.rate if options.rate else 0.0
        while time.perf_counter() < end and (not options.steps or step < options.steps):
            own.columns.event_step = np.full(events, step, "<i8").tobytes()
            for number in range(options.batches):
                while len(sent) >= WINDOW:
                    acknowledged.clear()
                    await acknowledged.wait()
                own.columns.first_event = sequence * events
                del own.steps[:]
                if number == options.batches - 1:
                    recorded = events * options.batches
                    own.steps.add(step=step, kind=pb.StepEvent.END, events=recorded, time=1.0)
                sequence += 1
                payload = own.SerializeToString()
                made = pb.SequencedBatch(
                    sequence=sequence, payload=payload, crc32=zlib.crc32(payload)
                )
                sent[sequence] = time.perf_counter()
                totals.sent += totals.rows
                await out.put(pb.FromAgent(batch=made))
                await asyncio.sleep(pause)
            step += 1
        while sent:
            acknowledged.clear()
            await acknowledged.wait()
        listener.cancel()
        await out.put(None)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(address: str, collector: int, options: argparse.Namespace) -> None:
    batch = prepared(options.rows)
    totals = Totals(options.rows)
    began, used = time.perf_counter(), cpu_seconds(collector)
    tasks = [
        asyncio.create_task(agent(address, rank, options, batch, totals))
        for rank in range(options.agents)
    ]
    memory = [resident_bytes(collector)]
    everything = asyncio.gather(*tasks)
    while not everything.done():
        await asyncio.wait([everything], timeout=1.0)
        memory.append(resident_bytes(collector))
    took, used = time.perf_counter() - began, cpu_seconds(collector) - used
    waits = sorted(totals.waits)
    last = waits[int(len(waits) * 0.99)] if waits else float("nan")
    quarter = memory[len(memory) // 4]
    print(f"| agents | {options.agents} |")
    print(f"| rows sent, durable | {totals.sent:,}, {totals.durable:,} |")
    print(f"| rows durable a second | {totals.durable / took:,.0f} |")
    print(f"| collector's CPU microseconds a row | {used / totals.durable * 1e6:.2f} |")
    median = statistics.median(waits)
    print(f"| seconds to the acknowledgement, median, p99 | {median:.2f}, {last:.2f} |")
    print(
        f"| collector's memory MB: largest, after a quarter, at the end | "
        f"{max(memory) / 1e6:.0f}, {quarter / 1e6:.0f}, {memory[-1] / 1e6:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=1, help="batches a step")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as fit in the time")
    parser.add_argument("--rate", type=float, default=0.0, help="rows a second, all together")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="load"))
    port_file = folder / "port"
    serve = [sys.executable, "-m", "rankscope.collector.cli", "serve", "--store", folder / "store"]
    environ = os.environ | {"RANKSCOPE_SERVE_MAX_STREAMS": "4096"}
    log = (folder / "log").open("w")
    collector = subprocess.Popen(
        [*map(str, serve), "--listen", "127.0.0.1:0", "--port-file", str(port_file)],
        env=environ,
        stdout=log,
        stderr=log,
    )
    try:
        while not port_file.exists():
            if collector.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.05)
        address = json.loads(port_file.read_text())["address"]
        asyncio.run(load(address, collector.pid, options))
        began = time.perf_counter()
        collector.send_signal(signal.SIGTERM)
        status, took = collector.wait(120), time.perf_counter() - began
        print(f"| collector's exit status and time | {status}, {took:.1f} s |")
    finally:
        collector.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
