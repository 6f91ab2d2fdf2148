"""What dead processes left: read up to the first torn frame, removed once it is stored."""

import fcntl
import os

import pytest
from batches import linear_batch
from fake_agent import hello, write_spool

from rankscope.collector import spool_reader


@pytest.fixture
def spool(tmp_path):
    said = hello(rank=0)
    write_spool(tmp_path, said, {n: linear_batch(n, 0) for n in (1, 2, 3)})
    return tmp_path, said.process_uuid, spool_reader.left_over(tmp_path)[said.process_uuid]


def sequences(segments, after=0):
    return [frame.sequence for frame in spool_reader.read_batches(segments, after)]


def test_reads_up_to_the_torn_frame(spool):
    _, process, segments = spool
    assert sequences(segments) == [1, 2, 3]
    assert sequences(segments, after=2) == [3]
    assert spool_reader.read_hello(segments).process_uuid == process


def test_a_frame_changed_on_disk_ends_the_file(spool):
    _, _, (segment,) = spool
    data = bytearray(segment.read_bytes())
    data[-60] ^= 1  # in the last whole frame
    segment.write_bytes(data)
    assert sequences([segment]) == [1, 2]


@pytest.mark.parametrize("content", [b"", b"RSSPOOL2" + bytes(40), b"RSSPOOL1", b"RSSP"])
def test_foreign_and_empty_files_hold_nothing(tmp_path, content):
    path = tmp_path / f"{'a' * 32}-{1:020d}.spool"
    path.write_bytes(content)
    assert sequences([path]) == []
    assert spool_reader.read_hello([path]) is None


def test_segments_come_in_order_and_other_files_are_left_out(tmp_path):
    names = [f"{'a' * 32}-{first:020d}.spool" for first in (20, 3, 100)]
    for name in [*names, "notes.txt", f"{'a' * 32}.lock"]:
        (tmp_path / name).touch()
    found = spool_reader.left_over(tmp_path)
    assert [p.name for p in found["a" * 32]] == [names[1], names[0], names[2]]
    assert spool_reader.left_over(tmp_path / "nowhere") == {}


def test_the_lock_says_whether_the_owner_lives(spool):
    folder, process, _ = spool
    assert spool_reader.is_owned(folder, process) is None
    fd = os.open(folder / f"{process}.lock", os.O_RDWR | os.O_CREAT)
    assert spool_reader.is_owned(folder, process) is False
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert spool_reader.is_owned(folder, process) is True
    spool_reader.remove(folder, process, durable=3)
    assert sequences(spool_reader.left_over(folder)[process]) == [1, 2, 3]
    os.close(fd)
    spool_reader.remove(folder, process, durable=3)
    assert list(folder.iterdir()) == []


def test_nothing_is_removed_that_is_not_stored(spool):
    folder, process, segments = spool
    spool_reader.remove(folder, process, durable=2)
    assert sequences(segments) == [1, 2, 3]
