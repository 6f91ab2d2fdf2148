"""How fast whole tensors get from a process to the store, as shares of what this machine can do.

    python deploy/bench/tensors.py [--peer PYTHON] [--mib 1024] [--rounds 3]

Distinct float32 tensors of 64 MiB are handed over as fast as the loop may; the clock stops when the
last of them is durable in the store. Each round measures beside it, in the same minute:

    local  a collector on this host, against `dd conv=fdatasync` of as many bytes
    grpc   a collector that reads no spool, against a bare gRPC stream of 1 MiB messages

`peak` is the most memory that the process took over what it had before the first capture. With
--peer, msProbe and rankscope record a small GPT with task tensor, see compare.py.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TENSOR_MIB = 64
SMALL_CASE = "small mix tensor"
JOB = """
import json, resource, sys, time
import torch
from rankscope.agent import PrecisionDebugger

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
tensors = [torch.full((int(sys.argv[2]) << 18,), float(i)) for i in range(int(sys.argv[3]))]
debugger = PrecisionDebugger(config_path=sys.argv[1])
debugger.start()
torch.sum(torch.ones(2))
debugger.stop()
debugger.step()
time.sleep(2)  # the collector is up
before, begin = peak(), time.time()
debugger.start()
for tensor in tensors:
    torch.sum(tensor)
debugger.stop()
debugger.step()
figures = {"begin": begin, "loop": time.time() - begin, "peak_mib": peak() - before}
print(json.dumps(figures), flush=True)
"""
SERVER = """
import asyncio, sys
import grpc

async def take(requests, context):
    size = 0
    async for message in requests:
        size += len(message)
    return str(size).encode()

async def main():
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    handler = grpc.stream_unary_rpc_method_handler(take)
    service = grpc.method_handlers_generic_handler("bare", {"Take": handler})
    server.add_generic_rpc_handlers((service,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default="", help="python with mindstudio-probe")
    parser.add_argument("--mib", type=int, default=1024, help="MiB in all")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count = options.mib // TENSOR_MIB
    print("| way | MiB/s | this machine | share | loop s | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name, ours, floor in (("local", local, dd), ("grpc", over_grpc, bare_grpc)):
        rounds = [(ours(count), floor(count)) for _ in range(options.rounds)]
        rates = [TENSOR_MIB * count / own["seconds"] for own, _ in rounds]
        floors = [TENSOR_MIB * count / seconds for _, seconds in rounds]
        share = statistics.median(a / b for a, b in zip(rates, floors, strict=True))
        loop, peak = (statistics.median(own[k] for own, _ in rounds) for k in ("loop", "peak_mib"))
        middle = statistics.median(rates), statistics.median(floors)
        cells = [name, *(f"{x:.0f}" for x in middle), f"{share:.2f}", f"{loop:.2f}", f"{peak:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.peer:
        compare = [sys.executable, str(HERE / "compare.py"), "--peer", options.peer]
        subprocess.run([*compare, "--cases", SMALL_CASE, "--rounds", "1"], check=True)


def local(count: int) -> dict[str, float]:
    """Through the spool that a collector on this host reads."""
    return _job(count)


def over_grpc(count: int) -> dict[str, float]:
    """Through the stream to a collector that reads no spool."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        port_file = Path(folder) / "port.json"
        command = [sys.executable, "-m", "rankscope.collector.cli", "serve", "--tensors", "stream"]
        command += ["--store", f"{folder}/store", "--listen", "127.0.0.1:0"]
        server = subprocess.Popen(
            [*command, "--port-file", str(port_file)], stderr=subprocess.DEVNULL
        )
        try:
            while not port_file.exists():
                time.sleep(0.05)
            address = json.loads(port_file.read_text())["address"]
            return _job(count, Path(folder) / "store", address)
        finally:
            server.terminate()
            server.wait()


def dd(count: int) -> float:
    """Seconds that the disk takes for as many bytes."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        begin = time.perf_counter()
        command = ["dd", "if=/dev/zero", f"of={folder}/bytes", "bs=8M", "conv=fdatasync"]
        command += [f"count={count * TENSOR_MIB // 8}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - begin


def bare_grpc(count: int) -> float:
    """Seconds that a stream takes which does nothing with its messages."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import grpc

    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{server.stdout.readline().strip()}"
        message = os.urandom(1 << 20)
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.stream_unary("/bare/Take")
            call(iter([message]), wait_for_ready=True)
            begin = time.perf_counter()
            call(message for _ in range(count * TENSOR_MIB))
            return time.perf_counter() - begin
    finally:
        server.kill()
        server.wait()


def _job(count: int, store: Path | None = None, address: str = "") -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        config = folder / "config.json"
        data = {"task": "tensor", "level": "L1", "dump_path": str(folder / "dump")}
        config.write_text(json.dumps(data | {"tensor": {"data_mode": ["forward", "input"]}}))
        command = [sys.executable, "-c", JOB, str(config), str(TENSOR_MIB), str(count)]
        environ = {**os.environ, "RANKSCOPE_COLLECTOR": address}
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        ended = _wait_for_blobs(store or folder, count, job)
        out, errors = job.communicate()
        if job.returncode or "left out" in errors:
            raise SystemExit(f"{out[-800:]}\n{errors[-1600:]}")
        found = json.loads(out.splitlines()[-1])
        return {**found, "seconds": ended - found["begin"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_blobs(folder: Path, count: int, job: subprocess.Popen[str]) -> float:
    """When all tensors were in the store: there they have a name once they are durable."""
    while job.poll() is None:
        if len(list(folder.glob("*.rankscope/blobs/??/*.pt"))) >= count:
            break
        time.sleep(0.01)
    return time.time()


if __name__ == "__main__":
    main()
