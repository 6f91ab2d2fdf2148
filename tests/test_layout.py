"""The promises that the folder layout makes."""

import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
import rankscope.agent

ROOT = Path(__file__).parent.parent


def test_rankscope_is_a_namespace() -> None:
    assert rankscope.__file__ is None
    assert not list(ROOT.glob("*/rankscope/__init__.py"))


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (
            "rankscope.agent",
            ("rankscope.collector", "pyarrow", "deltalake", "duckdb", "orjson", "typer", "rich"),
        ),
        ("rankscope.collector.cli", ("rankscope.agent", "torch", "pyarrow", "duckdb")),
        ("rankscope.agent.deliver", ("torch", "pyarrow")),
        ("rankscope.agent.doctor", ("torch", "pyarrow")),
        ("rankscope.collector.server", ("rankscope.agent", "torch")),
        ("rankscope.collector.commands.serve", ("rankscope.agent", "torch")),
        ("rankscope.collector.commands.query", ("rankscope.agent", "torch")),
        ("rankscope.collector.commands.export", ("rankscope.agent", "torch")),
    ],
)
def test_import_stays_light(imported: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {imported}; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_public_names_are_exact_and_sorted() -> None:
    """What a script may import; a new name is a decision and a line here."""
    assert rankscope.agent.__all__ == [
        "PrecisionDebugger",
        "module_dump",
        "module_dump_end",
        "random_save",
        "seed_all",
    ]
    for name in rankscope.agent.__all__:
        assert getattr(rankscope.agent, name).__module__.startswith("rankscope.agent.")


def test_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    source = "rankscope/v1/collector.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, source]
    subprocess.run(command, check=True, cwd=ROOT)
    fresh = list(tmp_path.rglob("*_pb2*"))
    assert len(fresh) == 3
    for path in fresh:
        assert path.read_text() == (ROOT / "proto" / path.relative_to(tmp_path)).read_text()
