"""Simulated agents that send as fast as they are acknowledged: `load.py ADDRESS PLAN_JSON`.

The plan: `run`, `agents`, `seconds`, `events` a batch, `batches` in flight for each agent, and
`batches_per_step`. Batches are prepared once; only sequence, step and event numbers are new.
Prints one JSON object: what was acknowledged, and how long acknowledgements took.
"""

import asyncio
import json
import os
import sys
import time
import uuid
import zlib
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import grpc.aio
import numpy as np
from batches import linear_batch

from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc


class Agent:
    """One stream. `durable` batches of `sent` are acknowledged."""

    def __init__(self, rank, plan, prepared):
        self.process = uuid.uuid4().hex
        self.sent = self.durable = 0
        self.waits = []
        self._rank, self._plan, self._prepared = rank, plan, prepared
        self._sent_at = {}
        self._changed = asyncio.Condition()

    async def stream(self, stub, deadline):
        call = stub.Collect(wait_for_ready=True)
        await call.write(pb.FromAgent(hello=self._hello()))
        reader = asyncio.create_task(self._read(call))
        while time.monotonic() < deadline:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self.sent - self.durable < self._plan["batches"] or reader.done()
                )
            if reader.done():
                break
            await self._send(call)
        await self._say_goodbye(call)
        # Not for the farewell: the layout of so many steps takes much longer than to store them.
        async with self._changed:
            stored = self._changed.wait_for(lambda: self.durable == self.sent or reader.done())
            await asyncio.wait_for(stored, 120)
        reader.cancel()

    async def _send(self, call):
        plan = self._plan
        step, place = divmod(self.sent, plan["batches_per_step"])
        more = pb.Batch(columns=pb.Columns(first_event=self.sent * plan["events"]))
        more.columns.event_step = np.full(plan["events"], step, "<i8").tobytes()
        if place == plan["batches_per_step"] - 1:
            events = plan["events"] * plan["batches_per_step"]
            more.steps.add(step=step, kind=pb.StepEvent.END, events=events, time=time.time())
        # Two messages one after the other are one, in which the later fields win.
        await self._write(call, self._prepared + more.SerializeToString())

    async def _say_goodbye(self, call):
        await self._write(call, pb.Batch(goodbye=pb.Goodbye(reason="exit")).SerializeToString())

    async def _write(self, call, payload):
        self.sent += 1
        self._sent_at[self.sent] = time.monotonic()
        batch = pb.SequencedBatch(sequence=self.sent, payload=payload, crc32=zlib.crc32(payload))
        await call.write(pb.FromAgent(batch=batch))

    async def _read(self, call):
        async for message in call:
            if message.HasField("problem"):
                print("problem", message.problem, file=sys.stderr)
            if message.HasField("ack"):
                async with self._changed:
                    for sequence in range(self.durable + 1, message.ack.durable_sequence + 1):
                        self.waits.append(time.monotonic() - self._sent_at.pop(sequence))
                    self.durable = max(self.durable, message.ack.durable_sequence)
                    self._changed.notify_all()

    def _hello(self):
        return pb.Hello(
            protocol_version=1,
            process_uuid=self.process,
            run=self._plan["run"],
            host="elsewhere",
            boot_id="another-boot",
            pid=1000 + self._rank,
            process_started=1.0,
            rank=pb.Rank(rank=self._rank, world_size=self._plan["agents"], source="RANK"),
            recording=pb.Recording(
                task="statistics", level="L1", summary_mode="statistics", precision="low"
            ),
        )


async def main(address, plan):
    prepared = linear_batch(1, 0, plan["events"]).SerializeToString()
    agents = [Agent(rank, plan, prepared) for rank in range(plan["agents"])]
    deadline = time.monotonic() + plan["seconds"]
    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = collector_pb2_grpc.CollectorStub(channel)
        await asyncio.gather(*(agent.stream(stub, deadline) for agent in agents))
    waits = np.array([wait for agent in agents for wait in agent.waits])
    sent = sum(agent.sent for agent in agents)
    print(
        json.dumps(
            {
                "sent": sent,
                "durable": sum(agent.durable for agent in agents),
                "events": (sent - len(agents)) * plan["events"],
                "ack_p50_seconds": round(float(np.median(waits)), 3),
                "ack_p99_seconds": round(float(np.quantile(waits, 0.99)), 3),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
