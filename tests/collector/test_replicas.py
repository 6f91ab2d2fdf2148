"""Which ranks replicas get: as tables, and that the order of learning does not matter."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.identity import Identity, Process, State
from rankscope.collector.replicas import Claim, places


def claim(name, order, rank, group="", **fields):
    return Claim(name, order, rank, group, **({"world_size": 2} | fields))


PLACES = {
    "nobody": ([], {}),
    "no rank": ([claim("a", 0, None)], {"a": (None, None)}),
    "one group": (
        [claim("a", 0, 0, "x"), claim("b", 1, 1, "x")],
        {"a": (0, 0), "b": (1, 0)},
    ),
    "two groups": (
        [
            claim("a", 0, 0, "x"),
            claim("b", 1, 0, "y"),
            claim("c", 2, 1, "y"),
            claim("d", 3, 1, "x"),
        ],
        {"a": (0, 0), "d": (1, 0), "b": (2, 1), "c": (3, 1)},
    ),
    "a rank given by hand is left alone": (
        [claim("a", 0, None, "x"), claim("b", 1, 0, "y")],
        {"a": (None, None), "b": (0, 0)},
    ),
    "sizes differ": (
        [claim("a", 0, 0, "x"), claim("b", 1, 3, "y", world_size=4), claim("c", 2, 0, "z")],
        {"a": (0, 0), "b": (7, 1), "c": (8, 2)},
    ),
    "size unknown": (
        [claim("a", 0, 5, "x", world_size=0), claim("b", 1, 0, "y", world_size=0)],
        {"a": (5, 0), "b": (6, 1)},
    ),
    "numbered by a variable": (
        [claim("a", 0, 0, "x", replica=3), claim("b", 1, 0, "y", replica=1)],
        {"a": (6, 3), "b": (2, 1)},
    ),
    "numbered in part": (
        [claim("a", 0, 0, "x", replica=1), claim("b", 1, 0, "y"), claim("c", 2, 0, "z")],
        {"a": (2, 1), "b": (0, 0), "c": (4, 2)},
    ),
    "a number told twice counts once": (
        [claim("a", 0, 0, "x", replica=0), claim("b", 1, 0, "y", replica=0)],
        {"a": (0, 0), "b": (2, 1)},
    ),
    "one address, told apart by a variable": (
        [claim("a", 0, 0, "x", replica=0), claim("b", 1, 0, "x", replica=1)],
        {"a": (0, 0), "b": (2, 1)},
    ),
    "a variable that only says what ranks say": (
        [claim("a", 0, 0, "x", replica=0), claim("b", 1, 1, "x", replica=1)],
        {"a": (0, 0), "b": (1, 0)},
    ),
    "a restart meets elsewhere": (
        [
            *(claim("a", 0, 0, "x"), claim("b", 1, 1, "x")),
            *(claim("c", 2, 1, "y", attempt=1), claim("d", 3, 0, "y", attempt=1)),
        ],
        {"a": (0, 0), "b": (1, 0), "c": (1, 0), "d": (0, 0)},
    ),
    "a restart of one of two jobs": (
        [
            *(claim("a", 0, 0, "x", run_key="1"), claim("b", 1, 0, "y", run_key="2")),
            claim("c", 2, 0, "z", run_key="1", attempt=1),
        ],
        {"a": (0, 0), "b": (2, 1), "c": (0, 0)},
    ),
    "one address in two jobs": (
        [claim("a", 0, 0, "x", run_key="1"), claim("b", 1, 0, "x", run_key="2")],
        {"a": (0, 0), "b": (2, 1)},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_places(case):
    claims, expected = PLACES[case]
    for order in permutations(claims):
        assert places(order) == expected


def process(name, rank=None, **fields):
    defaults = {"host": "h", "boot_id": "b", "pid": ord(name), "run_key": "job", "world_size": 2}
    return Process(process=name * 32, rank=rank, **(defaults | fields))


def folders(identity):
    return {name[0]: member.folder for name, member in identity.members.items()}


def test_replicas_get_folders_of_their_own_without_a_clash():
    identity = Identity(split_replicas=True)
    changes = [
        identity.join(process(name, rank, group=group))
        for name, rank, group in [("a", 0, "x"), ("b", 0, "y"), ("c", 1, "y"), ("d", 1, "x")]
    ]
    assert folders(identity) == {"a": "rank0", "b": "rank2", "c": "rank3", "d": "rank1"}
    assert not any(change.clashes for change in changes)


def test_launches_that_run_at_the_same_time_are_replicas():
    identity = Identity(split_replicas=True)
    identity.join(process("a", 0, group="x", run_key="1"))
    identity.join(process("b", 0, group="y", run_key="2"))
    assert folders(identity) == {"a": "rank0", "b": "rank2"}
    assert {m.instance for m in identity.members.values()} == {"a" * 32}


def test_a_repeated_rank_id_is_a_clash_all_the_same():
    identity = Identity(split_replicas=True)
    identity.join(process("a", 3, pinned=True, group="x"))
    changes = identity.join(process("b", 3, pinned=True, group="y"))
    assert changes.clashes == [("a" * 32, "b" * 32)]
    assert folders(identity) == {"a": "rank3", "b": "rank3.h.98"}


def test_one_rank_twice_in_one_group_is_a_clash_all_the_same():
    identity = Identity(split_replicas=True)
    identity.join(process("a", 0, group="x"))
    changes = identity.join(process("b", 0, group="x"))
    assert changes.clashes == [("a" * 32, "b" * 32)]


def test_ranks_that_trade_places_do_not_replace_each_other():
    """The group of c is told later to be replica 0, so that those of a and b move up."""
    identity = Identity(split_replicas=True)
    for name, group in [("a", "x"), ("b", "y")]:
        identity.join(process(name, 0, group=group, world_size=1))
    changes = identity.learn("a" * 32, 0, group="x", replica=1)
    assert folders(identity) == {"a": "rank1", "b": "rank0"}
    assert changes.renamed == [
        ("rank0", "rank0.moving"),
        ("rank1", "rank0"),
        ("rank0.moving", "rank1"),
    ]
    assert identity.members["a" * 32].replica == 1


def test_a_folder_that_two_attempts_share_is_drawn_anew():
    identity = Identity()
    identity.join(process("a", 0))
    identity.leave("a" * 32, State.LOST)
    identity.join(process("b", 0, attempt=1))
    changes = identity.learn("b" * 32, 1)
    assert folders(identity) == {"a": "rank0", "b": "rank1"}
    assert (changes.cleared, changes.renamed) == (["rank0"], [])
    assert sorted(changes.redrawn) == ["a" * 32, "b" * 32]


def test_known_replicas_stay_as_they_were():
    identity = Identity(split_replicas=True)
    for name, rank, group in [("a", 0, "x"), ("b", 0, "y"), ("c", 1, "y")]:
        identity.join(process(name, rank, group=group))
    again = Identity(identity.members.values(), split_replicas=True)
    assert again.members == identity.members
    again.join(process("d", 1, group="x"))
    assert folders(again) == {"a": "rank0", "b": "rank2", "c": "rank3", "d": "rank1"}


@st.composite
def learnings(draw):
    """What eight processes of up to three groups tell, in two orders; the orders of joining are
    equal."""
    facts = [
        (name, draw(st.integers(0, 3)), draw(st.sampled_from("xyz")), draw(st.booleans()))
        for name in "abcdefgh"
    ]
    return facts, draw(st.permutations(facts)), draw(st.permutations(facts))


@settings(deadline=None)
@given(learnings())
def test_any_order_of_learning_gives_the_same_ranks_and_no_shared_folder(drawn):
    facts, *orders = drawn
    ends = []
    for order in orders:
        identity = Identity(split_replicas=True)
        for name, *_ in facts:
            identity.join(process(name))
        shown = {name * 32: f"proc{ord(name)}" for name, *_ in facts}  # as a disk would have it
        for name, rank, group, known_before in order:
            learned = [("early", 0)] if known_before else []  # a launcher's variables, then a group
            for told, claimed in [*learned, (group, rank)]:
                changes = identity.learn(name * 32, claimed, group=told, world_size=4)
                renamed(shown, changes)
        ends.append({name: (m.rank, m.replica) for name, m in identity.members.items()})
        live = [m.folder for m in identity.members.values()]
        assert len(set(live)) == len(live)
        assert shown == {name: m.folder for name, m in identity.members.items()}
    assert ends[0] == ends[1]


def renamed(shown, changes):
    """Do with names what a disk does with folders: nothing may be replaced, nothing lost."""
    assert changes.cleared == []
    for old, new in changes.renamed:
        assert new not in shown.values(), (old, new)
        (process,) = [process for process, folder in shown.items() if folder == old]
        shown[process] = new
