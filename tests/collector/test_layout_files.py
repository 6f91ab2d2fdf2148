import threading

import pytest

from rankscope.collector.layout import Layout, checked_folder, folder_order


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "run")


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_write_puts_documents_in_place(layout):
    folder = layout.write(3, "rank0", {"dump.json": b"1", "stack.json": b"2"})
    assert folder == layout.run_path / "step3" / "rank0"
    layout.write(3, "rank0", {"dump.json": b"new"})
    assert files(layout.run_path) == {
        "step3/rank0/dump.json": b"new",
        "step3/rank0/stack.json": b"2",
    }


def test_the_run_holds_steps_only_and_nothing_is_left_aside(layout, tmp_path):
    layout.write(0, "proc12", {"dump.json": b"1"})
    assert [p.name for p in layout.run_path.iterdir()] == ["step0"]
    assert [p.name for p in (layout.run_path / "step0").iterdir()] == ["proc12"]
    assert list((tmp_path / "run.rankscope" / "tmp").iterdir()) == []


def test_dump_json_comes_last(layout, monkeypatch):
    placed = []
    real = layout.place
    monkeypatch.setattr(layout, "place", lambda p, make: (placed.append(p.name), real(p, make)))
    layout.write(0, "rank0", {"dump.json": b"", "construct.json": b"", "stack.json": b""})
    assert placed[-1] == "dump.json"
    assert len(placed) == 3


GOOD = ["rank0", "rank4095", "proc12", "rank0.node-1.example.77", "proc12.node1", "proc1.0f"]
BAD = [
    "",
    ".",
    "..",
    "rank",
    "rank-1",
    "rank0/..",
    "../rank0",
    "/rank0",
    "rank0.",
    "rank0..",
    "proc",
]
BAD += ["step0", "rank0\n", "rank0 ", "rank0.a/b", "rank0." + "x" * 200, "Rank0", "rank٣", "x\0"]


@pytest.mark.parametrize("name", GOOD)
def test_names_that_are_taken(layout, name):
    assert checked_folder(name) == name
    assert layout.write(0, name, {"dump.json": b""}).name == name


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_refused(layout, name):
    for call in (
        lambda: layout.write(0, name, {"dump.json": b""}),
        lambda: layout.rename(name, "rank0"),
        lambda: layout.rename("rank0", name),
        lambda: layout.remove([name]),
    ):
        with pytest.raises(ValueError, match="folder name"):
            call()
    assert not layout.run_path.exists()


def test_other_documents_and_steps_are_refused(layout):
    with pytest.raises(ValueError, match=r"document '\.\./x'"):
        layout.write(0, "rank0", {"../x": b""})
    with pytest.raises(ValueError, match="step -1"):
        layout.write(-1, "rank0", {"dump.json": b""})


def test_rename_in_all_steps_replaces_what_is_there(layout):
    for step in (0, 2):
        layout.write(step, "proc12", {"dump.json": b"%d" % step})
    layout.write(1, "rank5", {"dump.json": b"other"})
    layout.write(2, "rank5", {"dump.json": b"old", "stack.json": b"old"})
    layout.rename("proc12", "rank5")
    assert layout.folders() == {0: ["rank5"], 1: ["rank5"], 2: ["rank5"]}
    assert files(layout.run_path) == {
        "step0/rank5/dump.json": b"0",
        "step1/rank5/dump.json": b"other",
        "step2/rank5/dump.json": b"2",
    }


def test_remove_takes_empty_steps_too(layout):
    for step in range(3):
        layout.write(step, "rank0", {"dump.json": b""})
    layout.write(1, "rank1", {"dump.json": b""})
    layout.remove(["rank0", "rank9"], from_step=1)
    assert layout.folders() == {0: ["rank0"], 1: ["rank1"]}
    layout.remove(["rank0", "rank1"])
    assert list(layout.run_path.iterdir()) == []


def test_folders_are_in_order_and_others_left_out(layout):
    for name in ("rank10", "rank9", "proc3", "rank9.node2.4"):
        layout.write(10, name, {"dump.json": b""})
    layout.write(9, "rank0", {"dump.json": b""})
    (layout.run_path / "step9" / "notes").mkdir()
    (layout.run_path / "other").mkdir()
    assert list(layout.folders().items()) == [
        (9, ["rank0"]),
        (10, ["rank9", "rank9.node2.4", "rank10", "proc3"]),
    ]
    assert folder_order("rank2") < folder_order("rank10") < folder_order("proc1")


def test_no_run_has_no_folders(layout):
    assert layout.folders() == {}
    layout.remove(["rank0"])


def test_readers_never_see_half_a_file(layout):
    contents = {bytes([65 + n]) * (200_000 + n) for n in range(4)}
    path = layout.write(0, "rank0", {"dump.json": next(iter(contents))}) / "dump.json"
    done = threading.Event()

    def write():
        for _ in range(10):
            for content in contents:
                layout.write(0, "rank0", {"dump.json": content})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= contents
    assert seen


def test_write_and_remove_of_others_meet(layout):
    """A step folder taken away as empty while somebody writes into it is made again."""

    def remove():
        for _ in range(200):
            layout.remove(["rank1"])

    remover = threading.Thread(target=remove)
    remover.start()
    for number in range(200):
        layout.write(0, "rank1", {"dump.json": b"x"})
        layout.write(1, "rank0", {"dump.json": b"%d" % number})
    remover.join()
    assert files(layout.run_path)["step1/rank0/dump.json"] == b"199"
