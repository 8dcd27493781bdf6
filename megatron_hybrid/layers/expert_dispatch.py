"""Tokens to the ranks that hold their experts, and the results back.

A rank holds some experts of a layer (expert parallel), or a slice of each (expert tensor parallel),
or a slice of some. `Compute` gives what its own part contributes to any tokens; a token's result is
the sum of what all parts contribute. As of every mixer, what comes out of here is a rank's part of
a sum over the tensor-parallel ranks, which the next block adds up.

- Where one replica's ranks hold all experts between them, every rank has every token already.
- Otherwise tokens travel. All-gather: each rank computes its part of every replica's tokens, padded
  to one number that is known beforehand. Nothing waits for a count, so that a step can be captured.
- All-to-all: a token goes only to ranks that hold one of its experts. The counts go ahead, and the
  host waits for them. It pays for long prompts, most of all where the replicas' steps differ much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.parallel import ExpertRanks, RankGroup
from megatron_hybrid.parallel.ranks import sum_in_order

# (x [tokens, width], experts [tokens, chosen], weights [tokens, chosen]) -> [tokens, width].
# Experts are counted from this rank's first one; those at or past its number are elsewhere.
Compute = Callable[[Inputs, Tensor, Tensor], Tensor]


class ExpertDispatch:
    """How one layer's tokens meet its experts."""

    def __init__(self, ranks: ExpertRanks, tensor: RankGroup, num_experts: int) -> None:
        """`tensor`: the ranks that all have the same tokens."""
        self._ranks = ranks
        self._tensor = tensor
        self._num_experts = num_experts
        self.num_local = num_experts // ranks.owners.size
        self.first = ranks.owners.rank * self.num_local
        # Rows of padding go to no expert; where every rank has all of them, to one, with weight 0.
        self._of_padding = num_experts if ranks.owners.size > 1 else 0
        # Whether this rank computes other replicas' tokens.
        self.travels = ranks.everyone.size > tensor.size
        # Where fewer ranks hold all experts than have the tokens: how often the sum has each.
        self._copies = 1 if self.travels else tensor.size // ranks.everyone.size

    @property
    def is_here(self) -> bool:
        """Whether `compute` is given this rank's own tokens, and its results are summed once."""
        return not self.travels and self._copies == 1

    def run(
        self,
        x: Inputs,
        experts: Tensor,
        weights: Tensor,
        compute: Compute,
        plans: KernelPlans,
    ) -> Tensor:
        """[tokens, width] -> the same: this rank's part of the sum over each token's experts.

        experts [tokens, chosen] integers, weights [tokens, chosen] float32.
        """
        if not self.travels:
            weights = weights / self._copies if self._copies > 1 else weights
            return compute(x, self._local(experts), weights)
        x = plain_rows(x)
        if plans.all_to_all:
            return self._all_to_all(x, experts, weights, compute)
        return self._all_gather(x, experts, weights, compute, plans.most_tokens)

    def _local(self, experts: Tensor) -> Tensor:
        """Counted from our first one; `num_local` stands for all that are elsewhere."""
        if self.num_local == self._num_experts:
            return experts
        local = experts - self.first
        return torch.where((local >= 0) & (local < self.num_local), local, self.num_local)

    def _all_gather(
        self, x: Tensor, experts: Tensor, weights: Tensor, compute: Compute, tokens: int
    ) -> Tensor:
        replicas, count = self._ranks.replicas, x.shape[0]
        if count < tokens:
            below = (0, 0, 0, tokens - count)
            x, weights = F.pad(x, below), F.pad(weights, below)
            experts = F.pad(experts, below, value=self._of_padding)
        gathered = replicas.all_gather_rows(_pack(x, experts, weights))
        x, experts, weights = _unpack(gathered, x, experts)
        part = compute(x, self._local(experts), weights)
        return replicas.reduce_scatter_rows(part)[:count]

    def _all_to_all(self, x: Tensor, experts: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        everyone, tensor = self._ranks.everyone, self._tensor
        # Each of the ranks with the same tokens sends its share of them.
        total, width = x.shape
        share = -(-total // tensor.size)
        mine = slice(min(tensor.rank * share, total), min((tensor.rank + 1) * share, total))
        packed = _pack(x[mine], experts[mine], weights[mine])
        owner = experts[mine].long() // self.num_local
        owners = self._ranks.owners.size  # one more for numbers past the last expert's
        wanted = torch.zeros(
            (packed.shape[0], owners + 1), dtype=torch.bool, device=x.device
        ).scatter_(1, owner, True)[:, :owners]
        # `everyone` counts the ranks that split an expert first, then the next experts' ranks
        destination, token = (
            wanted.t().repeat_interleave(self._ranks.tensor.size, dim=0).nonzero(as_tuple=True)
        )
        counts = torch.bincount(destination, minlength=everyone.size)
        sent, received = torch.stack(
            (counts, everyone.exchange_counts(counts))
        ).tolist()  # waits for the device
        arrived = everyone.exchange_rows(packed.index_select(0, token), sent, received)
        x_here, experts_here, weights_here = _unpack(arrived, x, experts)
        part = compute(x_here, self._local(experts_here), weights_here)
        back = everyone.exchange_rows(part, received, sent)
        # Summed in the order of the ranks, whatever came first.
        parts = back.new_zeros((everyone.size, packed.shape[0], width))
        parts[destination, token] = back
        if tensor.size == 1:
            return sum_in_order(parts.unbind(0))
        result = back.new_zeros((total, width))
        result[mine] = sum_in_order(parts.unbind(0))
        return result


def _pack(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """One row of bytes a token, so that it travels in one message."""
    parts = (x, experts.int(), weights.float())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(packed: Tensor, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_pack` packed; x and experts are tensors of the same types and widths."""
    chosen = experts.shape[1]
    sections = [x.shape[1] * x.element_size(), 4 * chosen, 4 * chosen]
    rows = packed.split(sections, dim=1)
    types = (x.dtype, torch.int32, torch.float32)
    values, chosen_experts, weights = (
        part.contiguous().view(dtype) for part, dtype in zip(rows, types, strict=True)
    )
    return values, chosen_experts, weights
