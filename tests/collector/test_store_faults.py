"""kill -9, a full disk, torn files, other writers: nothing acknowledged is lost or doubled."""

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import crash_writer
import pytest
from batches import linear_batch

from rankscope.collector.decode import decode
from rankscope.collector.store import (
    RunStore,
    StoreDamaged,
    StoreUnavailable,
    open_readonly,
    tables_path,
)
from rankscope.collector.store import files as files_module
from rankscope.collector.store import log as log_module
from rankscope.collector.store import tables as tables_module

A, B = "a" * 32, "b" * 32
STEP_ROW = {"step": 0, "process": A, "batch": 1, "event": "begin"}
OWN_ROW = {"step": 0, "process": A, "event": "sealed"}
PROCESS_ROW = {"process": A, "revision": 1}


def made(process, sequence, step=0):
    payload = linear_batch(sequence, step).SerializeToString()
    return decode(payload, process=process, sequence=sequence, summary_mode="statistics")


def assert_stored_once(run_path, batches, steps=0, processes=0):
    """`batches` linear batches of A in step 0, and so many rows of the small tables."""
    reader = open_readonly(run_path)
    nodes, records = reader.read_step(0)
    assert sorted(nodes["seq"].to_pylist()) == list(range(4 * batches))
    assert records.num_rows == 8 * batches
    assert reader.steps_rows().num_rows == steps
    assert reader._processes.rows().num_rows == processes
    assert len(reader._stacks._table.files()) == 1


def data_files(run_path, table):
    return {
        path
        for path in (tables_path(run_path) / table).rglob("*.parquet")
        if path.parent.name != "_delta_log"
    }


@pytest.fixture
def run_path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def store(run_path):
    opened = RunStore.open(run_path, "one")
    yield opened
    opened.close()


@pytest.mark.parametrize("failing", ["stacks", "steps", "processes", "records", "nodes"])
@pytest.mark.parametrize("landed", [False, True], ids=["refused", "unsure"])
@pytest.mark.parametrize("restarted", [False, True], ids=["retry", "restart"])
def test_a_group_that_failed_half_way_is_stored_once(
    store, run_path, monkeypatch, failing, landed, restarted
):
    table = store._tables[failing]
    append = table.append

    def fail(*args):
        if landed:
            append(*args)
        raise StoreUnavailable("no space")

    monkeypatch.setattr(table, "append", fail)
    group = [made(A, 1)], [STEP_ROW, OWN_ROW], [PROCESS_ROW]
    with pytest.raises(StoreUnavailable):
        store.commit(*group)
    monkeypatch.undo()
    again = RunStore.open(run_path, "one") if restarted else store
    assert again.durable_sequence(A) == (1 if failing == "nodes" and landed else 0)
    if restarted:
        # A new collector makes its own rows anew if it wants; those of batches are not doubled.
        again.commit([made(A, 1), made(A, 2)], [STEP_ROW])
        rows = again.steps_rows()["event"].to_pylist()
        assert rows.count("begin") == 1
        nodes, records = again.read_step(0)
        assert (nodes.num_rows, records.num_rows) == (8, 16)
        assert again.stacks([A]) == {7: ["File a.py, line 1"]}
        assert len(again._stacks._table.files()) == 1
        again.close()
    else:
        again.commit(*group)
        again.append_steps([OWN_ROW])
        assert_stored_once(run_path, batches=1, steps=3, processes=1)
    assert again.durable_sequence(A) == (2 if restarted else 1)


def _crash(*_):
    raise KeyboardInterrupt


def test_regrouped_after_a_crash_between_tables(store, run_path, monkeypatch):
    monkeypatch.setattr(store._tables["nodes"], "append", _crash)
    with pytest.raises(KeyboardInterrupt):
        store.commit([made(A, 1), made(A, 2), made(A, 3)])
    again = RunStore.open(run_path, "one")
    assert again.durable_sequence(A) == 0
    assert again.read_step(0)[1].num_rows == 0
    again.commit([made(A, 1), made(A, 2)])
    assert again.durable_sequence(A) == 2
    assert again.read_step(0)[1].num_rows == 16
    again.commit([made(A, 3), made(A, 4)])
    assert_stored_once(run_path, batches=4)
    again.close()


