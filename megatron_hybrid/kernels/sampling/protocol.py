"""What sampling kernels are called with, greedy rows included."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_hybrid.kernels.protocols import Sampling


class SamplingKernels(Sampling, Protocol):
    """Logits to tokens."""

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [rows, vocabulary] in any float type -> the most likely tokens [rows] int64; of
        equal logits the lowest id. NaNs give some token of the vocabulary."""
