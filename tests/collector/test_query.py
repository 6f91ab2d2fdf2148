import csv
import io
import json
import math
import subprocess
import sys

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from rankscope.collector import cli, query, schema
from rankscope.collector.commands.export import export
from rankscope.collector.commands.ls import ls, spans
from rankscope.collector.commands.query import query as query_command
from rankscope.collector.export import Selection
from rankscope.collector.query import RunNotFoundError, open_run

FIRST, SECOND, THIRD = "a" * 32, "b" * 32, "c" * 32
COMMANDS = {"query": query_command, "ls": ls, "export": export}


def run_command(*arguments):
    return CliRunner().invoke(cli.build(COMMANDS), [str(a) for a in arguments])


def printed(*arguments):
    result = run_command(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def records_of(rows, process, step, rank=None, numbers=(1.0, 2.0)):
    events = rows.Events(process, step, rank)
    for call, number in enumerate(numbers):
        name = f"Torch.f.{call}.forward"
        events.node(name, stack=7)
        events.data(name, "input", {"input_args": [0]}, rows.tensor(max=number))
    return events


@pytest.fixture
def run(store, rows):
    """Two ranks in two steps: rank 0 complete, rank 1 learned its rank late and is in step 1."""
    store.process(FIRST, 0)
    store.process(SECOND, None, folder="proc101", joined=1, pid=101)
    store.process(SECOND, 1, revision=1)
    store.events(records_of(rows, FIRST, 0, rank=0))
    store.events(records_of(rows, SECOND, 0, numbers=[5.0, math.nan, math.inf]))
    store.events(records_of(rows, FIRST, 1, rank=0))
    store.events(records_of(rows, SECOND, 1, numbers=[5.0]))
    store.add("stacks", [{"process": FIRST, "stack": 7, "frames": ["File a.py, line 1"]}])
    base = {"batch": 1, "time": 2000.0}
    for process, step, events in ((FIRST, 0, 4), (SECOND, 0, 6), (FIRST, 1, 4)):
        end = {"step": step, "process": process, "event": "end", "events": events}
        store.add("steps", [base | end])
    return store


# ------------------------------------------------------------------------------- finding a run


@pytest.mark.parametrize("where", ["run", "run.rankscope", ".", "run/"])
def test_a_run_is_found(run, where, monkeypatch):
    monkeypatch.chdir(run.run_path.parent)
    found = open_run(where)
    assert (found.name, found.path, found.store) == ("run", run.run_path, run.store)


def test_what_is_not_there_is_said(run, tmp_path):
    with pytest.raises(RunNotFoundError, match=r"looked for .*/none\.rankscope/tables .*not exist"):
        open_run(tmp_path / "none")
    (tmp_path / "store" / "notes").mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match=r"/store holds notes$"):
        open_run(tmp_path / "store")
    (tmp_path / "second.rankscope" / "tables").mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match="holds 2 runs, name one of them: run, second"):
        open_run(tmp_path)


# ---------------------------------------------------------------------------------------- reading


def test_rank_comes_from_processes_where_rows_lack_it(run):
    found = open_run(run.run_path)
    statement = "select rank, count(*) n from {} group by rank order by rank"
    for table, counts in (("records", [4, 4]), ("nodes", [8, 8]), ("steps", [2, 1])):
        result = found.sql(statement.format(table)).to_pydict()
        assert result == {"rank": [0, 1], "n": counts}, table


def test_processes_are_the_newest_revision_in_order(run):
    processes = open_run(run.run_path).processes().to_pylist()
    assert [(p["process"], p["folder"]) for p in processes] == [(FIRST, "rank0"), (SECOND, "rank1")]


def test_nan_is_found_and_counts_as_large(run):
    found = open_run(run.run_path)
    statement = "select record from records where step = 0 and {} order by record"
    names = ["Torch.f.1.forward", "Torch.f.2.forward"]
    assert found.sql(statement.format("isnan(max)"))["record"].to_pylist() == names[:1]
    assert found.sql(statement.format("max > 5"))["record"].to_pylist() == names


