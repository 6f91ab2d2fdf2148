"""The table of faults."""

import contextlib
import os
import signal
import time

from .kills import kill_often
from .stage import Row, free_port, until

KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM

# A flush every 0.25 s: what a killed process recorded before that is on disk. The rest is slack for
# a busy machine, where the flushing thread gets its turn late.
LOSS_SECONDS = 1.5
# Kill-like ends of the job.
UNFLUSHED = {"may_lose_seconds": LOSS_SECONDS}
FULL = {"calls": 400, "steps": 12}


def job(fault="", step=3, rank=0, **more):
    return {"fault": fault, "fault_step": step, "fault_rank": rank} | more


# ------------------------------------------------------------------------------------------ actions


def start(stage):
    stage.start_daemon()


def kill(stage):
    stage.kill_daemon()


def restart(stage):
    stage.kill_daemon()
    stage.start_daemon()


def stop_in_order(stage):
    stage.daemon.terminate()
    stage.daemon.wait(60)


def freeze(stage):
    stage.daemon.send_signal(signal.SIGSTOP)


def thaw(stage):
    stage.daemon.send_signal(signal.SIGCONT)


def network(**faults):
    def change(stage):
        for name, value in faults.items():
            setattr(stage.proxy, name, value)

    return change


def cut(stage):
    stage.proxy.cut()


def cut_often(stage):
    for _ in range(5):
        stage.proxy.cut()
        time.sleep(0.1)


def half_open(stage):
    """The connection stays open and nothing passes any more."""
    stage.proxy.half_open = True


def heal(stage):
    stage.proxy.half_open = stage.proxy.refusing = False
    stage.proxy.delay_seconds = stage.proxy.bytes_per_second = 0.0


def move(stage):
    """Another collector for the same store takes over, at another address."""
    stage.kill_daemon()
    stage.port = free_port()
    stage.start_daemon()
    stage.proxy.target = f"127.0.0.1:{stage.port}"


def kill_embedded(stage):
    pid = stage.embedded_pid()
    os.kill(pid, signal.SIGKILL)


def await_first_rows(stage):
    until(lambda: (stage.run / "step0").exists())


def await_layout(stage):
    """A collector that lives a second at a time leaves most of it to the last one."""
    steps = sum(line.startswith("step ") for line in stage.read_log().splitlines())
    until(lambda: len(list(stage.run.glob("step*/*/dump.json"))) >= steps, 900)


def await_rows_then_kill(stage):
    """So the collector has heard of the process; what comes next finds the spool by itself."""
    await_first_rows(stage)
    kill(stage)


def await_rows_then_kill_embedded(stage):
    await_first_rows(stage)
    kill_embedded(stage)


def fill_disk(stage):
    if "step 1 " in stage.read_log():
        await_first_rows(stage)
    room = os.statvfs(stage.disk)
    with contextlib.suppress(OSError), open(stage.disk / "ballast", "wb") as ballast:
        ballast.write(bytes(room.f_bavail * room.f_frsize - 8192))


def make_room(stage):
    (stage.disk / "ballast").unlink()


def fail_with(*codes):
    """A server in the collector's place that answers each stream with an error."""

    def begin(stage):
        import grpc
        from scripted_collector import ScriptedCollector

        left = [getattr(grpc.StatusCode, code) for code in codes]

        def answer(collector, *_):
            yield left.pop(0) if len(left) > 1 else left[0]

        stage.notes["failing"] = ScriptedCollector(on_hello=answer)
        stage.proxy.target = stage.notes["failing"].address
        stage.proxy.cut()

    return begin


def end_failing(stage):
    stage.proxy.target = f"127.0.0.1:{stage.port}"
    stage.notes["failing"].stop()


# -------------------------------------------------------------------------------------------- table

