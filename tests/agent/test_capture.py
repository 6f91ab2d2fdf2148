"""Whole tensors in the agent: the bytes of that moment, once, within bounds, on disk before they
are promised."""

import threading
import time
import warnings

import numpy as np
import pytest
import torch
from blake3 import blake3

from rankscope.agent.capture import Capture
from rankscope.agent.capture.memory import Memory, room_for
from rankscope.agent.recorder import API, FORWARD, INPUT, SAVE, Recorder
from rankscope.agent.transport.disk_spool import DiskSpool
from rankscope.agent.transport.tensor_files import HEAD_BYTES, LARGE_BYTES, TensorReader
from rankscope.v1 import collector_pb2 as pb

UUID = "b" * 32
MIB = 1 << 20


def name_of(number):
    return f"{UUID}-{number:020d}"


class Setup:
    """A recorder whose tensors go to a spool folder."""

    def __init__(
        self,
        folder,
        wants=lambda name: True,
        memory=64 * MIB,
        limit=256 * MIB,
        wait=0.2,
        quota=None,
    ):
        self.folder = folder
        self.spool = DiskSpool(folder, UUID, b"", limit, tensor_patience_seconds=wait)
        self.capture = Capture(wants, memory, wait, quota)
        self.capture.keeper = self.spool.tensors
        self.recorder = Recorder(capture=self.capture)
        self.blobs = {}

    def event(self, *tensors, name="Torch.relu.0.forward", step=0, kind=API):
        self.recorder.event(
            *(step, self.recorder.name_id(name), INPUT, kind, FORWARD),
            parts=(("input_args", tensors),),
        )

    def take(self):
        batch = self.recorder.take()
        assert self.spool.append(batch.SerializeToString())
        self.spool.tensors.sealed(self.spool.last_sequence)
        return batch

    def contents(self, batch):
        """Per tensor leaf: (dtype, shape, bytes), None when it is not captured."""
        columns = batch.columns
        flags = np.frombuffer(columns.flags, np.uint8)
        ids = np.frombuffer(columns.digest, "<u4") if columns.digest else np.zeros(len(flags), int)
        assert [bool(flag & pb.IS_CAPTURED) for flag in flags] == [bool(i) for i in ids]
        return [self.blobs[columns.digests[i - 1]] if i else None for i in ids]

    def taken(self):
        """The contents of everything recorded since the last call."""
        batch = self.take()
        for blob in batch.blobs:
            data = (self.folder / blob.file).read_bytes()[blob.offset : blob.offset + blob.size]
            text = f"{blob.dtype} {','.join(map(str, blob.shape))}\n"
            assert blake3(text.encode() + data).digest() == blob.digest
            self.blobs[blob.digest] = (blob.dtype, tuple(blob.shape), data)
        return self.contents(batch), batch

    def files(self):
        return sorted(p.name for p in self.folder.iterdir() if ".tensor" in p.name)


