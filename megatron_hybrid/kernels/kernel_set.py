"""Which implementation of each operation a model runs on.

reference   plain torch: the meaning, and what a CPU runs
gpu         Triton kernels of ours, and flashinfer where it is installed
libraries   the same, but convolutions by causal-conv1d and Mamba's scans by mamba-ssm: the second,
            independent meaning on a GPU
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from megatron_hybrid.kernels import protocols as kinds
from megatron_hybrid.kernels.activation import reference as activation
from megatron_hybrid.kernels.causal_conv1d import reference as conv
from megatron_hybrid.kernels.channel_scans import (
    MLSTMConstants,
    MLSTMTokens,
    RGLRUConstants,
    RGLRUTokens,
    WKVConstants,
    WKVTokens,
)
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.convolved_heads import reference as convolved_heads
from megatron_hybrid.kernels.convolved_heads import whole_tiles as convolved_heads_by_tiles
from megatron_hybrid.kernels.convolved_heads.protocol import ConvolvedHeads
from megatron_hybrid.kernels.experts import reference as experts
from megatron_hybrid.kernels.experts import whole_tiles as experts_by_tiles
from megatron_hybrid.kernels.experts.protocol import Experts
from megatron_hybrid.kernels.gated_delta_rule import reference as gated_delta_rule
from megatron_hybrid.kernels.indexed_attention import by_key_tiles as indexed_by_key_tiles
from megatron_hybrid.kernels.indexed_attention import reference as indexed_attention
from megatron_hybrid.kernels.indexed_attention.protocol import IndexedAttention
from megatron_hybrid.kernels.latent_attention import by_key_tiles as latents_by_key_tiles
from megatron_hybrid.kernels.latent_attention import reference as latent_attention
from megatron_hybrid.kernels.latent_attention.protocol import LatentAttention
from megatron_hybrid.kernels.linear import reference as linear
from megatron_hybrid.kernels.linear import whole_tiles as linear_by_tiles
from megatron_hybrid.kernels.lora import reference as lora
from megatron_hybrid.kernels.lora import whole_tiles as lora_by_tiles
from megatron_hybrid.kernels.lora.protocol import Lora, StepAdapters
from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_scan
from megatron_hybrid.kernels.mamba2_scan import reference as mamba2_scan
from megatron_hybrid.kernels.mlstm import reference as mlstm
from megatron_hybrid.kernels.norm import reference as norm
from megatron_hybrid.kernels.packed_states import reference as packing
from megatron_hybrid.kernels.paged_attention import by_key_tiles
from megatron_hybrid.kernels.paged_attention import reference as attention
from megatron_hybrid.kernels.paged_attention.protocol import Attention
from megatron_hybrid.kernels.projected import ProjectedMamba1
from megatron_hybrid.kernels.refused_runs import refuse_runs
from megatron_hybrid.kernels.replay import TORCH_REPLAYS
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.kernels.rg_lru import reference as rg_lru
from megatron_hybrid.kernels.rope import reference as rope
from megatron_hybrid.kernels.runs import plan_runs
from megatron_hybrid.kernels.sampling import reference as sampling
from megatron_hybrid.kernels.sampling.protocol import Sampling
from megatron_hybrid.kernels.slots import plan_decode
from megatron_hybrid.kernels.streams import reference as streams
from megatron_hybrid.kernels.streams.protocol import Streams
from megatron_hybrid.kernels.whole_segments import UpdatedSlots
from megatron_hybrid.kernels.wkv import reference as wkv

Scan = kinds.Recurrence[kinds.Tokens, kinds.Constants, kinds.Rings]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of each kind of kernel: a module, or an object that keeps workspaces."""

    name: str
    attention: Attention
    latent_attention: LatentAttention
    plan_decode: Callable[[DecodeSlots], kinds.Plan]  # of all recurrent kernels' `decode`
    # (runs, ring length): of scans' `decode_runs`
    plan_runs: Callable[[DecodeRuns, int], kinds.Plan]
    conv: kinds.Convolution
    mamba1_scan: Scan[kinds.Mamba1Tokens, kinds.Mamba1Constants]
    mamba2_scan: Scan[kinds.Mamba2Tokens, kinds.Mamba2Constants]
    gated_delta_rule: Scan[kinds.DeltaRuleTokens, kinds.DeltaRuleConstants]
    packing: kinds.Packing
    norm: kinds.Norm
    activation: kinds.Activation
    linear: kinds.Linear
    experts: Experts
    convolved_heads: ConvolvedHeads
    rope: kinds.Rope
    sampling: Sampling
    captures: bool  # its kernels may be captured in a CUDA graph: none waits for the host
    stores_checkpoints: bool = True  # its prefill kernels store states in the middle of a chunk
    has_runs: bool = True  # its recurrent kernels have `decode_runs`
    # Of recurrent layers in batch-invariant mode, in which they have the place of `conv` and the
    # scans; None: another mode.
    replays: Replays | None = None
    # To be told, before steps are captured, of weights and whether a bias is added to their
    # products, and of the steps' numbers of tokens; waits for the device.
    learn: Callable[[Iterable[tuple[Tensor, bool]], Iterable[int]], None] | None = None
    # What computes more of a layer at once, where there is something.
    projected_mamba1: ProjectedMamba1 | None = None
    lora: Lora = lora
    streams: Streams = streams
    # In plain torch alone: models with them run on the reference's kernels everywhere.
    rg_lru: Scan[RGLRUTokens, RGLRUConstants] = rg_lru
    wkv: Scan[WKVTokens, WKVConstants] = wkv
    mlstm: Scan[MLSTMTokens, MLSTMConstants] = mlstm
    indexed_attention: IndexedAttention = indexed_attention
    # What a step's adapters add to the linear layers, which find it here; None: nothing.
    adapters: StepAdapters | None = None