COLLECTOR = (
    Row("nothing"),
    Row("collector kill -9", at={2: kill, 5: start}),
    Row("collector restarted often", at={1: restart, 3: restart, 5: restart}),
    Row("collector stops in order", at={2: stop_in_order, 5: start}),
    Row("collector down at start", collector="late", at={4: start}),
    Row(
        "collector down to the end",
        collector="late",
        after=start,
        deliver=True,
        exit_seconds=2.5,
    ),
    Row(
        "collector stopped (SIGSTOP)",
        at={2: freeze},
        after=thaw,
        settings={"exit_seconds": 1.0},
        exit_seconds=3.5,
    ),
    Row("collector stopped and resumed", at={2: freeze, 5: thaw}),
    Row("collector moves", through_proxy=True, at={3: move}),
    Row("first address dead", addresses_before=("127.0.0.1:9",)),
    Row(
        "collector answers errors",
        through_proxy=True,
        at={2: fail_with("INTERNAL", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"), 5: end_failing},
    ),
    Row(
        "collector's disk full",
        disk_bytes=8 << 20,
        at={2: fill_disk, 5: make_room},
    ),
    Row(
        "collector's disk full at start",
        disk_bytes=8 << 20,
        at={0: fill_disk},
        settings={"exit_seconds": 1.0},
        after=make_room,
        deliver=True,
    ),
    Row(
        "collector's disk full at exit",
        disk_bytes=8 << 20,
        at={2: fill_disk},
        settings={"exit_seconds": 1.0},
        exit_seconds=3.5,
        after=make_room,
    ),
)
NETWORK = (
    Row("connection cut", through_proxy=True, at={2: cut, 4: cut_often}),
    Row("network delays 0.2 s", through_proxy=True, at={1: network(delay_seconds=0.2), 6: heal}),
    Row(
        "network throttled",
        through_proxy=True,
        plan={"calls": 300},
        at={1: network(bytes_per_second=200_000.0), 6: heal},
    ),
    Row(
        "network refuses",
        through_proxy=True,
        at={2: lambda s: (network(refusing=True)(s), cut(s)), 5: heal},
    ),
    Row(
        "half-open at exit",
        through_proxy=True,
        at={2: half_open},
        settings={"exit_seconds": 1.0},
        exit_seconds=3.5,
        after=lambda stage: (heal(stage), cut(stage)),
    ),
    Row("http_proxy set", plan={"prepare": "proxies"}),
)
RANK = (
    Row("rank kill -9", plan=job("kill_9"), status=KILLED, **UNFLUSHED),
    Row("rank kill -9 in forward", plan=job("kill_9_in_forward"), status=KILLED, **UNFLUSHED),
    Row("rank kill -9 in step 0", plan=job("kill_9", 0), deliver=True, status=KILLED, **UNFLUSHED),
    Row(
        "rank kill -9 at full rate",
        plan=job("kill_9", 8, calls=300, steps=9, pace_seconds=0.0),
        status=KILLED,
        **UNFLUSHED,
    ),
    Row(
        "rank kill -9, collector down",
        plan=job("kill_9", 5),
        at={2: await_rows_then_kill},
        after=start,
        status=KILLED,
        **UNFLUSHED,
    ),
    Row(
        "rank kill -9, embedded",
        plan=job("kill_9", 5),
        at={2: await_first_rows},
        collector="embedded",
        status=KILLED,
        **UNFLUSHED,
    ),
    Row("rank SIGTERM", plan=job("sigterm"), status=TERMINATED),
    Row(
        "rank SIGTERM at full rate",
        plan=job("sigterm_in_thread_of_work"),
        status=TERMINATED,
        may_lose_seconds=0.2,
    ),
    Row(
        "rank SIGTERM, collector down",
        plan=job("sigterm"),
        at={2: await_rows_then_kill},
        after=start,
        status=TERMINATED,
    ),
    Row(
        "SIGTERM handled by the script",
        plan=job("sigterm", prepare="own_sigterm_handler"),
        status=9,
    ),
    Row("rank SIGINT", plan=job("sigint"), status=-signal.SIGINT),
    Row("rank os._exit", plan=job("os_exit"), status=5, **UNFLUSHED),
    Row("rank sys.exit", plan=job("sys_exit"), status=3),
    Row("rank uncaught exception", plan=job("exception"), status=1),
    Row("rank exception in forward", plan=job("exception_in_forward"), status=1),
    Row("rank exception caught", plan=job("exception_that_is_caught")),
    Row("rank segfault", plan=job("segfault"), status=-signal.SIGSEGV, **UNFLUSHED),
)
SPOOL = (
    Row(
        "spool full, drop",
        collector="late",
        plan=FULL,
        settings={"spool_limit_bytes": 1 << 20},
        after=start,
        deliver=True,
        drops=True,
    ),
    Row(
        "spool full, drained later",
        collector="late",
        plan=FULL | {"pace_seconds": 0.1},
        at={8: start},
        settings={"spool_limit_bytes": 1 << 20},
        drops=True,
    ),
    Row(
        "spool full, block",
        collector="late",
        plan=FULL | {"steps": 16},
        settings={"spool_limit_bytes": 1 << 20, "on_full": "block", "block_seconds": 0.5},
        after=start,
        deliver=True,
        drops=True,
        blocked_seconds=16 * 0.7,
    ),
    Row(
        "spool full, block, SIGTERM",
        collector="late",
        plan=FULL | job("sigterm", 13) | {"steps": 16},
        settings={"spool_limit_bytes": 1 << 20, "on_full": "block", "block_seconds": 3.0},
        after=start,
        deliver=True,
        drops=True,
        status=TERMINATED,
        blocked_seconds=16 * 3.0,
    ),
    Row(
        "spool's disk full",
        collector="late",
        plan=FULL,
        disk_bytes=512 << 10,
        small_spool=True,
        after=start,
        deliver=True,
        drops=True,
    ),
    Row(
        "spool files limited",
        collector="late",
        plan=FULL | {"prepare": "small_files"},
        after=start,
        deliver=True,
        drops=True,
    ),
    Row(
        "spool folder not writable",
        settings={"spool_path": "/dev/null/spool"},
        environ={"XDG_STATE_HOME": "/dev/null/state"},
    ),
)
PROCESSES = (
    Row("embedded", collector="embedded", exit_seconds=30.0, settings={"exit_seconds": 30.0}),
    Row(
        "embedded collector kill -9",
        collector="embedded",
        at={3: await_rows_then_kill_embedded},
        settings={"exit_seconds": 40.0},
        exit_seconds=45.0,
    ),
    Row("fork", plan=job("fork_and_wait")),
    Row("fork that exits in order", plan=job("fork_that_exits_in_order")),
    Row("forks while recording", plan=job("fork_while_recording"), blocked_seconds=30.0),
    Row("DataLoader, stream open", plan=job("data_loader", 4), blocked_seconds=30.0),
    Row("DataLoader, before the stream", plan={"prepare": "data_loader_first"}),
    Row("spawn", plan=job("spawn"), by_exec=True, blocked_seconds=60.0),
    Row("threads", plan=job("threads"), blocked_seconds=30.0),
    Row(
        "child by exec, same dump path", plan=job("run_a_child"), by_exec=True, blocked_seconds=90.0
    ),
    Row("gRPC and protobuf before us", plan={"prepare": "grpc_first"}, by_exec=True),
    Row("spool's descriptors closed", plan=job("close_descriptors", steps=9)),
    Row("ulimit -n 64", plan={"prepare": "few_descriptors"}),
    Row("clock back a day", plan=job("clock_back")),
    Row("clock forward a day", plan=job("clock_forward")),
    Row("records in threads at exit", plan={"prepare": "records_at_exit"}),
    Row("error in another's exit handler", plan=job("raise_in_thread_at_exit")),
    Row(
        "elastic restart",
        plan=job("kill_9", 2, rank=1),
        ranks=2,
        **UNFLUSHED,
    ),
)
ENDLESS = {"steps": 1_000_000, "calls": 20, "pace_seconds": 0.2}
MOMENTS = (
    Row(
        "collector kill -9, 20 moments",
        plan=ENDLESS,
        during=kill_often(20),
        deliver=True,
        blocked_seconds=9.0,
    ),
)
LONG = (
    Row(
        "collector kill -9, 500 moments",
        plan=ENDLESS,
        during=kill_often(500),
        after=await_layout,
        deliver=True,
        blocked_seconds=99.0,
    ),
)
ROWS = (*MOMENTS, *COLLECTOR, *NETWORK, *RANK, *SPOOL, *PROCESSES)
