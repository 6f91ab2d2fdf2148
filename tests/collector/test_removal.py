"""What a run takes on the disk, what goes when steps go, and what is taken out of it."""

import json
import math
import os
import struct
import time

import pytest
import torch
from fake_agent import hello, here, wait_for
from one_run import Client, events
from tensors import SpoolFolder, blob_of, capturing, data_of
from typer.testing import CliRunner

from rankscope.collector import cli
from rankscope.collector.blobs.digest import Tensor
from rankscope.collector.blobs.removal import UNUSED_SECONDS, remove_unreferenced
from rankscope.collector.blobs.store import BlobReader, BlobStore
from rankscope.collector.query import open_run as opened
from rankscope.v1 import collector_pb2 as pb

TENSOR = pb.Recording(
    task="tensor", level="L1", summary_mode="statistics", precision="low", extra_info=True
)
LARGE = [data_of(200 << 10, seed) for seed in range(3)]
SMALL = [data_of(100, seed) for seed in range(3)]


def command(*arguments, input=None):
    functions = {name: cli.load(name) for name in ("du", "rm", "export", "query", "ls")}
    return CliRunner().invoke(cli.build(functions), [str(a) for a in arguments], input=input)


def printed(*arguments):
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


class Job:
    """Two steps of one process: each has a large and a small tensor of its own, and a large and a
    small one that both have.
    """

    def __init__(self, open_run, tmp_path):
        self.run = tmp_path / "run"
        self.open_run, spool = open_run, tmp_path / "spool"
        said = hello(rank=0, recording=TENSOR, spool_path=str(spool), **here())
        self.spool = SpoolFolder(spool, said.process_uuid)
        self.client = Client(open_run(), said)
        self.blobs = [self.spool.large(data) for data in LARGE]
        self.blobs += self.spool.small(*SMALL)
        both = [self.blobs[2], self.blobs[5]]
        own = [self.blobs[0], self.blobs[3], self.blobs[1], self.blobs[4]]
        self.client.send(capturing(1, 0, [*own[:2], *both]))
        self.client.send(capturing(2, 1, own[2:], known=both))
        self.client.wait_durable()
        wait_for(lambda: len(events(self.run, "sealed")) == 2)

    def leave(self):
        """The process leaves and the collector ends."""
        self.client.farewell()
        self.client.service.close()

    def stored(self):
        sizes = BlobReader(self.run.with_name("run.rankscope")).sizes()
        return [blob.digest in sizes for blob in self.blobs]

    def age(self):
        """Nobody has asked for any tensor for long."""
        long_ago = time.time() - 2 * UNUSED_SECONDS
        for path in self.run.with_name("run.rankscope").glob("blobs/??/*.pt"):
            os.utime(path, (long_ago, long_ago))


@pytest.fixture
def job(open_run, tmp_path):
    return Job(open_run, tmp_path)


def test_du_tells_shared_from_own(job):
    found = json.loads(printed("du", job.run, "--json"))
    first, second = found["groups"]["step"]
    assert (first["step"], first["tensors"]) == (0, 4)
    assert first["logical"] == first["stored"] == second["stored"] > 400 << 10
    assert 200 << 10 < first["alone"] < first["stored"]
    (process,) = found["groups"]["folder"]
    assert process["folder"] == "rank0"
    assert process["logical"] == 2 * first["logical"]
    assert process["stored"] == process["alone"] == first["stored"] + second["alone"]
    assert [row["kind"] for row in found["groups"]["kind"]] == ["api"]
    assert found["unreferenced"] == 0
    parts = ("tables", "documents", "tensors", "spool")
    assert found["total"] == sum(found[part] for part in parts)
    assert all(found[part] > 0 for part in ("tables", "documents", "tensors"))
    assert "tensors 6" in printed("du", job.run)


def test_steps_go_with_what_only_they_hold(job):
    job.leave()
    assert "would remove steps 0: 2 tensors" in printed("rm", job.run, "--steps", 0, "--dry-run")
    assert job.stored() == [True] * 6
    assert "removed steps 0: 2 tensors" in printed("rm", job.run, "--steps", 0, "--yes")
    assert job.stored() == [False, True, True, False, True, True]
    assert [path.name for path in job.run.iterdir()] == ["step1"]
    assert opened(job.run).sql("select distinct step from records")["step"].to_pylist() == [1]
    assert [row["step"] for row in events(job.run, "removed")] == [0]
    assert "step0" not in printed("ls", job.run)
    out = job.run.with_name("out")
    printed("export", job.run, "--to", out)
    assert len(list((out / "step1/rank0/dump_tensor_data").iterdir())) == 4


def test_a_removed_step_does_not_come_back_with_the_next_collector(job, tmp_path):
    job.leave()
    printed("rm", job.run, "--steps", 0, "--yes")
    service = job.open_run()
    wait_for(lambda: not service.is_busy())
    assert [path.name for path in job.run.iterdir()] == ["step1"]
    said = hello(rank=0, recording=TENSOR, spool_path=str(job.spool.folder), **here())
    other = Client(service, said)
    spool = SpoolFolder(job.spool.folder, said.process_uuid)
    other.send(capturing(1, 2, [spool.large(LARGE[0]), *spool.small(SMALL[0])]))
    other.wait_durable()
    assert job.stored() == [True] * 6


