"""Depthwise causal convolution over packed sequences, with its window kept per slot."""

from megatron_hybrid.kernels.causal_conv1d.reference import ConvPlan, decode, plan, prefill

__all__ = ["ConvPlan", "decode", "plan", "prefill"]
