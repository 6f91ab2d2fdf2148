import errno
import fcntl
import os
import random
import struct
import zlib

import pytest

from rankscope.agent.transport import disk_spool as spool_module
from rankscope.agent.transport import segment as segment_module
from rankscope.agent.transport.disk_spool import DiskSpool
from rankscope.agent.transport.leftovers import LeftoverSpool, claim, spools_in
from rankscope.agent.transport.segment import read_frames
from rankscope.agent.transport.spool import MemorySpool
from rankscope.v1 import collector_pb2 as pb

UUID = "0123456789abcdef" * 2
# Python 3.12 and later warn when a process with threads forks; others' tests may have left some.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

HELLO = pb.Hello(process_uuid=UUID, pid=7).SerializeToString()


def open_spool(folder, limit=1 << 20, segment=1 << 16):
    return DiskSpool(folder, UUID, HELLO, limit, segment)


def files(folder):
    return sorted(path.name for path in folder.glob("*.spool"))


def test_a_segment_is_exactly_what_readers_expect(tmp_path):
    spool = open_spool(tmp_path)
    assert spool.append(b"first")
    assert spool.append(b"")
    content = (tmp_path / f"{UUID}-{1:020d}.spool").read_bytes()
    expected = b"RSSPOOL1"
    for sequence, payload in ((0, HELLO), (1, b"first"), (2, b"")):
        expected += struct.pack("<IIQ", len(payload), zlib.crc32(payload), sequence) + payload
    assert content == expected


@pytest.mark.parametrize("recent_bytes", [0, 10_000, 2 << 20])
def test_batches_are_read_back_by_sequence_over_segment_borders(
    tmp_path, monkeypatch, recent_bytes
):
    monkeypatch.setattr(spool_module, "RECENT_BYTES", recent_bytes)
    spool = open_spool(tmp_path, segment=4096)
    payloads = [os.urandom(random.Random(n).randrange(3000)) for n in range(20)]
    assert all(spool.append(payload) for payload in payloads)
    assert len(files(tmp_path)) > 3
    for sequence in (1, 20, 7, 13):
        stored = spool.read(sequence)
        assert stored == (sequence, payloads[sequence - 1], zlib.crc32(payloads[sequence - 1]))
    assert spool.read(21) is None


def test_acknowledged_segments_go_and_the_rest_stays(tmp_path):
    spool = open_spool(tmp_path, segment=900)
    for _ in range(6):
        assert spool.append(b"x" * 900)
    spool.acknowledge(3)
    assert files(tmp_path) == [f"{UUID}-{n:020d}.spool" for n in (4, 5, 6)]
    assert spool.read(1).sequence == 4
    spool.close()
    assert len(files(tmp_path)) == 3
    assert (tmp_path / f"{UUID}.lock").exists()


def test_nothing_remains_when_all_is_acknowledged(tmp_path):
    spool = open_spool(tmp_path)
    assert spool.append(b"x")
    spool.acknowledge(1)
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_spool_refuses_and_takes_again_after_acks(tmp_path):
    spool = open_spool(tmp_path, limit=10_000, segment=1 << 16)
    taken = 0
    while spool.append(b"x" * 900):
        taken += 1
    assert 8 <= taken <= 11
    assert spool.last_sequence == taken  # what was refused has no number
    assert sum(path.stat().st_size for path in tmp_path.glob("*.spool")) <= 10_000
    assert spool.append(b"y" * 900, reserve=5000)
    spool.acknowledge(taken + 1)
    assert spool.append(b"z" * 900)
    assert spool.read(taken + 2).payload == b"z" * 900


@pytest.mark.parametrize("truncates", [True, False])
def test_a_disk_that_fills_up_within_a_frame_leaves_no_torn_frame(tmp_path, monkeypatch, truncates):
    spool = open_spool(tmp_path)
    assert spool.append(b"kept")

    def half_write(fd, stored, prefix=b""):
        os.write(fd, b"half a frame")
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_truncate(fd, size):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "write_frame", half_write)
        if not truncates:
            patch.setattr(spool_module.os, "ftruncate", no_truncate)
        assert not spool.append(b"does not fit")
    assert spool.append(b"fits again")
    assert spool.read(2).payload == b"fits again"
    payloads = [f.stored.payload for name in files(tmp_path) for f in read_frames(tmp_path / name)]
    assert [payload for payload in payloads if payload != HELLO] == [b"kept", b"fits again"]


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(
        segment_module.os, "writev", lambda fd, parts: real(fd, [b"".join(parts)[:10]])
    )
    spool = open_spool(tmp_path)
    assert spool.append(b"payload")
    monkeypatch.undo()
    assert [frame.stored.payload for frame in read_frames(tmp_path / files(tmp_path)[0])] == [
        HELLO,
        b"payload",
    ]


