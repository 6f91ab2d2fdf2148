"""Lints everything in deploy/ with its own tools; a tool that is not here is named and passed over.

    python deploy/lint.py [--all]      --all: a missing tool is a failure

`make lint-deploy` brings the tools that come as Python packages. systemd-analyze and openssl are
the system's.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 110}, document-start: disable, "
    "comments: {min-spaces-from-content: 1}}}"
)
#: Resources of operators, which are not in the schemas of Kubernetes itself.
OPERATORS = ("kubeflow.org/", "jobset.x-k8s.io/")
KUBERNETES = "1.31"
#: Most that `systemd-analyze security` may say, from 0 (safe) to 10.
EXPOSURE = 2.0


def main(arguments: list[str]) -> int:
    failed = False
    for what, command in checks():
        tool = _tool(command[0])
        if tool is None:
            print(f"not run  {what}: no {command[0]}")
            failed |= "--all" in arguments
            continue
        done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
        print(f"{'failed' if done.returncode else 'ok':8} {what}")
        if done.returncode:
            print(done.stdout + done.stderr)
            failed = True
    return int(failed)


def checks() -> Iterator[tuple[str, list[str]]]:
    """(what, command)."""
    for file in sorted(HERE.glob("docker/*.Dockerfile")):
        yield f"{file.name} (hadolint)", ["hadolint", str(file)]
    scripts = sorted(map(str, (*HERE.glob("*/*.sh"), *HERE.glob("slurm/*.sbatch"))))
    for script in scripts:
        yield f"{Path(script).name} (bash -n)", ["bash", "-n", script]
    yield "scripts (shellcheck)", ["shellcheck", *scripts]
    yield "YAML (yamllint)", ["yamllint", "-s", "-d", YAMLLINT, str(HERE)]
    with tempfile.TemporaryDirectory() as folder:
        for file in manifests(Path(folder)):
            command = ["kubernetes-validate", "--kubernetes-version", KUBERNETES, "--strict"]
            yield f"{file.name} (kubernetes-validate)", [*command, str(file)]
        unit = str(_unit(Path(folder)))
        yield "unit (systemd-analyze verify)", ["systemd-analyze", "verify", "--man=no", unit]
        limit = ["--offline=true", f"--threshold={EXPOSURE * 10:.0f}"]
        yield "unit (systemd-analyze security)", ["systemd-analyze", "security", *limit, unit]


def manifests(folder: Path) -> Iterator[Path]:
    """Manifests as Kubernetes' own schemas know them: of an operator's resource, its pods."""
    for file in sorted(HERE.glob("kubernetes/*.yaml")):
        for number, document in enumerate(yaml.safe_load_all(file.read_text())):
            found = [document]
            if document["apiVersion"].startswith(OPERATORS):
                found = [_pod(template) for template in _templates(document["spec"])]
            for part, resource in enumerate(found):
                target = folder / f"{file.stem}-{number}-{part}.yaml"
                target.write_text(yaml.safe_dump(resource))
                yield target


def _templates(spec: object) -> Iterator[dict]:  # type: ignore[type-arg]
    """Every pod template below a specification."""
    if isinstance(spec, dict):
        if "containers" in spec.get("spec", {}):
            yield spec
        else:
            for value in spec.values():
                yield from _templates(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _templates(value)


def _pod(template: dict) -> dict:  # type: ignore[type-arg]
    metadata = {"name": "pod", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _unit(folder: Path) -> Path:
    """The unit with a command that is here: systemd-analyze wants it to exist."""
    unit = folder / "rankscope-collector.service"
    text = (HERE / "systemd" / unit.name).read_text()
    unit.write_text(
        text.replace("/opt/rankscope/bin/rankscope", shutil.which("true") or "/bin/true")
    )
    return unit


def _tool(name: str) -> str | None:
    """Beside this Python first, where packages put their commands."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
