"""How much memory a collector takes while agents send as fast as it lets them."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LOAD = Path(__file__).parent / "load.py"
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def watch(stage, seconds, **plan):
    """(samples, figures of the load): a sample is (seconds since the start, resident bytes)."""
    plan = {"run": "run", "agents": 64, "events": 500, "batches": 2, "batches_per_step": 4} | plan
    plan["seconds"] = seconds
    command = [sys.executable, str(LOAD), f"127.0.0.1:{stage.port}", json.dumps(plan)]
    began = time.monotonic()
    load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    samples = []
    try:
        while load.poll() is None and time.monotonic() - began < seconds + 180:
            samples.append((time.monotonic() - began, resident_bytes(stage.daemon.pid)))
            time.sleep(0.5)
    finally:
        load.kill()
        output = load.communicate()[0]
    return [s for s in samples if s[0] < seconds], json.loads(output)


def growth(samples, warm_up_share=0.4):
    """Growth of the resident memory, as medians, from the first part after the warm-up to the last.

    A commit or a seal takes memory for a moment; whose moment is the largest is chance.
    """
    seconds = samples[-1][0]
    begin = warm_up_share * seconds
    middle = begin + (seconds - begin) / 2
    early = statistics.median(size for at, size in samples if begin <= at < middle)
    late = statistics.median(size for at, size in samples if at >= middle)
    return late / early - 1.0
