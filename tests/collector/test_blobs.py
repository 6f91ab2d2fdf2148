"""The tensor store: what stands under a final name is whole, and what was said to be stored is."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tensors import SpoolFolder, blob_of, data_of

from rankscope.collector.blobs.digest import Tensor, hasher
from rankscope.collector.blobs.names import safe_names
from rankscope.collector.blobs.sources import bring
from rankscope.collector.blobs.store import LARGE_BYTES, BlobStore, Corrupt

PROCESS = "a" * 32


@pytest.fixture
def side(tmp_path):
    path = tmp_path / "run.rankscope"
    path.mkdir()
    return path


@pytest.fixture
def spool(tmp_path):
    return SpoolFolder(tmp_path / "spool", PROCESS)


@pytest.fixture
def take(pool):
    """Bring blobs out of a spool into a store; what is lacking comes back."""
    return lambda store, spool, *blobs: bring(store, blobs, spool.folder, pool)


@pytest.fixture(scope="module")
def pool():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as made:
        yield made


def content(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return archive.read("archive/data/0")


def test_a_large_tensor_becomes_a_pt_file_in_place(side, spool, take):
    store, data = BlobStore(side, "one"), data_of(LARGE_BYTES + 5)
    blob = spool.large(data)
    assert take(store, spool, blob) == []
    path = store.path(blob.digest)
    assert os.path.samefile(path, spool.folder / blob.file)
    assert content(path) == data
    assert path.stat().st_mode & 0o777 == 0o644
    assert store.has(blob.digest)


def test_bytes_that_are_not_the_digests_never_get_a_name(side, spool, take):
    store, data = BlobStore(side, "one"), data_of(LARGE_BYTES)
    large, (small,) = spool.large(data), spool.small(b"abc")
    for blob in (large, small):
        path = spool.folder / blob.file
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        path.write_bytes(changed)
    assert [b.digest for b in take(store, spool, large, small)] == [small.digest, large.digest]
    assert not store.has(large.digest)
    assert not store.has(small.digest)
    assert list(side.rglob("*.pt")) == []


@pytest.mark.parametrize("left", [0, 100, 4096 + 100])
def test_a_file_that_is_cut_off_is_lacking(side, spool, take, left):
    store = BlobStore(side, "one")
    blob = spool.large(data_of(LARGE_BYTES))
    os.truncate(spool.folder / blob.file, left)
    assert take(store, spool, blob) == [blob]
    assert not store.has(blob.digest)


def test_shape_and_dtype_belong_to_the_digest(side, spool, take):
    store, data = BlobStore(side, "one"), data_of(LARGE_BYTES)
    flat = spool.large(data)
    square = spool.large(data, shape=(2, LARGE_BYTES // 2))
    other = spool.large(data, dtype="torch.int8")
    assert len({flat.digest, square.digest, other.digest}) == 3
    assert take(store, spool, flat, square, other) == []
    assert all(content(store.path(b.digest)) == data for b in (flat, square, other))


def test_small_tensors_share_a_pack_and_are_found_again(side, spool, take):
    store = BlobStore(side, "one")
    tensors = [data_of(size, size) for size in (1, 10, 1000, LARGE_BYTES - 1)]
    blobs = spool.small(*tensors)
    assert take(store, spool, *blobs) == []
    assert len(list(side.rglob("*.pack"))) == 1
    for opened in (store, BlobStore(side, "one"), BlobStore(side, "two")):
        for blob, data in zip(blobs, tensors, strict=True):
            assert opened.has(blob.digest)
            assert data in opened.container(blob.digest)


def test_what_is_stored_is_not_stored_again(side, spool, take):
    store = BlobStore(side, "one")
    blobs = [*spool.small(b"abc"), spool.large(data_of(LARGE_BYTES))]
    take(store, spool, *blobs)
    before = {p: p.stat().st_size for p in (side / "blobs").rglob("*") if p.is_file()}
    again = [*spool.small(b"abc"), spool.large(data_of(LARGE_BYTES))]
    assert take(store, spool, *again) == []
    assert {p: p.stat().st_size for p in (side / "blobs").rglob("*") if p.is_file()} == before


def test_another_collector_reads_a_pack_that_grew(side, spool, take):
    writer, reader = BlobStore(side, "one"), BlobStore(side, "two")
    first, second = spool.small(b"first"), spool.small(b"second")
    for blobs in (first, second):
        take(writer, spool, *blobs)
        assert reader.container(blobs[0].digest) == writer.container(blobs[0].digest)
    with pytest.raises(KeyError):
        reader.container(bytes(32))


@pytest.mark.parametrize("cut", [1, 30, 60])
def test_a_torn_pack_keeps_what_is_whole(side, spool, take, cut):
    store = BlobStore(side, "one")
    first, second = spool.small(b"first"), spool.small(b"second" * 10)
    take(store, spool, *first)
    take(store, spool, *second)
    (pack,) = side.rglob("*.pack")
    os.truncate(pack, pack.stat().st_size - cut)
    opened = BlobStore(side, "one")
    assert opened.has(first[0].digest)
    assert not opened.has(second[0].digest)
    assert take(opened, spool, *second) == []
    assert BlobStore(side, "one").has(second[0].digest)


def test_without_links_the_file_is_copied(side, spool, take, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    store, data = BlobStore(side, "one"), data_of(LARGE_BYTES)
    blob = spool.large(data)
    monkeypatch.setattr(os, "link", refuse)
    assert take(store, spool, blob) == []
    assert content(store.path(blob.digest)) == data
    assert not os.path.samefile(store.path(blob.digest), spool.folder / blob.file)


def test_left_overs_of_this_collector_only_are_removed_when_it_starts(side):
    store = BlobStore(side, "one")
    for owner in ("one", "two"):
        BlobStore(side, owner).new_file().write_bytes(b"half")
    BlobStore(side, "one")
    assert [p.name[:3] for p in (side / "blobs" / "incoming").iterdir()] == ["two"]
    assert store.new_file().parent == side / "blobs" / "incoming"


def test_wrong_small_bytes_are_refused(side):
    store, blob = BlobStore(side, "one"), blob_of(b"abc")
    with pytest.raises(Corrupt):
        store.add_small([(Tensor.of(blob), b"abd")])
    with pytest.raises(Corrupt):
        store.add_small([(Tensor.of(blob), b"ab")])


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tensors import SpoolFolder, data_of
from rankscope.collector.blobs.sources import bring
from rankscope.collector.blobs.store import BlobStore
store, spool = BlobStore(Path(sys.argv[1]), "one"), SpoolFolder(Path(sys.argv[2]), "a" * 32)
with ThreadPoolExecutor(2) as pool:
    for number in range(10000):
        blobs = [spool.large(data_of(200_000 + i, number)) for i in range(3)]
        blobs += spool.small(data_of(1000, number))
        assert bring(store, blobs, spool.folder, pool) == []
        print(*[blob.digest.hex() for blob in blobs], flush=True)
"""