def test_a_real_full_disk_counts_as_full(tmp_path):
    """RLIMIT_FSIZE cuts a write within a frame as a disk does; a child, as it is for good."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        spool = open_spool(tmp_path)
        answers = [spool.append(b"a" * 3000), spool.append(b"b" * 3000), spool.append(b"c" * 1000)]
        os.write(write_end, bytes(answers))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 10) == bytes([True, False, True])
    os.close(read_end)
    os.close(write_end)
    frames = list(read_frames(tmp_path / files(tmp_path)[0]))
    assert [frame.stored.sequence for frame in frames] == [0, 1, 2]
    assert frames[-1].stored.payload == b"c" * 1000


def test_every_cut_of_a_segment_ends_it_at_a_whole_frame(tmp_path):
    spool = open_spool(tmp_path)
    for n in range(3):
        assert spool.append(bytes([n]) * 5)
    whole = (tmp_path / files(tmp_path)[0]).read_bytes()
    offsets = [f.offset for f in read_frames(tmp_path / files(tmp_path)[0])] + [len(whole)]
    cut = tmp_path / "cut.spool"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        expected = sum(offset <= size for offset in offsets[1:])
        assert len(list(read_frames(cut))) == expected
    damaged = bytearray(whole)
    damaged[offsets[2] + 16] ^= 1  # the first payload byte of sequence 2
    cut.write_bytes(damaged)
    assert [frame.stored.sequence for frame in read_frames(cut)] == [0, 1]


def test_a_deleted_folder_does_not_stop_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "RECENT_BYTES", 0)
    spool = open_spool(tmp_path, segment=900)
    for _ in range(3):
        assert spool.append(b"x" * 900)
    (tmp_path / files(tmp_path)[1]).unlink()
    assert spool.read(2).sequence == 3


def test_a_live_spool_cannot_be_claimed_and_a_dead_one_by_one_only(tmp_path):
    spool = open_spool(tmp_path)
    assert spool.append(b"x")
    with claim(tmp_path, UUID) as mine:
        assert not mine
    spool.close()
    with claim(tmp_path, UUID) as mine, claim(tmp_path, UUID) as other:
        assert mine
        assert not other
        left = LeftoverSpool(tmp_path, spools_in(tmp_path)[UUID])
        assert left.hello.pid == 7
        assert left.read(1).payload == b"x"
        left.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_script_may_close_our_descriptors_and_use_their_numbers(tmp_path):
    folder, other = tmp_path / "spool", tmp_path / "the script's"
    spool = open_spool(folder)
    payloads, numbers = [], set()
    for turn in range(3):
        payloads += [b"before %d" % turn, b"after %d" % turn]
        assert spool.append(payloads[-2])
        for number in {spool._file.number, spool._lock.number} - numbers:
            with open(other, "ab") as file:
                os.dup2(file.fileno(), number)  # closes ours first
            numbers.add(number)
        assert spool.append(payloads[-1])
    assert [spool.read(n + 1).payload for n in range(6)] == payloads
    spool.close()
    assert other.read_bytes() == b""
    for number in numbers:
        os.write(number, b"x")  # still the script's
        os.close(number)
    left = LeftoverSpool(folder, spools_in(folder)[UUID])
    assert [left.read(n + 1).payload for n in range(6)] == payloads


def test_a_lock_ends_with_its_process_even_if_a_forked_child_lives(tmp_path):
    spool = open_spool(tmp_path)
    assert spool.append(b"x")
    go, gone = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        spool.abandon()
        os.write(gone[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    os.read(gone[0], 1)
    with claim(tmp_path, UUID) as mine:
        assert not mine  # the child's abandon did not take it from the parent
    fcntl.flock(spool._lock.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    spool._lock.close()  # as the parent's death does
    with claim(tmp_path, UUID) as mine:
        assert mine
    os.write(go[1], b"1")
    os.waitpid(child, 0)
    for fd in (*go, *gone):
        os.close(fd)
    spool.close()


def test_leftovers_of_several_segments_are_read_in_order_over_a_gap(tmp_path):
    spool = open_spool(tmp_path, segment=900)
    for n in range(4):
        assert spool.append(bytes([n]) * 900)
    spool.close()
    (tmp_path / files(tmp_path)[1]).unlink()
    left = LeftoverSpool(tmp_path, spools_in(tmp_path)[UUID])
    assert left.last_sequence == 4
    assert [left.read(n).sequence for n in (1, 2, 3, 4)] == [1, 3, 3, 4]
    assert left.read(5) is None


def test_a_foreign_or_broken_file_is_no_leftover(tmp_path):
    (tmp_path / f"{UUID}-{1:020d}.spool").write_bytes(b"something else")
    (tmp_path / "notes.spool").write_bytes(b"RSSPOOL1")
    assert list(spools_in(tmp_path)) == [UUID]
    assert LeftoverSpool(tmp_path, spools_in(tmp_path)[UUID]).hello is None
    assert spools_in(tmp_path / "no such folder") == {}


def test_memory_keeps_the_same_promises():
    spool = MemorySpool(HELLO, 100)
    assert [spool.append(b"x" * 40) for _ in range(3)] == [True, True, False]
    assert spool.append(b"y" * 40, reserve=40)
    assert [spool.read(n).sequence for n in (1, 2, 3)] == [1, 2, 3]
    spool.acknowledge(2)
    assert spool.read(1).payload == b"y" * 40
    assert spool.read(4) is None
    assert spool.append(b"z" * 40)
