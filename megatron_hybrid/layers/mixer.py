"""What every layer is to the model, whatever it does with a block's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.experts.protocol import Unsummed
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_hybrid.layers.parts import Parts, inner_parts
from megatron_hybrid.parallel import ExpertRanks, RankGroup

if TYPE_CHECKING:
    from megatron_hybrid.layers.cached_attention import CachedAttention
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
    kv_dtype: torch.dtype
    # Tokens of a recurrent layer's chunk in batch-invariant mode; None: another mode.
    replay_chunk: int | None = None
    # Of a model on a GPU: tables of embeddings that few rows of are read stay in the host's memory.
    tables_on_host: bool = False

    def share(self, total: int, what: str, *, or_copy: bool = False) -> int:
        """This rank's part of so many `what`; `or_copy`: one at least, which several ranks have.
        Raises ConfigurationError where the ranks' parts would differ."""
        ranks, flag = self.parallel.size, "--tensor-model-parallel-size"
        if total % ranks and not or_copy:
            raise ConfigurationError(f"{flag} {ranks} does not divide the model's {total} {what}.")
        if total % ranks and ranks % total:
            raise ConfigurationError(
                f"{flag} {ranks} neither divides nor is a multiple of the model's {total} {what}."
            )
        return max(total // ranks, 1)

    def spread(self, total: int, what: str, groups: int, of: str) -> None:
        """Raise ConfigurationError unless each of so many groups has equally many of `what`."""
        if groups < 1 or total % groups:
            raise ConfigurationError(
                f"The model's {total} {what} are no multiple of its {groups} {of}."
            )

    def to_rows(self, rows: int, bias: bool, inputs: int | None = None) -> ColumnParallelLinear:
        """A projection of `inputs`, by default the hidden size, to so many rows on this rank."""
        return ColumnParallelLinear(inputs or self.hidden_size, rows, bias=bias, dtype=self.dtype)

    def to_hidden(self, columns: int, bias: bool) -> RowParallelLinear:
        """A projection of this rank's columns to its part of a sum of the hidden size."""
        return RowParallelLinear(
            columns,
            self.hidden_size,
            bias=bias,
            dtype=self.dtype,
            parallel=self.parallel,
            sums=False,
        )


Mixed = Tensor | Unsummed  # what a mixer gives


def added_up(mixed: Mixed) -> Tensor:
    """[tokens, hidden]"""
    return mixed if isinstance(mixed, Tensor) else mixed.sum()


class Deriving(nn.Module):
    """A module that makes something from its weights once they are loaded."""

    def derive(self, name: str, value: Tensor) -> None:
        """Set an attribute that is made from weights; again, after new weights, in place: CUDA
        graphs read it where it is. What has a gradient is of one pass."""
        if (known := getattr(self, name, None)) is None or value.requires_grad:
            setattr(self, name, value)
        else:
            known.copy_(value)


class Mixer(Deriving):
    """One block's work between its norm and the residual stream. Its result is this rank's part
    of a sum over the tensor-parallel ranks: the block that follows adds the parts up."""

    def weight_parts(self) -> Parts:
        """The weights that it needs on this rank."""
        return inner_parts(self)

    def forward(self, x: Inputs, plans: KernelPlans) -> Mixed:
        """[tokens, hidden] -> [tokens, hidden]."""
        raise NotImplementedError

    @property
    def reader(self) -> Reader | None:
        """How it takes its input; None: in the model's type."""
        return None

    @property
    def attention(self) -> CachedAttention | None:
        """The attention in it, which has a KV cache."""
        return None

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """The recurrent layer in it, which has a state."""
        return None


class LayerConfig(Protocol):
    """What a kind of layers is described by."""

    def mixer(self, context: LayerContext) -> Mixer:
        """Such a layer, with weights still to be read."""


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Memory for a weight that is read later; it has no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
