"""Stands in for `rankscope.collector.embedded`: election by lock, port file, acknowledgements."""

import argparse
import fcntl
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--run", type=Path)
run = parser.parse_args().run
sidecar = run.with_name(run.name + ".rankscope")

print("started with", json.dumps(sorted(os.environ)), "in", os.getcwd(), flush=True)
lock = os.open(sidecar / "lock", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(0)

sys.path.insert(0, os.environ["STAND_IN_TESTS"])
from scripted_collector import ScriptedCollector  # noqa: E402

collector = ScriptedCollector()
port = {
    "address": collector.address,
    "pid": os.getpid(),
    "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    "collector_id": "stand-in",
}
(sidecar / "port.new").write_text(json.dumps(port))
os.rename(sidecar / "port.new", sidecar / "port")
with open(sidecar / "arrivals", "a") as arrivals:
    seen, quiet_since = 0, time.monotonic()
    while time.monotonic() - quiet_since < 20:
        while seen < len(collector.arrivals):
            print(*collector.arrivals[seen], file=arrivals, flush=True)
            seen, quiet_since = seen + 1, time.monotonic()
        time.sleep(0.02)
