"""A batch with tensors is acknowledged when they are durable, wherever they come from."""

import json
import os
import shutil
import zipfile

import pytest
from fake_agent import hello, here, wait_for, write_spool
from one_run import Client, events
from tensors import SpoolFolder, blob_of, capturing, data_of, named

from rankscope.collector.blobs.store import LARGE_BYTES
from rankscope.v1 import collector_pb2 as pb

LARGE = data_of(3 << 20)
TENSOR = pb.Recording(
    task="tensor", level="L1", summary_mode="statistics", precision="low", extra_info=True
)


def files(run, step=0, folder="rank0"):
    """Names and contents of dump_tensor_data."""
    found = {}
    for path in (run / f"step{step}" / folder / "dump_tensor_data").iterdir():
        with zipfile.ZipFile(path) as archive:
            found[path.name] = archive.read("archive/data/0")
    return found


def name(number):
    return f"Functional.linear.{number}.forward.input.0.pt"


def local(tmp_path, rank=0):
    """A living process of this host with a spool."""
    said = hello(rank=rank, recording=TENSOR, spool_path=str(tmp_path / "spool"), **here())
    return said, SpoolFolder(tmp_path / "spool", said.process_uuid)


def remote(rank=0):
    return hello(rank=rank, recording=TENSOR)


def send_chunk(client, blob, data, offset=0, **more):
    chunk = pb.TensorChunk(digest=blob.digest, offset=offset, total=blob.size, data=data, **more)
    committer = client.service.committer
    committer.post(lambda: committer.chunk(client.hello.process_uuid, chunk, client.session))


def wanted(client):
    return [digest for want in client.session.all("want") for digest in want.digests]


