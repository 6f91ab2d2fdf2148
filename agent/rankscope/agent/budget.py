"""Recording less, in a fixed order, so that the agent stays within its share of the step time.

The share is what the agent's hooks and calls take on the job's threads, over what the same steps
take without that. While it is too large, one more of STAGES is left out after each recorded step;
once whole steps are, a step is recorded when the time of those before it has paid for it.
"""

from __future__ import annotations

#: What is left out, in this order.
STAGES = ("stacks", "inputs", "steps")


class Budget:
    """`share` is the most, such as 0.05; None sets no limit."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._stages = 0
        self._is_warm = False  # the first recorded step holds all start-up
        self._debt_seconds = 0.0

    @property
    def shed(self) -> tuple[str, ...]:
        """What is left out now."""
        return STAGES[: self._stages]

    def wants_step(self) -> bool:
        """Whether the next step may be recorded."""
        return self._stages < len(STAGES) or self._debt_seconds <= 0

    def step_ended(self, agent_seconds: float, wall_seconds: float, recorded: bool) -> bool:
        """Take in a step's figures; True when one more thing is left out from now on."""
        if self._share is None:
            return False
        if not self._is_warm:
            self._is_warm = recorded
            return False
        allowed = self._share * max(wall_seconds - agent_seconds, 0.0)
        # What was not used is no credit for more than the next step.
        self._debt_seconds = max(self._debt_seconds + agent_seconds - allowed, -allowed)
        if not recorded or agent_seconds <= allowed or self._stages == len(STAGES):
            return False
        self._stages += 1
        return True