@pytest.fixture
def setup(tmp_path):
    made = []

    def make(**options):
        made.append(Setup(tmp_path / f"spool{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.spool.close()


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected(tensor):
    return str(tensor.dtype), tuple(tensor.shape), raw(tensor)


def test_the_values_of_that_moment(setup):
    one = setup()
    x = torch.arange(6.0).reshape(2, 3)
    then = expected(x.clone())
    one.event(x)
    x.zero_()
    one.event(x)
    (first, second), _ = one.taken()
    assert (first, second) == (then, expected(x))


DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(setup, dtype):
    if dtype.itemsize == 1 and str(dtype)[-1] in "1234567" and "int" in str(dtype):
        pytest.skip("torch makes no tensor of it")
    one = setup()
    data = torch.arange(48, dtype=torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vector = data.view(dtype)
        one.event(vector, vector[0], vector.reshape(1, -1))
        contents, _ = one.taken()
        assert contents == [expected(t) for t in (vector, vector[0], vector.reshape(1, -1))]


def test_every_layout_becomes_row_major(setup):
    one = setup()
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    complexes = torch.complex(torch.arange(4.0), torch.ones(4))
    views = [
        base.transpose(0, 3),
        base[:, 1:, ::2],
        base.to(memory_format=torch.channels_last),
        torch.ones(3, 1).expand(3, 4),
        complexes.conj(),
        complexes.conj().imag,
        torch.nn.Parameter(base[0]),
        torch.tensor(3.5),
    ]
    one.event(*views)
    contents, _ = one.taken()
    resolved = [v.detach().resolve_conj().resolve_neg() for v in views]
    assert contents == [expected(v) for v in resolved]


def test_what_has_no_values_is_not_captured(setup):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    one = setup()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    nothing = [torch.ones(2, device="meta"), fake, torch.empty(0, 3), freed]
    one.event(*nothing, torch.ones(1))
    contents, batch = one.taken()
    assert contents == [None] * 4 + [expected(torch.ones(1))]
    assert not batch.drops


def test_inside_vmap_the_unwrapped_tensor_is_kept(setup):
    one, x = setup(), torch.arange(6.0).reshape(2, 3)

    def look(row):
        one.event(row)
        return row * 2

    torch.vmap(look)(x)
    assert one.taken()[0] == [expected(x)]


def test_equal_contents_are_written_once(setup):
    one = setup()
    x = torch.arange(1000.0)
    one.event(x, x.clone(), x.reshape(10, 100))
    contents, batch = one.taken()
    assert len(batch.blobs) == 2  # another shape is another tensor
    assert contents[0] == contents[1]
    one.event(x.clone())
    contents, batch = one.taken()
    assert contents == [expected(x)]
    assert not batch.blobs
    assert len(one.files()) == 1


def test_a_checksum_that_is_equal_by_chance_does_not_hide_a_tensor(setup, monkeypatch):
    monkeypatch.setattr("rankscope.agent.capture.capture.crc32_at", lambda address, size: 7)
    one = setup()
    a, b = torch.zeros(10), torch.ones(10)
    one.event(a, b, a)
    assert one.taken()[0] == [expected(a), expected(b), expected(a)]
    one.event(a, b)
    assert one.taken()[0] == [expected(a), expected(b)]


def test_large_ones_are_files_with_room_for_a_head(setup):
    one = setup()
    large, small = torch.zeros(LARGE_BYTES // 4), torch.ones(LARGE_BYTES // 4 - 1)
    one.event(large, small)
    _, batch = one.taken()
    by_size = {blob.size: blob for blob in batch.blobs}
    assert by_size[LARGE_BYTES].file == f"{name_of(1)}.tensor"
    assert by_size[LARGE_BYTES].offset == HEAD_BYTES
    assert by_size[LARGE_BYTES - 4].file == f"{name_of(2)}.tensors"
    assert (one.folder / f"{name_of(1)}.tensor").stat().st_size == HEAD_BYTES + LARGE_BYTES


def test_only_the_records_that_are_asked_for(setup):
    one = setup(wants=lambda name: "relu" in name)
    x = torch.ones(2)
    for name in ("Torch.relu.0.forward", "Torch.tanh.0.forward"):
        one.event(x, name=name)
    one.event(x, name="mine", kind=SAVE)
    assert one.taken()[0] == [expected(x), None, expected(x)]


def test_files_go_when_their_batch_is_acknowledged(setup):
    one = setup()
    one.event(torch.zeros(LARGE_BYTES))
    one.take()
    one.event(torch.ones(LARGE_BYTES), torch.ones(3))
    one.take()
    assert len(one.files()) == 3
    assert one.spool.size_bytes > 2 * 4 * LARGE_BYTES
    one.spool.acknowledge(1)
    assert len(one.files()) == 2
    one.spool.acknowledge(2)
    assert one.files() == []


def test_a_full_memory_waits_for_the_disk(setup):
    one = setup(memory=4 * MIB, wait=30.0)
    tensors = [torch.full((MIB // 4,), float(i)) for i in range(16)]
    batches, done = [], threading.Event()

    def write():
        while not done.is_set() or one.recorder.pending_bytes:
            if (batch := one.recorder.take()) is not None:
                batches.append(batch)
            time.sleep(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    for tensor in tensors:
        one.event(tensor)
        assert one.capture.memory.used <= 4 * MIB
    done.set()
    thread.join()
    assert sum(len(batch.blobs) for batch in batches) == 16
    assert not any(batch.drops for batch in batches)
    assert one.capture.memory.used == 0


def test_when_nothing_gets_free_tensors_are_left_out_and_counted(setup):
    one = setup(memory=2 * MIB)
    began = time.monotonic()
    for i in range(20):
        one.event(torch.full((MIB // 4,), float(i)), step=i % 2)
    assert time.monotonic() - began < 2.0  # it waited once, not for each
    contents, batch = one.taken()
    assert [c is not None for c in contents] == [True] * 2 + [False] * 18
    assert {(d.step, d.events, d.reason) for d in batch.drops} == {
        (0, 0, "tensor_memory_full: 9 tensors"),
        (1, 0, "tensor_memory_full: 9 tensors"),
    }
    one.event(torch.ones(3))  # there is room again
    assert one.taken()[0] == [expected(torch.ones(3))]


def test_a_tensor_larger_than_the_memory_goes_alone(setup):
    one, x = setup(memory=MIB), torch.arange(MIB, dtype=torch.int32)
    one.event(x)
    assert one.taken()[0] == [expected(x)]
    assert one.capture.memory.used == 0


def test_an_event_is_laid_where_all_of_it_fits(setup):
    # What lies before the held copy is free again, and has room for two of the three.
    one, held = setup(), torch.ones(16 << 10)
    finish = one.capture.finish

    def recorded_meanwhile(batch, leaves):
        one.event(held)
        finish(batch, leaves)

    one.event(torch.zeros(16 << 10))
    one.capture.finish = recorded_meanwhile
    one.taken()
    one.capture.finish = finish
    output, weight, bias = (torch.full((7 << 10,), float(i)) for i in range(2, 5))
    one.event(output, weight, bias)
    contents, batch = one.taken()
    assert contents == [expected(tensor) for tensor in (held, output, weight, bias)]
    assert not batch.drops


def test_an_event_larger_than_the_memory_is_kept_whole(setup):
    one = setup(memory=MIB)
    tensors = [torch.full((MIB // 8,), float(i)) for i in range(4)]
    for step in range(2):
        tensors = [tensor + 10 for tensor in tensors]
        one.event(torch.full((10,), float(step)), *tensors, step=step)
        contents, batch = one.taken()
        assert contents[1:] == [expected(tensor) for tensor in tensors]
        assert not batch.drops
        assert one.capture.memory.used == 0


def test_threads_do_not_take_each_other_s_room(setup):
    one = setup(memory=2 * MIB, wait=30.0)
    batches, done = [], threading.Event()

    def write():
        while not done.is_set() or one.recorder.pending_bytes:
            if (batch := one.recorder.take()) is not None:
                batches.append(batch)
            time.sleep(0.0005)

    def record(first):
        for i in range(10):
            one.event(*(torch.full((MIB // 8,), float(first + 3 * i + j)) for j in range(3)))

    threads = [threading.Thread(target=record, args=(1000 * i,)) for i in range(3)]
    writer = threading.Thread(target=write)
    for thread in (writer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    writer.join()
    assert sum(len(batch.blobs) for batch in batches) == 90
    assert not any(batch.drops for batch in batches)


def test_inside_vmap_room_is_made_for_the_whole_batch(setup):
    one = setup(memory=MIB)
    batch = torch.arange(MIB // 2, dtype=torch.int32).reshape(8, -1)
    torch.vmap(lambda row: (one.event(row, row + 1), row)[1])(batch)
    assert one.taken()[0] == [expected(batch), expected(batch + 1)]


def test_a_full_spool_leaves_out_and_takes_again_when_there_is_room(setup):
    one = setup(limit=5 * MIB)
    tensors = [torch.full((2 * MIB // 4,), float(i)) for i in range(4)]
    one.event(*tensors[:3])
    contents, batch = one.taken()
    assert contents == [expected(tensors[0]), expected(tensors[1]), None]
    assert [d.reason for d in batch.drops] == ["tensor_spool_full: 1 tensors"]
    one.spool.acknowledge(1)
    one.event(tensors[2], tensors[0])
    contents, batch = one.taken()
    assert contents == [expected(tensors[2]), expected(tensors[0])]
    assert len(batch.blobs) == 1


def test_a_process_that_is_stopped_waits_for_no_room(setup):
    one = setup(limit=3 * MIB, wait=60.0)
    tensors = [torch.full((2 * MIB // 4,), float(i)) for i in range(2)]
    one.event(*tensors)
    threading.Timer(0.2, lambda: setattr(one.spool.tensors, "hurry", True)).start()
    began = time.monotonic()
    assert one.taken()[0] == [expected(tensors[0]), None]
    assert 0.1 < time.monotonic() - began < 10


def test_a_lost_batch_brings_its_tensors_again(setup):
    one, x = setup(), torch.arange(LARGE_BYTES)
    one.event(x)
    batch = one.recorder.take()
    one.spool.tensors.discard()
    one.recorder.lost(batch, "spool_full")
    assert one.files() == []
    one.event(x)
    contents, batch = one.taken()
    assert contents == [expected(x)]
    assert len(batch.blobs) == 1


def test_a_lost_batch_is_lost_for_all_that_have_its_content(setup):
    one, x = setup(), torch.arange(LARGE_BYTES)
    one.event(x)
    batch = one.recorder.take()
    one.capture._seen.clear()  # forgotten among many others, so that it is copied again
    one.event(x)
    assert not one.recorder.take().blobs
    one.spool.tensors.discard()
    one.recorder.lost(batch, "spool_full")
    one.event(x)
    contents, batch = one.taken()
    assert contents == [expected(x)]
    assert len(batch.blobs) == 1


def test_without_a_disk_nothing_is_captured(setup):
    one = setup()
    one.capture.keeper = None
    one.event(torch.ones(3))
    batch = one.recorder.take()
    assert not batch.blobs
    assert [d.reason for d in batch.drops] == ["tensor_spool_full: 1 tensors"]


def test_capture_is_seen_by_no_mode_and_changes_no_tensor(setup):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    one = setup()
    x = torch.randn(4, 6, requires_grad=True)
    version = x._version
    with Count():
        one.event(x, x.t(), x.t()[1:])
    assert Count.calls == 3  # of the test's own views
    assert x._version == version
    assert x.grad is None


def test_chunks_of_a_tensor(setup):
    one = setup()
    x = torch.arange(3 * MIB // 8 + 1)
    one.event(x, torch.ones(2))
    batch = one.take()
    for blob in batch.blobs:
        reader, parts = TensorReader(blob.digest, one.spool.tensor(blob.digest)), []
        while not reader.done:
            parts.append(reader.next())
        assert [p.offset for p in parts] == [i * MIB for i in range(len(parts))]
        assert {p.total for p in parts} == {blob.size}
        assert b"".join(p.data for p in parts) == raw(x if blob.size > 100 else torch.ones(2))
    gone = TensorReader(bytes(32), one.spool.tensor(bytes(32)))
    assert gone.next().missing
    assert gone.done


def test_memory_is_a_ring():
    memory = Memory(1000)
    first, second = memory.take(400), memory.take(400)
    assert memory.take(400) is None
    memory.give_back(first)
    third = memory.take(300)
    assert third is not None
    assert third.start == 0
    assert memory.take(200) is None
    memory.give_back(third)
    memory.give_back(second)
    assert memory.used == 0
    assert memory.take(1000).start == 0


def test_memory_never_gives_out_what_is_held():
    rng, memory, held = np.random.default_rng(0), Memory(5000), []
    for number in range(3000):
        size = int(rng.integers(1, 1500))
        region = memory.take(size)
        if region is not None:
            region.view[:] = bytes([number % 251]) * size
            held.append((region, number % 251))
        elif held:
            region, value = held.pop(int(rng.integers(0, len(held))))
            assert bytes(region.view) == bytes([value]) * region.size
            memory.give_back(region)
        assert memory.used == sum(r.size for r, _ in held) <= 5000


def test_a_quota_leaves_out_what_is_new(setup):
    one = setup(quota=3 * MIB)
    tensors = [torch.full((MIB // 4,), float(i)) for i in range(5)]
    one.event(*tensors)
    contents, batch = one.taken()
    assert contents == [*map(expected, tensors[:3]), None, None]
    assert [(d.events, d.reason) for d in batch.drops] == [(0, "tensor_quota: 2 tensors")]
    one.event(tensors[0], tensors[4])  # what is there already is named
    assert one.taken()[0] == [expected(tensors[0]), None]


def test_a_collector_s_quota_holds_until_it_says_otherwise(setup):
    one, x = setup(), torch.ones(3)
    one.event(x)
    one.taken()
    one.spool.tensors.refused = True
    one.event(x, x + 1)
    contents, batch = one.taken()
    assert contents == [expected(x), None]
    assert [d.reason for d in batch.drops] == ["tensor_quota: 1 tensors"]
    one.spool.tensors.refused = False
    one.event(x + 1)
    assert one.taken()[0] == [expected(x + 1)]


def test_forms_that_are_not_kept_are_counted(setup):
    one = setup()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.rand(4), 0.1, 3, torch.quint8)
        sparse = torch.eye(3).to_sparse()
        rows = sparse.to_sparse_csr()
    one.event(quantized, sparse, rows, torch.ones(2))
    contents, batch = one.taken()
    assert contents == [None, None, None, expected(torch.ones(2))]
    assert [d.reason for d in batch.drops] == ["tensor_unsupported: 3 tensors"]


def test_what_was_written_long_ago_is_written_again(setup, monkeypatch):
    """A store may forget what nobody brought for an hour."""
    one, x = setup(), torch.rand(1000)
    for seconds, brought in ((0, 1), (500, 0), (700, 1), (800, 0), (1400, 1)):
        now = 1e6 + seconds
        monkeypatch.setattr("rankscope.agent.capture.blob.time.monotonic", lambda now=now: now)
        one.event(x)
        contents, batch = one.taken()
        assert contents == [expected(x)]
        assert len(batch.blobs) == brought, seconds


@pytest.mark.parametrize("seed", range(5))
def test_room_that_was_found_for_an_event_is_enough_for_all_of_it(seed):
    rng, memory, held = np.random.default_rng(seed), Memory(4096), []
    whole = 0
    for _ in range(2000):
        sizes = rng.integers(1, 700, int(rng.integers(1, 5))).tolist()
        ahead = sum(map(room_for, sizes))
        if memory.has_room(ahead):
            whole += 1
            for size in sizes:
                region = memory.take(size, ahead)
                assert region is not None
                held.append(region)
                ahead -= room_for(size)
        while held and rng.random() < 0.6:
            memory.give_back(held.pop(0))
    assert whole > 500


def test_a_ring_stays_small_while_copies_are_given_back():
    memory = Memory(1 << 20)
    held = []
    for _ in range(1000):
        held.append(memory.take(10_000))
        if len(held) == 3:
            memory.give_back(held.pop(0))
    assert max(region.start for region in held) < 50_000


def test_a_distributed_tensor_s_own_shard_is_kept_with_its_placement(setup):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        shard = torch.arange(6.0).reshape(2, 3)
        mesh = init_device_mesh("cpu", (2,))
        one = setup()
        one.event(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
        contents, batch = one.taken()
    finally:
        torch.distributed.destroy_process_group()
    assert contents == [expected(shard)]
    (outline,) = batch.columns.outlines
    (leaf,) = pb.Outline.FromString(outline).leaves
    assert list(leaf.shape) == [2, 3]
    assert '"Shard": {"dim": 0}' in leaf.extra_json
