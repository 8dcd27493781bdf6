"""Drafts from a model's head for multi-token prediction, made on the device, where it is known how
far each row has come.

    pass    token   hidden state before it      position    draft
    1       t0      of the model, behind P - 1  P           d1
    2       d1      of pass 1                   P + 1       d2
    3       d2      of pass 2                   P + 2       d3

What the passes leave in the head's KV cache from P on is written anew by the step itself, which has
the model's hidden states for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.execution.figures import DraftFigures, StepFigures
from megatron_hybrid.kernels.contract import PagedHost, PagedSequences
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.models.hybrid_model import HybridModel


class HeadDrafter:
    """Of one model and its caches. Waits for nothing, and can be captured in a CUDA graph."""

    def __init__(self, model: HybridModel, caches: LayerCaches, block_size: int) -> None:
        assert model.mtp is not None
        self._model = model
        self._head = model.mtp
        self._shape = model.mtp.shape(block_size)
        self._caches = caches

    def draft(
        self,
        step: StepFigures[Tensor],
        host: PagedHost,
        count: int,
        token: Tensor,
        position: Tensor,
        unfolded: Tensor,
    ) -> Tensor:
        """[n, count]: what may follow the tokens [n] that rows go on with, at these positions [n].
        unfolded [n]: as in DecodeRuns. A row that has fewer drafts ignores the rest. In place of a
        draft that would end an answer the row's token stands once more."""
        caches, kernels = self._caches, self._model.kernels
        assert isinstance(step.decodes, DraftFigures)
        stop_ids = step.decodes.stop_ids
        drafts_of = (step.cu_seqlens[: len(token) + 1].diff() - 1).clamp(min=0)
        where = (step.read_slot, step.decode_rows, position, unfolded)
        hidden = self._head.delay.last(*where, KernelPlans(caches, kernels))
        first, drafts = token, []
        for ahead in range(count):
            # A row that has its drafts stays where it is: behind them its blocks may end.
            at = position + drafts_of.clamp(max=ahead)
            attention = {self._head.attention.kind: self._plan(step, host, at)}
            plans = KernelPlans(caches, kernels, attention=attention)
            logits, hidden = self._model.predict(token, at, hidden, plans)
            guess = kernels.sampling.argmax(logits)
            ends = (guess[:, None] == stop_ids).any(dim=1)
            token = torch.where(ends, first, guess)
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def _plan(self, step: StepFigures[Tensor], host: PagedHost, position: Tensor) -> Plan:
        """Of attention by one token of each row, at these positions [n]."""
        count, size = len(position), self._shape.block_size
        indptr, kv_length = step.kv_indptr[: count + 1], position + 1
        block = step.kv_indices[indptr[:-1].long() + position // size].long()
        cu_seqlens = torch.arange(count + 1, dtype=indptr.dtype, device=indptr.device)
        on_host = host.kv_length[:count]  # the longest possible
        if kv_length.device.type == "cpu":  # whose kernels are planned with exact lengths
            on_host = kv_length.numpy()
        rows = PagedSequences(
            cu_seqlens=cu_seqlens,
            kv_length=kv_length,
            kv_indptr=indptr,
            kv_indices=step.kv_indices,
            last_block_length=step.last_block_length[:count],
            kv_slot=block * size + position % size,
            num_decodes=count,
            host=PagedHost(
                np.arange(count + 1, dtype=np.int32),
                on_host,
                host.kv_indptr[: count + 1],
                host.kv_indices,
                host.last_block_length[:count],
            ),
        )
        return self._model.kernels.attention.plan(rows, self._shape)
