"""log_softmax in Triton, each row by a program of its own, in a fixed order: torch's kernel adds up
a row in an order that depends on where the row begins in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.launching import launched

_BLOCK = 4096


def log_softmax(logits: Tensor) -> Tensor:
    """As in Sampling."""
    # In one type, from a multiple of 16 bytes on: how a program's threads share a row, and so the
    # order of its sums, follows both.
    logits = logits.float().contiguous()
    if logits.data_ptr() % 16:
        logits = logits.clone()
    rows, columns = logits.shape
    out = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    if rows:
        _log_softmax_kernel[(rows,)](logits, out, columns, BLOCK=_BLOCK, num_warps=8)
    return out


@launched
def _log_softmax_kernel(logits, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + column < columns
        most = tl.maximum(most, _loaded(logits, row, begin + column, mask))
    largest = tl.max(most, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + column < columns
        total += tl.exp(_loaded(logits, row, begin + column, mask) - largest)
    log_total = tl.log(tl.sum(total, 0))
    for begin in range(0, columns, BLOCK):
        mask = begin + column < columns
        values = _loaded(logits, row, begin + column, mask) - largest - log_total
        tl.store(out + row + begin + column, values, mask=mask)


@triton.jit
def _loaded(logits, row, column, mask):
    """Minus infinity past the row's end."""
    return tl.load(logits + row + column, mask=mask, other=float("-inf"))