def test_a_conflict_with_the_same_process_is_looked_at_again(store, run_path):
    other = RunStore.open(run_path, "two")
    assert store.durable_sequence(A) == other.durable_sequence(A) == 0
    other.commit([made(A, 1)])
    store.commit([made(A, 1), made(A, 2)])
    assert_stored_once(run_path, batches=2)
    other.close()


def test_a_process_that_comes_back_from_another_collector(store, run_path, monkeypatch):
    store.commit([made(A, 1)])
    other = RunStore.open(run_path, "two")
    assert other.durable_sequence(A) == 1
    other.commit([made(A, 2)])
    monkeypatch.setattr(other._tables["nodes"], "append", _crash)
    with pytest.raises(KeyboardInterrupt):
        other.commit([made(A, 3)])
    store.read_step(0)
    assert store.durable_sequence(A) == 2
    store.commit([made(A, 3)])
    assert_stored_once(run_path, batches=3)
    other.close()


@pytest.mark.parametrize("call", ["data", "log"])
def test_a_full_disk_is_reported_and_the_commit_repeated(store, run_path, monkeypatch, call):
    store.commit([made(A, 1)])
    before = {name: data_files(run_path, name) for name in ("records", "nodes")}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "data":
        monkeypatch.setattr(files_module, "fsync", full)
    else:
        monkeypatch.setattr(log_module, "fsync", full)
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="No space left"):
            store.commit([made(A, 2)], [{**STEP_ROW, "batch": 2}])
    if call == "data":
        assert before == {name: data_files(run_path, name) for name in before}
        assert store.durable_sequence(A) == 1
    monkeypatch.undo()
    store.commit([made(A, 2)], [{**STEP_ROW, "batch": 2}])
    assert store.durable_sequence(A) == 2
    assert_stored_once(run_path, batches=2, steps=1)


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield path
    gc.collect()
    subprocess.run(["umount", path], check=True)


def test_a_disk_that_is_really_full(small_disk):
    run_path = small_disk / "run"
    store = RunStore.open(run_path, "one")
    ballast = small_disk / "ballast"
    sequence = 0
    for free in (0, 4096, 12_288, 40_960):
        store.commit([made(A, sequence + 1)])
        sequence += 1
        room = os.statvfs(small_disk)
        ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - free)))
        sequence = _commit_until_full(store, sequence)
        ballast.unlink()
        store.commit([made(A, sequence + 1)])
        sequence += 1
        store.seal(0, {A: 0})
        store._delete_replaced(time.monotonic())
    assert_stored_once(run_path, batches=sequence)
    store.close()


def _commit_until_full(store, sequence):
    for _ in range(40):
        try:
            store.commit([made(A, sequence + 1)])
        except StoreUnavailable:
            return sequence
        sequence += 1
    raise AssertionError("the disk was never full")


def test_a_killed_writer_loses_nothing_and_doubles_nothing(run_path, tmp_path):
    rng = random.Random(2026)
    acks = tmp_path / "acks"
    command = [sys.executable, crash_writer.__file__, run_path, "one", A, acks]
    for _ in range(8):
        acks.touch()
        size = acks.stat().st_size
        writer = subprocess.Popen(command)
        try:
            _wait_for_growth(acks, size, writer)
            time.sleep(rng.uniform(0, 0.4))  # the moment of the fault
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    acknowledged = max(int(line.split()[-1]) for line in acks.read_text().splitlines())
    assert acknowledged > 10
    store = RunStore.open(run_path, "one")
    durable = store.durable_sequence(A)
    assert durable >= acknowledged
    seqs, leaves = [], 0
    for step in store.step_numbers():
        nodes, records = store.read_step(step)
        seqs += nodes["seq"].to_pylist()
        leaves += records.num_rows
    assert sorted(seqs) == list(range(4 * durable))
    assert leaves == 8 * durable
    stacks = {7, *range(1001, 1001 + durable)}
    assert set(store.stacks([A])) >= stacks
    batches = store.steps_rows()["batch"].to_pylist()
    assert sorted(batches)[:durable] == list(range(1, durable + 1))
    assert len(set(batches)) == len(batches)
    store.close()


