"""A layer that hands each token what came with the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.recurrent import RecurrentMixer


class Delay(RecurrentMixer):
    """A convolution of two taps, 1 and 0, which are no weights. Its state is the last token's
    vector: so this is carried from step to step, taken back with drafts that are not accepted, and
    kept at checkpoints as the states of all recurrent layers are. Whole on every rank."""

    kind = "delay"

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context, [context.hidden_size], width=2, bias=False)
        self.conv_weight[:, 0] = 1
        self.conv_weight[:, 1] = 0

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], zeros for the first token of a sequence; reads and
        writes the sequences' states."""
        return self.convolve(plain_rows(x), plans, silu=False)

    def last(
        self,
        read_slot: Tensor,
        ring: Tensor,
        position: Tensor,
        unfolded: Tensor,
        plans: KernelPlans,
    ) -> Tensor:
        """[sequences, hidden]: what came with the token before `position`; the arguments are those
        of DecodeRuns."""
        rings = plans.caches.rings[self.layer].conv
        in_ring = rings[ring.long(), (position - 1) % rings.shape[1]]
        in_state = self.state(plans).conv[:, :, 0].index_select(0, read_slot)
        in_state = in_state.to(in_ring.dtype).masked_fill((read_slot <= 0)[:, None], 0)
        return torch.where((unfolded > 0)[:, None], in_ring, in_state)
