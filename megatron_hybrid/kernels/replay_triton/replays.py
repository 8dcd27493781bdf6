"""All Replays of a GPU."""

from __future__ import annotations

from megatron_hybrid.kernels.causal_conv1d import triton_replay as conv
from megatron_hybrid.kernels.gated_delta_rule import triton_replay as gated_delta_rule
from megatron_hybrid.kernels.mamba1_scan import triton_replay as mamba1_scan
from megatron_hybrid.kernels.mamba2_scan import triton_replay as mamba2_scan
from megatron_hybrid.kernels.replay_protocol import Replays

TRITON_REPLAYS = Replays(
    conv=conv,
    mamba1_scan=mamba1_scan,
    mamba2_scan=mamba2_scan,
    gated_delta_rule=gated_delta_rule,
    mamba1_chunk=mamba1_scan.PLACES,
    chunk=mamba2_scan.TILE,
)
