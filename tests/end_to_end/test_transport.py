"""Real processes with a transport: how they end, what stays, what others deliver."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

HERE = Path(__file__).parent
JOB = HERE / "transport_job.py"


@pytest.fixture(scope="module")
def scripted():
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import scripted_collector

    return scripted_collector


@pytest.fixture
def collector(scripted):
    collector = scripted.ScriptedCollector()
    yield collector
    collector.stop()


@pytest.fixture
def start(tmp_path):
    """Starts the job with a scenario; whatever still runs at the end is killed."""
    running = []

    def start(scenario, *addresses, environ=None, **settings):
        settings |= {"dump_path": str(tmp_path / "dump"), "collector": addresses}
        if addresses:
            settings["spool_path"] = str(tmp_path / "spool")
        job = subprocess.Popen(
            [sys.executable, "-W", "error", JOB, json.dumps(settings), scenario],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environ or {}),
        )
        running.append(job)
        job.uuid = job.stdout.readline().split()[1]
        return job

    yield start
    for job in running:
        job.kill()
        job.communicate()


def await_line(job, wanted):
    """Lines up to and with the wanted one."""
    lines = []
    while not lines or wanted not in lines[-1]:
        line = job.stdout.readline()
        assert line, f"{wanted!r} never came: {lines} {job.stderr.read()}"
        lines.append(line.rstrip("\n"))
    return lines


def end(job, seconds=20):
    """Exit status, lines, stderr."""
    out, err = job.communicate(timeout=seconds)
    return job.returncode, out.splitlines(), err


def deliver(collector, *paths, seconds=10.0):
    done = subprocess.run(
        [sys.executable, "-c", DELIVER, collector, str(seconds), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


DELIVER = """
import sys
from pathlib import Path
from rankscope.agent.deliver import deliver
collector, seconds, *paths = sys.argv[1:]
deliver([Path(path) for path in paths], collector=collector, timeout=float(seconds))
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
"""


def spools(tmp_path):
    return sorted((tmp_path / "spool").rglob("*.spool"))


def until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_script_that_ends_has_delivered_everything(start, collector, tmp_path):
    status, lines, err = end(start("close_at_exit", collector.address))
    assert (status, lines[-1], err) == (0, "closed True", "")
    assert spools(tmp_path) == []


def test_a_script_that_raises_keeps_its_own_error_and_status(start, collector):
    job = start("raise_at_end", collector.address)
    status, lines, err = end(job)
    assert (status, lines[-1]) == (1, "closed True")
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: the script's own error\n")
    assert collector.sequences(job.uuid)[-1] == 21


@pytest.mark.parametrize("answers", [True, False])
def test_an_exit_without_close_prints_nothing(start, collector, answers):
    address = collector.address if answers else f"127.0.0.1:{free_port()}"
    status, _, err = end(start("no_close", address))
    assert (status, err) == (0, "")


def test_with_nobody_listening_the_exit_is_short_and_says_what_to_do(start, tmp_path):
    began = time.monotonic()
    status, lines, err = end(start("close_at_exit", f"127.0.0.1:{free_port()}"))
    assert time.monotonic() - began < 6
    assert (status, lines[-1], err) == (0, "closed False", "")
    assert sum("rankscope deliver" in line for line in lines) == 1
    assert len(spools(tmp_path)) == 1


def test_what_kill_9_left_is_delivered_once_and_can_be_repeated(start, collector, tmp_path):
    nobody = f"127.0.0.1:{free_port()}"
    job = start("hold", nobody)
    await_line(job, "recorded")
    job.kill()
    job.wait()
    assert len(spools(tmp_path)) == 1
    status, out, _ = deliver(nobody, tmp_path / "spool", seconds=0.5)
    assert status == 1
    assert "not delivered" in out
    status, out, err = deliver(collector.address, tmp_path / "spool")
    assert (status, out, err) == (0, f"process {job.uuid}: delivered 20 batches\n", "")
    assert collector.sequences(job.uuid) == list(range(1, 21))
    assert collector.hellos[-1].delivered_later
    assert [p for p in (tmp_path / "spool").rglob("*") if p.is_file()] == []
    assert deliver(collector.address, tmp_path / "spool")[:2] == (0, "nothing to deliver\n")


def test_a_torn_spool_is_delivered_up_to_its_last_whole_batch(start, collector, tmp_path):
    job = start("hold", f"127.0.0.1:{free_port()}")
    await_line(job, "recorded")
    job.kill()
    job.wait()
    (path,) = spools(tmp_path)
    os.truncate(path, path.stat().st_size - 5)
    assert deliver(collector.address, path)[0] == 0
    assert collector.sequences(job.uuid) == list(range(1, 20))


def test_deliver_leaves_the_spool_of_a_living_process_alone(start, collector, tmp_path):
    job = start("hold", f"127.0.0.1:{free_port()}")
    await_line(job, "recorded")
    status, out, _ = deliver(collector.address, tmp_path / "spool")
    assert status == 0
    assert "still running" in out
    assert collector.arrivals == []
    assert len(spools(tmp_path)) == 1


def test_deliver_names_a_path_that_is_no_spool(collector, tmp_path):
    status, _, err = deliver(collector.address, tmp_path / "nothing")
    assert status == 1
    assert "nothing: neither a folder nor a *.spool file" in err


def test_sigterm_flushes_and_keeps_the_exit_status(start, collector):
    job = start("await_signal", collector.address)
    await_line(job, "recorded")
    job.send_signal(signal.SIGTERM)
    status, _, err = end(job)
    assert (status, err) == (-signal.SIGTERM, "")
    last = collector.sequences(job.uuid)[-1]
    assert collector.batches[job.uuid, last].goodbye.reason == "signal 15"


def test_sigterm_with_nobody_listening_ends_within_its_second(start):
    job = start("await_signal", f"127.0.0.1:{free_port()}")
    await_line(job, "recorded")
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert end(job)[0] == -signal.SIGTERM
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("scenario", ["fork", "fork_connected"])
def test_forked_children_neither_send_nor_hang_nor_disturb(start, collector, scenario):
    job = start(scenario, collector.address)
    status, lines, err = end(job)
    assert (status, err) == (0, "")
    said = [line for line in lines if "records to" not in line]
    assert said == ["child 3", "child 3", "closed True"]
    assert collector.sequences(job.uuid) == [1, 2, 3, 4, 5, 6]
    assert collector.streams == 1


def test_proxies_are_not_asked(start, collector):
    proxy = f"http://127.0.0.1:{free_port()}"
    environ = {name: proxy for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy")}
    job = start("close_at_exit", collector.address, environ=environ)
    assert end(job)[1][-1] == "closed True"


def test_a_stopped_collector_never_stops_the_job(start, collector, scripted):
    collector.on_batch = scripted.silence
    job = start("hold", collector.address, exit_seconds=0.5)
    await_line(job, "recorded")
    began = time.monotonic()
    job.stdin.write("\n" * 20)
    job.stdin.close()
    job.stdin = None
    status, lines, err = end(job)
    assert time.monotonic() - began < 10
    assert (status, lines[-1], err) == (0, "closed False", "")


@pytest.fixture
def stand_in(tmp_path):
    """Environment in which the embedded collector is the stand-in."""
    package = tmp_path / "path" / "rankscope" / "collector"
    package.mkdir(parents=True)
    (package / "embedded.py").write_text((HERE / "stand_in_collector.py").read_text())
    yield {
        "PYTHONPATH": str(tmp_path / "path"),
        "STAND_IN_TESTS": str(HERE.parent / "support"),
        "PYTHONSTARTUP": "/nowhere",
    }
    port = tmp_path / "dump.rankscope" / "port"
    if port.exists():
        kill_collector(port)


def kill_collector(port):
    pid = json.loads(port.read_text())["pid"]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return pid


def test_many_ranks_start_one_collector(start, stand_in, tmp_path):
    jobs = [start("close_at_exit", environ=stand_in, exit_seconds=15.0) for _ in range(4)]
    for job in jobs:
        status, lines, err = end(job, 30)
        assert (status, lines[-1], err) == (0, "closed True", "")
    sidecar = tmp_path / "dump.rankscope"
    arrived = [line.split() for line in (sidecar / "arrivals").read_text().splitlines()]
    assert {uuid for uuid, _ in arrived} == {job.uuid for job in jobs}
    assert len(arrived) == len({tuple(pair) for pair in arrived})
    log = (sidecar / "collector.log").read_text()
    assert log.count("started with") == 1
    assert "PYTHONSTARTUP" not in log
    assert log.rstrip().endswith("in /")
    assert list((sidecar / "spool").iterdir()) == []


def test_a_killed_embedded_collector_is_started_again_for_what_is_left(start, stand_in, tmp_path):
    job = start("hold", environ=stand_in, exit_seconds=15.0)
    await_line(job, "records to")
    port = tmp_path / "dump.rankscope" / "port"
    first = kill_collector(port)
    job.stdin.close()
    job.stdin = None
    status, lines, err = end(job, 30)
    assert (status, lines[-1], err) == (0, "closed True", "")
    assert json.loads(port.read_text())["pid"] != first


def test_a_stale_port_file_is_not_believed(start, stand_in, tmp_path):
    sidecar = tmp_path / "dump.rankscope"
    sidecar.mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = {"address": f"127.0.0.1:{free_port()}", "pid": gone.pid, "boot_id": boot}
    (sidecar / "port").write_text(json.dumps(stale))
    status, lines, _ = end(start("close_at_exit", environ=stand_in, exit_seconds=15.0), 30)
    assert (status, lines[-1]) == (0, "closed True")
    assert json.loads((sidecar / "port").read_text())["collector_id"] == "stand-in"


def test_a_collector_that_cannot_start_is_said_once_and_the_spool_stays(start, tmp_path):
    package = tmp_path / "path" / "rankscope" / "collector"
    package.mkdir(parents=True)
    (package / "embedded.py").write_text("raise SystemExit('no store today')")
    environ = {"PYTHONPATH": str(tmp_path / "path")}
    status, lines, err = end(start("close_at_exit", environ=environ, exit_seconds=15.0), 30)
    assert (status, lines[-1], err) == (0, "closed False", "")
    sidecar = tmp_path / "dump.rankscope"
    assert sum("does not start" in line and str(sidecar) in line for line in lines) == 1
    assert (sidecar / "collector.log").read_text().count("no store today") == 3
    assert len(list((sidecar / "spool").glob("*.spool"))) == 1


@pytest.mark.parametrize(("module", "deaths"), [("daemon", 1), ("daemon", 2), ("embedded", 1)])
def test_a_collector_that_dies_while_it_loads_is_soon_started_again(
    start, tmp_path, module, deaths
):
    """`embedded` is loaded before it detaches, `daemon` afterwards."""
    package = tmp_path / "path" / "rankscope" / "collector"
    package.mkdir(parents=True)
    real = importlib.util.find_spec(f"rankscope.collector.{module}").origin
    (package / f"{module}.py").write_text(
        "import os\n"
        f"with open({str(tmp_path / 'deaths')!r}, 'ab', 0) as file:\n"
        f"    if file.tell() < {deaths}:\n"
        "        file.write(b'x')\n"
        "        os.kill(os.getpid(), 9)\n"
        f"exec(compile(open({real!r}).read(), {real!r}, 'exec'))\n"
    )
    environ = {"PYTHONPATH": str(tmp_path / "path")}
    status, lines, err = end(start("close_at_exit", environ=environ, exit_seconds=18.0), 40)
    assert (status, lines[-1], err) == (0, "closed True", "")
    assert (tmp_path / "deaths").read_bytes() == b"x" * deaths


def test_without_the_collector_extra_it_says_what_to_install_or_set(start, tmp_path):
    blocker = tmp_path / "path"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        "import sys\nfor name in ('pyarrow', 'deltalake'):\n    sys.modules[name] = None\n"
    )
    began = time.monotonic()
    job = start("close_at_exit", environ={"PYTHONPATH": str(blocker)})
    status, lines, err = end(job)
    assert time.monotonic() - began < 4
    assert (status, lines[-1], err) == (0, "closed False", "")
    said = [line for line in lines if "rankscope[collector]" in line]
    assert len(said) == 1
    assert "RANKSCOPE_COLLECTOR" in said[0]


def serve(store, port):
    """A real collector daemon, listening."""
    port_file = store.parent / "port"
    port_file.unlink(missing_ok=True)
    arguments = ["--store", store, "--listen", f"127.0.0.1:{port}", "--port-file", port_file]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "rankscope.collector.cli", "serve", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(port_file.exists, 30)
    return daemon


def record_more(job, command):
    """Five batches more; "flush" waits until all are acknowledged."""
    job.stdin.write(command)
    job.stdin.flush()
    await_line(job, "recorded")


def stored_stacks(sidecar):
    table = DeltaTable(sidecar / "tables" / "stacks").to_pyarrow_table()
    return sorted(table["stack"].to_pylist())


def test_a_collector_killed_at_work_has_every_batch_once_in_the_end(start, tmp_path):
    port = free_port()
    daemon = serve(tmp_path / "store", port)
    try:
        job = start("hold", f"127.0.0.1:{port}", exit_seconds=20.0)
        await_line(job, "recorded")
        for command in ("flush\n", "\n", "\n"):
            record_more(job, command)
        daemon.kill()
        daemon.wait()
        record_more(job, "\n")
        daemon = serve(tmp_path / "store", port)
        status, lines, err = end(job, 40)
        assert (status, lines[-1], err) == (0, "closed True", "")
    finally:
        daemon.terminate()
        daemon.wait(20)
    (sidecar,) = (tmp_path / "store").glob("*.rankscope")
    assert stored_stacks(sidecar) == list(range(1, 41))


def test_the_real_embedded_collector_is_started_and_has_everything(start, tmp_path):
    job = start("close_at_exit", exit_seconds=30.0)
    status, lines, err = end(job, 40)
    assert (status, lines[-1], err) == (0, "closed True", "")
    assert stored_stacks(tmp_path / "dump.rankscope") == list(range(1, 21))
    assert list((tmp_path / "dump.rankscope" / "spool").iterdir()) == []
