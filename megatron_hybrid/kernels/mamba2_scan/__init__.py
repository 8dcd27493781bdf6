"""The selective scan of Mamba2 over packed sequences, with its state kept per slot."""

from megatron_hybrid.kernels.mamba2_scan.reference import ScanPlan, decode, plan, prefill

__all__ = ["ScanPlan", "decode", "plan", "prefill"]
