"""Tensor-parallel layers: megatron-core's parameters and sharding, with a forward for inference.

megatron-core's forward goes through an autograd function and several checks for training, 11 to
30 us a call; a matrix product and an all-reduce is all that inference needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.parallel import megatron
from megatron_hybrid.parallel.ranks import RankGroup


def _config(dtype: torch.dtype) -> megatron.ModelParallelConfig:
    # CPU initialisation: torch.empty without a device, so `with torch.device(...)` decides.
    return megatron.ModelParallelConfig(
        use_cpu_initialization=True, perform_initialization=False, params_dtype=dtype
    )


def _no_initialization(weight: Tensor) -> None:
    """Weights are read from a checkpoint."""


class ColumnParallelLinear(megatron.ColumnParallelLinear):
    """y_rank = x W_rank^T + b_rank: every rank keeps its part of the output.

    `output_size` counts all ranks' rows, so a rank that replicates some rows (KV heads, groups)
    passes its own number times the number of ranks.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parallel: RankGroup,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=_config(dtype),
            init_method=_no_initialization,
            bias=bias,
            gather_output=False,
            tp_group=parallel.group,
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, input] -> [tokens, output / ranks]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(megatron.RowParallelLinear):
    """y = sum over ranks of x_rank W_rank^T, plus the bias once.

    `sums`: False leaves the sum to whoever uses the result, which is this rank's part of it then.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parallel: RankGroup,
        sums: bool = True,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=_config(dtype),
            init_method=_no_initialization,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=parallel.group,
        )
        self.parallel = parallel
        self.sums = sums
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, input / ranks] -> [tokens, output]."""
        y = F.linear(x, self.weight, self.bias if self.parallel.is_first else None)
        return self.parallel.all_reduce(y) if self.sums else y


class VocabParallelEmbedding(megatron.VocabParallelEmbedding):
    """Each rank holds rows [vocab_start_index, vocab_end_index) of the table."""

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype,
        parallel: RankGroup,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            init_method=_no_initialization,
            config=_config(dtype),
            tp_group=parallel.group,
        )
        self.parallel = parallel
        self.requires_grad_(False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, embedding_dim]."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill(elsewhere[:, None], 0))
