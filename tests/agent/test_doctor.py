"""`rankscope doctor` in set-ups that are broken, each in one way."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripted_collector import ScriptedCollector, welcome

from rankscope.agent.doctor import examine, host, network, software
from rankscope.agent.doctor.finding import worst
from rankscope.agent.doctor.job import VARIABLES
from rankscope.agent.settings import SETTINGS
from rankscope.collector import answers

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "SLOW_BYTES_PER_SECOND", 0.0)  # disks of test machines are busy


def look(environ=None, *, address=None, config=None, timeout=2.0):
    """Findings that are not ok, by name, in a healthy environment but for what is given."""
    spool = {"RANKSCOPE_SPOOL": os.getcwd()}
    findings = list(examine(address, config, spool | (environ or {}), timeout))
    assert len({finding.name for finding in findings}) > 12
    assert all(finding.remedy for finding in findings if finding.level != "ok")
    return {f.name: f for f in findings if f.level != "ok"}


def only(found, name, level, *words):
    """The one finding there is; it says these words."""
    assert list(found) == [name]
    assert found[name].level == level
    text = f"{found[name].what} {found[name].remedy}"
    assert [word for word in words if word not in text] == []


def test_nothing_is_wrong_with_a_healthy_set_up():
    assert look({"RANK": "1", "WORLD_SIZE": "2"}) == {}


# ------------------------------------------------------------------------------------- the network


def test_a_port_that_nobody_listens_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    found = look(address=f"127.0.0.1:{port}")
    only(found, "address", "fault", f"127.0.0.1:{port}", "nothing listens", "rankscope serve")


def test_a_name_that_is_not_known():
    found = look({"RANKSCOPE_COLLECTOR": "no-such-host.invalid:4317"})
    only(found, "address", "fault", "no-such-host.invalid", "not known")


def _accept(listener, answer):
    try:
        while True:
            connection, _ = listener.accept()
            with connection:
                answer(connection)
    except OSError:
        pass


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made
        made.shutdown(socket.SHUT_RDWR)


def test_a_port_that_is_no_collector(listener):
    def http(connection):
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=_accept, args=(listener, http), daemon=True).start()
    found = look(address=f"127.0.0.1:{listener.getsockname()[1]}")
    only(found, "collector", "fault", "does not answer as a collector")


def test_a_port_that_speaks_tls(listener, tmp_path):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -days 1 -subj /CN=a"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c", tmp_path / "k")

    def tls(connection):
        try:
            context.wrap_socket(connection, server_side=True).close()
        except OSError:
            pass

    threading.Thread(target=_accept, args=(listener, tls), daemon=True).start()
    found = look(address=f"127.0.0.1:{listener.getsockname()[1]}")
    only(found, "collector", "fault", "speaks TLS")


@pytest.fixture
def scripted():
    """Starts collectors that answer a hello with these fields of a Welcome."""
    started = []

    def start(on_hello):
        started.append(ScriptedCollector(on_hello=on_hello))
        return started[-1].address

    yield start
    for collector in started:
        collector.stop()


def answering(**fields):
    def on_hello(collector, hello):
        (answer,) = welcome(collector, hello)
        for name, value in fields.items():
            setattr(answer.welcome, name, value)
        yield answer

    return on_hello


def test_a_collector_that_is_too_old(scripted):
    address = scripted(answering(protocol_version=0, collector_version="0.0.9"))
    only(look(address=address), "collector", "fault", "0.0.9", "upgrade the collector")


def test_a_collector_that_refuses(scripted):
    def refuse(collector, hello):
        yield answers.refused("the token is wrong")

    found = look(address=scripted(refuse))
    only(found, "collector", "fault", "REFUSED", "the token is wrong")


def test_a_collector_from_before_probes(scripted):
    def refuse(collector, hello):
        yield answers.refused("process_uuid '': expected 32 hex digits")

    only(look(address=scripted(refuse)), "collector", "warning", "too old to say more")


def test_a_clock_that_is_wrong(scripted):
    found = look(address=scripted(answering(time=time.time() - 3600)))
    only(found, "clock", "warning", "s behind", "3600", "chrony")


def test_a_collector_that_is_well(scripted):
    assert look(address=scripted(answering(time=time.time()))) == {}


# ------------------------------------------------------------------------------------- the machine


def test_a_spool_that_cannot_be_written():
    found = look({"RANKSCOPE_SPOOL": "/proc/nowhere"})
    only(found, "spool", "fault", "cannot write in /proc", "RANKSCOPE_SPOOL")


def test_a_disk_without_the_space(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"rankscope": {"spool_limit_bytes": 1 << 60}}))
    only(look(config=config), "spool", "warning", "MiB free", "spool_limit_bytes")


def test_a_slow_disk(monkeypatch):
    monkeypatch.setattr(host, "SLOW_BYTES_PER_SECOND", 1e15)
    found = look()
    assert sorted(found) == ["dump_path", "spool"]
    assert all("slow" in finding.what for finding in found.values())


def test_a_spool_on_a_network_disk(monkeypatch):
    monkeypatch.setattr(host, "_kind_of", lambda place: "nfs4")
    only(look(), "spool disk", "warning", "nfs4", "local disk")


@pytest.mark.parametrize(
    ("limit", "name", "status"), [("-n 256", "open files", 1), ("-f 1024", "file size", 2)]
)
def test_limits_of_the_shell(limit, name, status):
    code = "from rankscope.agent.doctor import host; [print(f) for f in host.limits()]"
    command = ["bash", "-c", f'ulimit {limit}; exec {sys.executable} -c "{code}"']
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in out.splitlines() if "level='ok'" not in line]
    assert f"name='{name}'" in line
    assert (1 if "warning" in line else 2) == status


@pytest.mark.parametrize("value", ["1", "true"])
def test_forks_that_grpc_takes_part_in(value):
    found = look({"GRPC_ENABLE_FORK_SUPPORT": value})
    only(found, "forks", "warning", f"GRPC_ENABLE_FORK_SUPPORT={value}", "hang")


# ----------------------------------------------------------------------------------------- the job


@pytest.mark.parametrize(
    ("environ", "name", "level", "words"),
    [
        ({"RANK": "first"}, "RANK", "fault", ["'first' is no rank"]),
        ({"RANKSCOPE_RANK_ID": "-1"}, "RANKSCOPE_RANK_ID", "fault", ["'-1'"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank", "fault", ["rank 4", "world of 4"]),
        ({"RANK": "0", "SLURM_PROCID": "3"}, "rank", "warning", ["from RANK", "SLURM_PROCID=3"]),
        ({"RANKSCOPE_COLECTOR": "a:1"}, "RANKSCOPE_COLECTOR", "warning", ["RANKSCOPE_COLLECTOR?"]),
        ({"RANKSCOPE_COLLECTOR": "a"}, "settings", "fault", ["RANKSCOPE_COLLECTOR", "'a'"]),
    ],
)
def test_variables_that_are_wrong(environ, name, level, words):
    only(look(environ), name, level, *words)


def test_every_variable_of_the_agent_is_known():
    known = {*VARIABLES, *(key.variable for key in SETTINGS)}
    text = (ROOT / "docs/configuration.md").read_text().partition("## Collector")[0]
    assert set(re.findall(r"`(RANKSCOPE_[A-Z_]+)`", text)) <= known


@pytest.mark.parametrize(
    ("content", "names", "words"),
    [
        ({"task": "statistic"}, {"task", "settings"}, ["'statistic'", "statistics"]),
        ({"levle": "L1"}, {"levle"}, ["ignored", "did you mean level?"]),
        ({"level": "L2"}, {"level", "settings"}, ["not available in this version"]),
        ({"statistics": {"lst": []}}, {"statistics.lst"}, ["did you mean statistics.list?"]),
        ({"statistics": []}, {"statistics", "settings"}, ["write an object"]),
        ({"rankscope": {"colector": "a:1"}}, {"rankscope.colector", "settings"}, ["collector?"]),
        ({"step": ["3-1"]}, {"step", "settings"}, ["'3-1'"]),
        ([1], {"config", "settings"}, ["not an object"]),
    ],
)
def test_a_config_is_checked_key_by_key(tmp_path, content, names, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    found = look(config=path)
    assert set(found) == names
    finding = found[min(names - {"settings"})]
    assert [word for word in words if word not in f"{finding.what} {finding.remedy}"] == []


def test_a_config_that_is_right_says_what_each_key_does(tmp_path):
    path = tmp_path / "config.json"
    content = {"task": "tensor", "level": None, "tensor": {"list": ["relu"]}, "statistics": {}}
    path.write_text(json.dumps(content | {"rankscope": {"run": "night"}}))
    environ = {"RANKSCOPE_SPOOL": str(tmp_path)}
    said = {f.name: f.what for f in examine(None, path, environ, 1.0) if f.level == "ok"}
    assert said["task"] == "'tensor': what is recorded"
    assert said["level"] == "null: the default 'L1'"
    assert said["statistics"] == "not read: the task is tensor"
    assert said["tensor.list"].startswith("['relu']: keep records")
    assert said["rankscope.run"].startswith("'night'")


# ------------------------------------------------------------------------------------ the software


def test_libraries_that_are_too_old_or_not_there(monkeypatch):
    installed = {"protobuf": "4.25.3", "torch": None, "isal": None}
    real = software._version
    monkeypatch.setattr(
        software, "_version", lambda name: installed[name] if name in installed else real(name)
    )
    found = {finding.name: finding for finding in software.versions() if finding.level != "ok"}
    assert {name: finding.level for name, finding in found.items()} == {
        "isal": "fault",
        "protobuf": "fault",
        "torch": "warning",
    }
    assert found["protobuf"].remedy == "pip install 'protobuf>=5.29'"


def test_an_installation_without_compiled_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "AGENT", tmp_path)
    found = list(software.compiled())
    assert [f"{f.name} {f.level}" for f in found] == ["kernel warning", "loops warning"]
    (tmp_path / "statistics").mkdir()
    (tmp_path / "statistics/librankscope_kernel.so").write_text("of another machine")
    assert "does not load" in next(software.compiled()).what


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pyarrow", "deltalake", "duckdb", "orjson"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from rankscope.collector.cli import main
sys.argv = ["rankscope", "doctor", *sys.argv[1:]]
main()
"""


def run(*arguments, **environ):
    command = [sys.executable, "-c", BLOCKED, *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "SLURM_"))}
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=False)


def test_the_command_needs_neither_torch_nor_pyarrow():
    done = run("--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["status"]) == (1, "warning")
    levels = {finding["name"]: finding["level"] for finding in said["findings"]}
    assert levels["collector"] == "warning"
    assert set(said["findings"][0]) == {"name", "level", "what", "remedy"}


def test_the_command_says_faults_in_plain_lines():
    done = run("127.0.0.1:1", RANK="x")
    assert done.returncode == 2
    assert "\x1b" not in done.stdout
    assert "fault    RANK: 'x' is no rank\n         -> set RANK to a whole number" in done.stdout
    assert "fault    address: 127.0.0.1:1: nothing listens on this port" in done.stdout
    assert run("storage7").returncode == 2
    assert "HOST:PORT" in run("storage7").stderr


def test_levels_have_an_order():
    assert worst([]) == 0
    assert network.clock(0.2, 0.1).level == "ok"
    assert network.clock(-1.2, 0.1).level == "warning"
    assert network.split("[::1]:80") == ("::1", 80)
