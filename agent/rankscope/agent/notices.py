"""What a user is told about records that are not there, in one line each."""

from __future__ import annotations

from collections.abc import Collection

from rankscope.agent.config import Config

_MOST_NAMES = 8


def over_budget(left_out: str, share: float, budget: float | None, step: int) -> str:
    """The agent took more than overhead_budget allows, so that one more thing is left out."""
    names = {
        "stacks": "call stacks are",
        "inputs": "the inputs of forward records are",
        "steps": "whole steps are, for as long as the budget needs it,",
    }
    return (
        f"recording took {share:.2f} of the time of step {step}, overhead_budget is {budget:g}: "
        f"{names[left_out]} left out from now on (rankscope ls shows it)"
    )


def left_out(risk_level: str | None, names: Collection[str]) -> str:
    """What risk_level has left out; "" when nothing."""
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"risk_level {risk_level} leaves out calls of {shown}{rest}; "
        '"risk_level": "ALL" records everything'
    )


def unused(text: str, step: int) -> str:
    """That no record of a step has met a filter."""
    return f"{text} is the name of no record of step {step}"


def no_data(config: Config, step: int) -> str:
    """That a step was recorded and holds no value."""
    asked = f"level {config.level}"
    if len(config.data_mode) < 4:  # of forward, backward, input, output
        asked += f", data_mode {sorted(config.data_mode)}"
    if config.list or config.scope:
        asked += f", list {list(config.list)}, scope {list(config.scope)}"
    return (
        f"step {step} holds no values: nothing happened between start() and stop() "
        f"that {asked} keeps"
    )


def ranks_outside(ranks: Collection[int], world_size: int) -> str:
    """That no rank of the job is selected; "" when one is."""
    if not world_size or min(ranks) < world_size:
        return ""
    return (
        f"nothing is recorded: config.json selects ranks {sorted(ranks)} "
        f"and the job has ranks 0 to {world_size - 1}"
    )


def step_never_reached(steps: Collection[int], step: int) -> str:
    """That the script ended in `step`, and in none of the steps that are selected."""
    return (
        f"nothing is recorded: config.json selects steps {sorted(steps)[:_MOST_NAMES]} "
        f"and the script ends in step {step}"
    )
