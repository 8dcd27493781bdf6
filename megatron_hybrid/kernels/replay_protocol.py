"""What kernels of batch-invariant mode are called with, whose recurrent states lie on a grid.

In this mode a token is always computed in its chunk of the sequence, from the state at the
beginning of that, whatever of the chunk a step has: alone, with others, again as a prompt. So a
state is kept after a multiple of the chunk only, and what the tokens since have brought, in the
layer's ring. The token at position t has place t % R in its sequence's ring, which is `ring` of
DecodeRuns and PrefillSegments; R is at least what of a sequence is kept and computed at once.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_hybrid.kernels.channel_scans import (
    MLSTMConstants,
    MLSTMTokens,
    RGLRUConstants,
    RGLRUTokens,
    WKVConstants,
    WKVTokens,
)
from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.protocols import (
    Constants,
    ConvConstants,
    DeltaRuleConstants,
    DeltaRuleTokens,
    Gates,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
    Plan,
    Ring,
    Rings,
    Tokens,
)


class Replay(Protocol[Tokens, Constants, Ring]):
    """A Recurrence of that mode, with one call for decodes, drafts and prompts.

    With `start` a sequence's first own token, of prompts its state in read_slot is that after the
    last multiple of the chunk up to there; of DecodeRuns it is `unfolded` tokens behind. `run`
    leaves in write_slot the state after the last multiple of the chunk among the tokens that are
    certain (of a prompt all, of a run the first one), if that is another state or another slot;
    what goes in after it, drafts too, is left in the ring. States at checkpoints, which are
    multiples of the chunk, are stored as in PrefillSegments and DecodeRuns.
    """

    def plan(self, part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int, /) -> Plan:
        """Of the decodes of a step or of its prompts, once for all layers of a kind."""

    def run(
        self,
        tokens: Tokens,
        constants: Constants,
        state: Tensor,
        ring: Ring,
        plan: Plan,
        out: Tensor | None = None,
    ) -> Tensor:
        """The outputs [T, ...], like the tokens' `like`: in `out` if that is given."""


class ConvReplay(Protocol):
    """A Convolution of that mode: the states are windows, the rings inputs, and the rest as in
    Replay."""

    def plan(
        self, part: DecodeRuns | PrefillSegments, chunk: int, width: int, ring_length: int, /
    ) -> Plan:
        """As in Replay."""

    def run(
        self,
        tokens: Tensor,
        constants: ConvConstants,
        state: Tensor,
        ring: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Replay; gates as in Convolution."""


class Replays(NamedTuple):
    """Those of a KernelSet, by the names of what they stand for there."""

    conv: ConvReplay
    mamba1_scan: Replay[Mamba1Tokens, Mamba1Constants, Rings]
    mamba2_scan: Replay[Mamba2Tokens, Mamba2Constants, Rings]
    gated_delta_rule: Replay[DeltaRuleTokens, DeltaRuleConstants, Rings]
    mamba1_chunk: int  # tokens; of the other scans:
    chunk: int
    rg_lru: Replay[RGLRUTokens, RGLRUConstants, Rings] | None = None  # None: on a GPU
    wkv: Replay[WKVTokens, WKVConstants, Rings] | None = None
    mlstm: Replay[MLSTMTokens, MLSTMConstants, Rings] | None = None
