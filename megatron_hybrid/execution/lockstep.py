"""What the replicas of a lockstep group agree on before each step.

Replicas that share experts run every forward together, because each computes its experts' part of
the others' tokens. They agree on the host, while the device is still busy with the step before:
one small message round a step, and nothing waits for the device.
"""

from __future__ import annotations

from megatron_hybrid.execution.plan import StepDemand
from megatron_hybrid.parallel import RankGroup


class Lockstep:
    """One replica's voice in its group. Every rank of a replica says the same."""

    def __init__(self, replicas: RankGroup) -> None:
        """`replicas`: one rank of each replica of the group, this one among them."""
        self._replicas = replicas
        self.has_work = False  # whether any replica had work when they last agreed
        # What the server's loops ask one another. They end together: when all may, or one must.
        self.may_stop = False
        self.must_stop = False
        self.is_stopping = False
        # They change weights together: when all are at rest.
        self.is_at_rest = False
        self.all_at_rest = False

    def agree(self, demand: StepDemand, *, has_work: bool) -> StepDemand:
        """The group's demand. Every replica calls this once a turn, with work or without."""
        mine = (*demand, has_work, self.must_stop, not self.may_stop, not self.is_at_rest)
        *found, work, must, may_not, unrest = self._replicas.maxima([int(value) for value in mine])
        self.has_work = bool(work)
        self.is_stopping = bool(must) or not may_not
        self.all_at_rest = not unrest
        return StepDemand(*found)
