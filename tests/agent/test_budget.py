"""What overhead_budget leaves out, when, and that the average keeps to it."""

import pytest

from rankscope.agent.budget import STAGES, Budget


def run(budget, plain_seconds, agent_seconds, steps):
    """(agent's share, numbers of the recorded steps) of a job with these costs."""
    recorded = []
    agent = plain = 0.0
    for step in range(steps):
        cost = 0.0
        if budget.wants_step():
            recorded.append(step)
            cost = agent_seconds
        budget.step_ended(cost, plain_seconds + cost, bool(cost))
        if step:  # the first holds all start-up
            agent, plain = agent + cost, plain + plain_seconds
    return agent / plain, recorded


def test_without_a_budget_everything_is_recorded():
    budget = Budget(None)
    assert run(budget, 0.01, 1.0, 50)[1] == list(range(50))
    assert budget.shed == ()


def test_within_the_budget_nothing_is_left_out():
    budget = Budget(0.1)
    share, recorded = run(budget, 1.0, 0.09, 50)
    assert recorded == list(range(50))
    assert budget.shed == ()
    assert share == pytest.approx(0.09)


@pytest.mark.parametrize("limit", [0.02, 0.05, 0.5])
@pytest.mark.parametrize("agent_seconds", [0.06, 0.7, 4.0])
def test_the_average_keeps_to_the_budget(limit, agent_seconds):
    if agent_seconds < limit:
        pytest.skip("within the budget")
    budget = Budget(limit)
    share, recorded = run(budget, 0.1, agent_seconds, 20_000)
    assert budget.shed == STAGES
    assert share <= limit * 1.05
    assert share >= limit * 0.8 or len(recorded) < 20


def test_things_are_left_out_one_after_the_other():
    budget, seen = Budget(0.1), []
    for _ in range(5):
        seen.append(budget.shed)
        budget.step_ended(0.5, 1.5, recorded=True)
    assert seen == [(), (), STAGES[:1], STAGES[:2], STAGES]


def test_steps_without_recording_pay_for_no_more_than_the_next():
    budget = Budget(0.1)
    for _ in range(4):
        budget.step_ended(0.5, 1.5, recorded=True)
    for _ in range(1000):
        budget.step_ended(0.0, 1.0, recorded=False)
    assert budget.wants_step()
    budget.step_ended(0.5, 1.5, recorded=True)
    assert not budget.wants_step()
