"""A store that an older version wrote, with fewer columns, is read, served and changed."""

import json
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pyarrow.parquet as pq
import pytest
from batches import linear_batch
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType
from fake_agent import hello, step_batch, wait_for
from one_run import Client, events
from typer.testing import CliRunner

from rankscope.collector import cli, schema
from rankscope.collector.decode import decode
from rankscope.collector.query import open_run as opened
from rankscope.collector.store import RunStore, StoreError, open_readonly, tables_path
from rankscope.collector.store.tables import Table
from rankscope.v1 import collector_pb2 as pb

#: What the first version of the tables did not have.
LATER = {
    "records": ["std", "samples", "object", "object_call"],
    "nodes": ["object", "object_call"],
    "processes": ["claimed_rank", "replica", "pid_namespace"],
    "steps": ["agent_seconds", "wall_seconds", "shed"],
    "stacks": [],
}
BEGIN, END = pb.StepEvent.BEGIN, pb.StepEvent.END


def make_older(run):
    """Take the later columns out of every file and out of the log."""
    for name, columns in LATER.items():
        table = tables_path(run) / name
        for entry in (table / "_delta_log").glob("*.json"):
            actions = [json.loads(line) for line in entry.read_text().splitlines()]
            for action in actions:
                _age(action, table, columns)
            entry.write_text("".join(json.dumps(action) + "\n" for action in actions))


def _age(action, table, columns):
    if "metaData" in action:
        metadata = action["metaData"]
        said = json.loads(metadata["schemaString"])
        said["fields"] = [f for f in said["fields"] if f["name"] not in columns]
        metadata["schemaString"] = json.dumps(said)
    path = table / action["add"]["path"] if "add" in action else None
    if path is not None and path.exists():
        rows = pq.ParquetFile(path).read()
        pq.write_table(rows.drop_columns(columns), path)
        action["add"]["size"] = path.stat().st_size


def columns_of(run, table):
    return [field.name for field in DeltaTable(tables_path(run) / table).schema().fields]


def seals(run):
    return {(row["step"], row["events"], row["missing"]) for row in events(run, "sealed")}


def versions(run):
    return {name: DeltaTable(tables_path(run) / name).version() for name in LATER}


def command(*arguments):
    functions = {name: cli.load(name) for name in ("du", "rm", "export", "query", "ls")}
    return CliRunner().invoke(cli.build(functions), [str(a) for a in arguments])


def printed(*arguments):
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def end(step, **more):
    return pb.Batch(steps=[pb.StepEvent(step=step, kind=END, events=4, time=2.0, **more)])


@pytest.fixture
def run(tmp_path, open_run):
    """One sealed step, and one that its process left open, of an older version."""
    client = Client(open_run(), hello(rank=0, process_uuid="a" * 32))
    client.send(step_batch(1, 0))
    client.send(step_batch(2, 1, kinds=(BEGIN,)))
    client.wait_durable()
    path = tmp_path / "run"
    wait_for(lambda: events(path, "sealed"))
    open_run().close()
    make_older(path)
    return path


def test_an_older_store_is_read_as_it_is(run):
    before = versions(run)
    assert not set(LATER["steps"]) & set(columns_of(run, "steps"))
    (row, _) = json.loads(printed("ls", run, "--json"))["steps"]
    assert row["step"] == 0
    select = (
        "select count(std) + count(samples) + count(object) as later, count(*) as n from records"
    )
    assert opened(run).sql(select).to_pylist() == [{"later": 0, "n": 16}]
    out = run.parent / "exported"
    printed("export", run, "--to", out)
    exported = json.loads((out / "step0/rank0/dump.json").read_text())
    assert exported["data"] == json.loads((run / "step0/rank0/dump.json").read_text())["data"]
    printed("du", run)
    reader = open_readonly(run)
    nodes, records = reader.read_step(0)
    assert (nodes.schema, records.schema) == (schema.NODES, schema.RECORDS)
    assert (records["std"].null_count, nodes["object"].null_count) == (8, 4)
    assert reader.steps_rows()["agent_seconds"].null_count == reader.steps_rows().num_rows
    assert reader.processes()[0]["replica"] is None
    assert versions(run) == before


def test_an_older_store_is_served_on(run, open_run):
    client = Client(open_run(), hello(rank=0, process_uuid="a" * 32))
    assert client.session.all("welcome")[0].durable_sequence == 2
    client.sequence = 2
    client.send(end(1, agent_seconds=0.25, wall_seconds=1.0))
    client.send(step_batch(4, 0, kinds=()))  # late: the older file is sealed again
    client.wait_durable()
    client.farewell()
    wait_for(lambda: {(1, 4, "{}"), (0, 8, "{}")} <= seals(run))
    assert len(json.loads((run / "step1/rank0/dump.json").read_text())["data"]) == 4
    for name in LATER:
        assert set(columns_of(run, name)) == set(schema.TABLES[name].names)
    ends = "select step, agent_seconds as took from steps where event = 'end' order by step"
    told = [{"step": 0, "took": None}, {"step": 1, "took": 0.25}]
    assert opened(run).sql(ends).to_pylist() == told
    all_steps = DeltaTable(tables_path(run) / "steps").to_pyarrow_dataset()
    connection = duckdb.connect()
    connection.register("steps", all_steps)
    assert connection.sql(ends).to_arrow_table().to_pylist() == told
    records = DeltaTable(tables_path(run) / "records").to_pyarrow_table(columns=["seq", "std"])
    assert (len(records), records["std"].null_count) == (24, 24)


def test_a_step_is_removed_from_an_older_store(run):
    printed("rm", run, "--steps", "0", "--yes")
    assert opened(run).sql("select distinct step from records").to_pylist() == [{"step": 1}]
    assert [row["step"] for row in events(run, "removed")] == [0]
    assert set(columns_of(run, "steps")) == set(schema.STEPS.names)


def test_collectors_that_open_an_older_store_at_once_add_its_columns_once(run):
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda n: RunStore.open(run, f"c{n}"), range(4)))
    for store in stores:
        store.close()
    for name in LATER:
        assert sorted(columns_of(run, name)) == sorted(schema.TABLES[name].names)


def test_a_collector_of_an_older_version_writes_on_beside_a_newer_one(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Table, "add_later_columns", lambda self: None)
        older = RunStore.open(run, "older")
    older.read_step(0)
    newer = RunStore.open(run, "newer")
    process = "b" * 32
    payload = linear_batch(1, 0).SerializeToString()
    batch = decode(payload, process=process, sequence=1, summary_mode="statistics")
    older.commit([batch], steps=[{"step": 0, "process": process, "batch": 1, "event": "begin"}])
    assert older.seal(0, {}) == newer.seal(0, {}) == 4 + len(batch.nodes)
    assert newer.durable_sequence(process) == 1
    for store in (older, newer):
        store.close()


@pytest.mark.parametrize("table", ["steps", "records"])
def test_a_newer_store_is_read_and_not_written(run, table):
    field = Field("from_the_future", PrimitiveType("string"))
    DeltaTable(tables_path(run) / table).alter.add_columns(field)
    before = versions(run)
    with pytest.raises(StoreError, match=f"{table} has columns of a newer .*: from_the_future"):
        RunStore.open(run, "one")
    assert versions(run)[table] == before[table]
    refused = command("rm", run, "--steps", "0", "--yes")
    assert refused.exit_code != 0
    assert "from_the_future" in refused.output
    assert opened(run).sql("select count(*) as n from records").to_pylist() == [{"n": 16}]
    assert open_readonly(run).read_step(0)[0].num_rows == 4