REFERENCE = KernelSet(
    name="reference",
    attention=attention,
    latent_attention=latent_attention,
    plan_decode=plan_decode,
    plan_runs=plan_runs,
    conv=conv,
    mamba1_scan=mamba1_scan,
    mamba2_scan=mamba2_scan,
    gated_delta_rule=gated_delta_rule,
    packing=packing,
    norm=norm,
    activation=activation,
    linear=linear,
    experts=experts,
    convolved_heads=convolved_heads,
    rope=rope,
    sampling=sampling,
    captures=False,
)


# A token's bits do not depend on those beside it, nor on how a sequence is cut.
REFERENCE_INVARIANT = replace(
    REFERENCE,
    name="reference, batch-invariant",
    attention=by_key_tiles,
    latent_attention=latents_by_key_tiles,
    indexed_attention=indexed_by_key_tiles,
    linear=linear_by_tiles,
    experts=experts_by_tiles,
    convolved_heads=convolved_heads_by_tiles,
    lora=lora_by_tiles,
    replays=TORCH_REPLAYS,
)


def select(name: str, device: torch.device, *, batch_invariant: bool = False) -> KernelSet:
    """`name`: "reference", "libraries", or "auto": the fastest for the device. `batch_invariant`:
    kernels of that mode, where the libraries' have no part in."""
    if batch_invariant:
        on_cpu = name == "reference" or device.type == "cpu"
        return REFERENCE_INVARIANT if on_cpu else _gpu_invariant()
    if name == "libraries":
        return _libraries()
    if name == "reference" or device.type == "cpu":
        return REFERENCE
    return _gpu()


def missing_libraries(needed: Iterable[str]) -> list[str]:
    """Those of these packages (as they are imported) that are not installed."""
    return [name for name in needed if importlib.util.find_spec(name) is None]


def _libraries() -> KernelSet:
    # What a model without such layers needs not is not imported: it may not be installed.
    found = replace(
        _gpu(),
        name="libraries",
        plan_decode=UpdatedSlots.of,
        plan_runs=refuse_runs,
        captures=False,  # plans wait for the device
        stores_checkpoints=False,
        has_runs=False,
        projected_mamba1=None,  # the libraries' scans are wanted
    )
    if not missing_libraries(["causal_conv1d"]):
        from megatron_hybrid.kernels.causal_conv1d import library as conv

        found = replace(found, conv=conv)
    if not missing_libraries(["mamba_ssm"]):
        from megatron_hybrid.kernels.mamba1_scan import mamba_ssm as mamba1_scan
        from megatron_hybrid.kernels.mamba2_scan import mamba_ssm as mamba2_scan

        found = replace(found, mamba1_scan=mamba1_scan, mamba2_scan=mamba2_scan)
    return found


