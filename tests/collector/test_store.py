"""One store, one writer: what is committed is there once, sealed in order, and read back."""

import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from batches import Event, Leaf, batch, linear_batch
from deltalake import DeltaTable

from rankscope.collector import schema
from rankscope.collector.decode import decode, refused_batch
from rankscope.collector.store import (
    RunStore,
    StoreDamaged,
    StoreError,
    StoreGone,
    open_readonly,
    tables_path,
)
from rankscope.collector.store import store as store_module
from rankscope.collector.store import tables as tables_module
from rankscope.v1 import collector_pb2 as pb

A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def run_path(tmp_path):
    return tmp_path / "run with space"


@pytest.fixture
def open_store(run_path):
    opened = []

    def open_(collector_id="one"):
        opened.append(RunStore.open(run_path, collector_id))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


def made(process, sequence, step=0, **more):
    payload = linear_batch(sequence, step, **more).SerializeToString()
    return decode(payload, process=process, sequence=sequence, summary_mode="statistics")


def live_files(run_path, table, step):
    uris = DeltaTable(tables_path(run_path) / table).file_uris()
    return [uri for uri in uris if f"/step={step}/" in uri]


def keys(table):
    return list(zip(*(table[c].to_pylist() for c in ("process", "batch", "seq")), strict=True))


def test_what_is_committed_is_read_back_as_it_was_decoded(store):
    batches = [made(A, 1, step=3), made(B, 1, step=3), made(A, 2, step=3)]
    store.commit(batches)
    nodes, records = store.read_step(3)
    ordered = [batches[0], batches[2], batches[1]]
    expected = pa.concat_tables([b.records for b in ordered])
    assert records.schema == schema.RECORDS
    assert nodes.schema == schema.NODES
    assert records.to_pylist() == expected.to_pylist()
    assert nodes.to_pylist() == pa.concat_tables([b.nodes for b in ordered]).to_pylist()
    assert records.column("record").num_chunks == 1


def test_all_forms_survive_the_store(store):
    leaves = (
        Leaf("input_args", "0", numbers={"max": math.nan, "min": -math.inf}, shape=()),
        Leaf("input_args", "1", form=pb.SCALAR, type="int", value="3"),
        Leaf("input_args", "2", form=pb.VERBATIM, type="slice", value='{"type": "slice"}'),
        Leaf("input_args", "3", form=pb.NULL, type="NoneType"),
        Leaf("input_args", "4", form=pb.EMPTY, type="torch.dtype", value='"torch.int8"'),
    )
    events = [
        Event("Torch.f.0.forward", pb.INPUT, {"input_args": [0, 1, 2, 3, 4]}, leaves, step=1),
        Event("optimizer", pb.NODE, kind=pb.SCOPE, direction=pb.DIRECTION_NONE, step=2),
    ]
    payload = batch(events).SerializeToString()
    decoded = decode(payload, process=A, sequence=1, summary_mode="statistics")
    store.commit([decoded])
    nodes, records = store.read_step(1)
    assert str(records.to_pylist()) == str(decoded.records.to_pylist())  # NaN is not equal to NaN
    assert nodes.num_rows == 1
    nodes, records = store.read_step(2)
    assert (nodes["record"].to_pylist(), records.num_rows) == (["optimizer"], 0)
    assert store.step_numbers() == [1, 2]


def test_only_the_processes_asked_for_are_read(store):
    store.commit([made(A, 1), made(B, 1)])
    store.commit([made(C, 1)])
    nodes, records = store.read_step(0, [B, C])
    assert set(nodes["process"].to_pylist()) == {B, C}
    assert set(records["process"].to_pylist()) == {B, C}
    assert store.read_step(0, ["d" * 32])[0].num_rows == 0
    assert store.read_step(9)[1].schema == schema.RECORDS


def test_batches_that_are_stored_are_not_stored_again(store, open_store):
    first, second = made(A, 1), made(A, 2)
    assert store.durable_sequence(A) == 0
    store.commit([first, second, first])
    assert store.durable_sequence(A) == 2
    store.commit([first, second])
    other = open_store()
    for again in (store, other):
        again.commit([second, made(A, 3)])
        assert again.durable_sequence(A) == 3
    assert len(keys(store.read_step(0)[0])) == len(set(keys(store.read_step(0)[0]))) == 12


def test_a_batch_without_rows_raises_the_durable_sequence(store, open_store):
    store.commit([refused_batch(A, 1)])
    assert open_store("two").durable_sequence(A) == 1


