"""Which part of the model and which requests each of torchrun's processes has. No torch here.

Megatron's order of ranks (tensor, then data, then pipeline): neighbours share a layer, and a
pipeline's next stage is farthest away. The words:

- A replica is the ranks that share one scheduler and one prefix cache: tensor x pipeline.
- Experts may be spread over several replicas. Those form a lockstep group: they run every forward
  together, with nothing to do if need be. Without that, a lockstep group is one replica.
- Lockstep groups know nothing of one another: each is a world of its own to torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hybrid.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How a model is split. `expert_tensor` None: as Megatron has it, what `tensor` is."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    def __post_init__(self) -> None:
        smaller, larger = sorted((self.tensor, self.expert_group))
        if larger % smaller:
            raise ConfigurationError(
                f"Experts are split over {self.expert_group} ranks (--expert-model-parallel-size "
                f"{self.expert} x --expert-tensor-parallel-size {self.tensor_of_experts}), other "
                f"layers over {self.tensor} (--tensor-model-parallel-size); one must be a multiple "
                "of the other."
            )

    @property
    def tensor_of_experts(self) -> int:
        """Ranks that one expert is split over."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Tensor, pipeline, expert, expert tensor."""
        return self.tensor, self.pipeline, self.expert, self.tensor_of_experts

    @property
    def expert_group(self) -> int:
        """Ranks that hold one copy of all experts of a layer."""
        return self.expert * self.tensor_of_experts

    @property
    def replica(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline

    @property
    def replicas_in_lockstep(self) -> int:
        """Replicas that share their experts; 1 where each has its own."""
        return max(1, self.expert_group // self.tensor)

    @property
    def lockstep_group(self) -> int:
        """Ranks of one lockstep group."""
        return self.replica * self.replicas_in_lockstep


def is_started_as_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or what does as it does, has started this process."""
    return {"MASTER_ADDR", "RANK", "WORLD_SIZE"} <= environment.keys()


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of process `rank` of `world_size`."""

    sizes: ParallelSizes
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        wanted = self.sizes.lockstep_group
        if self.world_size % wanted:
            sizes = self.sizes
            flags = [f"--tensor-model-parallel-size {sizes.tensor}"]
            if sizes.pipeline > 1:
                flags.append(f"--pipeline-model-parallel-size {sizes.pipeline}")
            if sizes.expert > 1:
                flags.append(f"--expert-model-parallel-size {sizes.expert}")
            if sizes.expert > 1 or sizes.tensor_of_experts != sizes.tensor:
                flags.append(f"--expert-tensor-parallel-size {sizes.tensor_of_experts}")
            raise ConfigurationError(
                f"{self.world_size} process(es) were started, but {', '.join(flags)} "
                f"need(s) {wanted} or a multiple of it; say so to torchrun with --nproc-per-node."
            )

    @classmethod
    def from_environment(
        cls, sizes: ParallelSizes, environment: Mapping[str, str] = os.environ
    ) -> RankLayout:
        """As torchrun says, or of a process that was started alone."""
        if not is_started_as_rank(environment):
            return cls(sizes)
        return cls(sizes, int(environment["RANK"]), int(environment["WORLD_SIZE"]))

    @property
    def lockstep_index(self) -> int:
        """The number of this rank's lockstep group."""
        return self.rank // self.sizes.lockstep_group

    @property
    def lockstep_rank(self) -> int:
        """This rank's number in its lockstep group."""
        return self.rank % self.sizes.lockstep_group

    @property
    def tensor_rank(self) -> int:
        """Which part of every layer this rank has."""
        return self.lockstep_rank % self.sizes.tensor

    @property
    def pipeline_rank(self) -> int:
        """The stage that this rank computes."""
        return self.lockstep_rank // (self.sizes.tensor * self.sizes.replicas_in_lockstep)

    @property
    def replica_in_lockstep(self) -> int:
        """The number of this rank's replica in its lockstep group."""
        return self.lockstep_rank // self.sizes.tensor % self.sizes.replicas_in_lockstep

    @property
    def replica(self) -> int:
        """The number of this rank's replica among all that were started together."""
        return self.lockstep_index * self.sizes.replicas_in_lockstep + self.replica_in_lockstep

    @property
    def num_replicas(self) -> int:
        """Of all that were started together."""
        return self.world_size // self.sizes.replica

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this rank receives its replica's requests."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0
