"""What a runner that computes at once returns."""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.execution.plan import StepResult


class Computed(NamedTuple):
    """A plan.Launched that is done already."""

    step: StepResult

    def result(self) -> StepResult:
        """The step."""
        return self.step