def test_every_view_has_the_columns_of_its_table(run):
    found = open_run(run.run_path)
    for name, expected in schema.TABLES.items():
        assert set(found.sql(f"select * from {name}").column_names) == set(expected.names), name


def test_tables_not_written_yet_are_empty(store):
    store.process(FIRST)
    found = open_run(store.run_path)
    assert found.sql("select count(*) n from records")["n"].to_pylist() == [0]
    assert found.table("steps").schema.names == schema.STEPS.names


def test_table_projects_and_filters(run):
    table = open_run(run.run_path).table("nodes", ["seq", "process"], pc.field("step") == 1)
    assert table.column_names == ["seq", "process"]
    assert table.num_rows == 6


def test_a_reader_survives_files_replaced_under_it(run, monkeypatch):
    """The first snapshot's files are gone when they are read; the second attempt finds the new."""
    found = open_run(run.run_path)
    path = run.store / "tables" / "records"
    real, calls = found.dataset, []

    def dataset(name):
        snapshot = real(name)
        calls.append(name)
        if calls.count("records") == 1 and name == "records":
            table = DeltaTable(path)
            table.optimize.compact(min_commit_interval=None)
            table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        return snapshot

    # One rank's two files of one step become one, so that compaction replaces something.
    run.add("records", found.table("records", schema.RECORDS.names, pc.field("step") == 0))
    monkeypatch.setattr(found, "dataset", dataset)
    assert found.sql("select count(max) n from records where step = 0")["n"].to_pylist() == [10]
    assert calls.count("records") == 2


def test_other_errors_are_not_tried_again():
    tries = []

    def read():
        tries.append(1)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        query.again_if_gone(read)
    assert len(tries) == 1


# ------------------------------------------------------------------------------------------ query

NUMBERS = "select record, max, shape, stack from records where step = 0 and rank = 1 order by 1"


def test_query_prints_a_table(run):
    text = printed("query", run.run_path, NUMBERS)
    assert "NaN" in text
    assert "Infinity" in text
    assert "│ Torch.f.0.forward │      5.0 │ [2]" in text


def test_query_prints_csv(run):
    rows = list(
        csv.DictReader(io.StringIO(printed("query", run.run_path, NUMBERS, "--format", "csv")))
    )
    assert [row["max"] for row in rows] == ["5.0", "NaN", "Infinity"]
    assert rows[0]["shape"] == "[2]"
    assert rows[0]["stack"] == ""


def test_query_prints_strict_json(run):
    text = printed("query", run.run_path, NUMBERS, "--format", "json")
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [row["max"] for row in rows] == [5.0, "NaN", "Infinity"]
    assert rows[0]["shape"] == [2]
    nothing = "select 1 where false"
    assert json.loads(printed("query", run.run_path, nothing, "--format", "json")) == []


@pytest.mark.parametrize("form", ["table", "csv", "json", "parquet"])
def test_query_writes_files(run, tmp_path, form):
    target = tmp_path / "out"
    arguments = ["query", run.run_path, NUMBERS, "--format", form, "--output", target]
    assert printed(*arguments) == ""
    if form == "parquet":
        numbers = pq.read_table(target)["max"].to_pylist()
        assert numbers[0] == 5.0
        assert math.isnan(numbers[1])
    else:
        assert "Torch.f.2.forward" in target.read_text()


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select nothing from records", "nothing"),
        ("selekt 1", "syntax error"),
        ("select * from store", "store"),
    ],
)
def test_wrong_sql_is_one_line_and_exit_2(run, sql, message):
    result = run_command("query", run.run_path, sql)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("rankscope: ")
    assert result.stderr.count("\n") == 1