def test_rows_of_a_batch_are_split_by_step_in_any_order(store):
    events = [Event(f"Torch.f.{i}.forward", pb.NODE, step=i % 3) for i in range(9)]
    payload = batch(events).SerializeToString()
    store.commit([decode(payload, process=A, sequence=1, summary_mode="")])
    assert store.read_step(1)[0]["seq"].to_pylist() == [1, 4, 7]
    assert store.step_numbers() == [0, 1, 2]


def test_steps_rows_of_batches_are_stored_once_and_own_rows_always(store):
    of_batch = {"step": 0, "process": A, "batch": 1, "event": "begin", "time": 1.0}
    sealed = {"step": 0, "process": A, "event": "sealed", "events": 4}
    store.commit([made(A, 1)], steps=[of_batch, sealed])
    store.commit([made(A, 1)], steps=[of_batch])
    store.append_steps([sealed])
    rows = store.steps_rows()
    assert rows.schema == schema.STEPS
    assert sorted(rows["event"].to_pylist()) == ["begin", "sealed", "sealed"]
    assert rows["rank"].to_pylist() == [None] * 3


def test_processes_gives_the_newest_revision_of_each(store, run_path):
    assert store.processes() == []
    store.append_processes([{"process": A, "revision": 1, "rank": None, "host": "n1"}])
    store.commit(
        (), processes=[{"process": A, "revision": 2, "rank": 3}, {"process": B, "revision": 1}]
    )
    newest = {row["process"]: row for row in store.processes()}
    assert (newest[A]["rank"], newest[A]["host"], newest[A]["revision"]) == (3, None, 2)
    assert set(newest) == {A, B}
    assert set(newest[B]) == set(schema.PROCESSES.names)
    assert len(open_readonly(run_path).processes()) == 2


@pytest.mark.parametrize("row", [{"stepp": 1}, {"step": 2.7}, {"step": "x"}])
def test_rows_that_do_not_fit_the_schema_are_refused_whole(store, row):
    with pytest.raises(StoreError, match="step"):
        store.commit([made(A, 1)], steps=[row])
    assert store.durable_sequence(A) == 0
    store.commit([made(A, 1)])
    assert store.read_step(0)[0].num_rows == 4


def test_stacks_of_processes(store, run_path):
    store.commit([made(A, 1)])
    reader = open_readonly(run_path)
    assert reader.stacks([A]) == {7: ["File a.py, line 1"]}
    more = pb.Batch(stacks=[pb.Stack(id=-8, frames=["x", "y"])]).SerializeToString()
    store.commit([decode(more, process=B, sequence=1, summary_mode="")])
    for each in (store, reader):
        assert each.stacks([B]) == {-8: ["x", "y"]}
        assert set(each.stacks([A, B])) == {7, -8}
    assert store.stacks([]) == {}


def test_a_sealed_step_is_one_sorted_file_with_ranks(store, run_path):
    for sequence in (1, 2):
        store.commit([made(A, sequence), made(B, sequence), made(C, sequence)])
    assert store.seal(0, {A: 1, B: 0}) == 24
    for name in ("records", "nodes"):
        (uri,) = live_files(run_path, name, 0)
        rows = DeltaTable(tables_path(run_path) / name).to_pyarrow_table()
        assert rows["rank"].to_pylist() == sorted(
            rows["rank"].to_pylist(), key=lambda r: (r is None, r)
        )
        order = list(zip(rows["process"].to_pylist(), rows["seq"].to_pylist(), strict=True))
        assert [p for p in dict.fromkeys(p for p, _ in order)] == [B, A, C]
        assert order == sorted(order, key=lambda key: ([B, A, C].index(key[0]), key[1]))
        assert Path(uri).name.startswith("seal-one-")
    nodes, _ = store.read_step(0)
    assert keys(nodes) == sorted(set(keys(nodes)))


def test_sealing_again_changes_nothing_unless_rows_or_ranks_changed(store, run_path):
    store.commit([made(A, 1)])
    assert store.seal(0, {A: 5}) == 4
    before = live_files(run_path, "records", 0)
    assert store.seal(0, {A: 5}) == 4
    assert store.seal(0, {}) == 4
    assert live_files(run_path, "records", 0) == before
    store.commit([made(A, 2), made(B, 1)])
    assert store.seal(0, {A: 5, B: 6}) == 12
    assert store.seal(0, {A: 7, B: 6}) == 12
    assert len(live_files(run_path, "records", 0)) == 1
    _, records = store.read_step(0)
    ranks = dict(zip(records["process"].to_pylist(), records["rank"].to_pylist(), strict=True))
    assert ranks == {A: 7, B: 6}
    assert len(keys(records)) == 24