def test_tensors_come_out_of_the_spool_of_this_host(open_run, tmp_path):
    said, spool = local(tmp_path)
    client = Client(open_run(), said)
    blobs = [spool.large(LARGE), *spool.small(b"first", b"second")]
    client.send(capturing(1, 0, blobs))
    client.wait_durable()
    client.farewell()
    run = tmp_path / "run"
    assert files(run) == {name(0): LARGE, name(1): b"first", name(2): b"second"}
    assert os.path.samefile(
        spool.folder / blobs[0].file, run / "step0" / "rank0" / "dump_tensor_data" / name(0)
    )
    document = json.loads((run / "step0" / "rank0" / "dump.json").read_text())
    assert document["dump_data_dir"] == str(run / "step0" / "rank0" / "dump_tensor_data")
    entry = document["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert entry["data_name"] == name(0)
    assert wanted(client) == []


def test_a_digest_of_an_earlier_batch_names_the_same_tensor(open_run, tmp_path):
    said, spool = local(tmp_path)
    client = Client(open_run(), said)
    blobs = [spool.large(LARGE), *spool.small(b"small")]
    client.send(capturing(1, 0, blobs))
    client.send(capturing(2, 1, [], known=blobs))
    client.farewell()
    assert files(tmp_path / "run", 0) == files(tmp_path / "run", 1)
    for number in (0, 1):
        paths = [
            tmp_path / "run" / f"step{step}" / "rank0" / "dump_tensor_data" / name(number)
            for step in (0, 1)
        ]
        assert os.path.samefile(*paths)


def test_a_remote_process_is_asked_for_what_is_lacking(open_run, tmp_path):
    client = Client(open_run(), remote())
    process = client.hello.process_uuid
    large, small = blob_of(LARGE, file=named(process, 1)), blob_of(b"x", file=named(process, 2))
    client.send(capturing(1, 0, [large, small]))
    client.send(capturing(2, 1, [], known=[large]))
    wait_for(lambda: len(wanted(client)) == 2)
    send_chunk(client, small, b"x")
    send_chunk(client, large, LARGE[: 1 << 20])
    assert client.session.durable() == 0
    send_chunk(client, large, LARGE[1 << 20 :], offset=1 << 20)
    client.wait_durable()
    assert client.session.durable() == 2
    wait_for(lambda: client.session.released >= len(LARGE) + 1)
    client.farewell()
    assert files(tmp_path / "run") == {name(0): LARGE, name(1): b"x"}
    assert files(tmp_path / "run", 1) == {name(0): LARGE}


def test_a_spool_of_another_host_is_not_looked_at(open_run, tmp_path):
    said, spool = local(tmp_path)
    said.boot_id = "another"
    client = Client(open_run(), said)
    blob = spool.large(LARGE)
    client.send(capturing(1, 0, [blob]))
    assert wait_for(lambda: wanted(client)) == [blob.digest]


def test_a_damaged_file_is_asked_for(open_run, tmp_path):
    said, spool = local(tmp_path)
    client = Client(open_run(), said)
    blob = spool.large(LARGE)
    (spool.folder / blob.file).write_bytes(bytes(4096 + len(LARGE)))
    client.send(capturing(1, 0, [blob]))
    assert wait_for(lambda: wanted(client)) == [blob.digest]
    send_chunk(client, blob, LARGE)
    client.wait_durable()


@pytest.mark.parametrize("how", ["missing", "wrong", "too much"])
def test_what_cannot_be_had_is_told_and_holds_nothing_up(open_run, tmp_path, how):
    client = Client(open_run(), remote())
    blob = blob_of(LARGE, file=named(client.hello.process_uuid, 1))
    client.send(capturing(1, 0, [blob]))
    wait_for(lambda: wanted(client))
    if how == "missing":
        send_chunk(client, blob, b"", missing=True)
    else:
        send_chunk(client, blob, bytes(len(LARGE)) if how == "wrong" else LARGE + b"x")
    client.wait_durable()
    notices = [notice.text for notice in client.session.all("notice")]
    assert any("1 tensors are lost" in text for text in notices), notices
    client.farewell()
    assert files(tmp_path / "run") == {}
    assert list((tmp_path / "run.rankscope" / "blobs" / "incoming").iterdir()) == []


def test_a_new_stream_is_asked_again_from_the_beginning(open_run, tmp_path):
    service, said = open_run(), remote()
    client = Client(service, said)
    blob = blob_of(LARGE, file=named(said.process_uuid, 1))
    client.send(capturing(1, 0, [blob]))
    wait_for(lambda: wanted(client))
    send_chunk(client, blob, LARGE[: 1 << 20])
    again = Client(service, said)
    assert wait_for(lambda: wanted(again)) == [blob.digest]
    send_chunk(again, blob, LARGE)
    wait_for(lambda: again.session.durable() == 1)


def test_equal_tensors_of_two_processes_travel_once(open_run, tmp_path):
    service = open_run()
    clients = [Client(service, remote(rank)) for rank in (0, 1)]
    for client in clients:
        blob = blob_of(LARGE, file=named(client.hello.process_uuid, 1))
        client.send(capturing(1, 0, [blob]))
        wait_for(lambda: wanted(clients[0]))
    committer = service.committer
    committer.ask(lambda: None)
    assert wanted(clients[1]) == []
    # The one that was asked goes away: the other is asked.
    gone = clients[0]
    committer.post(lambda: committer.broken(gone.hello.process_uuid, gone.session))
    assert wait_for(lambda: wanted(clients[1])) == [blob.digest]
    send_chunk(clients[1], blob, LARGE)
    clients[1].wait_durable()


def test_what_a_dead_process_left_is_taken_in(open_run, tmp_path):
    said, spool = local(tmp_path)
    said.pid, said.process_started = 1, 1.0  # not that process any more
    blobs = [spool.large(LARGE), *spool.small(b"small")]
    lost = blob_of(data_of(LARGE_BYTES, 9), file=named(said.process_uuid, 99))
    write_spool(spool.folder, said, {1: capturing(1, 0, blobs), 2: capturing(2, 1, [lost])})
    committer = open_run().committer
    committer.post(lambda: committer.adopt(said))
    wait_for(lambda: list(spool.folder.iterdir()) == [])
    wait_for(lambda: (tmp_path / "run" / "step1" / "rank0" / "dump.json").exists())
    assert files(tmp_path / "run") == {name(0): LARGE, name(1): b"small"}
    assert files(tmp_path / "run", 1) == {}


def test_a_process_that_dies_before_it_sent_all_left_it_in_its_spool(open_run, tmp_path):
    said, spool = local(tmp_path)
    said.pid, said.process_started = 1, 1.0  # not that process any more
    client = Client(open_run(tensors="stream"), said)
    blob = spool.large(LARGE)
    client.send(capturing(1, 0, [blob]))
    wait_for(lambda: wanted(client))
    send_chunk(client, blob, LARGE[: 1 << 20])
    committer = client.service.committer
    committer.post(lambda: committer.broken(said.process_uuid, client.session))
    wait_for(lambda: (tmp_path / "run" / "step0" / "rank0" / "dump.json").exists())
    assert files(tmp_path / "run") == {name(0): LARGE}


def test_a_restarted_collector_gets_the_batch_again(open_run, tmp_path):
    said = remote()
    client = Client(open_run(), said)
    blob = blob_of(LARGE, file=named(said.process_uuid, 1))
    client.send(capturing(1, 0, [blob]))
    wait_for(lambda: wanted(client))
    send_chunk(client, blob, LARGE[: 1 << 20])
    again = Client(open_run(), said)
    assert again.session.all("welcome")[0].durable_sequence == 0
    again.send(capturing(1, 0, [blob]))
    wait_for(lambda: wanted(again))
    send_chunk(again, blob, LARGE)
    again.wait_durable()
    again.farewell()
    assert files(tmp_path / "run") == {name(0): LARGE}


def test_blobs_that_are_no_blobs_are_refused(open_run, tmp_path):
    client = Client(open_run(), remote())
    process = client.hello.process_uuid
    bad = [
        {"file": "../../etc/passwd"},
        {"file": f"{process}-1.tensor"},
        {"dtype": "os.system"},
        {"dtype": "torch.float32\nos\nsystem"},
        {"size": 0},
        {"size": 7, "shape": [3]},
        {"shape": [-1, -9]},
        {"digest": b"short"},
    ]
    for number, fields in enumerate(bad, 1):
        blob = pb.Blob(
            **({"digest": bytes(32), "dtype": "torch.uint8", "shape": [9], "size": 9} | fields)
        )
        blob.file = blob.file or named(process, 1)
        client.send(capturing(number, 0, [blob]))
    client.wait_durable()
    assert len(client.session.all("problem")) == len(bad)
    assert len(events(tmp_path / "run", "refused")) == len(bad)


def test_files_that_were_deleted_are_made_again(open_run, tmp_path):
    said, spool = local(tmp_path)
    client = Client(open_run(pause_render_seconds=0.01), said)
    blobs = [spool.large(LARGE), *spool.small(b"small")]
    client.send(capturing(1, 0, blobs))
    target = tmp_path / "run" / "step0" / "rank0"
    wait_for(lambda: (target / "dump.json").exists())
    shutil.rmtree(target / "dump_tensor_data")
    client.send(capturing(2, 0, [], known=blobs))
    client.farewell()
    assert files(tmp_path / "run") == {name(0): LARGE, name(1): b"small"}
