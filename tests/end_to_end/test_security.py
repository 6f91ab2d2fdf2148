"""Who gets into a real daemon, what attacks do to it, and what it shows about itself."""

import datetime
import json
import queue
import subprocess
import sys
import time
import urllib.request
import zlib

import grpc
import pytest
from batches import linear_batch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fake_agent import Daemon, FakeAgent, hello, step_batch, wait_for
from prometheus_client.parser import text_string_to_metric_families

from rankscope.agent.status import ask
from rankscope.agent.transport.channel import why_not
from rankscope.agent.transport.config import TransportConfig
from rankscope.collector.query import open_run
from rankscope.collector.run_names import run_of
from rankscope.v1 import collector_pb2 as pb

TOKEN, OTHER = "a" * 32, "b" * 32


class Authority:
    """Signs certificates for tests."""

    def __init__(self, folder, name="ca"):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(self._sign(self.name, self.key, 1, "", True)))

    def issue(self, name, host="localhost", days=1):
        """Paths of a certificate and its key; `days` in the past make an expired one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert, path = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        kind = serialization.PrivateFormat.PKCS8
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
        )
        cert.write_bytes(_pem(self._sign(subject, key, days, host, False)))
        return cert, path

    def _sign(self, subject, key, days, host, is_ca):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=10))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if host:
            names = x509.SubjectAlternativeName([x509.DNSName(host)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())


def _pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def start(tmp_path):
    """Starts a daemon with these options."""
    started = []

    def start(*options):
        started.append(Daemon(tmp_path / "store", *map(str, options)))
        return started[-1]

    yield start
    for daemon in started:
        daemon.stop()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    started = Daemon(tmp_path_factory.mktemp("names") / "store")
    yield started
    started.stop()


def told(agent):
    """What the collector said against a stream; waits for the stream to end."""
    agent.connect(wait=False)
    problem = agent.wait("problem")
    agent.wait_end()
    return problem


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--listen", "0.0.0.0:0"],
            ["--listen 0.0.0.0:0", "plaintext", "--insecure", "--tls-cert"],
        ),
        (["--metrics", "0.0.0.0:0"], ["--metrics", "--insecure"]),
        (["--tls-cert", "x"], ["--tls-key", "without"]),
        (["--client-ca", "x"], ["--client-ca", "--tls-cert"]),
        (["--token-file", "/no/such"], ["--token-file", "/no/such"]),
        (["--tls-cert", "/no/c", "--tls-key", "/no/k"], ["--tls-cert", "/no/c"]),
        (["--log-format", "xml"], ["xml", "json"]),
    ],
)
def test_what_would_let_others_in_is_refused_with_status_2(tmp_path, options, words):
    command = [sys.executable, "-m", "rankscope.collector.cli", "serve"]
    command += ["--store", str(tmp_path / "store"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    for word in words:
        assert word in said


def test_a_token_is_asked_for_and_changed_while_clients_are_connected(start, tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    daemon = start("--token-file", path)
    for wrong in ("", "x" * 32):
        problem = told(FakeAgent(daemon.address, hello("run", token=wrong)))
        assert problem.code == pb.Problem.REFUSED
        assert "token_file" in problem.message
    old = FakeAgent(daemon.address, hello("run", rank=0, token=TOKEN))
    old.connect()
    old.send(step_batch(1, 0))
    old.wait_durable()

    path.write_text(f"{TOKEN}\n{OTHER}\n")  # both: nobody notices
    new = FakeAgent(daemon.address, hello("run", rank=1, token=OTHER))
    wait_for(lambda: not told_or_welcomed(new))
    old.send(step_batch(2, 1))
    old.wait_durable()

    path.write_text(f"{OTHER}\n")
    assert "not valid any more" in old.wait("problem").message
    old.wait_end()
    new.send(step_batch(1, 0))
    new.wait_durable()
    new.close()
    daemon.stop()
    log = (tmp_path / "daemon.log").read_text()
    assert TOKEN not in log
    assert OTHER not in log
    stored = [path for path in daemon.store.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in stored)


def told_or_welcomed(agent):
    """The problem that ended the stream; empty when the agent was welcomed."""
    agent.connect(wait=False)
    wait_for(lambda: agent.all("welcome") or agent.all("problem"))
    return [problem.message for problem in agent.all("problem")]


def reach(daemon, config, address=None):
    """Whether a probe is answered over the channel of an agent."""
    return ask(config, address or daemon.address, 5.0)


def agent_config(tmp_path, address, **fields):
    return TransportConfig(dump_path=tmp_path / "dump", collector=(address,), **fields)


def test_tls_and_certificates_that_are_wrong(start, tmp_path):
    ca, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    cert, key = ca.issue("server")
    client_cert, client_key = ca.issue("client")
    bad_cert, bad_key = stranger.issue("bad")
    old_cert, old_key = ca.issue("old", days=-1)
    daemon = start("--tls-cert", cert, "--tls-key", key, "--client-ca", ca.path)
    address = daemon.address.replace("127.0.0.1", "localhost")

    def config(**fields):
        return agent_config(tmp_path, address, **fields)

    good = config(tls_ca=ca.path, tls_cert=client_cert, tls_key=client_key)
    assert ask(good, address, 10.0).streams == 1
    assert why_not(good, address, 2.0) == ""
    plain = why_not(config(), address, 2.0)
    assert "speaks TLS" in plain
    unknown = config(tls_ca=stranger.path, tls_cert=client_cert, tls_key=client_key)
    assert "certificate is not accepted" in why_not(unknown, address, 2.0)
    assert "accept this agent's certificate" in why_not(config(tls_ca=ca.path), address, 2.0)
    for own in ((bad_cert, bad_key), (old_cert, old_key)):
        wrong = config(tls_ca=ca.path, tls_cert=own[0], tls_key=own[1])
        assert "accept this agent's certificate" in why_not(wrong, address, 2.0)
    assert "not accepted" in why_not(good, daemon.address, 2.0)  # not the host in the certificate

    for name, fields, words in (
        ("later", {"days": -1}, "expired"),
        ("elsewhere", {"host": "other.example"}, "mismatch"),
        ("again", {}, ""),
    ):  # replaced without a restart
        fresh = ca.issue(name, **fields)
        key.write_bytes(fresh[1].read_bytes())
        cert.write_bytes(fresh[0].read_bytes())
        assert words in why_not(good, address, 2.0)
    assert ask(good, address, 10.0).streams == 1


@pytest.mark.parametrize(
    "run",
    ["../../x", "a\0b", "n" * 10_000, "nul", ".collectors", "x.rankscope", "a/b", "-x", "ü 100%"],
)
def test_run_names_from_the_network_stay_in_the_store(daemon, run):
    agent = FakeAgent(daemon.address, hello(run, rank=0, host="../../h\0", device="\0/.."))
    folder = agent.connect().run
    agent.send(step_batch(1, 0))
    agent.wait_durable()
    agent.close()
    assert folder not in (".", "..", run)
    assert "/" not in folder
    path = daemon.store / folder
    assert wait_for(path.is_dir)
    note = json.loads((daemon.store / f"{folder}.rankscope/run.json").read_text())
    assert note["run"] == run
    assert run_of(folder) in (run, None)
    assert not (daemon.store.parent / "x").exists()


def test_runs_that_differ_by_case_only_stay_apart(daemon):
    for run, events in (("Case", 3), ("case", 5)):
        agent = FakeAgent(daemon.address, hello(run, rank=0))
        agent.connect()
        agent.send(step_batch(1, 0, events=events))
        agent.wait_durable()
        agent.close()
        rows = open_run(daemon.store / run).sql("select count(*) as n from nodes").to_pylist()
        assert rows == [{"n": events}]


def test_health_metrics_status_and_json_logs(start, tmp_path):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    daemon = start("--metrics", "127.0.0.1:0", "--log-format", "json")
    with grpc.insecure_channel(daemon.address, [("grpc.enable_http_proxy", 0)]) as channel:
        for service in ("", "rankscope.v1.Collector"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    agent = FakeAgent(daemon.address, hello("run", rank=3))
    agent.connect()
    drops = [pb.DropCount(step=4, events=7, reason="spool_full")]
    agent.send(step_batch(1, 4, events=6, drops=drops))
    agent.send(b"\xff\xff")
    agent.wait_durable()
    lines = [json.loads(line) for line in (tmp_path / "daemon.log").read_text().splitlines()]
    shown = next(line["message"] for line in lines if "metrics on" in line["message"])
    text = urllib.request.urlopen(f"http://{shown.split()[-1]}/metrics", timeout=10).read()
    found = {
        (sample.name, sample.labels.get("run")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert found["rankscope_events_total", "run"] == 6
    assert found["rankscope_refused_batches_total", "run"] == 1
    assert found["rankscope_dropped_events_total", "run"] == 7
    assert found["rankscope_streams", None] == 1
    command = [sys.executable, "-m", "rankscope.collector.cli", "status", daemon.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr  # it lost records
    (process,) = json.loads(done.stdout)["runs"][0]["processes"]
    assert (process["folder"], process["step"], process["state"]) == ("rank3", 4, "connected")
    assert (process["dropped_events"], process["refused_batches"]) == (7, 1)
    agent.close()
    command[-2] = "127.0.0.1:9"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2


def many_streams(address):
    agents = [FakeAgent(address, hello("many", rank=n)) for n in range(12)]
    answers = [told_or_welcomed(agent) for agent in agents]
    for agent in agents:
        agent.close()
    return " ".join(text for texts in answers for text in texts)


def many_processes(address):
    said = []
    for n in range(30):
        agent = FakeAgent(address, hello("ranks", rank=n))
        said += told_or_welcomed(agent)
        agent.close()
    return " ".join(said)


def many_runs(address):
    said = []
    for n in range(8):
        agent = FakeAgent(address, hello(f"run{n}"))
        said += told_or_welcomed(agent)
        agent.close()
    return " ".join(said)


def heartbeats(address):
    agent = FakeAgent(address, hello("beats"))
    agent.connect()
    for _ in range(2000):
        agent.heartbeat()
    return agent.wait("problem").message


def batch_of(address, batch):
    agent = FakeAgent(address, hello("bomb"))
    agent.connect()
    agent.send(batch)
    agent.wait_durable()
    message = agent.wait("problem").message
    agent.close()
    return message


def empty_steps(address):
    return batch_of(address, b"\x12\x00" * 200_000)


def empty_leaves(address):
    return batch_of(address, pb.Batch(columns=pb.Columns(outlines=[b"\x12\x00" * 900_000])))


def shapes(address):
    """A shape of 256 sizes, repeated by every event that names it."""
    made = linear_batch(1, 0, 1)
    leaf = pb.LeafTemplate(part="input_args", path="0", form=pb.NULL)
    many = [leaf] * 20_000
    structure = json.dumps({"input_args": list(range(20_000))})
    outline = pb.Outline(structure=structure, leaves=many)
    columns = made.columns
    columns.outlines[:] = [outline.SerializeToString()]
    for name in ("step", "name", "what", "kind", "direction", "outline", "parent", "stack", "time"):
        field = f"event_{name}"
        setattr(columns, field, getattr(columns, field) * 60)
    columns.event_count = 60
    return batch_of(address, made)


def names(address):
    made = pb.Batch(columns=pb.Columns(names=[f"n{i}" for i in range(1_000_000)]))
    return batch_of(address, made)


def rows(address):
    agent = FakeAgent(address, hello("rows"))
    agent.connect()
    agent.send(step_batch(1, 0, events=600))
    agent.wait_durable()
    agent.send(step_batch(2, 1, events=600))
    return agent.wait("problem").message


def large_hello(address):
    return told(FakeAgent(address, hello("large", versions={"torch": "x" * (2 << 20)}))).message


ATTACKS = [
    (many_streams, "max_streams_per_peer"),
    (many_processes, "max_processes"),
    (many_runs, "max_open_runs"),
    (heartbeats, "too many heartbeats"),
    (empty_steps, "more than 100000"),
    (empty_leaves, "outlines.leaves"),
    (shapes, "leaves in all"),
    (names, "columns.names"),
    (rows, "quota_rows"),
    (large_hello, "Hello of 1 MiB"),
]


@pytest.mark.parametrize(
    ("attack", "reason"), ATTACKS, ids=lambda value: getattr(value, "__name__", "")
)
def test_attacks_are_refused_with_a_reason_while_others_go_on(start, attack, reason):
    limits = ["--max-streams-per-peer", 10, "--max-processes", 20, "--max-open-runs", 5]
    daemon = start(*limits, "--quota-rows", 500, "--hello-seconds", 2)
    honest = FakeAgent(daemon.address, hello("honest", rank=0))
    honest.connect()
    honest.send(step_batch(1, 0))
    honest.wait_durable()
    assert reason in attack(daemon.address)
    began = time.monotonic()
    honest.send(step_batch(2, 1))
    honest.wait_durable()
    assert time.monotonic() - began < 5.0
    honest.close()


def test_a_stream_that_says_nothing_is_ended(start):
    daemon = start("--hello-seconds", "0.2")
    with grpc.insecure_channel(daemon.address, [("grpc.enable_http_proxy", 0)]) as channel:
        collect = channel.stream_stream(
            "/rankscope.v1.Collector/Collect", response_deserializer=pb.FromCollector.FromString
        )
        never = queue.SimpleQueue()
        (answer,) = list(collect(iter(never.get, None), timeout=20))
        never.put(None)
    assert "within 0.2 s" in answer.problem.message


def test_who_does_not_read_is_cut_and_others_go_on(start):
    daemon = start()
    channel = grpc.insecure_channel(daemon.address, [("grpc.enable_http_proxy", 0)])
    collect = channel.stream_stream(
        "/rankscope.v1.Collector/Collect", response_deserializer=pb.FromCollector.FromString
    )

    def requests():
        yield pb.FromAgent(hello=hello("deaf")).SerializeToString()
        for sequence in range(1, 6000):
            payload = b"\xff" * 40
            batch = pb.SequencedBatch(sequence=sequence, payload=payload, crc32=zlib.crc32(payload))
            yield pb.FromAgent(batch=batch).SerializeToString()

    call = collect(requests())
    honest = FakeAgent(daemon.address, hello("honest", rank=0))
    honest.connect()
    honest.send(step_batch(1, 0))
    honest.wait_durable()
    assert honest.all("problem") == []
    honest.close()
    call.cancel()
    channel.close()
    assert daemon.process.poll() is None
