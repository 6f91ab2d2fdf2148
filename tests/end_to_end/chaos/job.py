"""A training script that tells what it does: `job.py PLAN_JSON`.

The plan: `folder` (journals, gates), `steps`, `calls` of torch.relu a step, `pace_seconds`, `gates`
(steps before which it waits for the file gate-STEP), `bare` (no agent), `prepare` and `fault`
(names of the functions below; the latter happens at `fault_rank`, `fault_step`).

It prints a line a step, and `done` before it ends.
"""

import atexit
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

now = time.monotonic


def say(*words):
    """One write: nothing is left in a buffer when the process is killed."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Job:
    def __init__(self, plan):
        self.plan = plan
        self.folder = Path(plan["folder"])
        self.rank = int(os.environ.get("RANK", "0"))
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.step = 0
        self.blocked = Blocked()
        self.inside = []  # called in the middle of a forward

    def run(self):
        prepare = PREPARATIONS.get(self.plan.get("prepare", ""))
        if prepare is not None:
            prepare(self)
        self.build()
        if self.plan.get("distributed"):
            self.join_group()
        for step in range(self.plan["steps"]):
            self.step = step
            self.wait_at_gate()
            with self.blocked:
                loss = self.train_step()
            say("step", self.step, "loss", float(loss).hex(), "blocked", *self.blocked.figures())
            if self.plan.get("distributed"):
                self.torch.distributed.barrier()
            time.sleep(self.plan.get("pace_seconds", 0.0))
            if (self.folder / "stop").exists():
                break
        say("done", now(), waited())

    def join_group(self):
        """By a file: gloo does not find together again in a restarted launcher's own store."""
        import torch.distributed as dist

        place = f"file://{self.folder}/group-{self.attempt}"
        world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", place, rank=self.rank, world_size=world_size)

    def build(self):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(7)
        self.torch = torch
        outer = self

        class Middle(torch.nn.Module):
            def forward(self, x):
                for action in outer.inside:
                    action()
                return torch.relu(x)

        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), Middle(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.batch = torch.randn(32, 8)
        self.debugger = None
        if not self.plan.get("bare"):
            from rankscope.agent import PrecisionDebugger
            from rankscope.agent.recorder import Recorder

            sys.path.insert(0, os.path.dirname(__file__))
            from journal import Journal

            Journal(self.folder).watch(Recorder)
            self.debugger = PrecisionDebugger(config_path=self.plan["config"])

    def train_step(self):
        if self.debugger is not None:
            self.debugger.start(model=self.model)
        self.maybe_fault()
        loss = self.model(self.batch).square().mean()
        for _ in range(self.plan.get("calls", 0)):
            self.torch.relu(self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.debugger is not None:
            self.debugger.stop()
            self.debugger.step()
        return loss.detach()

    def maybe_fault(self):
        name, plan = self.plan.get("fault"), self.plan
        here = (self.rank, self.step) == (plan.get("fault_rank", 0), plan.get("fault_step", 3))
        if name and here and self.attempt == 0:
            say("fault", time.time())
            with self.blocked.left_out():
                FAULTS[name](self)

    def wait_at_gate(self):
        if self.step in self.plan.get("gates", ()):
            say("gate", self.step)
            while not (self.folder / f"gate-{self.step}").exists():
                time.sleep(0.005)


def waited():
    """Seconds in which this thread slept or waited for a lock; waits for a processor don't count.

    Only differences mean something.
    """
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return now() - (int(ran) + int(queued)) / 1e9


class Blocked:
    """How long the training loop waited, what a fault itself takes left out."""

    def __init__(self):
        self.total = self.longest = 0.0

    def __enter__(self):
        self._before = waited()

    def __exit__(self, *_):
        blocked = waited() - self._before
        self.total += blocked
        self.longest = max(self.longest, blocked)

    @contextlib.contextmanager
    def left_out(self):
        before = waited()
        yield
        self._before += waited() - before

    def figures(self):
        return f"{self.total:.6f}", f"{self.longest:.6f}"


# ------------------------------------------------------------------------------------------ faults


def kill_9(job):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_9_in_forward(job):
    job.inside.append(lambda: kill_9(job))


def sigterm(job):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def sigterm_in_thread_of_work(job):
    """While the main thread records as fast as it can."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        job.torch.relu(job.batch)


def sigint(job):
    # A shell that starts things in the background has them ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def os_exit(job):
    job.torch.relu(job.batch)
    os._exit(5)


def sys_exit(job):
    sys.exit(3)


def exception(job):
    raise ValueError("the script's own error")


def exception_in_forward(job):
    def fail():
        raise ValueError("the model's own error")

    job.inside.append(fail)


def exception_that_is_caught(job):
    try:
        job.model(job.torch.randn(3, 3))
    except RuntimeError:
        return
    raise AssertionError("the shapes fit")


def segfault(job):
    import ctypes

    ctypes.string_at(0)


def fork_and_wait(job):
    """A child that would record, if it were not a fork."""
    child = os.fork()
    if child == 0:
        job.torch.relu(job.batch)
        os._exit(0)
    os.waitpid(child, 0)


def fork_that_exits_in_order(job):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status


def fork_while_recording(job):
    """Forks in a thread while the main thread records and the pump spools."""

    def fork_often():
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    thread = threading.Thread(target=fork_often)
    thread.start()
    while thread.is_alive():
        job.torch.relu(job.batch)
    thread.join()


class Numbers:
    """A dataset; its workers are forks that touch torch."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        return torch.relu(torch.ones(3)) * index


def data_loader(job):
    loader = job.torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
    assert sum(len(batch) for batch in loader) == 8


def threads(job):
    """Three threads that record beside the main one."""
    workers = [
        threading.Thread(target=lambda: [job.torch.relu(job.batch) for _ in range(50)])
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def run_a_child(job):
    """A child by exec that records into the same dump path."""
    plan = job.plan | {"prepare": "", "fault": "", "gates": [], "steps": 2}
    done = subprocess.run([sys.executable, __file__, json.dumps(plan)], stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def spawn(job):
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
    child.start()
    child.join()
    assert child.exitcode == 0


def clock_back(job):
    true = time.time
    time.time = lambda: true() - 86_400


def clock_forward(job):
    true = time.time
    time.time = lambda: true() + 86_400


def close_descriptors(job):
    """Closes the spool's files, and opens others under their numbers, which stay as they are."""
    mine = job.folder / "mine"
    for link in Path("/proc/self/fd").iterdir():
        if not os.path.exists(link) or "/spool/" not in os.readlink(link):
            continue
        with open(mine, "ab") as file:
            os.dup2(file.fileno(), int(link.name))
    assert mine.exists()
    atexit.register(lambda: mine.stat().st_size and os._exit(7))


def raise_in_thread_at_exit(job):
    atexit.register(lambda: 1 / 0)


# ------------------------------------------------------------------------------------ preparations


def few_descriptors(job):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def small_files(job):
    """The spool may not grow beyond 300 kB: EFBIG instead of ENOSPC."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def grpc_first(job):
    """The script is a gRPC client and server of its own, with messages of its own."""
    import grpc
    from google.protobuf import struct_pb2

    assert struct_pb2.Struct is not None
    job.server = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))
    port = job.server.add_insecure_port("127.0.0.1:0")
    job.server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    grpc.channel_ready_future(channel).result(timeout=20)
    job.channel = channel


def proxies(job):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy"):
        os.environ[name] = "http://127.0.0.1:9"


def data_loader_first(job):
    """Workers that were forked before there was an agent, and live as long as the job."""
    import torch

    job.torch = torch
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=1, persistent_workers=True
    )
    job.loader = iter(loader)
    next(job.loader)


def records_at_exit(job):
    """Works on in a thread after the main thread has ended, and once more at exit."""

    def work():
        threading.main_thread().join()
        for _ in range(20):
            job.torch.relu(job.batch)

    threading.Thread(target=work).start()
    atexit.register(lambda: job.torch.relu(job.batch))


def ignore_sigterm(job):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def own_sigterm_handler(job):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))


def _named(*functions):
    return {function.__name__: function for function in functions}


FAULTS = _named(
    kill_9,
    kill_9_in_forward,
    sigterm,
    sigterm_in_thread_of_work,
    sigint,
    os_exit,
    sys_exit,
    exception,
    exception_in_forward,
    exception_that_is_caught,
    segfault,
    fork_and_wait,
    fork_that_exits_in_order,
    fork_while_recording,
    data_loader,
    threads,
    run_a_child,
    spawn,
    clock_back,
    clock_forward,
    close_descriptors,
    raise_in_thread_at_exit,
)
PREPARATIONS = _named(
    few_descriptors,
    small_files,
    grpc_first,
    proxies,
    data_loader_first,
    records_at_exit,
    ignore_sigterm,
    own_sigterm_handler,
)

if __name__ == "__main__":
    atexit.register(lambda: say("exited", now(), waited()))  # the first one, so it runs last
    Job(json.loads(sys.argv[1])).run()
