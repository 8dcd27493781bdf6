"""Workloads that every engine is measured with, and the figures that are compared."""

from bench.measurements import RequestRecord, summarize
from bench.workloads import (
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
