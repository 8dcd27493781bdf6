"""What every layer is to the model, whatever it does with a block's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_hybrid.layers.parts import Parts
from megatron_hybrid.parallel import ExpertRanks, RankGroup

if TYPE_CHECKING:
    from megatron_hybrid.layers.attention import Attention
    from megatron_hybrid.layers.kernel_plans import KernelPlans
    from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where a layer is, and what it shares with the model's other layers."""

    hidden_size: int
    eps: float  # of norms
    layer: int
    dtype: torch.dtype
    parallel: RankGroup  # that split the layer
    experts: ExpertRanks
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype


class Mixer(nn.Module):
    """One block's work between its norm and the residual stream. Its result is this rank's part
    of a sum over the tensor-parallel ranks: the block that follows adds the parts up."""

    def weight_parts(self) -> Parts:
        """The weights that it needs on this rank."""
        raise NotImplementedError

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        raise NotImplementedError

    def derive(self, name: str, value: Tensor) -> None:
        """Set an attribute that is made from weights; again, after new weights, in place: CUDA
        graphs read it where it is."""
        if (known := getattr(self, name, None)) is None:
            setattr(self, name, value)
        else:
            known.copy_(value)

    @property
    def attention(self) -> Attention | None:
        """The attention in it, which has a KV cache."""
        return None

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """The recurrent layer in it, which has a state."""
        return None


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Memory for a weight that is read later; it has no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
