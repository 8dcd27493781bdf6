"""The tensor-parallel embedding, with megatron-core's name and sharding."""

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