def test_bad_requests_are_one_line_and_exit_2(run, tmp_path):
    for arguments, message in (
        (["query", tmp_path / "none", "select 1"], "no run here"),
        (["ls", tmp_path / "none"], "no run here"),
        (["query", run.run_path, "select 1", "--format", "parquet"], "needs --output"),
        (["query", run.run_path, "select 1", "--output", tmp_path], "Is a directory"),
    ):
        result = run_command(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------- ls


def step_rows(text):
    """The cells of the last table printed."""
    lines = text.split("step ")[-1].splitlines()
    return [[c.strip() for c in line.strip("│").split("│")] for line in lines if line[:1] == "│"]


def test_ls_shows_processes_and_steps(run):
    text = printed("ls", run.run_path)
    assert "launch launch-1: 2 processes" in text
    assert "rank1" in text
    assert step_rows(text) == [["0", "2 complete", "3 complete"], ["1", "2 complete", "1 open"]]


def test_ls_says_what_is_not_complete(store, rows):
    def happened(step, process, event, **more):
        row = {"step": step, "process": process, "event": event, "batch": 1, "time": 1.0}
        store.add("steps", [row | more])

    store.process(FIRST, 0)
    store.process(SECOND, 1, state="lost")
    store.process(THIRD, 2)
    for process in (FIRST, SECOND, THIRD):
        store.events(records_of(rows, process, 0))
    happened(0, FIRST, "end", events=6)
    happened(0, THIRD, "end", events=4)
    happened(0, THIRD, "dropped", events=9, reason="spool_full")
    happened(0, THIRD, "dropped", events=1, reason="error")
    happened(1, FIRST, "skipped", reason="step")
    happened(None, SECOND, "refused", reason="columns.flags: 9 has unknown bits")
    why = {SECOND: "lost", THIRD: "late"}
    happened(1, None, "sealed", missing=json.dumps(why), expected="[]")
    text = printed("ls", store.run_path)
    assert "rank1: 1 batches refused (columns.flags: 9 has unknown bits)" in text
    assert step_rows(text) == [
        [
            "0",
            "2 arriving (2 events not stored)",
            "2 incomplete (lost)",
            "2 complete (error, spool_full), 10 events dropped",
        ],
        ["1", "skipped (step)", "missing (lost)", "missing (late)"],
    ]


def test_ls_collapses_equal_steps_and_many_ranks(store, rows):
    for rank in range(12):
        store.process(f"{rank:032x}", rank)
    names = [f"{rank:032x}" for rank in range(12)]
    everything = []
    for step in range(30):
        for rank, process in enumerate(names):
            events = records_of(rows, process, step, numbers=[1.0] if rank == 7 else [1.0, 2.0])
            everything += events.node_rows
    store.add("nodes", everything)
    ends = {"event": "end", "events": 2, "batch": 1, "time": 1.0}
    store.add("steps", [ends | {"step": s, "process": p} for s in range(29) for p in names])
    text = printed("ls", store.run_path)
    assert step_rows(text) == [
        ["0-28", "rank 0-6, 8-11: 2 complete"],
        ["", "rank 7: 1 complete"],
        ["29", "rank 0-6, 8-11: 2 open"],
        ["", "rank 7: 1 open"],
    ]


def test_ls_shows_the_newest_launch_and_all(run, rows):
    run.process(THIRD, 0, instance="launch-2", joined=2)
    run.events(records_of(rows, THIRD, 4))
    newest = printed("ls", run.run_path)
    assert "launch launch-1" not in newest
    assert step_rows(newest) == [["4", "2 open"]]
    assert "launch launch-1" in printed("ls", run.run_path, "--all")


def test_ls_leaves_out_the_middle_of_long_tables(store, rows):
    store.process(FIRST, 0)
    nodes = []
    for step in range(100):
        nodes += records_of(rows, FIRST, step, numbers=[1.0] * (1 + step % 2)).node_rows
    store.add("nodes", nodes)
    lines = step_rows(printed("ls", store.run_path))
    assert (lines[0], lines[20], lines[-1]) == (
        ["0", "1 open"],
        ["... 60 more lines (--all)", ""],
        ["99", "2 open"],
    )
    assert len(step_rows(printed("ls", store.run_path, "--all"))) == 100


def test_ls_as_json(run):
    document = json.loads(printed("ls", run.run_path, "--json"))
    assert document["run"] == "run"
    assert [p["rank"] for p in document["processes"]] == [0, 1]
    last = document["steps"][-1]
    assert last == {
        "step": 1,
        "process": SECOND,
        "records": 1,
        "state": "open",
        "why": "",
        "dropped": 0,
        "shed": "",
        "agent_seconds": None,
        "wall_seconds": None,
    }


def test_ls_before_anything_was_heard(store):
    (store.store / "tables").mkdir(parents=True)
    assert "no process has been heard yet" in printed("ls", store.run_path)


def test_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == ""


# ----------------------------------------------------------------------------------------- export


def exported(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*.json"))


def test_export_renders_the_layout(run, tmp_path):
    target = tmp_path / "made" / "out"
    assert printed("export", run.run_path, "--to", target) == f"4 folders written below {target}\n"
    names = ("construct.json", "dump.json", "stack.json")
    folders = [f"step{step}/rank{rank}" for step in (0, 1) for rank in (0, 1)]
    assert exported(target) == [f"{folder}/{name}" for folder in folders for name in names]
    dump = json.loads((target / "step0/rank1/dump.json").read_text())
    assert [r["input_args"][0]["Max"] for r in dump["data"].values()] == [5.0, "nan", math.inf]
    assert dump["dump_data_dir"] is None
    stacks = json.loads((target / "step1/rank1/stack.json").read_text())
    assert stacks == {"0": [["Torch.f.0.forward"], ["File a.py, line 1"]]}
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_export_selects(run, tmp_path):
    printed("export", run.run_path, "--to", tmp_path / "out", "--step", "1-9", "--rank", "1")
    assert exported(tmp_path / "out")[1] == "step1/rank1/dump.json"
    assert len(exported(tmp_path / "out")) == 3


def test_export_takes_one_launch_and_the_latest_attempt(run, rows, tmp_path):
    run.process(THIRD, 0, instance="launch-2", folder=None, joined=2)
    run.process("d" * 32, 0, instance="launch-2", attempt=1, joined=3)
    run.events(records_of(rows, THIRD, 0, numbers=[8.0]))
    run.events(records_of(rows, "d" * 32, 0, numbers=[9.0]))
    printed("export", run.run_path, "--to", tmp_path / "new")
    printed("export", run.run_path, "--to", tmp_path / "old", "--instance", "launch-1")
    assert '"Max": 9.0' in (tmp_path / "new/step0/rank0/dump.json").read_text()
    assert len(exported(tmp_path / "new")) == 3
    assert len(exported(tmp_path / "old")) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "5-3"], "--step '5-3': expected numbers and spans"),
        (["--rank", "all"], "--rank 'all': expected numbers and spans"),
        (["--step", "77"], "nothing to export"),
        (["--instance", "x"], "launch 'x': expected one of launch-1"),
    ],
)
def test_export_refuses(run, tmp_path, arguments, message):
    result = run_command("export", run.run_path, "--to", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_export_never_writes_into_something(run, tmp_path):
    result = run_command("export", run.run_path, "--to", tmp_path)
    assert result.exit_code == 2
    assert "expected a new or an empty folder" in result.stderr


def test_selections():
    chosen = Selection.parse("0, 2,7-9", "--rank")
    assert [n for n in range(12) if n in chosen] == [0, 2, 7, 8, 9]
    assert None not in chosen
    assert None in Selection.parse(None, "--rank")


def test_modules_stand_alone():
    """Every command can be imported without torch; in a process of its own, as tests use torch."""
    script = (
        "import sys; from rankscope.collector import cli;"
        "[cli.load(name) for name in cli.COMMANDS];"
        "import rankscope.collector.runs; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
