"""When steps are rendered and sealed, as tables; and that the order of hearing does not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.steps import Part, Render, Seal, Steps

OPEN, PAUSED, ENDED, SKIPPED = Part.OPEN, Part.PAUSED, Part.ENDED, Part.SKIPPED


def play(events, **options):
    """Events: (time, verb, process, ...); returns what was due right after each, flattened."""
    steps, actions = Steps(**options), []
    for time, verb, *rest in events:
        if verb == "join":
            steps.join(*rest)
        elif verb == "leave":
            steps.leave(*rest, now=time)
        elif verb == "rows":
            steps.rows(*rest, now=time)
        elif verb == "event":
            steps.event(*rest, now=time)
        actions += steps.due(time)
    return steps, actions


def seals(actions):
    return [action for action in actions if isinstance(action, Seal)]


def renders(actions):
    return [(a.step, sorted(a.processes)) for a in actions if isinstance(a, Render)]


def seal(step, expected, **missing):
    return Seal(step, frozenset(expected), missing)


ab = [(0, "join", "a"), (0, "join", "b")]

SEALED = {
    "one process": (
        [(0, "join", "a"), (1, "event", "a", 0, OPEN), (2, "event", "a", 0, ENDED)],
        [seal(0, "a")],
    ),
    "waits for the other": (
        [*ab, (1, "event", "a", 0, ENDED), (2, "event", "b", 0, ENDED)],
        [seal(0, "ab")],
    ),
    "not before all ended": ([*ab, (1, "event", "a", 0, ENDED), (30, "tick")], []),
    "without the late one after 30 s": (
        [*ab, (1, "event", "a", 0, ENDED), (31, "tick")],
        [seal(0, "ab", b="late")],
    ),
    "the late one seals again": (
        [*ab, (1, "event", "a", 0, ENDED), (31, "tick"), (40, "event", "b", 0, ENDED)],
        [seal(0, "ab", b="late"), seal(0, "ab")],
    ),
    "the late one dies": (
        [*ab, (1, "event", "a", 0, ENDED), (31, "tick"), (40, "leave", "b", "lost")],
        [seal(0, "ab", b="late"), seal(0, "a")],
    ),
    "died in the middle": (
        [*ab, (1, "event", "b", 0, OPEN), (1, "event", "a", 0, ENDED), (2, "leave", "b", "lost")],
        [seal(0, "ab", b="lost")],
    ),
    "left without taking part": (
        [*ab, (1, "event", "a", 0, ENDED), (2, "leave", "b", "left: exit")],
        [seal(0, "a")],
    ),
    "left before the others came": (
        [
            (0, "join", "a"),
            (1, "event", "a", 0, ENDED),
            (2, "leave", "a", "left: exit"),
            (3, "join", "b"),
            (4, "event", "b", 0, ENDED),
        ],
        [seal(0, "a"), seal(0, "ab")],
    ),
    "filtered is not expected": (
        [*ab, (1, "event", "b", 0, SKIPPED), (2, "event", "a", 0, ENDED)],
        [seal(0, "a")],
    ),
    "only filtered": ([(0, "join", "a"), (1, "event", "a", 0, SKIPPED), (99, "tick")], []),
    "passed on to a later step": (
        [*ab, (1, "event", "b", 1, OPEN), (2, "event", "a", 0, ENDED)],
        [seal(0, "a")],
    ),
    "a new process does not reopen": (
        [(0, "join", "a"), (1, "event", "a", 0, ENDED), (2, "join", "b"), (99, "tick")],
        [seal(0, "a")],
    ),
    "late rows after the seal": (
        [(0, "join", "a"), (1, "event", "a", 0, ENDED), (2, "rows", "a", 0)],
        [seal(0, "a"), seal(0, "a")],
    ),
    "ended by leaving": (
        [(0, "join", "a"), (1, "rows", "a", 0), (2, "leave", "a", "left: exit")],
        [seal(0, "a", a="left: exit")],
    ),
    "paused is not ended": (
        [(0, "join", "a"), (1, "event", "a", 0, PAUSED), (99, "tick")],
        [],
    ),
}


@pytest.mark.parametrize("case", SEALED)
def test_sealed(case):
    events, expected = SEALED[case]
    assert seals(play(events)[1]) == expected


RENDERED = {
    "at the end": ([(1, "rows", "a", 0), (2, "event", "a", 0, ENDED)], [(0, ["a"])]),
    "not while open": ([(1, "rows", "a", 0), (99, "tick")], []),
    "a pause, a little later": (
        [(1, "event", "a", 0, PAUSED), (1.4, "tick"), (1.5, "tick"), (99, "tick")],
        [(0, ["a"])],
    ),
    "an end overtakes the pause": (
        [(1, "event", "a", 0, PAUSED), (1.1, "event", "a", 0, ENDED), (99, "tick")],
        [(0, ["a"])],
    ),
    "pauses at most every 5 s": (
        [
            (1, "event", "a", 0, PAUSED),
            (1.5, "tick"),
            (2, "event", "a", 0, PAUSED),
            (3, "event", "a", 0, PAUSED),
            (6, "tick"),
            (6.5, "tick"),
            (99, "tick"),
        ],
        [(0, ["a"]), (0, ["a"])],
    ),
    "at leaving": ([(1, "rows", "a", 0), (2, "leave", "a", "lost")], [(0, ["a"])]),
    "late rows": (
        [(1, "event", "a", 0, ENDED), (2, "rows", "a", 0), (3, "tick")],
        [(0, ["a"]), (0, ["a"])],
    ),
    "each process by itself": (
        [(0, "join", "b"), (1, "event", "a", 0, ENDED), (2, "event", "b", 0, ENDED)],
        [(0, ["a"]), (0, ["b"])],
    ),
    "filtered after it was paused": (
        [(1, "event", "a", 0, PAUSED), (1, "event", "a", 0, SKIPPED), (99, "tick")],
        [(0, ["a"])],
    ),
    "never for the filtered": ([(1, "event", "a", 0, SKIPPED), (2, "leave", "a", "x")], []),
}


@pytest.mark.parametrize("case", RENDERED)
def test_rendered(case):
    events, expected = RENDERED[case]
    assert renders(play([(0, "join", "a"), *events])[1]) == expected


@pytest.mark.parametrize("case", [*SEALED])
def test_next_due_is_when_something_is_due(case):
    steps, _ = play(SEALED[case][0])
    at = steps.next_due()
    if at is not None:
        assert at > 0
        assert steps.due(at - 0.001) == []
        assert steps.due(at) != []


def test_idle_after_everything_is_done():
    steps, _ = play([(0, "join", "a"), (1, "event", "a", 0, PAUSED)])
    assert not steps.idle()
    assert renders(steps.finish(1.0)) == [(0, ["a"])]
    assert steps.idle()


def test_equal_closed_steps_do_not_change_together():
    events = [(0, "join", "a")]
    events += [(1, "event", "a", step, ENDED) for step in range(5)]
    steps, _ = play([*events, (2, "join", "b"), (3, "event", "b", 2, ENDED)])
    assert [steps.took_part("b", step) for step in range(5)] == [False, False, True, False, False]


def test_restored_steps_are_sealed_again_only_if_they_changed():
    steps = Steps()
    for process in "ab":
        steps.join(process)
        for number in range(3):
            steps.event(process, number, ENDED, 0.0)
    steps.restore([seal(0, "ab"), seal(1, "ab", b="late")], 0.0)
    assert steps.due(0.0) == [seal(1, "ab"), seal(2, "ab")]
    assert steps.idle()


# What a process does, in order; it joins before and leaves after.
behaviour = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["rows", OPEN, PAUSED, ENDED, SKIPPED])),
    max_size=6,
)


@st.composite
def interleavings(draw):
    """The same behaviour of three processes, heard in two orders."""
    scripts = {}
    for process in "abc":
        acts = [
            ("rows", process, n) if a == "rows" else ("event", process, n, a)
            for n, a in draw(behaviour)
        ]
        why = draw(st.sampled_from(["lost", "left: exit"]))
        scripts[process] = [("join", process), *acts, ("leave", process, why)]

    def order():
        turns = draw(st.permutations([p for p, acts in scripts.items() for _ in acts]))
        left = {process: iter(acts) for process, acts in scripts.items()}
        return [(0.0, *next(left[process])) for process in turns]

    return order(), order()


@given(interleavings())
def test_any_order_of_hearing_ends_in_the_same_seals(orders):
    ends = []
    for events in orders:
        steps, actions = play(events)
        assert steps.idle()
        ends.append({action.step: action for action in seals(actions)})
    assert ends[0] == ends[1]


@given(interleavings())
def test_everything_that_took_part_is_rendered_after_its_last_news(orders):
    steps, actions = play(orders[0])
    rendered = {(step, p) for step, processes in renders(actions) for p in processes}
    took_part = {(n, p) for p in "abc" for n in steps.steps_of(p)}
    assert took_part <= rendered
