"""When steps are rendered and sealed, as tables; and that the order of hearing does not matter."""

from itertools import product, zip_longest

import pytest
from hypothesis import given, settings
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


@settings(deadline=None)
@given(interleavings())
def test_any_order_of_hearing_ends_in_the_same_seals(orders):
    ends = []
    for events in orders:
        steps, actions = play(events)
        assert steps.idle()
        ends.append({action.step: action for action in seals(actions)})
    assert ends[0] == ends[1]


@settings(deadline=None)
@given(interleavings())
def test_everything_that_took_part_is_rendered_after_its_last_news(orders):
    steps, actions = play(orders[0])
    rendered = {(step, p) for step, processes in renders(actions) for p in processes}
    took_part = {(n, p) for p in "abc" for n in steps.steps_of(p)}
    assert took_part <= rendered


#: What one process does with a step, and what a seal after 30 s and after its end says of it.
FATES = {
    "ends": ([OPEN, ENDED], None, None),
    "ends after micro-steps": ([OPEN, PAUSED, OPEN, PAUSED, ENDED], None, None),
    "only ends": ([ENDED], None, None),
    "hangs": ([OPEN], None, "late"),
    "pauses and hangs": ([OPEN, PAUSED], None, "late"),
    "is silent": ([], None, "late"),
    "dies in it": ([OPEN], "lost", "lost"),
    "leaves in it": ([OPEN, PAUSED], "left: exit", "left: exit"),
    "dies after it": ([OPEN, ENDED], "lost", None),
    "is filtered": ([SKIPPED], None, "not expected"),
    "leaves before it": ([], "left: exit", "not expected"),
}
TRIPLES = list(product(FATES, repeat=3))


@pytest.mark.parametrize("fates", TRIPLES, ids=lambda fates: ", ".join(fates))
def test_a_seal_names_who_is_missing_and_why(fates):
    """All triples of what may become of three ranks, whatever the order of hearing."""
    scripts = [
        [("event", p, 0, part) for part in FATES[fate][0]]
        + ([("leave", p, FATES[fate][1])] if FATES[fate][1] else [])
        for p, fate in zip("abc", fates, strict=True)
    ]
    outcomes = {p: FATES[fate][2] for p, fate in zip("abc", fates, strict=True)}
    expected = {p for p, why in outcomes.items() if why != "not expected"}
    missing = {p: why for p, why in outcomes.items() if p in expected and why}
    one_by_one = [event for script in scripts for event in script]
    in_turns = [event for row in zip_longest(*scripts) for event in row if event]
    for events in (one_by_one, in_turns, list(reversed_scripts(scripts))):
        steps, actions = play([(0.0, "join", p) for p in "abc"] + [(0.0, *e) for e in events])
        actions += steps.due(30.0)
        found = seals(actions)
        if not any(FATES[fate][0] and FATES[fate][0] != [SKIPPED] for fate in fates):
            assert found == []  # nobody took part: there is nothing to seal
        elif not any(ENDED in FATES[fate][0] for fate in fates) and "late" in missing.values():
            assert found == []  # somebody is still in it, and nobody waits
        else:
            assert found[-1] == Seal(0, frozenset(expected), missing)


def reversed_scripts(scripts):
    for script in reversed(scripts):
        yield from script


@st.composite
def deliveries(draw):
    """Three processes whose batches come in, are repeated after a break, and may be lost at the
    end of a process that dies; in two orders."""
    scripts = {}
    for process in "abc":
        acts = [
            ("rows", process, n) if a == "rows" else ("event", process, n, a)
            for n, a in draw(behaviour)
        ]
        breaks = draw(st.lists(st.integers(0, len(acts)), max_size=2))
        for at in sorted(breaks, reverse=True):
            acts.insert(at, ("join", process))  # it comes back
        kept = draw(st.integers(0, len(acts)))
        why = "left: exit" if kept == len(acts) else "lost"
        scripts[process] = [("join", process), *acts[:kept], ("leave", process, why)]

    def order():
        turns = draw(st.permutations([p for p, acts in scripts.items() for _ in acts]))
        left = {process: iter(acts) for process, acts in scripts.items()}
        return [(0.0, *next(left[process])) for process in turns]

    return order(), order()


@settings(deadline=None)
@given(deliveries())
def test_losses_and_breaks_end_in_the_same_seals_in_any_order(orders):
    ends = []
    for events in orders:
        _, actions = play(events)
        ends.append({action.step: action for action in seals(actions)})
    assert ends[0] == ends[1]
    for sealed in ends[0].values():
        assert set(sealed.missing) <= sealed.expected