def test_beside_a_collector_only_what_was_not_asked_for_goes(job):
    said = "2 tensors"
    assert said not in printed("rm", job.run, "--steps", 0, "--yes")
    assert job.stored() == [True] * 6
    job.age()
    assert job.client.service.committer.is_alive()
    printed("rm", job.run, "--steps", 0, "--yes")
    assert job.stored() == [False, True, True, True, True, True]  # small ones wait for the end
    job.client.send(capturing(3, 2, [job.spool.large(LARGE[0])], known=[job.blobs[1]]))
    job.client.wait_durable()
    assert job.stored()[0]
    job.leave()
    printed("rm", job.run, "--steps", 0, "--yes")
    assert job.stored() == [True, True, True, False, True, True]


def test_what_a_collector_asks_for_stays(tmp_path):
    """Stored, used again by a batch whose rows are not committed yet: nothing refers to it."""
    side = tmp_path / "run.rankscope"
    side.mkdir()
    store = BlobStore(side, "test")
    paths = []
    for number, data in enumerate(LARGE):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes(4096) + data)
        blob = blob_of(data)
        store.settle([store.adopt(path, Tensor.of(blob))])
        paths.append(store.path(blob.digest))
        os.utime(paths[-1], (1, 1))
    assert store.has(blob_of(LARGE[1]).digest)
    freed = remove_unreferenced(side, [blob_of(LARGE[2]).digest], is_live=True)
    assert freed.tensors == 1
    assert [path.exists() for path in paths] == [False, True, True]


def test_an_open_step_stays(job):
    begun = capturing(3, 5, [], known=job.blobs[:1])
    del begun.steps[1:]  # not ended
    job.client.send(begun)
    job.client.wait_durable()
    result = command("rm", job.run, "--steps", "5", "--yes")
    assert "not complete yet, kept: steps 5" in result.output
    assert opened(job.run).table("nodes", ["step"])["step"].to_pylist().count(5) > 0


def test_a_run_goes_whole_and_only_when_nobody_records(job):
    result = command("rm", job.run, "--yes")
    assert result.exit_code == 2
    assert "1 processes still record" in result.output
    job.leave()
    assert "would remove" in printed("rm", job.run, "--dry-run")
    assert command("rm", job.run, input="n\n").exit_code == 1
    assert job.run.exists()
    assert "freed" in printed("rm", job.run, "--yes")
    assert sorted(path.name for path in job.run.parent.iterdir()) == ["spool"]


# --------------------------------------------------------------------------------------- export


def read_safetensors(path):
    """Name -> (dtype, shape, bytes), by the format's own definition."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [a for a, _ in ends] == [0, *[b for _, b in ends[:-1]]]  # no gap, nothing shared
    assert 8 + length + ends[-1][1] == len(content)
    at = 8 + length
    return {
        name: (entry["dtype"], entry["shape"], content[at + a : at + b])
        for name, entry in header.items()
        for a, b in [entry["data_offsets"]]
    }


def test_safetensors_hold_the_bytes(job, tmp_path):
    printed("export", job.run, "--to", tmp_path / "out", "--format", "safetensors", "--step", 1)
    (path,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert path == tmp_path / "out/step1/rank0/tensors.safetensors"
    found = read_safetensors(path)
    names = [f"Functional.linear.{i}.forward.input.0" for i in range(4)]
    contents = [LARGE[1], SMALL[1], LARGE[2], SMALL[2]]
    assert found == {n: ("U8", [len(c)], c) for n, c in zip(names, contents, strict=True)}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.uint16],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3, 5), (90, 1000)], ids=str)
def test_every_dtype_is_described(dtype, shape, tmp_path):
    """Dtype and shape come back out of the container that was made of them."""
    size = math.prod(shape) * dtype.itemsize
    side = tmp_path / "run.rankscope"
    side.mkdir()
    store = BlobStore(side, "test")
    blob = blob_of(data_of(size), shape, str(dtype))
    if size < 32 << 10:
        store.add_small([(Tensor.of(blob), data_of(size))])
    else:
        path = tmp_path / "one"
        path.write_bytes(bytes(4096) + data_of(size))
        store.settle([store.adopt(path, Tensor.of(blob))])
    assert store.tensor(blob.digest) == Tensor.of(blob)
    assert b"".join(store.pieces(blob.digest)) == data_of(size)


def test_export_takes_records_by_name(job, tmp_path):
    printed("export", job.run, "--to", tmp_path / "out", "--name", "Functional.linear.[12].*")
    dump = json.loads((tmp_path / "out/step0/rank0/dump.json").read_text())
    assert list(dump["data"]) == [f"Functional.linear.{i}.forward" for i in (1, 2)]
    assert len(list((tmp_path / "out/step0/rank0/dump_tensor_data").iterdir())) == 2
    result = command("export", job.run, "--to", tmp_path / "no", "--name", "Module.*")
    assert result.exit_code == 2
    assert "--name Module.*" in result.output
    result = command("export", job.run, "--to", tmp_path / "no", "--format", "npz")
    assert "--format 'npz': expected one of msprobe, safetensors" in result.output