def test_sealing_a_step_without_rows(store):
    assert store.seal(12, {A: 0}) == 0


def test_two_sealers_from_stale_views_do_not_double_rows(open_store, run_path, monkeypatch):
    one, two = open_store("one"), open_store("two")
    one.commit([made(A, 1)])
    one.commit([made(A, 2)])
    table = two._tables["records"]
    replace = table.replace

    def overtaken(*args):
        monkeypatch.setattr(table, "replace", replace)
        other = open_store("three")
        other.seal(0, {A: 1})
        replace(*args)  # from a view of before the other's commit

    monkeypatch.setattr(table, "replace", overtaken)
    assert two.seal(0, {A: 1}) == 8
    for each in (one, two):
        nodes, records = each.read_step(0)
        assert (nodes.num_rows, records.num_rows) == (8, 16)
    assert len(live_files(run_path, "records", 0)) == 1
    assert len(live_files(run_path, "nodes", 0)) == 1


def test_a_sealer_that_reads_files_already_replaced_begins_again(open_store, monkeypatch):
    one, two = open_store("one"), open_store("two")
    one.commit([made(A, 1)])
    one.commit([made(A, 2)])
    table = one._tables["records"]
    files = table.files

    def vanishing(*args):
        monkeypatch.setattr(table, "files", files)
        found = files(*args)
        two.seal(0, {A: 1})
        two._delete_replaced(time.monotonic())
        return found

    monkeypatch.setattr(table, "files", vanishing)
    assert one.seal(0, {A: 1}) == 8
    assert one.read_step(0)[1].num_rows == 16


def test_a_commit_and_a_seal_in_two_stores_do_not_disturb_each_other(open_store):
    one, two = open_store("one"), open_store("two")
    for sequence in range(1, 6):
        one.commit([made(A, sequence)])
        two.commit([made(B, sequence)])
        one.seal(0, {A: 0, B: 1})
    nodes, records = two.read_step(0)
    assert (nodes.num_rows, records.num_rows) == (40, 80)
    assert len(set(keys(nodes))) == 40


