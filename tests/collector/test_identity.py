"""Which folder a process gets, when processes clash, and what leaves the layout: as tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.identity import Identity, Process, State, is_newer
from rankscope.collector.layout import checked_folder


def process(name, pid=None, **fields):
    """Process `name` (one letter) of host h1, of one job."""
    defaults = {"host": "h1", "boot_id": "boot1", "run_key": "job", "started": 1.0}
    pid = ord(name) if pid is None else pid
    return Process(process=name * 32, pid=pid, **(defaults | fields))


def play(*acts):
    """Acts: a Process that joins; ("rank", name, r), ("left"|"lost", name), ("writes", name)."""
    identity, changes = Identity(), []
    for act in acts:
        if isinstance(act, Process):
            changes.append(identity.join(act))
        elif act[0] == "rank":
            changes.append(identity.learn(act[1] * 32, act[2]))
        elif act[0] == "writes":
            changes.append(identity.writes(act[1] * 32))
        else:
            changes.append(identity.leave(act[1] * 32, State(act[0])))
    return identity, changes


def folders(identity):
    return {name[0]: member.folder for name, member in identity.members.items()}


def clashes(changes):
    return [(first[0], second[0]) for change in changes for first, second in change.clashes]


other = {"host": "h2", "boot_id": "boot2"}

FOLDERS = {
    "rank known": ([process("a", rank=3)], {"a": "rank3"}),
    "rank unknown": ([process("a", 77)], {"a": "proc77"}),
    "rank learned": ([process("a", 77), ("rank", "a", 5)], {"a": "rank5"}),
    "rank learned at a second hello": (
        [process("a", 77), process("a", 77, rank=5)],
        {"a": "rank5"},
    ),
    "rank corrected": ([process("a", rank=0), ("rank", "a", 1)], {"a": "rank1"}),
    "two ranks": ([process("a", rank=0), process("b", rank=1)], {"a": "rank0", "b": "rank1"}),
    "two hosts, one pid": (
        [process("a", 7), process("b", 7, **other)],
        {"a": "proc7", "b": "proc7.h2"},
    ),
    "two containers, one host name and pid": (
        [process("a", 7), process("b", 7, boot_id="boot2")],
        {"a": "proc7", "b": "proc7.bbbbbbbb"},
    ),
    "three of one pid": (
        [process("a", 7), process("b", 7, **other), process("c", 7, started=9.0, **other)],
        {"a": "proc7", "b": "proc7.h2", "c": "proc7.h2.cccccccc"},
    ),
    "pid used again later": (
        [process("a", 7), process("k"), ("left", "a"), process("b", 7, started=9.0)],
        {"a": "proc7", "k": "proc107", "b": "proc7.bbbbbbbb"},
    ),
    "second session of one process": (
        [process("a", 7), process("k"), ("left", "a"), process("b", 7)],
        {"a": "proc7", "k": "proc107", "b": "proc7"},
    ),
    "host names are made harmless": (
        [process("a", 7), process("b", 7, host="node 1/x..y", boot_id="boot2")],
        {"a": "proc7", "b": "proc7.node-1-x-y"},
    ),
    "helper with a parent": (
        [process("a", rank=0), process("b", 8, parent="a" * 32)],
        {"a": "rank0", "b": "proc8"},
    ),
    "one rank twice": (
        [process("a", rank=0), process("b", 8, rank=0)],
        {"a": "rank0", "b": "rank0.h1.8"},
    ),
    "one rank twice, learned late": (
        [process("a", 7), process("b", 8), ("rank", "a", 0), ("rank", "b", 0)],
        {"a": "rank0", "b": "rank0.h1.8"},
    ),
    "one rank twice, on two hosts with one pid": (
        [process("a", 7, rank=0), process("b", 7, rank=0, **other)],
        {"a": "rank0", "b": "rank0.h2.7"},
    ),
    "two jobs in one run": (
        [process("a", rank=0), process("b", 8, rank=0, run_key="other")],
        {"a": "rank0", "b": "rank0.h1.8"},
    ),
    "one rank thrice, the first is dead": (
        [process("a", rank=0), process("b", 8, rank=0), ("lost", "a"), process("c", 9, rank=0)],
        {"a": "rank0", "b": "rank0.h1.8", "c": "rank0.h1.9"},
    ),
    "a clash is mended by a rank of its own": (
        [process("a", rank=0), process("b", 8, rank=0), ("rank", "b", 1)],
        {"a": "rank0", "b": "rank1"},
    ),
    "restart": (
        [process("a", rank=0), process("b", rank=0, attempt=1)],
        {"a": "rank0", "b": "rank0"},
    ),
    "same rank after the first died": (
        [process("a", rank=0), process("k", rank=1), ("lost", "a"), process("b", rank=0)],
        {"a": "rank0", "k": "rank1", "b": "rank0"},
    ),
    "delivered later beside the living": (
        [process("a", rank=0), process("b", 8, rank=0, delivered_later=True)],
        {"a": "rank0", "b": "rank0.h1.8"},
    ),
    "delivered later, of an earlier attempt": (
        [process("a", rank=0, attempt=1), process("b", 8, rank=0, delivered_later=True)],
        {"a": "rank0", "b": "rank0"},
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case):
    acts, expected = FOLDERS[case]
    identity, _ = play(*acts)
    assert folders(identity) == expected
    for folder in expected.values():
        assert checked_folder(folder) == folder


CLASHES = {
    "two live ones": ([process("a", rank=0), process("b", rank=0)], [("a", "b")]),
    "a third names the first": (
        [process("a", rank=0), process("b", rank=0), process("c", rank=0)],
        [("a", "b"), ("a", "c")],
    ),
    "a restart": ([process("a", rank=0), process("b", rank=0, attempt=1)], []),
    "after the first left": (
        [process("a", rank=0), process("k"), ("left", "a"), process("b", rank=0)],
        [],
    ),
    "different ranks": ([process("a", rank=0), process("b", rank=1)], []),
    "no rank": ([process("a", 1), process("b", 1)], []),
    "the same process again": ([process("a", rank=0), process("a", rank=0)], []),
    "of another job": ([process("a", rank=0), process("b", rank=0, run_key="x")], [("a", "b")]),
}


@pytest.mark.parametrize("case", CLASHES)
def test_clashes(case):
    acts, expected = CLASHES[case]
    assert clashes(play(*acts)[1]) == expected


def test_the_second_claimant_keeps_its_name_when_the_first_leaves():
    identity, _ = play(process("a", rank=0), process("b", 8, rank=0), ("left", "a"))
    assert folders(identity)["b"] == "rank0.h1.8"


def test_a_late_rank_renames_once():
    _, changes = play(process("a", 7), ("writes", "a"), ("rank", "a", 2), ("rank", "a", 2))
    assert [change.renamed for change in changes] == [[], [], [("proc7", "rank2")], []]


INSTANCES = {
    "same job": ([process("a")], process("b"), "a"),
    "another job": ([process("a")], process("b", run_key="x"), None),
    "same key after all left": ([process("a"), ("left", "a")], process("b"), None),
    "same key while one is live": ([process("a"), process("k"), ("left", "a")], process("b"), "a"),
    "a restart after all died": ([process("a"), ("lost", "a")], process("b", attempt=1), "a"),
    "a child after its parent left": (
        [process("a"), ("left", "a")],
        process("b", parent="a" * 32, run_key="x"),
        "a",
    ),
    "delivered later": ([process("a"), ("left", "a")], process("b", delivered_later=True), "a"),
    "delivered later, of an unknown job": (
        [process("a"), ("left", "a")],
        process("b", run_key="x", delivered_later=True),
        None,
    ),
    "a slow one, after a quick one left": (
        [process("a", rank=0, world_size=2), ("left", "a")],
        process("b", rank=1, world_size=2),
        "a",
    ),
    "a slow one on another host": (
        [process("a", rank=0, world_size=2, parent_pid=5), ("left", "a")],
        process("b", rank=1, world_size=2, parent_pid=6, **other),
        "a",
    ),
    "the next launch, by another parent": (
        [process("a", rank=0, world_size=2, parent_pid=5), ("left", "a")],
        process("b", rank=1, world_size=2, parent_pid=6),
        None,
    ),
    "the next launch, of a rank that was there": (
        [
            *(process("a", rank=0, world_size=2), process("k", rank=1, world_size=2)),
            *(("left", "a"), ("left", "k")),
        ],
        process("b", rank=1, world_size=2),
        None,
    ),
    "the next launch, of another size": (
        [process("a", rank=0, world_size=2), ("left", "a")],
        process("b", rank=1, world_size=4),
        None,
    ),
    "a slow one whose fellows have no rank": (
        [process("a"), ("left", "a")],
        process("b", rank=1, world_size=2),
        None,
    ),
    "the newest of several": (
        [process("a"), ("lost", "a"), process("b"), ("lost", "b")],
        process("c", attempt=1),
        "b",
    ),
}


@pytest.mark.parametrize("case", INSTANCES)
def test_instances(case):
    acts, new, expected = INSTANCES[case]
    identity, _ = play(*acts)
    assert identity.instance_for(new) == (expected and expected * 32)


REMOVED = {
    "a second run, at its first step": (
        [process("a", rank=0), process("b", rank=1), ("left", "a"), ("left", "b")],
        [process("c", rank=0), ("writes", "c"), ("writes", "c")],
        [[], ["rank0", "rank1"], []],
    ),
    "not while the first one lives": (
        [process("a", rank=0), process("b", rank=1, run_key="x")],
        [("writes", "b"), ("left", "a"), ("writes", "b")],
        [[], [], []],
    ),
    "two finished runs": (
        [
            *(process("a", 7), ("writes", "a"), ("left", "a")),
            *(process("b", 8), ("left", "b")),
        ],
        [process("c", 9), ("writes", "c")],
        [[], ["proc7", "proc8"]],
    ),
    "delivered later, behind a run that is there": (
        [process("a", rank=0, started=5.0), ("writes", "a"), ("left", "a")],
        [process("b", rank=0, run_key="x", delivered_later=True), ("writes", "b")],
        [[], []],
    ),
}


@pytest.mark.parametrize("case", REMOVED)
def test_finished_instances_leave_the_layout(case):
    before, acts, expected = REMOVED[case]
    _, changes = play(*before, *acts)
    assert [change.removed for change in changes[-len(acts) :]] == expected


def test_what_left_the_layout_is_not_in_it():
    identity, _ = play(
        *(process("a", rank=0), ("left", "a"), process("b", rank=0), ("writes", "b")),
        process("a", rank=0),  # comes back after all
    )
    assert folders(identity) == {"a": None, "b": "rank0"}


def test_one_that_comes_back_does_not_meet_the_new_run():
    identity, changes = play(
        *(process("a", 7, rank=0), ("lost", "a"), process("b", rank=0)), process("a", 7, rank=0)
    )
    assert folders(identity) == {"a": "rank0.h1.7", "b": "rank0"}
    assert changes[-1].clashes == [("b" * 32, "a" * 32)]


def test_a_later_attempt_supersedes_an_earlier_one():
    identity, _ = play(process("b", rank=0, attempt=1), process("a", rank=0, attempt=0))
    assert identity.rivals("a" * 32) == ["b" * 32]
    assert identity.rivals("b" * 32) == []


NEWER = {
    "an attempt, whatever the clock": (
        process("a", rank=0, attempt=1, started=1.0),
        process("b", rank=0, attempt=0, started=9.0),
        "a",
    ),
    "by the clock of one host": (
        process("a", rank=0, started=9.0),
        process("b", rank=0, started=1.0, delivered_later=True),
        "a",
    ),
    "by joining, where the clocks are two": (
        process("a", rank=0, started=9.0),
        process("b", rank=0, started=1.0, **other),
        "b",
    ),
}


@pytest.mark.parametrize("case", NEWER)
def test_which_of_two_processes_of_a_rank_is_newer(case):
    first, second, expected = NEWER[case]
    identity, _ = play(first, ("lost", "a"), process("k", rank=9), second)
    older = "b" if expected == "a" else "a"
    members = identity.members
    assert is_newer(members[expected * 32], members[older * 32])
    assert not is_newer(members[older * 32], members[expected * 32])


def test_known_members_stay_as_they_were():
    identity, _ = play(
        *(process("a", 7), process("b", 7, **other), process("c", rank=0), process("d", rank=0)),
        *(("rank", "a", 4), ("left", "c")),
    )
    again = Identity(reversed(list(identity.members.values())))
    assert again.members == identity.members
    assert list(again.members) == list(identity.members)


def test_a_third_that_claims_a_rank_with_the_pid_of_the_second_is_kept_apart():
    third = [process("b", 7, rank=0), process("a", 7, rank=0), process("c", 7, rank=0)]
    identity, _ = play(*third)
    folders = [identity.members[name * 32].folder for name in "bac"]
    assert folders == ["rank0", "rank0.h1.7", "rank0.h1.7.cccccccc"]


names = st.sampled_from("abcdef")
hellos = st.builds(
    process,
    names,
    st.sampled_from([7, 8]),
    rank=st.sampled_from([None, 0, 1]),
    attempt=st.sampled_from([0, 0, 1]),
    host=st.sampled_from(["h1", "h2"]),
    run_key=st.sampled_from(["job", "job", "x"]),
)
acts = st.one_of(
    hellos,
    st.tuples(st.just("rank"), names, st.sampled_from([0, 1])),
    st.tuples(st.sampled_from(["left", "lost", "writes"]), names),
)


@settings(deadline=None)
@given(st.lists(acts, max_size=14))
def test_two_live_processes_of_one_attempt_never_share_a_folder(script):
    known, possible = set(), []
    for act in script:
        if isinstance(act, Process):
            known.add(act.process[0])
            possible.append(act)
        elif act[1] in known:
            possible.append(act)
    identity, _ = play(*possible)
    live = [m for m in identity.members.values() if m.state is State.LIVE and m.folder]
    places = [(m.folder, m.info.attempt, m.info.started) for m in live]
    same_process = {(m.info.host, m.info.pid) for m in live if m.info.rank is None}
    if len(same_process) == sum(m.info.rank is None for m in live):
        assert len(set(places)) == len(places)
