"""Sets one row's fault up, runs it to its recovery, and judges it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from jobs import environment

from rankscope.collector.liveness import start_time

from .journal import read_journals
from .nursery import Nursery
from .proxy import FaultProxy
from .verdict import Outcome, judge

JOB = Path(__file__).parent / "job.py"
PATIENCE_SECONDS = 120.0  # of what must come at last, on a machine that is busy


@dataclass(frozen=True)
class Row:
    """One fault. Actions get the stage; those of `at` are keyed by the step that waits for them."""

    name: str
    plan: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    collector: str = "daemon"
    """"daemon"; "late": one is started by an action; "embedded": the agent starts it."""
    through_proxy: bool = False
    at: dict = field(default_factory=dict)
    during: object = None
    """Once the job has trained a step, beside it."""
    after: object = None
    """When the job is over, before anything is awaited."""
    deliver: bool = False
    """What the job left is delivered by hand, not by the collector of its host."""
    status: int = 0
    ranks: int = 0
    """Under torchrun, with so many."""
    by_exec: bool = False
    environ: dict = field(default_factory=dict)
    may_lose_seconds: float | None = None
    drops: bool = False
    """Whether some of it must have been dropped."""
    blocked_seconds: float = 1.0
    """Most that the training loop may have slept in the debugger, in all."""
    exit_seconds: float = 6.0
    """Most that the exit may have waited."""
    addresses_before: tuple = ()
    """Of collectors to be tried before the one that is there."""
    disk_bytes: int = 0
    """The store (or with `small_spool` the spool) lies on a disk of this size."""
    small_spool: bool = False


class Nurseries:
    """One for jobs, one for collectors."""

    def __init__(self):
        self.jobs = Nursery("torch", "torch.utils.data", "torch._dynamo", "rankscope.agent")
        self.collectors = Nursery(
            "grpc.aio", "rankscope.collector.cli", "rankscope.collector.runs", "rankscope.agent"
        )

    def close(self):
        self.jobs.close()
        self.collectors.close()


class Stage:
    """The processes and folders of one row."""

    def __init__(self, row, folder, nurseries):
        self.row, self.folder, self.nurseries = row, Path(folder), nurseries
        self.folder.mkdir(parents=True)
        self.disk = self.folder / "disk"
        self.store = (
            self.disk if row.disk_bytes and not row.small_spool else self.folder
        ) / "store"
        self.spool = (self.disk if row.small_spool else self.folder) / "spool"
        self.log = self.folder / "job.log"
        self.proxy = None
        self.daemons = []
        self.port = 0
        self.job = None
        self.notes = {}

    # ------------------------------------------------------------------ for the actions of a row

    @property
    def daemon(self):
        return self.daemons[-1]

    @property
    def embedded(self):
        return self.row.collector == "embedded"

    @property
    def side(self):
        return self.run.with_name(self.run.name + ".rankscope")

    @property
    def run(self):
        return self.folder / "dump" if self.embedded else self.store / "run"

    def start_daemon(self, *options):
        """A collector, on the port of the one before; returns when it listens."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        command = ["serve", "--store", self.store, "--listen", f"127.0.0.1:{self.port}"]
        command += ["--port-file", port_file, *options]
        self.daemons.append(
            self.nurseries.collectors.start(
                "rankscope.collector.cli",
                *command,
                environ=environment(PYTHONWARNINGS="ignore"),
                output=self.folder / "collector.log",
            )
        )
        until(lambda: port_file.exists() or self.daemon.poll() is not None)
        assert port_file.exists(), (self.folder / "collector.log").read_text()
        if self.port == 0:
            self.port = int(json.loads(port_file.read_text())["address"].rpartition(":")[2])
        return self

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.wait(20)

    def embedded_pid(self):
        port = until(lambda: read_json(self.side / "port"))
        return port["pid"]

    def read_log(self):
        return self.log.read_text() if self.log.exists() else ""

    def await_line(self, text, seconds=PATIENCE_SECONDS):
        def found():
            assert text in self.read_log() or self.job.poll() is None, self.read_log()
            return text in self.read_log()

        until(found, seconds)

    def deliver(self, *paths):
        """`rankscope deliver`; its output."""
        output = self.folder / "deliver.log"
        address = [] if self.embedded else ["--collector", f"127.0.0.1:{self.port}"]
        child = self.nurseries.collectors.start(
            "rankscope.collector.cli",
            "deliver",
            *(paths or [self.spool]),
            *address,
            environ=environment(),
            output=output,
        )
        assert child.wait(PATIENCE_SECONDS) == 0, output.read_text()
        return output.read_text()

    def end_everything(self):
        """Kill what is left."""
        for process in (*self.daemons, self.job):
            if process is not None:
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGCONT)
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        if self.proxy is not None:
            self.proxy.close()
        port = read_json(self.side / "port") if self.embedded else None
        if port is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(port["pid"], signal.SIGKILL)

    # ------------------------------------------------------------------ the way of a row

    def play(self):
        """Run it; its outcome."""
        row = self.row
        outcome = Outcome(row.name)
        with contextlib.ExitStack() as ends:
            if row.disk_bytes:
                ends.enter_context(small_disk(self.disk, row.disk_bytes))
            ends.callback(self.end_everything)
            self._reserve_port()
            if row.collector == "daemon":
                self.start_daemon()
            self._start_job()
            for step, action in sorted(row.at.items()):
                self.await_line(f"gate {step}\n")
                action(self)
                (self.folder / f"gate-{step}").touch()
            if row.during is not None:
                self.await_line("step 0 ")
                row.during(self)
            outcome.status = self.job.wait(PATIENCE_SECONDS)
            outcome.exit_seconds = self._exit_seconds()
            if row.after is not None:
                row.after(self)
            if row.deliver and self.spool.exists():  # a job may die before it spools anything
                self.deliver()
            self._settle(outcome)
            judge(
                outcome,
                self.run,
                read_journals(self.folder),
                may_lose_seconds=row.may_lose_seconds,
            )
        self._judge_job(outcome)
        return outcome

    def _addresses(self):
        if self.embedded:
            return ()
        address = self.proxy.address if self.proxy else f"127.0.0.1:{self.port}"
        return (*self.row.addresses_before, address)

    def _reserve_port(self):
        self.port = free_port()
        if self.row.through_proxy:
            self.proxy = FaultProxy(f"127.0.0.1:{self.port}")

    def _start_job(self):
        row = self.row
        settings = {"exit_seconds": 5.0} | row.settings
        if not self.embedded:
            settings |= {"collector": list(self._addresses()), "run": "run"}
            settings.setdefault("spool_path", str(self.spool))
        config = self.folder / "config.json"
        config.write_text(
            json.dumps(
                {"dump_path": str(self.folder / "dump"), "level": "mix", "rankscope": settings}
            )
        )
        plan = {"folder": str(self.folder), "config": str(config), "steps": 7}
        plan |= {"gates": list(row.at), "pace_seconds": 0.02, "distributed": row.ranks > 0}
        plan = json.dumps(plan | row.plan)
        environ = environment(XDG_STATE_HOME=str(self.folder / "state")) | row.environ
        if not (row.by_exec or row.ranks):
            self.job = self.nurseries.jobs.start(JOB, plan, environ=environ, output=self.log)
            return
        command = [sys.executable]
        if row.ranks:
            command += ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
            command += [f"--nproc-per-node={row.ranks}", "--monitor-interval=0.1"]
        with open(self.log, "ab") as log:
            self.job = subprocess.Popen(
                [*command, str(JOB), plan], env=environ, stdout=log, stderr=log
            )

    def _exit_seconds(self):
        """From the last line of the script to the last exit handler; waits for a CPU left out."""
        words = [line.split() for line in self.read_log().splitlines()]
        said = {line[0]: float(line[2]) for line in words if line and line[0] in ("done", "exited")}
        return said["exited"] - said["done"] if len(said) == 2 and not self.row.ranks else 0.0

    def _settle(self, outcome):
        """Until nothing is on its way any more; then the collector ends in order."""
        spools = [self.side / "spool" if self.embedded else self.spool, self.folder / "state"]
        left = lambda: [p for s in spools for p in s.rglob("*.spool")]  # noqa: E731
        with contextlib.suppress(TimeoutError):
            until(lambda: not left(), 60)
        if left():
            outcome.faults.append(f"still in the spool: {sorted(p.name for p in left())}")
        if self.embedded:
            port = read_json(self.side / "port")
            if port is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(port["pid"], signal.SIGTERM)
                until(lambda: start_time(port["pid"]) is None, 60)
            return
        self.daemon.terminate()
        status = self.daemon.wait(PATIENCE_SECONDS)
        if status != 0:
            outcome.faults.append(f"the collector ended with status {status}")

    def _judge_job(self, outcome):
        row, say = self.row, outcome.faults.append
        log = self.read_log()
        if outcome.status != row.status:
            say(f"the job ended with {outcome.status}, not {row.status}: {log[-600:]}")
        figures = [line.split() for line in log.splitlines() if line.startswith("step ")]
        outcome.losses = losses(log)
        outcome.blocked_seconds = max((float(words[5]) for words in figures), default=0.0)
        if outcome.blocked_seconds > row.blocked_seconds:
            say(f"the loop was blocked for {outcome.blocked_seconds:.2f} s")
        if outcome.exit_seconds > row.exit_seconds:
            say(f"the exit took {outcome.exit_seconds:.2f} s")
        if row.drops != bool(outcome.dropped):
            say(f"{outcome.dropped} events were dropped")


def losses(log):
    """(step, loss) of every line that says one."""
    words = [line.split() for line in log.splitlines() if line.startswith("step ")]
    return [(int(w[1]), w[3]) for w in words]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def until(condition, seconds=PATIENCE_SECONDS):
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of so many bytes; OSError where one may not be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        raise OSError("may not mount a file system")
    try:
        yield
    finally:
        until(
            lambda: subprocess.run(["umount", str(path)], capture_output=True).returncode == 0, 20
        )