def test_sealing_reading_and_maintaining_while_another_thread_commits(store, monkeypatch):
    monkeypatch.setattr(tables_module, "CHECKPOINT_COMMITS", 7)
    monkeypatch.setattr(store_module, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(store_module, "MOST_SMALL_FILES", 3)
    with ThreadPoolExecutor(1) as committer:
        commits = [
            committer.submit(
                store.commit,
                [made(A, sequence, step=sequence % 2)],
                [{"process": A, "batch": sequence}],
            )
            for sequence in range(1, 25)
        ]
        while not commits[-1].done():
            store.seal(0, {A: 3})
            store.maintain()
            nodes, records = store.read_step(0)
            assert len(set(keys(nodes))) == nodes.num_rows
            assert records.num_rows == 2 * nodes.num_rows
        for commit in commits:
            commit.result()
    assert sum(store.read_step(step)[0].num_rows for step in (0, 1)) == 24 * 4
    assert sorted(store.steps_rows()["batch"].to_pylist()) == list(range(1, 25))


def test_replaced_files_are_deleted_after_their_grace(store, run_path, monkeypatch):
    store.commit([made(A, 1)])
    store.commit([made(A, 2)])
    reader = open_readonly(run_path)
    folder = tables_path(run_path) / "records" / "step=0"
    store.seal(0, {A: 0})
    store.maintain()
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(store_module, "GRACE_SECONDS", 0.0)
    store.maintain()
    assert len(list(folder.iterdir())) == 1
    assert reader.read_step(0)[1].num_rows == 16


def test_a_reader_whose_files_vanish_looks_again(store, run_path, monkeypatch):
    store.commit([made(A, 1)])
    reader = open_readonly(run_path)
    table = reader._tables["nodes"]
    files = table.files

    def vanishing(*args):
        monkeypatch.setattr(table, "files", files)
        found = files(*args)
        store.seal(0, {A: 0})
        store.commit([made(A, 2)])
        store.seal(0, {A: 0})
        store._delete_replaced(time.monotonic())
        return found

    monkeypatch.setattr(table, "files", vanishing)
    assert reader.read_step(0)[0].num_rows == 8


def test_records_without_their_nodes_are_left_out(store, run_path, monkeypatch):
    store.commit([made(A, 1)])
    reader = open_readonly(run_path)
    read = reader._read

    def slow(name, step, processes):
        found = read(name, step, processes)
        if name == "nodes":
            store.commit([made(A, 2), made(B, 1)])
        return found

    monkeypatch.setattr(reader, "_read", slow)
    nodes, records = reader.read_step(0)
    assert (nodes.num_rows, records.num_rows) == (4, 8)


def test_orphans_of_this_collector_are_swept_and_others_left(open_store, run_path):
    store = open_store("one")
    store.commit([made(A, 1)])
    folder = tables_path(run_path) / "records" / "step=0"
    (live,) = folder.iterdir()
    orphan = folder / f"part-one-{'0' * 32}.parquet"
    foreign = folder / f"part-one-two-{'0' * 32}.parquet"
    for path in (orphan, foreign):
        shutil.copy(live, path)
    open_store("one").close()
    assert sorted(folder.iterdir()) == sorted([live, foreign])


def test_queries_for_nan_and_infinity_find_all_rows(store, run_path):
    for sequence, maximum in enumerate([math.inf, math.nan, 0.7, 0.1], 1):
        store.commit([made(A, sequence, events=1, maximum=maximum)])

    def answers():
        delta = DeltaTable(tables_path(run_path) / "records")
        dataset = delta.to_pyarrow_dataset()
        above = dataset.to_table(filter=pc.field("max") > 0.5).num_rows
        nan = dataset.to_table(filter=pc.is_nan(pc.field("max"))).num_rows
        query = "select count(*) from dataset where isnan(max)"
        sql = "select count(*) from read_parquet($files) where max > 0.5"
        files = [str(path) for path in open_readonly(run_path).files("records")]
        (in_files,) = duckdb.execute(sql, {"files": files}).fetchall()
        return above, nan, duckdb.execute(query).fetchall()[0][0], in_files[0]

    assert answers() == (2, 1, 1, 3)  # NaN is above everything in DuckDB
    store.seal(0, {A: 0})
    assert answers() == (2, 1, 1, 3)


def test_a_long_run_has_checkpoints_and_few_small_files(store, open_store, run_path, monkeypatch):
    monkeypatch.setattr(tables_module, "CHECKPOINT_COMMITS", 10)
    monkeypatch.setattr(store_module, "MOST_SMALL_FILES", 8)
    for sequence in range(1, 26):
        row = {"step": 0, "process": A, "batch": sequence, "event": "pause"}
        store.commit([made(A, sequence, events=1)], steps=[row])
        store.maintain()
    log = tables_path(run_path) / "nodes" / "_delta_log"
    checkpoints = sorted(path.name for path in log.glob("*.checkpoint.parquet"))
    assert [int(name[:20]) for name in checkpoints] == [9, 19]
    assert len(open_readonly(run_path).files("steps")) <= 9
    assert store.steps_rows().num_rows == 25
    again = open_store("one")
    assert again.durable_sequence(A) == 25
    assert sorted(again.steps_rows()["batch"].to_pylist()) == list(range(1, 26))
    assert again.read_step(0)[0].num_rows == 25


def test_a_run_that_is_not_there_or_was_deleted(store, run_path, tmp_path):
    with pytest.raises(StoreGone):
        open_readonly(tmp_path / "other")
    store.commit([made(A, 1)])
    reader = open_readonly(run_path)
    shutil.rmtree(run_path.with_name(run_path.name + ".rankscope"))
    for call in (
        lambda: store.commit([made(A, 2)]),
        lambda: store.append_steps([{"step": 1}]),
        lambda: reader.read_step(0),
        lambda: store.seal(0, {A: 0}),
    ):
        with pytest.raises(StoreGone):
            call()
    assert not run_path.with_name(run_path.name + ".rankscope").exists()


def test_a_damaged_data_file_is_named(store, run_path):
    store.commit([made(A, 1)])
    (path,) = open_readonly(run_path).files("nodes")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreDamaged, match=path.name):
        store.read_step(0)


def test_a_collector_id_that_is_no_file_name(run_path):
    with pytest.raises(StoreError, match="allowed are letters"):
        RunStore.open(run_path, "../x")


def test_large_groups_keep_their_dictionaries_apart(store):
    rng = np.random.default_rng(5)
    batches = []
    for number in range(20):
        names = [f"Torch.f.{i}.forward" for i in rng.integers(0, 1000, 200)]
        payload = batch([Event(name, pb.NODE) for name in names]).SerializeToString()
        process = f"{number:032x}"
        batches.append(decode(payload, process=process, sequence=1, summary_mode=""))
    store.commit(batches)
    expected = [row for b in batches for row in b.nodes["record"].to_pylist()]
    assert store.read_step(0)[0]["record"].to_pylist() == expected
    store.seal(0, {b.process: i for i, b in enumerate(batches)})
    assert store.read_step(0)[0]["record"].to_pylist() == expected
