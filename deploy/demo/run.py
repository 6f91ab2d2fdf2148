"""The demo: a collector, two training ranks, and one question that finds where the ranks differ.

Everything it makes lies in demo_output/, which is emptied first. Options are handed to train.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = Path("demo_output")
RUN = OUTPUT / "store" / "demo"
COMMAND = [str(Path(sys.executable).with_name("rankscope"))]

QUESTION = """
select step, record, part, path,
       any_value(shape) filter (rank = 0) as rank0, any_value(shape) filter (rank = 1) as rank1
from records
where shape is not null
group by step, record, part, path
having count(distinct shape) > 1
order by step, min(seq), part, path
limit 3
"""


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    config = OUTPUT / "config.json"
    config.write_text(json.dumps({"task": "statistics", "level": "L1"}))
    say("1. A collector listens. On a cluster it runs on the storage node.")
    collector, address = start_collector()
    try:
        say("2. Two ranks train. train.py imports a debugger and calls start, stop and step.")
        train(config, address, sys.argv[1:])
    finally:
        collector.terminate()
        collector.wait(timeout=30)
    if collector.returncode != 0:
        raise SystemExit(f"the collector ended with status {collector.returncode}; see {OUTPUT}")
    show_results()
    say(f"Done in {time.monotonic() - began:.0f} s. What to try next:")
    print(NEXT)


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def start_collector() -> tuple["subprocess.Popen[bytes]", str]:
    """A collector on a free port, and its address."""
    port_file = OUTPUT / "port"
    command = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--store", str(OUTPUT / "store")]
    print("$ rankscope", *command[1:], flush=True)
    log = (OUTPUT / "collector.log").open("wb")
    collector = subprocess.Popen(
        [*command, "--port-file", str(port_file)], stdout=log, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 60
    while not port_file.exists():
        if collector.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no collector: {(OUTPUT / 'collector.log').read_text()}")
        time.sleep(0.05)
    return collector, json.loads(port_file.read_text())["address"]


def train(config: Path, address: str, options: list[str]) -> None:
    command = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    command += [str(HERE / "train.py"), "--config", str(config), *options]
    print(f"$ RANKSCOPE_COLLECTOR={address} RANKSCOPE_RUN=demo python", *command, flush=True)
    environ = dict(
        os.environ,
        RANKSCOPE_COLLECTOR=address,
        RANKSCOPE_RUN="demo",
        RANKSCOPE_SPOOL=str(OUTPUT / "spool"),
        OMP_NUM_THREADS="1",
    )
    done = subprocess.run([sys.executable, *command], env=environ)
    if done.returncode != 0:
        raise SystemExit(f"training ended with status {done.returncode}")


def show_results() -> None:
    say(f"3. {RUN} holds what msProbe would have written, for all ranks")
    print_tree(RUN)
    dump = RUN / "step0" / "rank0" / "dump.json"
    print(f"\n$ head -36 {dump}")
    print("\n".join(dump.read_text().splitlines()[:36]))
    say("4. Every rank and step in one list")
    call("ls", str(RUN))
    say("5. Where do the two ranks differ in shape? Step, API and rank in one question")
    call("query", str(RUN), QUESTION)
    print(
        "The windows of text do not come out even, so the last batch of each epoch is smaller on\n"
        "rank 1. DDP weighs both ranks alike, and no error tells of it."
    )


def print_tree(folder: Path) -> None:
    print(folder)
    steps = sorted(folder.iterdir(), key=lambda path: int(path.name.removeprefix("step")))
    for step in steps[:2]:
        print(f"  {step.name}")
        for rank in sorted(step.iterdir()):
            files = (f"{file.name} ({file.stat().st_size:,})" for file in sorted(rank.iterdir()))
            print(f"    {rank.name}  {'  '.join(files)}")
    print(f"  ... {len(steps) - 2} more steps")


def call(*arguments: str) -> None:
    shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
    print(f"$ rankscope {shown}", flush=True)
    subprocess.run([*COMMAND, *arguments], check=True)


NEXT = f"""\
  .venv/bin/rankscope query {RUN} "describe records"
  .venv/bin/rankscope query {RUN} "select step, rank, max(norm) from records group by all"
  Train without watching and compare the losses: they are equal to the last bit.
    .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node 2 deploy/demo/train.py
  Your own job: from rankscope.agent import PrecisionDebugger   (docs/configuration.md)"""


if __name__ == "__main__":
    main()
