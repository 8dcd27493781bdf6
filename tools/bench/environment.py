"""What a figure depends on besides the code: versions, machine, memory, the command."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from typing import Any

import torch

from bench.versions import package_versions

_PACKAGES = (
    "megatron-hybrid torch megatron-core transformers numpy triton flashinfer-python mamba-ssm "
    "causal-conv1d"
).split()


def exact_command() -> str:
    """The command line that started this process, ready to be pasted."""
    return shlex.join(["python", *sys.argv])


def describe_environment() -> dict[str, Any]:
    versions = package_versions(_PACKAGES)
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "versions": versions,
        "machine": {
            "device": device,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
        "command": exact_command(),
    }


def peak_memory() -> dict[str, float]:
    """The process's high-water marks so far, in MiB; they only ever rise."""
    # Kilobytes everywhere but on macOS, which counts bytes.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = {"host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if torch.cuda.is_available():
        peak["device_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return peak
