"""Workloads that every engine is measured with, and the figures that are compared."""

from megatron_hybrid.benchmarks.measurements import RequestRecord, summarize
from megatron_hybrid.benchmarks.workloads import (
    WORKLOAD_NAMES,
    Conversations,
    Workload,
    WorkloadRequest,
    make_workload,
)

__all__ = [
    "WORKLOAD_NAMES",
    "Conversations",
    "RequestRecord",
    "Workload",
    "WorkloadRequest",
    "make_workload",
    "summarize",
]
