"""Scripts run as jobs: plain or under torchrun, embedded or against a daemon."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
RUN_CASE = Path(__file__).parent / "run_case.py"


@dataclass
class Job:
    """A started script. `dump` is the folder with step{N}/, whoever writes it."""

    process: subprocess.Popen
    dump: Path
    config: Path
    output: str = field(default="")

    def finish(self, status=0, timeout=120):
        """Wait for the end, which must have this status; the job with its output."""
        try:
            self.output, _ = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        assert self.process.returncode == status, self.output
        return self

    def document(self, name="dump.json", folder="*", step=0):
        """A document of one process and step; `folder` may be a pattern that fits one."""
        (path,) = (self.dump / f"step{step}").glob(f"{folder}/{name}")
        return json.loads(path.read_text())


def environment(**more):
    """This process's environment without what would say a rank or a collector."""
    ours = ("RANKSCOPE_", "SLURM_", "OMPI_", "PMI", "MV2_")
    words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in words}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def start(
    script, *arguments, folder, ranks=0, restarts=0, under=(), config=None, daemon=None, **variables
):
    """Start a script with config.json as its first argument.

    `ranks` > 0 means torchrun, which may restart them; `under` is a command that starts it. With a
    daemon the layout lies in its store, under the name of `folder`; without one in `folder`/dump.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, dump = folder / "config.json", folder / "dump"
    # A busy machine may need long for the last files; the script waits for them.
    patient = {"dump_path": str(dump), "rankscope": {"exit_seconds": 60}}
    path.write_text(json.dumps(patient | (config or {})))
    if daemon is not None:
        dump = daemon.store / folder.name
        variables |= {"RANKSCOPE_COLLECTOR": daemon.address, "RANKSCOPE_RUN": folder.name}
        variables.setdefault("RANKSCOPE_SPOOL", str(folder / "spool"))
    command = [*under, sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    process = subprocess.Popen(
        [*command, str(script), *map(str, arguments), str(path)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Job(process, dump, path)


def start_case(name, folder, daemon=None):
    """Start one of tests/cases."""
    script = TESTS / "cases" / f"{name}.py"
    case = runpy.run_path(str(script))
    ranks = case.get("RANKS", 0)
    return start(RUN_CASE, script, folder=folder, ranks=ranks, config=case["CONFIG"], daemon=daemon)