def has_transformer_engine() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def import_transformer_engine() -> ModuleType:
    """Our kernels on it. Raises what the import does."""
    return importlib.import_module("megatron_hybrid.kernels.linear.transformer_engine")


def with_transformer_engine(
    kernels: KernelSet, recipe: str | None, weights: Iterable[Tensor]
) -> KernelSet:
    """The same with Transformer Engine's products; see linear/transformer_engine.py."""
    linear = import_transformer_engine().TransformerEngineLinear(recipe, weights)
    # Mamba1's product of step sizes is to be its, too.
    return replace(kernels, linear=linear, projected_mamba1=None)


def _gpu_invariant() -> KernelSet:
    from megatron_hybrid.kernels.experts import triton_in_order as experts
    from megatron_hybrid.kernels.indexed_attention.triton import TritonIndexedAttention
    from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention
    from megatron_hybrid.kernels.linear import triton_in_order as linear
    from megatron_hybrid.kernels.lora import triton_in_order as lora
    from megatron_hybrid.kernels.paged_attention.triton_by_split import SplitAttention
    from megatron_hybrid.kernels.replay_triton.replays import TRITON_REPLAYS

    attention, latents = SplitAttention(), TritonLatentAttention(batch_invariant=True)
    return replace(
        _gpu(),
        name="gpu, batch-invariant",
        attention=attention,
        latent_attention=latents,
        indexed_attention=TritonIndexedAttention(attention, latents, batch_invariant=True),
        linear=linear,
        lora=lora,
        experts=experts,
        replays=TRITON_REPLAYS,
        learn=linear.learn,
        projected_mamba1=None,
    )


def _gpu() -> KernelSet:
    # Triton is not installed on every machine.
    from megatron_hybrid.kernels.activation import triton as activation
    from megatron_hybrid.kernels.causal_conv1d import triton as conv
    from megatron_hybrid.kernels.convolved_heads import triton as convolved_heads
    from megatron_hybrid.kernels.experts import triton as experts
    from megatron_hybrid.kernels.gated_delta_rule import triton as gated_delta_rule
    from megatron_hybrid.kernels.indexed_attention.triton import TritonIndexedAttention
    from megatron_hybrid.kernels.latent_attention.triton import TritonLatentAttention
    from megatron_hybrid.kernels.linear import triton as linear
    from megatron_hybrid.kernels.lora import triton as lora
    from megatron_hybrid.kernels.mamba1_scan import triton as mamba1_scan
    from megatron_hybrid.kernels.mamba1_scan import triton_projected as projected_mamba1
    from megatron_hybrid.kernels.mamba2_scan import triton as mamba2_scan
    from megatron_hybrid.kernels.norm import triton as norm
    from megatron_hybrid.kernels.packed_states import triton as packing
    from megatron_hybrid.kernels.rope import triton as rope
    from megatron_hybrid.kernels.sampling import triton as sampling
    from megatron_hybrid.kernels.streams import triton as streams

    found = replace(
        REFERENCE,
        name="gpu",
        plan_decode=lambda slots: slots,  # the kernels read the slots themselves
        plan_runs=lambda runs, _: runs,
        latent_attention=TritonLatentAttention(),
        conv=conv,
        mamba1_scan=mamba1_scan,
        mamba2_scan=mamba2_scan,
        gated_delta_rule=gated_delta_rule,
        packing=packing,
        norm=norm,
        activation=activation,
        linear=linear,
        experts=experts,
        convolved_heads=convolved_heads,
        rope=rope,
        sampling=sampling,
        captures=True,
        lora=lora,
        projected_mamba1=projected_mamba1,
        streams=streams,
    )
    if importlib.util.find_spec("flashinfer") is None:
        from megatron_hybrid.kernels.paged_attention.triton import TritonAttention

        attention: Attention = TritonAttention()
    else:
        from megatron_hybrid.kernels.paged_attention.flashinfer import FlashInferAttention

        attention = FlashInferAttention()
    indexed = TritonIndexedAttention(attention, found.latent_attention)
    return replace(found, attention=attention, indexed_attention=indexed)