def _wait_for_growth(path, size, process, seconds=30):
    deadline = time.monotonic() + seconds
    while path.stat().st_size == size:
        assert process.poll() is None, "the writer ended"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def checkpoint(store, run_path, monkeypatch):
    """The checkpoint of `nodes` after the tenth of twelve commits."""
    monkeypatch.setattr(tables_module, "CHECKPOINT_COMMITS", 10)
    return _commit_twelve(store, run_path)


def _commit_twelve(store, run_path):
    for sequence in range(1, 13):
        store.commit([made(A, sequence)])
        store.maintain()
    log = tables_path(run_path) / "nodes" / "_delta_log"
    (path,) = log.glob("*.checkpoint.parquet")
    return path


@pytest.mark.parametrize("length", [0, 200])
def test_a_torn_checkpoint_is_replaced_by_the_entries_before_it(checkpoint, run_path, length):
    checkpoint.write_bytes(checkpoint.read_bytes()[:length])
    again = RunStore.open(run_path, "one")
    assert not checkpoint.exists()
    assert again.durable_sequence(A) == 12
    again.commit([made(A, 13)])
    assert_stored_once(run_path, batches=13)
    again.close()


def test_a_torn_checkpoint_whose_entries_are_gone_is_named(checkpoint, run_path):
    checkpoint.write_bytes(b"")
    (checkpoint.parent / f"{3:020d}.json").unlink()
    with pytest.raises(StoreDamaged, match=checkpoint.name):
        RunStore.open(run_path, "one")


@pytest.mark.parametrize("length", [0, 150])
def test_a_torn_last_log_entry_is_set_aside(store, run_path, length):
    store.commit([made(A, 1)])
    store.commit([made(A, 2)])
    newest = max((tables_path(run_path) / "nodes" / "_delta_log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:length])
    again = RunStore.open(run_path, "one")
    assert again.durable_sequence(A) == 1
    assert again.read_step(0)[1].num_rows == 8
    again.commit([made(A, 2)])
    assert_stored_once(run_path, batches=2)
    again.close()


def test_readers_go_on_when_old_log_entries_are_cleaned_up(store, run_path, monkeypatch):
    monkeypatch.setattr(tables_module, "CHECKPOINT_COMMITS", 10)
    reader = open_readonly(run_path)
    assert reader.read_step(0)[0].num_rows == 0
    log = _commit_twelve(store, run_path).parent
    for version in range(8):
        (log / f"{version:020d}.json").unlink()
    assert reader.read_step(0)[0].num_rows == 4 * 12


def test_everything_is_on_disk_before_commit_returns(store, run_path, monkeypatch):
    synced = []

    def watch(path):
        synced.append(Path(path))

    monkeypatch.setattr(files_module, "fsync", watch)
    monkeypatch.setattr(log_module, "fsync", watch)
    store.commit([made(A, 1)])
    for name in ("stacks", "records", "nodes"):
        root = tables_path(run_path) / name
        (file,) = data_files(run_path, name)
        entry = root / "_delta_log" / f"{1:020d}.json"
        order = [synced.index(p) for p in (file, file.parent, entry, entry.parent)]
        assert order == sorted(order)
        assert name == "stacks" or root in synced  # a new partition folder
    position = {
        name: synced.index(tables_path(run_path) / name / "_delta_log")
        for name in ("stacks", "records", "nodes")
    }
    assert max(position, key=position.get) == "nodes"


def test_entries_of_another_writer_are_made_durable_too(store, run_path, monkeypatch):
    other = RunStore.open(run_path, "two")
    store.commit([made(A, 1)])
    synced = []
    monkeypatch.setattr(log_module, "fsync", synced.append)
    other.commit([made(B, 1)])
    log = tables_path(run_path) / "nodes" / "_delta_log"
    assert [path for path in synced if path.parent == log] == [
        log / f"{v:020d}.json" for v in (1, 2)
    ]
    other.close()