@pytest.mark.parametrize("after", [1, 4])
def test_kill_9_leaves_nothing_half_and_nothing_lost(side, tmp_path, after):
    support = Path(__file__).parent.parent / "support"
    command = [sys.executable, "-c", WRITER, str(side), str(tmp_path / "spool")]
    paths = os.environ | {"PYTHONPATH": str(support)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as process:
        said = [process.stdout.readline() for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    digests = [word for line in said if line.endswith("\n") for word in line.split()]
    store = BlobStore(side, "one")
    assert len(digests) >= 4 * after
    assert all(store.has(bytes.fromhex(digest)) for digest in digests)
    for path in (side / "blobs").glob("??/*"):
        data = content(path)
        found = hasher("torch.uint8", [len(data)])
        found.update(data)
        assert path.name == f"{found.hexdigest()}.pt"


def test_names_that_a_file_system_refuses_get_others():
    import pyarrow as pa

    odd = ["a/b.pt", "a_b.pt", "x" * 300 + ".pt", "x" * 301 + ".pt", "é" * 200 + ".pt", "a\nb.pt"]
    plain = ["Functional.linear.0.forward.input.0.pt", "Module.Ä ö.forward.0.output.0.pt"]
    names = safe_names(pa.array(odd + plain)).to_pylist()
    assert names[1] == odd[1]
    assert names[len(odd) :] == plain
    assert len(set(names)) == len(names)
    for name in names:
        assert "/" not in name
        assert name.isprintable()
        assert len(name.encode()) <= 255
        assert name.endswith(".pt")
