"""Products of weights in float4_e2m1 with few rows of inputs in bfloat16, in CUDA (fp4_few.cu): of
linear layers here, of experts in experts/fp4_few.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_hybrid.kernels import cuda
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.launching import cdiv, next_power_of_2
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight, is_nvfp4
from megatron_hybrid.kernels.linear.products import counters

SOURCE = Path(__file__).with_suffix(".cu")
# As in the source.
WARPS = 8
INPUTS = 8
STEP = 128
STAGES = 2
THREADS = 32 * (WARPS + 1)
# What the source declares besides its dynamic memory, in bytes; a little more than the most.
DECLARED = 22 * 1024
RESIDENT = 2  # blocks of threads on a multiprocessor


def can_multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Whether this is the fastest way for such inputs and a weight [N, K]."""
    if bias is not None or not fits(weight, x.dtype):
        return False
    tokens, (rows, columns) = x.shape[0], weight.shape
    if tokens == 1:  # without tensor cores less is started for a small weight
        return rows * columns >= 2**23
    blocks = -(-tokens // INPUTS)
    # Several blocks read a weight again, from the L2 cache if it is small.
    return blocks == 1 or blocks * rows <= 32 * RESIDENT * processors(x.device)


def fits(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a weight [.., N, K] and such inputs."""
    if not is_nvfp4(weight) or dtype != torch.bfloat16:
        return False
    rows, columns = weight.shape[-2:]
    return (
        rows % 16 == 0
        and columns % 32 == 0
        and cuda.is_available(weight.device)
        and _memory(columns, WARPS) + DECLARED <= cuda.SHARED_MEMORY
    )


def multiply(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """As Linear.multiply, of few rows."""
    tokens = len(x)
    y = torch.empty(tokens, weight.shape[0], dtype=x.dtype, device=x.device)
    blocks = -(-tokens // INPUTS)
    launch("PLAIN", x.contiguous(), weight, y, blocks=blocks, num_rows=tokens)
    return y


def launch(
    kind: str, x: Tensor, weight: QuantizedWeight, out: Tensor, *, blocks: int, num_rows: int = 0,
    experts: Tensor | None = None, slots: Tensor | None = None, shares: Tensor | None = None,
    parts: Tensor | None = None, chosen: int = 1, activation: str = "none", gated: bool = False,
    across: int | None = None,
) -> None:  # fmt: skip
    """The source's `product`; weight [N, K] or [experts, N, K]. `across`: into how many parts the
    columns are cut, a power of two up to WARPS."""
    rows, columns = weight.shape[-2:]
    num_experts = 1 if len(weight.shape) == 2 else weight.shape[0]
    outputs = rows // 2 if gated else rows
    if across is None:
        across = _parts(columns)
    in_pairs = experts is not None and slots is None
    name = (
        f"product<{across}, {kind}, {str(in_pairs).lower()}, {str(gated).lower()}, "
        f"{activation.upper()}, {columns}, {outputs}>"
    )
    tile = (16 if gated else 32) * WARPS // across
    grid = min(blocks * cdiv(outputs, tile), RESIDENT * processors(out.device))
    assert weight.row_scale is not None
    unused = counters(out.device)  # in place of what this kind does not look at
    cuda.kernel(SOURCE, name, _memory(columns, across), out.device).launch(
        grid, THREADS, x, weight.values, weight.scale.view(torch.uint8), weight.row_scale,
        unused if experts is None else experts, unused if slots is None else slots,
        unused if shares is None else shares, out, unused if parts is None else parts,
        counters(out.device), chosen, num_experts, blocks, num_rows,
    )  # fmt: skip


def _parts(columns: int) -> int:
    """Two steps of a warp each, if there are enough columns."""
    return min(WARPS, max(1, next_power_of_2(columns // (2 * STEP))))


def _memory(columns: int, across: int) -> int:
    """Bytes of the stages' codes, scales of groups and of rows."""
    rows = 32 * WARPS // across
    return STAGES * rows * (columns // 2 + columns // 16 + 4)
