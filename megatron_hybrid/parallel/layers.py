"""Tensor-parallel layers with megatron-core's names and sharding, and a forward for inference.

megatron-core's own need its process groups, whose import takes longer than torch's, and their
forward goes through an autograd function and several checks for training, 11 to 30 us a call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.parallel.ranks import RankGroup


def _unread(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Weights that are to be read from a checkpoint; `with torch.device(...)` decides where."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _part_of(size: int, parallel: RankGroup) -> int:
    """One rank's share. Raises ValueError where the shares would differ."""
    if size % parallel.size:
        raise ValueError(f"{size} cannot be shared out evenly to {parallel.size} ranks.")
    return size // parallel.size


class ColumnParallelLinear(nn.Module):
    """y_rank = x W_rank^T + b_rank: every rank keeps its part of the output.

    `output_size` counts all ranks' rows, so a rank that replicates some rows (KV heads, groups)
    passes its own number times the number of ranks.
    """

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
        super().__init__()
        rows = _part_of(output_size, parallel)
        self.weight = _unread(rows, input_size, dtype=dtype)
        self.bias = _unread(rows, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, input] -> [tokens, output / ranks]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_rank W_rank^T, plus the bias once.

    `sums`: False leaves the sum to whoever uses the result, which is this rank's part of it then.
    """

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
        super().__init__()
        self.weight = _unread(output_size, _part_of(input_size, parallel), dtype=dtype)
        self.bias = _unread(output_size, dtype=dtype) if bias else None
        self.parallel = parallel
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, input / ranks] -> [tokens, output]."""
        y = F.linear(x, self.weight, self.bias if self.parallel.is_first else None)
        return self.parallel.all_reduce(y) if self.sums else y


class VocabParallelEmbedding(nn.Module):
    """Each rank holds as many rows of the table, from `vocab_start_index` on."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype,
        parallel: RankGroup,
    ) -> None:
        super().__init__()
        rows = _part_of(num_embeddings, parallel)
        self.vocab_start_index = parallel.rank * rows
        self.weight = _unread(rows, embedding_dim, dtype=dtype)
        self.parallel = parallel

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, embedding_dim]."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill(elsewhere[:, None], 0))
