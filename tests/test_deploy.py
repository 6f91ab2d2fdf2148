"""What deploy/ holds is well-formed, and says what the commands understand."""

import inspect
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rankscope.collector import cli

DEPLOY = Path(__file__).parent.parent / "deploy"
SERVE = [
    yaml.safe_load((DEPLOY / "docker/collector.Dockerfile").read_text().split("CMD ")[-1]),
    list(yaml.safe_load_all((DEPLOY / "kubernetes/collector.yaml").read_text()))[1]["spec"][
        "template"
    ]["spec"]["containers"][0]["args"],
    shlex.split(
        (DEPLOY / "systemd/rankscope-collector.service")
        .read_text()
        .partition("rankscope serve")[2]
        .splitlines()[0]
    ),
]


def test_everything_passes_its_linter():
    done = subprocess.run(
        [sys.executable, DEPLOY / "lint.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "(bash -n)" in done.stdout


@pytest.mark.parametrize("options", SERVE)
def test_collectors_are_started_with_options_that_there_are(options):
    called = {}
    serve = cli.load("serve")

    def instead(**values):
        called.update(values)

    instead.__signature__ = inspect.signature(serve)
    instead.__annotations__ = serve.__annotations__
    result = CliRunner().invoke(cli.build({"serve": instead}), ["serve", *options])
    assert result.exit_code == 0, result.output
    assert called["listen"] == "0.0.0.0:4317"
    assert called["store"].name == "runs"


def test_the_policy_lets_the_sample_jobs_in():
    policy = yaml.safe_load((DEPLOY / "kubernetes/network-policy.yaml").read_text())["spec"]
    (rule,) = policy["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"]
    sys.path.insert(0, str(DEPLOY))
    try:
        import lint
    finally:
        sys.path.remove(str(DEPLOY))
    for name in ("pytorchjob", "jobset"):
        job = yaml.safe_load((DEPLOY / f"kubernetes/{name}.yaml").read_text())
        templates = list(lint._templates(job["spec"]))
        assert templates
        for template in templates:
            assert wanted.items() <= template["metadata"]["labels"].items()
            variables = {v["name"]: v["value"] for v in template["spec"]["containers"][0]["env"]}
            assert variables["RANKSCOPE_COLLECTOR"] == "rankscope-collector:4317"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_certificates_make_a_connection_that_both_sides_trust(tmp_path):
    script = DEPLOY / "tls/make_certificates.sh"
    made = subprocess.run(
        [script, tmp_path / "tls", "localhost", "127.0.0.1"], capture_output=True, text=True
    )
    assert "DNS:localhost,IP:127.0.0.1" in made.stdout, made.stderr
    folder = tmp_path / "tls"
    assert {p.name for p in folder.iterdir() if p.stat().st_mode & 0o077 == 0} == {
        "agent.key",
        "ca.key",
        "collector.key",
    }
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(folder / "collector.pem", folder / "collector.key")
    client = ssl.create_default_context(cafile=folder / "ca.pem")
    client.load_cert_chain(folder / "agent.pem", folder / "agent.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            with server.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.sendall(connection.getpeercert()["subject"][1][0][1].encode())

        thread = threading.Thread(target=greet)
        thread.start()
        with (
            socket.create_connection(listener.getsockname()) as plain,
            client.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            assert connection.recv(100) == b"rankscope agent"
        thread.join(5)
    again = subprocess.run([script, folder, "10.0.0.7"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("runuser") is None, reason="not root")
@pytest.mark.parametrize(("command", "stays"), [("true", False), ("false", True)])
def test_the_epilog_removes_a_spool_only_when_it_is_delivered(command, stays):
    job = f"test-{os.getpid()}"
    environ = os.environ | {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_UID": "0",
        "RANKSCOPE_COMMAND": shutil.which(command),
    }
    spool = Path(f"/var/tmp/rankscope-{job}")
    try:
        subprocess.run([DEPLOY / "slurm/prolog.sh"], env=environ, check=True)
        assert spool.stat().st_mode & 0o777 == 0o700
        subprocess.run(
            [DEPLOY / "slurm/epilog.sh"], env=environ, check=True, stderr=subprocess.DEVNULL
        )
        assert spool.exists() is stays
    finally:
        shutil.rmtree(spool, ignore_errors=True)
